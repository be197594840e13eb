"""Training speed of gpt-mini: ours, a hand-written minimal module of the same shape, and transformers' LLaMA.

    make bench        # or: python benchmarks/training.py [--compile]

All take the same step (forward, loss, backward, clip, AdamW) on the same batch, in one process, by turns of four steps.
The median over the rounds counts, and for ratios that of each round's own: a machine's speed wanders. Each library
finds the loss its own way: ours as `anyformer train` does, transformers from `labels`, the hand-written module with
torch's cross-entropy. Prints tokens/s, ratios, and how near the machine's measured matrix-product rate they come.
Writes benchmarks/results/training.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyformer as af
from anyformer.inspect.limits import matmul_rate
from anyformer.tokens import Tokens
from anyformer.train.loss import cross_entropy
from anyformer.train.optim import AdamW

BATCH, LENGTH, ROUNDS, STEPS = 8, 128, 41, 4
SPEC = af.preset("gpt-mini")


class Layer(nn.Module):
    """What a person would write by hand for this one shape: nothing can be exchanged in it."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.head = heads, dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Minimal(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocab, bias=False)
        half = torch.arange(0, dim // heads, 2) / (dim // heads)
        angles = torch.outer(torch.arange(length), 10000.0**-half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.tokens.weight.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


Models = dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]]


def contestants(compiled: bool) -> Models:
    """Each model, and its way from ids and targets to the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, mixer, ffn = len(SPEC.decoder), SPEC.decoder[0].mixer, SPEC.decoder[0].branches[1].op
    ours, twin = SPEC.build(), SPEC.build()
    minimal = Minimal(SPEC.vocab_size, SPEC.dim, layers, mixer.num_heads, ffn.hidden, LENGTH)
    config = LlamaConfig(
        vocab_size=SPEC.vocab_size,
        hidden_size=SPEC.dim,
        intermediate_size=ffn.hidden,
        num_hidden_layers=layers,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.kv_heads,
        tie_word_embeddings=False,
    )
    llama = LlamaForCausalLM(config)
    document = torch.zeros(BATCH, LENGTH, dtype=torch.long)

    def loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(ids, Tokens.packed(document))
        return cross_entropy(logits.flatten(0, 1), targets.flatten()) / targets.numel()

    found: Models = {
        "anyformer": (ours, lambda ids, targets: loss(ours, ids, targets)),
        "hand-written": (
            minimal,
            lambda ids, targets: F.cross_entropy(minimal(ids).flatten(0, 1), targets.flatten()),
        ),
        "transformers": (llama, lambda ids, targets: llama(ids, labels=ids, use_cache=False).loss),
    }
    if compiled:
        found["anyformer, compiled"] = (twin, torch.compile(lambda ids, targets: loss(twin, ids, targets)))
    return found


def stepper(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], None]:
    optimizer = AdamW().build(model)
    model.train()

    def step(ids: Tensor) -> None:
        loss(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also time our model under torch.compile")
    compiled = parser.parse_args().compile
    torch.manual_seed(0)
    ids = torch.randint(SPEC.vocab_size, (BATCH, LENGTH + 1))
    steps = {name: stepper(model, loss) for name, (model, loss) in contestants(compiled).items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(ROUNDS):
        for name, step in steps.items():
            seconds = timed(lambda step=step: [step(ids) for _ in range(STEPS)]) / STEPS
            if round_:  # the first one warms up
                taken[name].append(seconds)
        print(f"round {round_} of {ROUNDS - 1}", end="\r", flush=True)
    report(taken)


def ratio(taken: dict[str, list[float]], a: str, b: str) -> float:
    """How many times as fast `a` is as `b`: the median over rounds."""
    return statistics.median(theirs / ours for ours, theirs in zip(taken[a], taken[b], strict=True))


def report(taken: dict[str, list[float]]) -> None:
    flops = 3 * sum(cost.flops for cost in SPEC.costs(LENGTH).values()) * BATCH
    peak = matmul_rate()
    lines = [
        f"# Training speed of gpt-mini, {BATCH} × {LENGTH} tokens a step",
        "",
        f"`python benchmarks/training.py`, {platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}; medians of {ROUNDS - 1} rounds by turns.",
        f"A 1024² matrix product reaches {peak / 1e9:.0f} GFLOP/s.",
        "",
        "| | tokens/s | anyformer is | of the matrix-product rate |",
        "|---|---|---|---|",
    ]
    for name, rounds in taken.items():
        seconds, times = statistics.median(rounds), ratio(taken, "anyformer", name)
        lines.append(f"| {name} | {BATCH * LENGTH / seconds:,.0f} | {times:.2f} × | {flops / seconds / peak:.0%} |")
    if "anyformer, compiled" in taken:
        times = ratio(taken, "anyformer, compiled", "transformers")
        lines += ["", f"Compiled, anyformer is {times:.2f} × transformers."]
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    Path(__file__).parent.joinpath("results", "training.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
