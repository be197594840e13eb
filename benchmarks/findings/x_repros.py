"""What was found in x-transformers, each as a few lines of its own calls: it prints what it measures."""

from __future__ import annotations

import copy
from typing import Any

import torch
import x_transformers
from torch import Tensor

from findings import x_options
from findings.finding import X, drawn, finding, off, raised

BY_LEAK = "(future|future_gradients|padding|cache|generation)"
"""What an option breaks that looks at the whole row."""


def decoder(**options: Any) -> Any:
    """A decoder of x-transformers with weights of order 1."""
    torch.manual_seed(0)
    return drawn(x_options.decoder(options, vocab=99, length=64))


def cached(model: Any, ids: Tensor) -> float:
    """How far decoding one by one by the cache is from the full pass."""
    with torch.no_grad():
        whole, cache, parts = model(ids), None, []
        for end in range(1, ids.shape[1] + 1):
            logits, cache = model(ids[:, :end], cache=cache, return_intermediates=True)
            parts.append(logits[:, -1:])
    return off(torch.cat(parts, 1), whole)


def leak(model: Any) -> float:
    """How much the first answer changes with the second token."""
    with torch.no_grad():
        return off(model(torch.tensor([[7, 8]]))[:, 0], model(torch.tensor([[7, 9]]))[:, 0])


SILENT_CACHE = "`can_cache_kv` says yes, and `generate` uses the cache by default"


@finding(
    X,
    "x-transformers shift_tokens=1: (cache|generation)",
    smallest="ids [[7, 8]], one by one",
    word="silent",
    why=SILENT_CACHE,
)
def shift_tokens_cached() -> float:
    """shift_tokens: a cached step shifts zeros in, not the token before"""
    return cached(decoder(shift_tokens=1), torch.tensor([[7, 8]]))


@finding(
    X,
    "x-transformers attn_data_dependent_alibi: cache",
    smallest="ids [[7, 8, 9]], one by one",
    word="silent",
    why=SILENT_CACHE,
)
def data_dependent_alibi_cached() -> float:
    """attn_data_dependent_alibi: a cached step has the bias of a text of one token"""
    return cached(decoder(attn_data_dependent_alibi=True), torch.tensor([[7, 8, 9]]))


@finding(
    X,
    f"x-transformers orthog_residual: {BY_LEAK}",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="the projection is taken over the whole row, all tokens as one vector; `Decoder` accepts the option",
)
def orthog_residual_looks_ahead() -> float:
    """orthog_residual: a decoder sees later tokens"""
    return leak(decoder(orthog_residual=True))


@finding(
    X,
    f"x-transformers attn_orthog_projected_values: {BY_LEAK}",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="the projection is taken over the whole row, all tokens as one vector; `Decoder` accepts the option",
)
def orthog_projected_values_look_ahead() -> float:
    """attn_orthog_projected_values: a decoder sees later tokens"""
    return leak(decoder(attn_orthog_projected_values=True))


@finding(
    X,
    f"x-transformers attn_orthog_projected_values_per_head: {BY_LEAK}",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="the projection is taken over the whole row, and over all heads too; `Decoder` accepts the option",
)
def orthog_projected_values_per_head_look_ahead() -> float:
    """attn_orthog_projected_values_per_head: a decoder sees later tokens"""
    return leak(decoder(attn_orthog_projected_values_per_head=True))


@finding(
    X,
    f"x-transformers mv_split_residual: {BY_LEAK}",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="means are taken over all places of the row; `Decoder` accepts the option",
)
def mv_split_residual_looks_ahead() -> float:
    """mv_split_residual: a decoder sees later tokens"""
    return leak(decoder(mv_split_residual=True))


def started(model: Any) -> float:
    """How far a text behind one pad, told by `seq_start_pos`, is from the text alone, whatever the pad."""
    with torch.no_grad():
        alone = model(torch.tensor([[7, 8, 9]]))
        padded = model(torch.tensor([[5, 7, 8, 9]]), seq_start_pos=torch.tensor([1]))
    return off(padded[:, 1:], alone)


@finding(
    X,
    "x-transformers attn_selective: (padding|generation)",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    word="silent",
    why="`seq_start_pos` is what `generate` gives for ragged prompts",
)
def selective_attention_sees_pads() -> float:
    """attn_selective: pads on the left change what is selected"""
    return started(decoder(attn_selective=True))


@finding(
    X,
    "x-transformers scaled_sinu_pos_emb: (future_gradients|padding|batch|cache|generation)",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    much="an error",
    word="loud",
    why="positions differ by row then, and the table is written for those that all rows share",
)
def sinusoids_with_left_padding() -> float:
    """scaled_sinu_pos_emb: text that is padded on the left is refused by an einsum error, so ragged prompts too"""
    model = decoder(scaled_sinu_pos_emb=True)
    return raised(lambda: started(model))


@finding(
    X,
    "x-transformers num_memory_tokens=2: (padding|generation)",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    word="silent",
    why="`seq_start_pos`, which `generate` gives for ragged prompts, is counted from the first memory token on",
)
def memory_tokens_hidden_as_pads() -> float:
    """num_memory_tokens: pads on the left are seen, and memory tokens hidden in their place"""
    return started(decoder(num_memory_tokens=2))


@finding(
    X,
    "x-transformers shift_tokens=1: (future_gradients|padding)",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    word="silent",
    why="`generate` gives `seq_start_pos` for ragged prompts; a pad sees all tokens, so later ones leak too",
)
def shift_tokens_sees_pads() -> float:
    """shift_tokens: the first token takes features of the pad before it"""
    return started(decoder(shift_tokens=1))


@finding(
    X,
    "x-transformers attn_use_latent_kv: generation",
    smallest="prompt [[7, 8]], 2 new tokens",
    much="an error",
    word="loud",
    why="`can_cache_kv` says yes; with `cache_kv=False` or `attn_latent_rope_subheads` it runs",
)
def latent_kv_generation() -> float:
    """attn_use_latent_kv: generate breaks at the second token"""
    model = decoder(attn_use_latent_kv=True, attn_dim_latent_kv=8)
    wrapped = x_transformers.AutoregressiveWrapper(model)
    return raised(lambda: wrapped.generate(torch.tensor([[7, 8]]), 2, temperature=0.0))


@finding(
    X,
    r"x-transformers .*: generation",
    said=r"prompts \[.*\b(\d+)\b.*\], max_new_tokens=\d+, end_ids=\[(\1|0)\]",
    smallest="prompt [[7, 8]], eos_token=7; prompts [7] and [8, 9], eos_token=0",
    much="other ids",
    word="silent",
    why="end tokens are looked for in the prompt and in its padding too, and all behind the first is replaced by the "
    "padding value",
)
def end_token_in_the_prompt() -> float:
    """generate(eos_token=...) says nothing but padding where the prompt, or the padding of a shorter one, holds it"""
    wrapped = x_transformers.AutoregressiveWrapper(decoder())
    found = []
    for prompts, end in ([torch.tensor([7, 8])], 7), ([torch.tensor([7]), torch.tensor([8, 9])], 0):
        free = wrapped.generate(prompts, 4, temperature=0.0)[0].tolist()
        ended = wrapped.generate(prompts, 4, eos_token=end, temperature=0.0)[0].tolist()
        print(f"  without an end token {free}, with {end} as one {ended}")
        found.append(free[0] != 0 and not any(ended) and end not in free)
    return float(all(found))


@finding(
    X,
    smallest="copy.deepcopy of the model",
    much="an error",
    word="loud",
    why="a class of its own cannot make an object without its arguments, which copying and pickling do",
)
def aggregated_residuals_copied() -> float:
    """attn_aggregated_residuals: the model cannot be copied"""
    model = decoder(attn_aggregated_residuals=True, attn_aggregated_residual_kwargs={"lora_rank": 8})
    return raised(lambda: copy.deepcopy(model))


@finding(
    X,
    smallest="ids [[7]], attn_sparse_topk=2",
    much="an error",
    word="loud",
    why="top-k is asked of fewer keys than k",
)
def sparse_topk_short_text() -> float:
    """attn_sparse_topk: texts shorter than k are refused by an index error"""
    model = decoder(attn_sparse_topk=2)
    return raised(lambda: model(torch.tensor([[7]])))
