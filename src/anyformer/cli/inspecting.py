"""`anyformer inspect`: which tokens each token of a text looks at, in one layer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from anyformer.checkpoint.load import load
from anyformer.inspect.explain import attention_weights

__all__ = ["inspect"]

WIDTH, LABEL, STRIP = 80, 12, 24  # columns: of a line, of a token's text, of its row of the heat map
SHADES = [(0.7, "█"), (0.4, "▓"), (0.2, "▒"), (0.05, "░"), (0.0, "·")]


def inspect(
    source: str, text: str, *, layer: int, head: int | None, rows: str | None, png: Path | None, dtype: str | None
) -> None:
    """Print a line for each row, and draw them in `png` if there is one."""
    model, tokenizer, _ = load(source, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, so text cannot be read")
    ids = tokenizer.encode(text, frame=True)
    if not ids:
        raise ValueError("the text has no tokens: give some to look at")
    labels = _labels(tokenizer, ids)
    chosen = _rows(rows, len(ids))
    stack = "decoder" if model.encoder is None else "encoder"
    with torch.inference_mode():
        batch = torch.tensor([ids], device=model.device)
        heads = None if head is None else [head]
        weights = attention_weights(model, batch, layer=layer, heads=heads, rows=chosen, stack=stack)[0].mean(0).cpu()
    title = f"{stack}, layer {layer}, {'mean of all heads' if head is None else f'head {head}'}"
    click.echo(f"{title}: where each token looks, and the tokens that it looks at most")
    for row, shares in zip(chosen, weights, strict=True):
        click.echo(_line(row % len(ids), labels, shares))
    if png is not None:
        from anyformer.inspect.heat import plot_heat

        plot_heat(png, {title: weights}, labels=[labels[row] for row in chosen], key_labels=labels)
        click.echo(f"drawn in {png}")


def _labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, its spaces visible; the id of one that completes no character."""
    stream = tokenizer.stream(special=True)
    pieces = [stream.push(token) or f"<{token}>" for token in ids]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in piece.replace(" ", "␣")) for piece in pieces]


def _rows(said: str | None, length: int) -> list[int]:
    """`0,4,-1` and `3:8`, as Python counts; all of them if nothing is said."""
    rows: list[int] = []
    for part in (said or ":").split(","):
        first, colon, last = part.partition(":")
        try:
            span = slice(int(first) if first else None, int(last) if last else None)
            rows += range(length)[span] if colon else [int(part)]
        except ValueError:
            raise ValueError(f"--rows must be like 0,4,-1 or 3:8, but is {said!r}") from None
    return rows


def _line(row: int, labels: list[str], shares: Tensor) -> str:
    """A row's number, its token, its weights as shades (the largest of several keys in each), and the largest."""
    width = min(STRIP, len(shares))
    strip = "".join(_shade(float(part.max())) for part in shares.tensor_split(width))
    line = f"{row:>4} {set_cell_size(labels[row], LABEL)} {strip} "
    values, keys = shares.sort(descending=True, stable=True)
    for value, key in zip(values.tolist(), keys.tolist(), strict=True):
        said = f" {labels[key]} {value:.0%}"
        if value < 0.005 or cell_len(line + said) > WIDTH:
            break
        line += said
    return line.rstrip() if float(shares.sum()) else f"{line} sees nothing"


def _shade(share: float) -> str:
    return next((shade for least, shade in SHADES if share > least), " ")
