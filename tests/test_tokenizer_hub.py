"""Tokenizers of hub folders, of every kind, against transformers and sentencepiece (FAULTS 66, 68, 69, 70)."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from anyformer.text.tokenizer import BackendTokenizer, Tokenizer, load_tokenizer

TEXT = """The quick brown fox jumps over the lazy dog. It's 12 o'clock, and the fox, unhappy, walks home again.
Attention is all you need: every word sees all words. Don't stop here! Is it so? Yes -- it is. Café naïve über.
这是一个汉字的长句子，没有空格。注意力机制让每个词看到所有的词。def f(x): return x ** 2 <b>bold</b> </a> <a>"""
LINES = [*TEXT.split("\n"), *TEXT.split(" ")] * 3
SAMPLES = [
    "",
    " ",
    "The fox",
    " The  fox ",
    "It's unhappy, isn't it?",
    "Café 汉字 注意力",
    "don't -- stop .",
    *LINES[:3],
]
SAMPLES += ["a\nb", "👩\u200d👧 zebra 🦙", "x" * 50, "the <b>fox</b>", "THE FOX ÜBER"]


def trained(backend: tokenizers.Tokenizer, trainer: object) -> tokenizers.Tokenizer:
    backend.train_from_iterator(LINES, trainer)
    return backend


def template(backend: tokenizers.Tokenizer, single: str, pair: str) -> tokenizers.Tokenizer:
    names = sorted({part.split(":")[0] for part in f"{single} {pair}".split() if "$" not in part})
    tokens = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    return backend


def gpt2() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder, backend.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    return trained(backend, trainer), {"eos_token": names[0], "bos_token": names[0]}


def bert() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(backend, trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return template(backend, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"), {**roles, "mask_token": "[MASK]"}


def t5() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    names = ["<pad>", "</s>", "<unk>"]
    trained(
        backend,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False),
    )
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return template(backend, "$A </s>", "$A </s> $B </s>"), roles


def sentence_bpe(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The LLaMA kind: byte fallback, and a vocabulary in which merges make "</s>" unless somebody takes care."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(backend, trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False))
    data = json.loads(backend.to_str())
    model = data["model"]
    for pair in (["<", "/s"], ["</s", ">"], ["</", "s>"], ["s", ">"], ["<", "/"], ["/", "s"]):
        model["vocab"].setdefault("".join(pair), len(model["vocab"]))
        model["merges"].append(pair)
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    data["added_tokens"] = data["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(plain)
    return template(backend, "<s> $A", "<s> $A <s>:1 $B:1")


LLAMA_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentence_bpe(backend), LLAMA_ROLES


def mistral() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentence_bpe(backend), LLAMA_ROLES


def clip() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder(suffix="</w>")
    names = ["<unk>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=names, end_of_word_suffix="</w>", show_progress=False)
    return trained(backend, trainer), {"unk_token": "<unk>", "eos_token": "<end>"}


def words() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Whole words, no decoder; "</s>" is a word."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained(backend, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False))
    return template(backend, "$A </s>", "$A </s> $B </s>"), {"unk_token": "<unk>", "eos_token": "</s>"}


KINDS: dict[str, Callable[[], tuple[tokenizers.Tokenizer, dict[str, str]]]] = {
    kind.__name__: kind for kind in (gpt2, bert, t5, llama, mistral, clip, words)
}


class Case:
    """One kind: the folder that transformers wrote, its own tokenizer, and ours."""

    def __init__(self, kind: str, folder: Path) -> None:
        backend, self.roles = KINDS[kind]()
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **self.roles).save_pretrained(folder)
        self.folder, self.kind = folder, kind
        self.other = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.own = load_tokenizer(folder)

    def ids(self, *texts: str, frame: bool = False) -> list[int]:
        return self.other(*texts, add_special_tokens=frame, split_special_tokens=True)["input_ids"]

    def decoded(self, ids: list[int], special: bool) -> str:
        return self.other.backend_tokenizer.decode(ids, skip_special_tokens=not special)


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_ids_and_frames_are_those_of_transformers(case: Case) -> None:
    for text in SAMPLES:
        assert case.own.encode(text) == case.ids(text)
        assert case.own.encode(text, frame=True) == case.ids(text, frame=True)
        assert case.own.encode(text, special=True) == case.other(text, add_special_tokens=False)["input_ids"]
        pair = case.other(text, "The fox", return_token_type_ids=True, split_special_tokens=True)
        assert case.own.encode_pair(text, "The fox") == (pair["input_ids"], pair["token_type_ids"])


def test_decode_is_that_of_the_library_and_streams_are_decode(case: Case) -> None:
    for text in SAMPLES:
        for special in (False, True):
            ids = case.own.encode(text, frame=special)
            assert case.own.decode(ids, special=special) == case.decoded(ids, special)
            stream = case.own.stream(special=special)
            assert "".join([*map(stream.push, ids), stream.flush()]) == case.decoded(ids, special)


def test_random_ids_stream_as_they_decode(case: Case) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [i for i in rng.choices(range(case.own.vocab_size), k=12) if not (byte_like(case.own, i))]
        for special in (False, True):
            assert case.own.decode(ids, special=special) == case.decoded(ids, special)


def byte_like(tokenizer: Tokenizer, token: int) -> bool:
    """Parts of characters: how many U+FFFD stand for bytes that form none, the library has its own way to count."""
    return "\ufffd" in tokenizer.decode([token])


def test_fault_68_streams_give_whole_characters(case: Case) -> None:
    stream = case.own.stream()
    for token in case.own.encode("汉字 👩 Café"):
        assert "\ufffd" not in stream.push(token)
    assert stream.flush() == ""


def test_roles(case: Case) -> None:
    other = case.other
    begin, end = other.bos_token_id, other.eos_token_id
    assert case.own.begin_id == (other.cls_token_id if begin is None else begin)
    assert case.own.end_id == (other.sep_token_id if end is None else end)
    assert case.own.end_ids == (case.own.end_id,)
    assert (case.own.pad_id, case.own.unk_id) == (other.pad_token_id, other.unk_token_id)
    assert case.own.mask_id == other.mask_token_id
    assert case.own.vocab_size == len(other)


def test_fault_70_special_text_typed_by_a_user(case: Case) -> None:
    """Also where the model's own vocabulary holds the text of a special token as a word."""
    for name in case.own.specials:
        for text in (name, f"hi {name} there", f"{name}{name}", f"a{name}", f" {name} "):
            plain = set(case.own.specials.values()) - {case.own.unk_id}
            assert not plain & set(case.own.encode(text)), text
            framed = case.own.encode(text, frame=True)
            assert sum(i in plain for i in framed) == sum(i in plain for i in case.own.encode("", frame=True))
            if name != case.roles.get("unk_token"):
                assert case.own.encode(text, special=True).count(case.own.specials[name]) == text.count(name)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_fault_70_special_text_survives(tmp_path: Path, kind: str) -> None:
    own = Case(kind, tmp_path).own
    for text in ("</s>", "hi </s> there", "<s></s>", "a <unk> b", "<|endoftext|>"):
        assert own.decode(own.encode(text)) == text
        assert not set(own.specials.values()) & set(own.encode(text))


def test_fault_66_lone_surrogates(case: Case) -> None:
    for special in (False, True):
        assert case.own.encode("ok\ud800bad", special=special) == case.own.encode("ok\ufffdbad", special=special)


def test_fault_69_saved_and_loaded(case: Case, tmp_path: Path) -> None:
    case.own.chat_template = "{{ messages[0].content }}"
    case.own.save(tmp_path)
    again, other = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for name in ("vocab_size", "specials", "roles", "end_ids", "begin_id", "pad_id", "unk_id", "mask_id", "frame"):
        assert getattr(again, name) == getattr(case.own, name), name
    assert again.chat_template == other.chat_template == "{{ messages[0].content }}"
    for text in SAMPLES:
        assert again.encode(text) == case.own.encode(text)
        assert other(text, split_special_tokens=True)["input_ids"] == case.own.encode(text, frame=True)
        assert again.decode(again.encode(text)) == case.own.decode(case.own.encode(text))
    assert other.eos_token == case.roles.get("eos_token")


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, "utf-8")
    return folder


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_of_bert(tmp_path: Path, lower: bool) -> None:
    vocabulary = sorted(bert()[0].get_vocab().items(), key=lambda item: item[1])
    names = [name for name, _ in vocabulary] + ["The", "THE", "Ü", "##ber", "café"]
    write(tmp_path, vocab__txt="\n".join(names) + "\n", tokenizer_config__json={"do_lower_case": lower})
    own = load_tokenizer(tmp_path)
    other = transformers.BertTokenizer(vocab=dict(zip(names, range(999), strict=False)), do_lower_case=lower)
    for text in SAMPLES:
        assert own.encode(text, frame=True) == other(text, split_special_tokens=True)["input_ids"]
        pair = other(text, "The", split_special_tokens=True)
        assert own.encode_pair(text, "The") == (pair["input_ids"], pair["token_type_ids"])
    assert [own.begin_id, own.end_id, own.pad_id, own.unk_id, own.mask_id] == [2, 3, 0, 1, 4]


def merges_of(backend: tokenizers.Tokenizer, folder: Path, specials: list[str]) -> None:
    model = json.loads(backend.to_str())["model"]
    kept = [name for name in model["vocab"] if name != "<|endoftext|>"]
    vocabulary = {name: i for i, name in enumerate([*specials, *kept])}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    write(folder, vocab__json=vocabulary, merges__txt="\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("made", "specials", "config"),
    [
        (transformers.GPT2Tokenizer, ["<|endoftext|>"], {}),
        (transformers.GPT2Tokenizer, ["<|endoftext|>"], {"add_prefix_space": True, "add_bos_token": True}),
        (transformers.RobertaTokenizer, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], {}),
        (transformers.Qwen2Tokenizer, ["<|endoftext|>"], {}),
    ],
)
def test_vocab_json_and_merges(tmp_path: Path, made: type, specials: list[str], config: dict[str, object]) -> None:
    merges_of(gpt2()[0], tmp_path, specials)
    write(tmp_path, tokenizer_config__json={"tokenizer_class": made.__name__, **config})
    own, other = load_tokenizer(tmp_path), made.from_pretrained(tmp_path)
    for text in SAMPLES:
        assert own.encode(text, frame=True) == other(text, split_special_tokens=True)["input_ids"]
        pair = other(text, "The", split_special_tokens=True)["input_ids"]
        assert own.encode_pair(text, "The")[0] == pair
    assert own.end_id == other.eos_token_id
    assert (own.begin_id, own.pad_id, own.mask_id) == (other.bos_token_id, other.pad_token_id, other.mask_token_id)


def test_merges_of_an_unknown_family_are_refused(tmp_path: Path) -> None:
    merges_of(gpt2()[0], tmp_path, ["<|endoftext|>"])
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(ValueError, match=r"is of 'clip', but without tokenizer.json only .*'gpt2'"):
        load_tokenizer(tmp_path)


def sentencepiece_model(folder: Path, kind: str, **choices: object) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("\n".join(LINES * 3), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "made"),
        model_type=kind,
        vocab_size=450,
        minloglevel=3,
        hard_vocab_limit=False,
        character_coverage=0.98,
        **choices,
    )
    return folder / "made.model"


LLAMA_MODEL = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def test_sentencepiece_model_of_llama(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path, "bpe", **LLAMA_MODEL).rename(tmp_path / "tokenizer.model")
    own = load_tokenizer(tmp_path)
    import sentencepiece

    other = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in SAMPLES:
        ids = other.encode(text)
        assert own.encode(text) == ids
        assert own.encode(text, frame=True) == [1, *ids]
        assert own.encode_pair(text, text) == ([1, *ids, 1, *ids], [0] * (len(ids) + 1) + [1] * (len(ids) + 1))
        assert own.decode(ids) == other.decode(ids) == text
    assert [own.begin_id, own.end_id, own.end_ids, own.unk_id, own.pad_id] == [1, 2, (2,), 0, None]
    assert not {0, 1, 2} & set(own.encode("<s> a </s> <unk>"))
    assert own.encode("<s>The</s>", special=True) == [1, *own.encode("The"), 2]
    assert own.decode(own.encode("hi </s> there")) == "hi </s> there"


def test_sentencepiece_model_of_t5(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path, "unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    path.rename(tmp_path / "spiece.model")
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "T5Tokenizer", "model_max_length": 512})
    own = load_tokenizer(tmp_path)
    size = own.specials["<extra_id_99>"]
    assert own.encode("The fox", frame=True) == [*own.encode("The fox"), 1]
    assert (own.vocab_size, own.specials["<extra_id_0>"]) == (size + 100, size + 99)
    assert own.encode("The <extra_id_0> fox", special=True) == [*own.encode("The "), size + 99, *own.encode(" fox")]
    assert max(own.encode("The <extra_id_0> fox")) < size
    assert own.decode(own.encode("The <extra_id_0> fox", special=True)) == "The fox"
    own.chat_template = "x"
    own.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert (again.specials, again.frame, again.chat_template) == (own.specials, own.frame, "x")
    assert [again.encode(text) for text in SAMPLES] == [own.encode(text) for text in SAMPLES]


def test_sentencepiece_streams(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path, "bpe", **LLAMA_MODEL).rename(tmp_path / "tokenizer.model")
    own = load_tokenizer(tmp_path)
    import sentencepiece

    other, rng = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")), random.Random(0)
    for _ in range(200):
        ids = [i for i in rng.choices(range(3, own.vocab_size), k=12) if not byte_like(own, i)]
        assert own.decode(ids) == other.decode(ids)
        assert own.decode([1, *ids, 2]) == own.decode(ids)


def test_sentencepiece_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=re.escape("pip install 'anyformer[sentencepiece]'")):
        load_tokenizer(tmp_path)


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "spiece.model").write_bytes(b"no model at all")
    with pytest.raises(ValueError, match=r"spiece\.model is damaged"):
        load_tokenizer(tmp_path)


def test_renumbered_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    write(tmp_path, tokenizer__model="", tokenizer_config__json={"tokenizer_class": "XLMRobertaTokenizer"})
    with pytest.raises(ValueError, match=r"'xlmroberta', whose ids are not those of its SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (2,)),
        ({"config__json": {"eos_token_id": 7}}, (7, 2)),
        ({"config__json": {"eos_token_id": 7}, "generation_config__json": {"eos_token_id": [2, 9]}}, (2, 9)),
        ({"config__json": {"eos_token_id": 2}, "generation_config__json": {}}, (2,)),
    ],
)
def test_every_end(tmp_path: Path, files: dict[str, object], ends: tuple[int, ...]) -> None:
    own = load_tokenizer(write(Case("llama", tmp_path).folder, **files))
    assert (own.end_ids, own.end_id) == (ends, 2)
    own.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").end_ids == ends


@pytest.mark.parametrize("wrong", ["2", [1, "x"], -1, True, 1.5])
def test_ends_that_are_no_ids(tmp_path: Path, wrong: object) -> None:
    folder = write(Case("llama", tmp_path).folder, generation_config__json={"eos_token_id": wrong})
    with pytest.raises(ValueError, match="must be an id or a list of ids"):
        load_tokenizer(folder)


def test_without_small_files_the_frame_says_where_a_text_ends(tmp_path: Path) -> None:
    for kind, begin, end in (("bert", 2, 3), ("t5", None, 1)):
        backend, _ = KINDS[kind]()
        backend.save(str(tmp_path / "tokenizer.json"))
        own = load_tokenizer(tmp_path)
        assert (own.begin_id, own.end_id, own.pad_id) == (begin, end, 0)


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    own = BackendTokenizer(backend, {})
    own.save(tmp_path)
    for tokenizer in (own, load_tokenizer(tmp_path)):
        assert tokenizer.encode("a b a", special=True) == [0, 1, 0]
        assert tokenizer.end_ids == () or tokenizer.end_ids == (1,)
    with pytest.raises(ValueError, match="names no token that ends a text"):
        _ = own.end_id


def test_the_post_processor_wins_over_flags(tmp_path: Path) -> None:
    folder = Case("llama", tmp_path).folder
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, tokenizer_config__json={**config, "add_bos_token": False, "add_eos_token": True})
    own, other = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert own.encode("The fox", frame=True) == other("The fox")["input_ids"] == [1, *own.encode("The fox")]


NAMED = [{"name": "x", "template": "no"}, {"name": "default", "template": "two"}]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tokenizer_config__json": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [{"name": "x", "template": "no"}, {"name": "default", "template": "two"}]
                }
            },
            "two",
        ),
        ({"tokenizer_config__json": {"chat_template": "one"}, "chat_template__jinja": "three\n"}, "three\n"),
        ({"tokenizer_config__json": {}}, None),
    ],
)
def test_where_chat_templates_are(tmp_path: Path, files: dict[str, object], found: str | None) -> None:
    own = load_tokenizer(write(Case("llama", tmp_path).folder, **files))
    assert own.chat_template == found
    own.save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == found


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"vocab__txt": "a\nb\n"}, "lacks {'unk_token': '[UNK]', 'cls_token': '[CLS]', 'sep_token': '[SEP]'}"),
        ({"vocab__json": {"a": 0}, "merges__txt": "#version\na b\n"}, "vocab.json' is damaged"),
        ({"vocab__json": {"a": 0}, "merges__txt": "#version\na b c\n"}, "damaged: line 2 is 'a b c', not two tokens"),
        ({"vocab__json": {"a": "x"}, "merges__txt": ""}, "vocab.json' is damaged"),
        ({"vocab__json": "[1", "merges__txt": ""}, "is damaged"),
        ({"tokenizer__json": "[" * 100000}, "is damaged"),
    ],
)
def test_fault_69_damaged_files(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_tokenizer(write(tmp_path, **files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("gpt2", "model.continuing_subword_prefix", "x", "lacks 'x'"),  # the library aborts the process
        ("bert", "post_processor.single", [], "must hold each of the texts ['A'] once, but this one holds []"),
        ("bert", "post_processor.special_tokens", {}, "names '[CLS]', but no id for it"),
        ("bert", "model.vocab", {}, "Missing [UNK] token"),
        ("t5", "model.vocab", {}, "is damaged"),
    ],
)
def test_fault_69_damage_inside_tokenizer_json(
    tmp_path: Path, kind: str, path: str, value: object, message: str
) -> None:
    data = json.loads(KINDS[kind]()[0].to_str())
    *outer, last = path.split(".")
    functools.reduce(lambda part, key: part[key], outer, data)[last] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        load_tokenizer(write(tmp_path, tokenizer__json=data))


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": 1}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"3": {"content": "new"}}},
    ],
)
def test_added_tokens_that_do_not_fit(tmp_path: Path, config: dict[str, object]) -> None:
    backend, _ = gpt2()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"must hold ids with texts|'new' has id 3, but the vocabulary gives it 400"):
        load_tokenizer(write(tmp_path, tokenizer_config__json=config))


def test_an_added_token_that_only_the_configuration_knows(tmp_path: Path) -> None:
    backend, _ = gpt2()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"400": {"content": "<|im_end|>", "special": True}}, "eos_token": "<|im_end|>"}
    own = load_tokenizer(write(tmp_path, tokenizer_config__json=config))
    assert (own.end_id, own.vocab_size) == (400, 401)
    assert own.encode("a<|im_end|>", special=True)[-1] == 400
