"""Tokenizers of GGUF files: real vocabularies against llama.cpp's own golden cases, and what is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from real import folder

from anyformer.text.tokenizer import gguf_tokenizer, load_tokenizer

MODELS = ["gpt-2", "llama-bpe", "llama-spm", "bert-bge", "falcon", "qwen2", "phi-3"]
NAMES = [f"ggml-vocab-{model}.gguf{end}" for model in MODELS for end in ("", ".inp", ".out")]
SHA256 = "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac"


def files() -> Path:
    return folder("llama_cpp_python==0.3.36", "vendor/llama.cpp/models", NAMES, SHA256, source=True)


def metadata(path: Path) -> dict[str, Any]:
    gguf = pytest.importorskip("gguf")
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "." in key}


def cases(path: Path) -> list[tuple[str, list[int]]]:
    """The texts and ids of llama.cpp's tests/test-tokenizer-0, which adds no frame and reads no special tokens.

    Each text ends with the separator, so there are as many as lines of ids: 46.
    """
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    rows = [[int(token) for token in line.split()] for line in lines]
    return list(zip(texts, rows, strict=True))


class Golden:
    def __init__(self, name: str) -> None:
        path = files() / f"ggml-vocab-{name}.gguf"
        self.name, self.metadata, self.cases = name, metadata(path), cases(path)
        self.tokenizer = gguf_tokenizer(self.metadata)


@pytest.fixture(scope="module", params=MODELS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.mark.slow
def test_golden_cases(golden: Golden) -> None:
    assert len(golden.cases) == 46
    own = golden.tokenizer
    wrong = [(text, ids, own.encode(text)) for text, ids in golden.cases if own.encode(text) != ids]
    assert not wrong, f"{len(wrong)} of {len(golden.cases)}: {wrong[:3]}"


@pytest.mark.slow
def test_golden_texts_come_back(golden: Golden) -> None:
    if golden.name == "bert-bge":
        pytest.skip("BERT's vocabulary is lower case and without spaces")
    for text, ids in golden.cases:
        stream = golden.tokenizer.stream()
        assert golden.tokenizer.decode(ids) == text
        assert "".join([*map(stream.push, ids), stream.flush()]) == text


FRAMES = {  # before and after a text, as the published models have them
    "gpt-2": ([], []),
    "llama-bpe": ([128000], []),
    "llama-spm": ([1], []),
    "bert-bge": ([101], [102]),
    "falcon": ([], []),
    "qwen2": ([], []),
    "phi-3": ([1], []),
}


@pytest.mark.slow
def test_golden_frames_and_special_tokens(golden: Golden) -> None:
    own = golden.tokenizer
    before, after = FRAMES[golden.name]
    assert own.encode("Hello", frame=True) == [*before, *own.encode("Hello"), *after]
    assert own.chat_template == golden.metadata.get("tokenizer.chat_template")
    assert own.end_id == golden.metadata.get("tokenizer.ggml.eos_token_id", 102)
    for name, token in [*own.specials.items()][:20]:
        assert token not in own.encode(f"{name} a{name}b"), name
        assert own.encode(name, special=True) == [token]


@pytest.mark.slow
def test_golden_tokenizers_are_saved(golden: Golden, tmp_path: Path) -> None:
    golden.tokenizer.save(tmp_path)
    again, other = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in golden.cases:
        assert again.encode(text) == ids
        assert other(text, split_special_tokens=True)["input_ids"] == again.encode(text, frame=True)
    for name in ("vocab_size", "specials", "roles", "end_ids", "frame", "chat_template"):
        assert getattr(again, name) == getattr(golden.tokenizer, name), name


def made(kind: str, tokens: list[str], **more: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in {"model": kind, "tokens": tokens, **more}.items()}


def test_scores_are_merged_as_sentencepiece_does(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = "the other brother bothers the mother. <s>then</s> 12 + 21 = 33; this is that, and theirs.\n"
    (tmp_path / "text").write_text(text * 20, "utf-8")
    choices = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=400,
        hard_vocab_limit=False, minloglevel=3, **choices,
    )  # fmt: skip
    other = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = range(other.vocab_size())
    types = [2 if other.is_unknown(i) else 3 if other.is_control(i) else 6 if other.is_byte(i) else 1 for i in ids]
    own = gguf_tokenizer(
        made(
            "llama",
            [other.id_to_piece(i) for i in ids],
            scores=[other.get_score(i) for i in ids],
            token_type=types,
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            eot_token_id=7,
        )
    )
    rng = random.Random(0)
    for text in ["", " ", "the  other", "</s>", "<s>then</s>", "é🦙", "<unk>", "<0x41>"]:
        assert own.encode(text) == other.encode(text), text
        assert own.decode(own.encode(text)) == text
    for _ in range(300):
        text = "".join(rng.choices("tehorbmis. <>/s1\n汉", k=30))
        assert own.encode(text) == other.encode(text)
        assert own.decode(own.encode(text)) == text
    assert (own.begin_id, own.end_ids, own.unk_id) == (1, (7, 2), 0)
    assert own.encode("the", frame=True) == [1, *own.encode("the")]


@pytest.mark.parametrize(
    ("key", "value", "frame"),
    [
        (None, None, [1]),
        ("add_bos_token", False, []),
        ("add_eos_token", True, [1, 2]),
    ],
)
def test_frame_of_a_scored_vocabulary(key: str | None, value: object, frame: list[int]) -> None:
    more = {} if key is None else {key: value}
    pieces = made("llama", ["<unk>", "<s>", "</s>", "▁", "a"], scores=[0.0, 0.0, 0.0, -1.0, -2.0], **more)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    assert gguf_tokenizer({**pieces, **ids}).encode("", frame=True) == frame


def test_without_a_space_before() -> None:
    tokens = ["<unk>", "▁", "a", "▁a"]
    scores = [0.0, -1.0, -2.0, -3.0]
    with_space = gguf_tokenizer(made("llama", tokens, scores=scores, unknown_token_id=0))
    without = gguf_tokenizer(made("llama", tokens, scores=scores, unknown_token_id=0, add_space_prefix=False))
    assert (with_space.encode("a a"), without.encode("a a")) == ([3, 3], [2, 3])
    assert (with_space.decode([3, 3]), without.decode([2, 3]), without.decode([3])) == ("a a", "a a", " a")


def test_tokens_that_users_of_a_model_added_are_ordinary() -> None:
    tokens = ["a", "b", "<tool>", "<end>"]
    own = gguf_tokenizer(made("gpt2", tokens, merges=[], token_type=[1, 1, 4, 3], eos_token_id=3, pre="qwen2"))
    assert own.encode("a<tool>b<end>", special=True) == [0, 2, 1, 3]
    assert own.encode("a<tool>b") == [0, 2, 1]
    assert (own.decode([0, 2, 3]), own.specials) == ("a<tool>", {"<end>": 3})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "tokenizer.ggml.model is a NoneType, not a str"),
        (made("t5", ["a"]), "is 't5', but the kinds that are read are ['bert', 'gpt2', 'llama']"),
        (
            made("gpt2", ["a"], merges=[], pre="new"),
            "pre is 'new', but the pre-tokenizers that are known are",
        ),
        (made("gpt2", ["a"]), "tokenizer.ggml.merges is a NoneType"),
        (made("gpt2", ["a"], merges=["ab"]), "holds 'ab', not two tokens"),
        (made("gpt2", ["a"], merges=["a b"]), "is damaged"),
        (made("gpt2", ["a", 3], merges=[]), "tokens holds what is no text"),
        (made("gpt2", ["a"], merges=[], token_type=[1, 1]), "token_type has 2 entries for 1 tokens"),
        (made("gpt2", ["a"], merges=[], eos_token_id=1), "eos_token_id is 1, no id of a token"),
        (made("llama", ["a"], scores=[]), "scores has 0 entries for 1 tokens"),
        (made("bert", ["a"]), "unknown_token_id is missing"),
    ],
)
def test_what_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        gguf_tokenizer(data)
    assert "\n" not in str(caught.value)
