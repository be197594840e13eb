"""Fused: a branch of a block as one or two compiled calls, for one new token a row on a CPU.

A step of decoding is many small things between reads of weights; asked for one by one, from Python, they take as long
as the reads. Here attention is two calls (what comes before the cache, and what comes after), a feed-forward one. What
a branch has that no loop knows (a norm behind its op, soft-caps, ALiBi, experts, ...) leaves it as it is.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.accelerate import operators as op
from anyformer.accelerate.quantize import QuantizedLinear
from anyformer.block import BlockModule, BranchModule
from anyformer.context import Context
from anyformer.kernels.base import Request
from anyformer.kernels.sdpa import maskless
from anyformer.parts.attention import AttentionModule
from anyformer.parts.ffn import DenseFFNModule, GatedFFNModule
from anyformer.parts.norm import LayerNormModule, RMSNormModule
from anyformer.parts.op import Result
from anyformer.parts.pattern import Pattern
from anyformer.parts.position import Position, PositionModule, Rotary, RotaryModule
from anyformer.parts.precision import saturate
from anyformer.tokens import Tokens

__all__ = ["FastGatedFFN", "FusedBlock", "fuses", "gather"]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
NONE = np.empty(0, np.float32)
UNTURNED = (np.empty((1, 0), np.float32), np.empty((1, 0), np.float32), 0, 1)
_LINE = 64  # bytes of a line of the processor's cache
ALL_SEEN = np.empty((1, 0), np.bool_)


class FusedBlock(BlockModule):
    """A block whose branches run fused where they can, in a step of decoding."""

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, stores: list[Any] | None = None) -> Result:
        step_only = stores is not None and x.shape[1] == 1 and ctx.kernel is None and not self.training
        loops = op.loops() if step_only and _plain(x) else None
        if stores is None or loops is None:
            return super().forward(x, ctx, stores)
        gather(self)
        for branch, store in zip(self.branches(), stores, strict=True):
            step = _step(branch)
            x = branch(x, ctx.at(store))[0] if step is None else step(x, ctx, store, loops)
        return x, None


class FastGatedFFN(GatedFFNModule):
    """Without gradients, the gate's values may be written over."""

    def forward(self, x: Float[Tensor, "*B D"], ctx: Context) -> Result:
        if torch.is_grad_enabled() or self.training:
            return super().forward(x, ctx)
        hidden = saturate(self.activation(self.gate(x)).mul_(self.up(x)))
        return saturate(self.down(hidden)), None


def fuses(block: BlockModule) -> bool:
    """Whether any branch of this block can run fused."""
    return block.join == "sequence" and any(_kind(branch) is not None for branch in block.branches())


def gather(module: nn.Module) -> None:
    """Move the weights of a part into one piece of memory, once, which the system may then map in large pages: a read
    of 2 MB needs one look into the page table, not 512. Numpy asks for such pages, torch does not. Maps of one input
    come to lie one behind another, and are then read as one (`joined`)."""
    if "_gathered" in module.__dict__ or torch.compiler.is_compiling():
        return
    module.__dict__["_gathered"] = True
    named = sorted(module.named_parameters(), key=lambda pair: pair[0].rpartition(".")[2])
    weights = [weight for _, weight in named if weight.device.type == "cpu"]
    places = list(itertools.accumulate((-(-weight.nbytes // _LINE) * _LINE for weight in weights), initial=0))
    memory = np.empty(places.pop(), np.uint8)
    for weight, place in zip(weights, places, strict=True):
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            home = torch.from_numpy(memory[place : place + weight.nbytes])  # a storage of its own: it pickles alone
            weight.data = home.view(weight.dtype).view(weight.shape).copy_(weight.data)


def _plain(x: Tensor) -> bool:
    """Whether the loops apply: rows of float32 on a CPU, no gradient, and no compiler that looks on."""
    eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return eager and len(x) > 0 and x.dtype == torch.float32 and x.device.type == "cpu"


def _step(branch: BranchModule) -> AttentionStep | FeedForwardStep | None:
    """What runs this branch, made once, and again if its weights have moved."""
    step: AttentionStep | FeedForwardStep | None = branch.__dict__.get("_fused")
    if step is None or step.moved():
        kind = _kind(branch)
        step = branch.__dict__["_fused"] = None if kind is None else kind(branch)
    return step


def _kind(branch: BranchModule) -> type[AttentionStep] | type[FeedForwardStep] | None:
    """How to run this branch, if the loops know all that it has."""
    lone = isinstance(branch.post, nn.Identity) and isinstance(branch.after, nn.Identity) and branch.scale == 1.0
    if not lone or not isinstance(branch.pre, RMSNormModule | LayerNormModule):
        return None
    if type(branch.op) in (DenseFFNModule, GatedFFNModule, FastGatedFFN):
        return FeedForwardStep if _are_maps(branch.op, "up", "down", "gate") else None
    return AttentionStep if _is_plain_attention(branch.op) else None


def _is_plain_attention(module: nn.Module) -> bool:
    if type(module) is not AttentionModule or not _are_maps(module, "q", "k", "v", "out"):
        return False
    spec, turns = module.spec, isinstance(module.position, RotaryModule)
    still = type(module.position) is PositionModule and type(module.position.spec) is Position
    return spec.qk_norm is None and spec.softcap is None and spec.pattern.heads_alike and (turns or still)


def _are_maps(module: nn.Module, *names: str) -> bool:
    """Whether these children, as far as there are any, are maps that the loops know."""
    return all(isinstance(getattr(module, name, None), nn.Linear | QuantizedLinear | None) for name in names)


class _Arrays:
    """Weights as arrays over the same memory, and a note of where that memory is."""

    def __init__(self) -> None:
        self.parts: list[tuple[dict[str, Any], str, nn.Module]] = []
        self.at: list[tuple[dict[str, Any], str, int]] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the model makes its own."""
        return type(None), ()

    def moved(self) -> bool:
        """Whether a part was replaced, or a weight lies elsewhere than it did, as after `model.to(...)`."""
        replaced = any(held[name] is not part for held, name, part in self.parts)
        return replaced or any(held[name].data_ptr() != place for held, name, place in self.at)

    def part(self, module: nn.Module, name: str) -> Any:
        part = getattr(module, name)
        self.parts.append((module._modules, name, part))
        return part

    def array(self, module: nn.Module, name: str) -> np.ndarray:
        tensor = getattr(module, name)
        self.at.append((module._parameters, name, tensor.data_ptr()))
        array: np.ndarray = tensor.detach().numpy()
        return array

    def weight(self, linear: Any) -> tuple[np.ndarray, ...]:
        names = ("weight", "gain") if isinstance(linear, QuantizedLinear) else ("weight",)
        return tuple(self.array(linear, name) for name in names)

    def bias(self, linear: Any) -> np.ndarray:
        return NONE if linear.bias is None else self.array(linear, "bias")

    def norm(self, norm: Any) -> tuple[np.ndarray, np.ndarray, float, float, bool]:
        gain = self.array(norm, "weight")
        if isinstance(norm, LayerNormModule):
            return gain, self.bias(norm), 0.0, norm.spec.eps, True
        return gain, NONE, norm.spec.offset, norm.spec.eps, False


class AttentionStep(_Arrays):
    """Norm, projections and rotation in one call; then the cache; attention, projection and residual in another."""

    def __init__(self, branch: BranchModule) -> None:
        super().__init__()
        module = self.part(branch, "op")
        assert isinstance(module, AttentionModule)
        self.module, self.before = module, self.norm(self.part(branch, "pre"))
        linears, out = [self.part(module, name) for name in ("q", "k", "v")], self.part(module, "out")
        self.weights, self.starts = joined([self.weight(linear) for linear in linears])
        self.biases = tuple(map(self.bias, linears))
        self.out, self.out_bias = self.weight(out), self.bias(out)
        self.heads, self.groups, self.width = module.spec.num_heads, module.spec.kv_heads, module.head_dim

    def __call__(self, x: Float[Tensor, "B 1 D"], ctx: Context, store: Any, loops: Any) -> Float[Tensor, "B 1 D"]:
        rows, batch, module = x.numpy()[:, 0], len(x), self.module
        q = np.empty((batch, self.heads, self.width), np.float32)
        k, v = (np.empty((batch, self.groups, self.width), np.float32) for _ in range(2))
        turn = self._turn(x, ctx)
        loops.attention_in(rows, self.before, self.weights, self.biases, self.starts, turn, q, k, v)
        keys, values, tokens = store.append(torch.from_numpy(k)[:, None], torch.from_numpy(v)[:, None])
        pattern = module.spec.pattern
        seen = ctx.once(("seen", pattern), (ctx.tokens, tokens), lambda: _seen(ctx, tokens, pattern, keys))
        out = torch.empty(x.shape)
        loops.attention_out(
            rows, q, keys.numpy(), values.numpy(), seen, module.scale, self.out, self.out_bias, out.numpy()[:, 0]
        )
        return out

    def _turn(self, x: Tensor, ctx: Context) -> tuple[np.ndarray, np.ndarray, int, int]:
        position = self.module.position
        if not isinstance(position, RotaryModule):
            return UNTURNED
        key = ("turn", position.spec, self.width)
        return ctx.once(key, (ctx.tokens,), lambda: _turned(position, x.new_empty(len(x), 1, 1, self.width), ctx))


def _turned(
    position: RotaryModule, x: Float[Tensor, "B 1 1 K"], ctx: Context
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Cosines, sines, and which channels pair up, as `loops.rotate` takes them."""
    spec = position.spec
    assert isinstance(spec, Rotary)
    cos, sin = position.phases(x, ctx.tokens, ctx)
    half = spec.layout == "half"
    return cos.numpy()[:, 0, 0], sin.numpy()[:, 0, 0], cos.shape[-1] if half else 1, 1 if half else 2


def _seen(ctx: Context, tokens: Tokens, pattern: Pattern, keys: Tensor) -> np.ndarray:
    """Which keys are seen (b, S); without columns where all are."""
    request = Request(keys, keys, keys, ctx.tokens, tokens, pattern, 1.0, memo=ctx.memo)
    return ALL_SEEN if maskless(request) else request.mask()[:, 0].numpy()


class FeedForwardStep(_Arrays):
    """Norm, feed-forward and residual in one call."""

    def __init__(self, branch: BranchModule) -> None:
        super().__init__()
        module = self.part(branch, "op")
        assert isinstance(module, DenseFFNModule | GatedFFNModule)
        names = ("gate", "up") if isinstance(module, GatedFFNModule) else ("up",)
        self.before, linears = self.norm(self.part(branch, "pre")), [self.part(module, name) for name in names]
        self.ups, self.starts = joined([self.weight(linear) for linear in linears])
        self.biases = tuple(map(self.bias, linears))
        down = self.part(module, "down")
        self.down, self.down_bias = self.weight(down), self.bias(down)
        self.activation = ACTIVATIONS.index(module.spec.activation)

    def __call__(self, x: Float[Tensor, "B 1 D"], ctx: Context, store: Any, loops: Any) -> Float[Tensor, "B 1 D"]:
        out = torch.empty(x.shape)
        rows, result = x.numpy()[:, 0], out.numpy()[:, 0]
        loops.feed_forward(
            rows, self.before, self.ups, self.biases, self.starts, self.activation, self.down, self.down_bias, result
        )
        return out


def joined(weights: list[tuple[np.ndarray, ...]]) -> tuple[tuple[tuple[np.ndarray, ...], ...], tuple[int, ...]]:
    """Maps of one input as one map if they lie one behind another, and where the outputs of each begin, and end."""
    starts = tuple(itertools.accumulate((len(weight[0]) for weight in weights), initial=0))
    whole = tuple(_behind_another(parts) for parts in zip(*weights, strict=True))
    known = tuple(array for array in whole if array is not None)
    return ((known,) if len(known) == len(whole) else tuple(weights)), starts


def _behind_another(parts: tuple[np.ndarray, ...]) -> np.ndarray | None:
    first, place = parts[0], parts[0].ctypes.data
    for part in parts:
        if part.ctypes.data != place or part.shape[1:] != first.shape[1:]:
            return None
        place += part.nbytes
    return np.lib.stride_tricks.as_strided(first, (sum(map(len, parts)), *first.shape[1:]), first.strides)
