"""Published encoders, with the head that they were trained with: logits for masked tokens, from the embedding's table.

Of BERT's two tasks in pretraining the second, whether a sentence follows another, is left out with its pooler.
"""

from __future__ import annotations

from anyformer.block import Block
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.embed import Embed
from anyformer.parts.ffn import DenseFFN
from anyformer.parts.global_attention import GlobalAttention
from anyformer.parts.head import MaskedLMHead
from anyformer.parts.norm import LayerNorm
from anyformer.parts.pattern import Full, Global, Window
from anyformer.parts.position import Learned
from anyformer.spec import cycle

__all__ = ["PRESETS", "bert", "longformer", "roberta"]


def bert(
    layers: int,
    dim: int,
    mixer: Attention,
    *,
    vocab_size: int = 30522,
    position: Learned = Learned(512),  # noqa: B008 (frozen data)
    token_types: int = 2,
    eps: float = 1e-12,
) -> TransformerSpec:
    """BERT (Devlin et al. 2019): learned positions and token types, a norm after each branch, biases, GELU."""
    norm = LayerNorm(eps=eps)
    mixer = mixer.replace(bias=("q", "k", "v", "out"), dropout=0.1)
    block = Block.post(mixer, DenseFFN(4 * dim, "gelu"), norm=norm, dropout=0.1)
    return TransformerSpec(
        dim=dim,
        vocab_size=vocab_size,
        embed=Embed(position=position, token_types=token_types, norm=norm, dropout=0.1),
        encoder=cycle([block], layers),
        head=MaskedLMHead(norm=norm),
    )


def roberta(layers: int, dim: int, mixer: Attention, *, positions: int = 512) -> TransformerSpec:
    """RoBERTa (Liu et al. 2019): BERT's shape; two rows of the position table are never used."""
    position = Learned(positions, offset=2)
    return bert(layers, dim, mixer, vocab_size=50265, position=position, token_types=1, eps=1e-5)


def longformer(layers: int, dim: int, heads: int, *, window: int = 512) -> TransformerSpec:
    """Longformer (Beltagy et al. 2020): RoBERTa within a window, half of it on either side; marked tokens see all."""
    mixer = GlobalAttention(heads, pattern=Window(window // 2 + 1) | Global())
    return roberta(layers, dim, mixer, positions=4096)


PRESETS = {
    "bert-base": lambda: bert(12, 768, Attention(12, pattern=Full())),
    "bert-large": lambda: bert(24, 1024, Attention(16, pattern=Full())),
    "roberta-base": lambda: roberta(12, 768, Attention(12, pattern=Full())),
    "longformer-base": lambda: longformer(12, 768, 12),
}
