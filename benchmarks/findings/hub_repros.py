"""What was found in transformers, each as a few lines of its own calls: it prints what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from findings.finding import HF, drawn, finding, off, raised
from findings.hub_subjects import HUB, VOCAB

PACKED = (
    *("gpt2", "gpt_neox", "falcon", "phi", "llama", "llama, dynamic rope", "mistral", "mixtral", "gemma2", "gemma3"),
    *("qwen3", "olmo2", "deepseek_v3"),
)
MIXED = ("gpt_oss", "opt", "xglm", "biogpt")
"""Families that tell packed documents apart without a cache, and those that never do."""


def theirs(name: str) -> Any:
    """A model of `transformers` with weights of order 1, so that each token matters."""
    architecture, config = HUB[name]
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    return drawn(kind(kind.config_class(vocab_size=VOCAB, **config)).eval())


def among(names: Sequence[str]) -> str:
    return f"transformers ({'|'.join(names)})"


@torch.no_grad()
def packed(names: Sequence[str], **how: Any) -> float:
    """How far the second of two packed documents is at least from itself alone."""
    found = {}
    for name in names:
        model, ids, position_ids = theirs(name), torch.tensor([[7, 8]]), torch.tensor([[0, 0]])
        alone = model(input_ids=ids[:, 1:], position_ids=position_ids[:, 1:], **how).logits[0, 0]
        found[name] = off(model(input_ids=ids, position_ids=position_ids, **how).logits[0, 1], alone)
    print(f"  {how or 'by default'}: {', '.join(f'{name} {apart:.2g}' for name, apart in found.items())}")
    return min(found.values())


@finding(
    HF,
    f"{among(PACKED)}: packing",
    smallest="ids [[7, 8]], position_ids [[0, 0]]",
    word="silent",
    why="a comment in the source says that positions tell documents apart without a cache alone; `use_cache` is on by "
    "default, also in training (`Trainer` turns it off), and nothing is said when documents are mixed",
)
def packed_rows_with_a_cache() -> float:
    """packed documents (position_ids that begin anew, no mask) see each other, unless use_cache=False is given"""
    packed(PACKED, use_cache=False)
    return packed(PACKED)


@finding(
    HF,
    f"{among(MIXED)}(, told all)?: packing",
    smallest="ids [[7, 8]], position_ids [[0, 0]], use_cache=False",
    word="silent",
    why="they take position_ids, and do not hand them to the function that makes the mask",
)
def packed_rows_of_some_families() -> float:
    """packed documents see each other in GPT-OSS, OPT, XGLM and BioGPT, even with use_cache=False"""
    return packed(MIXED, use_cache=False)


@torch.no_grad()
def left_padded(*names: str) -> float:
    """How far a token behind one pad, which `attention_mask` tells of, is at least from the token alone."""
    padded, mask, found = torch.tensor([[0, 7]]), torch.tensor([[0, 1]]), []
    for name in names:
        model = theirs(name)
        alone = model(input_ids=padded[:, 1:]).logits[0, 0]
        found.append(off(model(input_ids=padded, attention_mask=mask).logits[0, 1], alone))
        placed = model(input_ids=padded, attention_mask=mask, position_ids=torch.tensor([[0, 0]])).logits[0, 1]
        print(f"  {name}: against the token alone {found[-1]:.3g}; with position_ids {off(placed, alone):.3g}")
    return min(found)


@finding(
    HF,
    f"{among(('gpt2', 'xglm', 'biogpt'))}: padding",
    smallest="ids [[0, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="GPT-2's page advises padding on the right; but `generate` must pad on the left, and makes the positions that "
    "the forward pass does not",
)
def gpt2_left_padding() -> float:
    """the forward pass of GPT-2, XGLM and BioGPT counts pads on the left as positions, whatever attention_mask says"""
    return left_padded("gpt2", "xglm", "biogpt")


@finding(
    HF,
    f"{among(('bert', 'distilbert'))}: padding",
    smallest="ids [[0, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="BERT's page advises padding on the right",
)
def bert_left_padding() -> float:
    """BERT and DistilBERT count pads on the left as positions, whatever attention_mask says"""
    return left_padded("bert", "distilbert")


@finding(
    HF,
    "transformers bart(, told all)?: padding",
    smallest="source [[1, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="the model's page advises padding on the right; there are no position_ids that could be given",
)
@torch.no_grad()
def bart_left_padding() -> float:
    """BART counts pads on the left of its source as positions, whatever attention_mask says"""
    model, ids = theirs("bart"), torch.tensor([[2, 9]])
    alone = model(input_ids=torch.tensor([[7]]), decoder_input_ids=ids).logits
    padded, mask = torch.tensor([[1, 7]]), torch.tensor([[0, 1]])
    return off(model(input_ids=padded, attention_mask=mask, decoder_input_ids=ids).logits, alone)


@finding(
    HF,
    "transformers llama, dynamic rope: padding",
    smallest="3 ids behind 6 pads, trained for 8 positions",
    word="silent",
    why="without position_ids, which mend it, pads are positions, and frequencies are made for the last one",
)
@torch.no_grad()
def dynamic_rope_padded() -> float:
    """pads on the left lengthen the text that dynamic RoPE plans for, whatever attention_mask says"""
    model, ids = theirs("llama, dynamic rope"), torch.tensor([[7, 8, 9]])
    alone = model(ids).logits
    padded, mask = (torch.cat((torch.zeros(1, 6, dtype=torch.long), x), 1) for x in (ids, torch.ones_like(ids)))
    return off(model(padded, attention_mask=mask).logits[:, 6:], alone)


@finding(
    HF,
    "transformers llama, dynamic rope(, told all)?: cache",
    smallest="9 ids, trained for 8 positions, one by one",
    word="silent",
    why="it follows from the scheme, in which frequencies depend on the length: cached keys keep those of their time",
)
@torch.no_grad()
def dynamic_rope_cached() -> float:
    """beyond the trained length, dynamic RoPE decodes by a cache another text than the full pass reads"""
    model, ids = theirs("llama, dynamic rope"), torch.arange(9)[None] + 7
    cache, parts = transformers.DynamicCache(config=model.config), []
    for i in range(9):
        parts.append(model(ids[:, i : i + 1], cache=cache, use_cache=True).logits)
    return off(torch.cat(parts, 1), model(ids).logits)


@finding(
    HF,
    smallest="9 ids, before and after a call with 12",
    word="silent",
    why="a comment in the source says so: the largest length seen is kept until a text is within the trained length",
)
@torch.no_grad()
def dynamic_rope_remembers() -> float:
    """the answer to a text depends on the texts that the model was asked before, with dynamic RoPE"""
    model, ids = theirs("llama, dynamic rope"), torch.arange(12)[None] + 7
    before = model(ids[:, :9]).logits
    model(ids)
    after = model(ids[:, :9]).logits
    return off(after, before)


@finding(
    HF,
    smallest="decoder_input_ids [[0, 5], [7, 5]], start token 0",
    much="other ids",
    word="silent",
    why="a prompt that lacks the start token gets it only if every prompt of the batch lacks it",
)
@torch.no_grad()
def start_token_depends_on_batch_mates() -> float:
    """an encoder-decoder's generate puts the start token before a prompt, or does not, by its batch mates"""
    model, ids = theirs("t5"), torch.tensor([[0, 5], [7, 5]])
    source, how = torch.tensor([[9, 8], [9, 8]]), {"max_new_tokens": 4, "do_sample": False}
    together = model.generate(source, decoder_input_ids=ids, **how)[1].tolist()
    alone = model.generate(source[1:], decoder_input_ids=ids[1:], **how)[0].tolist()
    print(f"  in a batch {together}, alone {alone}")
    return float(together[0] != alone[0])


@finding(
    HF,
    smallest="a prompt of 63 ids of 64 positions, max_new_tokens=6",
    much="an error",
    word="loud",
    why="a warning comes before, and an IndexError stops it; the last positions are not told as a length",
)
@torch.no_grad()
def gpt2_past_its_positions() -> float:
    """GPT-2's generate runs past its table of positions"""
    model = theirs("gpt2")
    how = {"attention_mask": torch.ones(1, 63), "max_new_tokens": 6, "pad_token_id": 0}
    return raised(lambda: model.generate(torch.full((1, 63), 7), **how), IndexError)


@finding(
    HF,
    "transformers m2m_100(, told all)?: cache",
    smallest="decoder_input_ids [[1, 7, 8]], the first a pad, in pieces of 2 and 1",
    word="silent",
    why="a full pass counts the ids that are not padding, a cached step adds the number of all ids before it",
)
@torch.no_grad()
def m2m_100_cached_left_padding() -> float:
    """M2M-100's decoder has other positions behind left padding when it reads by a cache"""
    model, ids = theirs("m2m_100"), torch.tensor([[1, 7, 8]])
    source, mask = torch.tensor([[9, 8]]), torch.tensor([[0, 1, 1]])
    whole = model(source, decoder_input_ids=ids, decoder_attention_mask=mask).logits[:, 2]
    cache = model(source, decoder_input_ids=ids[:, :2], decoder_attention_mask=mask[:, :2], use_cache=True).cache
    step = {"decoder_input_ids": ids[:, 2:], "decoder_attention_mask": mask, "cache": cache}
    return off(model(source, **step).logits[:, 0], whole)
