"""Op: what a branch of a block does. A mixer moves information between tokens; a feed-forward works on each alone."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.spec import Part

__all__ = ["FeedForward", "Mixer", "Op", "OpModule", "Result", "Shared"]

Result = tuple[Tensor, Tensor | None]
"""What an op gives: its output (B, T, D), and an auxiliary loss (a scalar) or None."""

Shared = dict[Hashable, nn.Module]
"""Modules that all layers of one stack share, by their spec and whatever else shapes them."""


class Op(Part):
    """Base of mixers and feed-forwards. What it says of itself decides where it can stand (`legal`)."""

    one_way: ClassVar[bool] = False
    """Whether it reads its text left to right, whatever is asked."""
    reads_memory: ClassVar[bool] = False
    """Whether it attends to another text, the encoder's."""
    marked_see_all: ClassVar[bool] = False
    """Whether marked tokens see their whole document, whatever the pattern."""

    def build(self, dim: int, shared: Shared) -> OpModule:
        """The module for a model of width `dim`."""
        raise NotImplementedError

    def cost(self, dim: int, length: int) -> Cost:
        """What one sequence of `length` tokens costs."""
        raise NotImplementedError

    def looks_ahead(self) -> bool:
        """Whether a token may see later ones anywhere in its text (`pattern.frontier()` None)."""
        return False


class Mixer(Op):
    """Moves information between tokens: attention, and whatever fills the same slot."""


class FeedForward(Op):
    """Works on each token alone."""

    routes: ClassVar[bool] = False
    """Whether it sends tokens to feed-forwards of its own."""


class OpModule(nn.Module):
    """Base of the modules; `forward(x, ctx) -> Result`."""

    def forward(self, x: Tensor, ctx: Context) -> Result:
        raise NotImplementedError

    def new_store(self, cache: Any) -> Any:
        """This op's share of a new cache; None if it keeps nothing between decoding steps."""
        return None
