"""Published decoders: each is what loading its checkpoint gives, and where there is none, what its paper says."""

from __future__ import annotations

from anyformer.block import Block
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN, GatedFFN
from anyformer.parts.head import LMHead
from anyformer.parts.moe import MoE
from anyformer.parts.norm import LayerNorm, RMSNorm
from anyformer.parts.op import FeedForward
from anyformer.parts.pattern import Causal, Window
from anyformer.parts.position import Learned, Rotary
from anyformer.spec import cycle

__all__ = ["PRESETS", "gemma_2_2b", "gpt2", "gpt3_175b", "gpt_neox_20b", "heads", "llama", "palm_540b", "qwen3"]


def gpt2(layers: int, dim: int, heads: int, *, positions: int = 1024, dropout: float = 0.1) -> TransformerSpec:
    """GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each branch, biases everywhere, GELU."""
    mixer = Attention(heads, bias=("q", "k", "v", "out"), dropout=dropout)
    block = Block.pre(mixer, DenseFFN(4 * dim, "gelu_tanh"), norm=LayerNorm(), dropout=dropout)
    return TransformerSpec(
        dim=dim,
        vocab_size=50257,
        embed=Embed(position=Learned(positions), dropout=dropout),
        decoder=cycle([block], layers),
        final_norm=LayerNorm(),
    )


def gpt3_175b() -> TransformerSpec:
    """GPT-3 (Brown et al. 2020, table 2.1): GPT-2's blocks.

    The paper alternates dense and locally banded attention, but does not say how wide the band is: all layers are dense
    here, which changes what they compute and no parameter. It speaks of no dropout, so there is none.
    """
    return gpt2(96, 12288, 96, positions=2048, dropout=0.0)


def gpt_neox_20b() -> TransformerSpec:
    """GPT-NeoX (Black et al. 2022): attention and feed-forward side by side, a quarter of each head turns."""
    mixer = Attention(64, position=Rotary(fraction=0.25), bias=("q", "k", "v", "out"))
    return TransformerSpec(
        dim=6144,
        vocab_size=50432,
        embed=Embed(tied=False),
        decoder=cycle([Block.parallel(mixer, DenseFFN(24576, "gelu_tanh"), norm=LayerNorm())], 44),
        final_norm=LayerNorm(),
    )


def palm_540b() -> TransformerSpec:
    """PaLM (Chowdhery et al. 2022, section 2): both branches behind one norm, one key-value head, no biases.

    Logits are divided by √dim (section 5), since the embeddings, which are the head's too, start with variance 1.
    """
    mixer, norm = Attention(48, 1, head_dim=256, position=Rotary()), LayerNorm(bias=False)
    return TransformerSpec(
        dim=18432,
        vocab_size=256000,
        decoder=cycle([Block.parallel(mixer, GatedFFN(4 * 18432), norm=norm, one_norm=True)], 118),
        final_norm=norm,
        head=LMHead(scale=18432**-0.5),
    )


def heads(count: int, kv_heads: int, base: float = 1e4) -> Attention:
    """Rotary heads 128 wide, as LLaMA's kin have them."""
    return Attention(count, kv_heads, head_dim=128, position=Rotary(base=base))


def llama(
    layers: int,
    dim: int,
    mixer: Attention,
    ffn: FeedForward,
    *,
    vocab_size: int = 32000,
    eps: float = 1e-5,
    tied: bool = False,
) -> TransformerSpec:
    """LLaMA (Touvron et al. 2023) and its kin: RMSNorm before each branch, no biases, SwiGLU."""
    norm = RMSNorm(eps=eps)
    return TransformerSpec(
        dim=dim,
        vocab_size=vocab_size,
        embed=Embed(tied=tied),
        decoder=cycle([Block.pre(mixer, ffn, norm=norm)], layers),
        final_norm=norm,
    )


def qwen3(layers: int, dim: int, count: int, hidden: int, *, tied: bool = False) -> TransformerSpec:
    """Qwen 3 (Yang et al. 2025): a norm on each head's query and key."""
    mixer = heads(count, 8, base=1e6).replace(qk_norm=RMSNorm())
    return llama(layers, dim, mixer, GatedFFN(hidden), vocab_size=151936, eps=1e-6, tied=tied)


def gemma_2_2b() -> TransformerSpec:
    """Gemma 2 (Gemma team 2024): norms around each branch, capped scores and logits, every second layer in a window."""
    wide = Attention(8, 4, head_dim=256, position=Rotary(), scale=256**-0.5, softcap=50.0)
    local = wide.replace(pattern=Causal() & Window(4096))
    ffn, norm = GatedFFN(9216, "gelu_tanh"), RMSNorm(offset=1.0)
    return TransformerSpec(
        dim=2304,
        vocab_size=256000,
        embed=Embed(scale="sqrt_dim"),
        decoder=cycle([Block.sandwich(mixer, ffn, norm=norm) for mixer in (local, wide)], 26),
        final_norm=norm,
        head=LMHead(softcap=30.0),
    )


PRESETS = {
    "gpt2": lambda: gpt2(12, 768, 12),
    "gpt2-medium": lambda: gpt2(24, 1024, 16),
    "gpt2-large": lambda: gpt2(36, 1280, 20),
    "gpt2-xl": lambda: gpt2(48, 1600, 25),
    "gpt3-175b": gpt3_175b,
    "gpt-neox-20b": gpt_neox_20b,
    "palm-540b": palm_540b,
    "llama-7b": lambda: llama(32, 4096, heads(32, 32), GatedFFN(11008), eps=1e-6),
    "llama-3-8b": lambda: llama(32, 4096, heads(32, 8, base=5e5), GatedFFN(14336), vocab_size=128256),
    "mistral-7b": lambda: llama(32, 4096, heads(32, 8).replace(pattern=Causal() & Window(4096)), GatedFFN(14336)),
    "mixtral-8x7b": lambda: llama(32, 4096, heads(32, 8, base=1e6), MoE(GatedFFN(14336), 8, balance=0.02)),
    "gemma-2-2b": gemma_2_2b,
    "qwen3-0.6b": lambda: qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-8b": lambda: qwen3(36, 4096, 32, 12288),
}
