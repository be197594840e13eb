"""Weights in few bits: how far they may be off, what is made of them, and that they come back from disk unchanged."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.accelerate import operators as op
from anyformer.accelerate.fast import accelerate
from anyformer.accelerate.operators import FEW, GROUP, operators
from anyformer.accelerate.quantize import (
    Bits,
    QuantizedHead,
    QuantizedLinear,
    quantize,
    quantized,
    round_int4,
    round_int8,
)

DIM, VOCAB = 24, 37
BITS = get_args(Bits)
FLOAT32 = 2.0**-23


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- rounding ---------------------------------------------------------------------------------------------------------


def back(weight: Tensor, bits: str) -> Tensor:
    """Rounded to integers, and made numbers again in float64, one at a time."""
    rows, width = weight.shape
    out = torch.empty(rows, width, dtype=torch.float64)
    if bits == "int8":
        integers, gain = round_int8(weight)
        assert integers.shape == (rows, width)
        assert gain.shape == (rows,)
        return integers.double() * gain.double()[:, None]
    packed, gain = round_int4(weight)
    half = packed.shape[1]
    assert 2 * half == width + -width % (2 * GROUP)
    assert gain.shape == (rows, 2 * half // GROUP, 2)
    for n in range(rows):
        for k in range(width):
            byte = int(packed[n, k % half])
            number = byte >> 4 if k >= half else byte & 15
            step, least = gain[n, k // GROUP].tolist()
            out[n, k] = number * step + least
    return out


@pytest.mark.parametrize("width", [1, 7, 63, 64, 65, 130])
def test_int8_is_off_by_half_a_step_at_most(width: int) -> None:
    weight = torch.randn(5, width) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0])[:, None]
    error = (back(weight, "int8") - weight.double()).abs()
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert (error <= step * (0.5 + 1e-4)).all()
    assert (error[3] == 0).all()
    integers, _ = round_int8(weight)
    assert (integers.abs().amax(1) == torch.tensor([127, 127, 127, 0, 127])).all()


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 64, 130])
def test_int4_is_off_by_half_a_step_at_most(width: int) -> None:
    """A step is a fifteenth of what a group spans; one that is not full is filled with zeros."""
    weight = torch.randn(6, width) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0, 1.0])[:, None]
    weight[4, :32], weight[5] = 0, weight[5].abs() + 2
    error = (back(weight, "int4") - weight.double()).abs()
    for n in range(len(weight)):
        for begin in range(0, width, GROUP):
            group, wrong = weight[n, begin : begin + GROUP].double(), error[n, begin : begin + GROUP]
            filled = nn.functional.pad(group, (0, GROUP - len(group)))
            step = (filled.max() - filled.min()) / 15
            assert (wrong <= step * 0.5 + group.abs().max() * 1e-6).all()
            ends = nn.functional.pad(wrong, (0, GROUP - len(group)))[torch.stack((filled.argmin(), filled.argmax()))]
            assert ends.max() <= group.abs().max() * 1e-6


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("shift", [0, -8, 5, -40])
def test_int4_uses_all_sixteen_numbers_wherever_a_group_lies(shift: int, sign: int) -> None:
    weight = sign * (torch.arange(16.0) + shift).repeat(1, 4)
    packed, gain = round_int4(weight)
    assert gain.tolist() == [[[1.0, float(weight.min())]] * 2]
    assert set((packed & 15).flatten().tolist()) | set((packed >> 4).flatten().tolist()) == set(range(16))
    assert torch.equal(back(weight, "int4"), weight.double())


def test_a_group_of_one_value_comes_back_exactly() -> None:
    weight = torch.full((2, 64), -0.3)
    assert torch.equal(back(weight, "int4"), weight.double())


def test_zeros_come_back_as_zeros() -> None:
    for bits in BITS:
        assert torch.equal(back(torch.zeros(2, 65), bits), torch.zeros(2, 65, dtype=torch.float64))


def test_half_precision_weights_are_rounded_in_float32() -> None:
    weight = torch.randn(3, 70).bfloat16()
    for rounding in (round_int8, round_int4):
        for found, wanted in zip(rounding(weight), rounding(weight.float()), strict=True):
            assert torch.equal(found, wanted)


# -- the product ------------------------------------------------------------------------------------------------------


def parts(weight: Tensor, bits: str) -> tuple[Tensor, Tensor]:
    return round_int8(weight) if bits == "int8" else round_int4(weight)


def product(x: Tensor, weight: Tensor, bits: str, bias: Tensor | None = None) -> Tensor:
    found: Tensor = getattr(operators, f"linear_{bits}")(x, *parts(weight, bits), bias)
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, FEW, 19])
@pytest.mark.parametrize("width", [1, 7, 64, 97, 131, 511, 512, 513, 1100])
def test_the_product_is_that_of_the_rounded_weights(width: int, rows: int, bits: str) -> None:
    """x in 16 bits is off by half a step of its row's largest / 32767, and each product by that times |w|."""
    x, weight, bias = torch.randn(rows, width), torch.randn(11, width), torch.randn(11)
    if rows > 1:
        x[1] = 0
    exact = back(weight, bits)
    wanted = x.double() @ exact.T + bias.double()
    steps = x.double().abs().amax(1, keepdim=True) / 32767 if rows else x.new_zeros(0, 1).double()
    sizes = x.double().abs().sum(1, keepdim=True) * exact.abs().amax(1) + bias.abs()
    bound = 0.51 * steps * exact.abs().sum(1) + 64 * FLOAT32 * sizes
    for given in (x, torch.cat((x, x), 1)[:, :width]):
        assert ((product(given, weight, bits, bias).double() - wanted).abs() <= bound).all()
    assert ((product(x, weight, bits).double() - (wanted - bias)).abs() <= bound).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_fit(sign: int) -> None:
    """Every product is 127 · 32767: more than 512 of them would run over 32 bits."""
    x, weight = torch.full((1, 1536), float(sign)), torch.ones(3, 1536)
    assert torch.allclose(product(x, weight, "int8"), torch.full((1, 3), 1536.0 * sign))
    assert torch.allclose(product(x, -weight, "int4"), torch.full((1, 3), -1536.0 * sign))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value: float, bits: str) -> None:
    """A row that is broken must be seen to be, and must not touch its neighbours."""
    x, weight = torch.randn(3, 70), torch.randn(5, 70)
    x[1, 7] = value
    for rows in (x, x.flip(0), x[1:2] * 0 + value):
        found = product(rows, weight, bits)
        assert torch.equal(found.isfinite().all(1), rows.isfinite().all(1))
        assert torch.equal(found.isfinite().any(1), rows.isfinite().all(1))


@pytest.mark.parametrize("bits", BITS)
def test_other_types_take_the_plain_way(bits: str) -> None:
    x, weight = torch.randn(3, 70), torch.randn(5, 70)
    exact = back(weight, bits)
    found = product(x.double(), weight, bits)
    torch.testing.assert_close(found, x.double() @ exact.T, rtol=0, atol=1e-13 * 70)
    found = product(x.bfloat16(), weight, bits)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), x.double() @ exact.T, rtol=0, atol=0.3)


# -- models -----------------------------------------------------------------------------------------------------------


def spec(ffn: Any = None, *, encoder: bool = False, **fields: Any) -> af.TransformerSpec:
    mixer = af.Attention(4, 2, pattern=af.Full() if encoder else af.Causal(), position=af.Rotary(), bias=("q", "out"))
    blocks = af.cycle([af.Block.pre(mixer, ffn or af.GatedFFN(40), norm=af.RMSNorm())], 2)
    return af.TransformerSpec(
        DIM, VOCAB, **{"encoder" if encoder else "decoder": blocks, "final_norm": af.RMSNorm(), **fields}
    )


def build(made: af.TransformerSpec | None = None) -> af.Transformer:
    return (made or spec()).build().eval()


def ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def dequantized(model: af.Transformer, bits: Bits) -> af.Transformer:
    """The same model in float64, its maps rounded by the test's own reading of the integers, the head's to 8 bits."""
    model = copy.deepcopy(model).double()
    if model.spec.tied:
        model.head.weight = nn.Parameter(model.head.weight.clone())
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) and "router" not in name) or name == "head":
            module.weight.data = back(module.weight.float(), "int8" if name == "head" else bits)  # type: ignore[union-attr, arg-type]
    return model


@torch.inference_mode()
def decoded(model: af.Transformer, text: Tensor) -> Tensor:
    cache = model.new_cache(*text.shape)
    return torch.cat([model(text[:, t : t + 1], cache=cache) for t in range(text.shape[1])], 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "made",
    [
        spec(),
        spec(af.DenseFFN(30, "gelu")),
        spec(embed=af.Embed(tied=False)),
        spec(head=af.LMHead(bias=True, softcap=3.0)),
    ],
    ids=["tied", "dense", "untied", "head"],
)
@pytest.mark.parametrize("quick", [False, True], ids=["plain", "accelerated"])
def test_a_model_computes_with_its_rounded_weights(quick: bool, made: af.TransformerSpec, bits: Bits) -> None:
    model, text = build(made), ids()
    wanted = dequantized(model, bits)(text)
    assert quantize(model, bits) is model
    model = accelerate(model) if quick else model
    torch.testing.assert_close(model(text).double(), wanted, rtol=0, atol=1e-3)
    torch.testing.assert_close(decoded(model, text).double(), wanted, rtol=0, atol=1e-3)
    model.double()
    torch.testing.assert_close(model(text), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bits", BITS)
def test_before_or_after_accelerate_is_the_same(bits: Bits) -> None:
    model, text = build(), ids()
    one, other = (copy.deepcopy(model) for _ in range(2))
    a, b = accelerate(quantize(one, bits)), quantize(accelerate(other), bits)
    assert torch.equal(decoded(a, text), decoded(b, text))


def test_without_numba_the_numbers_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in BITS:
        model, text = quantize(build(), bits), ids()
        wanted = decoded(model, text)
        with monkeypatch.context() as change:
            change.setattr(op, "_found", lambda: None)
            torch.testing.assert_close(decoded(model, text), wanted, rtol=0, atol=1e-3)


def test_what_is_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="a model is quantized to int8 or int4, but 'int3' is asked for"):
        quantize(model, "int3")  # type: ignore[arg-type]
    assert quantized(model) is None
    quantize(model, "int4")
    assert quantized(model) == "int4"
    for bits in BITS:
        with pytest.raises(ValueError, match="the model is quantized to int4 already: load it anew"):
            quantize(model, bits)
    empty = build(af.TransformerSpec(8, VOCAB, decoder=[af.Block.pre(af.Recurrent(), norm=af.RMSNorm())], head=None))
    with pytest.raises(ValueError, match="the model has no linear map to quantize"):
        quantize(empty, "int8")


@pytest.mark.parametrize("bits", BITS)
def test_routers_norms_and_embeddings_are_left(bits: Bits) -> None:
    model = build(spec(af.MoE(af.GatedFFN(16), 3), embed=af.Embed(position=af.Learned(16))))
    kept = {
        n: p for n, p in model.named_parameters() if any(w in n for w in ("router", "norm", "pre", "tokens", "embed"))
    }
    assert sum("router" in name for name in kept) == 2
    before = {name: weight.clone() for name, weight in kept.items()}
    after = dict(quantize(model, bits).named_parameters())
    for name, weight in kept.items():
        assert after[name] is weight
        assert torch.equal(weight, before[name])
    types = {name: weight.dtype for name, weight in after.items()}
    integers = {name for name in types if name.endswith(".weight") and name not in kept}
    assert {types[name] for name in integers - {"head.weight"}} == {torch.int8 if bits == "int8" else torch.uint8}
    assert types["head.weight"] == torch.int8
    assert all(dtype == torch.float32 for name, dtype in types.items() if name not in integers)


@pytest.mark.parametrize("bits", BITS)
def test_a_tied_head_gets_a_table_of_its_own(bits: Bits) -> None:
    model = build()
    assert model.head.weight is model.tokens.weight
    table = model.tokens.weight.clone()
    quantize(model, bits)
    assert isinstance(model.head, QuantizedHead)
    assert torch.equal(model.tokens.weight, table)
    assert model.tokens.weight.dtype == torch.float32
    assert not model.head.weight.is_floating_point()


@pytest.mark.parametrize("bits", BITS)
def test_a_masked_head_keeps_what_stands_before_its_table(bits: Bits) -> None:
    """BERT's: without its map and norm the logits would be others altogether."""
    model = build(spec(encoder=True, head=af.MaskedLMHead()))
    for weight in model.head.parameters():
        nn.init.normal_(weight)
    text = ids()
    wanted = model(text)
    quantize(model, bits)
    assert isinstance(model.head.dense, QuantizedLinear)
    assert model.head.weight is model.tokens.weight
    assert (model(text) - wanted).norm() < (0.02 if bits == "int8" else 0.3) * wanted.norm()


@pytest.mark.parametrize(("bits", "most"), [("int8", 0.27), ("int4", 0.19)])
def test_memory_is_what_the_bits_say(bits: Bits, most: float) -> None:
    """4 bytes a weight become 1 + 4 / K, or 1/2 + 8 / 32; a head stays at 8 bits."""
    model = af.TransformerSpec(
        256,
        32,
        embed=af.Embed(tied=False),
        decoder=[af.Block.pre(af.Attention(4), af.GatedFFN(512), norm=af.RMSNorm())],
    ).build()
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) or n == "head"}

    def nbytes() -> int:
        return sum(w.nbytes for n, w in model.named_parameters() if n.rpartition(".")[0] in names)

    def count() -> int:
        return sum(w.numel() for w in model.parameters())

    before, numbers = nbytes(), count()
    quantize(model, bits)
    assert nbytes() <= most * before
    rows = sum(m.gain.numel() for m in model.modules() if isinstance(m, QuantizedLinear | QuantizedHead))
    packed = sum(m.weight.numel() for m in model.modules() if isinstance(m, QuantizedLinear))
    assert count() == numbers + rows - (packed if bits == "int4" else 0)
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.rpartition(".")[0] in names)


def counting() -> Tensor:
    """Texts that count in steps of 1 to 3, with a fifth of all tokens at random."""
    text = (torch.arange(24) * torch.randint(1, 4, (64, 1)) + torch.randint(VOCAB, (64, 1))) % VOCAB
    return torch.where(torch.rand(text.shape) < 0.2, torch.randint(VOCAB, text.shape), text)


def loss(model: af.Transformer, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def test_a_trained_model_loses_less_than_a_hundredth() -> None:
    """On texts that it has not seen; with 4 bits it loses more."""
    model, held_out = spec(embed=af.Embed(tied=False)).build(), counting()
    optimizer, start = torch.optim.Adam(model.parameters(), lr=0.01), float(loss(model, held_out))
    with torch.enable_grad():
        for _ in range(100):
            optimizer.zero_grad()
            loss(model, counting()).backward()
            optimizer.step()
    before = float(loss(model, held_out))
    assert before < 0.75 * start
    after: dict[Bits, float] = {bits: float(loss(quantize(copy.deepcopy(model), bits), held_out)) for bits in BITS}
    worse = {bits: abs(value - before) / before for bits, value in after.items()}
    assert worse["int8"] < 0.01, worse
    assert worse["int8"] < worse["int4"] < 0.1, worse


# -- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_saved_model_comes_back_bit_by_bit(tied: bool, bits: Bits, tmp_path: Path) -> None:
    """Whether or not a family of the hub says its spec: none has our integers."""
    llama = af.Block.pre(af.Attention(4, 2, position=af.Rotary()), af.GatedFFN(40), norm=af.RMSNorm(eps=1e-5))
    known = af.TransformerSpec(DIM, VOCAB, embed=af.Embed(tied=tied), decoder=[llama], final_norm=af.RMSNorm(eps=1e-5))
    for number, made in enumerate((spec(embed=af.Embed(tied=tied)), known)):
        model, text, folder = quantize(build(made), bits), ids(), tmp_path / str(number)
        af.save(model, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "quantized.json", "spec.yaml"]
        assert json.loads((folder / "quantized.json").read_text()) == {"bits": bits}
        loaded = af.load(folder)
        assert quantized(loaded.model) == bits
        assert loaded.spec == model.spec
        assert not loaded.model.training
        assert torch.equal(loaded.model(text), model(text))
        assert torch.equal(decoded(accelerate(loaded.model), text), decoded(accelerate(model), text))


def test_an_accelerated_model_is_saved_quantized(tmp_path: Path) -> None:
    model, text = quantize(accelerate(build()), "int4"), ids()
    af.save(model, tmp_path)
    assert torch.equal(accelerate(af.load(tmp_path).model)(text), model(text))


def test_a_quantized_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    af.save(quantize(build(), "int8"), tmp_path)
    for said, match in (({"bits": "int3"}, "'int3'"), ({}, "not named"), ({"bits": "int4"}, "must be|does not fit")):
        (tmp_path / "quantized.json").write_text(json.dumps(said))
        with pytest.raises(ValueError, match=match):
            af.load(tmp_path)
    (tmp_path / "quantized.json").unlink()
    with pytest.raises(ValueError, match="has unknown"):
        af.load(tmp_path)


def test_a_folder_that_was_quantized_is_written_over_by_a_plain_model(tmp_path: Path) -> None:
    """What the last model left behind must not change how this one is read."""
    model, text = build(), ids()
    af.save(quantize(copy.deepcopy(model), "int8"), tmp_path)
    af.save(model, tmp_path)
    loaded = af.load(tmp_path).model
    assert quantized(loaded) is None
    assert torch.equal(loaded(text), model(text))


@pytest.mark.parametrize("bits", BITS)
def test_a_loaded_model_may_be_of_another_type(bits: Bits, tmp_path: Path) -> None:
    model, text = quantize(build(), bits), ids()
    af.save(model, tmp_path)
    wide = af.load(tmp_path, dtype="float64").model
    torch.testing.assert_close(wide(text), copy.deepcopy(model).double()(text), rtol=0, atol=1e-12)
    assert wide.dtype == torch.float64


@pytest.mark.parametrize("bits", BITS)
@torch.enable_grad()
def test_gradients_are_refused_in_one_sentence(bits: Bits) -> None:
    model = quantize(af.preset("gpt-mini").build(), bits)
    with pytest.raises(ValueError, match=r"pass no gradients on: call the model under torch.inference_mode\(\)"):
        model(torch.tensor([[1, 2, 3]]))
