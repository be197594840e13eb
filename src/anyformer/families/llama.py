"""LLaMA 1, 2 and 3 (Touvron et al. 2023; Dubey et al. 2024), and what Mistral and Mixtral have in common with it."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rope import read_rotary, write_rotary
from anyformer.families.rules import Rule, Skip, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import RMSNorm
from anyformer.parts.op import FeedForward
from anyformer.parts.pattern import Causal, Pattern, Window
from anyformer.spec import cycle

__all__ = ["ATTENTION", "FAMILY", "config", "decoder", "mixer", "rules", "shape", "window", "write_window"]

ALL: Any = ("q", "k", "v", "out")

ATTENTION = """
    model.embed_tokens                              tokens
    model.layers.*.input_layernorm                  decoder.layers.*.mixer.pre
    model.layers.*.self_attn.q_proj                 decoder.layers.*.mixer.op.q
    model.layers.*.self_attn.k_proj                 decoder.layers.*.mixer.op.k
    model.layers.*.self_attn.v_proj                 decoder.layers.*.mixer.op.v
    model.layers.*.self_attn.o_proj                 decoder.layers.*.mixer.op.out
    model.norm                                      decoder.norm
    lm_head                                         head
"""

SECOND_NORM = """
    model.layers.*.post_attention_layernorm         decoder.layers.*.ffn.pre
"""

FEED_FORWARD = """
    model.layers.*.mlp.gate_proj                    decoder.layers.*.ffn.op.gate
    model.layers.*.mlp.up_proj                      decoder.layers.*.ffn.op.up
    model.layers.*.mlp.down_proj                    decoder.layers.*.ffn.op.down
"""


def spec(c: Config) -> TransformerSpec:
    bias = ALL if c("attention_bias", False) else ()
    ffn = GatedFFN(c("intermediate_size"), c.activation("hidden_act", "silu"), bool(c("mlp_bias", False)))
    return decoder(c, mixer(c, bias=bias), ffn)


def mixer(c: Config, pattern: Pattern = Causal(), **more: Any) -> Attention:  # noqa: B008 (frozen data)
    """The attention that a config describes."""
    heads = c("num_attention_heads")
    return Attention(
        num_heads=heads,
        num_kv_heads=c("num_key_value_heads", heads),
        head_dim=c("head_dim", c("hidden_size") // heads),
        pattern=pattern,
        position=read_rotary(c),
        dropout=float(c("attention_dropout", 0.0)),
        **more,
    )


def decoder(c: Config, attention: Attention, ffn: FeedForward) -> TransformerSpec:
    """Pre-norm blocks of these two."""
    c.expect("rope_interleaved", False)
    c.expect("pretraining_tp", 1)  # more than 1 only changes the order of sums
    norm = RMSNorm(eps=c("rms_norm_eps", 1e-6))
    return TransformerSpec(
        dim=c("hidden_size"),
        vocab_size=c("vocab_size"),
        embed=Embed(tied=bool(c("tie_word_embeddings", False))),
        decoder=cycle([Block.pre(attention, ffn, norm=norm)], c("num_hidden_layers")),
        final_norm=norm,
        head=c.head({"ForCausalLM": LMHead(), "Model": None}),
    )


def config(spec: Any) -> dict[str, Any]:
    ffn = spec.decoder[0].branches[-1].op
    attention = spec.decoder[0].mixer
    said = {"attention_bias": bool(attention.bias), "mlp_bias": ffn.bias}
    return shape(spec, "llama", "Llama") | write_ffn(ffn) | said


def shape(spec: Any, model_type: str, prefix: str) -> dict[str, Any]:
    """What all of LLaMA's kin write."""
    attention, norm = spec.decoder[0].mixer, spec.final_norm
    return {
        "architectures": [prefix + ("Model" if spec.head is None else "ForCausalLM")],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.decoder),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.width(spec.dim),
        "rms_norm_eps": norm.eps,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": spec.embed.tied,
        **write_rotary(attention.position),
    }


def write_ffn(ffn: Any) -> dict[str, Any]:
    return {"intermediate_size": ffn.hidden, "hidden_act": write_activation(ffn.activation)}


def window(c: Config) -> Pattern:
    """Causal, within `sliding_window` tokens if the config has one."""
    size = c("sliding_window", None)
    return Causal() & Window(size) if size else Causal()


def write_window(pattern: Pattern) -> dict[str, Any]:
    return {"sliding_window": pattern.reach()}


def rules(spec: TransformerSpec) -> list[Rule]:
    tie: list[Rule] = [Tie("lm_head.weight", "model.embed_tokens.weight")] if spec.tied else []
    return [*names(ATTENTION + SECOND_NORM + FEED_FORWARD), *tie, Skip("model.layers.*.self_attn.rotary_emb.inv_freq")]


FAMILY = Family(("llama",), spec, config, rules, prefix="model.")
