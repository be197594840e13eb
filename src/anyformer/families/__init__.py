"""Families: published models as data. A file a family: spec from config, config from spec, and a table of names.

A new one is a new file with a `FAMILY`; nothing else changes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any

from anyformer.families.family import Config, Family, model_type, shortest
from anyformer.families.rules import links
from anyformer.model import TransformerSpec
from anyformer.spec import diff

__all__ = ["FAMILIES", "Config", "Family", "family_for", "family_of"]


def _found() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {name: family for family in families for name in family.model_types}


FAMILIES = _found()
"""By `model_type`, as a config.json says it."""


def family_of(values: Mapping[str, Any]) -> Family:
    """The family that a config names. ValueError names the known ones."""
    name = model_type(values)
    if name not in FAMILIES:
        raise ValueError(f"config.json: model_type {name!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def family_for(spec: TransformerSpec, parameters: Collection[str], first: str = "") -> tuple[str, dict[str, Any]]:
    """The model type and config that say this spec exactly; `first` is tried before all others.

    Of equals the shortest name is taken: followers are named after those whom they follow (t5 and mt5, roberta and
    xlm-roberta).

    `parameters` are the names of the model's. ValueError if no family does, with what the nearest one would lose.
    """
    losses = []
    for name in sorted(FAMILIES, key=lambda name: (name != first, len(name))):
        family = FAMILIES[name]
        try:
            values = family.config(spec) | {"model_type": name}
            tensors = [theirs for link in links(family.rules(spec), parameters) for theirs in link.theirs]
            back, _ = family.read(values, tensors)
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
            continue  # of another shape
        if back == shortest(spec):
            return name, values
        losses.append((name, diff(shortest(spec), back)))
    if not losses:
        raise ValueError("no family of the hub has the shape of this model")
    name, lost = min(losses, key=lambda item: len(item[1]))
    path, ours, theirs = lost[0]
    raise ValueError(
        f"no family of the hub says this model: {name} is nearest, but has {path} {theirs!r}, not {ours!r}"
    )
