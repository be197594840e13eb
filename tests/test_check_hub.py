"""Models of `transformers` under the laws: lawful where they should be, and what is planted into them is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import CASES
from torch import Tensor

from anyformer.check.hub import HubSubject, open_hub
from anyformer.check.law import apart
from anyformer.check.layouts import padded, texts
from anyformer.check.report import Finding
from anyformer.check.run import check
from anyformer.check.subject import NotApplicable, Text
from anyformer.tokens import Tokens

SEEN = ("future", "future_gradients", "padding", "batch", "packing", "cache", "generation")
WHOLE = ("evaluation", "saving")


def subject(name: str, **more: Any) -> HubSubject:
    return HubSubject(CASES[name]().eval(), name=name, **more)


def found(subject: HubSubject, law: str) -> Finding:
    return check(subject, only=[law])[law]


# fmt: off
LAWFUL = {
    "llama-grouped": SEEN, "mistral": SEEN, "gpt2": SEEN[:-1],
    "bert": ("padding", "batch"), "roberta": ("padding", "batch"), "bert-classes": ("padding", "batch"),
    "t5": ("future", "future_gradients", "padding", "batch", "cache", "generation"),
}
# fmt: on


@pytest.mark.parametrize("name", LAWFUL)
def test_a_model_that_is_told_all_is_lawful(name: str) -> None:
    decodes = not name.startswith(("bert", "roberta", "t5"))
    asked = subject(name, positions=True, **({"use_cache": False} if decodes else {}))
    report = check(asked, only=[*SEEN[: len(SEEN) - (name == "gpt2")], *WHOLE])
    assert report.lawful, str(report)
    passed = {finding.law for finding in report.findings if finding.verdict == "pass"}
    assert passed == {*LAWFUL[name], *WHOLE}, report.findings


@pytest.mark.parametrize("name", ["bart", "gemma2", "neox", "qwen3"])
def test_other_families_keep_to_the_future_and_to_their_cache(name: str) -> None:
    report = check(subject(name), only=["future", "batch"])
    assert [finding.verdict for finding in report.findings] == ["pass", "pass"], str(report)
    asked = subject(name).anew(torch.float32)
    text = asked.text(2, 7)
    assert apart(asked.by_pieces(text, [3, 0, 1, 3]), asked.answer(text), "").error < 4096


def test_what_is_not_told_is_found() -> None:
    """A decoder with a table of positions cannot know of pads on the left, nor one with a cache of other documents."""
    assert found(subject("gpt2"), "padding").verdict == "fail"
    assert found(subject("gpt2", positions=True), "padding").verdict == "pass"
    assert found(subject("llama"), "packing").verdict == "fail"
    assert found(subject("llama", use_cache=False), "packing").verdict == "pass"


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_causal_mask_one_too_wide_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = sys.modules["transformers.masking_utils"]
    monkeypatch.setattr(masks, "causal_mask_function", lambda batch, head, q, kv: kv <= q + 1)
    report = check(subject("llama"), only=["future", "future_gradients"])
    assert [finding.verdict for finding in report.findings] == ["fail", "fail"]
    assert "ids [" in report["future"].smallest


def test_a_padding_mask_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(subject("bert").module.base_model)
    forward = kind.forward

    def deaf(self: Any, *given: Any, **more: Any) -> Any:
        return forward(self, *given, **(more | {"attention_mask": None}))

    monkeypatch.setattr(kind, "forward", deaf)
    assert found(subject("bert", positions=True), "padding").verdict == "fail"


def test_a_cache_that_forgets_its_first_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = sys.modules["transformers.cache_utils"].DynamicLayer
    update = layer.update

    def forgetful(self: Any, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        keys, values = update(self, key, value, *rest, **more)
        return torch.cat((keys[:, :, :1] * 0, keys[:, :, 1:]), 2), values

    monkeypatch.setattr(layer, "update", forgetful)
    assert found(subject("llama", use_cache=False), "cache").verdict == "fail"
    assert found(subject("llama", use_cache=False), "future").verdict == "pass"


# -- how a model is asked ---------------------------------------------------------------------------------------------


def test_places_are_said_as_users_say_them() -> None:
    asked = subject("llama")
    plain = asked.text(2, 4)
    assert asked.said(plain).keys() == {"input_ids"}
    rows = padded(asked, texts(asked, (1, 3)), "left", 1)
    assert asked.said(rows).keys() == {"input_ids", "attention_mask"}
    assert subject("llama", positions=True).said(rows)["position_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 2]]
    packed = Text(plain.ids[:1], Tokens.packed(torch.tensor([[0, 0, 1, -1]])))
    assert asked.said(packed).keys() == {"input_ids", "position_ids"}
    assert asked.said(packed)["position_ids"].tolist() == [[0, 1, 0, 0]]
    late = Text(plain.ids[:1], Tokens.arange(1, 4, start=5))
    assert asked.said(late)["position_ids"].tolist() == [[5, 6, 7, 8]]


def test_a_family_that_counts_its_pads_has_no_other_pads() -> None:
    """RoBERTa's positions are those of the ids that are not the pad, from one behind the pad's id on."""
    asked = subject("roberta", positions=True)
    said = asked.said(padded(asked, texts(asked, (2, 3)), "right", 1))
    assert said["input_ids"][0, 2:].tolist() == [1, 1]
    assert said["position_ids"][1, :3].tolist() == [2, 3, 4]
    assert asked.max_len == 64
    ids = asked.ids(5000)
    assert not (ids == 1).any()
    other = asked.other(ids)
    assert not (other == 1).any()
    assert not (other == ids).any()


@pytest.mark.parametrize(
    ("name", "documents", "why"),
    [
        ("bert", [[0, 0, 1, 1]], "known to decoders alone"),
        ("t5", [[0, 0, 1, 1]], "known to decoders alone"),
    ],
)
def test_what_was_never_promised_is_not_asked(name: str, documents: list[list[int]], why: str) -> None:
    asked = subject(name)
    text = asked.text(1, 4, tokens=Tokens.packed(torch.tensor(documents)))
    with pytest.raises(NotApplicable, match=why):
        asked.answer(text)
    with pytest.raises(NotApplicable, match="by a cache" if name == "bert" else "without a cache"):
        asked.by_pieces(text, [4])
    with pytest.raises(NotApplicable, match="batch without a row"):
        asked.answer(asked.text(0, 3))


def test_tokens_out_of_order_are_not_given_to_a_decoder() -> None:
    asked, ids = subject("llama"), torch.tensor([[5, 6, 7]])
    tokens = Tokens(torch.tensor([[2, 0, 1]]), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(NotApplicable, match="in which they stand"):
        asked.answer(Text(ids, tokens))


def test_generation_ends_at_an_end_token_and_repeats_with_its_seed() -> None:
    asked = subject("llama").anew(torch.float32)
    prompts = [[5, 6], [7, 8, 9]]
    new = asked.generated(prompts, max_new_tokens=5)
    assert [len(ids) for ids in new] == [5, 5]
    assert asked.generated(prompts, max_new_tokens=5, end_ids=[new[1][0]])[1] == new[1][:1]
    hot = {"max_new_tokens": 8, "temperature": 5.0}
    assert asked.generated(prompts, seed=1, **hot) == asked.generated(prompts, seed=1, **hot)
    assert asked.generated(prompts, seed=1, **hot) != asked.generated(prompts, seed=2, **hot)
    assert asked.generated(prompts, max_new_tokens=0) == [[], []]
    with pytest.raises(NotApplicable, match="whole batch"):
        asked.generated(prompts, max_new_tokens=1, seed=[1, 2])


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_opened_as_what_it_says_it_is(tmp_path: Path) -> None:
    theirs = CASES["bert-token-classes"]().eval()
    theirs.save_pretrained(tmp_path / "labels")
    opened = open_hub(tmp_path / "labels")
    assert type(opened.module) is type(theirs)
    assert opened.name == "labels"
    text = opened.text(2, 5)
    assert apart(opened.answer(text), theirs(input_ids=text.ids).logits, "").error < 100


def test_folders_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no folder of a model: it holds no config.json"):
        open_hub(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["Llama99"]}')
    with pytest.raises(ValueError, match="no class 'Llama99'"):
        open_hub(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match="cannot be loaded by transformers"):
        open_hub(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "ours", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="code in a folder is never run"):
        open_hub(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="is not installed: pip install transformers"):
        open_hub(tmp_path)


def test_a_penalty_that_a_folder_asks_for_is_none_of_what_is_compared() -> None:
    asked = subject("gpt2")
    asked.module.generation_config.repetition_penalty = 50.0
    assert found(asked, "generation").verdict == "pass"
    assert asked.module.generation_config.repetition_penalty == 50.0
