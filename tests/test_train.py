"""Training: the loop, its task, and going on after a stop."""

import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.data.store import TokenStore
from anyformer.tasks.causal_lm import CausalLM, Corpus, prepare, reopen
from anyformer.text.tokenizer import ByteTokenizer
from anyformer.train.loop import Loss, Trainer, TrainSpec, Watcher
from anyformer.train.optim import AdamW, Muon, Optimizer, learning_rate

TEXT = "def add(a, b):\n    return a + b\n\n\n" * 60


def corpus(folder: Path, text: str = TEXT) -> Corpus:
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"# {i}\n{text}", encoding="utf-8")
    return prepare(str(folder / "*.txt"), folder / "run", vocab_size=None, held_out=0.25)


def small(**changes: object) -> af.Transformer:
    mixer = af.Attention(2, position=af.Rotary())
    block = af.Block.pre(mixer, af.GatedFFN(24), norm=af.RMSNorm(), dropout=0.1)
    spec = af.TransformerSpec(16, 257, decoder=af.cycle([block], 2), final_norm=af.RMSNorm())
    for path, value in changes.items():
        spec = spec.replace(path, value)
    torch.manual_seed(1)
    return spec.build()


def trainer(
    data: Corpus, steps: int, save: Callable[[Trainer], None] = lambda trainer: None, **plan: object
) -> Trainer:
    spec = TrainSpec(steps=steps, batch_size=4, length=16, evaluations=2, **plan)
    task = CausalLM(data, batch_size=4, length=16, seed=0)
    return Trainer(small(), task, spec, Recorder(), save)


class Recorder(Watcher):
    """Keeps all figures."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.measured: list[tuple[int, dict[str, float], str | None]] = []

    def stepped(self, trainer: Trainer, figures: dict[str, float]) -> None:
        self.steps.append(figures)

    def evaluated(self, trainer: Trainer, figures: dict[str, float], sample: str | None) -> None:
        self.measured.append((trainer.step, figures, sample))


def test_it_learns_measures_and_samples(tmp_path: Path) -> None:
    run = trainer(corpus(tmp_path), 60, optimizer=AdamW(lr=1e-2))
    assert run.run()
    recorder = run.watcher
    assert isinstance(recorder, Recorder)
    assert recorder.steps[0]["loss"] == pytest.approx(math.log(257), abs=0.3)
    assert recorder.steps[-1]["loss"] < 2.5
    assert [step for step, _, _ in recorder.measured] == [30, 60]
    assert isinstance(recorder.measured[-1][2], str)


def test_bits_per_byte_counts_every_byte(tmp_path: Path) -> None:
    """With bytes as tokens and a uniform model, a document of n bytes costs (n + 1) log2 257 bits, its end included."""
    data = corpus(tmp_path)
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    figures = CausalLM(data, batch_size=4, length=16, seed=0).evaluate(model.eval(), last=True)
    texts = [path.read_bytes() for path in tmp_path.glob("*.txt")]
    held_out = next(text for text in texts if len(text) == data.held_out.num_bytes)
    assert figures["held_out_loss"] == pytest.approx(math.log(257), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx((len(held_out) + 1) * math.log2(257) / len(held_out), rel=1e-5)


def test_fault_12_documents_in_one_window_do_not_see_one_another() -> None:
    """The loss of two packed documents is the sum of their losses alone."""
    model = small().eval()
    task = CausalLM.__new__(CausalLM)
    from anyformer.tasks.causal_lm import logits_and_aux

    task.forward = logits_and_aux
    first, second = [256, 1, 2, 3, 256], [256, 4, 5, 256]
    ids = torch.tensor([first + second])
    document = torch.tensor([[0] * 5 + [1] * 4])
    targets = torch.tensor([[*first[1:], -100, *second[1:], -100]])
    packed = task.loss(model, (ids.numpy(), targets.numpy(), document.numpy()))
    alone = [
        task.loss(model, tuple(torch.tensor([part]).numpy() for part in (text, [*text[1:], -100], [0] * len(text))))
        for text in (first, second)
    ]
    assert packed.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-5)
    assert int(packed.targets) == 7


def test_fault_20_loss_over_nothing_is_zero() -> None:
    assert Loss(torch.tensor(0.0), torch.tensor(0)).mean().item() == 0.0


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=lambda optimizer: optimizer.kind)
def test_fault_54_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, optimizer: Optimizer) -> None:
    data = corpus(tmp_path)
    whole = trainer(data, 9, optimizer=optimizer)
    whole.run()
    for stop in (1, 4, 8):
        torch.manual_seed(1)
        part = trainer(data, 9, optimizer=optimizer)
        for _ in range(stop):
            part.train_step()
        state = part.state()
        torch.save(state, tmp_path / "state.pt")
        torch.rand(3)
        rest = trainer(reopen(tmp_path / "run"), 9, optimizer=optimizer)
        rest.restore(torch.load(tmp_path / "state.pt", weights_only=True))
        while rest.step < 9:
            rest.train_step()
        for (name, a), b in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
            assert torch.equal(a, b), (stop, name)


def test_muon_turns_matrices_and_adamw_moves_the_rest() -> None:
    """The first step from zero momentum is lr · √(rows / columns) · U Vᵀ of the gradient, to Newton-Schulz's 5 steps:
    singular values within 0.6 to 1.3; a table's entries move by lr, as AdamW's first step does."""
    model = small()
    spec = Muon(lr=1e-3, matrix_lr=1e-2, weight_decay=0.0)
    optimizer = spec.build(model)
    for group in optimizer.param_groups:
        group["lr"] = spec.lr * group.get("share", 1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn_like(parameter).sign()
        if parameter.dim() == 2 and name != "tokens.weight":
            u, values, vh = torch.linalg.svd(torch.randn_like(parameter), full_matrices=False)
            parameter.grad = u @ torch.diag(torch.linspace(0.5, 1, len(values))) @ vh
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (parameter - before[name]).detach()
        if name.endswith(("q.weight", "down.weight", "up.weight")):
            rows, columns = moved.shape
            values = torch.linalg.svdvals(moved) / 1e-2 / max(1, rows / columns) ** 0.5
            assert 0.6 < values.min() <= values.max() < 1.3, name
        elif name == "tokens.weight" or "pre" in name:
            torch.testing.assert_close(
                moved.abs(), torch.full_like(moved, 1e-3), rtol=1e-3, atol=0
            )  # less, where |g| is near eps


def test_ctrl_c_ends_the_step_and_saves(tmp_path: Path) -> None:
    saved: list[int] = []
    run = trainer(corpus(tmp_path), 50, save=lambda trainer: saved.append(trainer.step))

    class Impatient(Watcher):
        def stepped(self, trainer: Trainer, figures: dict[str, float]) -> None:
            if trainer.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    run.watcher = Impatient()
    assert run.run() is False
    assert saved == [3]
    assert signal.getsignal(signal.SIGINT) is before


def test_seconds_bound_a_run_and_lead_the_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("anyformer.train.loop.time.perf_counter", lambda: next(ticks) / 100)  # a step takes 0.01 s
    run = trainer(corpus(tmp_path), 10**6, seconds=0.295)
    assert run.run()
    assert run.step == 30
    assert isinstance(run.watcher, Recorder)
    rates = [figures["lr"] for figures in run.watcher.steps]
    assert rates == pytest.approx([learning_rate(run.spec.optimizer, step / 29.5) for step in range(30)])


def test_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    spec = AdamW(lr=1.0, warmup=0.1, floor=0.1)
    assert learning_rate(spec, 0.05) == pytest.approx(0.5)
    assert learning_rate(spec, 0.1) == pytest.approx(1.0)
    assert learning_rate(spec, 0.55) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(spec, 1.0) == pytest.approx(0.1)


def test_only_matrices_decay() -> None:
    groups = AdamW(weight_decay=0.1).build(small()).param_groups
    assert {parameter.dim() for parameter in groups[0]["params"]} == {2}
    assert groups[1]["weight_decay"] == 0.0
    assert any(parameter.shape == (257, 16) for parameter in groups[1]["params"])


def test_an_untied_head_is_a_matrix_and_decays() -> None:
    model = small(**{"embed.tied": False})
    groups = AdamW(weight_decay=0.1).build(model).param_groups
    assert any(parameter is model.head.weight for parameter in groups[0]["params"])
    assert any(parameter is model.tokens.weight for parameter in groups[1]["params"])


def test_gradients_are_clipped_and_the_norm_is_reported(tmp_path: Path) -> None:
    run = trainer(corpus(tmp_path), 5, optimizer=AdamW(clip=1e-3))
    clipped: list[float] = []
    step = run.optimizer.step

    def spy() -> None:
        squares = [p.grad.square().sum() for p in run.model.parameters() if p.grad is not None]
        clipped.append(float(torch.stack(squares).sum().sqrt()))
        step()

    run.optimizer.step = spy  # type: ignore[method-assign]
    figures = run.train_step()
    assert figures["grad_norm"] > 0.1
    assert clipped[0] == pytest.approx(1e-3, rel=1e-2)


def test_the_auxiliary_loss_of_experts_is_trained(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    moe = af.MoE(af.GatedFFN(8), num_experts=4, balance=0.0, z=0.0)
    grads = []
    for z in (0.0, 1.0):
        model = small(**{"decoder.*.ffn": moe.replace(z=z)})
        task = CausalLM(data, batch_size=4, length=16, seed=0)
        run = Trainer(model.eval(), task, TrainSpec(steps=5, evaluations=1), Watcher(), lambda trainer: None)
        loss = run.task.loss(model, task.batch(0))
        (loss.mean() + (loss.aux if loss.aux is not None else 0.0)).backward()
        grads.append(model.decoder.layers[0].ffn.op.router.weight.grad.norm().item())
    assert abs(grads[1] - grads[0]) > 1e-4


def test_chinese_text_trains_and_generates(tmp_path: Path) -> None:
    data = corpus(tmp_path, "注意力就是你所需要的。\n" * 60)
    run = trainer(data, 80, optimizer=AdamW(lr=1e-2))
    run.run()
    assert any("一" <= letter <= "鿿" for letter in run.task.sample(run.model) or "")


def test_prepare_reports_and_reopens(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01")
    data = corpus(tmp_path)
    assert sorted(Path(skipped.name).name for skipped in data.skipped) == ["binary.txt", "empty.txt"]
    again = reopen(tmp_path / "run")
    assert (again.train.tokens == data.train.tokens).all()
    assert again.baselines == data.baselines == json.loads((tmp_path / "run" / "baselines.json").read_text())
    assert isinstance(again.train, TokenStore)
    assert isinstance(again.tokenizer, ByteTokenizer)


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"`evaluations` must be at most `steps` \(5\), but is 10"):
        TrainSpec(steps=5)
    with pytest.raises(ValueError, match="`warmup` must be below 1"):
        AdamW(warmup=1.0)
