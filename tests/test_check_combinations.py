"""The table of combinations: what it lists is legal, what it leaves out is refused, and a cover holds every pair."""

from __future__ import annotations

import importlib
import itertools
import random
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.check.combinations import AXES, CORE, Row, Table
from anyformer.check.document import document, with_laws
from anyformer.check.law import Law
from anyformer.check.laws import LAWS

TABLE = Table()
ROOT = Path(__file__).parent.parent
FILES = ("attention", "cached", "seen", "training", "whole")


@pytest.fixture(scope="module")
def cover() -> list[Row]:
    return TABLE.cover()


def random_row(draw: random.Random, held: dict[int, str]) -> Row:
    return tuple(held.get(at) or draw.choice(list(names)) for at, names in enumerate(AXES.values()))


def test_a_cover_holds_every_pair_that_is_legal(cover: list[Row]) -> None:
    """Of a pair that stands in no row of it, no row out of many that hold it is legal."""
    draw, held = random.Random(1), {pair for row in cover for pair in itertools.combinations(enumerate(row), 2)}
    every = {
        ((a, x), (b, y))
        for (a, one), (b, two) in itertools.combinations(enumerate(AXES.values()), 2)
        for x in one
        for y in two
    }
    left_out = sorted(every - held)
    assert 0 < len(left_out) < len(held)
    for pair in left_out:
        assert all(TABLE.refusal(random_row(draw, dict(pair))) is not None for _ in range(60)), pair


def test_rows_of_a_cover_are_models(cover: list[Row]) -> None:
    for row in cover[::20]:
        assert sum(p.numel() for p in TABLE.spec(row).build().parameters()) < 20_000


def test_every_part_that_is_public_stands_in_the_table() -> None:
    """A new part that nobody put into the table would never be checked."""
    rows = [TABLE.spec(row).to_json() for row in TABLE.cover(seed=1)]
    slots = [af.Mixer, af.Pattern, af.Position, af.FeedForward, af.Norm, af.Frequencies]
    own = {kind for slot in slots for kind, part in slot.choices().items() if part.__module__.startswith("anyformer.")}
    missing = {kind for kind in own if not any(f'"kind": "{kind}"' in row for row in rows)}
    assert missing == set()


def test_the_full_table_crosses_what_meets_in_attention() -> None:
    rows = list(TABLE.rows())
    assert len({row[: len(CORE)] for row in rows}) == len(rows) == len(TABLE.cores)
    tried = list(itertools.product(*(AXES[axis] for axis in CORE)))
    rest = rows[0][len(CORE) :]
    draw = random.Random(0)
    for core in draw.sample(tried, 200):
        assert (core in TABLE.cores) == (TABLE.refusal((*core, *("lm" if n == "pooled" else n for n in rest))) is None)


def test_the_pages_are_up_to_date() -> None:
    combinations, laws = ((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("combinations", "check"))
    assert combinations == document(), "run `make docs`"
    assert laws == with_laws(laws), "run `make docs`"


def test_a_part_of_ones_own_takes_an_axis() -> None:
    table = Table(pattern={"mine": af.Causal() & af.Window(2)})
    assert {row[2] for row in table.rows()} == {"mine"}
    assert table.refusal(("encoder", "gru", "mine", *next(iter(TABLE.rows()))[3:])) is not None


def test_laws_have_names_meanings_and_limits() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS) >= 20
    for law in LAWS:
        assert isinstance(law, Law)
        assert law.means.endswith(".")
        assert law.measured.endswith(".")
        assert all(law.limit(dtype) >= 0 for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16))


def test_every_law_finds_planted_faults() -> None:
    """Those of `compiled` are planted in a process of its own."""
    modules = (importlib.import_module(f"test_check_{name}") for name in FILES)
    laws = [fault.law for module in modules for fault in module.FAULTS.values()]
    assert set(laws) == {law.name for law in LAWS} - {"compiled"}
    assert len(laws) > 80
