"""What the laws find in other libraries: tiny random models of each, and each finding again in a few lines of its own.

    python benchmarks/findings.py [NAME ...]

A NAME is the beginning of a subject's name, or a reproduction; without any, all run, and the tables are written into
benchmarks/results/findings.md and docs/check.md. The exit code is 1 if a reproduction does not show what it stands for,
or if a law is broken that no reproduction stands for. Needs transformers, and x-transformers 2.31.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import re
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from findings import hub_repros, torch_repros, x_repros  # noqa: F401 (they fill FINDINGS)
from findings.finding import FINDINGS, HF, SHOWS, TORCH, X
from findings.subjects import SUBJECTS
from findings.x_options import LEFT_OUT

from anyformer.check.laws import LAWS
from anyformer.check.report import Finding, Report
from anyformer.check.run import check
from anyformer.files import write_text

ROOT = Path(__file__).parent
RESULTS, PAGE = ROOT / "results" / "findings.md", ROOT.parent / "docs" / "check.md"
MARKS = ("<!-- found: begin -->", "<!-- found: end -->")
LIBRARIES = {name: importlib.metadata.version(name).partition("+")[0] for name in (HF, X, TORCH)}
"""Each library and its version."""
QUICK = [law.name for law in LAWS if not law.once]
"""Compiling each of these models would take most of the time."""
Lines = list[str]
Measured = dict[str, float]
"""How far apart the answers of each reproduction are."""


def cell(finding: Finding) -> str:
    if finding.verdict == "not applicable":
        return "–"
    error = f"{finding.error:.2g}"
    return error if finding.verdict == "pass" else f"**✗ {error}**"


def laws(reports: list[Report]) -> Lines:
    """The table of all subjects and those laws that could be asked of one of them."""
    asked = dict.fromkeys(f.law for report in reports for f in report.findings if f.verdict != "not applicable")
    units = {f.law: f.unit for report in reports for f in report.findings if f.verdict != "not applicable"}
    head = [f"{law} ({units[law]})" if units[law] else law for law in asked]
    lines = [f"| subject | {' | '.join(head)} |", "|---" * (len(asked) + 1) + "|"]
    for report in reports:
        lines.append(f"| {report.subject} | {' | '.join(cell(report[law]) for law in asked)} |")
    return lines


def told(finding: Finding) -> str:
    """The smallest input that breaks a law, and what raised."""
    return "; ".join(finding.details())


def standing(report: Report, finding: Finding, measured: Measured) -> Lines:
    """The reproductions that stand for a broken law, without those that were run and did not show."""
    at, said = f"{report.subject}: {finding.law}", told(finding)
    return [name for name, f in FINDINGS.items() if f.stands_for(at, said) and measured.get(name, math.inf) > SHOWS]


def broken(reports: list[Report], measured: Measured) -> Lines:
    """Each law that is broken, where, by the smallest input, and the reproductions that stand for it."""
    lines = ["| subject | law | worst error of what is allowed | smallest input | reproduction |", "|---" * 5 + "|"]
    for report in reports:
        for f in report.broken:
            said = told(f).replace("|", "/")
            said = said if len(said) <= 200 else said[:200] + " ..."
            names = ", ".join(standing(report, f, measured)) or "none"
            lines.append(f"| {report.subject} | {f.law} | {f.figure()} | {said} | {names} |")
    return lines


def faults(reports: list[Report], measured: Measured, *, whole: bool) -> Lines:
    """What this command fails for, a sentence each; `whole` if all subjects were asked."""
    found = [f"{name}: the reproduction does not show" for name, off in measured.items() if not off > SHOWS]
    for report in reports:
        for f in report.broken:
            if not standing(report, f, measured):
                what = f"{report.subject}: {f.law} is broken ({f.figure()}; {told(f)})"
                found.append(f"{what}, and no reproduction stands for it")
    seen = [f"{report.subject}: {f.law}" for report in reports for f in report.broken]
    for name, known in FINDINGS.items() if whole else ():
        for pattern in known.at:
            if not any(re.fullmatch(pattern, at) for at in seen):
                found.append(f"{name}: stands for {pattern!r}, but no such law is broken")
    return found


def reproduced(measured: Measured, page: Path) -> Lines:
    """The table of what was found; links are as from `page`."""
    lines = ["| library | what breaks | by how much | smallest input | reproduction | word |", "|---" * 6 + "|"]
    for name, off in measured.items():
        if not off > SHOWS:
            continue
        f = FINDINGS[name]
        file, first, last = f.lines()
        link = f"[`{name}`]({os.path.relpath(file, page.parent)}#L{first}-L{last})"
        library = f"{f.library} {LIBRARIES[f.library]}"
        much = f.much or f"{off:.2g}"
        lines.append(f"| {library} | {f.breaks} | {much} | {f.smallest} | {link} | **{f.word}**: {f.why} |")
    return lines


def lawful(reports: list[Report]) -> str:
    """How many subjects break no law, in words."""
    families = [r for r in reports if r.subject.startswith(f"{HF} ") and r.subject.endswith(", told all")]
    options = [r for r in reports if r.subject.startswith(f"{X} ")]
    kept = [sum(r.lawful for r in some) for some in (reports, families, options)]
    return (
        f"What holds deserves a word too. Of {len(reports)} subjects, {kept[0]} break no law that they can be asked; "
        f"of the {len(families)} families of transformers that are told all, {kept[1]}, and of the {len(options)} "
        f"decoders of x-transformers, {kept[2]}. A law about what a library never promised (packed rows in an encoder, "
        "an empty batch, a cache for an encoder) is not applicable, with the reason."
    )


def with_found(page: str, lines: Lines) -> str:
    """The page with these lines between its two marks."""
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    return "\n".join([before + MARKS[0], *lines, MARKS[1] + after])


def reasons(reports: list[Report]) -> Lines:
    """Why laws were not applicable, and to how many subjects each reason was given."""
    found: dict[tuple[str, str], int] = {}
    for report in reports:
        for f in report.findings:
            if f.verdict == "not applicable":
                found[f.law, f.why] = found.get((f.law, f.why), 0) + 1
    return [f"- {law}, {count} ×: {why}" for (law, why), count in found.items()]


def result(reports: list[Report], measured: Measured, seconds: float) -> Lines:
    versions = ", ".join(f"{name} {version}" for name, version in LIBRARIES.items())
    return [
        "# Found in others",
        "",
        f"`python benchmarks/findings.py`, {platform.machine()}, {torch.get_num_threads()} threads, {versions}; "
        f"{seconds:.0f} s. Tiny random models; differences are of answers of order 1, in float32.",
        *("", "## What was found, each measured by its reproduction", "", *reproduced(measured, RESULTS)),
        *("", "## Laws that are broken", "", *broken(reports, measured)),
        *("", "## All subjects, all laws", "", "Worst errors; ✗ is broken, – is not applicable.", "", *laws(reports)),
        *("", "## Why laws were not applicable", "", *reasons(reports)),
        *("", "## Options of x-transformers that are not tried alone", ""),
        *(f"- {why}: {', '.join(f'`{name}`' for name in names.split())}" for why, names in LEFT_OUT.items()),
    ]


def asked(names: list[str]) -> tuple[list[Report], Measured]:
    """Reports of these subjects, and these reproductions run; all, for no names."""
    reports = []
    for name, make in SUBJECTS.items():
        if not names or name.startswith(tuple(names)):
            torch.manual_seed(0)
            reports.append(check(make(), only=QUICK))
            print(reports[-1], flush=True)
    return reports, {name: known.measured() for name, known in FINDINGS.items() if not names or name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := [n for n in names if n not in FINDINGS and not any(s.startswith(n) for s in SUBJECTS)]:
        parser.error(f"no subject begins with {unknown[0]!r}, and no reproduction is called so")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    reports, measured = asked(names)
    if not names:
        write_text(RESULTS, "\n".join(result(reports, measured, time.perf_counter() - begin)) + "\n")
        lines = [*reproduced(measured, PAGE), "", lawful(reports)]
        write_text(PAGE, with_found(PAGE.read_text(encoding="utf-8"), lines))
    wrong = faults(reports, measured, whole=not names)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
