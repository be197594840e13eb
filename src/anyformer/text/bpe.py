"""Byte-level byte pair encoding (BPE), trained here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from anyformer.text.backend import BackendTokenizer
from anyformer.text.base import END, any_of, well_formed

__all__ = ["BPETokenizer"]

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


class BPETokenizer(BackendTokenizer):
    """Byte-level BPE. Any byte has an id, so that any text survives, seen in training or not.

    Args:
        backend: a byte-level BPE tokenizer; it is changed to encode the text of special tokens as data.
        end: the special token that ends a document.

    Raises:
        ValueError: `end` is no special token of `backend`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end: str) -> None:
        super().__init__(backend, {"eos_token": end})

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
    pattern = any_of(specials)
    for text in texts:
        yield from pattern.split(well_formed(text))[::2]
