"""Kernels: ways to compute the same attention. All are held to `reference`."""

from __future__ import annotations

from anyformer.kernels.base import Kernel
from anyformer.kernels.reference import Reference
from anyformer.kernels.sdpa import Sdpa

__all__ = ["KERNELS"]

KERNELS: list[Kernel] = [Sdpa(), Reference()]
"""In order of preference: the first that accepts a request is taken."""
