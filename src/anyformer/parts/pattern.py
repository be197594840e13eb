"""Patterns: who may attend to whom, written once, as a function of positions.

A new pattern is a class with `allows`; masks, fast paths, cached decoding and pictures follow from it:

    class Even(Pattern, kind="even"):
        \"\"\"Every token sees the tokens at an even distance.\"\"\"

        def allows(self, q, k):
            return (q.pos - k.pos) % 2 == 0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from anyformer.parts.legal import refuse
from anyformer.spec import Part
from anyformer.tokens import Tokens

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "And",
    "Causal",
    "Full",
    "Global",
    "Not",
    "Or",
    "Pattern",
    "Prefix",
    "Tiles",
    "Window",
]

Band = tuple[int | None, int | None]
EMPTY, PARTIAL, FULL = 0, 1, 2


class Tiles(NamedTuple):
    """Runs of tokens, (b, n) each: lowest and highest position, whether any and all are marked, and their documents."""

    lo: Tensor
    hi: Tensor
    any_mark: Tensor
    all_mark: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, tokens: Tokens, size: int) -> Tiles:
        """Runs of `size` tokens; the last one may be shorter."""
        mark = torch.zeros_like(tokens.seg, dtype=torch.bool) if tokens.mark is None else tokens.mark
        short = -tokens.length % size
        cut = [
            torch.cat((t, t[:, -1:].expand(-1, short)), 1).unflatten(1, (-1, size))
            for t in (tokens.pos, mark, tokens.seg)
        ]
        pos, mark, seg = cut
        return cls(pos.amin(2), pos.amax(2), mark.any(2), mark.all(2), seg.amin(2), seg.amax(2))

    def at(self, *index: Any) -> Tiles:
        return Tiles(*(part[index] for part in self))


Cover = tuple[Tensor, Tensor]
"""Of two tiles: whether some query may see some key, and whether every query surely sees every key."""


class Pattern(Part):
    """Base of all patterns. Only `allows` must be written; the other methods let kernels and caches do less work."""

    heads_alike: ClassVar[bool] = True
    """Whether all heads see the same; `PerHead` is the one pattern where they do not, and `allows` then refuses."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        """Elementwise over broadcast `pos` and `mark`: may this query see this key? Segments are not its business."""
        raise NotImplementedError(f"{type(self).__name__} has no `allows`")

    def band(self) -> Band | None:
        """(left, right) if a query sees exactly the keys from pos - left to pos + right; None for no bound."""
        return None

    def reach(self) -> int | None:
        """How many of the latest positions, the query's own included, can matter to a query; None for all."""
        return None

    def first(self) -> int:
        """How many of the first positions can matter to every query, besides the latest `reach` ones."""
        return 0

    def frontier(self) -> int | None:
        """A query may see later positions only below this number: 0 for never (causal), None for anywhere."""
        return None

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        """What is known of whole tiles, elementwise; (True, False) is always right, and says nothing."""
        unknown = torch.ones_like(q.lo + k.lo, dtype=torch.bool)
        return unknown, ~unknown

    def blocks(self, q: Tokens, k: Tokens, size: int) -> Int[Tensor, "b n m"]:
        """For each tile of size × size: EMPTY, PARTIAL or FULL. A tile that is called partial may be either."""
        if q.start is not None and k.start is not None:
            q, k = q.row(), k.row()
        rows, columns = Tiles.of(q, size).at(slice(None), slice(None), None), Tiles.of(k, size).at(slice(None), None)
        some, every = self.covers(rows, columns)
        apart = (rows.last < columns.first) | (columns.last < rows.first) | (columns.last < 0)
        one = (
            (rows.first == rows.last)
            & (columns.first == columns.last)
            & (rows.first == columns.first)
            & (rows.first >= 0)
        )
        return torch.where(some & ~apart, 1 + (every & one).long(), 0)

    def visible(self, q: Tokens, k: Tokens) -> Tensor:
        """`allows`, within a document and never to padding."""
        return self.allows(q, k) & (q.seg == k.seg) & (k.seg >= 0)

    def mask(self, q: Tokens, k: Tokens) -> Bool[Tensor, "b T S"]:
        """True where query t may see key s. One row (b = 1) stands for all when all rows are alike."""
        if q.start is not None and k.start is not None:
            q, k = q.row(), k.row()
        return self.visible(q.map(lambda t: t[:, :, None]), k.map(lambda t: t[:, None, :]))

    def __and__(self, other: Pattern) -> Pattern:
        return And((self, other))

    def __or__(self, other: Pattern) -> Pattern:
        return Or((self, other))

    def __invert__(self) -> Pattern:
        return Not(self)


class Full(Pattern, kind="full"):
    """Every token sees every token: encoders, cross-attention."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return torch.ones_like(q.pos + k.pos, dtype=torch.bool)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        every = torch.ones_like(q.lo + k.lo, dtype=torch.bool)
        return every, every

    def band(self) -> Band:
        return None, None


class Causal(Pattern, kind="causal"):
    """A token sees itself and what came before: decoders."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return k.pos <= q.pos

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        return k.lo <= q.hi, k.hi <= q.lo

    def band(self) -> Band:
        return None, 0

    def frontier(self) -> int:
        return 0


class Window(Pattern, kind="window"):
    """A token sees the tokens less than `size` away on either side; it counts itself.

    `Causal() & Window(n)` is the sliding window of n tokens (Mistral, Longformer's decoder); `Window(n)` alone, in an
    encoder, sees n - 1 tokens on each side.
    """

    size: PositiveInt

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (q.pos - k.pos).abs() < self.size

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        return (q.lo - k.hi < self.size) & (k.lo - q.hi < self.size), torch.maximum(
            q.hi - k.lo, k.hi - q.lo
        ) < self.size

    def band(self) -> Band:
        return self.size - 1, self.size - 1

    def reach(self) -> int:
        return self.size


class Prefix(Pattern, kind="prefix"):
    """Every token sees the first `size` tokens. `Causal() | Prefix(n)` is T5's prefix language model (section 3.2)."""

    size: NonNegativeInt

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (k.pos < self.size) & torch.ones_like(q.pos, dtype=torch.bool)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        return (k.lo < self.size).expand_as(q.lo + k.lo), (k.hi < self.size).expand_as(q.lo + k.lo)

    def frontier(self) -> int:
        return self.size

    def reach(self) -> int:
        return 0

    def first(self) -> int:
        return self.size


class Global(Pattern, kind="global"):
    """Marked tokens (`Tokens.mark`) see every token, and every token sees them (Longformer, BigBird)."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        nobody = torch.zeros((), dtype=torch.bool, device=q.pos.device)
        marked = (nobody if q.mark is None else q.mark) | (nobody if k.mark is None else k.mark)
        return marked & torch.ones_like(q.pos + k.pos, dtype=torch.bool)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        return q.any_mark | k.any_mark, q.all_mark | k.all_mark


class _Several(Pattern):
    parts: tuple[Pattern, ...]

    def check(self) -> None:
        refuse("pattern", self, self.parts)


class And(_Several, kind="and"):
    """What all `parts` allow."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        allowed = self.parts[0].allows(q, k)
        for part in self.parts[1:]:
            allowed = allowed & part.allows(q, k)
        return allowed

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        some, every = zip(*(part.covers(q, k) for part in self.parts), strict=True)
        return functools.reduce(torch.logical_and, some), functools.reduce(torch.logical_and, every)

    def band(self) -> Band | None:
        bands = [part.band() for part in self.parts]
        if None in bands:
            return None
        left, right = zip(*(band for band in bands if band), strict=True)
        return tightest(left), tightest(right)

    def reach(self) -> int | None:
        return self._tightest().reach()

    def first(self) -> int:
        return self._tightest().first()

    def _tightest(self) -> Pattern:
        """The part by which the least must be kept."""
        return min(self.parts, key=lambda part: math.inf if (reach := part.reach()) is None else reach + part.first())

    def frontier(self) -> int | None:
        return tightest(part.frontier() for part in self.parts)

    def __and__(self, other: Pattern) -> Pattern:
        return And((*self.parts, other))


class Or(_Several, kind="or"):
    """What any of `parts` allows."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        allowed = self.parts[0].allows(q, k)
        for part in self.parts[1:]:
            allowed = allowed | part.allows(q, k)
        return allowed

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        some, every = zip(*(part.covers(q, k) for part in self.parts), strict=True)
        return functools.reduce(torch.logical_or, some), functools.reduce(torch.logical_or, every)

    def reach(self) -> int | None:
        return loosest(part.reach() for part in self.parts)

    def first(self) -> int:
        return max(part.first() for part in self.parts)

    def frontier(self) -> int | None:
        return loosest(part.frontier() for part in self.parts)

    def __or__(self, other: Pattern) -> Pattern:
        return Or((*self.parts, other))


class Not(Pattern, kind="not"):
    """What `part` does not allow (documents and padding stay apart all the same)."""

    part: Pattern

    def check(self) -> None:
        refuse("pattern", self, (self.part,))

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return ~self.part.allows(q, k)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        some, every = self.part.covers(q, k)
        return ~every, ~some


def tightest(bounds: Iterable[int | None]) -> int | None:
    """The tightest bound; None is no bound."""
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None


def loosest(bounds: Iterable[int | None]) -> int | None:
    """The loosest bound; None is no bound."""
    known = list(bounds)
    return None if None in known else max(bound for bound in known if bound is not None)
