"""Tokens: where each token sits, in closed form."""

from __future__ import annotations

import inspect

import pytest
import torch

from anyformer import Tokens


def facts(tokens: Tokens) -> tuple[list[list[int]], list[list[int]]]:
    return tokens.pos.tolist(), tokens.seg.tolist()


def test_arange_counts_from_start() -> None:
    tokens = Tokens.arange(2, 3, start=4)
    assert facts(tokens) == ([[4, 5, 6]] * 2, [[0, 0, 0]] * 2)
    assert (tokens.batch, tokens.length, tokens.start, tokens.end, tokens.ordered) == (2, 3, 4, 7, True)
    assert tokens.real.tolist() == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("keep", "pos"),
    [
        pytest.param([0, 0, 1, 1], [0, 0, 0, 1], id="left"),
        pytest.param([1, 1, 0, 0], [0, 1, 1, 1], id="right"),
        pytest.param([0, 1, 0, 1], [0, 0, 0, 1], id="inside"),
        pytest.param([0, 0, 0, 0], [0, 0, 0, 0], id="nothing"),
    ],
)
def test_fault_10_padded_counts_real_tokens_only(keep: list[int], pos: list[int]) -> None:
    tokens = Tokens.padded(torch.tensor([keep]).bool())
    assert facts(tokens) == ([pos], [[bit - 1 for bit in keep]])
    assert tokens.start is None
    assert tokens.end == max(pos) + 1


def test_padded_without_padding_is_plain() -> None:
    tokens = Tokens.padded(torch.ones(2, 3, dtype=torch.bool))
    assert tokens.start == 0
    assert facts(tokens) == ([[0, 1, 2]] * 2, [[0, 0, 0]] * 2)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32], ids=str)
def test_fault_2_padded_refuses_a_mask_of_numbers(dtype: torch.dtype) -> None:
    unchecked = inspect.unwrap(Tokens.padded.__func__)  # type: ignore[attr-defined]  # as outside pytest
    with pytest.raises(ValueError, match=r"`keep` must be a bool tensor, True for real tokens.*use keep\.bool\(\)"):
        unchecked(Tokens, torch.ones(1, 3, dtype=dtype))


def test_packed_starts_each_document_at_0() -> None:
    tokens = Tokens.packed(torch.tensor([[0, 0, 0, 1, 1, -1], [5, 2, 2, 2, -1, -7]]))
    assert tokens.pos[:, :5].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]]
    assert tokens.seg.tolist() == [[0, 0, 0, 1, 1, -1], [5, 2, 2, 2, -1, -1]]
    assert tokens.real.tolist() == [[True] * 5 + [False], [True] * 4 + [False] * 2]
    assert tokens.start is None


def test_packed_with_padding_between_documents() -> None:
    tokens = Tokens.packed(torch.tensor([[-1, 3, 3, -1, -1, 4, 4]]))
    assert tokens.pos[tokens.real].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "row", [[0, 0, 1, 0], [3, -1, 3], [1, 2, 3, 1]], ids=["returns", "returns_after_padding", "first_and_last"]
)
def test_packed_refuses_a_number_that_comes_back(row: list[int]) -> None:
    ones = list(range(10, 10 + len(row)))  # a row without fault beside it
    with pytest.raises(ValueError, match="comes back later in its row"):
        Tokens.packed(torch.tensor([ones, row]))


def test_packed_keeps_the_number_of_a_lone_document() -> None:
    """Else cross-attention, which compares numbers, would not find the source of document 5."""
    assert Tokens.packed(torch.tensor([[5, 5]])).seg.tolist() == [[5, 5]]
    assert Tokens.packed(torch.tensor([[5, 5, -1]])).seg.tolist() == [[5, 5, -1]]


def test_packed_with_document_0_alone_is_plain() -> None:
    assert Tokens.packed(torch.zeros(2, 3, dtype=torch.long)).start == 0


def test_after_plain_text() -> None:
    tokens = Tokens.arange(2, 3, start=1).after(2)
    assert (tokens.start, *facts(tokens)) == (4, [[4, 5]] * 2, [[0, 0]] * 2)


@pytest.mark.parametrize(
    ("keep", "pos"),
    [([0, 0, 1, 1], [2, 3]), ([1, 1, 1, 0], [3, 4]), ([1, 0, 1, 0], [2, 3]), ([0, 0, 0, 0], [0, 1])],
    ids=["left", "right", "inside", "nothing"],
)
def test_after_padding_follows_the_last_real_token(keep: list[int], pos: list[int]) -> None:
    tokens = Tokens.padded(torch.tensor([keep]).bool()).after(2)
    assert facts(tokens) == ([pos], [[0, 0]])


def test_after_packed_goes_on_with_the_last_document() -> None:
    packed = Tokens.packed(torch.tensor([[4, 4, 7, 7, 7, -1], [1, 1, 1, 2, -1, -1]]))
    assert facts(packed.after()) == ([[3], [1]], [[7], [2]])


def test_row_stands_for_all_only_where_all_are_alike() -> None:
    plain = Tokens.arange(3, 2)
    assert plain.row().batch == 1
    assert plain.row().start == 0
    padded = Tokens.padded(torch.tensor([[False, True], [True, True]]))
    assert padded.row() is padded
    marked = Tokens(plain.pos, plain.seg, torch.zeros(3, 2, dtype=torch.bool), start=0)
    assert marked.row() is marked


def test_cat_puts_pieces_side_by_side() -> None:
    left, right = Tokens.arange(1, 2), Tokens.padded(torch.tensor([[True, False]])).map(lambda t: t)
    both = Tokens.cat([left, right])
    assert facts(both) == ([[0, 1, 0, 0]], [[0, 0, 0, -1]])
    assert both.mark is None
    marked = Tokens(left.pos, left.seg, torch.tensor([[True, False]]))
    mark = Tokens.cat([right, marked]).mark
    assert mark is not None
    assert mark.tolist() == [[False, False, True, False]]


def test_map_forgets_what_was_known() -> None:
    tokens = Tokens.arange(1, 4).map(lambda t: t.flip(1))
    assert (tokens.start, facts(tokens)[0]) == (None, [[3, 2, 1, 0]])


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (0, 0)])
def test_fault_20_empty_tokens(batch: int, length: int) -> None:
    for tokens in (
        Tokens.arange(batch, length),
        Tokens.padded(torch.zeros(batch, length, dtype=torch.bool)),
        Tokens.packed(torch.zeros(batch, length, dtype=torch.long)),
    ):
        assert (tokens.batch, tokens.length) == (batch, length)
        assert tokens.end in (0, length)


def test_packed_padding_needs_no_positions() -> None:
    """More padding than a model has positions is no reason to refuse a row."""
    tokens = Tokens.packed(torch.tensor([[0, 0, -1, -1, -1, -1]]))
    assert tokens.pos.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert tokens.end == 2
