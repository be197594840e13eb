"""Ours: a model of this library, as a subject."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.accelerate.quantize import quantized
from anyformer.check.law import needs
from anyformer.check.subject import NotApplicable, Subject, Text
from anyformer.checkpoint.load import load, save
from anyformer.generate.loop import generate
from anyformer.model import States, Transformer, TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.head import LMHead, PooledHead
from anyformer.parts.op import Op

__all__ = ["Ours", "ours"]


class Ours(Subject):
    """A `Transformer`. A head that pools gives one answer a text, so of such a model the hidden states are asked."""

    module: Transformer

    def __init__(self, model: Transformer, *, name: str = "model", kernel: Any = None, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self.name, self.kernel = name, kernel
        spec = self.spec
        self.vocab_size, self.max_len = spec.vocab_size, model.max_len
        self.causal, self.sources = bool(spec.decoder), bool(spec.encoder and spec.decoder)
        reach = [op.pattern.frontier() or 0 for op in self.ops("decoder") if isinstance(op, Attention)]
        self.frontier = max(reach, default=0)
        self.fixed = quantized(model) is not None
        if self.fixed:
            self.notes = ("its weights are integers, so laws are judged on them as they are, and none on gradients",)

    @property
    def model(self) -> Transformer:
        return self.module

    @property
    def spec(self) -> TransformerSpec:
        return self.module.spec

    def ops(self, *stacks: str) -> list[Op]:
        """The ops of these stacks (of all, if none is named), without repeats."""
        blocks = [
            block for name, stack in self.spec.stacks().items() if not stacks or name in stacks for block in stack
        ]
        return list(dict.fromkeys(branch.op for block in blocks for branch in block.branches))

    def answer(self, text: Text) -> Float[Tensor, "B T X"]:
        return self.head(self.states(text))

    def states(self, text: Text, **more: Any) -> States:
        """Hidden states of the last stack."""
        if self.model.decoder is None:
            return self.model.encode(text.ids, text.tokens, kernel=self.kernel)
        memory = more.pop("memory", None) or self.memory(text)
        return self.model.decode(text.ids, text.tokens, memory=memory, kernel=self.kernel, **more)

    def memory(self, text: Text) -> States | None:
        """What the encoder makes of the source."""
        if text.source is None:
            return None
        return self.model.encode(text.source, text.source_tokens, kernel=self.kernel)

    def head(self, states: States) -> Float[Tensor, "B T X"]:
        if isinstance(self.spec.head, PooledHead):
            return states.x
        answer: Tensor = self.model.head(states.x, states.tokens)
        return answer

    @torch.inference_mode()
    def by_pieces(self, text: Text, split: Sequence[int]) -> Float[Tensor, "B T X"]:
        if self.model.decoder is None:
            raise NotApplicable("an encoder reads its text at once: it has no cache")
        cache = self.model.new_cache(len(text.ids), max(text.length, 1))
        memory, parts = self.memory(text), []
        for begin, end in itertools.pairwise([0, *itertools.accumulate(split)]):
            piece = Text(text.ids[:, begin:end], text.tokens.cut(begin, end))
            states = self.states(piece, memory=memory, cache=cache, context_len=self.context_len(text))
            parts.append(self.head(states))
        return torch.cat(parts, 1)

    def context_len(self, text: Text) -> int:
        """What dynamic schedules plan for: the same length for a whole text and for its pieces."""
        return max(text.tokens.end, 1)

    def embedding(self) -> nn.Module:
        return self.model.tokens

    def generated(self, prompts: Sequence[Sequence[int]], **choices: Any) -> list[list[int]]:
        if self.model.decoder is None or not isinstance(self.spec.head, LMHead):
            raise NotApplicable("only a decoder with logits over its vocabulary generates")
        source = None
        if self.sources:
            source = self.read().expand(len(prompts), -1)
        return generate(self.model, prompts, source=source, **choices).ids

    def reloaded(self, folder: str) -> Ours:
        save(self.model, folder)
        return self.like(load(folder).model)

    def fresh(self) -> Ours:
        return self.like(self.spec.build(dtype=self.dtype, device=self.device))

    def like(self, model: Transformer) -> Ours:
        """The same questions to another model."""
        return Ours(model, name=self.name, kernel=self.kernel, seed=self.seed)

    def anew(self, dtype: torch.dtype) -> Ours:
        other = super().anew(dtype)
        assert isinstance(other, Ours)
        return other

    def replaced(self, model: Transformer) -> Ours:
        other = copy.copy(self)
        other.module = model
        return other


def ours(s: Subject) -> Ours:
    """For laws that ask for our parts: not applicable to other models."""
    needs(isinstance(s, Ours), "it asks for the parts of a model of this library")
    assert isinstance(s, Ours)
    return s
