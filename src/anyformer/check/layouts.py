"""Layouts: texts of every layout for laws to ask about: plain, padded, packed, marked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from anyformer.block import Stack
from anyformer.check.law import Trials, needs
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject, Text
from anyformer.parts.attention import Attention
from anyformer.parts.moe import MoE
from anyformer.parts.op import Op
from anyformer.parts.per_head import PerHead
from anyformer.tokens import Tokens

__all__ = ["cut", "lengths", "marked", "packed", "padded", "planning", "steady", "texts"]

PLANNED = 64
"""What schedules that plan for a length plan for."""


def planning(run: Callable[[Subject], Trials]) -> Callable[[Subject], Trials]:
    """Schedules that plan for a length plan for one and the same, however long a law's texts are: else a longer batch
    would rightly change all that is said."""

    @functools.wraps(run)
    def planned(s: Subject) -> Trials:
        with _planned(s, PLANNED):
            yield from run(s)

    return planned


@contextlib.contextmanager
def _planned(s: Subject, length: int) -> Iterator[None]:
    def plan(stack: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, ctx, *rest = given
        return x, dataclasses.replace(ctx, context_len=length), *rest

    hooks = [stack.register_forward_pre_hook(plan) for stack in s.module.modules() if isinstance(stack, Stack)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def steady(s: Subject) -> None:
    """Leave the law where rounding alone may change what is computed."""
    routed = isinstance(s, Ours) and any(isinstance(op, MoE) for op in s.ops())
    needs(not routed or torch.finfo(s.dtype).bits > 16, "in half precision, rounding chooses between experts")


def lengths(s: Subject, wanted: Sequence[int]) -> list[int]:
    """Those that the model has positions for, and one that goes beyond what all tokens may see."""
    beyond = [s.frontier + 2] if s.frontier else []
    return sorted({s.longest(length) for length in (*wanted, *beyond)})


def marked(s: Subject, text: Text) -> Text:
    """Every third token of each document marked, if the model looks at marks."""
    if not (isinstance(s, Ours) and any(map(_looks_at_marks, s.ops()))):
        return text
    source = None if text.source_tokens is None else _marked(text.source_tokens)
    return dataclasses.replace(text, tokens=_marked(text.tokens), source_tokens=source)


def _looks_at_marks(op: Op) -> bool:
    """Whether marked tokens see, or are seen, otherwise than others."""
    if op.marked_see_all or not isinstance(op, Attention):
        return op.marked_see_all
    tokens = Tokens.arange(1, 41)
    patterns = op.pattern.patterns if isinstance(op.pattern, PerHead) else (op.pattern,)
    other = _marked(tokens)
    return not all(torch.equal(part.mask(tokens, tokens), part.mask(other, other)) for part in patterns)


def _marked(tokens: Tokens) -> Tokens:
    return dataclasses.replace(tokens, mark=tokens.real & (tokens.pos % 3 == 0))


def texts(s: Subject, lengths: Sequence[int]) -> list[Text]:
    """A plain text of each length, a row each; where sources are read, they are of other lengths."""
    return [marked(s, s.text(1, s.longest(length), source=1 + 2 * i % 5)) for i, length in enumerate(lengths)]


def padded(s: Subject, rows: Sequence[Text], side: str, extra: int, *, source_side: str | None = None) -> Text:
    """The rows as one batch, `extra` columns wider than the longest; pads have random ids. Sources likewise."""
    ids, tokens = _padded(s, [row.ids[0] for row in rows], side, extra)
    sources = [row.source[0] for row in rows if row.source is not None]
    source, source_tokens = _padded(s, sources, source_side or side, extra) if sources else (None, None)
    return marked(s, Text(ids, tokens, source, source_tokens))


def _padded(s: Subject, rows: Sequence[Int[Tensor, "N"]], side: str, extra: int) -> tuple[Int[Tensor, "B T"], Tokens]:
    width = max(map(len, rows)) + extra
    ids = s.ids(len(rows), width)
    keep = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        spare = width - len(row)
        begin = {"left": spare, "right": 0, "both": (spare + 1) // 2}[side]
        ids[i, begin : begin + len(row)], keep[i, begin : begin + len(row)] = row, True
    return ids, Tokens.padded(keep)


def packed(s: Subject, rows: Sequence[Sequence[Text]], extra: int = 0) -> Text:
    """The documents of each row one after another, then padding; sources likewise, by the same numbers."""
    ids, tokens = _packed(s, [[text.ids[0] for text in row] for row in rows], extra)
    source, source_tokens = None, None
    if s.sources:
        sources = [[text.source[0] for text in row if text.source is not None] for row in rows]
        source, source_tokens = _packed(s, sources, extra)
    return marked(s, Text(ids, tokens, source, source_tokens))


def _packed(s: Subject, rows: Sequence[Sequence[Int[Tensor, "N"]]], extra: int) -> tuple[Int[Tensor, "B T"], Tokens]:
    ids = s.ids(len(rows), max(sum(map(len, row)) for row in rows) + extra)
    document = torch.full_like(ids, -1)
    for i, row in enumerate(rows):
        for number, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(map(len, row))])):
            ids[i, begin:end], document[i, begin:end] = row[number], number
    return ids, Tokens.packed(document)


def cut(text: Text, begin: int, end: int) -> Text:
    """The tokens of the columns from `begin` up to `end`; the source stays whole."""
    return Text(text.ids[:, begin:end], text.tokens.cut(begin, end), text.source, text.source_tokens)
