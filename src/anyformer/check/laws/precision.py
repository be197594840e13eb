"""Half precision: finite where numbers are large, and near where they are not."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.check.law import Law, Trial, Trials, holds, law, needs
from anyformer.check.laws.whole import finite_gradients, mean_square
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject, Text
from anyformer.model import TransformerSpec
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

HALF = (torch.bfloat16, torch.float16)
GROWN = 100.0


@law("half", "half precision stays finite and near", unit="eps of half precision", limits=16.0)
def half(s: Subject) -> Trials:
    """In bfloat16 and float16 a model says nearly what the same weights say in float64, however far into a text and
    however large its numbers: sums and phases are kept where they are safe.

    The distance of the median token (a router may choose another expert for a few), relative to the length of answers;
    at positions from 1000 on; with embeddings × 1000, where float64's numbers fit; and in models of ours that norm what
    each branch reads, with maps × 100. Answers must be finite, and gradients where float64's would fit.
    """
    needs(s.dtype == torch.float64, "both are compared with float64")
    for dtype in HALF:
        less = _cast(s, dtype)
        wide = _cast(less, torch.float64)
        for start, length in ((0, 1), (0, 7), (1000, 7)):
            text = _far(s, start, length)
            with torch.inference_mode():
                yield _near(less.answer(text), wide.answer(text), dtype, _said(text, dtype))
        yield from _with_loud_embeddings(less, wide, _far(s, 0, 7), dtype)
        if isinstance(less, Ours) and _normed(less.spec):
            yield from _with_grown_maps(less, _far(s, 0, 7), dtype)


def _cast(s: Subject, dtype: torch.dtype) -> Subject:
    """A copy with the same weights in another dtype."""
    other = copy.copy(s)
    other.module = copy.deepcopy(s.module).to(dtype)
    return other


def _far(s: Subject, start: int, length: int) -> Text:
    """Two rows at the positions from `start` on, or as near to it as there are positions."""
    length = s.longest(length)
    begin = s.longest(start + length) - length
    return s.text(2, length, tokens=Tokens.arange(2, length, start=begin, device=s.device))


def _said(text: Text, dtype: torch.dtype) -> str:
    return f"{dtype}: ids {text.ids.tolist()} at the positions from {text.tokens.start} on"


def _near(got: Tensor, right: Tensor, dtype: torch.dtype, said: str) -> Trial:
    """How far off half of the tokens are, at least, in units of the dtype's rounding."""
    if not got.isfinite().all():
        return Trial(math.inf, f"{said}: not finite")
    right = right.double()
    length = right.square().sum(-1).mean().sqrt().clamp(min=1e-30)
    off = (got.double() - right).norm(dim=-1).median() / length
    return Trial(off.item() / torch.finfo(dtype).eps, f"{said}: far from what the same weights say in float64")


def _with_loud_embeddings(less: Subject, wide: Subject, text: Text, dtype: torch.dtype) -> Trials:
    said = f"{_said(text, dtype)}, embeddings × 1000"
    with _loud(less), _loud(wide), _peak(wide.module) as peak:
        right = wide.answer(text)
        if right.requires_grad:
            mean_square(right).backward()
        steepest = max((float(p.grad.abs().max()) for p in wide.module.parameters() if p.grad is not None), default=0.0)
        most = torch.finfo(dtype).max / 16
        if peak[0] > most:
            return
        answer = less.answer(text)
        if isinstance(less, Ours) and _normed(less.spec):
            yield _near(answer, right, dtype, said)
        else:
            yield holds(answer.isfinite().all(), f"{said}: not finite")
        if steepest < most:
            yield from finite_gradients(less, answer, said)


def _with_grown_maps(less: Ours, text: Text, dtype: torch.dtype) -> Trials:
    said = f"{_said(text, dtype)}, linear maps × {GROWN:.0f}"
    with torch.no_grad():
        for stack in filter(None, (less.model.encoder, less.model.decoder)):
            for module in stack.modules():
                if isinstance(module, nn.Linear):
                    module.weight.mul_(GROWN)
        answer = less.answer(text)
    yield holds(answer.isfinite().all(), f"{said}: not finite")


def _normed(spec: TransformerSpec) -> bool:
    """Whether each branch, and the head, reads what a norm has made small."""
    blocks = [block for stack in spec.stacks().values() for block in stack]
    each = all(block.norm is not None or branch.pre is not None for block in blocks for branch in block.branches)
    return each and spec.final_norm is not None


@contextlib.contextmanager
def _loud(s: Subject) -> Iterator[None]:
    """Embeddings × 1000."""
    hook = s.embedding().register_forward_hook(lambda module, given, out: out * 1000)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _peak(module: nn.Module) -> Iterator[list[float]]:
    """The largest number that any part of the module gives."""
    peak = [0.0]

    def look(part: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            peak[0] = max(peak[0], float(out.detach().abs().max()))

    hooks = [part.register_forward_hook(look) for part in module.modules()]
    try:
        yield peak
    finally:
        for hook in hooks:
            hook.remove()


LAWS: tuple[Law, ...] = (half,)
