"""Choosing the next token: which rules act on the logits, what a row has seen and made, and repeatable draws.

The rules act in this order, as in `transformers` where it has them: logit bias, repetition penalty, frequency and
presence penalties, the tokens that the caller forbids, temperature, top-k, top-p, min-p, typical. From temperature on,
each later rule sees the distribution that the earlier ones left, made to sum to one again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.generate import rules
from anyformer.generate.rules import penalize

__all__ = ["Sampler", "Sampling", "penalize", "probabilities"]

_BLOCK = 256  # uniform numbers drawn per row at a time: one transfer to the device serves so many steps
_STRIDE = 0x9E3779B9  # odd, so row * stride (mod 2**32) never repeats within a batch


@dataclass(frozen=True)
class Sampling:
    """How to choose a token from logits. The defaults draw from the model's own distribution.

    temperature: logits are divided by it; 0 takes the best token (ties: lowest id). A tuple holds one per row.
    top_k: only the `top_k` best tokens stay (ties: lowest ids); 0, or the vocabulary's size or more, keeps all.
    top_p: the fewest best tokens whose probabilities reach `top_p` stay (nucleus sampling, Holtzman et al. 2020);
        1 keeps all, 0 keeps only the best.
    min_p: tokens less likely than `min_p` times the best one go (Nguyen et al. 2024); 0 keeps all.
    typical_p: the fewest most typical tokens whose probabilities reach `typical_p` stay (Meister et al. 2023), and
        those that are just as typical; 1 keeps all, 0 keeps the most typical.
    repetition_penalty: on tokens of the prompt and of the row's own text, see `penalize`; 1 is off.
    frequency_penalty: is subtracted for each time that the row made the token, its prompt not counted; 0 is off.
    presence_penalty: is subtracted once if the row made the token, its prompt not counted; 0 is off.
    logit_bias: a number to add for each token id, given as a mapping and kept as sorted pairs; -inf forbids the token.
    seed: equal seeds draw equal tokens; None takes a new one each time. A tuple holds one per row: the row then draws
        what it would draw alone with that seed.

    Raises ValueError, naming field, value and limit.
    """

    temperature: float | tuple[float, ...] = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _require_rows("temperature", self.temperature, _at_least_zero, "a finite number >= 0")
        _require("top_k", self.top_k, _whole, "a whole number >= 0, where 0 keeps every token")
        _require("top_p", self.top_p, _fraction, "from 0 (only the best token) to 1 (every token)")
        _require("min_p", self.min_p, _fraction, "from 0 (every token) to 1 (only the best token)")
        _require("typical_p", self.typical_p, _fraction, "from 0 (only the most typical token) to 1 (every token)")
        rules.check_penalty(self.repetition_penalty)
        _require("frequency_penalty", self.frequency_penalty, _finite, "a finite number (0 is off)")
        _require("presence_penalty", self.presence_penalty, _finite, "a finite number (0 is off)")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.seed is not None:
            _require_rows("seed", self.seed, _whole, "None, a whole number >= 0")

    @property
    def greedy(self) -> bool:
        """True if every row always takes its best token."""
        return self.top_k == 1 or self.top_p == 0 or all(row == 0 for row in _rows(self.temperature))


def probabilities(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """The distribution to draw from: the rules from temperature on; in float32 (float64 stays float64).

    A rule that is off leaves every bit as it was. Logits may be -inf (a forbidden token); ValueError if a row's largest
    logit is not finite, or if the temperatures do not fit the rows.
    """
    scores = rules.cooled(rules.at_least_float32(logits), sampling.temperature)
    scores = rules.top_k(scores, sampling.top_k)
    scores = rules.top_p(scores, sampling.top_p)
    scores = rules.min_p(scores, sampling.min_p)
    return rules.typical(scores, sampling.typical_p).softmax(-1)


class Sampler:
    """Draws one token per row and step, and remembers what each row has seen and made.

    A row's draws depend on its seed and its own logits only, not on its neighbours or on the device; `self.seed`
    repeats a run that was given none. `seen` (B, V) is None unless there is a repetition penalty, and `counts` (B, V)
    unless there is a frequency or presence penalty. Tokens that the sampler draws are noted; `see` adds the prompt, and
    `made` what a caller chose by itself, with `distribution` and `uniform`.
    """

    def __init__(self, sampling: Sampling, *, batch: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        rules.check_rows("temperature", sampling.temperature, batch)
        rules.check_rows("seed", sampling.seed, batch)
        device = torch.device(device)
        self.sampling = sampling
        self._greedy = sampling.greedy
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._shape = (batch, vocab_size)
        self._uniforms = _Uniforms(_row_seeds(self.seed, batch), device)
        self._bias = _bias(dict(sampling.logit_bias), vocab_size, device)
        # One column more than there are tokens: it takes the pads, so that marking needs no look at the data.
        columns = (batch, vocab_size + 1)
        penalized = sampling.repetition_penalty != 1
        self._marks = torch.zeros(columns, dtype=torch.bool, device=device) if penalized else None
        discounted = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._counts = torch.zeros(columns, dtype=torch.int32, device=device) if discounted else None

    @property
    def seen(self) -> Bool[Tensor, "B V"] | None:
        """Which tokens each row has seen, or None if nothing asks for it."""
        return None if self._marks is None else self._marks[:, :-1]

    @property
    def counts(self) -> Int[Tensor, "B V"] | None:
        """How often each row made each token, or None if nothing asks for it."""
        return None if self._counts is None else self._counts[:, :-1]

    def see(self, ids: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> None:
        """Note `ids` as seen wherever `real`; pads are passed over, whatever their id."""
        if self._marks is not None:
            self._marks.scatter_(1, self._columns(ids, real), True)

    def made(self, ids: Int[Tensor, "B *T"], real: Bool[Tensor, "B *T"] | None = None) -> None:
        """Note `ids`, (B,) or (B, T), as made by their rows, wherever `real` (None: all of them); they are seen too."""
        columns = self._columns(ids, real)
        if self._marks is not None:
            self._marks.scatter_(1, columns, True)
        if self._counts is not None:
            self._counts.scatter_add_(1, columns, self._counts.new_ones(()).expand_as(columns))

    def __call__(self, logits: Float[Tensor, "B V"], allowed: Bool[Tensor, "B V"] | None = None) -> Int[Tensor, "B"]:
        """The next id of each row, among the `allowed` tokens (None: all).

        ValueError if the shapes do not fit, or if a row has no finite best: no token allowed, or NaN, or overflow.
        """
        scores = self._changed(logits, allowed)
        ids = self._best(scores, allowed) if self._greedy else self._drawn(scores)
        self.made(ids)
        return ids

    def distribution(
        self, logits: Float[Tensor, "B V"], allowed: Bool[Tensor, "B V"] | None = None
    ) -> Float[Tensor, "B V"]:
        """The probabilities that a call would draw from, in float32 at least; a greedy row is 1 at its best token.

        Nothing is drawn or noted. ValueError as for a call.
        """
        return probabilities(self._changed(logits, allowed), self.sampling)

    def uniform(self) -> Float[Tensor, "B 1"]:
        """The next number in [0, 1) of each row; a call to the sampler that draws takes one too."""
        return self._uniforms.next()

    def _changed(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """The logits after the rules before temperature."""
        self._check_shape("logits", logits)
        if self._bias is not None:
            logits = rules.at_least_float32(logits)
            logits = logits + self._bias.to(logits.dtype)
        if self.seen is not None:
            logits = penalize(rules.at_least_float32(logits), self.seen, self.sampling.repetition_penalty)
        if self.counts is not None:
            frequency, presence = self.sampling.frequency_penalty, self.sampling.presence_penalty
            logits = rules.discount(rules.at_least_float32(logits), self.counts, frequency, presence)
        if allowed is not None:
            self._check_shape("allowed", allowed)
            logits = logits.masked_fill(~allowed, -math.inf)
        return logits

    def _best(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        if allowed is not None or self._bias is not None:
            rules.finite_best(scores)  # where tokens are forbidden, all of a row may be
        return scores.argmax(-1)  # of equal maxima the first

    def _drawn(self, scores: Tensor) -> Tensor:
        return rules.draw(probabilities(scores, self.sampling), self.uniform())

    def _columns(self, ids: Tensor, real: Tensor | None) -> Tensor:
        """(B, T) columns of the memory to mark."""
        ids = ids if real is None else torch.where(real, ids, self._shape[1])
        return ids[:, None].flatten(1).long()

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self._shape:
            raise ValueError(f"{name} must be {self._shape} as the sampler was made, but are {tuple(tensor.shape)}.")


class _Uniforms:
    """A stream of numbers in [0, 1) for each row, made on the CPU so that every device draws alike."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self._rows = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device
        self._dtype = rules.wide(device)
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


def _row_seeds(seed: int | tuple[int, ...], batch: int) -> list[int]:
    """One a row. A row with a seed of its own is row 0 of that seed."""
    if isinstance(seed, tuple):
        return [_row_seeds(own, 1)[0] for own in seed]
    base = int(np.random.SeedSequence(seed).generate_state(1)[0])  # so that seeds 0 and 1 share no rows
    return [(base + row * _STRIDE) % 2**32 for row in range(batch)]


def _bias(values: dict[int, float], vocab_size: int, device: torch.device) -> Tensor | None:
    """(V,) what is added to the logits, or None."""
    if not values:
        return None
    if max(values) >= vocab_size:
        raise ValueError(
            f"logit_bias must name token ids below {vocab_size}, the vocabulary's size, but names {max(values)}."
        )
    bias = torch.zeros(vocab_size, dtype=rules.wide(device))
    bias[list(values)] = torch.tensor(list(values.values()), dtype=bias.dtype)
    return bias.to(device)


def _pairs(logit_bias: object) -> tuple[tuple[int, float], ...]:
    """Sorted by id, so that equal biases are equal specs."""
    pairs = tuple(logit_bias.items()) if isinstance(logit_bias, Mapping) else logit_bias
    if not (isinstance(pairs, tuple) and all(map(_pair, pairs)) and len({token for token, _ in pairs}) == len(pairs)):
        rule = "a number below infinity for each token id >= 0, each id once"
        raise ValueError(f"logit_bias must be {rule}, but is {logit_bias!r}.")
    return tuple(sorted((int(token), float(value)) for token, value in pairs))


def _pair(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return _whole(pair[0]) and _number(pair[1]) and float(pair[1]) < math.inf


def _rows(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _require_rows(name: str, value: object, holds: Callable[..., bool], rule: str) -> None:
    for one in _rows(value):
        _require(name, one, holds, f"{rule}, or a tuple of such, one per row")
    _require(name, value, lambda value: value != (), "one number, or a tuple with one per row")


def _require(name: str, value: object, holds: Callable[..., bool], rule: str) -> None:
    if not holds(value):
        raise ValueError(f"{name} must be {rule}, but is {value!r}.")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return _number(value) and math.isfinite(value)  # type: ignore[arg-type]


def _at_least_zero(value: object) -> bool:
    return _finite(value) and value >= 0  # type: ignore[operator]


def _fraction(value: object) -> bool:
    return _at_least_zero(value) and value <= 1  # type: ignore[operator]
