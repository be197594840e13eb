"""The blocked kernel at lengths of several tiles, which the small grid of kernels does not reach."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anyformer as af
from anyformer.kernels.base import choose
from anyformer.kernels.blocked import merge, pieces
from anyformer.tokens import Tokens

LENGTHS = (1, 2, 127, 128, 129, 130, 255, 1100)
CAUSAL = af.Causal()


def heads(
    length: int, batch: int = 2, count: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    sizes = (count, groups, groups)
    return [torch.randn(batch, length, size, 8, dtype=dtype, requires_grad=True) for size in sizes]


def answers(inputs: list[Tensor], kernel: str, **how: Any) -> list[Tensor]:
    """The output, and the gradients of q, k and v under an uneven loss."""
    out = af.attend(*inputs, kernel=kernel, **how)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    return [out, *torch.autograd.grad(loss, inputs)]


def agree(inputs: list[Tensor], close: float = 1e-10, **how: Any) -> None:
    for ours, right in zip(answers(inputs, "blocked", **how), answers(inputs, "reference", **how), strict=True):
        torch.testing.assert_close(ours, right, atol=close, rtol=0)


def marked(length: int) -> Tokens:
    """Two rows of plain positions, with marked tokens at different places."""
    mark = torch.zeros(2, length, dtype=torch.bool)
    mark[0, :: max(length // 3, 1)] = True
    mark[1, length // 2] = True
    return Tokens(torch.arange(length).expand(2, -1), torch.zeros(2, length, dtype=torch.long), mark)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "pattern",
    [CAUSAL, af.Full(), CAUSAL & af.Window(70), af.Window(200), CAUSAL | af.Prefix(130), CAUSAL & ~af.Window(20)],
    ids=repr,
)
def test_fault_18_lengths_around_a_tile(length: int, pattern: af.Pattern) -> None:
    """The last pattern hides everything from the first 20 queries: their rows are zeros, with finite gradients."""
    agree(heads(length), pattern=pattern)


@pytest.mark.parametrize("length", [130, 700])
def test_marked_packed_and_padded(length: int) -> None:
    agree(heads(length), pattern=af.Window(40) | af.Global(), tokens=marked(length))
    documents = torch.randint(0, 6, (2, length)).sort(1).values
    agree(heads(length), tokens=Tokens.packed(documents))
    keep = torch.arange(length) >= torch.tensor([[length // 2], [3]])
    agree(heads(length), tokens=Tokens.padded(keep))
    agree(heads(length), tokens=Tokens.padded(~keep))


@pytest.mark.parametrize(
    "change", [{"position": af.Alibi()}, {"softcap": 2.0}, {"position": af.Alibi(), "softcap": 2.0}]
)
def test_score_changes_are_made_in_the_tile(change: dict[str, Any]) -> None:
    for pattern in (CAUSAL, CAUSAL & af.Window(150)):
        agree(heads(300), pattern=pattern, **change)


def test_the_table_of_a_bias_learns() -> None:
    """T5's: its gradient goes through every tile."""
    grads = []
    for kernel in ("blocked", "reference"):
        torch.manual_seed(1)
        module = af.RelativeBias(num_buckets=8, bidirectional=True).build(8, 4).double()
        torch.nn.init.normal_(module.table)
        out = af.attend(*heads(300), pattern=af.Full(), position=module, kernel=kernel)
        grads.append(torch.autograd.grad(out.square().sum(), module.table)[0])
    torch.testing.assert_close(*grads, atol=1e-9, rtol=0)


def test_merging_parts_is_the_whole() -> None:
    """Any split of the keys, one that is empty, and rows that see nothing in one part or in both."""
    scores, values = torch.randn(1, 1, 5, 12, dtype=torch.float64), torch.randn(1, 1, 12, 3, dtype=torch.float64)
    scores[..., 0, :6] = -torch.inf
    scores[..., 1, :] = -torch.inf

    def part(begin: int, end: int) -> tuple[Tensor, Tensor]:
        some = scores[..., begin:end]
        return some.softmax(-1).nan_to_num() @ values[..., begin:end, :], some.logsumexp(-1)

    for cut in (0, 1, 6, 11, 12):
        for ours, right in zip(merge(part(0, cut), part(cut, 12)), part(0, 12), strict=True):
            torch.testing.assert_close(ours, right, atol=1e-14, rtol=0)


def test_pieces_hold_every_visible_pair_once() -> None:
    for pattern, length in itertools.product((CAUSAL, af.Window(300), CAUSAL & af.Window(100)), (130, 2100)):
        tokens = Tokens.arange(1, length)
        x = torch.zeros(1, length, 1, 1)
        request = af.Request(x, x, x, tokens, tokens, pattern, 1.0)
        held = torch.zeros(length, length, dtype=torch.long)
        for piece in pieces(request):
            for keys in piece.keys:
                held[piece.queries, keys] += 1
        seen = pattern.mask(tokens, tokens)[0]
        assert held.max() == 1
        assert (held[seen] == 1).all()
        assert held.sum() <= seen.sum() + length * 4 * 128  # and not much more


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self.numel = max(self.numel, made.untyped_storage().nbytes() // made.element_size())
        return out


@pytest.mark.parametrize("how", [{}, {"pattern": CAUSAL & af.Window(64)}, {"softcap": 5.0}, {"position": af.Alibi()}])
def test_nothing_of_size_t_by_s(how: dict[str, Any]) -> None:
    """Forward and backward; the textbook makes T × S numbers a head."""
    length, inputs = 2048, heads(2048, batch=1, count=2, groups=1, dtype=torch.float32)
    with Largest() as blocked:
        answers(inputs, "blocked", **how)
    with Largest() as textbook:
        answers(inputs, "reference", **how)
    assert textbook.numel >= 2 * length * length
    assert blocked.numel <= 8 * 128 * length


def test_it_is_chosen_where_it_pays() -> None:
    def taken(length: int, pattern: af.Pattern, **more: Any) -> str:
        x, tokens = torch.zeros(1, length, 1, 8), Tokens.arange(1, length)
        return choose(af.Request(x, x, x, tokens, tokens, pattern, 1.0, **more), af.KERNELS).name

    assert taken(2048, CAUSAL & af.Window(64)) == "blocked"
    assert taken(2048, CAUSAL, softcap=5.0) == "blocked"
    assert taken(2048, CAUSAL) == "sdpa"
    assert taken(100, CAUSAL & af.Window(64)) == "sdpa"
    with pytest.raises(ValueError, match="keeps no weights, so it cannot drop any"):
        af.attend(*heads(4), kernel="blocked", dropout=0.5)


def test_no_rows_and_no_keys() -> None:
    empty = [x[:0] for x in heads(130)]
    assert af.attend(*empty, kernel="blocked").shape == (0, 130, 4, 8)
