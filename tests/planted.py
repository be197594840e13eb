"""Faults planted into a model or into this library, to see whether the law that names them finds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from anyformer import TransformerSpec
from anyformer.check.ours import Ours
from anyformer.check.run import check

Plant = Callable[[Ours], AbstractContextManager[object]]
"""Given the subject before it is judged: changes it, or patches what it uses for as long as the context lasts."""


class Fault(NamedTuple):
    """`law` must break for models of `spec` while `plant` lasts, and hold without it."""

    law: str
    spec: Callable[[], TransformerSpec]
    plant: Plant

    def judged(self, *, planted: bool) -> str:
        """The verdict of the law, and what it said."""
        subject = Ours(self.spec().build())
        with self.plant(subject) if planted else nullcontext():
            found = check(subject, only=[self.law])[self.law]
        return f"{found.verdict}: {found.figure()} {found.smallest} {found.why}"

    def assert_found(self) -> None:
        assert self.judged(planted=False).startswith("pass")
        assert self.judged(planted=True).startswith("fail")
