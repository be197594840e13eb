"""Many: the laws over a whole table of combinations, as one report."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from anyformer.check.combinations import CORE, Row, Table
from anyformer.check.named import named
from anyformer.check.ours import Ours
from anyformer.check.report import Finding, Report
from anyformer.check.run import Tell, chosen, judge
from anyformer.kernels.base import Kernel

__all__ = ["check_all", "check_part"]

UNBUILT = Finding("built", "a legal model can be built", "A spec that is not refused makes a model.", "", "fail")
CHUNK = 8
"""Rows that a process is given at once."""
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
NARROW = 4
"""All rows are judged in float64, and each row of so many in float32 as well."""


def check_all(
    *,
    cover: bool = False,
    only: Sequence[str] = (),
    seed: int = 0,
    jobs: int | None = None,
    tell: Tell = lambda said, share: None,
) -> Report:
    """Hold every legal combination of parts to the laws, as tiny models: some thousands; with `cover`, only as many as
    hold every legal pair of parts. Laws that are judged once a model are left out. `jobs` processes (None: one a core).
    Ctrl-C ends it with the report of what was tried so far.
    """
    return _many("", cover=cover, only=only, seed=seed, jobs=jobs, tell=tell)


def check_part(
    target: str,
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    jobs: int | None = None,
    tell: Tell = lambda said, share: None,
) -> Report:
    """Hold a part of the user's own, named "package.module:Name", to the laws in every legal combination.

    It is a mixer, pattern, position, frequency schedule, feature map, feed-forward, norm or head (a class that needs no
    arguments, an object, or a function that gives one), or a kernel, which then computes all that it accepts. Mixers,
    patterns and positions are crossed with one another; the others stand in a pairwise cover.
    """
    return _many(target, cover=named(target).axis not in CORE, only=only, seed=seed, jobs=jobs, tell=tell)


def _many(target: str, *, cover: bool, only: Sequence[str], seed: int, jobs: int | None, tell: Tell) -> Report:
    begin = time.perf_counter()
    laws = [law.name for law in chosen(only) if not law.once or (law.name == "tiles" and _kernel(target))]
    if not laws:
        raise ValueError(
            f"{', '.join(only)}: judged once a model, so not over a table; leave --only out, or name others"
        )
    table = _table(target)
    rows = table.cover(seed) if cover else list(table.rows(seed))
    if not rows:
        first = tuple(next(iter(choices)) for choices in table.axes.values())
        raise ValueError(f"{target} goes together with nothing; with {', '.join(first)}: {table.refusal(first)}")
    merged: dict[str, Finding] = {}
    done, broken = 0, 0
    with contextlib.suppress(KeyboardInterrupt):
        for row, findings in _findings(target, rows, laws, seed, jobs):
            tell(" · ".join(row[: len(CORE)]), done / len(rows))
            for finding in findings:
                merged[finding.law] = _worse(merged.get(finding.law), finding, row)
            done, broken = done + 1, broken + any(finding.verdict == "fail" for finding in findings)
    kind = "a pairwise cover of" if cover else "all"
    note = f"{len(rows)} combinations ({kind} the legal ones), {broken} of them break a law"
    left = [law.name for law in chosen(only) if law.name not in laws]
    note = f"{note}; left out, as they are judged once a model: {', '.join(left)}" if left else note
    note = note if done == len(rows) else f"stopped after {done} of {note}"
    note = f"{note}; {time.perf_counter() - begin:.0f} s"
    return Report(target or "every combination", tuple(merged.values()), (note,), stopped=done < len(rows))


def _kernel(target: str) -> Kernel | None:
    """The user's kernel, if it is one that is named."""
    return named(target).kernel if target else None


def _table(target: str) -> Table:
    """The table, with the user's part on its axis, if there is one."""
    if not target:
        return Table()
    found = named(target)
    return Table(**{found.axis: {found.name: found.part}}) if found.axis else Table()


def _findings(
    target: str, rows: list[Row], laws: Sequence[str], seed: int, jobs: int | None
) -> Iterable[tuple[Row, list[Finding]]]:
    jobs = jobs or os.cpu_count() or 1
    chunks = [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
    if jobs == 1:
        with _one_thread():
            for chunk in chunks:
                yield from _judged(target, chunk, laws, seed)
        return
    with _one_thread(), ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _deaf) as pool:
        waiting = [pool.submit(_judged, target, chunk, laws, seed) for chunk in chunks]
        try:
            for future in waiting:
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _deaf() -> None:
    """Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For this process and those that it starts: the models are tiny, so threads would only wait for each other."""
    before, known = torch.get_num_threads(), {name: os.environ.get(name) for name in THREADS}
    torch.set_num_threads(1)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _judged(target: str, rows: list[Row], laws: Sequence[str], seed: int) -> list[tuple[Row, list[Finding]]]:
    """What was found about each row; runs in a process of its own, which makes the table anew."""
    table, kernel = _table(target), _kernel(target)
    found = []
    for number, row in enumerate(rows):
        torch.manual_seed(seed)
        try:
            model = table.spec(row).build(dtype=torch.float64 if number % NARROW else torch.float32).eval()
        except Exception as error:  # a part of the user's own may be legal, and yet not be made
            found.append((row, [replace(UNBUILT, why=f"raised {type(error).__name__}: {error}")]))
            continue
        subject = Ours(model, name=" · ".join(row), kernel=kernel, seed=seed)
        found.append((row, [judge(law, subject) for law in chosen(laws)]))
    return found


def _worse(known: Finding | None, new: Finding, row: Row) -> Finding:
    """One finding for both: the worse of the two, and how many models the law applies to."""
    applies = new.verdict != "not applicable"
    told = replace(new, models=int(applies), where=" · ".join(row) if applies else "")
    if known is None:
        return told
    order = {"not applicable": 0, "pass": 1, "fail": 2}
    worse = max(known, told, key=lambda finding: (order[finding.verdict], finding.share))
    sums: dict[str, Any] = {
        name: getattr(known, name) + getattr(told, name) for name in ("trials", "models", "seconds")
    }
    return replace(worse, **sums)
