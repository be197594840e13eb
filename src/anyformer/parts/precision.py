"""Precision: the one place that knows what half precision needs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_least_float32", "saturate"]


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def saturate(x: Tensor) -> Tensor:
    """float16 stops at its largest number, 65504, instead of running over to infinity, which the next norm would turn
    into NaN. Other types pass untouched."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest)
