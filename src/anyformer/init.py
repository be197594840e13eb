"""Init: every weight initialisation, a documented function a scheme.

Biases and T5's tables start at 0, norms at 1, in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from anyformer.block import BranchModule, Stack
from anyformer.parts.head import LMHeadModule
from anyformer.parts.position import LearnedModule, RelativeBiasModule

__all__ = ["fan_in_init", "gpt2_init"]


@torch.no_grad()
def gpt2_init(model: nn.Module, std: float = 0.02) -> None:
    """GPT-2 (Radford et al. 2019, section 2.3): normal with `std` everywhere; projections back into the residual
    stream are divided by √(branches of the stack), so that the stream does not grow with depth."""
    _linears(model, lambda width: std)
    _tables(model, lambda width: std)


@torch.no_grad()
def fan_in_init(model: nn.Module) -> None:
    """Normal with std 1 / √width, of the input of a map or of a table's vectors, so that small and large models start
    alike; an untied head with 1 / width, so that its first guess is even. Projections back into the residual stream are
    divided as GPT-2's."""
    _linears(model, lambda width: width**-0.5)
    _tables(model, lambda width: width**-0.5)
    for head in model.modules():
        if isinstance(head, LMHeadModule) and all(head.weight is not table.weight for table in _embeddings(model)):
            head.weight.normal_(0.0, 1 / head.weight.shape[-1])


def _linears(model: nn.Module, std: Callable[[int], float]) -> None:
    shrink = _into_residual(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, std(module.in_features) / shrink.get(module, 1.0))
            if module.bias is not None:
                module.bias.zero_()


def _tables(model: nn.Module, std: Callable[[int], float]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding | LMHeadModule):
            module.weight.normal_(0.0, std(module.weight.shape[-1]))
        elif isinstance(module, LearnedModule):
            module.table.normal_(0.0, std(module.table.shape[-1]))
        elif isinstance(module, RelativeBiasModule):
            module.table.zero_()


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _into_residual(model: nn.Module) -> dict[nn.Module, float]:
    """The linear maps whose output is added to a residual stream (`out` of mixers, `down` of feed-forwards), and √ of
    the number of branches that add to the same stream."""
    found: dict[nn.Module, float] = {}
    for stack in model.modules():
        if isinstance(stack, Stack):
            branches = sum(isinstance(module, BranchModule) for module in stack.modules())
            maps = [module for name, module in stack.named_modules() if name.rsplit(".", 1)[-1] in ("out", "down")]
            found |= {module: math.sqrt(branches) for module in maps if isinstance(module, nn.Linear)}
    return found
