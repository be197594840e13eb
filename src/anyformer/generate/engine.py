"""Continuous batching: requests join and leave a running batch, one step at a time (Yu et al. 2022, Orca).

    engine = Engine(model, max_rows=8, max_len=2048)
    number = engine.submit(tokenizer.encode("Once"), max_new_tokens=100, end_ids=tokenizer.end_ids)
    while engine.busy:
        for event in engine.step():
            ...                                    # a stop string was seen: engine.cancel(event.request)

A plain object without threads: whoever has it calls `step`. A prompt is read a chunk a step into a cache of its own,
which then becomes a row of the batch; prompts that begin alike read their beginning once. A request that runs alone
stays in its own cache, where no mask is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.cache import Rows
from anyformer.generate.loop import Generation
from anyformer.generate.rules import check_rows, finite_best
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import Transformer
from anyformer.parts.attention import Attention
from anyformer.tokens import Tokens

__all__ = ["Engine", "Event"]

_SHORTEST = 16  # tokens of a common beginning that are worth a copy
_COMPARED = 32  # prompts before, and after, that one is compared with


class Event(NamedTuple):
    """What a step did for one request: its new token, if any, and why it ended, if it did.

    "end": an end token, or its guide is done; "length": `max_new_tokens`, or no position left; "error": `message`.
    """

    request: int
    token: int | None
    reason: str | None
    message: str | None = None


class Engine:
    """Runs many requests on one decoder; each gets the tokens that it would get alone, whoever comes and goes.

    tokens_read: tokens of prompts that the model has read; tokens_reused: those that a kept beginning saved.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_rows: int = 8,
        max_len: int | None = None,
        memory: int | None = None,
        prefill_chunk: int = 512,
        prefixes: int = 4,
    ) -> None:
        """Requests beyond `max_rows` wait, first come, first served.

        max_len: positions of a row, prompt and answer (None: as many as the model has). Schedules that depend on the
            length (`DynamicNTK`) plan for it.
        memory: bytes for all caches (None: no bound). Each row takes one, a prompt that is read beside others one more;
            what then is left goes to kept beginnings, `prefixes` at most. The weights and a step's own work are extra.
        prefill_chunk: tokens of a prompt that one step reads at most.

        Raises:
            ValueError: a number out of its range, a model that is no decoder alone, or a `memory` too small for a row.
        """
        _check_model(model)
        for name, value, least in (("max_rows", max_rows, 1), ("prefill_chunk", prefill_chunk, 1)):
            _at_least(name, value, least)
        _at_least("prefixes", prefixes, 0)
        self.model, self.max_len, self._chunk = model, _positions(model, max_len), prefill_chunk
        self.max_rows, kept = _shares(model, self.max_len, memory, max_rows, prefixes)
        self.tokens_read = self.tokens_reused = 0
        self._kept = _Beginnings(kept)
        self._together = _together(model)
        self._numbers = itertools.count()
        self._queue: deque[_Request] = deque()
        self._recent: deque[Tensor] = deque(maxlen=_COMPARED)
        self._reading: _Reading | None = None
        self._live: dict[int, _Request] = {}
        self._batch: Rows | None = None  # made when two requests first run at once
        self._alone: Rows | None = None  # the cache of the only one that runs, as long as it is in none of the batch

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
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        guide: Any = None,
    ) -> int:
        """Queue one prompt; gives the number that its events bear. The choices are those of `generate` for one row.

        guide: what follows the text and knows its next tokens: `allowed(vocab_size) -> (V,)`, `push(token)` and `done`,
            as a constraint's `bind` gives it; one for each request.

        Raises:
            ValueError: the prompt is empty, leaves no room or has ids beyond the vocabulary, or a choice is wrong.
        """
        prompt = self._prompt(ids)
        _at_least("max_new_tokens", max_new_tokens, 1)
        device, vocab_size = self.model.device, self.model.spec.vocab_size
        sampler = Sampler(sampling or Sampling(temperature=0.0), batch=1, vocab_size=vocab_size, device=device)
        room = min(max_new_tokens, self.max_len - len(prompt))
        ends = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        request = _Request(next(self._numbers), prompt, sampler, room, min_new_tokens, frozenset(end_ids), ends, guide)
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
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> Generation:
        """What follows each prompt, in their order. The reason of one that failed is "error: " and the message.

        Of one `seed`, prompt i draws with seed + i.

        Raises:
            ValueError: the engine is busy, or a prompt or a choice is wrong.
        """
        if self.busy:
            raise ValueError(f"the engine has {self.waiting + self.running} requests, whose events would be lost")
        choices = _apart(sampling or Sampling(temperature=0.0), len(prompts))
        said: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        try:
            for ids, one in zip(prompts, choices, strict=True):
                number = self.submit(
                    ids, sampling=one, max_new_tokens=max_new_tokens, end_ids=end_ids, min_new_tokens=min_new_tokens
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
        prompt = torch.tensor([int(token) for token in ids], dtype=torch.long)
        vocab_size = self.model.spec.vocab_size
        if not len(prompt):
            raise ValueError("the prompt is empty: begin with a start token, such as the tokenizer's `end_id`")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            wrong = prompt[(prompt < 0) | (prompt >= vocab_size)]
            raise ValueError(
                f"the prompt's ids must be 0 to {vocab_size - 1}, the vocabulary, but one is {int(wrong[0])}"
            )
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
            return self.model(ids, tokens, cache=self._alone)[:, -1]
        rows = [self._live.get(row) for row in range(self.max_rows)]
        said = [(0, 0, -1) if request is None else (request.last, request.end, 0) for request in rows]
        ids, pos, seg = torch.tensor(said, device=self.model.device).T[..., None]
        return self.model(ids, Tokens(pos, seg), cache=self._batch)[:, -1]

    def _read_on(self) -> list[Event]:
        """A chunk of the prompt that is being read, or of the next one if there is a row for it."""
        if self._reading is None:
            if not self._queue or len(self._live) == self.max_rows:
                return []
            self._reading = self._next()
        reading, request = self._reading, self._reading.request
        try:
            reading.at, logits = self._read(request.ids, reading.at, reading.cache, reading.split)
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

    def _next(self) -> _Reading:
        """Begin with the first in the queue."""
        if self._alone is not None:
            self._seat(0, self._alone)
            self._alone = None
        request = self._queue.popleft()
        at, cache = self._begin(request.ids[:-1])
        split = self._split(request.ids[:-1], at)
        self.tokens_reused += at
        self._recent.append(request.ids)
        return _Reading(request, cache, at, split)

    def _split(self, ids: Int[Tensor, "T"], at: int) -> int:
        """Up to where a copy would save the most, were all prompts known now read again behind `at`; 0 for no copy."""
        others = itertools.chain(self._recent, (request.ids for request in itertools.islice(self._queue, _COMPARED)))
        common = [_common(ids, other) for other in others] if self._kept.most else []
        least = max(at + _SHORTEST, self._together)
        saved = {length: (length - at) * sum(c >= length for c in common) for length in set(common) if length >= least}
        return max(saved, key=saved.__getitem__, default=0)

    def _begin(self, ids: Int[Tensor, "T"]) -> tuple[int, Rows]:
        """A cache that holds a beginning of `ids`, and how much."""
        at, known = self._kept.longest(ids)
        return at, self.model.new_rows(1, self.max_len) if known is None else known.copy()

    def _read(self, ids: Int[Tensor, "T"], at: int, cache: Rows, split: int = 0) -> tuple[int, Float[Tensor, "1 L V"]]:
        """Read a chunk, and first no further than `split`; its end, and the logits of the last token if all is read."""
        end = min(max(at + self._chunk, self._together), len(ids))
        end = split if at < split < end else end
        tokens = Tokens.arange(1, end - at, start=at, device=self.model.device)
        new = ids[None, at:end].to(self.model.device)
        logits = self.model(new, tokens, cache=cache, last=int(end == len(ids)))
        self.tokens_read += end - at
        return end, logits

    def _join(self, request: _Request, cache: Rows) -> None:
        """A request whose prompt has been read gets a row."""
        row = min(set(range(self.max_rows)) - self._live.keys())
        if self._live:
            self._seat(row, cache)
        else:
            self._alone = cache
        self._live[row] = request

    def _seat(self, row: int, cache: Rows) -> None:
        self._batch = self._batch or self.model.new_rows(self.max_rows, self.max_len)
        self._batch.put(row, cache)

    def _free(self, row: int) -> None:
        del self._live[row]
        if not self._live:
            self._alone = None


@dataclasses.dataclass(eq=False)
class _Request:
    """One request: it may make `room` tokens, and not end before `least`; it has `made` so many, `last` the last."""

    number: int
    ids: Int[Tensor, "T"]
    sampler: Sampler
    room: int
    least: int
    end_ids: frozenset[int]
    ends: Int[Tensor, "E"]
    guide: Any
    made: int = 0
    last: int = -1

    @property
    def end(self) -> int:
        """The position of the last token, which has not been read yet."""
        return len(self.ids) + self.made - 1

    def see(self) -> None:
        ids = self.ids[None].to(self.ends.device)
        self.sampler.see(ids, torch.ones_like(ids, dtype=torch.bool))

    def take(self, logits: Float[Tensor, "1 V"]) -> Event:
        """Choose the next token; whatever goes wrong ends this request, and no other."""
        try:
            self.last = self._chosen(logits)
            self.made += 1
            return Event(self.number, self.last, self._reason())
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Event:
        return Event(self.number, None, "error", str(error) or type(error).__name__)

    def _chosen(self, logits: Tensor) -> int:
        finite_best(logits)
        if self.made < self.least:
            logits = logits.index_fill(1, self.ends, -torch.inf)
        if self.guide is None:
            return int(self.sampler(logits))
        allowed = self.guide.allowed(logits.shape[1])
        token = int(self.sampler(logits, allowed[None].to(logits.device)))
        self.guide.push(token)
        return token

    def _reason(self) -> str | None:
        if self.last in self.end_ids or (self.guide is not None and self.guide.done):
            return "end"
        return "length" if self.made >= self.room else None


@dataclasses.dataclass
class _Reading:
    """A prompt that is being read: up to where, and where another one parts from it (0: nowhere)."""

    request: _Request
    cache: Rows
    at: int
    split: int


class _Beginnings:
    """Caches of texts that others begin with, `most` of them; those that were used last stay."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: list[tuple[Tensor, Rows]] = []

    def longest(self, ids: Int[Tensor, "T"]) -> tuple[int, Rows | None]:
        """How many tokens of `ids` the best one holds, and its cache, to be copied."""
        lengths = [(len(known), i) for i, (known, _) in enumerate(self._kept) if _common(ids, known) == len(known)]
        if not lengths:
            return 0, None
        length, i = max(lengths)
        self._kept.append(self._kept.pop(i))
        return length, self._kept[-1][1]

    def make_room(self) -> None:
        """For one more."""
        del self._kept[: max(len(self._kept) + 1 - self.most, 0)]

    def add(self, ids: Int[Tensor, "T"], cache: Rows) -> None:
        self._kept.append((ids, cache))


def _common(a: Int[Tensor, "T"], b: Int[Tensor, "S"]) -> int:
    """How many tokens two texts have in common from their beginning."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).cumprod(0).sum())


def _apart(sampling: Sampling, count: int) -> list[Sampling]:
    """A choice for each of `count` prompts, out of one for all."""
    check_rows("temperature", sampling.temperature, count)
    check_rows("seed", sampling.seed, count)
    heat, seed = sampling.temperature, sampling.seed
    heats = heat if isinstance(heat, tuple) else (heat,) * count
    seeds = seed if isinstance(seed, tuple) else [None if seed is None else seed + i for i in range(count)]
    return [dataclasses.replace(sampling, temperature=h, seed=s) for h, s in zip(heats, seeds, strict=True)]


def _check_model(model: Transformer) -> None:
    if model.decoder is None:
        raise ValueError("only a decoder generates: this model has none, so it needs no engine")
    if model.encoder is not None:
        raise ValueError(
            "an encoder-decoder's rows read sources of different lengths, which an engine does not keep: use `generate`"
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {value}")


def _positions(model: Transformer, max_len: int | None) -> int:
    """How long a row may get."""
    most = max_len or model.max_len or model.origin.get("max_position_embeddings")
    if most is None:
        raise ValueError("nothing says how long a row may get: give `max_len`")
    if model.max_len is not None and most > model.max_len:
        raise ValueError(f"`max_len` must be at most the model's {model.max_len} positions, but is {most}")
    _at_least("max_len", most, 2)
    return int(most)


def _shares(model: Transformer, max_len: int, memory: int | None, rows: int, kept: int) -> tuple[int, int]:
    """How many rows, and how many kept beginnings, fit into `memory`. One row alone never leaves its own cache."""
    if memory is None:
        return rows, kept
    meta = model.spec.build(init=None, device="meta", dtype=model.dtype)
    one = meta.new_rows(1, max_len).nbytes
    if memory < one:
        raise ValueError(f"a row of {max_len} positions takes {one} bytes, but `memory` is {memory}: lower `max_len`")
    caches = memory // one
    rows = min(rows, max(caches - 1, 1))
    return rows, min(kept, caches - (rows if rows == 1 else rows + 1))


def _together(model: Transformer) -> int:
    """How many first tokens see one another, and so must be read at once."""
    ops = [branch.op for block in model.spec.decoder for branch in block.branches]
    return max((op.pattern.frontier() or 0 for op in ops if isinstance(op, Attention)), default=0)
