"""`anyformer quantize`: a model's weights in few bits, written as a run, with what that costs."""

from __future__ import annotations

import argparse
from pathlib import Path

import click

from anyformer.accelerate.fast import accelerate
from anyformer.accelerate.quantize import Bits
from anyformer.accelerate.quantize import quantize as quantize_model
from anyformer.checkpoint.load import load, save
from anyformer.model import Transformer
from anyformer.tasks.scoring import front, score
from anyformer.text.tokenizer import Tokenizer

__all__ = ["quantize"]

CHARACTERS = 8000
"""How much of a text is read to measure the change."""


def quantize(source: str, target: Path, *, bits: Bits, text: Path | None, dtype: str | None) -> None:
    """Write the model of `source` to `target`, and print its size and its perplexity before and after."""
    model, tokenizer, _ = load(source, dtype=dtype)
    path = text or Path(argparse.__file__)
    words = path.read_text(encoding="utf-8")[:CHARACTERS]
    before, size = _perplexity(model, tokenizer, words), _megabytes(model)
    quantize_model(model, bits)
    save(model, target, tokenizer)
    click.echo(f"{size:,.0f} MB → {_megabytes(model):,.0f} MB, written to {target}")
    after = _perplexity(accelerate(model), tokenizer, words)
    if before is not None and after is not None:
        click.echo(f"perplexity {before:.3f} → {after:.3f} ({after / before - 1:+.2%}) on {path.name}")


def _perplexity(model: Transformer, tokenizer: Tokenizer | None, text: str) -> float | None:
    """None for a model that does not go on with text."""
    if tokenizer is None or model.decoder is None or model.encoder is not None:
        return None
    ids = tokenizer.encode(text)
    window = None if model.max_len is None else min(model.max_len, 1024)
    return score(model, ids, front=front(tokenizer), window=window).perplexity


def _megabytes(model: Transformer) -> float:
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6
