"""Tokenizers: text to ids and back, exactly. Bytes as they are, or byte-level byte pair encoding (BPE).

User text is data: "<|end|>" typed by a person is encoded as the characters it is made of. Only a template, which the
program wrote, may hold special tokens (`special=True`).
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from anyformer.files import write_text

__all__ = ["BPETokenizer", "ByteTokenizer", "TextStream", "Tokenizer", "load_tokenizer", "well_formed"]

END = "<|end|>"

# How text is cut before the merges, which never cross a cut. Every part is bounded, so that time is linear in the text
# whatever it holds. Longer pieces (signs with the line end; several signs and a word; whole lines) make 3-12 % fewer
# tokens of Python source, but a small model then ended 4-6 % higher in bits per byte after as many steps.
_PIECES = (
    r"(?: |[^\s\p{L}\p{N}])?[\p{L}\p{M}]{1,64}"  # a word with the space or sign before it; Chinese up to a stop
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,32}"  # signs
    r"|[\r\n]{1,16}[ \t]{0,48}"  # line ends and the indentation after them
    r"|\s{1,64}(?!\S)|\s{1,64}"  # other spaces; the last one stays for a word
)


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined into their character and each lone surrogate replaced by U+FFFD.

    A Python str may hold surrogates (JSON escapes, file names), which UTF-8 cannot express. Every text passes here, in
    training and encoding alike; one without surrogates is returned as it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class TextStream:
    """Turns ids into text one at a time, and gives out whole characters only.

    All pushes and the flush together are `decode` of all ids: bytes that form no character become U+FFFD as there.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; may be empty."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        vocab_size: every id is below it.
        specials: the special tokens, by their text.
        end_id: the special token that ends a document.
    """

    def __init__(self, pieces: Sequence[bytes], specials: Mapping[str, int], end: str) -> None:
        self.vocab_size = len(pieces)
        self.specials = dict(specials)
        self.end_id = self.specials[end]
        self._pieces, self._hidden = pieces, frozenset(self.specials.values())
        self._special = _any_of(self.specials)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`. With `special`, the texts of special tokens stand for them; without, for themselves."""
        if not special:
            return self.encode_batch([text])[0]
        parts = self._special.split(text)  # every second one is a special token
        plain = self.encode_batch(parts[::2])
        for ids, name in zip(plain, parts[1::2], strict=False):
            ids.append(self.specials[name])
        return [token for ids in plain for token in ids]

    @abstractmethod
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, which is all data: special tokens never come out."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are left out, or written as their text with `special`.

        Bytes that form no character become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return b"".join(self._piece(token, special) for token in ids).decode("utf-8", "replace")

    def stream(self, *, special: bool = False) -> TextStream:
        """Decoding of one text, token by token."""
        return TextStream(lambda token: self._piece(token, special))

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the tokenizer to `folder`, for `load_tokenizer`."""

    def _piece(self, token: int, special: bool) -> bytes:
        token = int(token)
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"Id {token} is not in the vocabulary, whose ids are 0..{self.vocab_size - 1}.")
        return b"" if token in self._hidden and not special else self._pieces[token]


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text as ids 0..255, and 256 for the end of a document."""

    def __init__(self) -> None:
        super().__init__([*(bytes([byte]) for byte in range(256)), END.encode()], {END: 256}, END)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [list(well_formed(text).encode()) for text in texts]

    def save(self, folder: str | Path) -> None:
        write_text(Path(folder, "tokenizer.json"), json.dumps({"kind": "byte"}) + "\n")


class BPETokenizer(Tokenizer):
    """Byte-level BPE. Any byte has an id, so that any text survives, seen in training or not.

    `save` writes the two files that Hugging Face's tokenizers read as well.

    Args:
        backend: a byte-level BPE tokenizer; it is changed to encode the text of special tokens as data.
        end: the special token that ends a document.

    Raises:
        ValueError: `end` is no special token of `backend`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end: str) -> None:
        specials = {added.content: i for i, added in _added(backend) if added.special}
        if end not in specials:
            raise ValueError(f"The end token {end!r} is not among the special tokens, which are {sorted(specials)}.")
        super().__init__(_byte_pieces(backend), specials, end)
        self._backend, self._end = backend, end
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, specials: Sequence[str] = (END,)) -> BPETokenizer:
        """Learn merges from `texts` until there are `vocab_size` tokens, or no pair that occurs twice (then fewer).

        Args:
            texts: read once. Without any, the vocabulary is the 256 bytes and the special tokens.
            vocab_size: the 256 bytes, the merges and the special tokens together.
            specials: the special tokens, with the highest ids; the first ends a document.

        Raises:
            ValueError: `vocab_size` leaves no room for the bytes and special tokens, or a special token is empty, given
                twice, or the text of a byte.
        """
        _check_training(vocab_size, specials)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend = _untrained()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(specials), initial_alphabet=alphabet, min_frequency=2, show_progress=False
        )
        backend.train_from_iterator(_without(specials, texts), trainer)
        _add_specials(backend, specials)
        return cls(backend, specials[0])

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        batch = [well_formed(text) for text in texts]
        return [row.ids for row in self._backend.encode_batch_fast(batch, add_special_tokens=False)]

    def save(self, folder: str | Path) -> None:
        write_text(Path(folder, "tokenizer.json"), self._backend.to_str())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._end}
        write_text(Path(folder, "tokenizer_config.json"), json.dumps(config, ensure_ascii=False, indent=2) + "\n")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer in `folder`: `tokenizer.json`, from here or from Hugging Face if it is a byte-level BPE.

    The token that ends a document is `eos_token` of `tokenizer_config.json`, or else the special token of lowest id.

    Raises:
        ValueError: the file is missing, damaged, or of another kind of tokenizer.
    """
    path = Path(folder, "tokenizer.json")
    data = _read_json(path)
    if data.get("kind") == "byte":
        return ByteTokenizer()
    kind = [(data.get(part) or {}).get("type") for part in ("model", "decoder")]
    if kind != ["BPE", "ByteLevel"]:
        raise ValueError(f"{str(path)!r} has model and decoder {kind}, but only byte-level BPE is read; convert it.")
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the tokenizer again.") from None
    return BPETokenizer(backend, _end_of(backend, path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); save a tokenizer there first.") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the tokenizer again.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{str(path)!r} holds no tokenizer but a {type(data).__name__}; save the tokenizer again.")
    return data


def _end_of(backend: tokenizers.Tokenizer, path: Path) -> str:
    config = path.with_name("tokenizer_config.json")
    named = _read_json(config).get("eos_token") if config.exists() else None
    specials = [added.content for _, added in _added(backend) if added.special]
    if named is None and not specials:
        raise ValueError(f"{str(path)!r} has no special token to end a document; add one, such as {END!r}.")
    return str(named["content"] if isinstance(named, dict) else named or specials[0])


def _check_training(vocab_size: int, specials: Sequence[str]) -> None:
    least = 256 + len(specials)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size is {vocab_size}, but must be at least {least}: 256 bytes and {len(specials)} special tokens."
        )
    if not specials or len(set(specials)) < len(specials) or min(map(len, specials)) < 2:
        raise ValueError(
            f"Special tokens must be different and of 2 characters or more each, but are {list(specials)};"
            f" the default is [{END!r}]."
        )


def _untrained() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_specials(backend: tokenizers.Tokenizer, specials: Sequence[str]) -> None:
    taken = [name for name in specials if backend.token_to_id(name) is not None]
    if taken:  # not by its own text, which was not trained on: a vocabulary writes the bytes of "é" as "Ã©"
        raise ValueError(f"Special token {taken[0]!r} is how a vocabulary writes other bytes; choose one in ASCII.")
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in specials])


def _without(specials: Iterable[str], texts: Iterable[str]) -> Iterator[str]:
    """The texts cut at special tokens, so that no learned token has the text, and so the id, of a special one."""
    pattern = _any_of(specials)
    for text in texts:
        yield from pattern.split(well_formed(text))[::2]


def _any_of(specials: Iterable[str]) -> re.Pattern[str]:
    """Matches a special token, as a group; of two that begin alike, the longer."""
    return re.compile("(" + "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True)) + ")")


def _added(backend: tokenizers.Tokenizer) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens beside the merges, by id."""
    return sorted(backend.get_added_tokens_decoder().items(), key=lambda item: item[0])


def _byte_pieces(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of each id, (vocab_size,); an id that no token has, as in some published vocabularies, has none."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces, byte = [b""] * (max(vocabulary.values()) + 1), _byte_of_letter()
    for token, i in vocabulary.items():
        pieces[i] = bytes(byte[letter] for letter in token) if byte.keys() >= set(token) else token.encode()
    for i, added in _added(backend):
        pieces[i] = added.content.encode()
    return pieces


def _byte_of_letter() -> dict[str, int]:
    """The printable letter by which GPT-2 and all after it write each byte in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
