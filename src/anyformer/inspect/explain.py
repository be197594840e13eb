"""Attention, step by step: every intermediate by name, and the weights of any layer and head, whatever kernel runs.

Fused kernels make no weights that could be given back, so what a layer asks is recorded, and worked out by the steps of
the reference kernel, for the rows that are wanted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.inspect.record import Note, alike, called, within
from anyformer.kernels.base import Request
from anyformer.kernels.reference import STEPS, Reference
from anyformer.model import Transformer
from anyformer.parts.attention import attend
from anyformer.parts.pattern import Causal, Pattern
from anyformer.parts.position import Position, PositionModule
from anyformer.tokens import Tokens

__all__ = ["Steps", "attention_weights", "explain", "explain_layer"]

REFERENCE = Reference()
SMALL = 10  # matrices of at most so many rows and columns are printed whole


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Steps:
    """One attention with every intermediate, in this order; a step that has nothing to do holds what it got.

    Axes: B rows of the batch, T queries, S keys, H query heads, G key-value heads, K their width, D the model's width.
    `print(steps)` writes the first row of the batch and the head `head`, with formulas; `draw` makes a picture of them.
    """

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S G K"]
    v: Float[Tensor, "B S G K"]
    q_turned: Float[Tensor, "B T H K"]
    k_turned: Float[Tensor, "B S G K"]
    scores: Float[Tensor, "B H T S"]
    scaled: Float[Tensor, "B H T S"]
    capped: Float[Tensor, "B H T S"]
    biased: Float[Tensor, "B H T S"]
    masked: Float[Tensor, "B H T S"]
    weights: Float[Tensor, "B H T S"]
    output: Float[Tensor, "B T H K"]
    request: Request
    x: Float[Tensor, "B T D"] | None = None
    projected: Float[Tensor, "B T D"] | None = None
    head: int = 0

    def formulas(self) -> dict[str, str]:
        """The steps that do something, in order, each with its formula."""
        asked, cap = self.request, self.request.softcap
        scheme = asked.position.spec if asked.position else None
        acts = getattr(scheme, "acts", None)
        root = " = scores / √K" if math.isclose(asked.scale, self.q.shape[-1] ** -0.5) else ""
        before = "capped" if cap else "scaled"
        biased = "biased" if acts == "scores" else before
        said = {
            "x": "what the layer reads" if self.x is not None else "",
            "q": "queries",
            "k": "keys",
            "v": "values",
            "q_turned": f"q turned by {scheme!r}" if acts == "heads" else "",
            "k_turned": f"k turned by {scheme!r}" if acts == "heads" else "",
            "scores": "q_turned · k_turnedᵀ" if acts == "heads" else "q · kᵀ",
            "scaled": f"scores · {asked.scale:.4g}{root}",
            "capped": f"{cap:g} · tanh(scaled / {cap:g})" if cap else "",
            "biased": f"{before} + bias of {scheme!r}" if biased == "biased" else "",
            "masked": f"{biased} where {asked.pattern!r} lets query t see key s, else -inf",
            "weights": "softmax(masked) along each row; 0 where nothing is seen",
            "output": "weights · v",
            "projected": "output of all heads · W_out" if self.projected is not None else "",
        }
        return {name: formula for name, formula in said.items() if formula}

    def matrix(self, name: str) -> Float[Tensor, "_ _"]:
        """The step `name` of the head that is shown, in the first row of the batch."""
        tensor: Tensor = getattr(self, name)[0]
        if name in ("x", "projected"):
            return tensor
        axis = 0 if name == "scores" or name in STEPS else 1
        return tensor.select(axis, self.head * tensor.shape[axis] // self.q.shape[2])

    def __str__(self) -> str:
        (batch, length, heads, width), (size, groups) = self.q.shape, self.k.shape[1:3]
        shared = "" if heads == groups else f", {groups} key-value heads"
        title = (
            f"attention of {length} queries over {size} keys; {heads} heads of width {width}{shared}; "
            f"shown: head {self.head}, row 0 of {batch}"
        )
        steps = self.formulas() if self.q.numel() and self.k.numel() else {}
        shown = [
            f"{name} {tuple(getattr(self, name).shape)} = {formula}\n{_text(self.matrix(name))}"
            for name, formula in steps.items()
        ]
        return "\n\n".join([title, *shown])

    def draw(
        self, path: str | Path, *, labels: Sequence[str] | None = None, key_labels: Sequence[str] | None = None
    ) -> None:
        """Write a PNG: scores, masked scores and weights as heat maps; `labels` are the texts of the queries' tokens,
        `key_labels` those of the keys (left out: the same, if there are as many)."""
        from anyformer.inspect.heat import plot_heat  # matplotlib is slow to import

        if key_labels is None and labels is not None and len(labels) == self.k.shape[1]:
            key_labels = labels
        maps = {name: self.matrix(name) for name in ("scores", "masked", "weights")}
        plot_heat(path, maps, labels=labels, key_labels=key_labels)


def explain(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    v: Float[Tensor, "B S G K"],
    *,
    pattern: Pattern = Causal(),  # noqa: B008 (frozen data)
    position: Position | PositionModule | None = None,
    tokens: Tokens | None = None,
    key_tokens: Tokens | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Steps:
    """What `attend` does with the same arguments, step by step; its output is that of the reference kernel."""
    note = Note()
    attend(
        q,
        k,
        v,
        pattern=pattern,
        position=position,
        tokens=tokens,
        key_tokens=key_tokens,
        kernel=note,
        scale=scale,
        softcap=softcap,
    )
    return _steps(q, k, note.requests[0])


def explain_layer(
    model: Transformer,
    ids: Int[Tensor, "B T"],
    layer: int = 0,
    head: int = 0,
    *,
    stack: str | None = None,
    branch: str = "mixer",
    **inputs: Any,
) -> Steps:
    """One attention layer of a model reading `ids`, step by step, with `x`, what it reads, and `projected`, its answer.

    `head` is the one that is printed and drawn; which layer, and `inputs`, are said as for `attention_weights`.
    """
    module, x, requests = called(model, ids, layer, stack, branch, inputs)
    if len(requests) > 1:
        raise ValueError(
            "this layer attends twice, as marked tokens have queries and keys of their own: see `attention_weights`"
        )
    request = requests[0]
    turned = getattr(module.position.spec, "acts", None) == "heads"
    q, k = (module.queries(x), module.keys_values(x)[0]) if turned else (request.q, request.k)
    (shown,) = within("head", [head], module.spec.num_heads)
    steps = _steps(q, k, request)
    return dataclasses.replace(steps, x=x, projected=module.out(steps.output.flatten(-2)), head=shown)


def attention_weights(
    model: Transformer,
    ids: Int[Tensor, "B T"],
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    stack: str | None = None,
    branch: str = "mixer",
    **inputs: Any,
) -> Float[Tensor, "B h n S"]:
    """How much each of the tokens `rows` of `ids` looks at each key, in one layer: h heads, n rows; all if left out.

    A row sums to 1, or is 0 where nothing is seen. Layers, heads and rows may be counted from the end (-1). `stack` is
    the decoder's, if there is one; `branch` "cross" is cross-attention, whose keys are the source's tokens. `inputs`
    are those of the model's call: `tokens`, `source`, `source_tokens`, `types`, `kernel`, ...; an encoder beside a
    decoder reads `source`, or `ids` if there is none.

    The layers below run as always, with the kernel that is forced or chosen; of this one, H × n × S numbers are made.
    Without dropout. ValueError if there is no such layer, head or row, or it is no attention.
    """
    first, *later = called(model, ids, layer, stack, branch, inputs).requests
    if rows is not None:
        at = torch.tensor(within("rows", rows, first.q.shape[1]), dtype=torch.long, device=first.q.device)
        first = _of_rows(first, at.expand(first.q.shape[0], -1))
    weights = _weights(first)
    for request in later:
        weights = _answered(weights, first.q_tokens, request)
    return weights if heads is None else weights[:, within("heads", heads, weights.shape[1])]


def _steps(q: Tensor, k: Tensor, request: Request) -> Steps:
    """The steps of a request; `q` and `k` as they were before their positions turned them."""
    runs = [REFERENCE.steps(part) for part in alike(request)]
    made: dict[str, Any] = {
        name: _joined([run[name] for run in runs], 2 if name == "output" else 1) for name in runs[0]
    }
    return Steps(q=q, k=k, v=request.v, q_turned=request.q, k_turned=request.k, request=request, **made)


def _weights(request: Request) -> Float[Tensor, "B H T S"]:
    return _joined([REFERENCE.weights(part) for part in alike(request)], 1)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _of_rows(request: Request, at: Int[Tensor, "B n"]) -> Request:
    """The same, asked for these queries only."""
    index = at[..., None, None].expand(-1, -1, *request.q.shape[2:])
    tokens = request.q_tokens.map(lambda t: t.gather(1, at))
    return dataclasses.replace(request, q=request.q.gather(1, index), q_tokens=tokens)


def _answered(weights: Tensor, rows: Tokens, later: Request) -> Float[Tensor, "B H n S"]:
    """`weights` of `rows`, but for tokens that a later request of the layer answers for (Longformer's marked ones)."""
    asked = later.q_tokens
    if not asked.length:
        return weights
    same = (rows.pos[:, :, None] == asked.pos[:, None]) & (rows.seg[:, :, None] == asked.seg[:, None])
    own = _weights(_of_rows(later, same.long().argmax(2)))
    return torch.where(same.any(2)[:, None, :, None], own, weights)


def _text(matrix: Float[Tensor, "_ _"]) -> str:
    """All numbers of a small matrix, what can be said of a large one."""
    if max(matrix.shape) > SMALL:
        seen = matrix[matrix != -torch.inf]
        hidden = f", {matrix.numel() - len(seen):,} hidden" if len(seen) < matrix.numel() else ""
        if not len(seen):
            return f"  all{hidden.removeprefix(',')}"
        return f"  min {seen.min():.3f}, max {seen.max():.3f}, mean {seen.mean():.3f}{hidden}"
    cells = [[f"{number:.3f}" for number in row] for row in matrix.tolist()]
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join("  " + " ".join(cell.rjust(width) for cell in row) for row in cells)
