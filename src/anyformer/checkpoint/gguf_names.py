"""GGUF and the hub: what each calls a tensor and a setting, for the kinds of models that llama.cpp knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anyformer.parts.frequencies import Llama3, Plain

# fmt: off
__all__ = [
    "ARRAY",
    "BLOCKS",
    "COMMON",
    "FILE_TYPE",
    "FIXED",
    "FLOAT",
    "FREE",
    "GRANTED",
    "KEYS",
    "NAMES",
    "OPTIONAL",
    "PLAIN",
    "ROTARY",
    "SCALARS",
    "TEXT",
    "TURNED",
    "WINDOW",
    "WRITTEN",
    "gguf_package",
    "paired_heads",
    "rename",
    "rope_factors",
    "swap",
    "turned",
]
# fmt: on

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FILE_TYPE = {"F32": 0, "F16": 1, "BF16": 32}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT, TEXT, ARRAY = 6, 8, 9

# Tensors: the name in the file and at the hub, {} for the layer and the expert.
_LAYER, _MOE = "model.layers.{}.", "model.layers.{}.block_sparse_moe."
COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": _LAYER + "input_layernorm",
    "blk.{}.attn_q": _LAYER + "self_attn.q_proj",
    "blk.{}.attn_k": _LAYER + "self_attn.k_proj",
    "blk.{}.attn_v": _LAYER + "self_attn.v_proj",
    "blk.{}.attn_output": _LAYER + "self_attn.o_proj",
    "blk.{}.ffn_norm": _LAYER + "post_attention_layernorm",
    "blk.{}.ffn_gate": _LAYER + "mlp.gate_proj",
    "blk.{}.ffn_up": _LAYER + "mlp.up_proj",
    "blk.{}.ffn_down": _LAYER + "mlp.down_proj",
}
NAMES = {
    "llama": COMMON
    | {
        "blk.{}.ffn_gate_inp": _MOE + "gate",
        "blk.{}.ffn_gate.{}": _MOE + "experts.{}.w1",
        "blk.{}.ffn_down.{}": _MOE + "experts.{}.w2",
        "blk.{}.ffn_up.{}": _MOE + "experts.{}.w3",
    },
    "qwen3": COMMON
    | {"blk.{}.attn_q_norm": _LAYER + "self_attn.q_norm", "blk.{}.attn_k_norm": _LAYER + "self_attn.k_norm"},
    "gemma2": COMMON
    | {
        "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.{}.ffn_norm": _LAYER + "pre_feedforward_layernorm",
        "blk.{}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
    },
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.{}.attn_norm": "transformer.h.{}.ln_1",
        "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
        "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
        "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
        "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
        "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
    },
}
TURNED = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")  # GPT-2's hub maps are (in, out)

# Metadata: the key in the file, after "<architecture>.", and in config.json.
ROTARY = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
KEYS = {
    "llama": ROTARY | WINDOW | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "qwen3": ROTARY,
    "gemma2": ROTARY | WINDOW | {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")},
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
}
OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"} | {
    key for keys in KEYS.values() for key in keys if key.startswith("expert") or "soft" in key or "sliding" in key
}
FREE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}  # follow from the tensors, or change nothing
FIXED: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    "mistral": {"architectures": ["MistralForCausalLM"], "hidden_act": "silu"},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "sliding_window": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False}
    | {"use_sliding_window": False, "sliding_window": None},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "attention_bias": False}
    | {"hidden_activation": "gelu_pytorch_tanh"}
    | {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},  # of early files
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"},
}
GRANTED = ("hidden_act", "attention_bias", "use_sliding_window")  # of these, what the file takes for granted
WRITTEN = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen3": "qwen3"}


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf: pip install anyformer[gguf]") from None
    return gguf


def rope_factors(scaling: Mapping[str, Any], head_dim: int, base: float) -> Tensor:
    """By how much each pair of channels turns slower, (K/2,)."""
    low, high, original = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    scaled = Llama3(factor=scaling["factor"], low_freq_factor=low, high_freq_factor=high, original_len=original)
    plain, slow = (part.inverse(head_dim, base, 0) for part in (Plain(), scaled))
    return torch.tensor([a / b for a, b in zip(plain, slow, strict=True)], dtype=torch.float32)


def rename(names: Mapping[str, str], name: str) -> str | None:
    """`name` in the other language, numbers and ending kept, or None."""
    stem, _, ending = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", stem + ".")
    target = names.get(re.sub(r"(?<=\.)\d+(?=\.)", "{}", stem + ".")[:-1])
    return None if target is None or ending not in ("weight", "bias") else f"{target.format(*numbers)}.{ending}"


def paired_heads(architecture: str, config: Mapping[str, Any], name: str) -> int:
    """The heads of q or k where the file has the two channels that turn together side by side; 0 elsewhere."""
    if architecture != "llama" or not re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
        return 0
    heads = config["num_attention_heads"]
    return int(heads if ".attn_q." in name else config.get("num_key_value_heads") or heads)


def turned(weight: Tensor) -> Tensor:
    return weight.T


def swap(rows: Tensor, heads: int, outer: int, inner: int) -> Tensor:
    """Rows of each head from (outer, inner) to (inner, outer) order."""
    return rows.reshape(heads, outer, inner, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
