"""`anyformer check`: what is named is found, held to the laws, and the report printed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.check.changed import small
from anyformer.check.hub import open_hub
from anyformer.check.many import check_all, check_part
from anyformer.check.page import write_page
from anyformer.check.report import Report
from anyformer.check.run import check as check_model
from anyformer.checkpoint.load import load
from anyformer.cli.console import console
from anyformer.cli.specs import has_weights, spec_of
from anyformer.model import Transformer, TransformerSpec

__all__ = ["check"]

PART = r"[A-Za-z_][\w.]+:\w+"
"""How a part of one's own is named: a drive of Windows has one letter."""
LARGE = 20_000_000
"""Parameters, from which on new weights are not made: the parts are checked in a narrow model."""


def check(
    target: str | None,
    *,
    theirs: str | None,
    everything: bool,
    cover: bool,
    only: str | None,
    as_json: bool,
    html: Path | None,
    seed: int,
    jobs: int | None,
    settings: tuple[str, ...],
) -> None:
    """Print the report of what was asked for; exit with 1 if a law is broken."""
    if (target is not None) + (theirs is not None) + everything != 1:
        raise ValueError("name one thing to check: TARGET, --transformers PATH, or --all")
    if cover and not everything:
        raise ValueError("--cover says how much of --all is tried: give both")
    if settings and (target is None or re.fullmatch(PART, target)):
        raise ValueError("--set changes a MODEL's spec: it goes with no part, --transformers or --all")
    given: dict[str, Any] = {"only": [name.strip() for name in only.split(",")] if only else [], "seed": seed}
    with _progress() as tell:
        report = _report(target, theirs, settings, cover, jobs, {**given, "tell": tell})
    if as_json:
        click.echo(report.to_json())
    else:
        console.print(report.table())
        for line in (report.summary(), *report.notes):
            console.print(line, markup=False)
    if html is not None:
        write_page(report, html)
        click.echo(f"drawn in {html}", err=True)
    if not report.lawful:
        raise click.exceptions.Exit(1)


def _report(
    target: str | None,
    theirs: str | None,
    settings: tuple[str, ...],
    cover: bool,
    jobs: int | None,
    given: dict[str, Any],
) -> Report:
    if theirs is not None:
        return check_model(open_hub(theirs), **given)
    if target is None:
        return check_all(cover=cover, jobs=jobs, **given)
    if re.fullmatch(PART, target):
        return check_part(target, jobs=jobs, **given)
    torch.manual_seed(given["seed"])
    model, notes = _model(target, settings)
    report = check_model(model, name=target, **given)
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def _model(target: str, settings: tuple[str, ...]) -> tuple[Transformer, list[str]]:
    """The model of a run or a checkpoint, as it is; of a spec, a new one, made small if it is large."""
    if has_weights(target) and not settings:
        return load(target).model, []
    spec: TransformerSpec = spec_of(target, settings)
    params = sum(cost.params for cost in spec.costs(1).values())
    notes = ["with --set its weights are new ones"] if has_weights(target) else []
    if params <= LARGE:
        return spec.build(), notes
    made = small(spec)
    notes.append(f"{target} has {params:,} parameters: checked were its parts, in a model {made.dim} wide")
    return made.build(), notes


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on the error stream, with the time left, which goes when all is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        row = bar.add_task("", total=1.0)
        yield lambda said, share: bar.update(row, description=said, completed=share)
