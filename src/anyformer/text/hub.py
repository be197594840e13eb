"""Tokenizers of Hugging Face folders, and those saved here. The files are data: nothing in them is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from anyformer.files import read_json
from anyformer.text import build
from anyformer.text.backend import BackendTokenizer, added_tokens
from anyformer.text.base import ByteTokenizer, Tokenizer
from anyformer.text.config import (
    added_ids,
    chat_template_of,
    end_ids_of,
    listed_tokens,
    named_roles,
    read_optional,
)
from anyformer.text.pieces import SentencePieceTokenizer

__all__ = ["load_tokenizer"]

_BERT = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_QWEN2 = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer in `folder`, from here or from Hugging Face.

    The first of these that is there: tokenizer.json (of any kind); vocab.txt (BERT); vocab.json with merges.txt (GPT-2,
    RoBERTa, BART, Qwen 2); tokenizer.model or spiece.model (SentencePiece). What ends a text is `eos_token` of
    tokenizer_config.json or `eos_token_id` of (generation_)config.json; or else what the model puts after a text, or
    the special token of lowest id.

    Raises:
        ValueError: no such file, a damaged one, or one of a model whose tokenizer is more than the file.
    """
    folder = Path(folder)
    model = next((folder / name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()), None)
    if (folder / "tokenizer.json").exists():
        return _of_json(folder)
    if (folder / "vocab.txt").is_file():
        return _of_vocab_txt(folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _of_merges(folder)
    if model is not None:
        return SentencePieceTokenizer.load(model)
    raise ValueError(
        f"{str(folder / 'tokenizer.json')!r} cannot be read (No such file or directory), and there is no vocab.txt,"
        " vocab.json with merges.txt, tokenizer.model or spiece.model; save a tokenizer there first."
    )


def _of_json(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    data = read_json(path)
    if data.get("kind") == "byte":
        return ByteTokenizer()
    _check_merges(data.get("model"), path)
    backend = build.damaged(lambda: tokenizers.Tokenizer.from_str(path.read_text("utf-8")), repr(str(path)))
    rare = "\u1234"  # some kinds fail for want of a token for the unknown
    build.damaged(lambda: backend.encode(rare, add_special_tokens=False), repr(str(path)))
    _add_from(read_optional(folder, "tokenizer_config.json"), backend)
    unknown = (data.get("model") or {}).get("unk_token")
    known = {**({"unk_token": unknown} if isinstance(unknown, str) else {}), **named_roles(folder)}
    return _finished(folder, backend, known)


def _of_vocab_txt(folder: Path) -> Tokenizer:
    path, config = folder / "vocab.txt", read_optional(folder, "tokenizer_config.json")
    lines = _text(path).removesuffix("\n").split("\n")
    vocabulary = {piece.rstrip("\r"): i for i, piece in enumerate(lines)}
    roles = {**_present(_BERT, vocabulary), **named_roles(folder)}
    missing = [role for role in ("unk_token", "cls_token", "sep_token") if roles.get(role) not in vocabulary]
    if missing:
        names = {role: roles.get(role, _BERT[role]) for role in missing}
        raise ValueError(f"{str(path)!r} lacks {names}; name the tokens it has in tokenizer_config.json.")
    strip = config.get("strip_accents")
    backend = build.word_pieces(
        vocabulary,
        roles["unk_token"],
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=None if strip is None else bool(strip),
        cut_chinese=bool(config.get("tokenize_chinese_chars", True)),
    )
    build.frame(backend, "begin A end", "begin A end B:1 end:1", begin=roles["cls_token"], end=roles["sep_token"])
    _add_from(config, backend)
    return _finished(folder, backend, roles)


def _of_merges(folder: Path) -> Tokenizer:
    config, model = read_optional(folder, "tokenizer_config.json"), read_optional(folder, "config.json")
    vocabulary, merges = read_json(folder / "vocab.json"), _merges(folder / "merges.txt")
    family = str(config.get("tokenizer_class") or model.get("model_type") or "GPT2").lower()
    family = family.removesuffix("fast").removesuffix("tokenizer")
    if family not in _FAMILIES:
        raise ValueError(
            f"{str(folder / 'vocab.json')!r} is of {family!r}, but without tokenizer.json only"
            f" {sorted(_FAMILIES)} are read; convert it to tokenizer.json."
        )
    cuts = build.CUTS["qwen2" if family == "qwen2" else "gpt-2"]
    backend = build.damaged(lambda: build.byte_level(vocabulary, merges, cuts), repr(str(folder / "vocab.json")))
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    elif config.get("add_prefix_space"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for name, i in sorted(added_ids(folder).items(), key=lambda item: item[1]):
        _add(backend, name, i, special=True)
    _add_from(config, backend)
    defaults = _QWEN2 if family == "qwen2" else _ROBERTA if family in _FRAMED else _GPT2
    roles = {**_present(defaults, backend.get_vocab(with_added_tokens=True)), **named_roles(folder)}
    if family in _FRAMED:
        begin, end = roles.get("cls_token", roles.get("bos_token")), roles.get("sep_token", roles.get("eos_token"))
        _make_special(backend, roles)
        build.frame(backend, "begin A end", "begin A end end B end", begin=begin, end=end)
    else:
        _frame_by_flags(config, backend, roles)
    return _finished(folder, backend, roles)


_FRAMED = {"roberta", "bart", "longformer", "led"}
_FAMILIES = {"gpt2", "codegen", "gpt_neo", "opt", "qwen2", *_FRAMED}


def _finished(folder: Path, backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with its special tokens marked as such, its end and its template."""
    _make_special(backend, roles)
    specials = {added.content: i for i, added in added_tokens(backend) if added.special}
    chosen = {role: name for role, name in roles.items() if name in specials or role == "eos_token"}
    ends = end_ids_of(folder)
    plain = BackendTokenizer(backend, chosen)
    if not {"eos_token", "sep_token"} & chosen.keys():
        names = {i: name for name, i in specials.items()}
        guesses = [*ends, plain.frame.ends[1], *sorted(names)]
        end = next((names[i] for i in guesses if i in names), None)
        chosen |= {} if end is None else {"eos_token": end}
    begin = plain.frame.ends[0]
    if not {"bos_token", "cls_token"} & chosen.keys() and begin is not None:
        chosen["bos_token"] = str(backend.id_to_token(begin))
    for role, names_of_role in _USUAL.items():
        usual = next((name for name in names_of_role if name in specials), None)
        chosen = chosen if role in chosen or usual is None else {**chosen, role: usual}
    return BackendTokenizer(backend, chosen, end_ids=ends, chat_template=chat_template_of(folder))


_USUAL = {"pad_token": ("[PAD]", "<pad>"), "unk_token": ("[UNK]", "<unk>"), "mask_token": ("[MASK]", "<mask>")}


def _frame_by_flags(config: Mapping[str, Any], backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> None:
    """Frame as `add_bos_token` and `add_eos_token` say; where there is a tokenizer.json, its post-processor does."""
    _make_special(backend, roles)
    begin = roles.get("bos_token") if config.get("add_bos_token") else None
    end = roles.get("eos_token") if config.get("add_eos_token") else None
    known = {
        name: text for name, text in (("begin", begin), ("end", end)) if backend.token_to_id(text or "") is not None
    }
    names = {"begin": known.get("begin"), "end": known.get("end")}
    build.frame(backend, "begin A end", "begin A end begin:1 B:1 end:1", **names)


def _make_special(backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> None:
    """Tokens of the vocabulary that have a role are special, whether or not the file says so."""
    special = {added.content for _, added in added_tokens(backend) if added.special}
    names = [name for name in dict.fromkeys(roles.values()) if name not in special]
    known = [name for name in names if backend.token_to_id(name) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in known])


def _add_from(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Add the tokens that only tokenizer_config.json knows, under the ids it gives."""
    known = backend.get_added_tokens_decoder()
    for token, name, special in listed_tokens(config):
        if token not in known:
            _add(backend, name, token, special=special)


def _add(backend: tokenizers.Tokenizer, name: str, token: int, *, special: bool) -> None:
    add = backend.add_special_tokens if special else backend.add_tokens
    add([tokenizers.AddedToken(name, special=special, normalized=False)])
    if backend.token_to_id(name) != token:
        raise ValueError(
            f"Added token {name!r} has id {token!r}, but the vocabulary gives it {backend.token_to_id(name)};"
            " convert the tokenizer to tokenizer.json."
        )


def _present(roles: Mapping[str, str], vocabulary: Mapping[str, int]) -> dict[str, str]:
    return {role: name for role, name in roles.items() if name in vocabulary}


def _check_merges(model: object, path: Path) -> None:
    """Refuse merges whose second token lacks the prefix that is taken off it: the library would end the program."""
    data = model if isinstance(model, dict) else {}
    prefix, merges = data.get("continuing_subword_prefix"), data.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    wrong = [pair for pair in pairs if not (isinstance(pair, list) and pair and str(pair[-1]).startswith(prefix))]
    if wrong:
        raise ValueError(f"{str(path)!r} is damaged (merge {wrong[0]!r} lacks {prefix!r}); save the tokenizer again.")


def _merges(path: Path) -> list[tuple[str, str]]:
    lines = _text(path).split("\n")
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    start = 1 if lines[0].startswith("#version") else 0
    wrong = next((i for i, pair in enumerate(pairs) if i >= start and len(pair) != 2 and pair != ("",)), None)
    if wrong is not None:
        raise ValueError(f"{str(path)!r} is damaged: line {wrong + 1} is {lines[wrong]!r}, not two tokens and a space.")
    return [(pair[0], pair[1]) for pair in pairs[start:] if len(pair) == 2]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8 ({error}); fetch the file again.") from None
