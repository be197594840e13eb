"""Tokenizers of the `tokenizers` library, of any kind: byte-level and other BPE, WordPiece, Unigram.

The library encodes. What it lacks is here: text that is data whatever the model's vocabulary holds, the frame as plain
data, and decoding token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from anyformer.files import write_text
from anyformer.text.base import Frame, Tokenizer, well_formed
from anyformer.text.config import write_config

__all__ = ["BackendTokenizer", "byte_of_letter"]

_MODE = threading.Lock()  # a backend is told how to read special tokens, then encodes


class BackendTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    `save` writes the two files that Hugging Face's libraries read as well.

    Args:
        backend: what encodes; it is changed to encode the text of special tokens as data. Its post-processor says
            what the frame is.
        roles: the text of the special token in each role (`eos_token`, `sep_token`, `pad_token`, ...).
        end_ids: further tokens that end a text.
        chat_template: Jinja, or None.

    Raises:
        ValueError: a token of `roles` is no special token of `backend`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        roles: Mapping[str, str],
        *,
        end_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        specials = {added.content: i for i, added in added_tokens(backend) if added.special}
        for role, name in roles.items():
            if name not in specials:
                what = "end token" if role == "eos_token" else role
                raise ValueError(f"The {what} {name!r} is not among the special tokens, which are {_some(specials)}.")
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        frame = _frame(json.loads(backend.post_processor.__getstate__()) if backend.post_processor else None)
        super().__init__(size, specials, roles, end_ids=end_ids, frame=frame, chat_template=chat_template)
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._pieces = backend, dict[tuple[int, bool], tuple[bytes, bytes]]()
        self._guarded = self._hidden - {self.unk_id}
        self._unk = roles.get("unk_token")
        self._spell = _Spelling(backend)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        batch = [well_formed(text) for text in texts]
        with _MODE:
            rows = self._backend.encode_batch_fast(batch, add_special_tokens=False)
        return [self._as_data(row.ids, text) for row, text in zip(rows, batch, strict=True)]

    def save(self, folder: str | Path) -> None:
        write_text(Path(folder, "tokenizer.json"), self._backend.to_str())
        write_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast"}, self)

    def _encode_template(self, text: str) -> list[int]:
        with _MODE:
            self._backend.encode_special_tokens = False
            try:
                return list(self._backend.encode(well_formed(text), add_special_tokens=False).ids)
            finally:
                self._backend.encode_special_tokens = True

    def _as_data(self, ids: list[int], text: str) -> list[int]:
        """The ids without special tokens that the model made itself, as its vocabulary may hold "</s>" as a word."""
        if self._unk is not None and self._unk in text and self.unk_id in ids:
            with _MODE:
                row = self._backend.encode(text, add_special_tokens=False)
            typed = [text[slice(*span)].strip() == self._unk for span in row.offsets]
            ids = [part for i, name in zip(ids, typed, strict=True) for part in (self._spelled(i) if name else [i])]
        if self._guarded.isdisjoint(ids):
            return ids
        return [part for i in ids for part in (self._spelled(i) if i in self._guarded else [i])]

    def _spelled(self, token: int) -> list[int]:
        """The ids of the text of a special token, of which none is special."""
        name, model = str(self._backend.id_to_token(token)), self._backend.model
        if len(name) == 1:
            return [] if self.unk_id is None else [self.unk_id]
        ids = [piece.id for part in (name[0], name[1:]) for piece in model.tokenize(part)]
        return [part for i in ids for part in (self._spelled(i) if i in self._guarded else [i])]

    def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
        if (token, first) not in self._pieces:
            name = self._backend.id_to_token(token)  # None for an id that no token has, as in some vocabularies
            self._pieces[token, first] = (b"", b"") if name is None else self._spell(name, first)
        return self._pieces[token, first]


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return str(listed) if len(listed) <= 20 else f"{listed[:20]} and {len(listed) - 20} more"


class _Spelling:
    """The bytes of a token by its text, found by asking the decoder what it adds to a text.

    Bytes are handled here, so that a character may come in several tokens: letters that stand for bytes ("Ġ"), and
    tokens such as <0xE6>. Bytes that form no character are then U+FFFD as Python has them, which the library counts
    otherwise.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = backend.decoder
        kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder else set()
        self._join: Callable[[list[str]], str] = decoder.decode if decoder else " ".join
        self._added = {added.content for _, added in added_tokens(backend)}
        self._bytes = byte_of_letter() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._next = len(self._after(["a"], "a"))

    def __call__(self, name: str, first: bool) -> tuple[bytes, bytes]:
        if self._bytes is not None:
            plain = name in self._added or not self._bytes.keys() >= set(name)
            return (name.encode() if plain else bytes(self._bytes[letter] for letter in name)), b""
        if self._fallback and (byte := _byte(name)) is not None and byte >= 128:
            return bytes([byte]), b""
        before = [] if first else ["a"]
        shown, followed = self._after(before, name), self._after(before, name, "a")
        return shown.encode(), followed[len(shown) : len(followed) - self._next].encode()

    def _after(self, before: list[str], *names: str) -> str:
        return self._join([*before, *names])[len(self._join(before)) if before else 0 :]


def _byte(name: str) -> int | None:
    """The byte that <0xE6> names."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


def _kinds(part: Mapping[str, Any]) -> Iterator[str]:
    yield part.get("type", "")
    for inner in part.get("decoders", []):
        yield from _kinds(inner)


def _frame(processor: Mapping[str, Any] | None) -> Frame:
    """The frame that a post-processor, as JSON, puts around texts."""
    kind = (processor or {}).get("type")
    if processor is None or kind == "ByteLevel":
        return Frame()
    if kind == "Sequence":
        frames = [_frame(inner) for inner in processor["processors"]]
        return next((frame for frame in frames if frame != Frame()), Frame())
    if kind == "TemplateProcessing":
        ids = {name: token["ids"] for name, token in processor["special_tokens"].items()}
        return Frame(*(tuple(_parts(processor[form], ids)) for form in ("single", "pair")))
    begin, end = processor["cls"][1], processor["sep"][1]
    single = ((begin, 0), ("A", 0), (end, 0))
    second = ((end, 0), ("B", 0), (end, 0)) if kind == "RobertaProcessing" else (("B", 1), (end, 1))
    return Frame(single, (*single, *second))


def _parts(template: Sequence[Mapping[str, Any]], ids: Mapping[str, list[int]]) -> Iterator[tuple[int | str, int]]:
    for part in template:
        if "Sequence" in part:
            yield part["Sequence"]["id"], part["Sequence"]["type_id"]
            continue
        name, kind = part["SpecialToken"]["id"], part["SpecialToken"]["type_id"]
        if name not in ids:
            raise ValueError(f"The tokenizer's frame names {name!r}, but no id for it; save the tokenizer again.")
        yield from ((token, kind) for token in ids[name])


def added_tokens(backend: tokenizers.Tokenizer) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens beside the model's own, by id."""
    return sorted(backend.get_added_tokens_decoder().items(), key=lambda item: item[0])


def byte_of_letter() -> dict[str, int]:
    """The printable letter by which GPT-2 and all after it write each byte in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
