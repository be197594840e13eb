"""Subject: a model under examination, ours or anyone's, behind the few questions that the laws ask.

To have another library's model examined, derive from `Subject` and answer what it can:

    class Mine(Subject):
        def answer(self, text): return self.module(text.ids, mask=text.tokens.real)

What is left out is "not applicable", with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.tokens import Tokens

__all__ = ["NotApplicable", "Subject", "Text", "stir"]


class NotApplicable(Exception):
    """A law says nothing about this model, or the model has no answer to its question; the message says why."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A batch of texts, and where their tokens sit; of an encoder-decoder also the source that it reads."""

    ids: Int[Tensor, "B T"]
    tokens: Tokens
    source: Int[Tensor, "B S"] | None = None
    source_tokens: Tokens | None = None

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def rows(self, rows: Sequence[int]) -> Text:
        """These rows, in this order."""
        at = torch.tensor(rows, device=self.ids.device, dtype=torch.long)
        source_tokens = None if self.source_tokens is None else self.source_tokens.take(at)
        source = None if self.source is None else self.source[at]
        return Text(self.ids[at], self.tokens.take(at), source, source_tokens)

    def saying(self, ids: Int[Tensor, "B T"]) -> Text:
        """Other words at the same places."""
        return dataclasses.replace(self, ids=ids)


class Subject:
    """A model and what it promises. `module` holds the weights; the rest are facts that laws ask for.

    `causal`: no answer may depend on later tokens, but for those before position `frontier`, which all may see.
    `sources`: it reads a source beside the text. `max_len`: how many positions it has; None for no bound. `notes`: what
    to know of how it was asked, for the report. `fixed`: its weights cannot be drawn anew (they are integers).
    """

    name: str = "model"
    vocab_size: int
    causal: bool = True
    frontier: int = 0
    sources: bool = False
    max_len: int | None = None
    notes: tuple[str, ...] = ()
    fixed: bool = False

    def __init__(self, module: nn.Module, *, seed: int = 0) -> None:
        self.module, self.seed = module, seed
        self.random = torch.Generator().manual_seed(seed)

    # -- what a model answers -----------------------------------------------------------------------------------------

    def answer(self, text: Text) -> Float[Tensor, "B T X"]:
        """What it says of each token: logits or hidden states."""
        raise NotApplicable("this kind of model gives no answer a token")

    def by_pieces(self, text: Text, split: Sequence[int]) -> Float[Tensor, "B T X"]:
        """The same, read piece by piece through the model's own cache."""
        raise NotApplicable("this kind of model has no cache that could be asked")

    def embedding(self) -> nn.Module:
        """The module whose output, (B, T, D), is the embedded text."""
        raise NotApplicable("nothing is known of where this kind of model embeds its text")

    def generated(self, prompts: Sequence[Sequence[int]], **choices: Any) -> list[list[int]]:
        """New ids for each prompt: `max_new_tokens`, `end_ids`, `temperature`, `seed`."""
        raise NotApplicable("this kind of model does not generate")

    def reloaded(self, folder: str) -> Subject:
        """The model, saved into `folder` and loaded again."""
        raise NotApplicable("nothing is known of how this kind of model is saved")

    def fresh(self) -> Subject:
        """A model of the same kind with new weights, as training would begin."""
        raise NotApplicable("nothing is known of how this kind of model is made anew")

    # -- what laws share ----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def longest(self, length: int) -> int:
        """`length`, or as much of it as the model has positions for."""
        return length if self.max_len is None else min(length, self.max_len)

    def ids(self, *shape: int) -> Int[Tensor, "*B"]:
        """Random ids."""
        return torch.randint(self.vocab_size, shape, generator=self.random).to(self.device)

    def other(self, ids: Int[Tensor, "*B"]) -> Int[Tensor, "*B"]:
        """Another id at each place."""
        step = torch.randint(1, self.vocab_size, ids.shape, generator=self.random)
        return (ids + step.to(ids.device)) % self.vocab_size

    def text(self, batch: int, length: int, *, tokens: Tokens | None = None, source: int = 5) -> Text:
        """Random text, with a random source of so many tokens where the model reads one."""
        tokens = tokens or Tokens.arange(batch, length, device=self.device)
        ids = self.ids(batch, length)
        if not self.sources:
            return Text(ids, tokens)
        source = self.longest(source)
        return Text(ids, tokens, self.ids(batch, source), Tokens.arange(batch, source, device=self.device))

    def read(self) -> Int[Tensor, "1 3"]:
        """The source that is read while `generated` makes text."""
        return torch.tensor([[1, 2, 3]], device=self.device) % self.vocab_size

    def anew(self, dtype: torch.dtype) -> Subject:
        """A copy in `dtype` with other weights, large enough for each token to matter to all that see it."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(dtype).eval()
        other.random = torch.Generator().manual_seed(self.seed)
        stir(other.module, self.seed)
        return other


@torch.no_grad()
def stir(module: nn.Module, seed: int = 0) -> None:
    """Draw weights anew: maps and tables as 1 / √width, vectors about what they are. Ties stay tied."""
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            continue
        drawn = torch.randn(parameter.shape, generator=random).to(parameter)
        if parameter.dim() > 1:
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * drawn)
