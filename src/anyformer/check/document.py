"""Document: which parts go together, written from the rules and from the table that the checker tries.

python -m anyformer.check.document docs/combinations.md
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from anyformer.check.combinations import CORE, Row, Table
from anyformer.check.laws import LAWS
from anyformer.files import write_text
from anyformer.parts.legal import RULES

__all__ = ["document", "with_laws"]

MARKS = ("<!-- laws: begin -->", "<!-- laws: end -->")
STACKS = {"decoder": "D", "encoder": "E", "encoder_decoder": "B"}


TEXT = """# What goes together

Written by `make docs` from the rules in `src/anyformer/parts/legal.py`, by which a spec is refused as it is made, and
from the table in `src/anyformer/check/combinations.py`, which `anyformer check --all` tries.

## Rules

{rules}

A rule asks what a part says of itself (`position.acts`, `pattern.frontier()`, `mixer.one_way`), so it holds for your
own parts too. Kernels refuse what they cannot do by themselves: `af.explain_kernels` prints why.

## Parts

{parts}

Of {tried:,} ways to choose stack, mixer, pattern and position, {legal:,} are legal. Feed-forward, norm, wiring,
embedding and head go with any of them, but for the rules above.

## Mixer and pattern

D in a decoder, E in an encoder, B in the decoder of an encoder-decoder. `own`: the mixer has no slot for a pattern.

{patterns}

## Mixer and position

{positions}

## Why not

{reasons}
"""


def document() -> str:
    """The page, as Markdown."""
    table = Table()
    rows = list(_tried(table))
    refused = Counter(_general(table, row, reason) for row, reason in rows if reason is not None)
    legal = {row for row, reason in rows if reason is None}
    choices = ((axis, " ".join(f"`{name}`" for name in names)) for axis, names in table.axes.items())
    return TEXT.format(
        rules=_markdown(("between", "rule"), ((rule.between, rule.says) for rule in RULES)),
        parts=_markdown(("slot", "choices"), choices),
        tried=len(rows),
        legal=len(legal),
        patterns=_crossed(table, legal, "pattern"),
        positions=_crossed(table, legal, "position"),
        reasons=_markdown(("ways", "reason"), ((f"{count:,}", reason) for reason, count in refused.most_common())),
    )


def _general(table: Table, row: Row, reason: str) -> str:
    """The reason, whichever pattern and position it names."""
    pattern, position = (table.axes[axis][row[CORE.index(axis)]] for axis in ("pattern", "position"))
    if position is not None:
        reason = reason.replace(f"position {position.kind!r}", "this position")
    return reason.replace(f"pattern {pattern!r}", "this pattern").replace(f"but is {pattern!r}", "but is another")


def _tried(table: Table) -> Iterable[tuple[Row, str | None]]:
    """Every choice on the axes of the core, and why it is refused."""
    rest = tuple(next(iter(choices)) for axis, choices in table.axes.items() if axis not in CORE)
    for core in product(*(table.axes[axis] for axis in CORE)):
        yield core, table.refusal(core + rest)


def _crossed(table: Table, legal: set[Row], other: str) -> str:
    """Mixers across, the choices of `other` down; in which stacks some row of both is legal."""
    at, mixers = CORE.index(other), list(table.axes["mixer"])
    met = {(row[at], row[1], STACKS[row[0]]) for row in legal}
    cells = (
        [f"`{name}`", *("".join(s for s in STACKS.values() if (name, mixer, s) in met) or "–" for mixer in mixers)]
        for name in table.axes[other]
    )
    return _markdown(("", *(f"`{mixer}`" for mixer in mixers)), cells)


def _markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = (" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def with_laws(page: str) -> str:
    """The page with the table of laws between its two marks."""
    rows = ((f"`{law.name}`{' †' * law.once}", law.title, f"{law.means} {law.measured}") for law in LAWS)
    laws = _markdown(("name", "law", "what it means, and how it is measured"), rows)
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{laws}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_text(folder / "combinations.md", document())
    write_text(folder / "check.md", with_laws((folder / "check.md").read_text(encoding="utf-8")))
