"""Text: what follows a prompt, as it is made, in pieces of whole characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from anyformer.generate.constrain import Constraint
from anyformer.generate.loop import start_id, steps
from anyformer.generate.sampling import Sampling
from anyformer.generate.speculative import Draft, speculate
from anyformer.generate.stops import StopStrings
from anyformer.model import Transformer
from anyformer.text.base import Tokenizer

__all__ = ["prompt_ids", "shown", "stream"]


class Prompt(NamedTuple):
    """What a decoder goes on from, and what an encoder reads, if there is one."""

    ids: list[int]
    source: torch.Tensor | None


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    prefill_chunk: int | None = None,
    sampling: Sampling | None = None,
    constraint: Constraint | None = None,
    draft: Draft | None = None,
) -> Iterator[str]:
    """The text that follows `prompt`, in pieces of whole characters, as they are made.

    An encoder-decoder reads `prompt` as its source, and writes its own text. Ends at an end token, before any of the
    `stop` strings, or after `max_new_tokens`. An empty prompt starts a new document. The prompt is data: special tokens
    written in it are plain text; what the model expects around a text is put there. The new text keeps to `constraint`;
    a `draft` makes it faster, and changes nothing else. Both at once are refused.
    """
    ids, source = prompt_ids(model, tokenizer, prompt)
    sampling = sampling or Sampling()
    if draft is not None:
        if constraint is not None:
            raise ValueError("a draft knows no constraint: give one of the two")
        made: Iterable[int] = speculate(
            model,
            ids,
            draft,
            sampling,
            max_new_tokens=max_new_tokens,
            end_ids=tokenizer.end_ids,
            source=source,
            prefill_chunk=prefill_chunk,
        )
    else:
        run = steps(
            model,
            [ids],
            sampling,
            max_new_tokens=max_new_tokens,
            end_ids=tokenizer.end_ids,
            source=source,
            prefill_chunk=prefill_chunk,
            guides=() if constraint is None else [constraint.bind(tokenizer)],
        )
        made = (int(step.ids[0]) for step in run)
    yield from shown(made, tokenizer, StopStrings(stop))


def prompt_ids(model: Transformer, tokenizer: Tokenizer, prompt: str) -> Prompt:
    """A prompt as the model reads it; an empty one is the end of the text before."""
    read = tokenizer.encode(prompt, frame=True)
    if model.encoder is None:
        return Prompt(read or [tokenizer.end_id], None)
    return Prompt([start_id(model)], torch.tensor([read], device=model.device))


def shown(ids: Iterable[int], tokenizer: Tokenizer, stops: StopStrings) -> Iterator[str]:
    """The text of ids up to an end token or a stop, in pieces of whole characters as they are made."""
    text = tokenizer.stream()
    for token in ids:
        if token in tokenizer.end_ids:
            break
        piece, hit = stops.push(text.push(token))
        if piece:
            yield piece
        if hit:
            return
    piece, hit = stops.push(text.flush())
    rest = piece if hit else piece + stops.flush()
    if rest:
        yield rest
