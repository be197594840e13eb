"""GGUF, the file format of llama.cpp, seen as a hub folder: a `config.json`, and tensors by their hub names.

Known here: which metadata key is which config key, which tensor is which, how blocks of bits become numbers, and that
rotary rows of LLaMA's q and k lie in pairs. What a config means is not.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.checkpoint.gguf_names import (
    ARRAY,
    BLOCKS,
    FIXED,
    FLOAT,
    FREE,
    KEYS,
    NAMES,
    OPTIONAL,
    PLAIN,
    SCALARS,
    TEXT,
    TURNED,
    gguf_package,
    paired_heads,
    rename,
    rope_factors,
    swap,
    turned,
)

__all__ = ["GGUFFile", "GGUFTensor", "read_gguf"]


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One tensor of a GGUF file. Nothing of it is in memory before `read`.

    Attributes:
        shape: as at the hub.
        kind: how it is stored: F32, F16, BF16, Q8_0, Q4_K ...
    """

    shape: tuple[int, ...]
    kind: str
    _bytes: np.ndarray = field(repr=False)  # (*shape in the file without its last axis, bytes of a row), mapped
    _change: Callable[[Tensor], Tensor] = field(repr=False)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, by default as stored (blocks of bits as float32). Every call reads the file anew."""
        stored = np.array(self._bytes)
        if self.kind in PLAIN:
            values = torch.from_numpy(stored).view(PLAIN[self.kind])
        else:
            gguf = gguf_package()
            values = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[self.kind]))
        return self._change(values).to(dtype or values.dtype).contiguous()


class GGUFFile(NamedTuple):
    """What a GGUF file holds.

    Attributes:
        config: as in the `config.json` of the same model at the hub.
        metadata: every key of the file with its value (`tokenizer.ggml.tokens`, `general.name` ...).
        tensors: by hub name.
    """

    config: dict[str, Any]
    metadata: dict[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file; tensors stay in the file until they are read.

    Raises:
        ValueError: no whole GGUF file; an architecture, a key that changes the arithmetic, a tensor or a way of storing
            that is not known here; the package `gguf` is not installed.
    """
    path = Path(path)
    metadata, stored = _Header(path).read()
    architecture = str(metadata.get("general.architecture"))
    if architecture not in NAMES:
        raise ValueError(f"{path} holds the architecture {architecture!r}, but known are {sorted(NAMES)}.")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"{path} is one of {metadata['split.count']} parts: join them with `llama-gguf-split --merge`."
        )
    config = _config(path, architecture, metadata, stored)
    return GGUFFile(config, metadata, dict(_hub_tensors(path, architecture, config, stored)))


class _Header:
    """Reads keys and places of tensors, one after another, from the mapped file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"{path} is not a file: name a GGUF file.")
        self.path, self.at = path, 0
        self.data = np.asarray(np.memmap(path, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Metadata, and tensors by their names in the file."""
        if bytes(self.data[:4]) != b"GGUF":
            raise ValueError(f"{self.path} is no GGUF file: it begins with {bytes(self.data[:4])!r}, not b'GGUF'.")
        self.at = 4
        version, tensors, keys = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is of GGUF version {version} (or big-endian), but known are 2 and 3.")
        metadata = {}
        for _ in range(keys):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        places = [self._place() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        stored = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in places}
        if len(stored) < tensors:
            raise self._damaged("two of its tensors have one name")
        return metadata, stored

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._text(), self._number("I")
        if not 1 <= axes <= 4:
            raise self._damaged(f"tensor {name} has {axes} axes, not 1 to 4")
        shape = tuple(self._number("Q") for _ in range(axes))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, at: int) -> GGUFTensor:
        gguf = gguf_package()
        kind = next((known.name for known in gguf.GGMLQuantizationType if known == number), str(number))
        if kind not in PLAIN and kind not in BLOCKS:
            raise ValueError(f"{self.path} stores {name} as {kind}, but known are {', '.join((*PLAIN, *BLOCKS))}.")
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if shape[-1] % block:
            raise self._damaged(f"tensor {name} has rows of {shape[-1]}, which blocks of {block} do not fill")
        rows = (*shape[:-1], shape[-1] // block * size)
        end = at + math.prod(rows)
        if end > len(self.data):
            raise self._damaged(f"tensor {name} reaches to byte {end} of {len(self.data)}")
        return GGUFTensor(shape, kind, self.data[at:end].reshape(rows), _as_stored)

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self._damaged(f"its header goes on after its {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(code)))[0]

    def _text(self) -> str:
        try:
            return self._bytes(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the text that ends at byte {self.at} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == FLOAT:  # the shortest decimal that is this float32: 1e-05, not 9.999999747e-06
            return float(str(np.float32(self._number("f"))))
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        item, count = (self._number("I"), self._number("Q")) if kind == ARRAY else (kind, 0)
        if item == TEXT:
            return [self._text() for _ in range(count)]
        if item not in SCALARS:
            raise self._damaged(f"there is a value of unknown type {item} before byte {self.at}")
        code = np.dtype(f"<{SCALARS[item]}" if SCALARS[item] != "?" else "?")
        return np.frombuffer(self._bytes(count * code.itemsize), code).tolist()

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is cut off or damaged: {what}; fetch it again.")


def _as_stored(values: Tensor) -> Tensor:
    return values


def _config(path: Path, architecture: str, metadata: dict[str, Any], stored: dict[str, GGUFTensor]) -> dict[str, Any]:
    begin = f"{architecture}."
    values = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}
    config: dict[str, Any] = {}
    for key, hub in KEYS[architecture].items():
        value = _one(path, begin + key, values.pop(key, None))
        if not value and key not in OPTIONAL:
            raise ValueError(f"{path} has no key {begin}{key}, or a zero there: convert the model again.")
        config |= {hub: value} if value else {}  # no experts, no window are written as 0 or not at all
    if "token_embd.weight" not in stored:
        raise ValueError(f"{path} has no tensor token_embd.weight: it holds no whole model.")
    if architecture != "gpt2":
        _complete(path, config, values, stored.pop("rope_freqs.weight", None) if architecture == "llama" else None)
    unknown = sorted(values.keys() - FREE)
    if unknown:
        raise ValueError(f"{path} has the key {begin}{unknown[0]} = {values[unknown[0]]!r}, which is not known here.")
    config["vocab_size"] = stored["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in stored
    for token in ("bos", "eos"):
        config[f"{token}_token_id"] = metadata.get(f"tokenizer.ggml.{token}_token_id")
    model_type = _model_type(architecture, config)
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in stored
        config["mlp_bias"] = "blk.0.ffn_up.bias" in stored
    if model_type == "gemma2":  # not in the file; llama.cpp goes by the size too: only the 27B model differs
        shared = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = shared if config["num_hidden_layers"] == 46 else config["head_dim"]
    return {"model_type": model_type} | FIXED[model_type] | config


def _one(path: Path, key: str, value: Any) -> Any:
    """A number that may be given once for all layers or for each."""
    if isinstance(value, list) and len(set(value)) != 1:
        raise ValueError(f"{path} has {key} = {value[:8]}, but all layers must be alike.")
    value = value[0] if isinstance(value, list) else value
    if not isinstance(value, int | float | None):
        raise ValueError(f"{path} has {key} = {value!r}, which is no number: convert the model again.")
    return value


def _model_type(architecture: str, config: dict[str, Any]) -> str:
    if architecture != "llama":
        return architecture
    return "mixtral" if "num_local_experts" in config else "mistral" if "sliding_window" in config else "llama"


def _complete(path: Path, config: dict[str, Any], values: dict[str, Any], freqs: GGUFTensor | None) -> None:
    """Add to `config` what models with rotary positions leave out, and take from `values` what says the same twice."""
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.pop(key, config["head_dim"]) != config["head_dim"]:
            raise ValueError(f"{path} has a {key} that is not its head width, {config['head_dim']}: not known here.")
    kind, factor, original = (
        values.pop(f"rope.scaling.{key}", None) for key in ("type", "factor", "original_context_length")
    )
    config["rope_scaling"] = None
    if freqs is not None:
        config["rope_scaling"] = _llama3(path, freqs.read(torch.float32), config, original or 8192)
    elif kind in ("linear", "yarn") and factor:
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    elif kind not in (None, "none", "linear"):
        raise ValueError(f"{path} has rope.scaling.type {kind!r} with factor {factor}; known are none, linear, yarn.")


def _llama3(path: Path, factors: Tensor, config: dict[str, Any], original: int) -> dict[str, Any]:
    """The scaling behind `factors` (K/2,): a file holds only these, so the one that all models use must give them."""
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    expected = rope_factors(scaling, config["head_dim"], config["rope_theta"])
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{path} has a rope_freqs.weight that is not that of Llama 3.1 (1, 4, {original}): not known.")
    return scaling


def _hub_tensors(
    path: Path, architecture: str, config: dict[str, Any], stored: dict[str, GGUFTensor]
) -> Iterator[tuple[str, GGUFTensor]]:
    for name, tensor in stored.items():
        for single, part in _experts(name, tensor):
            hub = rename(NAMES[architecture], single)
            if hub is None:
                raise ValueError(f"{path} has the tensor {name}, which is unknown in a model of type {architecture}.")
            change = _change(architecture, config, single)
            shape = part.shape[::-1] if change is turned else part.shape
            yield hub, GGUFTensor(shape, part.kind, part._bytes, change)


def _experts(name: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """A tensor of all experts, (E, ...), as one for each; others as they are."""
    if "_exps." not in name:
        yield name, tensor
        return
    for expert, rows in enumerate(tensor._bytes):
        yield name.replace("_exps.", f".{expert}."), GGUFTensor(tensor.shape[1:], tensor.kind, rows, _as_stored)


def _change(architecture: str, config: Mapping[str, Any], name: str) -> Callable[[Tensor], Tensor]:
    """From the values in the file to those at the hub."""
    heads = paired_heads(architecture, config, name)
    if heads:
        return lambda rows: swap(rows, heads, -1, 2)
    if architecture == "gemma2" and name.endswith("norm.weight"):
        return lambda scale: scale - 1  # the file has what is multiplied by, the hub its distance from 1
    return turned if architecture == "gpt2" and TURNED.fullmatch(name) else _as_stored
