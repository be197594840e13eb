"""Positions: how order enters. A scheme overrides one of three hooks, which otherwise do nothing:

`at_input` adds to the embeddings (learned, sinusoidal) and belongs in `Embed(position=...)`;
`at_heads` turns queries and keys (rotary), `at_scores` adds to the scores (ALiBi, T5): both belong in a mixer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.parts.frequencies import Frequencies, Plain
from anyformer.parts.precision import at_least_float32
from anyformer.spec import Part, SpecError
from anyformer.tokens import Tokens

__all__ = [
    "Alibi",
    "AlibiModule",
    "Learned",
    "LearnedModule",
    "Position",
    "PositionModule",
    "RelativeBias",
    "RelativeBiasModule",
    "Rotary",
    "RotaryModule",
    "Sinusoidal",
    "SinusoidalModule",
    "alibi_slopes",
    "sinusoids",
]


class Position(Part):
    """Base of all position schemes. `acts` says which hook it overrides."""

    acts: ClassVar[Literal["input", "heads", "scores"]]

    def build(self, width: int, num_heads: int = 1) -> PositionModule:
        """`width` is the model's at the input, a head's in a mixer."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """How many positions there are, if that is bounded."""
        return None

    def cost(self, width: int, num_heads: int) -> Cost:
        return Cost()


class PositionModule(nn.Module):
    """The three hooks. `spec` tells equal schemes, which share what they derive within a pass."""

    shared: ClassVar[bool] = False
    """Whether all layers of a stack share one module (and its weights)."""

    def __init__(self, spec: Position) -> None:
        super().__init__()
        self.spec = spec

    def at_input(self, x: Float[Tensor, "B T D"], tokens: Tokens) -> Float[Tensor, "B T D"]:
        return x

    def at_heads(self, x: Float[Tensor, "B T H K"], tokens: Tokens, ctx: Context) -> Float[Tensor, "B T H K"]:
        return x

    def at_scores(self, q: Tokens, k: Tokens) -> Float[Tensor, "b H T S"] | None:
        """What is added to the scores; one row (b = 1) stands for all when all rows are alike."""
        return None

    def key(self) -> Hashable:
        """Equal keys mean equal hooks."""
        return self.spec


class Learned(Position, kind="learned"):
    """A learned vector a position, added to the embedding (GPT-2, BERT). RoBERTa's rows begin at `offset` 2."""

    acts = "input"
    max_len: PositiveInt
    offset: NonNegativeInt = 0

    def build(self, width: int, num_heads: int = 1) -> LearnedModule:
        return LearnedModule(self, width)

    def limit(self) -> int:
        return self.max_len

    def cost(self, width: int, num_heads: int) -> Cost:
        params = (self.max_len + self.offset) * width
        return Cost(params=params, active=width)


class LearnedModule(PositionModule):
    def __init__(self, spec: Learned, width: int) -> None:
        super().__init__(spec)
        self.offset = spec.offset
        self.table = nn.Parameter(torch.zeros(spec.max_len + spec.offset, width))

    def at_input(self, x: Float[Tensor, "B T D"], tokens: Tokens) -> Float[Tensor, "B T D"]:
        return x + nn.functional.embedding(tokens.pos + self.offset, self.table)


class Sinusoidal(Position, kind="sinusoidal"):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), interleaved; `layout` "half" puts all sines first."""

    acts = "input"
    base: PositiveFloat = 10000.0
    layout: Literal["interleaved", "half"] = "interleaved"

    def build(self, width: int, num_heads: int = 1) -> SinusoidalModule:
        return SinusoidalModule(self)


class SinusoidalModule(PositionModule):
    def at_input(self, x: Float[Tensor, "B T D"], tokens: Tokens) -> Float[Tensor, "B T D"]:
        spec = self.spec
        assert isinstance(spec, Sinusoidal)
        table = sinusoids(tokens.row().pos, x.shape[-1], spec.base, spec.layout)
        return x + table.to(x.dtype)


def sinusoids(pos: Int[Tensor, "B T"], width: int, base: float = 10000.0, layout: str = "interleaved") -> Tensor:
    """(B, T, width): sin(pos / base^(2i / width)) and cos of the same; an odd width lacks the last cosine."""
    half = (width + 1) // 2
    inverse = [base ** (-2 * i / width) for i in range(half)]
    angles = _phases(pos, inverse)
    both = (angles.sin(), angles.cos())
    table = torch.stack(both, -1).flatten(-2) if layout == "interleaved" else torch.cat(both, -1)
    return table[..., :width]


class Rotary(Position, kind="rotary"):
    """Rotary positions (Su et al. 2021): each pair of channels turns by position × frequency, so that a score depends
    on the distance alone.

    `fraction` of the head's channels turn (GPT-NeoX: 0.25); `layout` says which channels pair up: i and i + half
    ("half": LLaMA's weights on the hub, GPT-NeoX), or 2i and 2i + 1 ("interleaved": the paper, GPT-J, GGUF's LLaMA).
    """

    acts = "heads"
    base: PositiveFloat = 10000.0
    fraction: PositiveFloat = 1.0
    layout: Literal["half", "interleaved"] = "half"
    frequencies: Frequencies = Plain()

    def check(self) -> None:
        if self.fraction > 1:
            raise SpecError(f"`fraction` must be at most 1, but is {self.fraction}")

    def turning(self, width: int) -> int:
        """How many of a head's channels turn."""
        turning = int(width * self.fraction)
        if turning < 2 or turning % 2:
            raise SpecError(
                f"rotary needs an even number of channels to turn, but {self.fraction} × {width} is {turning}"
            )
        return turning

    def build(self, width: int, num_heads: int = 1) -> RotaryModule:
        self.turning(width)
        return RotaryModule(self)

    def limit(self) -> int | None:
        return self.frequencies.limit()

    def phases(self, pos: Int[Tensor, "B T"], width: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine (B, T, 1, turning / 2) at `pos`, in float64 where the device has it."""
        turning = self.turning(width)
        angles = _phases(pos, self.frequencies.inverse(turning, self.base, length))[:, :, None]
        gain = self.frequencies.gain()
        return angles.cos() * gain, angles.sin() * gain


class RotaryModule(PositionModule):
    def at_heads(self, x: Float[Tensor, "B T H K"], tokens: Tokens, ctx: Context) -> Float[Tensor, "B T H K"]:
        spec = self.spec
        assert isinstance(spec, Rotary)
        return rotate(x, *self.phases(x, tokens, ctx), spec.layout)

    def phases(self, x: Float[Tensor, "B T H K"], tokens: Tokens, ctx: Context) -> tuple[Tensor, Tensor]:
        """Cosine and sine (b, T, 1, turning / 2) for x, made once a pass."""
        spec = self.spec
        assert isinstance(spec, Rotary)
        width, wide = x.shape[-1], at_least_float32(x).dtype
        key = ("phases", spec, width, wide)
        return ctx.once(key, (tokens,), lambda: self._phases(spec, tokens, width, wide, ctx.context_len))

    def _phases(
        self, spec: Rotary, tokens: Tokens, width: int, wide: torch.dtype, context_len: int | None
    ) -> tuple[Tensor, Tensor]:
        length = (context_len or tokens.end) if spec.frequencies.looks_at_length else 0
        cos, sin = spec.phases(tokens.row().pos, width, length)
        return cos.to(wide), sin.to(wide)


def rotate(x: Float[Tensor, "B T H K"], cos: Tensor, sin: Tensor, layout: str) -> Float[Tensor, "B T H K"]:
    """Turn the first 2 × half channels of x, half = cos.shape[-1]; the others stay."""
    half = cos.shape[-1]
    pairs, axis = ((2, half), -2) if layout == "half" else ((half, 2), -1)
    a, b = at_least_float32(x[..., : 2 * half]).unflatten(-1, pairs).unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


class Alibi(Position, kind="alibi"):
    """Attention with linear biases (Press et al. 2022): score - slope × distance, one slope a head, nothing learned."""

    acts = "scores"

    def build(self, width: int, num_heads: int = 1) -> AlibiModule:
        return AlibiModule(self, num_heads)


class AlibiModule(PositionModule):
    def __init__(self, spec: Alibi, num_heads: int) -> None:
        super().__init__(spec)
        self.slopes = alibi_slopes(num_heads)

    def at_scores(self, q: Tokens, k: Tokens) -> Float[Tensor, "b H T S"]:
        slopes = torch.tensor(self.slopes, device=q.pos.device)[:, None, None]
        return -slopes * _distance(q, k).abs()[:, None]

    def key(self) -> Hashable:
        return self.spec, len(self.slopes)


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for n heads, a power of two. Other counts follow the authors' code, not the paper's
    sentence: the slopes of the next lower power of two, then every other slope of twice that."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + alibi_slopes(2 * power)[::2][: num_heads - power] if power < num_heads else slopes


class RelativeBias(Position, kind="relative_bias"):
    """T5's relative positions (Raffel et al. 2020, section 2.1): a learned bias a head for each bucket of distances.

    Half of the buckets are single distances; the rest grow logarithmically up to `max_distance`. `bidirectional`
    gives each direction half of the buckets (encoders). All layers of a stack share one table.
    """

    acts = "scores"
    num_buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    bidirectional: bool = False

    def check(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise SpecError(f"`num_buckets` must be even and at least 4, but is {self.num_buckets}")
        if self.max_distance <= self._exact():
            raise SpecError(f"`max_distance` must be more than {self._exact()}, but is {self.max_distance}")

    def _one_way(self) -> int:
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def _exact(self) -> int:
        return self._one_way() // 2

    def build(self, width: int, num_heads: int = 1) -> RelativeBiasModule:
        return RelativeBiasModule(self, num_heads)

    def cost(self, width: int, num_heads: int) -> Cost:
        return Cost(params=self.num_buckets * num_heads, active=num_heads)

    def thresholds(self) -> list[int]:
        """The least distance of each bucket but the first, in exact integers: float logarithms slip at the edges.

        Bucket e + j begins where (d / e)^(n - e) ≥ (max / e)^j, for n buckets of which e are exact.
        """
        n, e = self._one_way(), self._exact()
        rest = n - e
        least = [
            bisect.bisect_left(range(self.max_distance), self.max_distance**j * e**rest, key=lambda d: d**rest * e**j)
            for j in range(1, rest)
        ]
        return [*range(1, e + 1), *least]

    def bucket(self, distance: Int[Tensor, "*B"], thresholds: list[int] | None = None) -> Int[Tensor, "*B"]:
        """Bucket of `distance` = query's position - key's; `thresholds` are this spec's, if they are at hand."""
        back = distance.abs() if self.bidirectional else distance.clamp(min=0)
        edges = torch.tensor(thresholds or self.thresholds(), device=distance.device)
        bucket = torch.bucketize(back, edges, right=True)
        return bucket + self._one_way() * (distance < 0) if self.bidirectional else bucket


class RelativeBiasModule(PositionModule):
    shared = True

    def __init__(self, spec: RelativeBias, num_heads: int) -> None:
        super().__init__(spec)
        self.thresholds = spec.thresholds()
        self.table = nn.Parameter(torch.zeros(spec.num_buckets, num_heads))

    def at_scores(self, q: Tokens, k: Tokens) -> Float[Tensor, "b H T S"]:
        spec = self.spec
        assert isinstance(spec, RelativeBias)
        return nn.functional.embedding(spec.bucket(_distance(q, k), self.thresholds), self.table).permute(0, 3, 1, 2)

    def key(self) -> Hashable:
        return self


def _distance(q: Tokens, k: Tokens) -> Int[Tensor, "b T S"]:
    if q.start is not None and k.start is not None:
        q, k = q.row(), k.row()
    return q.pos[:, :, None] - k.pos[:, None, :]


def _phases(pos: Int[Tensor, "B T"], inverse: list[float]) -> Float[Tensor, "B T half"]:
    """Position × frequency, in float64 where the device has it: in half precision, position 257 is 256."""
    wide = torch.float32 if pos.device.type == "mps" else torch.float64
    return pos.to(wide)[..., None] * torch.tensor(inverse, dtype=wide, device=pos.device)
