"""Kernels: ways to compute the same attention. All are held to `reference`."""

from __future__ import annotations

from anyformer.kernels.base import Kernel
from anyformer.kernels.blocked import Blocked
from anyformer.kernels.by_head import ByHead
from anyformer.kernels.flex import Flex
from anyformer.kernels.reference import Reference
from anyformer.kernels.sdpa import Sdpa

__all__ = ["KERNELS"]

KERNELS: list[Kernel] = [Blocked(), Sdpa(), Reference(), Flex()]
"""In order of preference: the first that accepts a request, and suits it, is taken."""
KERNELS.insert(0, ByHead(KERNELS))
