"""What a model must beat: bits per byte of a general compressor and of a table of token pairs."""

from __future__ import annotations

import gzip
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from anyformer.data.store import TokenStore

__all__ = ["bigram_bits_per_byte", "gzip_bits_per_byte"]

Ints = NDArray[np.int64]


def gzip_bits_per_byte(held_out: Iterable[str]) -> float:
    """Bits per UTF-8 byte of the held-out texts, one after the other, under `gzip -9`, which sees no training text.

    Raises:
        ValueError: there is no text.
    """
    data = "".join(held_out).encode("utf-8", "surrogatepass")
    if not data:
        raise ValueError("The held-out texts have 0 bytes, so there is nothing to compress; hold out some text.")
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def bigram_bits_per_byte(train: TokenStore, held_out: TokenStore, vocab_size: int) -> float:
    """Bits per UTF-8 byte of the held-out text under token pairs counted in `train`.

    Scores what a model is scored on: every token but the first of each document, end tokens included. Witten-Bell
    smoothing: p(b|a) = (n(a,b) + t(a) p(b)) / (n(a) + t(a)), t(a) the number of different tokens seen after a, with
    p(b) = (n(b) + 1) / (n + vocab_size).

    Raises:
        ValueError: a store has ids beyond `vocab_size`, or no pair of tokens.
    """
    train_a, train_b = _pairs(train, vocab_size)
    a, b = _pairs(held_out, vocab_size)
    single = (np.bincount(train_b, minlength=vocab_size) + 1) / (len(train_b) + vocab_size)
    keys, counts = np.unique(train_a * vocab_size + train_b, return_counts=True)
    seen = np.bincount(train_a, minlength=vocab_size)
    kinds = np.bincount(keys // vocab_size, minlength=vocab_size)
    paired = _look_up(keys, counts, a * vocab_size + b) + kinds[a] * single[b]
    probability = np.where(seen[a] > 0, paired / np.maximum(seen[a] + kinds[a], 1), single[b])
    return float(-np.log2(probability).sum() / held_out.num_bytes)


def _pairs(store: TokenStore, vocab_size: int) -> tuple[Ints, Ints]:
    """Each token and its successor in the same document."""
    tokens = np.asarray(store.tokens).astype(np.int64)
    if tokens.max() >= vocab_size:
        raise ValueError(f"The store holds id {tokens.max()}, but vocab_size is {vocab_size}; use its tokenizer's.")
    inner = np.ones(len(tokens), bool)
    inner[store.starts] = False
    if not inner.any():
        raise ValueError(f"The store has {len(store.starts)} documents of 1 token, but a pair needs 2; give more text.")
    after = np.flatnonzero(inner)
    return tokens[after - 1], tokens[after]


def _look_up(keys: Ints, counts: Ints, wanted: Ints) -> Ints:
    """The count of each wanted key, 0 where it is not among the sorted `keys`."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)
