"""Position schemes: rotary (FAULTS 29, 31), ALiBi (24), T5's buckets (26), sinusoids, learned tables (28)."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.parts.position import PositionModule, alibi_slopes, sinusoids


def turn(scheme: af.Rotary, x: Tensor, tokens: af.Tokens) -> Tensor:
    return scheme.build(x.shape[-1]).at_heads(x, tokens, Context(tokens))


def at(x: list[float], position: int, scheme: af.Rotary) -> Tensor:
    return turn(scheme, torch.tensor(x)[None, None, None], af.Tokens.arange(1, 1, start=position)).flatten()


# -- rotary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029800]),
        ("half", [-1.984111, 1.959901, 2.462378, 4.019800]),
    ],
)
def test_fault_29_both_layouts_in_numbers(layout: str, expected: list[float]) -> None:
    found = at([1.0, 2.0, 3.0, 4.0], 1, af.Rotary(layout=layout))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fault_29_scores_depend_on_the_distance_alone(layout: str) -> None:
    scheme = af.Rotary(layout=layout)
    q, k = torch.randn(2, 1, 6, 1, 8, dtype=torch.float64)
    near, far = af.Tokens.arange(1, 6), af.Tokens.arange(1, 6, start=1000)
    scores = [torch.einsum("bthk,bshk->bhts", turn(scheme, q, t), turn(scheme, k, t)) for t in (near, far)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    assert (scores[0] - torch.einsum("bthk,bshk->bhts", q, k)).abs().max() > 0.1
    torch.testing.assert_close(turn(scheme, q, far).norm(dim=-1), q.norm(dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fault_29_the_rest_of_a_partial_rotary_stays(layout: str) -> None:
    """A quarter of 16 channels turns, as a head of width 4 would; 12 stay bit for bit."""
    x = torch.randn(1, 5, 2, 16)
    tokens = af.Tokens.arange(1, 5, start=3)
    turned = turn(af.Rotary(fraction=0.25, layout=layout), x, tokens)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], turn(af.Rotary(layout=layout), x[..., :4].contiguous(), tokens))
    assert (turned[..., :4] - x[..., :4]).abs().min() > 0


def test_fault_29_permuted_weights_turn_one_layout_into_the_other() -> None:
    """Row 2i of an interleaved head is row i of a half-split one, row 2i + 1 is row i + half."""

    def build(layout: str) -> af.Transformer:
        mixer = af.Attention(2, num_kv_heads=1, position=af.Rotary(layout=layout))
        block = af.Block.pre(mixer, norm=af.RMSNorm())
        return af.TransformerSpec(dim=16, vocab_size=11, decoder=(block,), final_norm=af.RMSNorm()).build()

    half, interleaved = build("half"), build("interleaved")
    interleaved.load_state_dict(half.state_dict())
    ids = torch.randint(0, 11, (2, 7))
    assert (half(ids) - interleaved(ids)).abs().max() > 1e-4
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    for name in ("q", "k"):
        weight = getattr(interleaved.decoder.layers[0].mixer.op, name).weight.data
        weight.copy_(weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1))
    torch.testing.assert_close(half(ids), interleaved(ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fault_31_half_precision_at_long_positions(dtype: torch.dtype) -> None:
    """The model is cast after it was built; a vector (1, 0) in each pair comes out as cosine and sine."""
    mixer = af.Attention(1, position=af.Rotary())
    block = af.Block.pre(mixer, norm=af.RMSNorm())
    model = af.TransformerSpec(dim=64, vocab_size=3, decoder=(block,)).build().to(dtype)
    rotary = model.decoder.layers[0].mixer.op.position
    positions = [255, 257, 2049, 4095, 9001]
    pos = torch.tensor([positions])
    tokens = af.Tokens(pos, torch.zeros_like(pos))
    x = torch.cat((torch.ones(32), torch.zeros(32))).to(dtype).expand(1, 5, 1, 64)
    out = rotary.at_heads(x, tokens, Context(tokens))
    assert out.dtype == dtype
    angles = np.array(positions)[:, None] * 10000.0 ** (-2 * np.arange(32) / 64)
    exact = torch.tensor(np.concatenate((np.cos(angles), np.sin(angles)), -1))
    assert (out[0, :, 0].double() - exact).abs().max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fault_31_half_precision_is_rounded_once(dtype: torch.dtype, layout: str) -> None:
    """Turned in float32 and then rounded: each number is off by at most half of its last digit, however it cancels."""
    scheme, tokens = af.Rotary(layout=layout), af.Tokens.arange(1, 20, start=3000)
    x = torch.randn(1, 20, 2, 64).to(dtype)
    exact = turn(scheme, x.double(), tokens)
    error = (turn(scheme, x, tokens).double() - exact).abs()
    assert (error <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_fault_31_phases_are_computed_in_float64() -> None:
    cos, sin = af.Rotary().phases(torch.tensor([[4095, 1_000_000]]), 64, 1)
    angles = np.array([4095, 1_000_000])[:, None] * 10000.0 ** (-2 * np.arange(32) / 64)
    assert cos.dtype == torch.float64
    assert (cos[0, :, 0] - torch.tensor(np.cos(angles))).abs().max() < 1e-9
    assert (sin[0, :, 0] - torch.tensor(np.sin(angles))).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("scheme", "width", "said"),
    [
        (af.Rotary(), 3, "1.0 × 3 is 3"),
        (af.Rotary(fraction=0.25), 4, "0.25 × 4 is 1"),
        (af.Rotary(), 1, "1.0 × 1 is 1"),
    ],
)
def test_rotary_refuses_an_odd_number_of_channels(scheme: af.Rotary, width: int, said: str) -> None:
    with pytest.raises(af.SpecError, match=f"rotary needs an even number of channels to turn, but {said}"):
        scheme.build(width)


def test_rotary_refuses_a_fraction_above_1() -> None:
    with pytest.raises(af.SpecError, match=r"`fraction` must be at most 1, but is 1\.5"):
        af.Rotary(fraction=1.5)


# -- ALiBi ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (3, [1 / 16, 1 / 256, 1 / 4]),
        (1, [1 / 256]),
    ],
)
def test_fault_24_alibi_slopes(num_heads: int, slopes: list[float]) -> None:
    """The rule of the authors' code, not the sentence of their paper."""
    assert alibi_slopes(num_heads) == slopes


@pytest.mark.parametrize("num_heads", range(1, 34))
def test_fault_24_alibi_slopes_are_blooms(num_heads: int) -> None:
    """Bloom adds slope × key position, which is slope × (key - query) but for a constant of the row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    bloom = build_alibi_tensor(torch.ones(1, 5), num_heads, torch.float32)[:, 0]
    tokens = af.Tokens.arange(1, 5)
    ours = af.Alibi().build(8, num_heads).at_scores(tokens, tokens)
    torch.testing.assert_close(ours[0, :, -1] - ours[0, :, -1:, 0], bloom, rtol=1e-6, atol=0)


def test_alibi_falls_with_the_distance() -> None:
    tokens = af.Tokens.arange(2, 6)
    bias = af.Alibi().build(8, 2).at_scores(tokens, tokens)
    distance = torch.tensor([[abs(i - j) for j in range(6)] for i in range(6)])
    torch.testing.assert_close(bias, -torch.tensor([1 / 16, 1 / 256])[None, :, None, None] * distance)
    assert bias.shape[0] == 1, "one row stands for all when all are alike"


# -- T5 ---------------------------------------------------------------------------------------------------------------


def bucket_oracle(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's bucket in integers: e + (the most k with (d / e)^(n - e) ≥ (max / e)^k), at most n - 1."""
    n = num_buckets // 2 if bidirectional else num_buckets
    offset = n if bidirectional and distance < 0 else 0
    d, e = abs(distance) if bidirectional else max(distance, 0), n // 2
    if d < e:
        return offset + d
    k = 0
    while e + k + 1 <= n - 1 and d ** (n - e) * e ** (k + 1) >= max_distance ** (k + 1) * e ** (n - e):
        k += 1
    return offset + e + k


def buckets(distances: list[int], **spec: int | bool) -> list[int]:
    return af.RelativeBias(**spec).bucket(torch.tensor(distances)).tolist()


def test_fault_26_causal_buckets() -> None:
    back = [0, 1, 15, 16, 17, 20, 31, 64, 127, 128, 500]
    assert buckets(back) == [0, 1, 15, 16, 16, 17, 21, 26, 31, 31, 31]
    assert buckets([-1, -5, -300]) == [0, 0, 0]


def test_fault_26_bidirectional_buckets() -> None:
    key_minus_query = [-128, -20, -8, -7, -1, 0, 1, 7, 8, 20, 128]
    found = buckets([-d for d in key_minus_query], bidirectional=True)
    assert found == [15, 10, 8, 7, 1, 0, 17, 23, 24, 26, 31]


def test_fault_26_small_causal_table() -> None:
    expected = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7]
    assert buckets(list(range(16)), num_buckets=8, max_distance=16) == expected


SIZES = [(32, 128), (8, 16), (16, 64), (64, 500), (12, 50), (4, 9), (6, 10)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
def test_fault_26_buckets_are_the_integer_rule(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    distances = list(range(-600, 601))
    found = buckets(distances, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert found == [bucket_oracle(d, num_buckets, max_distance, bidirectional) for d in distances]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
def test_fault_26_buckets_are_transformers(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Wherever the logarithm is not on an edge, at which transformers' float32 may fall to either side."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers.models.t5.modeling_t5 import T5Attention
    distances = torch.arange(-200, 201)
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional, num_buckets, max_distance)
    ours = af.RelativeBias(num_buckets, max_distance, bidirectional=bidirectional).bucket(distances)
    n = num_buckets // 2 if bidirectional else num_buckets
    e = n // 2
    step = (distances.abs().clamp(min=e).double() / e).log() / math.log(max_distance / e) * (n - e)
    edge = ((step - step.round()).abs() < 1e-4) & (distances.abs() > e)
    assert edge.sum() < 20
    assert torch.equal(ours[~edge], theirs[~edge])


def test_relative_bias_is_looked_up_by_bucket() -> None:
    spec = af.RelativeBias(num_buckets=8, max_distance=16)
    module = spec.build(4, num_heads=3)
    torch.nn.init.normal_(module.table)
    tokens = af.Tokens.arange(1, 20)
    bias = module.at_scores(tokens, tokens)
    for q, k, head in [(0, 0, 0), (5, 3, 1), (19, 0, 2), (3, 9, 0)]:
        assert bias[0, head, q, k] == module.table[bucket_oracle(q - k, 8, 16, False), head]


def with_bias(*num_heads: int) -> af.Transformer:
    blocks = [
        af.Block.pre(af.Attention(h, position=af.RelativeBias(8, 16)), af.DenseFFN(8), norm=af.RMSNorm())
        for h in num_heads
    ]
    return af.TransformerSpec(dim=8, vocab_size=7, decoder=tuple(blocks)).build()


def test_one_table_serves_the_whole_stack() -> None:
    model = with_bias(2, 2, 2)
    tables = [p for name, p in model.named_parameters() if "position" in name]
    modules = {id(layer.mixer.op.position) for layer in model.decoder.layers}
    assert [tuple(t.shape) for t in tables] == [(8, 2)]
    assert len(modules) == 1
    ids = torch.randint(0, 7, (1, 6))
    before = model(ids)
    model.load_state_dict(with_bias(2, 2, 2).state_dict())
    tables[0].data.normal_(0, 3)
    tokens = af.Tokens.arange(1, 6)
    seen = [layer.mixer.op.position.at_scores(tokens, tokens) for layer in model.decoder.layers]
    assert all(torch.equal(s, seen[0]) for s in seen)
    assert seen[0][0, 1, 4, 1] == tables[0][3, 1]
    assert (model(ids) - before).abs().max() > 1e-3


def test_encoder_and_decoder_have_a_table_each() -> None:
    encoder = af.Block.pre(af.Attention(2, pattern=af.Full(), position=af.RelativeBias()), norm=af.RMSNorm())
    decoder = af.Block.pre(af.Attention(2, position=af.RelativeBias()), af.CrossAttention(2), norm=af.RMSNorm())
    model = af.TransformerSpec(dim=8, vocab_size=7, encoder=(encoder,) * 2, decoder=(decoder,) * 2).build()
    assert sum("position" in name for name, _ in model.named_parameters()) == 2


def test_layers_of_different_width_do_not_share_a_table() -> None:
    """A table has a column a head, so layers with 2 and with 4 heads have one each."""
    model = with_bias(2, 4, 2)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if "position" in name]
    assert shapes == [(8, 2), (8, 4)]
    assert model(torch.randint(0, 7, (1, 6))).isfinite().all()
    total = af.Cost().plus(*model.spec.costs(6).values())
    assert total.params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_buckets": 7}, "`num_buckets` must be even and at least 4, but is 7"),
        ({"num_buckets": 2}, "`num_buckets` must be even and at least 4, but is 2"),
        ({"max_distance": 16}, "`max_distance` must be more than 16, but is 16"),
        ({"max_distance": 8, "bidirectional": True}, "`max_distance` must be more than 8, but is 8"),
    ],
)
def test_relative_bias_refuses(options: dict[str, int], said: str) -> None:
    with pytest.raises(af.SpecError, match=said):
        af.RelativeBias(**options)


# -- at the input -----------------------------------------------------------------------------------------------------


def paper(length: int, width: int, base: float = 10000.0) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d)) (Vaswani et al. 2017)."""
    table = np.zeros((length, width))
    for pos in range(length):
        for channel in range(width):
            angle = pos / base ** (2 * (channel // 2) / width)
            table[pos, channel] = np.sin(angle) if channel % 2 == 0 else np.cos(angle)
    return table


@pytest.mark.parametrize("width", [2, 8, 64, 1, 7, 33])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sinusoids_are_the_papers(width: int, base: float) -> None:
    found = sinusoids(torch.arange(50)[None], width, base)
    assert found.shape == (1, 50, width)
    assert np.abs(found[0].double().numpy() - paper(50, width, base)).max() < 1e-6


def test_sinusoids_with_all_sines_first() -> None:
    found = sinusoids(torch.arange(50)[None], 8, layout="half")[0].double().numpy()
    both = paper(50, 8)
    assert np.abs(found - np.concatenate((both[:, 0::2], both[:, 1::2]), -1)).max() < 1e-6


def test_sinusoidal_is_added_to_the_input() -> None:
    module = af.Sinusoidal().build(6)
    x = torch.randn(2, 4, 6)
    tokens = af.Tokens.padded(torch.tensor([[False, True, True, True], [True, True, True, True]]))
    added = module.at_input(x, tokens) - x
    assert np.abs(added[0, 1:].numpy() - paper(3, 6)).max() < 1e-6
    assert np.abs(added[1].numpy() - paper(4, 6)).max() < 1e-6


def test_learned_rows_are_added_from_the_offset_on() -> None:
    module = af.Learned(5, offset=2).build(3)
    torch.nn.init.normal_(module.table)
    assert module.table.shape == (7, 3)
    out = module.at_input(torch.zeros(1, 5, 3), af.Tokens.arange(1, 5))
    assert torch.equal(out[0], module.table[2:])


def test_fault_28_learned_positions_run_out() -> None:
    """RoBERTa's 514 rows, offset 2, serve 512 tokens; one more is refused before anything is computed."""
    block = af.Block.pre(af.Attention(1, pattern=af.Full()), norm=af.RMSNorm())
    embed = af.Embed(position=af.Learned(512, offset=2))
    model = af.TransformerSpec(dim=2, vocab_size=3, embed=embed, encoder=(block,)).build()
    ids = torch.zeros(1, 513, dtype=torch.long)
    assert model.embeds["encoder"].position.table.shape == (514, 2)
    with pytest.raises(ValueError, match="the text needs 513 positions, but the model has 512: shorten it"):
        model(ids)
    assert model(ids[:, :512]).isfinite().all()


@pytest.mark.parametrize(
    "scheme", [af.Learned(4), af.Sinusoidal(), af.Rotary(), af.Alibi(), af.RelativeBias()], ids=repr
)
def test_a_scheme_overrides_the_hook_that_it_acts_through_and_no_other(scheme: af.Position) -> None:
    hooks = {"input": "at_input", "heads": "at_heads", "scores": "at_scores"}
    own = {
        name for name in hooks.values() if getattr(type(scheme.build(8, 2)), name) is not getattr(PositionModule, name)
    }
    assert own == {hooks[scheme.acts]}
