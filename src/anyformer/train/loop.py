"""The training loop: read it from top to bottom.

A `Task` says what a batch is and what its loss is; a `Watcher` is told what happens. The loop itself only steps,
evaluates, saves, and stops when the steps or the seconds are used up, or at Ctrl-C, which ends the step first.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from anyformer.model import Transformer
from anyformer.spec import Spec, SpecError
from anyformer.train.optim import AdamW, Optimizer, learning_rate

__all__ = ["Loss", "Task", "TrainSpec", "Trainer", "Watcher"]


class TrainSpec(Spec):
    """How long, and how. `seconds` bounds the time spent in steps; the learning rate follows whichever bound is nearer.

    `evaluations` is how often the run is measured on held-out text, the last time at its end.
    """

    steps: PositiveInt = 2000
    seconds: PositiveFloat | None = None
    batch_size: PositiveInt = 8
    length: PositiveInt = 128
    optimizer: Optimizer = AdamW()
    evaluations: PositiveInt = 10
    seed: NonNegativeInt = 0

    def check(self) -> None:
        if self.evaluations > self.steps:
            raise SpecError(f"`evaluations` must be at most `steps` ({self.steps}), but is {self.evaluations}")


class Loss(NamedTuple):
    """`total` in nats over `targets`, a count, and the model's auxiliary loss if it has one."""

    total: Tensor
    targets: Tensor
    aux: Tensor | None = None

    def mean(self) -> Tensor:
        """Nats per target; 0 for none."""
        return self.total / self.targets.clamp(min=1)


class Task(abc.ABC):
    """What is trained."""

    @abc.abstractmethod
    def batch(self, step: int) -> Any:
        """The batch of a step: a function of the step alone, so that a run can be resumed."""

    @abc.abstractmethod
    def loss(self, model: Transformer, batch: Any) -> Loss:
        """The loss of a batch."""

    @abc.abstractmethod
    def evaluate(self, model: Transformer, last: bool) -> dict[str, float]:
        """Figures on held-out data; all of it if this is the `last` time."""

    def sample(self, model: Transformer) -> str | None:
        """Something to look at, if the task has that."""
        return None


class Watcher:
    """Told what happens; does nothing by itself."""

    def stepped(self, trainer: Trainer, figures: dict[str, float]) -> None: ...

    def evaluated(self, trainer: Trainer, figures: dict[str, float], sample: str | None) -> None: ...


@dataclasses.dataclass
class Trainer:
    """Everything that changes while a run goes on. `save` is called after each measurement, and at the end."""

    model: Transformer
    task: Task
    spec: TrainSpec
    watcher: Watcher
    save: Callable[[Trainer], None]
    step: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = self.spec.optimizer.build(self.model)
        self.measured = 0

    @property
    def progress(self) -> float:
        """The share of the run that is done, by steps or by time."""
        by_time = self.seconds / self.spec.seconds if self.spec.seconds else 0.0
        return min(max(self.step / self.spec.steps, by_time), 1.0)

    def run(self) -> bool:
        """Train to the end; False if the user stopped it. The run is saved either way."""
        with _interruption() as interrupted:
            while self.progress < 1 and not interrupted():
                self._timed_step()
                if self.progress < 1 and self._due():
                    self._evaluate(last=False)
                    self.save(self)
        if self.progress >= 1:
            self._evaluate(last=True)
        self.save(self)
        return self.progress >= 1

    def _timed_step(self) -> None:
        begin = time.perf_counter()
        figures = self.train_step()
        self.seconds += time.perf_counter() - begin
        self.watcher.stepped(self, figures)

    def train_step(self) -> dict[str, float]:
        """One step of the optimiser."""
        self.model.train()
        rate = learning_rate(self.spec.optimizer, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        loss = self.task.loss(self.model, self.task.batch(self.step))
        mean = loss.mean()
        (mean if loss.aux is None else mean + loss.aux).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": mean.item(), "grad_norm": norm.item(), "lr": rate}

    def _due(self) -> bool:
        return self.progress * self.spec.evaluations >= self.measured + 1

    def _evaluate(self, last: bool) -> None:
        self.measured = int(self.progress * self.spec.evaluations)
        self.model.eval()
        with torch.inference_mode():
            figures = self.task.evaluate(self.model, last)
        self.watcher.evaluated(self, figures, self.task.sample(self.model))

    def state(self) -> dict[str, Any]:
        """All that is needed to go on: plain numbers and tensors."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "measured": self.measured,
            "model": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.step, self.seconds, self.measured = state["step"], state["seconds"], state["measured"]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])


@contextlib.contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only asks to stop, so that no step is left half done; the second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
