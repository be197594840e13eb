"""What an engine knows of its requests: their texts and choices, what they have in common, how much room they get."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.cache import Rows
from anyformer.generate.rules import check_rows, finite_best
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import States, Transformer
from anyformer.parts.attention import Attention, CrossAttentionModule
from anyformer.tokens import Tokens

__all__ = [
    "Beginnings",
    "Event",
    "Reading",
    "Request",
    "alike",
    "apart",
    "at_least",
    "positions",
    "shares",
    "side_by_side",
    "together",
]


class Event(NamedTuple):
    """What a step did for one request: its new token, if any, and why it ended, if it did.

    "end": an end token, or its guide is done; "length": `max_new_tokens`, or no position left; "error": `message`.
    """

    request: int
    token: int | None
    reason: str | None
    message: str | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """One request: it may make `room` tokens, and not end before `least`; it has `made` so many, `last` the last.

    memory: what the encoder made of its `source`, from its first step on until its keys and values are in the batch.
    """

    number: int
    ids: Int[Tensor, "T"]
    source: Int[Tensor, "S"] | None
    sampler: Sampler
    room: int
    least: int
    end_ids: frozenset[int]
    ends: Int[Tensor, "E"]
    guide: Any
    made: int = 0
    last: int = -1
    memory: States | None = None

    @property
    def end(self) -> int:
        """The position of the last token, which has not been read yet."""
        return len(self.ids) + self.made - 1

    def see(self) -> None:
        ids = self.ids[None].to(self.ends.device)
        self.sampler.see(ids, torch.ones_like(ids, dtype=torch.bool))

    def take(self, logits: Float[Tensor, "1 V"]) -> Event:
        """Choose the next token; whatever goes wrong ends this request, and no other."""
        try:
            self.last = self._chosen(logits)
            self.made += 1
            return Event(self.number, self.last, self._reason())
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Event:
        return Event(self.number, None, "error", str(error) or type(error).__name__)

    def _chosen(self, logits: Tensor) -> int:
        finite_best(logits)
        if self.made < self.least:
            logits = logits.index_fill(1, self.ends, -torch.inf)
        if self.guide is None:
            return int(self.sampler(logits))
        allowed = self.guide.allowed(logits.shape[1])
        token = int(self.sampler(logits, allowed[None].to(logits.device)))
        self.guide.push(token)
        return token

    def _reason(self) -> str | None:
        if self.last in self.end_ids or (self.guide is not None and self.guide.done):
            return "end"
        return "length" if self.made >= self.room else None


@dataclasses.dataclass
class Reading:
    """A prompt that is being read: up to where, and where another one parts from it (0: nowhere)."""

    request: Request
    cache: Rows
    at: int
    split: int


class Beginnings:
    """Caches of texts that others begin with, `most` of them; those that were used last stay."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: list[tuple[Tensor, Rows]] = []

    def longest(self, ids: Int[Tensor, "T"]) -> tuple[int, Rows | None]:
        """How many tokens of `ids` the best one holds, and its cache, to be copied."""
        lengths = [(len(known), i) for i, (known, _) in enumerate(self._kept) if alike(ids, known) == len(known)]
        if not lengths:
            return 0, None
        length, i = max(lengths)
        self._kept.append(self._kept.pop(i))
        return length, self._kept[-1][1]

    def make_room(self) -> None:
        """For one more."""
        del self._kept[: max(len(self._kept) + 1 - self.most, 0)]

    def add(self, ids: Int[Tensor, "T"], cache: Rows) -> None:
        self._kept.append((ids, cache))


def side_by_side(rows: States | None, row: int, source: States, batch: int) -> States:
    """What `batch` rows read, once row `row` of `rows` reads `source` (1, R, D): as wide as the longest so far.

    A cache has the keys and values, so only the tokens speak; the hidden states are zeros that take no memory.
    """
    length, width = source.tokens.length, 0 if rows is None else rows.tokens.length
    known = torch.zeros(batch, 0, dtype=torch.bool, device=source.x.device) if rows is None else rows.tokens.real
    real = nn.functional.pad(known, (0, max(length - width, 0)))
    real[row] = torch.arange(real.shape[1], device=real.device) < length
    return States(source.x.new_zeros(()).expand(*real.shape, source.x.shape[-1]), Tokens.padded(real))


def alike(a: Int[Tensor, "T"], b: Int[Tensor, "S"]) -> int:
    """How many tokens two texts have in common from their beginning."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).cumprod(0).sum())


def apart(sampling: Sampling, count: int) -> list[Sampling]:
    """A choice for each of `count` prompts, out of one for all."""
    check_rows("temperature", sampling.temperature, count)
    check_rows("seed", sampling.seed, count)
    heat, seed = sampling.temperature, sampling.seed
    heats = heat if isinstance(heat, tuple) else (heat,) * count
    seeds = seed if isinstance(seed, tuple) else [None if seed is None else seed + i for i in range(count)]
    return [dataclasses.replace(sampling, temperature=h, seed=s) for h, s in zip(heats, seeds, strict=True)]


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {value}")


def positions(model: Transformer, name: str, given: int | None, least: int) -> int | None:
    """How long a text may get: what is `given`, else what the model says; None if nothing does."""
    most = model.max_len or model.origin.get("max_position_embeddings") if given is None else given
    if most is None:
        return None
    if model.max_len is not None and most > model.max_len:
        raise ValueError(f"`{name}` must be at most the model's {model.max_len} positions, but is {most}")
    at_least(name, most, least)
    return int(most)


def shares(
    model: Transformer, max_len: int, max_source: int | None, memory: int | None, rows: int, kept: int
) -> tuple[int, int]:
    """How many rows, and how many kept beginnings, fit into `memory`. One row alone never leaves its own cache."""
    kept = 0 if model.encoder is not None else kept
    if memory is None:
        return rows, kept
    one = _row_bytes(model, max_len, max_source)
    if memory < one:
        raise ValueError(f"a row of {max_len} positions takes {one} bytes, but `memory` is {memory}: lower `max_len`")
    caches = memory // one
    rows = min(rows, max(caches - 1, 1))
    return rows, min(kept, caches - (rows if rows == 1 else rows + 1))


def _row_bytes(model: Transformer, max_len: int, max_source: int | None) -> int:
    """What one row's cache takes at most, its source included."""
    meta = model.spec.build(init=None, device="meta", dtype=model.dtype)
    row = meta.new_rows(1, max_len).nbytes
    if model.encoder is None:
        return row
    if max_source is None:
        raise ValueError("`memory` counts the sources too, and nothing says how long one may get: give `max_source`")
    source = torch.empty(1, max_source, model.spec.dim, dtype=model.dtype, device="meta")
    crosses = [part for part in meta.modules() if isinstance(part, CrossAttentionModule)]
    return row + sum(kept.nbytes for cross in crosses for kept in cross.keys_values(source))


def together(model: Transformer) -> int:
    """How many first tokens see one another, and so must be read at once."""
    ops = [branch.op for block in model.spec.decoder for branch in block.branches]
    return max((op.pattern.frontier() or 0 for op in ops if isinstance(op, Attention)), default=0)
