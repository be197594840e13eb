"""`anyformer show`: a model's tree, figures and masks, printed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from anyformer.cli.console import console
from anyformer.inspect.plot import plot_mask, plot_tiles, text_mask, text_tiles
from anyformer.inspect.show import count, describe, masks, tiles, tree
from anyformer.model import TransformerSpec

__all__ = ["show"]

MOST = 512  # cells a side that are drawn


def show(
    spec: TransformerSpec,
    *,
    length: int,
    batch_size: int,
    form: str | None,
    mask: int | None,
    blocks: int | None,
    png: Path | None,
) -> None:
    """Print what was asked for."""
    if blocks and not mask:
        raise ValueError("--blocks cuts the drawing of --mask N into tiles: give both")
    if form == "yaml":
        click.echo(spec.to_yaml(), nl=False)
        return
    facts = describe(spec, length=length, batch=batch_size)
    if form == "json":
        click.echo(json.dumps(facts, indent=2))
        return
    if mask:
        _draw(spec, mask, blocks, png or Path("mask.png"))
        return
    console.print(tree(spec, length=length, batch=batch_size))
    for line in _summary(facts):
        console.print(line)


def _draw(spec: TransformerSpec, size: int, blocks: int | None, png: Path) -> None:
    if -(-size // (blocks or 1)) > MOST:
        raise ValueError(
            f"--mask {size} would be more than {MOST} cells a side: give a smaller one, or larger --blocks"
        )
    found = tiles(spec, size, blocks) if blocks else masks(spec, size)
    write, plot = (text_tiles, plot_tiles) if blocks else (text_mask, plot_mask)
    for name, cells in found.items():
        click.echo(f"{name}\n{write(cells)}\n")
    plot(png, found)
    click.echo(f"drawn in {png}")


def _summary(facts: dict[str, int]) -> list[str]:
    active = facts["active_parameters"]
    return [
        f"parameters   {count(facts['parameters'])}, of which a token uses {count(active)}",
        f"FLOPs/token  {count(facts['flops_per_token_forward'])} forward, {count(facts['flops_per_token_backward'])} "
        f"backward, at {facts['length']} tokens",
        f"cache        {count(facts['cache_bytes_per_token'])}B a token, {count(facts['cache_bytes'])}B for "
        f"{facts['length']} tokens, float32",
        f"training     {count(facts['weight_bytes'])}B weights, {count(facts['gradient_bytes'])}B gradients, "
        f"{count(facts['optimizer_bytes'])}B AdamW, {count(facts['activation_bytes'])}B activations for "
        f"{facts['batch']} × {facts['length']} tokens, float32",
    ]
