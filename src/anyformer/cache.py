"""Cache: keys and values of earlier tokens, owned by the caller.

    cache = model.new_cache(batch=2, max_len=512)
    logits = model(prompt, tokens, cache=cache)              # any split of the text into pieces gives the same logits
    logits = model(ids, tokens.after(), cache=cache)

Memory is laid out once and written in place. A layer whose pattern reaches back n positions keeps a ring of n slots;
others keep `max_len`. `append` gives back the keys *and their tokens*: as masks speak of positions, the order of
slots is free, and rings, left padding and ragged batches need no special mask. Where tokens sit is kept once for all
layers of one size, not once a layer. A layer that sums up what it has read keeps a `State`, whose size is fixed.

A search takes rows anew (`take`, `repeat`); a guess that failed is dropped (`drop`, or `point` and `back`); rows that
come and go, each at its own length, live in `Rows`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.parts.pattern import Pattern
from anyformer.slots import Documents, Line, Places, Ring, Sinks, Slots
from anyformer.spec import SpecError
from anyformer.tokens import Tokens

__all__ = ["Cache", "Rows"]

KeysValues = tuple[Tensor, Tensor]
CacheKind = TypeVar("CacheKind", bound="Cache")


class Cache:
    """Everything that decoding keeps. Made by `model.new_cache`; `stores[layer][branch]` belong to the parts."""

    def __init__(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device, *, slack: int = 0) -> None:
        """`slack`: rings keep so many tokens more than their pattern reaches, so that as many can be dropped."""
        if max_len < 1:
            raise ValueError(f"`max_len` must be at least 1, but is {max_len}")
        self.batch, self.max_len, self.dtype, self.device, self.slack = batch, max_len, dtype, device, slack
        self.used = 0
        self.stores: list[list[Store | Memory | State | None]] = []
        self._slots: dict[tuple[int, int], Slots] = {}
        self._documents: Documents | None = None
        self._frontier = 0

    def keys_values(self, num_heads: int, head_dim: int, pattern: Pattern) -> Store:
        """A store for one attention layer, as large as its pattern needs."""
        frontier = pattern.frontier()
        if frontier is None:
            raise SpecError(
                f"pattern {pattern!r} looks ahead, so decoding with a cache would differ from the full pass"
            )
        self._frontier = max(self._frontier, frontier)
        reach, first = pattern.reach(), pattern.first()
        reach = None if reach is None else max(reach, 1) + self.slack
        if reach is None or reach + first >= self.max_len:
            reach, first = self.max_len, 0
        if (reach, first) not in self._slots:
            self._slots[reach, first] = self._new_slots(reach, first)
        slots = self._slots[reach, first]
        return Store(slots, (self.batch, slots.size, num_heads, head_dim), self.dtype)

    def _new_slots(self, reach: int, first: int) -> Slots:
        if first:
            return Sinks(self.batch, reach, first, self.device)
        return (Ring if reach < self.max_len else Line)(self.batch, reach, self.device)

    def memory(self) -> Memory:
        """A store for one cross-attention layer."""
        return Memory()

    def state(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> State:
        """A store of `shape` a row, whatever the length, for one layer that sums up what it has read."""
        self._documents = self._documents or Documents(self.batch, self.device)
        return State(self._documents, (self.batch, *shape), dtype or self.dtype)

    def advance(self, tokens: Tokens) -> None:
        """Make room for `tokens`; checks everything before anything is changed."""
        self._check(tokens)
        for slots in self._slots.values():
            slots.advance(tokens, self.used)
        if self._documents is not None:
            self._documents.advance(tokens)
        self.used += tokens.length

    def _check(self, tokens: Tokens) -> None:
        if tokens.batch != self.batch:
            raise ValueError(f"the cache is for {self.batch} rows, but {tokens.batch} are given")
        if self.used + tokens.length > self.max_len:
            raise ValueError(
                f"the cache holds {self.max_len} tokens, of which {self.used} are used, so {tokens.length} more do not "
                f"fit: make it with max_len={self.used + tokens.length} or more"
            )
        if self._frontier and self.used and tokens.batch and self._splits_prefix(tokens):
            raise ValueError(
                f"the first piece must hold the whole prefix of {self._frontier} tokens, which see one another"
            )

    def _splits_prefix(self, tokens: Tokens) -> bool:
        """Whether a row goes on, at its first real token, with a document whose prefix began in an earlier piece."""
        if tokens.start is not None:
            return tokens.length > 0 and 0 < tokens.start < self._frontier
        first = tokens.real & (tokens.real.cumsum(1) == 1)
        return bool((first & (tokens.pos > 0) & (tokens.pos < self._frontier)).any())

    def drop(self, count: int) -> None:
        """Forget the last `count` tokens of each row, as if they had never been read.

        Raises ValueError if a layer sums up what it reads (see `back`), or if a ring has no room for so many (`slack`).
        """
        if count and self._documents is not None:
            raise ValueError("a layer sums up what it reads, so no token can be dropped: go back to a `point`")
        self._drop(count)

    def _drop(self, count: int) -> None:
        if not 0 <= count <= self.used:
            raise ValueError(f"the cache holds {self.used} tokens, so {count} cannot be dropped")
        if count > self.slack and any(slots.size < self.used for slots in self._slots.values()):
            raise ValueError(f"rings keep {self.slack} tokens more than they show, so {count} cannot be dropped")
        self.used -= count
        for slots in self._slots.values():
            slots.drop(count, self.used)

    def point(self) -> Point:
        """Where the cache is now, for `back`: the count of tokens, and the states, which are small."""
        documents = self._documents
        known = None if documents is None else (documents.before, documents.after, documents.plain)
        return Point(self.used, [state.value.clone() for state in self._states()], known)

    def back(self, point: Point) -> None:
        """Forget what was read after `point`. Of rings, at most `slack` tokens."""
        self._drop(self.used - point.used)
        for state, value in zip(self._states(), point.states, strict=True):
            state.value.copy_(value)
        if self._documents is not None and point.documents is not None:
            self._documents.before, self._documents.after, self._documents.plain = point.documents

    @property
    def drops(self) -> bool:
        """Whether single tokens can be dropped: no layer sums up what it reads."""
        return self._documents is None

    def take(self, rows: Int[Tensor, "B"]) -> None:
        """Row i goes on as row rows[i] was; only rows that change are moved."""
        moved = (rows != torch.arange(self.batch, device=self.device)).nonzero()[:, 0]
        if not len(moved):
            return
        self._take(rows)
        for store in self._all():
            for buffer in store.buffers():
                shown = buffer[:, : self.used] if isinstance(store, Store) and type(store.slots) is Line else buffer
                shown[moved] = shown[rows[moved]]

    def repeat(self: CacheKind, count: int) -> CacheKind:
        """A copy in which each row stands `count` times, one after another."""
        rows = torch.arange(self.batch, device=self.device).repeat_interleave(count)
        other = copy.copy(self)
        other.batch = len(rows)
        other._slots = {key: copy.copy(slots) for key, slots in self._slots.items()}
        other._documents = copy.copy(self._documents)
        other._take(rows)
        anew = {id(old): new for old, new in zip(self._slots.values(), other._slots.values(), strict=True)}
        other.stores = [
            [None if store is None else store.taken(rows, anew, other._documents) for store in layer]
            for layer in self.stores
        ]
        return other

    def _take(self, rows: Int[Tensor, "N"]) -> None:
        """The same to the record of where tokens sit."""
        for slots in self._slots.values():
            slots.take(rows)
        if self._documents is not None:
            self._documents.take(rows)

    def copy(self: CacheKind) -> CacheKind:
        """The same rows once more, for texts that begin alike."""
        return self.repeat(1)

    def _all(self) -> list[Store | Memory | State]:
        return [store for layer in self.stores for store in layer if store is not None]

    def _states(self) -> list[State]:
        return [store for store in self._all() if isinstance(store, State)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states (the tokens' own record is small and not counted)."""
        return sum(store.nbytes for store in self._all())


class Rows(Cache):
    """A cache whose rows come and go, each at its own length. A row is read into a cache of its own, then `put` here.

    `Rows(...)` for one row and for many keep a position in equal slots; `max_len` bounds each row's positions. Sources
    of an encoder-decoder stand side by side, from the first column on: after a `put`, the next piece is told a memory
    as wide as the longest so far, whose tokens say which columns of each row are real; its hidden states are not read.
    """

    def _new_slots(self, reach: int, first: int) -> Slots:
        return Places(self.batch, reach, self.device) if reach == self.max_len else super()._new_slots(reach, first)

    def _check(self, tokens: Tokens) -> None:
        if tokens.end > self.max_len:
            raise ValueError(
                f"a row has {self.max_len} positions, but {tokens.end} are asked for: give a larger max_len"
            )

    def put(self, row: int, other: Rows) -> None:
        """Row `row` goes on as the one row of `other`; what it held is forgotten."""
        for slots, its in zip(self._slots.values(), other._slots.values(), strict=True):
            slots.put(row, its)
        if self._documents is not None and other._documents is not None:
            self._documents.put(row, other._documents)
        for mine, its_store in zip(self._all(), other._all(), strict=True):
            if isinstance(mine, Memory) and isinstance(its_store, Memory):
                mine.put(row, its_store, self.batch)
                continue
            for buffer, its_buffer in zip(mine.buffers(), its_store.buffers(), strict=True):
                buffer[row] = its_buffer[0]


class Point(NamedTuple):
    """A place in a text that a cache can go back to."""

    used: int
    states: list[Tensor]
    documents: tuple[Tensor, Tensor, bool] | None


class Store:
    """Keys and values of one layer, (B, size, G, K) each."""

    def __init__(self, slots: Slots, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.slots = slots
        self.k = torch.zeros(shape, dtype=dtype, device=slots.device)
        self.v = torch.zeros(shape, dtype=dtype, device=slots.device)

    def append(
        self, k: Float[Tensor, "B T G K"], v: Float[Tensor, "B T G K"]
    ) -> tuple[Float[Tensor, "B S G K"], Float[Tensor, "B S G K"], Tokens]:
        """Keep k and v; give back all that this piece may look at, and where those tokens sit."""
        if torch.is_grad_enabled() and k.requires_grad:
            raise ValueError("a cache keeps no gradients: call the model under torch.inference_mode()")
        return self.slots.write(self.k, k), self.slots.write(self.v, v), self.slots.keys

    def buffers(self) -> tuple[Tensor, ...]:
        return self.k, self.v

    def taken(self, rows: Int[Tensor, "N"], slots: dict[int, Slots], documents: Documents | None) -> Store:
        """A store of its own for these rows."""
        other = copy.copy(self)
        other.slots, other.k, other.v = slots[id(self.slots)], self.k[rows], self.v[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Memory:
    """Keys and values of the encoder's output, computed at the first step and read from then on."""

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.kept: KeysValues | None = None

    def fill(self, source: Tensor, project: Callable[[Tensor], KeysValues]) -> KeysValues:
        if self.kept is None:
            self.kept = project(source)
        if self.source is None:
            self.source = source
        if source is not self.source:
            raise ValueError("this cache was filled from another encoder output: make a new cache for a new source")
        return self.kept

    def buffers(self) -> tuple[Tensor, ...]:
        return self.kept or ()

    def taken(self, rows: Int[Tensor, "N"], slots: dict[int, Slots], documents: Documents | None) -> Memory:
        """A store of its own for these rows; the source that it is told next must be these rows of this one's."""
        other = Memory()
        other.kept = None if self.kept is None else (self.kept[0][rows], self.kept[1][rows])
        return other

    def put(self, row: int, other: Memory, batch: int) -> None:
        """Row `row` of `batch` goes on as the one row of `other`, with zeros behind; the next source is any."""
        if other.kept is None:
            raise ValueError("this row has read no source yet: let the model read a piece of its text before `put`")
        none = [new.new_zeros(batch, 0, *new.shape[2:]) for new in other.kept]
        k, v = (_with_row(old, row, new) for old, new in zip(self.kept or none, other.kept, strict=True))
        self.kept, self.source = (k, v), None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.kept) if self.kept else 0


def _with_row(old: Float[Tensor, "B S G K"], row: int, new: Float[Tensor, "1 R G K"]) -> Float[Tensor, "B C G K"]:
    """`old`, widened if need be, with `new` as its row and zeros behind it: NaN would show through a mask."""
    length = new.shape[1]
    if length > old.shape[1]:
        old = nn.functional.pad(old, (0, 0, 0, 0, 0, length - old.shape[1]))
    old[row, :length], old[row, length:] = new[0], 0
    return old


class State:
    """What one layer makes of all it has read, `value` (B, *shape): zeros until a row has read something.

    It speaks of the document that its row is in (`documents.before` this piece): a layer drops it for another one.
    """

    def __init__(self, documents: Documents, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.documents = documents
        self.value = torch.zeros(shape, dtype=dtype, device=documents.after.device)

    def keep(self, value: Tensor) -> None:
        """The value behind this piece, in place of that before it."""
        if torch.is_grad_enabled() and value.requires_grad:
            raise ValueError("a cache keeps no gradients: call the model under torch.inference_mode()")
        self.value.copy_(value)

    def buffers(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def taken(self, rows: Int[Tensor, "N"], slots: dict[int, Slots], documents: Documents | None) -> State:
        """A store of its own for these rows."""
        other = copy.copy(self)
        assert documents is not None
        other.documents, other.value = documents, self.value[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.value.nbytes
