"""Load and save: one argument for a run, a folder in the hub's layout, a GGUF file, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anyformer.accelerate.quantize import quantized
from anyformer.checkpoint import run
from anyformer.checkpoint.gguf import read_gguf
from anyformer.checkpoint.hub import assemble, load_hub, read_hub_spec, save_hub
from anyformer.checkpoint.tensors import Stored
from anyformer.families import family_for, family_of
from anyformer.model import Transformer, TransformerSpec
from anyformer.text.gguf_tokenizer import gguf_tokenizer
from anyformer.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Loaded", "load", "read_spec", "save"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KINDS = {"F16": torch.float16, "BF16": torch.bfloat16}  # of a GGUF file; all others are read as float32
MODEL = "tokenizer.ggml.model"
FILES = ["*.json", "*.safetensors", "*.model", "merges.txt", "vocab.txt", "*.jinja"]


class Loaded(NamedTuple):
    """A model with what belongs to it; `tokenizer` is None where there is none."""

    model: Transformer
    tokenizer: Tokenizer | None
    spec: TransformerSpec


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    skip: Sequence[str] = (),
) -> Loaded:
    """The model (in evaluation mode), tokenizer and spec of a run, a hub folder, a `.gguf` file or a hub id.

    `dtype` None keeps what is stored. Every tensor must find its place, but for those that match a pattern in `skip`,
    by their name in the file. Nothing is unpickled but plain tensors. ValueError says what does not fit, and where.
    """
    place = _place(source)
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and kind not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
    if place.suffix == ".gguf":
        return _load_gguf(place, device, kind, skip)
    if (place / run.SPEC).is_file():
        model = run.load_run(place, device=device, dtype=kind)
    else:
        model = load_hub(place, device=device, dtype=kind, skip=skip)
    return Loaded(model, _tokenizer(place), model.spec)


def read_spec(source: str | Path) -> TransformerSpec:
    """The spec alone, of anything that `load` takes."""
    place = _place(source)
    if place.suffix == ".gguf":
        file = read_gguf(place)
        family = family_of(file.config)
        return family.read(file.config, family.today(file.tensors))[0]
    return run.read_spec(place) if (place / run.SPEC).is_file() else read_hub_spec(place)


def save(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model in the hub's layout if one of its families says it exactly, for transformers and all that read it;
    else (and if it is quantized) as a run, for `load` alone. Each file is written whole or not at all."""
    folder = Path(folder)
    try:
        if quantized(model):
            raise ValueError("no family has our integers")
        family_for(model.spec, run.weights(model), model.origin.get("model_type", ""))
    except ValueError:
        _only(folder, "config.json", "a model in the hub's layout")
        return run.save_run(model, folder, tokenizer)
    _only(folder, run.SPEC, "a run")
    more: dict[str, Any] = {}
    if tokenizer is not None:
        tokenizer.save(folder)
        ends = tokenizer.end_ids
        more = {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    return save_hub(model, folder, **more)


def _only(folder: Path, other: str, what: str) -> None:
    if (folder / other).exists():
        raise ValueError(f"{folder} holds {what} already, which would then be read in place of this: choose another")


def _load_gguf(path: Path, device: torch.device | str | None, dtype: torch.dtype | None, skip: Sequence[str]) -> Loaded:
    file = read_gguf(path)
    stored = {name: Stored(t.shape, KINDS.get(t.kind, torch.float32), t.read) for name, t in file.tensors.items()}
    model = assemble(file.config, stored, device=device, dtype=dtype, skip=skip, where=path)
    tokenizer = None if file.metadata.get(MODEL, "no_vocab") == "no_vocab" else gguf_tokenizer(file.metadata)
    return Loaded(model, tokenizer, model.spec)


def _place(source: str | Path) -> Path:
    """Where the files are; a hub id is fetched first."""
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not any((path / name).is_file() for name in ("config.json", run.SPEC)):
            return files[0]
        if not any((path / name).is_file() for name in ("config.json", run.SPEC)):
            raise ValueError(f"{path} has neither spec.yaml (a run) nor config.json (the hub's layout)")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file: name its folder, or a .gguf file")
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) or path.suffix in (".gguf", ".yaml", ".json"):
        raise ValueError(f"{source} does not exist")
    return _fetched(str(source))


def _fetched(name: str) -> Path:
    """The folder of a model on the hub, fetched if it is not there yet."""
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{name} is no folder here; to fetch it from the hub, install it: pip install anyformer[hub]"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the library raises a dozen classes, of several packages
        reasons = {
            "RepositoryNotFoundError": "the hub has no such model",
            "GatedRepoError": "it must be asked for there",
        }
        reason = reasons.get(type(error).__name__, "the hub cannot be reached")
        raise ValueError(f"{name} is no folder here, and {reason}: fetch it elsewhere, and name its folder") from error


def _tokenizer(folder: Path) -> Tokenizer | None:
    """None where no file of a tokenizer is."""
    names = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
    return load_tokenizer(folder) if any((folder / name).is_file() for name in names) else None
