"""Tokenizers of published models put together from their vocabularies, for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

__all__ = ["CUTS", "byte_level", "damaged", "frame", "scored_pieces", "word_pieces"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How published byte-level models cut text before the merges: each expression cuts what those before it left whole.
# Those of GPT-2, LLaMA 3, SmolLM, Qwen 2 and Falcon; "default" is for files that name none.
CUTS: Mapping[str, Sequence[str]] = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LATER % r"\p{N}{1,3}",),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_LATER % r"\p{N}",),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def byte_level(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    cuts: Sequence[str],
    *,
    whole_words: bool = False,
) -> tokenizers.Tokenizer:
    """Byte-level BPE.

    Args:
        vocabulary: ids by token, bytes written as letters.
        merges: pairs of tokens, the first to be merged first.
        cuts: regular expressions; see `CUTS`.
        whole_words: a piece that is in the vocabulary is one token, whatever the merges would make of it (LLaMA 3).
    """
    backend = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges), ignore_merges=whole_words))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") for cut in cuts]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def word_pieces(
    vocabulary: Mapping[str, int],
    unknown: str,
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    cut_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """BERT's WordPiece: words cut at spaces and signs, then the longest piece first.

    Args:
        vocabulary: ids by piece; "##" begins one that continues a word.
        unknown: the token of words that no pieces make.
        lowercase: the vocabulary is lower case.
        strip_accents: take marks off letters; None does so for a lower-case vocabulary.
        cut_chinese: every Chinese character is a word.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=cut_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return backend


def scored_pieces(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: str | None, *, prefix_space: bool = True
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the neighbours that form the piece of the highest score are merged first.

    Args:
        vocabulary: ids by piece, spaces written "▁"; <0x00>..<0xFF> stand for the bytes of what no piece holds.
        scores: the pieces that a merge may make; special tokens and bytes are not among them.
        unknown: the token of what even bytes cannot express.
        prefix_space: put a space before every text.
    """
    order = sorted(scores, key=lambda piece: -scores[piece])
    merges = [pair for piece in order for pair in _halves(piece, vocabulary)]
    model = models.BPE(dict(vocabulary), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    space = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*plain, *strip])
    return backend


def _halves(piece: str, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make `piece`; the earlier tokens first."""
    cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
    pairs = [(a, b) for a, b in cuts if a in vocabulary and b in vocabulary]
    return sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def frame(backend: tokenizers.Tokenizer, single: str, pair: str, **names: str | None) -> None:
    """Frame texts as the templates say.

    Args:
        backend: its post-processor is set.
        single: what is around one text A: "begin A end".
        pair: what is around two; "B:1" is text B of token type 1.
        names: the special tokens that the templates name; those that are None are left out.

    Raises:
        ValueError: the vocabulary lacks one of them.
    """
    missing = [name for name in names.values() if name is not None and backend.token_to_id(name) is None]
    if missing:
        raise ValueError(f"The special token {missing[0]!r}, which frames a text, is not in the vocabulary.")
    parts = [_filled(template, names) for template in (single, pair)]
    specials = [(name, backend.token_to_id(name)) for name in dict.fromkeys(names.values()) if name is not None]
    backend.post_processor = processors.TemplateProcessing(single=parts[0], pair=parts[1], special_tokens=specials)


def _filled(template: str, names: Mapping[str, str | None]) -> list[str]:
    parts = [part.partition(":") for part in template.split()]
    texts = {"A": "$A", "B": "$B", **names}
    return [f"{texts[name]}:{kind or 0}" for name, _, kind in parts if texts[name] is not None]


def damaged(build: Callable[[], Any], what: str) -> Any:
    """What `build` makes.

    Raises:
        ValueError: the library refuses; it raises no narrower class than Exception.
    """
    try:
        return build()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what} is damaged ({reason}); save the tokenizer again.") from None
