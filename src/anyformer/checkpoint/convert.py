"""Convert: from anything that loads to a folder for transformers, or a file for llama.cpp."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.checkpoint.gguf_write import tokenizer_metadata, write_gguf
from anyformer.checkpoint.hub import Made, hub_tensors
from anyformer.checkpoint.load import Loaded, load, save
from anyformer.text.tokenizer import Tokenizer

__all__ = ["convert", "save_gguf"]


def convert(source: str | Path, target: str | Path, form: str, *, dtype: torch.dtype | str | None = None) -> None:
    """Write the model of `source` to `target`: `form` "hf" is a folder in the hub's layout, "gguf" one file.

    ValueError if no family of the hub says the model exactly, or llama.cpp knows no such model.
    """
    if form not in ("hf", "gguf"):
        raise ValueError(f"`form` must be 'hf' or 'gguf', but is {form!r}")
    loaded = load(source, dtype=dtype)
    hub_tensors(loaded.model)  # raises before anything is written
    if form == "hf":
        save(loaded.model, target, loaded.tokenizer)
    else:
        save_gguf(loaded, target)


def save_gguf(loaded: Loaded, path: str | Path) -> None:
    """Write a LLaMA-shaped model with its byte-level BPE tokenizer for llama.cpp, in the model's own dtype."""
    values, tensors = hub_tensors(loaded.model)
    metadata = _metadata(loaded.tokenizer, loaded.spec.vocab_size) if loaded.tokenizer else {}
    length = {"max_position_embeddings": 2048}  # what transformers takes where a config says nothing
    write_gguf(path, length | values, _Making(tensors), metadata)


class _Making(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for."""

    def __init__(self, made: Mapping[str, Made]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> Tensor:
        return self._made[name].make()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        file = Path(folder, "tokenizer.json")
        if not file.is_file():
            raise ValueError(
                "GGUF is written with a byte-level BPE tokenizer only, but this one is SentencePiece's own"
            )
        content = json.loads(file.read_text(encoding="utf-8"))
    return tokenizer_metadata(
        content,
        bos=tokenizer.begin_id,
        eos=next(iter(tokenizer.end_ids), None),
        chat_template=tokenizer.chat_template,
        vocab_size=vocab_size,
    )
