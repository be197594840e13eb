"""The whole model: what a spec refuses, what a model refuses, weights, and costs against what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import anyformer as af
from anyformer.init import fan_in_init, gpt2_init
from anyformer.parts.norm import RMSNormModule

NORM = af.RMSNorm()
DIM, VOCAB, LENGTH = 32, 48, 16


def block(*ops: af.Op, norm: af.Norm = NORM) -> af.Block:
    return af.Block.pre(*ops, norm=norm)


def decoder(*blocks: af.Block, num_layers: int = 2, **fields: Any) -> af.TransformerSpec:
    fields = {"final_norm": NORM, "dim": DIM, "vocab_size": VOCAB} | fields
    return af.TransformerSpec(decoder=af.cycle(blocks, num_layers), **fields)


def llama(**fields: Any) -> af.TransformerSpec:
    return decoder(block(af.Attention(4, 2, position=af.Rotary()), af.GatedFFN(40)), **fields)


def bert(**fields: Any) -> af.TransformerSpec:
    ops = af.Attention(4, pattern=af.Full(), bias=("q", "k", "v", "out")), af.DenseFFN(40, "gelu")
    embed = af.Embed(position=af.Learned(64), token_types=2, norm=af.LayerNorm())
    blocks = (af.Block.post(*ops, norm=af.LayerNorm()),) * 2
    fields = {"dim": DIM, "vocab_size": VOCAB, "embed": embed, "head": af.LMHead(bias=True)} | fields
    return af.TransformerSpec(encoder=blocks, **fields)


def t5(**fields: Any) -> af.TransformerSpec:
    encoder = block(af.Attention(4, pattern=af.Full(), position=af.RelativeBias(bidirectional=True)), af.DenseFFN(40))
    decode = block(af.Attention(4, position=af.RelativeBias()), af.CrossAttention(4), af.DenseFFN(40))
    return decoder(decode, encoder=(encoder,) * 3, **fields)


def ids(length: int = LENGTH, batch: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length))


def inputs(spec: af.TransformerSpec, batch: int = 1) -> dict[str, Tensor]:
    both = spec.encoder and spec.decoder
    return {"ids": ids(batch=batch)} | ({"source": ids(batch=batch)} if both else {})


# -- what a spec refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: llama().replace("decoder.1.mixer.pattern", af.Full()),
            "decoder.1.mixer: pattern Full() looks ahead, which a decoder must not: write `Causal() & ...`",
        ),
        (
            lambda: llama().replace("decoder.*.mixer.pattern", af.Window(4)),
            "decoder.0.mixer: pattern Window(size=4) looks ahead",
        ),
        (lambda: decoder(block(af.Attention(4, pattern=~af.Causal()))), "decoder.0.mixer: pattern Not("),
        (
            lambda: decoder(block(af.Attention(4), af.CrossAttention(4))),
            "decoder.0.cross: cross-attention needs an encoder, but there is none",
        ),
        (
            lambda: decoder(block(af.Attention(4)), encoder=(block(af.CrossAttention(4)),)),
            "encoder.0.cross: cross-attention belongs in a decoder",
        ),
        (
            lambda: af.TransformerSpec(dim=8, vocab_size=8),
            "a Transformer needs an encoder, a decoder, or both, but has no layers",
        ),
        (
            lambda: llama().replace(dim=30),
            "decoder.0.mixer: `dim` must be a multiple of `num_heads` (4), but is 30: or give `head_dim`",
        ),
        (lambda: llama().replace(vocab_size=0), "vocab_size: must be greater than 0, but is 0"),
    ],
)
def test_a_spec_refuses(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(af.SpecError) as error:
        make()
    assert str(error.value).startswith(said)


def test_a_width_of_heads_frees_dim() -> None:
    spec = llama().replace("decoder.*.mixer.head_dim", 8).replace(dim=30)
    assert spec.build()(ids()).shape == (1, LENGTH, VOCAB)


def test_prefix_and_causal_windows_may_decode() -> None:
    for pattern in (af.Causal() | af.Prefix(3), af.Causal() & af.Window(3)):
        assert llama().replace("decoder.*.mixer.pattern", pattern).build()(ids()).isfinite().all()


# -- weights ----------------------------------------------------------------------------------------------------------


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_tied_is_one_parameter() -> None:
    model = llama(embed=af.Embed(tied=True)).build()
    untied = llama(embed=af.Embed(tied=False)).build()
    assert model.head.weight is model.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    assert parameters(untied) - parameters(model) == VOCAB * DIM
    F.cross_entropy(model(ids())[0], ids()[0]).backward()
    before = model.head.weight.detach().clone()
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert torch.equal(model.head.weight, model.tokens.weight)
    assert not torch.equal(before, model.tokens.weight)


@pytest.mark.parametrize("make", [llama, bert, t5])
def test_tied_after_every_way_of_building(make: Callable[..., af.TransformerSpec]) -> None:
    for options in ({}, {"init": None}, {"dtype": torch.bfloat16}, {"init": None, "device": "meta"}):
        model = make(embed=make().embed.replace(tied=True)).build(**options)
        assert model.head.weight is model.tokens.weight, options


def test_no_head_gives_hidden_states() -> None:
    model = llama(head=None).build()
    x = ids()
    assert torch.equal(model(x), model.decode(x).x)


def test_build_on_meta_holds_no_memory() -> None:
    model = llama().replace(dim=4096, vocab_size=100_000).build(init=None, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("make", [llama, bert, t5])
def test_build_without_init_for_loading_over_it(make: Callable[..., af.TransformerSpec]) -> None:
    full, empty = make().build(), make().build(init=None)
    assert {p.device.type for p in empty.parameters()} == {"cpu"}
    empty.load_state_dict(full.state_dict())
    x = inputs(make())
    assert torch.equal(empty(**x), full(**x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype(dtype: torch.dtype) -> None:
    model = llama().build(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(ids()).dtype == model.dtype == dtype


def test_build_takes_torchs_default_device() -> None:
    with torch.device("meta"):
        model = llama().build()
    assert model.device.type == "meta"


def wide() -> af.TransformerSpec:
    embed = af.Embed(tied=False, position=af.Learned(512), token_types=64)
    mixer = af.Attention(4, bias=("q", "k", "v", "out"))
    blocks = (block(mixer, af.GatedFFN(200, bias=True)),) * 3
    return af.TransformerSpec(dim=128, vocab_size=300, embed=embed, decoder=blocks, head=af.LMHead(bias=True))


@pytest.mark.parametrize(
    ("init", "linear"),
    [
        (gpt2_init, lambda layer: 0.02),
        (lambda model: gpt2_init(model, std=0.1), lambda layer: 0.1),
        (fan_in_init, lambda layer: layer.in_features**-0.5),
    ],
)
def test_measured_std(init: Callable[[nn.Module], None], linear: Callable[[nn.Linear], float]) -> None:
    """Projections back into the stream are divided by √6: three layers of two. Biases are 0, norms 1."""
    model = wide().build(init=init)
    table = linear(model.decoder.layers[0].mixer.op.q)
    head = 1 / 128 if init is fan_in_init else table
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            back = name.endswith((".out", ".down"))
            expected = linear(module) / (math.sqrt(6) if back else 1.0)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(module.weight.mean().item()) < expected / 20
            assert module.bias.abs().max() == 0
        elif isinstance(module, RMSNormModule):
            assert (module.weight == 1).all()
    tables = model.tokens.weight, model.embeds["decoder"].position.table, model.head.weight
    assert [t.std().item() for t in tables] == pytest.approx([table, table, head], rel=0.05)
    assert model.embeds["decoder"].types.weight.std().item() == pytest.approx(table, rel=0.05)
    assert model.head.bias.abs().max() == 0


@pytest.mark.parametrize("init", [gpt2_init, fan_in_init])
def test_experts_do_not_shrink_what_the_stream_gets(init: Callable[[nn.Module], None]) -> None:
    """A block adds to the stream once for each branch, however many experts stand in one: two layers of two give √4."""
    for experts in (2, 8):
        spec = decoder(block(af.Attention(4, head_dim=64), af.MoE(af.GatedFFN(64), experts, 2)), num_layers=2, dim=64)
        layer = spec.build(init=init).decoder.layers[0]
        for back in (layer.mixer.op.out, layer.ffn.op.experts[0].down):
            expected = (0.02 if init is gpt2_init else back.in_features**-0.5) / 2
            assert back.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_a_new_model_guesses_evenly() -> None:
    """The first loss is about ln V: no initialisation starts with an opinion (fan-in where the head is untied)."""
    for init, tied in ((gpt2_init, True), (gpt2_init, False), (fan_in_init, False)):
        logits = llama().replace("embed.tied", tied).build(init=init)(ids(64, 4))
        loss = F.cross_entropy(logits.flatten(0, 1), ids(64, 4).flatten())
        assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.1)


# -- what a model takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "kept"), [(1, 1), (3, 3), (LENGTH, LENGTH), (99, LENGTH), (0, 0)])
def test_last(last: int, kept: int) -> None:
    model, x = llama().build(), ids(batch=2)
    torch.testing.assert_close(model(x, last=last), model(x)[:, LENGTH - kept :], rtol=1e-6, atol=1e-6)
    assert model(x, last=last).shape == (2, kept, VOCAB)


def test_fault_79_last_computes_no_other_logits() -> None:
    model = llama().build()
    seen: list[tuple[int, ...]] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    model(ids(), last=1)
    assert seen == [(1, 1, DIM)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: llama().build()(ids(), af.Tokens.arange(1, LENGTH + 1)),
            r"`tokens` are for \(1, 17\), but `ids` are \(1, 16\)",
        ),
        (lambda: llama().build()(ids(), af.Tokens.arange(2, LENGTH)), r"`tokens` are for \(2, 16\)"),
        (lambda: t5().build()(ids()), "an encoder-decoder needs `source` ids, or `memory` from `encode`"),
        (lambda: llama().build().encode(ids()), "this model has no encoder, so it reads no `source`"),
        (lambda: bert().build().decode(ids()), "this model has no decoder: call encode"),
        (lambda: bert().build().new_cache(1, 4), "only a decoder generates: this model has none, so it needs no cache"),
        (
            lambda: llama().build()(ids(), types=ids()),
            "token types were given, but this model's `embed.token_types` is 0",
        ),
        (lambda: llama().build()(ids(), kernel="flash"), "unknown kernel 'flash'; known: "),
        (lambda: bert().build()(ids(65)), "the text needs 65 positions, but the model has 64: shorten it"),
    ],
)
def test_a_model_refuses(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_memory_may_be_encoded_before() -> None:
    model, x, source = t5().build(), ids(5, 2), ids(7, 2)
    keep = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    tokens = af.Tokens.padded(keep)
    whole = model(x, source=source, source_tokens=tokens)
    torch.testing.assert_close(model(x, memory=model.encode(source, tokens)), whole, rtol=0, atol=0)
    assert (model(x, source=source) - whole)[1].abs().max() > 1e-4, "the padding of the source must matter"
    changed = source.masked_fill(~keep, 3)
    assert torch.equal(model(x, source=changed, source_tokens=tokens), whole)


@pytest.mark.parametrize("make", [llama, bert, t5])
def test_fault_20_empty_and_single(make: Callable[..., af.TransformerSpec]) -> None:
    model = make().build()
    for batch, length in ((0, 3), (2, 0), (2, 1)):
        x = ids(length, batch)
        source = {"source": ids(3, batch)} if make is t5 else {}
        assert model(x, **source).shape == (batch, length, VOCAB)
        assert model(x, **source).isfinite().all()


# -- costs: parameters ------------------------------------------------------------------------------------------------

MANY: dict[str, Callable[[], af.TransformerSpec]] = {
    "multi-head": lambda: decoder(block(af.Attention(4), af.DenseFFN(40))),
    "grouped": llama,
    "multi-query": lambda: decoder(block(af.Attention(4, 1, head_dim=6), af.GatedFFN(40))),
    "biases": lambda: decoder(block(af.Attention(4, bias=("q", "v")), af.GatedFFN(40, bias=True), norm=af.LayerNorm())),
    "no biases": lambda: decoder(block(af.Attention(4), af.DenseFFN(40, bias=False), norm=af.LayerNorm(bias=False))),
    "qk_norm": lambda: decoder(block(af.Attention(4, 2, qk_norm=NORM, position=af.Rotary()), af.GatedFFN(40))),
    "experts": lambda: decoder(block(af.Attention(4), af.MoE(af.GatedFFN(24), 4, 2, shared=af.DenseFFN(20)))),
    "shared bias": lambda: decoder(block(af.Attention(4, position=af.RelativeBias()), af.DenseFFN(40)), num_layers=3),
    "two biases": lambda: decoder(
        block(af.Attention(4, position=af.RelativeBias())),
        block(af.Attention(2, position=af.RelativeBias())),
        num_layers=5,
    ),
    "learned": lambda: decoder(block(af.Attention(4)), embed=af.Embed(position=af.Learned(64, offset=2))),
    "untied": lambda: llama(embed=af.Embed(tied=False)),
    "head bias": lambda: llama(head=af.LMHead(bias=True)),
    "no head": lambda: llama(head=None),
    "no head, untied": lambda: llama(head=None, embed=af.Embed(tied=False)),
    "bert": bert,
    "t5": t5,
    "sandwich": lambda: decoder(af.Block.sandwich(af.Attention(4), af.GatedFFN(40), norm=af.RMSNorm(offset=1.0))),
    "parallel": lambda: decoder(af.Block.parallel(af.Attention(4), af.DenseFFN(40), norm=NORM, one_norm=True)),
    "windowed": lambda: decoder(block(af.Attention(4, pattern=af.Causal() & af.Window(5)), af.DenseFFN(40))),
    "prefix alone": lambda: decoder(block(af.Attention(4, pattern=af.Causal() & af.Prefix(3)), af.DenseFFN(40))),
    "rotary encoder-decoder": lambda: decoder(
        block(af.Attention(4, 2, position=af.Rotary()), af.CrossAttention(4, 2), af.GatedFFN(40)),
        encoder=(block(af.Attention(4, pattern=af.Full(), position=af.Rotary()), af.GatedFFN(40)),),
    ),
}
SPECS = pytest.mark.parametrize("name", MANY)


def total(spec: af.TransformerSpec, length: int = LENGTH) -> af.Cost:
    return af.Cost().plus(*spec.costs(length).values())


@SPECS
def test_cost_params_are_the_models(name: str) -> None:
    spec = MANY[name]()
    assert total(spec).params == parameters(spec.build(init=None, device="meta"))


def test_cost_active_leaves_resting_experts_out() -> None:
    cost = total(MANY["experts"]())
    resting = 2 * 2 * 3 * 24 * DIM  # two layers, two experts, three matrices
    one_row = (VOCAB - 1) * DIM  # of the table that is looked up; the head, here the same one, is used whole
    assert cost.params - cost.active == resting + one_row - VOCAB * DIM


# -- costs: operations ------------------------------------------------------------------------------------------------


def measured_flops(spec: af.TransformerSpec, backward: bool = False) -> int:
    """By torch's own counter, on the reference kernel: the CPU's fused attention it does not know, and counts as 0."""
    model = spec.build()
    with FlopCounterMode(display=False) as counter:
        out = model(**inputs(spec), kernel="reference")
    if backward:
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
    return counter.get_total_flops()


@SPECS
def test_cost_flops_are_torchs(name: str) -> None:
    spec = MANY[name]()
    assert measured_flops(spec) == pytest.approx(total(spec).flops, rel=0.01)


@pytest.mark.parametrize("name", ["multi-head", "grouped", "t5", "experts", "qk_norm"])
def test_backward_is_twice_forward(name: str) -> None:
    spec = MANY[name]()
    assert measured_flops(spec, backward=True) == pytest.approx(2 * total(spec).flops, rel=0.01)


# -- costs: cache -----------------------------------------------------------------------------------------------------


@SPECS
def test_cost_cache_is_what_a_cache_holds(name: str) -> None:
    """Float32, so four bytes a number. The memory of cross-attention is made at the first step, and is counted."""
    spec = MANY[name]()
    expected = 4 * total(spec).cache
    if not spec.decoder:
        assert expected == 0
        return
    model, batch = spec.build(), 2
    cache = model.new_cache(batch, LENGTH)
    with torch.inference_mode():
        model(cache=cache, **inputs(spec, batch))
    assert cache.nbytes == batch * expected


def test_a_window_keeps_a_window() -> None:
    spec = MANY["windowed"]()
    assert [total(spec, n).cache for n in (3, 5, 100)] == [2 * 2 * DIM * n for n in (3, 5, 5)]


# -- costs: activations -----------------------------------------------------------------------------------------------


def measured_activations(spec: af.TransformerSpec) -> float:
    """Float32 numbers that a training step keeps for its backward pass: unique storages, weights left out.

    torch's CPU RMSNorm is no fused kernel, and keeps one more copy of its input than the GPU's: taken off again.
    """
    model = spec.build()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}
    more = 0

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    def count(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal more
        more += 4 * out.numel()

    for module in model.modules():
        if isinstance(module, RMSNormModule):
            module.register_forward_hook(count)
    x = inputs(spec)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = model(**x)
        F.cross_entropy(logits.flatten(0, 1), x["ids"].flatten())
    return (sum(size for size, _ in kept.values()) - more) / 4


NORMED = {"norm": af.LayerNorm()}
KEEPING: dict[str, af.TransformerSpec] = {
    "relu": decoder(block(af.Attention(4), af.DenseFFN(64), **NORMED), final_norm=af.LayerNorm()),
    "gelu": decoder(block(af.Attention(4), af.DenseFFN(64, "gelu"), **NORMED), final_norm=af.LayerNorm()),
    "relu2": decoder(block(af.Attention(4), af.DenseFFN(64, "relu2"), **NORMED), final_norm=af.LayerNorm()),
    "llama": llama(),
    "reglu": decoder(block(af.Attention(4, 1), af.GatedFFN(64, "relu"))),
    "geglu": decoder(block(af.Attention(4, 1), af.GatedFFN(64, "gelu_tanh"))),
    "qk_norm": MANY["qk_norm"](),
    "experts": decoder(block(af.Attention(4), af.MoE(af.GatedFFN(24), 4, 2)), num_layers=2),
    "shared expert": MANY["experts"](),
    "sandwich": MANY["sandwich"](),
    "post": decoder(
        af.Block.post(af.Attention(4), af.DenseFFN(64), norm=af.LayerNorm()),
        final_norm=None,
        embed=af.Embed(position=af.Learned(64), norm=af.LayerNorm()),
    ),
    "parallel": decoder(af.Block.parallel(af.Attention(4), af.DenseFFN(64), norm=NORM)),
    "parallel, one norm": decoder(af.Block.parallel(af.Attention(4), af.DenseFFN(64), norm=NORM, one_norm=True)),
    "capped head": llama(head=af.LMHead(softcap=30.0)),
    "encoder-decoder": MANY["rotary encoder-decoder"](),
}


@pytest.mark.parametrize("name", KEEPING)
def test_cost_activations_are_what_is_saved(name: str) -> None:
    """For plain causal attention, which the fused kernels compute without keeping scores, and without dropout."""
    measured, said = measured_activations(KEEPING[name]), total(KEEPING[name]).activations
    assert measured / said == pytest.approx(1.0, abs=0.15)
