"""Embeddings: from token ids to the vectors that enter the first block."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor, nn

from anyformer.cost import Cost
from anyformer.parts.legal import refuse
from anyformer.parts.norm import Norm
from anyformer.parts.position import Position, PositionModule
from anyformer.spec import Spec, SpecError
from anyformer.tokens import Tokens

__all__ = ["Embed", "EmbedModule", "table"]


class Embed(Spec):
    """Token embedding × `scale`, plus token types, plus a position at the input; then a norm (BERT) and dropout.

    `tied`: the output head uses the same table. An encoder and a decoder share the table of tokens; all the rest is
    each one's own.
    """

    tied: bool = True
    scale: float | Literal["sqrt_dim"] = 1.0
    position: Position | None = None
    token_types: NonNegativeInt = 0
    norm: Norm | None = None
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        refuse("embed", self)
        if self.dropout >= 1:
            raise SpecError(f"`dropout` must be below 1, but is {self.dropout}")

    def build(self, dim: int) -> EmbedModule:
        return EmbedModule(self, dim)

    def cost(self, dim: int, length: int) -> Cost:
        types = Cost(params=self.token_types * dim, active=dim if self.token_types else 0)
        position = self.position.cost(dim, 1) if self.position else Cost()
        return types.plus(position, self.norm.cost(dim, length) if self.norm else Cost())


class EmbedModule(nn.Module):
    """What happens to looked-up vectors before the first block; the table itself belongs to the model."""

    def __init__(self, spec: Embed, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5 if spec.scale == "sqrt_dim" else float(spec.scale)
        self.types = table(spec.token_types, dim) if spec.token_types else None
        self.position = spec.position.build(dim) if spec.position else PositionModule(Position())
        self.norm = spec.norm.build(dim) if spec.norm else nn.Identity()
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], tokens: Tokens, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        if self.scale != 1.0:
            x = x * self.scale
        if self.types is not None:
            x = x + self.types(torch.zeros_like(tokens.pos) if types is None else types)
        elif types is not None:
            raise ValueError("token types were given, but this model's `embed.token_types` is 0")
        return self.dropout(self.norm(self.position.at_input(x, tokens)))


def table(rows: int, dim: int) -> nn.Embedding:
    """A table of vectors, not filled: torch's own constructor would draw numbers, which a load then throws away."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)
