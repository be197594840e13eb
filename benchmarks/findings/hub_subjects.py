"""Subjects of transformers: tiny random models of its families."""

from __future__ import annotations

import functools
from typing import Any

import transformers

from anyformer.check.hub import HubSubject

VOCAB = 99

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GEMMA2 = GROUPED | {"query_pre_attn_scalar": 12, "sliding_window": 4}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}, "max_position_embeddings": 8}
ROBERTA = SIZES | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
BART: dict[str, Any] = {"d_model": 32, "max_position_embeddings": 64, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 64}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}

GPT_OSS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_parameters": None}
LATENT = SIZES | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT |= {"first_k_dense_replace": 1}
XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
MODERN = SIZES | {"local_attention": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MODERN |= {"bos_token_id": 1, "eos_token_id": 2}

HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTForCausalLM", OPT),
    "xglm": ("XGLMForCausalLM", XGLM),
    "biogpt": ("BioGptForCausalLM", SIZES),
    "bloom": ("BloomForCausalLM", BLOOM),
    "falcon": ("FalconForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "phi": ("PhiForCausalLM", SIZES),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama, dynamic rope": ("LlamaForCausalLM", GROUPED | DYNAMIC),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | {"sliding_window": 4}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "bert": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
}


def hub(name: str, **more: Any) -> HubSubject:
    """The model of this name, with random weights; `more` goes to `HubSubject`."""
    architecture, config = HUB[name]
    kind = getattr(transformers, architecture)
    return HubSubject(kind(kind.config_class(vocab_size=VOCAB, **config)).eval(), name=f"transformers {name}", **more)


def told(name: str) -> HubSubject:
    """Asked with all that it can be told, and without the cache that is made by default."""
    subject = hub(name, positions=True)
    subject.name += ", told all"
    subject.given = {"use_cache": False} if subject.causal and not subject.sources else {}
    return subject


HUB_SUBJECTS = {f"transformers {name}": functools.partial(hub, name) for name in HUB}
HUB_SUBJECTS |= {f"transformers {name}, told all": functools.partial(told, name) for name in HUB}
