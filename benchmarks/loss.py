"""The training loss against torch's, inside whole training steps of gpt-mini on random tokens, by turns in one process.

    python benchmarks/loss.py

Alone, the two are near; within a step, what counts is how much memory each touches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.train.loss import cross_entropy
from anyformer.train.optim import AdamW

BATCH, LENGTH, ROUNDS, STEPS = 8, 96, 12, 25


def main() -> None:
    model = af.preset("gpt-mini").build()
    optimizer = AdamW().build(model)
    ids = torch.randint(model.spec.vocab_size, (BATCH, LENGTH + 1))
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "torch": lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"),
        "anyformer": cross_entropy,
    }
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(ROUNDS):
        for name, loss in losses.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                total = loss(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                (total / (BATCH * LENGTH)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            taken[name].append((time.perf_counter() - begin) / STEPS * 1e3)
    for name, times in taken.items():
        print(f"{name}: best {min(times):.2f}, median {statistics.median(times):.2f} ms a step")


if __name__ == "__main__":
    main()
