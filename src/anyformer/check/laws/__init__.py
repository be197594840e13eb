"""Laws, in the order in which they are reported. A new one is a generator in a file here, and its name in LAWS."""

from __future__ import annotations

from anyformer.check.law import Law
from anyformer.check.laws import attention, cached, compiled, distance, patterns, precision, seen, training, whole

__all__ = ["LAWS"]

LAWS: tuple[Law, ...] = (
    *seen.LAWS,
    *cached.LAWS,
    *patterns.LAWS,
    *attention.LAWS,
    *distance.LAWS,
    *training.LAWS,
    *whole.LAWS,
    *precision.LAWS,
    *compiled.LAWS,
)
