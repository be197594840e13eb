"""What holds of a whole model: any shape, any dtype, saved, compiled, counted."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anyformer.cache import Cache
from anyformer.check.changed import small, undropped
from anyformer.check.law import EPS, Law, Trial, Trials, apart, holds, law, needs
from anyformer.check.laws.seen import cut
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject, Text
from anyformer.cost import Cost
from anyformer.families.family import shortest
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.global_attention import GlobalAttention
from anyformer.parts.moe import MoE
from anyformer.parts.position import Rotary
from anyformer.parts.precision import at_least_float32
from anyformer.parts.recurrent import Recurrent
from anyformer.tokens import Tokens

__all__ = ["LAWS"]


@law("evaluation", "evaluation is deterministic and free of dropout", limits=0.0)
@torch.inference_mode()
def evaluation(s: Subject) -> Trials:
    """In evaluation the same text gives the same bits, whatever the random seed, and no random number is drawn.

    Answers under two seeds; torch's generators before and after; and a model without dropout that has the same weights.
    """
    for batch, length in ((1, 1), (2, 7)):
        text = s.text(batch, s.longest(length))
        said = f"ids {text.ids.tolist()}"
        torch.manual_seed(1)
        before = _generators(s.device)
        first = s.answer(text)
        moved = not all(map(torch.equal, before, _generators(s.device)))
        yield holds(not moved, f"{said}: random numbers are drawn")
        torch.manual_seed(2)
        yield apart(s.answer(text), first, f"{said}: another random seed gives another answer")
        if isinstance(s, Ours):
            yield apart(undropped(s).answer(text), first, f"{said}: without dropout in the spec the answer is another")


def _generators(device: torch.device) -> list[Tensor]:
    """The state of torch's generators: the CPU's, and the device's own."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@law("saving", "saving and loading change nothing, and ties stay tied", anew=False)
def saving(s: Subject) -> Trials:
    """A model that was saved and loaded has the same names, weights and answers, and what was one weight still is.

    Weights are compared bit for bit, answers up to rounding (which follows where weights lie in memory), ties by the
    memory that they share, before and after a step of SGD.
    """
    with tempfile.TemporaryDirectory() as folder:
        again = s.reloaded(folder)
        again.module.to(s.device).eval()
        was, now = (dict(x.module.named_parameters(remove_duplicate=False)) for x in (s, again))
        yield holds(was.keys() == now.keys(), f"the names {sorted(was.keys() ^ now.keys())} are not in both")
        if isinstance(s, Ours) and isinstance(again, Ours):
            yield holds(shortest(s.spec) == shortest(again.spec), "the spec is another")
        for name, weight in was.items():
            yield holds(name in now and torch.equal(now[name], weight), f"{name} has other values")
        yield _ties(again.module, s.module, "loaded")
        for batch, length in ((1, 1), (2, 7)):
            text = s.text(batch, s.longest(length))
            with torch.inference_mode():
                yield apart(again.answer(text), s.answer(text), f"ids {text.ids.tolist()}: another answer")
        if any(parameter.requires_grad for parameter in now.values()):
            _mean_square(again.answer(s.text(2, s.longest(7)))).backward()
            torch.optim.SGD(again.module.parameters(), lr=1e-3).step()
            yield _ties(again.module, s.module, "loaded and trained for a step")


def _ties(now: nn.Module, was: nn.Module, when: str) -> Trial:
    """Whether the same names share memory."""
    changed = [" = ".join(sorted(names)) for names in _tied(now) ^ _tied(was)]
    return holds(not changed, f"{when}, other weights are tied: {', '.join(changed)}")


def _tied(module: nn.Module) -> set[frozenset[str]]:
    """The names of parameters that share memory, in groups."""
    groups: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter.data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


@law("shapes", "empty, single, odd and non-contiguous inputs work")
def shapes(s: Subject) -> Trials:
    """A text of any shape has an answer of its shape, no rows and no tokens included, however its ids lie in memory.

    Each batch against its rows alone, and against the same ids as a strided and as a transposed view; gradients must be
    finite.
    """
    width = s.answer(s.text(1, 1)).shape[2:]
    for batch, length in ((1, 1), (2, 7), (3, 13), (0, 3), (2, 0)):
        text = s.text(batch, s.longest(length))
        said = f"ids {text.ids.tolist()}" if text.ids.numel() else f"ids of shape {tuple(text.ids.shape)}"
        s.module.zero_grad(set_to_none=True)
        whole = s.answer(text)
        right = whole.shape == (*text.ids.shape, *width)
        yield holds(right, f"{said}: the answer has the shape {tuple(whole.shape)}")
        yield from _finite_gradients(s, whole, said)
        with torch.inference_mode():
            for i in range(batch):
                yield apart(s.answer(text.rows([i])), whole[i : i + 1], f"{said}: row {i} alone is answered otherwise")
            for how, view in (
                ("strided", torch.stack((text.ids,) * 2, -1)[..., 0]),
                ("transposed", text.ids.mT.contiguous().mT),
            ):
                yield apart(s.answer(text.saying(view)), whole, f"{said}: as a {how} view they are answered otherwise")


def _finite_gradients(s: Subject, answer: Tensor, said: str) -> Trials:
    """Whether all gradients of the mean square are finite."""
    if answer.requires_grad:
        _mean_square(answer).backward()
        wrong = [n for n, p in s.module.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        yield holds(not wrong, f"{said}: gradients of {', '.join(wrong)} are not finite")


def _mean_square(answer: Tensor) -> Tensor:
    return at_least_float32(answer).square().sum() / max(answer.numel(), 1)


HALF = (torch.bfloat16, torch.float16)
GROWN = 100.0


@law("half", "half precision stays finite and near", unit="eps of half precision", limits=16.0)
def half(s: Subject) -> Trials:
    """In bfloat16 and float16 a model says nearly what the same weights say in float64, however far into a text and
    however large its numbers: sums and phases are kept where they are safe.

    The distance of the median token (a router may choose another expert for a few), relative to the length of answers;
    at positions from 1000 on; with embeddings × 1000, where float64's numbers fit; and in models of ours that norm what
    each branch reads, with maps × 100. Answers must be finite, and gradients where float64's would fit.
    """
    needs(s.dtype == torch.float64, "both are compared with float64")
    for dtype in HALF:
        less = _cast(s, dtype)
        wide = _cast(less, torch.float64)
        for start, length in ((0, 1), (0, 7), (1000, 7)):
            text = _far(s, start, length)
            with torch.inference_mode():
                yield _near(less.answer(text), wide.answer(text), dtype, _said(text, dtype))
        yield from _with_loud_embeddings(less, wide, _far(s, 0, 7), dtype)
        if isinstance(less, Ours) and _normed(less.spec):
            yield from _with_grown_maps(less, _far(s, 0, 7), dtype)


def _cast(s: Subject, dtype: torch.dtype) -> Subject:
    """A copy with the same weights in another dtype."""
    other = copy.copy(s)
    other.module = copy.deepcopy(s.module).to(dtype)
    return other


def _far(s: Subject, start: int, length: int) -> Text:
    """Two rows at the positions from `start` on, or as near to it as there are positions."""
    length = s.longest(length)
    begin = s.longest(start + length) - length
    return s.text(2, length, tokens=Tokens.arange(2, length, start=begin, device=s.device))


def _said(text: Text, dtype: torch.dtype) -> str:
    return f"{dtype}: ids {text.ids.tolist()} at the positions from {text.tokens.start} on"


def _near(got: Tensor, right: Tensor, dtype: torch.dtype, said: str) -> Trial:
    """How far off half of the tokens are, at least, in units of the dtype's rounding."""
    if not got.isfinite().all():
        return Trial(math.inf, f"{said}: not finite")
    right = right.double()
    length = right.square().sum(-1).mean().sqrt().clamp(min=1e-30)
    off = (got.double() - right).norm(dim=-1).median() / length
    return Trial(off.item() / torch.finfo(dtype).eps, f"{said}: far from what the same weights say in float64")


def _with_loud_embeddings(less: Subject, wide: Subject, text: Text, dtype: torch.dtype) -> Trials:
    said = f"{_said(text, dtype)}, embeddings × 1000"
    with _loud(less), _loud(wide), _peak(wide.module) as peak:
        right = wide.answer(text)
        _mean_square(right).backward()
        steepest = max((float(p.grad.abs().max()) for p in wide.module.parameters() if p.grad is not None), default=0.0)
        most = torch.finfo(dtype).max / 16
        if peak[0] > most:
            return
        answer = less.answer(text)
        if isinstance(less, Ours) and _normed(less.spec):
            yield _near(answer, right, dtype, said)
        else:
            yield holds(answer.isfinite().all(), f"{said}: not finite")
        if steepest < most:
            yield from _finite_gradients(less, answer, said)


def _with_grown_maps(less: Ours, text: Text, dtype: torch.dtype) -> Trials:
    said = f"{_said(text, dtype)}, linear maps × {GROWN:.0f}"
    with torch.no_grad():
        for stack in filter(None, (less.model.encoder, less.model.decoder)):
            for module in stack.modules():
                if isinstance(module, nn.Linear):
                    module.weight.mul_(GROWN)
        answer = less.answer(text)
    yield holds(answer.isfinite().all(), f"{said}: not finite")


def _normed(spec: TransformerSpec) -> bool:
    """Whether each branch, and the head, reads what a norm has made small."""
    blocks = [block for stack in spec.stacks().values() for block in stack]
    each = all(block.norm is not None or branch.pre is not None for block in blocks for branch in block.branches)
    return each and spec.final_norm is not None


@contextlib.contextmanager
def _loud(s: Subject) -> Iterator[None]:
    """Embeddings × 1000."""
    hook = s.embedding().register_forward_hook(lambda module, given, out: out * 1000)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _peak(module: nn.Module) -> Iterator[list[float]]:
    """The largest number that any part of the module gives."""
    peak = [0.0]

    def look(part: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            peak[0] = max(peak[0], float(out.detach().abs().max()))

    hooks = [part.register_forward_hook(look) for part in module.modules()]
    try:
        yield peak
    finally:
        for hook in hooks:
            hook.remove()


LENGTHS = (5, 6, 7, 9)
Answering = Callable[[Text], Tensor]
Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


@law("compiled", "compiled equals eager, with few graphs", unit="graphs", limits=3.0, anew=False, once=True)
@torch.inference_mode()
def compiled(s: Subject) -> Trials:
    """A compiled model answers as the plain one, and is not compiled anew for each length or each step.

    torch.compile with the backend aot_eager, which traces all and is quick, for texts of 5, 6, 7 and 9 tokens, then for
    steps with a cache; of a model of ours for a small one of the same parts. Parts that look at numbers (experts,
    recurrent cells, dynamic frequencies) cut a graph in pieces, which are then counted as one.
    """
    s = Ours(small(s.spec).build(dtype=s.dtype, device=s.device).eval(), seed=s.seed) if isinstance(s, Ours) else s
    with _counting() as (compile_, graphs):
        texts = [s.text(2, s.longest(length)) for length in LENGTHS]
        yield from _few_graphs(s, [(compile_(s.answer), s.answer, text) for text in texts], graphs, "a text")
    if isinstance(s, Ours) and s.model.decoder is not None:
        with _counting() as (compile_, graphs):
            yield from _few_graphs(s, _steps(s, compile_), graphs, "a step behind a text")


def _few_graphs(s: Subject, calls: Iterable[tuple[Answering, Answering, Text]], graphs: list[int], what: str) -> Trials:
    """Each text by a compiled way to answer and a plain one, and how many graphs were made up to then."""
    pieces = 0
    for fast, plain, text in calls:
        got, right = fast(text), plain(text)
        pieces = pieces or (graphs[0] if _in_pieces(s) else 1)
        said = f"{what} of {text.length} tokens, ids {text.ids.tolist()}"
        off = apart(got, right, f"{said}: compiled, the answer is another")
        yield holds(off.error <= EPS[got.dtype], off.said)
        yield Trial(graphs[0] / max(pieces, 1), f"{said}: {graphs[0]} graphs were made up to here")


def _steps(s: Ours, compile_: Compile) -> Iterator[tuple[Answering, Answering, Text]]:
    """The steps behind a prompt, of a compiled model and of a plain one, with a cache each."""
    text = s.text(2, s.longest(LENGTHS[-1]))
    begin = min(max(LENGTHS[0], s.frontier), text.length)
    memory = s.memory(text)

    def plain(piece: Text, cache: Cache) -> Tensor:
        return s.head(s.states(piece, memory=memory, cache=cache))

    fast, caches = compile_(plain), [s.model.new_cache(2, text.length + 1) for _ in range(2)]
    for cache in caches:
        plain(cut(text, 0, begin), cache)
    for at in range(begin, text.length):
        yield lambda piece: fast(piece, caches[0]), lambda piece: plain(piece, caches[1]), cut(text, at, at + 1)


def _in_pieces(s: Subject) -> bool:
    """Whether something in it looks at numbers, which cuts graphs in pieces (of other libraries nothing is known)."""
    if not isinstance(s, Ours):
        return True
    turned = [position for position in s.spec.positions() if isinstance(position, Rotary)]
    looks = any(position.frequencies.looks_at_length for position in turned)
    return looks or any(isinstance(op, MoE | Recurrent) for op in s.ops())


@contextlib.contextmanager
def _counting() -> Iterator[tuple[Compile, list[int]]]:
    """torch.compile by aot_eager, and how many graphs it was given."""
    import torch._dynamo

    plain, graphs = torch._dynamo.lookup_backend("aot_eager"), [0]

    def backend(module: Any, inputs: Any) -> Any:
        graphs[0] += 1
        return plain(module, inputs)

    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield functools.partial(torch.compile, backend=backend), graphs
    finally:
        torch._dynamo.reset()


OFF = 0.01  # of the operations: what torch's counter and ours may be apart


@law("costs", "counted costs are the real ones", unit="% off", limits=0.0, anew=False)
@torch.inference_mode()
def costs(s: Subject) -> Trials:
    """What a spec says a model costs is what it costs: parameters, operations of a forward pass, numbers in a cache.

    Parameters are counted; operations by torch's own counter, on the textbook's attention (1 % is let pass; not where
    they depend on marks, nor where heads differ); a cache is filled, and its numbers counted.
    """
    needs(isinstance(s, Ours), "its costs are not counted by this library")
    assert isinstance(s, Ours)
    length = s.longest(16)
    counted = Cost().plus(*s.spec.costs(length).values())
    parameters = sum(parameter.numel() for parameter in s.module.parameters())
    yield _off(counted.params, parameters, "parameters")
    if length > 1 and not any(isinstance(op, Attention) and _uneven(op) for op in s.ops()):
        with _unfused(), FlopCounterMode(display=False) as counter:
            _whole(s, s.text(1, length, source=length), kernel="reference")
        yield _off(counted.flops, counter.get_total_flops(), f"operations of a text of {length} tokens", OFF)
    if s.model.decoder is not None:
        cache, text = s.model.new_cache(2, length), s.text(2, length, source=length)
        _whole(s, text, cache=cache)
        stores = [store for layer in cache.stores for store in layer if store is not None]
        kept = sum(buffer.numel() for store in stores for buffer in store.buffers())
        yield _off(2 * counted.cache, kept, f"numbers in a cache of 2 rows of {length} tokens")


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Without the CPU's fused cells, whose operations torch does not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _uneven(op: Attention) -> bool:
    """Whether its operations depend on marks, or are not the textbook's, whose heads are all alike."""
    return isinstance(op, GlobalAttention) or not op.pattern.heads_alike


def _whole(s: Ours, text: Text, **more: Any) -> Tensor:
    answer: Tensor = s.model(text.ids, text.tokens, source=text.source, source_tokens=text.source_tokens, **more)
    return answer


def _off(counted: int, real: int, what: str, free: float = 0.0) -> Trial:
    """How many % the count is off, beyond a share that is let pass."""
    off = abs(counted - real) / max(real, 1)
    return Trial(100 * max(off - free, 0.0), f"{what}: {counted} are counted, {real} are real")


LAWS: tuple[Law, ...] = (evaluation, saving, shapes, half, compiled, costs)
