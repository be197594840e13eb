"""torch's fused attention. Plain causal or full input needs no mask; anything else takes one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyformer.kernels.base import Kernel, Request

__all__ = ["Sdpa", "maskless"]


class Sdpa(Kernel):
    name = "sdpa"

    def rejects(self, request: Request) -> str | None:
        return "torch's fused attention cannot cap scores" if request.softcap is not None else None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        causal, mask, empty = self._seen(request)
        q, k, v = (heads.transpose(1, 2) for heads in (request.q, request.k, request.v))
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=request.dropout,
            is_causal=causal,
            scale=request.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        ).transpose(1, 2)
        return out if empty is None else out.masked_fill(empty, 0.0)

    def _seen(self, request: Request) -> tuple[bool, Tensor | None, Tensor | None]:
        """(causal flag, mask, rows that see nothing): the cheapest form that says what the pattern says."""
        bias = request.bias()
        if bias is None and _sees_all(request):
            return False, None, None
        if bias is None and _plain_causal(request):
            return True, None, None
        key = (request.pattern, None if request.position is None else request.position.key(), request.q.dtype)
        return request.once("sdpa", key, lambda: (False, *_mask(request, bias)))


def _mask(request: Request, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mask (b, h, T, S), and which queries (b, T, 1, 1) see nothing. Those are let see everything, and zeroed
    after: so no row of the softmax is empty, and no gradient NaN."""
    mask = request.mask()
    empty = ~mask.any(-1, keepdim=True)
    seen = (mask | empty)[:, None]
    if bias is not None:
        seen = bias.to(request.q.dtype).masked_fill(~seen, -torch.inf)
    return seen, empty[..., None]


def maskless(request: Request) -> bool:
    """Whether the pattern needs no mask here: all is seen, or what came before."""
    return _sees_all(request) or _plain_causal(request)


def _sees_all(request: Request) -> bool:
    """Whether every query sees every key, known without looking at a tensor."""
    q, k, band = request.q_tokens, request.k_tokens, request.pattern.band()
    if band == (None, None) and q.start is not None and k.start is not None:
        return k.length > 0
    if band is None or q.start is None or k.start is None or not k.length:
        return False
    left, right = band
    back, ahead = q.end - 1 - k.start, k.end - 1 - q.start
    return (left is None or back <= left) and (right is None or ahead <= right)


def _plain_causal(request: Request) -> bool:
    """Whether query i sees exactly the keys 0 .. i."""
    q, k, band = request.q_tokens, request.k_tokens, request.pattern.band()
    if band is None or band[1] != 0 or q.start is None or q.start != k.start:
        return False
    return q.ordered and k.ordered and q.length == k.length and (band[0] is None or band[0] >= q.length - 1)
