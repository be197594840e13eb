"""Where a MODEL comes from: a preset, a file, a run or a checkpoint; --set changes it. Torch is not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["has_weights", "spec_of"]


def spec_of(source: str, settings: Sequence[str] = ()) -> Any:
    """The spec of a preset, a file, a run or a checkpoint, changed by settings like "PATH=VALUE"."""
    import yaml

    spec = _read_spec(source)
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set needs PATH=VALUE, but is {setting!r}")
        spec = spec.replace(path, yaml.safe_load(value))
    return spec


def has_weights(source: str) -> bool:
    """Whether it is a run or a checkpoint, here or on the hub; a preset or a file with a spec has none."""
    path = Path(source)
    return path.is_dir() or path.suffix == ".gguf" or (not path.exists() and "/" in source)


def _read_spec(source: str) -> Any:
    from anyformer.checkpoint.load import read_spec
    from anyformer.model import TransformerSpec
    from anyformer.presets import PRESETS, preset

    if source in PRESETS:
        return preset(source)
    if has_weights(source):
        return read_spec(source)
    path = Path(source)
    return TransformerSpec.from_yaml(path.read_text(encoding="utf-8")) if path.exists() else preset(source)
