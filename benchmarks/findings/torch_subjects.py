"""Subjects of `torch.nn`: its encoder and its transformer, in evaluation and in training without dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.check.hub import several
from anyformer.check.subject import NotApplicable, Subject, Text

VOCAB, LENGTH = 99, 64


class Encoder(nn.Module):
    """torch's encoder, as its tutorials wrap it: embeddings, learned positions, logits."""

    def __init__(self, *, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.embed, self.place = nn.Embedding(VOCAB, 32), nn.Embedding(LENGTH, 32)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, pos: Tensor, **masks: Any) -> Tensor:
        return self.head(self.stack(self.embed(ids) + self.place(pos), **masks))


class Translator(nn.Module):
    """torch's `nn.Transformer`, wrapped likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 32), nn.Embedding(LENGTH, 32)
        self.both = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, source_pos: Tensor, ids: Tensor, pos: Tensor, **masks: Any) -> Tensor:
        x, y = self.embed(source) + self.place(source_pos), self.embed(ids) + self.place(pos)
        return self.head(self.both(x, y, **masks))


class TorchSubject(Subject):
    """A model of `torch.nn`: padding as key padding masks, the future as its causal mask. Its fast paths are for
    evaluation alone, so each is also asked in `training`."""

    module: Any
    vocab_size, max_len = VOCAB, LENGTH

    def __init__(self, make: Callable[[], nn.Module], *, name: str, causal: bool, training: bool) -> None:
        super().__init__(make())
        self.make, self.name, self.training = make, name, training
        self.sources = isinstance(self.module, Translator)
        self.causal = causal

    def answer(self, text: Text) -> Tensor:
        self.module.train(self.training)
        masks = self.masks(text)
        if not self.sources:
            return self.module(text.ids, text.tokens.pos, **masks)
        return self.module(text.source, text.source_tokens.pos, text.ids, text.tokens.pos, **masks)

    def masks(self, text: Text) -> dict[str, Any]:
        if any(several(tokens) for tokens in (text.tokens, text.source_tokens) if tokens is not None):
            raise NotApplicable("packed rows have no word here")
        if self.causal and bool((text.tokens.pos.diff(dim=1) < 0).any()):
            raise NotApplicable("a decoder reads tokens in the order in which they stand")
        side = "tgt" if self.sources else "src"
        said: dict[str, Any] = {} if text.tokens.real.all() else {f"{side}_key_padding_mask": ~text.tokens.real}
        if self.causal:
            future = torch.ones(text.length, text.length, dtype=torch.bool).triu(1)
            said |= {f"{side}_mask" if self.sources else "mask": future}
        if self.sources and not text.source_tokens.real.all():
            hidden = ~text.source_tokens.real
            said |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        return said

    def embedding(self) -> nn.Module:
        return self.module.embed

    def fresh(self) -> Subject:
        return TorchSubject(self.make, name=self.name, causal=self.causal, training=self.training)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "encoder": (Encoder, False),
    "encoder, norm first": (lambda: Encoder(norm_first=True), False),
    "encoder, causal": (Encoder, True),
    "transformer": (Translator, True),
}
"""What makes a model, and whether it is told to hide the future."""


MODES = {"": False, ", training": True}
TORCH_SUBJECTS = {
    (called := f"torch {name}{mode}"): functools.partial(
        TorchSubject, make, name=called, causal=causal, training=training
    )
    for mode, training in MODES.items()
    for name, (make, causal) in MODELS.items()
}
