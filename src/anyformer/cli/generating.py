"""`anyformer generate`: text that follows a prompt, as it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from anyformer.accelerate.quantize import Bits
from anyformer.cli.running import ready
from anyformer.files import read_json
from anyformer.generate.beam import beam_search
from anyformer.generate.constrain import Constraint, choices, json_schema, regex
from anyformer.generate.sampling import Sampling
from anyformer.generate.speculative import Draft, DraftModel, PromptLookup
from anyformer.generate.text import prompt_ids, stream
from anyformer.model import Transformer
from anyformer.text.tokenizer import Tokenizer

__all__ = ["generate"]


def generate(
    source: str,
    prompt: str,
    *,
    max_new_tokens: int,
    stop: tuple[str, ...],
    prefill_chunk: int | None,
    dtype: str | None,
    bits: Bits | None,
    num_beams: int | None,
    draft: str | None,
    constraint: Constraint | None,
    **rules: Any,
) -> None:
    """Print the text; Ctrl-C ends it."""
    sampling = Sampling(**rules)
    model, tokenizer = ready(source, dtype, bits)
    if model.decoder is None:
        raise ValueError(f"{source} is an encoder alone, which generates nothing")
    if num_beams is not None:
        if constraint or draft or stop:
            raise ValueError("--num-beams goes without --stop, --draft and constraints: leave them out")
        _beams(model, tokenizer, prompt, sampling, num_beams, max_new_tokens, prefill_chunk)
        return
    if model.encoder is None:
        click.echo(prompt, nl=False)
    pieces = stream(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        stop=stop,
        prefill_chunk=prefill_chunk,
        sampling=sampling,
        constraint=constraint,
        draft=_draft(draft, dtype),
    )
    try:
        for piece in pieces:
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        pass
    click.echo()


def asked(texts: tuple[str, ...], pattern: str | None, schema: Path | None) -> Constraint | None:
    """The one constraint that the options name."""
    if sum(map(bool, (texts, pattern, schema))) > 1:
        raise ValueError("--choice, --regex and --json-schema exclude one another: give one of them")
    if schema is not None:
        return json_schema(read_json(schema))
    return choices(texts) if texts else regex(pattern) if pattern else None


def _draft(draft: str | None, dtype: str | None) -> Draft | None:
    """`lookup`, or the model of a source."""
    if draft is None:
        return None
    return PromptLookup() if draft == "lookup" else DraftModel(ready(draft, dtype, None)[0])


def _beams(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    num_beams: int,
    most: int,
    chunk: int | None,
) -> None:
    """Print the best texts, one a line, each behind its score."""
    ids, source = prompt_ids(model, tokenizer, prompt)
    found = beam_search(
        model,
        [ids],
        num_beams=num_beams,
        num_return=num_beams,
        max_new_tokens=most,
        end_ids=tokenizer.end_ids,
        source=source,
        prefill_chunk=chunk,
        sampling=sampling,
    )[0]
    for best in found:
        click.echo(f"{best.score:.4f}\t{tokenizer.decode(best.ids)}")
