"""Feed-forwards: dense (ReLU, GELU) and gated (SwiGLU, GEGLU, ReGLU)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.parts.op import FeedForward, OpModule, Result, Shared
from anyformer.parts.precision import saturate
from anyformer.spec import SpecError

__all__ = ["ACTIVATIONS", "Activation", "DenseFFN", "DenseFFNModule", "GatedFFN", "GatedFFNModule"]

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # x Φ(x), exact (BERT)
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2's "gelu_new"; up to 4.7e-4 away from exact
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
}


class DenseFFN(FeedForward, kind="dense_ffn"):
    """activation(x W_up + b) W_down + b (Vaswani et al. 2017, equation 2). Dropout acts on the hidden values."""

    hidden: PositiveInt
    activation: Activation = "relu"
    bias: bool = True
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        _check(self.dropout)

    def build(self, dim: int, shared: Shared) -> DenseFFNModule:
        return DenseFFNModule(self, dim)

    def cost(self, dim: int, length: int) -> Cost:
        up, down = (linear(*sizes, length, self.bias) for sizes in ((dim, self.hidden), (self.hidden, dim)))
        kept = 1 if self.activation == "relu" else 2
        return up.plus(down, Cost(activations=length * (dim + kept * self.hidden)))


class DenseFFNModule(OpModule):
    def __init__(self, spec: DenseFFN, dim: int) -> None:
        super().__init__()
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        self.up = nn.Linear(dim, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, dim, bias=spec.bias)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Float[Tensor, "*B D"], ctx: Context) -> Result:
        hidden = saturate(self.activation(self.up(x)))
        return saturate(self.down(self.dropout(hidden))), None


class GatedFFN(FeedForward, kind="gated_ffn"):
    """(activation(x W_gate) ⊙ x W_up) W_down (Shazeer 2020): SwiGLU with silu, GEGLU with gelu, ReGLU with relu."""

    hidden: PositiveInt
    activation: Activation = "silu"
    bias: bool = False
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        _check(self.dropout)

    def build(self, dim: int, shared: Shared) -> GatedFFNModule:
        return GatedFFNModule(self, dim)

    def cost(self, dim: int, length: int) -> Cost:
        sizes = ((dim, self.hidden), (dim, self.hidden), (self.hidden, dim))
        kept = Cost(activations=length * (dim + (3 if self.activation == "relu" else 4) * self.hidden))
        return kept.plus(*(linear(i, o, length, self.bias) for i, o in sizes))


class GatedFFNModule(OpModule):
    def __init__(self, spec: GatedFFN, dim: int) -> None:
        super().__init__()
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(dim, spec.hidden, bias=spec.bias)
        self.up = nn.Linear(dim, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, dim, bias=spec.bias)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Float[Tensor, "*B D"], ctx: Context) -> Result:
        hidden = saturate(self.activation(self.gate(x)) * self.up(x))
        return saturate(self.down(self.dropout(hidden))), None


def _check(dropout: float) -> None:
    if dropout >= 1:
        raise SpecError(f"`dropout` must be below 1, but is {dropout}")
