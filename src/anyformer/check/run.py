"""Run: hold a model to the laws."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from anyformer.check.law import Law, NotApplicable
from anyformer.check.laws import LAWS
from anyformer.check.ours import Ours
from anyformer.check.report import Finding, Report, Verdict
from anyformer.check.subject import Subject
from anyformer.model import Transformer

__all__ = ["Tell", "check", "chosen", "judge"]

Tell = Callable[[str, float], None]
"""`tell(law, share)`: what is being measured, and how much of all is done."""


def check(
    model: Transformer | Subject,
    *,
    only: Sequence[str] = (),
    name: str = "model",
    seed: int | None = None,
    tell: Tell = lambda law, share: None,
) -> Report:
    """Hold a model to the laws (those in `only`, by name). It is left as it was.

    Most laws are judged on a copy with weights drawn anew, in float64 and in the model's own dtype: so an error in the
    arithmetic shows, whatever the weights. A model of another library comes as a `Subject`. `seed` is for weights and
    texts (None: the subject's own, or 0).
    """
    subject = copy.copy(model) if isinstance(model, Subject) else Ours(model, name=name)
    subject.seed = subject.seed if seed is None else seed
    laws, findings = chosen(only), []
    modes = {module: module.training for module in subject.module.modules()}
    subject.module.eval()
    try:
        for done, law in enumerate(laws):
            tell(law.title, done / len(laws))
            findings.append(judge(law, subject))
    finally:
        for module, training in modes.items():
            module.training = training
    return Report(subject.name, tuple(findings), subject.notes)


def chosen(only: Sequence[str]) -> list[Law]:
    """The laws of these names; all, for none. ValueError names the known ones."""
    known, only = {law.name: law for law in LAWS}, [only] if isinstance(only, str) else only
    for name in only:
        if name not in known:
            raise ValueError(f"unknown law {name!r}; known: {', '.join(known)}")
    return [law for law in LAWS if not only or law.name in only]


def judge(law: Law, subject: Subject) -> Finding:
    """One law on one subject; in each dtype in turn, until one breaks it. Random numbers outside stay as they were."""
    begin = time.perf_counter()
    finding = Finding(law.name, law.title, law.means, law.measured, "not applicable", law.unit)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(not subject.fixed):
        try:
            for judged in _copies(subject) if law.anew else [subject]:
                torch.manual_seed(subject.seed)
                judged.random = torch.Generator().manual_seed(subject.seed)
                found = _judged(law, judged, finding)
                trials = finding.trials + found.trials
                worse = finding.verdict == "not applicable" or found.share > finding.share or found.verdict == "fail"
                finding = dataclasses.replace(found if worse else finding, trials=trials)
                if found.verdict == "fail":
                    break
        except Exception as error:  # the model cannot be copied, or not to this dtype
            finding = dataclasses.replace(finding, verdict="fail", error=math.inf, limit=0.0, why=_raised(error))
    return dataclasses.replace(finding, seconds=time.perf_counter() - begin)


def _copies(subject: Subject) -> Iterator[Subject]:
    """With weights drawn anew: in float64, where the subject can be that, and in its own dtype."""
    if subject.fixed:
        yield subject
        return
    first = subject.anew(torch.float64)
    yield first
    if first.dtype != subject.dtype:
        yield subject.anew(subject.dtype)


def _judged(law: Law, subject: Subject, blank: Finding) -> Finding:
    dtype, limit = subject.dtype, law.limit(subject.dtype)
    worst, smallest, trials, why = 0.0, "", 0, ""
    try:
        for trial in law.run(subject):
            trials += 1
            error = math.inf if math.isnan(trial.error) else trial.error
            if error > limit and not smallest:
                smallest = trial.said
            worst = max(worst, error)
    except NotApplicable as reason:
        if not trials:
            return dataclasses.replace(blank, verdict="not applicable", why=str(reason))
        why = f"asked in part: {reason}"
    except Exception as error:
        worst, why, smallest = math.inf, _raised(error), smallest or "the next input"
    if not trials and not why:
        return dataclasses.replace(blank, verdict="not applicable", why="there was nothing to measure")
    verdict: Verdict = "fail" if smallest else "pass"
    figures: dict[str, Any] = {"error": worst, "limit": limit, "trials": trials, "dtype": _name(dtype)}
    return dataclasses.replace(blank, verdict=verdict, smallest=smallest, why=why, **figures)


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
