"""Writing GGUF: a model in the hub's names, and the tokenizer beside it, as llama.cpp reads them."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.checkpoint.gguf_names import (
    FILE_TYPE,
    FIXED,
    GRANTED,
    KEYS,
    NAMES,
    OPTIONAL,
    PLAIN,
    WRITTEN,
    gguf_package,
    paired_heads,
    rename,
    rope_factors,
    swap,
)
from anyformer.files import replacing
from anyformer.text.build import CUTS

__all__ = ["tokenizer_metadata", "write_gguf"]


def write_gguf(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model for llama.cpp: the file is the old one or the whole new one.

    Each tensor is stored in its own dtype, but norms, biases and routers in float32. llama.cpp's LLaMA has no sliding
    window: beyond its window, a Mistral model sees more there than here.

    Args:
        config: as in the hub's `config.json`, of type llama, mistral, mixtral or qwen3.
        tensors: by hub name, float32, float16 or bfloat16; each is asked for twice, so they may be read when asked for.
        metadata: more keys, such as those of `tokenizer_metadata`. What follows from config and tensors is not taken
            from here, so that the metadata of a file that was read may be given as it is.

    Raises:
        ValueError: a model, a tensor, a dtype or a value that the file cannot express; `gguf` is not installed.
    """
    gguf = gguf_package()
    architecture = WRITTEN.get(config.get("model_type", ""))
    if architecture is None:
        raise ValueError(f"model_type is {config.get('model_type')!r}, but GGUF is written for {sorted(WRITTEN)} only.")
    keys, sources = _keys(architecture, config), _sources(architecture, config, tensors)
    infos = {name: _info(source()) for name, source in sources.items()}
    kinds = Counter(kind for kind, shape in infos.values() if len(shape) > 1)
    keys["general.file_type"] = FILE_TYPE[kinds.most_common(1)[0][0]]
    keys[f"{architecture}.vocab_size"] = infos["token_embd.weight"][1][0]
    ours = (f"{architecture}.", "split.", "general.architecture", "general.alignment", "general.quantization_version")
    given = {key: value for key, value in (metadata or {}).items() if not key.startswith(ours)}
    with replacing(path) as file, contextlib.closing(gguf.GGUFWriter(file.name, architecture)) as writer:
        for key, value in (_tokens(config) | given | keys).items():
            _add(gguf, writer, key, value)
        for name, (kind, shape) in infos.items():
            size = math.prod(shape) * PLAIN[kind].itemsize
            writer.add_tensor_info(name, shape, np.dtype(np.void), size, gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for source in sources.values():
            writer.write_tensor_data(source().contiguous().view(torch.uint8).numpy())


def _info(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return _kind("", tensor), tuple(tensor.shape)


def _kind(name: str, tensor: Tensor) -> str:
    kind = next((kind for kind, dtype in PLAIN.items() if dtype == tensor.dtype), None)
    if kind is None:
        raise ValueError(f"Tensor {name} is of {tensor.dtype}, but GGUF is written in {sorted(PLAIN)} only.")
    return kind


def _keys(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that `config` gives."""
    fixed = FIXED[config["model_type"]]
    for key in GRANTED:
        if config.get(key, fixed.get(key)) != fixed.get(key, config.get(key)):
            raise ValueError(f"{key} is {config[key]!r}, but in GGUF a {architecture} model has {fixed[key]!r}.")
    scaling = _scaling(config)
    full: dict[str, Any] = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": _head_dim(config)}
    full |= {key: value for key, value in config.items() if value is not None} | {"rope_theta": scaling["rope_theta"]}
    keys: dict[str, Any] = {}
    for key, hub in KEYS[architecture].items():
        if full.get(hub) is not None:
            keys[key] = float(full[hub]) if hub in ("rms_norm_eps", "rope_theta") else int(full[hub])
        elif key not in OPTIONAL:
            raise ValueError(f"The config has no {hub}, which GGUF needs.")
    keys["attention.value_length"] = keys["rope.dimension_count"] = int(full["head_dim"])
    if scaling["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"])}
    if scaling["rope_type"] in ("llama3", "yarn"):
        original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = int(original)
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base, type and numbers of the rotary positions, from either way of saying them."""
    old = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    rope = {key: value for key, value in (config.get("rope_parameters") or old).items() if value is not None}
    rope = {"rope_theta": 10000.0, "rope_type": rope.pop("type", "default")} | rope
    usual = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}
    usual |= {"low_freq_factor": 1, "high_freq_factor": 4}
    told = {"rope_theta", "rope_type", "factor", "original_max_position_embeddings"}
    odd = [key for key, value in rope.items() if key not in told and usual.get(key) != value]
    if odd or rope["rope_type"] not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(f"GGUF is written for default, linear, yarn and llama3 rotary positions, but this is {rope}.")
    return rope


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys about tokens that a config can give; of several end tokens the file has the first."""
    keys: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab"}
    for token in ("bos", "eos"):
        ids = config.get(f"{token}_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        keys |= {f"tokenizer.ggml.{token}_token_id": first} if isinstance(first, int) else {}
    return keys


def _sources(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """How to get each tensor of the file, in the order of `tensors`."""
    names = {hub: name for name, hub in NAMES[architecture].items()}
    groups: dict[str, dict[int, str]] = {}
    for hub in tensors:
        name = rename(names, hub)
        if name is None:
            raise ValueError(f"Tensor {hub} has no place in the GGUF file of a {config['model_type']} model.")
        expert = re.fullmatch(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight", name)
        groups.setdefault(f"{expert[1]}_exps.weight" if expert else name, {})[int(expert[2]) if expert else 0] = hub
    _check_whole(config, tensors, groups)
    sources: dict[str, Callable[[], Tensor]]
    sources = {name: partial(_stored, architecture, config, tensors, name, hubs) for name, hubs in groups.items()}
    scaling = _scaling(config)
    if scaling["rope_type"] == "llama3":
        sources["rope_freqs.weight"] = partial(rope_factors, scaling, _head_dim(config), scaling["rope_theta"])
    return sources


def _check_whole(config: Mapping[str, Any], tensors: Mapping[str, Tensor], groups: dict[str, dict[int, str]]) -> None:
    """Take a tied output out of `groups`. ValueError where tensors or experts are missing, or a tied one differs."""
    tied = config.get("tie_word_embeddings", False)
    for name in ("token_embd.weight", "output_norm.weight", *([] if tied else ["output.weight"])):
        if name not in groups:
            raise ValueError(
                f"The tensor for {name} is missing; GGUF holds whole models (tie_word_embeddings: {tied})."
            )
    output = groups.pop("output.weight", None) if tied else None
    if output and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight.")
    for name, hubs in groups.items():
        count = config["num_local_experts"] if "_exps." in name else 1
        if sorted(hubs) != list(range(count)):
            raise ValueError(f"{name} needs the experts 0..{count - 1}, but there are {sorted(hubs)}.")


def _stored(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, hubs: dict[int, str]
) -> Tensor:
    """A tensor as the file has it."""
    parts = [tensors[hubs[expert]].detach().cpu() for expert in sorted(hubs)]
    values = torch.stack(parts) if "_exps." in name else parts[0]
    heads = paired_heads(architecture, config, name)
    if heads and len(values) != heads * _head_dim(config):
        raise ValueError(f"Tensor {hubs[0]} has {len(values)} rows, not {heads} heads of {_head_dim(config)}.")
    values = swap(values, heads, 2, -1) if heads else values
    _kind(hubs[0], values)
    return values.float() if values.ndim == 1 or "ffn_gate_inp" in name else values


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        writer.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        small, signed = -(2**31) <= value < 2**32, value < 0
        kind = (kinds.INT32 if small else kinds.INT64) if signed else kinds.UINT32 if small else kinds.UINT64
        writer.add_key_value(key, value, kind)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kinds.STRING)
    elif isinstance(value, list | tuple):
        writer.add_array(key, value)  # an empty one is left out: the format cannot say of what it is empty
    else:
        raise ValueError(f"Key {key} is {value!r}, but GGUF holds numbers, texts, truth values and lists of them.")


# How text is cut before the merges: the names that llama.cpp has for it, by what `tokenizer.json` says.
_CUTS = {tuple(cuts): name for name, cuts in CUTS.items()}
_CUTS |= {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5


def tokenizer_metadata(
    tokenizer: Mapping[str, Any],
    *,
    bos: int | None = None,
    eos: int | None = None,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    pre: str | None = None,
) -> dict[str, Any]:
    """The keys `tokenizer.*` by which llama.cpp encodes and decodes as a byte-level BPE `tokenizer.json` does.

    Args:
        tokenizer: the content of `tokenizer.json`.
        bos, eos: ids that begin and end a text.
        vocab_size: rows of the model's token table, if more than the tokenizer has tokens.
        pre: llama.cpp's name of the way text is cut before the merges. It has no others than its own; to name one that
            cuts differently gives a file that runs, but may encode some texts into other tokens.

    Raises:
        ValueError: another kind of tokenizer, or one that cuts text in a way without a name in llama.cpp.
    """
    model = tokenizer["model"]
    kinds = [model.get("type"), (tokenizer.get("decoder") or {}).get("type")]
    if kinds != ["BPE", "ByteLevel"]:
        raise ValueError(f"The tokenizer has model and decoder {kinds}, but GGUF is written for byte-level BPE only.")
    tokens = {i: (token, _NORMAL) for token, i in model["vocab"].items()}
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = (added["content"], _CONTROL if added["special"] else _OWN)
    size = max(max(tokens) + 1, vocab_size or 0)
    table = [tokens.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(size)]
    begins, ends = _template(tokenizer.get("post_processor"))
    keys = {
        "model": "gpt2",
        "pre": pre or _cut(tokenizer),
        "tokens": [token for token, _ in table],
        "token_type": [kind for _, kind in table],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "add_bos_token": begins,
        "add_eos_token": ends,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return named | ({"tokenizer.chat_template": chat_template} if chat_template else {})


def _cut(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name of how text is cut."""
    cutter = tokenizer.get("pre_tokenizer") or {}
    steps = cutter.get("pretokenizers", [cutter])
    regular = [step for step in steps if step.get("type") != "ByteLevel" or step.get("use_regex", True)]
    said = tuple((step.get("pattern") or {}).get("Regex", step.get("type")) for step in regular)
    together = any(step.get("add_prefix_space") or step.get("individual_digits") is False for step in steps)
    if said not in _CUTS or together or tokenizer.get("normalizer") not in (None, {"type": "NFC"}):
        raise ValueError(
            f"llama.cpp has no name for the way this tokenizer cuts text ({said}); name the nearest as `pre`, "
            f"such as {sorted(_CUTS.values())}, if other tokens in some texts do no harm."
        )
    return _CUTS[said]


def _template(post: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Whether a text gets a token before it and after it."""
    posts = (post or {}).get("processors", [post or {}])
    pieces: list[dict[str, Any]] = next(
        (step["single"] for step in posts if step.get("type") == "TemplateProcessing"), [{}]
    )
    return "SpecialToken" in pieces[0], "SpecialToken" in pieces[-1]
