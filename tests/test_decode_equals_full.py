"""Decoding with a cache gives the logits of the full pass, however the text is cut, padded or packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer import (
    NTK,
    Alibi,
    Attention,
    Block,
    Cache,
    Causal,
    Chunk,
    CrossAttention,
    DenseFFN,
    Dilated,
    DynamicNTK,
    Embed,
    Full,
    LayerNorm,
    Learned,
    Linear,
    Llama3,
    Pattern,
    PerHead,
    Position,
    Prefix,
    RandomBlocks,
    RelativeBias,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SpecError,
    Tokens,
    Transformer,
    TransformerSpec,
    Window,
    YaRN,
    cycle,
)
from anyformer.kernels.by_head import ByHead
from anyformer.kernels.reference import Reference

VOCAB, LENGTH, CLOSE = 13, 11, 1e-10


class Stride(Pattern, kind="stride_of_this_test"):
    """Every third token back."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (q.pos - k.pos) % 3 == 0


PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "window_1": Causal() & Window(1),
    "window_3": Causal() & Window(3),
    "window_longer": Causal() & Window(40),
    "prefix": Causal() | Prefix(4),
    "window_or_prefix": (Causal() & Window(3)) | Prefix(4),
    "prefix_in_window": (Causal() | Prefix(4)) & Window(3),
    "far_past": Causal() & ~Window(2),
    "sinks": Causal() & (Window(3) | Prefix(2)),
    "sinks_alone": Causal() & Prefix(3),
    "home_made": Causal() & Stride(),
    "home_made_window": Causal() & Stride() & Window(5),
    "dilated": Causal() & Dilated(2, 6),
    "chunk": Causal() & Chunk(4),
    "random": Causal() & (RandomBlocks(2, 1) | Window(2)),
}

POSITIONS: dict[str, Position | None] = {
    "none": None,
    "learned": Learned(24),
    "sinusoidal": Sinusoidal(),
    "rotary_half": Rotary(base=50.0),
    "rotary_interleaved": Rotary(base=50.0, layout="interleaved"),
    "rotary_partial": Rotary(base=50.0, fraction=0.5),
    "linear": Rotary(frequencies=Linear(factor=4)),
    "ntk": Rotary(frequencies=NTK(factor=4)),
    "dynamic_ntk": Rotary(frequencies=DynamicNTK(factor=4, original_len=4)),
    "yarn": Rotary(frequencies=YaRN(factor=4, original_len=8)),
    "llama3": Rotary(frequencies=Llama3(original_len=8)),
    "alibi": Alibi(),
    "relative_bias": RelativeBias(num_buckets=8, max_distance=16),
}

SPLITS: dict[str, list[int]] = {
    "whole": [11],
    "ones": [1] * 11,
    "3_4_4": [3, 4, 4],
    "4_1_2_4": [4, 1, 2, 4],
    "2_9": [2, 9],
    "9_2": [9, 2],
    "prompt_then_ones": [6, 1, 1, 1, 1, 1],
    "with_nothing": [4, 0, 7],
}


def make(*patterns: Pattern, position: Position | None = None, cross: bool = False, **fields: Any) -> Transformer:
    """A tiny decoder in float64 with weights large enough for attention to matter."""
    at_input = position is not None and position.acts == "input"
    inner = None if at_input else position
    norm, ffn = RMSNorm(), DenseFFN(8)
    memory = [CrossAttention(2)] if cross else []
    decoder = [Block.pre(Attention(4, 2, pattern=p, position=inner), *memory, ffn, norm=norm) for p in patterns]
    encoder = [Block.pre(Attention(4, pattern=Full()), ffn, norm=norm)] if cross else []
    embed = Embed(position=position if at_input else None)
    given = {"embed": embed, "encoder": encoder, "decoder": decoder, "final_norm": norm, **fields}
    model = TransformerSpec(dim=16, vocab_size=VOCAB, **given).build(dtype=torch.float64).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def ids(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def cut(tokens: Tokens, split: Iterable[int]) -> list[Tokens]:
    at = [0, *itertools.accumulate(split)]
    return [tokens.map(lambda t, a=a, b=b: t[:, a:b]) for a, b in itertools.pairwise(at)]  # type: ignore[misc]


@torch.inference_mode()
def by_pieces(model: Transformer, text: Tensor, split: list[int], cache: Cache | None = None, **kwargs: Any) -> Tensor:
    cache = cache or model.new_cache(text.shape[0], text.shape[1] + 2)
    tokens = kwargs.pop("tokens", None)
    pieces = cut(tokens, split) if tokens is not None else [None] * len(split)
    parts = text.split(split, 1)
    return torch.cat([model(part, t, cache=cache, **kwargs) for part, t in zip(parts, pieces, strict=True)], 1)


@torch.inference_mode()
def in_full(model: Transformer, text: Tensor, tokens: Tokens | None = None, **kwargs: Any) -> Tensor:
    return model(text, tokens, **{"kernel": "reference", **kwargs})


def same(a: Tensor, b: Tensor, close: float = CLOSE) -> None:
    torch.testing.assert_close(a, b, atol=close, rtol=0)


def first_piece_holds_the_prefix(pattern: Pattern, split: list[int]) -> bool:
    return split[0] >= (pattern.frontier() or 0)


# -- every pattern, every position, every split -----------------------------------------------------------------------


def splits() -> list[Any]:
    """Patterns × splits; those that seldom tell more than others are marked slow."""
    often, telling = ("3_4_4", "prompt_then_ones"), ("causal", "window_3", "prefix")
    return [
        pytest.param(
            PATTERNS[p], SPLITS[s], id=f"{p}-{s}", marks=[] if s in often or p in telling else pytest.mark.slow
        )
        for p, s in itertools.product(PATTERNS, SPLITS)
    ]


@pytest.mark.parametrize(("pattern", "split"), splits())
def test_fault_16_any_split(pattern: Pattern, split: list[int]) -> None:
    model, text = make(pattern, position=Rotary(base=50.0)), ids()
    if not first_piece_holds_the_prefix(pattern, split):
        with pytest.raises(ValueError, match="the first piece must hold the whole prefix of 4 tokens"):
            by_pieces(model, text, split)
        return
    same(by_pieces(model, text, split), in_full(model, text))


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(3)], ids=["causal", "window_3"])
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_any_position(position: Position | None, pattern: Pattern) -> None:
    model, text = make(pattern, position=position), ids()
    cache = model.new_cache(2, 20)
    full = in_full(model, text, context_len=cache.max_len)
    same(by_pieces(model, text, [5, 3, 1, 1, 1], cache), full)
    assert (full - in_full(model, text.flip(0), context_len=20)).abs().max() > 0.01


def test_a_position_scheme_does_something() -> None:
    """The test above would be worth little for schemes that change nothing."""
    text = ids()
    torch.manual_seed(1)
    outs = []
    for position in POSITIONS.values():
        torch.manual_seed(1)
        outs.append(in_full(make(Causal(), position=position), text, context_len=20))
    for (a, x), (b, y) in itertools.combinations(zip(POSITIONS, outs, strict=True), 2):
        assert (x - y).abs().max() > 1e-4, (a, b)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_layers_with_other_patterns_share_one_cache(kernel: str) -> None:
    patterns = [Causal() & Window(3), Causal(), Causal() & Window(3), Causal() & Window(5), Causal() | Prefix(3)]
    model, text = make(*patterns, position=Alibi()), ids()
    full = in_full(model, text)
    for split in ([4, 5, 1, 1], [3, 1, 1, 6]):
        same(by_pieces(model, text, split, kernel=kernel), full)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_fault_16_heads_with_patterns_of_their_own(split: list[int]) -> None:
    """The cache reaches as far back as the head that looks farthest."""
    chunks, window = Causal() & Chunk(4), Causal() & Window(5)
    model, text = make(PerHead((chunks, window)), PerHead((chunks, Causal())), position=Alibi()), ids()
    cache = model.new_cache(2, 13)
    same(by_pieces(model, text, split, cache), in_full(model, text, kernel=ByHead([Reference()])))
    assert cache.nbytes == 8 * 2 * 2 * (5 + 13) * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_whole_grid(pattern: Pattern, position: Position | None, split: list[int]) -> None:
    if not first_piece_holds_the_prefix(pattern, split):
        pytest.skip("this split cuts the prefix, which is refused (tested above)")
    model, text = make(pattern, position=position), ids()
    cache = model.new_cache(2, 20)
    same(by_pieces(model, text, split, cache), in_full(model, text, context_len=20))


# -- batches of different lengths -------------------------------------------------------------------------------------

LENGTHS = [5, 3, 1]


def prompts(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Three texts of 11 ids, their prompts in one padded batch, and which of it is real."""
    texts = list(ids(3))
    batch, keep = ids(3, max(LENGTHS)), torch.zeros(3, max(LENGTHS), dtype=torch.bool)
    for i, (text, n) in enumerate(zip(texts, LENGTHS, strict=True)):
        where = slice(-n, None) if side == "left" else slice(0, n)
        batch[i, where], keep[i, where] = text[:n], True
    return texts, batch, keep


RAGGED = ["causal", "window_1", "window_3", "window_longer", "far_past", "home_made_window", "chunk"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        *[(name, "rotary_half") for name in RAGGED],
        ("window_3", "learned"),
        ("window_3", "alibi"),
        ("causal", "relative_bias"),
    ],
)
@torch.inference_mode()
def test_fault_10_ragged_batches(name: str, position: str, side: str) -> None:
    model = make(PATTERNS[name], Causal(), position=POSITIONS[position])
    texts, batch, keep = prompts(side)
    right = [in_full(model, text[None])[0] for text in texts]
    cache, tokens = model.new_cache(3, 16), Tokens.padded(keep)
    prefill = model(batch, tokens, cache=cache)
    for i, n in enumerate(LENGTHS):
        same(prefill[i, keep[i]], right[i][:n])
    for step in range(5):
        tokens = tokens.after()
        new = torch.stack([text[n + step] for text, n in zip(texts, LENGTHS, strict=True)])[:, None]
        logits = model(new, tokens, cache=cache)
        for i, n in enumerate(LENGTHS):
            same(logits[i, 0], right[i][n + step])


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_ragged_batches_with_several_tokens_a_step(side: str) -> None:
    model = make(Causal() & Window(3), Causal(), position=Rotary(base=50.0))
    texts, batch, keep = prompts(side)
    cache, tokens = model.new_cache(3, 16), Tokens.padded(keep)
    model(batch, tokens, cache=cache)
    for begin, length in ((0, 2), (2, 4)):
        tokens = tokens.after(length)
        new = torch.stack([t[n + begin : n + begin + length] for t, n in zip(texts, LENGTHS, strict=True)])
        logits = model(new, tokens, cache=cache)
        for i, n in enumerate(LENGTHS):
            same(logits[i], in_full(model, texts[i][None])[0, n + begin : n + begin + length])


@pytest.mark.parametrize("name", ["causal", "window_3", "window_1", "prefix"])
@torch.inference_mode()
def test_rows_that_end_early(name: str) -> None:
    """A finished row is fed padding (segment -1), whatever its id, and changes nothing for itself and others."""
    model, text = make(PATTERNS[name], Causal(), position=Rotary(base=50.0)), ids()
    right, cache = in_full(model, text), model.new_cache(2, 16)
    model(text[:, :5], cache=cache)
    for t in range(5, LENGTH):
        over = torch.tensor([[False], [5 < t < 9]])  # row 1 pauses, and then goes on where it was
        at = torch.tensor([[t], [t if t <= 5 else t - 3 if t >= 9 else 1]])
        fed = torch.where(over, ids(2, 1), text.gather(1, at))
        logits = model(fed, Tokens(at, -over.long()), cache=cache)
        same(logits[0, 0], right[0, t])
        if not over[1]:
            same(logits[1, 0], right[1, int(at[1])])


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(5)], ids=["line", "ring"])
@torch.inference_mode()
def test_text_that_begins_later(pattern: Pattern) -> None:
    """Positions need not begin at 0: slots are found all the same."""
    model, text = make(pattern, position=Rotary(base=50.0)), ids()
    for start in (1, 3, 103):
        for split in ([2, 3, 6], [2, 1, 1, 7]):
            cache, at, parts = model.new_cache(2, 12), 0, []
            for length in split:
                tokens = Tokens.arange(2, length, start=start + at)
                parts.append(model(text[:, at : at + length], tokens, cache=cache))
                at += length
            same(torch.cat(parts, 1), in_full(model, text), 1e-6)  # rotary phases are kept in float32


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(5)], ids=["line", "ring"])
@torch.inference_mode()
def test_plain_text_behind_padding(pattern: Pattern) -> None:
    """What was padding once stays hidden, though the next piece has none."""
    model, text = make(pattern, position=Learned(24)), ids(1)
    first = Tokens.padded(torch.tensor([[False, True, True, False]]))
    rest = Tokens.arange(1, 7, start=4)
    right = in_full(model, text, Tokens.cat([first, rest]))
    for split in ([7], [1] * 7, [3, 1, 3]):
        cache, at = model.new_cache(1, 12), 4
        model(text[:, :4], first, cache=cache)
        for length in split:
            logits = model(text[:, at : at + length], Tokens.arange(1, length, start=at), cache=cache)
            same(logits, right[:, at : at + length])
            at += length


@torch.inference_mode()
def test_padding_pieces_of_a_prompt() -> None:
    """A left-padded prompt read in pieces: the first piece of a row may be padding alone."""
    text, keep = ids(2, 9), torch.ones(2, 9, dtype=torch.bool)
    keep[0, :5] = False
    for pattern in (Causal(), Causal() & Window(3), Causal() | Prefix(3)):
        model = make(pattern, position=Rotary(base=50.0))
        split = [3, 6] if pattern.frontier() == 0 else [4, 5]
        logits = by_pieces(model, text, split, tokens=Tokens.padded(keep))
        same(logits[0, 5:], in_full(model, text[:1, 5:])[0])
        same(logits[1], in_full(model, text[1:])[0])


# -- packed documents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "window_3", "window_1"])
@pytest.mark.parametrize("split", [[11], [8, 1, 1, 1], [5, 6], [2, 3, 1, 5]], ids=str)
def test_fault_12_packed_documents_then_decode(name: str, split: list[int]) -> None:
    model, text = make(PATTERNS[name], position=Rotary(base=50.0)), ids()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [4, 4, 4, 4, 2, 3, 3, 3, 3, 3, 3]])
    logits = by_pieces(model, text, split, tokens=Tokens.packed(documents))
    for row, begin, end in ((0, 0, 3), (0, 3, 11), (1, 0, 4), (1, 4, 5), (1, 5, 11)):
        same(logits[row, begin:end], in_full(model, text[row : row + 1, begin:end])[0])


@torch.inference_mode()
def test_packed_prefill_then_after() -> None:
    model, text = make(Causal() & Window(3), Causal(), position=Learned(24)), ids(1)
    cache, tokens = model.new_cache(1, 16), Tokens.packed(torch.tensor([[7, 7, 7, 9, 9]]))
    model(text[:, :5], tokens, cache=cache)
    right = in_full(model, text[:, 3:])
    for t in range(5, LENGTH):
        tokens = tokens.after()
        same(model(text[:, t : t + 1], tokens, cache=cache)[:, 0], right[:, t - 3])


def test_a_packed_document_whose_prefix_is_cut_is_refused() -> None:
    """Also if an earlier document of the row was long enough."""
    model, text = make(Causal() | Prefix(3)), ids(1)
    documents = Tokens.packed(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]))
    same(by_pieces(model, text, [7, 4], tokens=documents)[:, 4:], in_full(model, text[:, 4:]))
    same(by_pieces(model, text, [4, 7], tokens=documents)[:, 4:], in_full(model, text[:, 4:]))
    with pytest.raises(ValueError, match="first piece must hold the whole prefix of 3 tokens"):
        by_pieces(model, text, [6, 5], tokens=documents)


# -- encoder-decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [[11], [1] * 11, [3, 4, 4], [6, 1, 1, 3]], ids=str)
@torch.inference_mode()
def test_fault_16_cross_attention(split: list[int]) -> None:
    model, text, source = make(Causal(), Causal() & Window(3), cross=True, position=Alibi()), ids(), ids(2, 6)
    keep = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    memory = model.encode(source, Tokens.padded(keep))
    cache = model.new_cache(2, 16)
    logits = by_pieces(model, text, split, cache, memory=memory)
    same(logits[:1], in_full(model, text[:1], source=source[:1]))
    same(logits[1:], in_full(model, text[1:], source=source[1:, 2:5]))
    assert cache.nbytes == 8 * 2 * (2 * 16 * 2 * 4 + 2 * 3 * 2 * 4 + 2 * 2 * 6 * 2 * 8)


@torch.inference_mode()
def test_the_source_is_projected_once() -> None:
    model, text = make(Causal(), cross=True), ids(2, 4)
    memory, cache, calls = model.encode(ids(2, 6)), model.new_cache(2, 8), []
    assert model.decoder is not None
    project = model.decoder.layers[0].cross.op.k  # type: ignore[union-attr]
    project.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    by_pieces(model, text, [1] * 4, cache, memory=memory)
    assert len(calls) == 1


@torch.inference_mode()
def test_a_cache_refuses_another_source() -> None:
    model, text = make(Causal(), cross=True), ids(2, 4)
    cache = model.new_cache(2, 8)
    model(text[:, :2], memory=model.encode(ids(2, 6)), cache=cache)
    with pytest.raises(ValueError, match="filled from another encoder output: make a new cache"):
        model(text[:, 2:], memory=model.encode(ids(2, 6)), cache=cache)


@pytest.mark.parametrize("document", [[5, 5, 5, 5], [5, 5, 5, -1], [0, 0, 0, 0]], ids=str)
@torch.inference_mode()
def test_a_document_finds_its_source(document: list[int]) -> None:
    """Whatever number it has, and whether or not it fills its row."""
    model, text, source = make(Causal(), cross=True), ids(1, 4), ids(1, 3)
    number = document[0]
    tokens, source_tokens = Tokens.packed(torch.tensor([document])), Tokens.packed(torch.full((1, 3), number))
    logits = model(text, tokens, source=source, source_tokens=source_tokens)
    same(logits[tokens.real], in_full(model, text, source=source)[tokens.real])


# -- capacity ---------------------------------------------------------------------------------------------------------


def greedy(model: Transformer, prompt: Tensor, steps: int, max_len: int | None) -> tuple[Tensor, Tensor]:
    text, cache, seen = prompt, None, []
    if max_len is not None:
        cache = model.new_cache(prompt.shape[0], max_len)
    new = prompt
    with torch.inference_mode():
        for _ in range(steps):
            logits = (model(text) if cache is None else model(new, cache=cache))[:, -1]
            new = logits.argmax(-1, keepdim=True)
            text = torch.cat((text, new), 1)
            seen.append(logits)
    return text, torch.stack(seen)


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(4)], ids=["line", "ring"])
@pytest.mark.parametrize("max_len", [11, 64])
def test_fault_15_capacity_does_not_matter(max_len: int, pattern: Pattern) -> None:
    model, prompt = make(pattern, pattern, position=Rotary(base=50.0)), ids(2, 6)
    text, logits = greedy(model, prompt, 5, None)
    cached_text, cached_logits = greedy(model, prompt, 5, max_len)
    assert cached_text.tolist() == text.tolist()
    same(cached_logits, logits)


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(4)], ids=["line", "ring"])
@torch.inference_mode()
def test_fault_15_too_much_is_refused_before_anything_is_overwritten(pattern: Pattern) -> None:
    model, text = make(pattern, pattern, position=Rotary(base=50.0)), ids()
    right, cache = in_full(model, text), model.new_cache(2, 8)
    model(text[:, :6], cache=cache)
    before = [(store.k.clone(), store.v.clone()) for store, _ in cache.stores]  # type: ignore[union-attr]
    for piece in (text[:, 6:9], text[:, 6:]):
        with pytest.raises(
            ValueError, match=rf"the cache holds 8 tokens, of which 6 are used, so {piece.shape[1]} more do not fit"
        ):
            model(piece, cache=cache)
    assert cache.used == 6
    for (store, _), (k, v) in zip(cache.stores, before, strict=True):
        assert torch.equal(store.k, k)  # type: ignore[union-attr]
        assert torch.equal(store.v, v)  # type: ignore[union-attr]
    same(model(text[:, 6:8], cache=cache), right[:, 6:8])
    with pytest.raises(ValueError, match="so 1 more do not fit: make it with max_len=9 or more"):
        model(text[:, 8:9], cache=cache)


@pytest.mark.parametrize("window", [1, 3, 8, 12, 40])
def test_a_ring_has_exactly_window_slots(window: int) -> None:
    max_len, batch = 12, 2
    cache = make(Causal() & Window(window)).new_cache(batch, max_len)
    heads, width, of_keys_and_values, float64 = 2, 4, 2, 8
    assert cache.nbytes == batch * min(window, max_len) * heads * width * of_keys_and_values * float64
    mixed = make(Causal() & Window(window), Causal()).new_cache(batch, max_len)
    assert mixed.nbytes == cache.nbytes + batch * max_len * heads * width * of_keys_and_values * float64


@torch.inference_mode()
def test_a_ring_turns_many_times() -> None:
    model, text = make(Causal() & Window(3), position=Rotary(base=50.0)), ids(2, 20)
    full = in_full(model, text)
    for split in ([1] * 20, [7, 7, 6], [2, 1] * 6 + [2], [1, 3, 1, 15]):
        same(by_pieces(model, text, split), full)


@torch.inference_mode()
def test_feeding_tokens_again_is_appending() -> None:
    """Documented behaviour: `ids` come after what the cache holds."""
    model, text = make(Causal(), position=Rotary(base=50.0)), ids(2, 4)
    cache = model.new_cache(2, 8)
    model(text, cache=cache)
    same(model(text, cache=cache), in_full(model, torch.cat((text, text), 1))[:, 4:])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [Full(), Window(3), ~Causal(), Causal() | Window(2), Stride()], ids=str)
def test_patterns_that_look_ahead_are_refused(pattern: Pattern) -> None:
    with pytest.raises(SpecError, match=r"decoder.0.mixer: pattern .* looks ahead, which a decoder must not"):
        make(pattern)
    with pytest.raises(SpecError, match="looks ahead, so decoding with a cache would differ"):
        Cache(1, 4, torch.float32, torch.device("cpu")).keys_values(1, 4, pattern)


def test_other_batches_are_refused() -> None:
    model = make(Causal())
    with torch.inference_mode(), pytest.raises(ValueError, match="the cache is for 2 rows, but 3 are given"):
        model(ids(3, 2), cache=model.new_cache(2, 4))


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(2)], ids=["line", "ring"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all_weights", "embedding_frozen"])
def test_gradients_are_refused_and_the_cache_is_still_good(pattern: Pattern, frozen: bool) -> None:
    model, text = make(pattern), ids(2, 4)
    model.tokens.weight.requires_grad_(not frozen)
    right, cache = in_full(model, text), model.new_cache(2, 8)
    with torch.inference_mode():
        model(text[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"a cache keeps no gradients: call the model under torch.inference_mode"):
        model(text[:, 3:], cache=cache)
    assert cache.used == 3
    with torch.inference_mode():
        same(model(text[:, 3:], cache=cache), right[:, 3:])


def test_frozen_models_need_no_inference_mode() -> None:
    model, text = make(Causal()).requires_grad_(False), ids(2, 4)
    same(model(text, cache=model.new_cache(2, 4)), in_full(model, text))


def test_an_encoder_has_no_cache() -> None:
    block = Block.pre(Attention(2, pattern=Full()), norm=LayerNorm())
    model = TransformerSpec(dim=8, vocab_size=VOCAB, encoder=cycle([block], 1)).build()
    with pytest.raises(ValueError, match="only a decoder generates"):
        model.new_cache(1, 4)


@pytest.mark.parametrize("max_len", [0, -1])
def test_an_empty_cache_is_refused(max_len: int) -> None:
    with pytest.raises(ValueError, match=f"`max_len` must be at least 1, but is {max_len}"):
        make(Causal()).new_cache(1, max_len)


# -- how often masks are made -----------------------------------------------------------------------------------------


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Pattern]:
    """The patterns that were asked for a mask."""
    asked: list[Pattern] = []
    mask = Pattern.mask

    def counting(self: Pattern, q: Tokens, k: Tokens) -> Tensor:
        asked.append(self)
        return mask(self, q, k)

    monkeypatch.setattr(Pattern, "mask", counting)
    return asked


@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(3)], ids=["causal", "window"])
@torch.inference_mode()
def test_plain_decoding_makes_no_mask(pattern: Pattern, masks: list[Pattern]) -> None:
    model, text = make(pattern, pattern, pattern, position=Rotary(base=50.0)), ids()
    cache = model.new_cache(2, 16)
    model(text[:, :3], cache=cache)
    for t in range(3, LENGTH):
        model(text[:, t : t + 1], cache=cache)
    assert masks == []


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("position", [None, Alibi(), RelativeBias()], ids=["none", "alibi", "relative_bias"])
@torch.inference_mode()
def test_a_mask_once_for_each_pattern_and_step(position: Position | None, kernel: str, masks: list[Pattern]) -> None:
    local, wide = Causal() & Window(3), Causal()
    model, text = make(local, wide, local, wide, local, position=position), ids()
    cache, keep = model.new_cache(2, 16), torch.ones(2, 4, dtype=torch.bool)
    keep[0, 0] = False
    tokens = Tokens.padded(keep)
    model(text[:, :4], tokens, cache=cache, kernel=kernel)
    assert sorted(masks, key=str) == sorted([local, wide], key=str)
    for t in range(4, 8):
        masks.clear()
        tokens = tokens.after()
        model(text[:, t : t + 1], tokens, cache=cache, kernel=kernel)
        assert sorted(masks, key=str) == sorted([local, wide], key=str)
