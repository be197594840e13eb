"""Chat templates: messages to the text that a model was trained on, and to its ids.

A template is a program in Jinja that came with the model's files. It runs in Jinja's sandbox: it sees the messages and
the special tokens, and nothing else. What the messages say is data: "<|im_end|>" in a message is never that token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyformer.text.base import Tokenizer, any_of

__all__ = ["chat_ids", "render"]

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True, **specials: Any) -> str:
    """The text of a conversation.

    Args:
        template: Jinja, as in `chat_template` of a tokenizer.
        messages: each with a `role`, mostly with a `content`, and whatever else the template reads.
        add_generation_prompt: end with the beginning of an answer.
        specials: further names that the template reads, such as `bos_token`.

    Raises:
        ValueError: a message has no role, the template is wrong, or it refuses the messages.
    """
    _check(messages)
    names = {"tools": None, "documents": None, **specials}
    try:
        return _compiled(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
    except Exception as error:  # it is a program, and may fail like any other
        raise ValueError(f"The chat template refuses these {len(messages)} messages: {_sentence(error)}.") from None


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """The ids of a conversation, from the tokenizer's template. Special tokens come from the template alone.

    No frame is put around them: the template writes what the model expects.

    Raises:
        ValueError: the tokenizer has no template, or `render` refuses.
    """
    if tokenizer.chat_template is None:
        raise ValueError("This tokenizer has no chat template; encode the text of one, or set `chat_template`.")
    _check(messages)
    guard = _Guard(tokenizer.specials, [tokenizer.chat_template, *_strings(messages)])
    text = render(
        tokenizer.chat_template,
        [guard.hide(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        **tokenizer.roles,
    )
    plain = guard.undo(text)
    if guard.finds(plain) == guard.finds(text):
        return tokenizer.encode(plain, special=True)
    parts = [(guard.undo(part), i % 2 == 1) for i, part in enumerate(any_of(tokenizer.specials).split(text))]
    return tokenizer.encode_parts(parts)


class _Guard:
    """Keeps the text of special tokens in messages apart from those that the template writes.

    In what messages say, one character of each special token is replaced by a stand-in that occurs nowhere; also where
    a message begins or ends within one, so that it cannot be completed by what stands beside it. Templates still see
    the rest as it is. After the template has run, its special tokens are found, and only then are stand-ins undone.
    """

    def __init__(self, specials: Iterable[str], texts: Iterable[str]) -> None:
        self._specials = sorted(specials, key=len, reverse=True)
        taken = set[str]().union(*texts)
        letters = sorted({letter for name in self._specials for letter in (name[0], name[-1])})
        free = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in taken)  # for private use
        self._stand_in = {ord(letter): next(free) for letter in letters}
        self._undo = {ord(free): chr(letter) for letter, free in self._stand_in.items()}

    def hide(self, value: Any) -> Any:
        """The value with all its strings guarded; keys stay as they are."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {key: self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def undo(self, text: str) -> str:
        """The rendered text without stand-ins."""
        return text.translate(self._undo)

    def finds(self, text: str) -> list[str]:
        """The special tokens that are read in `text`."""
        return any_of(self._specials).findall(text)

    def _hide(self, text: str) -> str:
        letters = list(text)
        for name in self._specials:
            for place in _places(text, name):
                letters[place] = self._stand_in[ord(text[place])]
        return "".join(letters)


def _places(text: str, name: str) -> Iterator[int]:
    """Where a character must be hidden so that `name` comes neither from `text` nor from it and its neighbours.

    Spaces around the text do not count, as templates take them off.
    """
    place = text.find(name)
    while place >= 0:
        yield place
        place = text.find(name, place + 1)
    inner, start = text.strip(), len(text) - len(text.lstrip())
    for size in range(1, min(len(name), len(inner) + 1)):
        if inner.endswith(name[:size]):
            yield start + len(inner) - size
        if inner.startswith(name[-size:]):
            yield start + size - 1


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _check(messages: Any) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ValueError(f"Messages are a list such as [{_EXAMPLE}], but here is a {type(messages).__name__}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            shown = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise ValueError(f"Message {i} has no role but {shown}; a message is such as {_EXAMPLE}.")


_EXAMPLE = '{"role": "user", "content": "Hello"}'


class _Generation(Extension):
    """{% generation %} marks an answer in some templates; what is inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {"range": environment.globals["range"], "namespace": environment.globals["namespace"]}
    environment.globals |= {"dict": _dict, "raise_exception": _raise, "strftime_now": _now}
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"The chat template is damaged: {_sentence(error)}.") from None


def _dict(*pairs: Any, **items: Any) -> dict[str, Any]:
    return dict(*pairs, **items)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
