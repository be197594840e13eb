"""`anyformer score`: how likely a model finds the text of a file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from anyformer.accelerate.quantize import Bits
from anyformer.cli.console import clock
from anyformer.cli.running import ready
from anyformer.data.documents import read_documents
from anyformer.files import replacing
from anyformer.model import Transformer
from anyformer.tasks.scoring import Score, bits_per_byte, front, overlap
from anyformer.tasks.scoring import score as score_ids
from anyformer.text.tokenizer import Tokenizer

__all__ = ["score"]


def score(
    source: str,
    file: Path,
    *,
    stride: int | None,
    window: int | None,
    dtype: str | None,
    bits: Bits | None,
    as_json: bool,
    per_token: Path | None,
) -> None:
    """Print the figures of the text in `file`, and write each token's log-probability to `per_token` if it is given."""
    with _progress() as bar:
        row = bar.add_task(f"loading {source}", total=None, said="")
        model, tokenizer = ready(source, dtype, bits)
        bar.update(row, description=f"reading {file}")
        text = _text(file)
        before, ids = front(tokenizer), tokenizer.encode(text)
        begun = time.perf_counter()

        def tell(done: int) -> None:
            seconds = time.perf_counter() - begun
            left = clock(seconds * (len(ids) / done - 1))
            said = f"{done / max(seconds, 1e-9):,.0f} tokens/s  {left} left"
            bar.update(row, description="scoring", total=len(ids), completed=done, said=said)

        found = score_ids(model, ids, front=before, window=window, stride=stride, tell=tell)
        seconds = time.perf_counter() - begun
    if not found.tokens:
        raise ValueError(f"{file} has {len(ids)} token, before which there is none, so nothing is scored: give more")
    for note in _notes(model, before, ids, window):
        click.echo(f"note: {note}", err=True)
    facts = _facts(found, text, seconds, overlap(model, window, stride))
    click.echo(json.dumps({"model": source, "file": str(file), **facts}) if as_json else _said(facts))
    if per_token is not None:
        _write(per_token, tokenizer, ids, found)


def _progress() -> Progress:
    """On the error stream, so that nothing but the figures is printed."""
    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[said]}")
    return Progress(*columns, console=console, auto_refresh=console.is_terminal, transient=True)


def _text(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"{file} is no file: name one that holds text")
    documents, _ = read_documents(file)
    return documents[0].text


def _notes(model: Transformer, before: Sequence[int], ids: Sequence[int], window: int | None) -> list[str]:
    """What a reader of the figures must know."""
    notes, made_for = [], model.origin.get("max_position_embeddings")
    if not before:
        notes.append("the first token is not scored: the tokenizer has none that begins or ends a text")
    if made_for and max(window or 0, model.max_len or 0) == 0 and len(ids) > made_for:
        notes.append(f"the model was made for {made_for} tokens, but the text has {len(ids)}: see --window")
    return notes


def _facts(found: Score, text: str, seconds: float, plan: tuple[int | None, int | None]) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "bytes": len(text.encode()),
        "window": plan[0],
        "stride": plan[1],
        "log_likelihood": found.total,
        "perplexity": found.perplexity,
        "bits_per_byte": bits_per_byte(found, text),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(found.tokens / max(seconds, 1e-9), 1),
    }


def _said(facts: dict[str, Any]) -> str:
    window, stride = facts["window"], facts["stride"]
    how = "each token sees all before it" if window is None else f"windows of {window:,} tokens, {stride:,} apart"
    return (
        f"{facts['tokens']:,} tokens, {facts['bytes']:,} bytes; {how}\n"
        f"log-likelihood  {facts['log_likelihood']:,.2f} nats\n"
        f"perplexity      {facts['perplexity']:,.3f}\n"
        f"bits per byte   {facts['bits_per_byte']:.4f}\n"
        f"speed           {facts['tokens_per_second']:,.0f} tokens/s"
    )


def _write(path: Path, tokenizer: Tokenizer, ids: Sequence[int], found: Score) -> None:
    """A line a token: its id, the characters that it completes as a JSON string, and its log-probability if any."""
    stream = tokenizer.stream(special=True)
    unscored = [""] * (len(ids) - found.tokens)
    with replacing(path, "w") as file:
        file.write("id\ttext\tlogprob\n")
        for token, logprob in zip(ids, [*unscored, *found.logprobs.tolist()], strict=True):
            file.write(f"{token}\t{json.dumps(stream.push(token), ensure_ascii=False)}\t{logprob}\n")
