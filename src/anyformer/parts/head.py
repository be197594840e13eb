"""Heads: from the last hidden states to an answer. Logits over the vocabulary, a label a text, a label a token."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from anyformer.cost import Cost, linear
from anyformer.parts.ffn import ACTIVATIONS, Activation
from anyformer.parts.norm import LayerNorm, Norm
from anyformer.spec import Part, SpecError
from anyformer.tokens import Tokens

__all__ = [
    "Head",
    "HeadModule",
    "LMHead",
    "LMHeadModule",
    "MaskedLMHead",
    "MaskedLMHeadModule",
    "PooledHead",
    "PooledHeadModule",
    "TokenHead",
    "TokenHeadModule",
]


class Head(Part):
    """Base of all heads."""

    ties: ClassVar[bool] = False
    """Whether it has a table (V, D), which may be the embedding's."""
    pools: ClassVar[bool] = False
    """Whether it gives one answer a text, out of its first token."""

    def build(self, dim: int, vocab_size: int) -> HeadModule:
        raise NotImplementedError

    def cost(self, dim: int, vocab_size: int, length: int) -> Cost:
        raise NotImplementedError


class HeadModule(nn.Module):
    """Base of the modules; this one hands the hidden states on."""

    def forward(self, x: Float[Tensor, "*B D"], tokens: Tokens | None = None) -> Tensor:
        """`tokens` says where x sits; only heads that pick a token need it."""
        return x


class LMHead(Head, kind="lm"):
    """Logits over the vocabulary: x Wᵀ · scale + b, then soft-capped (Gemma 2) if `softcap` is given."""

    ties = True
    bias: bool = False
    scale: float = 1.0
    softcap: PositiveFloat | None = None

    def build(self, dim: int, vocab_size: int) -> HeadModule:
        return LMHeadModule(self, dim, vocab_size)

    def cost(self, dim: int, vocab_size: int, length: int) -> Cost:
        kept = Cost(activations=length * (dim + vocab_size * (2 if self.softcap else 1)))
        return kept.plus(linear(dim, vocab_size, length, self.bias))


class LMHeadModule(HeadModule):
    def __init__(self, spec: LMHead, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.scale, self.softcap = spec.scale, spec.softcap
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*B D"], tokens: Tokens | None = None) -> Float[Tensor, "*B V"]:
        x = x * self.scale if self.scale != 1.0 else x
        logits = self.project(x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def project(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """x Wᵀ + b"""
        return nn.functional.linear(x, self.weight, self.bias)


class MaskedLMHead(LMHead, kind="masked_lm"):
    """BERT's (Devlin et al. 2019): logits of norm(activation(x W + b))."""

    bias: bool = True
    activation: Activation = "gelu"
    norm: Norm = LayerNorm(eps=1e-12)

    def build(self, dim: int, vocab_size: int) -> HeadModule:
        return MaskedLMHeadModule(self, dim, vocab_size)

    def cost(self, dim: int, vocab_size: int, length: int) -> Cost:
        kept = Cost(activations=2 * length * dim)
        logits = super().cost(dim, vocab_size, length)
        return logits.plus(kept, linear(dim, dim, length, bias=True), self.norm.cost(dim, length))


class MaskedLMHeadModule(LMHeadModule):
    def __init__(self, spec: MaskedLMHead, dim: int, vocab_size: int) -> None:
        super().__init__(spec, dim, vocab_size)
        self.activation = ACTIVATIONS[spec.activation]
        self.dense = nn.Linear(dim, dim)
        self.norm = spec.norm.build(dim)

    def forward(self, x: Float[Tensor, "*B D"], tokens: Tokens | None = None) -> Float[Tensor, "*B V"]:
        return super().forward(self.norm(self.activation(self.dense(x))))


class PooledHead(Head, kind="pooled"):
    """One answer a text, from its first token: tanh(x W + b), and logits over `labels` of that, if there are any."""

    pools = True
    labels: PositiveInt | None = None
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        if self.dropout >= 1:
            raise SpecError(f"`dropout` must be below 1, but is {self.dropout}")

    def build(self, dim: int, vocab_size: int) -> HeadModule:
        return PooledHeadModule(self, dim)

    def cost(self, dim: int, vocab_size: int, length: int) -> Cost:
        pooled = Cost(activations=2 * dim).plus(linear(dim, dim, 1, bias=True))
        return pooled.plus(linear(dim, self.labels, 1, bias=True)) if self.labels else pooled


class PooledHeadModule(HeadModule):
    def __init__(self, spec: PooledHead, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(spec.dropout)
        self.out = nn.Linear(dim, spec.labels) if spec.labels else None

    def forward(self, x: Float[Tensor, "B T D"], tokens: Tokens | None = None) -> Float[Tensor, "B L"]:
        pooled = torch.tanh(self.dense(_first(x, tokens)))
        return pooled if self.out is None else self.out(self.dropout(pooled))


class TokenHead(Head, kind="token"):
    """One answer a token: logits over `labels` (named entities; with 2 labels, where an answer begins and ends)."""

    labels: PositiveInt
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        if self.dropout >= 1:
            raise SpecError(f"`dropout` must be below 1, but is {self.dropout}")

    def build(self, dim: int, vocab_size: int) -> HeadModule:
        return TokenHeadModule(self, dim)

    def cost(self, dim: int, vocab_size: int, length: int) -> Cost:
        return Cost(activations=length * dim).plus(linear(dim, self.labels, length, bias=True))


class TokenHeadModule(HeadModule):
    def __init__(self, spec: TokenHead, dim: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(spec.dropout)
        self.out = nn.Linear(dim, spec.labels)

    def forward(self, x: Float[Tensor, "*B D"], tokens: Tokens | None = None) -> Float[Tensor, "*B L"]:
        logits: Tensor = self.out(self.dropout(x))
        return logits


def _first(x: Float[Tensor, "B T D"], tokens: Tokens | None) -> Float[Tensor, "B D"]:
    """The first real token of each row."""
    if tokens is None or tokens.start == 0:
        return x[:, 0]
    if tokens.length != x.shape[1]:
        raise ValueError(f"a head that reads the first token needs all {tokens.length}: leave `last` out")
    at = tokens.real.long().argmax(1)
    return x[torch.arange(len(x), device=x.device), at]
