"""T5 (Raffel et al. 2020), versions 1.0 (ReLU, tied) and 1.1 with Flan (gated GELU, untied)."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family
from anyformer.families.rules import Rule, Skip, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention, CrossAttention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN, GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import RMSNorm
from anyformer.parts.op import FeedForward
from anyformer.parts.pattern import Causal, Full
from anyformer.parts.position import RelativeBias
from anyformer.spec import cycle

__all__ = ["FAMILY"]

NAMES = """
    shared                                                              tokens
    encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
                                                                        encoder.layers.0.mixer.op.position.table
    decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
                                                                        decoder.layers.0.mixer.op.position.table
    encoder.final_layer_norm                                            encoder.norm
    decoder.final_layer_norm                                            decoder.norm
    lm_head                                                             head
"""

LAYERS = (
    *(("encoder", 0, "SelfAttention", "mixer"), ("encoder", 1, "DenseReluDense", "ffn")),
    *(("decoder", 0, "SelfAttention", "mixer"), ("decoder", 1, "EncDecAttention", "cross")),
    ("decoder", 2, "DenseReluDense", "ffn"),
)
INNER = {
    "mixer": {"q": "q", "k": "k", "v": "v", "o": "out"},
    "ffn": {"wi": "up", "wi_1": "up", "wi_0": "gate", "wo": "down"},
}
INNER["cross"] = INNER["mixer"]


def spec(c: Config) -> TransformerSpec:
    c.ignore("is_gated_act", "dense_act_fn", "classifier_dropout", "n_positions", "output_past")
    head = {"num_heads": c("num_heads"), "head_dim": c("d_kv"), "scale": 1.0, "dropout": c("dropout_rate", 0.0)}
    buckets = {
        "num_buckets": c("relative_attention_num_buckets", 32),
        "max_distance": c("relative_attention_max_distance", 128),
    }
    here = Attention(**head, pattern=Full(), position=RelativeBias(**buckets, bidirectional=True))
    past = Attention(**head, pattern=Causal(), position=RelativeBias(**buckets))
    ffn, norm, dropout = _ffn(c), RMSNorm(eps=c("layer_norm_epsilon", 1e-6)), c("dropout_rate", 0.0)
    encoder = Block.pre(here, ffn, norm=norm, dropout=dropout)
    decoder = Block.pre(past, CrossAttention(**head), ffn, norm=norm, dropout=dropout)
    scaled = bool(c("scale_decoder_outputs", c("tie_word_embeddings", True)))
    return TransformerSpec(
        dim=c("d_model"),
        vocab_size=c("vocab_size"),
        embed=Embed(tied=scaled or "lm_head.weight" not in c.tensors, dropout=dropout),
        encoder=cycle([encoder], c("num_layers")),
        decoder=cycle([decoder], c("num_decoder_layers", c("num_layers"))),
        final_norm=norm,
        head=c.head({"ForConditionalGeneration": LMHead(scale=c("d_model") ** -0.5 if scaled else 1.0)}),
    )


def _ffn(c: Config) -> FeedForward:
    sizes = {"hidden": c("d_ff"), "bias": False, "dropout": c("dropout_rate", 0.0)}
    known = {
        "relu": DenseFFN(**sizes),
        "gated-gelu": GatedFFN(**sizes, activation="gelu_tanh"),  # the name says gelu, the code means the tanh form
        "gated-silu": GatedFFN(**sizes, activation="silu"),
        "gated-relu": GatedFFN(**sizes, activation="relu"),
        "gelu": DenseFFN(**sizes, activation="gelu"),
    }
    return c.choose("feed_forward_proj", known, "relu")


def config(spec: Any) -> dict[str, Any]:
    mixer, ffn, norm, head = spec.decoder[0].mixer, spec.decoder[0].branches[-1].op, spec.final_norm, spec.head
    scaled = head.scale != 1.0
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": spec.vocab_size,
        "d_model": spec.dim,
        "d_kv": mixer.width(spec.dim),
        "d_ff": ffn.hidden,
        "num_layers": len(spec.encoder),
        "num_decoder_layers": len(spec.decoder),
        "num_heads": mixer.num_heads,
        "relative_attention_num_buckets": mixer.position.num_buckets,
        "relative_attention_max_distance": mixer.position.max_distance,
        "layer_norm_epsilon": norm.eps,
        "feed_forward_proj": f"gated-{ffn.activation.removesuffix('_tanh')}"
        if isinstance(ffn, GatedFFN)
        else ffn.activation,
        "dropout_rate": spec.embed.dropout,
        "scale_decoder_outputs": scaled,
        "tie_word_embeddings": spec.embed.tied,
        "is_encoder_decoder": True,
    }


def rules(spec: TransformerSpec) -> list[Rule]:
    gated = isinstance(spec.decoder[0].branches[-1].op, GatedFFN)
    table = [NAMES]
    for stack, number, kind, branch in LAYERS:
        theirs, ours = f"{stack}.block.*.layer.{number}", f"{stack}.layers.*.{branch}"
        inner = {t: o for t, o in INNER[branch].items() if t != ("wi" if gated else "wi_1") and (gated or t != "wi_0")}
        table += [f"{theirs}.{kind}.{t} {ours}.op.{o}" for t, o in inner.items()]
        table += [f"{theirs}.layer_norm {ours}.pre"]
    copies = [Tie(f"{stack}.embed_tokens.weight", "shared.weight") for stack in ("encoder", "decoder")]
    copies += [Tie("lm_head.weight", "shared.weight")] if spec.tied else []
    unread = Skip("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")  # from the first release
    return [*names(" ".join(table)), *copies, unread]


FAMILY = Family(("t5",), spec, config, rules)
