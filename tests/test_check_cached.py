"""The laws of decoding hold for models of every kind, and find the faults that are planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planted import Fault, Foreign, patched, wrapped
from torch import Tensor

import anyformer as af
from anyformer.accelerate.fast import Step
from anyformer.accelerate.operators import has_numba
from anyformer.cache import Cache, State
from anyformer.check.laws import cached
from anyformer.check.ours import Ours
from anyformer.check.run import check, judge
from anyformer.check.subject import Text
from anyformer.generate import sampling
from anyformer.generate.loop import Running
from anyformer.kernels.base import Request
from anyformer.parts.position import Rotary, RotaryModule
from anyformer.slots import Ring, Slots
from anyformer.tokens import Tokens

DIM, VOCAB, NORM = 16, 17, af.RMSNorm()
NAMES = [law.name for law in cached.LAWS]
NO_HEAD = "only a decoder with logits over its vocabulary generates"
needs_numba = pytest.mark.skipif(not has_numba(), reason="numba, which runs the accelerated decoder, is not installed")


def decoder(mixer: af.Op | None = None, position: af.Position | None = None, **fields: Any) -> af.TransformerSpec:
    mixer = mixer or af.Attention(4, 2, position=None if position else Rotary())
    wiring = fields.pop("wiring", af.Block.pre)
    block = wiring(mixer, *fields.pop("cross", ()), fields.pop("ffn", af.GatedFFN(8)), norm=NORM)
    fields = {"embed": af.Embed(position=position), "final_norm": NORM, **fields}
    return af.TransformerSpec(dim=DIM, vocab_size=VOCAB, decoder=(block, block), **fields)


def window(size: int) -> af.TransformerSpec:
    return decoder(af.Attention(4, 2, pattern=af.Causal() & af.Window(size), position=Rotary()))


def both() -> af.TransformerSpec:
    reader = af.Block.pre(af.Attention(4, pattern=af.Full()), af.DenseFFN(8), norm=NORM)
    return decoder(af.Attention(4), cross=(af.CrossAttention(4),), encoder=(reader,))


def dynamic() -> af.TransformerSpec:
    return decoder(af.Attention(4, position=Rotary(frequencies=af.DynamicNTK(factor=4, original_len=4))))


def prefix(size: int, position: af.Position | None = None) -> af.TransformerSpec:
    return decoder(af.Attention(4, pattern=af.Causal() | af.Prefix(size)), position)


SPECS: dict[str, af.TransformerSpec] = {
    "few_positions": decoder(position=af.Learned(3)),
    "one_position": decoder(position=af.Learned(1)),
    "window_100": window(100),
    "prefix": prefix(4),
    "prefix_and_few_positions": prefix(6, af.Learned(8)),
    "prefix_of_all_positions": prefix(8, af.Learned(8)),
    "sinks": decoder(af.Attention(4, pattern=af.Causal() & (af.Window(3) | af.Prefix(2)))),
    "marks": decoder(af.Attention(4, pattern=af.Causal() & (af.Window(3) | af.Global()))),
    "moe": decoder(ffn=af.MoE(af.DenseFFN(8), 4)),
    "dropout": decoder(af.Attention(4, dropout=0.5), af.Learned(8), head=af.LMHead(softcap=3.0)),
    "no_head": decoder(head=None),
    "linear": decoder(af.LinearAttention(4, 2)),
    "recurrent": decoder(af.Recurrent("lstm")),
    "encoder_decoder": both(),
}
REASONS = {
    ("generation", "no_head"): NO_HEAD,
    ("generation", "one_position"): "it has 1 positions: too few for a new token",
    ("generation", "prefix_of_all_positions"): "it has 8 positions: too few for a new token",
}


@pytest.mark.parametrize("name", SPECS)
def test_the_laws_hold(name: str) -> None:
    for found in check(SPECS[name].build(), only=NAMES).findings:
        reason = REASONS.get((found.law, name), "")
        assert (found.verdict, found.why) == (("not applicable", reason) if reason else ("pass", "")), str(found)


def test_the_laws_hold_in_half_precision() -> None:
    assert check(decoder().build(dtype=torch.bfloat16), only=NAMES).lawful


def test_encoders_have_no_cache() -> None:
    block = af.Block.pre(af.Attention(4, pattern=af.Full()), norm=NORM)
    report = check(af.TransformerSpec(dim=DIM, vocab_size=VOCAB, encoder=(block,)).build(), only=NAMES)
    assert [found.why for found in report.findings] == ["an encoder reads its text at once", NO_HEAD]


# -- planted faults ---------------------------------------------------------------------------------------------------


def one_slot_short(old: Any, self: Cache, reach: int, first: int) -> Slots:
    slots: Slots = old(self, reach, first)
    return Ring(self.batch, reach - 1, self.device) if type(slots) is Ring else slots


def counted_from_the_piece(old: Any, self: Any, spec: Any, tokens: Tokens, *rest: Any) -> tuple[Tensor, Tensor]:
    pos = torch.arange(tokens.length).expand(tokens.batch, -1)
    found: tuple[Tensor, Tensor] = old(self, spec, Tokens(pos, tokens.seg), *rest)
    return found


def planned_for_the_piece(old: Any, self: Any, spec: Any, tokens: Tokens, width: int, wide: Any, length: Any) -> Any:
    return old(self, spec, tokens, width, wide, None)


def padding_as_text(old: Any, self: Slots, write: Any, tokens: Tokens) -> Tokens:
    kept: Tokens = old(self, write, Tokens(tokens.pos, tokens.seg.clamp(min=0), tokens.mark))
    return kept


def with_wrong_scale(old: Any, self: Step, request: Request) -> Tensor:
    found: Tensor = old(self, dataclasses.replace(request, scale=1.0))
    return found


def noted_late(old: Any, self: Running, *given: Any) -> dict[int, str]:
    self.made -= 1
    reasons: dict[int, str] = old(self, *given)
    self.made += 1
    return reasons


def never_ending(old: Any, self: Running, tokens: Tokens, most: int, least: int, ends: Any, max_len: Any) -> None:
    old(self, tokens, most, least, (), max_len)


def boundless(old: Any, self: Running, tokens: Tokens, most: int, least: int, ends: Any, max_len: Any) -> None:
    old(self, tokens, most, least, ends, None)


def after_the_columns(self: Tokens, length: int = 1) -> Tokens:
    return Tokens.arange(self.batch, length, start=int(self.pos[:, -1].max()) + 1)


def one_seed_for_all(seed: Any, batch: int) -> list[int]:
    first = seed[0] if isinstance(seed, tuple) else seed
    return [first + row for row in range(batch)]


FAULTS: dict[str, Fault] = {
    "a ring that lacks a slot": Fault("cache", lambda: window(20), wrapped(Cache, "_new_slots", one_slot_short)),
    "each piece begins at position 0": Fault(
        "cache", decoder, wrapped(RotaryModule, "_phases", counted_from_the_piece)
    ),
    "each piece plans for its own length": Fault(
        "cache", dynamic, wrapped(RotaryModule, "_phases", planned_for_the_piece)
    ),
    "a state is not kept": Fault(
        "cache", lambda: decoder(af.LinearAttention(4)), patched(State, "keep", lambda self, value: None)
    ),
    "padding in the cache is read": Fault("cache", decoder, wrapped(Slots, "_record", padding_as_text)),
    "too many by one": Fault("generation", decoder, wrapped(Running, "note", noted_late)),
    "end tokens are passed over": Fault("generation", decoder, wrapped(Running, "__init__", never_ending)),
    "positions are not counted": Fault(
        "generation", lambda: decoder(position=af.Learned(8)), wrapped(Running, "__init__", boundless)
    ),
    "padding moves what is new": Fault("generation", decoder, patched(Tokens, "after", after_the_columns)),
    "a seed of the neighbour": Fault("generation", decoder, patched(sampling, "_row_seeds", one_seed_for_all)),
    "a seed that is not used": Fault(
        "generation", decoder, patched(sampling, "_row_seeds", lambda seed, batch: torch.randint(99, (batch,)).tolist())
    ),
    "the same draws for every seed": Fault(
        "generation", decoder, patched(sampling, "_row_seeds", lambda seed, batch: [0] * batch)
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    fault.assert_found()


@needs_numba
def test_a_fault_of_the_accelerated_decoder_is_found() -> None:
    spec = decoder(wiring=af.Block.parallel)
    fault = Fault("cache", lambda: spec, wrapped(Step, "__call__", with_wrong_scale))
    fault.assert_found()
    assert "one by one by the accelerated decoder" in fault.judged(planted=True)


# -- what is measured -------------------------------------------------------------------------------------------------


def test_a_window_that_no_text_leaves_is_told() -> None:
    said = [trial.said for trial in cached.cache.run(Ours(window(100).build().eval()).anew(torch.float64))]
    assert any("(a window of 100 tokens is not left)" in text for text in said)
    said = [trial.said for trial in cached.cache.run(Ours(window(20).build().eval()).anew(torch.float64))]
    assert not any("is not left" in text for text in said)


def test_a_prefix_is_never_cut() -> None:
    subject = Ours(prefix(4).build())
    text = subject.text(2, 9, tokens=Tokens.packed(torch.tensor([[0] * 5 + [1] * 4, [-1] * 2 + [0] * 7])))
    assert cached._pieces(subject, text, range(1, 9)) == [9]
    text = subject.text(1, 9)
    assert cached._pieces(subject, text, range(1, 9)) == [4, 1, 1, 1, 1, 1]
    text = subject.text(1, 9, tokens=Tokens.packed(torch.tensor([[0] * 5 + [1] * 4])))
    assert cached._pieces(subject, text, range(1, 9)) == [4, 1, 4]


def test_wrong_ids_are_counted() -> None:
    subject = Ours(decoder().build().eval()).anew(torch.float64)
    prompt = [3, 1]
    (new,) = subject.generated([prompt], max_new_tokens=4, temperature=0.0)
    best = cached._wrong(subject, prompt, new, 4, ())
    assert best == 0
    worse = [*new[:-1], (new[-1] + 1) % VOCAB]
    assert cached._wrong(subject, prompt, worse, 4, ()) == 1
    assert cached._wrong(subject, prompt, new, 3, ()) == 1
    assert cached._wrong(subject, prompt, new[:2], 4, ()) == 2
    assert cached._wrong(subject, prompt, new, 4, new[:1]) == 3


def test_models_of_others_that_cannot_be_asked() -> None:
    subject = Foreign(decoder().build(), VOCAB)
    reasons = [judge(law, subject).why for law in cached.LAWS]
    assert reasons == ["this kind of model has no cache that could be asked", "this kind of model does not generate"]


def test_models_of_others_are_given_no_empty_piece() -> None:
    class Reading(Foreign):
        max_len = 4  # where cuts fall on the end

        def by_pieces(self, text: Text, split: Sequence[int]) -> Tensor:
            splits.append([*split])
            return self.answer(text)

    splits: list[list[int]] = []
    assert check(Reading(decoder().build(), VOCAB), only=["cache"])["cache"].verdict == "pass"
    assert len(splits) > 10
    assert all(min(split) > 0 for split in splits)
