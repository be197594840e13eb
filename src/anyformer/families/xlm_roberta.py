"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa over a hundred languages."""

from __future__ import annotations

from typing import Any

from anyformer.families import bert, roberta

__all__ = ["FAMILY"]


def config(spec: Any) -> dict[str, Any]:
    return bert.shape(spec, "xlm-roberta", "XLMRoberta") | roberta.write_position(spec)


FAMILY = roberta.FAMILY._replace(model_types=("xlm-roberta",), config=config)
