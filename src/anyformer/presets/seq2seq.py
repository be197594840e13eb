"""Published encoder-decoders; `layers` of each stack."""

from __future__ import annotations

from anyformer.block import Block
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention, CrossAttention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN, GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import LayerNorm, RMSNorm
from anyformer.parts.op import FeedForward
from anyformer.parts.pattern import Causal, Full
from anyformer.parts.position import Learned, RelativeBias, Sinusoidal
from anyformer.spec import cycle

__all__ = ["PRESETS", "bart", "t5", "t5_v1_1", "transformer_base"]


def transformer_base() -> TransformerSpec:
    """The Transformer of 2017 (Vaswani et al., table 3, base), for English to German.

    A norm after each branch, sinusoidal positions, one table for both languages and the output. As the paper writes it,
    attention has no biases; norms have the eps of its code.
    """
    mixer, cross, ffn, norm = Attention(8, pattern=Full()), CrossAttention(8), DenseFFN(2048), LayerNorm(eps=1e-6)
    past = mixer.replace(pattern=Causal())
    return TransformerSpec(
        dim=512,
        vocab_size=37000,
        embed=Embed(scale="sqrt_dim", position=Sinusoidal(), dropout=0.1),
        encoder=cycle([Block.post(mixer, ffn, norm=norm, dropout=0.1)], 6),
        decoder=cycle([Block.post(past, cross, ffn, norm=norm, dropout=0.1)], 6),
    )


def t5(layers: int, dim: int, heads: int, ffn: FeedForward, *, tied: bool = True) -> TransformerSpec:
    """T5 (Raffel et al. 2020): relative biases shared by each stack, RMSNorm before each branch, no biases."""
    here = Attention(
        heads, head_dim=64, scale=1.0, pattern=Full(), position=RelativeBias(bidirectional=True), dropout=0.1
    )
    past = here.replace(pattern=Causal(), position=RelativeBias())
    cross, norm = CrossAttention(heads, head_dim=64, scale=1.0, dropout=0.1), RMSNorm()
    return TransformerSpec(
        dim=dim,
        vocab_size=32128,
        embed=Embed(tied=tied, dropout=0.1),
        encoder=cycle([Block.pre(here, ffn, norm=norm, dropout=0.1)], layers),
        decoder=cycle([Block.pre(past, cross, ffn, norm=norm, dropout=0.1)], layers),
        final_norm=norm,
        head=LMHead(scale=dim**-0.5 if tied else 1.0),
    )


def t5_v1_1(layers: int, dim: int, heads: int, hidden: int) -> TransformerSpec:
    """T5 1.1: a gated feed-forward, and a head of its own."""
    return t5(layers, dim, heads, GatedFFN(hidden, "gelu_tanh", dropout=0.1), tied=False)


def bart(layers: int, dim: int, heads: int) -> TransformerSpec:
    """BART (Lewis et al. 2020): a norm after each branch, learned positions, biases everywhere, GELU."""
    cross = CrossAttention(heads, bias=("q", "k", "v", "out"), dropout=0.1)
    past = Attention(heads, bias=cross.bias, dropout=0.1)
    ffn, norm = DenseFFN(4 * dim, "gelu", dropout=0.1), LayerNorm()
    return TransformerSpec(
        dim=dim,
        vocab_size=50265,
        embed=Embed(position=Learned(1024, offset=2), norm=norm, dropout=0.1),
        encoder=cycle([Block.post(past.replace(pattern=Full()), ffn, norm=norm, dropout=0.1)], layers),
        decoder=cycle([Block.post(past, cross, ffn, norm=norm, dropout=0.1)], layers),
    )


PRESETS = {
    "transformer-base": transformer_base,
    "t5-small": lambda: t5(6, 512, 8, DenseFFN(2048, bias=False, dropout=0.1)),
    "t5-base": lambda: t5(12, 768, 12, DenseFFN(3072, bias=False, dropout=0.1)),
    "t5-large": lambda: t5(24, 1024, 16, DenseFFN(4096, bias=False, dropout=0.1)),
    "t5-v1.1-small": lambda: t5_v1_1(8, 512, 6, 1024),
    "t5-v1.1-base": lambda: t5_v1_1(12, 768, 12, 2048),
    "t5-v1.1-large": lambda: t5_v1_1(24, 1024, 16, 2816),
    "bart-base": lambda: bart(6, 768, 12),
    "bart-large": lambda: bart(12, 1024, 16),
}
