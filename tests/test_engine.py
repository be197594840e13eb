"""Continuous batching: each request gets the tokens that `generate` gives it alone, whoever comes and goes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.generate.engine import Engine, Event

VOCAB, MAX_LEN = 29, 48

MIXERS: dict[str, tuple[Any, Any]] = {
    "full": (af.Attention(2, position=af.Rotary()), None),
    "grouped": (af.Attention(4, 2), None),
    "window": (af.Attention(2, pattern=af.Causal() & af.Window(5), position=af.Rotary()), None),
    "sinks": (af.Attention(2, pattern=af.Causal() & (af.Window(4) | af.Prefix(2)), position=af.Rotary()), None),
    "linear": (af.LinearAttention(2), None),
    "recurrent": (af.Recurrent("lstm"), None),
    "learned": (af.Attention(2), af.Learned(MAX_LEN)),
    "alibi": (af.Attention(2, position=af.Alibi()), None),
    "relative_bias": (af.Attention(2, position=af.RelativeBias(num_buckets=8, max_distance=16)), None),
    "prefix": (af.Attention(2, pattern=af.Causal() | af.Prefix(6), position=af.Rotary()), None),
}


T5_BIAS = af.RelativeBias(num_buckets=8, max_distance=16, bidirectional=True)
SOURCES: dict[str, tuple[Any, Any, Any]] = {
    "t5": (
        af.Block.pre(
            af.Attention(2, pattern=af.Window(4), position=T5_BIAS), af.DenseFFN(8, bias=False), norm=af.RMSNorm()
        ),
        af.Block.pre(
            af.Attention(2, position=T5_BIAS.replace(bidirectional=False)),
            af.CrossAttention(2, scale=1.0),
            af.DenseFFN(8, bias=False),
            norm=af.RMSNorm(),
        ),
        None,
    ),
    "bart": (
        af.Block.post(af.Attention(2, pattern=af.Full(), bias=("q",)), af.DenseFFN(8), norm=af.LayerNorm()),
        af.Block.post(
            af.Attention(2, bias=("q",)), af.CrossAttention(2, 1, bias=("k",)), af.DenseFFN(8), norm=af.LayerNorm()
        ),
        af.Learned(MAX_LEN, offset=2),
    ),
}


def build(name: str = "full", *others: str) -> af.Transformer:
    """A tiny decoder, or encoder-decoder, in float64, with weights large enough for every token to matter."""
    if name in SOURCES:
        encoder, decoder, position = SOURCES[name]
        stacks = {"encoder": (encoder,) * 2, "decoder": (decoder,) * 2}
    else:
        position, names = MIXERS[name][1], (name, *(others or (name,)))
        stacks = {"decoder": tuple(af.Block.pre(MIXERS[n][0], af.DenseFFN(8), norm=af.RMSNorm()) for n in names)}
    embed = af.Embed(position=position, tied=False)
    model = af.TransformerSpec(8, VOCAB, embed=embed, **stacks).build(dtype=torch.float64).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def prompt(chance: random.Random, least: int = 6, most: int = 30) -> list[int]:
    """Half of them begin with the same tokens."""
    own = [chance.randrange(VOCAB) for _ in range(chance.randint(least, most))]
    return [*range(20), *own[: most - 20]] if chance.random() < 0.5 else own


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Shapes are not checked, which takes longer than the sums: for what other tests run with checks."""
    known = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", known)


@unchecked()
def alone(model: af.Transformer, ids: list[int], source: list[int] | None = None, **choices: Any) -> af.Generation:
    """What `generate` makes of one prompt."""
    return af.generate(model, [ids], source=None if source is None else torch.tensor([source]), **choices)


def drive(engine: Engine, most: int = 1000) -> dict[int, list[Event]]:
    """All events until nothing is left to do, by request."""
    events: dict[int, list[Event]] = {}
    for _ in range(most):
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
        if not engine.busy:
            return events
    raise AssertionError(f"busy after {most} steps")


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def first_logits_are_those_of_the_full_pass(engine: Engine, prompts: list[list[int]]) -> None:
    """Of prompts that are read, and make one token each."""
    seen: list[Tensor] = []
    hook = engine.model.head.register_forward_hook(lambda module, given, result: seen.extend(result[0]))
    engine.run(prompts, max_new_tokens=1)
    hook.remove()
    for ids, logits in zip(prompts, seen, strict=True):
        whole = engine.model(torch.tensor([ids]))[0, -1]
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_requests_that_come_and_go_get_what_they_get_alone(name: str, seed: int) -> None:
    """Prompts of mixed lengths and choices, submitted at random steps; some are cancelled at random steps."""
    chance = random.Random(f"{name} {seed}")
    model, rows = build(name), chance.randint(1, 4)
    engine = Engine(model, max_rows=rows, max_len=MAX_LEN, prefill_chunk=chance.choice([3, 7, 64]), prefixes=2)
    come_and_go(engine, chance, 7, lambda: {"ids": prompt(chance), "max_new_tokens": chance.choice([1, 4, 18, 30])})


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_requests_with_sources_get_what_they_get_alone(name: str, rows: int) -> None:
    """Sources of 1 to 20 tokens beside prompts of 1 to 5, read in pieces of 3."""
    chance = random.Random(f"{name} {rows}")
    engine = Engine(build(name), max_rows=rows, max_len=MAX_LEN, prefill_chunk=3)

    def ask() -> dict[str, Any]:
        ids, source = ([chance.randrange(VOCAB) for _ in range(chance.choice(n))] for n in ((1, 1, 5), (1, 3, 8, 20)))
        return {"ids": ids, "source": source, "max_new_tokens": chance.choice([1, 4, 12])}

    come_and_go(engine, chance, 8, ask)


@unchecked()
def come_and_go(engine: Engine, chance: random.Random, count: int, ask: Callable[[], dict[str, Any]]) -> None:
    """Submits, cancels and steps at random, and compares with `generate`."""
    asked: dict[int, dict[str, Any]] = {}
    said: dict[int, list[Event]] = {}
    cancelled: set[int] = set()
    for step in range(400):
        if len(asked) < count and chance.random() < 0.4:
            choices = ask() | {
                "sampling": af.Sampling(temperature=chance.choice([0.0, 1.0]), top_k=8, seed=step),
                "end_ids": [chance.randrange(VOCAB), 3],
                "min_new_tokens": chance.choice([0, 5]),
            }
            asked[engine.submit(**choices)] = choices
        if asked and chance.random() < 0.04:
            number = chance.choice(list(asked))
            ended = any(event.reason for event in said.get(number, []))
            assert engine.cancel(number) == (not ended and number not in cancelled)
            cancelled |= set() if ended else {number}
        for event in engine.step():
            assert event.request not in cancelled
            said.setdefault(event.request, []).append(event)
        assert engine.running <= engine.max_rows
        if len(asked) == count and not engine.busy:
            break
    assert not engine.busy
    for number, choices in asked.items():
        choices["max_new_tokens"] = min(choices["max_new_tokens"], MAX_LEN - len(choices["ids"]))
        lone, made = alone(engine.model, **choices), said.get(number, [])
        if number in cancelled:
            assert tokens(made) == lone.ids[0][: len(made)]
        else:
            assert (tokens(made), made[-1].reason) == (lone.ids[0], lone.reasons[0])
            assert [event.reason for event in made[:-1]] == [None] * (len(made) - 1)


def test_layers_of_several_kinds_and_penalties() -> None:
    model = build("window", "linear", "sinks", "recurrent")
    sampling = af.Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2, seed=(3, 1, 4))
    prompts = [[1, 2, 3], list(range(25)), [*range(20), 5]]
    made = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=4).run(prompts, sampling=sampling, max_new_tokens=9)
    for row, ids in enumerate(prompts):
        one = af.Sampling(**{**vars(sampling), "seed": sampling.seed[row]})  # type: ignore[index]
        assert made.ids[row] == alone(model, ids, sampling=one, max_new_tokens=9).ids[0]


def test_one_seed_for_a_list_gives_each_prompt_its_own() -> None:
    model = build()
    made = Engine(model, max_rows=2, max_len=MAX_LEN).run([[1], [1]], sampling=af.Sampling(seed=5), max_new_tokens=8)
    assert made.ids == [alone(model, [1], temperature=1.0, seed=s, max_new_tokens=8).ids[0] for s in (5, 6)]
    assert made.ids[0] != made.ids[1]


def test_first_come_first_served_and_a_row_is_free_at_once() -> None:
    engine = Engine(build(), max_rows=2, max_len=MAX_LEN)
    numbers = [engine.submit([1, 2], max_new_tokens=n) for n in (5, 2, 2, 2)]
    assert (engine.waiting, engine.running) == (4, 0)
    first = {}
    for step in range(30):
        for event in engine.step():
            first.setdefault(event.request, step)
    assert first == dict(zip(numbers, [0, 1, 2, 3], strict=True))


def test_a_step_gives_a_request_one_token_at_most() -> None:
    engine = Engine(build(), max_rows=3, max_len=MAX_LEN)
    for n in range(5):
        engine.submit([n, 2], max_new_tokens=4)
    while engine.busy:
        said = [event.request for event in engine.step()]
        assert len(said) == len(set(said))


def test_rows_go_on_while_a_long_prompt_is_read() -> None:
    engine = Engine(build(), max_rows=2, max_len=MAX_LEN, prefill_chunk=5)
    running = engine.submit([1, 2], max_new_tokens=20)
    engine.step()
    late = engine.submit(list(range(25)), max_new_tokens=2)
    said = [[event.request for event in engine.step()] for _ in range(5)]
    assert said == [[running]] * 4 + [[running, late]]


@pytest.mark.parametrize("when", ["queued", "read", "running", "alone"])
def test_fault_80_a_cancelled_request_says_nothing_more_and_frees_its_row(when: str) -> None:
    model = build("recurrent", "full")
    engine = Engine(model, max_rows=2 - (when == "alone"), max_len=MAX_LEN, prefill_chunk=4)
    stays = None if when == "alone" else engine.submit([1, 2, 3], max_new_tokens=12)
    goes = engine.submit(list(range(12)), max_new_tokens=20)
    said = [event for _ in range({"queued": 1, "read": 3, "running": 6, "alone": 6}[when]) for event in engine.step()]
    made = [event for event in said if event.request == goes]
    assert bool(made) == (when in ("running", "alone"))
    assert engine.cancel(goes)
    assert not engine.cancel(goes)
    follows = engine.submit([7, 7, 5], max_new_tokens=6)
    later = drive(engine)
    assert goes not in later
    assert tokens(later[follows]) == alone(model, [7, 7, 5], max_new_tokens=6).ids[0]
    if stays is not None:
        whole = [event for event in said if event.request == stays] + later[stays]
        assert tokens(whole) == alone(model, [1, 2, 3], max_new_tokens=12).ids[0]
    assert not engine.cancel(follows)
    assert not engine.cancel(99)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "prefix"])
def test_a_common_beginning_is_read_once_and_changes_nothing(name: str) -> None:
    """Four prompts of 20 equal tokens and 3 of their own: the first keeps the 20, the others read 3 each."""
    model = build(name)
    prompts = [[*range(20), n, n + 1, n + 2] for n in range(1, 5)]
    engine = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=8)
    plain = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=8, prefixes=0)
    made = engine.run(prompts, max_new_tokens=4)
    with unchecked():
        assert made == plain.run(prompts, max_new_tokens=4)
    assert made.ids == [alone(model, ids, max_new_tokens=4).ids[0] for ids in prompts]
    assert (engine.tokens_read, engine.tokens_reused) == (23 + 3 * 3, 3 * 20)
    assert (plain.tokens_read, plain.tokens_reused) == (4 * 23, 0)
    first_logits_are_those_of_the_full_pass(engine, [[*range(20), 8, n] for n in (1, 2)])


def test_a_beginning_is_found_among_prompts_that_have_ended() -> None:
    """The first prompt cannot know; the second keeps what they share; the third reads only what is its own."""
    engine = Engine(build(), max_rows=1, max_len=MAX_LEN)
    read = []
    for n in (1, 2, 3):
        before = engine.tokens_read
        engine.run([[*range(20), n, n, n]], max_new_tokens=2)
        read.append(engine.tokens_read - before)
    assert read == [23, 23, 3]


def test_what_most_prompts_share_is_kept_before_what_few_share() -> None:
    """All share 20 tokens, pairs share 3 more, which are not worth a copy; then some share 20 more, which are."""
    prompts = [[*range(20), *[first] * 3, n] for first in (1, 2) for n in (3, 4)]
    prompts += [[*range(20), *[9] * 20, n] for n in (5, 6, 7)]
    engine = Engine(build(), max_rows=1, max_len=MAX_LEN)
    engine.run(prompts, max_new_tokens=1)
    assert engine.tokens_read == 24 + 3 * 4 + 21 + 2 * 1


def test_equal_prompts_read_one_token_again_for_its_logits() -> None:
    model = build()
    engine = Engine(model, max_rows=2, max_len=MAX_LEN)
    made = engine.run([list(range(20))] * 3, max_new_tokens=5)
    assert made.ids == [alone(model, list(range(20)), max_new_tokens=5).ids[0]] * 3
    assert engine.tokens_read == 20 + 1 + 1


def test_short_common_beginnings_are_not_kept() -> None:
    engine = Engine(build(), max_rows=1, max_len=MAX_LEN)
    engine.run([[*range(15), n] for n in (1, 2, 3)], max_new_tokens=2)
    assert engine.tokens_reused == 0


def test_a_kept_beginning_serves_prompts_that_begin_with_it_only() -> None:
    model = build("window", "linear")
    engine = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=4)
    engine.keep(range(10))
    engine.keep(range(10))
    assert engine.tokens_read == 10
    prompts = [[*range(10), 3], [*range(9), 28, 3], list(range(10))]
    assert engine.run(prompts, max_new_tokens=6).ids == [alone(model, ids, max_new_tokens=6).ids[0] for ids in prompts]
    assert engine.tokens_reused == 10


def test_the_beginning_that_was_not_used_for_longest_goes() -> None:
    engine = Engine(build(), max_rows=1, max_len=MAX_LEN, prefixes=2)
    reused = []

    def ask(first: int) -> None:
        before = engine.tokens_reused
        engine.run([[first, first, 9]], max_new_tokens=1)
        reused.append(engine.tokens_reused - before)

    engine.keep([1, 1])
    engine.keep([2, 2])
    ask(1)
    engine.keep([3, 3])
    for first in (1, 2, 3):
        ask(first)
    assert reused == [2, 2, 0, 2]


def test_tokens_that_see_one_another_are_read_at_once() -> None:
    """A chunk or a split inside a prefix-LM's prefix would change what its first tokens say."""
    model = build("prefix")
    engine = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=2)
    first_logits_are_those_of_the_full_pass(engine, [[*range(20), n] for n in (1, 2)])
    assert engine.tokens_reused == 20
    with pytest.raises(ValueError, match="the first 6 tokens see one another, so a prompt must have as many, but this"):
        engine.submit([1, 2, 3, 4, 5])


def test_a_prompt_longer_than_a_window_and_a_full_row() -> None:
    model = build("window", "full")
    engine = Engine(model, max_rows=2, max_len=16, prefill_chunk=3)
    ids = list(range(13))
    made = engine.run([ids, [5]], max_new_tokens=100)
    assert made.ids == [alone(model, i, max_new_tokens=16 - len(i)).ids[0] for i in (ids, [5])]
    assert made.reasons == ["length", "length"]


def test_requests_are_refused_with_a_reason() -> None:
    engine = Engine(build(), max_len=8)
    for ids, why in (
        ([], "the prompt is empty: begin with a start token"),
        ([1] * 8, "a prompt of 8 tokens leaves no room in the engine's 8 positions"),
        ([1, 29], "ids must be 0 to 28, the vocabulary, but one is 29"),
        ([-1], "but one is -1"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.submit(ids)
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 1, but is 0"):
        engine.submit([1], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"one per row \(1\), but 2 are given"):
        engine.submit([1], sampling=af.Sampling(temperature=(0.0, 1.0)))
    assert not engine.busy


def test_engines_are_refused_with_a_reason() -> None:
    model = build()
    with pytest.raises(ValueError, match="nothing says how long a row may get: give `max_len`"):
        Engine(model)
    with pytest.raises(ValueError, match="`max_len` must be at most the model's 48 positions, but is 49"):
        Engine(build("learned"), max_len=49)
    assert Engine(build("learned")).max_len == 48
    with pytest.raises(ValueError, match="`max_rows` must be at least 1, but is 0"):
        Engine(model, max_len=8, max_rows=0)
    with pytest.raises(ValueError, match="this engine keeps no beginnings"):
        Engine(model, max_len=8, prefixes=0).keep([1])
    with pytest.raises(ValueError, match="a decoder alone reads no source: leave `max_source` out"):
        Engine(model, max_len=8, max_source=8)
    with pytest.raises(ValueError, match="`max_source` must be at most the model's 48 positions, but is 49"):
        Engine(build("bart"), max_source=49)
    with pytest.raises(ValueError, match="`max_source` must be at least 1, but is 0"):
        Engine(build("t5"), max_len=8, max_source=0)
    with pytest.raises(ValueError, match="`memory` counts the sources too, and nothing says how long one may get"):
        Engine(build("t5"), max_len=8, memory=10**9)
    with pytest.raises(ValueError, match="no beginning of an encoder-decoder can be kept"):
        Engine(build("t5"), max_len=8).keep([1])
    busy = Engine(model, max_len=8)
    busy.submit([1])
    with pytest.raises(ValueError, match="the engine has 1 requests, whose events would be lost"):
        busy.run([[1]])


@pytest.mark.parametrize(
    ("caches", "rows", "kept"), [(1, 1, 0), (2, 1, 1), (3, 2, 0), (5, 4, 0), (6, 4, 1), (99, 4, 2)]
)
def test_memory_bounds_all_caches(monkeypatch: pytest.MonkeyPatch, caches: int, rows: int, kept: int) -> None:
    """Counted as they are made: rows, the prompt that is read, and kept beginnings."""
    model = build()
    one = model.new_rows(1, MAX_LEN).nbytes
    engine = Engine(model, max_rows=4, max_len=MAX_LEN, memory=caches * one + one // 2, prefixes=2, prefill_chunk=9)
    assert (engine.max_rows, engine._kept.most) == (rows, kept)
    for n in range(8):
        engine.submit([*range(17), n % 3, n], max_new_tokens=20)
    most, running = 0, 0
    while engine.busy:
        with unchecked():
            engine.step()
        held = [engine._batch, engine._alone, *(cache for _, cache in engine._kept._kept)]
        held += [engine._reading.cache] if engine._reading else []
        most = max(most, sum(cache.nbytes for cache in held if cache is not None))
        running = max(running, engine.running)
    assert most <= caches * one
    assert running == rows
    assert (engine.tokens_reused > 0) == (kept > 0)


def test_memory_for_no_row_says_how_much_one_takes() -> None:
    model = build()
    one = model.new_rows(1, MAX_LEN).nbytes
    assert one == 2 * 2 * MAX_LEN * 8 * 8  # layers, keys and values, positions, width, bytes
    with pytest.raises(ValueError, match=f"a row of 48 positions takes {one} bytes, but `memory` is {one - 1}"):
        Engine(model, max_len=MAX_LEN, memory=one - 1)


def test_memory_bounds_caches_with_sources_too() -> None:
    """A row takes its source's keys and values; three rows leave room for two and one that is read."""
    model = build("bart")
    one = model.new_rows(1, MAX_LEN).nbytes + 2 * 2 * 20 * 4 * 8  # layers, keys and values, positions, width, bytes
    with pytest.raises(ValueError, match=f"a row of 48 positions takes {one} bytes"):
        Engine(model, max_source=20, memory=one - 1)
    engine = Engine(model, max_source=20, memory=3 * one)
    assert engine.max_rows == 2
    for n in range(6):
        engine.submit([n], source=[5] * (20 - n % 3), max_new_tokens=5)
    most = 0
    while engine.busy:
        with unchecked():
            engine.step()
        held = [engine._batch, engine._alone, engine._reading and engine._reading.cache]
        most = max(most, sum(cache.nbytes for cache in held if cache is not None))
        encoded = [request for request in engine._live.values() if request.memory is not None]
        assert len(encoded) == (engine._alone is not None)
    assert 2 * one <= most <= 3 * one


def test_a_source_is_read_once_whatever_the_prompt() -> None:
    """Also by prompts that are read in pieces, and that are equal: what they say depends on the source."""
    model, lengths = build("t5"), []
    prompts, sources = [list(range(20))] * 3, [[4, 5], [6, 7, 8, 9], [4]]
    lone = [alone(model, *one, max_new_tokens=6).ids[0] for one in zip(prompts, sources, strict=True)]
    assert model.encoder is not None
    model.encoder.register_forward_hook(lambda module, given, result: lengths.append(given[0].shape[1]))
    engine = Engine(model, max_rows=2, max_len=MAX_LEN, prefill_chunk=7)
    assert engine.run(prompts, sources=sources, max_new_tokens=6).ids == lone
    assert lone[0] != lone[1] != lone[2]
    assert lengths == [2, 4, 1]
    assert (engine.tokens_read, engine.tokens_reused) == (60, 0)


def test_an_unusable_source_ends_its_own_request_only() -> None:
    """Token 28 is NaN: it comes first, between others, and in a longer source than theirs."""
    model = build("t5")
    with torch.no_grad():
        model.tokens.weight[28] = torch.nan
    sources = [[28] * 3, [4, 5], [28] * 9, [6]]
    made = Engine(model, max_rows=2, max_len=MAX_LEN).run([[1]] * 4, sources=sources, max_new_tokens=6)
    assert made.ids[1::2] == [alone(model, [1], source, max_new_tokens=6).ids[0] for source in sources[1::2]]
    assert [reason.startswith("error: the largest logit") for reason in made.reasons] == [True, False] * 2


def test_sources_are_refused_with_a_reason() -> None:
    engine = Engine(build("t5"), max_len=8, max_source=5)
    for source, why in (
        (None, "an encoder-decoder generates from a source: give `source` ids"),
        ([], "the source is empty: give at least the end token"),
        ([1] * 6, "a source of 6 tokens is longer than the engine's 5: shorten it"),
        ([1, 29], "the source's ids must be 0 to 28, the vocabulary, but one is 29"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.submit([1], source=source)
    with pytest.raises(ValueError, match="1 sources are given for 2 prompts: give one for each"):
        engine.run([[1], [2]], sources=[[1]])
    with pytest.raises(ValueError, match="a decoder alone reads no source: leave `source` out"):
        Engine(build(), max_len=8).submit([1], source=[1])
    with pytest.raises(ValueError, match="longer than the engine's 48"):
        Engine(build("bart")).submit([1], source=[1] * 49)
    assert not engine.busy


class Only:
    """Allows a list of tokens, one after another; `fails` at one of its steps."""

    def __init__(self, script: list[int], fails: int = -1) -> None:
        self.script, self.fails, self.pushed = script, fails, []

    @property
    def done(self) -> bool:
        return len(self.pushed) == len(self.script)

    def allowed(self, vocab_size: int) -> Tensor:
        if len(self.pushed) == self.fails:
            raise KeyError("no such rule")
        return torch.arange(vocab_size) == self.script[len(self.pushed)]

    def push(self, token: int) -> None:
        self.pushed.append(token)


def test_a_guide_leads_its_own_request_only() -> None:
    model = build()
    engine = Engine(model, max_rows=3, max_len=MAX_LEN)
    free = engine.submit([1, 2], max_new_tokens=6)
    led = engine.submit([1, 2], max_new_tokens=6, guide=Only([4, 8, 15]))
    bad = engine.submit([1, 2], max_new_tokens=6, guide=Only([4, 8, 15], fails=2))
    events = drive(engine)
    assert tokens(events[free]) == alone(model, [1, 2], max_new_tokens=6).ids[0]
    assert (tokens(events[led]), events[led][-1].reason) == ([4, 8, 15], "end")
    assert tokens(events[bad]) == [4, 8]
    assert events[bad][-1] == Event(bad, None, "error", "'no such rule'")


@pytest.mark.parametrize("name", ["full", "window", "linear", "recurrent"])
def test_a_row_of_nan_ends_alone_and_leaves_nothing_behind(name: str) -> None:
    """Token 28 is NaN: of two requests that meet it, one reads it, the other is made to say it."""
    model = build(name)
    with torch.no_grad():
        model.tokens.weight[28] = torch.nan
    engine = Engine(model, max_rows=2, max_len=MAX_LEN)
    good = engine.submit([1, 2, 3], max_new_tokens=20)
    reads = engine.submit([1, 28, 3], max_new_tokens=20)
    says = engine.submit([1, 2], max_new_tokens=20, guide=Only([5, 28, 6, 7]))
    after = engine.submit([4, 5], max_new_tokens=8)
    events = drive(engine)
    assert tokens(events[good]) == alone(model, [1, 2, 3], max_new_tokens=20).ids[0]
    assert tokens(events[after]) == alone(model, [4, 5], max_new_tokens=8).ids[0]
    assert (tokens(events[reads]), tokens(events[says])) == ([], [5, 28])
    for number in (reads, says):
        assert events[number][-1].reason == "error"
        assert "must be finite" in str(events[number][-1].message)


def test_a_list_tells_which_prompt_failed() -> None:
    model = build()
    with torch.no_grad():
        model.tokens.weight[28] = torch.nan
    made = Engine(model, max_rows=2, max_len=MAX_LEN).run([[1], [28], [2]], max_new_tokens=2)
    assert [len(ids) for ids in made.ids] == [2, 0, 2]
    assert made.reasons[::2] == ["length", "length"]
    assert made.reasons[1].startswith("error: the largest logit")
