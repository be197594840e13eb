"""Feed-forwards against formulas in plain Python, and float16 that must not run over (FAULT 39)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.parts.ffn import ACTIVATIONS

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu2": lambda x: max(x, 0.0) ** 2,
}
CTX = Context(af.Tokens.arange(1, 1))


def apply(name: str, x: Tensor) -> Tensor:
    """The activation, from its formula, in float64."""
    return x.double().apply_(FORMULAS[name])


def run(spec: af.FeedForward, x: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, af.OpModule]:
    module = spec.build(x.shape[-1], {}).to(dtype)
    out, aux = module(x.to(dtype), CTX)
    assert aux is None
    return out, module


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_its_formula(name: str) -> None:
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), apply(name, x.clone()), rtol=0, atol=1e-12)


def test_every_activation_of_the_spec_is_there() -> None:
    assert set(ACTIVATIONS) == set(FORMULAS)
    for name in FORMULAS:
        af.DenseFFN(4, activation=name).build(4, {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu", [-0.00936083, -0.04550026, 0.84134475, 1.95449974]),
        ("gelu_tanh", [-0.00888759, -0.04540231, 0.84119199, 1.95459769]),
    ],
)
def test_fault_37_gelu_exact_and_tanh(name: str, expected: list[float]) -> None:
    x = torch.tensor([-2.7, -2.0, 1.0, 2.0])
    torch.testing.assert_close(ACTIVATIONS[name](x), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_is_its_formula(name: str, bias: bool) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    out, m = run(af.DenseFFN(7, activation=name, bias=bias), x)
    up, down = (m.up.bias, m.down.bias) if bias else (0.0, 0.0)
    expected = apply(name, (x @ m.up.weight.T + up).detach()) @ m.down.weight.T + down
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert {n for n, _ in m.named_parameters() if n.endswith("bias")} == ({"up.bias", "down.bias"} if bias else set())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gated_is_its_formula(name: str, bias: bool) -> None:
    """The activation is on the gate, not on `up`."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    out, m = run(af.GatedFFN(7, activation=name, bias=bias), x)
    gate, up, down = (m.gate.bias, m.up.bias, m.down.bias) if bias else (0.0, 0.0, 0.0)
    activated = apply(name, (x @ m.gate.weight.T + gate).detach())
    expected = (activated * (x @ m.up.weight.T + up)) @ m.down.weight.T + down
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def overflowing(dtype: torch.dtype) -> af.OpModule:
    """Activations [300, 300] × weights [110, 111] = 66 300, which float16 (up to 65 504) cannot hold."""
    ffn = af.DenseFFN(2, bias=False).build(1, {})
    ffn.up.weight.data = torch.tensor([[300.0], [300.0]])
    ffn.down.weight.data = torch.tensor([[110.0, 111.0]])
    return ffn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fault_39_dense_overflow(dtype: torch.dtype) -> None:
    out, _ = overflowing(dtype)(torch.ones(1, 1, 1, dtype=dtype), CTX)
    assert out.item() == {torch.float32: 66300.0, torch.bfloat16: 66048.0, torch.float16: 65504.0}[dtype]
    assert af.RMSNorm().build(1).to(dtype)(out).item() == 1.0


def test_fault_39_gated_product_overflow() -> None:
    """The product gate × up = 300 × 300 runs over before the last matrix does; and inf - inf would be NaN."""
    ffn = af.GatedFFN(2, activation="relu").build(1, {})
    ffn.gate.weight.data.fill_(300.0)
    ffn.up.weight.data.fill_(300.0)
    ffn.down.weight.data = torch.tensor([[1.0, -1.0]])
    out, _ = ffn.half()(torch.ones(1, 1, 1, dtype=torch.float16), CTX)
    assert out.item() == 0.0
    ffn.down.weight.data = torch.tensor([[1.0, 1.0]]).half()
    out, _ = ffn(torch.ones(1, 1, 1, dtype=torch.float16), CTX)
    assert out.item() == 65504.0


def test_fault_39_gradient_stays_finite() -> None:
    ffn = overflowing(torch.float16)
    x = torch.ones(1, 1, 1, dtype=torch.float16, requires_grad=True)
    af.RMSNorm().build(1).half()(ffn(x, CTX)[0]).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in [x, *ffn.parameters()])


def test_fault_39_residual_stream() -> None:
    """The sum x + out runs over even if both parts fit: 60 000 + 60 000."""
    block = af.Block.pre(af.DenseFFN(1, bias=False), norm=af.RMSNorm()).build(1, {})
    block.ffn.op.load_state_dict({"up.weight": torch.tensor([[250.0]]), "down.weight": torch.tensor([[240.0]])})
    out, _ = block.half()(torch.full((1, 1, 1), 60000.0, dtype=torch.float16), CTX)
    assert out.item() == 65504.0


@pytest.mark.parametrize("spec", [af.DenseFFN(12), af.DenseFFN(12, bias=False), af.GatedFFN(12, bias=True)], ids=repr)
def test_cost_counts_the_parameters(spec: af.FeedForward) -> None:
    assert spec.cost(5, 3).params == sum(p.numel() for p in spec.build(5, {}).parameters())


def test_unknown_activation_names_the_known() -> None:
    with pytest.raises(af.SpecError, match=r"^activation: .*'gelu', 'gelu_tanh', 'silu' or 'relu2', but is 'x'"):
        af.GatedFFN(8, activation="x")
