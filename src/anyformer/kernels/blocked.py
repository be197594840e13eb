"""Blocked: flash attention's tiling (Dao et al. 2022) for any pattern, both ways, in memory linear in length.

Softmax over many keys can be taken apart. For one query with scores s, split the keys into two parts, and let each give

    lse = log Σ exp(s)          out = Σ exp(s - lse) v          over its own keys.

Then the whole is   lse = log(exp(lse₁) + exp(lse₂)),   out = exp(lse₁ - lse) out₁ + exp(lse₂ - lse) out₂,   which is
`merge`. Flash attention's online softmax is this, one part after another; no row of scores is ever whole. Here queries
are cut into runs of SIZE, and for each run the pattern says which tiles of keys are empty (skipped), full (no mask) or
partial (a mask is made for them, and thrown away). Kept for the backward pass: q, k, v, out and lse, linear in length;
weights are made again, tile by tile, as exp(s - lse), which needs no second pass over the keys.

A tile is computed by torch's fused attention where it can (the CPU, scores not capped, no bias that learns), else as
written above.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.sdpa import maskless
from anyformer.parts.pattern import EMPTY, FULL, PARTIAL
from anyformer.parts.precision import at_least_float32
from anyformer.tokens import Tokens

__all__ = ["Blocked", "merge"]

SIZE = 128
"""Queries and keys a tile."""
APART = 6
"""A run of so many full tiles is computed apart from the partial ones, without a mask."""
TOGETHER = 8
"""So many tiles of queries are computed at once over what is full for all of them."""
PAYS = 1024
"""Queries from which on tiling is faster than one masked call."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Part = tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H T"]]
"""out, and lse: -inf where a query sees no key of this part."""


class Blocked(Kernel):
    name = "blocked"

    def rejects(self, request: Request) -> str | None:
        return "it keeps no weights, so it cannot drop any" if request.dropout else None

    def suits(self, request: Request) -> bool:
        """Long inputs on the CPU that the fused kernel would need a mask for, or could not do."""
        if request.q.shape[1] < PAYS or request.q.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return request.softcap is not None or request.biased or not maskless(request)

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        learned = _learned(request)
        q, k, v = (_dense(heads.transpose(1, 2)) for heads in (request.q, request.k, request.v))
        out: Tensor = _Attention.apply(request, q, k, v, *learned)
        return out.transpose(1, 2)


def merge(a: Part, b: Part) -> Part:
    """Attention over the keys of two parts together."""
    lse = torch.logaddexp(a[1], b[1])
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    first, second = (out * (its - safe).exp()[..., None].to(out.dtype) for out, its in (a, b))
    return first + second, lse


class Piece(NamedTuple):
    """A run of queries in some rows of the batch, and the runs of keys that they look at; `masked` if not at all."""

    rows: slice
    queries: slice
    keys: tuple[slice, ...]
    masked: bool


def pieces(request: Request) -> list[Piece]:
    """Everything there is to compute: no pair of a query and a key is in two pieces, and no empty tile in any."""
    blocks = request.pattern.blocks(request.q_tokens, request.k_tokens, SIZE)
    length, size, batch = request.q.shape[1], request.k.shape[1], request.q.shape[0]
    alike = len(blocks) == 1
    found = []
    for row, tiles in enumerate(blocks.tolist()):
        rows = slice(0, batch) if alike else slice(row, row + 1)
        for begin in range(0, len(tiles), TOGETHER):
            group = tiles[begin : begin + TOGETHER]
            common = _common(group)
            if common:
                queries = slice(begin * SIZE, min((begin + TOGETHER) * SIZE, length))
                found.append(Piece(rows, queries, _slices(common, size), False))
            for first, end, line in _pairs(group, begin):
                queries = slice(first * SIZE, min(end * SIZE, length))
                found += [Piece(rows, queries, keys, masked) for keys, masked in _runs(line, size)]
    return found


def _pairs(group: list[list[int]], begin: int) -> Iterator[tuple[int, int, list[int]]]:
    """Two lines as one, where they look at nearly the same keys: (first line, one past the last, tiles)."""
    for i in range(0, len(group), 2):
        pair = group[i : i + 2]
        both = [_either(column) for column in zip(*pair, strict=True)]
        if _busy(both) <= max(map(_busy, pair)) + 1:
            yield begin + i, begin + i + len(pair), both
        else:
            yield from ((begin + i + j, begin + i + j + 1, line) for j, line in enumerate(pair))


def _either(tiles: tuple[int, ...]) -> int:
    """What a column of tiles is, taken together."""
    return tiles[0] if len(set(tiles)) == 1 else PARTIAL


def _busy(line: list[int]) -> int:
    return len(line) - line.count(EMPTY)


def _common(group: list[list[int]]) -> list[tuple[int, int]]:
    """Long runs of tiles that are full for all lines of the group; they are taken out of the lines."""
    full = [all(tile == FULL for tile in column) for column in zip(*group, strict=True)]
    found = []
    for value, run in itertools.groupby(range(len(full)), full.__getitem__):
        columns = list(run)
        if value and len(columns) >= APART and len(group) > 1:
            found.append((columns[0], columns[-1] + 1))
            for line in group:
                line[columns[0] : columns[-1] + 1] = [EMPTY] * len(columns)
    return found


def _slices(runs: list[tuple[int, int]], size: int) -> tuple[slice, ...]:
    return tuple(slice(a * SIZE, min(b * SIZE, size)) for a, b in runs)


def _runs(line: list[int], size: int) -> Iterator[tuple[tuple[slice, ...], bool]]:
    """Full tiles in long runs apart; all others together, under one mask."""
    apart: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    no_mask = PARTIAL not in line
    begin = 0
    for tile, run in itertools.groupby(line):
        end = begin + len(list(run))
        if tile != EMPTY:
            long = tile == FULL and (no_mask or end - begin >= APART)
            (apart if long else rest).append((begin, end))
        begin = end
    if apart:
        yield _slices(apart, size), False
    if rest:
        yield _slices(_joined(rest), size), True


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that touch, as one."""
    found = [runs[0]]
    for begin, end in runs[1:]:
        if begin == found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        plan = request.once("blocked", request.pattern, lambda: pieces(request))
        masks = _Masks(request)
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=at_least_float32(q).dtype)
        for piece in plan:
            here, mask = (piece.rows, slice(None), piece.queries), masks.of(piece)
            part = _part(request, q[here], _at(k, piece), _at(v, piece), mask)
            first = bool((lse[here] == -torch.inf).all())
            out[here], lse[here] = part if first else merge((out[here], lse[here]), part)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill(lse == -torch.inf, 0.0))
        ctx.plan, ctx.masks, ctx.request, ctx.learned = plan, masks, request, learned
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(heads) for heads in (q, k, v))
        grad = _dense(grads[0])
        learned = [torch.zeros_like(parameter) for parameter in ctx.learned]
        for piece in ctx.plan:
            here, mask = (piece.rows, slice(None), piece.queries), ctx.masks.of(piece)
            given = (grad[here], q[here], _at(k, piece), _at(v, piece), out[here], lse[here])
            one, two, three, scores = _part_backward(ctx.request, *given, mask)
            dq[here] += one
            begin = 0
            for keys in piece.keys:
                end = begin + keys.stop - keys.start
                dk[piece.rows, :, keys] += two[:, :, begin:end]
                dv[piece.rows, :, keys] += three[:, :, begin:end]
                begin = end
            if learned:
                ctx.masks.learn(piece, scores, ctx.learned, learned)
        return None, dq, dk, dv, *learned


class Mask(NamedTuple):
    """What is added to the scores (b, h, t, s), -inf where hidden, and which queries see nothing, if any."""

    bias: Float[Tensor, "b h t s"]
    empty: Bool[Tensor, "b 1 t"] | None


class _Masks:
    """Masks of pieces, made when asked for. Where only the distance counts, pieces of one form share one."""

    def __init__(self, request: Request) -> None:
        self.request = request
        plain = request.q_tokens.start is not None and request.k_tokens.start is not None
        ordered = request.q_tokens.ordered and request.k_tokens.ordered
        self.by_distance = plain and ordered and request.pattern.band() is not None
        self.known: dict[Any, Mask] = {}

    def of(self, piece: Piece) -> Mask | None:
        if not piece.masked and self._bias(piece) is None:
            return None
        if not self.by_distance:
            return self._made(piece)
        form = (piece.queries.stop - piece.queries.start, *(end - piece.queries.start for end in _ends(piece)))
        if form not in self.known:
            self.known[form] = self._made(piece)
        return self.known[form]

    def _tokens(self, piece: Piece) -> tuple[Tokens, Tokens]:
        q, k = self.request.q_tokens, self.request.k_tokens
        if self.by_distance:
            q, k = q.row(), k.row()
        rows = piece.rows if len(q.pos) > 1 else slice(None)
        return (
            q.map(lambda t: t[rows, piece.queries]),
            k.map(lambda t: torch.cat([t[rows, keys] for keys in piece.keys], 1)),
        )

    def _bias(self, piece: Piece) -> Tensor | None:
        position = self.request.position
        return None if position is None else position.at_scores(*self._tokens(piece))

    def _made(self, piece: Piece) -> Mask:
        seen = self.request.pattern.mask(*self._tokens(piece))[:, None]
        bias, dtype = self._bias(piece), self.request.q.dtype
        added = torch.zeros_like(seen, dtype=dtype) if bias is None else bias.detach().to(dtype)
        empty = ~seen.any(-1)
        return Mask(added.masked_fill(~seen, -torch.inf), empty if bool(empty.any()) else None)

    def learn(self, piece: Piece, scores: Tensor, learned: tuple[Tensor, ...], grads: list[Tensor]) -> None:
        """Hand the gradient of the scores (B, H, t, s) to the parameters of the position scheme."""
        with torch.enable_grad():
            bias = self._bias(piece)
        if bias is None or not bias.requires_grad:
            return
        found = torch.autograd.grad(bias, learned, scores.sum_to_size(bias.shape).to(bias.dtype), allow_unused=True)
        for total, part in zip(grads, found, strict=True):
            if part is not None:
                total += part


def _dense(heads: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
    """torch's fused kernel reads the channels of a head as neighbours, and no tensor that repeats itself."""
    return heads.contiguous() if heads.stride(-1) != 1 or 0 in heads.stride() else heads


def _ends(piece: Piece) -> Iterator[int]:
    for keys in piece.keys:
        yield from (keys.start, keys.stop)


def _at(heads: Float[Tensor, "B G S K"], piece: Piece) -> Float[Tensor, "b G s K"]:
    """Keys or values of a piece: a view if they lie in one run."""
    runs = [heads[piece.rows, :, keys] for keys in piece.keys]
    return runs[0] if len(runs) == 1 else torch.cat(runs, 2)


def _learned(request: Request) -> list[Tensor]:
    """What of the position scheme has a gradient: parameters, or tensors that stand in for them."""
    if request.position is None:
        return []
    held = [*request.position.parameters(), *vars(request.position).values()]
    return [tensor for tensor in held if isinstance(tensor, Tensor) and tensor.requires_grad]


def _fused(request: Request, q: Tensor) -> bool:
    return q.device.type == "cpu" and request.softcap is None and not _learned(request)


def _part(request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Part:
    """out and lse of queries over the keys of one piece."""
    if _fused(request, q):
        bias = None if mask is None else mask.bias
        out, lse = _flash(q, k, v, attn_mask=bias, scale=request.scale)
    else:
        scores, _ = _scores(request, q, k, mask)
        lse = scores.logsumexp(-1)
        safe = lse.masked_fill(lse == -torch.inf, 0.0)
        out = _flat((scores - safe[..., None]).exp() @ _wide(v)).to(q.dtype)
        lse = lse.flatten(1, 2)
    if mask is not None and mask.empty is not None:
        out, lse = out.masked_fill(mask.empty[..., None], 0.0), lse.masked_fill(mask.empty, -torch.inf)
    return out, lse


def _part_backward(
    request: Request,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Float[Tensor, "B H T"],
    mask: Mask | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one piece, and of its scores, from the lse over all pieces."""
    if _fused(request, q):
        bias = None if mask is None else mask.bias
        found = _flash_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=request.scale)
        return (*found, lse)
    groups = k.shape[1]
    scores, slope = _scores(request, q, k, mask)
    weights = (scores - lse.unflatten(1, (groups, -1))[..., None]).exp()
    given, made = _grouped(at_least_float32(grad), groups), _grouped(at_least_float32(out), groups)
    change = weights * (given @ _wide(v).mT - (given * made).sum(-1, keepdim=True))
    before = change if slope is None else change * slope
    dq = _flat(before @ _wide(k)) * request.scale
    dk = (before.mT @ _grouped(at_least_float32(q), groups)).sum(2) * request.scale
    dv = (weights.mT @ given).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), change.flatten(1, 2)


def _scores(
    request: Request, q: Tensor, k: Tensor, mask: Mask | None
) -> tuple[Float[Tensor, "B G R T S"], Float[Tensor, "B G R T S"] | None]:
    """Scaled, capped, biased and masked, and the slope of the cap."""
    groups, slope = k.shape[1], None
    scores = _grouped(at_least_float32(q), groups) @ _wide(k).mT * request.scale
    if request.softcap is not None:
        bent = torch.tanh(scores / request.softcap)
        scores, slope = request.softcap * bent, 1 - bent.square()
    if mask is None:
        return scores, slope
    bias = at_least_float32(mask.bias)
    return scores + (bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (groups, -1))), slope


def _grouped(heads: Float[Tensor, "B H T K"], groups: int) -> Float[Tensor, "B G R T K"]:
    """Query heads by the key-value head that they read."""
    return heads.unflatten(1, (groups, -1))


def _wide(heads: Float[Tensor, "B G S K"]) -> Float[Tensor, "B G 1 S K"]:
    return at_least_float32(heads)[:, :, None]


def _flat(heads: Float[Tensor, "B G R T K"]) -> Float[Tensor, "B H T K"]:
    return heads.flatten(1, 2)
