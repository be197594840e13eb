"""Presets against what was published: configs as the hub has them, transformers' models, papers. No weights made."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import nn

import anyformer as af
from anyformer.cli.commands import cli
from anyformer.families import FAMILIES, family_for
from anyformer.families.family import shortest
from anyformer.presets import PRESETS

PAGE = Path(__file__).parent.parent / "docs" / "presets.md"
NAMES = sorted(PRESETS)


def config(model_type: str, keys: str, *values: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(keys.split(), values, strict=True)), **more}


def llama(model_type: str, *values: Any, **more: Any) -> dict[str, Any]:
    keys = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size"
    return config(model_type, f"{keys} max_position_embeddings rms_norm_eps rope_theta", *values, **more)


GPT2 = "n_layer n_embd n_head n_positions"
BERT = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size max_position_embeddings"
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
T5 = "num_layers d_model d_kv num_heads d_ff"
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART = " ".join(
    f"{stack}_{key}" for stack in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")
)
DROPPED = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
NEOX = {"hidden_act": "gelu_fast", "rotary_pct": 0.25, "hidden_size": 6144, "tie_word_embeddings": False}
CAPPED = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "sliding_window": None}
QWEN = {"head_dim": 128, "tie_word_embeddings": False}

HUB: dict[str, dict[str, Any]] = {
    "gpt2": config("gpt2", GPT2, 12, 768, 12, 1024),
    "gpt2-medium": config("gpt2", GPT2, 24, 1024, 16, 1024),
    "gpt2-large": config("gpt2", GPT2, 36, 1280, 20, 1024),
    "gpt2-xl": config("gpt2", GPT2, 48, 1600, 25, 1024),
    "gpt3-175b": config("gpt2", GPT2, 96, 12288, 96, 2048, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "gpt-neox-20b": config("gpt_neox", BERT, 44, 6144, 64, 24576, 50432, 2048, **NEOX),
    "llama-7b": llama("llama", 32, 4096, 32, 32, 11008, 32000, 2048, 1e-6, 1e4),
    "llama-3-8b": llama("llama", 32, 4096, 32, 8, 14336, 128256, 8192, 1e-5, 5e5),
    "mistral-7b": llama("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 1e4, sliding_window=4096),
    "mixtral-8x7b": llama("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 1e6, **EXPERTS),
    "gemma-2-2b": llama("gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, 1e-6, 1e4, **CAPPED),
    "qwen3-0.6b": llama(
        "qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, 1e-6, 1e6, **QWEN | {"tie_word_embeddings": True}
    ),
    "qwen3-8b": llama("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, 1e-6, 1e6, **QWEN),
    "bert-base": config("bert", BERT, 12, 768, 12, 3072, 30522, 512),
    "bert-large": config("bert", BERT, 24, 1024, 16, 4096, 30522, 512),
    "roberta-base": config("roberta", BERT, 12, 768, 12, 3072, 50265, 514, **ROBERTA),
    "longformer-base": config(
        "longformer", BERT, 12, 768, 12, 3072, 50265, 4098, **ROBERTA, attention_window=[512] * 12
    ),
    "t5-small": config("t5", T5, 6, 512, 64, 8, 2048),
    "t5-base": config("t5", T5, 12, 768, 64, 12, 3072),
    "t5-large": config("t5", T5, 24, 1024, 64, 16, 4096),
    "t5-v1.1-small": config("t5", T5, 8, 512, 64, 6, 1024, **GATED),
    "t5-v1.1-base": config("t5", T5, 12, 768, 64, 12, 2048, **GATED),
    "t5-v1.1-large": config("t5", T5, 24, 1024, 64, 16, 2816, **GATED),
    "bart-base": config("bart", BART, 6, 12, 3072, 6, 12, 3072, d_model=768, **DROPPED),
    "bart-large": config("bart", BART, 12, 16, 4096, 12, 16, 4096, d_model=1024, **DROPPED),
}
"""What the configs on the hub say beyond transformers' defaults; GPT-3's is what one would write for its paper."""

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "llama-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "roberta-base": 124_697_433,
    "longformer-base": 148_711_257,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
}
"""Parameters of the published checkpoints, exactly; encoders with the head for masked tokens and without a pooler."""

PAPERS = {"gpt3-175b": (175.0e9, 0.003), "palm-540b": (540.35e9, 2e-5), "transformer-base": (65e6, 0.031)}
"""Parameters as the papers round them, and how far from that their shapes come out."""

HEADLESS = {
    "bert": ("bert-base", 109_482_240, transformers.BertModel),
    "roberta": ("roberta-base", 124_645_632, transformers.RobertaModel),
    "bert large": ("bert-large", 335_141_888, transformers.BertModel),
}


def params(name: str) -> int:
    return sum(cost.params for cost in af.preset(name).costs(1).values())


@functools.cache
def on_meta(name: str) -> nn.Module:
    return af.preset(name).build(device="meta", init=None)


def theirs(values: dict[str, Any], model: Any = None) -> nn.Module:
    """transformers' model of that config, without weights."""
    kinds = {
        "bert": "MaskedLM",
        "roberta": "MaskedLM",
        "longformer": "MaskedLM",
        "t5": "Seq2SeqLM",
        "bart": "Seq2SeqLM",
    }
    auto = getattr(transformers, "AutoModelFor" + kinds.get(values["model_type"], "CausalLM"))
    asked = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        made = model(asked) if model else auto.from_config(asked)
    if not values.get("tie_word_embeddings", True):  # T5's forgets it, until a checkpoint brings another table
        head = made.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return made


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_the_spec_counts_is_what_is_built(name: str) -> None:
    assert size(on_meta(name)) == params(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert params(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", HUB)
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert params(name) == size(theirs(HUB[name]))


@pytest.mark.parametrize("name", PAPERS)
def test_parameters_are_the_papers_up_to_their_rounding(name: str) -> None:
    said, near = PAPERS[name]
    assert abs(params(name) / said - 1) < near


def test_counts_where_papers_only_round() -> None:
    """Out of the shapes in the papers, term by term."""
    dim, layers, hidden = 18432, 118, 4 * 18432
    heads = 2 * dim * 48 * 256 + 2 * dim * 256
    assert params("palm-540b") == layers * (heads + 3 * dim * hidden + dim) + dim + 256_000 * dim == 540_356_474_880
    dim, layers = 12288, 96
    block = 12 * dim**2 + 13 * dim
    assert params("gpt3-175b") == layers * block + 2 * dim + (50257 + 2048) * dim == 174_604_259_328


def test_transformer_base_is_torchs_transformer_without_what_that_adds() -> None:
    """torch's has biases in its 18 attentions, and a norm behind each stack."""
    torchs = size(nn.Transformer(512, 8, 6, 6, 2048, batch_first=True, device="meta"))
    assert params("transformer-base") == torchs - 18 * 4 * 512 - 2 * 2 * 512 + 37_000 * 512 == 63_045_632


@pytest.mark.parametrize(("name", "count", "model"), HEADLESS.values(), ids=HEADLESS)
def test_encoders_with_a_pooler_in_place_of_their_head(name: str, count: int, model: Any) -> None:
    """The other count that is often named."""
    pooled = af.preset(name).replace(head=af.PooledHead()).build(device="meta", init=None)
    assert size(pooled) == count == size(theirs(HUB[name], model))


# -- the same model as the checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUB)
def test_the_published_config_is_read_as_the_preset(name: str) -> None:
    family = FAMILIES[HUB[name]["model_type"]]
    full = transformers.AutoConfig.for_model(**HUB[name]).to_dict() | {"architectures": None}
    read, _ = family.read({**full, **HUB[name]}, ["lm_head.weight"])
    assert af.diff(read, shortest(af.preset(name))) == []


@pytest.mark.parametrize("name", HUB)
def test_a_family_writes_the_preset_and_reads_it_back(name: str) -> None:
    kind = HUB[name]["model_type"]
    parameters = [name for name, _ in on_meta(name).named_parameters()]
    found, values = family_for(af.preset(name), parameters, first=kind)
    assert found == kind
    written = transformers.AutoConfig.for_model(**values)
    published = transformers.AutoConfig.for_model(**HUB[name])
    assert written.num_hidden_layers == published.num_hidden_layers
    assert written.hidden_size == published.hidden_size


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(HUB) - {"gpt-mini", "bert-mini", "t5-mini"}))
def test_what_the_hub_has_no_family_for_is_said(name: str) -> None:
    with pytest.raises(ValueError, match="no family of the hub"):
        family_for(af.preset(name), [name for name, _ in on_meta(name).named_parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_survives_yaml(name: str) -> None:
    assert af.TransformerSpec.from_yaml(af.preset(name).to_yaml()) == af.preset(name)


@pytest.mark.parametrize("name", ["transformer-base", "gpt3-175b", "palm-540b", "longformer-base", "qwen3-0.6b"])
def test_show_shows_it(name: str) -> None:
    done = CliRunner().invoke(cli, ["show", name])
    assert done.exit_code == 0, done.output
    assert "parameters" in done.output


# -- the page ---------------------------------------------------------------------------------------------------------


def row(name: str) -> str:
    """What the page must say of a preset, up to its context."""
    spec = af.preset(name)
    stacks = spec.stacks()
    mixer = next(iter(stacks.values()))[0].mixer
    assert isinstance(mixer, af.Attention)
    layers = " + ".join(str(len(blocks)) for blocks in stacks.values())
    cells = ["-".join(stacks), f"{params(name):,}", f"{layers} × {spec.dim}", f"{mixer.num_heads} / {mixer.kv_heads}"]
    return f"| `{name}` | {' | '.join(cells)} | "


def context(name: str) -> int:
    """As published: what the position table has, or the config names."""
    values = HUB.get(name, {})
    return af.preset(name).max_len() or values.get("max_position_embeddings") or 0


def test_the_page_lists_every_preset_as_it_is() -> None:
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `(\S+)` \|.*$", PAGE.read_text(encoding="utf-8"), re.M)}
    assert set(rows) == set(PRESETS)
    for name, line in rows.items():
        assert line.startswith(row(name)), f"docs/presets.md should begin this row with:\n{row(name)}"
        if context(name):
            assert line.removeprefix(row(name)).startswith(f"{context(name):,} |"), f"{name}: {context(name):,}"
