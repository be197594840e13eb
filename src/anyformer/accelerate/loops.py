"""Loops for one token a row, compiled by Numba: what a decoding step does on a CPU.

With one row, a product of matrices is a read of the weights: the machine's bandwidth is the limit, of which torch's own
`linear` reaches a fifth to a half. Each loop here reads its weights once, in order, on all of torch's threads. Compiled
code is kept on disk, so that only the first process waits for the compiler.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from anyformer.accelerate.operators import GROUP

__all__ = [
    "attend",
    "attention_in",
    "attention_out",
    "feed_forward",
    "linear_float",
    "linear_int4",
    "linear_int8",
    "rms_norm",
    "rms_norm_rows",
    "rotate",
    "rotate_rows",
    "rounded",
    "use_threads",
]


_FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity keep their meaning
_AHEAD = 4  # keys that are asked for beforehand
_TASK, _COLUMNS = 64, 512  # rows of w that a thread takes at a time, and columns that it takes of them
_BLOCK = 512  # products of 8 and 16 bits whose sum is sure to fit 32 bits

_AVAILABLE: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
_here = threading.local()  # Numba's count is each thread's own

_parallel = numba.njit(parallel=True, fastmath=_FAST, cache=True, nogil=True)
_serial = numba.njit(fastmath=_FAST, cache=True, nogil=True)


def use_threads(count: int) -> None:
    """Work on so many threads, or on all there are."""
    if getattr(_here, "count", 0) != count:
        numba.set_num_threads(min(count, _AVAILABLE))
        _here.count = count


@intrinsic
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask the processor to have the line of `array[index]` in its cache soon."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [values[1]]), byte)
        builder.call(function, [place, number(0), number(2), number(1)])  # to read, into the second level, data
        return context.get_dummy_value()

    return types.void(array, index), code


@_parallel
def linear_float(x: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    """out (R, N) = x (R, K) wᵀ, for w (N, K).

    Several rows of x go by fours over two of w, six reads for eight products, in blocks of columns that stay in the
    processor's cache; the two rows of w that come next are asked for beforehand.
    """
    rows, width = x.shape
    count = w.shape[0]
    if rows == 1:
        for n in numba.prange(count):
            total = np.float32(0)
            for k in range(width):
                total += w[n, k] * x[0, k]
            out[0, n] = total
        return
    whole, flat = rows - rows % 4, w.reshape(-1)
    for task in numba.prange((count + _TASK - 1) // _TASK):
        for n in range(task * _TASK, min((task + 1) * _TASK, count)):
            for r in range(rows):
                out[r, n] = 0
        for begin in range(0, width, _COLUMNS):
            end = min(begin + _COLUMNS, width)
            for n in range(task * _TASK, min((task + 1) * _TASK, count), 2):
                m = min(n + 1, count - 1)
                ahead = (n + 2) * width + begin
                if ahead + width + end - begin <= len(flat):
                    for k in range(0, end - begin, 16):
                        _prefetch(flat, ahead + k)  # type: ignore[call-arg]
                        _prefetch(flat, ahead + width + k)
                wa, wb = w[n, begin:end], w[m, begin:end]
                for r in range(0, whole, 4):
                    x0, x1, x2, x3 = x[r, begin:end], x[r + 1, begin:end], x[r + 2, begin:end], x[r + 3, begin:end]
                    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
                    for k in range(len(wa)):
                        a0 += wa[k] * x0[k]
                        a1 += wa[k] * x1[k]
                        a2 += wa[k] * x2[k]
                        a3 += wa[k] * x3[k]
                        b0 += wb[k] * x0[k]
                        b1 += wb[k] * x1[k]
                        b2 += wb[k] * x2[k]
                        b3 += wb[k] * x3[k]
                    out[r, n] += a0
                    out[r + 1, n] += a1
                    out[r + 2, n] += a2
                    out[r + 3, n] += a3
                    if m > n:
                        out[r, m] += b0
                        out[r + 1, m] += b1
                        out[r + 2, m] += b2
                        out[r + 3, m] += b3
                for r in range(whole, rows):
                    xr, a, b = x[r, begin:end], np.float32(0), np.float32(0)
                    for k in range(len(wa)):
                        a += wa[k] * xr[k]
                        b += wb[k] * xr[k]
                    out[r, n] += a
                    if m > n:
                        out[r, m] += b


@_serial
def rounded(x: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """x (R, K) in 16 bits: values × scale, one scale a row; the largest of a row becomes 32767. A row that holds
    NaN or infinity has the scale NaN."""
    for r in range(x.shape[0]):
        top, finite = np.float32(0), np.float32(0)
        for k in range(x.shape[1]):
            top = max(top, abs(x[r, k]))
            finite += x[r, k] * np.float32(0)
        scales[r] = top / np.float32(32767) + finite
        inverse = np.float32(32767) / top if top > 0 else np.float32(0)
        for k in range(x.shape[1]):
            values[r, k] = np.int16(np.rint(x[r, k] * inverse))


@_parallel
def linear_int8(x: np.ndarray, scales: np.ndarray, w: np.ndarray, gains: np.ndarray, out: np.ndarray) -> None:
    """out (R, N) = (x · scales) (w · gains)ᵀ, for x (R, K) in 16 bits and w (N, K) in 8, a gain for each row of w.

    512 products fit an integer of 32 bits; their sums are added as floating-point numbers.
    """
    rows, width = x.shape
    blocks = width // _BLOCK
    for n in numba.prange(w.shape[0]):
        for r in range(rows):
            total = np.float32(0)
            for block in range(blocks):
                ws, xs = w[n, block * _BLOCK : (block + 1) * _BLOCK], x[r, block * _BLOCK : (block + 1) * _BLOCK]
                part = np.int32(0)
                for k in range(_BLOCK):
                    part = np.int32(part + np.int32(ws[k]) * np.int32(xs[k]))
                total += np.float32(part)
            ws, xs = w[n, blocks * _BLOCK :], x[r, blocks * _BLOCK :]
            part = np.int32(0)
            for k in range(ws.shape[0]):
                part = np.int32(part + np.int32(ws[k]) * np.int32(xs[k]))
            out[r, n] = (total + np.float32(part)) * gains[n] * scales[r]


@_parallel
def linear_int4(x: np.ndarray, w: np.ndarray, gains: np.ndarray, out: np.ndarray) -> None:
    """out (R, N) = x (R, K) wᵀ, for w (N, K / 2), two numbers of 4 bits in a byte, and K a multiple of 64.

    The lower halves of a row's bytes are its first numbers, the upper ones the others. A weight is number · gain +
    least with a pair of these for each 32, in `gains` (N, K / 32, 2). Each row of w is written
    out, and then met by all of x.
    """
    rows, width = x.shape
    half, groups = width // 2, width // GROUP // 2
    for n in numba.prange(w.shape[0]):
        row = np.empty(width, np.float32)
        for g in range(groups):
            begin, end = g * GROUP, (g + 1) * GROUP
            both, low, high = w[n, begin:end], row[begin:end], row[half + begin : half + end]
            low_gain, low_least = gains[n, g, 0], gains[n, g, 1]
            high_gain, high_least = gains[n, groups + g, 0], gains[n, groups + g, 1]
            for k in range(GROUP):
                low[k] = np.float32(np.int32(both[k] & np.uint8(15))) * low_gain + low_least
                high[k] = np.float32(np.int32(both[k] >> np.uint8(4))) * high_gain + high_least
        for r in range(rows):
            total = np.float32(0)
            for k in range(width):
                total += row[k] * x[r, k]
            out[r, n] = total


@_serial
def _prefetch_heads(heads: np.ndarray, first: int, last: int) -> None:
    """Ask for the heads first .. last - 1 of a key or value (G, K)."""
    for g in range(first, last):
        for i in range(0, heads.shape[1], 16):
            _prefetch(heads[g], i)  # type: ignore[call-arg]


@_parallel
def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float, out: np.ndarray) -> None:
    """Attention of one query a row: q (B, H, K), k and v (B, S, G, K), out (B, H, K).

    `seen` (b, S) is true where a key is seen, b being B or 1; without columns, all are. A query that sees none gives 0.
    A thread takes neighbouring heads and goes from key to key, so that it reads memory in order.
    """
    batch, heads, width = q.shape
    keys, groups = k.shape[1], k.shape[2]
    each, masked = heads // groups, seen.shape[1] > 0
    parts = min(groups, -(-4 // max(batch, 1)))
    for task in numba.prange(batch * parts):
        b, part = task // parts, task % parts
        first, last = part * groups // parts * each, (part + 1) * groups // parts * each
        scores = np.empty((last - first, keys), np.float32)
        row = b % seen.shape[0]
        for s in range(keys):
            hidden = masked and not seen[row, s]
            _prefetch_heads(k[b, min(s + _AHEAD, keys - 1)], first // each, last // each)
            for h in range(first, last):
                score = np.float32(0)
                for i in range(width):
                    score += q[b, h, i] * k[b, s, h // each, i]
                scores[h - first, s] = -np.float32(np.inf) if hidden else score * np.float32(scale)
        for h in range(first, last):
            _softmax(scores[h - first])
            for i in range(width):
                out[b, h, i] = 0
        for s in range(keys):
            if not (masked and not seen[row, s]):
                _prefetch_heads(v[b, min(s + _AHEAD, keys - 1)], first // each, last // each)
                for h in range(first, last):
                    weight = scores[h - first, s]
                    for i in range(width):
                        out[b, h, i] += weight * v[b, s, h // each, i]


@_serial
def _softmax(x: np.ndarray) -> None:
    """In place; where all is -inf, zeros."""
    best, total = -np.float32(np.inf), np.float32(0)
    for i in range(len(x)):
        best = max(best, x[i])
    if best == -np.inf:
        x[:] = 0
        return
    for i in range(len(x)):
        x[i] = math.exp(x[i] - best)
        total += x[i]
    for i in range(len(x)):
        x[i] /= total


@_serial
def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, first: int, step: int, out: np.ndarray) -> None:
    """Turn pairs of channels of x (B, H, K) by cos and sin (b, half): channel step · i pairs with step · i + first.

    Row r of x turns by row r mod b. step 1 and first half is the layout "half", step 2 and first 1 the interleaved one.
    Channels beyond stay.
    """
    half = cos.shape[1]
    for b in range(x.shape[0]):
        row = b % cos.shape[0]
        for h in range(x.shape[1]):
            for i in range(half):
                a, c = x[b, h, step * i], x[b, h, step * i + first]
                out[b, h, step * i] = a * cos[row, i] - c * sin[row, i]
                out[b, h, step * i + first] = c * cos[row, i] + a * sin[row, i]
            for i in range(2 * half, x.shape[2]):
                out[b, h, i] = x[b, h, i]


@_serial
def rms_norm(x: np.ndarray, gain: np.ndarray, offset: float, eps: float, out: np.ndarray) -> None:
    """x (R, K) / sqrt(mean(x²) + eps) · (offset + gain)."""
    for r in range(x.shape[0]):
        total = np.float32(0)
        for k in range(x.shape[1]):
            total += x[r, k] * x[r, k]
        scale = np.float32(1 / math.sqrt(total / x.shape[1] + eps))
        for k in range(x.shape[1]):
            out[r, k] = x[r, k] * scale * (gain[k] + np.float32(offset))


@_parallel
def rotate_rows(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, first: int, step: int, out: np.ndarray) -> None:
    """`rotate`, for many rows."""
    for r in numba.prange(x.shape[0]):
        row = r % cos.shape[0]
        rotate(x[r : r + 1], cos[row : row + 1], sin[row : row + 1], first, step, out[r : r + 1])


@_parallel
def rms_norm_rows(x: np.ndarray, gain: np.ndarray, offset: float, eps: float, out: np.ndarray) -> None:
    """`rms_norm`, for many rows."""
    for r in numba.prange(x.shape[0]):
        rms_norm(x[r : r + 1], gain, offset, eps, out[r : r + 1])


@_serial
def layer_norm(x: np.ndarray, gain: np.ndarray, shift: np.ndarray, eps: float, out: np.ndarray) -> None:
    """(x - mean) / sqrt(variance + eps) · gain + shift, for x (R, K); an empty shift is none."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        mean = np.float32(0)
        for k in range(width):
            mean += x[r, k]
        mean /= np.float32(width)
        total = np.float32(0)
        for k in range(width):
            out[r, k] = x[r, k] - mean
            total += out[r, k] * out[r, k]
        scale = np.float32(1 / math.sqrt(total / width + eps))
        for k in range(width):
            out[r, k] = out[r, k] * scale * gain[k]
        for k in range(len(shift)):
            out[r, k] += shift[k]


def product(x: np.ndarray, weight: tuple[np.ndarray, ...], bias: np.ndarray, out: np.ndarray) -> None:
    """out = x Wᵀ + b for a weight as (floats,), (int8, gain a row) or (int4, gains a group). An empty bias is none."""
    raise NotImplementedError("only compiled loops call it")


@overload(product)
def _product(x: Any, weight: Any, bias: Any, out: Any) -> Any:
    if len(weight) == 0:
        return lambda x, weight, bias, out: None
    if len(weight) == 1:

        def floats(x: Any, weight: Any, bias: Any, out: Any) -> None:
            linear_float(x, weight[0], out)
            _add(out, bias)

        return floats
    if weight[1].ndim == 1:

        def int8(x: Any, weight: Any, bias: Any, out: Any) -> None:
            short, scales = np.empty(x.shape, np.int16), np.empty(x.shape[0], np.float32)
            rounded(x, short, scales)
            linear_int8(short, scales, weight[0], weight[1], out)
            _add(out, bias)

        return int8

    def int4(x: Any, weight: Any, bias: Any, out: Any) -> None:
        filled = np.zeros((x.shape[0], 2 * weight[0].shape[1]), np.float32)
        filled[:, : x.shape[1]] = x
        linear_int4(filled, weight[0], weight[1], out)
        _add(out, bias)

    return int4


@_serial
def _add(x: np.ndarray, bias: np.ndarray) -> None:
    for r in range(x.shape[0]):
        for k in range(len(bias)):
            x[r, k] += bias[k]


@_serial
def _normed(x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float, float, bool]) -> np.ndarray:
    """x behind (gain, shift, offset, eps, whether the mean is taken off)."""
    gain, shift, offset, eps, centred = norm
    out = np.empty_like(x)
    if centred:
        layer_norm(x, gain, shift, eps, out)
    else:
        rms_norm(x, gain, offset, eps, out)
    return out


@_parallel
def _activate(x: np.ndarray, activation: int) -> None:
    """In place: 0 relu, 1 gelu, 2 gelu_tanh, 3 silu, 4 relu2."""
    width = x.shape[1]
    for i in numba.prange(x.size):
        v = x[i // width, i % width]
        if activation == 1:
            v = v * np.float32(0.5) * (np.float32(1) + math.erf(v * np.float32(math.sqrt(0.5))))
        elif activation == 2:
            inner = np.float32(math.sqrt(2 / math.pi)) * (v + np.float32(0.044715) * v * v * v)
            v = np.float32(0.5) * v * (np.float32(1) + math.tanh(inner))
        elif activation == 3:
            v = v / (np.float32(1) + math.exp(-v))
        else:
            v = max(v, np.float32(0))
            v = v * v if activation == 4 else v
        x[i // width, i % width] = v


def joint(x: np.ndarray, weights: Any, biases: Any, starts: Any) -> np.ndarray:
    """All outputs of maps of one input, side by side, (R, starts[-1]): of one weight for all, or of one each."""
    raise NotImplementedError("only compiled loops call it")


@overload(joint)
def _joint(x: Any, weights: Any, biases: Any, starts: Any) -> Any:
    if len(weights) == 1:

        def at_once(x: Any, weights: Any, biases: Any, starts: Any) -> np.ndarray:
            out = np.empty((x.shape[0], starts[-1]), np.float32)
            product(x, weights[0], np.empty(0, np.float32), out)
            for i in range(len(biases)):
                _add(out[:, starts[i] :], biases[i])
            return out

        return at_once

    def one_by_one(x: Any, weights: Any, biases: Any, starts: Any) -> np.ndarray:
        out = np.empty((x.shape[0], starts[-1]), np.float32)
        i = 0
        for weight in numba.literal_unroll(weights):
            part = np.empty((x.shape[0], starts[i + 1] - starts[i]), np.float32)
            product(x, weight, biases[i], part)
            out[:, starts[i] : starts[i + 1]] = part
            i += 1  # noqa: SIM113 (Numba unrolls no enumerate)
        return out

    return one_by_one


@_serial
def attention_in(x: Any, norm: Any, weights: Any, biases: Any, starts: Any, turn: Any, q: Any, k: Any, v: Any) -> None:
    """The first half of an attention branch: x (B, D), normed, becomes q (B, H, K), k and v (B, G, K), turned."""
    both = joint(_normed(x, norm), weights, biases, starts)
    q.reshape(x.shape[0], -1)[:] = both[:, : starts[1]]
    k.reshape(x.shape[0], -1)[:] = both[:, starts[1] : starts[2]]
    v.reshape(x.shape[0], -1)[:] = both[:, starts[2] :]
    cos, sin, first, step = turn
    if cos.shape[1]:
        rotate(q, cos, sin, first, step, q)
        rotate(k, cos, sin, first, step, k)


@_serial
def attention_out(x: Any, q: Any, k: Any, v: Any, seen: Any, scale: float, weight: Any, bias: Any, out: Any) -> None:
    """The second half: out (B, D) = x + attention(q, k, v) Wᵀ + b."""
    heads = np.empty_like(q)
    attend(q, k, v, seen, scale, heads)
    product(heads.reshape(x.shape[0], -1), weight, bias, out)
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] += x[r, i]


@_serial
def feed_forward(
    x: Any, norm: Any, ups: Any, biases: Any, starts: Any, activation: int, down: Any, down_bias: Any, out: Any
) -> None:
    """out (R, D) = x + ffn(norm(x)). Of two maps up, the first is the gate, and activated; else the only one."""
    hidden = joint(_normed(x, norm), ups, biases, starts)
    width = starts[1]
    inner = hidden[:, :width].copy()
    _activate(inner, activation)
    if len(starts) == 3:
        for r in range(x.shape[0]):
            for i in range(width):
                inner[r, i] *= hidden[r, width + i]
    product(inner, down, down_bias, out)
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] += x[r, i]
