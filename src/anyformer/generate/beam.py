"""Beam search: the likeliest continuations of a prompt, found by following several at once.

Each step continues every beam with every token, and the best `num_beams` of these that have not ended run on. One that
has ended among the best `num_beams` is a hypothesis; the best `num_beams` hypotheses are kept. Of equals the one of the
lower beam comes first, then the one of the lower id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.generate import rules
from anyformer.generate.loop import Prompts, Running, check_counts, encoded, left_padded, read
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import Transformer
from anyformer.tokens import Tokens

__all__ = ["Hypothesis", "beam_search"]

_RULES = {"logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"}


class Hypothesis(NamedTuple):
    """One continuation: its new ids, an end token included, its score, its log-probability, and why it ended.

    "end": an end token; "length": `max_new_tokens`, or no position left.
    """

    ids: list[int]
    score: float
    logprob: float
    reason: str


def beam_search(
    model: Transformer,
    ids: Prompts,
    *,
    num_beams: int = 4,
    max_new_tokens: int = 128,
    end_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return: int = 1,
    source: Int[Tensor, "B S"] | None = None,
    source_tokens: Tokens | None = None,
    prefill_chunk: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[Hypothesis]]:
    """The `num_return` best continuations of each prompt, best first; fewer where no more are found.

    Prompts, ends, minimum, source and chunks are as in `generate`. A score is logprob / n ** length_penalty (after Wu
    et al. 2016), where n counts the new tokens, the end token too, and logprob is their sum: a penalty of 0 compares
    sums, a larger one favours long continuations, one below 0 short ones. Before the minimum an end token is passed
    over; the other tokens keep their log-probabilities.

    A prompt is done when no beam can go on, or when it has `num_beams` hypotheses and `early_stopping` is satisfied.
    True: at once. False: when the best beam that runs would be no better than the worst of them if it ended at its
    present length; a guess where the penalty is above 0, for it may do better later. "never": when it would be no
    better at any length. Each prompt's hypotheses are those it would get alone.

    Of a `sampling`, the rules that only change logits act: bias and penalties; the others must be off.
    """
    rule = _Rule(num_beams, length_penalty, early_stopping)
    check_counts(max_new_tokens, prefill_chunk)
    _check(num_return, num_beams, sampling)
    prompts, tokens = left_padded(ids, model.device)
    if not max_new_tokens or not len(prompts):
        return [[] for _ in prompts]
    each = torch.arange(len(prompts), device=model.device).repeat_interleave(num_beams)
    wide = tokens.take(each)
    rows = Running(wide, max_new_tokens, min_new_tokens, end_ids, model.max_len)
    searches = [_Search(rule, room, frozenset(end_ids)) for room in rows.room[::num_beams].tolist()]
    logs = _Logs(sampling, prompts, tokens.real)
    with torch.inference_mode():
        memory = encoded(model, source, source_tokens)
        cache = model.new_cache(len(prompts), prompts.shape[1] + rows.most)
        logits = read(model, prompts, tokens, memory, cache, chunk=prefill_chunk)[:, -1]
        cache, tokens = cache.repeat(num_beams), wide
        memory = None if memory is None else memory.take(each)
        while True:
            _step(searches, rows.without_end(logs(logits, searches)))
            rows.made += 1
            rows.live = torch.tensor([search.live for search in searches], device=model.device)[each]
            if not rows.live.any():
                return [search.ended[:num_return] for search in searches]
            cache.take(_parents(searches, model.device))
            tokens = rows.place(tokens.after())
            logits = read(model, _newest(searches, model.device), tokens, memory, cache)[:, -1]


@dataclass(frozen=True)
class _Rule:
    """How hypotheses are compared, and when a search stops."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ValueError(f"`num_beams` must be at least 1, but is {self.num_beams}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"`length_penalty` must be a finite number (0 is off), but is {self.length_penalty}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'`early_stopping` must be True, False or "never", but is {self.early_stopping!r}')

    def score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty

    def hope(self, logprob: float, length: int, room: int) -> float:
        """The best score that is held possible for a beam of `length` tokens which may grow to `room`."""
        longest_is_best = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(logprob, room if longest_is_best else length)


class _Beam(NamedTuple):
    """A continuation that runs, and the place of the one that it continues among those of the step before."""

    logprob: float
    ids: list[int]
    parent: int


class _Candidate(NamedTuple):
    """The beam `parent`, continued with `token`."""

    logprob: float
    parent: int
    token: int


class _Search:
    """The search of one prompt: the beams that run, and the hypotheses, each best first."""

    def __init__(self, rule: _Rule, room: int, end_ids: frozenset[int]) -> None:
        self.rule, self.room, self.end_ids = rule, room, end_ids
        self.beams = [_Beam(0.0, [], 0)]
        self.ended: list[Hypothesis] = []
        self.made = 0

    @property
    def live(self) -> bool:
        return bool(self.beams)

    @property
    def width(self) -> int:
        """How many rows it has: one until its first step."""
        return self.rule.num_beams if self.made else 1

    def step(self, candidates: list[_Candidate]) -> None:
        """Take the best continuations of all beams, best first: enough to hold `num_beams` that do not end."""
        self.made += 1
        most, full = self.rule.num_beams, self.made == self.room
        best = [self._hypothesis(one) for one in candidates[:most] if full or one.token in self.end_ids]
        self.ended = sorted([*self.ended, *best], key=lambda one: -one.score)[:most]
        running = [] if full else [one for one in candidates if one.token not in self.end_ids][:most]
        self.beams = [_Beam(one.logprob, self._ids(one), one.parent) for one in running]
        if self.beams and self._satisfied():
            self.beams = []

    def _satisfied(self) -> bool:
        if len(self.ended) < self.rule.num_beams:
            return False
        hope = self.rule.hope(self.beams[0].logprob, self.made, self.room)
        return self.rule.early_stopping is True or hope <= self.ended[-1].score

    def _hypothesis(self, one: _Candidate) -> Hypothesis:
        reason = "end" if one.token in self.end_ids else "length"
        return Hypothesis(self._ids(one), self.rule.score(one.logprob, self.made), one.logprob, reason)

    def _ids(self, one: _Candidate) -> list[int]:
        return [*self.beams[one.parent].ids, one.token]

    def filled(self) -> list[_Beam]:
        """A beam for each row: those that run, then some that nothing can continue."""
        return self.beams + [_Beam(-math.inf, [0] * self.made, 0)] * (self.width - len(self.beams))


class _Logs:
    """Log-probabilities of the next token, after the rules of a sampling that only change logits."""

    def __init__(self, sampling: Sampling | None, prompts: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> None:
        self.sampling, self.prompts, self.real = sampling, prompts, real

    def __call__(self, logits: Float[Tensor, "R V"], searches: list[_Search]) -> Float[Tensor, "R V"]:
        """In float32 at least."""
        if self.sampling is None:
            return rules.at_least_float32(logits).log_softmax(-1)
        sampler = Sampler(self.sampling, batch=len(logits), vocab_size=logits.shape[1], device=logits.device)
        each = len(logits) // len(self.prompts)
        sampler.see(self.prompts.repeat_interleave(each, 0), self.real.repeat_interleave(each, 0))
        made = [beam.ids for search in searches for beam in search.filled()]
        sampler.made(torch.tensor(made, dtype=torch.long, device=logits.device))
        # Wide, so that the probability of an unlikely token does not vanish.
        return sampler.distribution(logits.to(rules.wide(logits.device))).log()


def _step(searches: list[_Search], logs: Float[Tensor, "R V"]) -> None:
    """One step of all searches, given the log-probabilities of their beams' next tokens."""
    sums = logs.new_tensor([[beam.logprob for beam in search.filled()] for search in searches])
    totals = (sums[:, :, None] + logs.unflatten(0, (len(searches), -1))).flatten(1)
    live = torch.tensor([search.live for search in searches], device=logs.device)
    rules.finite_best(totals.where(live[:, None], 0))
    rule, end_ids = searches[0].rule, searches[0].end_ids
    found = _candidates(totals, (1 + len(end_ids)) * rule.num_beams, logs.shape[1])
    for search, candidates in zip(searches, found, strict=True):
        search.step(candidates)


def _candidates(totals: Float[Tensor, "B N"], count: int, vocab_size: int) -> list[list[_Candidate]]:
    """For each prompt its `count` best continuations, best first; none that is forbidden."""
    least = totals.topk(min(count, totals.shape[1])).values[:, -1:]
    places = ((totals >= least) & (totals > -math.inf)).nonzero()  # equals at the edge too, in the order of their ids
    found: list[list[_Candidate]] = [[] for _ in totals]
    for (row, place), total in zip(places.tolist(), totals[places[:, 0], places[:, 1]].tolist(), strict=True):
        found[row].append(_Candidate(total, *divmod(place, vocab_size)))
    return [sorted(row, key=lambda one: -one.logprob)[:count] for row in found]


def _parents(searches: list[_Search], device: torch.device) -> Int[Tensor, "R"]:
    """For each row, the row that it continues."""
    rows = [i * search.width + beam.parent for i, search in enumerate(searches) for beam in search.filled()]
    return torch.tensor(rows, device=device)


def _newest(searches: list[_Search], device: torch.device) -> Int[Tensor, "R 1"]:
    """The last token of each row."""
    return torch.tensor([beam.ids[-1:] for search in searches for beam in search.filled()], device=device)


def _check(num_return: int, num_beams: int, sampling: Sampling | None) -> None:
    if not 1 <= num_return <= num_beams:
        raise ValueError(f"`num_return` must be from 1 to `num_beams` ({num_beams}), but is {num_return}")
    for field in dataclasses.fields(Sampling) if sampling is not None else ():
        value = getattr(sampling, field.name)
        if field.name not in _RULES and value != getattr(Sampling(), field.name):
            raise ValueError(
                f"beam search draws nothing, so `{field.name}` must be left out, but is {value}: use generate"
            )
