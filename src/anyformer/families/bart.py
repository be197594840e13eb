"""BART (Lewis et al. 2020): an encoder and a decoder as in 2017, post-norm, with learned positions and GELU."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rules import Constant, Rule, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention, CrossAttention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import LayerNorm
from anyformer.parts.pattern import Full
from anyformer.parts.position import Learned
from anyformer.spec import cycle

__all__ = ["FAMILY"]


STACK = """
    model.{0}.embed_positions.weight                embeds.{0}.position.table
    model.{0}.layernorm_embedding                   embeds.{0}.norm
    model.{0}.layers.*.self_attn.q_proj             {0}.layers.*.mixer.op.q
    model.{0}.layers.*.self_attn.k_proj             {0}.layers.*.mixer.op.k
    model.{0}.layers.*.self_attn.v_proj             {0}.layers.*.mixer.op.v
    model.{0}.layers.*.self_attn.out_proj           {0}.layers.*.mixer.op.out
    model.{0}.layers.*.self_attn_layer_norm         {0}.layers.*.mixer.after
    model.{0}.layers.*.fc1                          {0}.layers.*.ffn.op.up
    model.{0}.layers.*.fc2                          {0}.layers.*.ffn.op.down
    model.{0}.layers.*.final_layer_norm             {0}.layers.*.ffn.after
"""

CROSS = """
    model.shared                                    tokens
    model.decoder.layers.*.encoder_attn.q_proj      decoder.layers.*.cross.op.q
    model.decoder.layers.*.encoder_attn.k_proj      decoder.layers.*.cross.op.k
    model.decoder.layers.*.encoder_attn.v_proj      decoder.layers.*.cross.op.v
    model.decoder.layers.*.encoder_attn.out_proj    decoder.layers.*.cross.op.out
    model.decoder.layers.*.encoder_attn_layer_norm  decoder.layers.*.cross.after
    lm_head                                         head
"""


def spec(c: Config) -> TransformerSpec:
    c.expect("tie_word_embeddings", True)  # untied, transformers has a table for each stack too
    c.expect("normalize_before", False)
    c.expect("normalize_embedding", True)
    c.expect("add_final_layer_norm", False)
    c.expect("add_bias_logits", False)
    c.expect("static_position_embeddings", False)
    c.expect("encoder_layerdrop", 0.0)
    c.expect("decoder_layerdrop", 0.0)
    c.ignore("classifier_dropout", "classif_dropout", "num_hidden_layers", "force_bos_token_to_be_generated")
    c.ignore("extra_pos_embeddings", "save_step", "gradient_checkpointing", "forced_bos_token_id")
    dim, dropout, norm = c("d_model"), c("dropout", 0.0), LayerNorm()
    inner = c("activation_dropout", 0.0)
    act = c.activation("activation_function", "gelu")
    all_biases: dict[str, Any] = {"bias": ("q", "k", "v", "out"), "dropout": c("attention_dropout", 0.0)}
    heads, width = c("encoder_attention_heads"), DenseFFN(c("encoder_ffn_dim"), act, dropout=inner)
    encoder = Block.post(Attention(heads, pattern=Full(), **all_biases), width, norm=norm, dropout=dropout)
    heads, width = c("decoder_attention_heads"), DenseFFN(c("decoder_ffn_dim"), act, dropout=inner)
    mixers = Attention(heads, **all_biases), CrossAttention(heads, **all_biases)
    decoder = Block.post(*mixers, width, norm=norm, dropout=dropout)
    scale: Any = "sqrt_dim" if c("scale_embedding", False) else 1.0
    position = Learned(c("max_position_embeddings", 1024), offset=2)
    return TransformerSpec(
        dim=dim,
        vocab_size=c("vocab_size"),
        embed=Embed(scale=scale, position=position, norm=norm, dropout=dropout),
        encoder=cycle([encoder], c("encoder_layers")),
        decoder=cycle([decoder], c("decoder_layers")),
        head=c.head({"ForConditionalGeneration": LMHead(), "Model": None}),
    )


def config(spec: Any) -> dict[str, Any]:
    position = spec.embed.position
    said: dict[str, Any] = {}
    for stack, blocks in spec.stacks().items():
        mixer, ffn = blocks[0].mixer, blocks[0].branches[-1].op
        said[f"{stack}_layers"] = len(blocks)
        said[f"{stack}_attention_heads"] = mixer.num_heads
        said[f"{stack}_ffn_dim"] = ffn.hidden
        said |= {"attention_dropout": mixer.dropout, "activation_dropout": ffn.dropout}
        said["activation_function"] = write_activation(ffn.activation)
    return said | {
        "architectures": ["BartModel" if spec.head is None else "BartForConditionalGeneration"],
        "model_type": "bart",
        "vocab_size": spec.vocab_size,
        "d_model": spec.dim,
        "max_position_embeddings": position.max_len,
        "scale_embedding": spec.embed.scale == "sqrt_dim",
        "dropout": spec.embed.dropout,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    table = STACK.format("encoder") + STACK.format("decoder") + CROSS
    copies = [Tie(f"model.{name}.embed_tokens.weight", "model.shared.weight") for name in ("encoder", "decoder")]
    copies += [Tie("lm_head.weight", "model.shared.weight")] if spec.tied else []
    constant: list[Rule] = [Constant("final_logits_bias")] if spec.head else []
    return [*names(table), *copies, *constant]


FAMILY = Family(("bart",), spec, config, rules, prefix="model.")
