"""Changed: the same parts in a narrow model, and the same weights without dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from anyformer.block import Block
from anyformer.check.ours import Ours
from anyformer.model import TransformerSpec
from anyformer.spec import Spec, SpecError

__all__ = ["small", "undropped", "without_dropout"]

SpecKind = TypeVar("SpecKind", bound=Spec)


def undropped(s: Ours) -> Ours:
    """A model whose spec has no dropout, with the same weights."""
    spec = without_dropout(s.spec)
    if spec == s.spec or s.fixed:
        return s
    model = spec.build(init=None, device=s.device, dtype=s.dtype)
    model.load_state_dict(s.model.state_dict())
    return s.replaced(model.eval())


def without_dropout(spec: SpecKind) -> SpecKind:
    """The same with every dropout 0."""
    changed = {name: 0.0 if name == "dropout" else _without_dropout(value) for name, value in spec.items()}
    return dataclasses.replace(spec, **changed)  # type: ignore[type-var]


def _without_dropout(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_dropout(item) for item in value)
    return without_dropout(value) if isinstance(value, Spec) else value


def small(spec: TransformerSpec) -> TransformerSpec:
    """The same parts, narrow: each kind of block once, over 32 words. The spec itself if none is legal."""
    for width in (4, 8, 16, 32, 64):
        try:
            narrow = _narrow(spec, {"vocab_size": 32, "dim": 16, "hidden": 32, "head_dim": width})
            narrow.build(init=None, device="meta")
            return narrow
        except SpecError:
            continue
    return spec


def _narrow(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        items = tuple(_narrow(item, sizes) for item in value)
        return tuple(dict.fromkeys(items)) if all(isinstance(item, Block) for item in items) else items
    if not isinstance(value, Spec):
        return value
    fields = {name: _narrow(field, sizes) for name, field in value.items()}
    fields |= {name: size for name, size in sizes.items() if name in fields and (fields[name] or name == "head_dim")}
    return dataclasses.replace(value, **fields)  # type: ignore[type-var]
