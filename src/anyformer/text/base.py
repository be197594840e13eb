"""What every tokenizer does: text to ids and back, exactly, framed as the model expects, as a whole or as a stream.

User text is data: "<|end|>" typed by a person is encoded as the characters it is made of. Only a template, which the
program wrote, may hold special tokens (`special=True`).
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anyformer.files import write_text

__all__ = ["END", "ByteTokenizer", "Frame", "TextStream", "Tokenizer", "any_of", "well_formed"]

END = "<|end|>"


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


def any_of(specials: Iterable[str]) -> re.Pattern[str]:
    """Matches a special token, as a group; of two that begin alike, the longer."""
    names = sorted(specials, key=len, reverse=True)
    return re.compile("(" + "|".join(re.escape(name) for name in names) + ")" if names else r"((?!))")


@dataclass(frozen=True)
class Frame:
    """What a model expects around a text, and around a pair: special tokens by id and the texts "A" and "B" by name.

    Each part has its token type: BERT's pair is `((101, 0), ("A", 0), (102, 0), ("B", 1), (102, 1))`.

    Raises:
        ValueError: a text is not there just once.
    """

    single: tuple[tuple[int | str, int], ...] = (("A", 0),)
    pair: tuple[tuple[int | str, int], ...] = (("A", 0), ("B", 1))

    def __post_init__(self) -> None:
        for parts, texts in ((self.single, ["A"]), (self.pair, ["A", "B"])):
            found = [part for part, _ in parts if isinstance(part, str)]
            if sorted(found) != texts:
                raise ValueError(f"A frame must hold each of the texts {texts} once, but this one holds {found}.")

    def around(self, text: Sequence[int]) -> list[int]:
        """The ids of one text with its frame."""
        return [token for part, _ in self.single for token in (text if isinstance(part, str) else [part])]

    def around_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids of a pair with its frame, and the token type of each."""
        texts, ids, types = {"A": first, "B": second}, list[int](), list[int]()
        for part, kind in self.pair:
            piece = texts[part] if isinstance(part, str) else [part]
            ids += piece
            types += [kind] * len(piece)
        return ids, types

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """The special tokens before and after one text, where there are any."""
        first, last = (part for part, _ in (self.single[0], self.single[-1]))
        return first if isinstance(first, int) else None, last if isinstance(last, int) else None


class TextStream:
    """Turns ids into text one at a time, and gives out whole characters only.

    All pushes and the flush together are `decode` of all ids: bytes that form no character become U+FFFD as there.

    Args:
        piece: the bytes of a token and those that follow it if another token does; told whether it is the first one.
            None for a token that is left out.
    """

    def __init__(self, piece: Callable[[int, bool], tuple[bytes, bytes] | None]) -> None:
        self._piece, self._first, self._gap = piece, True, b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; may be empty."""
        piece = self._piece(int(token), self._first)
        if piece is None:
            return ""
        text, self._first = self._decoder.decode(self._gap + piece[0]), False
        self._gap = piece[1]
        return text

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        vocab_size: every id is below it.
        specials: the special tokens, by their text.
        roles: the text of the special token in each role, by its name in `tokenizer_config.json` (`eos_token`).
        end_ids: the tokens that end a text; may be none. The tokenizer's own end is one of them.
        begin_id, pad_id, unk_id, mask_id: the special tokens of these roles, where the tokenizer has them.
        frame: what the model expects around a text.
        chat_template: the model's template for messages, in Jinja; see `chat`.
    """

    def __init__(
        self,
        vocab_size: int,
        specials: Mapping[str, int],
        roles: Mapping[str, str],
        *,
        end_ids: Sequence[int] = (),
        frame: Frame = Frame(),
        chat_template: str | None = None,
    ) -> None:
        self.vocab_size, self.specials, self.roles = vocab_size, dict(specials), dict(roles)
        self.frame, self.chat_template = frame, chat_template
        self._end = self._role("eos_token", "sep_token")
        own = () if self._end is None else (self._end,)
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys([*end_ids, *own]))
        self.begin_id = self._role("bos_token", "cls_token")
        self.pad_id, self.unk_id = self._role("pad_token"), self._role("unk_token")
        self.mask_id = self._role("mask_token")
        self._hidden, self._special = frozenset(self.specials.values()), any_of(self.specials)

    @property
    def end_id(self) -> int:
        """The special token that ends a document; BERT's is [SEP].

        Raises:
            ValueError: the tokenizer has none.
        """
        if self._end is None:
            names = sorted(self.specials)[:10]
            raise ValueError(f"This tokenizer names no token that ends a text; its special tokens are {names}.")
        return self._end

    def encode(self, text: str, *, special: bool = False, frame: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            special: the texts of special tokens stand for them; without, for themselves.
            frame: put around the text what the model expects, such as [CLS] and [SEP].
        """
        ids = self._encode_template(text) if special else self.encode_batch([text])[0]
        return self.frame.around(ids) if frame else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts in the model's frame, and the token type of each. The texts are data."""
        return self.frame.around_pair(*self.encode_batch([first, second]))

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """The ids of texts in a row, each told to be data (False) or a special token (True)."""
        known = list(parts)
        data = iter(self.encode_batch([text for text, special in known if not special]))
        return [token for text, special in known for token in ([self.specials[text]] if special else next(data))]

    @abstractmethod
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, which is all data: special tokens never come out."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are left out, or written as their text with `special`.

        Bytes that form no character become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        stream = self.stream(special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, special: bool = False) -> TextStream:
        """Decoding of one text, token by token."""
        hidden = frozenset[int]() if special else self._hidden
        return TextStream(lambda token, first: None if token in hidden else self.piece(token, first=first))

    def piece(self, token: int, *, first: bool = False) -> tuple[bytes, bytes]:
        """What a token adds to a text: its bytes, and those that come after it if another token does.

        Args:
            token: a special one is spelled as its text.
            first: no token is before it; SentencePiece then leaves out the space that begins it.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"Id {token} is not in the vocabulary, whose ids are 0..{self.vocab_size - 1}.")
        return self._piece(token, first)

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the tokenizer to `folder`, for `load_tokenizer`."""

    @abstractmethod
    def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
        """The bytes of a token, and those that come after it if another token does."""

    def _encode_template(self, text: str) -> list[int]:
        return self.encode_parts((part, i % 2 == 1) for i, part in enumerate(self._special.split(text)))

    def _role(self, *roles: str) -> int | None:
        found = [self.specials.get(self.roles[role]) for role in roles if role in self.roles]
        return found[0] if found else None


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text as ids 0..255, and 256 for the end of a document."""

    def __init__(self) -> None:
        super().__init__(257, {END: 256}, {"eos_token": END})

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [list(well_formed(text).encode()) for text in texts]

    def save(self, folder: str | Path) -> None:
        write_text(Path(folder, "tokenizer.json"), json.dumps({"kind": "byte"}) + "\n")

    def _piece(self, token: int, first: bool) -> tuple[bytes, bytes]:
        return (END.encode() if token == 256 else bytes([token])), b""
