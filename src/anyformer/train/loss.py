"""The loss of next-token prediction, summed, with a backward pass that costs one product."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["IGNORE", "cross_entropy"]

IGNORE = -100


def cross_entropy(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """-Σ log softmax(logits)[target] in nats, over targets that are not IGNORE; 0 for none. In float32 at least.

    The forward pass turns the log-probabilities, in place, into the gradient (softmax - one-hot), so that the backward
    pass is one multiplication, and one (N, V) tensor is kept where torch keeps one and makes two more.
    """
    total: Tensor = _CrossEntropy.apply(logits, targets)
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        known = (targets != IGNORE)[:, None]
        target = targets.clamp(min=0)[:, None]
        logs = torch.log_softmax(logits, -1, dtype=wide)
        total = -(logs.gather(1, target) * known).sum()
        gradient = logs.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=wide))
        if not known.all():
            gradient.mul_(known)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None
