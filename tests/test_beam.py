"""Beam search against every sequence, against a search without a cache, against scripts, and against `transformers`."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.generate.beam import Hypothesis, beam_search

STOPPING: list[Any] = [False, True, "never"]
NORM = af.RMSNorm()


def built(vocab_size: int, *ops: Any, encoder: Any = (), **fields: Any) -> af.Transformer:
    """A tiny model in float64 that has opinions; each of `ops` makes a layer."""
    decoder = [af.Block.pre(*(op if isinstance(op, tuple) else (op,)), af.DenseFFN(16), norm=NORM) for op in ops]
    fields = {"embed": af.Embed(tied=False), **fields}  # tied, they would say one token again and again
    spec = af.TransformerSpec(8, vocab_size, decoder=decoder, encoder=encoder, final_norm=NORM, **fields)
    model = spec.build(dtype=torch.float64).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.7)
    return model


def small(vocab_size: int = 7) -> af.Transformer:
    return built(vocab_size, af.Attention(2, position=af.Rotary()))


Following = Callable[[list[list[int]]], list[list[float]]]


def following(model: af.Transformer, prompt: list[int], source: Tensor | None = None) -> Following:
    """Log-probabilities of what follows texts of as many new ids, without a cache."""

    @torch.inference_mode()
    def logs(texts: list[list[int]]) -> list[list[float]]:
        read = None if source is None else source.expand(len(texts), -1)
        return model(torch.tensor([prompt + ids for ids in texts]), source=read)[:, -1].log_softmax(-1).tolist()

    return logs


def same(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    assert [one.ids for one in ours] == [one.ids for one in theirs]
    assert [one.reason for one in ours] == [one.reason for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-10)
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-10)


# -------------------------------------------------------------------------------------------------------- all sequences


def every(logs: Following, longest: int, end: int, least: int = 0) -> list[Hypothesis]:
    """All continuations that end, or are `longest` long, without scores."""
    found, texts = [], [(0.0, [])]
    for made in range(longest):
        longer = grown(logs, [(total, ids) for total, ids in texts if end not in ids])
        texts = [(total, ids) for total, ids in longer if ids[-1] != end or made >= least]
        for total, ids in texts:
            if ids[-1] == end or len(ids) == longest:
                found.append(Hypothesis(ids, math.nan, total, "end" if ids[-1] == end else "length"))
    return found


def grown(logs: Following, texts: list[tuple[float, list[int]]]) -> list[tuple[float, list[int]]]:
    """Each text with each token behind it, and the sums of their log-probabilities."""
    after = logs([ids for _, ids in texts])
    pairs = zip(texts, after, strict=True)
    return [(total + log, [*ids, token]) for (total, ids), row in pairs for token, log in enumerate(row)]


@pytest.mark.parametrize(("vocab_size", "longest"), [(3, 4), (5, 3)])
def test_as_many_beams_as_sequences_find_the_best_of_all(vocab_size: int, longest: int) -> None:
    model, prompt, end = small(vocab_size), [1, 0, 2, 1], vocab_size - 1
    found = every(following(model, prompt), longest, end)
    lengths = set()
    for penalty in (-2.0, 0.0, 0.7, 1.0, 6.0):
        scored = [one._replace(score=one.logprob / len(one.ids) ** penalty) for one in found]
        best = sorted(scored, key=lambda one: -one.score)[:12]
        lengths.add(len(best[0].ids))
        made = beam_search(
            model,
            [prompt],
            num_beams=vocab_size**longest,
            max_new_tokens=longest,
            end_ids=[end],
            length_penalty=penalty,
            early_stopping="never",
            num_return=12,
        )
        same(made[0], best)
    assert len(lengths) > 1  # the penalty decides


def test_the_end_waits_for_the_minimum_and_all_there_is_comes_back() -> None:
    model, prompt, end = small(3), [1, 0], 2
    found = sorted(every(following(model, prompt), 3, end, least=2), key=lambda one: -one.logprob)
    made = beam_search(
        model,
        [prompt],
        num_beams=27,
        max_new_tokens=3,
        end_ids=[end],
        min_new_tokens=2,
        length_penalty=0.0,
        num_return=27,
    )
    assert len(found) == 12
    same(made[0], [one._replace(score=one.logprob) for one in found])


# ------------------------------------------------------------------------------------------------------ without a cache


def slow(
    logs: Following, *, count: int, longest: int, ends: set[int], stopping: Any = False, penalty: float = 1.0
) -> list[Hypothesis]:
    """The search as it is told: each step reads each text anew."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[Hypothesis] = []
    for made in range(1, longest + 1):
        longer = sorted(grown(logs, beams), key=lambda one: -one[0])
        for total, ids in longer[:count]:
            if ids[-1] in ends or made == longest:
                ended.append(Hypothesis(ids, total / made**penalty, total, "end" if ids[-1] in ends else "length"))
        ended = sorted(ended, key=lambda one: -one.score)[:count]
        beams = [one for one in longer if one[1][-1] not in ends][:count]
        length = longest if stopping == "never" and penalty > 0 else made
        if len(ended) == count and (stopping is True or beams[0][0] / length**penalty <= ended[-1].score):
            break
    return ended


KINDS: dict[str, tuple[Any, ...]] = {
    "full": (af.Attention(2, position=af.Rotary()),),
    "window": (af.Attention(2, position=af.Rotary(), pattern=af.Causal() & af.Window(3)), af.Attention(2)),
    "sinks": (af.Attention(2, pattern=af.Causal() & (af.Window(2) | af.Prefix(2)), position=af.Alibi()),),
    "linear": (af.LinearAttention(2), af.Attention(2, pattern=af.Causal() & af.Window(2))),
    "recurrent": (af.Recurrent("lstm"), af.Recurrent("gru")),
}
PROMPTS = [[3, 1, 4, 1, 5, 0, 2], [2], [6, 5, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_through_the_cache_equals_each_text_read_anew(kind: str) -> None:
    model, ends = built(7, *KINDS[kind]), {4, 5}
    lengths = set()
    for stopping, penalty in itertools.product(STOPPING, (0.0, 1.0)):
        options: dict[str, Any] = {"early_stopping": stopping, "length_penalty": penalty, "num_return": 3}
        made = beam_search(model, PROMPTS, num_beams=3, max_new_tokens=8, end_ids=[*ends], **options)
        for prompt, ours in zip(PROMPTS, made, strict=True):
            logs = following(model, prompt)
            same(ours, slow(logs, count=3, longest=8, ends=ends, stopping=stopping, penalty=penalty))
            lengths.update(len(one.ids) for one in ours)
    assert len(lengths) > 2


@pytest.mark.parametrize("stopping", STOPPING)
def test_prompts_that_are_done_do_not_disturb_the_others(stopping: Any) -> None:
    model = small()
    options: dict[str, Any] = {"num_beams": 2, "num_return": 2, "max_new_tokens": 12, "end_ids": [4, 5]}
    prompts = [[first, second] * (first + 1) for first, second in itertools.product(range(3), range(6))]
    made = beam_search(model, prompts, early_stopping=stopping, **options)
    for prompt, ours in zip(prompts, made, strict=True):
        same(ours, beam_search(model, [prompt], early_stopping=stopping, **options)[0])
    assert len({max(len(one.ids) for one in row) for row in made}) > 2


def test_a_prompt_read_in_chunks_gives_the_same() -> None:
    model = small()
    whole = beam_search(model, PROMPTS, max_new_tokens=4)
    for ours, theirs in zip(beam_search(model, PROMPTS, max_new_tokens=4, prefill_chunk=2), whole, strict=True):
        same(ours, theirs)


def test_an_encoder_decoder_searches_with_a_padded_source() -> None:
    encoder = [af.Block.pre(af.Attention(2, pattern=af.Full()), af.DenseFFN(8), norm=NORM)]
    model = built(7, (af.CrossAttention(2), af.Attention(2)), encoder=encoder)
    source = torch.tensor([[5, 6, 1, 0, 0], [2, 3, 1, 4, 6]])
    keep = torch.tensor([[True, True, True, False, False], [True] * 5])
    options: dict[str, Any] = {"num_beams": 3, "num_return": 3, "max_new_tokens": 6, "end_ids": [4]}
    made = beam_search(model, [[0], [0]], source=source, source_tokens=af.Tokens.padded(keep), **options)
    for row, ours in enumerate(made):
        logs = following(model, [0], source[row, keep[row]][None])
        same(ours, slow(logs, count=3, longest=6, ends={4}))
    assert [one.ids for one in made[0]] != [one.ids for one in made[1]]
    with pytest.raises(ValueError, match="give `source` ids"):
        beam_search(model, [[0]])


def test_prompts_run_out_of_positions_each_in_its_time() -> None:
    model = built(7, af.Attention(2), embed=af.Embed(position=af.Learned(8)))
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2]]
    for stopping in STOPPING:
        made = beam_search(model, prompts, num_beams=3, end_ids=[0], early_stopping=stopping, num_return=3)
        for prompt, ours in zip(prompts, made, strict=True):
            room = 8 - len(prompt)
            same(ours, slow(following(model, prompt), count=3, longest=room, ends={0}, stopping=stopping))
    with pytest.raises(ValueError, match="a prompt of 8 tokens leaves no room in the model's 8 positions"):
        beam_search(model, [[1] * 8])


def test_one_beam_is_greedy() -> None:
    model = small()
    made = beam_search(model, PROMPTS, num_beams=1, max_new_tokens=12)
    assert [row[0].ids for row in made] == af.generate(model, PROMPTS, max_new_tokens=12).ids
    for options in ({"early_stopping": True}, {"length_penalty": 0.0}):
        made = beam_search(model, PROMPTS, num_beams=1, max_new_tokens=12, end_ids=[4, 5], **options)
        greedy = af.generate(model, PROMPTS, max_new_tokens=12, end_ids=[4, 5])
        assert [row[0].ids for row in made] == greedy.ids
        assert [row[0].reason for row in made] == greedy.reasons
    assert "end" in greedy.reasons


def test_nothing_to_search() -> None:
    assert beam_search(small(), []) == []
    assert beam_search(small(), [[1], [2]], max_new_tokens=0) == [[], []]


# -------------------------------------------------------------------------------------------------------------- scripts

A, B, C, D, END, START = range(6)
MANY = 64


class Script(nn.Module):
    """A head that reads what comes next, and how likely it is, from a table by the last token.

    What a row leaves is spread over all other tokens; a token without a row is followed by any.
    """

    def __init__(self, table: dict[int, dict[int, float]]) -> None:
        super().__init__()
        self.calls = 0
        self.logs = torch.full((MANY, MANY), -math.log(MANY))
        for token, row in table.items():
            rest = max(1 - sum(math.exp(log) for log in row.values()), 0.0) / (MANY - len(row))
            self.logs[token] = torch.tensor(rest).log()
            for after, log in row.items():
                self.logs[token, after] = log

    def model(self, dtype: torch.dtype = torch.float64) -> af.Transformer:
        """Its layers add nothing, so that the head sees which token it was."""
        spec = af.TransformerSpec(MANY, MANY, decoder=[af.Block.pre(af.DenseFFN(4), norm=NORM)])
        model = spec.build().eval()
        for weight in model.parameters():
            nn.init.zeros_(weight)
        model.tokens.weight.data.copy_(torch.eye(MANY))
        model.head = self
        return model.to(dtype)

    def forward(self, x: Tensor, tokens: object = None) -> Tensor:
        self.calls += 1
        return self.logs.to(x.dtype)[x.argmax(-1)]


def test_fault_61_the_prompt_does_not_count_in_the_divisor_and_the_end_does() -> None:
    """-2.7 / 3 beats -2.0 / 2; with ten tokens of a prompt it would not."""
    script = Script({START: {A: -1.0, B: -0.9}, A: {END: -1.0}, B: {C: -0.9}, C: {END: -0.9}})
    options: dict[str, Any] = {"num_beams": 2, "num_return": 2, "max_new_tokens": 3, "end_ids": [END]}
    best, second = beam_search(script.model(), [[START] * 10], **options)[0]
    assert (best.ids, best.score, best.logprob) == ([B, C, END], pytest.approx(-0.9), pytest.approx(-2.7))
    assert (second.ids, second.score, second.reason) == ([A, END], pytest.approx(-1.0), "end")
    best, second = beam_search(script.model(), [[START]], length_penalty=0.0, **options)[0]
    assert (best.ids, best.score, second.score) == ([A, END], pytest.approx(-2.0), pytest.approx(-2.7))


def test_fault_61_a_long_text_may_still_win() -> None:
    """-1.0 has ended; -3.3 of three tokens is -1.1 now, and -0.33 as ten tokens."""
    table = {START: {A: -1.0}, A: {B: -1.0}, B: {END: -1.0, C: -1.3}, C: {D: 0.0}, D: {D: 0.0}}
    for stopping, ids, score, calls in (
        ("never", [A, B, C, *[D] * 7], -0.33, 10),
        (False, [A, B, END], -1.0, 3),
        (True, [A, B, END], -1.0, 3),
    ):
        script = Script(table)
        best = beam_search(
            script.model(), [[START]], num_beams=1, max_new_tokens=10, end_ids=[END], early_stopping=stopping
        )[0][0]
        assert (best.ids, best.score, script.calls) == (ids, pytest.approx(score), calls)


def test_fault_61_below_zero_the_shortest_length_is_the_best_that_can_come() -> None:
    """-0.9 · 2 may still beat -2.0 · 2; -0.9 · 10 could not."""
    script = Script({START: {A: -0.5, END: -1.2}, A: {B: -0.4, END: -1.5}, B: {END: 0.0}})
    for stopping, second in (("never", -2.7), (False, -2.7), (True, -4.0)):
        made = beam_search(
            script.model(),
            [[START]],
            num_beams=2,
            max_new_tokens=10,
            end_ids=[END],
            length_penalty=-1.0,
            early_stopping=stopping,
            num_return=2,
        )[0]
        assert [one.score for one in made] == pytest.approx([-1.2, second])


def test_of_equals_the_lower_beam_and_then_the_lower_id_comes_first() -> None:
    made = beam_search(Script({}).model(), [[START]], num_beams=50, max_new_tokens=3, num_return=50)[0]
    assert [one.ids for one in made] == [[0, 0, token] for token in range(50)]
    half = {C: math.log(0.5), D: math.log(0.5)}
    script = Script({START: {A: math.log(0.5), B: math.log(0.5)}, A: half, B: half})
    made = beam_search(script.model(), [[START]], num_beams=3, max_new_tokens=2, num_return=3)[0]
    assert [one.ids for one in made] == [[A, C], [A, D], [B, C]]


@pytest.mark.parametrize("stopping", STOPPING)
def test_a_beam_that_can_only_do_as_well_is_not_followed(stopping: Any) -> None:
    script = Script({START: {END: math.log(0.5), START: math.log(0.5)}})
    options: dict[str, Any] = {"num_beams": 1, "end_ids": [END], "length_penalty": 0.0}
    assert beam_search(script.model(), [[START]], early_stopping=stopping, **options)[0][0].ids == [END]
    assert script.calls == 1


def test_a_search_that_cannot_go_on_gives_what_it_found() -> None:
    script = Script({START: {A: 0.0}, A: {END: 0.0}})
    options: dict[str, Any] = {"num_beams": 3, "num_return": 3, "end_ids": [END]}
    only, longer = beam_search(script.model(), [[START], [D]], max_new_tokens=4, **options)
    assert only == [Hypothesis([A, END], 0.0, 0.0, "end")]
    assert len(longer) == 3
    with pytest.raises(ValueError, match="leave at least one token allowed"):
        beam_search(script.model(), [[START]], max_new_tokens=4, min_new_tokens=3, **options)


def test_sums_of_half_precision_are_kept_in_float32() -> None:
    made = beam_search(Script({}).model(torch.bfloat16), [[START]], num_beams=2, max_new_tokens=50)
    assert made[0][0].logprob == pytest.approx(-50 * math.log(MANY), abs=1e-3)


def test_numbers_that_are_none_are_found() -> None:
    with pytest.raises(ValueError, match="look for NaN or overflow"):
        beam_search(Script({START: {A: math.nan}}).model(), [[START]], max_new_tokens=2)


# ---------------------------------------------------------------------------------------------------------------- rules


def test_the_rules_of_a_sampling_that_change_logits_act() -> None:
    model = small()
    sampling = af.Sampling(
        logit_bias={2: 0.7, 6: -math.inf}, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    )

    def ruled(prompt: list[int]) -> Following:
        def changed(logit: float, token: int, ids: list[int]) -> float:
            logit += {2: 0.7, 6: -math.inf}.get(token, 0.0)
            if token in prompt + ids:
                logit = logit / 1.3 if logit > 0 else logit * 1.3
            return logit - 0.4 * ids.count(token) - 0.3 * (token in ids)

        @torch.inference_mode()
        def logs(texts: list[list[int]]) -> list[list[float]]:
            out = model(torch.tensor([prompt + ids for ids in texts]))[:, -1]
            for row, ids in zip(out, texts, strict=True):
                row.copy_(row.new_tensor([changed(logit, token, ids) for token, logit in enumerate(row.tolist())]))
            return out.log_softmax(-1).tolist()

        return logs

    made = beam_search(model, PROMPTS, num_beams=3, max_new_tokens=8, end_ids=[4], num_return=3, sampling=sampling)
    for prompt, ours in zip(PROMPTS, made, strict=True):
        same(ours, slow(ruled(prompt), count=3, longest=8, ends={4}))


def test_a_rule_does_not_lose_what_is_hardly_likely() -> None:
    script, sampling = Script({START: {A: 0.0, B: -200.0}}), af.Sampling(presence_penalty=0.1)
    made = beam_search(
        script.model(torch.float32), [[START]], num_beams=2, max_new_tokens=1, num_return=2, sampling=sampling
    )[0]
    assert [(one.ids, one.logprob) for one in made] == [([A], 0.0), ([B], pytest.approx(-200.0))]


def test_a_sampling_without_rules_changes_nothing() -> None:
    model = small()
    plain, ruled = (beam_search(model, PROMPTS, max_new_tokens=8, sampling=one) for one in (None, af.Sampling()))
    for ours, theirs in zip(ruled, plain, strict=True):
        same(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "`num_beams` must be at least 1, but is 0"),
        ({"num_beams": 2, "num_return": 3}, r"`num_return` must be from 1 to `num_beams` \(2\), but is 3"),
        ({"num_return": 0}, "but is 0"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be at least 0, but is -1"),
        ({"early_stopping": "ever"}, "`early_stopping` must be True, False or \"never\", but is 'ever'"),
        ({"length_penalty": math.nan}, "`length_penalty` must be a finite number .* but is nan"),
        ({"sampling": af.Sampling(temperature=0.5)}, "draws nothing, so `temperature` must be left out, but is 0.5"),
        ({"sampling": af.Sampling(top_k=3)}, "`top_k` must be left out"),
        ({"sampling": af.Sampling(seed=3)}, "`seed` must be left out"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(small(), [[1]], **options)


# --------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", ["llama-grouped", "mistral", "t5", "bart"])
def test_hypotheses_and_scores_equal_theirs(name: str, tmp_path: Path) -> None:
    """Two prompts of different lengths, many end tokens, every way to stop."""
    parity = pytest.importorskip("parity", reason="transformers is not installed")
    case, new, ends = parity.make(name, tmp_path), 8, list(range(7, 99, 6))
    theirs, batch = copy.deepcopy(case.theirs), parity.text(case.theirs, (13, 9))
    theirs.generation_config.update(eos_token_id=ends, forced_eos_token_id=None, pad_token_id=0)
    prompts = [row[keep].tolist() for row, keep in zip(batch.ids, batch.keep, strict=True)]
    source: dict[str, Any] = {}
    if case.both_stacks:
        prompts = [[theirs.config.decoder_start_token_id]] * 2
        source = {"source": batch.ids, "source_tokens": batch.tokens()}
    reasons = set()
    for stopping, penalty in itertools.product(STOPPING, (-0.5, 1.0)):
        ours = beam_search(
            case.ours,
            prompts,
            num_beams=4,
            max_new_tokens=new,
            end_ids=ends,
            length_penalty=penalty,
            early_stopping=stopping,
            num_return=3,
            **source,
        )
        made = theirs.generate(
            batch.ids,
            attention_mask=batch.keep.long(),
            do_sample=False,
            num_beams=4,
            max_new_tokens=new,
            length_penalty=penalty,
            early_stopping=stopping,
            num_return_sequences=3,
            return_dict_in_generate=True,
            output_scores=True,
        )
        width = 1 if case.both_stacks else batch.ids.shape[1]
        flat = [one for row in ours for one in row]
        assert [one.ids for one in flat] == [until_end(row[width:], ends) for row in made.sequences.tolist()]
        assert [one.score for one in flat] == pytest.approx(made.sequences_scores.tolist(), abs=1e-4)
        reasons.update(one.reason for one in flat)
    assert reasons == {"end", "length"}


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    """What was made, without the padding behind its end."""
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]
