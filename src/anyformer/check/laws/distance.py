"""Relative positions: how far apart tokens are, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.check.asked import laid_out, left_padded
from anyformer.check.law import Law, Trials, apart, law, needs
from anyformer.check.ours import Ours, ours
from anyformer.check.subject import Subject
from anyformer.check.textbook import alibi_slope, bucket, turned
from anyformer.context import Context
from anyformer.inspect.record import called
from anyformer.parts.attention import Attention, AttentionModule
from anyformer.parts.linear_attention import LinearAttentionModule
from anyformer.parts.position import Alibi, AlibiModule, PositionModule, RelativeBias, RelativeBiasModule, Rotary
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

SHIFTS = (1, 7, 1000)


class Placed(NamedTuple):
    """A position scheme in a mixer: heads of queries and of keys, and their width."""

    position: PositionModule
    num_heads: int
    kv_heads: int
    width: int


@law("distance", "relative positions depend on distance only")
@torch.inference_mode()
def distance(s: Subject) -> Trials:
    """Rotary positions, ALiBi and T5's biases know how far apart two tokens are, not where they are.

    The same queries and keys at positions moved by 1, 7 and 1000; and each scheme held to its closed form: rotation of
    complex numbers, -slope · distance, the bucket in whole numbers. In every kind of layer, queries and keys are turned
    once, at their own places.
    """
    s = ours(s)
    found: dict[Any, Placed] = {}
    mixers = [m for m in s.model.modules() if isinstance(m, AttentionModule | LinearAttentionModule)]
    for mixer in mixers:
        position = mixer.position
        if isinstance(position.spec, Rotary | Alibi | RelativeBias):
            placed = Placed(position, mixer.spec.num_heads, mixer.spec.kv_heads, mixer.head_dim)
            found.setdefault((position.key(), *placed[1:]), placed)
    needs(found, "no relative position scheme is in use")
    for placed in found.values():
        yield from _turns(s, placed) if isinstance(placed.position.spec, Rotary) else _adds(s, placed)
    yield from _turned_in_layers(s)


def _turns(s: Ours, placed: Placed) -> Trials:
    spec: Any = placed.position.spec
    q, k = (torch.randn(placed.width, dtype=torch.float64).to(s.device, s.dtype) for _ in range(2))
    for length in (8, 4096):  # what dynamic schedules plan for
        whole = f"{spec!r}, planned for {length}"

        def scores(start: int, length: int = length) -> Float[Tensor, "T S"]:
            tokens = Tokens.arange(1, 12, start=start, device=s.device)
            ctx = Context(tokens, context_len=length)
            one, other = (placed.position.at_heads(x.expand(1, 12, 1, -1), tokens, ctx)[0, :, 0] for x in (q, k))
            return one @ other.T

        pos = torch.arange(12, device=s.device) + torch.tensor([[0], [50]], device=s.device)
        tokens = Tokens(pos, torch.zeros_like(pos))
        for name, heads in ("queries", placed.num_heads), ("keys", placed.kv_heads):
            x = torch.randn(2, 12, heads, placed.width, dtype=torch.float64).to(s.device, s.dtype)
            mine = placed.position.at_heads(x, tokens, Context(tokens, context_len=length))
            yield apart(mine, turned(x, pos, spec, length), f"{whole}: {name} as complex numbers that turn")
        for shift in SHIFTS:
            yield apart(scores(shift), scores(0), f"{whole}: scores of positions 0 to 11, and moved by {shift}")


def _adds(s: Ours, placed: Placed) -> Trials:
    scheme, spec = placed.position, placed.position.spec
    most = spec.max_distance if isinstance(spec, RelativeBias) else 128
    pos = torch.tensor([sorted({*range(12), 17, 20, 31, 40, 64, most - 1, most, most + 1, 1000})], device=s.device)
    for tokens in (Tokens.arange(2, 3, device=s.device), Tokens(pos, torch.zeros_like(pos))):
        at = tokens.pos[0].tolist()
        said = f"{spec!r} at positions {at}"
        apart_by = torch.tensor([[i - j for j in at] for i in at], device=s.device)
        mine = _bias(scheme, tokens)
        yield apart(mine, _closed(scheme, apart_by, placed.num_heads), f"{said}: what is added to the scores")
        for shift in SHIFTS:
            moved = Tokens(tokens.pos + shift, tokens.seg)
            yield apart(_bias(scheme, moved), mine, f"{said}, and moved by {shift}")


def _bias(scheme: PositionModule, tokens: Tokens) -> Float[Tensor, "H T T"]:
    bias = scheme.at_scores(tokens, tokens)
    assert bias is not None
    return bias[0]


def _closed(scheme: PositionModule, apart_by: Int[Tensor, "T T"], num_heads: int) -> Float[Tensor, "H T T"]:
    """What the scheme adds at these distances, by its definition."""
    if isinstance(scheme, AlibiModule):
        slopes = [alibi_slope(head, num_heads) for head in range(num_heads)]
        return -torch.tensor(slopes, dtype=torch.float64, device=apart_by.device)[:, None, None] * apart_by.abs()
    assert isinstance(scheme, RelativeBiasModule)
    spec: Any = scheme.spec
    buckets = {d: bucket(d, spec) for d in set(apart_by.flatten().tolist())}
    rows = torch.tensor([[buckets[d] for d in row] for row in apart_by.tolist()], device=apart_by.device)
    return scheme.table[rows].permute(2, 0, 1)


def _turned_in_layers(s: Ours) -> Trials:
    """What reaches the kernel, in one layer of each kind."""
    known: set[Any] = set()
    for stack, blocks in s.spec.stacks().items():
        for layer, block in enumerate(blocks):
            for name, branch in zip(block.names(), block.branches, strict=True):
                op = branch.op
                if isinstance(op, Attention) and isinstance(op.position, Rotary) and (stack, op) not in known:
                    known.add((stack, op))
                    yield from _turned_in(s, stack, layer, name, op.position)


def _turned_in(s: Ours, stack: str, layer: int, branch: str, spec: Rotary) -> Trials:
    text = laid_out(s, left_padded(s, s.longest(5), s.longest(5) // 2))
    inputs: dict[str, Any] = {"tokens": text.tokens}
    if stack == "decoder" and text.source is not None:
        inputs |= {"source": text.source, "source_tokens": text.source_tokens}
    module, x, requests = called(s.model, text.ids, layer, stack, branch, inputs)
    for name, mine, heads in (
        ("queries", requests[0].q, module.queries(x)),
        ("keys", requests[0].k, module.keys_values(x)[0]),
    ):
        its = turned(heads, text.tokens.pos, spec, text.tokens.end)
        yield apart(mine, its, f"{stack} layer {layer}, ids {text.ids.tolist()}: {name} turned by {spec!r}")


LAWS: tuple[Law, ...] = (distance,)
