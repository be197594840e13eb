"""Cost: what a part costs, from its spec alone. No torch, no weights."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Cost", "linear"]


class Cost(NamedTuple):
    """Counts for one sequence; they add up.

    `params` numbers to learn; `active` those that one token uses (fewer than `params` in a mixture of experts);
    `flops` of the forward pass, 2 a multiply-add, matrix products only, attention counted over all pairs as a dense
    kernel runs it (the backward pass takes twice as many); `activations` numbers kept for the backward pass by the
    fused kernels (masks, score biases, soft caps and dropout keep more); `cache` numbers kept for decoding.
    """

    params: int = 0
    active: int = 0
    flops: int = 0
    activations: int = 0
    cache: int = 0

    def plus(self, *others: Cost) -> Cost:
        return Cost(*(sum(values) for values in zip(self, *others, strict=True)))


def linear(inputs: int, outputs: int, length: int, bias: bool = False) -> Cost:
    """A matrix product over `length` tokens (its input is counted by whoever makes it)."""
    params = inputs * outputs + (outputs if bias else 0)
    return Cost(params, params, 2 * inputs * outputs * length)
