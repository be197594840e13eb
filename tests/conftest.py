"""Shapes and types of every signature with tensors are checked while the tests run (and are free otherwise).

With UNCHECKED set they are not: the tests of the laws run models thousands of times, and compile them.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # the tensors are tiny: two threads would only wait for each other

CHECKED = ["block", "cache", "context", "generate", "init", "inspect", "kernels", "model", "parts", "tokens", "train"]

modules = [] if os.environ.get("UNCHECKED") else [f"anyformer.{name}" for name in CHECKED]
with install_import_hook(modules, "beartype.beartype"):
    import anyformer

    for name in anyformer.__all__:
        getattr(anyformer, name)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
