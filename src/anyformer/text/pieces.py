"""SentencePiece models, through the `sentencepiece` package (the extra of that name)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyformer.files import replacing
from anyformer.text.base import Frame, Tokenizer, well_formed
from anyformer.text.config import (
    added_ids,
    chat_template_of,
    end_ids_of,
    listed_tokens,
    named_roles,
    read_optional,
    write_config,
)

__all__ = ["SentencePieceTokenizer"]

# Tokenizers whose ids are not those of their SentencePiece model.
_RENUMBERED = ("xlmroberta", "camembert", "mbart", "marian", "nllb", "m2m100", "pegasus", "bigbirdpegasus", "xglm")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with its special tokens.

    Args:
        model: the bytes of the model file.
        name: the file's name, under which `save` writes it.
        config: the content of tokenizer_config.json.
        roles: the text of the special token in each role.
        added: ids of tokens beyond the model's pieces, by their text.
        end_ids: further tokens that end a text.
        chat_template: Jinja, or None.

    Raises:
        ValueError: `sentencepiece` is not installed, or the model is damaged.
    """

    def __init__(
        self,
        model: bytes,
        name: str = "tokenizer.model",
        *,
        config: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        added: Mapping[str, int] | None = None,
        end_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._processor, self._model, self._name = _processor(model, name), model, name
        self._config, self._added, size = dict(config or {}), dict(added or {}), self._processor.vocab_size()
        roles = {**_roles(self._processor), **(roles or {})}
        specials = {self._piece_of(i): i for i in range(size) if self._is_special(i)}
        named = {text: self._processor.piece_to_id(text) for text in roles.values() if text not in self._added}
        specials |= {text: i for text, i in named.items() if self._processor.id_to_piece(i) == text}
        specials |= self._added
        kept = {role: text for role, text in roles.items() if text in specials}
        super().__init__(
            max(size, *(i + 1 for i in self._added.values())) if self._added else size,
            specials,
            kept,
            end_ids=end_ids,
            frame=_frame(self._processor, self._config, {role: specials[text] for role, text in kept.items()}),
            chat_template=chat_template,
        )
        self._texts = {i: text for text, i in self._added.items()}
        self._pieces = dict[tuple[int, bool], tuple[bytes, bytes]]()

    @classmethod
    def load(cls, path: Path) -> SentencePieceTokenizer:
        """Read a model file with the small files beside it."""
        folder = path.parent
        config = read_optional(folder, "tokenizer_config.json")
        family = str(config.get("tokenizer_class") or read_optional(folder, "config.json").get("model_type") or "")
        family = family.lower().removesuffix("fast").removesuffix("tokenizer").replace("-", "").replace("_", "")
        if family in _RENUMBERED:
            raise ValueError(
                f"{str(path)!r} is of {family!r}, whose ids are not those of its SentencePiece model;"
                " convert it to tokenizer.json."
            )
        added = {**added_ids(folder), **_added(config)}
        model = path.read_bytes()
        size = _processor(model, path.name).vocab_size()
        if family in ("t5", "mt5") and not added:
            stated = config.get("extra_ids", 100 if family == "t5" else 0)
            count = stated if isinstance(stated, int) else 0
            added = {f"<extra_id_{i}>": size + count - 1 - i for i in range(count)}
        return cls(
            model,
            path.name,
            config=config,
            roles=named_roles(folder),
            added={name: i for name, i in added.items() if i >= size},
            end_ids=end_ids_of(folder),
            chat_template=chat_template_of(folder),
        )

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [self._processor.encode(well_formed(text), out_type=int) for text in texts]

    def save(self, folder: str | Path) -> None:
        with replacing(Path(folder, self._name)) as file:
            file.write(self._model)
        entries = {
            str(i): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for text, i in self._added.items()
        }
        write_config(folder, {**self._config, **({"added_tokens_decoder": entries} if entries else {})}, self)

    def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
        if (token, first) not in self._pieces:
            self._pieces[token, first] = self._spell(token, first), b""
        return self._pieces[token, first]

    def _spell(self, token: int, first: bool) -> bytes:
        """What the token adds to a text, by asking the model; bytes and added tokens are written as they are."""
        if token in self._texts or token >= self._processor.vocab_size():
            return self._texts.get(token, "").encode()
        text = self._piece_of(token)
        if self._processor.is_byte(token):
            byte = int(text[3:5], 16)
            return bytes([byte]) if byte >= 128 or not first else self._processor.decode([token]).encode()
        if token in self._hidden:
            return text.encode()
        before = [] if first else ["▁a"]
        return self._processor.decode([*before, text])[len(before) :].encode()

    def _piece_of(self, token: int) -> str:
        return self._processor.id_to_piece(token)

    def _is_special(self, token: int) -> bool:
        return self._processor.is_control(token) or self._processor.is_unknown(token)


def _processor(model: bytes, name: str) -> Any:
    try:
        package = importlib.import_module("sentencepiece")
    except ImportError:
        raise ValueError(
            f"{name} is a SentencePiece model, which needs the package sentencepiece:"
            " pip install 'anyformer[sentencepiece]'."
        ) from None
    processor = package.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{name} is damaged ({' '.join(str(error).split())}); fetch the file again.") from None
    return processor


def _roles(processor: Any) -> dict[str, str]:
    """The roles that the model itself gives: its begin, end, unknown and padding."""
    ids = {"bos_token": "bos_id", "eos_token": "eos_id", "unk_token": "unk_id", "pad_token": "pad_id"}
    found = {role: getattr(processor, name)() for role, name in ids.items()}
    roles = {role: processor.id_to_piece(i) for role, i in found.items() if i >= 0}
    usual = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}  # ALBERT
    known = {role: text for role, text in usual.items() if processor.id_to_piece(processor.piece_to_id(text)) == text}
    return {**roles, **known}


def _frame(processor: Any, config: Mapping[str, Any], ids: Mapping[str, int]) -> Frame:
    """[CLS] and [SEP] where the model has them; else begin and end as the configuration says.

    Without a word there, a model that has a begin token expects it (LLaMA), and one that has none, the end (T5).
    """
    if {"cls_token", "sep_token"} <= ids.keys():
        begin, end = ids["cls_token"], ids["sep_token"]
        pair = ((begin, 0), ("A", 0), (end, 0), ("B", 1), (end, 1))
        return Frame(((begin, 0), ("A", 0), (end, 0)), pair)
    has_begin = processor.bos_id() >= 0
    before = _wanted("bos_token", config.get("add_bos_token", has_begin), ids)
    after = _wanted("eos_token", config.get("add_eos_token", not has_begin), ids)
    kind = 1 if before else 0  # of the second text: T5 has no token types
    first: list[tuple[int | str, int]] = [(part, 0) for part in [*before, "A", *after]]
    second: list[tuple[int | str, int]] = [(part, kind) for part in [*before, "B", *after]]
    return Frame(tuple(first), (*first, *second))


def _wanted(role: str, wanted: object, ids: Mapping[str, int]) -> list[int | str]:
    return [ids[role]] if wanted and role in ids else []


def _added(config: Mapping[str, Any]) -> dict[str, int]:
    return {name: token for token, name, _ in listed_tokens(config)}
