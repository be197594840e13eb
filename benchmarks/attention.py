"""Attention that scales: what each claim reaches, side by side with its peer in one run.

    make bench-attention        # or: python benchmarks/attention.py [CLAIM ...]

Times are medians of rounds by turns, ratios the medians of each round's own. Memory is the peak of resident memory of a
process of its own, above what it held before. Writes benchmarks/results/attention.md and attention.png.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import anyformer as af

RESULTS = Path(__file__).parent / "results"
ROUNDS = 5
CAUSAL, WINDOW = af.Causal(), af.Causal() & af.Window(512)
Lines = list[str]


def heads(length: int, count: int = 8, width: int = 64, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, count, width, requires_grad=grad) for _ in range(3)]


def forward(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return af.attend(q, k, v, **how)

    return run


def both(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Callable[[], object]:
    def run() -> object:
        out = af.attend(q, k, v, **how)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return run


def race(ways: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each way in each round; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            if round_:
                taken[name].append(time.perf_counter() - begin)
    return taken


def ratio(taken: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times as fast `ours` is."""
    return statistics.median(b / a for a, b in zip(taken[ours], taken[theirs], strict=True))


def seconds(taken: dict[str, list[float]], name: str) -> str:
    return f"{statistics.median(taken[name]):.3f} s"


PEAK = """
import resource, sys, torch
sys.path.insert(0, {folder!r})
import attention as bench
def status(key):
    return 1024 * int(open("/proc/self/status").read().split(key + ":")[1].split()[0])
run = bench.{make}
before = status("VmRSS")
run()
print(status("VmHWM") - before)
"""


def peak(make: str) -> int:
    """Bytes that `run` of a fresh process needs at most; `make` is an expression of this module that gives it."""
    code = PEAK.format(folder=str(Path(__file__).parent), make=make)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def memory() -> tuple[Lines, dict[str, dict[int, float]]]:
    """Exact attention, forward and backward, one head of 64: peak memory against length."""
    lengths = [1024 * 2**i for i in range(7)]
    curves: dict[str, dict[int, float]] = {"blocked": {}, "textbook": {}}
    for length in lengths:
        curves["blocked"][length] = peak(f"both(*bench.heads({length}, 1), kernel='blocked')")
        if length <= 16384:
            curves["textbook"][length] = peak(f"both(*bench.heads({length}, 1), kernel='reference')")
        print(length, {name: f"{curve.get(length, 0) / 1e6:.0f} MB" for name, curve in curves.items()}, flush=True)
    lines = ["| T | blocked | textbook |", "|---|---|---|"]
    for length in lengths:
        cells = (f"{curve[length] / 1e6:,.0f} MB" if length in curve else "" for curve in curves.values())
        lines.append(f"| {length} | {' | '.join(cells)} |")
    ours, naive = curves["blocked"], curves["textbook"]
    growth = [ours[2 * t] / ours[t] for t in lengths[3:-1]]
    lines += ["", f"Doubling T from 8k on: blocked × {', '.join(f'{g:.2f}' for g in growth)}; textbook × "]
    lines[-1] += (
        f"{naive[16384] / naive[8192]:.2f}. At 16k blocked needs 1/{naive[16384] / ours[16384]:.0f} of the textbook's."
    )
    return lines, curves


def dense() -> tuple[Lines, None]:
    """Plain causal attention, T = 8192, 8 heads of 64."""
    lines = []
    for name, way in (("forward", forward), ("forward + backward", both)):
        q, k, v = heads(8192)
        taken = race({kernel: way(q, k, v, kernel=kernel) for kernel in ("blocked", "sdpa")})
        lines.append(f"- {name}: blocked {seconds(taken, 'blocked')}, sdpa {seconds(taken, 'sdpa')}: ")
        lines[-1] += f"{ratio(taken, 'blocked', 'sdpa'):.2f} × its speed"
    return lines, None


def window() -> tuple[Lines, None]:
    """A causal window of 512, T = 8192, 8 heads of 64."""
    lines = []
    for name, way in (("forward", forward), ("forward + backward", both)):
        q, k, v = heads(8192)
        ways = {"blocked": way(q, k, v, pattern=WINDOW, kernel="blocked"), "dense sdpa": way(q, k, v, kernel="sdpa")}
        if way is forward:
            ways["flex"] = flex(q, k, v)
        taken = race(ways)
        for other in list(ways)[1:]:
            lines.append(f"- {name}: blocked {seconds(taken, 'blocked')}, {other} {seconds(taken, other)}: ")
            lines[-1] += f"{ratio(taken, 'blocked', other):.2f} × its speed"
    return lines, None


def flex(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """torch's compiled FlexAttention with its own block mask; neither is counted."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[1]
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 512), None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    turned = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v)]

    def run() -> object:
        with torch.inference_mode():
            return compiled(*turned, block_mask=mask)

    return run


def growth() -> tuple[Lines, dict[str, dict[int, float]]]:
    """Forward time of a causal window of 512 against length, 8 heads of 64; dense for comparison."""
    curves: dict[str, dict[int, float]] = {"window 512, blocked": {}, "dense, sdpa": {}}
    for length in (8192, 16384, 32768, 65536):
        q, k, v = heads(length, grad=False)
        ways = {"window 512, blocked": forward(q, k, v, pattern=WINDOW, kernel="blocked")}
        if length <= 16384:
            ways["dense, sdpa"] = forward(q, k, v, kernel="sdpa")
        for name, times in race(ways, 3).items():
            curves[name][length] = statistics.median(times)
    ours = curves["window 512, blocked"]
    steps = [f"{ours[2 * t] / ours[t]:.2f}" for t in (8192, 16384, 32768)]
    table = ", ".join(f"{t // 1024}k {s:.2f} s" for t, s in ours.items())
    return [f"- {table}: each doubling of T takes × {', '.join(steps)}"], curves


def longformer() -> tuple[Lines, None]:
    """One attention layer of Longformer, 768 wide, T = 4096, window 512, the first 16 tokens global."""
    ways = {"anyformer": longformer_layer("ours"), "transformers": longformer_layer("theirs")}
    taken = race(ways)
    line = f"- forward + backward: ours {seconds(taken, 'anyformer')}, theirs {seconds(taken, 'transformers')}: "
    line += f"{ratio(taken, 'anyformer', 'transformers'):.2f} × its speed"
    ours, theirs = peak("longformer_layer('ours')"), peak("longformer_layer('theirs')")
    return [line, f"- peak memory: {ours / 1e6:.0f} MB against {theirs / 1e6:.0f} MB"], None


def longformer_layer(whose: str) -> Callable[[], object]:
    from anyformer.context import Context

    torch.manual_seed(0)
    x = torch.randn(1, 4096, 768, requires_grad=True)
    mark = torch.zeros(1, 4096, dtype=torch.bool)
    mark[:, :16] = True
    if whose == "theirs":
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        config = LongformerConfig(attention_window=[512], attention_probs_dropout_prob=0.0)
        layer = LongformerSelfAttention(config, 0)
        mask = mark[:, :].float() * 10000.0

        def run() -> object:
            out = layer(
                x,
                attention_mask=mask,
                is_index_masked=mask < 0,
                is_index_global_attn=mask > 0,
                is_global_attn=True,
            )[0]
            return torch.autograd.grad(out, x, torch.ones_like(out))

        return run
    spec = af.GlobalAttention(12, pattern=af.Window(257) | af.Global(), bias=("q", "k", "v", "out"))
    ours = spec.build(768, {})
    tokens = af.Tokens(torch.arange(4096)[None], torch.zeros(1, 4096, dtype=torch.long), mark, start=0)

    def run_ours() -> object:
        out, _ = ours(x, Context(tokens))
        return torch.autograd.grad(out, x, torch.ones_like(out))

    return run_ours


def packed() -> tuple[Lines, None]:
    """Packed documents of 300 tokens on average in 2 rows of 4096, 8 heads of 64, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(2):
        cuts = torch.rand(4096, generator=generator) < 1 / 300
        rows.append(cuts.cumsum(0))
    tokens = af.Tokens.packed(torch.stack(rows))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4096, 8, 64, requires_grad=True) for _ in range(3))
    taken = race({kernel: both(q, k, v, tokens=tokens, kernel=kernel) for kernel in ("blocked", "sdpa")})
    line = f"- blocked {seconds(taken, 'blocked')}, sdpa with a mask {seconds(taken, 'sdpa')}: "
    return [line + f"{ratio(taken, 'blocked', 'sdpa'):.2f} × its speed"], None


def million() -> tuple[Lines, None]:
    """A prompt of 1,000,000 tokens through 2 layers of 64 with windows of 512, in chunks of 4096."""
    window = af.Attention(2, pattern=WINDOW, position=af.Rotary())
    block = af.Block.pre(window, af.GatedFFN(128), norm=af.RMSNorm())
    spec = af.TransformerSpec(64, 256, decoder=af.cycle([block], 2), final_norm=af.RMSNorm())
    model = spec.build().eval()
    total, chunk = 1_000_000, 4096
    cache = model.new_cache(1, total)
    resident = []
    begin = time.perf_counter()
    with torch.inference_mode():
        for start in range(0, total, chunk):
            length = min(chunk, total - start)
            ids = torch.randint(256, (1, length))
            model(ids, cache=cache, last=0 if start + length < total else 1)
            resident.append(1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]))
    took = time.perf_counter() - begin
    least, most = min(resident[1:]), max(resident[1:])
    line = f"- {total:,} tokens in {took:.0f} s ({total / took:,.0f} tokens/s); resident memory after the first chunk "
    return [line + f"{least / 1e6:.0f} to {most / 1e6:.0f} MB, {most / resident[1] - 1:+.1%} over the second's"], None


CLAIMS = {c.__name__: c for c in (window, dense, growth, longformer, packed, million, memory)}


def draw(curves: dict[str, dict[str, dict[int, float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, name, label, unit in ((axes[0], "memory", "peak memory, MB", 1e6), (axes[1], "growth", "forward, s", 1)):
        for way, curve in curves.get(name, {}).items():
            axis.loglog(list(curve), [value / unit for value in curve.values()], "o-", label=way, base=2)
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(RESULTS / "attention.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"some of: {', '.join(CLAIMS)}")
    chosen = parser.parse_args().claims or list(CLAIMS)
    text = [
        "# Attention that scales",
        "",
        f"`python benchmarks/attention.py`, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}.",
    ]
    curves = {}
    for name in chosen:
        lines, curve = CLAIMS[name]()
        text += ["", f"## {CLAIMS[name].__doc__}", "", *lines]
        print("\n".join(text[-len(lines) - 2 :]), flush=True)
        if curve:
            curves[name] = curve
    if len(chosen) == len(CLAIMS):
        (RESULTS / "attention.md").write_text("\n".join(text) + "\n", encoding="utf-8")
        draw(curves)


if __name__ == "__main__":
    main()
