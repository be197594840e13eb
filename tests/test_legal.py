"""The table of what goes together: every rule refuses something, in the place where it is broken, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import anyformer as af
from anyformer.parts.legal import RULES, refuse

NORM = af.RMSNorm()
TWO = af.PerHead((af.Causal(), af.Causal() & af.Window(2)))
SEEN = af.Attention(2, pattern=af.Full())


def spec(*, encoder: tuple[Any, ...] = (), decoder: tuple[Any, ...] = (), **more: Any) -> af.TransformerSpec:
    """A model of one block a stack, of these ops."""
    stacks = {"encoder": encoder, "decoder": decoder}
    blocks = {name: [af.Block.pre(*ops, norm=NORM)] for name, ops in stacks.items() if ops}
    return af.TransformerSpec(dim=8, vocab_size=9, **blocks, **more)


BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "input_position_in_mixer": (lambda: af.Attention(2, position=af.Sinusoidal()), "position 'sinusoidal' acts on the"),
    "heads_share_patterns": (lambda: af.Attention(3, pattern=TWO), "3 heads cannot be shared out evenly to 2"),
    "cross_sees_all": (lambda: af.CrossAttention(2, position=af.Rotary()), "positions of two different texts"),
    "linear_sums": (lambda: af.LinearAttention(2, pattern=af.Window(3)), "linear attention keeps one sum"),
    "linear_has_no_scores": (lambda: af.LinearAttention(2, position=af.Alibi()), "position 'alibi' acts on the scores"),
    "mixer_position_in_embed": (lambda: af.Embed(position=af.Rotary()), "position 'rotary' acts on heads: put it"),
    "alike_in_formulas": (lambda: af.Causal() & TWO, "And cannot hold a PerHead"),
    "experts_do_not_route": (lambda: af.MoE(af.MoE(af.DenseFFN(4), 2), 2), "an expert cannot be a mixture"),
    "one_norm_is_parallel": (lambda: af.Block((af.Branch(SEEN),), norm=NORM), "`norm` is for parallel blocks"),
    "parallel_has_no_after": (lambda: af.Block((af.Branch(SEEN, after=NORM),), "parallel"), "a parallel block has one"),
    "no_look_ahead": (lambda: spec(decoder=(SEEN,)), "decoder.0.mixer: pattern Full() looks ahead"),
    "marked_in_encoder": (
        lambda: spec(decoder=(af.GlobalAttention(2, pattern=af.Causal()),)),
        "decoder.0.mixer: 'global_attention' lets marked tokens see",
    ),
    "recurrent_in_decoder": (lambda: spec(encoder=(af.Recurrent(),)), "encoder.0.mixer: a recurrent network reads"),
    "cross_in_decoder": (lambda: spec(encoder=(af.CrossAttention(2),)), "encoder.0.cross: cross-attention belongs"),
    "cross_needs_encoder": (lambda: spec(decoder=(af.CrossAttention(2),)), "decoder.0.cross: cross-attention needs"),
    "encoder_is_read": (
        lambda: spec(encoder=(SEEN,), decoder=(af.Attention(2),)),
        "the decoder has no cross-attention",
    ),
    "pooled_sees_text": (lambda: spec(decoder=(af.Attention(2),), head=af.PooledHead()), "head 'pooled' reads the"),
}
"""By the name of each rule: what breaks it, and how the refusal begins."""


@pytest.mark.parametrize("name", [rule.broken.__name__ for rule in RULES])
def test_every_rule_refuses(name: str) -> None:
    make, said = BROKEN[name]
    with pytest.raises(af.SpecError) as refused:
        make()
    assert str(refused.value).startswith(said)


def test_the_table_is_all_there_is() -> None:
    """Every rule has its case above, a sentence for people, and slots that it joins."""
    assert sorted(BROKEN) == sorted(rule.broken.__name__ for rule in RULES)
    assert all(rule.says.endswith(".") and rule.between for rule in RULES)


def test_marked_tokens_in_a_decoder_see_no_later_ones() -> None:
    """What the refusal of global attention proposes is legal."""
    pattern = af.Causal() & (af.Window(2) | af.Global())
    assert spec(decoder=(af.Attention(2, pattern=pattern),)).decoder[0].mixer.pattern == pattern


class OwnRecurrence(af.Mixer, kind="own_recurrence_of_this_test"):
    one_way = True


def test_parts_from_elsewhere_obey_by_what_they_say_of_themselves() -> None:
    with pytest.raises(af.SpecError, match="reads left to right"):
        refuse("encoder", OwnRecurrence())
    refuse("decoder", OwnRecurrence())
