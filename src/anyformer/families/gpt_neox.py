"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward side by side, a quarter of each head turns."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rope import read_rotary, write_rotary
from anyformer.families.rules import Rule, Skip, Split, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import LayerNorm
from anyformer.spec import cycle

__all__ = ["FAMILY"]


NAMES = """
    gpt_neox.embed_in                               tokens
    gpt_neox.layers.*.input_layernorm               decoder.layers.*.mixer.pre
    gpt_neox.layers.*.attention.dense               decoder.layers.*.mixer.op.out
    gpt_neox.layers.*.post_attention_layernorm      decoder.layers.*.ffn.pre
    gpt_neox.layers.*.mlp.dense_h_to_4h             decoder.layers.*.ffn.op.up
    gpt_neox.layers.*.mlp.dense_4h_to_h             decoder.layers.*.ffn.op.down
    gpt_neox.final_layer_norm                       decoder.norm
    embed_out                                       head
"""


def spec(c: Config) -> TransformerSpec:
    c.ignore("classifier_dropout")
    c.expect("attention_probs_dropout_prob", 0)  # older spellings
    c.expect("hidden_dropout_prob", 0)
    norm = LayerNorm(eps=c("layer_norm_eps", 1e-5))
    mixer = Attention(
        num_heads=c("num_attention_heads"),
        position=read_rotary(c, base=c("rotary_emb_base", 10000), fraction=c("rotary_pct", 0.25)),
        bias=("q", "k", "v", "out") if c("attention_bias", True) else (),
        dropout=c("attention_dropout", 0.0),
    )
    ffn = DenseFFN(c("intermediate_size"), c.activation("hidden_act", "gelu"))
    wiring = Block.parallel if c("use_parallel_residual", True) else Block.pre
    return TransformerSpec(
        dim=c("hidden_size"),
        vocab_size=c("vocab_size"),
        embed=Embed(tied=bool(c("tie_word_embeddings", False)), dropout=c("hidden_dropout", 0.0)),
        decoder=cycle([wiring(mixer, ffn, norm=norm, dropout=c("hidden_dropout", 0.0))], c("num_hidden_layers")),
        final_norm=norm,
        head=c.head({"ForCausalLM": LMHead(), "Model": None}),
    )


def config(spec: Any) -> dict[str, Any]:
    block, norm = spec.decoder[0], spec.final_norm
    mixer, ffn = block.mixer, block.branches[1].op
    return {
        "architectures": ["GPTNeoXModel" if spec.head is None else "GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.decoder),
        "num_attention_heads": mixer.num_heads,
        "intermediate_size": ffn.hidden,
        "hidden_act": write_activation(ffn.activation),
        "layer_norm_eps": norm.eps,
        "attention_bias": bool(mixer.bias),
        "attention_dropout": mixer.dropout,
        "hidden_dropout": spec.embed.dropout,
        "use_parallel_residual": block.join == "parallel",
        "rotary_pct": mixer.position.fraction,
        "tie_word_embeddings": spec.embed.tied,
        **write_rotary(mixer.position),
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    mixer: Any = spec.decoder[0].mixer
    op = "decoder.layers.*.mixer.op"
    tie: list[Rule] = [Tie("embed_out.weight", "gpt_neox.embed_in.weight")] if spec.tied else []
    return [
        *names(NAMES),
        Split("gpt_neox.layers.*.attention.query_key_value", *(f"{op}.{x}" for x in "qkv"), heads=mixer.num_heads),
        *tie,
        Skip("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
        Skip("gpt_neox.layers.*.attention.rotary_emb.inv_freq"),
    ]


FAMILY = Family(("gpt_neox",), spec, config, rules, prefix="gpt_neox.")
