"""RoBERTa (Liu et al. 2019): BERT's block; positions count from the row after the padding token's."""

from __future__ import annotations

from typing import Any

from anyformer.families import bert
from anyformer.families.family import Config, Family
from anyformer.families.rules import Rule, Skip, Tie, names
from anyformer.model import TransformerSpec
from anyformer.parts.head import Head, MaskedLMHead, PooledHead, TokenHead
from anyformer.parts.norm import LayerNorm
from anyformer.parts.position import Learned

__all__ = ["FAMILY", "HEADS", "head_rules", "masked", "offset_position", "write_position"]

HEADS: dict[type[Head], str] = {
    MaskedLMHead: """
    lm_head.dense                                       head.dense
    lm_head.layer_norm                                  head.norm
    lm_head.decoder.weight                              head.weight
    """,
    PooledHead: """
    classifier.dense                                    head.dense
    classifier.out_proj                                 head.out
    """,
    TokenHead: """
    classifier                                          head.out
    """,
}


def spec(c: Config) -> TransformerSpec:
    head = bert.answers(c, masked(c), pooled="pooler.dense.weight")
    return bert.encoder(c, bert.mixer(c), position=offset_position(c), head=head)


def masked(c: Config) -> MaskedLMHead:
    return MaskedLMHead(norm=LayerNorm(eps=c("layer_norm_eps", 1e-12)))


def offset_position(c: Config) -> Learned:
    """The table's first rows, up to the padding token's, are never used."""
    offset = c("pad_token_id", 1) + 1
    return Learned(c("max_position_embeddings", 512) - offset, offset=offset)


def config(spec: Any) -> dict[str, Any]:
    return bert.shape(spec, "roberta", "Roberta") | write_position(spec)


def write_position(spec: Any) -> dict[str, Any]:
    position = spec.embed.position
    return {"max_position_embeddings": position.max_len + position.offset, "pad_token_id": position.offset - 1}


def rules(spec: TransformerSpec) -> list[Rule]:
    return [*bert.encoder_names("roberta"), *head_rules(spec, "roberta")]


def head_rules(spec: TransformerSpec, prefix: str) -> list[Rule]:
    found = names(HEADS[type(spec.head)]) if spec.head else []
    if isinstance(spec.head, PooledHead) and not spec.head.labels:
        found = names(f"{prefix}.pooler.dense head.dense")
    if isinstance(spec.head, MaskedLMHead):
        found += [Tie("lm_head.decoder.weight", f"{prefix}.embeddings.word_embeddings.weight")] if spec.tied else []
        found += [*bert.bias_names("lm_head", spec.tied), Skip(f"{prefix}.pooler.dense")]
    return [*found, Skip(f"{prefix}.embeddings.position_ids")]


FAMILY = Family(("roberta",), spec, config, rules, prefix="roberta.")
