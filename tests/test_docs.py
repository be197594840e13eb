"""Documents that can run, run: Python snippets of README and docs, and the commands that the README names."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner

import anyformer as af
from anyformer.cli.commands import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_run(page: Path) -> None:
    names: dict[str, object] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(snippet, page.name, "exec"), names)


def test_the_snippet_of_the_readme_builds_what_it_says() -> None:
    names: dict[str, object] = {}
    first = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[0]
    exec(first, names)
    spec = names["spec"]
    assert len(spec.decoder) == 26  # type: ignore[attr-defined]
    assert [block.mixer.pattern.reach() for block in spec.decoder[:7]] == [1024] * 5 + [None, 1024]  # type: ignore[attr-defined]


def commands() -> list[str]:
    lines = (line for page in PAGES[:2] for line in page.read_text(encoding="utf-8").splitlines())
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith("    anyformer ")})


def published() -> None:
    """MODEL and MODEL.gguf: a tiny model as others publish it, with its tokenizer."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<end>"])
    backend.train_from_iterator(["Once upon a time there was a whale. " * 9], trainer)
    block = af.Block.pre(af.Attention(2, position=af.Rotary()), af.GatedFFN(64), norm=af.RMSNorm())
    spec = af.TransformerSpec(
        64, backend.get_vocab_size(), embed=af.Embed(tied=False), decoder=(block,), final_norm=af.RMSNorm()
    )
    af.save(spec.build(), "MODEL")
    backend.save("MODEL/tokenizer.json")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    Path("MODEL", "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    af.convert("MODEL", "MODEL.gguf", "gguf")


def test_commands_of_the_readme_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command as written, with fewer steps, in a folder that has a book."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely.\n" * 80)
    published()
    order = ["--yaml", "train gpt-mini", "train my-model", "generate", "show", "convert", "inspect", "anyformer"]
    known = sorted(commands(), key=lambda line: next(i for i, word in enumerate(order) if word in line))
    assert len(known) >= 6
    for line in known:
        words, _, target = line.removeprefix("anyformer ").partition(" > ")
        arguments = shlex.split(words)
        if arguments[0] == "train":
            arguments += ["--steps", "2", "--evaluations", "1", "--length", "16", "--vocab", "300"]
            arguments += [] if "--data" in arguments else ["--data", "book.txt"]
        if arguments[0] == "check":  # not those that compile: the tests check shapes
            arguments += ["--only", "future,padding,cache,saving,dead"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, (line, result.output)
        if target:
            Path(target).write_text(result.output, encoding="utf-8")


def test_the_readme_is_short_and_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    assert lines.index("```python") < 15


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|docs|benchmarks)/[\w/.]+\.\w+|[A-Z]\w+(?:\.zh)?\.md)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^      (\w+(?:\.py|/))", text, re.M):
        assert (ROOT / "src" / "anyformer" / name).exists(), name


def test_tests_that_the_docs_name_exist() -> None:
    for page in PAGES:
        for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name} names {file}::{name}"


def test_the_lines_that_a_family_is_said_to_take() -> None:
    folder = ROOT / "src" / "anyformer" / "families"
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py")}
    table = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    said = {name: int(count) for name, count in re.findall(r"`families/(\w+)\.py` \| (\d+) \|", table)}
    assert len(said) >= 8
    assert said == {name: lines[name] for name in said}
    rules = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"Gemma 2 took {lines['gemma2']} lines in one file, Qwen 3 took {lines['qwen3']}" in rules
