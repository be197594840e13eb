"""The command line, as a person uses it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import anyformer as af
from anyformer.cli.commands import cli
from anyformer.text.tokenizer import ByteTokenizer

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money.\n" * 60


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def train(folder: Path, *more: object, model: object = "gpt-mini") -> Result:
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    plan = ("--steps", 6, "--evaluations", 2, "--length", 16, "--batch-size", 2, "--vocab", 300)
    return run("train", model, "--data", folder / "book.txt", "--out", folder / "run", *plan, *more)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_come_at_once_and_without_torch(option: str) -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from anyformer.cli.commands import cli\n"
        f"try: cli(['{option}'], prog_name='anyformer')\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(f\"{time.perf_counter() - start} {'torch' in sys.modules} {'pydantic' in sys.modules}\")"
    )
    best = 9.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, torch, pydantic = done.stderr.split()
        best = min(best, float(seconds))
        assert (torch, pydantic) == ("False", "False")
        assert "anyformer" in done.stdout
    assert best < 0.5


def test_train_then_generate_then_load(tmp_path: Path) -> None:
    result = train(tmp_path)
    assert result.exit_code == 0, result.output
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written >= {"spec.yaml", "model.safetensors", "tokenizer.json", "metrics.jsonl", "loss.png", "samples.txt"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "bits_per_byte" in row] == [3, 6]
    assert "gzip" in result.output
    assert "bigram" in result.output
    one = run("generate", tmp_path / "run", "Call me", "--seed", 1, "--max-new-tokens", 8)
    two = run("generate", tmp_path / "run", "Call me", "--seed", 1, "--max-new-tokens", 8)
    assert one.exit_code == 0
    assert one.output.startswith("Call me")
    assert one.output == two.output
    model, tokenizer, spec = af.load(tmp_path / "run")
    assert model.spec == spec
    assert tokenizer is not None
    assert spec.vocab_size == tokenizer.vocab_size == 300


def test_train_on_bytes_in_chinese(tmp_path: Path) -> None:
    (tmp_path / "书.txt").write_text("注意力就是你所需要的。\n" * 99, encoding="utf-8")
    plan = ("--steps", 2, "--evaluations", 1, "--length", 16, "--vocab", "bytes", "--prompt", "注意")
    result = run("train", "gpt-mini", "--data", tmp_path / "书.txt", "--out", tmp_path / "运行", *plan)
    assert result.exit_code == 0, result.output
    assert "注意" in (tmp_path / "运行" / "samples.txt").read_text(encoding="utf-8")
    assert (tmp_path / "运行" / "loss.png").stat().st_size > 5000


def test_a_finished_run_is_never_overwritten_and_a_run_goes_on(tmp_path: Path) -> None:
    train(tmp_path)
    again = train(tmp_path)
    assert again.exit_code == 2
    assert "holds a run already: go on with --resume, or choose another --out" in again.output
    more = run("train", "gpt-mini", "--out", tmp_path / "run", "--resume", "--steps", 9, "--length", 16)
    assert more.exit_code == 2
    assert "`evaluations` must be at most `steps` (9)" in more.output
    plan = ("--steps", 9, "--evaluations", 3, "--length", 16, "--batch-size", 2)
    more = run("train", "gpt-mini", "--out", tmp_path / "run", "--resume", *plan)
    assert more.exit_code == 0, more.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "gpt-minu"], "unknown preset 'gpt-minu'; did you mean 'gpt-mini'?"),
        (["show", "gpt-mini", "--set", "decoder.*.mixer.positoin.kind=alibi"], "did you mean 'position'?"),
        (["show", "gpt-mini", "--set", "decoder.*.mixer.position.kind=alibbi"], "did you mean 'alibi'?"),
        (["show", "gpt-mini", "--set", "dim"], "--set needs PATH=VALUE, but is 'dim'"),
        (["show", "gpt-mini", "--blocks", "8"], "--blocks cuts the drawing of --mask N into tiles: give both"),
        (["show", "gpt-mini", "--mask", "513"], "--mask 513 would be more than 512 cells a side"),
        (["show", "gpt-mini", "--mask", "1026", "--blocks", "2"], "give a smaller one, or larger --blocks"),
        (["show", "gpt-mini", "--set", "dim=-1"], "dim: must be greater than 0, but is -1"),
        (["train", "gpt-mini", "--data", "no/such/file.txt", "--out", "x"], "no/such/file.txt"),
        (["train", "gpt-mini", "--vocab", "many", "--out", "x"], "--vocab must be a number or `bytes`, but is 'many'"),
        (["train", "bert-mini", "--out", "x"], "needs a decoder-only model"),
        (["generate", "nowhere", "hi"], "nowhere is no folder here, and the hub cannot be reached"),
        (["generate", "nowhere", "hi", "--top-p", "2"], "top_p must be from 0"),
        (["train", "gpt-mini", "--resume", "--out", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_mistakes_are_one_sentence_with_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert not Path("x", "spec.yaml").exists()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("spoken")
    torch.manual_seed(0)
    model = af.preset("gpt-mini").replace(vocab_size=257, dim=48).build().eval()
    af.save(model, folder / "run", ByteTokenizer())
    return folder / "run"


def test_generate_keeps_to_what_is_asked(spoken: Path, tmp_path: Path) -> None:
    assert run("generate", spoken, "a", "--choice", "yes", "--choice", "no").output in ("ayes\n", "ano\n")
    assert re.fullmatch(r"a\d{3}\n", run("generate", spoken, "a", "--regex", r"\d{3}").output)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["x", "y"]}', encoding="utf-8")
    assert run("generate", spoken, "a", "--json-schema", schema).output in ('a"x"\n', 'a"y"\n')


def test_generate_with_a_draft_says_the_same(spoken: Path) -> None:
    plain = ["generate", spoken, "abcabcabc", "--temperature", 0, "--max-new-tokens", 12]
    assert run(*plain, "--draft", "lookup").output == run(*plain).output == run(*plain, "--draft", spoken).output


def test_generate_prints_the_best_beams(spoken: Path) -> None:
    lines = run("generate", spoken, "a", "--num-beams", 3, "--max-new-tokens", 2).output.splitlines()
    scores = [float(line.split("\t")[0]) for line in lines if "\t" in line]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-beams", "2", "--top-k", "3"], "`top_k` must be left out"),
        (["--num-beams", "2", "--stop", "x"], "--num-beams goes without --stop"),
        (["--regex", "a", "--choice", "b"], "--choice, --regex and --json-schema exclude one another"),
        (["--draft", "lookup", "--regex", "a"], "a draft knows no constraint"),
    ],
)
def test_generate_drops_no_option_in_silence(spoken: Path, options: list[str], said: str) -> None:
    result = run("generate", spoken, "a", *options)
    assert result.exit_code == 2
    assert said in result.output


def test_quantize_writes_a_run_and_says_what_it_costs(spoken: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:300], encoding="utf-8")
    said = run("quantize", spoken, tmp_path / "small", "--bits", "int4", "--text", tmp_path / "text.txt")
    assert said.exit_code == 0, said.output
    assert re.search(r"perplexity [\d.]+ → [\d.]+ \([+-][\d.]+%\) on text.txt", said.output)
    assert run("generate", tmp_path / "small", "a", "--max-new-tokens", 2).exit_code == 0


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "show", "gpt-minu")
    assert isinstance(result.exception, ValueError)


def test_show_prints_the_tree_and_figures() -> None:
    result = run("show", "gpt-mini")
    assert result.exit_code == 0
    for word in ("Transformer", "layers 0-", "mixer", "ffn", "head", "FLOPs/token", "cache", "AdamW"):
        assert word in result.output, word


def test_show_yaml_is_a_spec_that_can_be_edited_and_trained(tmp_path: Path) -> None:
    text = run("show", "gpt-mini", "--set", "decoder.num_layers=2").output
    text = run("show", "gpt-mini", "--yaml").output
    assert af.TransformerSpec.from_yaml(text) == af.preset("gpt-mini")
    (tmp_path / "my-model.yaml").write_text(text.replace("kind: rotary", "kind: rotary\n        fraction: 0.5"))
    edited = tmp_path / "my-model.yaml"
    edited.write_text(text)
    assert train(tmp_path, "--set", "decoder.*.mixer.position.kind=alibi", model=edited).exit_code == 0
    assert af.load(tmp_path / "run").spec.decoder[0].mixer.position == af.Alibi()
    assert run("show", tmp_path / "run", "--json").exit_code == 0


def test_show_json_has_every_figure() -> None:
    facts = json.loads(run("show", "gpt-mini", "--json", "--length", 64, "--batch-size", 2).output)
    model = af.preset("gpt-mini").build()
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["cache_bytes"] == model.new_cache(1, 64).nbytes
    assert facts["flops_per_token_backward"] == 2 * facts["flops_per_token_forward"]


def test_show_mask_draws_each_kind_of_layer(tmp_path: Path) -> None:
    result = run("show", "t5-mini", "--mask", 3, "--png", tmp_path / "mask.png")
    assert "encoder.*.mixer: Full()\n███\n███\n███" in result.output
    assert "decoder.*.mixer: Causal()\n█··\n██·\n███" in result.output
    assert (tmp_path / "mask.png").stat().st_size > 2000


def test_show_mask_draws_heads_that_differ_and_tiles(tmp_path: Path) -> None:
    """One picture for each run of heads; tiles as the pattern tells them."""
    (tmp_path / "m.yaml").write_text(run("show", "gpt-mini", "--yaml").output, encoding="utf-8")
    here = "{kind: and, parts: [causal, {kind: %s, size: 2}]}"
    heads = (
        f"decoder.*.mixer.pattern={{kind: per_head, patterns: [{here % 'window'}, {here % 'chunk'}, causal, causal]}}"
    )
    given = ["show", tmp_path / "m.yaml", "--set", "decoder.*.mixer.num_heads=4", "--set", heads]
    said = run(*given, "--mask", 3, "--png", tmp_path / "mask.png").output
    assert "decoder.*.mixer.head 0: And(parts=(Causal(), Window(size=2)))\n█··\n██·\n·██" in said
    assert "decoder.*.mixer.head 1: And(parts=(Causal(), Chunk(size=2)))\n█··\n██·\n··█" in said
    assert "decoder.*.mixer.heads 2-3: Causal()\n█··\n██·\n███" in said
    said = run(*given, "--mask", 5, "--blocks", 2, "--png", tmp_path / "tiles.png").output
    assert "head 0: And(parts=(Causal(), Window(size=2)))\n▒··\n▒▒·\n·▒█" in said
    assert "heads 2-3: Causal()\n▒··\n█▒·\n███" in said
    assert (tmp_path / "tiles.png").stat().st_size > 2000


def test_ctrl_c_saves_a_run_that_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "run"
    plan = ["--steps", "100000", "--length", "16", "--batch-size", "2", "--vocab", "300"]
    command = [sys.executable, "-c", "from anyformer.cli.commands import main; main()", "train", "gpt-mini"]
    process = subprocess.Popen(
        [*command, "--data", str(tmp_path / "book.txt"), "--out", str(out), *plan],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size > 500) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "stopped at step" in said
    assert "--resume" in said
    assert (out / "model.safetensors").exists()
    assert (out / "state.pt").exists()
