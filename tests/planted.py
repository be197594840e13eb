"""Faults planted into a model or into this library, to see whether the law that names them finds them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, nn

from anyformer import TransformerSpec
from anyformer.check.ours import Ours
from anyformer.check.run import check
from anyformer.check.subject import Subject, Text

Plant = Callable[[Ours], AbstractContextManager[object]]
"""Given the subject before it is judged: changes it, or patches what it uses for as long as the context lasts."""


class Fault(NamedTuple):
    """`law` must break for models of `spec` while `plant` lasts, and hold without it."""

    law: str
    spec: Callable[[], TransformerSpec]
    plant: Plant

    def judged(self, *, planted: bool) -> str:
        """The verdict of the law, and what it said."""
        return _judged(self.law, self.spec(), self.plant if planted else None)

    def assert_found(self) -> None:
        assert _unplanted(self.law, self.spec()).startswith("pass")
        assert self.judged(planted=True).startswith("fail")


def _judged(law: str, spec: TransformerSpec, plant: Plant | None) -> str:
    subject = Ours(spec.build())
    with nullcontext() if plant is None else plant(subject):
        found = check(subject, only=[law])[law]
    return f"{found.verdict}: {found.figure()} {found.smallest} {found.why}"


@functools.cache
def _unplanted(law: str, spec: TransformerSpec) -> str:
    """Without a fault, once for all faults of a law in models of one kind."""
    return _judged(law, spec, None)


def patched(target: Any, name: str, new: Any) -> Plant:
    """`new` in the place of what is there."""
    return lambda subject: mock.patch.object(target, name, new)


def wrapped(target: Any, name: str, change: Callable[..., Any]) -> Plant:
    """`change(old, ...)` in the place of `old(...)`."""
    old = getattr(target, name)
    return patched(target, name, lambda *given, **more: change(old, *given, **more))


class Foreign(Subject):
    """A model of which only answers are known."""

    def __init__(self, module: nn.Module, vocab_size: int) -> None:
        super().__init__(module)
        self.vocab_size = vocab_size

    def answer(self, text: Text) -> Tensor:
        logits: Tensor = self.module(text.ids, text.tokens)
        return logits
