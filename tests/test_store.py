"""The token store: whole on disk, and windows that visit everything once and cross no document."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from anyformer.data.documents import Document
from anyformer.data.store import IGNORE, TokenStore, Windows, evaluation_windows, split_documents


def store_of(path: Path, *sizes: int) -> TokenStore:
    """Documents of these sizes, whose ids count up from 0 through all of them."""
    ends = np.cumsum([0, *sizes])
    documents = [range(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    return TokenStore.write(path / "tokens", documents, vocab_size=int(ends[-1]), num_bytes=3 * int(ends[-1]))


def documents_of(*sizes: int) -> list[Document]:
    return [Document(f"d{i}", "x" * size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_write_and_open(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    documents = [[1, 2, 256], [vocab_size - 1], [0, 256]]
    TokenStore.write(tmp_path / "t", documents, vocab_size=vocab_size, num_bytes=11)
    store = TokenStore.open(tmp_path / "t")
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == [1, 2, 256, vocab_size - 1, 0, 256]
    assert store.starts.tolist() == [0, 3, 4]
    assert (len(store), store.vocab_size, store.num_bytes) == (6, vocab_size, 11)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    store = store_of(tmp_path, 3, 4)
    tensors = load_file(tmp_path / "tokens")
    assert tensors["tokens"].tolist() == list(range(7))
    assert tensors["starts"].tolist() == store.starts.tolist() == [0, 3]


def test_documents_are_written_one_at_a_time_and_the_old_file_stays_on_failure(tmp_path: Path) -> None:
    store_of(tmp_path, 3)
    with pytest.raises(ValueError, match=re.escape("Document 1 holds id 9, outside 0..8; raise vocab_size.")):
        TokenStore.write(tmp_path / "tokens", iter([[1], [9]]), vocab_size=9, num_bytes=2)
    assert len(TokenStore.open(tmp_path / "tokens")) == 3


@pytest.mark.parametrize(
    ("documents", "message"),
    [([], "There are no documents"), ([[1], []], "Document 1 has no tokens"), ([[-1]], "Document 0 holds id -1")],
)
def test_documents_that_cannot_be_written(tmp_path: Path, documents: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenStore.write(tmp_path / "t", documents, vocab_size=9, num_bytes=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 8, 1030])
def test_truncated_file(tmp_path: Path, cut: int) -> None:
    store_of(tmp_path, 50, 50)
    data = (tmp_path / "tokens").read_bytes()
    (tmp_path / "tokens").write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"is not a token store|has 1030 bytes instead of 1240") as caught:
        TokenStore.open(tmp_path / "tokens")
    assert "tokens" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY" * 500, b"text " * 500, b"12345678[]", b"12345678{}", b"12345678[[]]", b"[" * 2000]
)
def test_foreign_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ValueError, match="is not a token store"):
        TokenStore.open(tmp_path / "t")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        TokenStore.open(tmp_path / "none")


# Splitting


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_split_is_whole_and_close_to_the_share(seed: int, share: float) -> None:
    documents = documents_of(*np.random.default_rng(seed).integers(1, 1000, 200).tolist())
    train, held = split_documents(documents, share, seed)
    assert sorted(train + held, key=lambda d: int(d.name[1:])) == documents
    assert not set(train) & set(held)
    total = sum(len(document.text) for document in documents)
    assert abs(sum(len(document.text) for document in held) / total - share) < 0.005
    assert split_documents(documents, share, seed) == (train, held)
    assert split_documents(documents, share, seed + 1) != (train, held)


def test_split_counts_bytes_not_characters() -> None:
    documents = [Document(str(i), "汉" * 100) for i in range(10)] + [Document(f"a{i}", "x" * 100) for i in range(10)]
    _, held = split_documents(documents, 0.25, 0)
    assert abs(sum(len(document.text.encode()) for document in held) - 1000) <= 100  # by characters: 500


@pytest.mark.parametrize("seed", range(8))
def test_split_draws_evenly_from_every_part(seed: int) -> None:
    """Of ten folders with ten files each, a tenth held out is one file of each, give or take one."""
    documents = [Document(f"{i // 10}/{i % 10}", "x" * 100) for i in range(100)]
    _, held = split_documents(documents, 0.1, seed)
    folders = [document.name[0] for document in held]
    assert len(folders) == 10
    assert len(set(folders)) >= 8
    assert all(folders.count(folder) <= 2 for folder in folders)


@pytest.mark.parametrize("sizes", [(1, 1), (1000, 1), (1000, 1000, 1000)])
@pytest.mark.parametrize("share", [1e-9, 0.1, 0.999999])
def test_split_leaves_no_side_empty(sizes: tuple[int, ...], share: float) -> None:
    for seed in range(4):
        train, held = split_documents(documents_of(*sizes), share, seed)
        assert train
        assert held


def test_split_of_one_document_at_a_line() -> None:
    text = "line of text\r\n" * 1000
    (train,), (held,) = split_documents([Document("a", text)], 0.1, 0)
    assert train.text + held.text == text
    assert train.text.endswith("\r\n")
    assert abs(len(held.text) / len(text) - 0.1) < 0.002
    assert (train.name, held.name) == (f"a[:{len(train.text)}]", f"a[{len(train.text)}:]")


@pytest.mark.parametrize("text", ["汉字" * 500, "ab", "a\n", "\nab" + "汉" * 100])
def test_split_of_one_document_without_lines(text: str) -> None:
    (train,), (held,) = split_documents([Document("a", text)], 0.1, 0)
    assert train.text + held.text == text
    assert train.text
    assert abs(len(held.text) - 0.1 * len(text)) <= 1


@pytest.mark.parametrize(
    ("documents", "share", "message"),
    [
        (documents_of(1), 0.1, "has 1 character, but at least 2 are needed"),
        (documents_of(3, 0), 0.1, "'d1' has no text"),
        ([], 0.1, "no documents to split"),
        (documents_of(3, 3), 0.0, "between 0 and 1, but is 0.0"),
        (documents_of(3, 3), float("nan"), "between 0 and 1, but is nan"),
    ],
)
def test_what_cannot_be_split(documents: list[Document], share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_documents(documents, share, 0)


# Windows


@pytest.mark.parametrize(("length", "size"), [(4, 3), (7, 5), (16, 1), (99, 4), (1, 8)])
def test_an_epoch_visits_each_window_once(tmp_path: Path, length: int, size: int) -> None:
    windows = Windows(store_of(tmp_path, 100), length, seed=3)
    count = (100 - 1) // length
    rows = np.concatenate([windows.batch(step, size)[0] for step in range(-(-2 * count // size))])
    for epoch in (rows[:count], rows[count : 2 * count]):
        starts = np.sort(epoch[:, 0])
        assert len(set(starts.tolist())) == count
        assert (np.diff(starts)[:-1] == length).all()
        assert starts[0] < max(length, 1)
        assert epoch.max() <= 98
    if count > 10:
        assert rows[:count].tolist() != rows[count : 2 * count].tolist()


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    store = store_of(tmp_path, 500, 400)
    first, again = Windows(store, 8, seed=1), Windows(store, 8, seed=1)
    forward = [first.batch(step, 6) for step in range(50)]
    for step in reversed(range(50)):
        for a, b in zip(forward[step], again.batch(step, 6), strict=True):
            assert a.tolist() == b.tolist()
    assert forward[7][0].tolist() != Windows(store, 8, seed=2).batch(7, 6)[0].tolist()
    assert Windows(store, 8, seed=1).batch(10**12, 6)[0].shape == (6, 8)


def test_the_offset_changes_between_epochs(tmp_path: Path) -> None:
    windows = Windows(store_of(tmp_path, 1000), 50, seed=0)
    firsts = {int(windows.batch(epoch, windows.per_epoch)[0].min()) for epoch in range(8)}
    assert len(firsts) > 3


def test_targets_are_the_next_token_and_cross_no_document(tmp_path: Path) -> None:
    store = store_of(tmp_path, 5, 1, 30, 64)
    last_of_documents = {4, 5, 35, 99}
    windows = Windows(store, 7, seed=0)
    for step in range(20):
        ids, targets, document = windows.batch(step, 4)
        assert ids.dtype == targets.dtype == document.dtype == np.int64
        for token, target, index in zip(ids.ravel(), targets.ravel(), document.ravel(), strict=True):
            assert target == (IGNORE if token in last_of_documents else token + 1)
            assert index == sum(token >= start for start in (5, 6, 36))


def test_windows_need_a_store_of_length_plus_one(tmp_path: Path) -> None:
    store = store_of(tmp_path, 8)
    assert Windows(store, 7, seed=0).batch(0, 2)[0].tolist() == [list(range(7))] * 2
    with pytest.raises(ValueError, match="has 8 tokens, but a window of length 8 needs 9"):
        Windows(store, 8, seed=0)
    with pytest.raises(ValueError, match="at least 1 token, but its length is 0"):
        Windows(store, 0, seed=0)


def test_a_batch_is_fast(tmp_path: Path) -> None:
    store = store_of(tmp_path, *[5000] * 200)
    windows = Windows(store, 256, seed=0)
    windows.batch(0, 32)
    times = []
    for step in range(1, 30):
        start = time.perf_counter()
        windows.batch(step, 32)
        times.append(time.perf_counter() - start)
    assert sorted(times)[5] < 2e-3  # about 0.3 ms on a quiet machine


@pytest.mark.parametrize(("length", "size"), [(4, 3), (7, 5), (25, 2), (200, 4), (1, 8)])
def test_evaluation_scores_each_target_once(tmp_path: Path, length: int, size: int) -> None:
    store = store_of(tmp_path, 5, 1, 30, 64)
    batches = list(evaluation_windows(store, length, size))
    ids, targets, document = (np.concatenate(part).ravel() for part in zip(*batches, strict=True))
    scored = targets != IGNORE
    assert targets[scored].tolist() == [i for i in range(1, 100) if i not in (5, 6, 36)]
    assert (ids[scored] + 1 == targets[scored]).all()
    assert (document[scored] == np.searchsorted([5, 6, 36], ids[scored], "right")).all()
    padding = document == -1
    assert padding.sum() == -99 % length
    assert (targets[padding] == IGNORE).all()
    assert all(len(batch[0]) == size for batch in batches[:-1])


def test_evaluation_needs_two_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1 tokens, but a window of length 4 needs 2"):
        evaluation_windows(store_of(tmp_path, 1), 4, 2)
