"""Imports point down: the table in docs/architecture.md, held against the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyformer"


def table() -> tuple[dict[str, int], set[int]]:
    """Level of each file or folder, and the levels whose members may import one another."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*?) \|(.*?)\|$", text.split("layers: begin")[1].split("layers: end")[0], re.M)
    levels = {name: int(level) for level, names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    return levels, {int(level) for level, _, own in rows if own.strip() == "all"}


LEVELS, OPEN = table()


def unit(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """What of this package a file imports, as dotted names without the package's own, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "anyformer":
            inner = (node.module or "").split(".")[1:]
            names += [_module([*inner, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name.removeprefix("anyformer.") for alias in node.names if "anyformer." in alias.name]
    return names


def _module(names: list[str]) -> str:
    """The file that holds this name: the name itself is one, or what is before it."""
    path = SOURCE.joinpath(*names)
    return ".".join(names if path.is_dir() or path.with_suffix(".py").exists() else names[:-1])


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    here = unit(path)
    for name in imported(path):
        there = name.split(".")[0]
        if there == here:
            continue
        allowed = LEVELS[there] < LEVELS[here] or (LEVELS[there] == LEVELS[here] and LEVELS[here] in OPEN)
        assert allowed, f"{here} (level {LEVELS[here]}) imports {name} (level {LEVELS[there]})"


def test_the_table_names_every_file_and_nothing_else() -> None:
    assert set(LEVELS) == {unit(path) for path in FILES}


def test_files_do_not_import_in_circles() -> None:
    names = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {name: [other for other in imported(path) if other in names] for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in names:
        visit(name, ())
