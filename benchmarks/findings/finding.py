"""A finding: a fault of another library, shown by a few lines of that library's own calls."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HF, X, TORCH = "transformers", "x-transformers", "torch"
SHOWS = 1e-3
"""Larger differences are no rounding: answers are of order 1, in float32."""
Run = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Finding:
    """`at` says where the laws see it, as patterns of "subject: law", and `said`, if any, what its smallest input then
    looks like; `word` is silent, documented or loud, and `why` says it fairly. `much` stands for a figure that is no
    difference."""

    name: str
    library: str
    at: tuple[str, ...]
    said: str
    breaks: str
    smallest: str
    word: str
    why: str
    much: str
    run: Run

    def measured(self) -> float:
        """How far apart the answers are; infinity for an error, or for a value that is no number."""
        print(f"{self.name}: {self.breaks}", flush=True)
        found = self.run()
        print(f"  {found:.3g}: {'shows' if found > SHOWS else 'DOES NOT SHOW'}", flush=True)
        return found

    def stands_for(self, at: str, said: str) -> bool:
        """Whether it is what breaks a law there ("subject: law"), by that input."""
        return any(re.fullmatch(pattern, at) for pattern in self.at) and re.search(self.said, said) is not None

    def lines(self) -> tuple[Path, int, int]:
        """The file, and the first and last line of the reproduction."""
        source, first = inspect.getsourcelines(self.run)
        return Path(inspect.getsourcefile(inspect.unwrap(self.run)) or ""), first, first + len(source) - 1


FINDINGS: dict[str, Finding] = {}


def finding(
    library: str, *at: str, smallest: str, word: str, why: str, said: str = "", much: str = ""
) -> Callable[[Run], Run]:
    """Makes a function that gives how far two answers are apart a finding; its docstring says what breaks."""

    def made(run: Run) -> Run:
        breaks = " ".join((run.__doc__ or "").split()).rstrip(".")
        FINDINGS[run.__name__] = Finding(run.__name__, library, at, said, breaks, smallest, word, why, much, run)
        return run

    return made


@torch.no_grad()
def drawn(model: Any) -> Any:
    """The model with maps and tables of order 1, so that each token matters."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one of them alone is not a number."""
    return float((a - b).abs().nan_to_num(nan=math.inf).max())


def raised(run: Callable[[], object], kind: type[Exception] = Exception) -> float:
    """Infinity, if it raises; it tells what."""
    try:
        run()
    except kind as error:
        print(f"  {type(error).__name__}: {error}")
        return math.inf
    return 0.0
