"""The textbook: every step written out, every intermediate there to see. All other kernels are held to this one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.kernels.base import Kernel, Request, grouped
from anyformer.parts.precision import at_least_float32

__all__ = ["Reference"]


class Reference(Kernel):
    """softmax(q kᵀ / √K) v (Vaswani et al. 2017, equation 1) in float32 at least, float64 if the inputs are."""

    name = "reference"

    def rejects(self, request: Request) -> str | None:
        return None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        weights = self.weights(request)
        weights = torch.nn.functional.dropout(weights, request.dropout)
        v = grouped(at_least_float32(request.v), request.q.shape[2])
        return torch.einsum("bhts,bshk->bthk", weights, v).to(request.q.dtype)

    def scores(self, request: Request) -> Float[Tensor, "B H T S"]:
        """Scaled, capped and biased; not yet masked."""
        q, k = at_least_float32(request.q), at_least_float32(request.k)
        scores = torch.einsum("bthk,bshk->bhts", q, grouped(k, q.shape[2])) * request.scale
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        bias = request.bias()
        return scores if bias is None else scores + bias.to(scores.dtype)

    def weights(self, request: Request) -> Float[Tensor, "B H T S"]:
        """The attention weights: each row sums to 1, or is all 0 where nothing can be seen.

        Hidden scores are selected away (-inf), never outbid by a large negative number.
        """
        mask = request.mask()[:, None]
        empty = ~mask.any(-1, keepdim=True)
        scores = self.scores(request).masked_fill(~(mask | empty), -torch.inf)
        return scores.softmax(-1).masked_fill(empty, 0.0)
