"""A run's folder: `spec.yaml`, `model.safetensors`, `tokenizer.json`. Weights are plain arrays (no pickle)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from anyformer.accelerate.quantize import quantize, quantized
from anyformer.files import read_json, replacing, write_text
from anyformer.model import Transformer, TransformerSpec
from anyformer.text.tokenizer import Tokenizer

__all__ = ["load_run", "load_weights", "read_spec", "save_run", "weights"]

SPEC, WEIGHTS, QUANTIZED = "spec.yaml", "model.safetensors", "quantized.json"
TABLE = "tokens.weight"
KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_run(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write spec, weights and tokenizer, each file whole or not at all."""
    folder = Path(folder)
    write_text(folder / SPEC, model.spec.to_yaml())
    bits = quantized(model)
    if bits is None:
        (folder / QUANTIZED).unlink(missing_ok=True)
    else:
        write_text(folder / QUANTIZED, json.dumps({"bits": bits}) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
    with replacing(folder / WEIGHTS) as file:
        save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, file.name)


def load_run(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Transformer:
    """The model of a run, in evaluation mode, quantized if it was; `dtype` None keeps what is stored. ValueError says
    what is missing or does not fit."""
    model = read_spec(folder).build(init=None, device=device, dtype=dtype or _stored(folder / WEIGHTS))
    if (folder / QUANTIZED).is_file():
        quantize(model, read_json(folder / QUANTIZED).get("bits", "bits that are not named"))
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def read_spec(folder: str | Path) -> TransformerSpec:
    """The spec of a run."""
    path = Path(folder) / SPEC
    if not path.is_file():
        what = "has no spec.yaml" if Path(folder).is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}: name the folder that `anyformer train --out` wrote")
    return TransformerSpec.from_yaml(path.read_text(encoding="utf-8"))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, by its first name: shared and tied ones are not repeated."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill every parameter from a file; anything missing, left over or of another shape is an error that names it."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is missing: the run has no weights")
    try:
        with safetensors.safe_open(path, "pt") as file:
            _fit(weights(model), {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, path)  # noqa: SIM118
            for name, parameter in weights(model).items():
                parameter.copy_(file.get_tensor(name))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def _stored(path: Path) -> torch.dtype | None:
    """In what the table of tokens is written; None if that cannot be said, which loading then says better."""
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            return KINDS.get(file.get_slice(TABLE).get_dtype()) if TABLE in file.keys() else None  # noqa: SIM118
    except safetensors.SafetensorError:
        return None


def _fit(wanted: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], path: str | Path) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        said = [f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", extra)) if names]
        raise ValueError(f"{path} does not fit its spec: it {' and '.join(said)}")
    for name, parameter in wanted.items():
        if found[name] != tuple(parameter.shape):
            raise ValueError(f"{path}: {name} must be {tuple(parameter.shape)}, but is {found[name]}")
