"""Generation: prompts in, tokens out, one step at a time.

`generate` works on ids and batches, and drives `steps`; `text.stream` makes text of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.cache import Cache
from anyformer.generate.constrain import Guide
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import States, Transformer
from anyformer.tokens import Tokens

__all__ = [
    "Generation",
    "Running",
    "Step",
    "check_counts",
    "encoded",
    "generate",
    "left_padded",
    "read",
    "start_id",
    "steps",
]

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
    guides: Sequence[Guide] = (),
    sampling: Sampling | None = None,
    **choices: Any,
) -> Generation:
    """New tokens for each prompt: a (B, T) tensor, or lists of ids of different lengths.

    How to choose is a `Sampling`, or its fields: `temperature=0.8, top_p=0.95, seed=1`; left out, greedy
    (temperature 0). A row ends at any of `end_ids`, though not before `min_new_tokens`; an end token inside the prompt
    does not count. An encoder-decoder also takes `source`. Each row's tokens are those it would get alone. The prompt
    is read `prefill_chunk` tokens at a time (None: at once): memory is then bounded by that and the patterns' reach.
    `guides` keep the rows to constraints, one each: `constraint.bind(tokenizer)`.
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
        guides=guides,
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
    guides: Sequence[Guide] = (),
    cache: Cache | None = None,
) -> Iterator[Step]:
    """Steps until every row has ended. Prefill, whole or in chunks, then one token a row and step, by the cache.

    A `cache` of the caller's holds the first tokens of the prompts, though not the last one; they are not read again.
    """
    check_counts(max_new_tokens, prefill_chunk)
    ids, tokens = left_padded(prompts, model.device)
    if not max_new_tokens or not len(ids):
        return
    if guides and len(guides) != len(ids):
        raise ValueError(f"{len(guides)} guides are given for {len(ids)} prompts: bind one for each")
    rows = Running(tokens, max_new_tokens, min_new_tokens, end_ids, model.max_len)
    sampler = Sampler(sampling, batch=len(ids), vocab_size=model.spec.vocab_size, device=model.device)
    sampler.see(ids, tokens.real)
    with torch.inference_mode():
        memory = encoded(model, source, source_tokens)
        cache = cache or model.new_cache(len(ids), ids.shape[1] + rows.most)
        ids, tokens = ids[:, cache.used :], tokens.cut(cache.used, tokens.length)
    while rows.live.any():
        with torch.inference_mode():
            logits = read(model, ids, tokens, memory, cache, chunk=prefill_chunk)[:, -1]
            chosen = sampler(rows.without_end(logits), rows.allowed(guides, logits))
        live = rows.live.clone()
        yield Step(chosen, live, rows.note(chosen, rows.follow(guides, chosen)))
        ids, tokens = chosen[:, None], rows.place(tokens.after())


def check_counts(max_new_tokens: int, prefill_chunk: int | None) -> None:
    """ValueError unless there can be so many new tokens, and a chunk of that size."""
    if max_new_tokens < 0:
        raise ValueError(f"`max_new_tokens` must be at least 0, but is {max_new_tokens}")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"`prefill_chunk` must be at least 1, but is {prefill_chunk}")


def read(
    model: Transformer,
    ids: Int[Tensor, "B T"],
    tokens: Tokens,
    memory: States | None,
    cache: Cache,
    *,
    last: int = 1,
    chunk: int | None = None,
) -> Float[Tensor, "B L V"]:
    """Logits of the `last` tokens. What comes before them is read `chunk` at a time (None: all at once)."""
    while chunk is not None and ids.shape[1] - last >= chunk:
        model(ids[:, :chunk], tokens.cut(0, chunk), memory=memory, cache=cache, last=0)
        ids, tokens = ids[:, chunk:], tokens.cut(chunk, tokens.length)
    logits: Tensor = model(ids, tokens, memory=memory, cache=cache, last=last)
    return logits


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


class Running:
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

    def allowed(self, guides: Sequence[Guide], logits: Float[Tensor, "B V"]) -> Bool[Tensor, "B V"] | None:
        """What the guides allow each row that runs; None where nothing is forbidden."""
        if not guides:
            return None
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        for row in self.live.nonzero()[:, 0].tolist():
            allowed[row] = guides[row].allowed(logits.shape[1])
        return allowed.to(logits.device)

    def follow(self, guides: Sequence[Guide], chosen: Int[Tensor, "B"]) -> Bool[Tensor, "B"] | None:
        """Tell the guides what was chosen; which rows nothing can follow."""
        if not guides:
            return None
        for row in self.live.nonzero()[:, 0].tolist():
            guides[row].push(int(chosen[row]))
        return torch.tensor([guide.done for guide in guides], device=chosen.device)

    def note(self, chosen: Int[Tensor, "B"], done: Bool[Tensor, "B"] | None = None) -> dict[int, str]:
        """Count one step; the rows that it ended, and why. Rows that are `done` end, whatever was chosen."""
        self.made += 1
        ended = torch.isin(chosen, self.ends)
        ended = self.live & (ended if done is None else ended | done)
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


def encoded(model: Transformer, source: Tensor | None, source_tokens: Tokens | None) -> States | None:
    """What an encoder-decoder made of `source`; None for a decoder alone."""
    if model.encoder is None:
        return None
    if source is None:
        raise ValueError("an encoder-decoder generates from a source: give `source` ids")
    return model.encode(source, source_tokens)
