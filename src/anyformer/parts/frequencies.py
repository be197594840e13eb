"""Frequencies: how fast each pair of channels of a rotary position turns, and how that is stretched for long contexts.

A schedule is one class with one method, in plain Python floats: `inverse(width, base, length)` gives the angle a
position adds, for each of the width / 2 pairs.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt

from anyformer.spec import Part, SpecError

__all__ = ["NTK", "DynamicNTK", "Frequencies", "Linear", "Llama3", "Plain", "YaRN"]


class Frequencies(Part):
    """Base of all frequency schedules."""

    looks_at_length: ClassVar[bool] = False
    """Whether `inverse` depends on `length`; where it does not, nobody need find the length out."""

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        """Angles per position, one for each pair; `length` is the context planned for (only dynamic schedules look)."""
        raise NotImplementedError

    def gain(self) -> float:
        """Factor on cosine and sine."""
        return 1.0

    def limit(self) -> int | None:
        """How many positions this schedule is made for, if it says so."""
        return None


class Plain(Frequencies, kind="plain"):
    """base^(-2i / width) (Su et al. 2021)."""

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        return [base ** (-2 * i / width) for i in range(width // 2)]


class Linear(Frequencies, kind="linear"):
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`.

    With `original_len`, positions from factor × original_len on are refused.
    """

    factor: PositiveFloat
    original_len: PositiveInt | None = None

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        return [f / self.factor for f in Plain().inverse(width, base, length)]

    def limit(self) -> int | None:
        return None if self.original_len is None else int(self.factor * self.original_len)


class NTK(Frequencies, kind="ntk"):
    """NTK-aware scaling (bloc97 2023): a larger base, so that slow pairs stretch by `factor`, fast ones hardly."""

    factor: PositiveFloat

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        return Plain().inverse(width, base * self.factor ** (width / max(width - 2, 1)), length)


class DynamicNTK(Frequencies, kind="dynamic_ntk"):
    """NTK scaling by as much as the planned length needs; none up to `original_len`.

    Nothing is remembered between calls. Without a cache the planned length is that of the input; with one it is the
    cache's capacity, so that all pieces of one text agree.
    """

    looks_at_length = True
    factor: PositiveFloat
    original_len: PositiveInt

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        stretch = self.factor * max(length, self.original_len) / self.original_len - (self.factor - 1)
        return NTK(stretch).inverse(width, base, length)


class YaRN(Frequencies, kind="yarn"):
    """YaRN (Peng et al. 2023): fast pairs stay, slow pairs are interpolated, with a ramp between; scores get a gain.

    A pair stays if it turns at least `beta_fast` times within `original_len`, and is fully interpolated if it turns at
    most `beta_slow` times. `attention_gain` None is the paper's 0.1 ln(factor) + 1.
    """

    factor: PositiveFloat
    original_len: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_gain: PositiveFloat | None = None
    truncate: bool = True

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        low, high = self._corner(self.beta_fast, width, base), self._corner(self.beta_slow, width, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = max(high - low, 0.001)
        return [
            _blend(f, f / self.factor, (i - low) / span) for i, f in enumerate(Plain().inverse(width, base, length))
        ]

    def _corner(self, turns: float, width: int, base: float) -> float:
        """The pair that turns so many times within the original length."""
        return width * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    def gain(self) -> float:
        if self.attention_gain is not None:
            return self.attention_gain
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def limit(self) -> int:
        return int(self.factor * self.original_len)


class Llama3(Frequencies, kind="llama3"):
    """Llama 3.1's schedule: short wavelengths stay, long ones slow down by `factor`, with a ramp between."""

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_len: PositiveInt = 8192

    def check(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise SpecError(
                f"`high_freq_factor` must be more than `low_freq_factor` ({self.low_freq_factor}), "
                f"but is {self.high_freq_factor}"
            )

    def inverse(self, width: int, base: float, length: int) -> list[float]:
        return [self._scaled(f) for f in Plain().inverse(width, base, length)]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_len * frequency / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequency, frequency / self.factor, 1 - fast)


def _blend(a: float, b: float, share: float) -> float:
    """From a to b as `share` goes from 0 to 1; flat outside."""
    share = min(max(share, 0.0), 1.0)
    return a * (1 - share) + b * share
