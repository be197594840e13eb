"""Norms: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn

from anyformer.cost import Cost
from anyformer.parts.precision import at_least_float32
from anyformer.spec import Part

__all__ = ["LayerNorm", "LayerNormModule", "Norm", "RMSNorm", "RMSNormModule"]


class Norm(Part):
    """Base of all norms: they work on the last axis, of any width."""

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError

    def cost(self, dim: int, length: int) -> Cost:
        """One gain a channel; the input is kept for the backward pass."""
        return Cost(params=dim, active=dim, activations=dim * length)


class LayerNorm(Norm, kind="layer_norm"):
    """(x - mean) / sqrt(variance + eps) · gain + shift; the shift only with `bias`."""

    eps: PositiveFloat = 1e-5
    bias: bool = True

    def build(self, dim: int) -> LayerNormModule:
        return LayerNormModule(self, dim)

    def cost(self, dim: int, length: int) -> Cost:
        params = dim * (1 + self.bias)
        return Cost(params=params, active=params, activations=dim * length)


class LayerNormModule(nn.Module):
    def __init__(self, spec: LayerNorm, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.spec.eps)


class RMSNorm(Norm, kind="rms_norm"):
    """x / sqrt(mean(x²) + eps) · (offset + weight), in float32 at least. Gemma's `offset` is 1, all others' 0."""

    eps: PositiveFloat = 1e-6
    offset: float = 0.0

    def build(self, dim: int) -> RMSNormModule:
        return RMSNormModule(self, dim)


class RMSNormModule(nn.Module):
    def __init__(self, spec: RMSNorm, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - spec.offset))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        wide, gain = at_least_float32(x), self.gain()
        return F.rms_norm(wide, gain.shape, gain.to(wide.dtype), self.spec.eps).to(x.dtype)

    def gain(self) -> Float[Tensor, "D"]:
        """offset + weight"""
        return self.weight + self.spec.offset if self.spec.offset else self.weight
