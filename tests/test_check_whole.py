"""The laws of whole models hold for models of every kind, and find the faults that are planted."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import Fault, patched, wrapped
from torch import Tensor, nn

import anyformer as af
from anyformer import block as blocks
from anyformer.cache import Cache
from anyformer.check import ours
from anyformer.check.changed import without_dropout
from anyformer.check.laws import precision, whole
from anyformer.check.run import check
from anyformer.checkpoint.load import Loaded
from anyformer.parts import ffn
from anyformer.parts.embed import EmbedModule
from anyformer.parts.head import LMHeadModule
from anyformer.parts.norm import RMSNormModule
from anyformer.parts.position import RotaryModule

DIM, VOCAB, NORM = 16, 17, af.RMSNorm()
NAMES = [law.name for law in (*whole.LAWS, *precision.LAWS)]


def decoder(mixer: af.Op | None = None, ffn: af.Op | None = None, **fields: Any) -> af.TransformerSpec:
    block = af.Block.pre(mixer or af.Attention(4, 2, position=af.Rotary()), ffn or af.GatedFFN(8), norm=NORM)
    return af.TransformerSpec(**{"dim": DIM, "vocab_size": VOCAB, "decoder": (block,) * 2, "final_norm": NORM} | fields)


def encoder(mixer: af.Op, **fields: Any) -> af.TransformerSpec:
    block = af.Block.post(mixer, af.DenseFFN(8), norm=af.LayerNorm())
    embed = af.Embed(position=af.Learned(16), token_types=2, norm=af.LayerNorm())
    return af.TransformerSpec(dim=DIM, vocab_size=VOCAB, embed=embed, encoder=(block,) * 2, **fields)


def both() -> af.TransformerSpec:
    bias = af.RelativeBias()
    reader = af.Block.pre(
        af.Attention(4, pattern=af.Full(), position=bias.replace(bidirectional=True)), NONE, norm=NORM
    )
    writer = af.Block.pre(af.Attention(4, position=bias), af.CrossAttention(4), NONE, norm=NORM)
    return decoder(decoder=(writer,) * 2, encoder=(reader,) * 2)


def dropped() -> af.TransformerSpec:
    some = af.Block.pre(af.Attention(4, dropout=0.5), af.DenseFFN(8, dropout=0.5), norm=NORM, dropout=0.5)
    return decoder(decoder=(some,) * 2, embed=af.Embed(dropout=0.5))


NONE = af.DenseFFN(8, bias=False)
SPECS: dict[str, Callable[[], af.TransformerSpec]] = {
    "few positions": lambda: decoder(af.Attention(4), embed=af.Embed(position=af.Learned(3))),
    "one position": lambda: decoder(af.Attention(4), embed=af.Embed(position=af.Learned(1))),
    "dynamic": lambda: decoder(af.Attention(4, position=af.Rotary(frequencies=af.DynamicNTK(4, 4)))),
    "window": lambda: decoder(af.Attention(4, 1, head_dim=6, pattern=af.Causal() & af.Window(3))),
    "heads differ": lambda: decoder(af.Attention(4, pattern=af.PerHead((af.Causal(), af.Causal() & af.Window(2))))),
    "experts": lambda: decoder(ffn=af.MoE(af.GatedFFN(8), 4, shared=af.DenseFFN(8))),
    "dropout": dropped,
    "no norms": lambda: decoder(
        decoder=(af.Block((af.Branch(af.Attention(4)), af.Branch(af.GatedFFN(8)))),), final_norm=None
    ),
    "linear": lambda: decoder(af.LinearAttention(4, 2)),
    "recurrent": lambda: decoder(af.Recurrent("lstm", hidden=8, layers=2)),
    "marks": lambda: encoder(af.GlobalAttention(4, pattern=af.Window(2) | af.Global())),
    "pooled": lambda: encoder(af.Attention(4, pattern=af.Full()), head=af.PooledHead(3, dropout=0.5)),
    "masked words": lambda: encoder(af.Attention(4, pattern=af.Full()), head=af.MaskedLMHead()),
    "no head": lambda: encoder(af.Attention(4, pattern=af.Window(3)), head=None),
    "encoder-decoder": both,
}


@pytest.mark.parametrize("law", NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_the_laws_hold(name: str, law: str) -> None:
    found = check(SPECS[name]().build(), only=[law])[law]
    assert found.verdict == "pass", f"{found.figure()} {found.smallest} {found.why}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_laws_hold_of_models_in_half_precision(dtype: torch.dtype) -> None:
    report = check(decoder().build(dtype=dtype), only=NAMES)
    assert [finding.verdict for finding in report.findings] == ["pass"] * len(NAMES), str(report)


def test_without_dropout() -> None:
    spec = dropped()
    plain = without_dropout(spec)
    assert "dropout" not in repr(plain)
    assert without_dropout(plain) == plain
    assert plain.replace(embed=spec.embed, decoder=spec.decoder) == spec


# -- planted faults ---------------------------------------------------------------------------------------------------


def drawing(inner: Any, *args: Any) -> Tensor:
    """Noise that is drawn always, and added in training alone."""
    x: Tensor = inner(*args)
    noise = torch.randn_like(x)
    return x + noise if args[0].training else x


def untied(load: Any, folder: str) -> Loaded:
    loaded: Loaded = load(folder)
    loaded.model.head.weight = nn.Parameter(loaded.model.head.weight.detach().clone())
    return loaded


def in_half(save: Any, model: af.Transformer, folder: str) -> None:
    save(copy.deepcopy(model).half().float(), folder)


def looked_up(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids.view(-1), self.weight).view(*ids.shape, self.weight.shape[1])


def phases_in_half(self: RotaryModule, x: Tensor, tokens: af.Tokens, ctx: Any) -> tuple[Tensor, Tensor]:
    inverse = torch.tensor(self.spec.frequencies.inverse(x.shape[-1], self.spec.base, 0), dtype=x.dtype)
    angles = (tokens.row().pos.to(x.dtype)[..., None] * inverse)[:, :, None]
    return angles.cos(), angles.sin()


def norm_in_half(self: RMSNormModule, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


FAULTS: dict[str, Fault] = {
    "dropout in evaluation": Fault(
        "evaluation", dropped, patched(nn.Dropout, "forward", lambda self, x: F.dropout(x, self.p))
    ),
    "noise drawn in evaluation": Fault("evaluation", decoder, wrapped(EmbedModule, "forward", drawing)),
    "a tie broken by loading": Fault("saving", decoder, wrapped(ours, "load", untied)),
    "saved in half precision": Fault("saving", decoder, wrapped(ours, "save", in_half)),
    "view in place of reshape": Fault("shapes", decoder, patched(nn.Embedding, "forward", looked_up)),
    "squeezed": Fault(
        "shapes", decoder, wrapped(LMHeadModule, "forward", lambda inner, *args: inner(*args).squeeze(0))
    ),
    "phases in half precision": Fault("half", decoder, patched(RotaryModule, "phases", phases_in_half)),
    "squares in half precision": Fault("half", decoder, patched(RMSNormModule, "forward", norm_in_half)),
    "a sum that overflows": Fault("half", decoder, patched(blocks, "saturate", lambda x: x)),
    "a bias not counted": Fault(
        "costs",
        lambda: decoder(ffn=af.DenseFFN(8)),
        wrapped(ffn, "linear", lambda inner, inputs, outputs, length, bias=False: inner(inputs, outputs, length)),
    ),
    "operations of half the pairs": Fault(
        "costs",
        decoder,
        wrapped(
            af.Attention,
            "cost",
            lambda inner, self, dim, length: inner(self, dim, length).plus(af.Cost(flops=-2 * dim * length**2)),
        ),
    ),
    "a cache twice as long": Fault(
        "costs", decoder, wrapped(Cache, "_new_slots", lambda inner, self, reach, first: inner(self, 2 * reach, first))
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    FAULTS[name].assert_found()


def test_what_is_said_can_be_tried_again() -> None:
    assert "head.weight = tokens.weight" in FAULTS["a tie broken by loading"].judged(planted=True)
    assert "torch.float16: ids [[" in FAULTS["a sum that overflows"].judged(planted=True)
    assert "parameters: " in FAULTS["a bias not counted"].judged(planted=True)


# -- compiled ---------------------------------------------------------------------------------------------------------

COMPILED = """
import torch
from unittest import mock
from planted import Fault
from anyformer import *
from anyformer.parts.norm import RMSNormModule

def decoder(*ops):
    return TransformerSpec(dim=16, vocab_size=17, decoder=(Block.pre(*ops, norm=RMSNorm()),), final_norm=RMSNorm())

def rotary():
    return decoder(Attention(4, position=Rotary()), GatedFFN(8))

def encoder():
    blocks = (Block.pre(Attention(4, pattern=Full()), DenseFFN(8), norm=RMSNorm()),)
    return TransformerSpec(dim=16, vocab_size=17, embed=Embed(position=Learned(7)), encoder=blocks)

inner = RMSNormModule.forward

def counting(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return inner(self, x)

def another_way(self, x):
    return inner(self, x) * 1.01 if torch.compiler.is_compiling() else inner(self, x)

def judged(spec, forward=inner):
    fault = Fault("compiled", spec, lambda s: mock.patch.object(RMSNormModule, "forward", forward))
    return fault.judged(planted=forward is not inner)

print("holds", judged(rotary))
print("a count kept by a module", judged(encoder, counting))
print("another way when compiled", judged(encoder, another_way))
"""


def test_compiled_holds_and_finds_planted_faults() -> None:
    """In a process of its own, as users run it: without the checks of signatures, which the compiler would trace."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILED)]
    here = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=here)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "holds pass",
        "a count kept by a module fail",
        "another way when compiled fail",
    ], lines
    assert "graphs were made up to here" in lines[1]
    assert "compiled, the answer is another" in lines[2]
