"""Model: encoder-only, decoder-only and encoder-decoder Transformers, from one spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int
from pydantic import PositiveInt
from torch import Tensor, nn

from anyformer.block import Block, Stack
from anyformer.cache import Cache, Rows
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.init import fan_in_init
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed, table
from anyformer.parts.head import Head, HeadModule, LMHead
from anyformer.parts.legal import refuse
from anyformer.parts.linear_attention import LinearAttention
from anyformer.parts.norm import Norm
from anyformer.parts.position import Position
from anyformer.spec import Spec, SpecError
from anyformer.tokens import Tokens

__all__ = ["States", "Transformer", "TransformerSpec"]

CacheKind = TypeVar("CacheKind", Cache, Rows)


class TransformerSpec(Spec):
    """A whole model as data: which stacks it has decides what it is.

    `encoder` alone is BERT's kind, `decoder` alone GPT's, both T5's. `final_norm` closes each stack: pre-LN needs
    it, post-LN ends in a norm already. `head` None gives hidden states in place of logits.
    """

    dim: PositiveInt
    vocab_size: PositiveInt
    embed: Embed = Embed()
    encoder: tuple[Block, ...] = ()
    decoder: tuple[Block, ...] = ()
    final_norm: Norm | None = None
    head: Head | None = LMHead()

    def check(self) -> None:
        if not self.encoder and not self.decoder:
            raise SpecError("a Transformer needs an encoder, a decoder, or both, but has no layers")
        for stack, blocks in (("encoder", self.encoder), ("decoder", self.decoder)):
            for i, block in enumerate(blocks):
                for name, branch in zip(block.names(), block.branches, strict=True):
                    self._check_op(branch.op, (stack, i, name))
        refuse("model", self)

    def _check_op(self, op: Any, path: tuple[str | int, ...]) -> None:
        if not self.encoder:
            refuse("decoder alone", op, path=path)
        refuse(str(path[0]), op, path=path)
        if isinstance(op, Attention | LinearAttention):
            try:
                op.width(self.dim)
            except SpecError as error:
                raise error.within(path) from None

    def build(
        self,
        *,
        init: Callable[[nn.Module], None] | None = fan_in_init,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Transformer:
        """The model, with fresh weights from `init` (None: whatever memory holds, for loading over it)."""
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta" if init is None else device):
            model = Transformer(self)
        if init is not None:
            init(model)
        elif device.type != "meta":
            model.to_empty(device=device)
            model.tie()
        return model if dtype is None else model.to(dtype)

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one table."""
        return self.embed.tied and self.head is not None and self.head.ties

    def max_len(self) -> int | None:
        """How many positions the model can tell apart; None for no bound."""
        limits = [position.limit() for position in self.positions()]
        return min((limit for limit in limits if limit is not None), default=None)

    def positions(self) -> list[Position]:
        """Every position scheme in use."""
        branches = [branch for block in self.encoder + self.decoder for branch in block.branches]
        mixers = [branch.op.position for branch in branches if isinstance(branch.op, Attention | LinearAttention)]
        return [position for position in [self.embed.position, *mixers] if position is not None]

    def stacks(self) -> dict[str, tuple[Block, ...]]:
        return {name: blocks for name, blocks in (("encoder", self.encoder), ("decoder", self.decoder)) if blocks}

    def costs(self, length: int) -> dict[str, Cost]:
        """What one sequence of `length` tokens costs (the same number on both sides of an encoder-decoder), by part."""
        table = self.vocab_size * self.dim
        costs = {"tokens": Cost(params=table, active=self.dim)}
        for name, blocks in self.stacks().items():
            norm = [self.final_norm.cost(self.dim, length)] if self.final_norm else []
            costs[f"{name}.embed"] = self.embed.cost(self.dim, length)
            costs[name] = Cost().plus(*(block.cost(self.dim, length) for block in blocks), *norm)
            costs[name] = costs[name]._replace(params=costs[name].params - self._counted_twice(blocks))
        if self.encoder:
            costs["encoder"] = costs["encoder"]._replace(cache=0)  # it reads its text once, and keeps no keys
        if self.head is not None:
            head = self.head.cost(self.dim, self.vocab_size, length)
            costs["head"] = head._replace(params=head.params - table * self.tied)
        return costs

    def _counted_twice(self, blocks: tuple[Block, ...]) -> int:
        """Parameters of position schemes that the layers of a stack share."""
        ops = [branch.op for block in blocks for branch in block.branches if isinstance(branch.op, Attention)]
        seen: set[tuple[Position, int]] = set()
        twice = 0
        for op in ops:
            if op.position is not None and (op.position, op.num_heads) in seen:
                twice += op.position.cost(op.width(self.dim), op.num_heads).params
            elif op.position is not None:
                seen.add((op.position, op.num_heads))
        return twice


class States(NamedTuple):
    """Hidden states (B, T, D), where their tokens sit, and the auxiliary loss if there is one."""

    x: Tensor
    tokens: Tokens
    aux: Tensor | None = None

    def take(self, rows: Int[Tensor, "N"]) -> States:
        """These rows, in this order."""
        return States(self.x[rows], self.tokens.take(rows))


class Transformer(nn.Module):
    """ids → x → logits. Nothing is kept between calls; a cache, if any, is the caller's."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.origin: dict[str, Any] = {}  # what a published config says beside the spec: kept, to be written back
        self.max_len = spec.max_len()
        self.tokens = table(spec.vocab_size, spec.dim)
        self.embeds = nn.ModuleDict({name: spec.embed.build(spec.dim) for name in spec.stacks()})
        self.encoder = Stack(spec.encoder, spec.dim, spec.final_norm) if spec.encoder else None
        self.decoder = Stack(spec.decoder, spec.dim, spec.final_norm) if spec.decoder else None
        self.head = spec.head.build(spec.dim, spec.vocab_size) if spec.head else HeadModule()
        self.tie()

    def tie(self) -> Transformer:
        """Make head and embedding one parameter, if the spec says so."""
        if self.spec.tied:
            self.head.weight = self.tokens.weight
        return self

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.weight.dtype

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        tokens: Tokens | None = None,
        *,
        source: Int[Tensor, "B S"] | None = None,
        source_tokens: Tokens | None = None,
        memory: States | None = None,
        types: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        last: int | None = None,
        kernel: Any = None,
        context_len: int | None = None,
    ) -> Tensor:
        """What the head says: logits (B, L, V) for each token (L = T); with `last=n`, for the last n only (L = n).

        `tokens` says where `ids` sit (left out: plain text, behind what the cache holds). An encoder-decoder reads
        `source`, or `memory` if it was encoded before. `kernel` forces an attention kernel. `context_len` is the length
        that dynamic schedules plan for: left out, the cache's capacity or the input's length.
        """
        if last is not None and last < 0:
            raise ValueError(f"`last` must be at least 0, but is {last}")
        if self.decoder is None:
            if source is not None or memory is not None or cache is not None:
                raise ValueError("an encoder alone takes `ids` only: `source`, `memory` and `cache` are for decoders")
            states = self.encode(ids, tokens, types=types, kernel=kernel, context_len=context_len)
        else:
            memory = self._memory(source, source_tokens, memory, kernel)
            states = self.decode(
                ids, tokens, memory=memory, types=types, cache=cache, kernel=kernel, context_len=context_len
            )
        x = states.x if last is None else states.x[:, max(states.x.shape[1] - last, 0) :]
        logits: Tensor = self.head(x, states.tokens)
        return logits

    def _memory(
        self, source: Tensor | None, tokens: Tokens | None, memory: States | None, kernel: Any
    ) -> States | None:
        """The encoder's output, given or made now."""
        if source is None:
            return memory
        if memory is not None:
            raise ValueError("`source` and `memory` say the same thing twice: give one of them")
        return self.encode(source, tokens, kernel=kernel)

    def encode(
        self,
        ids: Int[Tensor, "B T"],
        tokens: Tokens | None = None,
        *,
        types: Int[Tensor, "B T"] | None = None,
        kernel: Any = None,
        context_len: int | None = None,
    ) -> States:
        """Hidden states of the encoder."""
        if self.encoder is None:
            raise ValueError("this model has no encoder, so it reads no `source`")
        tokens = self._tokens(ids, tokens, 0)
        ctx = Context(tokens, kernel=kernel, context_len=context_len)
        x, aux = self.encoder(self._embed("encoder", ids, tokens, types), ctx)
        return States(x, tokens, aux)

    def decode(
        self,
        ids: Int[Tensor, "B T"],
        tokens: Tokens | None = None,
        *,
        memory: States | None = None,
        types: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        kernel: Any = None,
        context_len: int | None = None,
    ) -> States:
        """Hidden states of the decoder. With a cache, `ids` come after what it holds."""
        if self.decoder is None:
            raise ValueError("this model has no decoder: call encode")
        tokens = self._tokens(ids, tokens, cache.used if cache else 0)
        self._check_memory(memory, tokens.batch)
        x = self._embed("decoder", ids, tokens, types)
        if cache is not None:
            if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
                raise ValueError("a cache keeps no gradients: call the model under torch.inference_mode()")
            context_len = context_len or cache.max_len
            cache.advance(tokens)
        ctx = Context(
            tokens,
            memory=memory.x if memory else None,
            memory_tokens=memory.tokens if memory else None,
            kernel=kernel,
            context_len=context_len,
        )
        x, aux = self.decoder(x, ctx, cache.stores if cache else None)
        return States(x, tokens, aux if memory is None else _both(aux, memory.aux))

    def new_cache(self, batch: int, max_len: int, *, slack: int = 0) -> Cache:
        """An empty cache for `batch` rows of up to `max_len` tokens, padding included. Windowed layers keep less.

        The last `slack` tokens can be dropped again, whatever the patterns.
        """
        return self._filled(Cache(batch, max_len, self.dtype, self.device, slack=slack))

    def new_rows(self, batch: int, max_len: int) -> Rows:
        """An empty cache for rows that come and go, each of up to `max_len` tokens."""
        return self._filled(Rows(batch, max_len, self.dtype, self.device))

    def _filled(self, cache: CacheKind) -> CacheKind:
        if self.decoder is None:
            raise ValueError("only a decoder generates: this model has none, so it needs no cache")
        cache.stores = self.decoder.new_stores(cache)
        return cache

    def _check_memory(self, memory: States | None, batch: int) -> None:
        if (memory is None) != (self.encoder is None):
            raise ValueError(
                "an encoder-decoder needs `source` ids, or `memory` from `encode`"
                if memory is None
                else "a decoder alone has no cross-attention to read `memory` with"
            )
        if memory is not None and memory.tokens.batch != batch:
            raise ValueError(f"the source has {memory.tokens.batch} rows, but the ids have {batch}")

    def _tokens(self, ids: Tensor, tokens: Tokens | None, start: int) -> Tokens:
        if ids.dim() != 2:
            raise ValueError(f"`ids` must be (B, T), but are {tuple(ids.shape)}: for one text use ids[None]")
        tokens = tokens or Tokens.arange(*ids.shape, start=start, device=ids.device)
        if (tokens.batch, tokens.length) != tuple(ids.shape):
            raise ValueError(f"`tokens` are for {(tokens.batch, tokens.length)}, but `ids` are {tuple(ids.shape)}")
        if self.max_len is not None and tokens.end > self.max_len:
            raise ValueError(f"the text needs {tokens.end} positions, but the model has {self.max_len}: shorten it")
        return tokens

    def _embed(self, stack: str, ids: Tensor, tokens: Tokens, types: Tensor | None) -> Tensor:
        x: Tensor = self.embeds[stack](self.tokens(ids), tokens, types)
        return x


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else (a + b) / 2
