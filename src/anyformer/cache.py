"""Cache: keys and values of earlier tokens, owned by the caller.

    cache = model.new_cache(batch=2, max_len=512)
    logits = model(prompt, tokens, cache=cache)              # any split of the text into pieces gives the same logits
    logits = model(ids, tokens.after(), cache=cache)

Memory is laid out once and written in place. A layer whose pattern reaches back n positions keeps a ring of n slots;
others keep `max_len`. `append` gives back the keys *and their tokens*: as masks speak of positions, the order of
slots is free, and rings, left padding and ragged batches need no special mask. Where tokens sit is kept once for all
layers of one size, not once a layer. A layer that sums up what it has read keeps a `State`, whose size is fixed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.parts.pattern import Pattern
from anyformer.spec import SpecError
from anyformer.tokens import Tokens

__all__ = ["Cache"]

KeysValues = tuple[Tensor, Tensor]


class Cache:
    """Everything that decoding keeps. Made by `model.new_cache`; `stores[layer][branch]` belong to the parts."""

    def __init__(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        if max_len < 1:
            raise ValueError(f"`max_len` must be at least 1, but is {max_len}")
        self.batch, self.max_len, self.dtype, self.device = batch, max_len, dtype, device
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
        if reach is None or max(reach, 1) + first >= self.max_len:
            reach, first = self.max_len, 0
        reach = max(reach, 1)
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

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states (the tokens' own record is small and not counted)."""
        stores = [store for layer in self.stores for store in layer if store is not None]
        return sum(store.nbytes for store in stores)


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
            self.source, self.kept = source, project(source)
        if source is not self.source:
            raise ValueError("this cache was filled from another encoder output: make a new cache for a new source")
        return self.kept

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.kept) if self.kept else 0


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

    @property
    def nbytes(self) -> int:
        return self.value.nbytes


class Documents:
    """Which document each row is in, `before` this piece and `after` it: (B,), -1 for none yet. For all states at once.

    `plain` as long as all pieces are plain text. A document is one run of tokens: padding may lie in it, no other one.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.before = self.after = torch.full((batch,), -1, device=device)
        self.plain = True

    def advance(self, tokens: Tokens) -> None:
        self.plain = self.plain and tokens.start is not None
        self.before = self.after
        if tokens.length:
            order = torch.arange(tokens.length, device=tokens.seg.device)
            last = torch.where(tokens.real, order, -1).amax(1, keepdim=True)
            seg = tokens.seg.gather(1, last.clamp(min=0))
            self.after = torch.where(last >= 0, seg, self.before[:, None])[:, 0]


class Slots:
    """Which token sits in which slot, for all layers of one size. `keys` is where the visible keys sit."""

    def __init__(self, batch: int, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.keys = Tokens.arange(batch, 0, device=device)
        self.pos = torch.zeros(batch, size, dtype=torch.long, device=device)
        self.seg = torch.full_like(self.pos, -1)
        self.mark: Tensor | None = None
        self.plain = True
        self.write: Callable[[Tensor, Tensor], Tensor] = lambda buffer, new: new

    def advance(self, tokens: Tokens, used: int) -> None:
        """Choose slots for `tokens`, and set `keys` and `write` for this piece."""
        if tokens.mark is not None and self.mark is None:
            self.mark = torch.zeros_like(self.seg, dtype=torch.bool)
        self.plain = self.plain and tokens.start == used and tokens.ordered and tokens.mark is None
        self._place(tokens, used)

    def _place(self, tokens: Tokens, used: int) -> None:
        raise NotImplementedError

    def _record(self, write: Callable[[Tensor, Tensor], Tensor], tokens: Tokens) -> Tokens:
        """Write the tokens' own record with the same `write` as keys and values; give back what it shows."""
        mark = None
        if self.mark is not None:
            mark = write(self.mark, torch.zeros_like(tokens.real) if tokens.mark is None else tokens.mark)
        return Tokens(write(self.pos, tokens.pos), write(self.seg, tokens.seg), mark)


class Line(Slots):
    """As many slots as tokens: each piece goes behind the last."""

    def _place(self, tokens: Tokens, used: int) -> None:
        end = used + tokens.length

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            buffer[:, used:end] = new
            return buffer[:, :end]

        seen = self._record(write, tokens)
        self.keys = Tokens(seen.pos, seen.seg, start=0) if self.plain else seen
        self.write = write


class Ring(Slots):
    """As many slots as the pattern reaches back: position p goes to slot p mod size, over what is out of reach."""

    def _place(self, tokens: Tokens, used: int) -> None:
        if tokens.length == 1:
            self.write = self._one(tokens)
            seen = self._record(self.write, tokens)
            filled = min(used + 1, self.size)
            self.keys = self._plain(seen, used + 1 - filled) if self.plain else seen
        else:
            self.write = self._several(tokens, min(used, self.size) if self.plain else self.size)
            seen = self._record(self.write, tokens)
            self.keys = self._plain(seen, max(used - self.size, 0)) if self.plain else seen

    def _plain(self, seen: Tokens, start: int) -> Tokens:
        return Tokens(seen.pos, seen.seg, start=start, ordered=start == 0)

    def _one(self, tokens: Tokens) -> Callable[[Tensor, Tensor], Tensor]:
        """One token a row: it may write first, for what it overwrites is out of its own reach. Padding is not kept."""
        if self.plain:
            assert tokens.start is not None
            slot, filled = tokens.start % self.size, min(tokens.start + 1, self.size)

            def write_plain(buffer: Tensor, new: Tensor) -> Tensor:
                buffer[:, slot : slot + 1] = new
                return buffer[:, :filled]

            return write_plain
        rows = torch.arange(tokens.batch, device=self.device)[:, None]
        slots, real = self._slot(tokens.pos), tokens.real

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            buffer[rows, slots] = torch.where(_like(real, new), new, buffer[rows, slots])
            return buffer

        return write

    def _several(self, tokens: Tokens, filled: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Several tokens: they see what was kept and one another; then the last ones of each row are kept."""
        source = self._sources(tokens)

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            seen = torch.cat((buffer[:, :filled], new), 1) if filled else new
            index = _like(source.clamp(min=0), new).expand(-1, -1, *new.shape[2:])
            buffer.copy_(torch.where(_like(source >= 0, new), new.gather(1, index), buffer) if new.shape[1] else buffer)
            return seen

        return write

    def _sources(self, tokens: Tokens) -> Int[Tensor, "B size"]:
        """For each slot, the last token of this piece that belongs there; -1 for none."""
        order = torch.arange(tokens.length, device=self.device).expand_as(tokens.pos)
        order = order.masked_fill(~tokens.real, -1)
        none = torch.full_like(self.seg, -1)
        return none.scatter_reduce(1, self._slot(tokens.pos), order, "amax")

    def _slot(self, pos: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        return pos % self.size


class Sinks(Ring):
    """A ring, and beside it the `first` positions of the document, which are kept for good (Xiao et al. 2024)."""

    def __init__(self, batch: int, reach: int, first: int, device: torch.device) -> None:
        super().__init__(batch, first + reach, device)
        self.first, self.reach = first, reach
        self.plain = False  # what is kept is not one run of positions

    def _slot(self, pos: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        return torch.where(pos < self.first, pos, self.first + (pos - self.first) % self.reach)


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """(B, T) as (B, T, 1, ...), to go with x."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))
