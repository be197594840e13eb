"""Tokens: where each token sits. Made once by whoever has the batch; masks, positions and caches all speak of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["Tokens"]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """Position and segment of every token of a batch.

    `pos` (B, T) counts from 0 in each document; `seg` (B, T) is equal for tokens of one document, and -1 for padding;
    `mark` (B, T) marks global tokens, if any. When `start` is a number, every row is one segment 0 without padding
    that holds the positions start .. start + T - 1, in this order if `ordered`: the common case, in which kernels take
    their fast path and need no mask. `start` is a promise about `pos` and `seg`; the constructors keep it.
    """

    pos: Int[Tensor, "*BT"]
    seg: Int[Tensor, "*BT"]
    mark: Bool[Tensor, "*BT"] | None = None
    start: int | None = None
    ordered: bool = True

    @classmethod
    def arange(cls, batch: int, length: int, *, start: int = 0, device: torch.device | str | None = None) -> Tokens:
        """`batch` rows at positions start, start + 1, ...: plain text."""
        pos = torch.arange(start, start + length, device=device).expand(batch, length)
        return cls(pos, torch.zeros_like(pos), start=start)

    @classmethod
    def padded(cls, keep: Bool[Tensor, "B T"]) -> Tokens:
        """Rows with padding on either side, or inside; `keep` is True where a token is real.

        A 0/1 mask of numbers is refused: its meaning differs between libraries, and it would be easy to add it to
        scores. Write `Tokens.padded(mask.bool())`.
        """
        if keep.dtype != torch.bool:
            raise ValueError(
                f"`keep` must be a bool tensor, True for real tokens, but is {keep.dtype}: use keep.bool()"
            )
        if keep.all():
            return cls.arange(*keep.shape, device=keep.device)
        return cls((keep.long().cumsum(1) - 1).clamp(min=0), keep.long() - 1)

    @classmethod
    def packed(cls, document: Int[Tensor, "B T"]) -> Tokens:
        """Rows of several documents, one after another: `document` is equal within one, and negative for padding."""
        if (document == 0).all():
            return cls.arange(*document.shape, device=document.device)
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        runs = document.masked_fill(~begins | (document < 0), -1).sort(1).values
        if ((runs[:, 1:] == runs[:, :-1]) & (runs[:, 1:] >= 0)).any():
            raise ValueError(
                "a document number comes back later in its row: give each document one run of its own number"
            )
        slot = torch.arange(document.shape[1], device=document.device)
        pos = slot - torch.where(begins, slot, 0).cummax(1).values
        return cls(pos.masked_fill(document < 0, 0), document.clamp(min=-1))

    @property
    def batch(self) -> int:
        return self.pos.shape[0]

    @property
    def length(self) -> int:
        return self.pos.shape[1]

    @property
    def real(self) -> Bool[Tensor, "B T"]:
        return self.seg >= 0

    @property
    def end(self) -> int:
        """One past the largest position (waits for the device unless `start` is known)."""
        if self.start is not None:
            return self.start + self.length
        return int(self.pos.max()) + 1 if self.pos.numel() else 0

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The same change to `pos`, `seg` and `mark`; what was known of their order is forgotten."""
        return Tokens(change(self.pos), change(self.seg), None if self.mark is None else change(self.mark))

    def row(self) -> Tokens:
        """One row that stands for all, where all are alike; else these tokens."""
        alike = self.start is not None and self.mark is None and self.batch > 1
        return dataclasses.replace(self, pos=self.pos[:1], seg=self.seg[:1]) if alike else self

    def take(self, rows: Int[Tensor, "N"]) -> Tokens:
        """These rows, in this order."""
        mark = None if self.mark is None else self.mark[rows]
        return dataclasses.replace(self, pos=self.pos[rows], seg=self.seg[rows], mark=mark)

    def cut(self, begin: int, end: int) -> Tokens:
        """The tokens of the columns from `begin` up to `end`."""
        if self.start is not None and self.ordered:
            cut = Tokens.arange(self.batch, end - begin, start=self.start + begin, device=self.pos.device)
            return dataclasses.replace(cut, mark=None if self.mark is None else self.mark[:, begin:end])
        return self.map(lambda t: t[:, begin:end])

    def after(self, length: int = 1) -> Tokens:
        """The tokens that follow the last real one of each row."""
        if self.start is not None:
            return Tokens.arange(self.batch, length, start=self.start + self.length, device=self.pos.device)
        step = torch.arange(length, device=self.pos.device)
        last = torch.where(self.real, torch.arange(self.length, device=self.pos.device), -1).amax(1, keepdim=True)
        at = last.clamp(min=0)
        pos = torch.where(last >= 0, self.pos.gather(1, at) + 1, torch.zeros_like(at)) + step
        return Tokens(pos, self.seg.gather(1, at).clamp(min=0).expand_as(pos))

    @staticmethod
    def cat(parts: list[Tokens]) -> Tokens:
        """Side by side along T."""
        mark = None
        if any(part.mark is not None for part in parts):
            mark = torch.cat(
                [torch.zeros_like(p.seg, dtype=torch.bool) if p.mark is None else p.mark for p in parts], 1
            )
        return Tokens(torch.cat([p.pos for p in parts], 1), torch.cat([p.seg for p in parts], 1), mark)
