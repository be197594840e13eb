"""The laws of attention: each finds the slips that it names, and holds for models of every kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planted import Fault, Plant, patched
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyformer import (
    Alibi,
    Attention,
    Block,
    Causal,
    Chunk,
    CrossAttention,
    DenseFFN,
    DynamicNTK,
    Embed,
    Full,
    GlobalAttention,
    LayerNorm,
    Learned,
    LinearAttention,
    MoE,
    Pattern,
    PerHead,
    PooledHead,
    Position,
    Prefix,
    RandomBlocks,
    Recurrent,
    RelativeBias,
    Request,
    RMSNorm,
    Rotary,
    Tokens,
    TransformerSpec,
    Window,
    YaRN,
    bigbird,
    longformer,
)
from anyformer.check.asked import Caught
from anyformer.check.laws import attention, distance, patterns
from anyformer.check.ours import Ours
from anyformer.check.run import check, judge
from anyformer.check.subject import Subject
from anyformer.check.textbook import alibi_slope, attended, bucket, turned
from anyformer.kernels import blocked, reference, sdpa
from anyformer.kernels.base import Kernel
from anyformer.kernels.blocked import Blocked
from anyformer.kernels.sdpa import Sdpa
from anyformer.parts import position as positions
from anyformer.parts.attention import AttentionModule
from anyformer.parts.op import Mixer
from anyformer.parts.position import AlibiModule, RotaryModule

EVERY = (*patterns.LAWS, *attention.LAWS, *distance.LAWS)


def decoder(mixer: Mixer, *, ffn: Any = None, embed: Embed | None = None, **fields: Any) -> TransformerSpec:
    block = Block.pre(mixer, ffn or DenseFFN(24), norm=RMSNorm())
    embed = embed or Embed()
    return TransformerSpec(dim=16, vocab_size=17, embed=embed, decoder=(block, block), final_norm=RMSNorm(), **fields)


def encoder(mixer: Mixer, **fields: Any) -> TransformerSpec:
    block, embed = Block.post(mixer, DenseFFN(24), norm=LayerNorm()), Embed(position=Learned(8))
    return TransformerSpec(dim=16, vocab_size=17, embed=embed, encoder=(block, block), **fields)


def both(two_way: Position | None, one_way: Position | None) -> TransformerSpec:
    here, past = Attention(4, pattern=Full(), position=two_way), Attention(4, position=one_way)
    ffn, norm = DenseFFN(8), RMSNorm()
    return TransformerSpec(
        dim=16,
        vocab_size=17,
        encoder=(Block.pre(here, ffn, norm=norm),) * 2,
        decoder=(Block.pre(past, CrossAttention(4, 2), ffn, norm=norm),) * 2,
        final_norm=norm,
    )


def plain() -> TransformerSpec:
    return decoder(Attention(4, 2, position=Rotary()))


def sliding() -> TransformerSpec:
    return decoder(Attention(4, 2, pattern=Causal() & Window(3), position=Alibi()))


def capped() -> TransformerSpec:
    return decoder(Attention(4, pattern=Causal() & Window(3), position=RelativeBias(8, 16), softcap=2.0))


def two_sided() -> TransformerSpec:
    return encoder(Attention(4, pattern=Window(3)))


# -- slips ------------------------------------------------------------------------------------------------------------


def asking(kernel: type[Kernel], change: Callable[[Request], Request]) -> Plant:
    """The kernel computes another request than it is asked."""
    right = kernel.__call__
    return patched(kernel, "__call__", lambda self, request: right(self, change(request)))


def step(**steps: Callable[[Request, Tensor], Tensor]) -> Plant:
    """Other steps of the reference kernel."""
    return lambda s: patch.dict(reference.STEPS, steps)


def capped_last() -> Plant:
    order = ("scaled", "biased", "masked", "capped", "weights")
    return patched(reference, "STEPS", {name: reference.STEPS[name] for name in order})


def without_scale(request: Request) -> Request:
    return dataclasses.replace(request, scale=1.0)


def upside_down(request: Request, bias: Tensor | None, right: Any = sdpa._mask) -> tuple[Tensor, Tensor]:
    mask, empty = right(request, bias)
    return (~mask if mask.dtype == torch.bool else mask), empty


def top_left(request: Request) -> bool:
    """As if queries and keys began together."""
    band = request.pattern.band()
    return band == (None, 0) and request.q_tokens.start is not None and request.k_tokens.start is not None


def outbid_by(number: float) -> Callable[[Request, Tensor], Tensor]:
    """Hidden scores are lowered by so much, and not selected away."""
    return lambda request, scores: scores + torch.zeros_like(scores).masked_fill(~request.mask()[:, None], number)


def tiled(heads: Tensor, num_heads: int) -> Tensor:
    """(0, 1) becomes (0, 1, 0, 1)."""
    return heads.repeat(1, 1, num_heads // heads.shape[2], 1)


def added_up(a: blocked.Part, b: blocked.Part) -> blocked.Part:
    """Each part counts in full."""
    return a[0] + b[0], torch.logaddexp(a[1], b[1])


def sees_all_where_empty(request: Request, bias: Tensor | None, right: Any = sdpa._mask) -> tuple[Tensor, Tensor]:
    """Rows that see nothing are let see everything, but not zeroed after."""
    mask, empty = right(request, bias)
    return mask, torch.zeros_like(empty)


def not_apart(self: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """Padding is a document like any other."""
    return self.allows(q, k) & (q.seg == k.seg)


def full_too_soon(self: Window, q: Any, k: Any) -> tuple[Tensor, Tensor]:
    some = (q.lo - k.hi < self.size) & (k.lo - q.hi < self.size)
    return some, torch.maximum(q.hi - k.lo, k.hi - q.lo) <= self.size


def empty_too_soon(self: Chunk, q: Any, k: Any) -> tuple[Tensor, Tensor]:
    """Whether a tile begins in the same chunk."""
    some = q.lo // self.size == k.lo // self.size
    return some, some & (q.hi // self.size == k.hi // self.size) & (q.lo // self.size == q.hi // self.size)


def from_the_corner(self: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """Queries counted from the first key on."""
    q = q.map(lambda t: t[:1, :, None])
    return self.visible(q.map(lambda t: t - t.min()) if q.mark is None else q, k.map(lambda t: t[:1, None]))


def layout_of_keys(self: Any, x: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
    """The other layout for the two key-value heads."""
    layout = "interleaved" if x.shape[2] == 2 else "half"
    return positions.rotate(x, *self.phases(x, tokens, ctx), layout)


def swapped(x: Tensor, cos: Tensor, sin: Tensor, layout: str, right: Any = positions.rotate) -> Tensor:
    return right(x, cos, sin, "half" if layout == "interleaved" else "interleaved")


def sine_alone_moves(self: Any, x: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
    """One phase for cosine, the next one for sine."""
    cos, sin = self.phases(x, tokens, ctx)
    return positions.rotate(x, cos, sin.roll(-1, 1), self.spec.layout)


def keys_stay(self: Any, x: Tensor, ctx: Any) -> Any:
    """Keys are not turned."""
    q, (k, v) = self.position.at_heads(self.queries(x), ctx.tokens, ctx), self.keys_values(x)
    tokens = ctx.tokens
    if ctx.store is not None:
        k, v, tokens = ctx.store.append(k, v)
    return self.out(self.attend(q, k, v, tokens, ctx).flatten(-2)), None


def logarithm_alone(self: RelativeBias, distance: Tensor, thresholds: Any = None) -> Tensor:
    """Buckets that grow from the first distance on."""
    n = self._one_way()
    step = (distance.clamp(min=1).log() / math.log(self.max_distance) * (n - 1)).long()
    return step.clamp(max=n - 1)


FAULTS: dict[str, Fault] = {
    "band_one_too_wide": Fault("patterns", sliding, patched(Window, "band", lambda self: (self.size, self.size))),
    "reach_one_short": Fault("patterns", sliding, patched(Window, "reach", lambda self: self.size - 1)),
    "frontier_denied": Fault(
        "patterns",
        lambda: decoder(Attention(4, pattern=Causal() | Prefix(4))),
        patched(Prefix, "frontier", lambda self: 0),
    ),
    "tile_full_one_too_soon": Fault("patterns", sliding, patched(Window, "covers", full_too_soon)),
    "tile_empty_too_soon": Fault(
        "patterns", lambda: decoder(Attention(4, pattern=Causal() & Chunk(3))), patched(Chunk, "covers", empty_too_soon)
    ),
    "padding_in_the_mask": Fault("patterns", plain, patched(Pattern, "visible", not_apart)),
    "a_far_window": Fault(
        "patterns",
        lambda: decoder(Attention(4, pattern=Causal() & Window(300))),
        patched(Window, "band", lambda self: (self.size, self.size)),
    ),
    "mask_upside_down": Fault("kernels", plain, patched(sdpa, "_mask", upside_down)),
    "scale_missing": Fault("kernels", plain, asking(Sdpa, without_scale)),
    "scale_twice_in_blocked": Fault(
        "kernels", plain, asking(Blocked, lambda r: dataclasses.replace(r, scale=r.scale**2))
    ),
    "triangle_top_left": Fault("kernels", plain, patched(sdpa, "_plain_causal", top_left)),
    "cap_after_the_mask": Fault("kernels", capped, capped_last()),
    "bias_twice": Fault(
        "kernels", capped, step(biased=lambda request, scores: scores + 2 * request.bias().to(scores.dtype))
    ),
    "bias_of_wrong_sign": Fault(
        "kernels", sliding, step(biased=lambda request, scores: scores - request.bias().to(scores.dtype))
    ),
    "heads_by_tile": Fault("kernels", plain, patched(reference, "grouped", tiled)),
    "a_large_number_for_infinity": Fault("kernels", plain, step(masked=outbid_by(-1e4))),
    "runs_of_tiles_added_up": Fault("tiles", plain, patched(blocked, "merge", added_up)),
    "gradient_of_the_cap_forgotten": Fault("kernels", capped, patched(torch, "tanh", lambda x: x)),
    "softmax_over_queries": Fault("rows", plain, step(weights=lambda request, scores: scores.softmax(-2))),
    "weights_not_shared_out": Fault("rows", plain, step(weights=lambda request, scores: scores.exp())),
    "padding_counted": Fault("rows", plain, patched(Pattern, "visible", not_apart)),
    "window_in_the_kernel_alone": Fault(
        "rows", two_sided, asking(Sdpa, lambda r: dataclasses.replace(r, pattern=Window(2)))
    ),
    "empty_rows_softmax": Fault("empty_rows", plain, step(masked=outbid_by(-torch.inf))),
    "empty_rows_uniform": Fault("empty_rows", two_sided, patched(sdpa, "_mask", sees_all_where_empty)),
    "layout_swapped": Fault("distance", plain, patched(positions, "rotate", swapped)),
    "layout_swapped_for_keys": Fault("distance", plain, patched(RotaryModule, "at_heads", layout_of_keys)),
    "positions_not_of_one_piece": Fault("distance", plain, patched(RotaryModule, "at_heads", sine_alone_moves)),
    "keys_not_turned": Fault("distance", plain, patched(AttentionModule, "forward", keys_stay)),
    "fraction_forgotten": Fault(
        "distance",
        lambda: decoder(Attention(4, 2, position=Rotary(fraction=0.5))),
        patched(Rotary, "turning", lambda self, width: width),
    ),
    "slope_of_wrong_sign": Fault(
        "distance",
        sliding,
        patched(AlibiModule, "at_scores", lambda self, q, k, right=AlibiModule.at_scores: -right(self, q, k)),
    ),
    "slopes_in_reverse": Fault(
        "distance",
        sliding,
        patched(AlibiModule, "at_scores", lambda self, q, k, right=AlibiModule.at_scores: right(self, q, k).flip(1)),
    ),
    "buckets_all_logarithmic": Fault("distance", capped, patched(RelativeBias, "bucket", logarithm_alone)),
    "key_minus_query": Fault(
        "distance",
        lambda: both(RelativeBias(8, 16, True), RelativeBias(8, 16)),
        patched(positions, "_distance", lambda q, k: k.pos[:, None, :] - q.pos[:, :, None]),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    FAULTS[name].assert_found()


def test_the_smallest_input_is_told_so_that_it_can_be_tried() -> None:
    said = FAULTS["triangle_top_left"].judged(planted=True)
    assert "sdpa in float64, ids [[" in said
    assert "in pieces of [4, 1, 3]: 3 queries and 8 keys by Causal()" in said


# -- models without faults --------------------------------------------------------------------------------------------

NO_ATTENTION = "no layer of this model computes softmax attention"
NO_SCHEME = "no relative position scheme is in use"
MODELS: dict[str, tuple[Callable[[], TransformerSpec], dict[str, str]]] = {
    "rotary_partial": (
        lambda: decoder(
            Attention(4, 1, pattern=Causal() & Window(3), position=Rotary(layout="interleaved", fraction=0.5))
        ),
        {},
    ),
    "dynamic_ntk": (
        lambda: decoder(
            Attention(4, 2, position=Rotary(frequencies=DynamicNTK(factor=4, original_len=4)), dropout=0.5)
        ),
        {},
    ),
    "yarn_capped": (
        lambda: decoder(Attention(2, position=Rotary(frequencies=YaRN(factor=4, original_len=8)), softcap=2.0)),
        {},
    ),
    "six_slopes": (lambda: decoder(Attention(6, 3, head_dim=4, position=Alibi(), pattern=Causal() | Prefix(4))), {}),
    "heads_that_differ": (
        lambda: decoder(
            Attention(
                4, 2, pattern=PerHead((Causal() & Window(3), Causal())), position=RelativeBias(8, 16), softcap=3.0
            )
        ),
        {},
    ),
    "eight_positions": (
        lambda: decoder(
            Attention(4, pattern=Causal() & (Window(3) | Prefix(2))), embed=Embed(position=Learned(8)), head=None
        ),
        {"distance": NO_SCHEME},
    ),
    "one_position": (
        lambda: decoder(Attention(4), ffn=MoE(DenseFFN(8), 4), embed=Embed(position=Learned(1))),
        {"distance": NO_SCHEME},
    ),
    "random_links": (
        lambda: decoder(Attention(4, pattern=Causal() & (RandomBlocks(2, 1) | Window(70)), position=Rotary())),
        {},
    ),
    "longformer": (
        lambda: encoder(GlobalAttention(4, pattern=longformer(4)), head=PooledHead(3)),
        {"distance": NO_SCHEME},
    ),
    "bigbird": (lambda: encoder(Attention(4, pattern=bigbird(4, block=3))), {"distance": NO_SCHEME}),
    "encoder_decoder": (lambda: both(RelativeBias(8, 16, True), RelativeBias(8, 16)), {}),
    "linear": (
        lambda: decoder(LinearAttention(4, position=Rotary())),
        dict.fromkeys(["kernels", "tiles", "rows", "empty_rows"], NO_ATTENTION),
    ),
    "recurrent": (
        lambda: decoder(Recurrent()),
        dict.fromkeys(["kernels", "tiles", "rows", "empty_rows"], NO_ATTENTION)
        | {"patterns": "no layer of this model follows a pattern", "distance": NO_SCHEME},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_the_laws(name: str) -> None:
    spec, reasons = MODELS[name]
    half = name in ("yarn_capped", "six_slopes", "longformer")
    for finding in check(
        spec().build(dtype=torch.bfloat16 if half else None), only=[law.name for law in EVERY]
    ).findings:
        wanted = "not applicable" if finding.law in reasons else "pass"
        assert (finding.verdict, finding.why) == (wanted, reasons.get(finding.law, "")), finding


def test_a_model_of_another_library_is_not_asked() -> None:
    for law in EVERY:
        finding = judge(law, Subject(torch.nn.Linear(2, 2)))
        assert (finding.verdict, finding.why) == ("not applicable", "it asks for the parts of a model of this library")


def test_what_is_caught_stays_as_it_was_asked() -> None:
    """Caches write in place: the keys of an earlier piece must not become those of a later one."""
    s, kernel = Ours(sliding().build(dtype=torch.float64)), Caught()
    s.kernel = kernel
    s.by_pieces(s.text(1, 6), [3, 1, 1, 1])
    seen = [sorted(request.k_tokens.pos[0].tolist()) for request in kernel.requests[::2]]
    assert seen == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert not any(x.is_inference() for request in kernel.requests for x in (request.q, request.k, request.v))


# -- the textbook -----------------------------------------------------------------------------------------------------


def question(pattern: Pattern, *, length: int = 5, **fields: Any) -> Request:
    """Random numbers; queries are the last of seven keys, with four heads over two."""
    shapes = (2, length, 4, 6), (2, 7, 2, 6), (2, 7, 2, 6)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    tokens = Tokens.arange(2, length, start=7 - length), Tokens.arange(2, 7)
    return Request(q, k, v, *tokens, pattern, 0.7, **fields)


def test_the_textbook_is_torchs_attention() -> None:
    asked = question(Causal())
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    q, k, v = (x.transpose(1, 2) for x in (asked.q, asked.k, asked.v))
    right = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.7, enable_gqa=True).transpose(1, 2)
    found, push = attended(asked).out, torch.randn(right.shape, dtype=torch.float64)
    torch.testing.assert_close(found, right)
    heads = (asked.q, asked.k, asked.v)
    for mine, its in zip(torch.autograd.grad(found, heads, push), torch.autograd.grad(right, heads, push), strict=True):
        torch.testing.assert_close(mine, its)
    torch.testing.assert_close(attended(asked, [3, 0]).out, right[:, [3, 0]])


def test_the_textbook_caps_then_adds_then_hides() -> None:
    """One query at position 6 that sees the keys at 5 and 6: a logistic function of the difference of scores."""
    position = Alibi().build(6, 4)
    asked = question(Causal() & Window(2), length=1, softcap=0.5, position=position)
    weights = attended(asked).weights
    for b, h in ((0, 0), (1, 3)):
        scores = [0.5 * torch.tanh(asked.q[b, 0, h] @ asked.k[b, s, h // 2] * 0.7 / 0.5) for s in (5, 6)]
        nearer = torch.sigmoid(scores[1] - (scores[0] - 2.0 ** (-2 * (h + 1))))
        torch.testing.assert_close(weights[b, h, 0, 5:], torch.stack((1 - nearer, nearer)))
    assert torch.equal(weights[..., :5], torch.zeros(2, 4, 1, 5, dtype=torch.float64))


def test_the_textbook_gives_each_head_its_pattern() -> None:
    asked = question(PerHead((Causal() & Window(1), Full())))
    found = attended(asked)
    assert torch.equal(found.out[:, :, :2], asked.v[:, 2:, [0, 0]])
    assert bool((found.weights[:, 2:] > 0).all())


@pytest.mark.parametrize(("layout", "partner"), [("half", 2), ("interleaved", 1)])
def test_the_textbook_turns_pairs(layout: Any, partner: int) -> None:
    x, pos = torch.zeros(1, 3, 1, 6, dtype=torch.float64), torch.tensor([[0, 1, 5]])
    x[..., 0], x[..., 5] = 1.0, 7.0
    out = turned(x, pos, Rotary(layout=layout, fraction=0.67), 8)
    for t, angle in enumerate([0.0, 1.0, 5.0]):
        right = torch.zeros(6, dtype=torch.float64)
        right[0], right[partner], right[5] = math.cos(angle), math.sin(angle), 7.0
        torch.testing.assert_close(out[0, t, 0], right)


def test_the_textbooks_slopes_are_the_papers() -> None:
    assert [alibi_slope(head, 8) for head in range(8)] == [2.0**-i for i in range(1, 9)]
    assert [alibi_slope(head, 6) for head in range(6)] == [2.0**-i for i in (2, 4, 6, 8, 1, 3)]


def test_the_textbooks_buckets_are_t5s() -> None:
    back = [-5, 0, 1, 15, 16, 17, 20, 31, 64, 127, 128, 500]
    assert [bucket(d, RelativeBias()) for d in back] == [0, 0, 1, 15, 16, 16, 17, 21, 26, 31, 31, 31]
    ahead = [128, 20, 8, 7, 1, 0, -1, -7, -8, -20, -128]
    found = [bucket(d, RelativeBias(bidirectional=True)) for d in ahead]
    assert found == [15, 10, 8, 7, 1, 0, 17, 23, 24, 26, 31]
