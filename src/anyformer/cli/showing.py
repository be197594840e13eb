"""`anyformer show`: a model's tree, figures and masks, printed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from anyformer.cli.console import console
from anyformer.inspect.plot import plot_mask, text_mask
from anyformer.inspect.show import count, describe, masks, tree
from anyformer.model import TransformerSpec

__all__ = ["show"]


def show(
    spec: TransformerSpec, *, length: int, batch_size: int, form: str | None, mask: int | None, png: Path | None
) -> None:
    """Print what was asked for."""
    if form == "yaml":
        click.echo(spec.to_yaml(), nl=False)
        return
    facts = describe(spec, length=length, batch=batch_size)
    if form == "json":
        click.echo(json.dumps(facts, indent=2))
        return
    if mask:
        _draw(spec, mask, png)
        return
    console.print(tree(spec, length=length, batch=batch_size))
    for line in _summary(facts):
        console.print(line)


def _draw(spec: TransformerSpec, size: int, png: Path | None) -> None:
    found = masks(spec, size)
    for name, mask in found.items():
        click.echo(f"{name}\n{text_mask(mask)}\n")
    png = png or Path("mask.png")
    plot_mask(png, found)
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
