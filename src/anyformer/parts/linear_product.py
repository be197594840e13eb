"""The causal product of linear attention, Σ over s ≤ t of (q_t·k_s) v_s, in chunks.

Within a chunk it is a masked product; between chunks goes the state Σ k_s v_sᵀ of what came before. A token reads that
state only if its document is the one that the state speaks of. Time and memory grow with T alone: forward and backward
work on one state a chunk, and between them only q, k and v are kept.

Shapes: B rows, G groups of R query heads, n chunks of C tokens, F features, E channels of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["CHUNK", "Chunks", "causal_product", "causal_sums", "chunked", "cut", "joined"]

CHUNK = 128


def cut(length: int, most: int | None = None) -> tuple[int, int]:
    """How many chunks, and of how many tokens: of equal size, so that little is added to fill the last one."""
    most = most or CHUNK
    number = max(-(-length // most), 1)
    return number, max(-(-length // number), 1)


def chunked(x: Float[Tensor, "B T H K"], number: int, size: int, groups: int) -> Float[Tensor, "B G n R C K"]:
    """In chunks, with zeros after the end."""
    batch, length, heads, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, number * size - length)) if number * size > length else x
    return x.view(batch, number, size, groups, heads // groups, width).permute(0, 3, 1, 4, 2, 5).contiguous()


def joined(x: Float[Tensor, "B G n R C K"], length: int) -> Float[Tensor, "B T H K"]:
    """The way back."""
    batch, groups, number, per, size, width = x.shape
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, number * size, groups * per, width)[:, :length]


class Chunks(NamedTuple):
    """Which token is hidden from which within a chunk; and, unless all is one document, which tokens read the state
    before their chunk (`enters`), which are in the state behind it (`leaves`), and whether the one goes into the other.
    """

    hidden: Bool[Tensor, "*b C C"]
    enters: Bool[Tensor, "B 1 n 1 C 1"] | None = None
    leaves: Bool[Tensor, "B 1 n C 1"] | None = None
    carries: Bool[Tensor, "B 1 n 1 1"] | None = None

    @staticmethod
    def segments(seg: Int[Tensor, "B T"], number: int, size: int) -> Int[Tensor, "B n C"]:
        """In chunks, with padding after the end."""
        return F.pad(seg, (0, number * size - seg.shape[1]), value=-1).view(seg.shape[0], number, size)

    @classmethod
    def plain(cls, size: int, device: torch.device, itself: bool = True) -> Chunks:
        """Every row is one document. A token sees those before it, and `itself`."""
        return cls(torch.ones(size, size, dtype=torch.bool, device=device).triu(int(itself)))

    @classmethod
    def of(cls, seg: Int[Tensor, "B n C"], before: Int[Tensor, "B"], itself: bool = True) -> Chunks:
        """By documents; `before` is that of the state before the first chunk, -1 for none."""
        _, number, size = seg.shape
        flat, order = seg.flatten(1), torch.arange(number * size, device=seg.device)
        last = torch.where(flat >= 0, order, -1).cummax(1).values.view(seg.shape)[..., -1]
        after = torch.where(last >= 0, flat.gather(1, last.clamp(min=0)), before[:, None])
        before = torch.cat((before[:, None], after[:, :-1]), 1)
        hidden = cls.plain(size, seg.device, itself).hidden | (seg[..., :, None] != seg[..., None, :])
        return cls(
            hidden[:, None, :, None],
            (seg == before[..., None])[:, None, :, None, :, None],
            (seg == after[..., None])[:, None, :, :, None],
            (before == after)[:, None, :, None, None],
        )


def causal_product(
    q: Float[Tensor, "B G n R C F"], k: Float[Tensor, "B G n C F"], v: Float[Tensor, "B G n C E"], chunks: Chunks
) -> Float[Tensor, "B G n R C E"]:
    """Σ over the s that t may see of (q_t·k_s) v_s, with gradients."""
    product: Tensor = _CausalProduct.apply(q, k, v, *chunks)
    return product


def causal_sums(
    q: Float[Tensor, "B G n R C F"],
    k: Float[Tensor, "B G n C F"],
    v: Float[Tensor, "B G n C E"],
    chunks: Chunks,
    first: Float[Tensor, "B G F E"] | None = None,
) -> tuple[Float[Tensor, "B G n R C E"], Float[Tensor, "B G m F E"]]:
    """The same, behind the state `first`; and the states before each chunk and behind the last (m = n + 1)."""
    rows = q.flatten(3, 4)
    within = _hide((rows @ k.mT).view(*q.shape[:-1], k.shape[3]), chunks.hidden)
    states = _states(k.mT @ _only(v, chunks.leaves), chunks.carries, first)
    sums = (within.flatten(3, 4) @ v).view(*q.shape[:-1], v.shape[-1])
    return sums + _only((rows @ states[:, :, :-1]).view_as(sums), chunks.enters), states


class _CausalProduct(torch.autograd.Function):
    """Keeps q, k and v; the backward pass computes the states anew, and their gradients from the last chunk on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *chunks: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, *chunks)
        return causal_sums(q, k, v, Chunks(*chunks))[0]  # type: ignore[arg-type]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        chunks, rows, heads = Chunks(*rest), q.flatten(3, 4), q.shape[:-1]
        all_, entering = grad.flatten(3, 4), _only(grad, chunks.enters).flatten(3, 4)
        leaving = _only(v, chunks.leaves)
        states = _states(k.mT @ leaving, chunks.carries)[:, :, :-1]
        onward = _states(rows.mT @ entering, chunks.carries, reverse=True)[:, :, 1:]
        within = _hide((all_ @ v.mT).view(*heads, v.shape[3]), chunks.hidden).flatten(3, 4)
        dq = within @ k + entering @ states.mT
        dk = within.mT @ rows + leaving @ onward.mT
        within = _hide((rows @ k.mT).view(*heads, k.shape[3]), chunks.hidden).flatten(3, 4)
        dv = within.mT @ all_ + _only(k @ onward, chunks.leaves)
        return dq.view_as(q), dk, dv, None, None, None, None


def _states(
    own: Float[Tensor, "B G n F E"],
    carries: Bool[Tensor, "B 1 n 1 1"] | None,
    first: Float[Tensor, "B G F E"] | None = None,
    reverse: bool = False,
) -> Float[Tensor, "B G m F E"]:
    """Running sums of what each chunk adds: before each chunk and behind the last; or from the last chunk on."""
    edge = torch.zeros_like(own[:, :, :1]) if first is None else first[:, :, None]
    sums = torch.cat((own, edge) if reverse else (edge, own), 2)
    number = own.shape[2]
    for c in reversed(range(number)) if reverse else range(number):
        here, there = (c, c + 1) if reverse else (c + 1, c)
        sums[:, :, here] += sums[:, :, there] if carries is None else _only(sums[:, :, there], carries[:, :, c])
    return sums


def _hide(scores: Float[Tensor, "B G n R C C"], hidden: Tensor) -> Float[Tensor, "B G n R C C"]:
    return scores.masked_fill_(hidden, 0.0)


def _only(x: Tensor, shown: Tensor | None) -> Tensor:
    return x if shown is None else x.masked_fill(~shown, 0.0)
