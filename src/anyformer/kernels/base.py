"""What a kernel is asked, what it answers, and which one is taken."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.context import once
from anyformer.parts.pattern import Pattern
from anyformer.parts.position import PositionModule
from anyformer.tokens import Tokens

__all__ = ["Kernel", "Request", "choose", "explain_kernels"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One attention to compute: softmax(softcap(q kᵀ · scale) + bias, where the pattern allows) v.

    H is a multiple of G: query head h reads key-value head h // (H / G). A query that sees no key gives zeros.
    `memo` is shared by all layers of a pass, so that what follows from pattern and tokens is made once.
    """

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S G K"]
    v: Float[Tensor, "B S G K"]
    q_tokens: Tokens
    k_tokens: Tokens
    pattern: Pattern
    scale: float
    softcap: float | None = None
    position: PositionModule | None = None
    dropout: float = 0.0
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    def once(self, what: str, key: Hashable, make: Callable[[], Any]) -> Any:
        return once(self.memo, (what, key), (self.q_tokens, self.k_tokens), make)

    def mask(self) -> Bool[Tensor, "b T S"]:
        """True where query t sees key s."""
        return self.once("mask", self.pattern, lambda: self.pattern.mask(self.q_tokens, self.k_tokens))

    @property
    def biased(self) -> bool:
        """Whether the position scheme adds to the scores."""
        return self.position is not None and getattr(self.position.spec, "acts", None) == "scores"

    def bias(self) -> Float[Tensor, "b H T S"] | None:
        """What the position scheme adds to the scores."""
        if self.position is None:
            return None
        position = self.position
        return self.once("bias", position.key(), lambda: position.at_scores(self.q_tokens, self.k_tokens))


class Kernel(abc.ABC):
    """A way to compute a request."""

    name: str
    heads_may_differ: ClassVar[bool] = False
    """Whether it can honour a pattern without one mask for all heads (`PerHead`); a kernel that cannot is not asked."""

    @abc.abstractmethod
    def rejects(self, request: Request) -> str | None:
        """Why this kernel cannot honour the request; None if it can. No field may be ignored."""

    def suits(self, request: Request) -> bool:
        """Whether this kernel is worth it, for a request that it accepts; only asked where nobody forces it."""
        return True

    @abc.abstractmethod
    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        """The attention that was asked for."""


def choose(request: Request, kernels: Sequence[Kernel], forced: str | Kernel | None = None) -> Kernel:
    """The first kernel that accepts and suits; a forced one, by name or itself, must accept."""
    if forced is None:
        for kernel in kernels:
            if _reason(kernel, request) is None and kernel.suits(request):
                return kernel
        raise ValueError(f"no kernel can do this: {'; '.join(f'{k.name}: {_reason(k, request)}' for k in kernels)}")
    kernel = _named(forced, kernels) if isinstance(forced, str) else forced
    reason = _reason(kernel, request)
    if reason is not None:
        raise ValueError(f"kernel {kernel.name!r} was asked for, but {reason}")
    return kernel


def explain_kernels(request: Request, kernels: Sequence[Kernel]) -> str:
    """A line for each kernel, in order of preference: taken, possible, or why not."""
    taken = choose(request, kernels)
    verdicts = {kernel.name: _reason(kernel, request) for kernel in kernels}
    return "\n".join(f"{n}: {reason or ('taken' if n == taken.name else 'possible')}" for n, reason in verdicts.items())


def _reason(kernel: Kernel, request: Request) -> str | None:
    """Why this kernel cannot honour the request."""
    if not (request.pattern.heads_alike or kernel.heads_may_differ):
        return "heads follow different patterns, which only 'by_head' can take apart"
    return kernel.rejects(request)


def _named(name: str, kernels: Sequence[Kernel]) -> Kernel:
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise ValueError(f"unknown kernel {name!r}; known: {', '.join(kernel.name for kernel in kernels)}")


def grouped(heads: Float[Tensor, "B S G K"], num_heads: int) -> Float[Tensor, "B S H K"]:
    """Repeat each key-value head for the query heads that read it: (0, 1) becomes (0, 0, 1, 1)."""
    groups = heads.shape[2]
    return heads if groups == num_heads else torch.repeat_interleave(heads, num_heads // groups, dim=2)
