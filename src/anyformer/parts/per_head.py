"""Heads that differ: each its own pattern, and its own slice of a position scheme that acts on scores."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from anyformer.parts.legal import refuse
from anyformer.parts.pattern import Cover, Pattern, Tiles, loosest
from anyformer.parts.position import PositionModule
from anyformer.tokens import Tokens

__all__ = ["PerHead", "SomeHeads"]


class PerHead(Pattern, kind="per_head"):
    """Each head its own: of H heads, head h follows `patterns[h * len(patterns) // H]`.

    Longformer dilates the windows of two heads only (Beltagy et al. 2020, section 4.1). There is no one mask for all
    heads, so `allows` and `covers` refuse; the kernel `by_head` runs another one for each run of heads that are alike.
    """

    heads_alike: ClassVar[bool] = False
    patterns: tuple[Pattern, ...]

    def check(self) -> None:
        refuse("pattern", self, self.patterns)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        raise ValueError(f"{self!r} has no one mask for all heads: ask its `patterns`, or use the kernel 'by_head'")

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        raise ValueError(f"{self!r} has no one mask for all heads: ask its `patterns`, or use the kernel 'by_head'")

    def reach(self) -> int | None:
        return loosest(part.reach() for part in self.patterns)

    def first(self) -> int:
        return max(part.first() for part in self.patterns)

    def frontier(self) -> int | None:
        return loosest(part.frontier() for part in self.patterns)

    def misfit(self, num_heads: int, kv_heads: int) -> str | None:
        """Why so many heads cannot be shared out to the patterns; None if they can."""
        many, each = len(self.patterns), num_heads // kv_heads
        if num_heads % many:
            return f"{num_heads} heads cannot be shared out evenly to {many} patterns"
        if any(end % each for _, end, _ in self.runs(num_heads)):
            return f"the {each} query heads that read one key-value head must follow one pattern"
        return None

    def runs(self, num_heads: int) -> list[tuple[int, int, Pattern]]:
        """(first head, one past the last, their pattern) of each run of heads that are alike."""
        many = len(self.patterns)
        runs: list[tuple[int, int, Pattern]] = []
        for head in range(num_heads):
            pattern = self.patterns[head * many // num_heads]
            begun = runs.pop() if runs and runs[-1][2] == pattern else (head, head, pattern)
            runs.append((begun[0], head + 1, pattern))
        return runs


class SomeHeads(PositionModule):
    """What `whole` adds to the scores of the heads first .. end - 1."""

    def __init__(self, whole: PositionModule, first: int, end: int) -> None:
        super().__init__(whole.spec)
        self.whole, self.first, self.end = whole, first, end

    def at_scores(self, q: Tokens, k: Tokens) -> Float[Tensor, "b H T S"] | None:
        bias = self.whole.at_scores(q, k)
        return None if bias is None else bias[:, self.first : self.end]

    def key(self) -> Hashable:
        return self.whole.key(), self.first, self.end
