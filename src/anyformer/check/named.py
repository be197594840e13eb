"""Named: a part of the user's own, found by name, and the place in the table where it belongs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NamedTuple

from torch import Tensor

from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.by_head import ByHead
from anyformer.kernels.reference import Reference
from anyformer.parts.frequencies import Frequencies
from anyformer.parts.head import Head
from anyformer.parts.linear_attention import FeatureMap, LinearAttention
from anyformer.parts.norm import Norm
from anyformer.parts.op import FeedForward, Mixer
from anyformer.parts.pattern import Pattern
from anyformer.parts.position import Position, Rotary
from anyformer.spec import Part, SpecError

__all__ = ["Named", "named"]

PLACES: dict[type[Part], str] = {
    Mixer: "mixer",
    Pattern: "pattern",
    Position: "position",
    FeedForward: "feed_forward",
    Norm: "norm",
    Head: "head",
}
"""Which axis of the table a part stands on."""


class Named(NamedTuple):
    """The part and its axis, or a kernel."""

    name: str
    axis: str = ""
    part: Part | None = None
    kernel: Kernel | None = None


class WhereItCan(Kernel):
    """The user's kernel for all that it accepts, the textbook for the rest."""

    heads_may_differ = True

    def __init__(self, own: Kernel) -> None:
        self.own, self.name, self.rest = own, own.name, Reference()
        self.heads = ByHead([own, self.rest])

    def rejects(self, request: Request) -> str | None:
        return None

    def __call__(self, request: Request) -> Tensor:
        if not (request.pattern.heads_alike or self.own.heads_may_differ):
            return self.heads(request)
        return (self.rest if self.own.rejects(request) else self.own)(request)


def named(target: str) -> Named:
    """The part that "package.module:Name" names, in the current folder too. ValueError if it is none."""
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{target} cannot be found: {type(error).__name__}: {error}") from error
    if not isinstance(found, Part | Kernel):
        found = _made(target, found)
    if isinstance(found, Kernel):
        return Named(name, kernel=WhereItCan(found))
    if isinstance(found, Frequencies):
        found = Rotary(frequencies=found)
    if isinstance(found, FeatureMap):
        found = LinearAttention(features=found)
    for slot, axis in PLACES.items():
        if isinstance(found, slot):
            return Named(name, axis, found)
    slots = ", ".join(slot.__name__ for slot in PLACES)
    raise ValueError(f"{target} is {found!r}, which stands in no slot of the table: {slots}, Kernel")


def _made(target: str, make: Any) -> Any:
    """What a class or a function gives."""
    if not callable(make):
        raise ValueError(f"{target} must be a part, or something to call for one, but is {make!r}")
    try:
        return make()
    except (TypeError, SpecError) as error:
        raise ValueError(
            f"{target} cannot be made without arguments ({error}): name an object, or a function"
        ) from None
