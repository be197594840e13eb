"""Published families against `transformers`, by tiny random models: what is loaded computes, and is written, the same.

One table of cases (`parity.CASES`); every claim is made for each.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    BART,
    CASES,
    ENCODING,
    GENERATING,
    GROUPED,
    SIZES,
    TRAINED,
    Case,
    Text,
    make,
    of,
    our_answer,
    randomize,
    real,
    text,
    their_answer,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import anyformer as af
from anyformer.checkpoint.hub import load_hub, read_hub_spec, save_hub
from anyformer.families import FAMILIES
from anyformer.families.family import ACTIVATIONS as NAMES
from anyformer.parts.ffn import ACTIVATIONS
from anyformer.train.loss import cross_entropy

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CLOSE = 1e-5
"""Absolute, in float32, for answers of order 1."""
NEW = 20
RAGGED = (13, 7, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each case is made once."""
    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def case(request: pytest.FixtureRequest, made: Callable[[str], Case]) -> Case:
    return made(request.param)


def cases(names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True)


# ----------------------------------------------------------------------------------------------------------- arithmetic


@cases()
@pytest.mark.parametrize("lengths", [(13, 13, 13), RAGGED], ids=["full", "padded"])
def test_answers_equal_theirs(case: Case, lengths: tuple[int, ...]) -> None:
    """Decoders padded on the left, encoders on the right; Longformer with marks, past its windows, not a multiple."""
    batch = text(case.theirs, lengths)
    theirs, ours = (real(case, batch, answer) for answer in answers(case, batch))
    assert 0.1 < theirs.std() < 3  # of order 1, so that the tolerance means something
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)


def answers(case: Case, batch: Text) -> tuple[Tensor, Tensor]:
    return their_answer(case.theirs, batch), our_answer(case.ours, batch)


@cases(ENCODING)
@pytest.mark.parametrize("lengths", [(13, 13, 13), RAGGED], ids=["full", "padded"])
def test_hidden_states_of_encoders_equal_theirs(case: Case, lengths: tuple[int, ...]) -> None:
    batch = text(case.theirs, lengths)
    inputs: dict[str, Any] = {"token_type_ids": batch.types} if batch.types is not None else {}
    inputs |= {"global_attention_mask": batch.mark.long()} if batch.mark is not None else {}
    base = case.theirs.get_encoder() if case.both_stacks else case.theirs.base_model
    with torch.inference_mode():
        theirs = base(batch.ids, attention_mask=batch.keep.long(), **inputs).last_hidden_state
        ours = case.ours.encode(batch.ids, batch.tokens(), types=batch.types).x
    torch.testing.assert_close(ours[batch.keep], theirs[batch.keep], atol=CLOSE, rtol=0)


@cases(GENERATING)
def test_greedy_tokens_equal_theirs(case: Case) -> None:
    """Two rows of different lengths, ours through the cache; windows (4) are left far behind."""
    theirs, batch = copy.deepcopy(case.theirs), text(case.theirs, (13, 9))
    theirs.generation_config.update(eos_token_id=None, forced_eos_token_id=None, pad_token_id=0)
    if case.both_stacks:
        start = theirs.config.decoder_start_token_id
        ours = af.generate(case.ours, [[start]] * 2, max_new_tokens=NEW, source=batch.ids, source_tokens=batch.tokens())
    else:
        warm_up(theirs, 13 + NEW)
        prompts = [row[keep].tolist() for row, keep in zip(batch.ids, batch.keep, strict=True)]
        ours = af.generate(case.ours, prompts, max_new_tokens=NEW)
    made = theirs.generate(
        batch.ids,
        attention_mask=batch.keep.long(),
        do_sample=False,
        max_new_tokens=NEW,
        use_cache=False,  # their cache has as many layers as the encoder, which is wrong where depths differ
    )
    wanted = made[:, -NEW:].tolist()
    assert ours.ids == wanted
    assert len({token for row in wanted for token in row}) > 1  # something was said


def warm_up(model: Any, length: int) -> None:
    """A dynamic schedule plans for the longest text seen so far, ours for the cache's capacity: let both be equal."""
    with torch.inference_mode():
        model(torch.ones(1, length, dtype=torch.long))


@cases(TRAINED)
def test_loss_of_labels_equals_theirs(case: Case) -> None:
    """Next tokens shifted, masked tokens and classes not; decoders of two stacks read the labels one place later."""
    batch, config = text(case.theirs), case.theirs.config
    answer = our_answer(case.ours, batch)
    labels = torch.randint(answer.shape[-1], answer.shape[:-1])
    if case.answers_tokens:
        labels[0, 1], labels[1, -2:] = -100, -100
    theirs = their_loss(case, batch, labels)
    if batch.target is not None:
        batch.target = decoder_inputs(labels, config.decoder_start_token_id, config.pad_token_id)
        answer = our_answer(case.ours, batch)
    elif case.ours.spec.decoder:
        answer, labels = answer[:, :-1], labels[:, 1:]
    ours = cross_entropy(answer.flatten(0, -2), labels.flatten()) / (labels != -100).sum()
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)


@torch.inference_mode()
def their_loss(case: Case, batch: Text, labels: Tensor) -> Tensor:
    inputs: dict[str, Any] = {"token_type_ids": batch.types} if batch.types is not None else {}
    inputs |= {"global_attention_mask": batch.mark.long()} if batch.mark is not None else {}
    loss: Tensor = case.theirs(input_ids=batch.ids, labels=labels, **inputs).loss
    return loss


def decoder_inputs(labels: Tensor, start: int, pad: int) -> Tensor:
    """What a decoder reads to say `labels`: the start token, then all labels but the last; -100 is no token."""
    first, rest = torch.full_like(labels[:, :1], start), labels[:, :-1]
    return torch.cat((first, rest.masked_fill(rest == -100, pad)), 1)


def test_decoder_inputs_from_labels_are_those_that_published_models_were_trained_with() -> None:
    """Fault 53."""
    labels = torch.tensor([[8, 9, 2, -100, -100]])
    shifted = transformers.models.bart.modeling_bart.shift_tokens_right(labels, 1, 2)
    assert decoder_inputs(labels, start=2, pad=1).tolist() == shifted.tolist() == [[2, 8, 9, 2, 1]]  # BART
    t5 = CASES["t5"]()
    assert decoder_inputs(labels, start=0, pad=0).tolist() == t5._shift_right(labels).tolist() == [[0, 8, 9, 2, 0]]


# ---------------------------------------------------------------------------------------------------------------- files


WRITTEN_OUT = {
    "classifier_dropout": "null is the dropout of hidden states",
    "head_dim": "null is hidden_size / num_attention_heads",
    "n_inner": "null is 4 × n_embd",
    "rope_theta": "GPT-NeoX's stands in rope_parameters alone; here beside them too, for readers of older configs",
}
"""What theirs may leave open, or out, and ours says."""


@cases()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_saved_tensors_equal_theirs_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    there, back = case.folder, tmp_path / "back"
    if dtype != torch.float32:
        there = tmp_path / "there"
        copy.deepcopy(case.theirs).to(dtype).save_pretrained(there)
    model = load_hub(there)
    assert model.dtype == dtype
    save_hub(model, back)
    theirs, ours = load_file(there / "model.safetensors"), load_file(back / "model.safetensors")
    today = FAMILIES[model.origin["model_type"]].today(theirs)  # a bare model's names, with what headed ones begin with
    theirs = {new: theirs[old] for new, old in today.items() if old not in case.unread}
    assert ours.keys() == theirs.keys()
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []


@cases()
def test_transformers_reads_what_we_save_as_the_same_model(case: Case, tmp_path: Path) -> None:
    save_hub(case.ours, tmp_path)
    model, astray = case.reload(tmp_path)
    assert type(model) is type(case.theirs)
    assert astray == set()
    batch = text(case.theirs, RAGGED)
    assert torch.equal(their_answer(model, batch), their_answer(case.theirs, batch))


@cases()
def test_transformers_reads_a_model_that_never_was_theirs(case: Case, tmp_path: Path) -> None:
    """The spec alone says all: nothing hangs on what was kept of a config that was loaded."""
    fresh = copy.copy(case.ours)
    fresh.origin = {}
    save_hub(fresh, tmp_path)
    model, astray = case.reload(tmp_path)
    assert astray == set()
    batch = text(case.theirs, RAGGED)
    assert torch.equal(their_answer(model, batch), their_answer(case.theirs, batch))


@cases()
def test_saved_config_means_the_same(case: Case, tmp_path: Path) -> None:
    save_hub(case.ours, tmp_path)
    theirs, ours = (transformers.AutoConfig.from_pretrained(folder) for folder in (case.folder, tmp_path))
    assert type(theirs) is type(ours)
    theirs, ours = theirs.to_dict(), ours.to_dict() | {"_name_or_path": theirs.name_or_path}
    differ = {key: (theirs.get(key), ours.get(key)) for key in theirs | ours if theirs.get(key) != ours.get(key)}
    assert {key: pair for key, pair in differ.items() if key not in WRITTEN_OUT or pair[0] is not None} == {}
    assert read_hub_spec(tmp_path) == case.ours.spec


def test_every_family_has_a_case() -> None:
    assert {recipe.model_type for recipe in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_keys_that_a_config_leaves_out_mean_what_they_mean_to_transformers(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    full = json.loads(json.dumps(config.to_dict())) | {"architectures": None}
    needed = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "d_model", "d_kv"}
    needed |= {
        "intermediate_size",
        "d_ff",
        "num_layers",
        "num_heads",
        "n_embd",
        "n_layer",
        "n_head",
        "num_local_experts",
    }
    needed |= {
        f"{stack}_{name}" for stack in ("encoder", "decoder") for name in ("layers", "ffn_dim", "attention_heads")
    }
    told, short = (FAMILIES[kind].read(values)[0] for values in (full, {k: v for k, v in full.items() if k in needed}))
    assert [change for change in af.diff(told, short) if not change[0].endswith("dropout")] == []


OLDER: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "gpt2": lambda t: {
        **{name.removeprefix("transformer."): tensor for name, tensor in t.items()},
        **{f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)},
        **{f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)},
    },
    "neox": lambda t: {
        **t,
        **{f"gpt_neox.layers.{i}.attention.bias": torch.ones(1, 1, 64, 64).tril().bool() for i in range(2)},
        **{f"gpt_neox.layers.{i}.attention.masked_bias": torch.tensor(-1e9) for i in range(2)},
        **{f"gpt_neox.layers.{i}.attention.rotary_emb.inv_freq": torch.ones(1) for i in range(2)},
    },
    "llama": lambda t: t | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)},
    "bert": lambda t: {
        **{
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in t.items()
        },
        "bert.embeddings.position_ids": torch.arange(64)[None],
        "bert.pooler.dense.weight": torch.ones(32, 32),
        "bert.pooler.dense.bias": torch.ones(32),
        "cls.seq_relationship.weight": torch.ones(2, 32),
        "cls.seq_relationship.bias": torch.ones(2),
        "cls.predictions.decoder.weight": t["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": t["cls.predictions.bias"],
    },
    "roberta": lambda t: t | {"roberta.embeddings.position_ids": torch.arange(66)[None]},
    "t5": lambda t: {
        **t,
        **{f"{stack}.embed_tokens.weight": t["shared.weight"] for stack in ("encoder", "decoder")},
        "lm_head.weight": t["shared.weight"],
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(8, 4),
    },
    "bart": lambda t: {
        **t,
        **{f"model.{stack}.embed_tokens.weight": t["model.shared.weight"] for stack in ("encoder", "decoder")},
        "lm_head.weight": t["model.shared.weight"],
    },
}
"""What files of earlier years have besides, or under another name."""


@pytest.mark.parametrize("name", OLDER)
def test_older_files_are_read_and_written_as_todays(name: str, tmp_path: Path) -> None:
    case = make(name, tmp_path / "there")
    modern = load_file(case.folder / "model.safetensors")
    change_tensors(case.folder, OLDER[name])
    model = af.load(case.folder).model
    batch = text(case.theirs)
    assert torch.equal(our_answer(model, batch), our_answer(case.ours, batch))
    save_hub(model, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == modern.keys()
    assert all(torch.equal(back[name], modern[name]) for name in modern)


def test_bert_as_pretrained_gives_its_logits_without_the_next_sentence(tmp_path: Path) -> None:
    theirs = of("BertForPreTraining", SIZES)()
    randomize(theirs.eval())
    theirs.save_pretrained(tmp_path)
    batch = text(theirs)
    ours = our_answer(af.load(tmp_path).model, batch)
    torch.testing.assert_close(ours, their_answer(theirs, batch), atol=CLOSE, rtol=0)


def test_untied_bart_is_refused_since_transformers_then_has_three_tables(tmp_path: Path) -> None:
    of("BartForConditionalGeneration", BART, tie_word_embeddings=False)().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'tie_word_embeddings' must be True, but is False"):
        af.load(tmp_path)


def test_a_rotary_scaling_without_its_factor_is_refused(tmp_path: Path) -> None:
    change_config(llama(tmp_path), rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rotary scaling 'yarn' needs a 'factor'"):
        af.load(tmp_path)


# --------------------------------------------------------------------------------------------------------------- faults


def llama(folder: Path, **more: Any) -> Path:
    """A folder with a tiny LLaMA."""
    model = of("LlamaForCausalLM", GROUPED, more)()
    randomize(model.eval())
    model.save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


@torch.inference_mode()
def logits(model: af.Transformer, length: int = 13) -> Tensor:
    return model(torch.randint(5, 99, (2, length), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_layouts_differ_by_the_order_of_rows(tmp_path: Path, fraction: float) -> None:
    """Fault 29: channels i and i + half, or 2i and 2i + 1. With the rows of query and key in the other order, equal."""
    name, width = ("llama", 8) if fraction == 1.0 else ("neox-half-turn-base", 4)
    half = make(name, tmp_path).ours
    layout = half.spec.replace("decoder.*.mixer.position.layout", "interleaved").build()
    layout.load_state_dict(half.state_dict())
    assert (logits(layout) - logits(half)).abs().max() > 0.1
    order = torch.arange(8)
    order[:width] = torch.arange(width).view(2, -1).t().flatten()
    for key, tensor in layout.state_dict().items():
        if ".mixer.op.q." in key or ".mixer.op.k." in key:
            tensor.copy_(tensor.unflatten(0, (4, 8))[:, order].flatten(0, 1))
    torch.testing.assert_close(logits(layout), logits(half), atol=CLOSE, rtol=0)


def test_a_head_width_that_is_not_dim_over_heads_survives_a_round_trip(tmp_path: Path) -> None:
    """Fault 34: the shapes follow the config, and the config comes back."""
    attention = af.Attention(num_heads=4, num_kv_heads=2, head_dim=4, position=af.Rotary())
    block = af.Block.pre(attention, af.GatedFFN(hidden=8), norm=af.RMSNorm())
    spec = af.TransformerSpec(
        dim=12, vocab_size=9, embed=af.Embed(tied=False), decoder=af.cycle([block], 1), final_norm=af.RMSNorm()
    )
    save_hub(spec.build(), tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    found = [shapes[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkvo"]
    assert found == [(16, 12), (8, 12), (8, 12), (12, 16)]
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 4
    assert read_hub_spec(tmp_path) == spec
    assert load_hub(tmp_path).decoder.layers[0].mixer.op.scale == 0.5


def test_a_tensor_of_another_shape_is_refused_by_its_name_and_both_shapes(tmp_path: Path) -> None:
    """Fault 34."""
    change_config(llama(tmp_path), head_dim=16)
    name = r"model\.layers\.0\.self_attn\.q_proj\.weight"
    with pytest.raises(ValueError, match=rf"{name} must be \(64, 32\) by the config, but is \(32, 32\)"):
        af.load(tmp_path)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_as_many_heads_with_copied_weights(tmp_path: Path, kv_heads: int) -> None:
    """Fault 35: key-value head 0 serves the first query heads, not every second."""
    grouped, copied, tiled = (
        llama(tmp_path / name, num_key_value_heads=kv_heads) for name in ("grouped", "copied", "tiled")
    )
    source = load_file(grouped / "model.safetensors")
    copies = 4 // kv_heads

    def spread(order: Tensor) -> dict[str, Tensor]:
        return {
            name: tensor.unflatten(0, (kv_heads, 8))[order].flatten(0, 1)
            if "k_proj" in name or "v_proj" in name
            else tensor
            for name, tensor in source.items()
        }

    for folder, order in (
        (copied, torch.arange(kv_heads).repeat_interleave(copies)),
        (tiled, torch.arange(kv_heads).repeat(copies)),
    ):
        change_config(folder, num_key_value_heads=4)
        change_tensors(folder, lambda _, order=order: spread(order))
    wanted = logits(af.load(grouped).model)
    torch.testing.assert_close(logits(af.load(copied).model), wanted, atol=CLOSE, rtol=0)
    assert kv_heads == 1 or (logits(af.load(tiled).model) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_activation_is_the_one_that_its_name_says(name: str) -> None:
    """Fault 37: exact and tanh GELU are furthest apart, by 4.7e-4, near ±2.7."""
    x = torch.cat((torch.tensor([-2.7, -2.0, 1.0, 2.0, 2.7]), torch.linspace(-5, 5, 1001))).double()
    theirs = transformers.activations.ACT2FN[name](x)
    torch.testing.assert_close(ACTIVATIONS[NAMES[name]](x), theirs, atol=1e-6, rtol=0)


def test_gelu_values_tell_exact_from_tanh() -> None:
    """Fault 37, by its numbers."""
    x = torch.tensor([-2.7, -2.0, 1.0, 2.0], dtype=torch.float64)
    exact = torch.tensor([-0.00936083, -0.04550026, 0.84134475, 1.95449974], dtype=torch.float64)
    tanh = torch.tensor([-0.00888759, -0.04540231, 0.84119199, 1.95459769], dtype=torch.float64)
    for name, wanted in {"gelu": exact, "gelu_new": tanh, "gelu_pytorch_tanh": tanh, "gelu_fast": tanh}.items():
        torch.testing.assert_close(
            ACTIVATIONS[NAMES[name]](x), wanted, atol=1e-8 if name != "gelu_fast" else 1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("name", "norms"),
    {
        "gpt2": 2 * 2 + 1,
        "neox": 2 * 2 + 1,
        "llama": 2 * 2 + 1,
        "gemma2": 2 * 4 + 1,
        "qwen3": 2 * 4 + 1,  # with those of queries and keys
        "bert": 1 + 2 * 2 + 1,  # the embedding's, and the head's; none at the end
        "bert-bare": 1 + 2 * 2,
        "longformer": 1 + 2 * 2 + 1,
        "t5": (2 * 2 + 1) + (2 * 3 + 1),
        "bart": (1 + 2 * 2) + (1 + 2 * 3),
    }.items(),
)
def test_the_norms_are_as_many_as_published(name: str, norms: int, tmp_path: Path) -> None:
    """Fault 38: none is missing at the end, none is doubled."""
    ours = make(name, tmp_path).ours
    found = [module for module in ours.modules() if type(module).__name__ in ("LayerNormModule", "RMSNormModule")]
    assert len(found) == norms


def test_a_last_norm_is_applied_once(tmp_path: Path) -> None:
    """Fault 38: branches that say nothing leave the normalised embedding, times the last gain."""
    model = make("llama-bare", tmp_path).ours
    for name, tensor in model.state_dict().items():
        if name.endswith(("out.weight", "down.weight")):
            tensor.zero_()
    model.decoder.norm.state_dict()["weight"].fill_(2)
    ids = torch.arange(5, 10)[None]
    table = model.tokens.weight[ids]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), 2 * table * (table.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("held", ["table", "head", "both"])
def test_a_tied_head_is_found_under_either_name(tmp_path: Path, held: str) -> None:
    """Fault 43: and one step of an optimizer moves both, which are one parameter."""
    wanted = logits(af.load(llama(tmp_path, tie_word_embeddings=True)).model)
    if held == "head":
        change_tensors(tmp_path, lambda t: {HEAD if name == TABLE else name: x for name, x in t.items()})
    elif held == "both":
        change_tensors(tmp_path, lambda t: t | {HEAD: t[TABLE]})
    model = af.load(tmp_path).model
    assert torch.equal(logits(model), wanted)
    assert model.head.weight is model.tokens.weight
    assert len([name for name, _ in model.named_parameters() if name in ("tokens.weight", "head.weight")]) == 1
    before = model.tokens.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(torch.tensor([[5, 6, 7]]))[0], torch.tensor([6, 7, 8])).backward()
    optimizer.step()
    assert model.head.weight is model.tokens.weight
    assert not torch.equal(model.head.weight, before)


def test_a_tied_head_that_differs_from_its_table_is_refused(tmp_path: Path) -> None:
    """Fault 43."""
    change_tensors(llama(tmp_path, tie_word_embeddings=True), lambda t: t | {HEAD: t[TABLE] + 1})
    with pytest.raises(ValueError, match=rf"{HEAD} and {TABLE} must be equal, as the config ties them, but differ"):
        af.load(tmp_path)


def test_a_file_without_its_table_is_refused(tmp_path: Path) -> None:
    """Fault 43: untied, neither can stand for the other."""
    change_tensors(llama(tmp_path), lambda t: {name: tensor for name, tensor in t.items() if name != TABLE})
    with pytest.raises(ValueError, match=f"lacks {TABLE}"):
        af.load(tmp_path)


# ----------------------------------------------------------------------------------------------------------------- PaLM


def palm(weights: dict[str, Tensor], ids: list[int], layers: int, heads: int) -> Tensor:
    """PaLM (Chowdhery et al. 2022, section 2) in float64 loops: one norm, then x + attention(n) + feed-forward(n), one
    key-value head for all queries, SwiGLU, rotary positions, one table, no biases."""
    table = weights["tokens.weight"]
    x = table[ids]

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return gain * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(row: Tensor, place: int) -> Tensor:
        half = len(row) // 2
        out = row.clone()
        for i in range(half):
            angle = place * 10000 ** (-2 * i / len(row))
            out[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
            out[i + half] = row[i + half] * math.cos(angle) + row[i] * math.sin(angle)
        return out

    for layer in range(layers):
        w = {
            name.removeprefix(f"decoder.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        n = norm(x, w["norm"])
        q, k, v = (n @ w[f"mixer.op.{name}"].T for name in "qkv")
        width = k.shape[1]
        k = torch.stack([turned(row, t) for t, row in enumerate(k)])
        seen = torch.zeros(len(ids), heads * width, dtype=x.dtype)
        for t in range(len(ids)):
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                scores = torch.stack([turned(q[t, part], t) @ k[s] / math.sqrt(width) for s in range(t + 1)])
                seen[t, part] = torch.softmax(scores, 0) @ v[: t + 1]
        gate = n @ w["ffn.op.gate"].T
        x = (
            x
            + seen @ w["mixer.op.out"].T
            + (gate / (1 + torch.exp(-gate)) * (n @ w["ffn.op.up"].T)) @ w["ffn.op.down"].T
        )
    return norm(x, weights["decoder.norm.weight"]) @ table.T


def test_palms_shape_equals_a_loop_from_the_paper() -> None:
    """Its weights were never published: the shape is held to plain arithmetic."""
    norm = af.LayerNorm(bias=False)
    attention = af.Attention(num_heads=4, num_kv_heads=1, head_dim=6, position=af.Rotary())
    block = af.Block.parallel(attention, af.GatedFFN(hidden=20), norm=norm, one_norm=True)
    spec = af.TransformerSpec(dim=16, vocab_size=31, decoder=af.cycle([block], 2), final_norm=norm)
    model = spec.build(dtype=torch.float64).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    ids = torch.randint(31, (9,)).tolist()
    with torch.inference_mode():
        ours = model(torch.tensor([ids]))[0]
        wanted = palm(dict(model.named_parameters()), ids, 2, 4)
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours, wanted, atol=1e-9, rtol=0)
