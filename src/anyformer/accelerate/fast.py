"""Fast: parts that decode at the speed of the memory, put in place of the built ones.

    af.accelerate(model)        # the same numbers within rounding; training goes the old way

One table says which class takes whose place; weights keep their names. What is compiled is loaded at the first step of
decoding, so that a prompt need not wait for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.accelerate import operators as op
from anyformer.accelerate.fused import FastGatedFFN, FusedBlock, fuses, gather
from anyformer.accelerate.operators import FEW, has_numba, operators
from anyformer.block import BlockModule
from anyformer.context import Context
from anyformer.kernels import KERNELS
from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.sdpa import maskless
from anyformer.model import Transformer
from anyformer.parts.attention import AttentionModule
from anyformer.parts.ffn import GatedFFNModule
from anyformer.parts.head import LMHeadModule
from anyformer.parts.norm import RMSNormModule
from anyformer.parts.position import Rotary, RotaryModule
from anyformer.tokens import Tokens

__all__ = ["FAST", "STEP", "accelerate"]


def accelerate(model: Transformer) -> Transformer:
    """Make decoding on a CPU fast, in place; gives the model back. Without Numba nothing changes but for a warning."""
    if not has_numba():
        warnings.warn(
            "numba is not installed, so decoding runs in plain torch: pip install anyformer[fast]", stacklevel=2
        )
        return model
    for module in model.modules():
        module.__class__ = FAST.get(type(module), type(module))
        if isinstance(module, AttentionModule):
            module.kernels = (STEP, *KERNELS)
        if type(module) is BlockModule and fuses(module):
            module.__class__ = FusedBlock
    return model


def _few(x: Tensor) -> bool:
    """Whether these are few rows that need no gradient, and the loops are there."""
    return op.ready.loaded and not torch.is_grad_enabled() and x.numel() <= FEW * x.shape[-1]


class FastLinear(nn.Linear):
    """A linear map of few rows reads its weights once, at the memory's speed."""

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        return operators.linear(x, self.weight, self.bias) if _few(x) else super().forward(x)


class FastLMHead(LMHeadModule):
    """The same for the logits."""

    def project(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        if not _few(x):
            return super().project(x)
        gather(self)
        return operators.linear(x, self.weight, self.bias)


class FastRMSNorm(RMSNormModule):
    """A norm in one pass over its rows, however many."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        if torch.is_grad_enabled() or not op.ready.loaded:
            return super().forward(x)
        return operators.rms_norm(x, self.gain(), self.spec.eps)


class FastRotary(RotaryModule):
    """Heads turned in one pass."""

    def at_heads(self, x: Float[Tensor, "B T H K"], tokens: Tokens, ctx: Context) -> Float[Tensor, "B T H K"]:
        if torch.is_grad_enabled() or not op.ready.loaded:
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
    GatedFFNModule: FastGatedFFN,
    RotaryModule: FastRotary,
}
