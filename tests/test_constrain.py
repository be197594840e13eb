"""Constrained generation: a random model can only write what the constraint allows, token by token, and all of that."""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.generate.constrain import _TABLES, Constraint, Guide, choices, json_schema, regex
from anyformer.text import build
from anyformer.text.tokenizer import BackendTokenizer, BPETokenizer, ByteTokenizer, SentencePieceTokenizer, Tokenizer

TEXT = 'yes no yesterday 123 {"name": "a", "tags": ["red", "green"], "size": 12} 汉字 naïve the fox' + "\n"
PREFIXES = ["yes", "y", "yesterday", "no", "", "no way"]
UNICODE = ["汉字", "汉", "naïve", "na", "👩\u200d👧", '"quoted\\"\n\t\x00', "a/b|c", "Ω"]
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", 7, None]},
        "size": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "more": {"type": "array", "items": {"type": "integer"}}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["color", "size", "tags", "inner"],
    "additionalProperties": False,
}


class Pieces(Tokenizer):
    """A tokenizer of the given pieces, in this order, and an end token after them if `end`."""

    def __init__(self, pieces: Sequence[bytes], *, end: bool = True) -> None:
        self.pieces = [*pieces, *([b"<end>"] if end else [])]
        super().__init__(len(self.pieces), {"<end>": len(pieces)} if end else {}, {"eos_token": "<end>"} if end else {})

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        raise NotImplementedError

    def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
        return self.pieces[token], b""


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([TEXT] * 20, 400)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: BPETokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else ByteTokenizer()


def drawn(guide: Guide, tokenizer: Tokenizer, seed: int, vocab_size: int | None = None) -> list[int]:
    """The ids of one text by a model of random logits, which takes the best of the allowed tokens."""
    rng, ids = torch.Generator().manual_seed(seed), list[int]()
    size = vocab_size or tokenizer.vocab_size
    while not guide.done:
        logits = torch.randn(size, generator=rng)
        token = int(logits.masked_fill(~guide.allowed(size), -torch.inf).argmax())
        guide.push(token)
        if token not in tokenizer.end_ids:
            ids.append(token)
    return ids


def texts(constraint: Constraint, tokenizer: Tokenizer, count: int) -> list[str]:
    guide = constraint.bind(tokenizer)
    return [tokenizer.decode(drawn(guide.copy(), tokenizer, seed), special=True) for seed in range(count)]


def fits(value: Any) -> bool:
    """Whether `value` is as `SCHEMA` says, keys in its order."""
    inner = value["inner"]
    return (
        list(value) == ["color", "size", "tags", "inner"]
        and value["color"] in ("red", "green", 7, None)
        and type(value["size"]) is int
        and -3 <= value["size"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 4 for tag in value["tags"])
        and list(inner) in (["on"], ["on", "more"])
        and type(inner["on"]) is bool
        and all(type(number) is int for number in inner.get("more", []))
    )


@pytest.mark.parametrize("listed", [PREFIXES, UNICODE, ["one"]])
def test_choices_come_out_and_nothing_else(tokenizer: Tokenizer, listed: list[str]) -> None:
    assert set(texts(choices(listed), tokenizer, 150)) == set(listed)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}",
        r"[^\d]\Da[\d.]{2}",
        r"(ab|a)+c?",
        r"[^\n]{2,5}",
        r"(?i)naïve|\p{Han}{1,2}",
        "^a$",
        "",
        "a/b\n\\\\",
        r"-?(0|[1-9]\d*)(\.\d+)?",
    ],
)
def test_regex_matches_from_the_beginning_to_the_end(tokenizer: Tokenizer, pattern: str) -> None:
    python = re.compile(pattern.replace(r"\p{Han}", "[\u2e80-\u9fff\uf900-\ufaff\U00016fe2-\U0003ffff々〇]"))
    assert all(python.fullmatch(text) for text in texts(regex(pattern), tokenizer, 40))


def test_json_fits_the_schema(tokenizer: Tokenizer) -> None:
    made = [json.loads(text) for text in texts(json_schema(SCHEMA), tokenizer, 40)]
    assert all(map(fits, made))
    assert {value["color"] for value in made} == {"red", "green", 7, None}
    assert {tuple(value["inner"]) for value in made} == {("on",), ("on", "more")}


def test_json_has_the_spaces_of_json_dumps(tokenizer: Tokenizer) -> None:
    value = {"a": [1, 2, {"b": "x y"}], "c": True}
    assert texts(json_schema({"const": value}), tokenizer, 3) == [json.dumps(value)] * 3


def language(pattern: str, letters: str, longest: int) -> list[str]:
    words = ("".join(word) for n in range(longest + 1) for word in itertools.product(letters, repeat=n))
    return [word for word in words if re.fullmatch(pattern, word)]


def follows(guide: Guide, tokenizer: Tokenizer, listed: list[str], ids: list[int], rng: random.Random) -> None:
    """Hold a walk against the list of all texts: decoding says what each token would make of the text."""
    while True:
        text = tokenizer.decode(ids)
        longer = {
            token
            for token in range(tokenizer.vocab_size)
            if token not in {*tokenizer.specials.values(), *tokenizer.end_ids}
            and tokenizer.decode([*ids, token]) != text
            and any(other.startswith(tokenizer.decode([*ids, token])) for other in listed)
        }
        ends = set(tokenizer.end_ids) if text in listed else set()
        assert set(guide.allowed(tokenizer.vocab_size).nonzero()[:, 0].tolist()) == longer | ends
        assert guide.done == (text in listed and not longer)
        if not longer:
            return
        ids.append(rng.choice(sorted(longer)))
        guide.push(ids[-1])


def test_allowed_is_all_that_can_still_match() -> None:
    own = Pieces([b"a", b"b", b"ab", b"ba", b"aab", b"c", b"ab", b"abc", b""])
    pattern = "(ab|ba){0,2}c?|aab"
    listed = language(pattern, "abc", 5)
    for constraint in (regex(pattern), choices(listed)):
        guide = constraint.bind(own)
        for seed in range(30):
            follows(guide.copy(), own, listed, [], random.Random(seed))


def sentence_bpe() -> Tokenizer:
    """As in a LLaMA GGUF file: bytes, "▁" for a space, and a space put before every text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "t", "h", "e", "th", "▁t", "▁the", "the", "▁fox", "f", "o", "fo", "▁f", "▁▁"]
    ids = {name: i for i, name in enumerate([*names, *words])}
    backend = build.scored_pieces(ids, {word: -i for i, word in enumerate(words)}, "<unk>")
    backend.add_special_tokens(names[:3])
    return BackendTokenizer(backend, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})


def word_pieces() -> Tokenizer:
    names = ["[UNK]", "[CLS]", "[SEP]"]
    words = ["the", "t", "##h", "##e", "fox", "f", "##o", "##x", "##ox", ".", "##s", "[the]"]
    backend = build.word_pieces({name: i for i, name in enumerate([*names, *words])}, "[UNK]")
    backend.add_special_tokens(names)
    return BackendTokenizer(backend, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"})


def sentencepiece_model(folder: Path) -> Tokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("the fox\nthe fox the\nhot foxes\n" * 5, "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "made"),
        model_type="bpe",
        vocab_size=290,
        minloglevel=3,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    return SentencePieceTokenizer.load(folder / "made.model")


@pytest.mark.parametrize("kind", ["scored", "words", "sentencepiece"])
def test_spaces_at_the_beginning_are_as_decoding_has_them(kind: str, tmp_path: Path) -> None:
    made = {"scored": sentence_bpe, "words": word_pieces, "sentencepiece": lambda: sentencepiece_model(tmp_path)}
    own, listed = made[kind](), ["the", "the fox", "fox the", "t h", "the fox."]
    listed += [] if kind == "words" else [" the fox", "  the", " "]
    guide = choices(listed).bind(own)
    for seed in range(15):
        follows(guide.copy(), own, listed, [], random.Random(seed))


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused() -> None:
    class Suffixed(Pieces):
        def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
            return self.pieces[token], b" "

    with pytest.raises(ValueError, match=r"token 0 \('fox'\) adds to a text depends on whether another token follows"):
        choices(["fox"]).bind(Suffixed([b"fox"]))


def test_special_tokens_are_not_text() -> None:
    own = BPETokenizer.train(["<s> <s> <s>"], 300, specials=("<|end|>", "<s>"))
    guide = regex(r"(?s).*").bind(own)
    allowed = guide.allowed(own.vocab_size)
    assert allowed[own.end_id]
    assert not allowed[own.specials["<s>"]]
    for token in own.encode("<s>"):
        guide.push(token)
    assert texts(choices(["<|end|>", "<s>"]), own, 10)[0] in ("<|end|>", "<s>")
    assert set(texts(choices(["<s>"]), own, 3)) == {"<s>"}


def test_every_end_token_ends_a_complete_text() -> None:
    own = Pieces([b"a", b"b"])
    own.end_ids = (2, 1)
    guide = regex("[ab]+").bind(own)
    assert guide.allowed(3).tolist() == [True, False, False]
    guide.push(0)
    assert guide.allowed(3).tolist() == [True, True, True]
    guide.push(1)
    assert guide.done
    assert guide.allowed(3).tolist() == [False, True, True]


def test_ids_beyond_the_tokenizer_are_never_allowed(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    guide = regex("[a-z]{1,5}").bind(tokenizer)
    assert not guide.allowed(size + 67)[size:].any()
    assert torch.equal(guide.allowed(size + 67)[:size], guide.allowed(size))
    assert torch.equal(guide.allowed(100), guide.allowed(size)[:100])
    for seed in range(20):
        ids = drawn(guide.copy(), tokenizer, seed, vocab_size=size + 67)
        assert re.fullmatch("[a-z]{1,5}", tokenizer.decode(ids))


def test_the_smallest_vocabularies() -> None:
    alone = Pieces([b"a"], end=False)
    guide = regex("a{3}").bind(alone)
    assert drawn(guide.copy(), alone, 0) == [0, 0, 0]
    assert choices([""]).bind(Pieces([])).done
    assert choices(["b", ""]).bind(alone).done
    assert not guide.done


def test_a_text_that_no_token_continues() -> None:
    own = Pieces([b"a", b"b"])
    with pytest.raises(ValueError, match=r"no token .* continues the text '' under the choices '\[\"cab\"\]'; allow a"):
        choices(["cab"]).bind(own)
    with pytest.raises(ValueError, match="no token of the tokenizer continues the text ''"):
        regex(r"[^\x00-\x{10ffff}]").bind(ByteTokenizer())
    guide = choices(["abc"]).bind(own)
    guide.push(0)
    guide.push(1)
    assert not guide.done
    with pytest.raises(ValueError, match="no token of the tokenizer continues the text 'ab'"):
        guide.allowed(3)


@pytest.mark.parametrize("wrong", [1, 2, 3, -1, 99])
def test_a_token_that_is_not_allowed_changes_nothing(wrong: int) -> None:
    guide = choices(["aa", "aaa"]).bind(Pieces([b"a", b"b", b""]))
    guide.push(0)
    with pytest.raises(ValueError, match=rf"token {wrong} may not follow the text 'a' under the choices"):
        guide.push(wrong)
    assert guide.allowed(4).tolist() == [True, False, False, False]
    guide.push(0)
    assert guide.allowed(4).tolist() == [True, False, False, True]


def test_a_copy_goes_its_own_way(tokenizer: Tokenizer) -> None:
    guide = choices(["ab", "ac"]).bind(tokenizer)
    first = guide.allowed(tokenizer.vocab_size)
    for text in ("ab", "ac"):
        twin = guide.copy()
        for token in text.encode() if isinstance(tokenizer, ByteTokenizer) else tokenizer.encode(text):
            twin.push(token)
        assert twin.done
        assert not guide.done
        assert torch.equal(guide.allowed(tokenizer.vocab_size), first)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(", "the regex 'a(' cannot be used: unclosed group, at '('."),
        ("x[z-a]", "invalid character class range, the start must be <= the end, at 'z-a'."),
        ("b\na{3,1}", "invalid repetition count range, the start must be <= the end, at '{3,1}'."),
        (r"(a)\1", r"backreferences are not supported, at '\\1'."),
        (r"\bfoo", r"lookarounds not supported yet; WordUnicode in regex /\bfoo/."),
        ("a" * 200 + "(", "the regex '" + "a" * 77 + "...' cannot be used: unclosed group"),
    ],
)
def test_invalid_regex(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        regex(pattern).bind(ByteTokenizer())
    assert "\n" not in str(caught.value)


def test_regex_that_ends_within_an_escape() -> None:
    with pytest.raises(ValueError, match="ends in a backslash"):
        regex("a\\\\\\")
    assert texts(regex("a\\\\"), ByteTokenizer(), 1) == ["a\\"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "cannot be used at #: Invalid type: strin."),
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "cannot be used at #/properties/a/items: Invalid type"),
        ({"anyOf": [{"type": "integer"}, {"not": {}}]}, 'cannot be used at #/anyOf/1: Unimplemented keys: ["not"]'),
        ({"properties": {"a": {"pattern": "a(", "type": "string"}}}, "at #/properties/a: unclosed group, at '('."),
        ({"$ref": "#/nope"}, "cannot be used at #: Pointer '/nope' does not exist."),
        ({"minimum": float("nan")}, "the JSON schema is not JSON: Out of range float"),
        ({"const": {1, 2}}, "the JSON schema is not JSON: Object of type set"),
    ],
)
def test_invalid_schema(schema: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        json_schema(schema).bind(ByteTokenizer())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["yes", [], ()])
def test_choices_that_are_none(wrong: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="choices must be a list of 1 string or more, but are "):
        choices(wrong)


def test_lone_surrogates_are_mended_as_in_every_text() -> None:
    assert texts(choices(["a\ud800"]), ByteTokenizer(), 1) == texts(regex("a\ud800"), ByteTokenizer(), 1) == ["a\ufffd"]


def test_a_constraint_is_data() -> None:
    assert choices(["a"]) == choices(("a",)) == Constraint("choices", '["a"]')
    assert len({regex("a"), regex("a"), regex("b")}) == 2
    with pytest.raises(ValueError, match=r"must be one of \['choices', 'json_schema', 'regex'\], but is 'lark'"):
        Constraint("lark", "start: /a/")


def test_llguidance_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = [choices(["a"]), regex("a"), json_schema({"type": "integer"})]
    for constraint in made:
        with pytest.raises(ValueError, match=re.escape("pip install anyformer[constrain]")):
            constraint.bind(ByteTokenizer())


def test_a_grammar_that_llguidance_gives_up_on() -> None:
    class Exhausted:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: {"get_error": "step too complex\n<state>", "compute_bitmask": bytes(40)}.get(name, False)

    guide = regex("a+").bind(ByteTokenizer())
    guide._matcher = Exhausted()
    with pytest.raises(ValueError, match=r"gave up after the text 'a' .*: step too complex; use a simpler grammar"):
        guide.push(97)


def test_a_table_lives_as_long_as_its_tokenizer() -> None:
    own = ByteTokenizer()
    regex("a").bind(own)
    table = weakref.ref(_TABLES[own])
    regex("b").bind(own)
    assert _TABLES[own] is table()
    del own
    gc.collect()
    assert table() is None


def test_pieces_of_a_text_are_its_bytes(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.piece(token, first=i == 0) for i, token in enumerate(tokenizer.encode(TEXT))]
    assert b"".join(text for text, _ in pieces) == TEXT.encode()
    assert tokenizer.piece(tokenizer.end_id) == (b"<|end|>", b"")
    assert [sentence_bpe().piece(265, first=first)[0] for first in (True, False)] == [b"the", b" the"]
    with pytest.raises(ValueError, match=r"Id 9999 is not in the vocabulary"):
        tokenizer.piece(9999)
