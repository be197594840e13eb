"""Optimiser and learning rate."""

from __future__ import annotations

import math

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import nn

from anyformer.parts.embed import LMHeadModule
from anyformer.spec import Spec, SpecError

__all__ = ["AdamW", "learning_rate"]


class AdamW(Spec):
    """AdamW (Loshchilov & Hutter 2019) with a linear warm-up and a cosine decay.

    `warmup` is the share of the run that warms up, `floor` the share of `lr` that is left at the end. Gradients are
    clipped to the norm `clip`. Matrices decay by `weight_decay`, an untied head among them; gains, biases and tables of
    vectors do not.
    """

    lr: PositiveFloat = 5e-3
    warmup: NonNegativeFloat = 0.03
    floor: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.1
    beta1: NonNegativeFloat = 0.9
    beta2: NonNegativeFloat = 0.95
    eps: PositiveFloat = 1e-8
    clip: PositiveFloat = 1.0

    def check(self) -> None:
        for name in ("warmup", "floor", "beta1", "beta2"):
            if getattr(self, name) >= 1 and not (name == "floor" and self.floor == 1):
                raise SpecError(f"`{name}` must be below 1, but is {getattr(self, name)}")

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear | LMHeadModule)]
        decayed = [weight for weight in matrices if id(weight) not in tables]
        numbers = {id(parameter) for parameter in decayed}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in numbers]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


def learning_rate(spec: AdamW, progress: float) -> float:
    """The rate when a share `progress` (0 to 1) of the run is done."""
    if progress < spec.warmup:
        return spec.lr * max(progress / spec.warmup, 1e-3)
    along = min((progress - spec.warmup) / (1 - spec.warmup), 1.0)
    return spec.lr * (spec.floor + (1 - spec.floor) * (1 + math.cos(math.pi * along)) / 2)
