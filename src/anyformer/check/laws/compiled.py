"""Compiled: as eager, in few graphs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anyformer.cache import Cache
from anyformer.check.changed import small
from anyformer.check.law import ALLOWED, Law, Trial, Trials, apart, holds, law
from anyformer.check.layouts import cut
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject, Text
from anyformer.parts.moe import MoE
from anyformer.parts.position import Rotary

__all__ = ["LAWS"]

LENGTHS = (5, 6, 7, 9)
Answering = Callable[[Text], Tensor]
Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


@law("compiled", "compiled equals eager, with few graphs", unit="graphs", limits=3.0, anew=False, once=True)
@torch.inference_mode()
def compiled(s: Subject) -> Trials:
    """A compiled model answers as the plain one, and is not compiled anew for each length or each step.

    torch.compile with the backend aot_eager, which traces all and is quick, for texts of 5, 6, 7 and 9 tokens, then for
    steps with a cache; of a model of ours for a small one of the same parts. Parts that look at numbers (experts,
    recurrent cells, dynamic frequencies) cut a graph in pieces, which are then counted as one.
    """
    s = Ours(small(s.spec).build(dtype=s.dtype, device=s.device).eval(), seed=s.seed) if isinstance(s, Ours) else s
    with _counting() as (compile_, graphs):
        texts = [s.text(2, s.longest(length)) for length in LENGTHS]
        yield from _few_graphs(s, [(compile_(s.answer), s.answer, text) for text in texts], graphs, "a text")
    if isinstance(s, Ours) and s.model.decoder is not None:
        with _counting() as (compile_, graphs):
            yield from _few_graphs(s, _steps(s, compile_), graphs, "a step behind a text")


def _few_graphs(s: Subject, calls: Iterable[tuple[Answering, Answering, Text]], graphs: list[int], what: str) -> Trials:
    """Each text by a compiled way to answer and a plain one, and how many graphs were made up to then."""
    pieces = 0
    for fast, plain, text in calls:
        got, right = fast(text), plain(text)
        pieces = pieces or (graphs[0] if _in_pieces(s) else 1)
        said = f"{what} of {text.length} tokens, ids {text.ids.tolist()}"
        off = apart(got, right, f"{said}: compiled, the answer is another")
        yield holds(off.error <= ALLOWED[got.dtype], off.said)
        yield Trial(graphs[0] / max(pieces, 1), f"{said}: {graphs[0]} graphs were made up to here")


def _steps(s: Ours, compile_: Compile) -> Iterator[tuple[Answering, Answering, Text]]:
    """The steps behind a prompt, of a compiled model and of a plain one, with a cache each."""
    text = s.text(2, s.longest(LENGTHS[-1]))
    begin = min(max(LENGTHS[0], s.frontier), text.length)
    memory = s.memory(text)

    def plain(piece: Text, cache: Cache) -> Tensor:
        return s.head(s.states(piece, memory=memory, cache=cache))

    fast, caches = compile_(plain), [s.model.new_cache(2, text.length + 1) for _ in range(2)]
    for cache in caches:
        plain(cut(text, 0, begin), cache)
    for at in range(begin, text.length):
        yield lambda piece: fast(piece, caches[0]), lambda piece: plain(piece, caches[1]), cut(text, at, at + 1)


def _in_pieces(s: Subject) -> bool:
    """Whether something in it looks at numbers, which cuts graphs in pieces (of other libraries nothing is known)."""
    if not isinstance(s, Ours):
        return True
    turned = [position for position in s.spec.positions() if isinstance(position, Rotary)]
    looks = any(position.frequencies.looks_at_length for position in turned)
    return looks or any(op.one_way or isinstance(op, MoE) for op in s.ops())


@contextlib.contextmanager
def _counting() -> Iterator[tuple[Compile, list[int]]]:
    """torch.compile by aot_eager, and how many graphs it was given."""
    import torch._dynamo

    plain, graphs = torch._dynamo.lookup_backend("aot_eager"), [0]

    def backend(module: Any, inputs: Any) -> Any:
        graphs[0] += 1
        return plain(module, inputs)

    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield functools.partial(torch.compile, backend=backend), graphs
    finally:
        torch._dynamo.reset()


LAWS: tuple[Law, ...] = (compiled,)
