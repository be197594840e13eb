"""What holds of a whole model: any shape, any dtype, saved, compiled, counted."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anyformer.check.changed import undropped
from anyformer.check.law import INTEGERS, Law, Trial, Trials, apart, holds, law, needs
from anyformer.check.ours import Ours, ours
from anyformer.check.subject import Subject, Text
from anyformer.cost import Cost
from anyformer.families.family import shortest
from anyformer.parts.attention import Attention
from anyformer.parts.global_attention import GlobalAttention
from anyformer.parts.precision import at_least_float32

__all__ = ["LAWS", "finite_gradients", "mean_square"]


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
        answer = again.answer(s.text(2, s.longest(7)))
        if answer.requires_grad:
            mean_square(answer).backward()
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
        yield from finite_gradients(s, whole, said)
        with torch.inference_mode():
            for i in range(batch):
                yield apart(s.answer(text.rows([i])), whole[i : i + 1], f"{said}: row {i} alone is answered otherwise")
            for how, view in (
                ("strided", torch.stack((text.ids,) * 2, -1)[..., 0]),
                ("transposed", text.ids.mT.contiguous().mT),
            ):
                yield apart(s.answer(text.saying(view)), whole, f"{said}: as a {how} view they are answered otherwise")


def finite_gradients(s: Subject, answer: Tensor, said: str) -> Trials:
    """Whether all gradients of the mean square are finite."""
    if answer.requires_grad:
        mean_square(answer).backward()
        wrong = [n for n, p in s.module.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        yield holds(not wrong, f"{said}: gradients of {', '.join(wrong)} are not finite")


def mean_square(answer: Tensor) -> Tensor:
    return at_least_float32(answer).square().sum() / max(answer.numel(), 1)


OFF = 0.01  # of the operations: what torch's counter and ours may be apart


@law("costs", "counted costs are the real ones", unit="% off", limits=0.0, anew=False)
@torch.inference_mode()
def costs(s: Subject) -> Trials:
    """What a spec says a model costs is what it costs: parameters, operations of a forward pass, numbers in a cache.

    Parameters are counted; operations by torch's own counter, on the textbook's attention (1 % is let pass; not where
    they depend on marks, nor where heads differ); a cache is filled, and its numbers counted.
    """
    s = ours(s)
    needs(not s.fixed, INTEGERS)
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


LAWS: tuple[Law, ...] = (evaluation, saving, shapes, costs)
