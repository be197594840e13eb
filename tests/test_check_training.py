"""The laws of training hold for models of every kind, and find the faults that are planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import Fault, patched
from torch import Tensor

import anyformer as af
from anyformer import init
from anyformer.check.changed import small
from anyformer.check.laws import training
from anyformer.check.ours import Ours
from anyformer.check.run import check
from anyformer.kernels import sdpa
from anyformer.parts.embed import EmbedModule
from anyformer.parts.ffn import GatedFFNModule
from anyformer.parts.head import LMHeadModule
from anyformer.parts.moe import MoEModule
from anyformer.parts.norm import RMSNormModule
from anyformer.parts.position import LearnedModule
from anyformer.presets import PRESETS
from anyformer.train import loss

DIM, VOCAB, NORM, BIASES = 16, 17, af.RMSNorm(), ("q", "k", "v", "out")


def decoder(mixer: af.Op | None = None, ffn: af.Op | None = None, **fields: Any) -> af.TransformerSpec:
    block = af.Block.pre(mixer or af.Attention(4, 2, position=af.Rotary()), ffn or af.GatedFFN(8), norm=NORM)
    return af.TransformerSpec(**{"dim": DIM, "vocab_size": VOCAB, "decoder": (block,) * 2, "final_norm": NORM} | fields)


def encoder(mixer: af.Op, **fields: Any) -> af.TransformerSpec:
    block = af.Block.post(mixer, af.DenseFFN(8), norm=af.LayerNorm())
    embed = af.Embed(position=af.Learned(16), norm=af.LayerNorm())
    return af.TransformerSpec(dim=DIM, vocab_size=VOCAB, embed=embed, encoder=(block,) * 2, **fields)


def both() -> af.TransformerSpec:
    reader = af.Block.pre(af.Attention(4, pattern=af.Full()), af.DenseFFN(8), norm=NORM)
    writer = af.Block.pre(af.Attention(4), af.CrossAttention(4, bias=BIASES), af.DenseFFN(8), norm=NORM)
    return decoder(decoder=(writer,) * 2, encoder=(reader,) * 2)


SPECS: dict[str, Callable[[], af.TransformerSpec]] = {
    "few positions": lambda: decoder(af.Attention(4), embed=af.Embed(position=af.Learned(3))),
    "dynamic": lambda: decoder(af.Attention(4, position=af.Rotary(frequencies=af.DynamicNTK(4, 4)))),
    "prefix and biases": lambda: decoder(af.Attention(4, pattern=af.Causal() | af.Prefix(4), bias=BIASES)),
    "one key": lambda: decoder(af.Attention(4, pattern=af.Causal() & af.Window(1), position=af.RelativeBias())),
    "experts and dropout": lambda: decoder(af.Attention(4, dropout=0.5), af.MoE(af.DenseFFN(8, dropout=0.5), 8, 1)),
    "one expert": lambda: decoder(ffn=af.MoE(af.GatedFFN(8), 1, 1)),
    "linear": lambda: decoder(af.LinearAttention(4, position=af.Rotary())),
    "recurrent": lambda: decoder(af.Recurrent("lstm"), embed=af.Embed(scale="sqrt_dim")),
    "marks": lambda: encoder(af.GlobalAttention(4, pattern=af.Window(2) | af.Global(), bias=BIASES)),
    "pooled": lambda: encoder(af.Attention(4, pattern=af.Full()), head=af.PooledHead(3)),
    "no head": lambda: encoder(af.Attention(4, pattern=af.Full(), bias=BIASES), head=None),
    "encoder-decoder": both,
}
REASONS = {
    "an encoder may look ahead",
    "its answers are no logits over the vocabulary",
}


@pytest.mark.parametrize("law", [law.name for law in training.LAWS])
@pytest.mark.parametrize("name", SPECS)
def test_the_laws_hold(name: str, law: str) -> None:
    found = check(SPECS[name]().build(), only=[law])[law]
    assert found.verdict == "pass" or found.why in REASONS, f"{found.figure()} {found.smallest} {found.why}"


def test_one_position_teaches_nothing_of_the_next() -> None:
    report = check(decoder(af.Attention(4), embed=af.Embed(position=af.Learned(1))).build(), only=["noise", "dead"])
    assert report["noise"].why == "it has no positions for a token that is hidden from another"
    assert report["dead"].why == "it has one position, so no token meets another"


# -- planted faults ---------------------------------------------------------------------------------------------------


def batch_statistics(self: RMSNormModule, x: Tensor) -> Tensor:
    return x * (x.square().mean((0, 1, 2), keepdim=True) + 1e-6).rsqrt() * self.weight


def batch_norm_in_training(self: RMSNormModule, x: Tensor) -> Tensor:
    axes = (0, 1) if self.training else -1
    return x * (x.square().mean(axes, keepdim=True) + 1e-6).rsqrt() * self.weight


def never_the_last(self: MoEModule, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = logits[:, :-1].softmax(-1).topk(self.spec.top_k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def with_the_next(self: EmbedModule, x: Tensor, tokens: af.Tokens, types: Tensor | None = None) -> Tensor:
    """A token shift that rolls the wrong way."""
    return x + x.roll(-1, 1)


FAULTS: dict[str, Fault] = {
    "statistics of the batch": Fault("accumulation", decoder, patched(RMSNormModule, "forward", batch_statistics)),
    "statistics of the batch, in training alone": Fault(
        "accumulation", decoder, patched(RMSNormModule, "forward", batch_norm_in_training)
    ),
    "each piece averaged by itself": Fault(
        "accumulation", decoder, patched(loss._CrossEntropy, "apply", F.cross_entropy)
    ),
    "first weights ten times too large": Fault(
        "initial_loss",
        decoder,
        patched(init, "_tables", lambda model, std, _as_it_was=init._tables: _as_it_was(model, lambda w: 10 * std(w))),
    ),
    "logits not scaled": Fault(
        "initial_loss",
        decoder,
        patched(LMHeadModule, "project", lambda self, x: F.linear(x, self.weight * x.shape[-1] ** 0.5)),
    ),
    "no mask on the fast path": Fault("noise", decoder, patched(sdpa, "_sees_all", lambda request: True)),
    "a shift the wrong way": Fault("noise", decoder, patched(EmbedModule, "forward", with_the_next)),
    "an expert never used": Fault(
        "dead", lambda: decoder(ffn=af.MoE(af.GatedFFN(8), 4)), patched(MoEModule, "route", never_the_last)
    ),
    "a map detached": Fault(
        "dead",
        decoder,
        patched(
            GatedFFNModule,
            "forward",
            lambda self, x, ctx: (self.down(F.silu(self.gate(x)) * self.up(x).detach()), None),
        ),
    ),
    "a table read as data": Fault(
        "dead",
        lambda: decoder(af.Attention(4), embed=af.Embed(position=af.Learned(16))),
        patched(LearnedModule, "at_input", lambda self, x, tokens: x + F.embedding(tokens.pos, self.table.data)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    FAULTS[name].assert_found()


def test_dead_parameters_are_named() -> None:
    said = FAULTS["an expert never used"].judged(planted=True)
    assert said.startswith("fail: 6 of 0 parameters no gradient reaches decoder.layers.0.ffn.op.experts.3.gate.weight")


# -- the same parts, small --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_small_models_have_the_same_parts(name: str) -> None:
    spec = af.preset(name)
    narrow = small(spec)
    for stack, blocks in spec.stacks().items():
        kinds = {tuple(type(branch.op) for branch in block.branches) for block in blocks}
        assert {tuple(type(b.op) for b in block.branches) for block in narrow.stacks()[stack]} == kinds
    assert narrow.embed == spec.embed
    assert type(narrow.head) is type(spec.head)
    assert sum(p.numel() for p in narrow.build(init=None, device="meta").parameters()) < 200_000


def test_small_keeps_what_it_cannot_narrow() -> None:
    """No width of a head has 0.01 of its channels to turn."""
    spec = decoder(af.Attention(4, head_dim=200, position=af.Rotary(fraction=0.01)))
    assert small(spec) == spec


def test_gradients_are_told_to_the_last_row() -> None:
    """Against torch's own loss: one batch, no pieces."""
    torch.manual_seed(0)
    s = Ours(decoder().build(dtype=torch.float64))
    text, targets = training._ragged(s, [4, 2])
    got = training._gradients(s.module, [training._loss(s, text, targets).mean()])
    s.module.zero_grad(set_to_none=True)
    F.cross_entropy(s.model(text.ids, text.tokens).flatten(0, 1), targets.flatten()).backward()
    for name, parameter in s.module.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)
