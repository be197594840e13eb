"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts as feed-forward."""

from __future__ import annotations

from typing import Any

from anyformer.families.family import Config, Family
from anyformer.families.llama import ATTENTION, SECOND_NORM, decoder, mixer, shape, window, write_ffn, write_window
from anyformer.families.rules import Rule, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.ffn import GatedFFN
from anyformer.parts.moe import MoE

__all__ = ["FAMILY"]

EXPERTS = """
    model.layers.*.block_sparse_moe.gate            decoder.layers.*.ffn.op.router
    model.layers.*.block_sparse_moe.experts.*.w1    decoder.layers.*.ffn.op.experts.*.gate
    model.layers.*.block_sparse_moe.experts.*.w3    decoder.layers.*.ffn.op.experts.*.up
    model.layers.*.block_sparse_moe.experts.*.w2    decoder.layers.*.ffn.op.experts.*.down
"""

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec(c: Config) -> TransformerSpec:
    c.expect("router_jitter_noise", 0.0)
    c.ignore("output_router_logits")  # whether the auxiliary loss is added by itself; ours always hands it out
    expert = GatedFFN(c("intermediate_size"), c.activation("hidden_act", "silu"))
    ffn = MoE(expert, c("num_local_experts"), c("num_experts_per_tok", 2), balance=c("router_aux_loss_coef", 0.001))
    return decoder(c, mixer(c, window(c)), ffn)


def config(spec: Any) -> dict[str, Any]:
    attention, ffn = spec.decoder[0].mixer, spec.decoder[0].branches[-1].op
    return {
        **shape(spec, "mixtral", "Mixtral"),
        **write_ffn(ffn.expert),
        **write_window(attention.pattern),
        "num_local_experts": ffn.num_experts,
        "num_experts_per_tok": ffn.top_k,
        "router_aux_loss_coef": ffn.balance,
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    tie: list[Rule] = [Tie("lm_head.weight", "model.embed_tokens.weight")] if spec.tied else []
    return [*names(ATTENTION + SECOND_NORM + EXPERTS), *tie]


FAMILY = Family(("mixtral",), spec, config, rules, prefix="model.", defaults=DEFAULTS)
