"""Baselines, against closed forms."""

from __future__ import annotations

import gzip
import math
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from anyformer.data.baselines import bigram_bits_per_byte, gzip_bits_per_byte
from anyformer.data.store import TokenStore


def store(path: Path, name: str, documents: list[list[int]], num_bytes: int = 10, vocab_size: int = 50) -> TokenStore:
    return TokenStore.write(path / name, documents, vocab_size=vocab_size, num_bytes=num_bytes)


def test_gzip_counts_bytes() -> None:
    texts = ["汉字没有空格。" * 30, "a b c\n" * 50]
    data = "".join(texts).encode()
    assert gzip_bits_per_byte(texts) == 8 * len(gzip.compress(data, 9)) / len(data)


def test_gzip_of_noise_and_of_repetition() -> None:
    noise = "".join(random.Random(0).choices([chr(i) for i in range(128)], k=50_000))
    assert gzip_bits_per_byte([noise]) == pytest.approx(7.0, abs=0.1)
    assert gzip_bits_per_byte(["a" * 100_000]) < 0.02


def test_gzip_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        gzip_bits_per_byte(["", ""])


def by_hand(train: list[list[int]], held: list[list[int]], vocab_size: int) -> float:
    pairs = [pair for ids in train for pair in pairwise(ids)]
    count, single, before = Counter(pairs), Counter(b for _, b in pairs), Counter(a for a, _ in pairs)
    bits = 0.0
    for ids in held:
        for a, b in pairwise(ids):
            p = (single[b] + 1) / (len(pairs) + vocab_size)
            kinds = sum(first == a for first, _ in count)
            if before[a]:
                p = (count[a, b] + kinds * p) / (before[a] + kinds)
            bits -= math.log2(p)
    return bits


def test_bigram_is_witten_bell(tmp_path: Path) -> None:
    rng = random.Random(0)
    train = [[rng.randrange(6) for _ in range(rng.randrange(1, 9))] + [9] for _ in range(9)]
    held = [[rng.randrange(8) for _ in range(7)] + [9] for _ in range(5)]
    found = bigram_bits_per_byte(store(tmp_path, "t", train), store(tmp_path, "h", held, num_bytes=33), 10)
    assert found == pytest.approx(by_hand(train, held, 10) / 33, rel=1e-12)


def test_bigram_probabilities_sum_to_one(tmp_path: Path) -> None:
    train = store(tmp_path, "t", [[0, 1, 0, 2, 0, 1, 3]])
    for before in (0, 3, 4):
        bits = [bigram_bits_per_byte(train, store(tmp_path, "h", [[before, b]], num_bytes=1), 5) for b in range(5)]
        assert sum(2**-bit for bit in bits) == pytest.approx(1)


def test_bigram_of_a_cycle_is_almost_free(tmp_path: Path) -> None:
    documents = [list(range(20)) * 500]
    found = bigram_bits_per_byte(store(tmp_path, "t", documents), store(tmp_path, "h", documents, 10_000), 20)
    assert found < 0.01


def test_bigram_refuses(tmp_path: Path) -> None:
    good, single = store(tmp_path, "t", [[1, 2, 3]]), store(tmp_path, "s", [[1], [2]])
    with pytest.raises(ValueError, match="holds id 3, but vocab_size is 3"):
        bigram_bits_per_byte(good, good, 3)
    with pytest.raises(ValueError, match="2 documents of 1 token, but a pair needs 2"):
        bigram_bits_per_byte(good, single, 9)


def test_bigram_is_fast(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).zipf(1.2, 1_500_000) % 2048
    train = store(tmp_path, "t", [ids], vocab_size=2048)  # type: ignore[list-item]
    start = time.perf_counter()
    bigram_bits_per_byte(train, train, 2048)
    assert time.perf_counter() - start < 6
