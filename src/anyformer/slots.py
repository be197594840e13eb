"""Slots: where the tokens that a cache keeps sit. The order of slots is free, as masks speak of positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from anyformer.tokens import Tokens

__all__ = ["Documents", "Line", "Places", "Ring", "Sinks", "Slots"]


class Documents:
    """Which document each row is in, `before` this piece and `after` it: (B,), -1 for none yet. For all states at once.

    `plain` as long as all pieces are plain text. A document is one run of tokens: padding may lie in it, no other one.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.before = self.after = torch.full((batch,), -1, device=device)
        self.plain = True

    def take(self, rows: Int[Tensor, "N"]) -> None:
        """Row i goes on as row rows[i] was."""
        self.before, self.after = self.before[rows], self.after[rows]

    def put(self, row: int, other: Documents) -> None:
        """Row `row` goes on as the first row of `other`."""
        self.plain = False
        self.after = self.after.clone()
        self.after[row] = other.after[0]

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

    def drop(self, count: int, used: int) -> None:
        """Forget the last `count` tokens of each row; `used` are left."""
        end = torch.where(self.seg >= 0, self.pos, -1).amax(1, keepdim=True) + 1
        self.seg.masked_fill_(self.pos >= end - count, -1)

    def take(self, rows: Int[Tensor, "N"]) -> None:
        """Row i goes on as row rows[i] was."""
        self.pos, self.seg = self.pos[rows], self.seg[rows]
        self.mark = None if self.mark is None else self.mark[rows]

    def put(self, row: int, other: Slots) -> None:
        """Row `row` goes on as the first row of `other`, which has as many slots."""
        self.plain = False
        self.pos[row], self.seg[row] = other.pos[0], other.seg[0]
        if other.mark is not None and self.mark is None:
            self.mark = torch.zeros_like(self.seg, dtype=torch.bool)
        if self.mark is not None:
            self.mark[row] = False if other.mark is None else other.mark[0]

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

    def drop(self, count: int, used: int) -> None:
        """They are the last columns, which the next piece overwrites."""

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

    def drop(self, count: int, used: int) -> None:
        super().drop(count, used)
        self.plain = self.plain and used + count <= self.size  # else the slots hold a gap where older tokens were

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
        filled = self._filled(tokens)

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            buffer[rows, slots] = torch.where(_like(real, new), new, buffer[rows, slots])
            return buffer[:, :filled]

        return write

    def _filled(self, tokens: Tokens) -> int:
        """How many slots may hold something that one token a row looks at."""
        return self.size

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


class Places(Ring):
    """A slot for every position, for rows that are at different ones; what lies behind the furthest is not shown."""

    def _filled(self, tokens: Tokens) -> int:
        return min(tokens.end, self.size)


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
