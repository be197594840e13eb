"""Longformer (Beltagy et al. 2020): RoBERTa within a window; marked tokens see all, by projections of their own."""

from __future__ import annotations

from typing import Any

from anyformer.families import bert, roberta
from anyformer.families.family import Config, Family
from anyformer.families.rules import Rule, names
from anyformer.model import TransformerSpec
from anyformer.parts.global_attention import GlobalAttention
from anyformer.parts.pattern import Global, Pattern, Window

__all__ = ["FAMILY"]

NAMES = """
    longformer.encoder.layer.*.attention.self.query_global      encoder.layers.*.mixer.op.q_global
    longformer.encoder.layer.*.attention.self.key_global        encoder.layers.*.mixer.op.k_global
    longformer.encoder.layer.*.attention.self.value_global      encoder.layers.*.mixer.op.v_global
"""


def spec(c: Config) -> TransformerSpec:
    c.expect("attention_mode", "longformer")
    c.expect("ignore_attention_mask", False)
    windows, layers = c("attention_window", 512), c("num_hidden_layers")
    windows = [windows] * layers if isinstance(windows, int) else windows
    if len(windows) != layers or any(size % 2 for size in windows):
        raise ValueError(f"config.json: 'attention_window' must be {layers} even numbers, but is {windows}")
    plain = bert.mixer(c)
    mixers = [
        GlobalAttention(plain.num_heads, pattern=_pattern(size), bias=plain.bias, dropout=plain.dropout)
        for size in windows
    ]
    head = bert.answers(c, roberta.masked(c), pooled="pooler.dense.weight")
    return bert.encoder(c, *mixers, position=roberta.offset_position(c), head=head)


def _pattern(size: int) -> Pattern:
    """`size` / 2 neighbours on either side, and the marked tokens."""
    return Window(size // 2 + 1) | Global()


def config(spec: Any) -> dict[str, Any]:
    windows = []
    for block in spec.encoder:
        mixer = block.mixer
        window = mixer.pattern.parts[0]
        windows.append(2 * (window.size - 1))
    said = {"attention_window": windows}
    return bert.shape(spec, "longformer", "Longformer") | roberta.write_position(spec) | said


def rules(spec: TransformerSpec) -> list[Rule]:
    return [*bert.encoder_names("longformer"), *names(NAMES), *roberta.head_rules(spec, "longformer")]


FAMILY = Family(("longformer",), spec, config, rules, prefix="longformer.")
