"""The memory-mapped token store, its split from documents, and the windows that are cut from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from anyformer.data.documents import Document
from anyformer.files import replacing

__all__ = ["IGNORE", "Batch", "TokenStore", "Windows", "evaluation_windows", "split_documents"]

IGNORE = -100
"""The target that is not scored, as in `torch.nn.functional.cross_entropy`."""

Ints = NDArray[np.int64]
Batch = tuple[Ints, Ints, Ints]
"""ids, targets and document, each (B, length)."""

_FORMAT = "anyformer.tokens.1"
_HEADER = 1024  # bytes before the tokens: the header of the safetensors format, padded with spaces


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Split whole documents into (train, held out), both in the order given; neither is empty.

    Documents are drawn evenly over the order given, so that each folder gives its share, from a start that `seed`
    chooses; each is held out if that brings the share of UTF-8 bytes closer to `held_out`. A single document is cut
    near its end instead, after a line end if there is one nearby.

    Raises:
        ValueError: the share is not between 0 and 1; there is no document, or one without text; the only document has
            fewer than 2 characters.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"The held-out share must lie between 0 and 1, but is {held_out}; 0.1 is usual.")
    if not documents:
        raise ValueError("There are no documents to split; give at least one.")
    empty = next((document.name for document in documents if not document.text), None)
    if empty is not None:
        raise ValueError(f"Document {empty!r} has no text; leave it out before splitting.")
    if len(documents) == 1:
        return _cut(documents[0], held_out)
    chosen = _choose([_num_bytes(document.text) for document in documents], held_out, seed)
    train = [document for i, document in enumerate(documents) if i not in chosen]
    return train, [documents[i] for i in sorted(chosen)]


def _choose(sizes: list[int], held_out: float, seed: int) -> set[int]:
    """Indices of the documents held out: at least one, and not all."""
    target, total, chosen = held_out * sum(sizes), 0, set()
    for i in _evenly(len(sizes), seed):
        if abs(total + sizes[i] - target) < abs(total - target):
            chosen.add(i)
            total += sizes[i]
    smallest = sizes.index(min(sizes))
    if len(chosen) == len(sizes):
        chosen.remove(smallest)
    return chosen or {smallest}


def _evenly(count: int, seed: int) -> list[int]:
    """All of range(count), in an order whose every beginning is spread over the whole: by the golden ratio."""
    start = np.random.default_rng(seed).random()
    steps = start + np.arange(4 * count) * (math.sqrt(5) - 1) / 2
    drawn = dict.fromkeys((steps % 1 * count).astype(int).tolist())
    return [*drawn, *(i for i in range(count) if i not in drawn)]


def _cut(document: Document, held_out: float) -> tuple[list[Document], list[Document]]:
    text, name = document.text, document.name
    if len(text) < 2:
        raise ValueError(
            f"Document {name!r} has {len(text)} character, but at least 2 are needed to hold a part of it out;"
            " give a longer text, or more documents."
        )
    at = _cut_index(text, held_out)
    return [Document(f"{name}[:{at}]", text[:at])], [Document(f"{name}[{at}:]", text[at:])]


def _cut_index(text: str, held_out: float) -> int:
    """The character where the held-out tail begins: nearest line start within a quarter of the tail, if any."""
    data = _utf8(text)
    head = data[: round(len(data) * (1 - held_out))].decode("utf-8", "ignore")
    at = min(max(len(head), 1), len(text) - 1)
    near = (len(text) - at) // 4
    before = text.rfind("\n", max(at - near - 1, 0), at) + 1
    after = text.find("\n", at, min(at + near, len(text) - 1)) + 1
    lines = [line for line in (before, after) if line]
    return min(lines, key=lambda line: abs(line - at), default=at)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(_utf8(text))


class TokenStore:
    """The token ids of many documents, end to end, memory-mapped from one file.

    The file is in the safetensors format, with the tensors `tokens` and `starts`.

    Attributes:
        tokens: (N,) uint16 or uint32, read-only, on disk.
        starts: (D,) int64, the offset of each document's first token.
        vocab_size: every id is below it.
        num_bytes: UTF-8 bytes of the text that the tokens stand for, without end tokens.
    """

    def __init__(self, tokens: NDArray[Any], starts: Ints, vocab_size: int, num_bytes: int) -> None:
        self.tokens, self.starts, self.vocab_size, self.num_bytes = tokens, starts, vocab_size, num_bytes

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def write(
        cls, path: str | Path, documents_as_ids: Iterable[Sequence[int]], *, vocab_size: int, num_bytes: int
    ) -> TokenStore:
        """Write the documents, one at a time, to `path` (the old file stays until all are written) and open it.

        Raises:
            ValueError: no documents, a document without tokens, or an id outside 0..vocab_size-1.
        """
        dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        with replacing(path) as file:
            file.write(b" " * _HEADER)
            sizes = [_write_ids(file, i, ids, dtype, vocab_size) for i, ids in enumerate(documents_as_ids)]
            if not sizes:
                raise ValueError(f"There are no documents to write to {str(path)!r}; give at least one.")
            starts = np.cumsum([0, *sizes[:-1]], dtype="<i8")
            file.write(starts.tobytes())
            file.seek(0)
            file.write(_header(sum(sizes), len(sizes), dtype, vocab_size, num_bytes))
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Map the store at `path` into memory.

        Raises:
            ValueError: there is no file, it is something else than a token store, or a part of it is missing.
        """
        try:
            with open(path, "rb") as file:
                return cls(*_read(path, file))
        except OSError as error:
            raise ValueError(
                f"Token store {str(path)!r} cannot be opened ({error.strerror}); write it first."
            ) from None


def _write_ids(file: IO[Any], index: int, ids: Sequence[int], dtype: np.dtype[Any], vocab_size: int) -> int:
    array = np.asarray(ids)
    if not len(array):
        raise ValueError(f"Document {index} has no tokens; each must have at least its end token.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"Document {index} holds id {wrong}, outside 0..{vocab_size - 1}; raise vocab_size.")
    file.write(array.astype(dtype).tobytes())
    return len(array)


def _header(num_tokens: int, num_documents: int, dtype: np.dtype[Any], vocab_size: int, num_bytes: int) -> bytes:
    middle = num_tokens * dtype.itemsize
    end = middle + num_documents * 8
    fields = {
        "__metadata__": {"format": _FORMAT, "vocab_size": str(vocab_size), "num_bytes": str(num_bytes)},
        "tokens": {"dtype": f"U{8 * dtype.itemsize}", "shape": [num_tokens], "data_offsets": [0, middle]},
        "starts": {"dtype": "I64", "shape": [num_documents], "data_offsets": [middle, end]},
    }
    size = _HEADER - 8
    return size.to_bytes(8, "little") + json.dumps(fields).encode().ljust(size)


def _read(path: str | Path, file: IO[bytes]) -> tuple[NDArray[Any], Ints, int, int]:
    fields = _fields(path, file.read(_HEADER))
    meta, (num_tokens,), (num_documents,) = fields["__metadata__"], fields["tokens"]["shape"], fields["starts"]["shape"]
    dtype = np.dtype({"U16": "<u2", "U32": "<u4"}[fields["tokens"]["dtype"]])
    need, have = _HEADER + num_tokens * dtype.itemsize + num_documents * 8, os.fstat(file.fileno()).st_size
    if have != need:
        raise ValueError(f"Token store {str(path)!r} has {have} bytes instead of {need}; write it again.")
    file.seek(need - num_documents * 8)
    starts = np.frombuffer(file.read(), "<i8")
    tokens = np.memmap(path, dtype, "r", _HEADER, (num_tokens,))
    return tokens, starts, int(meta["vocab_size"]), int(meta["num_bytes"])


def _fields(path: str | Path, header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(header[8:])
        known = fields["__metadata__"]["format"] == _FORMAT
    except (ValueError, LookupError, TypeError, RecursionError):
        known = False
    if not known:
        raise ValueError(
            f"{str(path)!r} is not a token store (no {_FORMAT!r} header); write one with TokenStore.write."
        )
    return dict(fields)


class Windows:
    """Training windows: an endless shuffled sequence that is a pure function of (store, length, seed).

    Each epoch lays windows of `length` tokens side by side over the stream, from a random offset below `length`, and
    visits each once in a random order. The last is pulled back to the stream's end if the offset pushes it over, so
    that every epoch has the same number of windows and any step can be computed at once.

    Args:
        store: the tokens; each document should end with the end token.
        length: input tokens a window. A window needs one more, for the last target.
        seed: of the offsets and orders.

    Raises:
        ValueError: the length is below 1, or the store is shorter than length + 1.
    """

    def __init__(self, store: TokenStore, length: int, seed: int) -> None:
        _check_length(store, length, length + 1)
        self.length, self.seed = length, seed
        self.per_epoch = (len(store) - 1) // length
        self._store, self._last = store, len(store) - 1 - length
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int, size: int) -> Batch:
        """The windows of training step `step` (from 0) in batches of `size`: ids, targets, document, each (B, length).

        `targets` is the next token, or IGNORE where that belongs to another document. `document` is the index of the
        document that the input token belongs to.
        """
        epoch, slot = divmod(step * size, self.per_epoch)
        starts = self._epoch(epoch)[slot : slot + size]
        while len(starts) < size:
            epoch += 1
            starts = np.concatenate([starts, self._epoch(epoch)[: size - len(starts)]])
        return _cut_windows(self._store, starts, self.length)

    def _make_epoch(self, epoch: int) -> Ints:
        """First tokens of one epoch's windows, (per_epoch,), in the order of their visit."""
        random = np.random.default_rng((self.seed, epoch))
        offset = random.integers(self.length)
        return np.minimum(offset + self.length * random.permutation(self.per_epoch), self._last)


def evaluation_windows(store: TokenStore, length: int, size: int) -> Iterator[Batch]:
    """Cover the store in order with windows of `length`, `size` a batch, so that each target is scored exactly once.

    The last batch may have fewer rows; its last row is padded with id 0, target IGNORE and document -1.
    Not scored: the first token of each document, which nothing in the document predicts.

    Raises:
        ValueError: the length is below 1, or the store has fewer than 2 tokens.
    """
    _check_length(store, length, 2)
    num_inputs = len(store) - 1
    starts = np.arange(math.ceil(num_inputs / length)) * length
    return (_cut_windows(store, starts[i : i + size], length) for i in range(0, len(starts), size))


def _check_length(store: TokenStore, length: int, need: int) -> None:
    if length < 1:
        raise ValueError(f"A window must have at least 1 token, but its length is {length}.")
    if len(store) < need:
        raise ValueError(
            f"The store has {len(store)} tokens, but a window of length {length} needs {need};"
            " give more text or a shorter length."
        )


def _cut_windows(store: TokenStore, starts: Ints, length: int) -> Batch:
    """Windows that begin at `starts` (B,); what lies beyond the stream's last input is padding."""
    last = len(store) - 1
    at = starts[:, None] + np.arange(length + 1)
    inside = np.minimum(at, last)
    tokens = np.asarray(store.tokens)[inside].astype(np.int64)
    document = np.searchsorted(store.starts, inside, side="right") - 1
    targets = np.where(document[:, 1:] == document[:, :-1], tokens[:, 1:], IGNORE)
    padding = at[:, :-1] >= last
    targets[padding] = IGNORE
    return np.where(padding, 0, tokens[:, :-1]), targets, np.where(padding, -1, document[:, :-1])
