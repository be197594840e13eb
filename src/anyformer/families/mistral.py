"""Mistral (Jiang et al. 2023): LLaMA within a sliding window."""

from __future__ import annotations

from typing import Any

from anyformer.families.family import Config, Family
from anyformer.families.llama import decoder, mixer, rules, shape, window, write_ffn, write_window
from anyformer.model import TransformerSpec
from anyformer.parts.ffn import GatedFFN

__all__ = ["FAMILY"]

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def spec(c: Config) -> TransformerSpec:
    ffn = GatedFFN(c("intermediate_size"), c.activation("hidden_act", "silu"))
    return decoder(c, mixer(c, window(c)), ffn)


def config(spec: Any) -> dict[str, Any]:
    attention, ffn = spec.decoder[0].mixer, spec.decoder[0].branches[-1].op
    return shape(spec, "mistral", "Mistral") | write_ffn(ffn) | write_window(attention.pattern)


FAMILY = Family(("mistral",), spec, config, rules, prefix="model.", defaults=DEFAULTS)
