"""Presets: models by name. A preset is a function that returns a spec; each file here has a table of its own.

A new one is a line in a table, or a new file with a `PRESETS`; nothing else changes.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable

from anyformer.model import TransformerSpec

__all__ = ["PRESETS", "preset"]


def _found() -> dict[str, Callable[[], TransformerSpec]]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {name: function for module in modules for name, function in module.PRESETS.items()}


PRESETS = _found()


def preset(name: str) -> TransformerSpec:
    """The spec of that name. ValueError names the known ones."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown preset {name!r}; {hint}known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
