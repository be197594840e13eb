"""Continuous batching: requests join and leave a running batch, one step at a time (Yu et al. 2022, Orca).

    engine = Engine(model, max_rows=8, max_len=2048)
    number = engine.submit(tokenizer.encode("Once"), max_new_tokens=100, end_ids=tokenizer.end_ids)
    while engine.busy:
        for event in engine.step():
            ...                                    # a stop string was seen: engine.cancel(event.request)

A plain object without threads: whoever has it calls `step`. A prompt is read a chunk a step into a cache of its own,
which then becomes a row of the batch; prompts that begin alike read their beginning once. A request that runs alone
stays in its own cache, where no mask is needed. An encoder-decoder reads each request's source once, when its prompt
begins; the batch keeps its keys and values, beside those of longer and shorter ones.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.cache import Rows
from anyformer.generate.loop import Generation
from anyformer.generate.requests import (
    Beginnings,
    Event,
    Reading,
    Request,
    alike,
    apart,
    at_least,
    positions,
    shares,
    side_by_side,
    together,
)
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import States, Transformer
from anyformer.tokens import Tokens

__all__ = ["Engine", "Event"]

_SHORTEST = 16  # tokens of a common beginning that are worth a copy
_COMPARED = 32  # prompts before, and after, that one is compared with


class Engine:
    """Runs many requests on one model; each gets the tokens that it would get alone, whoever comes and goes.

    tokens_read: tokens of prompts that the model has read; tokens_reused: those that a kept beginning saved.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_rows: int = 8,
        max_len: int | None = None,
        max_source: int | None = None,
        memory: int | None = None,
        prefill_chunk: int = 512,
        prefixes: int = 4,
    ) -> None:
        """Requests beyond `max_rows` wait, first come, first served.

        max_len: positions of a row, prompt and answer (None: as many as the model has). Schedules that depend on the
            length (`DynamicNTK`) plan for it.
        max_source: tokens of an encoder-decoder's source (None: as many as the model has, or without a bound).
        memory: bytes for all caches (None: no bound). Each row takes one, a prompt that is read beside others one more;
            what then is left goes to kept beginnings, `prefixes` at most. The weights and a step's own work are extra.
        prefill_chunk: tokens of a prompt that one step reads at most. A source is read at once.
        prefixes: beginnings to keep; none are for an encoder-decoder, whose texts depend on their sources.

        Raises:
            ValueError: a number out of its range, a model without a decoder, or a `memory` too small for a row.
        """
        if model.decoder is None:
            raise ValueError("only a decoder generates: this model has none, so it needs no engine")
        if model.encoder is None and max_source is not None:
            raise ValueError("a decoder alone reads no source: leave `max_source` out")
        for name, value, least in (("max_rows", max_rows, 1), ("prefill_chunk", prefill_chunk, 1)):
            at_least(name, value, least)
        at_least("prefixes", prefixes, 0)
        most = positions(model, "max_len", max_len, least=2)
        if most is None:
            raise ValueError("nothing says how long a row may get: give `max_len`")
        self.model, self.max_len, self._chunk = model, most, prefill_chunk
        self._max_source = positions(model, "max_source", max_source, least=1)
        self.max_rows, kept = shares(model, most, self._max_source, memory, max_rows, prefixes)
        self.tokens_read = self.tokens_reused = 0
        self._kept = Beginnings(kept)
        self._together = together(model)
        self._numbers = itertools.count()
        self._queue: deque[Request] = deque()
        self._recent: deque[Tensor] = deque(maxlen=_COMPARED)
        self._reading: Reading | None = None
        self._live: dict[int, Request] = {}
        self._batch: Rows | None = None  # made when two requests first run at once
        self._alone: Rows | None = None  # the cache of the only one that runs, as long as it is in none of the batch
        self._sources: States | None = None  # what the rows of the batch read, if they read sources

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests whose prompt is being read, or that make tokens."""
        return len(self._live) + (self._reading is not None)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def submit(
        self,
        ids: Sequence[int] | Int[Tensor, "T"],
        *,
        source: Sequence[int] | Int[Tensor, "S"] | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        guide: Any = None,
    ) -> int:
        """Queue one prompt; gives the number that its events bear. The choices are those of `generate` for one row.

        source: what an encoder-decoder reads beside the prompt, without padding.
        guide: what follows the text and knows its next tokens: `allowed(vocab_size) -> (V,)`, `push(token)` and `done`,
            as a constraint's `bind` gives it; one for each request.

        Raises:
            ValueError: a text is empty, too long or has ids beyond the vocabulary, or a choice is wrong.
        """
        prompt, beside = self._prompt(ids), self._source(source)
        at_least("max_new_tokens", max_new_tokens, 1)
        device, vocab_size = self.model.device, self.model.spec.vocab_size
        sampler = Sampler(sampling or Sampling(temperature=0.0), batch=1, vocab_size=vocab_size, device=device)
        room = min(max_new_tokens, self.max_len - len(prompt))
        ends = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        request = Request(
            next(self._numbers), prompt, beside, sampler, room, min_new_tokens, frozenset(end_ids), ends, guide
        )
        self._queue.append(request)
        return request.number

    def cancel(self, number: int) -> bool:
        """Forget a request; no event of it follows. False if it is unknown, or has ended."""
        for request in self._queue:
            if request.number == number:
                self._queue.remove(request)
                return True
        if self._reading is not None and self._reading.request.number == number:
            self._reading = None
            return True
        for row, request in self._live.items():
            if request.number == number:
                self._free(row)
                return True
        return False

    @torch.inference_mode()
    def keep(self, ids: Sequence[int] | Int[Tensor, "T"]) -> None:
        """Read a beginning now, and keep it for the prompts to come, until `prefixes` others were used more recently.

        Raises:
            ValueError: ids that no prompt could begin with, or an engine that keeps no beginnings.
        """
        if self.model.encoder is not None:
            raise ValueError("no beginning of an encoder-decoder can be kept: what it says depends on the source")
        if not self._kept.most:
            raise ValueError("this engine keeps no beginnings: make it with `prefixes` of at least 1, or more `memory`")
        ids = self._prompt(ids)
        at, cache = self._begin(ids)
        if at == len(ids):
            return
        self._kept.make_room()
        while at < len(ids):
            at, _ = self._read(ids, at, cache)
        self._kept.add(ids, cache)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One token for each request that runs, then at most one chunk of a prompt, whose last chunk gives a token too.

        An error in one request ends that one; one of the model itself (out of memory) is raised.
        """
        return self._decode() + self._read_on()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> Generation:
        """What follows each prompt, in their order. The reason of one that failed is "error: " and the message.

        sources: one for each prompt, if the model is an encoder-decoder. Of one `seed`, prompt i draws with seed + i.

        Raises:
            ValueError: the engine is busy, or a prompt or a choice is wrong.
        """
        if self.busy:
            raise ValueError(f"the engine has {self.waiting + self.running} requests, whose events would be lost")
        if sources is not None and len(sources) != len(prompts):
            raise ValueError(f"{len(sources)} sources are given for {len(prompts)} prompts: give one for each")
        choices = apart(sampling or Sampling(temperature=0.0), len(prompts))
        beside = [None] * len(prompts) if sources is None else sources
        said: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        try:
            for ids, source, one in zip(prompts, beside, choices, strict=True):
                number = self.submit(
                    ids,
                    source=source,
                    sampling=one,
                    max_new_tokens=max_new_tokens,
                    end_ids=end_ids,
                    min_new_tokens=min_new_tokens,
                )
                said[number] = []
            while self.busy:
                for number, token, reason, message in self.step():
                    said[number] += [] if token is None else [token]
                    if reason is not None:
                        reasons[number] = reason if message is None else f"{reason}: {message}"
        finally:
            for number in said:
                self.cancel(number)
        return Generation(list(said.values()), [reasons[number] for number in said])

    def _prompt(self, ids: Sequence[int] | Tensor) -> Int[Tensor, "T"]:
        """The ids, on the CPU, if a prompt can begin with them."""
        prompt = self._known("prompt", ids)
        if not len(prompt):
            raise ValueError("the prompt is empty: begin with a start token, such as the tokenizer's `end_id`")
        if len(prompt) >= self.max_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in the engine's {self.max_len} positions: shorten it"
            )
        if len(prompt) < self._together:
            raise ValueError(
                f"the first {self._together} tokens see one another, so a prompt must have as many, but this has "
                f"{len(prompt)}"
            )
        return prompt

    def _source(self, ids: Sequence[int] | Tensor | None) -> Int[Tensor, "S"] | None:
        """The ids, on the CPU, if the encoder can read them; None for a decoder alone."""
        if (ids is None) != (self.model.encoder is None):
            raise ValueError(
                "an encoder-decoder generates from a source: give `source` ids"
                if ids is None
                else "a decoder alone reads no source: leave `source` out"
            )
        if ids is None:
            return None
        source = self._known("source", ids)
        if not len(source):
            raise ValueError("the source is empty: give at least the end token that closes each")
        if self._max_source is not None and len(source) > self._max_source:
            raise ValueError(
                f"a source of {len(source)} tokens is longer than the engine's {self._max_source}: shorten it"
            )
        return source

    def _known(self, name: str, ids: Sequence[int] | Tensor) -> Int[Tensor, "T"]:
        """The ids, on the CPU, if all are in the vocabulary."""
        known = torch.tensor([int(token) for token in ids], dtype=torch.long)
        vocab_size = self.model.spec.vocab_size
        wrong = known[(known < 0) | (known >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"the {name}'s ids must be 0 to {vocab_size - 1}, the vocabulary, but one is {int(wrong[0])}"
            )
        return known

    def _decode(self) -> list[Event]:
        """One token for each row."""
        if not self._live:
            return []
        logits = self._logits()
        events = {row: request.take(logits[row : row + 1]) for row, request in self._live.items()}
        for row, event in events.items():
            if event.reason is not None:
                self._free(row)
        return list(events.values())

    def _logits(self) -> Float[Tensor, "B V"]:
        """What the rows say after their last tokens; free rows are padding."""
        if self._alone is not None:
            request = self._live[0]
            ids = torch.tensor([[request.last]], device=self.model.device)
            tokens = Tokens.arange(1, 1, start=request.end, device=self.model.device)
            return self.model(ids, tokens, memory=request.memory, cache=self._alone)[:, -1]
        rows = [self._live.get(row) for row in range(self.max_rows)]
        said = [(0, 0, -1) if request is None else (request.last, request.end, 0) for request in rows]
        ids, pos, seg = torch.tensor(said, device=self.model.device).T[..., None]
        return self.model(ids, Tokens(pos, seg), memory=self._sources, cache=self._batch)[:, -1]

    def _read_on(self) -> list[Event]:
        """A chunk of the prompt that is being read, or of the next one if there is a row for it."""
        if self._reading is None:
            if not self._queue or len(self._live) == self.max_rows:
                return []
            self._reading = self._next()
        reading, request = self._reading, self._reading.request
        try:
            if request.source is not None and request.memory is None:
                request.memory = self.model.encode(request.source[None].to(self.model.device))
            reading.at, logits = self._read(request.ids, reading.at, reading.cache, reading.split, request.memory)
        except Exception as error:
            self._reading = None
            return [request.failed(error)]
        if reading.at == reading.split:
            self._kept.make_room()
            self._kept.add(request.ids[: reading.at], reading.cache.copy())
        if reading.at < len(request.ids):
            return []
        self._reading = None
        request.see()
        event = request.take(logits[:, -1])
        if event.reason is None:
            self._join(request, reading.cache)
        return [event]

    def _next(self) -> Reading:
        """Begin with the first in the queue."""
        if self._alone is not None:
            self._seat(0, self._live[0], self._alone)
            self._alone = None
        request = self._queue.popleft()
        at, cache = self._begin(request.ids[:-1])
        split = self._split(request.ids[:-1], at)
        self.tokens_reused += at
        self._recent.append(request.ids)
        return Reading(request, cache, at, split)

    def _split(self, ids: Int[Tensor, "T"], at: int) -> int:
        """Up to where a copy would save the most, were all prompts known now read again behind `at`; 0 for no copy."""
        others = itertools.chain(self._recent, (request.ids for request in itertools.islice(self._queue, _COMPARED)))
        common = [alike(ids, other) for other in others] if self._kept.most else []
        least = max(at + _SHORTEST, self._together)
        saved = {length: (length - at) * sum(c >= length for c in common) for length in set(common) if length >= least}
        return max(saved, key=saved.__getitem__, default=0)

    def _begin(self, ids: Int[Tensor, "T"]) -> tuple[int, Rows]:
        """A cache that holds a beginning of `ids`, and how much."""
        at, known = self._kept.longest(ids)
        return at, self.model.new_rows(1, self.max_len) if known is None else known.copy()

    def _read(
        self, ids: Int[Tensor, "T"], at: int, cache: Rows, split: int = 0, memory: States | None = None
    ) -> tuple[int, Float[Tensor, "1 L V"]]:
        """Read a chunk, and first no further than `split`; its end, and the logits of the last token if all is read."""
        end = min(max(at + self._chunk, self._together), len(ids))
        end = split if at < split < end else end
        tokens = Tokens.arange(1, end - at, start=at, device=self.model.device)
        new = ids[None, at:end].to(self.model.device)
        logits = self.model(new, tokens, memory=memory, cache=cache, last=int(end == len(ids)))
        self.tokens_read += end - at
        return end, logits

    def _join(self, request: Request, cache: Rows) -> None:
        """A request whose prompt has been read gets a row."""
        row = min(set(range(self.max_rows)) - self._live.keys())
        if self._live:
            self._seat(row, request, cache)
        else:
            self._alone = cache
        self._live[row] = request

    def _seat(self, row: int, request: Request, cache: Rows) -> None:
        """A row of the batch goes on as this request, of whose source it keeps keys and values."""
        self._batch = self._batch or self.model.new_rows(self.max_rows, self.max_len)
        self._batch.put(row, cache)
        if request.memory is not None:
            self._sources = side_by_side(self._sources, row, request.memory, self.max_rows)
            request.memory = None

    def _free(self, row: int) -> None:
        del self._live[row]
        if not self._live:
            self._alone = None
