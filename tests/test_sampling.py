"""Sampling: closed-form oracles (FAULTS 57, 59), frequencies, and agreement with transformers' processors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.generate import rules as pure
from anyformer.generate import sampling
from anyformer.generate.sampling import Sampler, Sampling, penalize, probabilities

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
PROBS = torch.tensor([[0.08714, 0.64391, 0.23688, 0.03206]])
NEVER = -math.inf


def kept(logits: Tensor, **rules: Any) -> list[int]:
    """The ids that stay possible in a single row."""
    return probabilities(logits, Sampling(**rules))[0].nonzero().flatten().tolist()


def drawn(logits: Tensor, steps: int, **rules: Any) -> Tensor:
    """(B, steps) draws from constant logits."""
    sampler = Sampler(Sampling(**rules), batch=logits.shape[0], vocab_size=logits.shape[1])
    return torch.stack([sampler(logits) for _ in range(steps)], dim=1)


def test_fault_57_plain_probabilities() -> None:
    torch.testing.assert_close(probabilities(LOGITS, Sampling()), PROBS, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probabilities_are_float32_at_least(dtype: torch.dtype) -> None:
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert probabilities(LOGITS.to(dtype), Sampling(temperature=0.7, top_p=0.5)).dtype == wanted


def test_fault_57_temperature_zero_takes_the_best() -> None:
    assert probabilities(LOGITS, Sampling(temperature=0.0)).tolist() == [[0, 1, 0, 0]]
    assert drawn(LOGITS, 50, temperature=0.0).unique().tolist() == [1]


def test_fault_57_ties_go_to_the_lowest_id() -> None:
    tied = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]])
    assert kept(tied, temperature=0.0) == kept(tied, top_k=1) == kept(tied, top_p=0.0) == [1]
    assert kept(tied, top_k=2) == [1, 3]
    assert kept(tied, top_p=0.5) == [1, 3]
    assert drawn(tied, 20, temperature=0.0).unique().tolist() == [1]
    assert drawn(tied, 20, top_k=1).unique().tolist() == [1]


def test_fault_57_rows_of_temperature_zero_and_one() -> None:
    rules = Sampling(temperature=(0.0, 1.0))
    both = probabilities(LOGITS.repeat(2, 1), rules)
    assert both[0].tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(both[1:], PROBS, atol=5e-6, rtol=0)
    ids = drawn(LOGITS.repeat(2, 1), 200, temperature=(0.0, 1.0), seed=0)
    assert ids[0].unique().tolist() == [1]
    assert ids[1].unique().tolist() == [0, 1, 2, 3]


def test_fault_57_top_p_zero() -> None:
    assert kept(LOGITS, top_p=0.0) == [1]
    assert kept(torch.zeros(1, 4), top_p=0.0) == [0]


def test_top_p_that_is_reached_exactly_needs_no_more() -> None:
    assert kept(torch.zeros(1, 2, dtype=torch.float64), top_p=0.5) == [0]


def test_fault_57_top_p_one_leaves_every_bit() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * 8
    assert torch.equal(probabilities(logits, Sampling(top_p=1.0)), logits.softmax(-1))
    assert torch.equal(probabilities(logits, Sampling(top_k=5000)), logits.softmax(-1))


@pytest.mark.parametrize(
    ("top_p", "ids"), [(0.6, [1]), (0.65, [1, 2]), (0.88, [1, 2]), (0.9, [0, 1, 2]), (0.999, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, ids: list[int]) -> None:
    assert kept(LOGITS, top_p=top_p) == ids


@pytest.mark.parametrize(
    ("top_k", "ids"), [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 2]), (4, [0, 1, 2, 3]), (10, [0, 1, 2, 3])]
)
def test_fault_57_top_k(top_k: int, ids: list[int]) -> None:
    assert kept(LOGITS, top_k=top_k) == ids


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of the two best the first holds .7311: enough for .7, though it is .6439 of the whole.
    assert kept(LOGITS, top_k=2, top_p=0.7) == [1]
    assert kept(LOGITS, top_p=0.7) == [1, 2]


def test_temperature_acts_before_top_p() -> None:
    assert kept(LOGITS, top_p=0.65) == [1, 2]
    assert kept(LOGITS, temperature=0.5, top_p=0.65) == [1]


@pytest.mark.parametrize(
    ("min_p", "ids"), [(0.0, [0, 1, 2, 3]), (0.04, [0, 1, 2, 3]), (0.06, [0, 1, 2]), (0.2, [1, 2]), (1.0, [1])]
)
def test_min_p_is_relative_to_the_best(min_p: float, ids: list[int]) -> None:
    assert kept(LOGITS, min_p=min_p) == ids


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8, 1.0, 1e8, 1e300])
@pytest.mark.parametrize(
    "row", [[1.0, 3.0, 2.0, 0.0], [NEVER, 3.0, NEVER, 0.0], [0.0, 3e38, -3e38, 0.0], [NEVER, 0.0, NEVER, NEVER]]
)
def test_fault_57_extreme_temperatures_give_no_nan(row: list[float], temperature: float) -> None:
    for rules in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5, "min_p": 0.5}):
        for degrees in (temperature, (temperature,)):
            probs = probabilities(torch.tensor([row]), Sampling(temperature=degrees, **rules))
            assert probs.isfinite().all()
            assert float(probs.sum()) == pytest.approx(1)
            assert (probs[torch.tensor([row]) == NEVER] == 0).all()
            if temperature <= 1e-8:
                assert probs.argmax() == 1
                assert probs.max() == 1


def test_fault_57_heat_makes_the_allowed_equal() -> None:
    logits = torch.tensor([[1.0, 3.0, NEVER, 0.0]])
    wanted = torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]])
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=1e8)), wanted)


@pytest.mark.parametrize(
    ("bad", "shown"), [([NEVER, NEVER], "-inf"), ([math.nan, 1.0], "nan"), ([math.inf, 1.0], "inf")]
)
def test_row_without_a_finite_best_is_an_error(bad: list[float], shown: str) -> None:
    with pytest.raises(ValueError, match=rf"must be finite, but that of row 1 is {shown};"):
        probabilities(torch.tensor([[0.0, 1.0], bad]), Sampling())


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"temperature": ()},
        {"temperature": (1.0, -0.5)},
        {"top_k": -1},
        {"top_p": 1.01},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 2.0},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -2.0},
        {"repetition_penalty": math.nan},
        {"typical_p": 1.5},
        {"typical_p": -0.1},
        {"typical_p": math.nan},
        {"frequency_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"presence_penalty": NEVER},
        {"logit_bias": {0: math.inf}},
        {"logit_bias": {0: math.nan}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": ((2, 1.0), (2, 0.5))},
        {"seed": -1},
        {"seed": ()},
        {"seed": (0, -1)},
    ],
)
def test_fault_57_invalid_values_are_named(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(field))} must be .*, but is .*\.$"):
        Sampling(**field)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": "hot"},
        {"temperature": [1.0]},
        {"top_k": 1.5},
        {"presence_penalty": "much"},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: "much"}},
        {"logit_bias": (1, 2)},
        {"seed": 0.5},
        {"seed": (1, None)},
    ],
)
def test_wrong_types_are_named(field: dict[str, Any]) -> None:
    # TypeError: when shapes and types are checked at run time, the checker speaks first.
    with pytest.raises((ValueError, TypeError), match=next(iter(field))):
        Sampling(**field)


def test_error_sentence() -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Sampling(top_p=1.5)
    assert str(error.value) == "top_p must be from 0 (only the best token) to 1 (every token), but is 1.5."


def test_temperatures_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match=r"one per row \(3\), but 2 are given"):
        Sampler(Sampling(temperature=(0.0, 1.0)), batch=3, vocab_size=4)
    with pytest.raises(ValueError, match=r"one per row \(1\), but 2 are given"):
        probabilities(LOGITS, Sampling(temperature=(0.0, 1.0)))


def test_logits_must_fit_the_sampler() -> None:
    with pytest.raises(ValueError, match=r"logits must be \(2, 4\).*but are \(1, 4\)"):
        Sampler(Sampling(), batch=2, vocab_size=4)(LOGITS)


@pytest.mark.parametrize("rules", [{}, {"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_fault_57_frequencies_within_four_sigma(rules: dict[str, Any]) -> None:
    rows, steps = 500, 200
    wanted = probabilities(LOGITS, Sampling(**rules))[0]
    ids = drawn(LOGITS.repeat(rows, 1), steps, seed=1, **rules)
    share = torch.bincount(ids.flatten(), minlength=4) / (rows * steps)
    assert ((share - wanted).abs() <= 4 * (wanted * (1 - wanted) / (rows * steps)).sqrt()).all()
    assert (share[wanted == 0] == 0).all()


def test_first_draws_of_many_rows_are_independent() -> None:
    rows = 10_000  # one number per row: a bad spread of the row seeds would show here
    share = torch.bincount(drawn(LOGITS.repeat(rows, 1), 1, seed=3).flatten(), minlength=4) / rows
    assert ((share - PROBS[0]).abs() <= 4 * (PROBS[0] * (1 - PROBS[0]) / rows).sqrt()).all()


def test_draw_inverts_half_open_intervals() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    for uniform, token in [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)]:
        assert int(pure.draw(probs, torch.tensor([[uniform]], dtype=torch.float64))) == token


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((8, 64), NEVER)
    logits[:, ::3] = 0.0
    assert (drawn(logits, 1000, seed=0) % 3 == 0).all()


def test_draws_outlast_one_block_and_do_not_repeat() -> None:
    ids = drawn(torch.zeros(1, 1000), 600, seed=0)[0]
    assert not torch.equal(ids[:256], ids[256:512])


def test_seed_repeats_and_none_does_not() -> None:
    logits = torch.zeros(2, 1000)
    assert torch.equal(drawn(logits, 20, seed=7), drawn(logits, 20, seed=7))
    assert torch.equal(drawn(logits, 20, seed=0), drawn(logits, 20, seed=0))
    assert not torch.equal(drawn(logits, 20, seed=7), drawn(logits, 20, seed=8))
    assert not torch.equal(drawn(logits, 20), drawn(logits, 20))
    first = Sampler(Sampling(), batch=2, vocab_size=1000)
    again = Sampler(Sampling(seed=first.seed), batch=2, vocab_size=1000)
    assert torch.equal(first(logits), again(logits))


def test_rows_differ_and_seeds_share_no_rows() -> None:
    ids = torch.cat([drawn(torch.zeros(3, 1000), 20, seed=seed) for seed in (0, 1, 2)])
    assert len({tuple(row) for row in ids.tolist()}) == 9


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    drawn(LOGITS, 5, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_row_draws_the_same_whatever_the_rest_does() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(40, 3, 50, generator=generator)
    alone = Sampler(Sampling(seed=5), batch=1, vocab_size=50)
    mixed = Sampler(Sampling(seed=5, temperature=(1.0, 0.0, 3.0)), batch=3, vocab_size=50)
    assert [int(alone(x[:1])) for x in steps] == [int(mixed(x)[0]) for x in steps]


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.0}])
def test_empty_batch_draws_nothing(rules: dict[str, Any]) -> None:
    assert drawn(torch.zeros(0, 4), 2, **rules).shape == (0, 2)


def test_greedy_is_only_an_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("greedy must not compute probabilities")

    monkeypatch.setattr(sampling, "probabilities", forbidden)
    sampler = Sampler(Sampling(temperature=0.0), batch=1, vocab_size=4)
    assert sampler(LOGITS).tolist() == [1]
    assert sampler.seen is None
    assert sampler.counts is None
    with pytest.raises(AssertionError, match="greedy must not"):
        Sampler(Sampling(), batch=1, vocab_size=4)(LOGITS)


def test_fault_59_penalty_by_sign_and_once_per_token() -> None:
    seen = torch.tensor([[True, True, False]])
    assert penalize(torch.tensor([[2.0, -2.0, 1.0]]), seen, 2.0).tolist() == [[1, -4, 1]]
    assert penalize(torch.tensor([[2.0, -2.0, NEVER]]), ~seen, 2.0).tolist() == [[2, -2, NEVER]]


def test_fault_59_penalty_one_is_identity() -> None:
    logits = torch.randn(2, 9)
    assert torch.equal(penalize(logits, torch.ones(2, 9, dtype=torch.bool), 1.0), logits)


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan])
def test_fault_59_penalty_must_be_positive(penalty: float) -> None:
    with pytest.raises(ValueError, match="repetition_penalty must be a finite number > 0"):
        penalize(LOGITS, LOGITS > 0, penalty)


def test_fault_59_pads_and_neighbours_do_not_count() -> None:
    rules = Sampling(temperature=0.0, repetition_penalty=2.0)
    alone = Sampler(rules, batch=1, vocab_size=3)
    alone.see(torch.tensor([[0, 1, 1, 1]]), torch.ones(1, 4, dtype=torch.bool))
    batch = Sampler(rules, batch=2, vocab_size=3)
    batch.see(
        torch.tensor([[2, 2, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2]]), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).bool()
    )
    assert batch.seen is not None
    assert alone.seen is not None
    assert alone.seen.tolist() == [[True, True, False]]
    assert batch.seen.tolist() == [[True, True, False], [False, False, True]]
    logits = torch.tensor([[2.0, -2.0, 1.5]])  # penalised to [1, -4, 1.5]: the best is 2, and not 0
    assert alone(logits).tolist() == [2]
    assert batch(logits.repeat(2, 1)).tolist() == [2, 0]


def test_fault_59_pad_id_may_lie_outside_the_vocabulary() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), batch=1, vocab_size=3)
    sampler.see(torch.tensor([[-100, 99, 1]]), torch.tensor([[False, False, True]]))
    assert sampler.seen is not None
    assert sampler.seen.tolist() == [[False, True, False]]


def test_own_draws_count_as_seen() -> None:
    sampler = Sampler(Sampling(temperature=0.0, repetition_penalty=4.0), batch=1, vocab_size=4)
    assert [int(sampler(LOGITS)) for _ in range(3)] == [1, 2, 0]


def test_penalty_is_computed_in_float32() -> None:
    sampler = Sampler(Sampling(repetition_penalty=10.0, seed=0), batch=1, vocab_size=2)
    sampler.see(torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
    sampler(torch.tensor([[-60000.0, -60000.0]], dtype=torch.float16))  # times 10 would be -inf, and so an error


@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_top_p_over_a_large_vocabulary_equals_a_full_sort(spread: float) -> None:
    """Spread .1 needs more than the tried head of best tokens, 4 does not."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * spread
    probs, ids = logits.softmax(-1).sort(-1, descending=True)
    stays = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids, probs.cumsum(-1) - probs < 0.8)
    assert (stays.sum(-1) > 1024).all() == (spread < 1)
    assert torch.equal(probabilities(logits, Sampling(top_p=0.8)) > 0, stays)


WARPERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "top_k": ("TopKLogitsWarper", (1, 7, 299, 300)),
    "top_p": ("TopPLogitsWarper", (0.05, 0.5, 0.95)),
    "min_p": ("MinPLogitsWarper", (0.01, 0.2, 0.9)),
    "typical_p": ("TypicalLogitsWarper", (0.01, 0.2, 0.5, 0.95)),
}


@pytest.mark.parametrize("rule", WARPERS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_agrees_with_transformers(rule: str, temperature: float) -> None:
    import transformers

    name, values = WARPERS[rule]
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(2)) * 3
    for value in values:
        warmed = transformers.TemperatureLogitsWarper(temperature)(None, logits)
        wanted = getattr(transformers, name)(value)(None, warmed).softmax(-1)
        ours = probabilities(logits, Sampling(temperature=temperature, **{rule: value}))
        assert torch.equal(ours > 0, wanted > 0)
        torch.testing.assert_close(ours, wanted)


def test_order_agrees_with_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(3)) * 2
    scores = logits
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1), TypicalLogitsWarper(0.7)):
        before, scores = scores, warper(None, scores)
        assert not torch.equal(before, scores)
    ours = probabilities(logits, Sampling(top_k=20, top_p=0.8, min_p=0.1, typical_p=0.7))
    torch.testing.assert_close(ours, scores.softmax(-1))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_fault_59_agrees_with_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 30, generator=generator)
    ids = torch.randint(30, (4, 50), generator=generator)
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids, True)
    torch.testing.assert_close(
        penalize(logits, seen, penalty), RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    )


def surprises(probs: list[float], mass: float) -> list[int]:
    """Ids that typical sampling keeps, from the definition, one token at a time."""
    entropy = -sum(p * math.log(p) for p in probs if p)
    away = {i: abs(-math.log(p) - entropy) for i, p in enumerate(probs) if p}
    left, reached = sorted(away, key=lambda i: away[i]), 0.0
    needed = []
    while left and (not needed or reached < mass):
        needed.append(left.pop(0))
        reached += probs[needed[-1]]
    return sorted(i for i, far in away.items() if far <= away[needed[-1]])


@pytest.mark.parametrize("mass", [0.0, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_typical_is_its_definition(mass: float) -> None:
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 2
    logits[:, ::7] = NEVER
    probs = logits.softmax(-1)
    ours = probabilities(logits, Sampling(typical_p=mass))
    for row, wanted in zip(ours, probs.tolist(), strict=True):
        assert row.nonzero().flatten().tolist() == surprises(wanted, mass)
    torch.testing.assert_close(ours, (probs * (ours > 0)) / (probs * (ours > 0)).sum(-1, keepdim=True))


def test_typical_may_drop_the_best_and_always_keeps_one() -> None:
    # Entropy .948: the surprises 2.440, .440, 1.440 and 3.440 are 1.492, .508, .492 and 2.492 away from it.
    assert kept(LOGITS, typical_p=0.0) == kept(LOGITS, typical_p=0.23) == [2]
    assert kept(LOGITS, typical_p=0.24) == kept(LOGITS, typical_p=0.88) == [1, 2]
    assert kept(LOGITS, typical_p=0.89) == [0, 1, 2]
    flat = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])  # p .51 and .07: .973 and 1.027 away
    assert kept(flat, typical_p=0.4) == [0]
    wide = torch.cat([torch.tensor([[3.0]]), torch.zeros(1, 99)], 1)  # entropy 4.27: the best, 1.78, is the farthest
    assert kept(wide, typical_p=0.0) == list(range(1, 100))
    assert kept(torch.tensor([[NEVER, 0.0, NEVER]]), typical_p=0.0) == [1]


def test_typical_does_not_part_equals() -> None:
    assert kept(torch.zeros(1, 5), typical_p=0.3) == [0, 1, 2, 3, 4]
    assert kept(torch.zeros(1, 3000), typical_p=0.9) == list(range(3000))


def test_typical_over_a_large_vocabulary_equals_a_full_sort() -> None:
    """Of these tokens, more than the tried head are needed."""
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    ours = probabilities(logits, Sampling(typical_p=0.9)) > 0
    assert (ours.sum(-1) > 1024).all()
    for row, wanted in zip(ours, logits.softmax(-1).tolist(), strict=True):
        assert row.nonzero().flatten().tolist() == surprises(wanted, 0.9)


def test_typical_keeps_rows_of_temperature_zero() -> None:
    probs = probabilities(LOGITS.repeat(2, 1), Sampling(temperature=(0.0, 5.0), typical_p=0.2))
    assert probs[0].tolist() == [0, 1, 0, 0]
    assert (probs[1] > 0).tolist() == [i in kept(LOGITS, temperature=5.0, typical_p=0.2) for i in range(4)]


def test_discount_is_the_formula_of_the_api() -> None:
    logits, counts = torch.randn(3, 8, dtype=torch.float64), torch.randint(4, (3, 8), dtype=torch.int32)
    ours = pure.discount(logits, counts, 0.3, -0.7)
    for row in range(3):
        for token in range(8):
            times = int(counts[row, token])
            assert float(ours[row, token]) == pytest.approx(float(logits[row, token]) - times * 0.3 + (times > 0) * 0.7)
    assert torch.equal(ours[counts == 0], logits[counts == 0])


def test_discount_of_extreme_numbers_leaves_other_tokens() -> None:
    counts = torch.tensor([[2, 0, 0, 0]])
    assert pure.discount(LOGITS, counts, 1e308, 0.0).tolist() == [[NEVER, 3.0, 2.0, 0.0]]


def test_greedy_goes_on_when_frequency_or_presence_speaks() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    assert drawn(logits, 6, temperature=0.0, frequency_penalty=1.0).tolist() == [[0, 1, 0, 1, 0, 1]]
    assert drawn(logits, 6, temperature=0.0, presence_penalty=1.0).tolist() == [[0, 1, 0, 0, 0, 0]]
    assert drawn(logits, 3, temperature=0.0, frequency_penalty=-1.0).tolist() == [[0, 0, 0]]


def test_prompt_is_seen_but_not_counted() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0, presence_penalty=1.0), batch=2, vocab_size=4)
    sampler.see(torch.tensor([[1, 1], [3, 0]]), torch.ones(2, 2, dtype=torch.bool))
    sampler.made(torch.tensor([2, 3]))
    sampler.made(torch.tensor([[2, 0], [3, 99]]), torch.tensor([[True, True], [True, False]]))
    assert sampler.counts is not None
    assert sampler.seen is not None
    assert sampler.counts.tolist() == [[1, 0, 2, 0], [0, 0, 0, 2]]
    assert sampler.seen.tolist() == [[True, True, True, False], [True, False, False, True]]


def test_frequency_is_computed_in_float32_at_least() -> None:
    sampler = Sampler(Sampling(temperature=0.0, frequency_penalty=2e-3), batch=1, vocab_size=2)
    logits = torch.tensor([[10.0, 9.99]], dtype=torch.bfloat16)  # both 10 in bfloat16
    assert torch.cat([sampler(logits) for _ in range(4)]).tolist() == [0, 1, 0, 1]


def test_bias_is_added_and_forbids() -> None:
    bias = {3: 4.0, 1: NEVER}
    sampler = Sampler(Sampling(logit_bias=bias), batch=1, vocab_size=4)
    torch.testing.assert_close(sampler.distribution(LOGITS), torch.tensor([[1.0, NEVER, 2.0, 4.0]]).softmax(-1))
    assert drawn(LOGITS, 5, temperature=0.0, logit_bias=bias).unique().tolist() == [3]
    assert 1 not in drawn(LOGITS, 200, seed=0, logit_bias=bias)


def test_bias_is_added_in_float32_at_least() -> None:
    logits = torch.full((1, 2), 10.0, dtype=torch.bfloat16)  # 10.001 would be 10 in bfloat16
    assert drawn(logits, 1, temperature=0.0, logit_bias={1: 1e-3}).tolist() == [[1]]


def test_bias_is_plain_data() -> None:
    rules = Sampling(logit_bias={3: 4.0, 1: NEVER})
    assert rules.logit_bias == ((1, NEVER), (3, 4.0))
    assert rules == Sampling(logit_bias={1: NEVER, 3: 4.0}) == Sampling(logit_bias=rules.logit_bias)
    assert hash(rules) == hash(dataclasses.replace(rules, seed=None))


def test_bias_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"token ids below 4, the vocabulary's size, but names 4\."):
        Sampler(Sampling(logit_bias={4: 1.0, 0: 1.0}), batch=1, vocab_size=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_with_nothing_allowed_is_an_error(temperature: float) -> None:
    plain = Sampler(Sampling(temperature=temperature), batch=2, vocab_size=4)
    allowed = torch.tensor([[True] * 4, [False] * 4])
    for call in (plain, plain.distribution):
        with pytest.raises(ValueError, match=r"that of row 1 is -inf; leave at least one token allowed"):
            call(LOGITS.repeat(2, 1), allowed)
    biased = Sampler(Sampling(temperature=temperature, logit_bias={2: NEVER}), batch=1, vocab_size=4)
    with pytest.raises(ValueError, match=r"leave at least one token allowed"):
        biased(LOGITS, torch.tensor([[False, False, True, False]]))


def test_allowed_must_fit_the_sampler() -> None:
    with pytest.raises((ValueError, TypeError), match="allowed"):
        Sampler(Sampling(), batch=2, vocab_size=4)(LOGITS.repeat(2, 1), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("rules", [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.5}, {}])
def test_only_allowed_tokens_are_chosen(rules: dict[str, Any]) -> None:
    """What is forbidden goes before top-k counts its two best, and before top-p sums."""
    allowed = torch.tensor([[True, False, True, True], [False, True, False, False]])
    sampler = Sampler(Sampling(seed=0, **rules), batch=2, vocab_size=4)
    logits = LOGITS.repeat(2, 1)
    ids = torch.stack([sampler(logits, allowed) for _ in range(100)], 1)
    assert allowed.gather(1, ids).all()
    masked = logits.masked_fill(~allowed, NEVER)
    assert torch.equal(sampler.distribution(logits, allowed), probabilities(masked, Sampling(**rules)))
    if rules == {"top_k": 2}:
        assert ids[0].unique().tolist() == [0, 2]


@pytest.mark.parametrize("rules", [{}, {"temperature": (1.0, 0.0, 2.0)}, {"top_p": 0.7, "repetition_penalty": 1.5}])
def test_caller_who_draws_for_itself_makes_the_same_text(rules: dict[str, Any]) -> None:
    choice = Sampling(seed=9, frequency_penalty=0.5, logit_bias={3: 1.0}, **rules)
    whole, parts = (Sampler(choice, batch=3, vocab_size=20) for _ in range(2))
    allowed = torch.arange(20).expand(3, 20) != 7
    for logits in torch.randn(300, 3, 20, generator=torch.Generator().manual_seed(8)):
        probs = parts.distribution(logits, allowed)
        assert torch.equal(probs, parts.distribution(logits, allowed))
        ids = pure.draw(probs, parts.uniform())
        parts.made(ids)
        assert torch.equal(ids, whole(logits, allowed))


@pytest.mark.parametrize("rules", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_greedy_distribution_is_one_at_the_best(rules: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(presence_penalty=2.0, **rules), batch=1, vocab_size=4)
    sampler.made(torch.tensor([1]))
    probs = sampler.distribution(LOGITS.half())
    assert probs.tolist() == [[0, 0, 1, 0]]
    assert probs.dtype == torch.float32
    assert sampler.uniform().shape == (1, 1)


def test_order_of_the_penalties() -> None:
    """Bias, then repetition, then frequency and presence, then what is forbidden, then temperature."""
    rules = Sampling(
        temperature=0.5, logit_bias={0: -3.0}, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0
    )
    sampler = Sampler(rules, batch=1, vocab_size=4)
    sampler.see(torch.tensor([[2]]), torch.tensor([[True]]))
    sampler.made(torch.tensor([[0, 0, 1]]))
    # 0: (1 - 3) · 2 - 1.5;  1: 3 / 2 - 1.25;  2: 2 / 2;  3: forbidden
    wanted = torch.tensor([[-5.5, 0.25, 1.0, NEVER]]).div(0.5).softmax(-1)
    torch.testing.assert_close(sampler.distribution(LOGITS, torch.tensor([[True, True, True, False]])), wanted)


def test_bias_and_repetition_agree_with_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(4, 30, generator=generator)
    ids = torch.randint(30, (4, 9), generator=generator)
    bias = {2: 1.5, 7: -4.0, 11: 0.25}
    theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, logits)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(ids, theirs)
    sampler = Sampler(Sampling(logit_bias=bias, repetition_penalty=1.7), batch=4, vocab_size=30)
    sampler.see(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(sampler.distribution(logits), theirs.softmax(-1))


def test_rules_that_are_off_leave_every_bit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(11))
    sampler = Sampler(Sampling(typical_p=1.0, logit_bias={}), batch=3, vocab_size=50)
    assert torch.equal(sampler.distribution(logits), logits.softmax(-1))
    assert torch.equal(sampler.distribution(logits, torch.ones(3, 50, dtype=torch.bool)), logits.softmax(-1))
    assert sampler.counts is None
    assert sampler.seen is None


def test_row_with_its_own_seed_draws_as_alone() -> None:
    """Over more than one block of numbers, and whatever the neighbours' seeds are."""
    steps = torch.randn(300, 3, 50, generator=torch.Generator().manual_seed(12))
    together = Sampler(Sampling(seed=(5, 9, 5)), batch=3, vocab_size=50)
    assert together.seed == (5, 9, 5)
    ids = torch.stack([together(logits) for logits in steps], 1)
    for row, seed in enumerate((5, 9, 5)):
        alone = Sampler(Sampling(seed=seed), batch=1, vocab_size=50)
        assert ids[row].tolist() == [int(alone(logits[row : row + 1])) for logits in steps]


def test_seeds_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match=r"^seed must be one number or one per row \(3\), but 2 are given"):
        Sampler(Sampling(seed=(1, 2)), batch=3, vocab_size=4)


def test_draws_of_one_seed_stay_what_they_were() -> None:
    """Numbers that earlier versions drew: a seed given once must give its text for ever."""
    assert drawn(torch.zeros(3, 1000), 5, seed=7).tolist() == [
        [656, 129, 662, 441, 299],
        [5, 512, 193, 539, 21],
        [513, 47, 259, 2, 990],
    ]
