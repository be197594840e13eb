"""Mixture of experts: each token goes to the few feed-forwards that a router picks for it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, linear
from anyformer.parts.legal import refuse
from anyformer.parts.op import FeedForward, OpModule, Result, Shared
from anyformer.parts.precision import at_least_float32
from anyformer.spec import SpecError

__all__ = ["MoE", "MoEModule", "balance_loss", "router_z_loss"]


class MoE(FeedForward, kind="moe"):
    """Top-k mixture of experts (Shazeer et al. 2017; Switch: Fedus et al. 2021; Mixtral: Jiang et al. 2024).

    `expert` is the feed-forward that is repeated; `shared` is one that every token also passes (DeepSeekMoE).
    `renormalize` makes the chosen weights sum to 1; with `top_k` 1 all are then 1, and only the auxiliary losses teach
    the router, so Switch leaves it off. `balance` and `z` weigh the load-balance and router-z losses.
    """

    routes = True
    expert: FeedForward
    num_experts: PositiveInt
    top_k: PositiveInt = 2
    renormalize: bool = True
    shared: FeedForward | None = None
    balance: NonNegativeFloat = 0.01
    z: NonNegativeFloat = 0.0

    def check(self) -> None:
        if self.top_k > self.num_experts:
            raise SpecError(f"`top_k` must be at most `num_experts` ({self.num_experts}), but is {self.top_k}")
        refuse("moe", self)

    def build(self, dim: int, shared: Shared) -> MoEModule:
        return MoEModule(self, dim, shared)

    def cost(self, dim: int, length: int) -> Cost:
        router = linear(dim, self.num_experts, length)
        expert = self.expert.cost(dim, length)
        used = Cost(
            params=self.num_experts * expert.params,
            active=self.top_k * expert.active,
            flops=self.top_k * expert.flops,
            activations=self.top_k * (expert.activations + 2 * dim * length),
        )
        kept = Cost(activations=length * (dim + 2 * self.num_experts))
        return router.plus(kept, used, *([self.shared.cost(dim, length)] if self.shared else []))


class MoEModule(OpModule):
    def __init__(self, spec: MoE, dim: int, shared: Shared) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Linear(dim, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(spec.expert.build(dim, shared) for _ in range(spec.num_experts))
        self.shared = spec.shared.build(dim, shared) if spec.shared else None

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Result:
        logits = at_least_float32(self.router(x)).flatten(0, -2)
        weights, chosen = self.route(logits)
        out = self._mix(x.flatten(0, -2), weights, chosen, ctx).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x, ctx)[0]
        return out, self._aux(logits, chosen, ctx.tokens.real.flatten())

    def route(self, logits: Float[Tensor, "N E"]) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
        """Weights and numbers of the experts of each token."""
        weights, chosen = logits.softmax(-1).topk(self.spec.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.spec.renormalize else weights), chosen

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor, ctx: Context) -> Tensor:
        """Each expert reads its own tokens only, and adds its weighted answer to their rows."""
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            answer, _ = expert(x[token], ctx)
            out = out.index_add(0, token, answer * weights[token, rank, None].to(x.dtype))
        return out

    def _aux(self, logits: Tensor, chosen: Tensor, real: Tensor) -> Tensor | None:
        if not (self.spec.balance or self.spec.z):
            return None
        balance = self.spec.balance * balance_loss(logits.softmax(-1), chosen, real)
        return balance + self.spec.z * router_z_loss(logits, real) if self.spec.z else balance


def balance_loss(
    probabilities: Float[Tensor, "N E"], chosen: Int[Tensor, "N k"], real: Bool[Tensor, "N"]
) -> Float[Tensor, ""]:
    """E · Σ f_e P_e (Fedus et al. 2021, equation 4), over real tokens: f_e is how many choices a token spends on expert
    e, P_e the mean probability of e. It is k when all experts are used alike, and 0 for no tokens."""
    experts = probabilities.shape[1]
    count = real.sum().clamp(min=1)
    picked = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
    used = (picked * real[:, None]).sum(0) / count
    mean = (probabilities * real[:, None]).sum(0) / count
    return experts * (used * mean).sum()


def router_z_loss(logits: Float[Tensor, "N E"], real: Bool[Tensor, "N"]) -> Float[Tensor, ""]:
    """Mean of (log Σ exp logits)² over real tokens (Zoph et al. 2022, equation 5): keeps the router's logits small."""
    return (logits.logsumexp(-1).square() * real).sum() / real.sum().clamp(min=1)
