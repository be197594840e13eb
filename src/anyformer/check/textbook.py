"""Textbook: attention and relative positions straight from their definitions, in float64: slow, plain, and sharing no
line with a kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.kernels.base import Request
from anyformer.parts.frequencies import Plain
from anyformer.parts.pattern import Pattern
from anyformer.parts.per_head import PerHead
from anyformer.parts.position import RelativeBias, Rotary

__all__ = ["Attended", "alibi_slope", "attended", "bucket", "turned", "visible"]


class Attended(NamedTuple):
    """What n queries get, and their weights over the keys."""

    out: Float[Tensor, "B n H K"]
    weights: Float[Tensor, "B H n S"]


def attended(request: Request, queries: Sequence[int] | None = None) -> Attended:
    """softmax(softcap(q kᵀ · scale) + bias) v, one query and head after another, over the keys that it sees (Vaswani et
    al. 2017, equation 1); `queries` are the columns asked for, all if left out. Has gradients for q, k and v."""
    q, k, v = (heads.double() for heads in (request.q, request.k, request.v))
    (batch, length, heads, width), (size, groups) = q.shape, k.shape[1:3]
    asked = range(length) if queries is None else queries
    out, weights = [], []
    for b, t in itertools.product(range(batch), asked):
        seen, bias = _seen(request, b, t), _bias(request, b, t)
        for h in range(heads):
            keys, row = seen[h].nonzero()[:, 0], q.new_zeros(size)
            group = h // (heads // groups)
            if len(keys):
                row[keys] = _softmax(_scores(request, q[b, t, h], k[b, keys, group], bias[h, keys]))
            out.append(row[keys] @ v[b, keys, group])
            weights.append(row)
    shape = (batch, len(asked), heads)
    if not out:
        return Attended(q.new_zeros(*shape, width), q.new_zeros(batch, heads, len(asked), size))
    return Attended(torch.stack(out).view(*shape, width), torch.stack(weights).view(*shape, size).transpose(1, 2))


def visible(request: Request) -> Bool[Tensor, "B H T S"]:
    """True where query t of head h sees key s: as the pattern allows, within a document, and never padding."""
    rows = [[_seen(request, b, t) for t in range(request.q.shape[1])] for b in range(request.q.shape[0])]
    return torch.stack([torch.stack(row, 1) for row in rows])


def _seen(request: Request, b: int, t: int) -> Bool[Tensor, "H S"]:
    """Which keys a query sees, by head."""
    q, k = request.q_tokens.map(lambda x: x[b, t]), request.k_tokens.map(lambda x: x[b])
    one_document = (k.seg == q.seg) & (k.seg >= 0)
    patterns = _patterns(request.pattern, request.q.shape[2])
    known = {pattern: pattern.allows(q, k) & one_document for pattern in dict.fromkeys(patterns)}
    return torch.stack([known[pattern] for pattern in patterns])


def _patterns(pattern: Pattern, num_heads: int) -> list[Pattern]:
    """The pattern of each head."""
    if not isinstance(pattern, PerHead):
        return [pattern] * num_heads
    return [pattern.patterns[head * len(pattern.patterns) // num_heads] for head in range(num_heads)]


def _bias(request: Request, b: int, t: int) -> Float[Tensor, "H S"]:
    """What the position scheme adds to the scores of one query; zeros if nothing."""
    q, k = request.q_tokens.map(lambda x: x[b : b + 1, t : t + 1]), request.k_tokens.map(lambda x: x[b : b + 1])
    found = None if request.position is None else request.position.at_scores(q, k)
    if found is None:
        return torch.zeros(request.q.shape[2], k.length, dtype=torch.float64, device=k.pos.device)
    return found[0, :, 0].detach().double()


def _scores(
    request: Request, q: Float[Tensor, "K"], k: Float[Tensor, "n K"], bias: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    scores = k @ q * request.scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    return scores + bias


def _softmax(scores: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    exponentials = (scores - scores.detach().max()).exp()
    return exponentials / exponentials.sum()


def turned(x: Float[Tensor, "B T H K"], pos: Int[Tensor, "B T"], spec: Rotary, length: int) -> Float[Tensor, "B T H K"]:
    """Rotary positions by complex numbers (Su et al. 2021, equation 16): a pair of channels a + bi is multiplied by
    gain · e^(i · position · frequency). Schedules but the plain one are taken at their word, for a text of `length`."""
    turning = int(x.shape[-1] * spec.fraction)
    if spec.frequencies == Plain():
        frequencies = [spec.base ** (-2 * i / turning) for i in range(turning // 2)]
    else:
        frequencies = spec.frequencies.inverse(turning, spec.base, length)
    half = turning // 2
    first, second = (slice(0, half), slice(half, turning))
    if spec.layout == "interleaved":
        first, second = slice(0, turning, 2), slice(1, turning, 2)
    angles = pos.double()[..., None, None] * torch.tensor(frequencies, dtype=torch.float64, device=x.device)
    out = x.double().clone()
    pairs = torch.complex(out[..., first], out[..., second])
    pairs = pairs * torch.polar(torch.full_like(angles, spec.frequencies.gain()), angles)
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def alibi_slope(head: int, num_heads: int) -> float:
    """2^(-8 (h + 1) / n) for n heads, a power of two; heads beyond one take every other slope of twice as many (Press
    et al. 2022, section 3, and the authors' code)."""
    power = 2 ** math.floor(math.log2(num_heads))
    return 2 ** (-8 * (head + 1) / power) if head < power else 2 ** (-4 * (2 * (head - power) + 1) / power)


def bucket(distance: int, spec: RelativeBias) -> int:
    """The bucket of query's position - key's (Raffel et al. 2020, section 2.1): with e single distances out of n, a
    longer one d is in e + the most j below n - e for which (d / e)^(n - e) ≥ (max / e)^j; all in whole numbers."""
    n = spec.num_buckets // 2 if spec.bidirectional else spec.num_buckets
    ahead = n if spec.bidirectional and distance < 0 else 0
    d, e = abs(distance) if spec.bidirectional else max(distance, 0), n // 2
    if d < e:
        return ahead + d
    return ahead + e + sum(d ** (n - e) * e**j >= spec.max_distance**j * e ** (n - e) for j in range(1, n - e))
