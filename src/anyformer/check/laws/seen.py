"""What a token may see: nothing of the future, of padding, of batch mates, or of other documents."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.check.law import INTEGERS, Law, Trial, Trials, apart, holds, law, needs
from anyformer.check.layouts import cut, lengths, marked, packed, padded, planning, steady, texts
from anyformer.check.ours import Ours, ours
from anyformer.check.subject import Subject, Text
from anyformer.parts.attention import Attention
from anyformer.parts.head import PooledHead
from anyformer.parts.linear_attention import LinearAttention
from anyformer.parts.op import Mixer, Op
from anyformer.parts.pattern import Causal, Full
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

LENGTHS = (2, 3, 8)
AHEAD = "an encoder may look ahead"
SIDES = {"left": "right", "right": "left", "both": "both"}


def _told(rows: Sequence[Text]) -> str:
    return "; ".join(
        f"ids {row.ids[0].tolist()}" + ("" if row.source is None else f" with source {row.source[0].tolist()}")
        for row in rows
    )


def _finite(answer: Float[Tensor, "B T X"], said: str) -> Trial:
    return holds(answer.isfinite().all(), f"{said}: an answer is not finite")


# -- the future -------------------------------------------------------------------------------------------------------


@law("future", "no look at the future")
@torch.inference_mode()
@planning
def future(s: Subject) -> Trials:
    """What is said of a token does not depend on later tokens, nor on whether there are any.

    From each place on all tokens are replaced, then cut off; answers before it are compared.
    """
    needs(s.causal, AHEAD)
    steady(s)
    for length in lengths(s, LENGTHS):
        text = marked(s, s.text(1, length))
        whole = s.answer(text)
        for j in range(max(s.frontier, 1), length):
            changed = text.ids.clone()
            changed[:, j:] = s.other(changed[:, j:])
            said = f"ids {text.ids[0].tolist()}, from place {j} on {changed[0, j:].tolist()}: answers before it differ"
            yield apart(s.answer(text.saying(changed))[:, :j], whole[:, :j], said)
            said = f"ids {text.ids[0].tolist()}, cut off at place {j}: answers before it differ"
            yield apart(s.answer(cut(text, 0, j)), whole[:, :j], said)


@law("future_gradients", "no gradient from the future", unit="", limits=0.0)
@torch.enable_grad()
@planning
def future_gradients(s: Subject) -> Trials:
    """Nothing can be learned from later tokens: what is said of a token has no gradient in them, not even a small one.

    The largest gradient of a mean square of one answer in a later embedding, in plain, left-padded and packed texts; it
    is exactly 0. All other gradients are finite.
    """
    needs(s.causal, AHEAD)
    needs(not s.fixed, INTEGERS)
    for length in lengths(s, (2, 5)):
        one = [0] * length
        for layout, documents in {"plain": one, "padded": [-1, *one], "packed": [*one, *([1] * length)]}.items():
            tokens = Tokens.packed(torch.tensor([documents], device=s.device))
            text = marked(s, s.text(1, len(documents), tokens=tokens, source=length))
            if text.source_tokens is not None and layout == "packed":
                text = packed(s, [texts(s, [length, length])])
            yield from _gradients(s, text, f"{layout}, documents {documents}, ids {text.ids[0].tolist()}")


def _gradients(s: Subject, text: Text, said: str) -> Trials:
    embedded, answer = _traced(s, text)
    pos, seg = text.tokens.pos[0], text.tokens.seg[0]
    at = torch.arange(text.length, device=s.device)
    for i in at[seg >= 0][:-1].tolist()[:: max(text.length // 8, 1)]:
        (found,) = torch.autograd.grad(answer[0, i].square().mean(), embedded, retain_graph=True)
        yield _finite(found, f"{said}: the gradient of place {i}")
        later = (at > i) & ~((seg == seg[i]) & (pos < s.frontier))
        worst = found[0, later].abs().nan_to_num(nan=float("inf"))
        if worst.numel():
            yield Trial(float(worst.max()), f"{said}: place {i} has a gradient in a later one")


def _traced(s: Subject, text: Text) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T X"]]:
    """The embedded text, as a tensor that takes gradients, and the answer from it."""
    seen: list[Tensor] = []

    def watch(module: Any, given: Any, out: Tensor) -> Tensor:
        seen.append(out.detach().requires_grad_())
        return seen[-1]

    hook = s.embedding().register_forward_hook(watch)
    try:
        answer = s.answer(text)
    finally:
        hook.remove()
    return seen[-1], answer


# -- padding, batch mates, other documents ----------------------------------------------------------------------------


@law("padding", "padding and its content change nothing")
@torch.inference_mode()
@planning
def padding(s: Subject) -> Trials:
    """What is said of a real token is the same without any padding, wherever that is, and whatever ids it has.

    Rows of different lengths, padded left, right and on both sides, to two widths, with two contents, against each row
    alone; sources are padded too. All answers are finite, also at the pads.
    """
    steady(s)
    for count in (1, 3):
        rows = texts(s, (1, 3, 6)[:count])
        alone = [s.answer(row)[0] for row in rows]
        for (side, mirrored), extra in itertools.product(SIDES.items(), (1, 4)):
            batch = padded(s, rows, side, extra, source_side=side if extra == 1 else mirrored)
            for content in ("pads of random ids", "pads of other ids"):
                said = f"{_told(rows)}: {side} padded to {batch.length} columns, {content}"
                answers = s.answer(batch)
                for i, row in enumerate(rows):
                    yield apart(
                        answers[i, batch.tokens.real[i]], alone[i], f"{said}: row {row.ids[0].tolist()} differs"
                    )
                yield _finite(answers, said)
                if isinstance(s, Ours) and isinstance(s.spec.head, PooledHead):
                    each = torch.cat([_pooled(s, row) for row in rows])
                    yield apart(_pooled(s, batch), each, f"{said}: the pooled answers differ")
                batch = _other_pads(s, batch)


def _other_pads(s: Subject, text: Text) -> Text:
    text = text.saying(torch.where(text.tokens.real, text.ids, s.other(text.ids)))
    if text.source is None or text.source_tokens is None:
        return text
    return dataclasses.replace(text, source=torch.where(text.source_tokens.real, text.source, s.other(text.source)))


def _pooled(s: Ours, text: Text) -> Float[Tensor, "B L"]:
    states = s.states(text)
    answer: Tensor = s.model.head(states.x, states.tokens)
    return answer


@law("batch", "batch mates and batch size change nothing")
@torch.inference_mode()
@planning
def batch(s: Subject) -> Trials:
    """What is said of a row does not depend on which other rows are in its batch, nor on how many, nor on their order.

    Rows of one length, and rows of several, padded: in another order, each alone, and beside other neighbours.
    """
    steady(s)
    plain = [marked(s, s.text(2, 1)), marked(s, s.text(4, s.longest(5)))]
    for text in (*plain, padded(s, texts(s, (1, 3, 6)), "left", 0)):
        whole, count = s.answer(text), len(text.ids)
        said = f"rows {text.ids.tolist()}, real {text.tokens.real.int().tolist()}"
        order = [*range(1, count), 0]
        yield _alike(s.answer(text.rows(order)), whole[order], text.rows(order), f"{said}: in the order {order} differ")
        for i in range(count):
            row = text.rows([i])
            yield _alike(s.answer(row), whole[i : i + 1], row, f"{said}: row {i} alone differs")
        beside = torch.cat((text.ids[:1], s.other(text.ids[1:])))
        answers = s.answer(text.saying(beside))[:1]
        yield _alike(answers, whole[:1], text.rows([0]), f"{said}: row 0 beside {beside[1:].tolist()} differs")


def _alike(a: Float[Tensor, "B T X"], b: Float[Tensor, "B T X"], text: Text, said: str) -> Trial:
    """Two answers to one text, at its real tokens."""
    return apart(a[text.tokens.real], b[text.tokens.real], said)


@law("packing", "packed documents do not see each other")
@torch.inference_mode()
@planning
def packing(s: Subject) -> Trials:
    """What is said of a document is the same whether it stands alone or among others in one row.

    Documents of different lengths, one token long too, with padding behind them, against each alone; then one of them
    is replaced, and the others are compared. Sources are packed too, and belong to the document of their number.
    """
    steady(s)
    for shape, extra in ([[1, 1]], 0), ([[2, 1]], 1), ([[1, 4, 3], [4, 1, 2]], 1):
        rows = [texts(s, lengths) for lengths in shape]
        alone = [[s.answer(text)[0] for text in row] for row in rows]
        text = packed(s, rows, extra)
        answers = s.answer(text)
        said = "documents " + " | ".join(_told(row) for row in rows) + f", packed into {text.length} columns"
        for i, row in enumerate(alone):
            for number, wanted in enumerate(row):
                yield apart(answers[i, _in(text, number)[i]], wanted, f"{said}: document {number} of row {i} differs")
        for number in range(len(shape[0])):
            changed = s.answer(_replaced(s, text, number))
            others = text.tokens.real & ~_in(text, number)
            yield apart(changed[others], answers[others], f"{said}: with other ids in document {number} others differ")


def _in(text: Text, number: int) -> Bool[Tensor, "B T"]:
    return text.tokens.seg == number


def _replaced(s: Subject, text: Text, number: int) -> Text:
    """Other words in the documents of this number, and in their sources."""
    text = text.saying(torch.where(_in(text, number), s.other(text.ids), text.ids))
    if text.source is None or text.source_tokens is None:
        return text
    source = torch.where(text.source_tokens.seg == number, s.other(text.source), text.source)
    return dataclasses.replace(text, source=source)


# -- order ------------------------------------------------------------------------------------------------------------


@law("order", "only positions tell tokens apart")
@torch.inference_mode()
@planning
def order(s: Subject) -> Trials:
    """Tokens that are given in another order, each with its position, get the same answers in that order. Where nothing
    looks at positions, they need not even take these along.

    Permuted texts and sources, against those in order.
    """
    s = ours(s)
    needs(not any(map(_runs, s.ops())), "a mixer reads a document as a run of tokens, in their order")
    steady(s)
    for length in sorted({s.longest(length) for length in (2, 3, 7)}):
        text = marked(s, s.text(2, length, source=length))
        whole, way = s.answer(text), _shuffled(s, length)
        said = f"ids {text.ids[0].tolist()}, taken in the order {way.tolist()}"
        moved = dataclasses.replace(text, ids=text.ids[:, way], tokens=_moved(text.tokens, way))
        yield apart(s.answer(moved), whole[:, way], f"{said} with their positions: answers differ")
        if not s.causal and _blind(s, text.tokens):
            yield apart(s.answer(text.saying(moved.ids)), whole[:, way], f"{said}: without positions, answers differ")
        if text.source is not None and text.source_tokens is not None:
            way = _shuffled(s, text.source.shape[1])
            said = f"source {text.source[0].tolist()}, taken in the order {way.tolist()}"
            moved = dataclasses.replace(text, source=text.source[:, way])
            if _blind(s, text.source_tokens):
                yield apart(s.answer(moved), whole, f"{said}: without positions, answers differ")
            moved = dataclasses.replace(moved, source_tokens=_moved(text.source_tokens, way))
            yield apart(s.answer(moved), whole, f"{said} with their positions: answers differ")


def _moved(tokens: Tokens, way: Int[Tensor, "T"]) -> Tokens:
    return tokens.map(lambda t: t[:, way])


def _runs(op: Op) -> bool:
    """Whether it reads tokens as they come."""
    return op.one_way or (isinstance(op, LinearAttention) and op.pattern == Causal())


def _blind(s: Ours, tokens: Tokens) -> bool:
    """Whether nothing in the encoder can tell places apart."""
    mixers = [op for op in s.ops("encoder") if isinstance(op, Mixer)]
    see_all = all(isinstance(op, Attention | LinearAttention) and op.pattern == Full() for op in mixers)
    return see_all and not s.spec.positions() and tokens.mark is None


def _shuffled(s: Subject, length: int) -> Int[Tensor, "T"]:
    """An order that is not the usual one."""
    way = torch.randperm(length, generator=s.random).to(s.device)
    return way.flip(0) if bool((way.diff() == 1).all()) else way


LAWS: tuple[Law, ...] = (future, future_gradients, padding, batch, packing, order)
