"""Speculative decoding: a cheap draft proposes the next tokens, and the model checks them in one pass.

A proposal drawn from q is accepted with the chance min(1, p / q), else a token is drawn from what p has more than q, so
that the text has the model's own distribution p, after all rules of sampling (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.generate.loop import Running, check_counts, encoded, left_padded, read
from anyformer.generate.rules import draw
from anyformer.generate.sampling import Sampler, Sampling
from anyformer.model import Transformer
from anyformer.tokens import Tokens

__all__ = ["Draft", "DraftModel", "Drafter", "PromptLookup", "Proposal", "Reading", "Speculation", "Text", "speculate"]


class Text:
    """One text as it grows: `ids`, the prompt first; what may follow by the rules; `reason`, once it has ended."""

    def __init__(
        self,
        model: Transformer,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        prompt, tokens = left_padded([ids], model.device)
        self.ids: list[int] = prompt[0].tolist()
        self.reason: str | None = None
        self.vocab_size, self.device = model.spec.vocab_size, model.device
        self._running = Running(tokens, max_new_tokens, min_new_tokens, end_ids, model.max_len)
        self._sampler = Sampler(sampling, batch=1, vocab_size=self.vocab_size, device=self.device)
        self._sampler.see(prompt, tokens.real)

    @property
    def room(self) -> int:
        """How many tokens can still be made."""
        return self._running.most - self._running.made

    def distribution(self, logits: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        """The probabilities of the next token, after all rules; a greedy text has 1 at the best one."""
        return self._sampler.distribution(self._running.without_end(logits))

    def draw(self, probs: Float[Tensor, "1 V"]) -> int:
        """A token, by the next uniform number. The probabilities need not sum to 1."""
        return int(draw(probs, self._sampler.uniform()))

    def accepts(self, p: Tensor, q: Tensor | float) -> bool:
        """True with the chance min(1, p / q), by the next uniform number."""
        return bool((self._sampler.uniform() * q < p).all())

    def push(self, token: int) -> None:
        """The text goes on with `token`, which may end it."""
        chosen = torch.tensor([token], device=self.device)
        self.ids.append(token)
        self._sampler.made(chosen)
        self.reason = self._running.note(chosen).get(0)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is pushed within is forgotten behind; the uniform numbers that it took stay used."""
        length, made, live = len(self.ids), self._running.made, self._running.live
        counted = [table for table in (self._sampler.seen, self._sampler.counts) if table is not None]
        kept = [table.clone() for table in counted]
        try:
            yield
        finally:
            del self.ids[length:]
            self.reason, self._running.made, self._running.live = None, made, live
            for table, before in zip(counted, kept, strict=True):
                table.copy_(before)


class Proposal(NamedTuple):
    """What may come next: `ids`, and the distribution (1, V) that each was drawn from, None if the draft was sure."""

    ids: list[int]
    probs: list[Tensor] | None = None

    def chance(self, index: int) -> Tensor | float:
        """The probability with which `ids[index]` was proposed."""
        return 1.0 if self.probs is None else self.probs[index][0, self.ids[index]]

    def rest(self, p: Float[Tensor, "1 V"], index: int) -> Float[Tensor, "1 V"]:
        """What `p` has more than the distribution of `ids[index]`, to draw from when that is not accepted."""
        if self.probs is None:
            q = F.one_hot(torch.tensor([self.ids[index]], device=p.device), p.shape[1])
        else:
            q = self.probs[index]
        rest = (p - q).clamp(min=0)
        return torch.where(rest.sum() > 0, rest, p)  # nothing is left only where p and q differ by rounding


class Reading(NamedTuple):
    """How a text is read: beside which source (1, S), for an encoder, and how many tokens of a prompt at a time."""

    source: Tensor | None = None
    tokens: Tokens | None = None
    chunk: int | None = None


class Drafter:
    """A draft at work on one text."""

    def propose(self, text: Text, most: int) -> Proposal:
        """At most `most` tokens, perhaps none, that may follow `text`, which is left as it was."""
        raise NotImplementedError

    def accepted(self, count: int) -> None:
        """The first `count` tokens of the last proposal were accepted; what follows them is in the text."""


class Draft:
    """Who proposes: `length` tokens at a time at most. A part: what it keeps of a text is in its `Drafter`."""

    length: int

    def start(self, text: Text, reading: Reading) -> Drafter:
        """A drafter for `text`, which holds its prompt.

        Raises:
            ValueError: it cannot speak for the text's model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DraftModel(Draft):
    """A smaller model with the same tokenizer, on the same device. It follows the same rules of sampling.

    Where its own positions end, it proposes nothing. An encoder-decoder reads the same source.
    """

    model: Transformer
    length: int = 4

    def __post_init__(self) -> None:
        _require("length", self.length)

    def start(self, text: Text, reading: Reading) -> Drafter:
        ours, theirs = self.model.spec.vocab_size, text.vocab_size
        if ours != theirs:
            raise ValueError(
                f"the draft's vocabulary has {ours} tokens, but the model's has {theirs}: "
                "take a draft with the model's tokenizer"
            )
        if self.model.device != text.device:
            raise ValueError(f"the draft is on {self.model.device}, but the model on {text.device}: move one of them")
        return _ModelDrafter(self.model, text, reading, self.length)


@dataclass(frozen=True)
class PromptLookup(Draft):
    """No model: where the latest `ngram` tokens stood before, the same is proposed to follow (Saxena 2023).

    The longest match counts, down to one token, and of equals the latest. It serves texts that repeat their prompt.
    """

    length: int = 10
    ngram: int = 3

    def __post_init__(self) -> None:
        _require("length", self.length)
        _require("ngram", self.ngram)

    def start(self, text: Text, reading: Reading) -> Drafter:
        return _Lookup(self.ngram)


class Speculation(Iterator[int]):
    """The new tokens, one at a time, an end token included.

    reason: why the token that came last ended the text, as in `Generation`; None before that.
    passes: how often the model was asked for what follows, the prompt included; without a draft, once a token.
    proposed, accepted: tokens of the draft so far.
    """

    def __init__(self, run: _Run | None = None) -> None:
        self.reason: str | None = None if run else "length"
        self.passes = self.proposed = self.accepted = 0
        self._tokens = self._follow(run) if run else iter(())

    def __next__(self) -> int:
        return next(self._tokens)

    def _follow(self, run: _Run) -> Iterator[int]:
        text = run.text
        while text.reason is None:
            begin = len(text.ids)
            with torch.inference_mode():
                proposed, accepted = run.one_pass()
            self.passes += 1
            self.proposed += proposed
            self.accepted += accepted
            yield from text.ids[begin:-1]
            self.reason = text.reason
            yield text.ids[-1]


def speculate(
    model: Transformer,
    ids: Sequence[int],
    draft: Draft,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    source: Int[Tensor, "1 S"] | None = None,
    source_tokens: Tokens | None = None,
    prefill_chunk: int | None = None,
) -> Speculation:
    """New tokens for one prompt, as `steps` makes them, in fewer passes of the model.

    Greedy tokens are those of `generate`, up to ties within rounding; others have the same distribution, though a seed
    draws other ones. `draft` is a `DraftModel` or a `PromptLookup`.

    Raises:
        ValueError: a draft that does not fit the model, or as `generate`.
    """
    check_counts(max_new_tokens, prefill_chunk)
    if not max_new_tokens:
        return Speculation()
    text = Text(model, ids, sampling, max_new_tokens=max_new_tokens, end_ids=end_ids, min_new_tokens=min_new_tokens)
    reading = Reading(source, source_tokens, prefill_chunk)
    drafter = draft.start(text, reading)
    # What waits to be read is no longer than a proposal: so much is read at once, and may have to be forgotten.
    reader = _Reader(model, reading, len(text.ids) + text.room, slack=2 * draft.length)
    return Speculation(_Run(text, reader, drafter, draft.length))


@dataclass(frozen=True)
class _Run:
    """A text, who reads it, and who proposes up to `length` tokens."""

    text: Text
    reader: _Reader
    drafter: Drafter
    length: int

    def one_pass(self) -> tuple[int, int]:
        """The text grows by what is accepted, and one token more; how many tokens were proposed and accepted."""
        begin = len(self.text.ids)
        waiting = self.text.ids[self.reader.used :]
        proposal = self._proposal(len(waiting))
        self.reader.mark()
        logits = self.reader.read([*waiting, *proposal.ids], len(proposal.ids) + 1)
        accepted = self._verify(logits, proposal)
        self.reader.keep(begin + accepted)
        if proposal.ids:
            self.drafter.accepted(accepted)
        return len(proposal.ids), accepted

    def _proposal(self, waiting: int) -> Proposal:
        """None for the prompt, which a pattern may need in one piece, and none where too much waits to be read.

        A cache that cannot drop single tokens leaves accepted ones to be read again, together with the next proposal.
        """
        most = min(self.length, self.text.room - 1)
        if not self.reader.used or waiting > self.length or not most:
            return Proposal([])
        return self.drafter.propose(self.text, most)

    def _verify(self, logits: Float[Tensor, "1 L V"], proposal: Proposal) -> int:
        """Push the tokens that are accepted, and one that is drawn, unless they end the text; how many are accepted."""
        text = self.text
        for index, token in enumerate(proposal.ids):
            p = text.distribution(logits[:, index])
            if not text.accepts(p[0, token], proposal.chance(index)):
                text.push(text.draw(proposal.rest(p, index)))
                return index
            text.push(token)
            if text.reason is not None:
                return index + 1
        text.push(text.draw(text.distribution(logits[:, -1])))
        return len(proposal.ids)


class _Reader:
    """A model, and what it has read of one text."""

    def __init__(self, model: Transformer, reading: Reading, max_len: int, *, slack: int) -> None:
        self.model, self.chunk = model, reading.chunk
        with torch.inference_mode():
            self.memory = encoded(model, reading.source, reading.tokens)
            self.cache = model.new_cache(1, max_len, slack=slack)
        self.mark()

    @property
    def used(self) -> int:
        """How many tokens are read."""
        return self.cache.used

    def read(self, ids: list[int], last: int) -> Float[Tensor, "1 L V"]:
        """Read on; the logits of the `last` tokens."""
        piece = torch.tensor([ids], device=self.model.device)
        tokens = Tokens.arange(1, len(ids), start=self.used, device=self.model.device)
        return read(self.model, piece, tokens, self.memory, self.cache, last=last, chunk=self.chunk)

    def mark(self) -> None:
        """Note where the text may be taken up again."""
        self._point = None if self.cache.drops else self.cache.point()

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens; where single ones cannot be dropped, all behind the mark."""
        extra = self.used - count
        if extra > 0 and self._point is not None:
            self.cache.back(self._point)
        elif extra > 0:
            self.cache.drop(extra)


class _ModelDrafter(Drafter):
    def __init__(self, model: Transformer, text: Text, reading: Reading, length: int) -> None:
        whole = len(text.ids) + text.room
        self.reader = _Reader(model, reading, min(whole, model.max_len or whole), slack=length)
        self.begin = 0

    def propose(self, text: Text, most: int) -> Proposal:
        self.begin = len(text.ids)
        ids: list[int] = []
        probs: list[Tensor] = []
        most = min(most, self.reader.cache.max_len - self.begin + 1)  # the last one is not read
        with text.trial():
            while len(ids) < most and text.reason is None:
                logits = self.reader.read(text.ids[self.reader.used :], 1)
                if not ids:
                    self.reader.mark()
                probs.append(text.distribution(logits[:, -1]))
                ids.append(text.draw(probs[-1]))
                text.push(ids[-1])
        return Proposal(ids, probs)

    def accepted(self, count: int) -> None:
        self.reader.keep(self.begin + count)


class _Lookup(Drafter):
    """`after[n - 1]` says where the text went on, the last time, behind each run of n tokens."""

    def __init__(self, ngram: int) -> None:
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram)]
        self.known = 1  # places before this one are entered

    def propose(self, text: Text, most: int) -> Proposal:
        ids = text.ids
        for place in range(self.known, len(ids)):
            for n, after in enumerate(self.after[:place], 1):
                after[tuple(ids[place - n : place])] = place
        self.known = len(ids)
        begin = self._begin(ids)
        period = len(ids) - begin  # what is proposed may go on into itself
        return Proposal([ids[begin + i % period] for i in range(most if period else 0)])

    def _begin(self, ids: list[int]) -> int:
        """Where the longest run at the end of `ids` went on before; the end, if nowhere."""
        for n in range(min(len(self.after), len(ids)), 0, -1):
            place = self.after[n - 1].get(tuple(ids[-n:]))
            if place is not None:
                return place
        return len(ids)


def _require(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"`{name}` of a draft must be at least 1, but is {count}")
