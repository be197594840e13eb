"""Generation: prompts in, tokens out, one step at a time.

`generate` works on ids and batches; `stream` on text, one prompt, as it is made. Both drive `steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.generate.sampling import Sampler, Sampling
from anyformer.generate.stops import StopStrings
from anyformer.model import States, Transformer
from anyformer.tokens import Tokens

__all__ = ["Generation", "Step", "generate", "left_padded", "start_id", "steps", "stream"]

Prompts = Tensor | Sequence[Sequence[int]]


class Generation(NamedTuple):
    """What came out: for each row its new ids, an end token included, and why it ended.

    "end": an end token; "length": `max_new_tokens`, or no position left.
    """

    ids: list[list[int]]
    reasons: list[str]


class Step(NamedTuple):
    """One step of a batch: the new id of each row, which rows it belongs to, and which rows it ended, by reason."""

    ids: Int[Tensor, "B"]
    live: Bool[Tensor, "B"]
    ended: dict[int, str]


def generate(
    model: Transformer,
    ids: Prompts,
    *,
    max_new_tokens: int = 128,
    end_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    source: Int[Tensor, "B S"] | None = None,
    source_tokens: Tokens | None = None,
    prefill_chunk: int | None = None,
    sampling: Sampling | None = None,
    **choices: Any,
) -> Generation:
    """New tokens for each prompt: a (B, T) tensor, or lists of ids of different lengths.

    How to choose is a `Sampling`, or its fields: `temperature=0.8, top_p=0.95, seed=1`; left out, greedy
    (temperature 0). A row ends at any of `end_ids`, though not before `min_new_tokens`; an end token inside the prompt
    does not count. An encoder-decoder also takes `source`. Each row's tokens are those it would get alone. The prompt
    is read `prefill_chunk` tokens at a time (None: at once): memory is then bounded by that and the patterns' reach.
    """
    if sampling is not None and choices:
        raise ValueError(f"give `sampling`, or its fields, not both: {', '.join(choices)}")
    sampling = sampling or Sampling(**{"temperature": 0.0, **choices})
    run = steps(
        model,
        ids,
        sampling,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        min_new_tokens=min_new_tokens,
        source=source,
        source_tokens=source_tokens,
        prefill_chunk=prefill_chunk,
    )
    rows = len(ids)
    out: list[list[int]] = [[] for _ in range(rows)]
    reasons = ["length"] * rows
    for step in run:
        for row, (token, live) in enumerate(zip(step.ids.tolist(), step.live.tolist(), strict=True)):
            if live:
                out[row].append(token)
        for row, reason in step.ended.items():
            reasons[row] = reason
    return Generation(out, reasons)


def stream(
    model: Transformer,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    prefill_chunk: int | None = None,
    sampling: Sampling | None = None,
) -> Iterator[str]:
    """The text that follows `prompt`, in pieces of whole characters, as they are made.

    An encoder-decoder reads `prompt` as its source, and writes its own text. Ends at an end token, before any of the
    `stop` strings, or after `max_new_tokens`. An empty prompt starts a new document. The prompt is data: special tokens
    written in it are plain text; what the model expects around a text is put there.
    """
    read = tokenizer.encode(prompt, frame=True)
    text, stops = tokenizer.stream(), StopStrings(stop)
    ids, source = (read or [tokenizer.end_id], None) if model.encoder is None else ([start_id(model)], read)
    run = steps(
        model,
        [ids],
        sampling or Sampling(),
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        source=None if source is None else torch.tensor([source], device=model.device),
        prefill_chunk=prefill_chunk,
    )
    for step in run:
        if "end" in step.ended.values():
            break
        shown, hit = stops.push(text.push(int(step.ids[0])))
        if shown:
            yield shown
        if hit:
            return
    shown, hit = stops.push(text.flush())
    rest = shown if hit else shown + stops.flush()
    if rest:
        yield rest


def steps(
    model: Transformer,
    prompts: Prompts,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    source: Int[Tensor, "B S"] | None = None,
    source_tokens: Tokens | None = None,
    prefill_chunk: int | None = None,
) -> Iterator[Step]:
    """Steps until every row has ended. Prefill, whole or in chunks, then one token a row and step, by the cache."""
    if max_new_tokens < 0:
        raise ValueError(f"`max_new_tokens` must be at least 0, but is {max_new_tokens}")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"`prefill_chunk` must be at least 1, but is {prefill_chunk}")
    ids, tokens = left_padded(prompts, model.device)
    if not max_new_tokens or not len(ids):
        return
    rows = _Rows(tokens, max_new_tokens, min_new_tokens, end_ids, model.max_len)
    sampler = Sampler(sampling, batch=len(ids), vocab_size=model.spec.vocab_size, device=model.device)
    sampler.see(ids, tokens.real)
    with torch.inference_mode():
        memory = _memory(model, source, source_tokens)
        cache = model.new_cache(len(ids), ids.shape[1] + rows.most)
        chunk = prefill_chunk or ids.shape[1]
        while ids.shape[1] > chunk:  # what is read before the last chunk needs no logits
            model(ids[:, :chunk], tokens.cut(0, chunk), memory=memory, cache=cache, last=0)
            ids, tokens = ids[:, chunk:], tokens.cut(chunk, tokens.length)
    while rows.live.any():
        with torch.inference_mode():
            logits = model(ids, tokens, memory=memory, cache=cache, last=1)[:, -1]
            chosen = sampler(rows.without_end(logits))
        live = rows.live.clone()
        yield Step(chosen, live, rows.note(chosen))
        ids, tokens = chosen[:, None], rows.place(tokens.after())


def start_id(model: Transformer) -> int:
    """The token that an encoder-decoder's own text begins with, as its config says."""
    start = model.origin.get("decoder_start_token_id")
    if start is None and model.origin.get("model_type") in ("t5", "mt5"):
        start = model.origin.get("pad_token_id")  # T5's configs leave it at that
    if start is None:
        raise ValueError("the model's config has no decoder_start_token_id, so its text cannot begin: add the key")
    return int(start)


def left_padded(prompts: Prompts, device: torch.device) -> tuple[Int[Tensor, "B T"], Tokens]:
    """Prompts as one (B, T) tensor, short ones padded on the left, so that every row ends in the last column."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise ValueError(f"prompt ids must be (B, T), but are {tuple(prompts.shape)}: for one prompt use ids[None]")
        prompts = prompts.tolist()
    rows = [[int(token) for token in row] for row in prompts]
    empty = [i for i, row in enumerate(rows) if not row]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty: begin with a start token, such as the tokenizer's `end_id`")
    width = max(map(len, rows), default=0)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], dtype=torch.long, device=device)
    keep = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    ids, keep = ids.view(len(rows), width), keep.view(len(rows), width)
    return ids, Tokens.padded(keep) if len(rows) else Tokens.arange(0, width, device=device)


class _Rows:
    """Which rows still run, and why the others ended."""

    def __init__(self, tokens: Tokens, most: int, least: int, end_ids: Sequence[int], max_len: int | None) -> None:
        lengths = tokens.real.sum(1)
        room = torch.full_like(lengths, most) if max_len is None else (max_len - lengths).clamp(max=most)
        if int(room.min()) < 1:
            raise ValueError(
                f"a prompt of {int(lengths.max())} tokens leaves no room in the model's {max_len} positions"
            )
        self.room, self.most, self.least = room, int(room.max()), least
        self.ends = torch.tensor(list(end_ids), dtype=torch.long, device=lengths.device)
        self.live = torch.ones_like(lengths, dtype=torch.bool)
        self.made = 0

    def without_end(self, logits: Tensor) -> Tensor:
        """End tokens cannot be chosen before `least` tokens are made."""
        return logits if self.made >= self.least else logits.index_fill(1, self.ends, -torch.inf)

    def note(self, chosen: Int[Tensor, "B"]) -> dict[int, str]:
        """Count one step; the rows that it ended, and why."""
        self.made += 1
        ended = self.live & torch.isin(chosen, self.ends)
        full = self.live & ~ended & (self.room <= self.made)
        self.live = self.live & ~ended & ~full
        reasons = dict.fromkeys(ended.nonzero()[:, 0].tolist(), "end")
        return reasons | dict.fromkeys(full.nonzero()[:, 0].tolist(), "length")

    def place(self, tokens: Tokens) -> Tokens:
        """Rows that have ended go on as padding."""
        if self.live.all():
            return tokens
        dead = ~self.live[:, None]
        return Tokens(tokens.pos.masked_fill(dead, 0), tokens.seg.masked_fill(dead, -1), tokens.mark)


def _memory(model: Transformer, source: Tensor | None, source_tokens: Tokens | None) -> States | None:
    if model.encoder is None:
        return None
    if source is None:
        raise ValueError("an encoder-decoder generates from a source: give `source` ids")
    return model.encode(source, source_tokens)
