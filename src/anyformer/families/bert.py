"""BERT (Devlin et al. 2019), and what RoBERTa and Longformer have in common with it."""

from __future__ import annotations

from typing import Any

from anyformer.block import Block
from anyformer.families.family import Config, Family, write_activation
from anyformer.families.rules import Name, Rule, Skip, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN
from anyformer.parts.head import Head, MaskedLMHead, PooledHead, TokenHead
from anyformer.parts.norm import LayerNorm
from anyformer.parts.pattern import Full
from anyformer.parts.position import Learned
from anyformer.spec import cycle

__all__ = ["ALL", "FAMILY", "answers", "bias_names", "encoder", "encoder_names", "mixer", "shape"]

ALL: Any = ("q", "k", "v", "out")

ENCODER = """
    .embeddings.word_embeddings                         tokens
    .embeddings.position_embeddings.weight              embeds.encoder.position.table
    .embeddings.token_type_embeddings                   embeds.encoder.types
    .embeddings.LayerNorm                               embeds.encoder.norm
    .encoder.layer.*.attention.self.query               encoder.layers.*.mixer.op.q
    .encoder.layer.*.attention.self.key                 encoder.layers.*.mixer.op.k
    .encoder.layer.*.attention.self.value               encoder.layers.*.mixer.op.v
    .encoder.layer.*.attention.output.dense             encoder.layers.*.mixer.op.out
    .encoder.layer.*.attention.output.LayerNorm         encoder.layers.*.mixer.after
    .encoder.layer.*.intermediate.dense                 encoder.layers.*.ffn.op.up
    .encoder.layer.*.output.dense                       encoder.layers.*.ffn.op.down
    .encoder.layer.*.output.LayerNorm                   encoder.layers.*.ffn.after
"""

HEADS: dict[type[Head], str] = {
    MaskedLMHead: """
    cls.predictions.transform.dense                     head.dense
    cls.predictions.transform.LayerNorm                 head.norm
    cls.predictions.decoder.weight                      head.weight
    """,
    PooledHead: """
    bert.pooler.dense                                   head.dense
    classifier                                          head.out
    """,
    TokenHead: """
    classifier                                          head.out
    """,
}


def spec(c: Config) -> TransformerSpec:
    act = c.activation("hidden_act", "gelu")
    masked = MaskedLMHead(activation=act, norm=LayerNorm(eps=c("layer_norm_eps", 1e-12)))
    position = Learned(c("max_position_embeddings", 512))
    head = answers(c, masked, pooled="pooler.dense.weight")
    return encoder(c, mixer(c), position=position, head=head)


def mixer(c: Config) -> Attention:
    dropout = c("attention_probs_dropout_prob", 0.0)
    return Attention(num_heads=c("num_attention_heads"), pattern=Full(), bias=ALL, dropout=dropout)


def answers(c: Config, masked: Head, *, pooled: str) -> Head | None:
    """The head that the architecture names; `pooled` is a tensor that a bare model has if it pools."""
    dropout = c("classifier_dropout", c("hidden_dropout_prob", 0.0))
    return c.head(
        {
            "ForMaskedLM": masked,
            "ForPreTraining": masked,
            "ForSequenceClassification": PooledHead(c.labels(), dropout),
            "ForTokenClassification": TokenHead(c.labels(), dropout),
            "Model": PooledHead() if any(name.endswith(pooled) for name in c.tensors) else None,
        }
    )


def encoder(c: Config, *mixers: Any, position: Learned | None = None, head: Head | None = None) -> TransformerSpec:
    """Post-norm blocks, one for each of `mixers` in turn."""
    c.expect("position_embedding_type", "absolute")
    c.expect("add_cross_attention", False)
    c.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    c.ignore("pooler_size_per_head", "pooler_type")  # of the first release
    norm = LayerNorm(eps=c("layer_norm_eps", 1e-12))
    dropout = c("hidden_dropout_prob", 0.0)
    ffn = DenseFFN(c("intermediate_size"), c.activation("hidden_act", "gelu"))
    blocks = [Block.post(mixer, ffn, norm=norm, dropout=dropout) for mixer in mixers]
    types = c("type_vocab_size", 2)
    tied = bool(c("tie_word_embeddings", True))
    return TransformerSpec(
        dim=c("hidden_size"),
        vocab_size=c("vocab_size"),
        embed=Embed(tied=tied, position=position, token_types=types, norm=norm, dropout=dropout),
        encoder=cycle(blocks, c("num_hidden_layers")),
        head=head,
    )


def config(spec: Any) -> dict[str, Any]:
    said = {"max_position_embeddings": spec.embed.position.max_len}
    return shape(spec, "bert", "Bert") | said


def shape(spec: Any, model_type: str, prefix: str) -> dict[str, Any]:
    """What all of BERT's kin write."""
    block, norm, head = spec.encoder[0], spec.embed.norm, spec.head
    mixer, ffn = block.mixer, block.branches[1].op
    endings = {MaskedLMHead: "ForMaskedLM", TokenHead: "ForTokenClassification"}
    pooled = "ForSequenceClassification" if isinstance(head, PooledHead) and head.labels else "Model"
    said = {
        "architectures": [prefix + endings.get(type(head), pooled)],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.encoder),
        "num_attention_heads": mixer.num_heads,
        "intermediate_size": ffn.hidden,
        "hidden_act": write_activation(ffn.activation),
        "layer_norm_eps": norm.eps,
        "type_vocab_size": spec.embed.token_types,
        "hidden_dropout_prob": spec.embed.dropout,
        "attention_probs_dropout_prob": mixer.dropout,
        "tie_word_embeddings": spec.embed.tied,
    }
    if isinstance(head, PooledHead | TokenHead) and head.labels:
        labels = {i: f"LABEL_{i}" for i in range(head.labels)}
        said |= {"classifier_dropout": head.dropout}
        said |= {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
    return said


def encoder_names(prefix: str) -> list[Rule]:
    return names("\n".join(prefix + line.strip() for line in ENCODER.strip().splitlines()))


def bias_names(head: str, tied: bool) -> list[Rule]:
    """The bias of logits goes by two names. A tied file has the first; untied, transformers adds the second."""
    first, second = f"{head}.bias", f"{head}.decoder.bias"
    original, copy = (first, second) if tied else (second, first)
    return [Name(original, "head.bias"), Tie(copy, original)]


def rules(spec: TransformerSpec) -> list[Rule]:
    table = "bert.embeddings.word_embeddings.weight"
    found = [*encoder_names("bert"), *(names(HEADS[type(spec.head)]) if spec.head else [])]
    if isinstance(spec.head, MaskedLMHead):
        found += [Tie("cls.predictions.decoder.weight", table)] if spec.tied else []
        found += bias_names("cls.predictions", spec.tied)
        found += [Skip("cls.seq_relationship", "bert.pooler.dense")]  # what pretraining had beside masked tokens
    return [*found, Skip("bert.embeddings.position_ids")]


FAMILY = Family(("bert",), spec, config, rules, prefix="bert.", older=((".gamma", ".weight"), (".beta", ".bias")))
