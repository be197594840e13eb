"""Block: the residual equation, and a stack of blocks.

Every published wiring is one equation, x ← after(x + scale · post(op(pre(x)))), with some of its places left empty:

    pre-LN      x + op(pre(x))             Block.pre(...)        GPT-2, LLaMA, T5
    post-LN     after(x + op(x))           Block.post(...)       the 2017 Transformer, BERT, BART
    sandwich    x + post(op(pre(x)))       Block.sandwich(...)   Gemma 2
    parallel    x + Σ op(pre(x))           Block.parallel(...)   GPT-NeoX; with one norm for all: GPT-J, PaLM
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from anyformer import parts
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.parts.attention import CrossAttention
from anyformer.parts.legal import refuse
from anyformer.parts.norm import Norm
from anyformer.parts.op import FeedForward, Mixer, Op, Result, Shared
from anyformer.parts.precision import saturate
from anyformer.spec import Path, Spec, SpecError

__all__ = ["Block", "BlockModule", "Branch", "BranchModule", "Stack"]

for found in pkgutil.iter_modules(parts.__path__):  # so that a spec read from a file finds every kind
    importlib.import_module(f"{parts.__name__}.{found.name}")


class Branch(Spec):
    """One op and what stands around it: x ← after(x + scale · post(op(pre(x)))). Dropout acts on what is added."""

    op: Op
    pre: Norm | None = None
    post: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    dropout: NonNegativeFloat = 0.0

    def check(self) -> None:
        if self.dropout >= 1:
            raise SpecError(f"`dropout` must be below 1, but is {self.dropout}")

    def role(self) -> str:
        """`mixer`, `cross` or `ffn`: the name of this branch in its block."""
        if isinstance(self.op, FeedForward):
            return "ffn"
        return "cross" if isinstance(self.op, CrossAttention) else "mixer"

    def cost(self, dim: int, length: int) -> Cost:
        norms = [norm.cost(dim, length) for norm in (self.pre, self.post, self.after) if norm]
        return self.op.cost(dim, length).plus(*norms)


class Block(Spec):
    """Branches one after another, or side by side (`join: parallel`), all adding to one stream.

    `norm` is one norm before all branches of a parallel block, whose own `pre` may then be empty.
    """

    branches: tuple[Branch, ...]
    join: Literal["sequence", "parallel"] = "sequence"
    norm: Norm | None = None

    def check(self) -> None:
        if not self.branches:
            raise SpecError("a block needs at least one branch")
        refuse("block", self)

    @classmethod
    def pre(cls, *ops: Op, norm: Norm, dropout: float = 0.0) -> Block:
        return cls(tuple(Branch(op, pre=norm, dropout=dropout) for op in ops))

    @classmethod
    def post(cls, *ops: Op, norm: Norm, dropout: float = 0.0) -> Block:
        return cls(tuple(Branch(op, after=norm, dropout=dropout) for op in ops))

    @classmethod
    def sandwich(cls, *ops: Op, norm: Norm, dropout: float = 0.0) -> Block:
        return cls(tuple(Branch(op, pre=norm, post=norm, dropout=dropout) for op in ops))

    @classmethod
    def parallel(cls, *ops: Op, norm: Norm, one_norm: bool = False, dropout: float = 0.0) -> Block:
        """Each op behind a norm of its own, or all behind one (`one_norm`)."""
        own = None if one_norm else norm
        branches = tuple(Branch(op, pre=own, dropout=dropout) for op in ops)
        return cls(branches, "parallel", norm if one_norm else None)

    @property
    def mixer(self) -> Mixer:
        """The op of the first branch that mixes tokens."""
        for branch in self.branches:
            if isinstance(branch.op, Mixer):
                return branch.op
        raise SpecError(f"this block has no mixer, but only {', '.join(self.names())}")

    def names(self) -> list[str]:
        """A name for each branch: its role, numbered from the second of a kind on."""
        roles = [branch.role() for branch in self.branches]
        before = [roles[:i].count(role) for i, role in enumerate(roles)]
        return [f"{role}{count + 1}" if count else role for role, count in zip(roles, before, strict=True)]

    def aliases(self) -> dict[str, Path]:
        return {name: ("branches", str(i), "op") for i, name in enumerate(self.names())}

    def cost(self, dim: int, length: int) -> Cost:
        norm = [self.norm.cost(dim, length)] if self.norm else []
        return Cost().plus(*(branch.cost(dim, length) for branch in self.branches), *norm)

    def build(self, dim: int, shared: Shared) -> BlockModule:
        return BlockModule(self, dim, shared)


class BranchModule(nn.Module):
    """x ← after(x + scale · post(op(pre(x))))."""

    def __init__(self, spec: Branch, dim: int, shared: Shared) -> None:
        super().__init__()
        self.scale = spec.scale
        self.pre, self.post, self.after = (_norm(norm, dim) for norm in (spec.pre, spec.post, spec.after))
        self.op = spec.op.build(dim, shared)
        self.dropout = nn.Dropout(spec.dropout)

    def delta(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        out, aux = self.op(self.pre(x), ctx)
        out = self.dropout(self.post(saturate(out)))
        return (out if self.scale == 1.0 else out * self.scale), aux

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        out, aux = self.delta(x, ctx)
        return self.after(saturate(x + out)), aux


class BlockModule(nn.Module):
    def __init__(self, spec: Block, dim: int, shared: Shared) -> None:
        super().__init__()
        self.names, self.join = spec.names(), spec.join
        self.norm = _norm(spec.norm, dim)
        for name, branch in zip(self.names, spec.branches, strict=True):
            self.add_module(name, BranchModule(branch, dim, shared))

    def branches(self) -> list[BranchModule]:
        return [getattr(self, name) for name in self.names]

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, stores: list[Any] | None = None) -> Result:
        branches = self.branches()
        contexts = [ctx.at(store) for store in stores or [None] * len(branches)]
        run = self._parallel if self.join == "parallel" else self._sequence
        return run(x, list(zip(branches, contexts, strict=True)))

    def _sequence(self, x: Tensor, steps: list[tuple[BranchModule, Context]]) -> Result:
        losses = []
        for branch, ctx in steps:
            x, aux = branch(x, ctx)
            losses.append(aux)
        return x, _mean(losses)

    def _parallel(self, x: Tensor, steps: list[tuple[BranchModule, Context]]) -> Result:
        normed = self.norm(x)
        results = [branch.delta(normed, ctx) for branch, ctx in steps]
        for out, _ in results:
            x = saturate(x + out)
        return x, _mean([aux for _, aux in results])

    def new_stores(self, cache: Any) -> list[Any]:
        return [branch.op.new_store(cache) for branch in self.branches()]


class Stack(nn.Module):
    """Blocks one after another, then a last norm. Modules that all layers share are made once, for the stack."""

    def __init__(self, blocks: tuple[Block, ...], dim: int, norm: Norm | None) -> None:
        super().__init__()
        shared: Shared = {}
        self.layers = nn.ModuleList(block.build(dim, shared) for block in blocks)
        self.norm = _norm(norm, dim)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, stores: list[list[Any]] | None = None) -> Result:
        losses = []
        for i, layer in enumerate(self.layers):
            x, aux = layer(x, ctx, stores[i] if stores else None)
            losses.append(aux)
        return self.norm(x), _mean(losses)

    def new_stores(self, cache: Any) -> list[list[Any]]:
        return [layer.new_stores(cache) for layer in self.layers if isinstance(layer, BlockModule)]


def _norm(spec: Norm | None, dim: int) -> nn.Module:
    return nn.Identity() if spec is None else spec.build(dim)


def _mean(losses: list[Tensor | None]) -> Tensor | None:
    """The mean over those that have an auxiliary loss: each layer is balanced by itself."""
    known = [loss for loss in losses if loss is not None]
    return torch.stack(known).mean() if known else None
