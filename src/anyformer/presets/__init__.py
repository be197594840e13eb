"""Presets: models by name. A preset is a function that returns a spec; its name here has dashes for underscores."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from anyformer.model import TransformerSpec
from anyformer.presets import mini

__all__ = ["PRESETS", "preset"]

PRESETS: dict[str, Callable[[], TransformerSpec]] = {
    function.__name__.replace("_", "-"): function for function in (mini.gpt_mini, mini.bert_mini, mini.t5_mini)
}


def preset(name: str) -> TransformerSpec:
    """The spec of that name. ValueError names the known ones."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown preset {name!r}; {hint}known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
