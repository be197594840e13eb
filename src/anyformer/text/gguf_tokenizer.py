"""The tokenizer inside a GGUF file, from its metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers

from anyformer.text import build
from anyformer.text.backend import BackendTokenizer
from anyformer.text.base import Tokenizer

__all__ = ["gguf_tokenizer"]

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # so it is spelled
}
_MORE_ENDS = ("eot_token_id", "eom_token_id")
_BEGIN_BY_DEFAULT = {"llama-bpe"}  # byte-level files that name no `add_bos_token` but expect one


class _Type(IntEnum):
    NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: plain Python values by key; those that begin with "tokenizer." are read. The kinds
            (`tokenizer.ggml.model`) are "gpt2" (byte-level BPE), "llama" (SentencePiece's BPE) and "bert" (WordPiece).

    Raises:
        ValueError: an unknown kind or pre-tokenizer, a key that is missing, or values that do not fit together.
    """
    kind, tokens = _get(metadata, "model", str), _get(metadata, "tokens", list)
    if kind not in _KINDS:
        raise ValueError(f"{_PREFIX}model is {kind!r}, but the kinds that are read are {sorted(_KINDS)}.")
    _check(all(isinstance(token, str) for token in tokens), f"{_PREFIX}tokens", "holds what is no text")
    types = metadata.get(_PREFIX + "token_type") or [_Type.NORMAL] * len(tokens)
    _check(len(types) == len(tokens), f"{_PREFIX}token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    roles = {role: tokens[i] for role, key in _ROLES.items() if (i := _token_id(metadata, key, tokens)) is not None}
    if kind == "bert":
        tokens = _word_pieces(tokens, types)
    backend = build.damaged(lambda: _KINDS[kind](metadata, tokens, types, roles), "The GGUF file's tokenizer")
    _add(backend, tokens, types, roles)
    _frame(backend, kind, metadata, roles)
    ends = [_token_id(metadata, key, tokens) for key in _MORE_ENDS]
    template = metadata.get("tokenizer.chat_template")
    return BackendTokenizer(
        backend,
        roles,
        end_ids=[i for i in ends if i is not None],
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], roles: Mapping[str, str]
) -> tokenizers.Tokenizer:
    name = metadata.get(_PREFIX + "pre", "default")
    if name not in build.CUTS:
        raise ValueError(f"{_PREFIX}pre is {name!r}, but the pre-tokenizers that are known are {sorted(build.CUTS)}.")
    merges = [_pair(merge) for merge in _get(metadata, "merges", list)]
    return build.byte_level(_ids(tokens), merges, build.CUTS[name], whole_words=name == "llama-bpe")


def _scored(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], roles: Mapping[str, str]
) -> tokenizers.Tokenizer:
    scores = _get(metadata, "scores", list)
    _check(len(scores) == len(tokens), f"{_PREFIX}scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    merged = (_Type.NORMAL, _Type.UNUSED)
    made = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind in merged}
    space = bool(metadata.get(_PREFIX + "add_space_prefix", True))
    return build.scored_pieces(_ids(tokens), made, roles.get("unk_token"), prefix_space=space)


def _bert(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], roles: Mapping[str, str]
) -> tokenizers.Tokenizer:
    _check("unk_token" in roles, f"{_PREFIX}unknown_token_id", "is missing")
    lowercase = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    strip = metadata.get("tokenizer.ggml.normalizer.strip_accents")
    return build.word_pieces(_ids(tokens), roles["unk_token"], lowercase=lowercase, strip_accents=strip)


_KINDS = {"gpt2": _byte_level, "llama": _scored, "bert": _bert}


def _word_pieces(tokens: list[str], types: list[int]) -> list[str]:
    """BERT's own spelling ("##ing") of pieces that the file spells by their beginning ("▁sing", "ing")."""

    def piece(token: str, kind: int) -> str:
        if token.startswith("▁"):
            return token[1:]
        plain = kind == _Type.NORMAL and not (token.startswith("[") and token.endswith("]"))
        return "##" + token if plain else token

    return [piece(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _add(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], roles: Mapping[str, str]) -> None:
    """Mark the special tokens, and those that users of the model added: both are found in a text before all else."""
    named = set(roles.values())
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _Type.CONTROL or token in named]
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == _Type.USER and token not in named]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in added])


def _frame(backend: tokenizers.Tokenizer, kind: str, metadata: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    if kind == "bert":
        begin, end = roles.get("cls_token", roles.get("bos_token")), roles.get("sep_token", roles.get("eos_token"))
        build.frame(backend, "begin A end", "begin A end B:1 end:1", begin=begin, end=end)
        return
    usual = kind == "llama" or metadata.get(_PREFIX + "pre") in _BEGIN_BY_DEFAULT
    begin = roles.get("bos_token") if metadata.get(_PREFIX + "add_bos_token", usual) else None
    end = roles.get("eos_token") if metadata.get(_PREFIX + "add_eos_token", False) else None
    build.frame(backend, "begin A end", "begin A end begin:1 B:1 end:1", begin=begin, end=end)


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = str(merge).partition(" ")
    _check(bool(left and right), f"{_PREFIX}merges", f"holds {merge!r}, not two tokens and a space between")
    return left, right


def _token_id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    _check(isinstance(value, int) and 0 <= value < len(tokens), _PREFIX + key, f"is {value!r}, no id of a token")
    return int(value)


def _get(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(_PREFIX + key)
    _check(isinstance(value, kind), _PREFIX + key, f"is a {type(value).__name__}, not a {kind.__name__},")
    return value


def _check(right: bool, what: str, wrong: str) -> None:
    if not right:
        raise ValueError(f"{what} {wrong} in this GGUF file; convert the model again.")
