"""Accelerated decoding gives the plain model's numbers: each operator, then whole models, then what changes in them."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyformer as af
from anyformer.accelerate import fast, fused
from anyformer.accelerate import operators as op
from anyformer.accelerate.fast import STEP, accelerate
from anyformer.accelerate.operators import FEW, operators
from anyformer.accelerate.quantize import quantize, round_int4, round_int8
from anyformer.parts.position import rotate

DIM, VOCAB, LENGTH = 12, 29, 22


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def close(found: Tensor, wanted: Tensor, relative: float = 1e-5) -> None:
    """As near as float32 can be, by the largest number."""
    assert found.shape == wanted.shape
    if wanted.numel():
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=relative * max(1.0, float(wanted.abs().max())))


def spread(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)[..., ::2]
    return wide.copy_(x)


# -- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 13, FEW, 19])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (7, 3), (31, 17), (64, 8), (97, 1)])
def test_linear(rows: int, width: int, out: int) -> None:
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    for b in (None, bias):
        wanted = F.linear(x.double(), weight.double(), None if b is None else b.double())
        close(operators.linear(x, weight, b), wanted)
        close(operators.linear(spread(x), spread(weight), b), wanted)


def test_linear_keeps_leading_axes() -> None:
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    close(operators.linear(x, weight, None), x.double() @ weight.double().T)


def test_linear_keeps_nan_and_infinity() -> None:
    x, weight = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [2.0, 1.0]]), torch.ones(1, 2)
    assert str(operators.linear(x, weight, None).flatten().tolist()) == "[nan, inf, 3.0]"


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 1, 97), (2, 3, 4, 8)])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    x, gain = torch.randn(shape), torch.randn(shape[-1])
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    close(operators.rms_norm(x, gain, eps), wanted)
    close(operators.rms_norm(spread(x), gain, eps), wanted)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("width", "turning"), [(2, 2), (8, 8), (8, 2), (14, 6), (7, 4)])
@pytest.mark.parametrize(("batch", "rows"), [(0, 1), (1, 1), (3, 1), (3, 3)])
def test_rotate(batch: int, rows: int, width: int, turning: int, layout: str) -> None:
    """Each pair is a complex number times cos + i sin."""
    x, angle = torch.randn(batch, 1, 3, width), torch.randn(rows, 1, 1, turning // 2)
    pairs = x[..., :turning].double().unflatten(-1, (2, -1) if layout == "half" else (-1, 2))
    axis = -2 if layout == "half" else -1
    turned = torch.complex(*pairs.unbind(axis)) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    wanted = torch.cat((torch.stack((turned.real, turned.imag), axis).flatten(-2), x[..., turning:].double()), -1)
    close(operators.rotate(x, angle.cos(), angle.sin(), layout), wanted)
    close(operators.rotate(spread(x), spread(angle.cos()), spread(angle.sin()), layout), wanted)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """One query a row, in float64, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    out, each = torch.zeros_like(q), q.shape[1] // k.shape[2]
    for b in range(len(q)):
        for h in range(q.shape[1]):
            some = slice(None) if seen is None else seen[b % len(seen)]
            scores = k[b, some, h // each] @ q[b, h] * scale
            out[b, h] = scores.softmax(0) @ v[b, some, h // each]
    return out


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (5, 1), (12, 6)])
@pytest.mark.parametrize(
    ("batch", "keys", "width"), [(0, 3, 4), (1, 1, 1), (1, 13, 7), (3, 5, 8), (7, 2, 3), (2, 0, 4)]
)
def test_attend(batch: int, keys: int, width: int, heads: int, groups: int) -> None:
    q = torch.randn(batch, heads, width)
    k, v = (torch.randn(batch, keys + 4, groups, width)[:, 2 : 2 + keys] for _ in range(2))  # a slice of a cache
    for seen in (None, torch.rand(batch, keys) < 0.5, torch.rand(1, keys) < 0.7):
        if seen is not None:
            seen[:1] = seen[:1] & (batch != 3)  # a row that sees nothing
        wanted = attention(q, k, v, seen, 0.4)
        close(operators.attend(q, k, v, seen, 0.4), wanted)
        close(operators.attend(spread(q), spread(k), spread(v), seen, 0.4), wanted)
        close(op.PLAIN["attend"](q, k, v, seen, 0.4), wanted)


def test_a_query_that_sees_nothing_gives_zeros_and_never_reads() -> None:
    q, k = torch.randn(2, 2, 3), torch.full((2, 4, 1, 3), torch.nan)
    k[1, 2] = 1.0
    seen = torch.tensor([[False] * 4, [False, False, True, False]])
    wanted = torch.stack((torch.zeros(2, 3), torch.ones(2, 3)))
    assert torch.equal(operators.attend(q, k, k, seen, 1.0), wanted)


def test_attend_shows_nan_in_every_way() -> None:
    q, k = torch.randn(1, 1, 2), torch.tensor([[[[1.0, 2.0]], [[torch.nan, 1.0]]]])
    for seen in (None, torch.ones(1, 2, dtype=torch.bool)):
        assert operators.attend(q, k, k, seen, 1.0).isnan().all()
        assert op.PLAIN["attend"](q, k, k, seen, 1.0).isnan().all()


def test_large_scores_do_not_run_over() -> None:
    q, k = torch.full((1, 1, 2), 300.0), torch.tensor([[[[1.0, 1.0]], [[2.0, 2.0]]]])
    assert torch.equal(operators.attend(q, k, k, None, 1.0), k[:, 1])


@pytest.mark.parametrize("keep", [None, [[True, False, True, True, False]]], ids=["all", "some"])
def test_operators_take_the_plain_way_in_other_types(keep: list[list[bool]] | None) -> None:
    """bfloat16 within its own steps, and float64 as it is: neither passes through float32."""
    seen = None if keep is None else torch.tensor(keep)
    q, k, v = torch.randn(2, 4, 6).double(), *torch.randn(2, 2, 5, 2, 6).double()
    x, weight, bias = torch.randn(3, 7).double(), torch.randn(5, 7).double(), torch.randn(5).double()
    heads, angle = torch.randn(2, 1, 3, 8).double(), torch.randn(2, 1, 1, 3).double()
    ways: list[tuple[Callable[..., Tensor], list[Any], Tensor]] = [
        (operators.linear, [x, weight, bias], x @ weight.T + bias),
        (operators.attend, [q, k, v, seen, 0.4], attention(q, k, v, seen, 0.4)),
        (operators.rotate, [heads, angle.cos(), angle.sin(), "half"], rotate(heads, angle.cos(), angle.sin(), "half")),
        (operators.rms_norm, [x, weight[0], 0.1], x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight[0]),
    ]
    for function, given, wanted in ways:
        assert function(*given).dtype == torch.float64
        close(function(*given), wanted, 1e-13)
        half = [g.bfloat16() if isinstance(g, Tensor) and g.is_floating_point() else g for g in given]
        assert function(*half).dtype == torch.bfloat16
        close(function(*half).double(), wanted, 2e-2)


def test_the_norm_in_half_precision_is_the_norm_it_replaces() -> None:
    norm = af.RMSNorm().build(16).bfloat16()
    norm.weight.copy_(torch.randn(16))
    x, quick = 100 * torch.randn(4, 16).bfloat16(), copy.deepcopy(norm)
    quick.__class__ = fast.FastRMSNorm
    assert torch.equal(quick(x), norm(x))


def given() -> dict[str, tuple[Any, ...]]:
    weight, x = torch.randn(5, 70), torch.randn(2, 3, 70)
    q, k = torch.randn(2, 4, 6), torch.randn(2, 5, 2, 6)
    angle = torch.randn(1, 1, 1, 2)
    return {
        "linear": (x, weight, torch.randn(5)),
        "linear_int8": (x, *round_int8(weight), None),
        "linear_int4": (x, *round_int4(weight), torch.randn(5)),
        "attend": (q, k, k, torch.rand(2, 5) < 0.5, 0.3),
        "rotate": (torch.randn(2, 1, 3, 6), angle.cos(), angle.sin(), "half"),
        "rms_norm": (x, torch.randn(70), 1e-6),
    }


@pytest.mark.parametrize("name", op.PLAIN)
def test_what_torch_asks_of_an_operator(name: str) -> None:
    """Its schema is true, and its shapes are known without numbers, as compilers and meta models need."""
    example = given()[name]
    operator = getattr(operators, name).default
    torch.library.opcheck(operator, example, test_utils=("test_schema", "test_faketensor"))
    abstract = [g.to("meta") if isinstance(g, Tensor) else g for g in example]
    out, wanted = operator(*abstract), operator(*example)
    assert out.device.type == "meta"
    assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)


# -- whole models -----------------------------------------------------------------------------------------------------


def spec(
    mixer: Any, ffn: Any = None, norm: Any = None, *, wiring: Any = af.Block.pre, **fields: Any
) -> af.TransformerSpec:
    norm = norm or af.RMSNorm()
    mixers = mixer if isinstance(mixer, tuple) else (mixer, mixer)
    blocks = [wiring(m, ffn or af.GatedFFN(10), norm=norm) for m in mixers]
    return af.TransformerSpec(DIM, VOCAB, **{"decoder": blocks, "final_norm": norm, **fields})


ALL = ("q", "k", "v", "out")
TURNING = af.Attention(2, position=af.Rotary())
CAPPED = TURNING.replace(softcap=5.0)
PAST = af.Attention(4, scale=1.0, position=af.RelativeBias(8, 16))
READER = PAST.replace(pattern=af.Full(), position=af.RelativeBias(8, 16, bidirectional=True))

SPECS: dict[str, af.TransformerSpec] = {
    "llama": spec(af.Attention(6, 2, position=af.Rotary(base=50.0)), embed=af.Embed(tied=False)),
    "gpt2": spec(
        af.Attention(3, bias=ALL),
        af.DenseFFN(11, "gelu_tanh"),
        af.LayerNorm(),
        embed=af.Embed(position=af.Learned(LENGTH + 2)),
    ),
    "neox": spec(
        af.Attention(3, position=af.Rotary(fraction=0.5), bias=ALL),
        af.DenseFFN(11, "gelu"),
        af.LayerNorm(),
        wiring=af.Block.parallel,
    ),
    "gemma": spec(
        (CAPPED.replace(pattern=af.Causal() & af.Window(4)), CAPPED),
        af.GatedFFN(10, "gelu_tanh"),
        af.RMSNorm(offset=1.0),
        wiring=af.Block.sandwich,
        embed=af.Embed(scale="sqrt_dim"),
        head=af.LMHead(softcap=7.0, bias=True, scale=0.5),
    ),
    "offset": spec(TURNING, norm=af.RMSNorm(offset=1.0)),
    "post": spec(TURNING, norm=af.LayerNorm(), wiring=af.Block.post, final_norm=None),
    "interleaved": spec(af.Attention(2, 1, position=af.Rotary(layout="interleaved", fraction=0.67)), af.DenseFFN(9)),
    "yarn": spec(af.Attention(2, position=af.Rotary(frequencies=af.YaRN(factor=4, original_len=8)))),
    "alibi": spec(af.Attention(4, position=af.Alibi()), af.DenseFFN(8, "relu2", bias=False)),
    "moe": spec(TURNING, af.MoE(af.GatedFFN(7), 3, shared=af.DenseFFN(5), balance=0.1)),
    "window": spec((TURNING.replace(pattern=af.Causal() & af.Window(5)), TURNING)),
    "sinks": spec(TURNING.replace(pattern=af.Causal() & (af.Window(4) | af.Prefix(2)))),
    "linear": spec(af.LinearAttention(2)),
    "recurrent": spec((af.Recurrent("lstm"), TURNING)),
    "per_head": spec(af.Attention(4, pattern=af.PerHead((af.Causal(), af.Causal() & af.Window(3))))),
    "qk_norm": spec(af.Attention(4, 2, position=af.Rotary(fraction=0.7), head_dim=6, qk_norm=af.RMSNorm())),
    "masked": spec(TURNING.replace(pattern=af.Causal() & af.Dilated(2, 4))),
}
SPECS |= {
    f"{ffn.__name__}_{activation}": spec(af.Attention(3, 1), ffn(13, activation, bias=bias), embed=af.Embed(tied=False))
    for ffn in (af.DenseFFN, af.GatedFFN)
    for activation, bias in (("relu", True), ("relu2", False), ("gelu", False), ("gelu_tanh", True), ("silu", True))
}
T5 = spec(
    PAST,
    wiring=lambda m, ffn, norm: af.Block.pre(m, af.CrossAttention(4, 2), ffn, norm=norm),
    encoder=[af.Block.pre(READER, af.DenseFFN(8), norm=af.RMSNorm())],
)


def build(made: af.TransformerSpec) -> af.Transformer:
    """With weights large enough for every token to matter, also those that start at zero."""
    model = made.build().eval()
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, std=0.4)
        if "norm" in name or ".pre." in name:
            weight += 0.8
    return model


def ids(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


@torch.inference_mode()
def decoded(
    model: af.Transformer, text: Tensor, keep: Tensor | None = None, prompt: int = 6, **given: Any
) -> list[Tensor]:
    """The last logits of a prompt, then those of each next token."""
    cache, tokens = model.new_cache(len(text), LENGTH + 1), None if keep is None else af.Tokens.padded(keep)
    logits = [model(text[:, :prompt], tokens, cache=cache, last=1, **given)]
    for t in range(prompt, text.shape[1]):
        tokens = None if tokens is None else tokens.after()
        logits.append(model(text[:, t : t + 1], tokens, cache=cache, **given))
    return logits


def same(found: list[Tensor], wanted: list[Tensor], relative: float = 1e-4) -> None:
    for one, other in zip(found, wanted, strict=True):
        close(one, other.double(), relative)


def left_padded(batch: int, prompt: int = 6) -> Tensor:
    """Row b lacks its first b mod 5 tokens."""
    return torch.arange(prompt) >= torch.arange(batch)[:, None] % 5


@pytest.mark.parametrize("name", SPECS)
def test_decoding_is_the_plain_models(name: str) -> None:
    plain = build(SPECS[name])
    quick = accelerate(copy.deepcopy(plain))
    for batch in (1, 3, 8):
        text, keep = ids(batch), left_padded(batch)
        same(decoded(quick, text), decoded(plain, text))
        same(decoded(quick, text, keep), decoded(plain, text, keep))


FUSED = {"llama", "gpt2", "offset", "interleaved", "yarn", "window", "sinks", "recurrent", "masked"} | {
    name for name in SPECS if "FFN" in name
}


@pytest.mark.parametrize("name", sorted(FUSED))
def test_what_the_loops_know_runs_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would say little of the fused steps."""
    ran: list[str] = []
    for kind in (fused.AttentionStep, fused.FeedForwardStep):
        call = kind.__call__

        def counting(self: Any, *given: Any, call: Any = call) -> Tensor:
            ran.append(type(self).__name__)
            return call(self, *given)

        monkeypatch.setattr(kind, "__call__", counting)
    decoded(accelerate(build(SPECS[name])), ids(2, 7))
    mixers = {"recurrent": 1}.get(name, 2)
    assert sorted(ran) == ["AttentionStep"] * mixers + ["FeedForwardStep"] * 2


@pytest.mark.parametrize("batch", [1, 3])
@torch.inference_mode()
def test_an_encoder_decoder(batch: int) -> None:
    plain = build(T5)
    quick = accelerate(copy.deepcopy(plain))
    text, source = ids(batch), ids(batch, 5)
    tokens = af.Tokens.padded(torch.arange(5) >= torch.arange(batch)[:, None])
    wanted = decoded(plain, text, memory=plain.encode(source, tokens))
    same(decoded(quick, text, memory=quick.encode(source, tokens)), wanted)
    one = ids(batch, 1)
    close(quick(one, source=source[:, :1]), plain(one, source=source[:, :1]).double(), 1e-4)


def rows_decoded(model: af.Transformer, texts: list[Tensor], prompts: list[int], steps: int) -> list[Tensor]:
    """Texts that come one by one into a cache of rows, each at its own length."""
    cache, logits = model.new_rows(len(texts), LENGTH), []
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        alone = model.new_rows(1, LENGTH)
        model(text[None, :prompt], cache=alone)
        cache.put(row, alone)
    for step in range(steps):
        at = torch.tensor(prompts)[:, None] + step
        new = torch.stack([text[n + step] for text, n in zip(texts, prompts, strict=True)])[:, None]
        logits.append(model(new, af.Tokens(at, torch.zeros_like(at)), cache=cache))
    return logits


@pytest.mark.parametrize("name", ["llama", "gpt2", "window", "sinks", "alibi", "linear", "gemma", "recurrent"])
@torch.inference_mode()
def test_rows_that_come_and_go(name: str) -> None:
    plain = build(SPECS[name])
    quick = accelerate(copy.deepcopy(plain))
    texts, prompts = list(ids(3)), [2, 9, 5]
    same(rows_decoded(quick, texts, prompts, 8), rows_decoded(plain, texts, prompts, 8))


@pytest.mark.parametrize("name", ["llama", "moe", "gemma"])
@torch.inference_mode()
def test_no_rows_at_all(name: str) -> None:
    model = accelerate(build(SPECS[name]))
    cache = model.new_cache(0, 4)
    for _ in range(2):
        assert model(ids(0, 1), cache=cache).shape == (0, 1, VOCAB)


@torch.inference_mode()
def test_many_rows_pass_by_the_loops() -> None:
    """More than a few rows, and prompts of many tokens."""
    plain = build(SPECS["llama"])
    quick = accelerate(copy.deepcopy(plain))
    text = ids(FEW + 3)
    same(decoded(quick, text), decoded(plain, text))
    same([quick(text)], [plain(text)])


# -- what is asked of the model stays as it was -----------------------------------------------------------------------


class Told(Exception):
    pass


class Telling(type(STEP)):  # type: ignore[misc]
    name = "telling"

    def __call__(self, request: af.Request) -> Tensor:
        raise Told


@torch.inference_mode()
def test_a_forced_kernel_is_honoured() -> None:
    plain, text = build(SPECS["llama"]), ids(2)
    quick = accelerate(copy.deepcopy(plain))
    for kernel in ("reference", "sdpa", STEP):
        given = {} if kernel is STEP else {"kernel": kernel}
        same(decoded(quick, text, **given), decoded(plain, text, **given))
    with pytest.raises(Told):
        quick(text[:, :1], cache=quick.new_cache(2, 4), kernel=Telling())
    with pytest.raises(ValueError, match="kernel 'step' was asked for, but it takes one query a row, but here are 22"):
        quick(text, kernel="step")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"softcap": 2.0}, "neither caps scores, nor adds to them, nor drops any"),
        ({"dropout": 0.5}, "nor drops any"),
        ({"position": af.Alibi()}, "nor adds to them"),
    ],
)
def test_the_step_kernel_refuses_what_it_cannot(changes: dict[str, Any], said: str) -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(ValueError, match=said):
        af.attend(q, q, q, kernel=STEP, **changes)
    with pytest.raises(ValueError, match=r"it computes in float32 on a CPU, but here is torch.float64 on cpu"):
        af.attend(q.double(), q.double(), q.double(), kernel=STEP)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"it has no gradient: call it under"):
        af.attend(q, q, q, kernel=STEP)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "moe", "recurrent"])
@pytest.mark.parametrize("length", [1, 5])
def test_gradients_are_those_before(name: str, length: int) -> None:
    plain, text = build(SPECS[name]), ids(2, length)
    quick = accelerate(copy.deepcopy(plain))
    with torch.enable_grad():
        for model in (plain, quick):
            model.train()(text).square().mean().backward()
    for (name, weight), other in zip(plain.named_parameters(), quick.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        if weight.grad is not None and other.grad is not None:
            close(other.grad, weight.grad.double(), 1e-5)


def test_training_goes_on_with_the_same_optimizer() -> None:
    """Weights keep who they are, so an optimizer that was made before still moves them."""
    models = [build(SPECS["llama"])]
    models.append(copy.deepcopy(models[0]))
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    accelerate(models[1])
    text = ids(2, 6)
    for model, optimizer in zip(models, made, strict=True):
        with torch.enable_grad():
            model(text).logsumexp(-1).mean().backward()
        optimizer.step()
    same(decoded(models[1], text), decoded(models[0], text))


def test_dropout_drops_while_training() -> None:
    plain = build(spec(TURNING, af.DenseFFN(10, dropout=0.5)))
    quick = accelerate(copy.deepcopy(plain))
    text, outs = ids(2, 9), []
    for model in (plain, quick):
        torch.manual_seed(3)
        outs.append(decoded(model.train(), text))
    same(outs[1], outs[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "moe", "gemma"])
def test_the_state_dict_keeps_names_and_values(name: str) -> None:
    model = build(SPECS[name])
    before, tied = {k: v.clone() for k, v in model.state_dict().items()}, model.head.weight is model.tokens.weight
    named = {id(p) for p in model.parameters()}
    assert accelerate(model) is model
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert (model.head.weight is model.tokens.weight) == tied
    assert {id(p) for p in model.parameters()} == named


def test_twice_is_once() -> None:
    model, text = build(SPECS["llama"]), ids(2)
    once = decoded(accelerate(model), text)
    same(decoded(accelerate(model), text), once, 0)


# -- weights that change afterwards -----------------------------------------------------------------------------------


def load_in_place(model: af.Transformer, other: af.Transformer) -> None:
    model.load_state_dict(other.state_dict())


def load_assigned(model: af.Transformer, other: af.Transformer) -> None:
    model.load_state_dict(other.state_dict(), assign=True)
    model.tie()


def through_float64(model: af.Transformer, other: af.Transformer) -> None:
    model.double().load_state_dict(other.state_dict())
    model.float()


def step_in_place(model: af.Transformer, other: af.Transformer) -> None:
    for weight, wanted in zip(model.parameters(), other.parameters(), strict=True):
        weight.grad = weight - wanted
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def replace_modules(model: af.Transformer, other: af.Transformer) -> None:
    for layer, its in zip(model.decoder.layers, other.decoder.layers, strict=True):  # type: ignore[union-attr]
        for branch, its_branch in zip(layer.branches(), its.branches(), strict=True):  # type: ignore[union-attr, operator]
            branch.pre = its_branch.pre
            for name, child in its_branch.op.named_children():
                setattr(branch.op, name, child)
    load_in_place(model, other)


def replace_ops(model: af.Transformer, other: af.Transformer) -> None:
    for layer, its in zip(model.decoder.layers, other.decoder.layers, strict=True):  # type: ignore[union-attr]
        for branch, its_branch in zip(layer.branches(), its.branches(), strict=True):  # type: ignore[union-attr, operator]
            branch.op = its_branch.op
    load_in_place(model, other)


@pytest.mark.parametrize("name", ["llama", "gpt2", "offset", "gemma"])
@pytest.mark.parametrize(
    "change", [load_in_place, load_assigned, through_float64, step_in_place, replace_modules, replace_ops]
)
def test_new_weights_are_used(change: Callable[..., None], name: str) -> None:
    """After a step of decoding, which is when fused steps note where the weights are."""
    model, other, text = build(SPECS[name]), build(SPECS[name]), ids(2, 9)
    old = decoded(accelerate(model), text)
    change(model, copy.deepcopy(other))
    new = decoded(other, text)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(old, new, strict=True))
    same(decoded(model, text), new, 1e-4)


def test_float64_in_between_gives_float64() -> None:
    plain, text = build(SPECS["llama"]).double(), ids(2, 9)
    quick = accelerate(copy.deepcopy(plain).float())
    decoded(quick, text)
    quick.double().load_state_dict(plain.state_dict())
    same(decoded(quick, text), decoded(plain, text), 1e-12)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_that_are_quantized_later_are_used(bits: Any) -> None:
    model, text = build(SPECS["llama"]), ids(2, 9)
    wanted = decoded(quantize(copy.deepcopy(model), bits), text)
    old = decoded(accelerate(model), text)
    found = decoded(quantize(model, bits), text)
    same(found, wanted, 1e-3)
    assert (found[-1] - old[-1]).abs().max() > 3 * (found[-1] - wanted[-1]).abs().max()


class Adapter(nn.Module):
    """A map with something added, as adapters do it: it has a `weight`, but is more than that."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.weight, self.bias = linear, linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + x.sum(-1, keepdim=True)
        return y


@pytest.mark.parametrize("before", [False, True])
def test_maps_that_are_more_than_their_weight_are_called(before: bool) -> None:
    plain, text = build(SPECS["llama"]), ids(2, 9)
    quick = copy.deepcopy(plain)
    if before:
        decoded(accelerate(quick), text)
    for model in (plain, quick):
        layers = model.decoder.layers  # type: ignore[union-attr]
        layers[0].mixer.op.q = Adapter(layers[0].mixer.op.q)  # type: ignore[union-attr]
        layers[1].ffn.op.down = Adapter(layers[1].ffn.op.down)  # type: ignore[union-attr]
    same(decoded(accelerate(quick), text), decoded(plain, text))


# -- copies, saving, compilers, threads -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "window", "per_head"])
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_lives_alone(how: Callable[[af.Transformer], af.Transformer], name: str) -> None:
    model, text = accelerate(build(SPECS[name])), ids(2, 9)
    wanted = decoded(model, text)
    other = how(model)
    same(decoded(other, text), wanted, 0)
    for weight in model.parameters():
        weight.zero_()
    same(decoded(other, text), wanted, 0)
    assert all(logits.eq(0).all() for logits in decoded(model, text))


def test_a_pickle_holds_each_weight_once() -> None:
    model = build(spec(TURNING, af.DenseFFN(2000)))
    plain = len(pickle.dumps(model))
    decoded(accelerate(model), ids(1, 8))
    assert len(pickle.dumps(model)) < 1.1 * plain


def test_an_accelerated_model_is_saved_like_any(tmp_path: Path) -> None:
    model, text = accelerate(build(SPECS["alibi"])), ids(2, 9)
    af.save(model, tmp_path)
    back = af.load(tmp_path).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    same(decoded(accelerate(back), text), decoded(model, text), 0)


def test_a_dropped_model_leaves_no_memory() -> None:
    """Fused steps hold arrays over the weights, and are held by their branch alone."""
    model = accelerate(build(SPECS["llama"]))
    decoded(model, ids(1, 8))
    kept = fused._step(model.decoder.layers[0].ffn)  # type: ignore[union-attr, arg-type]
    assert kept is not None
    del model
    gc.collect()
    assert [type(holder) for holder in gc.get_referrers(kept) if isinstance(holder, dict)] == []


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from anyformer import *
from anyformer.accelerate.fast import accelerate

CASES = {
    "plain": (Attention(4, 2, position=Rotary()), 0),
    "padded": (Attention(4, 2, pattern=Causal() & Window(6), position=Rotary()), 2),
}

@torch.inference_mode()
def decode(name):
    torch._dynamo.reset()
    mixer, pads = CASES[name]
    block = Block.pre(mixer, GatedFFN(16), norm=RMSNorm())
    made = TransformerSpec(dim=16, vocab_size=32, decoder=(block, block), final_norm=RMSNorm())
    model, count, ids = accelerate(made.build().eval()), CompileCounter(), torch.randint(32, (2, 40))
    compiled = torch.compile(model, backend=count, fullgraph=True)  # raises at a graph break
    for prompt in (5, 6):
        keep = torch.ones(2, prompt, dtype=torch.bool)
        keep[0, :pads] = False
        tokens, caches = Tokens.padded(keep), [model.new_cache(2, 64) for _ in range(2)]
        for cache in caches:
            model(ids[:, :prompt], tokens, cache=cache)
        for t in range(prompt, prompt + 16):
            tokens = tokens.after()
            a, b = (f(ids[:, t : t + 1], tokens, cache=c) for f, c in zip((compiled, model), caches))
            assert (a - b).abs().max() < 1e-5, (name, prompt, t)
    print(name, count.frame_count)

for name in CASES:
    decode(name)
"""


def test_few_graphs_for_decoding() -> None:
    """None broken, and eager's logits. In a process of its own, as users run it."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    graphs = dict(line.split() for line in done.stdout.splitlines())
    assert list(graphs) == ["plain", "padded"]
    assert all(1 <= int(count) <= 3 for count in graphs.values()), graphs


def test_two_threads_decode_two_models_at_once() -> None:
    models, texts = [accelerate(build(SPECS[name])) for name in ("llama", "gpt2")], [ids(3), ids(1)]
    wanted = [decoded(model, text) for model, text in zip(models, texts, strict=True)]
    found: dict[int, list[list[Tensor]]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(5):
            found[number].append(decoded(models[number], texts[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, runs in found.items():
        assert len(runs) == 5
        for run in runs:
            same(run, wanted[number], 1e-6)


# -- without Numba ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    op._found.cache_clear()
    for module in (op, fast):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    yield
    op._found.cache_clear()


@pytest.mark.usefixtures("_no_numba")
def test_without_numba_one_warning_and_the_same_numbers() -> None:
    plain, text = build(SPECS["llama"]), ids(2)
    quick = copy.deepcopy(plain)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert accelerate(quick) is quick
    assert [str(w.message) for w in seen] == [
        "numba is not installed, so decoding runs in plain torch: pip install anyformer[fast]"
    ]
    same(decoded(quick, text), decoded(plain, text), 0)


def test_numba_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was accelerated elsewhere, as one that is unpickled, runs in plain torch."""
    plain, text = build(SPECS["llama"]), ids(2)
    quick = accelerate(copy.deepcopy(plain))
    monkeypatch.setattr(op, "_found", lambda: None)
    same(decoded(quick, text), decoded(plain, text), 1e-5)
    for name, example in given().items():
        close(getattr(operators, name)(*example), op.PLAIN[name](*example).double(), 0)


def test_threads_that_are_not_safe_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "numba_layer", lambda: "workqueue")
    op._found.cache_clear()
    try:
        with pytest.warns(UserWarning, match="neither OpenMP nor TBB"):
            assert op.loops() is None
    finally:
        op._found.cache_clear()
