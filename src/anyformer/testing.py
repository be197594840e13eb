"""Testing: the laws as one assertion, for other people's test suites."""

from __future__ import annotations

from collections.abc import Sequence

from anyformer.check.report import Report
from anyformer.check.run import check
from anyformer.check.subject import Subject
from anyformer.model import Transformer

__all__ = ["assert_lawful"]


def assert_lawful(model: Transformer | Subject, *, only: Sequence[str] = (), seed: int = 0) -> Report:
    """Hold a model to the laws, all or those named in `only`. AssertionError names each that is broken, the error, and
    the smallest input that breaks it; the report of what was found otherwise."""
    report = check(model, only=only, seed=seed)
    if not report.lawful:
        raise AssertionError(str(report))
    return report
