"""What a decoding step computes, as operators of torch: `torch.ops.anyformer.*`.

On a CPU, in float32 and with Numba at hand, they run `loops`; anywhere else the same sums in plain torch. A compiler
sees each as one node. None has a gradient.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from anyformer.parts import position
from anyformer.parts.precision import at_least_float32

__all__ = ["FEW", "GROUP", "has_numba", "loops", "operators", "ready"]

FEW = 16
"""Rows up to which a loop that reads the weights once is faster than a product of matrices."""

GROUP = 32
"""4-bit weights of a row that share a gain and an offset."""

_library = torch.library.Library("anyformer", "DEF")
operators = torch.ops.anyformer


def has_numba() -> bool:
    """Whether there are compiled loops."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _found() -> ModuleType | None:
    """The loops, if there are any, and threads that may run them from several places at once."""
    found = importlib.import_module("anyformer.accelerate.loops") if has_numba() else None
    if found is not None and numba_layer() == "workqueue":
        warnings.warn(
            "numba finds neither OpenMP nor TBB, so decoding runs in plain torch: install libgomp", stacklevel=2
        )
        return None
    return found


def numba_layer() -> str:
    """What runs Numba's threads. Its last resort, `workqueue`, ends the process when two threads call it at once."""
    import numba

    numba.set_num_threads(numba.get_num_threads())  # starts them
    return str(numba.threading_layer())  # type: ignore[attr-defined]


class _Ready:
    """Whether the loops are in memory: what can wait for a step of decoding does not load them for a prompt."""

    loaded = False


ready = _Ready()


def loops() -> Any:
    """The compiled loops, on as many threads as torch has; None without Numba."""
    found = _found()
    ready.loaded = found is not None
    if found is not None:
        found.use_threads(torch.get_num_threads())
    return found


def _for(x: Tensor, weight: Tensor) -> Any:
    """The loops, if they apply."""
    return loops() if x.dtype == torch.float32 == weight.dtype else None


def _operator(schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a function for the CPU, and what it is given as `plain` for everything else."""

    def register(on_cpu: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = _library.define(schema)
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, PLAIN[name], "CompositeExplicitAutograd")
        return on_cpu

    return register


def _linear_int8(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight.to(x.dtype) * gain[:, None].to(x.dtype), bias)


def _linear_int4(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    numbers = torch.cat((weight & 15, weight >> 4), 1).to(x.dtype).unflatten(1, (-1, GROUP))
    values = numbers * gain[:, :, :1].to(x.dtype) + gain[:, :, 1:].to(x.dtype)
    return linear(x, values.flatten(1)[:, : x.shape[-1]], bias)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    scores = torch.einsum("bgek,bsgk->bges", q.unflatten(1, (k.shape[2], -1)), k) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    if seen is not None:
        weights = weights.masked_fill(~seen[:, None, None], 0.0)  # also for a query that sees nothing
    return torch.einsum("bges,bsgk->bgek", weights, v).flatten(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    return position.rotate(x, cos, sin, layout)


def _rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return rms_norm(wide, gain.shape, gain.to(wide.dtype), eps).to(x.dtype)


PLAIN: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "linear_int8": _linear_int8,
    "linear_int4": _linear_int4,
    "attend": _attend,
    "rotate": _rotate,
    "rms_norm": _rms_norm,
}


@_operator("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    loop = _for(x, weight)
    if loop is None or not weight.is_contiguous():
        return linear(x, weight, bias)
    out = torch.empty(*x.shape[:-1], len(weight))
    loop.linear_float(_rows(x), weight.numpy(), _rows(out))
    return out if bias is None else out.add_(bias)


@_operator("linear_int8(Tensor x, Tensor weight, Tensor gain, Tensor? bias) -> Tensor")
def _(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """weight (N, K) in int8, gain (N,). A few rows of x are rounded to 16 bits, and meet the integers as they are."""
    loop, rows = _for(x, gain), x.numel() // x.shape[-1]
    if loop is None or rows > FEW:
        return _linear_int8(x, weight, gain, bias)
    out = torch.empty(*x.shape[:-1], len(weight))
    short, scales = torch.empty(rows, x.shape[-1], dtype=torch.int16).numpy(), torch.empty(rows).numpy()
    loop.rounded(_rows(x), short, scales)
    loop.linear_int8(short, scales, weight.numpy(), gain.numpy(), _rows(out))
    return out if bias is None else out.add_(bias)


@_operator("linear_int4(Tensor x, Tensor weight, Tensor gain, Tensor? bias) -> Tensor")
def _(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """weight (N, K / 2) in bytes of two, gain (N, K / 32, 2), K filled up to a multiple of 64."""
    loop = _for(x, gain)
    if loop is None or x.numel() > FEW * x.shape[-1]:
        return _linear_int4(x, weight, gain, bias)
    out = torch.empty(*x.shape[:-1], len(weight))
    filled = torch.nn.functional.pad(x, (0, 2 * weight.shape[1] - x.shape[-1]))
    loop.linear_int4(_rows(filled), weight.numpy(), gain.numpy(), _rows(out))
    return out if bias is None else out.add_(bias)


@_operator("attend(Tensor q, Tensor k, Tensor v, Tensor? seen, float scale) -> Tensor")
def _(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """One query a row: q (B, H, K), k and v (B, S, G, K), seen (b, S); (B, H, K)."""
    loop = _for(q, k)
    if loop is None:
        return _attend(q, k, v, seen, scale)
    out = torch.empty(q.shape)
    mask = torch.empty(1, 0, dtype=torch.bool) if seen is None else seen
    loop.attend(q.numpy(), k.numpy(), v.numpy(), mask.numpy(), scale, out.numpy())
    return out


@_operator("rotate(Tensor x, Tensor cos, Tensor sin, str layout) -> Tensor")
def _(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x (B, T, H, K), cos and sin (b, T, 1, half)."""
    loop = _for(x, cos)
    if loop is None:
        return _rotate(x, cos, sin, layout)
    out = torch.empty(x.shape)
    first, step = (cos.shape[-1], 1) if layout == "half" else (1, 2)
    heads, cos_rows, sin_rows = x.flatten(0, 1).numpy(), cos.flatten(0, 2).numpy(), sin.flatten(0, 2).numpy()
    rotate = loop.rotate if len(heads) <= FEW else loop.rotate_rows
    rotate(heads, cos_rows, sin_rows, first, step, out.flatten(0, 1).numpy())
    return out


@_operator("rms_norm(Tensor x, Tensor gain, float eps) -> Tensor")
def _(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    loop = _for(x, gain)
    if loop is None:
        return _rms_norm(x, gain, eps)
    out = torch.empty(x.shape)
    rows = _rows(x)
    norm = loop.rms_norm if len(rows) <= FEW else loop.rms_norm_rows
    norm(rows, gain.numpy(), 0.0, eps, _rows(out))
    return out


def _rows(x: Tensor) -> Any:
    """(..., K) as an array (R, K)."""
    return x.reshape(-1, x.shape[-1]).numpy()
