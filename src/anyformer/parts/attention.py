"""Attention: multi-head, grouped-query and multi-query, self and cross, as one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.kernels import KERNELS
from anyformer.kernels.base import Kernel, Request, choose
from anyformer.parts.legal import refuse
from anyformer.parts.norm import Norm
from anyformer.parts.op import Mixer, OpModule, Result, Shared
from anyformer.parts.pattern import Causal, Full, Pattern
from anyformer.parts.position import Position, PositionModule
from anyformer.spec import SpecError
from anyformer.tokens import Tokens

__all__ = ["Attention", "AttentionModule", "CrossAttention", "CrossAttentionModule", "attend"]


class Attention(Mixer, kind="attention"):
    """Softmax attention (Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023).

    `num_kv_heads` None is one key-value head a query head, 1 is multi-query. `head_dim` None is dim / num_heads.
    `bias` names the projections that have one. `qk_norm` is applied to each head's query and key, before the position.
    `scale` None is 1 / √head_dim. `softcap` c turns a score s into c · tanh(s / c).
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    pattern: Pattern = Causal()
    position: Position | None = None
    bias: tuple[Literal["q", "k", "v", "out"], ...] = ()
    qk_norm: Norm | None = None
    scale: float | None = None
    softcap: PositiveFloat | None = None
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        if self.num_heads % self.kv_heads:
            raise SpecError(
                f"`num_heads` must be a multiple of `num_kv_heads` ({self.kv_heads}), but is {self.num_heads}"
            )
        refuse("attention", self)
        if self.dropout >= 1:
            raise SpecError(f"`dropout` must be below 1, but is {self.dropout}")

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

    def build(self, dim: int, shared: Shared) -> AttentionModule:
        return AttentionModule(self, dim, shared)

    def looks_ahead(self) -> bool:
        return self.pattern.frontier() is None

    def cost(self, dim: int, length: int) -> Cost:
        head, h, g = self.width(dim), self.num_heads, self.kv_heads
        widths = {"q": (dim, h * head), "k": (dim, g * head), "v": (dim, g * head), "out": (h * head, dim)}
        projections = [linear(i, o, length, bias=name in self.bias) for name, (i, o) in widths.items()]
        kept = length * (dim + 2 * h * head + 2 * g * head + h)
        pairs = Cost(flops=4 * h * head * length * length, activations=kept, cache=self._kept(dim, length))
        norms = [self.qk_norm.cost(head, length * n) for n in (h, g)] if self.qk_norm else []
        position = self.position.cost(head, h) if self.position else Cost()
        return pairs.plus(*projections, *norms, position)

    def _kept(self, dim: int, length: int) -> int:
        """Numbers in the cache: keys and values of as many tokens as the pattern reaches back."""
        reach = self.pattern.reach()
        kept = length if reach is None else min(length, max(reach, 1) + self.pattern.first())
        return 2 * self.kv_heads * self.width(dim) * kept


class AttentionModule(OpModule):
    kernels: Sequence[Kernel] = KERNELS
    """What may compute it, in order of preference."""

    def __init__(self, spec: Attention, dim: int, shared: Shared) -> None:
        super().__init__()
        head, h, g = spec.width(dim), spec.num_heads, spec.kv_heads
        self.spec, self.head_dim = spec, head
        self.scale = head**-0.5 if spec.scale is None else spec.scale
        self.q = nn.Linear(dim, h * head, bias="q" in spec.bias)
        self.k = nn.Linear(dim, g * head, bias="k" in spec.bias)
        self.v = nn.Linear(dim, g * head, bias="v" in spec.bias)
        self.out = nn.Linear(h * head, dim, bias="out" in spec.bias)
        self.q_norm = spec.qk_norm.build(head) if spec.qk_norm else nn.Identity()
        self.k_norm = spec.qk_norm.build(head) if spec.qk_norm else nn.Identity()
        self.position = _position(spec.position, head, h, shared)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        q = self.position.at_heads(self.queries(x), ctx.tokens, ctx)
        k, v = self.keys_values(x)
        k, k_tokens = self.position.at_heads(k, ctx.tokens, ctx), ctx.tokens
        if ctx.store is not None:
            k, v, k_tokens = ctx.store.append(k, v)
        return self.out(self.attend(q, k, v, k_tokens, ctx).flatten(-2)), None

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        return self.q_norm(self.q(x).unflatten(-1, (-1, self.head_dim)))

    def keys_values(self, x: Float[Tensor, "B S D"]) -> tuple[Float[Tensor, "B S G K"], Float[Tensor, "B S G K"]]:
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k, self.v))
        return self.k_norm(k), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_tokens: Tokens, ctx: Context, pattern: Pattern | None = None
    ) -> Float[Tensor, "B T H K"]:
        """One attention as this spec says; `pattern` in place of its own."""
        request = Request(
            q,
            k,
            v,
            ctx.tokens,
            k_tokens,
            pattern or self.spec.pattern,
            self.scale,
            softcap=self.spec.softcap,
            position=self.position,
            dropout=self.spec.dropout if self.training else 0.0,
            memo=ctx.memo,
        )
        return choose(request, self.kernels, ctx.kernel)(request)

    def new_store(self, cache: Any) -> Any:
        return cache.keys_values(self.spec.kv_heads, self.head_dim, self.spec.pattern)


class CrossAttention(Attention, kind="cross_attention"):
    """Attention whose keys and values come from the encoder's output; documents see their own source only."""

    reads_memory = True
    pattern: Pattern = Full()

    def build(self, dim: int, shared: Shared) -> CrossAttentionModule:
        return CrossAttentionModule(self, dim, shared)

    def check(self) -> None:
        super().check()
        refuse("cross_attention", self)

    def looks_ahead(self) -> bool:
        return False  # it sees no other token of its own text


class CrossAttentionModule(AttentionModule):
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        if ctx.memory is None or ctx.memory_tokens is None:
            raise ValueError(
                "cross-attention needs the encoder's output: give `memory`, or `source` to the whole model"
            )
        memory = ctx.memory
        k, v = ctx.store.fill(memory, self.keys_values) if ctx.store is not None else self.keys_values(memory)
        return self.out(self.attend(self.queries(x), k, v, ctx.memory_tokens, ctx).flatten(-2)), None

    def new_store(self, cache: Any) -> Any:
        return cache.memory()


def attend(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    v: Float[Tensor, "B S G K"],
    *,
    pattern: Pattern = Causal(),  # noqa: B008 (frozen data)
    position: Position | PositionModule | None = None,
    tokens: Tokens | None = None,
    key_tokens: Tokens | None = None,
    kernel: str | Kernel | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H K"]:
    """The whole attention machinery as one function, for models that are not ours.

    `tokens` says where the queries sit and `key_tokens` where the keys do. Left out, the keys are 0 .. S - 1 and the
    queries the last T of them, as in decoding with a cache. `position` is a spec, or a module where it has weights.
    A query that sees no key gives zeros. Raises ValueError if the forced `kernel` cannot do what is asked.
    """
    _check_heads(q, k, v)
    (batch, length, num_heads, width), size = q.shape, k.shape[1]
    _check_tokens(tokens, batch, length, "tokens")
    _check_tokens(key_tokens, batch, size, "key_tokens")
    if tokens is None and length > size and pattern != Full():
        raise ValueError(f"{length} queries cannot be the last of {size} keys: give `tokens` and `key_tokens`")
    key_tokens = key_tokens or (tokens if tokens is not None and length == size else None)
    key_tokens = key_tokens or Tokens.arange(batch, size, device=q.device)
    tokens = tokens or (
        key_tokens if length == size else Tokens.arange(batch, length, start=max(size - length, 0), device=q.device)
    )
    module = position if isinstance(position, PositionModule) else _position(position, width, num_heads, {})
    ctx = Context(tokens, context_len=max(tokens.end, key_tokens.end))
    q, k = module.at_heads(q, tokens, ctx), module.at_heads(k, key_tokens, ctx)
    scale = width**-0.5 if scale is None else scale
    request = Request(q, k, v, tokens, key_tokens, pattern, scale, softcap, module, dropout)
    return choose(request, KERNELS, kernel)(request)


def _position(spec: Position | None, width: int, num_heads: int, shared: Shared) -> PositionModule:
    if spec is None:
        return PositionModule(Position())
    if spec.acts == "input":
        raise SpecError(f"position {spec.kind!r} acts on the input, which attention does not see")
    module = shared.get((spec, num_heads))
    if module is None:
        module = spec.build(width, num_heads)
        if module.shared:
            shared[spec, num_heads] = module
    assert isinstance(module, PositionModule)
    return module


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    (batch, _, num_heads, width), groups = q.shape, k.shape[2]
    if groups == 0 or num_heads % groups:
        raise ValueError(f"{num_heads} query heads must be a multiple of the key-value heads, which are {groups}")
    if k.shape != v.shape:
        raise ValueError(f"keys and values must have equal shapes, but have {tuple(k.shape)} and {tuple(v.shape)}")
    if (batch, width) != (k.shape[0], k.shape[3]):
        raise ValueError(f"queries and keys must agree in B and K, but are {tuple(q.shape)} and {tuple(k.shape)}")


def _check_tokens(tokens: Tokens | None, batch: int, length: int, name: str) -> None:
    if tokens is not None and (tokens.batch, tokens.length) != (batch, length):
        raise ValueError(
            f"`{name}` must be for (B, T) = {(batch, length)}, but are for {(tokens.batch, tokens.length)}"
        )
