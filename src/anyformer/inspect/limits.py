"""What this machine can do, measured, so that a speed can be printed beside its limit."""

from __future__ import annotations

import time

import torch

__all__ = ["matmul_rate"]


def matmul_rate(size: int = 1024, device: torch.device | str = "cpu") -> float:
    """Multiply-adds × 2 a second of a float32 matrix product, the best of ten (about 0.2 s on a CPU)."""
    a, b = torch.randn(2, size, size, device=device)
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
