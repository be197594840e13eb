"""Scores of texts: against full passes, one pass a token, closed forms, and `transformers`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import make
from torch import Tensor

import anyformer as af
from anyformer.cli.scoring import score as command
from anyformer.tasks.scoring import _windows, bits_per_byte, front, loglikelihood, overlap, score
from anyformer.text.base import Frame
from anyformer.text.tokenizer import ByteTokenizer

CLOSE = {"atol": 1e-10, "rtol": 0}
TEXT = "To be — or not to be: 这是问题。👍\n\tÆ\u2028ons\r\n"

KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "window": {"decoder.*.mixer.pattern": af.Causal() & af.Window(3)},
    "sinks": {"decoder.*.mixer.pattern": af.Causal() & (af.Window(3) | af.Prefix(2))},
    "dynamic_ntk": {"decoder.*.mixer.position": af.Rotary(frequencies=af.DynamicNTK(2.0, original_len=8))},
    "alibi": {"decoder.*.mixer.position": af.Alibi()},
    "learned": {"decoder.*.mixer.position": None, "embed.position": af.Learned(40)},
    "experts": {"decoder.*.ffn": af.MoE(af.GatedFFN(8), num_experts=4)},
    "linear": {"decoder.*.mixer": af.LinearAttention(2)},
    "capped": {"head": af.LMHead(softcap=2.0, bias=True)},
}


def small(vocab_size: int = 23, **changes: Any) -> af.Transformer:
    block = af.Block.pre(af.Attention(2, position=af.Rotary()), af.GatedFFN(24), norm=af.RMSNorm())
    spec = af.TransformerSpec(16, vocab_size, decoder=af.cycle([block], 2), final_norm=af.RMSNorm())
    for path, value in changes.items():
        spec = spec.replace(path, value)
    return spec.build(dtype=torch.float64).eval()


def uniform(vocab_size: int = 257) -> af.Transformer:
    model = small(vocab_size)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def random_ids(count: int, vocab_size: int = 23) -> list[int]:
    return torch.randint(vocab_size, (count,)).tolist()


@torch.inference_mode()
def full_pass(model: af.Transformer, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of ids[1:], from all logits at once."""
    logits = model(torch.tensor([ids[:-1]]))[0].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def context_of(token: int, count: int, window: int, stride: int) -> int:
    """Where the window begins in which the token behind `token` inputs is scored, of `count` inputs in all."""
    moves = max(math.ceil((token - window) / stride), 0)
    return max(min(window + moves * stride, count) - window, 0)


def one_pass_a_token(model: af.Transformer, ids: Sequence[int], window: int, stride: int) -> Tensor:
    """Each token after exactly what it may see, alone."""
    begins = [context_of(token, len(ids) - 1, window, stride) for token in range(1, len(ids))]
    return torch.stack([full_pass(model, ids[begin : t + 2])[-1] for t, begin in enumerate(begins)])


def test_a_uniform_model_finds_every_token_as_likely_and_bytes_are_counted() -> None:
    tokenizer, model = ByteTokenizer(), uniform()
    ids = tokenizer.encode(TEXT)
    found = score(model, ids, front=front(tokenizer))
    assert found.tokens == len(TEXT.encode()) > len(TEXT)
    assert found.perplexity == pytest.approx(257)
    assert found.mean == pytest.approx(-math.log(257))
    assert found.total == pytest.approx(-len(ids) * math.log(257))
    assert bits_per_byte(found, TEXT) == pytest.approx(math.log2(257))
    assert found.ids.tolist() == ids


def test_bits_per_byte_of_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 0 bytes"):
        bits_per_byte(score(uniform(), []), "")


@pytest.mark.parametrize("kind", KINDS)
def test_reading_by_a_cache_equals_one_full_pass(kind: str) -> None:
    model, ids = small(**KINDS[kind]), random_ids(31)
    whole = full_pass(model, ids)
    for chunk in (1, 4, 29, 30, 512):
        found = score(model, ids, chunk=chunk)
        torch.testing.assert_close(found.logprobs, whole, **CLOSE)
        assert found.ids.tolist() == ids[1:]


@pytest.mark.parametrize("window", [1, 2, 5, 10, 11])
def test_windows_equal_one_pass_a_token_with_what_it_may_see(window: int) -> None:
    """By what is asked, and by the model's own limit; whatever the stride, and however a window is read."""
    limited = small(**{"decoder.*.mixer.position": None, "embed.position": af.Learned(window)})
    free, ids = small(**KINDS["alibi"]), random_ids(12)
    for stride in range(1, window + 1):
        for model, asked in ((limited, None), (free, window)):
            right = one_pass_a_token(model, ids, window, stride)
            for chunk in (2, 512):
                found = score(model, ids, window=asked, stride=stride, chunk=chunk)
                torch.testing.assert_close(found.logprobs, right, **CLOSE)


def test_every_token_is_scored_once_with_the_context_that_is_promised() -> None:
    for window in range(1, 9):
        for stride in range(1, window + 1):
            for count in range(20):
                for first in range(4):
                    scored: list[int] = []
                    for begin, skip, end in _windows(first, count, window, stride):
                        assert end - begin == min(window, count)
                        assert skip - begin >= window - stride or begin == 0
                        scored += range(skip, end)
                    assert scored == list(range(first, count))


def test_half_a_window_is_the_stride_if_none_is_given() -> None:
    model, ids = small(**{"decoder.*.mixer.position": None, "embed.position": af.Learned(7)}), random_ids(23)
    torch.testing.assert_close(score(model, ids).logprobs, one_pass_a_token(model, ids, 7, 3), **CLOSE)
    assert overlap(model) == (7, 3)
    assert overlap(model, 1) == (1, 1)
    assert overlap(small()) == (None, None)


def test_a_front_is_read_and_not_scored_however_long() -> None:
    model, ids = small(), random_ids(14)
    for cut in (1, 2, 9):
        found = score(model, ids[cut:], front=ids[:cut], window=5, stride=2)
        assert found.tokens == len(ids) - cut
        assert found.ids.tolist() == ids[cut:]
    torch.testing.assert_close(score(model, ids[9:], front=ids[:9]).logprobs, full_pass(model, ids)[8:], **CLOSE)
    late = score(model, ids[9:], front=ids[:9], window=4, stride=1)
    torch.testing.assert_close(late.logprobs, one_pass_a_token(model, ids, 4, 1)[8:], **CLOSE)


def test_empty_and_one_token_texts() -> None:
    model = small()
    for ids, before in (([], ()), ([], [3]), ([4], ())):
        found = score(model, ids, front=before)
        assert (found.tokens, found.total) == (0, 0.0)
        assert math.isnan(found.perplexity)
        assert math.isnan(found.mean)
    found = score(model, torch.tensor([4]), front=[3])
    assert found.total == pytest.approx(full_pass(model, [3, 4]).item())


def test_low_precision_logits_are_summed_in_float32() -> None:
    model = small().bfloat16()
    likely = [math.exp(score(model, [token], front=[1, 2]).total) for token in range(23)]
    assert sum(likely) == pytest.approx(1.0, abs=1e-5)


def test_logits_are_made_a_piece_at_a_time_and_only_of_what_is_scored() -> None:
    model, ids, seen, told = small(), random_ids(1301), [], []
    model.head.register_forward_hook(lambda module, given, result: seen.append(result.shape[0]))
    score(model, ids, chunk=1000, tell=told.append)
    assert (max(seen), sum(seen)) == (512, 1300)
    assert told == [1000, 1300]
    seen.clear()
    score(model, ids, front=ids[:700], window=600, stride=100)
    assert sum(seen) == 1301


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2", "gemma2", "qwen3"])
def test_the_mean_is_the_loss_of_transformers(name: str, tmp_path: Path) -> None:
    case = make(name, tmp_path)
    ids = torch.randint(5, 99, (1, 60))
    with torch.inference_mode():
        loss = case.theirs(input_ids=ids, labels=ids).loss.item()
    assert score(case.ours, ids[0], chunk=25).mean == pytest.approx(-loss, rel=1e-5)


def test_a_long_text_through_64_positions_is_what_transformers_says_window_by_window(tmp_path: Path) -> None:
    case, ids = make("gpt2", tmp_path), torch.randint(5, 99, (150,))
    total, done = 0.0, 0
    with torch.inference_mode():
        for end in (64, 84, 104, 124, 144, 149):
            inputs = ids[end - 64 : end]
            logs = case.theirs(input_ids=inputs[None]).logits[0].double().log_softmax(-1)
            total += sum(float(logs[t - end, ids[t + 1]]) for t in range(done, end))
            done = end
    found = score(case.ours, ids, stride=20)
    assert found.tokens == 149
    assert found.total == pytest.approx(total, rel=1e-6)


PAIRS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10]), ([1, 2, 3, 4, 5, 6], [7]), ([2], []), ([6, 2], [7, 8, 9])]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_each_continuation_is_as_likely_as_alone(batch_size: int) -> None:
    model, told = small(), []
    found = loglikelihood(model, PAIRS, batch_size=batch_size, tell=told.append)
    for (context, ids), (total, _) in zip(PAIRS, found, strict=True):
        alone = full_pass(model, [*context, *ids])[len(context) - 1 :].sum().item() if ids else 0.0
        assert total == pytest.approx(alone, abs=1e-10)
        assert total == pytest.approx(score(model, ids, front=context).total, abs=1e-10)
    assert told[-1] == len(PAIRS)
    assert found[3].greedy
    assert loglikelihood(model, []) == []


def test_a_greedy_continuation_is_known_and_one_other_token_is_enough() -> None:
    model, prompts = small(), [[3, 1, 4], [1, 5]]
    made = af.generate(model, prompts, max_new_tokens=5).ids
    pairs = list(zip(prompts, made, strict=True))
    others = [(context, [*ids[:-1], (ids[-1] + 1) % 23]) for context, ids in pairs]
    assert [pair.greedy for pair in loglikelihood(model, pairs + others)] == [True, True, False, False]


def test_an_encoder_decoder_reads_the_context_as_its_source(tmp_path: Path) -> None:
    case = make("t5", tmp_path)
    pairs = [([7, 8, 9, 1], [20, 21]), ([5, 1], [30, 31, 32])]
    found = loglikelihood(case.ours, pairs)
    for (context, ids), (total, _) in zip(pairs, found, strict=True):
        with torch.inference_mode():
            loss = case.theirs(input_ids=torch.tensor([context]), labels=torch.tensor([ids])).loss.item()
        assert total == pytest.approx(-loss * len(ids), rel=1e-5)
    with pytest.raises(ValueError, match="after a source only: use `loglikelihood`"):
        score(case.ours, [1, 2])


def test_a_prefix_whose_tokens_see_one_another_has_no_likelihood() -> None:
    model = small(**{"decoder.*.mixer.pattern": af.Causal() | af.Prefix(3)})
    with pytest.raises(
        ValueError, match="the first 3 tokens see one another, so a text of which 1 is given has no like"
    ):
        score(model, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="of which 2 is given"):
        loglikelihood(model, [([1, 2, 3], [4]), ([1, 2], [3])])
    (found,) = loglikelihood(model, [([1, 2, 3], [4, 5])])
    assert found.total == pytest.approx(full_pass(model, [1, 2, 3, 4, 5])[2:].sum().item())


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"window": 0}, "`window` must be at least 1, but is 0"),
        ({"window": 4, "stride": 0}, "`stride` must be at least 1, but is 0"),
        ({"window": 4, "stride": 5}, "`stride` must be at most the window's 4 tokens, but is 5"),
        ({"window": 9}, "`window` must be at most the model's 8 positions, but is 9"),
        ({"chunk": 0}, "`chunk` must be at least 1, but is 0"),
    ],
)
def test_windows_out_of_bounds_are_refused(choices: dict[str, int], said: str) -> None:
    model = small(**{"decoder.*.mixer.position": None, "embed.position": af.Learned(8)})
    with pytest.raises(ValueError, match=said):
        score(model, [1, 2, 3], **choices)


def test_what_gives_no_likelihood_is_refused() -> None:
    with pytest.raises(ValueError, match="a `stride` of 2 moves no window, as the model has no limit"):
        score(small(), [1, 2], stride=2)
    with pytest.raises(ValueError, match="a likelihood needs a head over the vocabulary, but the model's is None"):
        score(small(head=None), [1, 2])
    encoder = af.preset("bert-mini").replace("encoder.num_layers", 1).build()
    for ask in (lambda: score(encoder, [1, 2]), lambda: loglikelihood(encoder, [([1], [2])])):
        with pytest.raises(ValueError, match="an encoder alone predicts no next token"):
            ask()
    with pytest.raises(ValueError, match="context 1 is empty: begin it with a token"):
        loglikelihood(small(), [([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, but is 0"):
        loglikelihood(small(), [], batch_size=0)


def test_what_a_text_is_read_after() -> None:
    tokenizer = ByteTokenizer()
    assert front(tokenizer) == [256]
    tokenizer.begin_id = 9
    assert front(tokenizer) == [9]
    tokenizer.frame = Frame(((7, 0), ("A", 0), (8, 0)))
    assert front(tokenizer) == [7]
    tokenizer.begin_id, tokenizer.end_ids, tokenizer.frame = None, (), Frame()
    assert front(tokenizer) == []


PLAIN = {"stride": None, "window": None, "dtype": None, "bits": None, "as_json": False, "per_token": None}


def saved(folder: Path, text: str = TEXT, **changes: Any) -> tuple[str, Path, af.Transformer]:
    model = small(257, **changes)
    af.save(model, folder / "run", ByteTokenizer())
    (folder / "text.txt").write_bytes(text.encode())
    return str(folder / "run"), folder / "text.txt", model


def test_the_command_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file, model = saved(tmp_path)
    right = score(model, ByteTokenizer().encode(TEXT), front=[256], window=8, stride=3)
    command(source, file, **PLAIN | {"window": 8, "stride": 3, "dtype": "float64"})
    said = capsys.readouterr().out
    size = len(TEXT.encode())
    assert said.startswith(f"{size} tokens, {size} bytes; windows of 8 tokens, 3 apart\n")
    assert f"perplexity      {right.perplexity:,.3f}\n" in said
    assert f"bits per byte   {bits_per_byte(right, TEXT):.4f}\n" in said
    command(source, file, **PLAIN)
    assert "each token sees all before it" in capsys.readouterr().out


def test_the_command_writes_json_and_a_line_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file, model = saved(tmp_path)
    right = score(model, ByteTokenizer().encode(TEXT), front=[256])
    command(source, file, **PLAIN | {"dtype": "float64", "as_json": True, "per_token": tmp_path / "new" / "tokens.tsv"})
    facts = json.loads(capsys.readouterr().out)
    assert facts["log_likelihood"] == pytest.approx(right.total)
    assert (facts["tokens"], facts["bytes"]) == (len(TEXT.encode()),) * 2
    assert (facts["window"], facts["stride"]) == (None, None)
    assert {"perplexity", "bits_per_byte", "tokens_per_second", "seconds"} <= set(facts)
    head, *lines = (tmp_path / "new" / "tokens.tsv").read_bytes().decode().removesuffix("\n").split("\n")
    rows = [line.split("\t") for line in lines]
    assert head == "id\ttext\tlogprob"
    assert [int(token) for token, _, _ in rows] == list(TEXT.encode())
    assert "".join(json.loads(text) for _, text, _ in rows) == TEXT
    assert [float(logprob) for _, _, logprob in rows] == pytest.approx(right.logprobs.tolist())


def test_the_command_tells_what_a_reader_must_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file, model = saved(tmp_path)
    tokenizer = ByteTokenizer()
    tokenizer.end_ids = ()
    model.origin = {"max_position_embeddings": 5}
    monkeypatch.setattr("anyformer.cli.scoring.ready", lambda *given: (model, tokenizer))
    command(source, file, **PLAIN | {"per_token": tmp_path / "tokens.tsv"})
    said = capsys.readouterr()
    assert "note: the first token is not scored: the tokenizer has none that begins or ends a text" in said.err
    assert f"note: the model was made for 5 tokens, but the text has {len(TEXT.encode())}: see --window" in said.err
    assert "note" not in said.out
    assert (tmp_path / "tokens.tsv").read_text(encoding="utf-8").split("\n")[1] == '84\t"T"\t'
    command(source, file, **PLAIN | {"window": 5})
    assert "made for" not in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_score(tmp_path: Path) -> None:
    source, file, model = saved(tmp_path)
    with pytest.raises(ValueError, match="is no file: name one that holds text"):
        command(source, tmp_path, **PLAIN)
    (tmp_path / "bad.txt").write_bytes(b"good \xff")
    with pytest.raises(ValueError, match="is not UTF-8 \\(byte 0xff at offset 5\\)"):
        command(source, tmp_path / "bad.txt", **PLAIN)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        command(source, tmp_path / "empty.txt", **PLAIN)
    af.save(model, tmp_path / "bare")
    with pytest.raises(ValueError, match="has no tokenizer, so text cannot be read"):
        command(str(tmp_path / "bare"), file, **PLAIN)


HARNESS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
"""
CHOOSE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
ROLL = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
"""
WRITE = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def a_task(folder: Path, name: str, how: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.yaml").write_text(HARNESS.format(name=name, folder=folder) + how, encoding="utf-8")
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.filterwarnings("ignore")  # the harness and what it imports warn of themselves
def test_the_harness_asks_and_gets_what_full_passes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks in local files: choices, rolling likelihood over more than the positions, and writing to a stop."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed", exc_type=ImportError)
    from lm_eval.tasks import TaskManager

    from anyformer.tasks.lm_eval import HarnessLM

    tokenizer = ByteTokenizer()
    model = small(257, **{"decoder.*.mixer.position": None, "embed.position": af.Learned(24)})
    questions = [("one two", [" three", " four!"]), ("红", ["色", "绿", " blue"]), ("", ["a", "b"])]
    rows = [{"question": q, "choices": c, "answer": len(c) - 1} for q, c in questions]
    a_task(tmp_path, "choose", CHOOSE, rows)
    texts = ["Short text.", "A text of many more bytes than there are positions: 注意力就是你所需要的。"]
    a_task(tmp_path, "roll", ROLL, [{"text": text} for text in texts])
    asked = ["ab", "cde", "a context longer than all the positions"]
    a_task(tmp_path, "write", WRITE, [{"text": text, "answer": "?"} for text in asked])

    results = lm_eval.simple_evaluate(
        HarnessLM(model, tokenizer, batch_size=2),
        tasks=["choose", "roll", "write"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )

    for sample, (question, choices) in zip(results["samples"]["choose"], questions, strict=True):
        before = tokenizer.encode(question) or [256]
        for (answer,), choice in zip(sample["resps"], choices, strict=True):
            alone = full_pass(model, [*before, *tokenizer.encode(choice)])[len(before) - 1 :].sum().item()
            assert float(answer[0]) == pytest.approx(alone, abs=1e-6)
    nats = sum(one_pass_a_token(model, [256, *text.encode()], 24, 24).sum().item() for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert results["results"]["roll"]["bits_per_byte,none"] == pytest.approx(-nats / math.log(2) / size)
    for sample, text in zip(results["samples"]["write"], asked, strict=True):
        prompt = tokenizer.encode(text)[-18:]
        made = af.generate(model, [prompt], max_new_tokens=6, end_ids=[256]).ids[0]
        assert sample["resps"][0][0] == tokenizer.decode(made).split("\n")[0]


@pytest.mark.filterwarnings("ignore")
def test_the_harness_is_told_what_is_not_known_and_what_stops_a_text() -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed", exc_type=ImportError)
    from lm_eval.api.instance import Instance

    from anyformer.tasks.lm_eval import HarnessLM

    tokenizer, model = ByteTokenizer(), small(257)
    harness = HarnessLM(model, tokenizer, batch_size=2)

    def write(*asked: tuple[str, dict[str, Any]]) -> list[str]:
        made = [Instance("generate_until", {}, given, i) for i, given in enumerate(asked)]
        return harness.generate_until(made, disable_tqdm=True)

    plain = {"max_gen_toks": 9, "until": []}
    whole = write(("abc", plain), ("d", plain), ("", plain))
    stop = whole[0][3:5]
    again = write(("abc", plain | {"until": [stop]}), ("d", plain), ("", plain | {"until": "\n\n"}), ("abc", plain))
    assert again == [whole[0].split(stop)[0], whole[1], whole[2], whole[0]]
    drawn = {"do_sample": True, "seed": 1, "top_k": 3, "num_beams": 1}
    assert write(("abc", plain | drawn)) == write(("abc", plain | drawn)) != whole[:1]
    with pytest.raises(ValueError, match="generation_kwargs asks for num_beams, typical_p, which is not known"):
        write(("abc", {"num_beams": 2, "typical_p": 0.5}))
