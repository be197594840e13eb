"""What was found, each as a few lines of the other library's own calls: it prints what it measures."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
import x_transformers
from torch import Tensor, nn

from findings.subjects import BART, DYNAMIC, GPT2, GROUPED, HUB, SIZES, T5, VOCAB

HF, X, TORCH = "transformers", "x-transformers", "torch"
SHOWS = 1e-3
"""Larger differences are no rounding: answers are of order 1, in float32."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """`at` says where the lane sees it, as patterns of "subject: law"; `word` is silent, documented or loud, and `why`
    says it fairly."""

    name: str
    library: str
    at: tuple[str, ...]
    breaks: str
    smallest: str
    word: str
    why: str
    run: Callable[[], float]

    def measured(self) -> float:
        """How far apart the answers are; infinity for an error, or for a value that is no number."""
        print(f"{self.name}: {self.breaks}", flush=True)
        found = self.run()
        print(f"  {found:.3g}: {'shows' if found > SHOWS else 'DOES NOT SHOW'}", flush=True)
        return found


FINDINGS: dict[str, Finding] = {}
Run = Callable[[], float]


def finding(library: str, *at: str, smallest: str, word: str, why: str) -> Callable[[Run], Run]:
    """Makes a function that gives how far two answers are apart a finding; its docstring says what breaks."""

    def made(run: Run) -> Run:
        breaks = " ".join((run.__doc__ or "").split()).rstrip(".")
        FINDINGS[run.__name__] = Finding(run.__name__, library, at, breaks, smallest, word, why, run)
        return run

    return made


def theirs(architecture: str, config: dict[str, Any]) -> Any:
    """A model of `transformers` with weights of order 1, so that each token matters."""
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(vocab_size=VOCAB, **config)).eval()
    return drawn(model)


def decoder(**options: Any) -> Any:
    """A decoder of x-transformers with weights of order 1."""
    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, verbose=False, **options)
    return drawn(x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers).eval())


@torch.no_grad()
def drawn(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one of them alone is not a number."""
    return float((a - b).abs().nan_to_num(nan=float("inf")).max())


# -- transformers -----------------------------------------------------------------------------------------------------


@finding(
    HF,
    "transformers *: packing",
    smallest="ids [[7, 8]], position_ids [[0, 0]]",
    word="silent",
    why="a comment in the source says that positions tell documents apart without a cache alone; `use_cache` is on by "
    "default, also in training (`Trainer` turns it off), and nothing is said when documents are mixed",
)
@torch.no_grad()
def packed_rows_with_a_cache() -> float:
    """packed documents (position_ids that begin anew, no mask) see each other, unless use_cache=False is given"""
    model = theirs("LlamaForCausalLM", GROUPED)
    ids, position_ids = torch.tensor([[7, 8]]), torch.tensor([[0, 0]])
    alone = model(input_ids=ids[:, 1:]).logits[0, 0]
    default = model(input_ids=ids, position_ids=position_ids).logits[0, 1]
    without = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[0, 1]
    print(f"  against the document alone: {off(default, alone):.3g}; with use_cache=False {off(without, alone):.3g}")
    return off(default, alone)


@finding(
    HF,
    *(f"transformers {name}*: packing" for name in ("gpt_oss", "opt", "xglm", "biogpt")),
    smallest="ids [[7, 8]], position_ids [[0, 0]], use_cache=False",
    word="silent",
    why="they take position_ids, and do not hand them to the function that makes the mask",
)
@torch.no_grad()
def packed_rows_of_some_families() -> float:
    """packed documents see each other in GPT-OSS, OPT, XGLM and BioGPT, even with use_cache=False"""
    found = []
    for name in ("gpt_oss", "opt", "xglm", "biogpt"):
        model, ids, position_ids = theirs(*HUB[name]), torch.tensor([[7, 8]]), torch.tensor([[0, 0]])
        alone = model(input_ids=ids[:, 1:], position_ids=position_ids[:, 1:], use_cache=False).logits[0, 0]
        packed = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[0, 1]
        found.append(off(packed, alone))
        print(f"  {name}: the second document against itself alone: {found[-1]:.3g}")
    return min(found)


def left_padded(architecture: str, config: dict[str, Any]) -> float:
    """How far a token behind one pad, which `attention_mask` tells of, is from the token alone."""
    model = theirs(architecture, config)
    padded, mask = torch.tensor([[0, 7]]), torch.tensor([[0, 1]])
    with torch.no_grad():
        alone = model(input_ids=padded[:, 1:]).logits[0, 0]
        told = model(input_ids=padded, attention_mask=mask).logits[0, 1]
        placed = model(input_ids=padded, attention_mask=mask, position_ids=torch.tensor([[0, 0]])).logits[0, 1]
    print(f"  against the token alone: {off(told, alone):.3g}; with position_ids {off(placed, alone):.3g}")
    return off(told, alone)


@finding(
    HF,
    "transformers gpt2: padding",
    "transformers xglm: padding",
    "transformers biogpt: padding",
    smallest="ids [[0, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="the model's page advises padding on the right; but `generate` must pad on the left, and makes the positions "
    "that the forward pass does not",
)
def gpt2_left_padding() -> float:
    """GPT-2's forward pass counts pads on the left as positions, whatever attention_mask says"""
    return left_padded("GPT2LMHeadModel", GPT2)


@finding(
    HF,
    "transformers bert: padding",
    "transformers distilbert: padding",
    smallest="ids [[0, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="the model's page advises padding on the right",
)
def bert_left_padding() -> float:
    """BERT counts pads on the left as positions, whatever attention_mask says"""
    return left_padded("BertForMaskedLM", SIZES)


@finding(
    HF,
    "transformers bart*: padding",
    smallest="source [[1, 7]], attention_mask [[0, 1]]",
    word="documented",
    why="the model's page advises padding on the right; there are no position_ids that could be given",
)
@torch.no_grad()
def bart_left_padding() -> float:
    """BART counts pads on the left of its source as positions, whatever attention_mask says"""
    model, ids = theirs("BartForConditionalGeneration", BART), torch.tensor([[2, 9]])
    alone = model(input_ids=torch.tensor([[7]]), decoder_input_ids=ids).logits
    padded, mask = torch.tensor([[1, 7]]), torch.tensor([[0, 1]])
    return off(model(input_ids=padded, attention_mask=mask, decoder_input_ids=ids).logits, alone)


@finding(
    HF,
    "transformers llama, dynamic rope*: cache",
    "transformers llama, dynamic rope*: generation",
    smallest="9 ids, trained for 8 positions, one by one",
    word="silent",
    why="it follows from the scheme, in which frequencies depend on the length: cached keys keep those of their time",
)
@torch.no_grad()
def dynamic_rope_cached() -> float:
    """beyond the trained length, dynamic RoPE decodes by a cache another text than the full pass reads"""
    model, ids = theirs("LlamaForCausalLM", GROUPED | DYNAMIC), torch.arange(9)[None] + 7
    cache, parts = transformers.DynamicCache(config=model.config), []
    for i in range(9):
        parts.append(model(ids[:, i : i + 1], cache=cache, use_cache=True).logits)
    return off(torch.cat(parts, 1), model(ids).logits)


@finding(
    HF,
    "transformers llama, dynamic rope*: *",
    smallest="9 ids, before and after a call with 12",
    word="silent",
    why="a comment in the source says so: the largest length seen is kept until a text is within the trained length",
)
@torch.no_grad()
def dynamic_rope_remembers() -> float:
    """the answer to a text depends on the texts that the model was asked before, with dynamic RoPE"""
    model, ids = theirs("LlamaForCausalLM", GROUPED | DYNAMIC), torch.arange(12)[None] + 7
    before = model(ids[:, :9]).logits
    model(ids)
    after = model(ids[:, :9]).logits
    return off(after, before)


@finding(
    HF,
    smallest="decoder_input_ids [[0, 5], [7, 5]], start token 0",
    word="silent",
    why="a prompt that lacks the start token gets it only if every prompt of the batch lacks it",
)
@torch.no_grad()
def start_token_depends_on_batch_mates() -> float:
    """an encoder-decoder's generate puts the start token before a prompt, or does not, by its batch mates"""
    model, ids = theirs("T5ForConditionalGeneration", T5), torch.tensor([[0, 5], [7, 5]])
    source, how = torch.tensor([[9, 8], [9, 8]]), {"max_new_tokens": 4, "do_sample": False}
    together = model.generate(source, decoder_input_ids=ids, **how)[1].tolist()
    alone = model.generate(source[1:], decoder_input_ids=ids[1:], **how)[0].tolist()
    print(f"  in a batch {together}, alone {alone}")
    return float(together[0] != alone[0])


@finding(
    HF,
    "transformers gpt2*: generation",
    "transformers opt*: generation",
    "transformers bart*: generation",
    "transformers biogpt*: generation",
    smallest="a prompt of 63 ids of 64 positions, max_new_tokens=6",
    word="loud",
    why="a warning comes before, and an IndexError stops it; the last positions are not told as a length",
)
@torch.no_grad()
def gpt2_past_its_positions() -> float:
    """GPT-2's generate runs past its table of positions"""
    model = theirs("GPT2LMHeadModel", GPT2)
    try:
        model.generate(torch.full((1, 63), 7), attention_mask=torch.ones(1, 63), max_new_tokens=6, pad_token_id=0)
    except IndexError as error:
        print(f"  IndexError: {error}")
        return float("inf")
    return 0.0


@finding(
    HF,
    "transformers m2m_100*: cache",
    smallest="decoder_input_ids [[1, 7, 8]], the first a pad, in pieces of 2 and 1",
    word="silent",
    why="a full pass counts the ids that are not padding, a cached step adds the number of all ids before it",
)
@torch.no_grad()
def m2m_100_cached_left_padding() -> float:
    """M2M-100's decoder has other positions behind left padding when it reads by a cache"""
    model, ids = theirs("M2M100ForConditionalGeneration", BART), torch.tensor([[1, 7, 8]])
    source, mask = torch.tensor([[9, 8]]), torch.tensor([[0, 1, 1]])
    whole = model(source, decoder_input_ids=ids, decoder_attention_mask=mask).logits[:, 2]
    cache = model(source, decoder_input_ids=ids[:, :2], decoder_attention_mask=mask[:, :2], use_cache=True).cache
    step = {"decoder_input_ids": ids[:, 2:], "decoder_attention_mask": mask, "cache": cache}
    return off(model(source, **step).logits[:, 0], whole)


# -- x-transformers ---------------------------------------------------------------------------------------------------


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
    "x-transformers shift_tokens: cache",
    "x-transformers shift_tokens: generation",
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
    "x-transformers attn_data_dependent_alibi: generation",
    smallest="ids [[7, 8, 9]], one by one",
    word="silent",
    why=SILENT_CACHE,
)
def data_dependent_alibi_cached() -> float:
    """attn_data_dependent_alibi: a cached step has the bias of a text of one token"""
    return cached(decoder(attn_data_dependent_alibi=True), torch.tensor([[7, 8, 9]]))


@finding(
    X,
    "x-transformers orthog_residual: *",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="the projection is taken over the whole row, all tokens as one vector; `Decoder` accepts the option",
)
def orthog_residual_looks_ahead() -> float:
    """orthog_residual: a decoder sees later tokens"""
    return leak(decoder(orthog_residual=True))


@finding(
    X,
    "x-transformers attn_orthog_projected_values: *",
    smallest="ids [[7, 8]] and [[7, 9]], first answer",
    word="silent",
    why="the projection is taken over the whole row, all tokens as one vector; `Decoder` accepts the option",
)
def orthog_projected_values_look_ahead() -> float:
    """attn_orthog_projected_values: a decoder sees later tokens"""
    return leak(decoder(attn_orthog_projected_values=True))


@finding(
    X,
    "x-transformers mv_split_residual: *",
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
    "x-transformers attn_selective: padding",
    "x-transformers attn_selective: generation",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    word="silent",
    why="`seq_start_pos` is what `generate` gives for ragged prompts",
)
def selective_attention_sees_pads() -> float:
    """attn_selective: pads on the left change what is selected"""
    return started(decoder(attn_selective=True))


@finding(
    X,
    "x-transformers shift_tokens: future_gradients",
    "x-transformers shift_tokens: padding",
    "x-transformers shift_tokens: batch",
    smallest="ids [[5, 7, 8, 9]], seq_start_pos [1]",
    word="silent",
    why="`generate` gives `seq_start_pos` for ragged prompts; a pad sees all tokens, so later ones leak too",
)
def shift_tokens_sees_pads() -> float:
    """shift_tokens: the first token takes features of the pad before it"""
    return started(decoder(shift_tokens=1))


def raised(run: Callable[[], object]) -> float:
    """Infinity, if it raises; it tells what."""
    try:
        run()
    except Exception as error:
        print(f"  {type(error).__name__}: {error}")
        return float("inf")
    return 0.0


@finding(
    X,
    "x-transformers attn_use_latent_kv: generation",
    smallest="prompt [[7, 8]], 2 new tokens",
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
    "x-transformers *: generation",
    smallest="prompt [[7, 8]], eos_token=7",
    word="silent",
    why="end tokens are looked for in the prompt too, and all behind the first is replaced by the padding value",
)
def end_token_in_the_prompt() -> float:
    """generate(eos_token=...) says nothing but padding to a prompt that holds the end token"""
    wrapped, prompt = x_transformers.AutoregressiveWrapper(decoder()), torch.tensor([[7, 8]])
    free = wrapped.generate(prompt, 4, temperature=0.0)[0].tolist()
    ended = wrapped.generate(prompt, 4, eos_token=7, temperature=0.0)[0].tolist()
    print(f"  without an end token {free}, with one {ended}")
    return float(free != ended and not any(ended) and 7 not in free)


@finding(
    X,
    smallest="copy.deepcopy of the model",
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
    word="loud",
    why="top-k is asked of fewer keys than k",
)
def sparse_topk_short_text() -> float:
    """attn_sparse_topk: texts shorter than k are refused by an index error"""
    model = decoder(attn_sparse_topk=2)
    return raised(lambda: model(torch.tensor([[7]])))


# -- torch ------------------------------------------------------------------------------------------------------------


def layers(**how: Any) -> Any:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2, **how).eval()


def fast_against_slow(model: Any, x: Tensor, **masks: Tensor) -> float:
    """How far eval without gradients, which takes the fast path, is from eval with gradients, which does not."""
    slow = model(x, **masks).detach()
    with torch.no_grad():
        fast = model(x, **masks)
    print(f"  NaN at {fast.isnan().any(-1).tolist()} on the fast path, at {slow.isnan().any(-1).tolist()} on the other")
    return off(fast, slow)


@finding(
    TORCH,
    "torch encoder, causal: *",
    smallest="3 tokens, the first one masked, and a causal mask",
    word="silent",
    why="attention that sees nothing is 0 on the slow path and NaN on the fast one, and NaN spreads; known to the "
    "library: https://github.com/pytorch/pytorch/pull/190486",
)
def torch_causal_left_padding() -> float:
    """a causal TransformerEncoder in eval gives NaN for a whole text that is padded on the left"""
    future, pads = torch.ones(3, 3).triu(1).bool(), torch.tensor([[True, False, False]])
    return fast_against_slow(layers(), torch.randn(1, 3, 32), mask=future, src_key_padding_mask=pads)


@finding(
    TORCH,
    "torch transformer: *",
    smallest="target of 3 tokens, the first one masked, and a causal mask",
    word="silent",
    why="the same, through the fast path of MultiheadAttention",
)
def torch_transformer_left_padding() -> float:
    """nn.Transformer in eval gives NaN for a target that is padded on the left"""
    torch.manual_seed(0)
    model, x = nn.Transformer(32, 4, 2, 2, 48, batch_first=True).eval(), torch.randn(1, 3, 32)
    future, pads = torch.ones(3, 3).triu(1).bool(), torch.tensor([[True, False, False]])
    return fast_against_slow(lambda x, **masks: model(x, x, **masks), x, tgt_mask=future, tgt_key_padding_mask=pads)


@finding(
    TORCH,
    smallest="a batch of two rows of 2 tokens, one row all masked",
    word="silent",
    why="with nested tensors, the default of an encoder that norms last, the row is 0 instead",
)
def torch_masked_row() -> float:
    """a row without a real token is NaN in eval on the fast path, and finite in training and with gradients"""
    pads = torch.tensor([[False, False], [True, True]])
    return fast_against_slow(layers(enable_nested_tensor=False), torch.randn(2, 2, 32), src_key_padding_mask=pads)


@finding(
    TORCH,
    smallest="a batch of one row of 2 tokens, all masked",
    word="loud",
    why="the conversion to nested tensors refuses a batch without a token",
)
@torch.no_grad()
def torch_masked_batch() -> float:
    """a batch without a real token raises in eval on the fast path, and is finite in training and with gradients"""
    pads = torch.tensor([[True, True]])
    return raised(lambda: layers()(torch.randn(1, 2, 32), src_key_padding_mask=pads))
