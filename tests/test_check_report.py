"""Reports, and the ways to one: the command, the function, the assertion; parts of one's own; many models at once."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import anyformer as af
from anyformer.check import many
from anyformer.check.combinations import Table
from anyformer.check.many import check_all, check_part
from anyformer.check.page import page
from anyformer.check.report import Finding, Report
from anyformer.cli.commands import cli

KEPT = Finding("future", "no look", "Means.", "Measured.", "pass", "eps", 2.0, 4096.0, trials=7, dtype="float32")
BROKEN = Finding("padding", "pads", "Means.", "So.", "fail", "eps", math.inf, 4096.0, smallest="ids [1, 2] <b>")
LEFT = Finding("noise", "noise", "Means.", "So.", "not applicable", why="an encoder may look ahead")
REPORT = Report("a <b>model</b>", (KEPT, BROKEN, LEFT), ("a note",))

PARTS = """
import anyformer as af

class Leak(af.Pattern, kind="leak_of_this_test"):
    def allows(self, q, k):
        return k.pos <= q.pos + 1
    def frontier(self):
        return 0

class Even(af.Pattern, kind="even_of_this_test"):
    def allows(self, q, k):
        return (k.pos <= q.pos) & ((q.pos - k.pos) % 2 == 0)
    def frontier(self):
        return 0

class Sized(af.Norm, kind="sized_of_this_test"):
    size: int

class Shifted(type(af.KERNELS[2])):
    name = "shifted"
    def __call__(self, request):
        return super().__call__(request).roll(1, 1)

def lstm():
    return af.Recurrent("lstm")

number = 3
"""


class Later(af.Subject):
    """Adds up a token and what comes after it."""

    vocab_size = 11

    def answer(self, text: Any) -> Tensor:
        embedded: Tensor = self.module(text.ids)
        return embedded.flip(1).cumsum(1).flip(1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("parts_of_mine.py").write_text(PARTS, encoding="utf-8")
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 17 rows of a table, to be quick."""
    rows, cover = Table.rows, Table.cover
    monkeypatch.setattr(Table, "rows", lambda self, seed=0: itertools.islice(rows(self, seed), 0, None, 17))
    monkeypatch.setattr(Table, "cover", lambda self, seed=0: cover(self, seed)[::17])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments])


def test_a_report_counts_and_names_what_is_broken() -> None:
    assert not REPORT.lawful
    assert [finding.law for finding in REPORT.broken] == ["padding"]
    assert str(REPORT).splitlines() == [
        "a <b>model</b>: 1 laws kept, 1 broken, 1 not applicable; 0.0 s",
        "padding: pads: broken: inf of 4096 eps; ids [1, 2] <b>",
    ]
    assert REPORT["future"].share == 2 / 4096
    assert Report("x", (KEPT, LEFT)).lawful


def test_json_has_no_number_that_json_has_no_word_for() -> None:
    data = json.loads(REPORT.to_json(), parse_constant=pytest.fail)
    assert data["findings"][1]["error"] == "inf"
    assert data["lawful"] is False


def test_the_page_stands_alone_and_escapes() -> None:
    text = page(REPORT)
    assert "<b>" not in text
    assert "a &lt;b&gt;model" in text
    assert "http" not in text
    assert text.count("<rect") == 2
    widths = [float(part.split('"')[0]) for part in text.split('rect x="0" y="3" width="')[1:]]
    assert widths == sorted(widths)
    assert widths[1] == 360


def test_the_command_and_its_exit_codes(here: Path) -> None:
    done = run("gpt-mini", "--only", "future,evaluation", "--html", "out.html")
    assert done.exit_code == 0, done.output
    assert "2 laws kept, 0 broken" in done.output
    assert "gpt-mini" in Path("out.html").read_text(encoding="utf-8")
    data = json.loads(run("gpt-mini", "--only", "future", "--json").stdout)
    assert [finding["verdict"] for finding in data["findings"]] == ["pass"]
    for mistake in (["gpt-mini", "--only", "futur"], [], ["gpt-mini", "--all"], ["gpt-mini", "--cover"], ["no-preset"]):
        assert run(*mistake).exit_code == 2, mistake


def test_a_large_preset_is_checked_in_small() -> None:
    done = run("llama-3-8b", "--only", "shapes")
    assert done.exit_code == 0
    assert "8,030,261,248 parameters: checked were its parts" in " ".join(done.output.split())


def test_a_run_and_a_changed_spec(here: Path) -> None:
    af.save(af.preset("gpt-mini").replace("decoder.num_layers", 1).build(), "kept")
    assert run("kept", "--only", "saving").exit_code == 0
    assert run("gpt-mini", "--set", "decoder.*.mixer.position.kind=alibi", "--only", "distance").exit_code == 0


def test_a_part_of_ones_own_that_leaks_is_found(here: Path, few: None) -> None:
    done = run("parts_of_mine:Leak", "--only", "future", "--jobs", "1")
    assert done.exit_code == 1
    assert "no look at the future" in done.output
    assert "answers before it differ" in " ".join(done.output.split())


def test_a_sound_part_is_held_in_every_combination(here: Path, few: None) -> None:
    report = check_part("parts_of_mine:Even", only=["future", "patterns"], jobs=1)
    assert report.lawful
    assert report["patterns"].models > 10
    assert "combinations (all the legal ones)" in report.notes[0]


def test_a_kernel_of_ones_own(here: Path, few: None) -> None:
    report = check_part("parts_of_mine:Shifted", only=["kernels"], jobs=1)
    assert not report.lawful
    assert report["kernels"].where.count("·") == 8


def test_what_is_no_part_is_refused(here: Path, few: None) -> None:
    for name, said in {
        "nothing": "cannot be found",
        "Sized": "cannot be made without arguments",
        "number": "must be a part, or something to call for one, but is 3",
    }.items():
        done = run(f"parts_of_mine:{name}")
        assert done.exit_code == 2
        assert said in done.output
    assert run("no_such_module:Part").exit_code == 2
    assert check_part("parts_of_mine:lstm", only=["evaluation"], jobs=1).lawful


def test_laws_that_are_judged_once_are_not_for_tables() -> None:
    with pytest.raises(ValueError, match="judged once a model"):
        check_all(only=["noise"])


def test_processes_find_what_one_process_finds(few: None) -> None:
    one, two = (check_all(cover=True, only=["evaluation"], jobs=jobs) for jobs in (1, 2))
    assert one.lawful
    assert two.lawful
    assert one["evaluation"].trials == two["evaluation"].trials > 50
    assert one["evaluation"].models == two["evaluation"].models > 10


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantized_model_is_judged_as_it_is(bits: Any) -> None:
    model = af.quantize(af.preset("gpt-mini").build(), bits)
    report = af.check(model, only=["future", "padding", "cache", "kernels", "saving", "shapes", "dead", "costs"])
    assert report.lawful, str(report)
    assert [finding.law for finding in report.findings if finding.why] == ["dead", "costs"]


def test_nan_is_never_a_pass() -> None:
    class Broken(Later):
        def answer(self, text: Any) -> Tensor:
            return super().answer(text) * float("nan")

    assert not af.check(Broken(torch.nn.Embedding(11, 8)), only=["padding"]).lawful


def test_what_cannot_be_copied_is_reported() -> None:
    class Stuck(Later):
        def anew(self, dtype: torch.dtype) -> af.Subject:
            raise RuntimeError("no float64 here")

    report = af.check(Stuck(torch.nn.Embedding(11, 8)), only=["future", "evaluation"])
    assert [finding.why for finding in report.findings] == ["raised RuntimeError: no float64 here"] * 2


def test_ctrl_c_leaves_what_was_found(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = many._findings

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield from itertools.islice(whole(*arguments), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "_findings", interrupted)
    report = check_all(cover=True, only=["evaluation"], jobs=1)
    assert report["evaluation"].models == 2
    assert not report.lawful
    assert report.notes[0].startswith("stopped after 2 of 18 combinations")


def test_the_assertion_says_what_the_report_says() -> None:
    with pytest.raises(AssertionError, match=r"(?s)1 broken.*future: no look at the future: broken: .* ids \["):
        af.testing.assert_lawful(Later(torch.nn.Embedding(11, 8)), only=["future"])
    assert af.testing.assert_lawful(af.preset("gpt-mini").build(), only=["future"]).lawful


def test_a_subject_is_not_blamed_for_what_it_does_not_answer() -> None:
    report = af.check(Later(torch.nn.Embedding(11, 8)), only=["cache", "saving", "kernels"])
    assert [finding.verdict for finding in report.findings] == ["not applicable"] * 3
    assert report["cache"].why == "this kind of model has no cache that could be asked"


def test_a_check_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = af.preset("gpt-mini").build().train()
    before, drawn = {name: w.clone() for name, w in model.state_dict().items()}, torch.get_rng_state()
    af.check(model, only=["padding", "saving", "dead", "evaluation"])
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
