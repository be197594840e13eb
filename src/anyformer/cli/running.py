"""What the commands that run a model share: it is loaded, quantized if that is asked for, and made fast."""

from __future__ import annotations

import warnings

import click

from anyformer.accelerate.fast import accelerate
from anyformer.accelerate.quantize import Bits, quantize
from anyformer.checkpoint.load import load
from anyformer.model import Transformer
from anyformer.text.tokenizer import Tokenizer

__all__ = ["ready"]


def ready(source: str, dtype: str | None, bits: Bits | None) -> tuple[Transformer, Tokenizer]:
    """The model of `source` and its tokenizer. ValueError if it has none."""
    model, tokenizer, _ = load(source, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, so text cannot be read or written")
    if bits is not None:
        quantize(model, bits)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerate(model)
    for warning in said:
        click.echo(f"anyformer: {warning.message}", err=True)
    return model, tokenizer
