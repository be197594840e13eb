"""Step by step: each step follows from the one before, and weights are those that the layer really used."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner, Result
from matplotlib import image
from parity import Case, make, text, their_inputs
from rich.cells import cell_len
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anyformer as af
from anyformer.checkpoint.run import save_run
from anyformer.cli.commands import cli
from anyformer.inspect.heat import plot_heat
from anyformer.parts.per_head import PerHead
from anyformer.text.tokenizer import ByteTokenizer

B, T, H, K, DIM, VOCAB = 2, 7, 4, 4, 16, 30
WIDE = torch.float64

PATTERNS = [
    af.Full(),
    af.Causal(),
    af.Causal() & af.Window(3),
    af.Window(2),
    af.Causal() | af.Prefix(3),
    ~af.Causal(),
]
POSITIONS = [None, af.Rotary(base=100.0), af.Alibi(), af.RelativeBias(8, 16)]
HEADS = [4, 2, 1]
TOKENS = {
    "plain": af.Tokens.arange(B, T),
    "left": af.Tokens.padded(torch.tensor([[False] * 3 + [True] * 4, [True] * T])),
    "right": af.Tokens.padded(torch.tensor([[True] * 5 + [False] * 2, [False] * T])),
    "packed": af.Tokens.packed(torch.tensor([[0, 0, 0, 1, 1, 1, -1], [2, 3, 3, 3, 3, 3, 3]])),
}


def heads(groups: int = H, length: int = T, dtype: torch.dtype = WIDE) -> list[Tensor]:
    return [torch.randn(B, length, n, K, dtype=dtype) for n in (H, groups, groups)]


def randomized(spec: af.TransformerSpec) -> af.Transformer:
    """Weights large enough for rows of attention to differ."""
    model = spec.build().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def decoder(groups: int = H, layers: int = 2, **attention: Any) -> af.Transformer:
    block = af.Block.pre(af.Attention(H, groups, **attention), af.DenseFFN(8), norm=af.RMSNorm())
    return randomized(af.TransformerSpec(DIM, VOCAB, decoder=(block,) * layers))


def both_stacks() -> af.Transformer:
    norm, bias = af.RMSNorm(), af.RelativeBias(8, 16)
    own, seen = af.Attention(H, position=bias), af.Attention(H, pattern=af.Full(), position=bias)
    encoder = af.Block.pre(seen, af.DenseFFN(8), norm=norm)
    block = af.Block.pre(own, af.CrossAttention(H, 2), af.DenseFFN(8), norm=norm)
    return randomized(af.TransformerSpec(DIM, VOCAB, encoder=(encoder,) * 2, decoder=(block,) * 2))


def ids(length: int = T, batch: int = B) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def seen_at(model: af.Transformer, place: str, *args: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
    """The module at `place`, what it read and what it answered in a real pass."""
    module = model.get_submodule(place)
    kept: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda _, given, out: kept.append((given[0], out[0])))
    model(*args, **kwargs)
    handle.remove()
    return module, *kept[0]


def used(module: Any, weights: Tensor, source: Tensor) -> Tensor:
    """What a layer answers if it looks with these weights, all heads, at what `source` (B, S, D) becomes as values."""
    v = module.v(source).unflatten(-1, (-1, module.head_dim)).repeat_interleave(H // module.spec.kv_heads, 2)
    answer: Tensor = module.out(torch.einsum("bhts,bshk->bthk", weights, v).flatten(-2))
    return answer


# -- steps ------------------------------------------------------------------------------------------------------------


def test_two_tokens_by_hand() -> None:
    q, k, v = (torch.tensor(x, dtype=WIDE).view(1, 2, 1, 1) for x in ([0.0, 1.0], [0.0, math.log(3)], [4.0, 8.0]))
    steps = af.explain(q, k, v)
    torch.testing.assert_close(steps.scores[0, 0], torch.tensor([[0.0, 0.0], [0.0, math.log(3)]], dtype=WIDE))
    assert steps.masked[0, 0].isneginf().tolist() == [[False, True], [False, False]]
    torch.testing.assert_close(steps.weights[0, 0], torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=WIDE))
    torch.testing.assert_close(steps.output.flatten(), torch.tensor([4.0, 7.0], dtype=WIDE))


@pytest.mark.parametrize("layout", TOKENS)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("position", POSITIONS, ids=repr)
@pytest.mark.parametrize("groups", HEADS)
def test_each_step_follows_from_the_one_before(
    groups: int, position: af.Position | None, softcap: float | None, layout: str
) -> None:
    tokens = TOKENS[layout]
    for pattern in PATTERNS:
        q, k, v = heads(groups)
        module = position.build(K, H).double() if position else None
        said: dict[str, Any] = {
            "pattern": pattern,
            "position": module,
            "tokens": tokens,
            "scale": 0.3,
            "softcap": softcap,
        }
        steps = af.explain(q, k, v, **said)
        assert (steps.q is q, steps.k is k, steps.v is v) == (True, True, True)
        assert torch.equal(steps.output, af.attend(q, k, v, kernel="reference", **said))
        many = H // groups
        close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
        if not isinstance(position, af.Rotary):
            assert steps.q_turned is q
        product = torch.einsum("bthk,bshk->bhts", steps.q_turned, steps.k_turned.repeat_interleave(many, 2))
        close(steps.scores, product)
        close(steps.scaled, steps.scores * 0.3)
        close(steps.capped, softcap * torch.tanh(steps.scaled / softcap) if softcap else steps.scaled)
        bias = None if module is None else module.at_scores(tokens, tokens)
        close(steps.biased, steps.capped if bias is None else steps.capped + bias)
        mask = pattern.mask(tokens, tokens)[:, None].expand_as(steps.scores)
        close(steps.masked, torch.where(mask, steps.biased, -torch.inf))
        sums = torch.where(mask, steps.biased, -torch.inf).exp().sum(-1, keepdim=True)
        close(steps.weights, torch.where(sums > 0, steps.masked.exp() / sums, 0.0))
        close(steps.output, torch.einsum("bhts,bshk->bthk", steps.weights, v.repeat_interleave(many, 2)))


def test_fault_1_a_row_that_sees_nothing_is_all_hidden_and_all_0() -> None:
    q, k, v = heads()
    steps = af.explain(q.requires_grad_(), k, v, pattern=~af.Causal())
    assert steps.masked[:, :, -1].isneginf().all()
    assert (steps.weights[:, :, -1] == 0).all()
    assert (steps.output[:, -1] == 0).all()
    (gradient,) = torch.autograd.grad(steps.output.sum(), q)
    assert gradient.isfinite().all()


def test_shapes_with_as_many_keys_as_wanted() -> None:
    (q, _, _), (_, k, v) = heads(2, 3), heads(2, 9)
    steps = af.explain(q, k, v, position=af.Rotary())
    by_shape = {
        (B, 3, H, K): ("q", "q_turned", "output"),
        (B, 9, 2, K): ("k", "v", "k_turned"),
        (B, H, 3, 9): ("scores", "scaled", "capped", "biased", "masked", "weights"),
    }
    assert {name: shape for shape, names in by_shape.items() for name in names} == {
        field.name: tuple(value.shape)
        for field in dataclasses.fields(steps)
        if isinstance(value := getattr(steps, field.name), Tensor)
    }
    torch.testing.assert_close(steps.weights.sum(-1), torch.ones(B, H, 3, dtype=WIDE))


def test_print_names_each_step_that_does_something() -> None:
    q, k, v = heads(2)
    plain = str(af.explain(q, k, v))
    assert "7 queries over 7 keys; 4 heads of width 4, 2 key-value heads; shown: head 0, row 0 of 2" in plain
    assert "scaled (2, 4, 7, 7) = scores · 0.5 = scores / √K" in plain
    assert "capped" not in plain
    assert "bias" not in plain
    assert "turned" not in plain
    assert "weights (2, 4, 7, 7) = softmax(masked) along each row; 0 where nothing is seen\n  1.000 0.000" in plain
    full = str(af.explain(q, k, v, position=af.Rotary(), softcap=2.0, scale=0.1, pattern=af.Causal() & af.Window(2)))
    assert "q_turned (2, 7, 4, 4) = q turned by Rotary()" in full
    assert "capped (2, 4, 7, 7) = 2 · tanh(scaled / 2)" in full
    assert "= capped where And(parts=(Causal(), Window(size=2))) lets query t see key s, else -inf" in full
    assert "biased (2, 4, 7, 7) = scaled + bias of Alibi()" in str(af.explain(q, k, v, position=af.Alibi()))
    large = str(af.explain(*heads(4, 30)))
    assert "\n  min 0.000, max 1.000, mean 0.033" in large
    assert ", 435 hidden" in large
    assert max(len(line) for line in large.splitlines()) <= 120
    assert str(af.explain(q[:, :0], k[:, :0], v[:, :0])).startswith("attention of 0 queries")


def test_the_matrix_shown_is_that_of_the_head() -> None:
    q, k, v = heads(2)
    steps = dataclasses.replace(af.explain(q, k, v), head=3)
    assert torch.equal(steps.matrix("weights"), steps.weights[0, 3])
    assert torch.equal(steps.matrix("q"), q[0, :, 3])
    assert torch.equal(steps.matrix("k"), k[0, :, 1])
    assert torch.equal(steps.matrix("output"), steps.output[0, :, 3])


def test_the_picture_shows_hidden_cells_in_grey(tmp_path: Path) -> None:
    steps = af.explain(*heads())
    steps.draw(tmp_path / "steps.png", labels=["The", "␣猫", "$x^2$", "\n", "a", "b", "c" * 30])
    pixels = np.rint(image.imread(tmp_path / "steps.png")[..., :3] * 255).astype(int)
    grey = float((np.abs(pixels - (0xC9, 0xCD, 0xD4)).max(-1) <= 2).mean())
    assert 0.03 < grey < 0.2
    steps.draw(tmp_path / "plain.png")
    af.explain(*heads(4, 70)).draw(tmp_path / "large.png", labels=["x"] * 70)
    af.explain(*heads(4, 0)).draw(tmp_path / "empty.png")
    with pytest.raises(ValueError, match="`labels` must be 7 for 'scores', one a token, but are 2"):
        steps.draw(tmp_path / "steps.png", labels=["a", "b"])
    with pytest.raises(ValueError, match="at least 1 map"):
        plot_heat(tmp_path / "steps.png", {})


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", TOKENS)
@pytest.mark.parametrize("kernel", [None, "sdpa", "reference"])
@pytest.mark.parametrize("position", POSITIONS, ids=repr)
@pytest.mark.parametrize("groups", HEADS)
@torch.inference_mode()
def test_weights_are_those_that_the_layer_used(
    groups: int, position: af.Position | None, kernel: str | None, layout: str
) -> None:
    """With the values that it had, they give what the layer answered in a real pass, by whatever kernel."""
    tokens, read = TOKENS[layout], ids()
    for pattern in (af.Causal(), af.Causal() & af.Window(3), af.Causal() | af.Prefix(3)):
        model = decoder(groups, pattern=pattern, position=position, qk_norm=af.RMSNorm())
        module, x, answer = seen_at(model, "decoder.layers.1.mixer.op", read, tokens, kernel=kernel)
        weights = af.attention_weights(model, read, layer=1, tokens=tokens, kernel=kernel)
        assert weights.shape == (B, H, T, T)
        torch.testing.assert_close(used(module, weights, x), answer, rtol=1e-4, atol=1e-5)
        sums = weights.sum(-1)
        torch.testing.assert_close(sums, tokens.real[:, None].expand_as(sums).float())
        few = af.attention_weights(model, read, layer=-1, heads=[2, 0], rows=[5, -7, 5], tokens=tokens, kernel=kernel)
        torch.testing.assert_close(few, weights[:, [2, 0]][:, :, [5, 0, 5]], rtol=1e-6, atol=1e-7)


@torch.inference_mode()
def test_heads_that_differ() -> None:
    pattern = PerHead((af.Causal() & af.Window(2), af.Causal()))
    model, read = decoder(2, pattern=pattern, position=af.Alibi()), ids()
    module, x, answer = seen_at(model, "decoder.layers.1.mixer.op", read)
    weights = af.attention_weights(model, read, layer=1)
    torch.testing.assert_close(used(module, weights, x), answer)
    assert (weights[:, :2, -1, :-2] == 0).all()
    assert (weights[:, 2:, -1] > 0).all()
    torch.testing.assert_close(af.attention_weights(model, read, layer=1, rows=[4, 0]), weights[:, :, [4, 0]])
    steps = af.explain_layer(model, read, 1)
    assert torch.equal(steps.weights, weights)
    torch.testing.assert_close(steps.projected, answer)


@torch.inference_mode()
def test_a_softcap_is_no_obstacle() -> None:
    model, read = decoder(softcap=0.5, scale=2.0), ids()
    module, x, answer = seen_at(model, "decoder.layers.0.mixer.op", read)
    torch.testing.assert_close(used(module, af.attention_weights(model, read, layer=0), x), answer)


@torch.inference_mode()
def test_cross_attention_and_each_stack_of_an_encoder_decoder() -> None:
    model, read, source = both_stacks(), ids(5), ids()
    padded = TOKENS["right"]
    said: dict[str, Any] = {"source": source, "source_tokens": padded}
    memory = model.encode(source, padded).x
    for place in ("encoder.layers.1.mixer", "decoder.layers.1.mixer", "decoder.layers.0.cross"):
        stack, _, layer, branch = place.split(".")
        module, x, answer = seen_at(model, f"{place}.op", read, **said)
        weights = af.attention_weights(model, read, layer=int(layer), stack=stack, branch=branch, **said)
        torch.testing.assert_close(used(module, weights, memory if branch == "cross" else x), answer)
        few = af.attention_weights(model, read, layer=int(layer), stack=stack, branch=branch, rows=[3], **said)
        torch.testing.assert_close(few, weights[:, :, [3]])
    assert weights.shape == (B, H, 5, T)
    assert (weights[1] == 0).all()  # its source is all padding
    alone = af.attention_weights(model, source, layer=0, stack="encoder", tokens=padded)
    assert torch.equal(alone, af.attention_weights(model, read, layer=0, stack="encoder", **said))
    with pytest.raises(ValueError, match="the encoder is not run: give `source`"):
        af.attention_weights(model, read, layer=0, stack="encoder", memory=model.encode(source))


@torch.inference_mode()
def test_marked_tokens_have_weights_of_their_own_projections() -> None:
    """Longformer: queries and keys of a second set, over the whole document."""
    mixer = af.GlobalAttention(H, pattern=af.Window(2) | af.Global())
    block = af.Block.pre(mixer, af.DenseFFN(8), norm=af.RMSNorm())
    model, read = randomized(af.TransformerSpec(DIM, VOCAB, encoder=(block,))), ids()
    mark = torch.zeros(B, T, dtype=torch.bool)
    mark[0, [0, 4]] = mark[1, 2] = True
    tokens = dataclasses.replace(TOKENS["left"], mark=mark)
    module, x, answer = seen_at(model, "encoder.layers.0.mixer.op", read, tokens)
    weights = af.attention_weights(model, read, layer=0, tokens=tokens)
    q, k, v = (
        project(x).unflatten(-1, (-1, K)).transpose(1, 2)
        for project in (module.q_global, module.k_global, module.v_global)
    )
    seen = (tokens.seg[:, :, None] == tokens.seg[:, None]) & tokens.real[:, None]
    own = (q @ k.mT * K**-0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
    at = mark & tokens.real
    torch.testing.assert_close(weights.transpose(1, 2)[at], own.transpose(1, 2)[at])
    torch.testing.assert_close(module.out((own @ v).transpose(1, 2).flatten(-2))[at], answer[at])
    torch.testing.assert_close(used(module, weights, x)[~at], answer[~at])
    torch.testing.assert_close(af.attention_weights(model, read, layer=0, tokens=tokens, rows=[4]), weights[:, :, [4]])
    with pytest.raises(ValueError, match="this layer attends twice"):
        af.explain_layer(model, read, tokens=tokens)
    padding = dataclasses.replace(TOKENS["left"], mark=~TOKENS["left"].real)  # nobody real is marked
    assert torch.equal(
        af.attention_weights(model, read, layer=0, tokens=padding),
        af.attention_weights(model, read, layer=0, tokens=TOKENS["left"]),
    )


@pytest.mark.parametrize("position", POSITIONS, ids=repr)
@torch.inference_mode()
def test_a_layer_step_by_step_is_the_layer(position: af.Position | None) -> None:
    model, read = decoder(2, position=position, qk_norm=af.RMSNorm(), bias=("q", "v", "out")), ids()
    module, x, answer = seen_at(model, "decoder.layers.1.mixer.op", read)
    steps = af.explain_layer(model, read, 1, -1)
    assert steps.x is not None
    assert steps.projected is not None
    assert (steps.head, tuple(steps.x.shape)) == (3, (B, T, DIM))
    torch.testing.assert_close(steps.x, x)
    torch.testing.assert_close(steps.projected, answer)
    torch.testing.assert_close(steps.q, module.q_norm(module.q(x).unflatten(-1, (H, K))))
    torch.testing.assert_close(steps.v, module.v(x).unflatten(-1, (2, K)))
    assert torch.equal(steps.weights, af.attention_weights(model, read, layer=1))
    assert torch.equal(steps.q, steps.q_turned) != isinstance(position, af.Rotary)
    for name in ("x", "projected", "weights", *(["q_turned"] if isinstance(position, af.Rotary) else [])):
        assert f"\n{name} (" in str(steps)


@torch.inference_mode()
def test_cross_attention_step_by_step() -> None:
    model, read, source = both_stacks(), ids(5), ids()
    *_, answer = seen_at(model, "decoder.layers.1.cross.op", read, source=source)
    steps = af.explain_layer(model, read, 1, branch="cross", source=source)
    assert steps.projected is not None
    assert tuple(steps.k.shape) == (B, T, 2, K)
    torch.testing.assert_close(steps.projected, answer)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("position", [af.Rotary(), af.Alibi(), af.RelativeBias()], ids=repr)
@pytest.mark.parametrize("layout", ["plain", "packed"])
@torch.inference_mode()
def test_few_rows_take_no_square_of_the_length(layout: str, position: af.Position) -> None:
    """Of this layer; those below it run as always."""
    length = 4096
    model, read = decoder(position=position, layers=1), ids(length, 1)
    packed = af.Tokens.packed((torch.arange(length) // 1000)[None])
    tokens = packed if layout == "packed" else af.Tokens.arange(1, length)
    with Largest() as mode:
        weights = af.attention_weights(model, read, layer=0, rows=[5], tokens=tokens)
    assert weights.shape == (1, H, 1, length)
    assert mode.numel <= 8 * DIM * length < length * length
    with Largest() as mode:  # so that the check can see it
        af.attention_weights(model, read[:, :512], layer=0)
    assert mode.numel >= 512 * 512


@torch.inference_mode()
def test_few_rows_of_a_layer_above_a_fused_one() -> None:
    model, read = decoder(position=af.Rotary()), ids(4096, 1)
    with Largest() as mode:
        af.attention_weights(model, read, layer=1, rows=[5, 4000])
    assert mode.numel < 4096 * 4096


def test_the_model_is_left_as_it_was() -> None:
    model, read = decoder(position=af.Rotary()), ids()
    before = model(read)
    af.attention_weights(model, read, layer=0)
    with pytest.raises(ValueError, match="unknown kernel"):
        af.attention_weights(model, read, layer=1, kernel="no such")
    assert torch.equal(model(read), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_rest_of_the_model_does_not_run() -> None:
    model = decoder()
    model.get_submodule("decoder.layers.0.mixer.op.out").register_forward_hook(lambda *_: ran.append("out"))
    model.get_submodule("decoder.layers.1").register_forward_hook(lambda *_: ran.append("layer 1"))
    ran: list[str] = []
    af.attention_weights(model, ids(), layer=0)
    assert ran == ["out"]


def test_weights_have_gradients() -> None:
    model = decoder(position=af.Rotary())
    af.attention_weights(model, ids(), layer=1, rows=[-1])[..., 0].sum().backward()
    assert model.tokens.weight.grad is not None
    assert model.tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"layer": 2}, "`layer` must be from -2 to 1, but is 2"),
        ({"layer": 0, "heads": [4]}, "`heads` must be from -4 to 3, but is 4"),
        ({"layer": 0, "rows": [0, -8]}, "`rows` must be from -7 to 6, but is -8"),
        ({"layer": 0, "stack": "encoder"}, "`stack` must be 'decoder', but is 'encoder'"),
        ({"layer": 0, "branch": "cross"}, "`branch` must be one of mixer, ffn in layer 0, but is 'cross'"),
        ({"layer": 0, "branch": "ffn"}, "decoder.0.ffn is no attention, so it has no weights over tokens"),
    ],
)
def test_mistakes_are_named(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        af.attention_weights(decoder(), ids(), **said)


def test_no_rows_no_tokens_and_a_cache() -> None:
    model = decoder()
    assert af.attention_weights(model, ids(), layer=0, rows=[], heads=range(2)).shape == (B, 2, 0, T)
    assert af.attention_weights(model, ids(0), layer=0).shape == (B, H, 0, 0)
    assert af.attention_weights(model, ids(1), layer=0).eq(1).all()
    with pytest.raises(ValueError, match="give all of its `ids`, and no `cache`"):
        af.attention_weights(model, ids(), layer=0, cache=model.new_cache(B, T))


# -- against transformers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(
    "name",
    ["llama-grouped", "llama-yarn", "gpt2", "neox", "mistral", "gemma2", "qwen3", "bert", "roberta", "t5", "bart"],
)
@pytest.mark.parametrize("lengths", [(13, 13, 13), (13, 7, 4)], ids=["even", "ragged"])
@torch.inference_mode()
def test_weights_are_those_of_transformers(name: str, lengths: tuple[int, ...], made: Callable[[str], Case]) -> None:
    case = made(name)
    read = text(case.theirs, lengths)
    found: list[tuple[str | None, str, Any, Tensor]]
    out = case.theirs(**their_inputs(case.theirs, read), output_attentions=True)
    tokens = read.tokens()
    if case.both_stacks:
        said: dict[str, Any] = {"source": read.ids, "source_tokens": tokens}
        assert read.target is not None
        all_real = torch.ones_like(read.target, dtype=torch.bool)
        found = [
            ("encoder", "mixer", out.encoder_attentions, tokens.real),
            ("decoder", "mixer", out.decoder_attentions, all_real),
            ("decoder", "cross", out.cross_attentions, all_real),
        ]
    else:
        said = {"tokens": tokens, "types": read.types}
        found = [(None, "mixer", out.attentions, tokens.real)]
    for stack, branch, theirs, real in found:
        given = read.ids if read.target is None else read.target
        assert len(theirs) == 2
        for layer, right in enumerate(theirs):
            ours = af.attention_weights(case.ours, given, layer=layer, stack=stack, branch=branch, **said)
            assert ours.shape == right.shape
            torch.testing.assert_close(ours.transpose(1, 2)[real], right.transpose(1, 2)[real], rtol=0, atol=1e-5)


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["inspect", *[str(argument) for argument in arguments]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on bytes, and a model as others publish it, of each kind."""
    root = tmp_path_factory.mktemp("models")
    save_run(randomized(af.preset("gpt-mini").replace(vocab_size=257)), root / "run", ByteTokenizer())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<end>"])
    backend.train_from_iterator(["the cat sat on the mat. " * 9], trainer)
    case = make("llama-grouped", root / "small")
    spec = case.ours.spec.replace(vocab_size=backend.get_vocab_size())
    af.save(randomized(spec), root / "hub")
    backend.save(str(root / "hub" / "tokenizer.json"))
    (root / "hub" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return {"run": root / "run", "hub": root / "hub", "bare": root / "small"}


def test_the_command_prints_a_line_for_each_token(folders: dict[str, Path], tmp_path: Path) -> None:
    said = "the cat sat\non the 猫 mat"
    for source in ("run", "hub"):
        result = run(folders[source], said, "--layer", 1, "--head", 0, "--png", tmp_path / f"{source}.png")
        assert result.exit_code == 0, result.output
        title, *lines, drawn = result.output.splitlines()
        assert title.startswith("decoder, layer 1, head 0: ")
        model, tokenizer, _ = af.load(folders[source])
        assert tokenizer is not None
        read = tokenizer.encode(said, frame=True)
        assert len(lines) == len(read)
        assert max(map(cell_len, lines)) <= 80
        first = lines[0].split()
        assert (first[0], first[-1]) == ("0", "100%")  # the first token sees itself alone
        weights = af.attention_weights(model, torch.tensor([read]), layer=1, heads=[0]).detach()[0, 0]
        best = float(weights[-1].max())
        assert f"{best:.0%}" in lines[-1]
        assert "\\n" in result.output
        assert drawn == f"drawn in {tmp_path / f'{source}.png'}"
        assert image.imread(tmp_path / f"{source}.png").shape[1] > 400


def test_the_command_shows_the_rows_that_are_wanted(folders: dict[str, Path]) -> None:
    def numbers(rows: str) -> list[str]:
        result = run(folders["hub"], "the cat sat on the mat", "--rows", rows)
        assert result.exit_code == 0, result.output
        return [line.split()[0] for line in result.output.splitlines()[1:]]

    last = numbers(":")[-1]
    assert numbers("0,-1") == ["0", last]
    assert numbers("1:3,0") == ["1", "2", "0"]
    assert numbers("-2:") == [str(int(last) - 1), last]


def test_the_command_shows_encoders(tmp_path: Path) -> None:
    """Of a model with both stacks too."""
    save_run(both_stacks_of(257), tmp_path, ByteTokenizer())
    result = run(tmp_path, "abc", "--layer", -1)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("encoder, layer -1, mean of all heads: ")
    assert len(result.output.splitlines()) == 4


def both_stacks_of(vocab: int) -> af.Transformer:
    return randomized(both_stacks().spec.replace(vocab_size=vocab))


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        ("run", ["a", "--layer", 9], "`layer` must be from -3 to 2, but is 9"),
        ("run", ["a", "--head", 9], "`heads` must be from -3 to 2, but is 9"),
        ("run", ["a", "--rows", "x"], "--rows must be like 0,4,-1 or 3:8, but is 'x'"),
        ("run", ["a", "--rows", "7"], "`rows` must be from -1 to 0, but is 7"),
        ("run", [""], "the text has no tokens: give some to look at"),
        ("bare", ["a"], "has no tokenizer, so text cannot be read"),
    ],
)
def test_mistakes_at_the_command_are_one_sentence(
    folders: dict[str, Path], source: str, more: list[object], said: str
) -> None:
    result = run(folders[source], *more)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1
