"""Qwen 3 (Yang et al. 2025): LLaMA with a norm on each head's query and key."""

from __future__ import annotations

from typing import Any

from anyformer.families import llama
from anyformer.families.family import Config, Family
from anyformer.families.rules import Rule, names
from anyformer.model import TransformerSpec
from anyformer.parts.ffn import GatedFFN
from anyformer.parts.norm import RMSNorm

__all__ = ["FAMILY"]

NORMS = """
    model.layers.*.self_attn.q_norm                 decoder.layers.*.mixer.op.q_norm
    model.layers.*.self_attn.k_norm                 decoder.layers.*.mixer.op.k_norm
"""

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}


def spec(c: Config) -> TransformerSpec:
    c.expect("use_sliding_window", False)
    c.ignore("sliding_window", "max_window_layers", "layer_types")  # they say nothing without it
    bias = llama.ALL if c("attention_bias", False) else ()
    attention = llama.mixer(c, bias=bias, qk_norm=RMSNorm(eps=c("rms_norm_eps", 1e-6)))
    ffn = GatedFFN(c("intermediate_size"), c.activation("hidden_act", "silu"))
    return llama.decoder(c, attention, ffn)


def config(spec: Any) -> dict[str, Any]:
    attention, ffn = spec.decoder[0].mixer, spec.decoder[0].branches[-1].op
    said = {"attention_bias": bool(attention.bias), "use_sliding_window": False}
    return llama.shape(spec, "qwen3", "Qwen3") | llama.write_ffn(ffn) | said


def rules(spec: TransformerSpec) -> list[Rule]:
    return [*llama.rules(spec), *names(NORMS)]


FAMILY = Family(("qwen3",), spec, config, rules, prefix="model.", defaults=DEFAULTS)
