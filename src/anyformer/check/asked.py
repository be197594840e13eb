"""Asked: what a model asks its kernels while it reads texts of every layout."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.check.law import needs
from anyformer.check.ours import Ours, ours
from anyformer.check.subject import Subject, Text
from anyformer.inspect.record import Note, alike
from anyformer.kernels import KERNELS
from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.flex import Flex
from anyformer.kernels.reference import Reference
from anyformer.parts.attention import Attention
from anyformer.tokens import Tokens

__all__ = [
    "REFERENCE",
    "Asked",
    "Caught",
    "able",
    "answered",
    "attending",
    "every_request",
    "kinds",
    "laid_out",
    "left_padded",
    "requests",
    "texts",
    "wording",
]

REFERENCE = Reference()
BEYOND = 64  # decoding goes on beyond windows up to this one
NO_ATTENTION = "no layer of this model computes softmax attention"


class Caught(Note):
    """Notes what is asked, as it is at that moment, and answers by the reference kernel."""

    name = "caught"

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        with torch.inference_mode(False), torch.no_grad():  # copies: caches write in place
            q_tokens, k_tokens = _kept(request.q_tokens), _kept(request.k_tokens)
            heads = {name: getattr(request, name).clone() for name in ("q", "k", "v")}
        self.requests.append(dataclasses.replace(request, **heads, q_tokens=q_tokens, k_tokens=k_tokens, memo={}))
        return answered(REFERENCE, request)


def _kept(tokens: Tokens) -> Tokens:
    mark = None if tokens.mark is None else tokens.mark.clone()
    return dataclasses.replace(tokens, pos=tokens.pos.clone(), seg=tokens.seg.clone(), mark=mark)


class Asked(NamedTuple):
    """A request, of which `queries` (all, if None) are looked at, and where it comes from."""

    request: Request
    said: str
    queries: Sequence[int] | None = None

    def made(self, **changed: Any) -> Asked:
        return self._replace(request=dataclasses.replace(self.request, memo={}, **changed))

    def of(self, dtype: torch.dtype, *, learned: bool) -> Asked:
        """The same numbers, rounded to `dtype`; `learned` if gradients are wanted."""
        heads = (self.request.q, self.request.k, self.request.v)
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_(learned) for x in heads)
        return self.made(q=q, k=k, v=v)


def attending(s: Subject) -> Ours:
    s = ours(s)
    needs(any(isinstance(op, Attention) for op in s.ops()), NO_ATTENTION)
    return s


def texts(s: Ours) -> Iterator[tuple[Text, list[int]]]:
    """Short texts, plain, padded (with a marked token) and packed, and into which pieces to cut them: none is whole."""
    for length in sorted({s.longest(length) for length in (2, 7)}):
        yield s.text(1, length), []
    padded = left_padded(s, s.longest(6), s.longest(6) // 2)
    mark = torch.zeros_like(padded.pos, dtype=torch.bool)
    mark[:, -1] = True
    yield laid_out(s, dataclasses.replace(padded, mark=mark)), []
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1][: s.longest(7)]], device=s.device)
    yield laid_out(s, Tokens.packed(documents)), []
    split = _split(s)
    if split:
        yield s.text(1, sum(split)), split
        yield laid_out(s, left_padded(s, sum(split), 2)), split


def left_padded(s: Ours, length: int, pads: int) -> Tokens:
    """Two rows, the first with padding on the left."""
    column = torch.arange(length, device=s.device)
    return Tokens.padded(torch.stack((column >= pads, column >= 0)))


def laid_out(s: Ours, tokens: Tokens) -> Text:
    """Random text there, and a source that is laid out like it."""
    text = s.text(tokens.batch, tokens.length, tokens=tokens)
    if text.source is None:
        return text
    return dataclasses.replace(text, source=s.ids(tokens.batch, tokens.length), source_tokens=tokens)


def _split(s: Ours) -> list[int]:
    """Pieces of which the last ones begin where windows have forgotten; none if there is no cache, or no room."""
    if s.model.decoder is None or s.frontier > BEYOND:
        return []
    seen = [op.pattern for op in s.ops("decoder") if isinstance(op, Attention)]
    kept = [(pattern.reach() or 0) + pattern.first() for pattern in seen]
    first = max(2, s.frontier, *(number for number in kept if number <= BEYOND)) + 2
    first = s.longest(first + 4) - 4
    return [first, 1, 3] if first >= max(s.frontier, 1) + 2 else []


@torch.no_grad()
def requests(s: Ours, text: Text, split: Sequence[int] = ()) -> list[Request]:
    """All that the model asks while it reads a text, at once or piece by piece."""
    other, kernel = copy.copy(s), Caught()
    other.kernel = kernel
    other.by_pieces(text, split) if split else other.states(text)
    return [request for request in kernel.requests if not split or request.q.shape[1] in split[1:]]


def every_request(s: Ours) -> Iterator[Asked]:
    """Every kind of request of each text, once."""
    for text, split in texts(s):
        for request in kinds(requests(s, text, split)):
            yield Asked(request, wording(request, text, split))


def kinds(requests: Sequence[Request]) -> list[Request]:
    """One of each kind: layers that ask the same of other numbers are alike."""
    kinds: dict[Any, Request] = {}
    for asked in requests:
        position = None if asked.position is None else asked.position.key()
        kind = asked.pattern, position, asked.scale, asked.softcap, asked.q.shape, asked.k.shape
        kinds.setdefault(kind, asked)
    return [*kinds.values()]


def wording(request: Request, text: Text, split: Sequence[int] = ()) -> str:
    documents = "" if text.tokens.start is not None else f", documents {text.tokens.seg.tolist()} (-1: padding)"
    pieces = f", in pieces of {[*split]}" if split else ""
    sizes = f"{request.q.shape[1]} queries and {request.k.shape[1]} keys"
    return f"ids {text.ids.tolist()}{documents}{pieces}: {sizes} by {request.pattern!r}"


def answered(kernel: Kernel, request: Request) -> Float[Tensor, "B T H K"]:
    """The kernel's answer; where heads differ and it cannot do that, of each run of heads alone."""
    return torch.cat([kernel(part) for part in runs(kernel, request)], 2)


def runs(kernel: Kernel, request: Request) -> list[Request]:
    return [request] if kernel.heads_may_differ else alike(request)


def able(s: Ours, request: Request) -> list[Kernel]:
    """The kernels that accept it."""
    kernels = [*KERNELS, *([s.kernel] if isinstance(s.kernel, Kernel) else [])]
    return [
        kernel
        for kernel in kernels
        if not isinstance(kernel, Flex) and all(kernel.rejects(part) is None for part in runs(kernel, request))
    ]
