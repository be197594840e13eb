"""What must not matter does not matter: future tokens, padding, neighbours, packing, the kernel, dropout in eval."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyformer import (
    Alibi,
    Attention,
    Block,
    Causal,
    CrossAttention,
    DenseFFN,
    Embed,
    Full,
    GatedFFN,
    LayerNorm,
    Learned,
    MoE,
    Pattern,
    Position,
    Prefix,
    RelativeBias,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Tokens,
    Transformer,
    TransformerSpec,
    Window,
    attend,
)

VOCAB, DIM = 17, 16
KERNELS = [None, "sdpa", "reference"]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=str)
forced = pytest.mark.parametrize("kernel", ["sdpa", "reference"])


def built(spec: TransformerSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights large enough for each token to matter to all that see it."""
    model = spec.build(dtype=dtype).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def decoder(pattern: Pattern, position: Position | None, *, moe: bool = False, **attention: Any) -> TransformerSpec:
    at_input = position is not None and position.acts == "input"
    mixer = Attention(4, 2, pattern=pattern, position=None if at_input else position, **attention)
    ffn = MoE(DenseFFN(8), 4) if moe else GatedFFN(8)
    block = Block.pre(mixer, ffn, norm=RMSNorm())
    embed = Embed(position=position if at_input else None)
    return TransformerSpec(dim=DIM, vocab_size=VOCAB, embed=embed, decoder=(block, block), final_norm=RMSNorm())


def encoder(position: Position | None = None, pattern: Pattern | None = None) -> TransformerSpec:
    block = Block.post(Attention(4, pattern=pattern or Full()), DenseFFN(8, "gelu"), norm=LayerNorm())
    embed = Embed(position=position or Learned(64), token_types=2, norm=LayerNorm())
    return TransformerSpec(dim=DIM, vocab_size=VOCAB, embed=embed, encoder=(block, block))


def both(bias: bool = True) -> TransformerSpec:
    """T5's kind: relative biases, or learned positions without `bias`."""
    two_way, one_way = (RelativeBias(8, 16, b) if bias else None for b in (True, False))
    ffn, norm = DenseFFN(8), RMSNorm()
    return TransformerSpec(
        dim=DIM,
        vocab_size=VOCAB,
        embed=Embed(position=None if bias else Learned(64)),
        encoder=(Block.pre(Attention(4, pattern=Full(), position=two_way), ffn, norm=norm),) * 2,
        decoder=(Block.pre(Attention(4, position=one_way), CrossAttention(4), ffn, norm=norm),) * 2,
        final_norm=norm,
    )


DECODERS = {
    "causal_rotary": decoder(Causal(), Rotary()),
    "causal_learned": decoder(Causal(), Learned(64)),
    "sliding_alibi": decoder(Causal() & Window(3), Alibi()),
    "far_past_relative": decoder(Causal() & ~Window(2), RelativeBias(8, 16)),
    "moe_sinusoidal": decoder(Causal(), Sinusoidal(), moe=True),
    "softcap": decoder(Causal() & Window(3), Rotary(), softcap=2.0),
    "dropout": decoder(Causal(), Rotary(), dropout=0.5),
}
ENCODERS = {"full": encoder(), "window": encoder(pattern=Window(3)), "sinusoidal": encoder(Sinusoidal())}


def forcible(spec: TransformerSpec, kernel: str | None) -> bool:
    mixers = [block.mixer for block in (*spec.encoder, *spec.decoder)]
    return kernel != "sdpa" or not any(isinstance(m, Attention) and m.softcap for m in mixers)


def grid(specs: dict[str, TransformerSpec]) -> list[Any]:
    """Every spec with every kernel that can compute it (what a kernel cannot do is tested in test_kernels_agree)."""
    pairs = itertools.product(specs, KERNELS)
    return [pytest.param(specs[s], k, id=f"{s}-{k}") for s, k in pairs if forcible(specs[s], k)]


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def other(text: Tensor) -> Tensor:
    """Another id at each place."""
    return (text + torch.randint(1, VOCAB, text.shape)) % VOCAB


def same(a: Tensor, b: Tensor, close: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=close, rtol=0)


def rounding(spec: TransformerSpec) -> float:
    """0: bit for bit. Experts read other numbers of rows at once when other tokens change, which rounds differently."""
    blocks = (*spec.encoder, *spec.decoder)
    return 1e-6 if any(isinstance(branch.op, MoE) for block in blocks for branch in block.branches) else 0.0


def padded(rows: list[Tensor], side: str, length: int) -> tuple[Tensor, Tokens]:
    """Rows of other lengths as one batch; pads have random ids."""
    batch, keep = ids(len(rows), length), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        batch[i, at], keep[i, at] = row, True
    return batch, Tokens.padded(keep)


# -- fault 5: the future ----------------------------------------------------------------------------------------------


def memory_of(model: Transformer) -> dict[str, Any]:
    return {} if model.encoder is None else {"memory": model.encode(ids(1, 5))}


CAUSAL = {**DECODERS, "encoder_decoder": both()}


@pytest.mark.parametrize(("spec", "kernel"), grid(CAUSAL))
@torch.inference_mode()
def test_fault_5_future_tokens_change_nothing(spec: TransformerSpec, kernel: str | None) -> None:
    model, text = built(spec), ids(1, 8)
    given = memory_of(model)
    logits = model(text, kernel=kernel, **given)
    for j in range(1, 8):
        changed = text.clone()
        changed[0, j:] = other(text[0, j:])
        after = model(changed, kernel=kernel, **given)
        same(after[:, :j], logits[:, :j], 1e-6)
        assert (after[:, j] - logits[:, j]).abs().max() > 1e-4


@pytest.mark.parametrize("layout", ["plain", "left_padded", "right_padded", "packed"])
@pytest.mark.parametrize(("spec", "kernel"), grid(CAUSAL))
def test_fault_5_no_gradient_from_the_future(spec: TransformerSpec, kernel: str | None, layout: str) -> None:
    """Exactly 0, and exactly where the written rule says; elsewhere it flows."""
    model, text = built(spec), ids(1, 6)
    documents = {
        "plain": [0] * 6,
        "left_padded": [-1, -1, 0, 0, 0, 0],
        "right_padded": [0, 0, 0, 0, -1, -1],
        "packed": [0, 0, 0, 1, 1, 1],
    }[layout]
    tokens = Tokens.packed(torch.tensor([documents]))
    given = memory_of(model)
    seen: list[Tensor] = []
    hook = model.tokens.register_forward_hook(lambda module, inputs, out: seen.append(out))
    logits = model(text, tokens, kernel=kernel, **given)
    hook.remove()
    for i in range(6):
        if documents[i] < 0:
            continue
        (grad,) = torch.autograd.grad(logits[0, i].square().sum(), seen[-1], retain_graph=True)
        flows = [bool((grad[0, j] != 0).any()) for j in range(6)]
        allowed = [j <= i and documents[j] == documents[i] for j in range(6)]
        assert all(ok for flow, ok in zip(flows, allowed, strict=True) if flow), (i, flows)
        assert flows[i]
    assert bool(grad.isfinite().all())


def test_fault_5_prefix_is_seen_and_the_rest_is_not() -> None:
    model, text = built(decoder(Causal() | Prefix(3), Rotary())), ids(1, 6)
    seen: list[Tensor] = []
    model.tokens.register_forward_hook(lambda module, inputs, out: seen.append(out))
    logits = model(text)
    (grad,) = torch.autograd.grad(logits[0, 0].sum(), seen[-1])
    assert [bool((grad[0, j] != 0).any()) for j in range(6)] == [True] * 3 + [False] * 3


class Leak(Pattern, kind="leak_of_this_test"):
    """Sees the next token, and lies about it."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return k.pos - q.pos == 1

    def frontier(self) -> int:
        return 0


def loss_on_noise(pattern: Pattern, steps: int = 70) -> float:
    """Mean loss of the last steps on uniform random tokens, new ones each step, V = 32."""
    block = Block.pre(Attention(2, pattern=pattern, position=Rotary()), DenseFFN(16), norm=RMSNorm())
    spec = TransformerSpec(dim=16, vocab_size=32, embed=Embed(tied=False), decoder=(block,), final_norm=RMSNorm())
    model = spec.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        text = torch.randint(32, (32, 9))
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def test_fault_5_noise_cannot_be_learned() -> None:
    assert loss_on_noise(Causal()) >= math.log(32) - 0.05


def test_fault_5_the_check_sees_a_leak() -> None:
    assert loss_on_noise(Leak() | (Causal() & Window(1))) < math.log(32) - 0.5


# -- faults 9 and 10: padding and neighbours --------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("spec", "kernel"), grid({**DECODERS, **ENCODERS}))
@torch.inference_mode()
def test_fault_9_padding_and_neighbours_change_nothing(spec: TransformerSpec, kernel: str | None, side: str) -> None:
    model, rows = built(spec), [ids(1, 3)[0], ids(1, 9)[0]]
    alone = [model(row[None])[0] for row in rows]
    for length in (9, 24):
        batch, tokens = padded(rows, side, length)
        logits = model(batch, tokens, kernel=kernel)
        for i in range(2):
            same(logits[i, tokens.real[i]], alone[i])
        assert bool(logits.isfinite().all())
        filled = torch.where(tokens.real, batch, other(batch))
        again = model(filled, tokens, kernel=kernel)
        same(again[tokens.real], logits[tokens.real], rounding(spec))


@kernels
@pytest.mark.parametrize("sides", list(itertools.product(["left", "right"], repeat=2)), ids="_".join)
@pytest.mark.parametrize("bias", [True, False], ids=["relative", "learned"])
@torch.inference_mode()
def test_fault_9_encoder_decoder(sides: tuple[str, str], kernel: str | None, bias: bool) -> None:
    model = built(both(bias))
    sources, targets = [ids(1, 7)[0], ids(1, 2)[0]], [ids(1, 3)[0], ids(1, 5)[0]]
    alone = [model(t[None], source=s[None])[0] for s, t in zip(sources, targets, strict=True)]
    for extra in (0, 4):
        source, source_tokens = padded(sources, sides[0], 7 + extra)
        target, tokens = padded(targets, sides[1], 5 + extra)
        logits = model(target, tokens, source=source, source_tokens=source_tokens, kernel=kernel)
        for i in range(2):
            same(logits[i, tokens.real[i]], alone[i])
        filled = torch.where(source_tokens.real, source, other(source))
        again = model(target, tokens, source=filled, source_tokens=source_tokens, kernel=kernel)
        assert torch.equal(again[tokens.real], logits[tokens.real])


@pytest.mark.parametrize(("spec", "kernel"), grid(DECODERS))
@torch.inference_mode()
def test_order_and_number_of_rows_change_nothing(spec: TransformerSpec, kernel: str | None) -> None:
    model, text = built(spec), ids(5, 6)
    logits = model(text, kernel=kernel)
    order = torch.tensor([3, 0, 4, 1, 2])
    same(model(text[order], kernel=kernel), logits[order])
    same(model(text[2:3], kernel=kernel), logits[2:3])


@torch.inference_mode()
def test_fault_10_learned_positions_start_at_the_first_real_token() -> None:
    model = built(decoder(Causal(), Learned(64)))
    text = torch.tensor([[5, 6, 7]])
    keep = torch.tensor([[False] * 3 + [True] * 3])
    tokens = Tokens.padded(keep)
    assert tokens.pos[keep].tolist() == [0, 1, 2]
    logits = model(torch.cat((ids(1, 3), text), 1), tokens)
    same(logits[:, 3:], model(text))
    assert tokens.after().pos.tolist() == [[3]]


SHIFTED = {
    "rotary": Rotary(),
    "interleaved": Rotary(layout="interleaved"),
    "alibi": Alibi(),
    "relative": RelativeBias(),
}


@kernels
@pytest.mark.parametrize("position", SHIFTED.values(), ids=SHIFTED)
@torch.inference_mode()
def test_fault_10_only_distances_matter(position: Position, kernel: str | None) -> None:
    model, text = built(decoder(Causal(), position)), ids(2, 8)
    logits = model(text, kernel=kernel)
    for start in (1, 100):
        same(model(text, Tokens.arange(2, 8, start=start), kernel=kernel), logits)
    each = torch.arange(8) + torch.tensor([[3], [50]])
    same(model(text, Tokens(each, torch.zeros_like(each)), kernel=kernel), logits)


@torch.inference_mode()
def test_fault_10_absolute_positions_do_move() -> None:
    """The test above can fail: there are schemes for which positions matter."""
    for position in (Learned(64), Sinusoidal()):
        model, text = built(decoder(Causal(), position)), ids(1, 8)
        assert (model(text, Tokens.arange(1, 8, start=5)) - model(text)).abs().max() > 1e-3


# -- fault 12: packing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "kernel"), grid({**DECODERS, **ENCODERS}))
@torch.inference_mode()
def test_fault_12_packed_documents_do_not_see_each_other(spec: TransformerSpec, kernel: str | None) -> None:
    model, text = built(spec), ids(1, 8)
    tokens = Tokens.packed(torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]]))
    logits = model(text, tokens, kernel=kernel)
    same(logits[:, :4], model(text[:, :4]))
    same(logits[:, 4:7], model(text[:, 4:7]))
    changed = text.clone()
    changed[:, :4] = other(text[:, :4])
    after = model(changed, tokens, kernel=kernel)
    same(after[:, 4:7], logits[:, 4:7], rounding(spec))


@kernels
@torch.inference_mode()
def test_fault_12_packed_pairs_of_source_and_target(kernel: str | None) -> None:
    model, source, target = built(both()), ids(1, 6), ids(1, 7)
    source_tokens = Tokens.packed(torch.tensor([[3, 3, 8, 8, 8, 8]]))
    tokens = Tokens.packed(torch.tensor([[3, 3, 3, 3, 8, 8, 8]]))
    logits = model(target, tokens, source=source, source_tokens=source_tokens, kernel=kernel)
    same(logits[:, :4], model(target[:, :4], source=source[:, :2]))
    same(logits[:, 4:], model(target[:, 4:], source=source[:, 2:]))


# -- faults 1, 2, 7, 8: masked rows and numbers at the edge ------------------------------------------------------------


@forced
def test_fault_1_rows_that_see_nothing(kernel: str) -> None:
    q, k, v = (torch.randn(2, 4, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    tokens, pattern = Tokens.padded(real), Causal() & Window(2)
    out = attend(q, k, v, pattern=pattern, tokens=tokens, kernel=kernel)
    assert torch.equal(out[~real], torch.zeros(2, 2, 4, dtype=torch.float64))
    grads = torch.autograd.grad(out.sin()[real].sum(), (q, k, v))
    rows = [attend(q[i : i + 1, :n], k[i : i + 1, :n], v[i : i + 1, :n], pattern=pattern) for i, n in ((0, 4), (1, 2))]
    wanted = torch.autograd.grad(sum(row.sin().sum() for row in rows), (q, k, v))
    for grad, right in zip(grads, wanted, strict=True):
        same(grad, right, 1e-10)
    everything = torch.autograd.grad(attend(q, k, v, pattern=pattern, tokens=tokens, kernel=kernel).sum(), (q, k, v))
    assert all(bool(grad.isfinite().all()) for grad in everything)


@forced
@pytest.mark.parametrize("anomaly", [False, True], ids=["plain", "detect_anomaly"])
def test_fault_1_weights_of_a_model_stay_finite(kernel: str, anomaly: bool) -> None:
    model = built(decoder(Causal() & Window(2), Alibi()), torch.float64)
    text, real = ids(2, 4), torch.tensor([[True] * 4, [True, True, False, False]])
    with torch.autograd.set_detect_anomaly(anomaly):
        model(text, Tokens.padded(real), kernel=kernel)[real].logsumexp(-1).sum().backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    (model(text[:1]).logsumexp(-1).sum() + model(text[1:, :2]).logsumexp(-1).sum()).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert bool(grads[name].isfinite().all())
        same(grads[name], weight.grad, 1e-10)


@forced
def test_fault_1_a_whole_batch_of_padding(kernel: str) -> None:
    model = built(both())
    nothing = Tokens.padded(torch.zeros(2, 3, dtype=torch.bool))
    logits = model(ids(2, 3), nothing, source=ids(2, 3), source_tokens=nothing, kernel=kernel)
    logits.sum().backward()
    assert bool(logits.isfinite().all())
    assert all(w.grad is None or bool(w.grad.isfinite().all()) for w in model.parameters())


@torch.inference_mode()
def test_fault_2_kept_means_real() -> None:
    """Through a whole model: the kept tokens are those that count."""
    model, text = built(encoder()), ids(1, 4)
    keep = torch.tensor([[True, True, True, False]])
    same(model(text, Tokens.padded(keep))[:, :3], model(text[:, :3]))
    assert (model(text, Tokens.padded(keep))[:, :3] - model(text)[:, :3]).abs().max() > 1e-3


EXTREMES = [
    pytest.param(torch.float32, 20_000.0, id="float32-2e4"),
    pytest.param(torch.float16, 60_000.0, id="float16-6e4"),
    pytest.param(torch.float32, 1e30, id="float32-1e30"),
    pytest.param(torch.bfloat16, 1e30, id="bfloat16-1e30"),
]


@forced
@pytest.mark.parametrize("masked", [False, True], ids=["fast_path", "mask"])
@pytest.mark.parametrize(("dtype", "large"), EXTREMES)
def test_fault_7_hidden_keys_never_win(dtype: torch.dtype, large: float, masked: bool, kernel: str) -> None:
    tokens = Tokens.arange(1, 3)
    tokens = tokens.map(lambda t: t) if masked else tokens
    q = torch.ones(1, 3, 1, 1, dtype=dtype)
    k = torch.tensor([-large, 0.0, large], dtype=dtype).view(1, 3, 1, 1)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=dtype).view(1, 3, 1, 1)
    out = attend(q, k, v, tokens=tokens, scale=1.0, kernel=kernel)
    assert out.flatten().tolist() == [1.0, 2.0, 4.0]
    future = attend(-q, k, v, tokens=tokens, pattern=~Causal(), scale=1.0, kernel=kernel)
    assert future.flatten().tolist() == [2.0, 4.0, 0.0]


@forced
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fault_8_half_precision_and_left_padding(dtype: torch.dtype, kernel: str) -> None:
    q = torch.ones(1, 4, 1, 1, dtype=dtype)
    k = torch.tensor([3.0, 50.0, -100.0, 2.0], dtype=dtype).view(1, 4, 1, 1)
    v = torch.tensor([5.0, 7.0, 1.0, 2.0], dtype=dtype).view(1, 4, 1, 1)
    tokens = Tokens.padded(torch.tensor([[False, False, True, True]]))
    out = attend(q, k, v, tokens=tokens, scale=1.0, kernel=kernel)
    assert out.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]
    close = attend(q, k / 100, v, tokens=tokens, scale=1.0, kernel=kernel).flatten().tolist()
    a, b = math.exp(-1), math.exp(0.02)
    assert close == pytest.approx([0, 0, 1, (a + 2 * b) / (a + b)], rel=1e-3 if dtype == torch.float16 else 1e-2)


@forced
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fault_8_half_precision_models_are_finite(dtype: torch.dtype, kernel: str) -> None:
    """With padding, a window, a bias and gradients; and near the float32 model."""
    model = built(decoder(Causal() & Window(3), Alibi()))
    text, real = ids(2, 6), torch.tensor([[False, False, True, True, True, True], [True] * 6])
    wide = model(text, Tokens.padded(real))[real].detach()
    half = model.to(dtype)
    logits = half(text, Tokens.padded(real), kernel=kernel)
    same(logits[real].float(), wide, 0.03 if dtype == torch.float16 else 0.3)
    logits[real].float().logsumexp(-1).sum().backward()
    assert all(w.grad is None or bool(w.grad.isfinite().all()) for w in half.parameters())


# -- fault 20: empty shapes -------------------------------------------------------------------------------------------

SHAPES = [(0, 3), (2, 0), (0, 0), (2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("spec", "kernel"), grid({**DECODERS, **ENCODERS}))
def test_fault_20_empty_shapes(spec: TransformerSpec, kernel: str | None, shape: tuple[int, int]) -> None:
    model, text = built(spec), ids(*shape)
    for tokens in (None, Tokens.padded(torch.zeros(shape, dtype=torch.bool))):
        logits = model(text, tokens, kernel=kernel)
        assert logits.shape == (*shape, VOCAB)
        logits.sum().backward()
        assert all(w.grad is None or bool(w.grad.isfinite().all()) for w in model.parameters())
    if model.decoder is None:
        return
    with torch.inference_mode():
        cache = model.new_cache(shape[0], 5)
        first = model(text, cache=cache, kernel=kernel)
        same(first, model(text, kernel=kernel))
        assert model(ids(shape[0], 1), cache=cache, kernel=kernel).shape == (shape[0], 1, VOCAB)


@forced
def test_fault_20_one_token_attends_to_itself(kernel: str) -> None:
    q, k, v = (torch.randn(2, 1, 2, 4) for _ in range(3))
    assert torch.equal(attend(q, k, v, kernel=kernel), v)


@kernels
@torch.inference_mode()
def test_fault_20_no_source(kernel: str | None) -> None:
    """Cross-attention to nothing gives zeros, as to a source of padding alone."""
    model, text = built(both()), ids(2, 4)
    nothing = model(text, source=ids(2, 0), kernel=kernel)
    padding = Tokens.padded(torch.zeros(2, 3, dtype=torch.bool))
    same(nothing, model(text, source=ids(2, 3), source_tokens=padding, kernel=kernel))
    assert bool(nothing.isfinite().all())
    assert (nothing - model(text, source=ids(2, 3), kernel=kernel)).abs().max() > 1e-3
    cache, memory = model.new_cache(2, 4), model.encode(ids(2, 0))
    steps = [model(text[:, t : t + 1], memory=memory, cache=cache, kernel=kernel) for t in range(4)]
    same(torch.cat(steps, 1), nothing)


# -- fault 21: dropout ------------------------------------------------------------------------------------------------


def with_dropout(p: float) -> TransformerSpec:
    block = Block.pre(Attention(4, dropout=p), DenseFFN(8), norm=RMSNorm(), dropout=p)
    return TransformerSpec(dim=DIM, vocab_size=VOCAB, embed=Embed(dropout=p), decoder=(block, block))


@forced
def test_fault_21_no_dropout_in_eval(kernel: str) -> None:
    model, text = built(with_dropout(0.5)), ids(2, 6)
    plain = with_dropout(0.0).build()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(text, kernel=kernel), model(text, kernel=kernel))
    assert torch.equal(model(text, kernel=kernel), plain(text, kernel=kernel))
    model.train()
    assert not torch.equal(model(text, kernel=kernel), model(text, kernel=kernel))


@forced
def test_fault_21_attention_dropout_alone_acts_in_training(kernel: str) -> None:
    block = Block.pre(Attention(4, dropout=0.5), norm=RMSNorm())
    model = built(TransformerSpec(dim=DIM, vocab_size=VOCAB, decoder=(block,)))
    text = ids(2, 6)
    assert torch.equal(model(text, kernel=kernel), model(text, kernel=kernel))
    model.train()
    assert not torch.equal(model(text, kernel=kernel), model(text, kernel=kernel))


@forced
@pytest.mark.parametrize("masked", [False, True], ids=["fast_path", "mask"])
def test_fault_21_dropout_keeps_the_mean(masked: bool, kernel: str) -> None:
    q = torch.zeros(4000, 4, 1, 1)
    tokens = Tokens.arange(4000, 4)
    tokens = tokens.map(lambda t: t) if masked else tokens
    out = attend(q, q, torch.ones_like(q), tokens=tokens, dropout=0.5, kernel=kernel)
    assert out.mean(0).flatten().tolist() == pytest.approx([1.0] * 4, abs=0.05)
    assert sorted(set(out[:, 0].flatten().tolist())) == [0.0, 2.0]


# -- fault 28: positions run out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@torch.inference_mode()
def test_fault_28_learned_positions_run_out(kind: str) -> None:
    model = built(encoder(Learned(16)) if kind == "encoder" else decoder(Causal(), Learned(16)))
    right = model(ids(1, 16) * 0)
    with pytest.raises(ValueError, match="the text needs 17 positions, but the model has 16: shorten it"):
        model(ids(1, 17))
    with pytest.raises(ValueError, match="needs 17 positions"):
        model(ids(1, 2), Tokens.arange(1, 2, start=15))
    assert torch.equal(model(ids(1, 16) * 0), right)
    batch, tokens = padded([ids(1, 16)[0], ids(1, 2)[0]], "left", 20)
    assert bool(model(batch, tokens).isfinite().all())  # 20 slots, but no more than 16 positions


@torch.inference_mode()
def test_fault_28_rows_of_roberta() -> None:
    """514 rows serve 512 tokens: the first sits at row 2, the last at row 513."""
    model = built(decoder(Causal(), Learned(512, offset=2)))
    table = model.embeds["decoder"].position.table  # type: ignore[union-attr]
    assert table.shape == (514, DIM)
    seen: list[Tensor] = []
    model.embeds["decoder"].register_forward_hook(lambda module, inputs, out: seen.append(out - inputs[0]))
    model(ids(1, 512))
    same(seen[0][0, 0], table[2])
    same(seen[0][0, 511], table[513])
    with pytest.raises(ValueError, match="needs 513 positions, but the model has 512"):
        model(ids(1, 513))


@torch.inference_mode()
def test_fault_28_generation_stops_at_the_limit() -> None:
    model, text = built(decoder(Causal(), Learned(16))), ids(1, 16)
    cache = model.new_cache(1, 32)
    model(text[:, :14], cache=cache)
    logits = [model(text[:, t : t + 1], cache=cache) for t in (14, 15)]
    with pytest.raises(ValueError, match="the text needs 17 positions, but the model has 16"):
        model(ids(1, 1), cache=cache)
    assert cache.used == 16
    same(torch.cat(logits, 1), model(text)[:, 14:])


# -- fault 78: recompilation ------------------------------------------------------------------------------------------

DECODING = """
import sys, torch
from torch._dynamo.testing import CompileCounter
from anyformer import *

def spec(pattern, position):
    at_input = position.acts == "input"
    mixer = Attention(4, 2, pattern=pattern, position=None if at_input else position)
    block = Block.pre(mixer, GatedFFN(16), norm=RMSNorm())
    embed = Embed(position=position if at_input else None)
    return TransformerSpec(dim=16, vocab_size=32, embed=embed, decoder=(block, block), final_norm=RMSNorm())

CASES = {
    "plain": (spec(Causal(), Rotary()), 0),
    "padded_window_bias": (spec(Causal() & Window(4), RelativeBias()), 2),
    "window": (spec(Causal() & Window(4), Rotary()), 0),
    "learned": (spec(Causal(), Learned(64)), 0),
    "alibi": (spec(Causal(), Alibi()), 0),
    "prefix": (spec(Causal() | Prefix(4), Rotary()), 0),
    "padded": (spec(Causal(), Rotary()), 2),
}

@torch.inference_mode()
def decode(name):
    made, pads = CASES[name]
    torch._dynamo.reset()
    model, count, ids = made.build().eval(), CompileCounter(), torch.randint(32, (2, 40))
    compiled = torch.compile(model, backend=count, fullgraph=True)  # raises at a graph break
    for prompt in (5, 6, 7):
        keep = torch.ones(2, prompt, dtype=torch.bool)
        keep[0, :pads] = False
        tokens, caches = Tokens.padded(keep), [model.new_cache(2, 64) for _ in range(2)]
        for cache in caches:
            model(ids[:, :prompt], tokens, cache=cache)
        for t in range(prompt, prompt + 32):
            tokens = tokens.after()
            a, b = (f(ids[:, t : t + 1], tokens, cache=c) for f, c in zip((compiled, model), caches))
            assert (a - b).abs().max() < 1e-5, (name, prompt, t)
    print(name, count.frame_count)

for name in sys.argv[1:]:
    decode(name)
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["plain", "padded_window_bias"], id="most"),
        pytest.param(["window", "learned", "alibi", "prefix", "padded"], id="others", marks=pytest.mark.slow),
    ],
)
def test_fault_78_few_graphs_for_decoding(names: list[str]) -> None:
    """32 steps after prompts of 5, 6 and 7 tokens: at most 3 graphs, none broken, and eager's logits. In a process of
    its own, as users run it: without the checks of signatures, which the compiler would have to trace."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(DECODING), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    graphs = dict(line.split() for line in done.stdout.splitlines())
    assert list(graphs) == names
    assert all(1 <= int(count) <= 3 for count in graphs.values()), graphs


# -- fault 79: memory -------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers in any one tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def largest(model: Transformer, text: Tensor, **kwargs: Any) -> int:
    with torch.inference_mode(), Largest() as mode:
        model(text, **kwargs)
    return mode.numel


def of_vocab(vocab: int, pattern: Pattern | None = None) -> Transformer:
    block = Block.pre(Attention(2, pattern=pattern or Causal(), position=Rotary()), DenseFFN(8), norm=RMSNorm())
    return built(TransformerSpec(dim=8, vocab_size=vocab, decoder=(block,)))


def test_fault_79_only_the_last_logits_are_made() -> None:
    model, text = of_vocab(1000), ids(1, 64)
    assert largest(model, text) == 64 * 1000
    assert largest(model, text, last=1) <= 8 * 1000  # the weights of the head, not its output
    cache = model.new_cache(1, 80)
    assert largest(model, text, last=1, cache=cache) <= 8 * 1000


@pytest.mark.parametrize("last", [0, 1, 3, 6, 9])
@torch.inference_mode()
def test_fault_79_last_logits_are_the_last_of_all(last: int) -> None:
    model, text = of_vocab(11), torch.randint(11, (2, 6))
    same(model(text, last=last), model(text)[:, max(6 - last, 0) :], 1e-6)


def test_fault_79_no_square_of_the_length() -> None:
    """Plain causal attention holds nothing of size T × T; the textbook kernel does, so the check can see it."""
    model, text = of_vocab(10), torch.randint(10, (1, 256))
    assert largest(model, text) < 256 * 256
    assert largest(model, text, kernel="reference") >= 256 * 256


# -- what layers share ------------------------------------------------------------------------------------------------


def test_layers_share_a_relative_bias_only_with_as_many_heads() -> None:
    """One table for all layers alike (T5), but a layer with other heads has its own; `costs` counts the same."""
    blocks = [Block.pre(Attention(heads, position=RelativeBias(8, 16)), norm=RMSNorm()) for heads in (1, 4, 4, 1)]
    spec = TransformerSpec(dim=DIM, vocab_size=VOCAB, decoder=blocks)
    model = built(spec)
    tables = [tuple(w.shape) for name, w in model.named_parameters() if name.endswith("table")]
    assert tables == [(8, 1), (8, 4)]
    assert sum(cost.params for cost in spec.costs(4).values()) == sum(w.numel() for w in model.parameters())
    assert model(ids(1, 4)).shape == (1, 4, VOCAB)
