"""CamemBERT (Martin et al. 2020): RoBERTa in French."""

from __future__ import annotations

from typing import Any

from anyformer.families import bert, roberta

__all__ = ["FAMILY"]


def config(spec: Any) -> dict[str, Any]:
    return bert.shape(spec, "camembert", "Camembert") | roberta.write_position(spec)


FAMILY = roberta.FAMILY._replace(model_types=("camembert",), config=config)
