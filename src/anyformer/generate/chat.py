"""Chat: a conversation with a model that was trained on a chat template.

    chat = Chat(model, tokenizer, system="Answer in one word.")
    for piece in chat.say("Is 7 a prime number?"):
        print(piece, end="", flush=True)

What the model has read stays in a cache. Each turn, the template renders the whole conversation anew, since a template
may rewrite what was said; only what differs from the text in the cache is read.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anyformer.cache import Cache, Point
from anyformer.files import read_json, write_text
from anyformer.generate.loop import steps
from anyformer.generate.sampling import Sampling
from anyformer.generate.stops import StopStrings
from anyformer.generate.text import shown
from anyformer.model import Transformer
from anyformer.text.base import Tokenizer, well_formed
from anyformer.text.chat import chat_ids

__all__ = ["Chat"]

Message = dict[str, Any]

_ROOM = 4096  # tokens that a cache has room for at first; it is doubled when needed
_LEFT_OUT = "the conversation is longer than the model's {} positions: its oldest messages are left out from now on"


class Chat:
    """A conversation with a decoder.

    An answer ends at any of the tokenizer's `end_ids`, before a `stop`, after `max_new_tokens`, or where the model has
    no position left. Without `sampling`, tokens are drawn from the model's own distribution; with a seed, equal
    conversations have equal answers. When a conversation no longer fits the model's positions, its oldest exchanges are
    left out of what the model reads until half of them are free; the system message and `messages` stay.

    Attributes:
        messages: the conversation, `{"role": "user", "content": "Hello"}` and so on; may be set and changed.
        reason: why the last answer ended: "end", "stop" or "length"; None while it is made, and if it was interrupted.
        notice: what the user should be told about the last answer: that exchanges are left out from now on; or None.
        read: how many tokens the model has read since this was made.

    Raises:
        ValueError: the model is no decoder alone, the tokenizer has no chat template, a stop is empty, or a number is
            below 1.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        prefill_chunk: int = 512,
    ) -> None:
        if model.decoder is None or model.encoder is not None:
            raise ValueError("only a decoder alone holds a conversation, and this model has an encoder")
        if tokenizer.chat_template is None:
            raise ValueError(
                "this model's tokenizer has no chat template, so the model was not made for conversation: continue a "
                "text with `anyformer generate`, or set the tokenizer's `chat_template`"
            )
        for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}")
        StopStrings(stop)
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        self.max_new_tokens, self.stop, self.prefill_chunk = max_new_tokens, stop, prefill_chunk
        self.messages: list[Message] = []
        self.system = system
        self.reason: str | None = None
        self.notice: str | None = None
        self.read = 0
        self._first: Message | None = None  # what comes before this message is left out
        self._draws = 0
        self._cache: Cache | None = None
        self._ids: list[int] = []  # what the cache holds; where reading was interrupted, it may hold more
        self._point: Point | None = None  # before the last token of the latest prompt

    @property
    def system(self) -> str | None:
        """The system message, with which the conversation begins; None for none."""
        return self.messages[0]["content"] if _head(self.messages) else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[_head(self.messages) :]
        self.messages = rest if text is None else [_message("system", text), *rest]

    def reset(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = self.messages[: _head(self.messages)]

    def say(self, text: str) -> Generator[str, None, None]:
        """The answer to `text`, in pieces of whole characters as they are made.

        Both are added to `messages`. If the caller stops early, closes the generator or is interrupted, the answer is
        what was shown so far.

        Raises:
            ValueError: the template refuses the conversation, or the message leaves no position for an answer; nothing
                has changed then.
        """
        return self._answer([*self.messages, _message("user", text)])

    def again(self) -> Generator[str, None, None]:
        """Another answer to the last message of the user, in place of the one there is.

        Raises:
            ValueError: nothing was asked yet; see also `say`.
        """
        answered = self.messages and self.messages[-1]["role"] == "assistant"
        messages = self.messages[:-1] if answered else self.messages[:]
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("nothing was asked yet, so there is no answer to draw anew: say something first")
        return self._answer(messages)

    def save(self, path: str | Path) -> None:
        """Write `messages` to a JSON file, whole or not at all."""
        said = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        write_text(path, well_formed(said) + "\n")

    def load(self, path: str | Path) -> None:
        """Go on with the `messages` of a JSON file, in place of those there are.

        Raises:
            ValueError: it cannot be read, or holds no messages; nothing has changed then.
        """
        messages = read_json(Path(path)).get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            example = json.dumps({"messages": [_message("user", "Hello")]})
            raise ValueError(f"{path} must hold messages such as {example}, but does not")
        self.messages = messages

    def _answer(self, messages: list[Message]) -> Generator[str, None, None]:
        ids = self._prompt(messages)
        stops, answer = StopStrings(self.stop), list[str]()
        self.messages, self.reason = messages, None
        try:
            for piece in shown(self._made(ids), self.tokenizer, stops):
                answer.append(piece)
                yield piece
            self.reason = self.reason if stops.hit is None else "stop"
        finally:
            messages.append(_message("assistant", "".join(answer)))

    def _prompt(self, messages: list[Message]) -> list[int]:
        """The ids to answer to; of a conversation that is too long, without its oldest exchanges."""
        begin, limit = _head(messages), self._limit
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        start = next((i for i, message in enumerate(messages) if message is self._first), begin)
        ids, now = self._rendered(messages, start), start
        if limit is not None and len(ids) + min(self.max_new_tokens, limit // 4) > limit:
            while now < last and len(ids) > limit // 2:
                now = next(i for i in range(now + 1, last + 1) if messages[i]["role"] == "user")
                ids = self._rendered(messages, now)
            if len(ids) >= limit:
                raise ValueError(
                    f"the message makes a prompt of {len(ids)} tokens, but the model has {limit} positions: shorten it"
                )
        self.notice = _LEFT_OUT.format(limit) if now > start and start == begin else None
        self._first = messages[now] if now > begin else None
        return ids

    def _rendered(self, messages: list[Message], start: int) -> list[int]:
        return chat_ids(self.tokenizer, [*messages[: _head(messages)], *messages[start:]])

    @property
    def _limit(self) -> int | None:
        """How many positions the model has, or was trained on; None if that is not known."""
        trained = self.model.origin.get("max_position_embeddings")
        return min((limit for limit in (self.model.max_len, trained) if limit), default=None)

    def _made(self, ids: list[int]) -> Iterator[int]:
        """Read what the cache does not hold, then make tokens; after each step, `_ids` is what the cache holds."""
        limit = self._limit
        most = self.max_new_tokens if limit is None else min(self.max_new_tokens, limit - len(ids))
        with torch.inference_mode():
            cache = self._ready(ids, len(ids) + most)
            while cache.used < len(ids) - 1:
                piece = ids[cache.used : len(ids) - 1][: self.prefill_chunk]
                self.model(torch.tensor([piece], device=self.model.device), cache=cache, last=0)
                self._note(piece)
            self._point = cache.point()
        token, ends = ids[-1], self.tokenizer.end_ids
        for step in steps(self.model, [ids], self._draw(), max_new_tokens=most, end_ids=ends, cache=cache):
            self._note([token])
            token, self.reason = int(step.ids[0]), step.ended.get(0)
            yield token

    def _note(self, ids: list[int]) -> None:
        self._ids += ids
        self.read += len(ids)

    def _draw(self) -> Sampling:
        """How to choose this answer's tokens: a seed goes on with each answer, so that another one may be drawn."""
        seed, draws = self.sampling.seed, self._draws
        self._draws += 1
        return self.sampling if seed is None or isinstance(seed, tuple) else replace(self.sampling, seed=seed + draws)

    def _ready(self, ids: list[int], length: int) -> Cache:
        """A cache with room for `length` tokens that holds a beginning of `ids`, though not the last one."""
        common, cache = _common(self._ids, ids[:-1]), self._cache
        if cache is None or length > cache.max_len or not self._goes_back(cache, common):
            room = max(_ROOM, 1 << (length - 1).bit_length())
            room = room if self._limit is None else min(room, self._limit)
            cache = self._cache = self.model.new_cache(1, room, slack=self.max_new_tokens)
            self._point = None
        del self._ids[cache.used :]
        return cache

    def _goes_back(self, cache: Cache, common: int) -> bool:
        """Whether the cache could be made to forget what lies behind the `common` beginning."""
        if cache.used == common:
            return True
        try:
            if cache.drops:
                cache.drop(cache.used - common)
            elif self._point is not None and self._point.used <= common:
                cache.back(self._point)
        except ValueError:  # a ring keeps too few tokens
            return False
        return cache.used <= common


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids `a` and `b` both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": well_formed(content)}


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _head(messages: list[Message]) -> int:
    """How many messages are the system's, at the beginning: 0 or 1."""
    return int(bool(messages) and messages[0]["role"] == "system")
