"""Record: what a layer asks of its kernel, without a part in the model.

The layer is called, through its context, with a kernel of ours, which notes the request: queries, keys, tokens, pattern
and so on. Everything else about the attention can be worked out from that, whatever kernel runs otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.kernels.base import Kernel, Request
from anyformer.kernels.by_head import ByHead
from anyformer.model import Transformer
from anyformer.parts.attention import AttentionModule

__all__ = ["Called", "Note", "alike", "called", "within"]


class Note(Kernel):
    """Notes what is asked, and answers nothing: no pair of tokens is computed."""

    name = "note"
    heads_may_differ: ClassVar[bool] = True

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def rejects(self, request: Request) -> str | None:
        return None

    def __call__(self, request: Request) -> Float[Tensor, "B T H K"]:
        self.requests.append(request)
        return torch.zeros_like(request.q)


class Called(NamedTuple):
    """A layer, what it read, and what it asked of its kernel."""

    module: AttentionModule
    x: Tensor
    requests: list[Request]


class _Enough(Exception):
    """The layer was reached: the rest of the model need not run."""


def called(
    model: Transformer, ids: Tensor, layer: int, stack: str | None, branch: str, inputs: dict[str, Any]
) -> Called:
    """Run the model as far as one layer, which is given a kernel that only notes."""
    if inputs.get("cache") is not None:
        raise ValueError("weights are those of a whole text: give all of its `ids`, and no `cache`")
    stack = stack or ("encoder" if model.decoder is None else "decoder")
    module, note = _attention(model, stack, layer, branch), Note()
    calls: list[Called] = []

    def enter(_: nn.Module, arguments: tuple[Tensor, Context]) -> tuple[Tensor, Context]:
        x, ctx = arguments
        calls.append(Called(module, x, note.requests))
        return x, dataclasses.replace(ctx, kernel=note)

    def leave(*_: Any) -> None:
        raise _Enough

    alone = stack == "encoder" and model.decoder is not None and not {"source", "memory"} & set(inputs)
    with module.register_forward_pre_hook(enter), module.register_forward_hook(leave), contextlib.suppress(_Enough):
        (model.encode if alone else model)(ids, **inputs)
    if not calls:
        raise ValueError("with `memory` given, the encoder is not run: give `source`")
    return calls[0]


def _attention(model: Transformer, stack: str, layer: int, branch: str) -> AttentionModule:
    stacks = model.spec.stacks()
    if stack not in stacks:
        raise ValueError(f"`stack` must be {' or '.join(map(repr, stacks))}, but is {stack!r}")
    number = within("layer", [layer], len(stacks[stack]))[0]
    names = stacks[stack][number].names()
    if branch not in names:
        raise ValueError(f"`branch` must be one of {', '.join(names)} in layer {number}, but is {branch!r}")
    module = model.get_submodule(f"{stack}.layers.{number}.{branch}.op")
    if not isinstance(module, AttentionModule):
        raise ValueError(f"{stack}.{number}.{branch} is no attention, so it has no weights over tokens")
    return module


def within(name: str, numbers: Sequence[int], size: int) -> list[int]:
    """The numbers, counted from the start."""
    for number in numbers:
        if not -size <= number < size:
            raise ValueError(f"`{name}` must be from {-size} to {size - 1}, but is {number}")
    return [number % size for number in numbers]


def alike(request: Request) -> list[Request]:
    """The request; where heads differ (`PerHead`), one for each run of them that are alike."""
    if request.pattern.heads_alike:
        return [request]
    note = Note()
    ByHead([note])(request)
    return note.requests
