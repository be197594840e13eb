"""Sparse patterns: dilated windows, chunks, random blocks, and the published mixtures of them."""

from __future__ import annotations

from typing import TypeVar

import torch
from jaxtyping import Int
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from anyformer.parts.pattern import Cover, Global, Pattern, Tiles, Window
from anyformer.tokens import Tokens

__all__ = ["Chunk", "Dilated", "RandomBlocks", "bigbird", "longformer"]

Number = TypeVar("Number", int, Tensor)


class Dilated(Pattern, kind="dilated"):
    """A token sees the tokens less than `span` away on either side whose distance is a multiple of `step`; and itself.

    So `Dilated(3, 7)` sees distances 0, 3 and 6, and so does `Dilated(3, 9)`: the last is the largest multiple of
    `step` below `span`. `Dilated(1, n)` is `Window(n)`. (Child et al. 2019, section 4.3, "strided", within a span;
    Beltagy et al. 2020, figure 2c.)
    """

    step: PositiveInt
    span: PositiveInt

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        distance = q.pos - k.pos
        return (distance.abs() < self.span) & (distance % self.step == 0)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        """Some: the last multiple of `step` among the distances within `span` is one of them."""
        near, far = q.lo - k.hi, q.hi - k.lo
        low, high = near.clamp(min=1 - self.span), far.clamp(max=self.span - 1)
        one = (near == far) & (near % self.step == 0) if self.step > 1 else torch.ones_like(near, dtype=torch.bool)
        return high // self.step * self.step >= low, one & (torch.maximum(far, -near) < self.span)

    def reach(self) -> int:
        return self.span


class Chunk(Pattern, kind="chunk"):
    """A token sees its own chunk: positions 0 to `size` - 1 are one, and so on (local attention in blocks).

    `Causal() & Chunk(n)`, a decoder's, sees back to where the chunk begins (Child et al. 2019, section 4.3, "fixed").
    """

    size: PositiveInt

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return q.pos // self.size == k.pos // self.size

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        q_first, q_last, k_first, k_last = (at // self.size for at in (q.lo, q.hi, k.lo, k.hi))
        some = (q_first <= k_last) & (k_first <= q_last)
        return some, some & (q_first == q_last) & (k_first == k_last)

    def reach(self) -> int:
        return self.size


class RandomBlocks(Pattern, kind="random_blocks"):
    """Random links between blocks of `block` tokens (Zaheer et al. 2020, section 2), whatever the length.

    A block sees `count` earlier blocks, or all if there are no more, and the later blocks that drew it; not itself.
    Which ones is a hash of the two blocks and `seed`, so a longer text or a cache changes nothing. In a decoder,
    `Causal() & RandomBlocks(...)`, these are exactly `count` blocks; in an encoder, twice as many on average. (The
    authors draw from the whole sequence, and so need its length.)
    """

    block: PositiveInt
    count: PositiveInt
    seed: NonNegativeInt = 0

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return self._linked(q.pos // self.block, k.pos // self.block)

    def _linked(self, a: Int[Tensor, "..."], b: Int[Tensor, "..."]) -> Tensor:
        """The blocks before `later` are cut into `count` even stretches, and one is drawn from each: so all differ."""
        later, earlier = torch.maximum(a, b), torch.minimum(a, b)
        stretch = ((earlier + 1) * self.count - 1) // later.clamp(min=1)
        begin, end = stretch * later // self.count, (stretch + 1) * later // self.count
        drawn = begin + _mixed(_mixed(self.seed) ^ (later * self.count + stretch)) % (end - begin).clamp(min=1)
        return (earlier < later) & (earlier == drawn)

    def covers(self, q: Tiles, k: Tiles) -> Cover:
        """Exact: links are counted in the rectangle of blocks under each tile, by a table of running sums."""
        q_first, q_end = q.lo // self.block, q.hi // self.block + 1
        k_first, k_end = k.lo // self.block, k.hi // self.block + 1
        most = torch.cat((q_end.flatten(), k_end.flatten(), q_end.new_zeros(1))).max()
        blocks = torch.arange(int(most), device=q.lo.device)
        sums = self._linked(blocks[:, None], blocks).long().cumsum(0).cumsum(1)
        sums = torch.nn.functional.pad(sums, (1, 0, 1, 0))
        links = sums[q_end, k_end] - sums[q_first, k_end] - sums[q_end, k_first] + sums[q_first, k_first]
        return links > 0, links == (q_end - q_first) * (k_end - k_first)


def longformer(window: int, dilation: int = 1) -> Pattern:
    """Longformer's (Beltagy et al. 2020, section 3.1): window // 2 neighbours on either side, `dilation` apart, and the
    marked tokens. In the paper two heads are dilated: `PerHead((longformer(w),) * 5 + (longformer(w, 2),))`."""
    side = window // 2
    near = Window(side + 1) if dilation == 1 else Dilated(dilation, side * dilation + 1)
    return near | Global()


def bigbird(window: int, block: int = 64, random: int = 3, seed: int = 0) -> Pattern:
    """BigBird's (Zaheer et al. 2020, section 2): window // 2 neighbours on either side, `random` random blocks, and the
    marked tokens (their internal global blocks: mark the first tokens)."""
    return Window(window // 2 + 1) | RandomBlocks(block, random, seed) | Global()


def _mixed(x: Number) -> Number:
    """A hash of 32 bits, by Mueller's multiply and shift; in 64 bits it never overflows, so devices agree."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
