"""The residual equation: against torch's layers, against the written equation, and FAULT 38's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.block import BlockModule
from anyformer.context import Context

BIAS = ("q", "k", "v", "out")


def run(module: nn.Module, x: Tensor, tokens: af.Tokens | None = None, **ctx: object) -> Tensor:
    out, _ = module(x, Context(tokens or af.Tokens.arange(*x.shape[:2]), **ctx))
    return out


def randomized(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module


# -- against torch ----------------------------------------------------------------------------------------------------


def attention_state(ours: str, theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    state = {f"{ours}.op.out.weight": theirs.out_proj.weight, f"{ours}.op.out.bias": theirs.out_proj.bias}
    for name, w, b in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        state |= {f"{ours}.op.{name}.weight": w, f"{ours}.op.{name}.bias": b}
    return state


def layer_state(names: dict[str, nn.Module], norm: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        if isinstance(theirs, nn.MultiheadAttention):
            state |= attention_state(ours, theirs)
        elif isinstance(theirs, nn.LayerNorm):
            state |= {f"{ours}.{norm}.{n}": w for n, w in theirs.state_dict().items()}
        else:
            state |= {f"ffn.op.{ours}.{n}": w for n, w in theirs.state_dict().items()}
    return state


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_layer_is_torchs(norm_first: bool, activation: str, padded: bool) -> None:
    theirs = randomized(nn.TransformerEncoderLayer(12, 3, 20, 0.0, activation, batch_first=True, norm_first=norm_first))
    wiring = af.Block.pre if norm_first else af.Block.post
    ops = af.Attention(3, pattern=af.Full(), bias=BIAS), af.DenseFFN(20, activation)
    ours = wiring(*ops, norm=af.LayerNorm()).build(12, {})
    norms = {"mixer": theirs.norm1, "ffn": theirs.norm2}
    norm = "pre" if norm_first else "after"
    rest = {"mixer": theirs.self_attn, "up": theirs.linear1, "down": theirs.linear2}
    ours.load_state_dict(layer_state(norms, norm) | layer_state(rest, norm))
    x = torch.randn(2, 5, 12)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool() if padded else torch.ones(2, 5).bool()
    expected = theirs(x, src_key_padding_mask=~keep if padded else None)
    out = run(ours, x, af.Tokens.padded(keep))
    torch.testing.assert_close(out[keep], expected[keep], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layer_is_torchs(norm_first: bool, activation: str) -> None:
    theirs = randomized(nn.TransformerDecoderLayer(12, 3, 20, 0.0, activation, batch_first=True, norm_first=norm_first))
    wiring = af.Block.pre if norm_first else af.Block.post
    ops = af.Attention(3, bias=BIAS), af.CrossAttention(3, bias=BIAS), af.DenseFFN(20, activation)
    ours = wiring(*ops, norm=af.LayerNorm()).build(12, {})
    norm = "pre" if norm_first else "after"
    norms = {"mixer": theirs.norm1, "cross": theirs.norm2, "ffn": theirs.norm3}
    rest = {
        "mixer": theirs.self_attn,
        "cross": theirs.multihead_attn,
        "up": theirs.linear1,
        "down": theirs.linear2,
    }
    ours.load_state_dict(layer_state(norms, norm) | layer_state(rest, norm))
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    source = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    expected = theirs(
        x,
        memory,
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
        tgt_key_padding_mask=~keep,
        memory_key_padding_mask=~source,
    )
    out = run(ours, x, af.Tokens.padded(keep), memory=memory, memory_tokens=af.Tokens.padded(source))
    torch.testing.assert_close(out[keep], expected[keep], rtol=1e-5, atol=1e-5)


# -- the written equation ---------------------------------------------------------------------------------------------

OPS = af.Attention(2), af.GatedFFN(10)
NORM = af.RMSNorm()


def built(spec: af.Block) -> tuple[BlockModule, Tensor, Context]:
    module = randomized(spec.build(8, {}).double())
    return module, torch.randn(2, 4, 8, dtype=torch.float64), Context(af.Tokens.arange(2, 4))


def test_sandwich_is_its_equation() -> None:
    module, x, ctx = built(af.Block.sandwich(*OPS, norm=NORM))
    y = x + module.mixer.post(module.mixer.op(module.mixer.pre(x), ctx)[0])
    y = y + module.ffn.post(module.ffn.op(module.ffn.pre(y), ctx)[0])
    torch.testing.assert_close(module(x, ctx)[0], y, rtol=0, atol=1e-12)
    assert module.mixer.pre is not module.mixer.post


def test_parallel_with_two_norms_is_its_equation() -> None:
    module, x, ctx = built(af.Block.parallel(*OPS, norm=NORM))
    y = x + module.mixer.op(module.mixer.pre(x), ctx)[0] + module.ffn.op(module.ffn.pre(x), ctx)[0]
    torch.testing.assert_close(module(x, ctx)[0], y, rtol=0, atol=1e-12)


def test_parallel_with_one_norm_is_its_equation() -> None:
    module, x, ctx = built(af.Block.parallel(*OPS, norm=NORM, one_norm=True))
    y = x + module.mixer.op(module.norm(x), ctx)[0] + module.ffn.op(module.norm(x), ctx)[0]
    torch.testing.assert_close(module(x, ctx)[0], y, rtol=0, atol=1e-12)
    assert sum("weight" in n and p.dim() == 1 for n, p in module.named_parameters()) == 1


def test_every_place_of_a_branch_at_once() -> None:
    """x ← after(x + scale · post(op(pre(x))))."""
    branch = af.Branch(af.GatedFFN(10), pre=NORM, post=af.LayerNorm(), after=af.LayerNorm(bias=False), scale=0.3)
    module, x, ctx = built(af.Block((branch,)))
    ffn = module.ffn
    y = ffn.after(x + 0.3 * ffn.post(ffn.op(ffn.pre(x), ctx)[0]))
    torch.testing.assert_close(module(x, ctx)[0], y, rtol=0, atol=1e-12)


def test_scale_counts_in_a_parallel_block_too() -> None:
    branches = af.Branch(OPS[0], pre=NORM, scale=0.5), af.Branch(OPS[1], pre=NORM, post=NORM, scale=-2.0)
    module, x, ctx = built(af.Block(branches, "parallel"))
    mixer, ffn = module.mixer, module.ffn
    y = x + 0.5 * mixer.op(mixer.pre(x), ctx)[0] - 2 * ffn.post(ffn.op(ffn.pre(x), ctx)[0])
    torch.testing.assert_close(module(x, ctx)[0], y, rtol=0, atol=1e-12)


def test_fault_21_dropout_acts_on_what_is_added_and_in_training_only() -> None:
    dropped, still = (af.Block.pre(*OPS, norm=NORM, dropout=p).build(8, {}) for p in (0.5, 0.0))
    still.load_state_dict(dropped.state_dict())
    x = torch.randn(2, 4, 8)
    assert torch.equal(run(dropped.eval(), x), run(still.eval(), x))
    ffn = af.Block.pre(af.DenseFFN(4), norm=NORM, dropout=0.5).build(8, {})
    ffn.ffn.op.down.bias.data.fill_(100.0)
    ffn.ffn.op.down.weight.data.zero_()
    added = (run(ffn.train(), x) - x).round(decimals=3)
    assert set(added.unique().tolist()) == {0.0, 200.0}, "the residual itself must not be dropped"


# -- FAULT 38 ---------------------------------------------------------------------------------------------------------


def stack(wiring: str, final: af.Norm | None, layers: int = 2) -> af.Transformer:
    """A model of width 2 whose ops add nothing, and whose embedding is (1, 3)."""
    block = getattr(af.Block, wiring)(af.Attention(1), af.DenseFFN(4), norm=af.LayerNorm())
    model = af.TransformerSpec(dim=2, vocab_size=1, decoder=(block,) * layers, final_norm=final).build()
    for layer in model.decoder.layers:
        layer.mixer.op.out.weight.data.zero_()
        layer.ffn.op.down.weight.data.zero_()
    model.tokens.weight.data = torch.tensor([[1.0, 3.0]])
    return model


def hidden(model: af.Transformer) -> list[float]:
    return model.decode(torch.zeros(1, 1, dtype=torch.long)).x.flatten().tolist()


def norms(model: af.Transformer) -> int:
    return sum(name.endswith("weight") and p.dim() == 1 for name, p in model.named_parameters())


def test_fault_38_pre_norm_ends_with_its_final_norm() -> None:
    model = stack("pre", af.LayerNorm())
    assert hidden(model) == pytest.approx([-1.0, 1.0], abs=5.1e-6)
    model.decoder.norm.weight.data.fill_(2.0)
    assert hidden(model) == pytest.approx([-2.0, 2.0], abs=1.1e-5)
    assert norms(model) == 2 * 2 + 1


def test_fault_38_pre_norm_without_it_is_the_bare_stream() -> None:
    assert hidden(stack("pre", None)) == [1.0, 3.0]


def test_fault_38_post_norm_has_two_norms_a_layer_and_no_other() -> None:
    model = stack("post", None)
    assert hidden(model) == pytest.approx([-1.0, 1.0], abs=2e-5)
    assert norms(model) == 2 * 2


def test_fault_38_sandwich_has_four_norms_a_layer() -> None:
    assert norms(stack("sandwich", af.LayerNorm())) == 4 * 2 + 1


def test_the_two_documents_swap_pre_and_post() -> None:
    """Pre-LN is x + f(LN(x)): the stream itself is never normed. Post-LN is LN(x + f(x)): it always is."""
    x = 100 * torch.randn(1, 3, 8) + 50
    pre = run(af.Block.pre(*OPS, norm=af.LayerNorm()).build(8, {}), x)
    post = run(af.Block.post(*OPS, norm=af.LayerNorm()).build(8, {}), x)
    assert (pre - x).abs().max() < 10
    torch.testing.assert_close(post.mean(-1), torch.zeros(1, 3), rtol=0, atol=1e-5)


# -- FAULT 39 ---------------------------------------------------------------------------------------------------------


def adding(*amounts: float) -> list[af.Op]:
    return [af.DenseFFN(1) for _ in amounts]


def set_added(module: BlockModule, amounts: tuple[float, ...]) -> None:
    for branch, amount in zip(module.branches(), amounts, strict=True):
        for p in branch.op.parameters():
            p.data.zero_()
        branch.op.down.bias.data.fill_(amount)


@pytest.mark.parametrize("amounts", [(60000.0, 60000.0, -60000.0), (-60000.0, -60000.0, 1.0)])
def test_fault_39_parallel_sum_stays_finite(amounts: tuple[float, ...]) -> None:
    module = af.Block.parallel(*adding(*amounts), norm=af.RMSNorm()).build(1, {})
    set_added(module, amounts)
    assert run(module.half(), torch.full((1, 1, 1), 60000.0).half()).isfinite().all()


def test_fault_39_attention_output_over_the_range_meets_a_norm() -> None:
    """v = 300, out weights 110 and 111: 66 300, then the sandwich's second norm, which would make inf a NaN."""
    block = af.Block.sandwich(af.Attention(1, head_dim=2), norm=af.RMSNorm())
    module = block.build(1, {})
    module.mixer.op.v.weight.data.fill_(300.0)
    module.mixer.op.out.weight.data = torch.tensor([[110.0, 111.0]])
    out = run(module.half(), torch.ones(1, 2, 1).half())
    assert out.flatten().tolist() == [2.0, 2.0]


# -- specs ------------------------------------------------------------------------------------------------------------


def test_names_and_aliases() -> None:
    block = af.Block.pre(
        af.Attention(2), af.CrossAttention(2), af.GatedFFN(4), af.DenseFFN(4), af.Attention(4), norm=NORM
    )
    assert block.names() == ["mixer", "cross", "ffn", "ffn2", "mixer2"]
    assert block.aliases()["ffn2"] == ("branches", "3", "op")
    assert block.mixer == af.Attention(2)
    assert block.replace("mixer2.num_heads", 1).branches[4].op == af.Attention(1)
    assert block.replace("ffn2", af.GatedFFN(9)).branches[3].op == af.GatedFFN(9)
    assert set(dict(block.build(8, {}).named_children())) >= {"mixer", "cross", "ffn", "ffn2", "mixer2"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: af.Block((af.Branch(OPS[0]),), norm=NORM),
            "`norm` is for parallel blocks: in a sequence each branch has its own `pre`",
        ),
        (
            lambda: af.Block((af.Branch(OPS[0], after=NORM),), "parallel"),
            "a parallel block has one sum, so its branches cannot have `after`",
        ),
        (lambda: af.Branch(OPS[1], dropout=1.5), "`dropout` must be below 1, but is 1.5"),
        (lambda: af.Block((), "both"), "join: must be 'sequence' or 'parallel', but is 'both'"),
        (lambda: af.Branch(NORM), r"op: needs an? Op, but is RMSNorm\(\)"),
    ],
)
def test_illegal_wirings_are_refused(make, said: str) -> None:
    with pytest.raises(af.SpecError, match=said):
        make()


@pytest.mark.parametrize("wiring", ["pre", "post", "sandwich", "parallel"])
def test_cost_counts_the_parameters(wiring: str) -> None:
    block = getattr(af.Block, wiring)(*OPS, norm=af.LayerNorm())
    assert block.cost(8, 3).params == sum(p.numel() for p in block.build(8, {}).parameters())


def test_one_norm_is_counted_once() -> None:
    block = af.Block.parallel(*OPS, norm=NORM, one_norm=True)
    assert block.cost(8, 3).params == sum(p.numel() for p in block.build(8, {}).parameters())
