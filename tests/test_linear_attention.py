"""Linear attention against its O(T²) form in float64: an explicit matrix of feature products, masked, normalised."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from test_model import NORMED, measured_activations, measured_flops, total
from torch import Tensor

import anyformer as af
from anyformer.cli.commands import cli
from anyformer.context import Context
from anyformer.parts import linear_product
from anyformer.parts.linear_product import Chunks, causal_product, causal_sums, cut

CLOSE = {"rtol": 0, "atol": 1e-10}
VOCAB = 13
FEATURES = [af.Elu(), af.Relu(), af.Relu(eps=0.0), af.RandomFeatures(20, seed=1)]
LENGTHS = [1, 2, 127, 128, 129, 130, 255]


def documents(length: int) -> Tensor:
    """Documents of 1 to 70 tokens, with padding at the end, between them, and at the start."""
    seg = torch.zeros(2, length, dtype=torch.long)
    for row, ends in enumerate(([1, 4, 70, 140], [60, 130, 131])):
        for end in ends:
            seg[row, end:] += 1
    seg[0, length - length // 9 :] = -1
    seg[1, 62:65] = -1
    return seg


LAYOUTS: dict[str, Callable[[int], af.Tokens]] = {
    "plain": lambda n: af.Tokens.arange(2, n),
    "left": lambda n: af.Tokens.padded(torch.arange(n) >= torch.tensor([[n // 3], [n - 1]])),
    "right": lambda n: af.Tokens.padded(torch.arange(n) < torch.tensor([[n // 3], [n]])),
    "inside": lambda n: af.Tokens.padded((torch.arange(n) % 7 != 3).expand(2, n)),
    "packed": lambda n: af.Tokens(torch.arange(n).expand(2, n), documents(n)),
    "nothing": lambda n: af.Tokens.padded(torch.zeros(2, n, dtype=torch.bool)),
}


def dense(module: Any, x: Tensor, tokens: af.Tokens) -> Tensor:
    """The whole matrix of products; a query that sees nothing gives zeros."""
    spec, ctx = module.spec, Context(tokens)
    q, k, v = (f(x).unflatten(-1, (-1, module.head_dim)) for f in (module.q, module.k, module.v))
    if spec.position:
        q, k = module.position.at_heads(q, tokens, ctx), module.position.at_heads(k, tokens, ctx)
    per = spec.num_heads // spec.kv_heads
    q, k, v = module.features.queries(q, ctx), module.features.keys(k, ctx).repeat_interleave(per, 2), v
    weights = torch.einsum("bthf,bshf->bhts", q, k) * spec.pattern.mask(tokens, tokens)[:, None]
    all_ = weights.sum(-1, keepdim=True)
    heads = torch.einsum("bhts,bshe->bthe", weights / torch.where(all_ > 0, all_, 1.0), v.repeat_interleave(per, 2))
    return module.out(heads.flatten(-2))


def both(spec: af.LinearAttention, length: int, tokens: af.Tokens) -> None:
    """Outputs and all gradients of module and dense form."""
    module = spec.build(16, {}).double()
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    probe = torch.randn_like(x)
    ours, theirs = module(x, Context(tokens))[0], dense(module, x, tokens)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    given = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), given),
        torch.autograd.grad((theirs * probe).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("pattern", [af.Causal(), af.Full()], ids=repr)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_dense_form(layout: str, length: int, pattern: af.Pattern) -> None:
    """Forward and gradients, on lengths around the chunk (FAULT 18's kind; FAULT 22c)."""
    both(af.LinearAttention(4, 2, pattern=pattern), length, LAYOUTS[layout](length))


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("pattern", [af.Causal(), af.Full()], ids=repr)
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_every_feature_map(layout: str, pattern: af.Pattern, features: Any) -> None:
    both(af.LinearAttention(4, 1, features=features, pattern=pattern, head_dim=6), 150, LAYOUTS[layout](150))


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 64, 99, 100, 1000])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_every_chunk_size(layout: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_product, "CHUNK", chunk)
    both(af.LinearAttention(2, position=af.Rotary(), bias=("q", "k", "v", "out")), 100, LAYOUTS[layout](100))


def test_chunks_hold_all_tokens_and_little_more() -> None:
    for length in range(1, 1000):
        number, size = cut(length)
        assert size <= linear_product.CHUNK
        assert length <= number * size < length + number


# -- the product itself -----------------------------------------------------------------------------------------------


def parts(groups: int = 1, per: int = 2, number: int = 3, size: int = 4) -> list[Tensor]:
    shapes = (2, groups, number, per, size, 3), (2, groups, number, size, 3), (2, groups, number, size, 2)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("itself", [True, False])
def test_gradcheck(itself: bool) -> None:
    seg = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, -1, -1], [-1, -1, 3, 3, -1, 3, 3, 4, 4, 4, 5, 5]])
    for chunks in (
        Chunks.plain(4, torch.device("cpu"), itself),
        Chunks.of(seg.view(2, 3, 4), torch.tensor([-1, -1]), itself),
    ):
        assert torch.autograd.gradcheck(lambda q, k, v, c=chunks: causal_product(q, k, v, c), parts())


def test_a_state_before_the_first_chunk_goes_on_in_its_own_document() -> None:
    """Row 0 goes on with document 5, row 1 begins another one: the state of row 1 changes nothing."""
    q, k, v = (t.detach() for t in parts())
    seg = torch.full((2, 3, 4), 5)
    chunks, first = Chunks.of(seg, torch.tensor([5, 6])), torch.randn(2, 1, 3, 2, dtype=torch.float64)
    sums, states = causal_sums(q, k, v, chunks, first)
    without, _ = causal_sums(q, k, v, chunks, torch.zeros_like(first))
    torch.testing.assert_close(sums[0] - without[0], q[0] @ first[0, :, None, None], **CLOSE)
    assert torch.equal(sums[1], without[1])
    torch.testing.assert_close(states[0, :, -1], first[0] + (k[0].mT @ v[0]).sum(1), **CLOSE)
    torch.testing.assert_close(states[1, :, -1], (k[1].mT @ v[1]).sum(1), **CLOSE)


def saved(length: int, layout: str) -> list[int]:
    """Bytes of each storage that a pass keeps for its backward pass."""
    module = af.LinearAttention(2).build(32, {})
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = module(torch.randn(2, length, 32), Context(LAYOUTS[layout](length)))
    out.sum().backward()
    return list(kept.values())


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_memory_grows_with_length_alone(layout: str) -> None:
    """What is kept doubles with the length, and no part of it is a T × d × d or T × T tensor."""
    small, large = saved(512, layout), saved(1024, layout)
    assert sum(large) / sum(small) == pytest.approx(2.0, abs=0.05)
    assert max(large) <= 2 * 1024 * max(32, 2 * 17, 128 // 4) * 4


# -- what must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [af.Causal(), af.Full()], ids=repr)
@pytest.mark.parametrize("features", [af.Elu(), af.RandomFeatures(20)], ids=repr)
def test_fault_9_and_12_padding_and_other_documents_change_nothing(pattern: af.Pattern, features: Any) -> None:
    tokens = LAYOUTS["packed"](200)
    module = af.LinearAttention(4, features=features, pattern=pattern).build(16, {})
    x = torch.randn(2, 200, 16)
    for document in (-1, 0, 2):
        there = (tokens.seg == document)[..., None]
        a, b = (module(y, Context(tokens))[0] for y in (x, torch.where(there, torch.randn_like(x), x)))
        assert torch.equal(a.masked_fill(there, 0), b.masked_fill(there, 0))
        assert document < 0 or not torch.equal(a, b)


def test_fault_5_no_gradient_from_the_future() -> None:
    module, x = af.LinearAttention(2).build(8, {}), torch.randn(1, 200, 8, requires_grad=True)
    out, _ = module(x, Context(af.Tokens.arange(1, 200)))
    (grad,) = torch.autograd.grad(out[:, 130].sum(), x)
    assert (grad[:, 131:] == 0).all()
    assert (grad[:, :131] != 0).any(-1).all()


@pytest.mark.parametrize("pattern", [af.Causal(), af.Full()], ids=repr)
def test_fault_22_sums_do_not_run_over_in_float16(pattern: af.Pattern) -> None:
    """70 000 keys of feature 1 are more than float16 holds: the answer is the plain mean, 3."""
    module = af.LinearAttention(1, pattern=pattern, bias=("v",)).build(1, {})
    for weight, value in ((module.k, 0.0), (module.v, 0.0), (module.out, 1.0)):
        torch.nn.init.constant_(weight.weight, value)
    torch.nn.init.constant_(module.v.bias, 3.0)
    with torch.inference_mode():
        out, _ = module.half()(torch.randn(1, 70_000, 1).half(), Context(af.Tokens.arange(1, 70_000)))
    assert out.dtype == torch.float16
    assert (out == 3.0).all()


def test_fault_22_no_key_is_met() -> None:
    """Features of relu are all 0 where keys are negative: zeros, and finite gradients."""
    module = af.LinearAttention(1, features=af.Relu(eps=0.0)).build(2, {})
    torch.nn.init.constant_(module.k.weight, -1.0)
    x = torch.rand(1, 5, 2, requires_grad=True)
    out, _ = module(x, Context(af.Tokens.arange(1, 5)))
    out.sum().backward()
    assert (out == 0).all()
    assert all(t.grad.isfinite().all() for t in [x, *module.parameters()])


def test_large_vectors_stay_finite() -> None:
    module = af.LinearAttention(2, features=af.RandomFeatures(64)).build(256, {})
    x = 300 * torch.randn(1, 50, 256, requires_grad=True)
    out, _ = module(x, Context(af.Tokens.arange(1, 50)))
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


# -- random features --------------------------------------------------------------------------------------------------


def error(features: int) -> float:
    """Mean distance from softmax attention over a few seeds."""
    q, k, v = torch.randn(3, 1, 40, 2, 8) * torch.tensor([0.5, 0.5, 1.0]).view(3, 1, 1, 1, 1)
    tokens, found = af.Tokens.arange(1, 40), []
    exact = af.attend(q, k, v)
    for seed in range(8):
        module = af.LinearAttention(2, features=af.RandomFeatures(features, seed=seed)).build(16, {})
        found.append((module.mix(q, k, v, Context(tokens)) - exact).abs().mean())
    return torch.stack(found).mean().item()


def test_random_features_approach_softmax() -> None:
    errors = []
    for count in (16, 128, 1024, 8192):
        torch.manual_seed(0)
        errors.append(error(count))
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(1.5 < ratio < 6 for ratio in ratios), f"should fall by about √8: {errors}"
    assert errors[-1] < 0.03


def test_random_features_are_unbiased() -> None:
    """Lemma 1: the mean of φ(q)·φ(k) over directions is exp(q·k / √width); the query's own factor is put back."""
    q, k = 0.7 * torch.randn(2, 5, 8, dtype=torch.float64)
    module = af.RandomFeatures(400_000).build(8)
    ctx = Context(af.Tokens.arange(1, 1))
    x = q * 8**-0.25
    factor = ((x @ module.directions.T).amax(-1, keepdim=True) - x.square().sum(-1, keepdim=True) / 2).exp()
    made = (module.queries(q, ctx) * factor) @ module.keys(k, ctx).T / 400_000
    torch.testing.assert_close(made, (q @ k.T / 8**0.5).exp(), rtol=0.03, atol=0)


def test_directions_are_orthogonal_and_follow_the_seed() -> None:
    state = torch.get_rng_state()
    a, b, c = (af.RandomFeatures(20, seed=seed).build(8) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "no numbers of the global generator are drawn"
    assert torch.equal(a.directions, b.directions)
    assert not torch.equal(a.directions, c.directions)
    assert a.directions.shape == (20, 8)
    for block in a.directions.split(8):
        product = block @ block.T
        torch.testing.assert_close(product, product.diagonal().diag(), rtol=0, atol=1e-12)
    long = af.RandomFeatures(8000).build(8).directions
    assert long.square().sum(-1).mean().item() == pytest.approx(8, rel=0.05)
    assert long.mean(0).abs().max() < 0.05


def test_directions_are_not_stored_and_come_back(tmp_path: Path) -> None:
    spec = decoder(af.LinearAttention(4, features=af.RandomFeatures(20, seed=3)))
    model = spec.build()
    af.save(model, tmp_path / "run")
    x = torch.randint(0, VOCAB, (1, 9))
    assert torch.equal(af.load(tmp_path / "run").model(x), model(x))
    assert not [name for name in model.state_dict() if "directions" in name]


# -- decoding ---------------------------------------------------------------------------------------------------------


def decoder(mixer: af.Mixer, **fields: Any) -> af.TransformerSpec:
    block = af.Block.pre(mixer, af.DenseFFN(8), norm=af.RMSNorm())
    fields = {"dim": 16, "vocab_size": VOCAB, "final_norm": af.RMSNorm()} | fields
    return af.TransformerSpec(decoder=(block,) * 2, **fields)


MIXERS = [
    af.LinearAttention(4, 2),
    af.LinearAttention(2, features=af.Relu(), position=af.Rotary(base=50.0)),
    af.LinearAttention(2, features=af.RandomFeatures(10), bias=("q", "v")),
]
SPLITS = [[11], [1] * 11, [3, 4, 4], [4, 1, 2, 4], [9, 2], [4, 0, 7]]
PIECES: dict[str, af.Tokens | None] = {
    "plain": None,
    "left": af.Tokens.padded(torch.arange(11) >= torch.tensor([[4], [0]])),
    "right": af.Tokens.padded(torch.arange(11) < torch.tensor([[5], [11]])),
    "inside": af.Tokens.padded(
        torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1]]) > 0
    ),
    "packed": af.Tokens.packed(torch.tensor([[3, 3, 3, 1, 1, 1, 1, 1, 0, 0, -1], [-1, -1, 2, 5, 5, 5, 5, 5, 5, 6, 6]])),
}


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_decoding_equals_the_full_pass(mixer: af.Mixer, pieces: str, split: list[int]) -> None:
    model = decoder(mixer).build(dtype=torch.float64).eval()
    ids, tokens = torch.randint(0, VOCAB, (2, 11)), PIECES[pieces]
    real = torch.ones_like(ids, dtype=torch.bool) if tokens is None else tokens.real
    cache, out, begin = model.new_cache(2, 11), [], 0
    with torch.inference_mode():
        whole = model(ids, tokens)
        for length in split:
            here = slice(begin, begin + length)
            piece = None if tokens is None else tokens.map(lambda t, here=here: t[:, here])
            out.append(model(ids[:, here], piece, cache=cache))
            begin += length
    torch.testing.assert_close(torch.cat(out, 1)[real], whole[real], **CLOSE)


def test_plain_pieces_after_padding() -> None:
    """A plain second piece, which says its start, goes on behind a padded first one."""
    model = decoder(MIXERS[0]).build(dtype=torch.float64).eval()
    ids, tokens = torch.randint(0, VOCAB, (2, 5)), PIECES["left"].map(lambda t: t[:, 2:7])
    cache = model.new_cache(2, 9)
    with torch.inference_mode():
        model(ids, tokens, cache=cache)
        more = torch.randint(0, VOCAB, (2, 4))
        made = model(more, cache=cache)
        alone = model(torch.cat((ids[:1, 2:], more[:1]), 1))
    torch.testing.assert_close(made[0], alone[0, 3:], **CLOSE)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_ragged_batch_generates_what_each_prompt_does_alone(mixer: af.Mixer) -> None:
    model = decoder(mixer).build(dtype=torch.float64).eval()
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12]]
    together = af.generate(model, prompts, max_new_tokens=8)
    assert together.ids == [af.generate(model, [prompt], max_new_tokens=8).ids[0] for prompt in prompts]


def test_the_state_has_one_size_and_is_float32_at_least() -> None:
    spec = decoder(MIXERS[0])
    for dtype, size in ((torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)):
        caches = [spec.build(dtype=dtype).new_cache(3, length) for length in (4, 4000)]
        assert [cache.nbytes for cache in caches] == [3 * size * total(spec, 4).cache] * 2
    assert total(spec, 4).cache == total(spec, 4000).cache == 2 * 2 * 4 * 5


def test_half_precision_decodes_as_it_trains() -> None:
    model = decoder(MIXERS[0]).build(dtype=torch.bfloat16).eval()
    ids, cache = torch.randint(0, VOCAB, (1, 9)), None
    with torch.inference_mode():
        cache = model.new_cache(1, 9)
        steps = torch.cat([model(token, cache=cache) for token in ids.split(1, 1)], 1)
        torch.testing.assert_close(steps, model(ids), rtol=0.05, atol=0.05)


# -- costs, specs, the command line -----------------------------------------------------------------------------------

COSTS = {
    "elu": af.LinearAttention(4),
    "grouped": af.LinearAttention(4, 2, head_dim=6, bias=("q", "out"), position=af.Rotary()),
    "relu": af.LinearAttention(4, 1, features=af.Relu()),
    "random": af.LinearAttention(4, 2, features=af.RandomFeatures(24)),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_what_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_model.ids", lambda batch=1: torch.randint(0, VOCAB, (batch, 150)))
    block = af.Block.pre(COSTS[name], af.DenseFFN(40), norm=NORMED["norm"])
    spec = af.TransformerSpec(dim=32, vocab_size=VOCAB, decoder=(block,) * 2, final_norm=NORMED["norm"])
    said = total(spec, 150)
    assert said.params == sum(p.numel() for p in spec.build().parameters())
    assert measured_flops(spec) == said.flops
    assert measured_activations(spec) / said.activations == pytest.approx(1.0, abs=0.05)


def test_cost_flops_of_an_encoder() -> None:
    block = af.Block.pre(af.LinearAttention(4, 2, pattern=af.Full()), norm=af.RMSNorm())
    spec = af.TransformerSpec(dim=32, vocab_size=48, encoder=(block,))
    assert measured_flops(spec) == total(spec).flops
    assert total(spec).cache == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: af.LinearAttention(4, 3), "`num_heads` must be a multiple of `num_kv_heads` (3), but is 4"),
        (
            lambda: af.LinearAttention(4, pattern=af.Causal() & af.Window(3)),
            "linear attention keeps one sum of what it has seen, out of which nothing can be taken",
        ),
        (lambda: af.LinearAttention(4, position=af.Alibi()), "position 'alibi' acts on the scores: there are none"),
        (lambda: af.LinearAttention(4, position=af.Learned(9)), "position 'learned' acts on the input: put it in"),
        (
            lambda: decoder(af.LinearAttention(4, pattern=af.Full())),
            "decoder.0.mixer: pattern Full() looks ahead, which a decoder must not: write `Causal() & ...`",
        ),
        (lambda: decoder(af.LinearAttention(3)), "decoder.0.mixer: `dim` must be a multiple of `num_heads` (3)"),
    ],
)
def test_refusals(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(af.SpecError) as refused:
        make()
    assert str(refused.value).startswith(said)


def test_a_cache_keeps_no_gradients() -> None:
    store = decoder(MIXERS[0]).build().new_cache(1, 4).stores[0][0]
    with pytest.raises(ValueError, match="a cache keeps no gradients"):
        store.keep(store.value.clone().requires_grad_())


def test_a_limit_of_positions_is_known() -> None:
    rotary = af.Rotary(frequencies=af.Linear(factor=2, original_len=8))
    assert decoder(af.LinearAttention(4, position=rotary)).max_len() == 16


def test_yaml_and_paths() -> None:
    spec = decoder(af.LinearAttention(4, 2, features=af.RandomFeatures(32, seed=5), position=af.Rotary(), bias=("q",)))
    assert af.TransformerSpec.from_yaml(spec.to_yaml()) == spec
    changed = af.preset("gpt-mini").replace("decoder.*.mixer.kind", "linear_attention")
    assert {block.mixer for block in changed.decoder} == {af.LinearAttention()}
    assert changed.replace("decoder.*.mixer.features.kind", "relu").decoder[0].mixer.features == af.Relu()
    af.preset("bert-mini").replace("encoder.*.mixer", {"kind": "linear_attention", "pattern": "full"})


def falls(folder: Path, *settings: str) -> None:
    """Train gpt-mini with these settings, and let it write, as a person would."""

    (folder / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long.\n" * 60, encoding="utf-8")
    plan = ["--steps", "40", "--evaluations", "2", "--length", "16", "--batch-size", "4", "--vocab", "300"]
    more = [word for setting in settings for word in ("--set", setting)]
    made = CliRunner().invoke(
        cli, ["train", "gpt-mini", "--data", str(folder / "book.txt"), "--out", str(folder / "run"), *plan, *more]
    )
    assert made.exit_code == 0, made.output
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    said = CliRunner().invoke(cli, ["generate", str(folder / "run"), "Call me", "--seed", "1", "--max-new-tokens", "8"])
    assert said.exit_code == 0, said.output
    assert said.output.startswith("Call me")
    assert CliRunner().invoke(cli, ["show", str(folder / "run")]).exit_code == 0


@pytest.mark.parametrize("features", ["elu", "random_features"])
def test_trains_and_generates_through_the_commands(features: str, tmp_path: Path) -> None:
    kind = "decoder.*.mixer.kind=linear_attention"
    falls(tmp_path, kind, f"decoder.*.mixer.features.kind={features}")


def test_an_encoder_trains() -> None:
    block = af.Block.pre(af.LinearAttention(2, pattern=af.Full()), af.DenseFFN(16), norm=af.RMSNorm())
    spec = af.TransformerSpec(dim=16, vocab_size=VOCAB, encoder=(block,) * 2, final_norm=af.RMSNorm())
    model, ids = spec.build(), torch.randint(0, VOCAB, (4, 30))
    tokens = af.Tokens.padded(torch.arange(30) < torch.tensor([[30], [20], [9], [1]]))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        loss = F.cross_entropy(model(ids, tokens)[tokens.real], ids.roll(1, 1)[tokens.real])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
