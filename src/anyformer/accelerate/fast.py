"""Fast: parts that decode at the speed of the memory, put in place of the built ones.

    af.accelerate(model)        # the same numbers within rounding; prompts and training go the old way

For one table says which class takes whose place: the weights stay where they are, under their names.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.accelerate.fused import FusedBlock, fuses
from anyformer.accelerate.operators import FEW, has_numba, operators
from anyformer.block import BlockModule
from anyformer.context import Context
from anyformer.kernels import KERNELS
from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.sdpa import maskless
from anyformer.model import Transformer
from anyformer.parts.attention import AttentionModule
from anyformer.parts.head import LMHeadModule
from anyformer.parts.norm import RMSNormModule
from anyformer.parts.position import Rotary, RotaryModule
from anyformer.tokens import Tokens

__all__ = ["FAST", "STEP", "accelerate"]

_LINE = 64  # bytes of a line of the processor's cache


def accelerate(model: Transformer) -> Transformer:
    """Make decoding on a CPU fast, in place; gives the model back. Without Numba nothing changes but for a warning."""
    if not has_numba():
        warnings.warn(
            "numba is not installed, so decoding runs in plain torch: pip install anyformer[fast]", stacklevel=2
        )
        return model
    for part in (*model.modules(),) if model.device.type == "cpu" else ():
        if isinstance(part, BlockModule | LMHeadModule):
            _gather(part)
    for module in model.modules():
        module.__class__ = FAST.get(type(module), type(module))
        if isinstance(module, AttentionModule):
            module.kernels = (STEP, *KERNELS)
        if type(module) is BlockModule and fuses(module):
            module.__class__ = FusedBlock
    return model


def _gather(module: nn.Module) -> None:
    """Move the weights of a part into one piece of memory, which the system may then map in large pages: a read of 2 MB
    needs one look into the page table, not 512. Numpy asks for such pages, torch does not."""
    weights = list(module.parameters())
    places = list(itertools.accumulate((-(-weight.nbytes // _LINE) * _LINE for weight in weights), initial=0))
    memory = np.empty(places.pop(), np.uint8)
    for weight, place in zip(weights, places, strict=True):
        home = torch.from_numpy(memory[place : place + weight.nbytes])  # a storage of its own, so that it pickles alone
        weight.data = home.view(weight.dtype).view(weight.shape).copy_(weight.data)


def _few(x: Tensor) -> bool:
    """Whether this is a step of decoding: a few tokens, and no gradient."""
    return not torch.is_grad_enabled() and x.numel() <= FEW * x.shape[-1]


class FastLinear(nn.Linear):
    """A linear map of few rows reads its weights once, at the memory's speed."""

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        return operators.linear(x, self.weight, self.bias) if _few(x) else super().forward(x)


class FastLMHead(LMHeadModule):
    """The same for the logits."""

    def project(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        return operators.linear(x, self.weight, self.bias) if _few(x) else super().project(x)


class FastRMSNorm(RMSNormModule):
    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return operators.rms_norm(x, self.gain(), self.spec.eps) if _few(x) else super().forward(x)


class FastRotary(RotaryModule):
    def at_heads(self, x: Float[Tensor, "B T H K"], tokens: Tokens, ctx: Context) -> Float[Tensor, "B T H K"]:
        if x.shape[1] != 1 or torch.is_grad_enabled():
            return super().at_heads(x, tokens, ctx)
        spec = self.spec
        assert isinstance(spec, Rotary)
        return operators.rotate(x, *self.phases(x, tokens, ctx), spec.layout)


class Step(Kernel):
    """One new token a row, which reads each key and value once."""

    name = "step"

    def rejects(self, request: Request) -> str | None:
        if request.q.shape[1] != 1:
            return f"it takes one query a row, but here are {request.q.shape[1]}"
        if request.q.device.type != "cpu" or request.q.dtype != torch.float32:
            return f"it computes in float32 on a CPU, but here is {request.q.dtype} on {request.q.device.type}"
        if request.softcap is not None or request.biased or request.dropout:
            return "it neither caps scores, nor adds to them, nor drops any"
        if torch.is_grad_enabled():
            return "it has no gradient: call it under torch.inference_mode()"
        return None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        seen = None if maskless(request) else request.mask()[:, 0]
        return operators.attend(request.q[:, 0], request.k, request.v, seen, request.scale)[:, None]


STEP = Step()

FAST: dict[type[nn.Module], Any] = {
    nn.Linear: FastLinear,
    LMHeadModule: FastLMHead,
    RMSNormModule: FastRMSNorm,
    RotaryModule: FastRotary,
}
