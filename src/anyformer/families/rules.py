"""Rules: how the tensors of a published checkpoint and the parameters of our model say the same thing.

A rule names tensors on both sides and can be followed in either direction, so that what was loaded can be saved back
bit for bit. In names `*` stands for a layer's or an expert's number; a rule for a module holds for its weight and its
bias. Which tensors there are follows from the model: each of its parameters is claimed by exactly one rule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Constant", "Link", "Name", "Rule", "Skip", "Split", "Tie", "Transpose", "links", "names"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """`theirs` ↔ `ours`: patterns of names. This one copies; a subclass changes the tensors on the way."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]

    def read(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours from theirs."""
        return tensors

    def write(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs from ours."""
        return tensors


class Name(Rule):
    """The same tensor under another name."""

    def __init__(self, theirs: str, ours: str) -> None:
        super().__init__((theirs,), (ours,))


class Transpose(Name):
    """The same matrix, stored as (input, output); a bias stays."""

    def read(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]

    write = read


@dataclasses.dataclass(frozen=True, init=False)
class Split(Rule):
    """One tensor that holds several of ours, of equal size, along its output axis.

    With `heads`, they take turns head by head (GPT-NeoX), else each is whole (GPT-2); `transposed` as in `Transpose`.
    """

    heads: int = 1
    transposed: bool = False

    def __init__(self, theirs: str, *ours: str, heads: int = 1, transposed: bool = False) -> None:
        super().__init__((theirs,), ours)
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "transposed", transposed)

    def read(self, tensors: list[Tensor]) -> list[Tensor]:
        (whole,) = (self._turned(tensor) for tensor in tensors)
        if whole.shape[0] % (self.heads * len(self.ours)):
            raise ValueError(f"{tuple(whole.shape)} cannot be cut into {len(self.ours)} × {self.heads} equal parts")
        cut = whole.unflatten(0, (self.heads, len(self.ours), -1))
        return [part.flatten(0, 1) for part in cut.unbind(1)]

    def write(self, tensors: list[Tensor]) -> list[Tensor]:
        parts = [tensor.unflatten(0, (self.heads, -1)) for tensor in tensors]
        return [self._turned(torch.stack(parts, 1).flatten(0, 2))]

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


class Tie(Name):
    """Theirs repeats another of theirs, where the model is tied: it may be absent, and must be equal if it is there."""

    def __init__(self, theirs: str, original: str) -> None:
        super().__init__(theirs, original)


class Skip(Rule):
    """Tensors that say nothing: buffers that older files carry."""

    def __init__(self, *theirs: str) -> None:
        super().__init__(theirs, ())


@dataclasses.dataclass(frozen=True, init=False)
class Constant(Rule):
    """A tensor (1, vocab_size) that must be all zeros, and is written so."""

    def __init__(self, theirs: str) -> None:
        super().__init__((theirs,), ())


class Link(NamedTuple):
    """A rule at one place of one model: whole names."""

    rule: Rule
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


def names(table: str) -> list[Rule]:
    """Rules from a table of two columns: their name, our name."""
    words = table.split()
    return [Name(*pair) for pair in zip(words[::2], words[1::2], strict=True)]


def links(rules: Sequence[Rule], parameters: Iterable[str]) -> list[Link]:
    """Every rule at every place where one of our `parameters` has its name."""
    found: list[Link] = []
    unclaimed = dict.fromkeys(parameters)
    anchors = [(rule, _pattern(rule.ours[0])) for rule in rules if rule.ours and not isinstance(rule, Tie)]
    for parameter in list(unclaimed):
        for rule, anchor in anchors:
            match = anchor.fullmatch(parameter)
            if match:
                *numbers, ending = match.groups()
                theirs, ours = ([_filled(p, numbers) + ending for p in side] for side in (rule.theirs, rule.ours))
                found.append(Link(rule, tuple(theirs), tuple(ours)))
    claimed = [name for link in found for name in link.ours]
    twice = {name for name in claimed if claimed.count(name) > 1} if len(set(claimed)) < len(claimed) else set()
    left = unclaimed.keys() - set(claimed)
    if twice or left:
        raise ValueError(
            f"each parameter needs one rule, but {sorted(left)[:4]} have none, {sorted(twice)[:4]} several"
        )
    return found


def matching(pattern: str, listed: Mapping[str, object] | Iterable[str]) -> list[str]:
    """The names that a pattern stands for."""
    form = _pattern(pattern)
    return [name for name in listed if form.fullmatch(name)]


def _pattern(name: str) -> re.Pattern[str]:
    """`*` is a number; the last group is what a module's tensor is called."""
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias|)")


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
