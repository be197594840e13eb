"""How likely a model finds a text: its tokens' log-probabilities, perplexity, and bits per byte.

A text is read through a cache, a piece at a time, and logits are made for a piece only: memory does not grow with
texts × vocabulary. What does not fit a model's positions is read in windows that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.generate.loop import left_padded, start_id
from anyformer.model import Transformer
from anyformer.parts.attention import Attention
from anyformer.parts.head import LMHead
from anyformer.text.tokenizer import Tokenizer

__all__ = ["Likelihood", "Score", "bits_per_byte", "front", "loglikelihood", "overlap", "score"]

PIECE = 512  # hidden states that logits are made of at a time
CHUNK = 1024  # tokens read at a time

Ids = Sequence[int] | Int[Tensor, " N"]
Tell = Callable[[int], None]
"""`tell(count)`: how many tokens, or pairs, are done."""


class Score(NamedTuple):
    """The tokens of a text that were scored, `ids` (N,), and the `logprobs` (N,) of each, float64 in nats."""

    ids: Int[Tensor, " N"]
    logprobs: Float[Tensor, " N"]

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return len(self.logprobs)

    @property
    def total(self) -> float:
        """Log-likelihood of the text, in nats."""
        return float(self.logprobs.sum())

    @property
    def mean(self) -> float:
        """Nats a token (negative); NaN if there is none."""
        return float(self.logprobs.mean())

    @property
    def perplexity(self) -> float:
        """exp(-mean): how many tokens, all equally likely, would be as hard to choose among; NaN if there is none."""
        return float((-self.logprobs.mean()).exp())


class Likelihood(NamedTuple):
    """Of a continuation: log-likelihood in nats, and whether each of its tokens is the likeliest one."""

    total: float
    greedy: bool


def score(
    model: Transformer,
    ids: Ids,
    *,
    front: Ids = (),
    window: int | None = None,
    stride: int | None = None,
    chunk: int = CHUNK,
    tell: Tell = lambda count: None,
) -> Score:
    """The log-probability of each of `ids` (N,) given those before it, under a decoder-only model.

    `front` is read before the text and not scored, such as `front(tokenizer)`; without it the first of `ids`, which
    nothing predicts, is not scored either.

    A text of more tokens than `window` (None: than the model's positions) is read in windows of `window` tokens. The
    first one scores all that it predicts, the token after its last one included; each further one begins anew, ends
    `stride` tokens later (at the text's end at the latest), and scores what is new. So each token is scored once, with
    at least `window - stride + 1` tokens before it if there are so many, and at most `window`. `stride` None is half a
    window. With neither limit nor `window`, each token sees all before it.

    `chunk` tokens are read at a time, the earlier ones of a window kept in a cache; this changes no figure.

    Raises:
        ValueError: the model has an encoder, no head over the vocabulary, or a prefix whose tokens see one another; or
            `window`, `stride` or `chunk` is out of bounds.
    """
    if model.encoder is not None and model.decoder is not None:
        raise ValueError(
            "an encoder-decoder says how likely a text is after a source only: use `loglikelihood`, which takes both"
        )
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, but is {chunk}")
    window, stride = overlap(model, window, stride)
    _check(model, 1)
    whole = torch.cat([torch.as_tensor(part, dtype=torch.long).cpu() for part in (front, ids)]).to(model.device)
    first = max(len(front), 1)
    found, done = [torch.zeros(0, dtype=torch.float64)], 0
    with torch.inference_mode():
        for begin, skip, end in _windows(first - 1, len(whole) - 1, window, stride):
            for logprobs in _read(model, whole[begin : end + 1], skip - begin, chunk):
                found.append(logprobs.cpu().double())
                done += len(logprobs)
                tell(done)
    return Score(whole[first:].cpu(), torch.cat(found))


def overlap(model: Transformer, window: int | None = None, stride: int | None = None) -> tuple[int | None, int | None]:
    """The window and stride that `score` reads a long text with; (None, None): the whole text at once.

    Raises:
        ValueError: the model has fewer positions than the window; the stride is longer than it, or moves no window.
    """
    limit = model.max_len
    for name, value in (("window", window), ("stride", stride)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}")
    if window is not None and limit is not None and window > limit:
        raise ValueError(f"`window` must be at most the model's {limit} positions, but is {window}")
    window = window or limit
    if window is None:
        if stride is not None:
            raise ValueError(f"a `stride` of {stride} moves no window, as the model has no limit: give `window` too")
        return None, None
    if stride is not None and stride > window:
        raise ValueError(
            f"`stride` must be at most the window's {window} tokens, but is {stride}: tokens would be left out"
        )
    return window, stride or max(window // 2, 1)


def front(tokenizer: Tokenizer) -> list[int]:
    """The token that a text is read after, so that its first token is predicted too: what the model expects before a
    text, or what begins a text, or what ends the text before; [] if the tokenizer has none of these."""
    found = [tokenizer.frame.ends[0], tokenizer.begin_id, *tokenizer.end_ids]
    return [token for token in found if token is not None][:1]


def bits_per_byte(score: Score, text: str) -> float:
    """-log2 of the text's likelihood by its UTF-8 bytes, to compare models whose tokens differ.

    ValueError if there is no text.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if not size:
        raise ValueError("the text has 0 bytes, so there are no bits per byte: give some text")
    return -score.total / math.log(2) / size


def loglikelihood(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 16,
    tell: Tell = lambda count: None,
) -> list[Likelihood]:
    """How likely each continuation is after its context, for (context, continuation) pairs of ids.

    Pairs are read `batch_size` at a time, those of like length together. An encoder-decoder reads the context as its
    source, and the continuation after its start token.

    Raises:
        ValueError: a context is empty, a pair has more tokens than the model has positions, the model has no decoder or
            no head over the vocabulary, or a context ends within the prefix whose tokens see one another.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, but is {batch_size}")
    empty = next((i for i, (context, _) in enumerate(pairs) if not len(context)), None)
    if empty is not None:
        raise ValueError(f"context {empty} is empty: begin it with a token such as those of `front(tokenizer)`")
    both = model.encoder is not None
    _check(model, 1 if both else min((len(context) for context, _ in pairs), default=1))
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    answers: dict[int, Likelihood] = {}
    with torch.inference_mode():
        for begin in range(0, len(pairs), batch_size):
            some = order[begin : begin + batch_size]
            answers |= zip(some, _answers(model, [pairs[i] for i in some]), strict=True)
            tell(len(answers))
    return [answers[i] for i in range(len(pairs))]


def _check(model: Transformer, seen: int) -> None:
    """Refuse a model that predicts no next token, and one whose tokens behind the first `seen` are seen too early."""
    if model.decoder is None:
        raise ValueError("an encoder alone predicts no next token, so it gives a text no likelihood: take a decoder")
    if not isinstance(model.spec.head, LMHead):
        raise ValueError(f"a likelihood needs a head over the vocabulary, but the model's is {model.spec.head!r}")
    ops = [branch.op for block in model.spec.decoder for branch in block.branches]
    prefix = max([op.pattern.frontier() or 0 for op in ops if isinstance(op, Attention)], default=0)
    if prefix > seen:
        raise ValueError(
            f"the first {prefix} tokens see one another, so a text of which {seen} is given has no likelihood: give a "
            f"context of {prefix} tokens or more to `loglikelihood`"
        )


def _windows(skip: int, count: int, window: int | None, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """(begin, skip, end) of windows over `count` inputs: from `begin` to `end`, of which those before `skip` are only
    seen. The next token after each other input, from the `skip` given on, is predicted in one of them."""
    window, stride = window or count, stride or count
    end = window if skip < window else skip + stride
    while skip < count:
        end = min(end, count)
        yield max(end - window, 0), skip, end
        skip, end = end, end + stride


def _read(model: Transformer, ids: Int[Tensor, " T+1"], skip: int, chunk: int) -> Iterator[Float[Tensor, " n"]]:
    """Log-probabilities of ids[skip + 1 :], in pieces: one window, read through a cache."""
    inputs, targets = ids[:-1], ids[1:]
    cache = model.new_cache(1, len(inputs))
    for begin in range(0, len(inputs), chunk):
        here = slice(begin, begin + chunk)
        x = model.decode(inputs[None, here], cache=cache).x[0]
        seen = max(skip - begin, 0)
        if seen < len(x):
            yield _logprobs(model, x[seen:], targets[here][seen:])[0]


def _answers(model: Transformer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
    """Of one batch."""
    x, sizes = _states(model, pairs), [len(continuation) for _, continuation in pairs]
    rows = torch.cat([row[len(row) - size :] for row, size in zip(x, sizes, strict=True)])
    targets = torch.tensor([token for _, ids in pairs for token in ids], dtype=torch.long, device=model.device)
    logprobs, best = (found.split(sizes) for found in _logprobs(model, rows, targets))
    return [Likelihood(float(a.cpu().double().sum()), bool(b.all())) for a, b in zip(logprobs, best, strict=True)]


def _states(model: Transformer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Float[Tensor, "B T D"]:
    """Hidden states whose last ones in each row predict the continuation."""
    if model.encoder is None:
        ids, tokens = left_padded([[*context, *ids[:-1]] for context, ids in pairs], model.device)
        return model.decode(ids, tokens).x
    memory = model.encode(*left_padded([context for context, _ in pairs], model.device))
    ids, tokens = left_padded([[start_id(model), *ids[:-1]] for _, ids in pairs], model.device)
    return model.decode(ids, tokens, memory=memory).x


def _logprobs(
    model: Transformer, x: Float[Tensor, "N D"], targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Of each target after its hidden state, in float32 at least; and whether it is the likeliest token."""
    pairs = [_piece(model.head(some), ids) for some, ids in zip(x.split(PIECE), targets.split(PIECE), strict=True)]
    logprobs, best = zip(*pairs, strict=True)
    return torch.cat(logprobs), torch.cat(best)


def _piece(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return logs.gather(1, targets[:, None])[:, 0], logits.argmax(-1) == targets
