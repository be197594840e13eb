"""What a person sees: progress in the terminal, and the files of a run that are made to be read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from anyformer.files import write_text
from anyformer.inspect.plot import plot_loss
from anyformer.train.loop import Trainer, Watcher

__all__ = ["RunWatcher", "stages"]

console = Console(highlight=False)


@contextmanager
def stages() -> Iterator[Any]:
    """`tell(stage, share)` shows what is being done and, where `share` says how much of it is done, the time left.

    When the next stage begins, the last one stays on the screen with the time that it took.
    """
    now, begun = "", time.perf_counter()
    with console.status("") as status:

        def tell(stage: str, share: float | None = None) -> None:
            nonlocal now, begun
            if stage != now:
                if now:
                    console.print(f"{time.perf_counter() - begun:5.1f} s  {now}", style="dim", markup=False)
                now, begun = stage, time.perf_counter()
            left = f" {share:.0%}, {clock((time.perf_counter() - begun) * (1 / share - 1))} left" if share else " ..."
            status.update(escape(stage + left))

        yield tell
        tell("")


class RunWatcher(Watcher):
    """Shows a training run as it goes, and writes `metrics.jsonl`, `samples.txt` and `loss.png` into its folder."""

    def __init__(self, folder: Path, tokens_per_step: int) -> None:
        self.folder, self.tokens_per_step = folder, tokens_per_step
        self.metrics = folder / "metrics.jsonl"
        self.bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  {task.fields[left]} left"),
            console=console,
            auto_refresh=console.is_terminal,
        )
        self.row = self.bar.add_task("", total=1.0, step=0, loss=float("nan"), rate=0.0, left="?")
        self.smooth = float("nan")

    def stepped(self, trainer: Trainer, figures: dict[str, float]) -> None:
        self._record(trainer, figures)
        known = self.smooth == self.smooth
        self.smooth = 0.95 * self.smooth + 0.05 * figures["loss"] if known else figures["loss"]
        left = trainer.seconds * (1 / max(trainer.progress, 1e-9) - 1)
        rate = trainer.step * self.tokens_per_step / max(trainer.seconds, 1e-9)
        shown = {"step": trainer.step, "loss": self.smooth, "rate": rate, "left": clock(left)}
        self.bar.update(self.row, completed=trainer.progress, **shown)  # type: ignore[arg-type]

    def evaluated(self, trainer: Trainer, figures: dict[str, float], sample: str | None) -> None:
        self._record(trainer, figures)
        said = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        console.print(f"[bold]step {trainer.step}, {clock(trainer.seconds)}: {said}[/bold]")
        if sample is not None:
            console.print(sample, markup=False, style="green")
            self._append_sample(f"--- step {trainer.step}: {said}\n{sample}\n")
        self.draw()

    def begin(self, step: int) -> None:
        """Drop what was recorded after the step that the run goes on from; all of it at step 0."""
        rows = read_metrics(self.metrics) if self.metrics.exists() else []
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        if step == 0:
            (self.folder / "samples.txt").unlink(missing_ok=True)

    def draw(self) -> None:
        """Draw `loss.png` from `metrics.jsonl`."""
        rows = read_metrics(self.metrics)
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        measured = [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row]
        plot_loss(self.folder / "loss.png", *_columns(train), *_columns(measured), title=self.folder.name)

    def _record(self, trainer: Trainer, figures: dict[str, float]) -> None:
        row = {"step": trainer.step, "seconds": round(trainer.seconds, 3), **figures}
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _append_sample(self, text: str) -> None:
        with (self.folder / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def clock(seconds: float) -> str:
    """65 as 1:05, 3700 as 1:01:40."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02.0f}" if hours else f"{minutes}:{seconds:02.0f}"


def _columns(pairs: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in pairs], [value for _, value in pairs]
