"""Optimisers, and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from anyformer.parts.head import LMHeadModule
from anyformer.spec import Part, SpecError

__all__ = ["AdamW", "Muon", "Optimizer", "Together", "learning_rate"]


class Optimizer(Part):
    """Base of all optimisers: what they have in common. Linear warm-up, then a cosine decay.

    `warmup` is the share of the run that warms up, `floor` the share of `lr` that is left at the end. Gradients are
    clipped to the norm `clip`. Matrices decay by `weight_decay`; gains, biases and tables of vectors do not.
    """

    lr: PositiveFloat
    warmup: NonNegativeFloat = 0.03
    floor: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.1
    clip: PositiveFloat = 1.0

    def check(self) -> None:
        for name in ("warmup", "floor", "beta1", "beta2", "momentum"):
            if getattr(self, name, 0) >= 1 and not (name == "floor" and self.floor == 1):
                raise SpecError(f"`{name}` must be below 1, but is {getattr(self, name)}")

    def build(self, model: nn.Module) -> Any:
        """A torch optimiser. `share` of a group of its parameters is their part of the learning rate."""
        raise NotImplementedError


class AdamW(Optimizer, kind="adamw"):
    """AdamW (Loshchilov & Hutter 2019). An untied head decays as well."""

    lr: PositiveFloat = 5e-3
    beta1: NonNegativeFloat = 0.9
    beta2: NonNegativeFloat = 0.95
    eps: PositiveFloat = 1e-8

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        heads = [module.weight for module in model.modules() if isinstance(module, LMHeadModule)]
        decayed = [weight for weight in _matrices(model) + heads if id(weight) not in _tables(model)]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": _but(model, decayed), "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


class Muon(Optimizer, kind="muon"):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, each step a rotation; AdamW for all else, at `lr`.

    `matrix_lr` is the rate of the matrices, for a square one: a tall one's is larger by √(rows / columns). It pays with
    more tokens a step than AdamW needs, since a step costs about a fifth more for small models.
    """

    lr: PositiveFloat = 1e-2
    matrix_lr: PositiveFloat = 2e-2
    momentum: NonNegativeFloat = 0.95

    def build(self, model: nn.Module) -> Together:
        matrices = [weight for weight in _matrices(model) if id(weight) not in _tables(model)]
        decay = self.weight_decay
        turned = torch.optim.Muon(
            [{"params": matrices, "share": self.matrix_lr / self.lr}], momentum=self.momentum, weight_decay=decay
        )
        rest = torch.optim.AdamW(_but(model, matrices), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        return Together(turned, rest)


class Together:
    """Optimisers of different parameters, stepped as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(i)])


def learning_rate(spec: Optimizer, progress: float) -> float:
    """The rate when a share `progress` (0 to 1) of the run is done."""
    if progress < spec.warmup:
        return spec.lr * max(progress / spec.warmup, 1e-3)
    along = min((progress - spec.warmup) / (1 - spec.warmup), 1.0)
    return spec.lr * (spec.floor + (1 - spec.floor) * (1 + math.cos(math.pi * along)) / 2)


def _matrices(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def _tables(model: nn.Module) -> set[int]:
    """Which tensors are tables of vectors: a tied head's weight among them."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _but(model: nn.Module, some: list[Tensor]) -> list[nn.Parameter]:
    numbers = {id(parameter) for parameter in some}
    return [parameter for parameter in model.parameters() if id(parameter) not in numbers]
