"""The main job, from text to a trained model in a folder: `anyformer train`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from anyformer.checkpoint.run import read_spec, save_run
from anyformer.checkpoint.state import load_state, save_state
from anyformer.cli.console import RunWatcher, clock, console, stages
from anyformer.files import write_text
from anyformer.inspect.limits import matmul_rate
from anyformer.inspect.show import count, describe
from anyformer.model import TransformerSpec
from anyformer.tasks.causal_lm import CausalLM, Corpus, logits_and_aux, prepare, reopen
from anyformer.train.loop import Trainer, TrainSpec

__all__ = ["pretrain"]


def pretrain(
    spec: TransformerSpec,
    *,
    out: Path,
    data: str = "stdlib",
    vocab_size: int | None = 2048,
    held_out: float = 0.1,
    prompt: str = "",
    compiled: bool = False,
    resume: bool = False,
    seed: int = 0,
    optimizer: str = "adamw",
    lr: float | None = None,
    **choices: float | None,
) -> Trainer:
    """Prepare the text, build the model, train it, and leave a run in `out`."""
    if not spec.decoder or spec.encoder:
        raise ValueError("`train` needs a decoder-only model, such as gpt-mini: others are not trained on plain text")
    if resume:
        spec = read_spec(out)
    elif (out / "spec.yaml").exists():
        raise ValueError(f"{out} holds a run already: go on with --resume, or choose another --out")
    how = {"kind": optimizer} | ({} if lr is None else {"lr": lr})
    plan = TrainSpec.parse({"optimizer": how, "seed": seed, **choices})
    corpus = _corpus(data, out, vocab_size, held_out, seed, resume)
    torch.manual_seed(seed)
    model = spec.replace(vocab_size=corpus.tokenizer.vocab_size).build()
    _fits(plan.length, model.max_len)
    forward = torch.compile(logits_and_aux) if compiled else logits_and_aux
    task = CausalLM(corpus, batch_size=plan.batch_size, length=plan.length, seed=seed, prompt=prompt, forward=forward)
    watcher = RunWatcher(out, plan.batch_size * plan.length)
    trainer = Trainer(model, task, plan, watcher, partial(_save, out, corpus))
    if resume:
        trainer.restore(load_state(out / "state.pt"))
    watcher.begin(trainer.step)
    _announce(model.spec, plan)
    write_text(out / "train.yaml", plan.to_yaml())
    with watcher.bar:
        finished = trainer.run()
    _conclude(out, corpus, trainer, finished)
    return trainer


def _corpus(data: str, out: Path, vocab_size: int | None, held_out: float, seed: int, resume: bool) -> Corpus:
    if resume:
        return reopen(out)
    with stages() as tell:
        corpus = prepare(data, out, vocab_size=vocab_size, held_out=held_out, seed=seed, tell=tell)
    for skipped in corpus.skipped:
        console.print(f"[yellow]left out {skipped.name}: {skipped.reason}[/yellow]", markup=True)
    console.print(
        f"{count(len(corpus.train))} tokens to train on, {count(len(corpus.held_out))} held out; "
        f"{corpus.train.num_bytes / len(corpus.train):.2f} bytes a token"
    )
    return corpus


def _announce(spec: TransformerSpec, plan: TrainSpec) -> None:
    facts = describe(spec, length=plan.length, batch=plan.batch_size)
    memory = sum(facts[f"{name}_bytes"] for name in ("weight", "gradient", "optimizer", "activation"))
    console.print(
        f"{count(facts['parameters'])} parameters; a batch of {plan.batch_size} × {plan.length} tokens "
        f"takes about {count(memory)}B and {count(3 * facts['flops_per_token_forward'])} FLOPs a token"
    )


def _speed(trainer: Trainer) -> str:
    plan, spec = trainer.spec, trainer.model.spec
    tokens = trainer.step * plan.batch_size * plan.length / max(trainer.seconds, 1e-9)
    flops = 3 * describe(spec, length=plan.length, batch=1)["flops_per_token_forward"] * tokens
    limit = matmul_rate(device=trainer.model.device)
    return f"{tokens:,.0f} tokens/s: {flops / limit:.0%} of this machine's matrix-product rate ({count(limit)}FLOP/s)"


def _fits(length: int, max_len: int | None) -> None:
    if max_len is not None and length > max_len:
        raise ValueError(f"`length` must be at most the model's {max_len} positions, but is {length}")


def _save(out: Path, corpus: Corpus, trainer: Trainer) -> None:
    save_state(out / "state.pt", trainer.state())
    save_run(trainer.model, out, corpus.tokenizer)


def _conclude(out: Path, corpus: Corpus, trainer: Trainer, finished: bool) -> None:
    if not finished:
        console.print(f"stopped at step {trainer.step} and saved; go on with --out {out} --resume")
        return
    others = ", ".join(f"{name} {value:.3f}" for name, value in corpus.baselines.items())
    console.print(f"bits per byte on held-out text, to compare with: {others}")
    console.print(f"{clock(trainer.seconds)} of training, {_speed(trainer)}; see {out}/loss.png and {out}/samples.txt")
    console.print(f'next: anyformer generate {out} "your prompt"')
