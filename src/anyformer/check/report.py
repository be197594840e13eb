"""Report: what was found, law by law; as data, and as a table for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

__all__ = ["Finding", "Report", "Verdict"]

Verdict = Literal["pass", "fail", "not applicable"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One law: its verdict, the worst `error` beside the `limit`, both in `unit`, and on how many inputs (`trials`).

    `why` says why a law does not apply, or what raised; `smallest` is the smallest input that breaks it. Of many
    models, `models` is how many the law applies to, and the rest is about the worst one, named in `where`.
    """

    law: str
    title: str
    means: str
    measured: str
    verdict: Verdict
    unit: str = ""
    error: float | None = None
    limit: float | None = None
    trials: int = 0
    models: int = 1
    dtype: str = ""
    why: str = ""
    where: str = ""
    smallest: str = ""
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; above 1 it is a fault."""
        if self.error is None or self.limit is None:
            return 0.0
        return self.error / self.limit if self.limit else (math.inf if self.error else 0.0)

    def details(self) -> list[str]:
        """What to know of a law that is broken: in which model, by which input, and what raised."""
        return [told for told in (self.where, self.smallest, self.why) if told and self.verdict == "fail"]

    def figure(self) -> str:
        """The error for people: "0.4 of 4096 eps"."""
        if self.error is None or self.limit is None:
            return ""
        return f"{self.error:.3g} of {self.limit:.4g} {self.unit}".strip()


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings about one subject, in the order of the laws; `stopped` if there would have been more to try."""

    subject: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def lawful(self) -> bool:
        """Whether no law was broken, some were kept, and all was tried."""
        return not self.broken and not self.stopped and any(finding.verdict == "pass" for finding in self.findings)

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    def __getitem__(self, law: str) -> Finding:
        known = {finding.law: finding for finding in self.findings}
        if law not in known:
            raise KeyError(f"{law!r} was not judged; known: {', '.join(known)}")
        return known[law]

    def __str__(self) -> str:
        """One line, and one more for each law that is broken."""
        lines = [self.summary()]
        for finding in self.broken:
            said = "; ".join([finding.figure(), *finding.details()])
            lines.append(f"{finding.law}: {finding.title}: broken: {said}")
        return "\n".join(lines)

    def summary(self) -> str:
        counts = {verdict: sum(f.verdict == verdict for f in self.findings) for verdict in ("pass", "fail")}
        rest = len(self.findings) - sum(counts.values())
        seconds = sum(finding.seconds for finding in self.findings)
        kept = f"{counts['pass']} laws kept, {counts['fail']} broken, {rest} not applicable"
        return f"{self.subject}: {kept}; {seconds:.1f} s"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that JSON has no word for become text."""
        findings = [{key: _plain(value) for key, value in dataclasses.asdict(f).items()} for f in self.findings]
        told = {"subject": self.subject, "lawful": self.lawful, "stopped": self.stopped, "notes": [*self.notes]}
        return {**told, "findings": findings}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> Table:
        """For a terminal: verdict, law, figure, and what to know."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        many = any(finding.where for finding in self.findings)
        for name in ("", "law", "worst error", "inputs", *(["models"] if many else []), "time"):
            number = name in ("inputs", "models", "time")
            table.add_column(name, no_wrap=number or not name, justify="right" if number else "left")
        for finding in self.findings:
            mark, style = MARKS[finding.verdict]
            told = finding.why if finding.verdict == "not applicable" else finding.figure()
            counts = [str(finding.trials or ""), *([str(finding.models or "")] if many else [])]
            table.add_row(mark, finding.title, Text(told), *counts, f"{finding.seconds:.1f} s", style=style)
            for more in finding.details():
                table.add_row("", "", Text(more), style="red")
        return table


MARKS = {"pass": ("pass", "green"), "fail": ("FAIL", "bold red"), "not applicable": ("–", "dim")}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
