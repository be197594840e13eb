"""The textbook: every step written out, every intermediate there to see. All other kernels are held to this one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.kernels.base import Kernel, Request, grouped
from anyformer.parts.precision import at_least_float32

__all__ = ["STEPS", "Reference"]


class Reference(Kernel):
    """softmax(q kᵀ / √K) v (Vaswani et al. 2017, equation 1) in float32 at least, float64 if the inputs are."""

    name = "reference"

    def rejects(self, request: Request) -> str | None:
        return None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        return self.output(request, torch.nn.functional.dropout(self.weights(request), request.dropout))

    def scores(self, request: Request) -> Float[Tensor, "B H T S"]:
        """q · k of every pair, as it is: not yet scaled."""
        q, k = at_least_float32(request.q), at_least_float32(request.k)
        return torch.einsum("bthk,bshk->bhts", q, grouped(k, q.shape[2]))

    def weights(self, request: Request) -> Float[Tensor, "B H T S"]:
        """The attention weights: each row sums to 1, or is all 0 where nothing can be seen."""
        scores = self.scores(request)
        for step in STEPS.values():
            scores = step(request, scores)
        return scores

    def output(self, request: Request, weights: Float[Tensor, "B H T S"]) -> Float[Tensor, "B T H K"]:
        v = grouped(at_least_float32(request.v), request.q.shape[2])
        return torch.einsum("bhts,bshk->bthk", weights, v).to(request.q.dtype)

    def steps(self, request: Request) -> dict[str, Tensor]:
        """Every intermediate by its name: `scores`, what each of `STEPS` makes of them, and `output`."""
        last = self.scores(request)
        found = {"scores": last}
        for name, step in STEPS.items():
            found[name] = last = step(request, last)
        found["masked"] = found["masked"].masked_fill(_empty(request), -torch.inf)
        return found | {"output": self.output(request, last)}


def _capped(request: Request, scores: Tensor) -> Tensor:
    cap = request.softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _biased(request: Request, scores: Tensor) -> Tensor:
    bias = request.bias()
    return scores if bias is None else scores + bias.to(scores.dtype)


def _masked(request: Request, scores: Tensor) -> Tensor:
    """Hidden scores are selected away (-inf), never outbid by a large negative number.

    A row that sees nothing is left as it is, so that no gradient is NaN, and its weights are zeroed after.
    """
    return scores.masked_fill(~(request.mask()[:, None] | _empty(request)), -torch.inf)


def _softmax(request: Request, scores: Tensor) -> Tensor:
    return scores.softmax(-1).masked_fill(_empty(request), 0.0)


def _empty(request: Request) -> Bool[Tensor, "b 1 T 1"]:
    """True for queries that see no key."""
    return request.once("empty", request.pattern, lambda: ~request.mask().any(-1)[:, None, :, None])


STEPS: dict[str, Callable[[Request, Tensor], Tensor]] = {
    "scaled": lambda request, scores: scores * request.scale,
    "capped": _capped,
    "biased": _biased,
    "masked": _masked,
    "weights": _softmax,
}
"""What becomes of the scores (B, H, T, S), in this order; a step that has nothing to do gives back what it got."""
