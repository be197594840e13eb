"""Shapes and types of every public signature are checked while the tests run (and are free otherwise)."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

with install_import_hook("anyformer", "beartype.beartype"):
    import anyformer
    import anyformer.model  # noqa: F401

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
