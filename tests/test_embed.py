"""What happens to looked-up vectors before the first block, and to hidden states after the last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import anyformer as af

TOKENS = af.Tokens.arange(2, 3)


def test_nothing_by_default() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(af.Embed().build(4)(x, TOKENS), x)


@pytest.mark.parametrize(("scale", "factor"), [("sqrt_dim", 4.0), (2.5, 2.5), (1.0, 1.0)])
def test_scale(scale: float | str, factor: float) -> None:
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(af.Embed(scale=scale).build(16)(x, TOKENS), x * factor)


def test_scale_comes_before_the_position() -> None:
    """Vaswani et al. 2017, section 3.4: embeddings are multiplied by √dim, then the position is added."""
    spec = af.Embed(scale="sqrt_dim", position=af.Learned(3))
    module = spec.build(4)
    torch.nn.init.normal_(module.position.table)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(module(x, TOKENS), 2 * x + module.position.table)


def test_bert_embedding_is_transformers() -> None:
    """Word + type + position, then LayerNorm: BERT's order, against its own module."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing transformers may warn about its own optional dependencies
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertEmbeddings
    config = BertConfig(
        vocab_size=9, hidden_size=8, max_position_embeddings=5, type_vocab_size=2, hidden_dropout_prob=0.0
    )
    theirs = BertEmbeddings(config)
    ours = af.Embed(position=af.Learned(5), token_types=2, norm=af.LayerNorm(eps=config.layer_norm_eps)).build(8)
    with torch.no_grad():
        ours.types.weight.copy_(theirs.token_type_embeddings.weight)
        ours.position.table.copy_(theirs.position_embeddings.weight)
    ids, types = torch.randint(0, 9, (2, 5)), torch.randint(0, 2, (2, 5))
    x = theirs.word_embeddings(ids)
    tokens = af.Tokens.arange(2, 5)
    torch.testing.assert_close(ours(x, tokens, types), theirs(ids, token_type_ids=types), rtol=0, atol=1e-6)
    zeros = theirs(ids, token_type_ids=torch.zeros_like(types))
    torch.testing.assert_close(ours(x, tokens), zeros, rtol=0, atol=1e-6)


def test_types_to_a_model_without_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token types were given, but this model's `embed.token_types` is 0"):
        af.Embed().build(4)(torch.zeros(2, 3, 4), TOKENS, torch.zeros(2, 3, dtype=torch.long))


def test_fault_21_dropout_only_in_training() -> None:
    module = af.Embed(dropout=0.5).build(16)
    x = torch.ones(2, 3, 16)
    assert set(module(x, TOKENS).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(module.eval()(x, TOKENS), x)


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "relative_bias"])
def test_positions_of_mixers_are_refused(scheme: str) -> None:
    with pytest.raises(af.SpecError, match=f"position '{scheme}' acts on .*: put it in the mixers"):
        af.Embed(position=scheme)


def test_dropout_below_1() -> None:
    with pytest.raises(af.SpecError, match=r"`dropout` must be below 1, but is 1\.0"):
        af.Embed(dropout=1.0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_is_its_formula(bias: bool, scale: float, softcap: float | None) -> None:
    """softcap · tanh((scale · W x + b) / softcap)."""
    head = af.LMHead(bias=bias, scale=scale, softcap=softcap).build(4, 7)
    torch.nn.init.normal_(head.weight, std=2.0)
    if bias:
        torch.nn.init.normal_(head.bias)
    x = torch.randn(2, 3, 4)
    logits = F.linear(x, head.weight) * scale + (head.bias if bias else 0.0)
    expected = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(head(x), expected, rtol=0, atol=1e-5)
    if softcap is not None:
        assert head(100 * x).abs().max() <= softcap


@pytest.mark.parametrize(
    "spec",
    [af.Embed(), af.Embed(token_types=3, norm=af.LayerNorm()), af.Embed(position=af.Learned(5, offset=2))],
    ids=repr,
)
def test_cost_counts_the_parameters(spec: af.Embed) -> None:
    assert spec.cost(8, 4).params == sum(p.numel() for p in spec.build(8).parameters())
