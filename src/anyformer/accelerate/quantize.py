"""Quantize: the weights of linear maps in 8 or 4 bits, for models that are read and not trained.

    af.quantize(model, "int8")          # in place; af.save and af.load keep it so

int8 has one gain for each row of a weight, int4 a gain and an offset for each 32 weights of a row; weights are rounded
to the nearest step, and no text is asked for to calibrate. Embeddings, norms and routers stay as they are; a tied head
gets a table of its own, which is int8 in both: the logits feel every error of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from anyformer.accelerate.operators import GROUP, operators
from anyformer.model import Transformer
from anyformer.parts.head import LMHeadModule, MaskedLMHeadModule

__all__ = ["Bits", "QuantizedHead", "QuantizedLinear", "quantize", "quantized"]

Bits = Literal["int8", "int4"]


def quantize(model: Transformer, bits: Bits) -> Transformer:
    """Replace every linear map and the head over the vocabulary, in place; gives the model back.

    Raises ValueError for other bits, for a model that is quantized already, and if there is nothing to replace.
    """
    if bits not in get_args(Bits):
        raise ValueError(f"a model is quantized to int8 or int4, but {bits!r} is asked for")
    known = quantized(model)
    if known is not None:
        raise ValueError(f"the model is quantized to {known} already: load it anew")
    found = list(_linears(model))
    if not found:
        raise ValueError("the model has no linear map to quantize")
    for parent, name, module in found:
        new = QuantizedHead(module, bits) if isinstance(module, LMHeadModule) else QuantizedLinear(module, bits)
        setattr(parent, name, new.train(module.training))
    return model


def quantized(model: nn.Module) -> Bits | None:
    """To what the model is quantized; None if it is not."""
    return next((m.bits for m in model.modules() if isinstance(m, QuantizedLinear | QuantizedHead)), None)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | LMHeadModule]]:
    """Each module to replace, with its parent and its name there. A router is small, and its choices are delicate;
    a head that is more than a table keeps it."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            kept = name == "router" or isinstance(module, MaskedLMHeadModule)
            if isinstance(module, nn.Linear | LMHeadModule) and not kept:
                yield parent, name, module


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with W in few bits."""

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.bits, self.bias = bits, linear.bias
        self.weight, self.gain = _fixed(*(round_int8 if bits == "int8" else round_int4)(linear.weight.detach()))

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        _check_gradients(x)
        operator = operators.linear_int8 if self.bits == "int8" else operators.linear_int4
        y: Tensor = operator(x, self.weight, self.gain, self.bias)
        return y


class QuantizedHead(LMHeadModule):
    """Logits from a table in few bits."""

    def __init__(self, head: LMHeadModule, bits: Bits) -> None:
        nn.Module.__init__(self)
        self.bits, self.bias, self.scale, self.softcap = bits, head.bias, head.scale, head.softcap
        self.weight, self.gain = _fixed(*round_int8(head.weight.detach()))

    def project(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        _check_gradients(x)
        y: Tensor = operators.linear_int8(x, self.weight, self.gain, self.bias)
        return y


def _check_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("weights of few bits pass no gradients on: call the model under torch.inference_mode()")


def _fixed(integers: Tensor, gain: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(integers, requires_grad=False), nn.Parameter(gain, requires_grad=False)


def round_int8(weight: Float[Tensor, "N K"]) -> tuple[Int8[Tensor, "N K"], Float[Tensor, "N"]]:
    """weight ≈ integers · gain, from -127 to 127."""
    gain = weight.float().abs().amax(1) / 127
    return _steps(weight.float(), gain[:, None]).to(torch.int8), gain


def round_int4(weight: Float[Tensor, "N K"]) -> tuple[UInt8[Tensor, "N half"], Float[Tensor, "N groups 2"]]:
    """weight ≈ integers · gain + least, from 0 to 15, with (gain, least) for each group; as GGUF's Q4_1.

    A row is filled up to a multiple of 64. A byte holds one number of the first half of its row in its lower four bits,
    and one of the second half in its upper four.
    """
    groups = nn.functional.pad(weight.float(), (0, -weight.shape[1] % (2 * GROUP))).unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    gain = (most - least) / 15
    low, high = _steps(groups - least, gain).to(torch.uint8).flatten(1).chunk(2, 1)
    return low | high << 4, torch.cat((gain, least), 2)


def _steps(weight: Tensor, gain: Tensor) -> Tensor:
    return (weight / gain.masked_fill(gain == 0, 1.0)).round()
