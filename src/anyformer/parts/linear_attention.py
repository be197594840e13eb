"""Linear attention: features in place of the softmax, so that the past is one sum and time grows with length alone.

    out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)       over the s that t may see; zeros where that is none

Values get a last channel of ones, so that one product (`linear_product`) gives both sums; those of padding are zeros.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.parts.legal import refuse
from anyformer.parts.linear_product import Chunks, causal_product, causal_sums, chunked, cut, joined
from anyformer.parts.op import Mixer, OpModule, Result, Shared
from anyformer.parts.pattern import Causal, Full, Pattern
from anyformer.parts.position import Position, PositionModule
from anyformer.parts.precision import at_least_float32
from anyformer.spec import Part, SpecError

__all__ = ["Elu", "FeatureMap", "LinearAttention", "LinearAttentionModule", "RandomFeatures", "Relu"]

LARGEST = 60.0  # of exponents: e^60 is 1e26, of which float32 can add as many as there will ever be tokens


class FeatureMap(Part):
    """How queries and keys become features, which are never negative."""

    def count(self, width: int) -> int:
        """How many features a head of `width` channels has."""
        return width

    def build(self, width: int) -> FeatureMapModule:
        raise NotImplementedError

    def cost(self, width: int, queries: int, keys: int) -> Cost:
        """Of so many vectors; what is kept are the vectors (their features are counted by the product)."""
        return Cost(activations=width * (queries + keys))


class FeatureMapModule(nn.Module):
    def keys(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        raise NotImplementedError

    def queries(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        """Up to a factor for each query, which the normaliser takes out again."""
        return self.keys(x, ctx)


class Elu(FeatureMap, kind="elu"):
    """elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""

    def build(self, width: int) -> EluModule:
        return EluModule()


class EluModule(FeatureMapModule):
    def keys(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        return F.elu(x) + 1


class Relu(FeatureMap, kind="relu"):
    """relu(x) + eps (Choromanski et al. 2021, section 4). With `eps` 0, a query that meets no key gives zeros."""

    eps: NonNegativeFloat = 1e-3

    def build(self, width: int) -> ReluModule:
        return ReluModule(self.eps)


class ReluModule(FeatureMapModule):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def keys(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        return F.relu(x) + self.eps


class RandomFeatures(FeatureMap, kind="random_features"):
    """Positive orthogonal random features of the softmax (FAVOR+, Choromanski et al. 2021, lemma 1 and section 3.2).

    With x scaled by width^(-1/4), exp(ω·x - |x|² / 2) for `features` directions ω, so that φ(q)·φ(k) is near
    exp(q·k / √width), the nearer the more. The directions follow from `seed`: they are no weights, and not stored.
    """

    features: PositiveInt = 256
    seed: NonNegativeInt = 0

    def count(self, width: int) -> int:
        return self.features

    def build(self, width: int) -> RandomFeaturesModule:
        return RandomFeaturesModule(self, width)

    def cost(self, width: int, queries: int, keys: int) -> Cost:
        products = 2 * width * self.features * (queries + keys)
        return Cost(flops=products, activations=(width + self.features) * keys)


class RandomFeaturesModule(FeatureMapModule):
    def __init__(self, spec: RandomFeatures, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.directions = _directions(spec.features, width, spec.seed)  # no buffer: the spec says it all

    def keys(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        x, along = self._along(x, ctx)
        return (along - x.square().sum(-1, keepdim=True) / 2).clamp(max=LARGEST).exp()

    def queries(self, x: Float[Tensor, "*B K"], ctx: Context) -> Float[Tensor, "*B F"]:
        """Without |x|² / 2, and over the largest feature: both are factors of a whole query."""
        _, along = self._along(x, ctx)
        return (along - along.detach().amax(-1, keepdim=True)).exp()

    def _along(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        key = ("directions", self.spec, self.width, x.dtype, x.device)
        directions = ctx.once(key, (ctx.tokens,), lambda: self.directions.to(x.device, x.dtype))
        x = x * self.width**-0.25
        return x, x @ directions.T


@torch.inference_mode(False)
def _directions(count: int, width: int, seed: int) -> Float[Tensor, "F K"]:
    """Normal vectors, of which each run of `width` is orthogonal: rotations by QR, lengths of other normal vectors."""
    random = torch.Generator("cpu").manual_seed(seed)
    normal: dict[str, Any] = {"generator": random, "dtype": torch.float64, "device": "cpu"}
    turns, scales = torch.linalg.qr(torch.randn(math.ceil(count / width), width, width, **normal))
    turns = turns * scales.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # else they would not be evenly drawn
    lengths = torch.randn(count, width, **normal).norm(dim=-1, keepdim=True)
    return turns.flatten(0, 1)[:count] * lengths


class LinearAttention(Mixer, kind="linear_attention"):
    """Linear attention (Katharopoulos et al. 2020). Fields as in `Attention`; queries and keys turn before `features`.

    A document is one run of tokens, in their order. The state that decoding keeps is of one size whatever the length:
    features × (head_dim + 1) for each key-value head, in float32 or wider.
    """

    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    features: FeatureMap = Elu()
    pattern: Pattern = Causal()
    position: Position | None = None
    bias: tuple[Literal["q", "k", "v", "out"], ...] = ()

    def check(self) -> None:
        if self.num_heads % self.kv_heads:
            raise SpecError(
                f"`num_heads` must be a multiple of `num_kv_heads` ({self.kv_heads}), but is {self.num_heads}"
            )
        refuse("linear_attention", self)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def width(self, dim: int) -> int:
        """The width of one head in a model of width `dim`."""
        if self.head_dim is None and dim % self.num_heads:
            raise SpecError(
                f"`dim` must be a multiple of `num_heads` ({self.num_heads}), but is {dim}: or give `head_dim`"
            )
        return self.head_dim or dim // self.num_heads

    def build(self, dim: int, shared: Shared) -> LinearAttentionModule:
        return LinearAttentionModule(self, dim)

    def looks_ahead(self) -> bool:
        return self.pattern.frontier() is None

    def cost(self, dim: int, length: int) -> Cost:
        head, h, g = self.width(dim), self.num_heads, self.kv_heads
        features, values = self.features.count(head), head + 1
        widths = {"q": (dim, h * head), "k": (dim, g * head), "v": (dim, g * head), "out": (h * head, dim)}
        projections = [linear(i, o, length, bias=name in self.bias) for name, (i, o) in widths.items()]
        number, size = cut(length) if self.pattern == Causal() else (1, length)
        within = h * size * (features + values) if self.pattern == Causal() else 0
        flops = 2 * number * size * (within + (h + g) * features * values)
        kept = length * (dim + h * (features + values + 1 + head) + g * (features + values))
        products = Cost(flops=flops, activations=kept, cache=g * features * values)
        return products.plus(*projections, self.features.cost(head, length * h, length * g))


class LinearAttentionModule(OpModule):
    def __init__(self, spec: LinearAttention, dim: int) -> None:
        super().__init__()
        head, h, g = spec.width(dim), spec.num_heads, spec.kv_heads
        self.spec, self.head_dim, self.groups, self.two_sided = spec, head, g, spec.pattern == Full()
        self.q = nn.Linear(dim, h * head, bias="q" in spec.bias)
        self.k = nn.Linear(dim, g * head, bias="k" in spec.bias)
        self.v = nn.Linear(dim, g * head, bias="v" in spec.bias)
        self.out = nn.Linear(h * head, dim, bias="out" in spec.bias)
        self.features = spec.features.build(head)
        self.position = spec.position.build(head, h) if spec.position else PositionModule(Position())

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q, k = (self.position.at_heads(t, ctx.tokens, ctx) for t in (q, k))
        heads = self.mix(at_least_float32(q), at_least_float32(k), at_least_float32(v), ctx)
        return self.out(heads.to(x.dtype).flatten(-2)), None

    def mix(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T G K"], v: Float[Tensor, "B T G K"], ctx: Context
    ) -> Float[Tensor, "B T H K"]:
        """Numerator over denominator, for each query."""
        length, tokens = q.shape[1], ctx.tokens
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        if tokens.start is None:
            v = v.masked_fill(~tokens.real[..., None, None], 0.0)
        one = self.two_sided and self._one_document(ctx)
        number, size = (1, max(length, 1)) if one else cut(length)
        q, k, v = (chunked(t, number, size, self.groups) for t in (q, k, v))
        q, k, v = self.features.queries(q, ctx), self.features.keys(k[:, :, :, 0], ctx), v[:, :, :, 0]
        sums = self._sums_of_one(q, k, v, ctx) if one else self._sums(q, k, v, ctx)
        return joined(sums[..., :-1] / torch.where(sums[..., -1:] > 0, sums[..., -1:], 1.0), length)

    def _one_document(self, ctx: Context) -> bool:
        """Whether each row is one document (numbered 0), with or without padding."""
        tokens = ctx.tokens
        return tokens.start is not None or ctx.once("one", (tokens,), lambda: bool((tokens.seg <= 0).all()))

    def _sums_of_one(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Every token sees all of its row."""
        sums = (q.flatten(3, 4) @ (k.mT @ v)).view(*q.shape[:-1], v.shape[-1])
        real = ctx.tokens.real[:, None, None, None, :, None]
        return sums if ctx.tokens.start is not None or not ctx.tokens.length else sums.masked_fill(~real, 0.0)

    def _sums(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """What came before, and, where the pattern is not causal, what comes after."""
        tokens, store = ctx.tokens, ctx.store
        number, size = q.shape[2], q.shape[4]
        plain = tokens.start is not None and (store is None or store.documents.plain)
        before = tokens.seg.new_full((tokens.batch,), -1) if store is None else store.documents.before
        seg = functools.partial(Chunks.segments, tokens.seg, number, size)
        make = (lambda: Chunks.plain(size, q.device)) if plain else lambda: Chunks.of(seg(), before)
        past = ctx.once(("past", number), (tokens,), make)
        if store is not None:
            sums, states = causal_sums(q, k, v, past, store.value)
            store.keep(states[:, :, -1])
            return sums
        sums = causal_product(q, k, v, past)
        if self.two_sided:
            future = ctx.once(("future", number), (tokens,), lambda: Chunks.of(seg().flip(1, 2), before, itself=False))
            sums = sums + causal_product(q.flip(2, 4), k.flip(2, 3), v.flip(2, 3), future).flip(2, 4)
        return sums

    def new_store(self, cache: Any) -> Any:
        shape = (self.groups, self.spec.features.count(self.head_dim), self.head_dim + 1)
        return cache.state(shape, torch.promote_types(cache.dtype, torch.float32))
