"""torch's flex attention: a fused kernel compiled from the pattern itself, which skips the tiles that are empty.

The first call with a new pattern or score change compiles for some seconds; on the CPU, with a new length too (kernels
for any length do not always compile there, as of torch 2.13), and there is no backward pass. So it has to be asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from anyformer.kernels.base import Kernel, Request
from anyformer.parts.pattern import FULL, PARTIAL
from anyformer.tokens import Tokens

__all__ = ["Flex"]

SIZE = 128
"""Queries and keys a tile."""
KINDS = 64
"""How many kinds of requests are compiled before torch gives up and computes them one step after another."""


class Flex(Kernel):
    """`flex_attention` (Dong et al. 2024). `compiled` False computes the same step by step, to look at."""

    name = "flex"

    def __init__(self, *, compiled: bool = True) -> None:
        self.compiled = compiled

    def rejects(self, request: Request) -> str | None:
        q, on_cpu = request.q, request.q.device.type == "cpu"
        if request.dropout:
            return "torch's flex attention cannot drop weights"
        if not (q.numel() and request.k.numel()):
            return "it needs at least one query and one key"
        if on_cpu and _learns(request):
            return "on the CPU, torch's flex attention gives no gradients: call it under torch.inference_mode()"
        if not self.compiled:
            return None
        if q.dtype == torch.float64:
            return "torch's flex attention is compiled for float32 and half precision, but the inputs are float64"
        if not on_cpu and q.shape[-1] < 16:
            return f"on a GPU, torch's flex attention needs heads at least 16 wide, but they are {q.shape[-1]}"
        return None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        q, k, v = (heads.transpose(1, 2) for heads in (request.q, request.k, request.v))
        mask = request.once("flex", request.pattern, lambda: _block_mask(request))
        given: dict[str, Any] = {"block_mask": mask, "score_mod": _score_mod(request), "scale": request.scale}
        within = torch.compiler.is_compiling()  # then all of this is compiled with the model around it
        run: Any = _compiled if self.compiled and not within else flex_attention
        out: Tensor = run(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **given)
        return out.transpose(1, 2)


def _compiled(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch._dynamo.config.patch(recompile_limit=KINDS):
        out: Tensor = _compiler(q.device.type == "cpu")(q, *args, **kwargs)
    return out


@functools.cache
def _compiler(each_length: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False if each_length else None)


def _learns(request: Request) -> bool:
    learned = [] if request.position is None else list(request.position.parameters())
    return torch.is_grad_enabled() and any(x.requires_grad for x in (request.q, request.k, request.v, *learned))


def _block_mask(request: Request) -> BlockMask:
    """Which tiles to compute, and the pattern's own `visible` for those that are partial."""
    q, k, pattern = request.q_tokens, request.k_tokens, request.pattern

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.visible(_one(q, b, i), _one(k, b, j))

    tiles = pattern.blocks(q, k, SIZE)[:, None]
    partial, full = _listed(tiles == PARTIAL), _listed(tiles == FULL)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=SIZE, mask_mod=visible, seq_lengths=(q.length, k.length)
    )


def _listed(chosen: Bool[Tensor, "b 1 n m"]) -> tuple[Tensor, Tensor]:
    """For each row of tiles, how many are chosen, and their columns first."""
    return chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int()


def _one(tokens: Tokens, row: Tensor, at: Tensor) -> Tokens:
    return tokens.map(lambda t: t[row, at])


def _score_mod(request: Request) -> Any:
    """What happens to one score that is already scaled: the cap, then the bias."""
    cap, bias = request.softcap, request.bias()
    if cap is None and bias is None:
        return None
    biases = None if bias is None else bias.expand(request.q.shape[0], -1, -1, -1)

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        return score if biases is None else score + biases[b, h, i, j]

    return changed
