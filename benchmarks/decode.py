"""Decoding on a CPU: what each claim reaches, side by side with its peer in one run.

    pip install -e .[bench] accelerate     # transformers, xllamacpp (llama.cpp), numba, gguf
    python benchmarks/decode.py [CLAIM ...]

The model has LLaMA's shape and random weights, which every peer reads from what `af.save` wrote; the SmolLM2 file is
the one that the slow tests fetch. All have as many threads as the machine has cores. Rates are counted from the first
new token to the last, ratios are medians over rounds by turns of each round's own. Writes benchmarks/results/decode.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyformer as af
from anyformer.accelerate.operators import operators
from anyformer.checkpoint.gguf_write import tokenizer_metadata, write_gguf
from anyformer.checkpoint.hub import hub_tensors
from anyformer.generate.loop import steps
from anyformer.text.bpe import BPETokenizer

RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("ANYFORMER_TEST_CACHE", Path.home() / ".cache" / "anyformer" / "tests"))
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS, DIM, HEADS, HIDDEN, VOCAB = 12, 768, 12, 2048, 32000
PROMPT, NEW, LONG, ROWS = 128, 64, 512, 8
ROUNDS, REST = 5, 0.2  # seconds between turns, in which the threads of the last one stop spinning
THREADS = os.cpu_count() or 1
GREEDY = af.Sampling(temperature=0.0)

Rates = dict[str, list[float]]


class Missing(Exception):
    """Why a claim cannot be measured here."""


class Row(NamedTuple):
    claim: str
    ours: str
    theirs: str
    ratio: float
    target: float | None = None

    def __str__(self) -> str:
        met = "" if self.target is None else "yes" if self.ratio >= self.target else "**no**"
        target = "" if self.target is None else f"≥ {self.target:.2f}"
        return f"| {self.claim} | {self.ours} | {self.theirs} | {self.ratio:.2f} × | {target} | {met} |"


def race(ways: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> Rates:
    """What each way gives in each round; the first round warms up."""
    rates: Rates = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, run in ways.items():
            time.sleep(REST)
            found = run()
            if round_:
                rates[name].append(found)
    return rates


def compare(claim: str, rates: Rates, ours: str, theirs: str, target: float | None = None, unit: str = "/s") -> Row:
    """Of the ways whose names begin with `theirs`, the better one counts."""
    best = max((name for name in rates if name.startswith(theirs)), key=lambda name: statistics.median(rates[name]))
    ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[best], strict=True))
    left, right = (statistics.median(rates[name]) for name in (ours, best))
    return Row(claim, f"{left:.1f} {unit}", f"{best}: {right:.1f} {unit}", ratio, target)


def pace(tokens: Iterable[object]) -> float:
    """Tokens a second between the first and the last."""
    return rate([time.perf_counter() for _ in tokens])


def rate(marks: list[float]) -> float:
    return (len(marks) - 1) / (marks[-1] - marks[0])


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - begin


def prompt(count: int, rows: int = 1, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(2, vocab_size, (rows, count), generator=torch.Generator().manual_seed(0))


@functools.cache
def shape(bits: Any = None) -> af.Transformer:
    """LLaMA's shape, accelerated, in float32 or few bits; the weights are the same each time."""
    torch.manual_seed(0)
    mixer = af.Attention(HEADS, num_kv_heads=HEADS, head_dim=DIM // HEADS, position=af.Rotary())
    block = af.Block.pre(mixer, af.GatedFFN(HIDDEN), norm=af.RMSNorm())
    layers = af.cycle([block], LAYERS)
    spec = af.TransformerSpec(DIM, VOCAB, embed=af.Embed(tied=False), decoder=layers, final_norm=af.RMSNorm())
    return fast(spec.build(), bits)


def fast(model: af.Transformer, bits: Any = None) -> af.Transformer:
    return af.accelerate(af.quantize(model, bits) if bits else model).eval()


def ours(model: af.Transformer, ids: Tensor, count: int = NEW) -> Callable[[], float]:
    return lambda: pace(steps(model, ids, GREEDY, max_new_tokens=count))


def theirs(folder: Path, ids: Tensor, count: int = NEW) -> Callable[[], float]:
    """`generate` on the saved folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(saved(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run() -> float:
        marks: list[float] = []

        def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            marks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        stop = transformers.StoppingCriteriaList([note])
        every = torch.ones_like(ids)
        model.generate(ids, attention_mask=every, max_new_tokens=count, do_sample=False, stopping_criteria=stop)
        assert len(marks) == count
        return rate(marks)

    return run


def llama(path: Path, ids: Tensor, count: int, *, flash: bool) -> Callable[[], float]:
    """llama.cpp's server: new tokens a second, or those of the prompt if only one new token is wanted."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity, params.fit_params = 1024, 1, 0, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    kind = f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if flash else 'DISABLED'}"
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, kind)
    asked = {"prompt": ids[0].tolist(), "n_predict": count, "ignore_eos": True, "cache_prompt": False}
    body = json.dumps(asked | {"temperature": 0, "samplers": ["top_k"], "top_k": 1}).encode()

    def run() -> float:
        server = xllamacpp.Server(params)  # anew each turn: while an idle one lives, other ways are a fifth slower
        request = urllib.request.Request(f"{server.listening_address}/completion", body)
        with urllib.request.urlopen(request, timeout=120) as answer:
            took = json.load(answer)["timings"]
        assert (took["prompt_n"], took["predicted_n"]) == (ids.shape[1], count)
        if count == 1:
            return float(took["prompt_per_second"])
        return (count - 1) / took["predicted_ms"] * 1e3  # its clock begins at the first token, which it counts too

    return run


def llamas(path: Path, ids: Tensor, count: int = NEW, name: str = "llama.cpp") -> dict[str, Callable[[], float]]:
    return {name: llama(path, ids, count, flash=True), f"{name}, no flash": llama(path, ids, count, flash=False)}


def saved(folder: Path) -> Path:
    """The shape in the hub's layout, written once."""
    path = folder / "shape"
    if not path.exists():
        af.save(shape(), path)
    return path


def gguf_file(folder: Path, kind: str) -> Path:
    """The shape for llama.cpp, written once: "F32", "Q8_0" or "Q4_0"."""
    path = folder / f"{kind}.gguf"
    if not path.exists() and kind == "F32":  # llama.cpp wants a tokenizer, and one with merges
        BPETokenizer.train(["aa aa"], 258).save(folder / "words")
        content = json.loads((folder / "words" / "tokenizer.json").read_text("utf-8"))
        tokenizer = tokenizer_metadata(content, bos=0, eos=1, vocab_size=VOCAB, pre="default")
        values, made = hub_tensors(shape())
        tensors = {name: part.make() for name, part in made.items()}
        write_gguf(path, {"max_position_embeddings": 2048} | values, tensors, tokenizer)
    return path if path.exists() else requantized(gguf_file(folder, "F32"), path, kind)


def requantized(source: Path, path: Path, kind: str) -> Path:
    """The same file with its matrices in another kind of numbers."""
    import gguf

    read, write, to = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType[kind]
    for field in read.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            inner = field.types[-1] if len(field.types) > 1 else None
            write.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    write.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in read.tensors:
        values, plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type), len(tensor.shape) == 1
        found = values if plain else gguf.quants.quantize(values, to)
        write.add_tensor(tensor.name, found, raw_dtype=None if plain else to)
    write.write_header_to_file()
    write.write_kv_data_to_file()
    write.write_tensors_to_file()
    write.close()
    return path


def cached(name: str) -> Path:
    path = next(CACHE.rglob(name), None)
    if path is None:
        raise Missing(f"{name} is not in {CACHE}: `make test-slow` fetches it")
    return path


def moby_dick() -> str:
    """The beginning of the first chapter."""
    return cached("chapter_1.txt").read_text("utf-8")[:2500]


def float32(folder: Path) -> Iterator[Row]:
    """One row in float32, against its peers and the memory's bandwidth."""
    model, ids = shape(), prompt(PROMPT)
    size = sum(parameter.nbytes for parameter in model.parameters()) - model.tokens.weight.nbytes
    ways = {"ours": ours(model, ids), "memory": lambda: bandwidth() / size, "transformers": theirs(folder, ids)}
    rates = race(ways | llamas(gguf_file(folder, "F32"), ids))
    yield compare("float32 decode", rates, "ours", "llama.cpp", 1.0)
    yield compare("float32 decode", rates, "ours", "transformers", 2.2)
    rates = {name: [rate * size / 1e9 for rate in rates[name]] for name in ("ours", "memory")}
    yield compare("float32 weights read", rates, "ours", "memory", 0.75, "GB/s")


@functools.cache
def sums() -> tuple[Callable[[], object], ...]:
    """Two ways to read 400 MB."""
    import numba

    @numba.njit(parallel=True, fastmath=True)
    def total(x: Any) -> Any:
        found = x[0]
        for i in numba.prange(1, len(x)):
            found += x[i]
        return found

    numbers = torch.ones(100_000_000)
    return numbers.sum, functools.partial(total, numbers.numpy())


def bandwidth() -> float:
    """Bytes a second of reading, over as long as decoding takes; the better of two ways."""
    return max(40 * 4e8 / seconds(lambda read=read: [read() for _ in range(40)]) for read in sums())


def few_bits(folder: Path) -> Iterator[Row]:
    """One row in 8 and 4 bits."""
    ids = prompt(PROMPT)
    for bits, kind, target in (("int8", "Q8_0", 1.0), ("int4", "Q4_0", None)):
        rates = race({"ours": ours(shape(bits), ids), **llamas(gguf_file(folder, kind), ids)})
        yield compare(f"{bits} decode, {kind}", rates, "ours", "llama.cpp", target)


def smollm2(folder: Path) -> Iterator[Row]:
    """SmolLM2-135M in few bits: how fast, and how much worse it reads."""
    file, text = cached(SMOLLM2), moby_dick()
    models = {bits: fast(af.load(file).model, bits) for bits in ("int8", "int4", None)}
    ids = prompt(PROMPT, vocab_size=models[None].spec.vocab_size)
    ways = {f"{bits}": ours(model, ids) for bits, model in models.items() if bits}
    q8 = requantized(file, folder / "smollm2.gguf", "Q8_0")
    rates = race(ways | llamas(file, ids, name="Q4_1") | llamas(q8, ids, name="Q8_0"))
    for bits in ("int8", "int4"):
        for kind in ("Q8_0", "Q4_1"):
            yield compare(f"SmolLM2 decode, {bits}", rates, bits, kind)
    words = af.load(file).tokenizer.encode(text)
    found = {bits: af.score(model, words, chunk=16).perplexity for bits, model in models.items()}
    for bits, target in (("int8", 0.99), ("int4", None)):
        left, right = f"{found[bits]:.2f}", f"float32: {found[None]:.2f}"
        yield Row(f"SmolLM2 perplexity, {bits}", left, right, found[None] / found[bits], target)


def prefill(folder: Path) -> Iterator[Row]:
    """A prompt of 512 tokens in float32, against llama.cpp and the machine's matrix products."""
    model, ids = shape(), prompt(LONG)

    def read() -> float:
        with torch.inference_mode():
            cache = model.new_cache(1, LONG + 1)
        return LONG / seconds(lambda: model(ids, cache=cache, last=1))

    ways = {"ours": read, "products": products()}
    rates = race(ways | llamas(gguf_file(folder, "F32"), ids, 1))
    yield compare("float32 prefill, 512 tokens", rates, "ours", "llama.cpp", 1.1)
    yield compare("float32 prefill, 512 tokens", rates, "ours", "products", 0.95)


def products() -> Callable[[], float]:
    """Every matrix product that a prompt of 512 tokens takes, and nothing else."""
    x = {width: torch.ones(LONG, width) for width in (DIM, HIDDEN)}
    q, scores = torch.ones(HEADS, LONG, DIM // HEADS), torch.ones(HEADS, LONG, LONG)

    def run() -> None:
        for weight in weights(shape().decoder):
            F.linear(x[weight.shape[1]], weight)
        for _ in range(LAYERS):
            torch.bmm(q, q.transpose(1, 2))
            torch.bmm(scores, q)
        F.linear(x[DIM][:1], shape().head.weight)

    return lambda: LONG / seconds(run)


def weights(module: nn.Module) -> list[Tensor]:
    return [part.weight for part in module.modules() if isinstance(part, nn.Linear)]


def batch(folder: Path) -> Iterator[Row]:
    """Eight requests in a running batch."""
    ids, count = prompt(PROMPT, ROWS), NEW // 2
    ways = {"ours": lambda: engine(ids, count), "one row": ours(shape(), ids[:1])}
    rows = theirs(folder, ids, count)
    rates = race(ways | {"transformers": lambda: ROWS * rows()})
    yield compare("8 requests", rates, "ours", "one row", 3.0)
    yield compare("8 requests", rates, "ours", "transformers", 1.5)


def engine(ids: Tensor, count: int) -> float:
    """Tokens a second of all rows, once all run: behind the step that read the last prompt."""
    running = af.Engine(shape(), max_rows=len(ids), max_len=PROMPT + 2 * NEW)
    for row in ids:
        running.submit(row, max_new_tokens=count + len(ids))
    while len(running.step()) < len(ids):
        pass
    return len(ids) * pace(running.step() for _ in range(count))


def lookup(folder: Path) -> Iterator[Row]:
    """A paragraph three times, which SmolLM2 then writes once more."""
    model, tokenizer, _ = af.load(cached(SMOLLM2))
    model = fast(model)
    ids = tokenizer.encode((moby_dick()[:600] + "\n\n") * 3)

    def looked_up() -> Iterable[int]:
        return af.speculate(model, ids, af.PromptLookup(), GREEDY, max_new_tokens=2 * NEW)

    (plain,) = af.generate(model, [ids], max_new_tokens=2 * NEW).ids
    same = sum(a == b for a, b in zip(plain, looked_up(), strict=True))
    rates = race({"ours": lambda: pace(looked_up()), "greedy": ours(model, torch.tensor([ids]), 2 * NEW)})
    yield compare("prompt lookup, SmolLM2", rates, "ours", "greedy", 1.5)
    yield Row("prompt lookup, tokens as by greedy", f"{same}", f"{len(plain)}", same / len(plain), 1.0)


THEIR_FIRST = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(int(sys.argv[4]))
how = dict(gguf_file=sys.argv[3]) if sys.argv[3] else dict()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **how)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **how)
read = tokenizer(sys.argv[2], return_tensors="pt")
out = model.generate(**read, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0], skip_special_tokens=True))
for part in (model, tokenizer) if len(sys.argv) > 5 else ():
    part.save_pretrained(sys.argv[5])
"""


def first(folder: Path) -> Iterator[Row]:
    """From the start of a process to its first token."""
    file, text, hub, ours_saved = cached(SMOLLM2), "Call me Ishmael. Some years", folder / "hub", folder / "smollm2"
    model, tokenizer, _ = af.load(file)
    af.save(model, ours_saved, tokenizer)
    said([*their_first(ours_saved, text), hub])
    for kind, source, path in (("safetensors", hub, their_first(hub, text)), ("GGUF", file, their_first(file, text))):
        if kind == "GGUF" and importlib.util.find_spec("accelerate") is None:
            raise Missing("transformers reads GGUF only with the package accelerate")
        command = [Path(sys.executable).with_name("anyformer"), "generate", source, text]
        ways = {"ours": [*command, "--max-new-tokens", "1", "--temperature", "0"], "transformers": path}
        assert len({said(way) for way in ways.values()}) == 1
        rates = race({name: lambda way=way: 1 / seconds(lambda: said(way)) for name, way in ways.items()}, 3)
        row = compare(f"first token, {kind}", rates, "ours", "transformers", 2.0)
        left, right = (f"{statistics.median(1 / rate for rate in rates[name]):.2f} s" for name in ways)
        yield row._replace(ours=left, theirs=f"transformers: {right}")


def their_first(source: Path, text: str) -> list[Any]:
    path, file = (source, "") if source.is_dir() else (source.parent, source.name)
    return [sys.executable, "-c", THEIR_FIRST, path, text, file, str(THREADS)]


def said(command: list[Any]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


CLAIMS = {c.__name__: c for c in (float32, few_bits, smollm2, prefill, batch, lookup, first)}


def profile() -> Iterator[str]:
    """Where the time of a float32 step goes: its loops alone, on as many weights, keys and values."""
    model, x = shape(), {width: torch.ones(1, width) for width in (DIM, HIDDEN)}
    every, passes = [*weights(model.decoder), model.head.weight], 8  # other keys each time: none are in the caches
    k, v = torch.ones(2, passes * LAYERS, 1, PROMPT + NEW // 2, HEADS, DIM // HEADS)
    q = torch.ones(1, HEADS, DIM // HEADS)

    def read_weights() -> None:
        for weight in every * passes:
            operators.linear(x[weight.shape[1]], weight, None)

    def attend() -> None:
        for keys, values in zip(k, v, strict=True):
            operators.attend(q, keys, values, None, 0.125)

    parts = {
        "step": lambda: 1 / ours(model, prompt(PROMPT))(),
        "weights": lambda: seconds(read_weights) / passes,
        "attention": lambda: seconds(attend) / passes,
    }
    took = {name: statistics.median(times) * 1e3 for name, times in race(parts).items()}
    took["rest"] = took["step"] - took["weights"] - took["attention"]
    yield "A float32 step, with its loops run alone, and the rest by subtraction:"
    yield from ("", "| | ms | share |", "|---|---|---|")
    for name, ms in took.items():
        yield f"| {name} | {ms:.2f} | {ms / took['step']:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"some of: {', '.join(CLAIMS)}")
    chosen = parser.parse_args().claims or list(CLAIMS)
    torch.set_num_threads(THREADS)
    lines = [
        "# Decoding",
        "",
        f"`python benchmarks/decode.py`, {platform.machine()}, {THREADS} threads, torch {torch.__version__}; tokens a "
        f"second, medians of {ROUNDS} rounds by turns.",
        "",
        "| claim | ours | theirs | ratio | target | met |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            try:
                for row in CLAIMS[name](Path(folder)):
                    lines.append(str(row))
                    print(row, flush=True)
            except Missing as missing:
                lines.append(f"| {name} | skipped: {missing} | | | | |")
                print(lines[-1], flush=True)
    if chosen == list(CLAIMS):
        lines += ["", *profile()]
        (RESULTS / "decode.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
