"""Causal linear attention in chunks against the cumulative-sum form, its growth with length, and its decoding step.

    python benchmarks/linear_attention.py

One head of 64 channels, elu + 1, forward and backward, by turns in one process. The cumulative-sum form keeps k vᵀ of
every token, T × 64 × 65 numbers: at 16 k tokens, 0.27 GB for each such tensor. Writes
benchmarks/results/linear_attention.md.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.parts.linear_product import Chunks, causal_product, chunked, cut, joined

WIDTH, ROUNDS, STEPS = 64, 5, 200
AGAINST = (2048, 4096, 8192, 16384)
GROWTH = (8192, 16384, 32768, 65536)
NEAR, FAR = 1024, 65536

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_cumulative_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the formula is written: the running sum of k vᵀ, read by each query."""
    q, k, v = F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0)
    sums = torch.einsum("bthf,bthfe->bthe", q, torch.einsum("bthf,bthe->bthfe", k, v).cumsum(1))
    return sums[..., :-1] / sums[..., -1:]


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `LinearAttention` computes it."""
    length, groups = q.shape[1:3]
    number, size = cut(length)
    q, k, v = (chunked(t, number, size, groups) for t in (q, k, F.pad(v, (0, 1), value=1.0)))
    sums = causal_product(F.elu(q) + 1, F.elu(k[:, :, :, 0]) + 1, v[:, :, :, 0], Chunks.plain(size, q.device))
    return joined(sums[..., :-1] / sums[..., -1:], length)


def vectors(length: int) -> list[Tensor]:
    return [torch.randn(1, length, 1, WIDTH).requires_grad_() for _ in range(3)]


def seconds(form: Form, given: list[Tensor], times: int = 1) -> float:
    """Of one forward and backward pass, behind one that is not counted."""
    torch.autograd.grad(form(*given).sum(), given)
    begin = time.perf_counter()
    for _ in range(times):
        torch.autograd.grad(form(*given).sum(), given)
    return (time.perf_counter() - begin) / times


def against(length: int) -> tuple[float, float, float]:
    """Milliseconds of both, and the median ratio of paired rounds. Both must give the same first."""
    given = vectors(length)
    for ours, theirs in zip(gradients(in_chunks, given), gradients(by_cumulative_sum, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    pairs = [(seconds(in_chunks, given, 3), seconds(by_cumulative_sum, given)) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return ours, theirs, statistics.median(b / a for a, b in pairs)


def gradients(form: Form, given: list[Tensor]) -> list[Tensor]:
    out = form(*given)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def growth() -> list[tuple[int, float, float | None]]:
    """Milliseconds at each length, and over those at half the length."""
    given = {length: vectors(length) for length in GROWTH}
    rounds = [[seconds(in_chunks, given[length], 2) for length in GROWTH] for _ in range(ROUNDS)]
    found: list[tuple[int, float, float | None]] = []
    for i, length in enumerate(GROWTH):
        ratio = statistics.median(r[i] / r[i - 1] for r in rounds) if i else None
        found.append((length, statistics.median(r[i] for r in rounds) * 1e3, ratio))
    return found


@torch.inference_mode()
def decoding() -> tuple[float, float, float, int]:
    """Microseconds of a step behind a short and a long text, the median ratio of paired rounds, the state's bytes."""
    block = af.Block.pre(af.LinearAttention(4, head_dim=WIDTH), af.GatedFFN(512), norm=af.RMSNorm())
    model = af.TransformerSpec(256, 1000, decoder=(block,) * 2, final_norm=af.RMSNorm()).build().eval()
    caches, token = {}, torch.zeros(1, 1, dtype=torch.long)
    for length in (NEAR, FAR):
        caches[length] = model.new_cache(1, length + (ROUNDS + 1) * STEPS)
        for piece in torch.randint(1000, (1, length)).split(8192, 1):
            model(piece, cache=caches[length], last=1)
    assert caches[NEAR].nbytes == caches[FAR].nbytes

    def step(length: int) -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            model(token, cache=caches[length])
        return (time.perf_counter() - begin) / STEPS * 1e6

    rounds = [(step(NEAR), step(FAR)) for _ in range(ROUNDS + 1)][1:]
    near, far = (statistics.median(column) for column in zip(*rounds, strict=True))
    return near, far, statistics.median(b / a for a, b in rounds), caches[FAR].nbytes


def main() -> None:
    torch.manual_seed(0)
    lines = [
        "# Linear attention",
        "",
        f"`python benchmarks/linear_attention.py`, {platform.machine()}, {torch.get_num_threads()} threads, one head",
        f"of {WIDTH} channels, float32, forward and backward; medians of {ROUNDS} paired rounds.",
        "",
        "| tokens | in chunks | cumulative sums | ratio (target ≥ 5) |",
        "|---|---|---|---|",
    ]
    for length in AGAINST:
        ours, theirs, ratio = against(length)
        lines.append(f"| {length:,} | {ours:.1f} ms | {theirs:.1f} ms | {ratio:.1f} × |")
    lines += ["", "| tokens | in chunks | over half the tokens (target ≤ 2.15) |", "|---|---|---|"]
    for length, taken, grown in growth():
        lines.append(f"| {length:,} | {taken:.1f} ms | {'' if grown is None else f'{grown:.2f} ×'} |")
    near, far, ratio, size = decoding()
    lines += [
        "",
        f"A decoding step of two layers (4 heads, width 256), whose state is {size:,} bytes at any length:",
        "",
        f"| after {NEAR:,} tokens | after {FAR:,} tokens | ratio (target 1) |",
        "|---|---|---|",
        f"| {near:.0f} µs | {far:.0f} µs | {ratio:.2f} × |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).parent.joinpath("results", "linear_attention.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
