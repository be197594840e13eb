"""By head: patterns that differ between heads, each run of equal ones computed by the kernel that suits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.kernels.base import Kernel, Request, choose
from anyformer.parts.pattern import Pattern
from anyformer.parts.per_head import PerHead, SomeHeads

__all__ = ["ByHead"]


class ByHead(Kernel):
    """Runs one of `kernels` for each run of heads; they may include this one, which takes no request twice."""

    name = "by_head"
    heads_may_differ: ClassVar[bool] = True

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = kernels

    def rejects(self, request: Request) -> str | None:
        pattern, heads, groups = request.pattern, request.q.shape[2], request.k.shape[2]
        if not isinstance(pattern, PerHead):
            return "all heads follow one pattern: it is for PerHead"
        return pattern.misfit(heads, groups)

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        assert isinstance(request.pattern, PerHead)
        parts = [_part(request, *run) for run in request.pattern.runs(request.q.shape[2])]
        return torch.cat([choose(part, self.kernels)(part) for part in parts], 2)


def _part(request: Request, first: int, end: int, pattern: Pattern) -> Request:
    """The same request for the query heads first .. end - 1 alone."""
    share, position = request.q.shape[2] // request.k.shape[2], request.position
    k, v = (heads[:, :, first // share : end // share] for heads in (request.k, request.v))
    if position is not None:
        key, whole = (position.key(), first, end), position
        position = request.once("some_heads", key, lambda: SomeHeads(whole, first, end))
    return dataclasses.replace(request, q=request.q[:, :, first:end], k=k, v=v, pattern=pattern, position=position)
