"""Mixture of experts against Mixtral's block and loss, and in numbers (FAULT 41)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.parts.moe import MoEModule, balance_loss, router_z_loss


def build(spec: af.MoE, dim: int = 6) -> MoEModule:
    module = spec.build(dim, {})
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return module


def run(module: MoEModule, x: Tensor, tokens: af.Tokens | None = None) -> tuple[Tensor, Tensor | None]:
    return module(x, Context(tokens or af.Tokens.arange(*x.shape[:2])))


def mixtral():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers.models.mixtral import modeling_mixtral
    return modeling_mixtral


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_output_is_mixtrals(top_k: int) -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(hidden_size=6, intermediate_size=10, num_local_experts=4, num_experts_per_tok=top_k)
    config._experts_implementation = "eager"
    theirs = mixtral().MixtralSparseMoeBlock(config)
    ours = build(af.MoE(af.GatedFFN(10), 4, top_k))
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        for number, expert in enumerate(ours.experts):
            theirs.experts.gate_up_proj[number] = torch.cat((expert.gate.weight, expert.up.weight))
            theirs.experts.down_proj[number] = expert.down.weight
    x = torch.randn(2, 7, 6)
    torch.testing.assert_close(run(ours, x)[0], theirs(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_is_mixtrals(top_k: int, padded: bool) -> None:
    logits = torch.randn(12, 4)
    keep = torch.ones(2, 6, dtype=torch.bool)
    if padded:
        keep[1, 2:] = False
    theirs = mixtral().load_balancing_loss_func((logits,), 4, top_k, keep if padded else None)
    probabilities = logits.softmax(-1)
    ours = balance_loss(probabilities, probabilities.topk(top_k).indices, keep.flatten())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


P = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
TOP = torch.tensor([[0], [0], [0], [1]])


def test_fault_41_balance_loss_in_numbers() -> None:
    assert balance_loss(P, TOP, torch.ones(4, dtype=torch.bool)).item() == pytest.approx(1.15, abs=1e-6)
    assert balance_loss(P, TOP, torch.tensor([True, True, False, False])).item() == pytest.approx(1.70, abs=1e-6)
    assert balance_loss(P, TOP, torch.zeros(4, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_fault_41_uniform_use_gives_k(top_k: int) -> None:
    uniform = torch.full((4, 4), 0.25)
    chosen = (torch.arange(4)[:, None] + torch.arange(top_k)) % 4
    assert balance_loss(uniform, chosen, torch.ones(4, dtype=torch.bool)).item() == pytest.approx(top_k)


def model(*specs: af.MoE, encoder: bool = False) -> af.Transformer:
    blocks = tuple(
        af.Block.pre(af.Attention(1, pattern=af.Full() if encoder else af.Causal()), spec, norm=af.RMSNorm())
        for spec in specs
    )
    stack = {"encoder": blocks} if encoder else {"decoder": blocks}
    return af.TransformerSpec(dim=4, vocab_size=9, **stack).build()


def force(moe: MoEModule, expert: int) -> None:
    """All tokens go to one expert, with probability 1: a router that ignores what is normed to √4 in channel 0."""
    moe.router.weight.data.zero_()
    moe.router.weight.data[expert, 0] = 100.0


@pytest.mark.parametrize("encoder", [True, False])
def test_fault_41_layers_are_balanced_each_by_itself(encoder: bool) -> None:
    """One layer sends all to expert 0, one all to expert 1: each costs 2; pooled they would look balanced, 1."""
    net = model(*[af.MoE(af.DenseFFN(4), 2, 1, renormalize=False, balance=1.0)] * 2, encoder=encoder)
    net.tokens.weight.data = torch.tensor([[5.0, 0.1, 0.1, 0.1]]).expand(9, 4).clone()
    layers = (net.encoder or net.decoder).layers
    for number, layer in enumerate(layers):
        layer.mixer.op.out.weight.data.zero_()
        layer.ffn.op.experts.apply(lambda m: [p.data.zero_() for p in m.parameters(recurse=False)])
        force(layer.ffn.op, number)
    ids = torch.randint(0, 9, (2, 5))
    states = net.encode(ids) if encoder else net.decode(ids)
    assert states.aux is not None
    assert states.aux.item() == pytest.approx(2.0, abs=1e-5)


def test_fault_41_padding_does_not_count_in_a_model() -> None:
    net = model(af.MoE(af.DenseFFN(4), 3, 2, balance=1.0, z=0.1))
    ids = torch.randint(0, 9, (1, 6))
    keep = torch.tensor([[True, True, True, False, False, False]])
    alone = net.decode(ids[:, :3]).aux
    padded = net.decode(ids, af.Tokens.padded(keep)).aux
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)
    assert (net.decode(ids).aux - alone).abs() > 1e-4
    assert net.decode(ids, af.Tokens.padded(torch.zeros_like(keep))).aux.item() == 0.0


def test_aux_arrives_once() -> None:
    """Layers without experts do not thin it; encoder and decoder count alike; without experts there is none."""
    spec = af.MoE(af.DenseFFN(4), 2, 1, renormalize=False, balance=0.5)
    net = model(spec)
    ids = torch.randint(0, 9, (2, 5))
    seen: list[Tensor] = []
    net.decoder.layers[0].ffn.op.router.register_forward_hook(lambda m, i, out: seen.append(out))
    aux = net.decode(ids).aux
    probabilities = seen[0].flatten(0, 1).softmax(-1)
    used = torch.bincount(probabilities.argmax(-1), minlength=2) / 10
    assert aux.item() == pytest.approx(0.5 * 2 * (used * probabilities.mean(0)).sum().item(), abs=1e-6)
    dense = af.Block.pre(af.Attention(1), af.DenseFFN(4), norm=af.RMSNorm())
    mixed = af.TransformerSpec(dim=4, vocab_size=9, decoder=(*net.spec.decoder, dense)).build()
    mixed.load_state_dict(net.state_dict(), strict=False)
    torch.testing.assert_close(mixed.decode(ids).aux, aux, rtol=0, atol=1e-6)
    assert model(spec.replace(balance=0.0)).decode(ids).aux is None
    only_dense = af.TransformerSpec(dim=4, vocab_size=9, decoder=(dense,)).build()
    assert only_dense.decode(ids).aux is None


def test_aux_of_an_encoder_decoder_is_the_mean_of_both() -> None:
    spec = af.MoE(af.DenseFFN(4), 2, 1, renormalize=False, balance=1.0)
    encoder = af.Block.pre(af.Attention(1, pattern=af.Full()), spec, norm=af.RMSNorm())
    decoder = af.Block.pre(af.Attention(1), af.CrossAttention(1), spec, norm=af.RMSNorm())
    net = af.TransformerSpec(dim=4, vocab_size=9, encoder=(encoder,), decoder=(decoder,)).build()
    ids = torch.randint(0, 9, (2, 5))
    memory = net.encode(ids)
    both = net.decode(ids, memory=memory).aux
    own = net.decode(ids, memory=memory._replace(aux=None)).aux
    torch.testing.assert_close(both, (own + memory.aux) / 2)


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_1_weight(renormalize: bool) -> None:
    """Switch multiplies by the probability, so that the router learns from the output; renormalized, it is 1."""
    module = build(af.MoE(af.GatedFFN(5), 3, 1, renormalize=renormalize))
    x = torch.randn(1, 4, 6)
    probabilities = module.router(x).softmax(-1)
    out = run(module, x)[0]
    for t in range(4):
        best = int(probabilities[0, t].argmax())
        expert, _ = module.experts[best](x[0, t], Context(af.Tokens.arange(1, 1)))
        weight = 1.0 if renormalize else probabilities[0, t, best]
        torch.testing.assert_close(out[0, t], expert * weight, rtol=0, atol=1e-5)
    out.square().sum().backward()
    learns = module.router.weight.grad.abs().sum() > 1e-4
    assert learns == (not renormalize)


def test_all_experts_without_renormalising_is_the_weighted_sum() -> None:
    module = build(af.MoE(af.DenseFFN(5), 3, 3, renormalize=False))
    x = torch.randn(2, 4, 6)
    ctx = Context(af.Tokens.arange(2, 4))
    answers = torch.stack([expert(x, ctx)[0] for expert in module.experts], -1)
    expected = (answers * module.router(x).softmax(-1)[:, :, None]).sum(-1)
    torch.testing.assert_close(run(module, x)[0], expected, rtol=0, atol=1e-5)


def test_shared_expert_is_added_for_every_token() -> None:
    spec = af.MoE(af.GatedFFN(5), 3, 2)
    both = build(spec.replace(shared=af.DenseFFN(7)))
    routed = build(spec)
    routed.load_state_dict({n: w for n, w in both.state_dict().items() if not n.startswith("shared.")})
    x = torch.randn(2, 4, 6)
    shared, _ = both.shared(x, Context(af.Tokens.arange(2, 4)))
    torch.testing.assert_close(run(both, x)[0], run(routed, x)[0] + shared, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_z_loss_is_its_formula(size: float) -> None:
    """Mean over real tokens of log(Σ exp)²; for equal logits c of n experts that is (c + ln n)²."""
    logits = torch.full((3, 4), size)
    logits[2] = 50.0
    keep = torch.tensor([True, True, False])
    expected = (size + torch.tensor(4.0).log()).square()
    torch.testing.assert_close(router_z_loss(logits, keep), expected)
    assert router_z_loss(logits, torch.zeros_like(keep)).item() == 0.0


def test_z_loss_is_added_with_its_weight() -> None:
    with_z, without = (build(af.MoE(af.DenseFFN(4), 3, 2, balance=0.01, z=z)) for z in (0.5, 0.0))
    without.load_state_dict(with_z.state_dict())
    x = torch.randn(2, 4, 6)
    z = with_z.router(x).flatten(0, 1).exp().sum(-1).log().square().mean()
    torch.testing.assert_close(run(with_z, x)[1] - run(without, x)[1], 0.5 * z, rtol=0, atol=1e-5)


def test_an_expert_without_tokens_does_no_harm() -> None:
    module = build(af.MoE(af.GatedFFN(5), 4, 1, renormalize=False, balance=1.0))
    module.router.weight.data.zero_()
    module.router.weight.data[2] = 1.0
    x = torch.rand(2, 3, 6) + 0.1
    out, aux = run(module, x)
    (out.sum() + aux).backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
    idle = [float(e.down.weight.grad.abs().sum()) if e.down.weight.grad is not None else 0.0 for e in module.experts]
    assert [bool(grad) for grad in idle] == [False, False, True, False]


@pytest.mark.parametrize("source", ["output", "balance", "z"])
def test_gradient_reaches_the_router(source: str) -> None:
    weights = {"balance": 1.0 if source == "balance" else 0.0, "z": 1.0 if source == "z" else 0.0}
    module = build(af.MoE(af.GatedFFN(5), 4, 2, **weights))
    out, aux = run(module, torch.randn(2, 3, 6))
    (out.square().sum() if source == "output" else aux).backward()
    assert module.router.weight.grad.abs().sum() > 1e-4


def test_no_tokens_at_all() -> None:
    out, aux = run(build(af.MoE(af.GatedFFN(5), 4, 2)), torch.zeros(2, 0, 6))
    assert out.shape == (2, 0, 6)
    assert aux.item() == 0.0


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    module = build(af.MoE(af.GatedFFN(5), 4, 2))
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(run(module, x[1:, 2:])[0], run(module, x)[0][1:, 2:], rtol=0, atol=1e-6)


def test_fault_39_float16_experts_stay_finite() -> None:
    """Two experts of 65 504 each, unrenormalised weights, and a shared one on top, behind a sandwich norm."""
    spec = af.MoE(af.DenseFFN(1, bias=False), 2, 2, shared=af.DenseFFN(1, bias=False))
    module = af.Block.sandwich(spec, norm=af.RMSNorm()).build(1, {})
    for name, p in module.named_parameters():
        if name.endswith(("up.weight", "down.weight")):
            p.data.fill_(300.0)
    out, _ = module.half()(torch.ones(1, 2, 1).half(), Context(af.Tokens.arange(1, 2)))
    assert out.flatten().tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: af.MoE(af.GatedFFN(4), 2, 3), r"`top_k` must be at most `num_experts` \(2\), but is 3"),
        (lambda: af.MoE(af.GatedFFN(4), 0), "num_experts: must be greater than 0, but is 0"),
        (
            lambda: af.MoE(af.GatedFFN(4), 2, balance=-1.0),
            "balance: must be greater than or equal to 0, but is -1",
        ),
    ],
)
def test_moe_refuses(make, said: str) -> None:
    with pytest.raises(af.SpecError, match=said):
        make()


def test_cost_counts_all_and_active_parameters() -> None:
    spec = af.MoE(af.GatedFFN(5), 4, 2, shared=af.DenseFFN(7))
    cost = spec.cost(6, 3)
    assert cost.params == sum(p.numel() for p in spec.build(6, {}).parameters())
    assert cost.active == cost.params - 2 * 3 * 5 * 6, "two of four experts rest"
