"""Tokenizers: exact round trips, special tokens, streams, persistence (FAULTS 66, 68, 69, 70)."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import tokenizers

from anyformer.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, well_formed

CODE = '''class Point:
    """A point."""

    def __init__(self, x=0, y=1000):
        self.x = x
        self.y = y\r\n
    def norm(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5
'''
CHINESE = "这是一个汉字的长句子，没有空格。注意力机制让每个词看到所有的词。" * 4
AWKWARD = [
    *["", " ", "  a ", "a\r\nb", "a\n\n\nb", "\x00", "\ufeffa", "a\ufeffb", "\U0010ffff", "\u00e9", "e\u0301"],
    *["".join(map(chr, range(256))), "\u2028\x85\u3000", CODE, CHINESE, "\t\tx = 12345678"],
    *["日本語テキスト 한국어 👩\u200d👧", "a" * 300, " " * 300, "\n" * 300],
]


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([CODE, CHINESE], 400)


@pytest.fixture(params=["byte", "bpe", "only_a", "untrained"])
def tokenizer(request: pytest.FixtureRequest, bpe: BPETokenizer) -> Tokenizer:
    made = {"byte": ByteTokenizer, "bpe": lambda: bpe, "only_a": lambda: BPETokenizer.train(["a"], 300)}
    return made.get(request.param, lambda: BPETokenizer.train([], 257))()


def test_fault_68_round_trip(tokenizer: Tokenizer) -> None:
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]


def test_fault_68_round_trip_of_random_text(bpe: BPETokenizer) -> None:
    rng = random.Random(0)
    pool = [*range(128)] * 500 + [*range(0xD800)] + [*range(0xE000, 0x110000, 7)]
    for _ in range(300):
        codes = rng.choices(pool, k=20)
        text = "".join(map(chr, codes))
        assert bpe.decode(bpe.encode(text)) == text


def test_fault_68_without_training_text_the_vocabulary_is_the_bytes() -> None:
    empty = BPETokenizer.train([""], 1000)
    assert (empty.vocab_size, empty.end_id) == (257, 256)
    assert len(empty.encode(CHINESE)) == len(CHINESE.encode())


@pytest.mark.parametrize("line", ["x" * 1_000_000, "汉" * 300_000, "ab1_,汉" * 100_000, " " * 300_000], ids=len)
def test_fault_68_pieces_are_bounded(bpe: BPETokenizer, line: str) -> None:
    cut = bpe._backend.pre_tokenizer.pre_tokenize_str(line)
    assert max(end - start for _, (start, end) in cut) <= 128


def test_fault_68_a_line_of_2_mb_without_spaces() -> None:
    rng = random.Random(0)
    line = "".join(rng.choices("abcdefghijklmnop_.", k=2_000_000))
    start = time.perf_counter()
    trained = BPETokenizer.train([line], 300)
    assert trained.decode(trained.encode(line)) == line
    assert time.perf_counter() - start < 60  # quadratic work would take hours


def test_training_uses_the_vocabulary(bpe: BPETokenizer) -> None:
    assert BPETokenizer.train([CODE, CHINESE], 280).vocab_size == 280
    assert len(bpe.encode(CODE)) < len(CODE) / 1.5
    assert len(bpe.encode(CHINESE)) < len(CHINESE) / 2


def test_digits_are_grouped_by_three_at_most() -> None:
    trained = BPETokenizer.train(["123456789 " * 50], 600)
    assert [trained.decode([i]) for i in trained.encode("123456789")] == ["123", "456", "789"]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("ok\ud800bad", "ok\ufffdbad"),
        ("\ud83d\udc4d", "\U0001f44d"),
        ("\udcff", "\ufffd"),
        ("\udc4d\ud83d", "\ufffd\ufffd"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
        ("\ud800\ud83d\udc4d", "\ufffd\U0001f44d"),
        ("汉字", "汉字"),
    ],
)
def test_fault_66_lone_surrogates(tokenizer: Tokenizer, text: str, same: str) -> None:
    assert well_formed(text) == same
    assert tokenizer.encode(text) == tokenizer.encode(same)
    assert tokenizer.encode(text, special=True) == tokenizer.encode(same)
    assert tokenizer.encode_batch([text]) == [tokenizer.encode(same)]


def test_fault_66_surrogates_in_training() -> None:
    with_pairs = BPETokenizer.train(["\ud83d\udc4d\ud800 " * 9], 270)
    without = BPETokenizer.train(["\U0001f44d\ufffd " * 9], 270)
    assert with_pairs._backend.to_str() == without._backend.to_str()


def test_fault_70_special_text_typed_by_a_user(tokenizer: Tokenizer) -> None:
    text = "hi <|end|> there"
    assert tokenizer.end_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]


def test_fault_70_special_text_of_a_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi <|end|> there<|end|>", special=True)
    assert ids == [*tokenizer.encode("hi "), tokenizer.end_id, *tokenizer.encode(" there"), tokenizer.end_id]
    assert tokenizer.decode(ids) == "hi  there"
    assert tokenizer.decode(ids, special=True) == "hi <|end|> there<|end|>"


def test_fault_70_decode_leaves_out_ids_not_look_alikes(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("<|end|>"), tokenizer.end_id]
    assert tokenizer.decode(ids) == "<|end|>"
    assert tokenizer.decode(ids, special=True) == "<|end|><|end|>"


def test_fault_70_special_token_in_another() -> None:
    trained = BPETokenizer.train(["a"], 300, specials=("<s>", "<s>>", "x<s>"))
    a, b, c = (trained.specials[name] for name in ("<s>", "<s>>", "x<s>"))
    assert trained.encode("<s><s>>x<s>", special=True) == [a, b, c]
    assert trained.decode(trained.encode("<s><s>>x<s>")) == "<s><s>>x<s>"
    assert not {a, b, c} & set(trained.encode("<s><s>>x<s>"))


def test_fault_70_training_text_full_of_special_text() -> None:
    trained = BPETokenizer.train(["END END " * 1000, "END"], 300, specials=("END",))
    assert trained.end_id not in trained.encode("END END END")
    assert trained.decode(trained.encode("END END END")) == "END END END"
    assert trained.encode("END", special=True) == [trained.end_id]


def test_special_token_that_spells_other_bytes() -> None:
    with pytest.raises(ValueError, match="'Ã©' is how a vocabulary writes other bytes"):
        BPETokenizer.train(["é é é é"], 270, specials=("Ã©",))


@pytest.mark.parametrize("specials", [(), ("<e>", "<e>"), ("",), ("a",)])
def test_bad_special_tokens(specials: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="different and of 2 characters or more"):
        BPETokenizer.train(["a"], 1000, specials=specials)


def test_fault_68_vocabulary_too_small() -> None:
    with pytest.raises(
        ValueError, match=r"vocab_size is 200, but must be at least 258: 256 bytes and 2 special tokens"
    ):
        BPETokenizer.train(["a"], 200, specials=("<a>", "<b>"))


def test_stream_gives_whole_characters(tokenizer: Tokenizer) -> None:
    for text in AWKWARD:
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        parts = [stream.push(i) for i in ids]
        assert "".join(parts) == text
        assert stream.flush() == ""


def test_stream_of_bytes_gives_a_character_at_its_last_byte() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "汉a👍".encode()] == ["", "", "汉", "a", "", "", "", "👍"]


def test_stream_of_invalid_bytes_is_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_half_a_character_at_the_end() -> None:
    stream = ByteTokenizer().stream()
    assert (stream.push(0xE6), stream.push(0xB1), stream.flush()) == ("", "", "\ufffd")
    assert ByteTokenizer().decode([0xE6, 0xB1]) == "\ufffd"


@pytest.mark.parametrize("wrong", [-1, 257])
def test_id_outside_the_vocabulary(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"Id {wrong} is not in the vocabulary, whose ids are 0..256\."):
        ByteTokenizer().decode([wrong])


def test_fault_69_save_and_load(tmp_path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.end_id, loaded.specials) == (
        tokenizer.vocab_size,
        tokenizer.end_id,
        tokenizer.specials,
    )
    assert loaded.encode_batch(AWKWARD) == tokenizer.encode_batch(AWKWARD)


def test_fault_69_unusual_merges(tmp_path) -> None:
    text = '#version: 0.2\n\t"a b"\t\n \\n \\" <x y> é a);\n' * 40
    trained = BPETokenizer.train([text], 330, specials=("<|end|>", "<x y>", "#version", "<|汉|>"))
    tokens = [trained.decode([i]) for i in range(256, trained.vocab_size - 4)]
    assert any(" " in token and token.strip() for token in tokens)
    assert any("\n" in token and len(token) > 1 for token in tokens)
    trained.save(tmp_path)
    loaded, rng = load_tokenizer(tmp_path), random.Random(0)
    assert loaded.end_id == trained.specials["<|end|>"]
    for _ in range(1000):
        sample = "".join(
            rng.choices(["#version", " ", "\n", "\t", '"', "a b", "<x y>", "汉", "é", "\\n", "<|汉|>"], k=8)
        )
        for special in (False, True):
            assert loaded.encode(sample, special=special) == trained.encode(sample, special=special)


def test_saved_files_are_read_by_the_tokenizers_library(tmp_path, bpe: BPETokenizer) -> None:
    bpe.save(tmp_path)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in AWKWARD:
        assert other.encode(text).ids == bpe.encode(text)
        assert other.decode(bpe.encode(text)) == text
    assert other.encode("a<|end|>").ids == bpe.encode("a<|end|>", special=True)


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}])
def test_end_of_a_foreign_tokenizer(tmp_path, eos: object) -> None:
    trained = BPETokenizer.train(["a"], 300, specials=("<s>", "</s>"))
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.end_id == loaded.specials["</s>"]
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).end_id == trained.specials["<s>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is damaged"),
        ("[]", "must hold an object, but holds a list"),
        ('{"model": {"type": "Unigram"}, "decoder": null}', "is damaged (Missing vocab"),
        ('{"model": {"type": "BPE", "merges": 3}, "decoder": {"type": "ByteLevel"}}', "is damaged"),
    ],
)
def test_fault_69_damaged_files(tmp_path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_end_token(tmp_path, bpe: BPETokenizer) -> None:
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match=re.escape("'</s>' is not among the special tokens, which are ['<|end|>']")):
        load_tokenizer(tmp_path)
