"""Frequency schedules of rotary positions against transformers' own, and NTK against its formula."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import anyformer as af
from anyformer.context import Context


def theirs(
    head_dim: int, base: float, length: int, scaling: dict[str, Any], **config: Any
) -> tuple[list[float], float]:
    """(inverse frequencies, attention factor) by transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    full = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_theta": base, **scaling},
        **config,
    )
    kind = scaling["rope_type"]
    if kind == "default":
        inverse, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(full)
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](full, torch.device("cpu"), seq_len=length)
    return inverse.tolist(), factor


def assert_alike(ours: af.Frequencies, expected: tuple[list[float], float], head_dim: int, base: float, n: int) -> None:
    """Theirs is computed in float32, so it holds to a few times 1e-7 of each value."""
    inverse, gain = expected
    assert len(inverse) == head_dim // 2
    assert ours.inverse(head_dim, base, n) == pytest.approx(inverse, rel=3e-6)
    assert ours.gain() == pytest.approx(gain, rel=1e-9)


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_plain(head_dim: int, base: float) -> None:
    expected = theirs(head_dim, base, 100, {"rope_type": "default"})
    assert_alike(af.Plain(), expected, head_dim, base, 100)


@pytest.mark.parametrize("factor", [1.0, 4.0, 2.5])
def test_linear(factor: float) -> None:
    expected = theirs(64, 1e4, 100, {"rope_type": "linear", "factor": factor})
    assert_alike(af.Linear(factor), expected, 64, 1e4, 100)


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_dynamic_below_and_beyond_the_original_length(length: int, factor: float) -> None:
    scaling = {"rope_type": "dynamic", "factor": factor}
    expected = theirs(32, 1e4, length, scaling, max_position_embeddings=64)
    assert_alike(af.DynamicNTK(factor, original_len=64), expected, 32, 1e4, length)
    if length <= 64:
        assert af.DynamicNTK(factor, original_len=64).inverse(32, 1e4, length) == af.Plain().inverse(32, 1e4, length)


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 4.0},
        {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0},
        {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 4.0, "truncate": False},
        {"factor": 32.0, "truncate": False, "beta_fast": 64.0, "beta_slow": 0.5},
        {"factor": 4.0, "attention_factor": 0.75},
        {"factor": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "base", "original"), [(64, 1e4, 4096), (128, 1e6, 32768), (16, 150000.0, 512)])
def test_yarn(options: dict[str, Any], head_dim: int, base: float, original: int) -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": original, **options}
    extended = int(original * options["factor"])
    expected = theirs(head_dim, base, 100, scaling, max_position_embeddings=extended)
    ours = {("attention_gain" if name == "attention_factor" else name): value for name, value in options.items()}
    assert_alike(af.YaRN(original_len=original, **ours), expected, head_dim, base, 100)


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
        {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0, "original": 1024},
    ],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "base"), [(128, 5e5), (64, 1e4)])
def test_llama3(options: dict[str, Any], head_dim: int, base: float) -> None:
    rest = {name: value for name, value in options.items() if name != "original"}
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": options["original"], **rest}
    expected = theirs(head_dim, base, 100, scaling, max_position_embeddings=131072)
    assert_alike(af.Llama3(original_len=options["original"], **rest), expected, head_dim, base, 100)


def test_llama3_has_all_three_regions() -> None:
    """The settings above are no test if every pair stays or every pair is divided."""
    ratio = [a / b for a, b in zip(af.Plain().inverse(128, 5e5, 0), af.Llama3().inverse(128, 5e5, 0), strict=True)]
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert any(1.01 < r < 7.99 for r in ratio)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_ntk_is_its_formula(factor: float) -> None:
    """base · factor^(d / (d - 2)): the fastest pair stays, the slowest turns exactly `factor` times slower."""
    d, base = 16, 1e4
    found = af.NTK(factor).inverse(d, base, 0)
    larger = base * factor ** (d / (d - 2))
    assert found == pytest.approx([larger ** (-2 * i / d) for i in range(d // 2)], rel=1e-12)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(base ** (-(d - 2) / d) / factor, rel=1e-12)


def test_gain_multiplies_cosine_and_sine() -> None:
    """YaRN's factor reaches the queries: a vector of norm 1 comes out with norm gain."""
    scheme = af.Rotary(frequencies=af.YaRN(4.0, original_len=4096))
    gain = 0.1 * math.log(4.0) + 1
    q = torch.zeros(1, 3, 1, 64)
    q[..., 0] = 1.0
    tokens = af.Tokens.arange(1, 3)
    turned = scheme.build(64).at_heads(q, tokens, Context(tokens))
    assert turned.norm(dim=-1).flatten().tolist() == pytest.approx([gain] * 3, rel=1e-6)


def model(frequencies: Any) -> af.Transformer:
    mixer = af.Attention(2, position=af.Rotary(frequencies=frequencies))
    block = af.Block.pre(mixer, af.GatedFFN(8), norm=af.RMSNorm())
    return af.TransformerSpec(dim=8, vocab_size=5, decoder=(block,), final_norm=af.RMSNorm()).build()


def test_fault_33_position_63_is_there_and_64_is_refused() -> None:
    scaled = model(af.Linear(factor=4, original_len=16))
    ids = torch.zeros(1, 65, dtype=torch.long)
    assert scaled.max_len == 64
    assert scaled(ids[:, :64]).isfinite().all()
    with pytest.raises(ValueError, match="the text needs 65 positions, but the model has 64"):
        scaled(ids)
    tokens = af.Tokens.arange(1, 1, start=63)
    assert scaled(ids[:, :1], tokens).isfinite().all()
    with pytest.raises(ValueError, match="needs 65 positions, but the model has 64"):
        scaled(ids[:, :1], af.Tokens.arange(1, 1, start=64))


def test_fault_33_yarn_is_bounded_too_and_plain_is_not() -> None:
    assert model(af.YaRN(4.0, original_len=16)).max_len == 64
    assert model(af.Plain()).max_len is None
    assert model(af.Linear(4.0)).max_len is None


@pytest.mark.parametrize("position", [0, 8, 15, 16, 63])
def test_fault_33_linear_8_is_plain_2(position: int) -> None:
    """With factor 4, position p turns as p / 4 does without: 8 as 2."""
    pos = torch.tensor([[position]])
    cos, sin = af.Rotary(frequencies=af.Linear(4.0)).phases(pos, 8, 64)
    angles = [position / 4 * 1e4 ** (-2 * i / 8) for i in range(4)]
    assert cos.flatten().tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-7)
    assert sin.flatten().tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-7)


def test_fault_33_no_scaling_is_factor_1() -> None:
    assert af.Rotary().frequencies == af.Plain()
    assert af.Linear(1.0).inverse(8, 1e4, 9) == af.Plain().inverse(8, 1e4, 9)


def test_fault_33_unknown_kind_is_refused() -> None:
    with pytest.raises(af.SpecError, match=r"^frequencies: unknown kind of .* 'lineer'; did you mean 'linear'"):
        af.Rotary(frequencies={"kind": "lineer", "factor": 4.0})


def test_dynamic_follows_the_length_that_is_planned_for() -> None:
    """In a model: `context_len` decides, else the input's length; short inputs are as without scaling."""
    dynamic, plain = model(af.DynamicNTK(2.0, original_len=8)), model(af.Plain())
    plain.load_state_dict(dynamic.state_dict())
    ids = torch.randint(0, 5, (1, 8))
    torch.testing.assert_close(dynamic(ids), plain(ids), rtol=0, atol=0)
    planned = dynamic(ids, context_len=32)
    assert (planned - plain(ids)).abs().max() > 1e-5
    longer = torch.cat((ids, ids[:, :1].expand(1, 24)), 1)
    torch.testing.assert_close(planned, dynamic(longer)[:, :8], rtol=0, atol=1e-6)
