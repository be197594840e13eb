"""Run: hold a model to the laws."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from anyformer.check.law import Law, NotApplicable
from anyformer.check.laws import LAWS
from anyformer.check.ours import Ours
from anyformer.check.report import Finding, Report, Verdict
from anyformer.check.subject import Subject
from anyformer.model import Transformer

__all__ = ["check", "chosen", "judge"]

Tell = Callable[[str, float], None]
"""`tell(law, share)`: what is being measured, and how much of all is done."""


def check(
    model: Transformer | Subject,
    *,
    only: Sequence[str] = (),
    name: str = "model",
    seed: int = 0,
    tell: Tell = lambda law, share: None,
) -> Report:
    """Hold a model to the laws (those in `only`, by name). It is left as it was.

    Most laws are judged on a copy with weights drawn anew, in float64 and in the model's own dtype: so an error in the
    arithmetic shows, whatever the weights. A model of another library comes as a `Subject`.
    """
    subject = model if isinstance(model, Subject) else Ours(model, name=name, seed=seed)
    laws, findings = chosen(only), []
    training = subject.module.training
    subject.module.eval()
    try:
        for done, law in enumerate(laws):
            tell(law.title, done / len(laws))
            findings.append(judge(law, subject))
    finally:
        subject.module.train(training)
    return Report(subject.name, tuple(findings), subject.notes)


def chosen(only: Sequence[str]) -> list[Law]:
    """The laws of these names; all, for none. ValueError names the known ones."""
    known = {law.name: law for law in LAWS}
    for name in only:
        if name not in known:
            raise ValueError(f"unknown law {name!r}; known: {', '.join(known)}")
    return [law for law in LAWS if not only or law.name in only]


def judge(law: Law, subject: Subject) -> Finding:
    """One law on one subject; in each dtype in turn, until one breaks it. Random numbers outside stay as they were."""
    begin = time.perf_counter()
    finding = Finding(law.name, law.title, law.means, law.measured, "not applicable", law.unit)
    with torch.random.fork_rng(devices=[]):
        for judged in _copies(subject) if law.anew else [subject]:
            torch.manual_seed(subject.seed)
            found = _judged(law, judged, finding)
            trials = finding.trials + found.trials
            worse = finding.verdict == "not applicable" or found.share > finding.share or found.verdict == "fail"
            finding = dataclasses.replace(found if worse else finding, trials=trials)
            if found.verdict == "fail":
                break
    return dataclasses.replace(finding, seconds=time.perf_counter() - begin)


def _copies(subject: Subject) -> Iterator[Subject]:
    """With weights drawn anew: in float64, where the subject can be that, and in its own dtype."""
    first = subject.anew(torch.float64)
    yield first
    if first.dtype != subject.dtype:
        yield subject.anew(subject.dtype)


def _judged(law: Law, subject: Subject, blank: Finding) -> Finding:
    dtype, limit = subject.dtype, law.limit(subject.dtype)
    worst, smallest, trials = 0.0, "", 0
    try:
        for trial in law.run(subject):
            trials += 1
            if trial.error > limit and not smallest:
                smallest = trial.said
            worst = max(worst, trial.error)
    except (NotApplicable, NotImplementedError) as reason:
        if not trials:
            return dataclasses.replace(blank, verdict="not applicable", why=str(reason))
    except Exception as error:
        why = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        return dataclasses.replace(
            blank, verdict="fail", error=math.inf, limit=limit, why=why, dtype=_name(dtype), trials=trials
        )
    if not trials:
        return dataclasses.replace(blank, verdict="not applicable", why="there was nothing to measure")
    verdict: Verdict = "fail" if smallest else "pass"
    return dataclasses.replace(
        blank, verdict=verdict, error=worst, limit=limit, smallest=smallest, trials=trials, dtype=_name(dtype), why=""
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
