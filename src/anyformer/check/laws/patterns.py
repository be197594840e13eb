"""What a pattern promises kernels and caches, beside what it allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.check.law import Law, Trial, Trials, law, needs
from anyformer.check.ours import ours
from anyformer.check.subject import Subject
from anyformer.parts.attention import Attention
from anyformer.parts.linear_attention import LinearAttention
from anyformer.parts.pattern import EMPTY, FULL, Pattern
from anyformer.parts.per_head import PerHead
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

STRETCH = 41  # positions of which all pairs are asked
TILES = (1, 2, 3, 4, 5, 7, 16)
FURTHEST = 4096  # numbers in a pattern up to this one are looked at from both sides
TILED = 1024  # and up to this one by tiles too


@law("patterns", "a pattern's short cuts say what it says", unit="pairs", limits=0.0, anew=False)
@torch.inference_mode()
def patterns(s: Subject) -> Trials:
    """What kernels and caches ask of a pattern (its band, reach and frontier, masks, whole tiles) is what `allows` says
    of each pair.

    Every pair of the first 41 positions, and about each number up to 4096 in the pattern; plain, marked and packed
    tokens; tiles of 1 to 16. Counted are the pairs about which something else is said.
    """
    s = ours(s)
    found: dict[Pattern, None] = {op.pattern: None for op in s.ops() if isinstance(op, Attention | LinearAttention)}
    needs(found, "no layer of this model follows a pattern")
    for pattern in found:
        yield from _promises(pattern, s.device)
    for pattern in dict.fromkeys(part for whole in found for part in _parts(whole)):
        yield from _masks(pattern, s.device)


def _parts(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns that heads follow."""
    return pattern.patterns if isinstance(pattern, PerHead) else (pattern,)


def _promises(pattern: Pattern, device: torch.device) -> Trials:
    """`band`, `reach`, `first` and `frontier`."""
    band, reach, first, frontier = pattern.band(), pattern.reach(), pattern.first(), pattern.frontier()
    near = {n + i for n in _numbers(pattern) for i in range(-2, 3)}
    pos = torch.tensor(sorted({*range(STRETCH), *(n for n in near if n >= 0)}), device=device)[None]
    tokens = Tokens(pos, torch.zeros_like(pos), pos % 5 == 2)
    allowed = torch.stack([_allowed(part, tokens, tokens) for part in _parts(pattern)]).any(0)
    q, k = pos[0, :, None], pos[0, None, :]
    if band is not None:
        left, right = band
        within = torch.ones_like(allowed) if left is None else q - k <= left
        within = within if right is None else within & (k - q <= right)
        yield _wrong(within != allowed, tokens, tokens, f"band() of {pattern!r} is {band}")
    if reach is not None:
        forgotten = (k <= q) & (q - k >= reach) & (k >= first)
        yield _wrong(allowed & forgotten, tokens, tokens, f"{pattern!r} reaches {reach} back, and the first {first}")
    if frontier is not None:
        yield _wrong(allowed & (k > q) & (k >= frontier), tokens, tokens, f"frontier() of {pattern!r} is {frontier}")


def _masks(pattern: Pattern, device: torch.device) -> Trials:
    """`allows` of one pair, `mask` and `blocks`."""
    for q, k, said in _layouts(pattern, device):
        allowed = _allowed(pattern, q, k)
        few = range(min(q.length, 5)), range(min(k.length, 5))
        alone = torch.tensor([[bool(pattern.allows(_token(q, t), _token(k, s))) for s in few[1]] for t in few[0]])
        yield _wrong(alone.to(device) != allowed[:5, :5], q, k, f"allows() of {pattern!r} alone and among others")
        seen = allowed & (q.seg[0, :, None] == k.seg[0]) & (k.seg[0] >= 0)
        yield _wrong(pattern.mask(q, k)[0] != seen, q, k, f"mask() of {pattern!r}, {said}")
        for size in TILES:
            tiles = pattern.blocks(q, k, size)[0].repeat_interleave(size, 0).repeat_interleave(size, 1)
            tile = tiles[: q.length, : k.length]
            wrong = ((tile == EMPTY) & seen) | ((tile == FULL) & ~seen)
            yield _wrong(wrong, q, k, f"tiles of {size} by blocks() of {pattern!r}, {said}")


def _layouts(pattern: Pattern, device: torch.device) -> Iterator[tuple[Tokens, Tokens, str]]:
    """Queries and keys, one row each."""
    plain = Tokens.arange(1, STRETCH, device=device)
    documents = torch.tensor([[0] * 9 + [1] * 20 + [2] + [-1] * (STRETCH - 30)], device=device)
    yield plain, plain, "plain text"
    marked = dataclasses.replace(plain, mark=plain.pos % 5 == 2)
    yield marked, marked, "positions 2, 7, 12, ... marked"
    packed = Tokens.packed(documents)
    yield packed, packed, "documents of 9, 20 and 1 tokens, then padding"
    for number in sorted(_numbers(pattern)):
        if STRETCH // 2 < number <= TILED:
            yield Tokens.arange(1, STRETCH, start=number - STRETCH // 2, device=device), plain, "later queries"


def _numbers(spec: Any) -> set[int]:
    """The whole numbers in a pattern, and those that it promises."""
    if isinstance(spec, int):
        return {spec} if 0 < spec <= FURTHEST else set()
    if isinstance(spec, tuple):
        return {number for item in spec for number in _numbers(item)}
    if not isinstance(spec, Pattern):
        return set()
    said = (spec.band() or (), spec.reach(), spec.first(), spec.frontier())
    return {number for _, item in spec.items() for number in _numbers(item)} | _numbers(said)


def _allowed(pattern: Pattern, q: Tokens, k: Tokens) -> Bool[Tensor, "T S"]:
    """`allows`, from a list of all pairs."""
    pairs = q.map(lambda t: t[0].repeat_interleave(k.length)), k.map(lambda t: t[0].repeat(q.length))
    return pattern.allows(*pairs).expand(q.length * k.length).view(q.length, k.length)


def _token(tokens: Tokens, at: int) -> Tokens:
    return tokens.map(lambda t: t[0, at])


def _wrong(wrong: Bool[Tensor, "T S"], q: Tokens, k: Tokens, said: str) -> Trial:
    """How many pairs, and the first of them."""
    found = wrong.nonzero().tolist()
    if not found:
        return Trial(0.0, said)
    t, s = found[0]
    return Trial(len(found), f"{said}: not so of the query at {int(q.pos[0, t])} and the key at {int(k.pos[0, s])}")


LAWS: tuple[Law, ...] = (patterns,)
