"""Global attention: a few marked tokens see everything, through projections of their own (Longformer)."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.parts.attention import Attention, AttentionModule
from anyformer.parts.op import Result, Shared
from anyformer.parts.pattern import Full, Global, Pattern, Window
from anyformer.tokens import Tokens

__all__ = ["GlobalAttention", "GlobalAttentionModule"]


class GlobalAttention(Attention, kind="global_attention"):
    """Longformer's (Beltagy et al. 2020, section 3.1): `pattern` for all, and what marked tokens ask for themselves.

    A marked token (`Tokens.mark`) attends to its whole document with a second set of query, key and value projections.
    All others follow `pattern`, in which they see the marked ones by `Global()`.
    """

    marked_see_all = True
    pattern: Pattern = Window(257) | Global()

    def build(self, dim: int, shared: Shared) -> GlobalAttentionModule:
        return GlobalAttentionModule(self, dim, shared)

    def cost(self, dim: int, length: int) -> Cost:
        """With the second projections, whose keys and values are made for every token; marked rows are not counted."""
        head = self.width(dim)
        widths = {"q": self.num_heads * head, "k": self.kv_heads * head, "v": self.kv_heads * head}
        costs = {name: linear(dim, width, length, bias=name in self.bias) for name, width in widths.items()}
        costs["q"] = costs["q"]._replace(flops=0)
        return super().cost(dim, length).plus(*costs.values())


class GlobalAttentionModule(AttentionModule):
    def __init__(self, spec: GlobalAttention, dim: int, shared: Shared) -> None:
        super().__init__(spec, dim, shared)
        self.q_global = nn.Linear(dim, self.q.out_features, bias="q" in spec.bias)
        self.k_global = nn.Linear(dim, self.k.out_features, bias="k" in spec.bias)
        self.v_global = nn.Linear(dim, self.v.out_features, bias="v" in spec.bias)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        tokens = ctx.tokens
        q = self.position.at_heads(self.queries(x), tokens, ctx)
        k, v = self.keys_values(x)
        heads = self.attend(q, self.position.at_heads(k, tokens, ctx), v, tokens, ctx)
        if tokens.mark is not None and bool(tokens.mark.any()):
            heads = self._answer_marked(x, heads, tokens.mark & tokens.real, ctx)
        return self.out(heads.flatten(-2)), None

    def _answer_marked(
        self, x: Float[Tensor, "B T D"], heads: Float[Tensor, "B T H K"], mark: Bool[Tensor, "B T"], ctx: Context
    ) -> Float[Tensor, "B T H K"]:
        """`heads`, with the rows of marked tokens replaced. Rows of the batch may have different counts of them."""
        most = int(mark.sum(1).max())
        at = mark.long().argsort(dim=1, descending=True, stable=True)[:, :most]
        asked = Tokens(ctx.tokens.pos.gather(1, at), ctx.tokens.seg.gather(1, at).masked_fill(~mark.gather(1, at), -1))
        q = self._projected(self.q_global, _rows(x, at))
        k, v = self._projected(self.k_global, x), self._projected(self.v_global, x)
        q, k = self.position.at_heads(q, asked, ctx), self.position.at_heads(k, ctx.tokens, ctx)
        context = dataclasses.replace(ctx, tokens=asked)
        answers = self.attend(q, k, v, ctx.tokens, context, pattern=Full())
        index = at[..., None, None].expand_as(answers)
        kept = torch.where(mark.gather(1, at)[..., None, None], answers, heads.gather(1, index))
        return heads.scatter(1, index, kept)

    def _projected(self, project: nn.Linear, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        heads: Tensor = project(x).unflatten(-1, (-1, self.head_dim))
        return heads


def _rows(x: Float[Tensor, "B T D"], at: Int[Tensor, "B n"]) -> Float[Tensor, "B n D"]:
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
