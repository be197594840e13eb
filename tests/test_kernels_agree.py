"""Every kernel means the same: forward and gradients equal a float64 loop over pairs, written here and only here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from anyformer import (
    KERNELS,
    Alibi,
    Causal,
    Chunk,
    Dilated,
    Full,
    Global,
    Pattern,
    PerHead,
    Position,
    PositionModule,
    Prefix,
    RandomBlocks,
    RelativeBias,
    Request,
    Rotary,
    Tokens,
    Window,
    attend,
    choose,
    explain_kernels,
)
from anyformer.kernels.base import Kernel
from anyformer.kernels.flex import Flex

WIDTH, SCALE = 4, 0.7  # not the default, 1 / √4, which is tested on its own below
NAMES = [kernel.name for kernel in KERNELS if kernel.name not in ("by_head", "flex")]  # those have tests of their own
WIDE = torch.float64


class Even(Pattern, kind="even_of_this_test"):
    """Every token sees the tokens at an even distance."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (q.pos - k.pos) % 2 == 0


Rule = Callable[[int, int], bool]

PATTERNS: dict[str, tuple[Pattern, Rule]] = {
    "full": (Full(), lambda q, k: True),
    "causal": (Causal(), lambda q, k: k <= q),
    "window": (Window(3), lambda q, k: -3 < q - k < 3),
    "sliding": (Causal() & Window(3), lambda q, k: 0 <= q - k < 3),
    "prefix": (Causal() | Prefix(4), lambda q, k: k <= q or k < 4),
    "future": (~Causal(), lambda q, k: k > q),
    "far_past": (Causal() & ~Window(2), lambda q, k: q - k >= 2),
    "home_made": (Even(), lambda q, k: (q - k) % 2 == 0),
    "dilated": (Dilated(2, 5), lambda q, k: q - k in (-4, -2, 0, 2, 4)),
    "chunk": (Causal() & Chunk(3), lambda q, k: k <= q and q // 3 == k // 3),
    "random": (RandomBlocks(2, 1, seed=3), lambda q, k: q // 2 != k // 2 and 1 in (q // 2, k // 2)),
}


class Layout(NamedTuple):
    """Tokens of queries and keys, and the same as lists: (position, segment) of each token of each row."""

    q: Tokens
    k: Tokens
    q_at: list[list[tuple[int, int]]]
    k_at: list[list[tuple[int, int]]]


def row(text: str) -> list[tuple[int, int]]:
    """'0a 1a 0b _' is two tokens of document 0, one of document 1, and padding."""
    return [(0, -1) if word == "_" else (int(word[:-1]), "abcdef".index(word[-1])) for word in text.split()]


def keep(*rows: str) -> Tokens:
    return Tokens.padded(torch.tensor([[letter == "x" for letter in row] for row in rows]))


def layouts() -> dict[str, Layout]:
    plain = row("0a 1a 2a 3a 4a 5a 6a")
    left, right = row("_ _ _ 0a 1a 2a 3a"), row("0a 1a 2a 3a 4a _ _")
    packed = [row("0a 1a 2a 0b 1b 2b _"), row("0c 0d 1d 2d 3d 4d 5d")]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [2, 3, 3, 3, 3, 3, 3]])

    def same(tokens: Tokens, *at: list[tuple[int, int]]) -> Layout:
        return Layout(tokens, tokens, list(at), list(at))

    ragged = keep("..xxxxx", "xxxxxxx")
    return {
        "plain": same(Tokens.arange(2, 7), plain, plain),
        "packed": same(Tokens.packed(documents), *packed),
        "left_padded": same(keep("...xxxx", "xxxxxxx"), left, plain),
        "right_padded": same(keep("xxxxxxx", "xxxxx.."), plain, right),
        "offset": Layout(Tokens.arange(2, 3, start=4), Tokens.arange(2, 7), [plain[4:]] * 2, [plain] * 2),
        "ragged_offset": Layout(
            ragged.map(lambda t: t[:, 5:]),
            ragged,
            [row("3a 4a"), plain[5:]],
            [row("_ _ 0a 1a 2a 3a 4a"), plain],
        ),
    }


LAYOUTS = layouts()
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


class Change(NamedTuple):
    """What is done to scores: the position scheme given to the library, and the soft-cap."""

    position: Position | None = None
    softcap: float | None = None


CHANGES = {
    "none": Change(),
    "alibi": Change(Alibi()),
    "relative": Change(RelativeBias(num_buckets=8, max_distance=16)),
    "softcap": Change(softcap=0.7),
    "rotary": Change(Rotary(base=100.0)),
}
BUCKETS = [0, 1, 2, 3, 4, 4, 5]  # of distance back 0 .. 6, from FAULTS case 26
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]


class Case(NamedTuple):
    pattern: str
    layout: str
    heads: str
    change: str


# -- the oracle -------------------------------------------------------------------------------------------------------


def turned(x: Tensor, at: list[list[tuple[int, int]]], base: float) -> Tensor:
    """Rotary, halves paired: channel i and i + half turn by position × base^(-2i / width)."""
    half = x.shape[-1] // 2
    angle = torch.tensor(
        [[[p * base ** (-2 * i / (2 * half)) for i in range(half)] for p, _ in r] for r in at], dtype=WIDE
    )
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def added(change: str, table: Tensor, head: int, distance: int) -> Tensor | float:
    if change == "alibi":
        return -SLOPES[head] * abs(distance)
    return table[BUCKETS[max(distance, 0)], head] if change == "relative" else 0.0


def oracle(q: Tensor, k: Tensor, v: Tensor, table: Tensor, case: Case) -> Tensor:
    """Each query alone: a softmax over the list of keys that it may see."""
    _, rule = PATTERNS[case.pattern]
    layout = LAYOUTS[case.layout]
    if case.change == "rotary":
        q, k = turned(q, layout.q_at, 100.0), turned(k, layout.k_at, 100.0)
    batch, length, heads, _ = q.shape
    share = heads // k.shape[2]
    out = []
    for b, t in itertools.product(range(batch), range(length)):
        pos, seg = layout.q_at[b][t]
        seen = [s for s, (p, d) in enumerate(layout.k_at[b]) if d >= 0 and d == seg and rule(pos, p)]
        for h in range(heads):
            if not seen:
                out.append(q[b, t, h] * 0)
                continue
            scores = k[b, seen, h // share] @ q[b, t, h] * SCALE
            if case.change == "softcap":
                scores = 0.7 * torch.tanh(scores / 0.7)
            bias = [added(case.change, table, h, pos - layout.k_at[b][s][0]) for s in seen]
            scores = scores + torch.stack([torch.as_tensor(value, dtype=WIDE) for value in bias])
            weights = scores.exp() / scores.exp().sum()
            out.append(weights @ v[b, seen, h // share])
    return torch.stack(out).view(q.shape)


class Answer(NamedTuple):
    inputs: tuple[Tensor, ...]
    out_weight: Tensor
    out: Tensor
    grads: tuple[Tensor, ...]


@functools.cache
def answer(case: Case) -> Answer:
    generator = torch.Generator().manual_seed(len(case.layout))
    layout, (heads, groups) = LAYOUTS[case.layout], HEADS[case.heads]
    shapes = [(2, layout.q.length, heads, WIDTH), *[(2, layout.k.length, groups, WIDTH)] * 2, (8, heads)]
    inputs = tuple(torch.randn(shape, generator=generator, dtype=WIDE).requires_grad_() for shape in shapes)
    out = oracle(*inputs, case)
    out_weight = torch.randn(out.shape, generator=generator, dtype=WIDE)
    grads = gradients((out * out_weight).sum(), inputs)
    return Answer(tuple(x.detach() for x in inputs), out_weight, out.detach(), grads)


def gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True))


def ours(case: Case, inputs: tuple[Tensor, ...], kernel: str | Kernel | None, **changed: Any) -> Tensor:
    q, k, v, table = inputs
    change, layout = CHANGES[case.change], LAYOUTS[case.layout]
    position: Any = change.position
    if isinstance(position, RelativeBias):
        position = position.build(WIDTH, q.shape[2])
        del position.table
        position.table = table
    given = {"tokens": layout.q, "key_tokens": layout.k, "scale": SCALE, "pattern": PATTERNS[case.pattern][0]}
    return attend(q, k, v, position=position, kernel=kernel, softcap=change.softcap, **{**given, **changed})


REJECTED = {("sdpa", "softcap"): "cannot cap scores"}


def all_cases() -> Iterator[Any]:
    for change, heads, layout, pattern in itertools.product(CHANGES, HEADS, LAYOUTS, PATTERNS):
        case = Case(pattern, layout, heads, change)
        sparse = pattern in ("dilated", "chunk", "random")
        wide = heads == "gqa" and (change in ("none",) if sparse else change in ("none", "relative"))
        wide = wide or (heads == "gqa" and pattern in ("prefix", "far_past"))
        full = wide or pattern == "sliding"
        yield pytest.param(case, id="-".join(case), marks=[] if full else pytest.mark.slow)


@pytest.mark.parametrize("case", list(all_cases()))
def test_forward_and_gradients(case: Case) -> None:
    right = answer(case)
    close = 1e-6 if case.change == "rotary" else 1e-12  # rotary phases are kept in float32
    for kernel in NAMES:
        inputs = tuple(x.clone().requires_grad_() for x in right.inputs)
        reason = REJECTED.get((kernel, case.change))
        if reason:
            with pytest.raises(ValueError, match=f"kernel '{kernel}' was asked for, but .*{reason}"):
                ours(case, inputs, kernel)
            continue
        out = ours(case, inputs, kernel)
        torch.testing.assert_close(out, right.out, atol=close, rtol=0, msg=lambda m, k=kernel: f"{k}: {m}")
        grads = gradients((out * right.out_weight).sum(), inputs)
        for name, grad, wanted in zip(("q", "k", "v", "table"), grads, right.grads, strict=True):
            torch.testing.assert_close(
                grad, wanted, atol=10 * close, rtol=0, msg=lambda m, k=kernel, n=name: f"{k}, gradient of {n}: {m}"
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "change"), [("mha", "alibi"), ("gqa", "relative"), ("mha", "rotary")])
def test_heads_with_patterns_of_their_own(heads: str, change: str, layout: str) -> None:
    """The first half of the heads is the oracle with one pattern, the second the oracle with another."""
    names = ("sliding", "chunk")
    right = answer(Case("sliding", layout, heads, change))
    cases = [Case(name, layout, heads, change) for name in names]
    exact = tuple(x.clone().requires_grad_() for x in right.inputs)
    parts = [oracle(*exact, case)[:, :, 2 * i : 2 * i + 2] for i, case in enumerate(cases)]
    pattern = PerHead(tuple(PATTERNS[name][0] for name in names))
    inputs = tuple(x.clone().requires_grad_() for x in right.inputs)
    out = ours(cases[0], inputs, "by_head", pattern=pattern)
    close = 1e-6 if change == "rotary" else 1e-12
    torch.testing.assert_close(out, torch.cat(parts, 2), atol=close, rtol=0)
    wanted = gradients((torch.cat(parts, 2) * right.out_weight).sum(), exact)
    for mine, other in zip(gradients((out * right.out_weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=10 * close, rtol=0)


def test_the_oracle_can_tell_cases_apart() -> None:
    """The grid would be worth little if all its answers were the same."""
    for one, other in itertools.combinations(PATTERNS, 2):
        a, b = (answer(Case(pattern, "plain", "gqa", "none")).out for pattern in (one, other))
        assert (a - b).abs().max() > 0.01, (one, other)
    for one, other in itertools.combinations(CHANGES, 2):
        a, b = (answer(Case("causal", "plain", "gqa", change)).out for change in (one, other))
        assert (a - b).abs().max() > 0.001, (one, other)


# -- flex: compiled, so but a few -------------------------------------------------------------------------------------


def flexed(case: Case, flex: Flex) -> None:
    """Forward only: on the CPU, torch's flex attention has no backward pass."""
    right = answer(case)
    dtype, close = (torch.float32, 1e-5) if flex.compiled else (WIDE, 1e-6)
    out = ours(case, tuple(x.to(dtype) for x in right.inputs), flex)
    torch.testing.assert_close(out.to(WIDE), right.out, atol=close, rtol=close)


def flexed_around_a_block(length: int) -> None:
    q, k, v = torch.randn(2, length, 4, 8), *(torch.randn(2, length, 2, 8) for _ in range(2))
    mark = torch.arange(length).expand(2, -1) % 100 == 3
    tokens = dataclasses.replace(Tokens.arange(2, length), mark=mark)
    pattern = Causal() & (Window(9) | Global() | RandomBlocks(16, 1))
    given: dict[str, Any] = {"pattern": pattern, "tokens": tokens, "position": Alibi()}
    out, right = (attend(q, k, v, kernel=kernel, **given) for kernel in ("flex", "reference"))
    torch.testing.assert_close(out, right, atol=2e-6, rtol=1e-5)


def apart(calls: list[str]) -> None:
    """In a process of its own, as users run it: without the checks of signatures, which the compiler would trace."""
    code = "; ".join(["from test_kernels_agree import *", *calls, "print('done')"])
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=here, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case", [Case("dilated", "packed", "gqa", "relative"), Case("chunk", "left_padded", "mqa", "softcap")], ids="-".join
)
def test_flex_step_by_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    flexed(case, Flex(compiled=False))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_compiled(pattern: str) -> None:
    places = (("packed", "gqa", "none"), ("ragged_offset", "mha", "alibi"), ("left_padded", "mqa", "softcap"))
    apart([f"flexed({Case(pattern, *place)!r}, Flex())" for place in places])


@pytest.mark.slow
def test_fault_18_flex_around_a_block() -> None:
    apart([f"flexed_around_a_block({length})" for length in (1, 2, 127, 128, 129, 130, 255)])


def test_flex_says_what_it_cannot() -> None:
    flex = Flex()
    learning = torch.randn(1, 3, 4, 4, requires_grad=True)
    assert flex.rejects(request()) is None
    assert flex.rejects(request(q=learning.detach())) is None
    with torch.inference_mode():
        assert flex.rejects(request(q=learning)) is None
    table = RelativeBias().build(4, 4)
    for given, why in (
        ({"dropout": 0.1}, "cannot drop weights"),
        ({"q": learning}, r"on the CPU, .* gives no gradients: call it under torch.inference_mode\(\)"),
        ({"position": table}, "on the CPU, .* gives no gradients"),
        ({"q": torch.randn(1, 3, 4, 4, dtype=WIDE)}, "but the inputs are float64"),
        ({"q": torch.randn(1, 0, 4, 4)}, "at least one query and one key"),
    ):
        with pytest.raises(ValueError, match=f"kernel 'flex' was asked for, but .*{why}"):
            choose(request(**given), KERNELS, "flex")


# -- precision, memory layout -----------------------------------------------------------------------------------------

FEW = [
    Case("causal", "plain", "gqa", "none"),
    Case("sliding", "left_padded", "mha", "relative"),
    Case("future", "packed", "mqa", "alibi"),
    Case("prefix", "offset", "gqa", "rotary"),
    Case("full", "right_padded", "mha", "none"),
]


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("case", FEW, ids="-".join)
@pytest.mark.parametrize("kernel", NAMES)
def test_precision(kernel: str, case: Case, dtype: torch.dtype, close: float) -> None:
    right = answer(case)
    inputs = tuple(x.to(dtype).requires_grad_() for x in right.inputs)
    out = ours(case, inputs, kernel)
    assert out.dtype == dtype
    torch.testing.assert_close(out.to(WIDE), right.out, atol=close, rtol=close)
    for grad, wanted in zip(gradients((out * right.out_weight.to(dtype)).sum(), inputs), right.grads, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.to(WIDE), wanted, atol=5 * close, rtol=5 * close)


@pytest.mark.parametrize("case", FEW, ids="-".join)
@pytest.mark.parametrize("kernel", NAMES)
def test_memory_layout_does_not_matter(kernel: str, case: Case) -> None:
    right = answer(case)
    q, k, v, table = right.inputs
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    sliced = [torch.stack((x, x + 100), -1)[..., 0] for x in (q, k, v)]
    for variant in (strided, sliced):
        assert not variant[0].is_contiguous()
        out = ours(case, (*variant, table), kernel)
        torch.testing.assert_close(out, ours(case, right.inputs, kernel), atol=1e-12, rtol=0)
    repeated = ours(case, (q[:1].expand(2, -1, -1, -1), k, v, table), kernel)
    torch.testing.assert_close(
        repeated, ours(case, (q[:1].repeat(2, 1, 1, 1), k, v, table), kernel), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("case", FEW, ids="-".join)
@pytest.mark.parametrize("kernel", NAMES)
def test_order_of_rows_does_not_matter(kernel: str, case: Case) -> None:
    right, layout = answer(case), LAYOUTS[case.layout]
    q, k, v, table = right.inputs
    flipped = {"tokens": layout.q.map(lambda t: t.flip(0)), "key_tokens": layout.k.map(lambda t: t.flip(0))}
    out = ours(case, (q.flip(0), k.flip(0), v.flip(0), table), kernel, **flipped)
    torch.testing.assert_close(out.flip(0), right.out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", FEW, ids="-".join)
@pytest.mark.parametrize("kernel", NAMES)
def test_order_of_keys_does_not_matter(kernel: str, case: Case) -> None:
    right, layout = answer(case), LAYOUTS[case.layout]
    q, k, v, table = right.inputs
    order = torch.randperm(k.shape[1])
    out = ours(case, (q, k[:, order], v[:, order], table), kernel, key_tokens=layout.k.map(lambda t: t[:, order]))
    torch.testing.assert_close(out, right.out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 130, 255])
def test_fault_18_lengths_around_a_block(length: int, kernel: str) -> None:
    """Causal with a linear bias: the loop over queries as matrix-vector products."""
    q, k, v = (torch.randn(1, length, 1, WIDTH, dtype=WIDE).requires_grad_() for _ in range(3))
    weight = torch.randn(1, length, 1, WIDTH, dtype=WIDE)
    rows = []
    for t in range(length):
        distance = t - torch.arange(t + 1, dtype=WIDE)
        weights = torch.softmax(k[0, : t + 1, 0] @ q[0, t, 0] / 2 - distance / 256, 0)  # one head: slope 2^-8
        rows.append(weights @ v[0, : t + 1, 0])
    right = torch.stack(rows)[None, :, None]
    out = attend(q, k, v, position=Alibi(), kernel=kernel)
    torch.testing.assert_close(out, right, atol=1e-10, rtol=0)
    for mine, wanted in zip(
        gradients((out * weight).sum(), (q, k, v)), gradients((right * weight).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, wanted, atol=1e-10, rtol=0)


def test_fault_18_tokens_of_another_length_are_refused() -> None:
    q, k = torch.randn(1, 128, 1, 4), torch.randn(1, 128, 1, 4)
    with pytest.raises(ValueError, match=r"`key_tokens` must be for \(B, T\) = \(1, 128\), but are for \(1, 256\)"):
        attend(q, k, k, tokens=Tokens.arange(1, 128), key_tokens=Tokens.arange(1, 256))
    with pytest.raises(ValueError, match=r"`key_tokens` must be for .*\(1, 128\), but are for \(2, 128\)"):
        attend(q, k, k, key_tokens=Tokens.arange(2, 128))
    with pytest.raises(ValueError, match=r"`tokens` must be for .*\(1, 128\), but are for \(1, 127\)"):
        attend(q, k, k, tokens=Tokens.arange(1, 127), key_tokens=Tokens.arange(1, 128))


# -- closed forms -----------------------------------------------------------------------------------------------------


def means(values: list[float], kernel: str, length: int | None = None, **kwargs: Any) -> list[float]:
    """Zero scores: each output is the plain mean of the visible values."""
    v = torch.tensor(values, dtype=WIDE).view(1, -1, 1, 1)
    q = torch.zeros(1, length or len(values), 1, 1, dtype=WIDE)
    return attend(q, torch.zeros_like(v), v, kernel=kernel, **kwargs).flatten().tolist()


@pytest.mark.parametrize("kernel", NAMES)
def test_fault_2_true_means_may_attend(kernel: str) -> None:
    assert means([1, 2, 4], kernel) == pytest.approx([1, 1.5, 7 / 3])
    assert means([1, 2, 4], kernel, pattern=~Causal()) == pytest.approx([3, 4, 0])


@pytest.mark.parametrize("kernel", NAMES)
def test_fault_4_new_queries_are_the_last_ones(kernel: str) -> None:
    assert means([1, 2, 4, 8, 16], kernel, 2) == pytest.approx([3.75, 6.2])
    assert means([1, 2, 4, 8, 16], kernel, 1) == pytest.approx([6.2])


@pytest.mark.parametrize("kernel", NAMES)
def test_fault_13_window_counts_itself(kernel: str) -> None:
    values = [2.0**i for i in range(6)]
    right = [1, 3 / 2, 7 / 3, 14 / 3, 28 / 3, 56 / 3]
    assert means(values, kernel, pattern=Causal() & Window(3)) == pytest.approx(right)
    assert means(values, kernel, pattern=Window(3) & Causal()) == pytest.approx(right)
    mask = (Causal() & Window(3)).mask(Tokens.arange(1, 6), Tokens.arange(1, 6))
    assert mask.sum(-1).tolist() == [[1, 2, 3, 3, 3, 3]]


@pytest.mark.parametrize("kernel", NAMES)
def test_more_queries_than_keys_need_tokens(kernel: str) -> None:
    with pytest.raises(ValueError, match="3 queries cannot be the last of 2 keys"):
        means([1, 2], kernel, 3)
    assert means([1, 2], kernel, 3, pattern=Full()) == pytest.approx([1.5] * 3)


# -- the fast path ----------------------------------------------------------------------------------------------------


def refuse_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(self: Pattern, q: Tokens, k: Tokens) -> Tensor:
        raise AssertionError(f"{self!r} was asked for a mask of {q.length} × {k.length}")

    monkeypatch.setattr(Pattern, "mask", no_mask)


FAST: list[Any] = [
    pytest.param(Causal(), 6, 6, id="causal"),
    pytest.param(Full(), 6, 6, id="full"),
    pytest.param(Full(), 4, 6, id="full_more_keys"),
    pytest.param(Causal() & Window(6), 6, 6, id="window_of_all"),
    pytest.param(Causal() & Window(9), 6, 6, id="window_longer"),
    pytest.param(Window(6), 6, 6, id="two_sided_window_of_all"),
    pytest.param(Causal() & Full(), 6, 6, id="causal_and_full"),
    pytest.param(Causal(), 1, 6, id="one_new_token"),
    pytest.param(Causal() & Window(6), 1, 6, id="one_new_token_window"),
    pytest.param(Causal(), 1, 1, id="first_token"),
]


@pytest.mark.parametrize(("pattern", "length", "size"), FAST)
def test_no_mask_on_the_fast_path(pattern: Pattern, length: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, n, 2, 4) for n in (length, size, size))
    right = attend(q, k, v, pattern=pattern, kernel="reference")
    refuse_masks(monkeypatch)
    torch.testing.assert_close(attend(q, k, v, pattern=pattern, kernel="sdpa"), right, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("pattern", "length", "size"),
    [(Causal(), 2, 6), (Causal() & Window(5), 6, 6), (Causal() & Window(5), 1, 6), (Window(5), 6, 6)],
    ids=["two_new_tokens", "window_shorter", "one_new_token_window_shorter", "two_sided_window_shorter"],
)
def test_a_mask_where_one_is_needed(pattern: Pattern, length: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half of the test above: there the mask is not forgotten."""
    refuse_masks(monkeypatch)
    q, k, v = (torch.randn(2, n, 2, 4) for n in (length, size, size))
    with pytest.raises(AssertionError, match="was asked for a mask"):
        attend(q, k, v, pattern=pattern, kernel="sdpa")


def test_a_mask_is_one_row_when_all_rows_are_alike() -> None:
    tokens = Tokens.arange(5, 4)
    assert Causal().mask(tokens, tokens).shape == (1, 4, 4)
    assert Causal().mask(tokens.map(lambda t: t), tokens).shape == (5, 4, 4)


# -- choosing ---------------------------------------------------------------------------------------------------------


def request(**changed: Any) -> Request:
    q, k = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 2, 4)
    tokens = Tokens.arange(1, 3)
    given = {"q": q, "k": k, "v": k, "q_tokens": tokens, "k_tokens": tokens, "pattern": Causal(), "scale": 0.5}
    return Request(**{**given, **changed})  # type: ignore[arg-type]


def test_the_first_kernel_that_accepts_is_taken() -> None:
    assert choose(request(), KERNELS).name == "sdpa"
    assert choose(request(softcap=1.0), KERNELS).name == "reference"
    assert choose(request(), KERNELS, "reference").name == "reference"
    assert choose(request(), [k for k in KERNELS[::-1] if k.name in NAMES]).name == "reference"


def test_a_kernel_of_ones_own_can_be_forced() -> None:
    class Zero(Kernel):
        name = "zero"

        def rejects(self, request: Request) -> str | None:
            return "it keeps all" if request.dropout else None

        def __call__(self, request: Request) -> Tensor:
            return request.q * 0

    q = torch.randn(1, 2, 1, 4)
    assert attend(q, q, q, kernel=Zero()).abs().sum() == 0
    with pytest.raises(ValueError, match="kernel 'zero' was asked for, but it keeps all"):
        attend(q, q, q, kernel=Zero(), dropout=0.5)


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'flash'; known: "):
        choose(request(), KERNELS, "flash")


def test_explain_kernels_has_a_line_for_each_kernel() -> None:
    def verdicts(**changed: Any) -> dict[str, str]:
        return dict(line.split(": ", 1) for line in explain_kernels(request(**changed), KERNELS).splitlines())

    assert list(verdicts()) == [kernel.name for kernel in KERNELS]
    assert (verdicts()["sdpa"], verdicts()["reference"], verdicts()["flex"]) == ("taken", "possible", "possible")
    capped = verdicts(softcap=1.0)
    assert (capped["sdpa"], capped["reference"]) == ("torch's fused attention cannot cap scores", "taken")


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="4 query heads must be a multiple of the key-value heads, which are 3"):
        attend(q, k, k)


def test_a_memo_is_not_shared_between_other_tokens() -> None:
    """Equal patterns with other tokens have other masks, also within one pass."""
    memo: dict[Any, Any] = {}
    three, packed = Tokens.arange(1, 3), Tokens.packed(torch.tensor([[0, 1, 1]]))
    one = request(memo=memo).mask()
    two = request(q_tokens=packed, k_tokens=packed, memo=memo).mask()
    assert one.tolist() != two.tolist()
    same = request(q_tokens=packed, k_tokens=packed, memo=memo)
    assert same.mask() is two
    assert request(q_tokens=three, k_tokens=packed, memo=memo).mask() is not two
    assert request(q_tokens=packed, k_tokens=packed, pattern=Full(), memo=memo).mask() is not two


@pytest.mark.parametrize("kernel", NAMES)
def test_kernels_share_the_score_bias_of_a_module_with_weights(kernel: str) -> None:
    """Two layers with tables of their own must not take one another's bias from the memo."""
    spec = RelativeBias(num_buckets=4, max_distance=8)
    modules = [spec.build(4, 4), spec.build(4, 4)]
    memo: dict[Any, Any] = {}
    outs = []
    base = request()
    for module in modules:
        assert isinstance(module, PositionModule)
        torch.nn.init.normal_(module.table)  # type: ignore[arg-type]
        given = request(q=base.q, k=base.k, v=base.v, q_tokens=base.q_tokens, k_tokens=base.k_tokens)
        alone = choose(given, KERNELS, kernel)
        shared = Request(
            base.q, base.k, base.v, base.q_tokens, base.k_tokens, Causal(), 0.5, position=module, memo=memo
        )
        fresh = Request(base.q, base.k, base.v, base.q_tokens, base.k_tokens, Causal(), 0.5, position=module)
        outs.append(alone(shared))
        torch.testing.assert_close(outs[-1], alone(fresh))
    assert (outs[0] - outs[1]).abs().max() > 1e-3


# -- what patterns promise to kernels and caches ----------------------------------------------------------------------

GRID = 9
PROMISES: dict[str, Pattern] = {
    **{name: pattern for name, (pattern, _) in PATTERNS.items()},
    "nothing": Prefix(0),
    "self": Window(1),
    "prefix_alone": Prefix(4),
    "and_three": Causal() & Window(5) & Window(2),
    "or_of_windows": (Causal() & Window(2)) | (Causal() & Window(4)),
    "or_with_far": (Causal() & Window(2)) | Causal(),
    "prefix_in_window": Prefix(4) & Window(3),
    "window_or_prefix": Window(2) | Prefix(3),
    "causal_or_two_prefixes": Causal() | Prefix(2) | Prefix(5),
    "double_not": ~~Causal(),
    "not_prefix": Causal() & ~Prefix(2),
    "window_and_home_made": Causal() & Window(4) & Even(),
    "full_and_window": Full() & Window(3),
    "full_or_causal": Full() | Causal(),
}


def pairs(pattern: Pattern) -> Iterator[tuple[int, int, bool]]:
    tokens = Tokens.arange(1, GRID)
    mask = pattern.mask(tokens, tokens)[0].tolist()
    return ((q, k, mask[q][k]) for q in range(GRID) for k in range(GRID))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_means_what_it_says(name: str) -> None:
    pattern, rule = PATTERNS[name]
    assert all(seen == rule(q, k) for q, k, seen in pairs(pattern))


@pytest.mark.parametrize("name", PROMISES)
def test_a_band_is_exactly_the_pattern(name: str) -> None:
    band = PROMISES[name].band()
    if band is None:
        return
    left, right = (GRID if side is None else side for side in band)
    assert all(seen == (q - left <= k <= q + right) for q, k, seen in pairs(PROMISES[name]))


@pytest.mark.parametrize("name", PROMISES)
def test_nothing_beyond_the_reach_is_visible(name: str) -> None:
    reach, first = PROMISES[name].reach(), PROMISES[name].first()
    assert reach is None or all(q - k < reach or k < first for q, k, seen in pairs(PROMISES[name]) if seen)


@pytest.mark.parametrize("name", PROMISES)
def test_nothing_later_is_visible_from_the_frontier_on(name: str) -> None:
    frontier = PROMISES[name].frontier()
    later = [k for q, k, seen in pairs(PROMISES[name]) if seen and k > q]
    assert frontier is None or all(k < frontier for k in later)


@pytest.mark.parametrize(
    ("name", "band", "reach", "frontier"),
    [
        ("full", (None, None), None, None),
        ("causal", (None, 0), None, 0),
        ("window", (2, 2), 3, None),
        ("sliding", (2, 0), 3, 0),
        ("prefix", None, None, 4),
        ("future", None, None, None),
        ("far_past", None, None, 0),
        ("home_made", None, None, None),
        ("and_three", (1, 0), 2, 0),
        ("or_of_windows", None, 4, 0),
        ("prefix_in_window", None, 3, 4),
        ("causal_or_two_prefixes", None, None, 5),
        ("window_and_home_made", None, 4, 0),
        ("full_and_window", (2, 2), 3, None),
    ],
)
def test_promises_are_as_strong_as_they_can_be(
    name: str, band: object, reach: int | None, frontier: int | None
) -> None:
    """Else caches would keep too much and decoders refuse what they may have."""
    pattern = PROMISES[name]
    assert (pattern.band(), pattern.reach(), pattern.frontier()) == (band, reach, frontier)


def test_a_pattern_is_data() -> None:
    for pattern in PROMISES.values():
        assert Pattern.parse(pattern.to_dict()) == pattern
    assert Pattern.parse({"kind": "even_of_this_test"}) == Even()
