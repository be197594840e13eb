"""Gemma 2 (Gemma team 2024): norms around each branch, capped scores and logits, every second layer in a window."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families import llama
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rules import Rule, Skip, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import RMSNorm
from anyformer.parts.pattern import Causal, Window

__all__ = ["FAMILY"]

NORMS = """
    model.layers.*.post_attention_layernorm         decoder.layers.*.mixer.post
    model.layers.*.pre_feedforward_layernorm        decoder.layers.*.ffn.pre
    model.layers.*.post_feedforward_layernorm       decoder.layers.*.ffn.post
"""

DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}


def spec(c: Config) -> TransformerSpec:
    c.expect("use_bidirectional_attention", False)
    c.ignore("final_logit_softcapping")  # kept, for a model that has no logits
    c.expect("hidden_act", c("hidden_activation", "gelu_pytorch_tanh"), "gelu_pytorch_tanh")  # an older spelling
    bias = llama.ALL if c("attention_bias", False) else ()
    scale = float(c("query_pre_attn_scalar", 256)) ** -0.5
    wide = llama.mixer(c, bias=bias, scale=scale, softcap=c("attn_logit_softcapping", None))
    local = wide.replace(pattern=Causal() & Window(c("sliding_window", 4096)))
    kinds = {"sliding_attention": local, "full_attention": wide}
    layers = c("num_hidden_layers")
    types = c("layer_types", [list(kinds)[i % 2] for i in range(layers)])
    ffn = GatedFFN(c("intermediate_size"), c.activation("hidden_activation", "gelu_pytorch_tanh"))
    norm = RMSNorm(eps=c("rms_norm_eps", 1e-6), offset=1.0)
    return TransformerSpec(
        dim=c("hidden_size"),
        vocab_size=c("vocab_size"),
        embed=Embed(tied=bool(c("tie_word_embeddings", True)), scale="sqrt_dim"),
        decoder=tuple(Block.sandwich(kinds[kind], ffn, norm=norm) for kind in types),
        final_norm=norm,
        head=c.head({"ForCausalLM": LMHead(softcap=c("final_logit_softcapping", None)), "Model": None}),
    )


def config(spec: Any) -> dict[str, Any]:
    attentions = [block.mixer for block in spec.decoder]
    first, ffn, head = attentions[0], spec.decoder[0].branches[-1].op, spec.head
    windows = [attention.pattern.reach() for attention in attentions]
    scale = first.width(spec.dim) ** -0.5 if first.scale is None else first.scale
    scalar = scale**-2
    return {
        **llama.shape(spec, "gemma2", "Gemma2"),
        "intermediate_size": ffn.hidden,
        "hidden_activation": write_activation(ffn.activation).replace("gelu_new", "gelu_pytorch_tanh"),
        "attention_bias": bool(first.bias),
        "query_pre_attn_scalar": round(scalar) if abs(round(scalar) - scalar) < 1e-9 * scalar else scalar,
        "attn_logit_softcapping": first.softcap,
        "sliding_window": next((size for size in windows if size), 4096),
        **({"final_logit_softcapping": head.softcap} if head else {}),
        "layer_types": ["sliding_attention" if size else "full_attention" for size in windows],
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    tie: list[Rule] = [Tie("lm_head.weight", "model.embed_tokens.weight")] if spec.tied else []
    return [
        *names(llama.ATTENTION + llama.FEED_FORWARD + NORMS),
        *tie,
        Skip("model.layers.*.self_attn.rotary_emb.inv_freq"),
    ]


FAMILY = Family(("gemma2",), spec, config, rules, prefix="model.", defaults=DEFAULTS)
