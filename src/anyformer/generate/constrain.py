"""Constrained generation: new text that is one of a list, matches a regular expression, or fits a JSON schema.

What may come next is worked out by `llguidance` (the extra `constrain`), byte by byte, so that a token may hold any
part of the text. A `Constraint` is data; bound to a tokenizer it gives a `Guide`, which follows one row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy as shallow
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.text.base import Tokenizer, well_formed

__all__ = ["Constraint", "Guide", "choices", "json_schema", "regex"]

# All ways to cut the text into tokens are allowed, also where there is only one text.
_HEADER = '%llguidance {"no_forcing": true}\n'
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
_SPELLED = {"/": r"\/", r"\d": "[0-9]", r"\D": "[^0-9]"}  # in a regular expression between slashes
_NO_TEXT = 0  # the slot of tokens that are never text


@dataclass(frozen=True)
class Constraint:
    """What the whole generated text must be; see `choices`, `regex` and `json_schema`.

    kind: "choices", "regex" or "json_schema".
    grammar: the choices or the schema in JSON, or the expression.
    """

    kind: str
    grammar: str

    def __post_init__(self) -> None:
        if self.kind not in _LARK:
            raise ValueError(f"a constraint's kind must be one of {sorted(_LARK)}, but is {self.kind!r}.")

    def __str__(self) -> str:
        short = self.grammar if len(self.grammar) <= 80 else self.grammar[:77] + "..."
        return f"{self.kind} {short!r}"

    def bind(self, tokenizer: Tokenizer) -> Guide:
        """A guide for one row, at the beginning of its text; for more rows copy it, which costs less.

        Raises:
            ValueError: a grammar that is invalid or that no text fits, a tokenizer that cannot be constrained, or
                `llguidance` is not installed.
        """
        package, table = _package(), _table(tokenizer)
        matcher = package.LLMatcher(table.slots, _HEADER + _LARK[self.kind](self.grammar), log_level=0)
        if matcher.is_error():
            raise ValueError(_refusal(self, matcher.get_error()))
        guide = Guide(self, tokenizer, table, matcher)
        guide.allowed(tokenizer.vocab_size)
        return guide


def choices(texts: Sequence[str]) -> Constraint:
    """The text is one of `texts`.

    Raises:
        ValueError: there are none, or a bare string is given in place of a list.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError(f"choices must be a list of 1 string or more, but are {texts!r}.")
    return Constraint("choices", json.dumps([well_formed(text) for text in texts]))


def regex(pattern: str) -> Constraint:
    r"""The text matches `pattern`, from its beginning to its end.

    The syntax is that of Rust's `regex`: as in Python, with `\p{L}` and the like, without look-around and back
    references. `\d` is 0 to 9.

    Raises:
        ValueError: it ends within an escape; `bind` finds all other faults.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError(f"the regex {pattern!r} ends in a backslash, which says nothing alone; double it.")
    return Constraint("regex", well_formed(pattern))


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    """The text is JSON that fits `schema`, in one line and with the spaces of `json.dumps`; keys in the schema's order.

    Key words that constrain and cannot be honoured ("not", "uniqueItems") are refused. JSON Schema allows further keys
    in an object unless it says `"additionalProperties": False`.

    Raises:
        ValueError: the schema is not JSON.
    """
    try:
        return Constraint("json_schema", json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema is not JSON: {error}.") from None


class Guide:
    """Follows the text of one row, and knows which tokens may come next. Made by `Constraint.bind`."""

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer, table: _Table, matcher: Any) -> None:
        self._constraint, self._tokenizer, self._table, self._matcher = constraint, tokenizer, table, matcher
        self._ids: list[int] = []
        self._complete, self._next = self._look()

    @property
    def done(self) -> bool:
        """Nothing can follow: the end has been pushed, or the text is complete and no token continues it."""
        return self._complete and not self._next.any().item()

    def allowed(self, vocab_size: int) -> Bool[Tensor, "V"]:
        """The tokens that may come next, out of `vocab_size`.

        The tokens that end a text are among them when the text is complete, and only those when the guide is `done`.
        Ids beyond the tokenizer's are not allowed.

        Raises:
            ValueError: the text is not complete, but no token continues it.
        """
        text = self._next[self._table.ids[self._where]]
        if self._complete:
            text[self._table.ends] = True
        elif not text.any():
            raise ValueError(f"no token of the tokenizer continues {self._said}; allow a text that its tokens spell.")
        out = torch.zeros(vocab_size, dtype=torch.bool)
        out[: len(text)] = text[:vocab_size]
        return out

    def push(self, token: int) -> None:
        """Take the next token.

        Raises:
            ValueError: it is not allowed (the guide is then as before), or the grammar asks too much of llguidance.
        """
        token = int(token)
        known = 0 <= token < self._tokenizer.vocab_size
        if self._complete and token in self._tokenizer.end_ids:
            self._next = torch.zeros_like(self._next)
            return
        slot = int(self._table.ids[self._where, token]) if known else _NO_TEXT
        if not self._next[slot]:
            raise ValueError(f"token {token} may not follow {self._said}; push one of those that `allowed` gives.")
        self._matcher.consume_token(slot)
        self._ids.append(token)
        self._complete, self._next = self._look()

    def copy(self) -> Guide:
        """A guide in the same place, which goes its own way."""
        twin = shallow(self)
        twin._matcher, twin._ids = self._matcher.deep_copy(), list(self._ids)
        return twin

    def _look(self) -> tuple[bool, Bool[Tensor, "S"]]:
        """Whether the text is complete, and which slots may follow."""
        complete = self._matcher.is_accepting()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        reason = self._matcher.get_error()
        if reason and not reason.startswith("NoExtension"):
            raise ValueError(f"llguidance gave up after {self._said}: {_brief(reason)}; use a simpler grammar.")
        following = torch.from_numpy(bits).bool()
        following[self._table.slots.eos_token] = False
        return complete, following

    @property
    def _where(self) -> int:
        return 1 if self._ids else 0

    @property
    def _said(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return f"the text {text!r} under the {self._constraint}"


@dataclass(frozen=True)
class _Table:
    """A tokenizer's tokens as llguidance has them: one slot for all tokens that add the same bytes to a text.

    slots: the vocabulary of bytes.
    ids: the slot of each token, (2, V): at the beginning of a text, and later.
    ends: the tokens that end a text.
    """

    slots: Any
    ids: Int[Tensor, "2 V"]
    ends: Int[Tensor, "E"]


_TABLES: WeakKeyDictionary[Tokenizer, _Table] = WeakKeyDictionary()  # a large vocabulary takes a second


def _table(tokenizer: Tokenizer) -> _Table:
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _new_table(tokenizer)
    return _TABLES[tokenizer]


def _new_table(tokenizer: Tokenizer) -> _Table:
    hidden = {*tokenizer.specials.values(), *tokenizer.end_ids}
    slots = {b"": _NO_TEXT}
    ids = [
        [
            _NO_TEXT if token in hidden else slots.setdefault(_spelled(tokenizer, token, first), len(slots))
            for token in range(tokenizer.vocab_size)
        ]
        for first in (True, False)
    ]
    package = _package()
    wrapper = package.TokenizerWrapper(_Vocabulary([*slots, b""], len(slots)))
    ends = [token for token in tokenizer.end_ids if token < tokenizer.vocab_size]
    return _Table(package.LLTokenizer(wrapper), torch.tensor(ids), torch.tensor(ends, dtype=torch.long))


def _spelled(tokenizer: Tokenizer, token: int, first: bool) -> bytes:
    text, gap = tokenizer.piece(token, first=first)
    if gap:
        raise ValueError(
            f"this tokenizer cannot be constrained: what its token {token} ({text.decode(errors='replace')!r}) adds to"
            " a text depends on whether another token follows; generate without a constraint, and check the text."
        )
    return text


@dataclass(frozen=True)
class _Vocabulary:
    """What llguidance asks of a tokenizer. It encodes nothing: `_HEADER` sees to it that nothing is forced."""

    tokens: list[bytes]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        return []


def _package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "constrained generation needs the package llguidance: pip install anyformer[constrain]"
        ) from None
    return llguidance


def _choices_lark(texts: str) -> str:
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in json.loads(texts))


def _regex_lark(pattern: str) -> str:
    spelled = re.sub(r"\\.|/", lambda found: _SPELLED.get(found[0], found[0]), pattern)
    return f"start: /{spelled or '(?:)'}/"


def _schema_lark(schema: str) -> str:
    return f"start: %json {json.dumps({'x-guidance': _LAYOUT, **json.loads(schema)})}"


_LARK = {"choices": _choices_lark, "regex": _regex_lark, "json_schema": _schema_lark}


def _refusal(constraint: Constraint, message: str) -> str:
    place = ""
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.grammar)
        message = _schema_reason(schema) or message
        place = f" at {_schema_place(schema, message, '#') or '#'}"
    return f"the {constraint} cannot be used{place}: {_brief(message)}."


def _schema_reason(schema: dict[str, Any]) -> str:
    matcher = _package().LLMatcher
    return str(matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps(schema))))


def _schema_place(part: Any, reason: str, path: str) -> str | None:
    """The path of the innermost part that is refused for the same reason by itself."""
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if (found := _schema_place(inner, reason, f"{path}/{key}")) is not None:
            return found
    return path if isinstance(part, dict) and _schema_reason(part) == reason else None


def _brief(message: str) -> str:
    """llguidance's message in a few words, with what it marks in an expression."""
    marked = re.search(r"^(?P<line>.*)\n(?P<before> *)(?P<marks>\^+)\s*\n(?:~+\n)?error: (?P<what>.*)$", message, re.M)
    if marked:
        line, start, end = marked["line"], *marked.span("marks")
        start, end = (place - marked.start("before") for place in (start, end))
        return f"{marked['what']}, at {line[start:end] or 'its end'!r}"
    return message.split("(in regex): ")[-1].split("\n")[0]
