"""Tiny random models of `transformers`, one line a case, and the same question asked of them and of ours."""

from __future__ import annotations

import dataclasses
import inspect
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anyformer as af

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 99

GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = SIZES | {"num_key_value_heads": 2}
GEMMA2 = GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 4}
GEMMA2 |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
ROBERTA = SIZES | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
LONG = ROBERTA | {"attention_window": [4, 8], "type_vocab_size": 2}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
GATED = T5 | {"feed_forward_proj": "gated-gelu"}
BART = {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64}
BART |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in {"layers": 2, "ffn_dim": 48}.items()}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LABELS = {"num_labels": 3}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model of `transformers`, made when called."""

    architecture: str
    config: dict[str, Any]
    pooler: bool = True
    own_head: bool = False

    @property
    def kind(self) -> Any:
        return getattr(transformers, self.architecture)

    @property
    def model_type(self) -> str:
        return str(self.kind.config_class.model_type)

    def __call__(self) -> Any:
        config = self.kind.config_class(**self.config)
        config._attn_implementation = "eager"  # the textbook
        model = self.kind(config) if self.pooler else self.kind(config, add_pooling_layer=False)
        if self.own_head:  # T5 1.1 as it was published; `transformers` ties it whatever the config says
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
            model.config.tie_word_embeddings = False
        return model


def of(architecture: str, *sizes: dict[str, Any], pooler: bool = True, own_head: bool = False, **more: Any) -> Recipe:
    """The model that a config of these keys describes; later ones count."""
    config = {key: value for part in (*sizes, more) for key, value in part.items()}
    return Recipe(architecture, config, pooler, own_head)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", original_max_position_embeddings=16)

CASES: dict[str, Recipe] = {
    "gpt2": of("GPT2LMHeadModel", GPT2),
    "gpt2-untied": of("GPT2LMHeadModel", GPT2, tie_word_embeddings=False),
    "gpt2-relu": of("GPT2LMHeadModel", GPT2, n_inner=48, activation_function="relu"),
    "gpt2-exact-gelu": of("GPT2LMHeadModel", GPT2, activation_function="gelu"),
    "gpt2-silu": of("GPT2LMHeadModel", GPT2, activation_function="silu", layer_norm_epsilon=0.1),
    "gpt2-bare": of("GPT2Model", GPT2),
    "neox": of("GPTNeoXForCausalLM", SIZES),
    "neox-sequential": of("GPTNeoXForCausalLM", SIZES, use_parallel_residual=False),
    "neox-no-bias": of("GPTNeoXForCausalLM", SIZES, attention_bias=False),
    "neox-tied-all-turn": of("GPTNeoXForCausalLM", SIZES, tie_word_embeddings=True, rotary_pct=1.0),
    "neox-half-turn-base": of("GPTNeoXForCausalLM", SIZES, rotary_pct=0.5, rotary_emb_base=500),
    "neox-gelu-new": of("GPTNeoXForCausalLM", SIZES, hidden_act="gelu_new", layer_norm_eps=0.1),
    "neox-linear": of("GPTNeoXForCausalLM", SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "neox-bare": of("GPTNeoXModel", SIZES),
    "llama": of("LlamaForCausalLM", SIZES),
    "llama-grouped": of("LlamaForCausalLM", GROUPED),
    "llama-one-kv-head": of("LlamaForCausalLM", SIZES, num_key_value_heads=1),
    "llama-tied": of("LlamaForCausalLM", GROUPED, tie_word_embeddings=True),
    "llama-wide-heads": of("LlamaForCausalLM", GROUPED, head_dim=16),
    "llama-narrow-heads": of("LlamaForCausalLM", GROUPED, head_dim=4),
    "llama-attention-bias": of("LlamaForCausalLM", GROUPED, attention_bias=True),
    "llama-mlp-bias": of("LlamaForCausalLM", GROUPED, mlp_bias=True, rms_norm_eps=0.1),
    "llama-gelu": of("LlamaForCausalLM", SIZES, hidden_act="gelu"),
    "llama-linear": of("LlamaForCausalLM", GROUPED, rope("linear")),
    "llama-dynamic": of("LlamaForCausalLM", GROUPED, rope("dynamic"), max_position_embeddings=8),
    "llama-llama3": of("LlamaForCausalLM", GROUPED, LLAMA3),
    "llama-yarn": of("LlamaForCausalLM", GROUPED, YARN),
    "llama-yarn-all-keys": of(
        "LlamaForCausalLM",
        GROUPED,
        rope("yarn", original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5, attention_factor=1.5)
        | {"head_dim": 16},
    ),
    "llama-yarn-not-truncated": of(
        "LlamaForCausalLM", GROUPED, rope("yarn", original_max_position_embeddings=16, truncate=False)
    ),
    "llama-bare": of("LlamaModel", GROUPED),
    "mistral": of("MistralForCausalLM", GROUPED, sliding_window=4),
    "mistral-no-window": of("MistralForCausalLM", GROUPED, sliding_window=None, head_dim=16),
    "mistral-tied": of(
        "MistralForCausalLM", GROUPED, num_key_value_heads=4, sliding_window=4, tie_word_embeddings=True
    ),
    "mistral-bare": of("MistralModel", GROUPED, sliding_window=4),
    "mixtral": of("MixtralForCausalLM", GROUPED, num_local_experts=4),
    "mixtral-window-one": of(
        "MixtralForCausalLM", GROUPED, num_local_experts=3, num_experts_per_tok=1, sliding_window=4
    ),
    "mixtral-tied": of("MixtralForCausalLM", GROUPED, num_local_experts=4, tie_word_embeddings=True),
    "mixtral-bare": of("MixtralModel", GROUPED, num_local_experts=4),
    "gemma2": of("Gemma2ForCausalLM", GEMMA2),
    "gemma2-uncapped-bias": of(
        "Gemma2ForCausalLM",
        GEMMA2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    "gemma2-untied": of("Gemma2ForCausalLM", GEMMA2, tie_word_embeddings=False, num_key_value_heads=1),
    "gemma2-layers": of("Gemma2ForCausalLM", GEMMA2, layer_types=["full_attention", "sliding_attention"]),
    "gemma2-bare": of("Gemma2Model", GEMMA2),
    "qwen3": of("Qwen3ForCausalLM", GROUPED, head_dim=16),
    "qwen3-tied-bias": of(
        "Qwen3ForCausalLM", GROUPED, num_key_value_heads=4, head_dim=8, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-yarn": of("Qwen3ForCausalLM", GROUPED, YARN, head_dim=16),
    "qwen3-bare": of("Qwen3Model", GROUPED, head_dim=16),
    "bert": of("BertForMaskedLM", SIZES),
    "bert-untied-gelu-new": of(
        "BertForMaskedLM", SIZES, tie_word_embeddings=False, hidden_act="gelu_new", type_vocab_size=3
    ),
    "bert-relu": of("BertForMaskedLM", SIZES, hidden_act="relu", layer_norm_eps=0.1),
    "bert-bare": of("BertModel", SIZES),
    "bert-bare-no-pooler": of("BertModel", SIZES, pooler=False),
    "bert-classes": of("BertForSequenceClassification", SIZES, LABELS),
    "bert-token-classes": of("BertForTokenClassification", SIZES, LABELS),
    "roberta": of("RobertaForMaskedLM", ROBERTA),
    "roberta-untied-types": of("RobertaForMaskedLM", ROBERTA, tie_word_embeddings=False, type_vocab_size=2),
    "roberta-pad-0": of("RobertaForMaskedLM", ROBERTA, pad_token_id=0, layer_norm_eps=0.1),
    "roberta-bare": of("RobertaModel", ROBERTA),
    "roberta-bare-no-pooler": of("RobertaModel", ROBERTA, pooler=False),
    "roberta-classes": of("RobertaForSequenceClassification", ROBERTA, LABELS),
    "roberta-token-classes": of("RobertaForTokenClassification", ROBERTA, LABELS),
    "xlm-roberta": of("XLMRobertaForMaskedLM", ROBERTA),
    "camembert": of("CamembertForMaskedLM", ROBERTA),
    "longformer": of("LongformerForMaskedLM", LONG),
    "longformer-untied-equal-windows": of("LongformerForMaskedLM", LONG, attention_window=4, tie_word_embeddings=False),
    "longformer-bare": of("LongformerModel", LONG),
    "longformer-bare-no-pooler": of("LongformerModel", LONG, pooler=False),
    "longformer-classes": of("LongformerForSequenceClassification", LONG, LABELS),
    "longformer-token-classes": of("LongformerForTokenClassification", LONG, LABELS),
    "t5": of("T5ForConditionalGeneration", T5),
    "t5-unequal-depths": of("T5ForConditionalGeneration", T5, num_layers=1, num_decoder_layers=3, d_kv=12),
    "t5-gated-unscaled": of("T5ForConditionalGeneration", GATED, tie_word_embeddings=False),
    "t5-gated-untied": of("T5ForConditionalGeneration", GATED, tie_word_embeddings=False, own_head=True),
    "t5-gated-silu": of("T5ForConditionalGeneration", T5, feed_forward_proj="gated-silu", layer_norm_epsilon=0.1),
    "t5-gelu": of("T5ForConditionalGeneration", T5, feed_forward_proj="gelu"),
    "mt5": of("MT5ForConditionalGeneration", GATED),
    "bart": of("BartForConditionalGeneration", BART),
    "bart-scaled": of("BartForConditionalGeneration", BART, scale_embedding=True),
    "bart-unequal-stacks": of(
        "BartForConditionalGeneration", BART, encoder_layers=1, decoder_layers=3, decoder_attention_heads=2
    ),
    "bart-unequal-widths": of("BartForConditionalGeneration", BART, decoder_ffn_dim=64, activation_function="relu"),
    "bart-bare": of("BartModel", BART),
}
"""A new family is a line here, and every claim of `test_parity.py` is made for it."""

DECODERS = ("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "gemma2", "qwen3")
ENCODING = [name for name, recipe in CASES.items() if recipe.model_type not in DECODERS]
GENERATING = [
    name
    for name, recipe in CASES.items()
    if recipe.architecture.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration"))
]
TRAINED = [
    name
    for name, recipe in CASES.items()
    if "For" in recipe.architecture or recipe.architecture.endswith("LMHeadModel")
]


class Case(NamedTuple):
    """One model: theirs, the folder that they wrote, and ours out of it."""

    name: str
    theirs: Any
    folder: Path
    ours: af.Transformer

    @property
    def both_stacks(self) -> bool:
        return bool(self.ours.spec.encoder and self.ours.spec.decoder)

    @property
    def answers_tokens(self) -> bool:
        """Whether there is an answer a token, not one a text."""
        return not isinstance(self.ours.spec.head, af.PooledHead)

    @property
    def unread(self) -> set[str]:
        """The bias of logits under a second name: untied, `transformers` stores it and adds only the decoder's."""
        return set() if self.ours.spec.embed.tied else {"cls.predictions.bias", "lm_head.bias"}

    def reload(self, folder: Path) -> tuple[Any, set[str]]:
        """Theirs out of another folder, and the names that did not fit."""
        bare = "Model" in type(self.theirs).__name__ and getattr(self.theirs, "pooler", self) is None
        more = {"add_pooling_layer": False} if bare else {}
        kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
        model, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **more)
        return model.eval(), {name for names in info.values() for name in names} - self.unread


def make(name: str, folder: Path) -> Case:
    """The case of this name, written into `folder`; its weights depend on the name alone."""
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(name.encode()))
        theirs = CASES[name]().eval()
        randomize(theirs)
    theirs.save_pretrained(folder)
    return Case(name, theirs, folder, af.load(folder).model)


@torch.no_grad()
def randomize(model: Any) -> None:
    """Every parameter counts: gains and biases too, so that none can be ignored, and logits are of order 1.

    Gains have either sign, and decoders' maps are large: else they would say one token again and again.
    """
    size = 1.5 if decoder_only(model) else 1.0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, size * parameter.shape[-1] ** -0.5)
        elif name.endswith("weight"):
            parameter.normal_(-1.0 if "gemma" in model.config.model_type else 0.0)  # Gemma adds 1
        else:
            parameter.normal_(0.0, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("decoder.bias"):  # untied, transformers has the bias of logits twice, and adds this one
            model.get_parameter(name.replace("decoder.bias", "bias")).copy_(parameter)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for _ in range(3 if head is not None else 0):
        head.weight.div_(their_answer(model, text(model)).std().clamp(min=0.1))


@dataclasses.dataclass
class Text:
    """One batch for both: `keep` is True at real tokens, `target` is what an encoder-decoder's decoder reads."""

    ids: Tensor
    keep: Tensor
    types: Tensor | None
    mark: Tensor | None
    target: Tensor | None

    def tokens(self) -> af.Tokens:
        return dataclasses.replace(af.Tokens.padded(self.keep), mark=self.mark)


def text(model: Any, lengths: Sequence[int] = (13, 13, 13)) -> Text:
    """Random text for `transformers`' model, padded on the side on which its kind is."""
    config, batch, longest = model.config, len(lengths), max(lengths)
    random = torch.Generator().manual_seed(1)
    pad, types = getattr(config, "pad_token_id", None) or 0, getattr(config, "type_vocab_size", 0)
    place, length = torch.arange(longest), torch.tensor(lengths)[:, None]
    right = place < length
    keep = right.flip(1) if decoder_only(model) else right
    ids = torch.randint(5, VOCAB, (batch, longest), generator=random).where(keep, torch.tensor(pad))
    kinds = torch.randint(types, (batch, longest), generator=random) if types and types > 1 else None
    mark = (torch.rand(batch, longest, generator=random) < 0.2) & keep if hasattr(config, "attention_window") else None
    target = torch.randint(5, VOCAB, (batch, 6), generator=random) if config.is_encoder_decoder else None
    return Text(ids, keep, kinds, mark, target)


def decoder_only(model: Any) -> bool:
    return model.config.model_type in DECODERS


def their_inputs(model: Any, text: Text) -> dict[str, Any]:
    said: dict[str, Any] = {"input_ids": text.ids, "attention_mask": text.keep.long()}
    if decoder_only(model) and "position_ids" in inspect.signature(model.forward).parameters:
        said["position_ids"] = (text.keep.long().cumsum(1) - 1).clamp(min=0)
    if text.types is not None:
        said["token_type_ids"] = text.types
    if text.mark is not None:
        said["global_attention_mask"] = text.mark.long()
    if text.target is not None:
        said["decoder_input_ids"] = text.target
    return said


@torch.inference_mode()
def their_answer(model: Any, text: Text) -> Tensor:
    """Logits, or the pooled text, or hidden states: the first that there is."""
    out = model(**their_inputs(model, text))
    found = (getattr(out, name, None) for name in ("logits", "prediction_logits", "pooler_output", "last_hidden_state"))
    answer: Tensor = next(answer for answer in found if answer is not None)
    return answer


@torch.inference_mode()
def our_answer(model: af.Transformer, text: Text) -> Tensor:
    if text.target is not None:
        return model(text.target, source=text.ids, source_tokens=text.tokens())
    return model(text.ids, text.tokens(), types=text.types)


def real(case: Case, text: Text, answer: Tensor) -> Tensor:
    """The part of an answer that is about real tokens."""
    return answer[text.keep] if case.answers_tokens and text.target is None else answer
