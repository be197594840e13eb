"""What attention computes: the textbook's arithmetic, whichever kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anyformer.check.asked import (
    REFERENCE,
    Asked,
    able,
    answered,
    attending,
    every_request,
    kinds,
    laid_out,
    requests,
    texts,
    wording,
)
from anyformer.check.law import ALLOWED, Law, Trial, Trials, apart, law, needs
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject
from anyformer.check.textbook import attended, visible
from anyformer.inspect.record import alike
from anyformer.kernels.base import Request, choose
from anyformer.kernels.reference import Reference
from anyformer.parts.attention import AttentionModule
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

LONG = 901  # seven tiles of a kernel, so that it puts runs of them together, and a few tokens more
EDGES = (0, 1, 127, 128, 129, 895, 896, 900)  # queries of a long text, on both sides of a tile's edge


@law("kernels", "every kernel computes the textbook's attention", unit="allowed", limits=1.0)
def kernels(s: Subject) -> Trials:
    """Whatever kernel is taken, attention is softmax(softcap(q kᵀ · scale) + bias) v over the keys that are seen.

    What the model asks (plain, padded and packed texts; by a cache, beyond windows of up to 64; padding that shouts) is
    worked out by loops in float64, and by each kernel that accepts it: outputs, in float64 and bfloat16 too, and in
    float64 the gradients of q, k and v. The figure is a share of what rounding may do. Left out is `flex`, which
    compiles for seconds.
    """
    s = attending(s)
    for asked in map(_shouting, every_request(s)):
        yield from _held(s, asked, s.dtype)
        if s.dtype == torch.float64:
            yield from _held(s, asked, torch.bfloat16)


@law("tiles", "long texts, tile by tile, are the textbook's too", unit="allowed", limits=1.0, once=True)
def tiles(s: Subject) -> Trials:
    """Kernels that skip tiles of a long text, or put runs of them together, still compute the textbook's attention.

    901 tokens of random numbers for each kind of request, some queries at the edges of tiles: outputs and the gradients
    of q, k and v, as for `kernels`.
    """
    s = attending(s)
    needs(s.dtype == torch.float64, "float64 says it all")
    for request in kinds(requests(s, s.text(1, s.longest(3)))):
        yield from _held(s, _long(request), s.dtype)


def _held(s: Ours, asked: Asked, dtype: torch.dtype) -> Trials:
    """Each kernel, held to the textbook on the same rounded numbers."""
    learned = dtype == torch.float64
    asked = asked.of(dtype, learned=learned)
    right = attended(asked.request, asked.queries).out
    push = torch.randn(right.shape, dtype=torch.float64).to(right.device)
    wanted = _gradients(right, push, asked.request) if learned else ()
    for kernel in able(s, asked.request):
        if asked.queries is not None and isinstance(kernel, Reference):
            continue  # it has no tiles, and makes all pairs
        request = asked.made().request
        out = answered(kernel, request)
        out = out if asked.queries is None else out[:, [*asked.queries]]
        said = f"{kernel.name} in {str(dtype).removeprefix('torch.')}, {asked.said}"
        yield _share(apart(out, right, said), dtype)
        if learned:
            for name, mine, its in zip("qkv", _gradients(out, push, request), wanted, strict=True):
                yield _share(apart(mine, its, f"gradient of {name} by {said}"), dtype)


def _share(trial: Trial, dtype: torch.dtype) -> Trial:
    return trial._replace(error=trial.error / ALLOWED[dtype])


def _gradients(out: Tensor, push: Tensor, request: Request) -> tuple[Tensor, ...]:
    """Of q, k and v, for this gradient of the output; zeros where nothing is seen at all."""
    heads = (request.q, request.k, request.v)
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in heads)
    return torch.autograd.grad(out, heads, push, allow_unused=True, materialize_grads=True)


def _shouting(asked: Asked) -> Asked:
    """The same, with keys and values of padding so large that only -inf hides them."""
    request = asked.request
    padding = ~request.k_tokens.real[..., None, None]
    if not bool(padding.any()):
        return asked
    loud = min(2.0**20, torch.finfo(request.k.dtype).max / 64)
    k, v = (torch.where(padding, heads * loud, heads) for heads in (request.k, request.v))
    return asked.made(k=k, v=v)._replace(said=f"{asked.said}, keys and values of padding times {loud:g}")


def _long(request: Request) -> Asked:
    """The same question about many tokens."""
    tokens = Tokens.arange(1, LONG, device=request.q.device)
    q, k, v = (torch.randn(1, LONG, *x.shape[2:]).to(x) for x in (request.q, request.k, request.v))
    asked = Asked(request, f"{LONG} tokens of random numbers by {request.pattern!r}, queries {EDGES}", EDGES)
    return asked.made(q=q, k=k, v=v, q_tokens=tokens, k_tokens=tokens)


@law("rows", "attention weights sum to one, and give the output")
@torch.inference_mode()
def rows(s: Subject) -> Trials:
    """Each query shares out one whole among the keys that it sees, and gets that mixture of their values.

    In every layer: a row of weights sums to 1, or to 0 where nothing is seen; none is negative, none falls on what the
    pattern hides; weights times values are what the kernel that is taken gives.
    """
    s = attending(s)
    for text, split in texts(s):
        for number, request in enumerate(requests(s, text, split), 1):
            yield from _shared_out(s, request, f"attention {number}, {wording(request, text, split)}")


def _shared_out(s: Ours, request: Request, said: str) -> Trials:
    weights = torch.cat([REFERENCE.weights(part) for part in alike(request)], 1)
    seen, none = visible(request), torch.zeros_like(weights)
    yield apart(weights.sum(-1), seen.any(-1).to(weights), f"{said}: sums of rows")
    yield apart(weights.masked_fill(seen, 0.0), none, f"{said}: weights on what is hidden")
    yield apart(weights.clamp(max=0.0), none, f"{said}: negative weights")
    values = request.v.to(weights).repeat_interleave(request.q.shape[2] // request.v.shape[2], 2)
    kernel = choose(request, AttentionModule.kernels, s.kernel)
    mixed = torch.einsum("bhts,bshk->bthk", weights, values)
    yield apart(kernel(request), mixed, f"{said}: what {kernel.name} gives, and weights times values")


@law("empty_rows", "a query that sees nothing gives zeros, and no gradient is NaN", unit="numbers", limits=0.0)
def empty_rows(s: Subject) -> Trials:
    """A query that sees no key (in padding, or with only padding in its window) gives exactly zero, and spoils nothing.

    By each kernel, random numbers with the model's own pattern, position and heads; then the whole model reads a row of
    padding alone, and beside text. Counted are numbers that should be zero and are not, or are not finite.
    """
    s = attending(s)
    for request in kinds(requests(s, s.text(1, s.longest(3)))):
        for asked in _emptied(request):
            yield from _nothing(s, asked.of(s.dtype, learned=True))
    for real in ([False] * 3,), ([False] * 3, [True] * 3):
        keep = torch.tensor(real, device=s.device)[:, : s.longest(3)]
        text = laid_out(s, Tokens.padded(keep))
        answer = s.answer(text)
        weights = [weight for weight in s.module.parameters() if weight.requires_grad]
        found = (
            torch.autograd.grad(answer.double().square().mean(), weights, allow_unused=True)
            if answer.requires_grad
            else ()
        )
        said = f"ids {text.ids.tolist()}, of which real: {keep.tolist()}"
        yield Trial(_not_finite(answer), f"{said}: answers that are not finite")
        yield Trial(sum(_not_finite(x) for x in found if x is not None), f"{said}: gradients that are not finite")


def _emptied(request: Request) -> Iterator[Asked]:
    """The same question about two rows of four tokens, of which some see nothing."""
    device = request.q.device
    q, k, v = (torch.randn(2, 4, *x.shape[2:]).to(x) for x in (request.q, request.k, request.v))
    real = [[False, False, True, True], [False] * 4]
    padded = Tokens.padded(torch.tensor(real, device=device))
    far = Tokens(padded.pos + 100, torch.zeros_like(padded.seg))
    for queries, said in (padded, "queries as the keys"), (far, "queries at positions from 100 on"):
        whole = f"random numbers by {request.pattern!r}, keys real or not: {real}, {said}"
        yield Asked(request, whole).made(q=q, k=k, v=v, q_tokens=queries, k_tokens=padded)


def _nothing(s: Ours, asked: Asked) -> Trials:
    empty = ~visible(asked.request).any(-1).mT
    for kernel in able(s, asked.request):
        request = asked.made().request
        out = answered(kernel, request)
        said = f"{kernel.name}, {asked.said}"
        spoiled = float((out[empty] != 0).sum()) + _not_finite(out[~empty])
        yield Trial(spoiled, f"{said}: what should be zero is not, or not finite")
        if out.requires_grad:
            found = _gradients(out, torch.ones_like(out), request)
            yield Trial(sum(map(_not_finite, found)), f"{said}: gradients that are not finite")


def _not_finite(x: Tensor) -> float:
    return float((~x.isfinite()).sum())


LAWS: tuple[Law, ...] = (kernels, tiles, rows, empty_rows)
