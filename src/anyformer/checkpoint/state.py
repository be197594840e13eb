"""The state of a training run, to go on from. Read with torch's safe loader: no code in the file is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from anyformer.files import replacing

__all__ = ["load_state", "save_state"]


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings and containers of them."""
    with replacing(path) as file:
        torch.save(state, file)


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote. ValueError if it is missing, cut off, or holds anything but plain data."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, so there is nothing to go on from: train without --resume")
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{path} is not a training state that can be read safely: {first}") from None
    return state
