"""Recurrent networks in the place of attention, so that both can be compared: same data, training and commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.parts.op import Mixer, OpModule, Result, Shared
from anyformer.tokens import Tokens

__all__ = ["Recurrent", "RecurrentModule"]

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
KEPT = {"rnn": 1, "gru": 7, "lstm": 7}  # numbers a unit that torch's own cells keep for the backward pass
STATES = {"rnn": 1, "gru": 1, "lstm": 2}


class Recurrent(Mixer, kind="recurrent"):
    """torch's RNN (tanh; Elman 1990), GRU (Cho et al. 2014) or LSTM (Hochreiter & Schmidhuber 1997), `layers` deep.

    `hidden` None is the model's width; another width is mapped back to it. Its weights start as torch starts them. A
    document is one run of tokens, in their order; the state that decoding keeps is of one size whatever the length.
    """

    one_way = True
    cell: Literal["rnn", "gru", "lstm"] = "gru"
    hidden: PositiveInt | None = None
    layers: PositiveInt = 1

    def build(self, dim: int, shared: Shared) -> RecurrentModule:
        return RecurrentModule(self, dim)

    def cost(self, dim: int, length: int) -> Cost:
        hidden, gates = self.hidden or dim, GATES[self.cell]
        inputs = [dim] + [hidden] * (self.layers - 1)
        maps = [linear(i, gates * hidden, length, bias=True) for i in inputs]
        maps += [linear(hidden, gates * hidden, length, bias=True) for _ in inputs]
        between = self.layers - 1 + (hidden != dim)
        kept = length * (dim + (self.layers * KEPT[self.cell] + between) * hidden)
        own = Cost(activations=kept, cache=STATES[self.cell] * self.layers * hidden)
        return own.plus(*maps, *([linear(hidden, dim, length)] if hidden != dim else []))


class Runs(NamedTuple):
    """The documents of a batch as torch packs sequences: first all first tokens, then all second ones, long runs first.

    `at` (N,) is where each real token is among B × T; `sizes` how many runs are so long (on the CPU); `row` (M,) the
    row of each run; `goes_on` whether it goes on with what its row read before; `last` (B,) the last run of each row,
    -1 for none.
    """

    at: Int[Tensor, "N"]
    sizes: Int[Tensor, "L"]
    row: Int[Tensor, "M"]
    goes_on: Bool[Tensor, "M"]
    last: Int[Tensor, "B"]

    @classmethod
    def of(cls, tokens: Tokens, before: Int[Tensor, "B"] | None) -> Runs:
        at = tokens.real.flatten().nonzero()[:, 0]
        row, seg, order = at // max(tokens.length, 1), tokens.seg.flatten()[at], torch.arange(len(at), device=at.device)
        begins = torch.ones_like(at, dtype=torch.bool)
        begins[1:] = (row[1:] != row[:-1]) | (seg[1:] != seg[:-1])
        run, starts = begins.cumsum(0) - 1, begins.nonzero()[:, 0]
        step = order - starts[run]
        by_length = run.bincount(minlength=len(starts)).argsort(descending=True, stable=True)
        rank = by_length.argsort()
        nobody = torch.full((tokens.batch,), -1, device=at.device)
        latest = nobody.scatter_reduce(0, row, run, "amax")
        heads = row[starts]
        goes_on = torch.zeros_like(begins[starts])
        if before is not None:
            earlier = torch.ones_like(goes_on)
            earlier[1:] = heads[1:] != heads[:-1]
            goes_on = earlier & (seg[starts] == before[heads])
        return cls(
            at[(step * len(starts) + rank[run]).argsort()],
            step.bincount().cpu(),
            heads[by_length],
            goes_on[by_length],
            torch.where(latest >= 0, rank[latest.clamp(min=0)], -1) if len(at) else nobody,
        )


class RecurrentModule(OpModule):
    def __init__(self, spec: Recurrent, dim: int) -> None:
        super().__init__()
        hidden = spec.hidden or dim
        self.cell = CELLS[spec.cell](dim, hidden, spec.layers, batch_first=True)
        self.out = nn.Identity() if hidden == dim else nn.Linear(hidden, dim, bias=False)
        self.shape = (STATES[spec.cell], spec.layers, hidden)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        store = ctx.store
        state = None if store is None else store.value.permute(1, 2, 0, 3)
        if not x.numel():
            return self.out(x.new_zeros(*x.shape[:2], self.shape[-1])), None
        if ctx.tokens.start is not None and (store is None or store.documents.plain):
            y, state = self._run(x, state)
        else:
            y, state = self._by_document(x, state, ctx)
        if store is not None:
            store.keep(state.permute(2, 0, 1, 3))
        return self.out(y), None

    def _by_document(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "k L B U"] | None, ctx: Context
    ) -> tuple[Float[Tensor, "B T U"], Float[Tensor, "k L B U"]]:
        """Each document from zeros, or from where the cache left it; padding is not read, and gives zeros."""
        before = None if ctx.store is None else ctx.store.documents.before
        runs = ctx.once("runs", (ctx.tokens,), lambda: Runs.of(ctx.tokens, before))
        known = x.new_zeros(*self.shape[:2], x.shape[0], self.shape[2]) if state is None else state
        y = x.new_zeros(x.shape[0] * x.shape[1], self.shape[2])
        if len(runs.at):
            first = known[:, :, runs.row].masked_fill(~runs.goes_on[:, None], 0.0)
            read, behind = self._run(PackedSequence(x.flatten(0, 1)[runs.at], runs.sizes), first)
            y = y.index_copy(0, runs.at, read.data)
            behind = behind[:, :, runs.last.clamp(min=0)]
            known = torch.where((runs.last >= 0)[:, None], behind, known)
        return y.view(*x.shape[:2], -1), known

    def _run(self, x: Any, state: Float[Tensor, "k L M U"] | None) -> tuple[Any, Float[Tensor, "k L M U"]]:
        """torch's module, with the states of an LSTM as one tensor."""
        given: Any = None
        if state is not None:
            given = tuple(state.contiguous()) if len(state) == 2 else state[0].contiguous()
        y, last = self.cell(x, given)
        return y, torch.stack(last) if isinstance(last, tuple) else last[None]

    def new_store(self, cache: Any) -> Any:
        return cache.state(self.shape)
