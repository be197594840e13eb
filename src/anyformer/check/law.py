"""Law: a promise of a Transformer. What it means, how it is measured, and how large an error is still rounding.

A law is a generator. It tries inputs, the smallest first, and yields how far off each answer was: the worst is the
law's figure, and the first that is too far off is the smallest input that breaks it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.check.subject import NotApplicable, Subject

__all__ = ["ALLOWED", "INTEGERS", "Law", "NotApplicable", "Trial", "Trials", "apart", "holds", "law", "needs"]

ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: 2.0**20,
    torch.float32: 2.0**12,
    torch.float16: 2.0**7,
    torch.bfloat16: 2.0**5,
}
"""How far two ways to compute the same may be apart, in units of the dtype (`apart`): far above what rounding does in a
deep model, far below what a fault does."""


class Trial(NamedTuple):
    """One input: how far off the answer was, in the law's unit, and what was asked, for a person to try again."""

    error: float
    said: str


Trials = Iterator[Trial]


@dataclasses.dataclass(frozen=True)
class Law:
    """`anew`: judged on a copy whose weights are drawn anew, so that every part matters, in float64 and in the model's
    own dtype; else on the model as it is. `once`: too slow to be repeated for each of many combinations.
    """

    name: str
    title: str
    means: str
    measured: str
    run: Callable[[Subject], Trials]
    unit: str = "eps"
    limits: Mapping[torch.dtype, float] | float = dataclasses.field(default_factory=lambda: ALLOWED)
    anew: bool = True
    once: bool = False

    def limit(self, dtype: torch.dtype) -> float:
        """The largest error that is no fault."""
        return self.limits if isinstance(self.limits, int | float) else self.limits[dtype]


def law(
    name: str,
    title: str,
    *,
    unit: str = "eps",
    limits: Mapping[torch.dtype, float] | float = ALLOWED,
    anew: bool = True,
    once: bool = False,
) -> Callable[[Callable[[Subject], Trials]], Law]:
    """Make a generator a law: its docstring says what it means and, in a second paragraph, how that is measured."""

    def made(run: Callable[[Subject], Trials]) -> Law:
        means, _, measured = (inspect.getdoc(run) or "").partition("\n\n")
        return Law(name, title, _line(means), _line(measured), run, unit, limits, anew, once)

    return made


def _line(text: str) -> str:
    return " ".join(text.split())


INTEGERS = "its weights are integers"


def needs(condition: object, why: str) -> None:
    """Leave the law, with the reason, unless the condition holds."""
    if not condition:
        raise NotApplicable(why)


def apart(a: Tensor, b: Tensor, said: str, dtype: torch.dtype | None = None) -> Trial:
    """The largest difference, in units of `dtype` (a's): its epsilon times the largest value, which counts as 1 at
    least. A value that is not finite in one of them only is infinitely far off."""
    if a.shape != b.shape:
        return Trial(math.inf, f"{said}: the shapes are {tuple(a.shape)} and {tuple(b.shape)}")
    if not a.numel():
        return Trial(0.0, said)
    unit = torch.finfo(dtype or a.dtype).eps
    a, b = a.detach().double(), b.detach().double()
    off = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    scale = b[b.isfinite()].abs().amax().clamp(min=1.0) if bool(b.isfinite().any()) else torch.ones(())
    return Trial(float(off.amax() / (scale * unit)), said)


def holds(true: object, said: str) -> Trial:
    """No error, or an endless one."""
    return Trial(0.0 if true else math.inf, said)
