"""What the laws find in other libraries: tiny random models of each, and each finding again in a few lines of its own.

    python benchmarks/findings.py [NAME ...]

A NAME is the beginning of a subject's name, or a reproduction; without any, all run, and the tables are written into
benchmarks/results/findings.md. Needs transformers, and x-transformers 2.31.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import os
import platform
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from findings.repros import FINDINGS
from findings.subjects import SUBJECTS

from anyformer.check.laws import LAWS
from anyformer.check.report import Finding, Report
from anyformer.check.run import check

RESULTS = Path(__file__).parent / "results" / "findings.md"
LIBRARIES = ("torch", "transformers", "x-transformers")
QUICK = [law.name for law in LAWS if not law.once]
"""Compiling each of these models would take most of the time."""
Lines = list[str]


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


def broken(reports: list[Report]) -> Lines:
    """Each law that is broken, where, by the smallest input, and the reproductions that stand for it."""
    lines = ["| subject | law | worst error of what is allowed | smallest input | reproduction |", "|---" * 5 + "|"]
    for report in reports:
        for f in report.broken:
            at = f"{report.subject}: {f.law}"
            names = [name for name, known in FINDINGS.items() if any(fnmatch.fnmatch(at, p) for p in known.at)]
            said = (f.smallest or f.why).replace("|", "/")
            said = said if len(said) <= 200 else said[:200] + " ..."
            lines.append(f"| {report.subject} | {f.law} | {f.figure()} | {said} | {', '.join(names) or 'none'} |")
    return lines


def reproduced(measured: dict[str, float]) -> Lines:
    lines = ["| library | what breaks | by how much | smallest input | reproduction | fair word |", "|---" * 6 + "|"]
    for name, off in measured.items():
        f = FINDINGS[name]
        much = "an error, or no number" if off == float("inf") else f"{off:.2g}"
        lines.append(f"| {f.library} | {f.breaks} | {much} | {f.smallest} | `{name}` | {f.word}: {f.why} |")
    return lines


def reasons(reports: list[Report]) -> Lines:
    """Why laws were not applicable, and to how many subjects each reason was given."""
    found: dict[tuple[str, str], int] = {}
    for report in reports:
        for f in report.findings:
            if f.verdict == "not applicable":
                found[f.law, f.why] = found.get((f.law, f.why), 0) + 1
    return [f"- {law}, {count} ×: {why}" for (law, why), count in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = tuple(parser.parse_args().names)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    begin, reports = time.perf_counter(), []
    for name, make in SUBJECTS.items():
        if not names or name.startswith(names):
            reports.append(check(make(), only=QUICK))
            print(reports[-1], flush=True)
    measured = {name: FINDINGS[name].measured() for name in FINDINGS if not names or name in names}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    text = [
        "# Found in others",
        "",
        f"`python benchmarks/findings.py`, {platform.machine()}, {torch.get_num_threads()} threads, {versions}; "
        f"{time.perf_counter() - begin:.0f} s. Tiny random models; differences are of answers of order 1, in float32.",
        *("", "## What was found, each measured by its reproduction", "", *reproduced(measured)),
        *("", "## Laws that are broken", "", *broken(reports)),
        *("", "## All subjects, all laws", "", "Worst errors; ✗ is broken, – is not applicable.", "", *laws(reports)),
        *("", "## Why laws were not applicable", "", *reasons(reports)),
    ]
    if not names:
        RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
