"""GPT-2 (Radford et al. 2019), and with it the shape of GPT-3: learned positions, LayerNorm before each branch."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rules import Rule, Skip, Split, Tie, Transpose, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import LayerNorm
from anyformer.parts.position import Learned
from anyformer.spec import cycle

__all__ = ["FAMILY"]


NAMES = """
    transformer.wte                 tokens
    transformer.wpe.weight          embeds.decoder.position.table
    transformer.h.*.ln_1            decoder.layers.*.mixer.pre
    transformer.h.*.ln_2            decoder.layers.*.ffn.pre
    transformer.ln_f                decoder.norm
    lm_head                         head
"""


def spec(c: Config) -> TransformerSpec:
    c.expect("scale_attn_by_inverse_layer_idx", False)
    c.expect("scale_attn_weights", True)
    c.expect("add_cross_attention", False)
    c.ignore("reorder_and_upcast_attn", "n_ctx")  # precision, and an older name of n_positions
    c.ignore(
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"
    )
    dim, norm = c("n_embd"), LayerNorm(eps=c("layer_norm_epsilon", 1e-5))
    mixer = Attention(num_heads=c("n_head"), bias=("q", "k", "v", "out"), dropout=c("attn_pdrop", 0.0))
    ffn = DenseFFN(c("n_inner", 4 * dim), c.activation("activation_function", "gelu_new"))
    block = Block.pre(mixer, ffn, norm=norm, dropout=c("resid_pdrop", 0.0))
    tied = bool(c("tie_word_embeddings", True))
    return TransformerSpec(
        dim=dim,
        vocab_size=c("vocab_size"),
        embed=Embed(tied=tied, position=Learned(c("n_positions", 1024)), dropout=c("embd_pdrop", 0.0)),
        decoder=cycle([block], c("n_layer")),
        final_norm=norm,
        head=c.head({"LMHeadModel": LMHead(), "Model": None}),
    )


def config(spec: Any) -> dict[str, Any]:
    block, position, norm = spec.decoder[0], spec.embed.position, spec.final_norm
    mixer, ffn = block.mixer, block.branches[1].op
    return {
        "architectures": ["GPT2Model" if spec.head is None else "GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_embd": spec.dim,
        "n_layer": len(spec.decoder),
        "n_head": mixer.num_heads,
        "n_inner": ffn.hidden,
        "n_positions": position.max_len,
        "activation_function": write_activation(ffn.activation),
        "layer_norm_epsilon": norm.eps,
        "attn_pdrop": mixer.dropout,
        "resid_pdrop": block.branches[0].dropout,
        "embd_pdrop": spec.embed.dropout,
        "tie_word_embeddings": spec.embed.tied,
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    op = "decoder.layers.*.mixer.op"
    tie: list[Rule] = [Tie("lm_head.weight", "transformer.wte.weight")] if spec.tied else []
    return [
        *names(NAMES),
        Split("transformer.h.*.attn.c_attn", f"{op}.q", f"{op}.k", f"{op}.v", transposed=True),
        Transpose("transformer.h.*.attn.c_proj", f"{op}.out"),
        Transpose("transformer.h.*.mlp.c_fc", "decoder.layers.*.ffn.op.up"),
        Transpose("transformer.h.*.mlp.c_proj", "decoder.layers.*.ffn.op.down"),
        *tie,
        Skip("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    ]


FAMILY = Family(("gpt2",), spec, config, rules, prefix="transformer.")
