"""Patterns: each one's own rule, what they know of tiles, and heads that differ, against loops in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from anyformer import (
    Alibi,
    Attention,
    Block,
    Causal,
    Chunk,
    Dilated,
    Full,
    GatedFFN,
    Global,
    Pattern,
    PerHead,
    Prefix,
    RandomBlocks,
    RelativeBias,
    Request,
    RMSNorm,
    SpecError,
    Tokens,
    TransformerSpec,
    Window,
    attend,
    bigbird,
    choose,
    longformer,
)
from anyformer.kernels import KERNELS
from anyformer.kernels.by_head import ByHead
from anyformer.kernels.reference import Reference
from anyformer.kernels.sdpa import Sdpa
from anyformer.parts.pattern import EMPTY, FULL, PARTIAL

# -- each pattern against its rule ------------------------------------------------------------------------------------

Rule = Callable[[int, int, bool, bool], bool]
"""May the query at the first position see the key at the second? The bools say which of them is marked."""


def mixed(x: int) -> int:
    for _ in range(2):
        x = (((x >> 16) ^ x) * 73244475) % 2**32
    return (x >> 16) ^ x


def draws(later: int, count: int, seed: int) -> set[int]:
    """The earlier blocks that block `later` draws: one from each of `count` even stretches that are not empty."""
    found = set()
    for stretch in range(count):
        begin, end = stretch * later // count, (stretch + 1) * later // count
        if begin < end:
            found.add(begin + mixed(mixed(seed) ^ (later * count + stretch)) % (end - begin))
    return found


def linked(block: int, count: int, seed: int) -> Rule:
    def rule(q: int, k: int, *_: bool) -> bool:
        later, earlier = max(q, k) // block, min(q, k) // block
        return earlier < later and earlier in draws(later, count, seed)

    return rule


RULES: dict[str, tuple[Pattern, Rule]] = {
    "full": (Full(), lambda q, k, *_: True),
    "causal": (Causal(), lambda q, k, *_: k <= q),
    "window": (Window(5), lambda q, k, *_: q - 5 < k < q + 5),
    "prefix": (Prefix(6), lambda q, k, *_: k < 6),
    "global": (Global(), lambda q, k, q_mark, k_mark: q_mark or k_mark),
    "dilated": (Dilated(3, 9), lambda q, k, *_: k in (q - 6, q - 3, q, q + 3, q + 6)),
    "dilated_to_its_end": (Dilated(3, 10), lambda q, k, *_: k in range(q - 9, q + 10, 3)),
    "dilated_by_one": (Dilated(1, 4), lambda q, k, *_: q - 4 < k < q + 4),
    "dilated_to_nothing": (Dilated(5, 3), lambda q, k, *_: q == k),
    "chunk": (Chunk(5), lambda q, k, *_: k in range(q - q % 5, q - q % 5 + 5)),
    "chunk_of_one": (Chunk(1), lambda q, k, *_: q == k),
    "random_blocks": (RandomBlocks(4, 2, seed=7), linked(4, 2, 7)),
    "random_blocks_of_one": (RandomBlocks(1, 3), linked(1, 3, 0)),
    "longformer": (longformer(6), lambda q, k, a, b: a or b or abs(q - k) <= 3),
    "longformer_dilated": (longformer(6, 2), lambda q, k, a, b: a or b or abs(q - k) in (0, 2, 4, 6)),
    "bigbird": (
        bigbird(4, block=3, random=2, seed=5),
        lambda q, k, a, b: a or b or abs(q - k) <= 2 or linked(3, 2, 5)(q, k),
    ),
    "not": (~Chunk(4), lambda q, k, *_: q // 4 != k // 4),
    "and": (Causal() & Dilated(2, 7), lambda q, k, *_: q - k in (0, 2, 4, 6)),
    "or": (Chunk(4) | Prefix(2), lambda q, k, *_: k < 2 or q // 4 == k // 4),
}


def marked(tokens: Tokens, every: int = 5) -> Tokens:
    """The same with every fifth token marked; what was known of their order stays known."""
    at = torch.arange(tokens.length).expand_as(tokens.pos)
    return dataclasses.replace(tokens, mark=at % every == 2)


def loop(rule: Rule, q: Tokens, k: Tokens) -> list[list[list[bool]]]:
    """The mask (B, T, S), pair by pair."""

    def row(tokens: Tokens, b: int) -> list[tuple[int, int, bool]]:
        mark = torch.zeros_like(tokens.seg).bool() if tokens.mark is None else tokens.mark
        return list(zip(tokens.pos[b].tolist(), tokens.seg[b].tolist(), mark[b].tolist(), strict=True))

    return [
        [
            [q_seg == k_seg and k_seg >= 0 and rule(q_pos, k_pos, q_mark, k_mark) for k_pos, k_seg, k_mark in row(k, b)]
            for q_pos, q_seg, q_mark in row(q, b)
        ]
        for b in range(q.batch)
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_pattern_means_its_rule(name: str) -> None:
    pattern, rule = RULES[name]
    documents = torch.tensor([[0] * 9 + [1] * 20 + [-1] * 4, [3] * 30 + [4] * 3])
    for tokens in (Tokens.arange(1, 41), marked(Tokens.arange(1, 41)), marked(Tokens.packed(documents))):
        assert pattern.mask(tokens, tokens).tolist() == loop(rule, tokens, tokens)
    some = Tokens.arange(1, 3, start=30)
    assert pattern.mask(some, Tokens.arange(1, 41)).tolist() == loop(rule, some, Tokens.arange(1, 41))


@pytest.mark.parametrize("name", RULES)
def test_a_pattern_is_data(name: str) -> None:
    pattern = RULES[name][0]
    assert Pattern.parse(pattern.to_dict()) == pattern
    assert Pattern.from_json(pattern.to_json()) == pattern


@pytest.mark.parametrize("name", RULES)
def test_promises_hold(name: str) -> None:
    pattern, tokens = RULES[name][0], Tokens.arange(1, 60)
    pairs = [(q, k) for _, q, k in pattern.mask(tokens, tokens).nonzero().tolist()]
    reach, frontier, band = pattern.reach(), pattern.frontier(), pattern.band()
    assert reach is None or all(q - k < reach or k < pattern.first() for q, k in pairs)
    assert frontier is None or all(k < frontier for q, k in pairs if k > q)
    if band is not None:
        left, right = (60 if side is None else side for side in band)
        assert pairs == [(q, k) for q in range(60) for k in range(60) if q - left <= k <= q + right]


@pytest.mark.parametrize(
    ("pattern", "reach"),
    [
        (Dilated(3, 9), 9),
        (Dilated(3, 10), 10),
        (Causal() & Dilated(2, 7), 7),
        (Chunk(5), 5),
        (Causal() & Chunk(5), 5),
        ((Causal() & Chunk(5)) | (Causal() & Window(7)), 7),
        (Causal() & RandomBlocks(4, 2), None),
        (PerHead((Causal() & Window(3), Causal() & Chunk(8))), 8),
        (PerHead((Causal() & Window(3), Causal())), None),
    ],
    ids=str,
)
def test_reach(pattern: Pattern, reach: int | None) -> None:
    assert pattern.reach() == reach


@pytest.mark.parametrize("pattern", [Dilated(2, 5), Chunk(4), RandomBlocks(4, 2), longformer(4), bigbird(4)], ids=str)
def test_sparse_patterns_look_both_ways(pattern: Pattern) -> None:
    assert pattern.frontier() is None
    assert (Causal() & pattern).frontier() == 0
    tokens = Tokens.arange(1, 40)
    mask = pattern.mask(tokens, tokens)
    assert torch.equal(mask, mask.transpose(1, 2))


def test_fault_13_the_last_distance_of_a_dilated_window() -> None:
    """The span counts the token itself, as a window does: its last distance is the largest multiple below it."""
    tokens = Tokens.arange(1, 30)
    for step, span in itertools.product(range(1, 6), range(1, 14)):
        seen = (Causal() & Dilated(step, span)).mask(tokens, tokens)[0, 29].nonzero().flatten().tolist()
        assert seen == [29 - d for d in range(0, span, step)][::-1]
        wide = longformer(2 * (span - 1), step).mask(tokens, tokens)[0].sum(-1)
        assert wide[15] == sum(0 <= 15 + d * step < 30 for d in range(1 - span, span))


# -- random blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_a_block_draws_so_many_earlier_blocks(count: int, seed: int) -> None:
    tokens = Tokens.arange(1, 64)
    mask = (Causal() & RandomBlocks(1, count, seed)).mask(tokens, tokens)[0]
    assert mask.sum(-1).tolist() == [min(count, block) for block in range(64)]


def test_random_links_do_not_depend_on_the_length() -> None:
    pattern, short, long = RandomBlocks(4, 2, seed=3), Tokens.arange(1, 50), Tokens.arange(1, 200)
    assert torch.equal(pattern.mask(long, long)[:, :50, :50], pattern.mask(short, short))


def test_random_links_are_even_and_differ_by_seed() -> None:
    """Which of the earlier blocks is drawn: each about as often as any other, over many seeds."""
    tokens = Tokens.arange(1, 41)
    masks = [(Causal() & RandomBlocks(1, 4, seed)).mask(tokens, tokens)[0, 40].long() for seed in range(1000)]
    drawn = torch.stack(masks).sum(0)[:40]  # 4 of 40: 100 times each; the standard deviation is 9.5
    assert (drawn - 100).abs().max() < 40
    assert len({tuple(mask.tolist()) for mask in masks}) > 900
    assert drawn.sum() == 4000


def test_random_links_do_not_follow_a_line() -> None:
    """Two blocks in a row do not draw the same distances, nor the same blocks."""
    tokens = Tokens.arange(1, 400)
    mask = (Causal() & RandomBlocks(1, 1)).mask(tokens, tokens)[0]
    drawn = mask[1:].long().argmax(-1)
    assert (drawn[1:] == drawn[:-1]).float().mean() < 0.1
    assert (drawn.diff() == 1).float().mean() < 0.1


# -- tiles ------------------------------------------------------------------------------------------------------------


def tile_truth(mask: Tensor, size: int) -> Tensor:
    """(b, n, m): EMPTY, PARTIAL or FULL as it is, tile by tile."""
    rows = [
        [
            [EMPTY if not t.any() else FULL if t.all() else PARTIAL for t in band.split(size, 1)]
            for band in m.split(size)
        ]
        for m in mask
    ]
    return torch.tensor(rows)


def sound(pattern: Pattern, q: Tokens, k: Tokens, size: int) -> Tensor:
    """The tiles that the pattern claims, of which none says what is not so."""
    said, truth = pattern.blocks(q, k, size), tile_truth(pattern.mask(q, k), size)
    assert said.shape == truth.shape
    wrong = (said != truth) & (said != PARTIAL)
    assert not wrong.any(), (pattern, size, wrong.nonzero().tolist())
    return said


def ragged(length: int, generator: random.Random) -> Iterator[tuple[Tokens, Tokens]]:
    """Queries and keys of every layout: plain, packed, padded, marked, the last of many, out of order."""
    plain = Tokens.arange(2, length)
    cuts = [sorted(generator.sample(range(length + 1), min(3, length))) for _ in range(2)]
    documents = torch.tensor([[sum(at >= cut for cut in row) for at in range(length)] for row in cuts])
    documents[1, length - length // 7 :] = -1
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[0, : length // 3] = keep[1, length - length // 4 :] = False
    for tokens in (plain, Tokens.packed(documents), Tokens.padded(keep)):
        yield tokens, tokens
        yield marked(tokens, every=40), marked(tokens, every=40)
    few = max(length // 5, 1)
    yield Tokens.arange(2, few, start=length - few), plain
    order = torch.tensor(generator.sample(range(length), length))
    yield plain, plain.map(lambda t: t[:, order])


LENGTHS = (1, 2, 127, 128, 129, 130)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_fault_18_tiles_are_sound(length: int, name: str) -> None:
    for q, k in ragged(length, random.Random(length)):
        for size in (16, 64, 128):
            sound(RULES[name][0], q, k, size)


def composed(generator: random.Random, depth: int) -> Pattern:
    """A random formula of & | ~ over random patterns."""
    if not depth:
        few, many = generator.randint(1, 5), generator.randint(1, 140)
        leaves: list[Pattern] = [Full(), Causal(), Window(many), Prefix(many - 1), Global(), Dilated(few, many)]
        return generator.choice([*leaves, Chunk(many), RandomBlocks(generator.choice([8, 16, 24]), few, many)])
    a, b = (composed(generator, depth - 1) for _ in range(2))
    return generator.choice([lambda: a & b, lambda: a | b, lambda: ~a])()


@pytest.mark.parametrize("seed", range(12))
def test_fault_18_tiles_of_compositions_are_sound(seed: int) -> None:
    generator = random.Random(seed)
    for depth in (1, 2, 3):
        pattern = composed(generator, depth)
        for q, k in ragged(generator.choice(LENGTHS), generator):
            sound(pattern, q, k, generator.choice([16, 24, 128]))


BANDS: list[Pattern] = [
    Full(),
    Causal(),
    ~Causal(),
    Window(1),
    Window(16),
    Window(17),
    Window(33),
    ~Window(20),
    Causal() & Window(1),
    Causal() & Window(15),
    Causal() & Window(16),
    Causal() & Window(31),
    Causal() & Window(50) & Full(),
    Prefix(16),
    Prefix(17),
]
TIGHT = [*BANDS, Dilated(16, 40), Dilated(40, 100), Chunk(16), Chunk(32), Chunk(17), RandomBlocks(16, 2)]


@pytest.mark.parametrize("pattern", [*TIGHT, RandomBlocks(5, 2), RandomBlocks(48, 1)], ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 33, 130])
def test_tiles_are_tight(length: int, pattern: Pattern) -> None:
    """Where positions run on, no tile is called partial that is empty or full."""
    tokens = Tokens.arange(2, length)
    for q in (tokens, Tokens.arange(2, 1 + length // 4, start=length - 1 - length // 4)):
        assert torch.equal(sound(pattern, q, tokens, 16), tile_truth(pattern.mask(q, tokens), 16))


def test_tiles_of_random_blocks_are_tight_whatever_their_size() -> None:
    tokens = Tokens.arange(1, 300)
    for block, size in ((16, 16), (16, 64), (64, 16), (10, 16)):
        pattern = RandomBlocks(block, 2, seed=1)
        said = sound(pattern, tokens, tokens, size)
        assert torch.equal(said, tile_truth(pattern.mask(tokens, tokens), size))
        assert (said == EMPTY).any()


def test_bigbird_leaves_most_tiles_empty() -> None:
    tokens = Tokens.arange(1, 4096)
    said = bigbird(192).blocks(tokens, tokens, 64)
    assert (said == EMPTY).float().mean() > 0.8  # a row of 64: 5 of the window, about 2 × 3 drawn


def test_no_tiles_of_no_tokens() -> None:
    none, some = Tokens.arange(1, 0), Tokens.arange(1, 20)
    for pattern, _ in RULES.values():
        assert pattern.blocks(none, some, 16).shape == (1, 0, 2)
        assert pattern.blocks(some, none, 16).shape == (1, 2, 0)


# -- heads that differ ------------------------------------------------------------------------------------------------

HALVES = PerHead((Causal() & Window(3), Causal()))


def asked(pattern: Pattern, heads: int = 4, groups: int = 2, **more: object) -> Request:
    q, k = torch.randn(1, 5, heads, 4), torch.randn(1, 5, groups, 4)
    tokens = Tokens.arange(1, 5)
    given = {"q": q, "k": k, "v": k, "q_tokens": tokens, "k_tokens": tokens, "pattern": pattern, "scale": 0.5}
    return Request(**{**given, **more})  # type: ignore[arg-type]


def test_heads_share_patterns_out_in_order() -> None:
    a, b, c = Causal(), Window(2), Full()
    assert PerHead((a, b)).runs(6) == [(0, 3, a), (3, 6, b)]
    assert PerHead((a, b, c)).runs(3) == [(0, 1, a), (1, 2, b), (2, 3, c)]
    assert PerHead((a, a, b, a)).runs(8) == [(0, 4, a), (4, 6, b), (6, 8, a)]
    assert PerHead((a,)).runs(5) == [(0, 5, a)]


@pytest.mark.parametrize("change", [Alibi(), RelativeBias(num_buckets=8, max_distance=16)], ids=str)
def test_fault_24_each_head_keeps_its_own_bias(change: Alibi | RelativeBias) -> None:
    """Six heads, so that ALiBi's slopes are no plain series; each alone is the textbook with its pattern."""
    position = change.build(4, 6)
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    patterns = (Causal(), Window(2), Causal() & Window(3))
    q, k, v = (torch.randn(2, 7, 6, 4, dtype=torch.float64) for _ in range(3))
    out = attend(q, k, v, pattern=PerHead(patterns), position=position)
    for head in range(6):
        right = attend(q, k, v, pattern=patterns[head // 2], position=position, kernel="reference")
        torch.testing.assert_close(out[:, :, head], right[:, :, head], atol=1e-6, rtol=0)


def test_each_run_goes_to_the_kernel_that_suits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...], Pattern]] = []
    for kernel in (Sdpa, Reference):
        call = kernel.__call__

        def noting(self: Sdpa, request: Request, call: Callable[..., Tensor] = call) -> Tensor:
            seen.append((self.name, (request.q.shape[2], request.k.shape[2]), request.pattern))
            return call(self, request)

        monkeypatch.setattr(kernel, "__call__", noting)
    pattern = PerHead((Causal(), Causal(), Full(), Causal()))
    choose(asked(pattern, 8, 4), KERNELS)(asked(pattern, 8, 4))
    assert seen == [("sdpa", (4, 2), Causal()), ("sdpa", (2, 1), Full()), ("sdpa", (2, 1), Causal())]
    seen.clear()
    choose(asked(pattern, 8, 4), KERNELS)(asked(pattern, 8, 4, softcap=1.0))
    assert [name for name, *_ in seen] == ["reference"] * 3


def test_no_other_kernel_takes_heads_that_differ() -> None:
    for kernel in KERNELS:
        if kernel.name == "by_head":
            assert choose(asked(HALVES), KERNELS, "by_head") is kernel
            continue
        with pytest.raises(ValueError, match=f"kernel '{kernel.name}' was asked for, but heads follow different patt"):
            choose(asked(HALVES), KERNELS, kernel.name)
        with pytest.raises(ValueError, match="has no one mask for all heads"):
            kernel(asked(HALVES))
    with pytest.raises(ValueError, match="by_head' was asked for, but all heads follow one pattern"):
        choose(asked(Causal()), KERNELS, "by_head")


@pytest.mark.parametrize(
    ("pattern", "heads", "groups", "why"),
    [
        (HALVES, 4, 1, "the 4 query heads that read one key-value head must follow one pattern"),
        (PerHead((Causal(), Causal(), Full())), 6, 2, "the 3 query heads that read one key-value head must"),
        (PerHead((Causal(),) * 3), 4, 4, "4 heads cannot be shared out evenly to 3 patterns"),
    ],
    ids=["multi_query", "across_groups", "uneven"],
)
def test_heads_that_cannot_be_taken_apart_are_refused(pattern: PerHead, heads: int, groups: int, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        Attention(heads, num_kv_heads=groups, pattern=pattern)
    with pytest.raises(ValueError, match=f"no kernel can do this: by_head: {why}"):
        choose(asked(pattern, heads, groups), KERNELS)


def test_equal_patterns_may_lie_across_key_value_heads() -> None:
    pattern = PerHead((Causal(), Causal(), Full(), Full()))
    assert choose(asked(pattern, 8, 2), KERNELS).name == "by_head"
    assert choose(asked(PerHead((Causal(),) * 8), 8, 1), KERNELS).name == "by_head"


def test_per_head_is_not_part_of_a_formula() -> None:
    for make in (lambda: Causal() & HALVES, lambda: HALVES | Causal(), lambda: ~HALVES, lambda: PerHead((HALVES,))):
        with pytest.raises(SpecError, match=r"cannot hold a PerHead: combine inside it"):
            make()
    with pytest.raises(SpecError, match="PerHead needs at least one pattern"):
        PerHead(())


def test_per_head_has_no_mask() -> None:
    tokens = Tokens.arange(1, 4)
    for ask in (lambda: HALVES.mask(tokens, tokens), lambda: HALVES.blocks(tokens, tokens, 2)):
        with pytest.raises(ValueError, match="has no one mask for all heads: ask its `patterns`"):
            ask()


def test_a_decoder_refuses_one_head_that_looks_ahead() -> None:
    def layer(pattern: Pattern) -> TransformerSpec:
        block = Block.pre(Attention(4, pattern=pattern), GatedFFN(8), norm=RMSNorm())
        return TransformerSpec(dim=8, vocab_size=9, decoder=[block])

    assert layer(HALVES).build().new_cache(1, 8).nbytes == layer(Causal()).build().new_cache(1, 8).nbytes
    with pytest.raises(SpecError, match="looks ahead, which a decoder must not"):
        layer(PerHead((Causal(), Window(3))))


def test_equal_biases_of_other_heads_are_not_taken_for_one_another() -> None:
    """Two runs of heads with one pattern between them share the pass's memo, and must not share its bias."""
    position = Alibi().build(4, 4)
    request = asked(PerHead((Causal(), Full(), Causal(), Causal())), 4, 4, position=position)
    out = ByHead([Sdpa()])(request)
    for head, pattern in enumerate((Causal(), Full(), Causal(), Causal())):
        right = Reference()(dataclasses.replace(request, pattern=pattern, memo={}))
        torch.testing.assert_close(out[:, :, head], right[:, :, head])


COMPILED = """
import torch, anyformer as af
from torch._dynamo.testing import CompileCounter

near, far = af.Causal() & af.Window(5), af.Causal() & (af.RandomBlocks(4, 1) | af.Chunk(4))
mixer = af.Attention(4, 2, pattern=af.PerHead((near, far)), position=af.RelativeBias(8, 16))
block = af.Block.pre(mixer, af.DenseFFN(16), norm=af.RMSNorm())
model = af.TransformerSpec(dim=16, vocab_size=32, decoder=[block, block]).build().eval()
count, ids = CompileCounter(), torch.randint(32, (2, 40))
compiled = torch.compile(model, backend=count, fullgraph=True)  # raises at a graph break
with torch.inference_mode():
    caches = [model.new_cache(2, 64) for _ in range(2)]
    for cache in caches:
        model(ids[:, :5], cache=cache)
    for t in range(5, 37):
        a, b = (f(ids[:, t : t + 1], cache=c) for f, c in zip((compiled, model), caches))
        assert (a - b).abs().max() < 1e-5
print(count.frame_count)
"""


@pytest.mark.slow
def test_heads_that_differ_compile_whole() -> None:
    """In a process of its own, without the checks of signatures, which the compiler would have to trace."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 1 <= int(done.stdout) <= 3


# -- no sparse pattern makes NaN --------------------------------------------------------------------------------------

SPARSE = [Causal() & Dilated(2, 5), Causal() & Chunk(2), Causal() & RandomBlocks(1, 2), longformer(2), HALVES]


@pytest.mark.parametrize("pattern", SPARSE, ids=str)
def test_fault_8_half_precision_and_padding(pattern: Pattern) -> None:
    """[pad, pad, real, real] in float16 with scores around -100: finite, and as the real tokens alone."""
    q, k = torch.full((1, 4, 2, 4), 10.0), torch.full((1, 4, 2, 4), -5.0)
    q, k, v = (x.half().requires_grad_() for x in (q, k, torch.randn(1, 4, 2, 4)))
    tokens = Tokens.padded(torch.tensor([[False, False, True, True]]))
    out = attend(q, k, v, pattern=pattern, tokens=tokens)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[:, :2] == 0).all() for grad in grads[1:])
    right = attend(*(x[:, 2:].double() for x in (q, k, v)), pattern=pattern)
    torch.testing.assert_close(out[:, 2:].double(), right, atol=2e-3, rtol=1e-3)
