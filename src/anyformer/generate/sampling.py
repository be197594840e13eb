"""Choosing the next token: temperature, top-k, top-p, min-p, repetition penalty, and repeatable draws.

The rules act in this order, as in `transformers`: repetition penalty, temperature, top-k, top-p, min-p. Each later rule
sees the distribution that the earlier ones left, made to sum to one again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Sampler", "Sampling", "penalize", "probabilities"]

_BLOCK = 256  # uniform numbers drawn per row at a time: one transfer to the device serves so many steps
_HEAD = 1024  # best tokens that are tried before the whole vocabulary is sorted for top-p
_STRIDE = 0x9E3779B9  # odd, so row * stride (mod 2**32) never repeats within a batch


@dataclass(frozen=True)
class Sampling:
    """How to choose a token from logits. The defaults draw from the model's own distribution.

    temperature: logits are divided by it; 0 takes the best token (ties: lowest id). A tuple holds one per row.
    top_k: only the `top_k` best tokens stay (ties: lowest ids); 0, or the vocabulary's size or more, keeps all.
    top_p: the fewest best tokens whose probabilities reach `top_p` stay (nucleus sampling, Holtzman et al. 2020);
        1 keeps all, 0 keeps only the best.
    min_p: tokens less likely than `min_p` times the best one go (Nguyen et al. 2024); 0 keeps all.
    repetition_penalty: see `penalize`; 1 is off.
    seed: equal seeds draw equal tokens; None takes a new one each time.

    Raises ValueError, naming field, value and limit.
    """

    temperature: float | tuple[float, ...] = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for value in self.temperature if isinstance(self.temperature, tuple) else (self.temperature,):
            _require("temperature", value, _at_least_zero, "a finite number >= 0, or a tuple of such, one per row")
        _require("temperature", self.temperature, lambda value: value != (), "one number, or a tuple with one per row")
        _require("top_k", self.top_k, _whole, "a whole number >= 0, where 0 keeps every token")
        _require("top_p", self.top_p, _fraction, "from 0 (only the best token) to 1 (every token)")
        _require("min_p", self.min_p, _fraction, "from 0 (every token) to 1 (only the best token)")
        _check_penalty(self.repetition_penalty)
        _require("seed", self.seed, lambda seed: seed is None or _whole(seed), "a whole number >= 0, or None")

    @property
    def greedy(self) -> bool:
        """True if every row always takes its best token."""
        rows = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        return self.top_k == 1 or self.top_p == 0 or all(row == 0 for row in rows)


def penalize(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float) -> Float[Tensor, "B V"]:
    """CTRL's repetition penalty (Keskar et al. 2019, section 4.1) on the tokens that a row has seen.

    A positive logit is divided by `penalty`, a negative one multiplied, so that both become less likely; once,
    however often the token was seen. A penalty below 1 rewards instead; 1 changes nothing. ValueError if it is <= 0.
    """
    _check_penalty(penalty)
    if penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """The distribution to draw from: temperature, then top-k, top-p, min-p; in float32 (float64 stays float64).

    A rule that is off leaves every bit as it was. Logits may be -inf (a forbidden token); ValueError if a row's largest
    logit is not finite, or if the temperatures do not fit the rows.
    """
    scores = _cooled(_at_least_float32(logits), sampling.temperature)
    scores = _without_tail(scores, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:  # the best score is 0, so exp(score) is the probability relative to the best
        scores = scores.masked_fill(scores.exp() < sampling.min_p, -math.inf)
    return scores.softmax(-1)


class Sampler:
    """Draws one token per row and step, and remembers what each row has seen.

    A row's draws depend on (seed, row) and its own logits only, not on its neighbours or on the device; `self.seed`
    repeats a run that was given none. `seen` (B, V) is None unless there is a repetition penalty; tokens that the
    sampler draws count as seen, and `see` adds the prompt.
    """

    def __init__(self, sampling: Sampling, *, batch: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        _check_rows(sampling.temperature, batch)
        self.sampling = sampling
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._shape = (batch, vocab_size)
        self._uniforms = None if sampling.greedy else _Uniforms(self.seed, batch, torch.device(device))
        # One column more than there are tokens: it takes the pads, so that marking needs no look at the data.
        penalized = sampling.repetition_penalty != 1
        self._marks = torch.zeros(batch, vocab_size + 1, dtype=torch.bool, device=device) if penalized else None

    @property
    def seen(self) -> Bool[Tensor, "B V"] | None:
        """Which tokens each row has seen, or None if nothing asks for it."""
        return None if self._marks is None else self._marks[:, :-1]

    def see(self, ids: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> None:
        """Note `ids` as seen wherever `real`; pads are passed over, whatever their id."""
        if self._marks is not None:
            self._marks.scatter_(1, torch.where(real, ids, self._shape[1]).long(), True)

    def __call__(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        """The next id of each row. ValueError if the logits do not fit, or if a row to draw from has no finite best."""
        if tuple(logits.shape) != self._shape:
            raise ValueError(f"logits must be {self._shape} as the sampler was made, but are {tuple(logits.shape)}.")
        if self._marks is None:
            return self._choose(logits)
        ids = self._choose(penalize(_at_least_float32(logits), self._marks[:, :-1], self.sampling.repetition_penalty))
        self._marks.scatter_(1, ids[:, None], True)
        return ids

    def _choose(self, logits: Tensor) -> Tensor:
        if self._uniforms is None:
            return logits.argmax(-1)  # of equal maxima the first
        return _draw(probabilities(logits, self.sampling), self._uniforms.next())


class _Uniforms:
    """A stream of numbers in [0, 1) for each row, made on the CPU so that every device draws alike."""

    def __init__(self, seed: int, batch: int, device: torch.device) -> None:
        base = int(np.random.SeedSequence(seed).generate_state(1)[0])  # so that seeds 0 and 1 share no rows
        seeds = [(base + row * _STRIDE) % 2**32 for row in range(batch)]
        self._rows = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device
        self._dtype = _wide(device)
        self._used = _BLOCK

    def next(self) -> Tensor:
        """(B, 1)"""
        if self._used == _BLOCK:
            self._block, self._used = self._drawn().to(self._device), 0
        self._used += 1
        return self._block[:, self._used - 1 : self._used]

    def _drawn(self) -> Tensor:
        block = torch.empty(len(self._rows), _BLOCK, dtype=self._dtype)
        for row, generator in zip(block, self._rows, strict=True):
            row.uniform_(generator=generator)
        return block


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform` (B, 1): the first id whose running sum exceeds it."""
    total = probs.cumsum(-1, dtype=uniform.dtype)
    ids = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=probs.shape[1] - 1)
    # A parallel sum may wobble in its last bit and so land on a forbidden token: take the best instead.
    return torch.where(probs.gather(1, ids) > 0, ids, probs.argmax(-1, keepdim=True)).squeeze(1)


def _cooled(logits: Tensor, temperature: float | tuple[float, ...]) -> Tensor:
    """(logits - best) / temperature: never above 0, so no temperature overflows. At 0 all but the best are -inf."""
    best = _finite_best(logits)
    degrees = _degrees(logits, temperature)
    scores = (logits - best) / degrees.clamp(min=torch.finfo(logits.dtype).tiny)
    if temperature != 0 and not (isinstance(temperature, tuple) and 0 in temperature):
        return scores
    ids = torch.arange(logits.shape[1], device=logits.device)
    return scores.masked_fill((degrees == 0) & (ids != logits.argmax(-1, keepdim=True)), -math.inf)


def _degrees(logits: Tensor, temperature: float | tuple[float, ...]) -> Tensor:
    """(B, 1) temperatures, kept within the dtype: one too small for it must not become 0, which would mean greedy."""
    _check_rows(temperature, len(logits))
    tiny = torch.finfo(logits.dtype).tiny
    if not isinstance(temperature, tuple):
        return logits.new_full((len(logits), 1), _within(temperature, tiny), dtype=logits.dtype)
    return logits.new_tensor([[_within(degree, tiny)] for degree in temperature])


def _within(degree: float, tiny: float) -> float:
    return min(max(float(degree), tiny), 1 / tiny) if degree else 0.0


def _without_tail(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k, then top-p. Both need only the best scores in order, so the whole vocabulary is seldom sorted."""
    if 0 < top_k < scores.shape[1]:
        scores = _best(scores, top_k, scores.topk(top_k).values[:, -1:])
    if top_p < 1:
        scores = _best(scores, *_nucleus(scores, top_p))
    return scores


def _nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """(B, 1) twice: how many best scores it takes to reach `top_p`, and the least of them.

    The probability before a token decides: it stays if the better ones alone do not reach `top_p`. The few best usually
    do, so the whole vocabulary is sorted only if they do not.
    """
    total = scores.logsumexp(-1, keepdim=True)
    ordered = scores.topk(min(_HEAD, scores.shape[1])).values
    reached = _running_sum(ordered, total)
    if not (reached[:, -1] >= top_p).all():
        ordered = scores.sort(-1, descending=True).values
        reached = _running_sum(ordered, total)
    count = 1 + (reached[:, :-1] < top_p).sum(-1, keepdim=True)
    return count, ordered.gather(1, count - 1)


def _running_sum(ordered: Tensor, total: Tensor) -> Tensor:
    """(B, n) probability of the first 1..n of the ordered scores, given the log of the sum of all exponentials."""
    return (ordered - total).exp().cumsum(-1, dtype=_wide(ordered.device))


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _best(scores: Tensor, count: Tensor | int, least: Tensor) -> Tensor:
    """Keep the `count` (one, or (B, 1)) best scores, given the least of them; of equals at the edge the lowest ids."""
    above, level = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | (level & (level.cumsum(-1) <= room))), -math.inf)


def _finite_best(logits: Tensor) -> Tensor:
    best = logits.amax(-1, keepdim=True)
    if not best.isfinite().all():
        row = int((~best[:, 0].isfinite()).nonzero()[0])
        raise ValueError(
            f"the largest logit of a row must be finite, but that of row {row} is {float(best[row])}; "
            "leave at least one token allowed, and look for NaN or overflow in the model."
        )
    return best


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_rows(temperature: float | tuple[float, ...], batch: int) -> None:
    if isinstance(temperature, tuple) and len(temperature) != batch:
        raise ValueError(
            f"temperature must be one number or one per row ({batch}), but {len(temperature)} are given: {temperature}."
        )


def _check_penalty(penalty: float) -> None:
    _require("repetition_penalty", penalty, lambda x: _at_least_zero(x) and x > 0, "a finite number > 0 (1 is off)")


def _require(name: str, value: object, holds: Callable[..., bool], rule: str) -> None:
    if not holds(value):
        raise ValueError(f"{name} must be {rule}, but is {value!r}.")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _at_least_zero(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def _fraction(value: object) -> bool:
    return _at_least_zero(value) and float(value) <= 1  # type: ignore[arg-type]
