"""What a search, a guess or a server does to a cache: the rows go on as if they had been read that way at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anyformer import (
    Alibi,
    Attention,
    Block,
    Causal,
    CrossAttention,
    DenseFFN,
    Embed,
    LayerNorm,
    Learned,
    LinearAttention,
    Mixer,
    Prefix,
    Recurrent,
    Rotary,
    Tokens,
    Transformer,
    TransformerSpec,
    Window,
)
from anyformer.cache import Cache, Rows
from anyformer.model import States

VOCAB, CLOSE = 13, 1e-10


MIXERS: dict[str, Mixer] = {
    "full": Attention(2, position=Rotary()),
    "window": Attention(2, num_kv_heads=1, pattern=Causal() & Window(3), position=Alibi()),
    "sinks": Attention(2, pattern=Causal() & (Window(3) | Prefix(2)), position=Rotary()),
    "linear": LinearAttention(2),
    "recurrent": Recurrent("lstm"),
}


def build(mixer: Mixer, position: Learned | None = None, source: bool = False) -> Transformer:
    torch.manual_seed(0)
    cross = [CrossAttention(2)] if source else []
    block = Block.pre(mixer, *cross, DenseFFN(16), norm=LayerNorm())
    encoder = (Block.pre(Attention(2, pattern=Window(5)), DenseFFN(16), norm=LayerNorm()),) if source else ()
    spec = TransformerSpec(8, VOCAB, embed=Embed(position=position), encoder=encoder, decoder=(block, block))
    return spec.build(dtype=torch.float64).eval()


def read_with(model: Transformer, ids: list[int], source: Tensor, max_len: int) -> Rows:
    """A cache of one row that has read `ids` beside `source`."""
    cache = model.new_rows(1, max_len)
    model(torch.tensor([ids]), source=source, cache=cache)
    return cache


def beside(lengths: list[int], width: int) -> States:
    """What rows with sources of these lengths are told: which columns are real. Hidden states must not be read."""
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return States(torch.full((*real.shape, 8), torch.nan), Tokens.padded(real))


def text(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("before", [1, 2, 6])
def test_a_dropped_guess_leaves_no_trace(name: str, before: int) -> None:
    model, ids, guess = build(MIXERS[name]), text(2, before + 6), text(2, 4, seed=1)
    cache = model.new_cache(2, before + 10, slack=4)
    model(ids[:, :before], cache=cache)
    for wrong in (guess, guess[:, :1]):
        point = cache.point()
        model(wrong, cache=cache)
        if cache.drops:
            cache.drop(wrong.shape[1])
        else:
            cache.back(point)
    made = [model(ids[:, i : i + 1], cache=cache) for i in range(before, before + 2)]
    made.append(model(ids[:, before + 2 :], cache=cache))
    torch.testing.assert_close(torch.cat(made, 1), model(ids)[:, before:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", MIXERS)
def test_a_part_of_a_guess_may_stay(name: str) -> None:
    model, ids = build(MIXERS[name]), text(1, 12)
    wrong = torch.cat((ids[:, :7], text(1, 3, seed=2)), 1)
    cache = model.new_cache(1, 12, slack=3)
    if not cache.drops:
        model(ids[:, :2], cache=cache)
        with pytest.raises(ValueError, match="sums up"):
            cache.drop(1)
        return
    model(wrong[:, :5], cache=cache)
    model(wrong[:, 5:], cache=cache)
    cache.drop(3)
    torch.testing.assert_close(model(ids[:, 7:], cache=cache), model(ids)[:, 7:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", ["full", "window", "sinks"])
def test_a_guess_is_dropped_from_rows_of_different_lengths(name: str) -> None:
    model, ids = build(MIXERS[name]), text(2, 9)
    keep = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
    tokens = Tokens.padded(keep)
    cache = model.new_cache(2, 16, slack=2)
    model(ids, tokens, cache=cache)
    guess = tokens.after(2)
    model(text(2, 2, seed=3), guess, cache=cache)
    cache.drop(2)
    new = text(2, 1, seed=4)
    found = model(new, tokens.after(), cache=cache)[:, 0]
    for row, padding in ((0, 3), (1, 0)):
        alone = model(torch.cat((ids[row, padding:], new[row]))[None])[0, -1]
        torch.testing.assert_close(found[row], alone, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("count", "message"), [(5, "holds 4 tokens"), (3, "rings keep 2"), (-1, "cannot be dropped")])
def test_what_cannot_be_dropped_is_refused(count: int, message: str) -> None:
    model = build(MIXERS["window"])
    cache = model.new_cache(1, 6, slack=0 if count == 5 else 2)
    if count == 3:
        cache = model.new_cache(1, 12, slack=2)
        model(text(1, 6), cache=cache)
    model(text(1, 4), cache=cache)
    with pytest.raises(ValueError, match=message):
        cache.drop(count)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_taken_anew(name: str, padded: bool) -> None:
    """Two prompts, three beams each, then beams change places: each goes on with the text of the one it came from."""
    model, ids = build(MIXERS[name]), text(2, 5)
    tokens = Tokens.padded(torch.tensor([[False, False, True, True, True], [True] * 5])) if padded else None
    first = model.new_cache(2, 9)
    model(ids, tokens, cache=first)
    cache = first.repeat(3)
    now = (tokens or Tokens.arange(2, 5)).take(torch.arange(2).repeat_interleave(3)).after()
    texts = [ids[row, 2 * padded * (row == 0) :].tolist() for row in (0, 0, 0, 1, 1, 1)]
    for step, rows in enumerate(([0, 1, 2, 3, 4, 5], [2, 2, 0, 3, 5, 4], [1, 0, 0, 5, 5, 5])):
        cache.take(torch.tensor(rows))
        new = text(6, 1, seed=step)
        texts = [[*texts[row], int(new[i])] for i, row in enumerate(rows)]
        found = model(new, now, cache=cache)[:, 0]
        now = now.after()
        for row, one in enumerate(texts):
            torch.testing.assert_close(found[row], model(torch.tensor([one]))[0, -1], rtol=0, atol=CLOSE)


def test_the_rows_of_a_copy_are_its_own() -> None:
    for mixer in MIXERS.values():
        model, ids = build(mixer), text(1, 6)
        cache = model.new_cache(1, 6)
        model(ids[:, :3], cache=cache)
        other = cache.copy()
        model(text(1, 3, seed=5), cache=other)
        torch.testing.assert_close(model(ids[:, 3:], cache=cache), model(ids)[:, 3:], rtol=0, atol=CLOSE)


def test_cross_attention_goes_with_its_rows() -> None:
    model = build(MIXERS["full"], source=True)
    source, ids = text(2, 7, seed=1), text(2, 3)
    memory = model.encode(source)
    cache = model.new_cache(2, 5)
    model(ids, memory=memory, cache=cache)
    rows = torch.tensor([0, 0, 1, 1])
    cache, memory = cache.repeat(2), memory.take(rows)
    cache.take(torch.tensor([1, 1, 2, 2]))
    new = text(4, 1, seed=2)
    found = model(new, memory=memory, cache=cache)
    whole = model(torch.cat((ids[rows], new), 1), source=source[rows])[:, -1:]
    torch.testing.assert_close(found, whole, rtol=0, atol=CLOSE)
    with pytest.raises(ValueError, match="another encoder output"):
        model(new, memory=memory.take(rows), cache=cache)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("position", [None, Learned(20)])
def test_rows_come_and_go(name: str, position: Learned | None) -> None:
    """Three rows, of which one is free, one joins late, and one is taken by another text: each as if alone."""
    model = build(MIXERS[name], position)
    rows = model.new_rows(3, 20)
    texts: dict[int, list[int]] = {}

    def join(row: int, length: int, seed: int) -> None:
        prompt = text(1, length, seed=seed)
        single = model.new_rows(1, 20)
        model(prompt[:, : length // 2], cache=single)
        model(prompt[:, length // 2 :], cache=single)
        rows.put(row, single)
        texts[row] = prompt[0].tolist()

    join(0, 2, 1)
    for step in range(9):
        if step == 2:
            join(2, 9, 2)
        if step == 4:
            join(0, 4, 3)
        if step == 7:
            del texts[2]
        live = torch.tensor([[row in texts] for row in range(3)])
        pos = torch.tensor([[len(texts.get(row, ()))] for row in range(3)])
        new = text(3, 1, seed=10 + step)
        found = model(new, Tokens(pos, live.long() - 1), cache=rows)[:, 0]
        for row, one in texts.items():
            one.append(int(new[row]))
            torch.testing.assert_close(found[row], model(torch.tensor([one]))[0, -1], rtol=0, atol=CLOSE)


def test_rows_with_sources_come_and_go() -> None:
    """A short source; beside it a longer one, whose row then has a shorter one; then the longest, and the shortest."""
    model = build(MIXERS["full"], source=True)
    rows, widest = model.new_rows(3, 12), 0
    texts: dict[int, list[int]] = {}
    sources: dict[int, Tensor] = {}
    for step, (row, length) in enumerate([(0, 3), (1, 7), (1, 2), (0, 9), (0, 1)]):
        texts[row], sources[row] = text(2, seed=step).tolist(), text(1, length, seed=20 + step)
        rows.put(row, read_with(model, texts[row], sources[row], max_len=12))
        widest = max(widest, length)
        memory = beside([sources[row].shape[1] if row in sources else 0 for row in range(3)], widest)
        for again in range(2):
            pos = torch.tensor([[len(texts.get(row, ()))] for row in range(3)])
            seg = torch.tensor([[int(row in texts) - 1] for row in range(3)])
            new = text(3, 1, seed=40 + 2 * step + again)
            found = model(new, Tokens(pos, seg), memory=memory, cache=rows)[:, 0]
            for row, one in texts.items():
                one.append(int(new[row]))
                alone = model(torch.tensor([one]), source=sources[row])[0, -1]
                torch.testing.assert_close(found[row], alone, rtol=0, atol=CLOSE)
    assert rows.stores[0][1].nbytes == 2 * 3 * 9 * 8 * 8  # type: ignore[union-attr]


def test_a_source_leaves_nothing_behind_under_a_shorter_one() -> None:
    """Not even NaN, which would show through a mask, as 0 · NaN."""
    model, source = build(MIXERS["full"], source=True), text(1, 2, seed=1)
    rows, long = model.new_rows(1, 4), read_with(model, [1], text(1, 6), max_len=4)
    for store in (stores[1] for stores in long.stores):
        for buffer in store.buffers():  # type: ignore[union-attr]
            buffer.fill_(torch.nan)
    rows.put(0, long)
    rows.put(0, read_with(model, [1], source, max_len=4))
    found = model(torch.tensor([[2]]), Tokens.arange(1, 1, start=1), memory=beside([2], 6), cache=rows)
    torch.testing.assert_close(found, model(torch.tensor([[1, 2]]), source=source)[:, 1:], rtol=0, atol=CLOSE)


def test_a_copy_of_a_row_goes_on_with_its_source() -> None:
    """The source may be encoded anew for the copy, not for the original; what is put into one, the other never sees."""
    model, source, ids = build(MIXERS["full"], source=True), text(1, 5, seed=1), text(1, 4)
    cache = read_with(model, ids[0, :2].tolist(), source, max_len=6)
    copies = [cache.copy(), cache.copy()]
    assert [other.nbytes for other in copies] == [cache.nbytes] * 2
    copies[1].put(0, read_with(model, [3], text(1, 5, seed=2), max_len=6))
    found = model(ids[:, 2:], memory=model.encode(source), cache=copies[0])
    torch.testing.assert_close(found, model(ids, source=source)[:, 2:], rtol=0, atol=CLOSE)
    torch.testing.assert_close(cache.stores[0][1].buffers(), copies[0].stores[0][1].buffers())  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="another encoder output"):
        model(ids[:, 2:], memory=model.encode(source), cache=cache)


def test_a_row_that_has_read_no_source_is_refused() -> None:
    model = build(MIXERS["full"], source=True)
    with pytest.raises(ValueError, match="this row has read no source yet: let the model read a piece"):
        model.new_rows(2, 4).put(0, model.new_rows(1, 4))


def test_rows_end_where_their_positions_end() -> None:
    model = build(MIXERS["full"])
    rows = model.new_rows(1, 4)
    model(text(1, 4), cache=rows)
    with pytest.raises(ValueError, match="a row has 4 positions, but 5"):
        model(text(1, 1), Tokens.arange(1, 1, start=4), cache=rows)


def test_only_what_is_used_is_moved() -> None:
    """A free slot may hold anything, even NaN, and stays where it is."""
    model = build(MIXERS["full"])
    cache = model.new_cache(2, 50)
    model(text(2, 3), cache=cache)
    store = cache.stores[0][0]
    assert isinstance(cache, Cache)
    store.k[0, 3:] = torch.nan  # type: ignore[union-attr]
    cache.take(torch.tensor([1, 0]))
    assert store.k[0, 3:].isnan().all()  # type: ignore[union-attr]
    assert not store.k[1, 3:].isnan().any()  # type: ignore[union-attr]
