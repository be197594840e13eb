"""Show: a model as a tree with its cost, from the spec alone; no weights are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from rich.text import Text
from rich.tree import Tree

from anyformer.block import Block, Branch
from anyformer.cost import Cost
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.pattern import Pattern
from anyformer.parts.per_head import PerHead
from anyformer.spec import Part, Spec
from anyformer.tokens import Tokens

__all__ = ["describe", "masks", "tiles", "tree"]

BYTES = 4  # of a number in float32
OPTIMIZER = 2  # numbers AdamW keeps for each weight


def describe(spec: TransformerSpec, *, length: int, batch: int) -> dict[str, Any]:
    """Every figure, as plain data: counts for one token, bytes in float32 for a batch of `batch` × `length`."""
    parts = spec.costs(length)
    total = Cost().plus(*parts.values())
    return {
        "length": length,
        "batch": batch,
        "parameters": total.params,
        "active_parameters": total.active,
        "parameters_by_part": {name: cost.params for name, cost in parts.items()},
        "flops_per_token_forward": total.flops // length,
        "flops_per_token_backward": 2 * total.flops // length,
        "flops_by_part": {name: cost.flops // length for name, cost in parts.items()},
        "cache_bytes_per_token": BYTES * _cache(spec, 1),
        "cache_bytes": BYTES * _cache(spec, length),
        "weight_bytes": BYTES * total.params,
        "gradient_bytes": BYTES * total.params,
        "optimizer_bytes": BYTES * OPTIMIZER * total.params,
        "activation_bytes": BYTES * batch * total.activations,
        "max_len": spec.max_len(),
    }


def _cache(spec: TransformerSpec, length: int) -> int:
    """Numbers in the cache of one row of `length` tokens: only decoders keep one."""
    return sum(block.cost(spec.dim, length).cache for block in spec.decoder)


def tree(spec: TransformerSpec, *, length: int, batch: int) -> Tree:
    """The model as a tree of parts, with parameters and forward FLOPs a token; equal layers in a row are shown once."""
    facts = describe(spec, length=length, batch=batch)
    root = Tree(_line("Transformer", f"dim {spec.dim}, vocabulary {spec.vocab_size}", facts["parameters"], None))
    root.add(_line("tokens", "one vector a token", spec.vocab_size * spec.dim, None))
    for name, blocks in spec.stacks().items():
        part = spec.costs(length)[name]
        if spec.embed.replace(tied=True) != Embed():
            embed = root.add(_line(f"{name}.embed", "", spec.embed.cost(spec.dim, length).params, None))
            _add_fields(embed, spec.embed, skip=("tied",))
        stack = root.add(_line(name, f"{len(blocks)} layers", part.params, part.flops // length))
        for first, last in _runs(blocks):
            _add_block(stack, blocks[first], _span(first, last), spec.dim, length, last - first + 1)
        if spec.final_norm:
            stack.add(_line("norm", repr(spec.final_norm), spec.final_norm.cost(spec.dim, length).params, None))
    if spec.head:
        cost = spec.costs(length)["head"]
        root.add(_line("head", repr(spec.head) + (", tied" if spec.tied else ""), cost.params, cost.flops // length))
    return root


def masks(spec: TransformerSpec, size: int) -> dict[str, Any]:
    """For each kind of attention layer, who sees whom among `size` tokens: name → (T, S) bool; the first is marked."""
    tokens = _first_marked(size)
    return {name: pattern.mask(tokens, tokens)[0] for name, pattern in _patterns(spec).items()}


def tiles(spec: TransformerSpec, size: int, block: int) -> dict[str, Any]:
    """The same in tiles of `block` × `block`: name → (n, m), EMPTY, PARTIAL or FULL as the pattern tells kernels."""
    tokens = _first_marked(size)
    return {name: pattern.blocks(tokens, tokens, block)[0] for name, pattern in _patterns(spec).items()}


def _first_marked(size: int) -> Tokens:
    return dataclasses.replace(Tokens.arange(1, size), mark=torch.arange(size)[None] == 0)


def _patterns(spec: TransformerSpec) -> dict[str, Pattern]:
    """The pattern of each kind of attention layer, and of each run of heads where they differ."""
    found: dict[tuple[str, str, Pattern], list[int]] = {}
    for stack, blocks in spec.stacks().items():
        for i, block in enumerate(blocks):
            for name, branch in zip(block.names(), block.branches, strict=True):
                if isinstance(branch.op, Attention):
                    for heads, pattern in _by_head(branch.op):
                        found.setdefault((stack, name + heads, pattern), []).append(i)
    return {
        f"{stack}.{_layers(layers, len(spec.stacks()[stack]))}.{name}: {pattern!r}": pattern
        for (stack, name, pattern), layers in found.items()
    }


def _by_head(op: Attention) -> list[tuple[str, Pattern]]:
    if not isinstance(op.pattern, PerHead):
        return [("", op.pattern)]
    runs = op.pattern.runs(op.num_heads)
    return [(f".{_span(first, end - 1, 'head')}", pattern) for first, end, pattern in runs]


def _add_block(stack: Tree, block: Block, where: str, dim: int, length: int, times: int) -> None:
    cost = block.cost(dim, length)
    note = f"× {times}" if times > 1 else ""
    node = stack.add(_line(where, note, cost.params * times, cost.flops // length * times))
    if block.norm:
        node.add(_line("norm", repr(block.norm), block.norm.cost(dim, length).params, None))
    for name, branch in zip(block.names(), block.branches, strict=True):
        own = branch.cost(dim, length)
        _add_fields(node.add(_line(name, _wiring(branch), own.params, own.flops // length)), branch.op)


def _add_fields(node: Tree, spec: Spec, skip: tuple[str, ...] = ()) -> None:
    """What was chosen: values that are not None or empty; parts by their repr."""
    shown = [f"{name} {_short(value)}" for name, value in spec.items() if name not in skip and _chosen(value)]
    kind = spec.kind if isinstance(spec, Part) else ""
    text = ", ".join(([kind] if kind else []) + shown)
    if text:
        node.add(Text(text, style="dim"))


def _chosen(value: Any) -> bool:
    neutral = value is None or value is False or value == () or (isinstance(value, float) and value in (0.0, 1.0))
    return not neutral


def _short(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else str(value)


def _wiring(branch: Branch) -> str:
    around = {"pre": branch.pre, "post": branch.post, "after": branch.after}
    named = [f"{place} {norm!r}" for place, norm in around.items() if norm]
    return ", ".join(named + ([f"scale {branch.scale}"] if branch.scale != 1.0 else []))


def _runs(blocks: tuple[Block, ...]) -> list[tuple[int, int]]:
    """First and last of each run of equal layers."""
    starts = [i for i in range(len(blocks)) if i == 0 or blocks[i] != blocks[i - 1]]
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True)]


def _span(first: int, last: int, what: str = "layer") -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _layers(numbers: list[int], of: int) -> str:
    return "*" if len(numbers) == of else ",".join(map(str, numbers))


def _line(name: str, note: str, params: int, flops: int | None) -> Text:
    line = Text(name, style="bold")
    if note:
        line.append(f"  {note}", style="not bold")
    line.append(f"  {count(params)} parameters", style="not bold cyan")
    if flops is not None:
        line.append(f"  {count(flops)} FLOPs/token", style="not bold magenta")
    return line


def count(number: float) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
