"""Attention against torch's and transformers' own, and in numbers (FAULTS 34, 35)."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.context import Context


def run(module: af.OpModule, x: Tensor, tokens: af.Tokens | None = None, kernel: str | None = None) -> Tensor:
    tokens = tokens or af.Tokens.arange(*x.shape[:2])
    out, aux = module(x, Context(tokens, kernel=kernel, context_len=tokens.end))
    assert aux is None
    return out


def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """softmax(softcap(q kᵀ · scale)) v of one head, with loops over nothing but the written formula; (T, K), (S, K)."""
    scores = q @ k.T * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.where(mask, scores, -torch.inf).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


# -- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_multi_head_is_torchs(kernel: str, bias: bool, is_causal: bool) -> None:
    theirs = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    pattern = af.Causal() if is_causal else af.Full()
    ours = af.Attention(3, pattern=pattern, bias=("q", "k", "v", "out") if bias else ()).build(12, {})
    ours.load_state_dict(from_torch(theirs))
    x = torch.randn(2, 5, 12)
    expected, _ = theirs(x, x, x, attn_mask=~causal(5) if is_causal else None, need_weights=False)
    torch.testing.assert_close(run(ours, x, kernel=kernel), expected, rtol=0, atol=1e-6)


def from_torch(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Our state from torch's: three stacked projections come apart."""
    state = {"out.weight": theirs.out_proj.weight}
    state |= {f"{n}.weight": w for n, w in zip("qkv", theirs.in_proj_weight.chunk(3), strict=True)}
    if theirs.in_proj_bias is not None:
        state |= {f"{n}.bias": b for n, b in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True)}
        state["out.bias"] = theirs.out_proj.bias
    return state


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_padding_is_torchs_key_padding_mask(kernel: str) -> None:
    theirs = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    ours = af.Attention(3, pattern=af.Full()).build(12, {})
    ours.load_state_dict(from_torch(theirs))
    x = torch.randn(3, 5, 12)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    expected, _ = theirs(x, x, x, key_padding_mask=~keep, need_weights=False)
    out = run(ours, x, af.Tokens.padded(keep), kernel)
    torch.testing.assert_close(out[keep], expected[keep], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_cross_attention_is_torchs(kernel: str) -> None:
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = af.CrossAttention(3, bias=("q", "k", "v", "out")).build(12, {})
    ours.load_state_dict(from_torch(theirs))
    x, memory = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    ctx = Context(af.Tokens.arange(2, 4), memory, af.Tokens.padded(keep), kernel=kernel)
    expected, _ = theirs(x, memory, memory, key_padding_mask=~keep, need_weights=False)
    torch.testing.assert_close(ours(x, ctx)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("names", [(), ("q",), ("k", "v"), ("out",), ("q", "k", "v", "out")])
def test_bias_names_the_projections_that_have_one(names: tuple[str, ...]) -> None:
    module = af.Attention(2, bias=names).build(8, {})
    assert {n.removesuffix(".bias") for n, _ in module.named_parameters() if n.endswith(".bias")} == set(names)


# -- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_qk_norm_before_rotary_is_qwen3(kernel: str) -> None:
    """Grouped queries, a head width of its own, RMSNorm a head, then rotary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
    config = Qwen3Config(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_hidden_layers=1, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    theirs = Qwen3Attention(config, 0)
    nn.init.normal_(theirs.q_norm.weight)
    nn.init.normal_(theirs.k_norm.weight)
    position = af.Rotary(base=config.rope_parameters["rope_theta"])
    ours = af.Attention(4, num_kv_heads=2, head_dim=6, qk_norm=af.RMSNorm(), position=position).build(12, {})
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    ours.load_state_dict({f"{mine}.weight": getattr(theirs, name).weight for mine, name in names.items()})
    x = torch.randn(2, 5, 12)
    phases = Qwen3RotaryEmbedding(config)(x, torch.arange(5)[None])
    hidden = torch.zeros(5, 5).masked_fill(~causal(5), -torch.inf)
    expected, _ = theirs(x, phases, hidden[None, None])
    torch.testing.assert_close(run(ours, x, kernel=kernel), expected, rtol=0, atol=1e-6)


def test_softcap_and_scale_are_gemma2() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    q, k, v = 5 * torch.randn(2, 6, 4, 8), 5 * torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    groups = nn.Module()
    groups.num_key_value_groups = 2
    hidden = torch.zeros(6, 6).masked_fill(~causal(6), -torch.inf)
    heads = (t.transpose(1, 2) for t in (q, k, v))
    expected, _ = eager_attention_forward(groups.eval(), *heads, hidden[None, None], scaling=0.3, softcap=4.0)
    torch.testing.assert_close(af.attend(q, k, v, scale=0.3, softcap=4.0), expected, rtol=0, atol=1e-6)
    assert (af.attend(q, k, v, scale=0.3) - expected).abs().max() > 0.1


# -- in numbers -------------------------------------------------------------------------------------------------------


def test_fault_34_shapes_of_a_head_width_of_its_own() -> None:
    spec = af.Attention(4, num_kv_heads=2, head_dim=3)
    module = spec.build(6, {})
    shapes = {name: tuple(getattr(module, name).weight.shape) for name in ("q", "k", "v", "out")}
    assert shapes == {"q": (12, 6), "k": (6, 6), "v": (6, 6), "out": (6, 12)}
    assert af.Attention.parse(spec.to_dict()).head_dim == 3
    with pytest.raises(RuntimeError, match=r"q\.weight.*\[6, 6\].*\[12, 6\]"):
        module.load_state_dict({**module.state_dict(), "q.weight": torch.zeros(6, 6)})


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_fault_34_scale_is_that_of_the_head(kernel: str) -> None:
    """q = k₀ = (1, 1, 1), k₁ = 0: the weight of key 0 is sigmoid(3 / √3) = 0.849675."""
    module = af.Attention(4, num_kv_heads=2, head_dim=3, pattern=af.Full()).build(6, {})
    assert module.scale == pytest.approx(1 / math.sqrt(3))
    q = torch.ones(1, 1, 4, 3)
    k = torch.stack((torch.ones(2, 3), torch.zeros(2, 3)))[None]
    v = torch.tensor([1.0, 0.0])[None, :, None, None].expand(1, 2, 2, 3)
    out = af.attend(q, k, v, pattern=af.Full(), kernel=kernel)
    torch.testing.assert_close(out, torch.full((1, 1, 4, 3), 0.849675), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_fault_35_key_value_heads_are_repeated_not_tiled(kernel: str) -> None:
    """4 query heads on 2: (0, 0, 1, 1)."""
    q, k = torch.zeros(1, 3, 4, 2), torch.zeros(1, 3, 2, 2)
    v = torch.tensor([10.0, 20.0])[None, None, :, None].expand(1, 3, 2, 2)
    out = af.attend(q, k, v, kernel=kernel)
    assert torch.equal(out, torch.tensor([10.0, 10.0, 20.0, 20.0])[None, None, :, None].expand(1, 3, 4, 2))


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize(("num_heads", "groups"), [(4, 2), (6, 2), (6, 3), (4, 1), (3, 3)])
@pytest.mark.parametrize("length", [2, 3, 5])
def test_fault_35_grouped_is_multi_head_with_copied_weights(
    kernel: str, num_heads: int, groups: int, length: int
) -> None:
    """Lengths that equal the number of key-value heads would hide a mistaken axis."""
    grouped = af.Attention(num_heads, num_kv_heads=groups, head_dim=4, bias=("k", "v")).build(8, {})
    full = af.Attention(num_heads, head_dim=4, bias=("k", "v")).build(8, {})
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight", "k.bias", "v.bias"):
        heads = [state[name].unflatten(0, (groups, 4))[h // (num_heads // groups)] for h in range(num_heads)]
        state[name] = torch.cat(heads)
    full.load_state_dict(state)
    x = torch.randn(2, length, 8)
    torch.testing.assert_close(run(grouped, x, kernel=kernel), run(full, x, kernel=kernel), rtol=0, atol=1e-6)


def test_fault_35_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(af.SpecError, match=r"^`num_heads` must be a multiple of `num_kv_heads` \(4\), but is 6$"):
        af.Attention(6, num_kv_heads=4)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_scale_in_a_module(kernel: str, scale: float | None) -> None:
    module = af.Attention(1, head_dim=4, scale=scale).build(6, {}).double()
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    q, k, v = (layer(x)[0] for layer in (module.q, module.k, module.v))
    expected = module.out(textbook(q, k, v, causal(5), 0.5 if scale is None else scale))
    torch.testing.assert_close(run(module, x, kernel=kernel)[0], expected, rtol=0, atol=1e-12)


def test_qk_norm_is_of_each_head_and_before_the_position() -> None:
    """With a gain that differs by channel, rotary then norm is not norm then rotary."""
    spec = af.Attention(2, head_dim=4, qk_norm=af.RMSNorm(), position=af.Rotary())
    module = spec.build(8, {}).double()
    nn.init.normal_(module.q_norm.weight)
    nn.init.normal_(module.k_norm.weight)
    x = torch.randn(1, 5, 8, dtype=torch.float64)

    def normed(y: Tensor, gain: Tensor) -> Tensor:
        heads = y.unflatten(-1, (2, 4))
        return heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def rotated(y: Tensor) -> Tensor:
        angle = torch.arange(5.0, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        a, b = y[..., :2], y[..., 2:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    q, k = rotated(normed(module.q(x), module.q_norm.weight)), rotated(normed(module.k(x), module.k_norm.weight))
    v = module.v(x).unflatten(-1, (2, 4))
    heads = [textbook(q[0, :, h], k[0, :, h], v[0, :, h], causal(5), 0.5) for h in range(2)]
    torch.testing.assert_close(run(module, x)[0], module.out(torch.cat(heads, -1)), rtol=0, atol=1e-6)


def test_fault_21_dropout_only_in_training() -> None:
    module = af.Attention(2, dropout=0.5).build(8, {})
    still = af.Attention(2).build(8, {})
    still.load_state_dict(module.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(run(module.eval(), x), run(still, x))
    assert not torch.equal(run(module.train(), x), run(module, x))


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_fault_21_dropout_keeps_the_mean(kernel: str) -> None:
    ones = torch.ones(4000, 4, 1, 1)
    out = af.attend(0 * ones, 0 * ones, ones, pattern=af.Full(), dropout=0.5, kernel=kernel)
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)
    assert out.std() > 0.1


# -- attend, for models that are not ours -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [None, "sdpa", "reference"])
def test_attend_is_causal_by_default(kernel: str | None) -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    out = af.attend(q, k, v, kernel=kernel)
    for head in range(2):
        expected = textbook(q[0, :, head], k[0, :, head], v[0, :, head], causal(5), 0.5)
        torch.testing.assert_close(out[0, :, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_fault_4_queries_are_the_last_of_the_keys(kernel: str) -> None:
    """3 cached + 2 new, all scores 0: means of 4 and of 5 values; a triangle in the other corner gives 1 and 1.5."""
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[None, :, None, None]
    zero = torch.zeros(1, 5, 1, 1)
    out = af.attend(zero[:, :2], zero, v, kernel=kernel)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.75, 6.2]))
    torch.testing.assert_close(af.attend(zero[:, :1], zero, v, kernel=kernel).item(), 6.2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", [af.Rotary(), af.Alibi()], ids=repr)
def test_attend_places_fewer_queries_at_the_end_for_the_position_too(scheme: af.Position) -> None:
    q, k, v = torch.randn(3, 2, 6, 2, 4)
    full = af.attend(q, k, v, position=scheme)
    torch.testing.assert_close(af.attend(q[:, 4:], k, v, position=scheme), full[:, 4:], rtol=0, atol=1e-6)


def test_attend_with_a_learned_bias_as_a_module() -> None:
    spec = af.RelativeBias(8, 16)
    bias = spec.build(4, num_heads=2)
    nn.init.normal_(bias.table)
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    out = af.attend(q, k, v, position=bias, scale=1.0)
    for head in range(2):
        distance = (torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0)
        scores = q[0, :, head] @ k[0, :, head].T + bias.table[spec.bucket(distance), head]
        weights = torch.where(causal(5), scores, -torch.inf).softmax(-1)
        torch.testing.assert_close(out[0, :, head], weights @ v[0, :, head], rtol=0, atol=1e-6)
    out.sum().backward()
    assert bias.table.grad is not None
    assert bias.table.grad.abs().sum() > 0


def test_attend_tokens_of_the_queries_hold_for_keys_of_the_same_length() -> None:
    q, k, v = torch.randn(3, 1, 4, 1, 2)
    packed = af.Tokens.packed(torch.tensor([[0, 0, 1, 1]]))
    out = af.attend(q, k, v, tokens=packed)
    torch.testing.assert_close(out[:, 2:], af.attend(q[:, 2:], k[:, 2:], v[:, 2:]), rtol=0, atol=1e-6)


QKV = torch.zeros(1, 3, 4, 8)


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        (QKV[:, :, :3], {}, "4 query heads must be a multiple of the key-value heads, which are 3"),
        (QKV[:, :2], {}, "3 queries cannot be the last of 2 keys: give `tokens` and `key_tokens`"),
        (QKV, {"tokens": af.Tokens.arange(1, 2)}, r"`tokens` must be for \(B, T\) = \(1, 3\), but are for \(1, 2\)"),
        (QKV, {"key_tokens": af.Tokens.arange(2, 3)}, r"`key_tokens` must be for \(B, T\) = \(1, 3\), but .* \(2, 3\)"),
        (QKV, {"kernel": "flash"}, "unknown kernel 'flash'; known: "),
        (
            QKV,
            {"kernel": "sdpa", "softcap": 2.0},
            "kernel 'sdpa' was asked for, but torch's fused attention cannot cap",
        ),
        (QKV, {"position": af.Learned(8)}, "position 'learned' acts on the input, which attention does not see"),
    ],
)
def test_attend_says_what_is_wrong_in_one_sentence(keys: Tensor, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        af.attend(QKV, keys, keys, **options)
    assert "\n" not in str(error.value)


def test_attend_full_takes_more_queries_than_keys() -> None:
    out = af.attend(QKV, QKV[:, :2], QKV[:, :2] + 3, pattern=af.Full())
    assert torch.equal(out, QKV + 3)


# -- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: af.Attention(4, position=af.Learned(8)),
            "position 'learned' acts on the input: put it in `embed.position`",
        ),
        (lambda: af.Attention(4, dropout=1.0), "`dropout` must be below 1, but is 1.0"),
        (lambda: af.CrossAttention(4, position=af.Rotary()), "positions of two different texts cannot be compared"),
        (lambda: af.CrossAttention(4, pattern=af.Causal()), "positions of two different texts cannot be compared"),
        (
            lambda: af.Attention(4).build(6, {}),
            r"`dim` must be a multiple of `num_heads` \(4\), but is 6: or give `head_dim`",
        ),
        (lambda: af.Attention(4, bias=("o",)), "must be 'q', 'k', 'v' or 'out', but is 'o'"),
    ],
)
def test_attention_refuses(make, said: str) -> None:
    with pytest.raises(af.SpecError, match=said):
        make()


def test_cross_attention_without_memory() -> None:
    with pytest.raises(ValueError, match="cross-attention needs the encoder's output: give `memory`, or `source`"):
        run(af.CrossAttention(2).build(8, {}), torch.zeros(1, 3, 8))


@pytest.mark.parametrize(
    "spec",
    [
        af.Attention(2),
        af.Attention(4, num_kv_heads=2, head_dim=3, bias=("q", "out")),
        af.Attention(4, num_kv_heads=1, qk_norm=af.RMSNorm(), position=af.RelativeBias()),
        af.CrossAttention(2, bias=("k",)),
    ],
    ids=repr,
)
def test_cost_counts_the_parameters(spec: af.Attention) -> None:
    assert spec.cost(8, 3).params == sum(p.numel() for p in spec.build(8, {}).parameters())
