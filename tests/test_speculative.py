"""Speculative decoding gives the tokens, or the distribution, of plain decoding, in fewer passes."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_decode_equals_full import VOCAB, make
from torch import Tensor

import anyformer as af
from anyformer.generate.sampling import Sampling
from anyformer.generate.speculative import (
    Draft,
    Drafter,
    DraftModel,
    PromptLookup,
    Proposal,
    Reading,
    Speculation,
    Text,
    speculate,
)

GREEDY = Sampling(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 3, 1, 4]
LEARNED = 24


def recurring(*mixers: af.Mixer) -> af.Transformer:
    """Layers that sum up what they read, from which no token can be dropped."""
    return make(decoder=[af.Block.pre(mixer, af.DenseFFN(8), norm=af.RMSNorm()) for mixer in mixers])


WINDOW = af.Attention(4, 2, pattern=af.Causal() & af.Window(3), position=af.Rotary(base=50.0))

KINDS: dict[str, Callable[[], af.Transformer]] = {
    "full": lambda: make(af.Causal(), af.Causal(), position=af.Rotary(base=50.0)),
    "ring": lambda: make(af.Causal() & af.Window(3), af.Causal(), position=af.Rotary(base=50.0)),
    "rings": lambda: make(af.Causal() & af.Window(1), af.Causal() & af.Window(5), position=af.Rotary(base=50.0)),
    "sinks": lambda: make(af.Causal() & (af.Window(3) | af.Prefix(2)), position=af.Rotary(base=50.0)),
    "chunk": lambda: make(af.Causal() & af.Chunk(4), position=af.Rotary(base=50.0)),
    "prefix": lambda: make(af.Causal() | af.Prefix(4), position=af.Rotary(base=50.0)),
    "alibi": lambda: make(af.Causal() & af.Window(6), position=af.Alibi()),
    "learned": lambda: make(af.Causal(), position=af.Learned(LEARNED)),
    "dynamic_ntk": lambda: make(af.Causal(), position=af.Rotary(frequencies=af.DynamicNTK(factor=4, original_len=4))),
    "linear": lambda: recurring(af.LinearAttention(4, 2, position=af.Rotary(base=50.0))),
    "recurrent": lambda: recurring(af.Recurrent("gru")),
    "linear_and_ring": lambda: recurring(af.LinearAttention(4), WINDOW, af.Recurrent("lstm")),
    "encoder_decoder": lambda: make(af.Causal() & af.Window(3), af.Causal(), cross=True, position=af.Alibi()),
}


def nearly(model: af.Transformer, noise: float = 0.03) -> af.Transformer:
    """A model that often says the same."""
    other = model.spec.build(dtype=torch.float64).eval()
    other.load_state_dict(model.state_dict())
    for weight in other.parameters():
        weight.data += noise * torch.randn_like(weight)
    return other


DRAFTS: dict[str, Callable[[af.Transformer, int], Draft]] = {
    "same": lambda model, length: DraftModel(model, length),
    "nearly": lambda model, length: DraftModel(nearly(model), length),
    "other": lambda model, length: DraftModel(nearly(model, 1.0), length),
    "lookup": lambda model, length: PromptLookup(length),
}


def given(model: af.Transformer) -> dict[str, Any]:
    return {} if model.encoder is None else {"source": torch.tensor([[5, 6, 7, 8, 2, 1]])}


def plain(model: af.Transformer, count: int = 15, **choices: Any) -> list[int]:
    return af.generate(model, [PROMPT], max_new_tokens=count, **given(model), **choices).ids[0]


def run(model: af.Transformer, draft: Draft, count: int = 15, **choices: Any) -> tuple[list[int], Speculation]:
    sampling = choices.pop("sampling", GREEDY)
    made = speculate(model, PROMPT, draft, sampling, max_new_tokens=count, **given(model), **choices)
    return list(made), made


# -- greedy: the same tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "length"), [("same", 5), ("nearly", 3), ("lookup", 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind: str, draft: str, length: int) -> None:
    model = KINDS[kind]()
    ids, made = run(model, DRAFTS[draft](model, length), 15)
    assert ids == plain(model, 15)
    assert made.reason == "length"
    assert made.passes + made.accepted == len(ids)
    assert made.accepted == made.proposed if draft == "same" else made.accepted <= made.proposed


@pytest.mark.parametrize("kind", ["full", "ring", "linear_and_ring"])
def test_every_length_of_a_proposal(kind: str) -> None:
    model = KINDS[kind]()
    draft, right = nearly(model, 0.15), plain(model, 14)
    proposed = accepted = 0
    for length in range(1, 9):
        ids, made = run(model, DraftModel(draft, length), 14)
        assert ids == right
        proposed, accepted = proposed + made.proposed, accepted + made.accepted
    assert 0 < accepted < proposed


@pytest.mark.parametrize("kind", ["ring", "linear_and_ring"])
def test_a_draft_that_is_seldom_right(kind: str) -> None:
    model = KINDS[kind]()
    ids, made = run(model, DRAFTS["other"](model, 4))
    assert ids == plain(model)
    assert made.accepted < 0.5 * made.proposed


def test_positions_end_while_speculating() -> None:
    model = KINDS["learned"]()
    right = plain(model, 99)
    for draft, length in itertools.product(("same", "nearly", "lookup"), (1, 4, 8)):
        ids, made = run(model, DRAFTS[draft](model, length), 99)
        assert (ids, made.reason) == (right, "length")
        assert len(ids) == LEARNED - len(PROMPT)


@pytest.mark.parametrize("positions", [8, 9, 10, 12])
def test_a_draft_with_fewer_positions_proposes_until_they_end(positions: int) -> None:
    model, small = KINDS["full"](), make(af.Causal(), position=af.Learned(positions))
    ids, made = run(model, DraftModel(small))
    assert ids == plain(model)
    assert (made.proposed > 0) == (positions > len(PROMPT))


def test_drafts_of_another_kind() -> None:
    both, decoder = KINDS["encoder_decoder"](), KINDS["full"]()
    for model, draft in ((both, decoder), (KINDS["ring"](), KINDS["linear"]()), (KINDS["linear"](), decoder)):
        assert run(model, DraftModel(draft))[0] == plain(model)
    with pytest.raises(ValueError, match="an encoder-decoder generates from a source: give `source` ids"):
        run(decoder, DraftModel(both))


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("kind", ["ring", "linear_and_ring", "encoder_decoder"])
def test_a_prompt_read_in_chunks_gives_the_same(kind: str, chunk: int) -> None:
    model = KINDS[kind]()
    assert run(model, DraftModel(nearly(model)), prefill_chunk=chunk)[0] == plain(model)


def test_rules_of_sampling_hold_for_greedy_text() -> None:
    model = KINDS["full"]()
    rules = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "logit_bias": {3: -math.inf, 4: 1.0}}
    sampling = Sampling(temperature=0.0, **rules)
    right = plain(model, sampling=sampling)
    assert right != plain(model)
    for draft in ("nearly", "lookup"):
        assert run(model, DRAFTS[draft](model, 4), sampling=sampling)[0] == right


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["same", "nearly", "lookup"])
def test_an_end_token_inside_an_accepted_run(draft: str) -> None:
    model = KINDS["full"]()
    for end in plain(model, 6):
        ids, made = run(model, DRAFTS[draft](model, 4), end_ids=[end, 77])
        assert (ids, made.reason) == (plain(model, end_ids=[end]), "end")
        assert ids.index(end) == len(ids) - 1


def test_end_tokens_wait_for_the_minimum() -> None:
    model = KINDS["full"]()
    for end, least in itertools.product(plain(model, 3), (2, 5)):
        ends = {"end_ids": [end], "min_new_tokens": least}
        ids, made = run(model, DraftModel(model), **ends)
        assert ids == plain(model, **ends)
        assert made.accepted == made.proposed


@pytest.mark.parametrize("count", range(10))
def test_the_limit_inside_an_accepted_run(count: int) -> None:
    model = KINDS["full"]()
    ids, made = run(model, DraftModel(model, 4), count)
    assert (ids, made.reason) == (plain(model, 9)[:count], "length")
    assert made.passes == math.ceil(max(count - 1, 0) / 5) + (count > 0)


def test_the_reason_comes_with_the_last_token() -> None:
    model = KINDS["full"]()
    made = speculate(model, PROMPT, DraftModel(model), GREEDY, max_new_tokens=7)
    assert [made.reason for _ in made] == [None] * 6 + ["length"]


# -- fewer passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ring", "recurrent"])
def test_the_model_accepts_all_that_it_proposes_itself(kind: str) -> None:
    model = KINDS[kind]()
    _, made = run(model, DraftModel(model, 4), 12)
    assert (made.passes, made.proposed, made.accepted) == (4, 8, 8)  # 1 + 5 + 5 + 1 tokens


@pytest.mark.parametrize("mixer", [af.Attention(4, pattern=af.Causal() & af.Window(1)), af.LinearAttention(4)])
def test_a_text_that_repeats_takes_few_passes(mixer: Any) -> None:
    """Each token follows from the one before, so the text goes in a circle after at most `VOCAB` tokens."""
    model = recurring(mixer)
    if isinstance(mixer, af.LinearAttention):
        torch.nn.init.zeros_(model.decoder.layers[0].mixer.op.out.weight)
    ids, made = run(model, PromptLookup(length=10), 120)
    assert ids == plain(model, 120)
    assert made.passes <= 2 * VOCAB + 120 / 11


def test_layers_that_sum_up_need_no_pass_more_than_plain_decoding() -> None:
    """Whatever is proposed: here a token that is always wrong."""
    model = KINDS["linear_and_ring"]()
    right = plain(model)

    class Wrong(Draft, Drafter):
        length = 3

        def start(self, text: Text, reading: object) -> Drafter:
            return self

        def propose(self, text: Text, most: int) -> Proposal:
            return Proposal([(right[len(text.ids) - len(PROMPT)] + 1) % VOCAB] * most)

    ids, made = run(model, Wrong())
    assert ids == right
    assert (made.passes, made.accepted) == (15, 0)
    assert made.proposed > 15


def test_what_is_read_and_how_many_logits_are_asked_for() -> None:
    """The prompt is read alone, however short: where a pattern lets it see itself whole, it must not see a proposal."""
    model, small = KINDS["full"](), KINDS["ring"]()
    seen: dict[str, list[tuple[int, int]]] = {"model": [], "draft": []}
    for who, name in ((model, "model"), (small, "draft")):
        noted: list[int] = []
        who.tokens.register_forward_hook(lambda m, args, out, noted=noted: noted.append(out.shape[1]))
        who.head.register_forward_hook(
            lambda m, args, out, noted=noted, name=name: seen[name].append((noted[-1], out.shape[1]))
        )
    list(speculate(model, [3, 1], DraftModel(small, 4), GREEDY, max_new_tokens=12))
    assert seen["model"][:3] == [(2, 1), (5, 5), (5, 5)]
    assert seen["draft"][:5] == [(3, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert {logits for _, logits in seen["draft"]} == {1}


# -- sampling: the same distribution -----------------------------------------------------------------------------------


SMALL, BEGIN = 3, [0, 1, 2, 0, 1]


class Branches:
    """In the place of random numbers: the choices of `plan`, then always the first; `weight` is their probability."""

    def __init__(self, plan: list[int]) -> None:
        self.plan, self.weight = plan, 1.0
        self.taken: list[tuple[int, int]] = []

    def choose(self, weights: list[float]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        at = self.plan[len(self.taken)] if len(self.taken) < len(self.plan) else 0
        self.taken.append((at, len(possible)))
        self.weight *= weights[possible[at]] / sum(weights)
        return possible[at]

    def after(self) -> list[int] | None:
        """The plan of the next way to choose."""
        while self.taken and self.taken[-1][0] == self.taken[-1][1] - 1:
            self.taken.pop()
        return [at for at, _ in self.taken[:-1]] + [self.taken[-1][0] + 1] if self.taken else None


def every_way(
    patch: pytest.MonkeyPatch, speak: Callable[[], tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """What `speak` gives under all random numbers, each with its probability."""
    plan: list[int] | None = []
    while plan is not None:
        ways = Branches(plan)
        patch.setattr(Text, "draw", lambda self, probs, ways=ways: ways.choose(probs[0].tolist()))
        patch.setattr(Text, "accepts", lambda self, p, q, ways=ways: _accepts(ways, float(p), float(q)))
        yield speak(), ways.weight
        plan = ways.after()


def _accepts(ways: Branches, p: float, q: float) -> bool:
    return ways.choose([min(1.0, p / q), 1 - min(1.0, p / q)]) == 0


def by_hand(logits: Tensor, prompt: list[int], made: list[int], rules: dict[str, Any]) -> Tensor:
    """The distribution of the next token under some of the rules, written anew."""
    logits = logits.clone()
    for token in range(len(logits)):
        if token in prompt + made:
            penalty = rules.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if token in made:
            logits[token] -= made.count(token) * rules.get("frequency_penalty", 0) + rules.get("presence_penalty", 0)
    logits = logits / rules.get("temperature", 1.0)
    worst = logits.argsort(descending=True)[rules.get("top_k", len(logits)) :]
    return logits.index_fill(0, worst, -math.inf).softmax(0)


def tabled(table: Tensor) -> af.Transformer:
    """A model whose logits are those of `table`, by position and id, and not by earlier tokens."""
    model = make(af.Causal()).spec.replace(vocab_size=SMALL).build()

    def forward(ids: Tensor, tokens: af.Tokens, *, cache: af.Cache, last: int, memory: None) -> Tensor:
        cache.advance(tokens)
        return table[tokens.pos, ids][:, -last:]

    model.forward = forward
    return model


def drafts(table: Tensor) -> dict[str, Draft]:
    return {
        "nearly": DraftModel(tabled(table + 0.3 * torch.randn_like(table)), 2),
        "other": DraftModel(tabled(torch.randn_like(table)), 2),
        "lookup": PromptLookup(2),
    }


def brute_force(
    table: Tensor, rules: dict[str, Any], count: int, end: int, made: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every text of `count` tokens, or that ends before, with its probability."""
    if len(made) == count or end in made:
        yield made, 1.0
        return
    text = [*BEGIN, *made]
    for token, chance in enumerate(by_hand(table[len(text) - 1, text[-1]], BEGIN, list(made), rules).tolist()):
        if chance > 0:
            for whole, rest in brute_force(table, rules, count, end, (*made, token)):
                yield whole, chance * rest


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 2, "temperature": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "counts": {"frequency_penalty": 0.9, "presence_penalty": -0.5, "temperature": 1.3},
}


@pytest.mark.parametrize("draft", ["nearly", "other", "lookup"])
@pytest.mark.parametrize("rules", SETTINGS)
def test_the_distribution_is_exactly_the_models(rules: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every way in which all random numbers may fall, texts that end early included."""
    table = torch.randn(12, SMALL, SMALL, dtype=torch.float64)
    model, who, sampling, end = tabled(table), drafts(table)[draft], Sampling(**SETTINGS[rules]), 2

    def speak() -> tuple[int, ...]:
        return tuple(speculate(model, BEGIN, who, sampling, max_new_tokens=4, end_ids=[end]))

    ours: dict[tuple[int, ...], float] = defaultdict(float)
    for text, weight in every_way(monkeypatch, speak):
        ours[text] += weight
    theirs = dict(brute_force(table, SETTINGS[rules], 4, end))
    assert ours.keys() == theirs.keys()
    for text, weight in theirs.items():
        assert ours[text] == pytest.approx(weight, abs=1e-9), text


@pytest.mark.parametrize("draft", ["nearly", "other", "lookup"])
def test_drawn_tokens_have_the_models_frequencies(draft: str) -> None:
    """With true random numbers, none of which may serve twice; within 4 standard deviations."""
    count = 1000
    table = torch.randn(SMALL, SMALL, dtype=torch.float64).expand(count + len(BEGIN), -1, -1)
    made = speculate(tabled(table), BEGIN, drafts(table)[draft], Sampling(seed=1), max_new_tokens=count)
    pairs = Counter(itertools.pairwise([BEGIN[-1], *made]))
    for before, probs in enumerate(table[0].softmax(1).tolist()):
        total = sum(pairs[before, token] for token in range(SMALL))
        for token, chance in enumerate(probs):
            assert abs(pairs[before, token] / total - chance) < 4 * math.sqrt(chance * (1 - chance) / total)


def test_a_number_accepts_with_the_chance_p_over_q() -> None:
    text = Text(tabled(torch.zeros(9, SMALL, SMALL)), BEGIN, Sampling(seed=0), max_new_tokens=1)
    for p, q in ((0.2, 0.8), (0.5, 0.5), (0.9, 0.3), (0.0, 0.4), (0.3, 1.0)):
        share = sum(text.accepts(torch.tensor(p), q) for _ in range(2000)) / 2000
        chance = min(1.0, p / q)
        assert abs(share - chance) <= 4 * math.sqrt(chance * (1 - chance) / 2000)


def test_rounding_draws_no_forbidden_token() -> None:
    p = torch.tensor([[0.0, 0.5, 0.5]])
    for probs in ([p.clone()], [p + 1e-9]):
        assert torch.equal(Proposal([1], probs).rest(p, 0), p)
    assert Proposal([1]).rest(p, 0).tolist() == [[0.0, 0.0, 0.5]]


def test_a_seed_repeats_the_text() -> None:
    model = KINDS["full"]()
    draft = DraftModel(nearly(model))
    first, again, other = (run(model, draft, sampling=Sampling(seed=seed))[0] for seed in (5, 5, 6))
    assert first == again != other


def test_a_trial_leaves_the_text_as_it_was() -> None:
    rules = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    text, logits = (
        Text(tabled(torch.zeros(9, SMALL, SMALL)), BEGIN, rules, max_new_tokens=9, end_ids=[2], min_new_tokens=1),
        torch.ones(1, 3),
    )
    before = text.distribution(logits)
    with text.trial():
        text.push(1)
        assert not torch.equal(text.distribution(logits), before)
        text.push(2)
        assert text.reason == "end"
    assert (text.ids, text.room, text.reason) == (BEGIN, 9, None)
    assert torch.equal(text.distribution(logits), before)


# -- what is proposed --------------------------------------------------------------------------------------------------


def looked_up(ids: list[int], ngram: int, most: int) -> list[int]:
    """By search: the longest run, its latest place, one token after another."""
    for n in range(min(ngram, len(ids) - 1), 0, -1):
        places = [i for i in range(n, len(ids)) if ids[i - n : i] == ids[-n:]]
        if places:
            text = list(ids)
            for step in range(most):
                text.append(text[places[-1] + step])
            return text[len(ids) :]
    return []


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
def test_a_lookup_proposes_what_followed_the_longest_match(ngram: int) -> None:
    model = make(af.Causal())
    for most, begin in itertools.product((1, 4), ([1], [1, 1, 1], [1, 2, 3, 1, 2])):
        text = Text(model, begin, GREEDY, max_new_tokens=99)
        drafter = PromptLookup(most, ngram).start(text, Reading())
        for token in torch.randint(3, (40,)).tolist():
            assert drafter.propose(text, most).ids == looked_up(text.ids, ngram, most)
            text.push(token)


def test_nothing_is_proposed_behind_an_end_token() -> None:
    model = KINDS["full"]()
    end = plain(model)[3]
    _, made = run(model, DraftModel(model, 8), end_ids=[end])
    assert made.proposed == made.accepted == plain(model).index(end)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_models_with_other_vocabularies_or_devices_are_refused() -> None:
    model = KINDS["full"]()
    with pytest.raises(ValueError, match="the draft's vocabulary has 3 tokens, but the model's has 13"):
        run(model, DraftModel(tabled(torch.zeros(9, SMALL, SMALL))))
    with pytest.raises(ValueError, match="the draft is on meta, but the model on cpu"):
        run(model, DraftModel(model.spec.build(device="meta")))


def test_mistakes_are_told_before_the_first_token() -> None:
    model, draft = KINDS["learned"](), PromptLookup()
    for choices, message in (
        ({"ids": []}, "prompt 0 is empty"),
        ({"ids": [1] * LEARNED}, "leaves no room in the model's 24 positions"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be at least 0, but is -1"),
        ({"prefill_chunk": 0}, "`prefill_chunk` must be at least 1, but is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            speculate(
                **{"model": model, "ids": PROMPT, "draft": draft, "sampling": GREEDY, "max_new_tokens": 3} | choices
            )
    with pytest.raises(ValueError, match="`length` of a draft must be at least 1, but is 0"):
        PromptLookup(length=0)
    with pytest.raises(ValueError, match="`ngram` of a draft must be at least 1, but is 0"):
        PromptLookup(ngram=0)
    with pytest.raises(ValueError, match="`length` of a draft must be at least 1, but is 0"):
        DraftModel(model, 0)
