"""What was found in `torch.nn`, each as a few lines of its own calls: it prints what it measures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from findings.finding import TORCH, finding, off, raised


def layers(**how: Any) -> Any:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2, **how).eval()


def fast_against_slow(model: Any, x: Tensor, **masks: Tensor) -> float:
    """How far eval without gradients, which takes the fast path, is from eval with gradients, which does not."""
    slow = model(x, **masks).detach()
    with torch.no_grad():
        fast = model(x, **masks)
    print(f"  NaN at {fast.isnan().any(-1).tolist()} on the fast path, at {slow.isnan().any(-1).tolist()} on the other")
    return off(fast, slow)


@finding(
    TORCH,
    "torch encoder, causal: (padding|batch)",
    smallest="3 tokens, the first one masked, and a causal mask",
    much="NaN",
    word="silent",
    why="attention that sees nothing is 0 on the slow path and NaN on the fast one, and NaN spreads; known to the "
    "library: https://github.com/pytorch/pytorch/pull/190486",
)
def torch_causal_left_padding() -> float:
    """a causal TransformerEncoder in eval gives NaN for a whole text that is padded on the left"""
    future, pads = torch.ones(3, 3).triu(1).bool(), torch.tensor([[True, False, False]])
    return fast_against_slow(layers(), torch.randn(1, 3, 32), mask=future, src_key_padding_mask=pads)


@finding(
    TORCH,
    "torch transformer: (padding|batch)",
    smallest="target of 3 tokens, the first one masked, and a causal mask",
    much="NaN",
    word="silent",
    why="the same, through the fast path of MultiheadAttention",
)
def torch_transformer_left_padding() -> float:
    """nn.Transformer in eval gives NaN for a target that is padded on the left"""
    torch.manual_seed(0)
    model, x = nn.Transformer(32, 4, 2, 2, 48, batch_first=True).eval(), torch.randn(1, 3, 32)
    future, pads = torch.ones(3, 3).triu(1).bool(), torch.tensor([[True, False, False]])
    return fast_against_slow(lambda x, **masks: model(x, x, **masks), x, tgt_mask=future, tgt_key_padding_mask=pads)


@finding(
    TORCH,
    smallest="a batch of two rows of 2 tokens, one row all masked",
    much="NaN",
    word="silent",
    why="with nested tensors, the default of an encoder that norms last, the row is 0 instead",
)
def torch_masked_row() -> float:
    """a row without a real token is NaN in eval without gradients (the fast path), and finite with them"""
    pads = torch.tensor([[False, False], [True, True]])
    return fast_against_slow(layers(enable_nested_tensor=False), torch.randn(2, 2, 32), src_key_padding_mask=pads)


@finding(
    TORCH,
    smallest="a batch of one row of 2 tokens, all masked",
    much="an error",
    word="loud",
    why="the conversion to nested tensors refuses a batch without a token",
)
def torch_masked_batch() -> float:
    """a batch without a real token raises in eval without gradients (the fast path), and is finite with them"""
    model, x, pads = layers(), torch.randn(1, 2, 32), torch.tensor([[True, True]])
    finite = bool(model(x, src_key_padding_mask=pads).isfinite().all())
    print(f"  finite with gradients: {finite}")
    with torch.no_grad():
        return raised(lambda: model(x, src_key_padding_mask=pads)) if finite else 0.0
