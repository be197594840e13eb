"""Tensors on disk: looked at before anything is read, memory-mapped, and moved once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anyformer.files import gist, read_json

__all__ = ["Stored", "cast", "open_folder", "open_safetensors"]

# fmt: off
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}
# fmt: on
MAPPED_AT_ONCE = 1 << 20
"""Bytes that are read through one mapping, if they are changed on the way: then it is dropped, and their pages too."""


class Stored(NamedTuple):
    """A tensor in a file: its shape and dtype, and how to get it (a view of the file where that is possible)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


CAST_AT_ONCE = 1 << 23
"""Numbers of a large tensor that are turned to another dtype at a time, so that its file's pages can go meanwhile."""


def cast(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype, without all of the old one in memory."""
    if not stored.shape or torch.Size(stored.shape).numel() <= CAST_AT_ONCE:
        return stored.read().to(dtype).contiguous()
    out = torch.empty(stored.shape, dtype=dtype)
    rows = max(CAST_AT_ONCE * stored.shape[0] // out.numel(), 1)
    for begin in range(0, stored.shape[0], rows):
        out[begin : begin + rows] = stored.read()[begin : begin + rows]
    return out


def open_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder in the hub's layout, by name: safetensors, or pickled weights read safely."""
    for name, opened in (("model.safetensors", open_safetensors), ("pytorch_model.bin", _open_bin)):
        if (folder / name).is_file():
            return opened(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _open_shards(folder, f"{name}.index.json", opened)
    raise ValueError(f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, whole or in shards")


def open_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    unknown = sorted({kind for _, kind in kinds.values()} - set(DTYPES))
    if unknown:
        raise ValueError(f"{path} has tensors of dtype {', '.join(unknown)}; known: {', '.join(DTYPES)}")
    mapping = _Mapping(path)
    return {
        name: Stored(shape, DTYPES[kind], lambda name=name: mapping.tensor(name))  # type: ignore[misc]
        for name, (shape, kind) in kinds.items()
    }


class _Mapping:
    """One file, mapped; anew after so many bytes if no tensor was kept, so that their pages can go too."""

    def __init__(self, path: Path) -> None:
        self.path, self.given = path, 0
        self.file: Any = None
        self.storages: list[StorageWeakRef] = []

    def tensor(self, name: str) -> Tensor:
        if self.file is None or (self.given > MAPPED_AT_ONCE and all(known.expired() for known in self.storages)):
            self.file, self.given, self.storages = safetensors.safe_open(self.path, "pt"), 0, []
        tensor: Tensor = self.file.get_tensor(name)
        self.given += tensor.nbytes
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor


def _open_bin(path: Path) -> dict[str, Stored]:
    """Pickled weights, by torch's safe loader: plain tensors and containers; no code in the file is run."""
    try:
        found = _load_bin(path)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise ValueError(
            f"{path} cannot be read safely ({gist(error)}): "
            "if you trust it, load it with torch and save it as safetensors"
        ) from None
    found = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} must hold tensors by name, but holds a {type(found).__name__}")
    wrong = [name for name, tensor in found.items() if not isinstance(name, str) or not isinstance(tensor, Tensor)]
    if wrong:
        raise ValueError(f"{path} holds more than tensors by name: {', '.join(map(str, wrong[:4]))}")
    return {name: Stored(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in found.items()}  # type: ignore[misc]


def _load_bin(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        found = torch.load(path, weights_only=True, map_location="cpu")  # the format before 2020 cannot be mapped
    return found


def _open_shards(folder: Path, name: str, opened: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    """What an index lists: each tensor must lie in the file that it names, within the folder."""
    index = read_json(folder / name).get("weight_map")
    if not isinstance(index, Mapping) or not all(isinstance(shard, str) for shard in index.values()):
        raise ValueError(f"{folder / name} has no `weight_map` from tensors to files")
    shards = sorted(set(index.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ValueError(f"{folder / name} points outside its folder: {outside[0]!r}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {name} lists: fetch the missing shards")
    files = {shard: opened(folder / shard) for shard in shards}
    astray = [tensor for tensor, shard in index.items() if tensor not in files[shard]]
    if astray:
        raise ValueError(f"{folder / name} says that {astray[0]} is in {index[astray[0]]}, but it is not there")
    unlisted = sorted({tensor for shard in files.values() for tensor in shard} - index.keys())
    if unlisted:
        raise ValueError(f"{folder / name} does not list {', '.join(unlisted[:5])}, which its files hold")
    return {tensor: files[shard][tensor] for tensor, shard in index.items()}
