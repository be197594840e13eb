"""Small models that train within minutes on two cores, one of each family."""

from __future__ import annotations

from anyformer.block import Block
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention, CrossAttention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN, GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.norm import LayerNorm, RMSNorm
from anyformer.parts.pattern import Causal, Full
from anyformer.parts.position import Learned, RelativeBias, Rotary
from anyformer.spec import cycle

__all__ = ["PRESETS", "bert_mini", "gpt_mini", "t5_mini"]


def gpt_mini() -> TransformerSpec:
    """A decoder as they are built today: rotary positions, RMSNorm before each branch, SwiGLU."""
    block = Block.pre(Attention(num_heads=3, position=Rotary()), GatedFFN(hidden=288), norm=RMSNorm())
    embed = Embed(tied=False, scale="sqrt_dim")
    return TransformerSpec(dim=96, vocab_size=2048, embed=embed, decoder=cycle([block], 3), final_norm=RMSNorm())


def bert_mini() -> TransformerSpec:
    """An encoder as in 2018: learned positions and token types, a norm after each branch, GELU."""
    mixer = Attention(num_heads=4, pattern=Full(), bias=("q", "k", "v", "out"))
    block = Block.post(mixer, DenseFFN(hidden=512, activation="gelu"), norm=LayerNorm(eps=1e-12))
    embed = Embed(position=Learned(512), token_types=2, norm=LayerNorm(eps=1e-12))
    return TransformerSpec(dim=128, vocab_size=2048, embed=embed, encoder=cycle([block], 4), head=LMHead(bias=True))


def t5_mini() -> TransformerSpec:
    """An encoder-decoder as in 2019: relative biases shared by each stack, RMSNorm before each branch, no scaling."""
    here = Attention(num_heads=4, scale=1.0, pattern=Full(), position=RelativeBias(bidirectional=True))
    past = here.replace(pattern=Causal(), position=RelativeBias())
    cross = CrossAttention(num_heads=4, scale=1.0)
    ffn = DenseFFN(hidden=512, activation="relu", bias=False)
    return TransformerSpec(
        dim=128,
        vocab_size=2048,
        encoder=cycle([Block.pre(here, ffn, norm=RMSNorm())], 4),
        decoder=cycle([Block.pre(past, cross, ffn, norm=RMSNorm())], 4),
        final_norm=RMSNorm(),
        head=LMHead(scale=128**-0.5),
    )


PRESETS = {"gpt-mini": gpt_mini, "bert-mini": bert_mini, "t5-mini": t5_mini}
