"""Norms against torch and against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anyformer as af


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_layer_norm_is_torchs(bias: bool, eps: float) -> None:
    ours, theirs = af.LayerNorm(eps=eps, bias=bias).build(6), nn.LayerNorm(6, eps=eps, bias=bias)
    nn.init.normal_(theirs.weight)
    if bias:
        nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_torchs(eps: float) -> None:
    ours, theirs = af.RMSNorm(eps=eps).build(6), nn.RMSNorm(6, eps=eps)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


def test_layer_norm_in_numbers() -> None:
    """Mean 2, variance 1: (1, 3) becomes (-1, 1); gain 2 and shift 5 make it (3, 7)."""
    norm = af.LayerNorm(eps=1e-12).build(2)
    torch.testing.assert_close(norm(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]))
    norm.weight.data.fill_(2.0)
    norm.bias.data.fill_(5.0)
    torch.testing.assert_close(norm(torch.tensor([1.0, 3.0])), torch.tensor([3.0, 7.0]))


def test_fault_38_rms_norm_of_3_4() -> None:
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(af.RMSNorm().build(2)(x), torch.tensor([0.848528, 1.131371]), rtol=0, atol=1e-6)


def test_eps_is_under_the_root() -> None:
    """x = (1, 1) and eps 3: 1 / √(1 + 3) = 0.5; beside the root it would be 1 / (1 + 3)."""
    torch.testing.assert_close(af.RMSNorm(eps=3.0).build(2)(torch.ones(2)), torch.full((2,), 0.5))


def test_gemma_offset_stores_weights_around_zero() -> None:
    """Gemma multiplies by 1 + weight: a new norm is the same function, and its stored weight is 0."""
    plain, gemma = af.RMSNorm().build(4), af.RMSNorm(offset=1.0).build(4)
    x = torch.randn(3, 4)
    assert gemma.weight.tolist() == [0.0] * 4
    torch.testing.assert_close(gemma(x), plain(x), rtol=0, atol=1e-7)
    gemma.weight.data.fill_(0.5)
    torch.testing.assert_close(gemma(x), 1.5 * plain(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", [af.LayerNorm(), af.RMSNorm(), af.RMSNorm(offset=1.0)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_in_half_out(spec: af.Norm, dtype: torch.dtype) -> None:
    """The answer has the type of the input, and the accuracy of one rounding of the float64 answer."""
    x = torch.randn(5, 64).to(dtype)
    exact = spec.build(64).double()(x.double())
    half = spec.build(64).to(dtype)(x)
    assert half.dtype == dtype
    torch.testing.assert_close(half.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("spec", [af.LayerNorm(), af.RMSNorm()], ids=repr)
@pytest.mark.parametrize("size", [3e4, 3e-5])
def test_squares_leave_the_range_of_float16(spec: af.Norm, size: float) -> None:
    """30 000² does not fit in float16, nor does 0.00003²: the statistics must be taken in float32."""
    x = torch.tensor([[size, -size, size, -size]], dtype=torch.float16)
    spec = spec.replace(eps=1e-20)
    expected = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float16)
    torch.testing.assert_close(spec.build(4).half()(x), expected, rtol=0, atol=2e-3)


def test_float64_stays_float64() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    out: Tensor = af.RMSNorm().build(8).double()(x)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize("spec", [af.LayerNorm(), af.LayerNorm(bias=False), af.RMSNorm()], ids=repr)
def test_cost_counts_the_parameters(spec: af.Norm) -> None:
    assert spec.cost(24, 5).params == sum(p.numel() for p in spec.build(24).parameters())


@pytest.mark.parametrize("eps", [0.0, -1e-5])
def test_eps_must_be_positive(eps: float) -> None:
    with pytest.raises(af.SpecError, match=r"^eps: .*greater than 0"):
        af.RMSNorm(eps=eps)
