"""mT5 (Xue et al. 2021): T5 1.1 over a hundred languages. Its logits are never scaled, whatever its config ties."""

from __future__ import annotations

from typing import Any

from anyformer.families import t5
from anyformer.families.family import Config
from anyformer.model import TransformerSpec
from anyformer.parts.head import LMHead

__all__ = ["FAMILY"]


def spec(c: Config) -> TransformerSpec:
    own_head = not c("tie_word_embeddings", True) and "lm_head.weight" in c.tensors
    return t5.spec(c).replace(head=LMHead()).replace("embed.tied", not own_head)


def config(spec: Any) -> dict[str, Any]:
    said = t5.config(spec)
    del said["scale_decoder_outputs"]
    return said | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"}


FAMILY = t5.FAMILY._replace(
    model_types=("mt5",), spec=spec, config=config, defaults={"feed_forward_proj": "gated-gelu"}
)
