"""Loading a folder of 500 MB: ours and transformers' `from_pretrained`, each in a process of its own, by turns.

    python benchmarks/loading.py        # or: make bench

Time from the call to the first logits of a short text (a load that only maps would else look free), and the peak of
resident memory above what the imports took. The folder is a LLaMA of 125 M random weights in float32, in the hub's
layout. Writes benchmarks/results/loading.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROUNDS = 5
SIZES = {"dim": 768, "vocab_size": 32000, "hidden": 2304, "num_layers": 12, "num_heads": 12}

MEASURE = """
import resource, sys, time, torch
{imports}
torch.set_num_threads({threads})
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
ids = torch.tensor([[1, 2, 3, 4]])
before, begin = resident(), time.perf_counter()
{load}
loaded = time.perf_counter() - begin
with torch.inference_mode():
    out = {logits}
first = time.perf_counter() - begin
peak = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) - before
print(loaded, first, peak, float(out.double().sum()))
"""

WAYS = {
    "anyformer": (
        "import anyformer as af; af.load",
        'model = af.load(sys.argv[1], dtype="{dtype}").model',
        "model(ids)",
    ),
    "transformers": (
        "from transformers import LlamaForCausalLM as M",
        "model = M.from_pretrained(sys.argv[1], dtype=torch.{dtype})",
        "model(ids).logits",
    ),
}


def measure(way: str, folder: str, dtype: str) -> tuple[float, float, float, float]:
    imports, load, logits = WAYS[way]
    code = MEASURE.format(imports=imports, load=load.format(dtype=dtype), logits=logits, threads=os.cpu_count())
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    loaded, first, peak, check = map(float, done.stdout.split()[-4:])
    return loaded, first, peak, check


def write(folder: str) -> int:
    """A model as a user would save it; how many bytes its weights take."""
    import torch

    import anyformer as af

    torch.manual_seed(0)
    mixer = af.Attention(SIZES["num_heads"], head_dim=SIZES["dim"] // SIZES["num_heads"], position=af.Rotary())
    mixer = mixer.replace(num_kv_heads=SIZES["num_heads"])
    block = af.Block.pre(mixer, af.GatedFFN(SIZES["hidden"]), norm=af.RMSNorm())
    spec = af.TransformerSpec(
        SIZES["dim"],
        SIZES["vocab_size"],
        embed=af.Embed(tied=False),
        decoder=af.cycle([block], SIZES["num_layers"]),
        final_norm=af.RMSNorm(),
    )
    model = spec.build()
    af.save(model, folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        weights = write(folder)
        assert json.loads(Path(folder, "config.json").read_text())["model_type"] == "llama"
        for dtype in ("float32", "bfloat16"):
            target = weights if dtype == "float32" else weights // 2
            taken = {way: [measure(way, folder, dtype) for _ in range(ROUNDS)] for way in WAYS}
            for way, rounds in taken.items():
                loaded, first, peak, _ = (statistics.median(column) for column in zip(*rounds, strict=True))
                memory = f"{peak / 1e6:,.0f} MB | {peak / target:.2f} ×"
                lines.append(f"| {way}, as {dtype} | {loaded:.2f} s | {first:.2f} s | {memory} |")
            ours, theirs = taken["anyformer"], taken["transformers"]
            for i, name in ((0, "load"), (1, "first logits"), (2, "peak memory")):
                ratio = statistics.median(a[i] / b[i] for a, b in zip(ours, theirs, strict=True))
                lines.append(f"| ratio of {name}, {dtype} | {ratio:.2f} × | | | |")
    head = [
        f"# Loading {weights / 1e6:,.0f} MB of float32 weights",
        "",
        f"`python benchmarks/loading.py`, {platform.machine()}, {os.cpu_count()} cores; medians of {ROUNDS} processes.",
        "Files in the page cache. Memory: resident, above what the imports took, mapped pages of the file included.",
        "",
        "| | load | until first logits | peak memory | of the weights |",
        "|---|---|---|---|---|",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    print(text)
    Path(__file__).parent.joinpath("results", "loading.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
