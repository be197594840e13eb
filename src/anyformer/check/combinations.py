"""Combinations: every part, and every legal way to put them together, as tiny models.

A row names one choice for each slot. Which rows are legal is not written here: each is tried, and the table of rules
(`parts.legal`) refuses it with a reason or lets it be built.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from anyformer.block import Block
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention, CrossAttention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN, GatedFFN
from anyformer.parts.frequencies import NTK, DynamicNTK, Linear, Llama3, YaRN
from anyformer.parts.global_attention import GlobalAttention
from anyformer.parts.head import LMHead, MaskedLMHead, PooledHead, TokenHead
from anyformer.parts.linear_attention import LinearAttention, RandomFeatures, Relu
from anyformer.parts.moe import MoE
from anyformer.parts.norm import LayerNorm, RMSNorm
from anyformer.parts.op import Mixer
from anyformer.parts.pattern import Causal, Full, Global, Pattern, Prefix, Window
from anyformer.parts.per_head import PerHead
from anyformer.parts.position import Alibi, Learned, Position, RelativeBias, Rotary, Sinusoidal
from anyformer.parts.recurrent import Recurrent
from anyformer.parts.sparse import Chunk, Dilated, RandomBlocks
from anyformer.spec import SpecError

__all__ = ["AXES", "CORE", "Row", "Table"]

DIM, VOCAB, LAYERS = 16, 23, 2

Row = tuple[str, ...]
"""One choice for each axis, in their order."""

PAST = Causal()
TWO_SIDED: dict[str, Pattern] = {
    "full": Full(),
    "window": Window(3),
    "dilated": Dilated(2, 5),
    "chunk": Chunk(4),
    "random": RandomBlocks(2, 1) | Window(2),
    "global": Window(2) | Global(),
    "per_head": PerHead((Full(), Window(2))),
}
ONE_SIDED: dict[str, Pattern] = {
    "causal": PAST,
    "sliding": PAST & Window(3),
    "prefix": PAST | Prefix(3),
    "prefix_alone": PAST & Prefix(3),
    "sinks": PAST & (Window(3) | Prefix(2)),
    "far_past": PAST & ~Window(2),
    "past_dilated": PAST & Dilated(2, 5),
    "past_chunk": PAST & Chunk(4),
    "past_random": PAST & (RandomBlocks(2, 1) | Window(2)),
    "past_global": PAST & (Window(2) | Global()),
    "past_per_head": PerHead((PAST, PAST & Window(2))),
}
ALL: tuple[Literal["q", "k", "v", "out"], ...] = ("q", "k", "v", "out")

AXES: dict[str, dict[str, Any]] = {
    "stack": {name: name for name in ("decoder", "encoder", "encoder_decoder")},
    "mixer": {
        "multi_head": Attention(4),
        "grouped": Attention(4, 2),
        "multi_query_bias": Attention(4, 1, bias=ALL),
        "qk_norm": Attention(4, 2, qk_norm=RMSNorm()),
        "softcap": Attention(4, softcap=2.0),
        "wide_heads": Attention(2, head_dim=12, scale=0.5),
        "global": GlobalAttention(4),
        "linear": LinearAttention(4),
        "linear_relu": LinearAttention(4, 2, features=Relu(), bias=ALL),
        "linear_random": LinearAttention(2, features=RandomFeatures(8)),
        "rnn": Recurrent("rnn"),
        "gru": Recurrent("gru"),
        "lstm": Recurrent("lstm", hidden=12, layers=2),
    },
    "pattern": {"own": None, **TWO_SIDED, **ONE_SIDED},
    "position": {
        "none": None,
        "learned": Learned(64),
        "sinusoidal": Sinusoidal(),
        "rotary": Rotary(),
        "rotary_interleaved": Rotary(layout="interleaved"),
        "rotary_partial": Rotary(fraction=0.5),
        "rotary_linear": Rotary(frequencies=Linear(factor=4)),
        "rotary_ntk": Rotary(frequencies=NTK(factor=4)),
        "rotary_dynamic": Rotary(frequencies=DynamicNTK(factor=4, original_len=4)),
        "rotary_yarn": Rotary(frequencies=YaRN(factor=4, original_len=8)),
        "rotary_llama3": Rotary(frequencies=Llama3(original_len=8)),
        "alibi": Alibi(),
        "relative_bias": RelativeBias(8, 16),
        "relative_bias_two_sided": RelativeBias(8, 16, bidirectional=True),
    },
    "norm": {
        "layer_norm": LayerNorm(),
        "layer_norm_no_bias": LayerNorm(bias=False),
        "rms_norm": RMSNorm(),
        "rms_norm_offset": RMSNorm(offset=1.0),
    },
    "feed_forward": {
        "none": None,
        "relu": DenseFFN(24),
        "gelu": DenseFFN(24, "gelu"),
        "gelu_tanh": DenseFFN(24, "gelu_tanh"),
        "silu": DenseFFN(24, "silu"),
        "relu2": DenseFFN(24, "relu2", bias=False),
        "swiglu": GatedFFN(24),
        "geglu": GatedFFN(24, "gelu", bias=True),
        "reglu": GatedFFN(24, "relu"),
        "experts": MoE(GatedFFN(8), 4),
        "experts_shared": MoE(DenseFFN(8), 3, top_k=1, renormalize=False, shared=DenseFFN(8), z=0.001),
    },
    "wiring": {
        "pre": Block.pre,
        "post": Block.post,
        "sandwich": Block.sandwich,
        "parallel": Block.parallel,
        "parallel_one_norm": lambda *ops, norm: Block.parallel(*ops, norm=norm, one_norm=True),
    },
    "embed": {
        "tied": Embed(),
        "untied_scaled": Embed(tied=False, scale="sqrt_dim"),
        "types_norm": Embed(token_types=2, norm=LayerNorm()),
    },
    "head": {
        "lm": LMHead(),
        "lm_bias_softcap": LMHead(bias=True, scale=0.5, softcap=3.0),
        "masked_lm": MaskedLMHead(),
        "token": TokenHead(3),
        "pooled": PooledHead(3),
        "hidden": None,
    },
}
"""Slot → name → choice."""

CORE = ("stack", "mixer", "pattern", "position")
"""The axes that meet inside attention, and are crossed in full. The others act on each token alone: they are drawn."""


class Table:
    """All rows over `axes`. `parts` puts other choices on an axis than its own: `Table(mixer={"mine": Mine()})`."""

    def __init__(self, **parts: Mapping[str, Any]) -> None:
        self.axes: dict[str, Mapping[str, Any]] = {**AXES, **parts}

    def spec(self, row: Row) -> TransformerSpec:
        """The model of this row. SpecError says why there is none."""
        choice = {axis: self.axes[axis][name] for axis, name in zip(self.axes, row, strict=True)}
        position: Position | None = choice["position"]
        mixer, embed = _mixer(choice["mixer"], choice["pattern"], position), choice["embed"]
        if position is not None and position.acts == "input":
            embed = embed.replace(position=position)
        norm, feed, wiring = choice["norm"], choice["feed_forward"], choice["wiring"]
        feeds = [] if feed is None else [feed]
        stacks: dict[str, Any] = {"decoder": [wiring(mixer, *feeds, norm=norm)] * LAYERS}
        if choice["stack"] == "encoder":
            stacks = {"encoder": stacks["decoder"]}
        elif choice["stack"] == "encoder_decoder":
            read = _mixer(Attention(4), Full(), position)
            stacks = {
                "encoder": [wiring(read, *feeds, norm=norm)] * LAYERS,
                "decoder": [wiring(mixer, CrossAttention(4, 2), *feeds, norm=norm)] * LAYERS,
            }
        return TransformerSpec(DIM, VOCAB, embed=embed, final_norm=norm, head=choice["head"], **stacks)

    def refusal(self, row: Row) -> str | None:
        """Why this row is no model; None if it is one."""
        try:
            self.spec(row)
        except SpecError as error:
            return error.reason
        return None

    @cached_property
    def cores(self) -> list[Row]:
        """The legal choices for the axes of `CORE`, with the first choice of all others."""
        first = tuple(next(iter(self.axes[axis])) for axis in self.axes if axis not in CORE)
        rows = (core + first for core in itertools.product(*(self.axes[axis] for axis in CORE)))
        return [row[: len(CORE)] for row in rows if self.refusal(row) is None]

    def rows(self, seed: int = 0) -> Iterator[Row]:
        """The full table: every legal core, with the other axes drawn at random for each."""
        draw = random.Random(seed)
        for core in self.cores:
            yield self._completed(core, draw)

    def cover(self, seed: int = 0) -> list[Row]:
        """Few rows in which every legal pair of choices stands at least once (a pairwise cover), greedily."""
        draw, missing = random.Random(seed), set(self.pairs)
        rows: list[Row] = []
        while missing:
            wanted = min(missing)
            best = max(
                (self._with(wanted, missing, draw) for _ in range(4)), key=lambda row: len(missing & _pairs(row))
            )
            rows.append(best)
            missing -= _pairs(best)
        return rows

    def _completed(self, core: Row, draw: random.Random) -> Row:
        others = [list(self.axes[axis]) for axis in self.axes if axis not in CORE]
        for _ in range(100):
            row = core + tuple(draw.choice(names) for names in others)
            if self.refusal(row) is None:
                return row
        raise AssertionError(f"no legal row has {core}")

    @cached_property
    def pairs(self) -> set[Pair]:
        """All pairs of choices that stand together in some legal row."""
        count, names = len(CORE), list(self.axes.values())
        found = {pair for core in self.cores for pair in _pairs(core)}
        outer = [[(at, name) for name in names[at]] for at in range(count, len(names))]
        for (at, name), core in itertools.product(itertools.chain(*outer), self.cores):
            held = {(choice, (at, name)) for choice in enumerate(core)}
            row = [*core, *(next(iter(rest)) for rest in names[count:])]
            row[at] = name
            if not held <= found and self.refusal(tuple(row)) is None:
                found |= held
        return found.union(*(itertools.product(one, two) for one, two in itertools.combinations(outer, 2)))

    def _with(self, wanted: Pair, missing: set[Pair], draw: random.Random) -> Row:
        """A legal row that holds `wanted`, and in each other place a choice that adds much of what is missing."""
        fixed, names = dict(wanted), list(self.axes.values())
        cores = [core for core in self.cores if all(core[at] == name for at, name in fixed.items() if at < len(CORE))]
        for core in sorted(draw.sample(cores, min(40, len(cores))), key=lambda core: -len(missing & _pairs(core))):
            row = core
            for at in range(len(CORE), len(names)):
                choices = [fixed[at]] if at in fixed else draw.sample(list(names[at]), len(names[at]))
                legal = [(*row, name) for name in choices if _pairs((*row, name)) <= self.pairs]
                if not legal:
                    break
                row = max(legal, key=lambda row: len(missing & _pairs(row)))
            if len(row) == len(names) and self.refusal(row) is None:
                return row
        raise AssertionError(f"no legal row was found that holds {wanted}")


Pair = tuple[tuple[int, str], tuple[int, str]]
"""Two choices, each with the number of its axis."""


def _pairs(row: Row) -> set[Pair]:
    return set(itertools.combinations(enumerate(row), 2))


def _mixer(mixer: Mixer, pattern: Pattern | None, position: Position | None) -> Mixer:
    """The mixer with this pattern, and this position if it acts there; SpecError where it has no such slot."""
    fields = dict(mixer.items())
    if pattern is None and "pattern" in fields:
        raise SpecError(f"{mixer.kind!r} has a slot for a pattern, so the table names one")
    if pattern is not None:
        mixer = _filled(mixer, "pattern", pattern)
    return mixer if position is None or position.acts == "input" else _filled(mixer, "position", position)


def _filled(mixer: Mixer, slot: str, part: Any) -> Mixer:
    if slot not in dict(mixer.items()):
        raise SpecError(f"{mixer.kind!r} has no slot for a {slot}: it reads its text in order")
    return mixer.replace(**{slot: part})
