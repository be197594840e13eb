"""Page: a report as one HTML file that needs nothing else, with the error of each law as a picture."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import jinja2

from anyformer.check.report import Finding, Report
from anyformer.files import write_text

__all__ = ["page", "write_page"]

LOW, HIGH = -6, 6
"""Powers of ten, of what is allowed, between which errors are drawn."""
WIDTH = 360


def write_page(report: Report, path: str | Path) -> None:
    """Write the page to `path`, safely."""
    write_text(path, page(report))


def page(report: Report) -> str:
    """The page as text."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    classes = {"pass": "pass", "fail": "fail", "not applicable": "none"}
    words = {"pass": "kept", "fail": "broken", "not applicable": "–"}
    return environment.from_string(template).render(report=report, bar=_bar, axis=_axis, classes=classes, words=words)


def _at(share: float) -> float:
    """Where a share of what is allowed is drawn; what is off the scale stands at its end."""
    power = LOW if share <= 0 else HIGH if math.isinf(share) else min(max(math.log10(share), LOW), HIGH)
    return (power - LOW) / (HIGH - LOW) * WIDTH


def _bar(finding: Finding) -> str:
    share, height = finding.share, 14
    colour = "var(--bad)" if share > 1 else "var(--good)"
    drawn = max(_at(share), 3)
    pale = "" if share > 0 else ' opacity="0.3"'
    shapes = (
        f'<rect x="0" y="3" width="{drawn:.1f}" height="{height - 6}" rx="2" fill="{colour}"{pale}/>'
        f'<line x1="{_at(1):.1f}" x2="{_at(1):.1f}" y1="0" y2="{height}" stroke="var(--ink)"/>'
    )
    return _drawn(shapes, height, f"{share:.2g} of what is allowed")


def _axis() -> str:
    """The powers of ten over the bars."""
    ticks = "".join(
        f'<text x="{_at(10.0**power):.1f}" y="10" text-anchor="{anchor}">{10.0**power:g}</text>'
        for power, anchor in ((LOW, "start"), (-3, "middle"), (0, "middle"), (3, "middle"), (HIGH, "end"))
    )
    return _drawn(ticks, 12, "share of what is allowed")


def _drawn(shapes: str, height: int, label: str) -> str:
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{shapes}</svg>"
    )
