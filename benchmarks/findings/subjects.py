"""Subjects of other libraries: tiny random models, each made when asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
import x_transformers
from torch import Tensor, nn

from anyformer.check.hub import HubSubject, follows, several
from anyformer.check.subject import Subject, Text

VOCAB = 99
Make = Callable[[], Subject]

# -- transformers -----------------------------------------------------------------------------------------------------

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
    torch.manual_seed(0)
    return HubSubject(kind(kind.config_class(vocab_size=VOCAB, **config)).eval(), name=f"transformers {name}", **more)


# -- x-transformers ---------------------------------------------------------------------------------------------------

X: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary_pos_emb": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "polar_pos_emb": {"polar_pos_emb": True},
    "alibi_pos_bias": {"alibi_pos_bias": True},
    "rel_pos_bias": {"rel_pos_bias": True},
    "dynamic_pos_bias": {"dynamic_pos_bias": True},
    "attn_data_dependent_alibi": {"attn_data_dependent_alibi": True},
    "attn_use_rel_proj_pos_bias": {"attn_use_rel_proj_pos_bias": True},
    "attn_use_cope": {"attn_use_cope": True},
    "shift_tokens": {"shift_tokens": 1},
    "attn_flash": {"attn_flash": True},
    "attn_max_attend_past": {"attn_max_attend_past": 3},
    "attn_num_mem_kv": {"attn_num_mem_kv": 2},
    "attn_add_zero_kv": {"attn_add_zero_kv": True},
    "attn_head_learned_sink": {"attn_head_learned_sink": True},
    "attn_kv_heads": {"attn_kv_heads": 2},
    "attn_one_kv_head": {"attn_one_kv_head": True},
    "attn_use_latent_kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    "attn_pre_talking_heads": {"attn_pre_talking_heads": True},
    "attn_post_talking_heads": {"attn_post_talking_heads": True},
    "attn_sparse_topk": {"attn_sparse_topk": 1},
    "attn_qk_norm": {"attn_qk_norm": True},
    "attn_l2_distance": {"attn_l2_distance": True},
    "attn_sigmoid": {"attn_sigmoid": True},
    "attn_hard": {"attn_hard": True},
    "attn_selective": {"attn_selective": True},
    "attn_softclamp_logits": {"attn_softclamp_logits": True},
    "attn_on_attn": {"attn_on_attn": True},
    "attn_gate_values": {"attn_gate_values": True},
    "attn_output_gate": {"attn_output_gate": True},
    "attn_head_scale": {"attn_head_scale": True},
    "attn_laser": {"attn_laser": True},
    "attn_orthog_projected_values": {"attn_orthog_projected_values": True},
    "ff_glu": {"ff_glu": True, "ff_swish": True},
    "use_rmsnorm": {"use_rmsnorm": True},
    "use_scalenorm": {"use_scalenorm": True},
    "use_dynamic_tanh": {"use_dynamic_tanh": True},
    "sandwich_norm": {"sandwich_norm": True},
    "pre_norm=False": {"pre_norm": False},
    "macaron": {"macaron": True},
    "residual_attn": {"residual_attn": True},
    "gate_residual": {"gate_residual": True},
    "orthog_residual": {"orthog_residual": True},
    "mv_split_residual": {"mv_split_residual": True},
    "num_residual_streams": {"num_residual_streams": 2},
    "integrate_layers": {"integrate_layers": True},
    "add_value_residual": {"add_value_residual": True},
    "reinject_input": {"reinject_input": True},
    "unet_skips": {"unet_skips": True},
    "weight_tie_layers": {"weight_tie_layers": True},
}
"""Options of `Decoder`, each alone."""


class XSubject(Subject):
    """A decoder of x-transformers: padding on the right as `mask`, on the left as `seq_start_pos`."""

    module: Any
    vocab_size, max_len = VOCAB, 128

    def __init__(self, options: dict[str, Any], *, name: str) -> None:
        self.options, self.name = options, f"x-transformers {name}"
        torch.manual_seed(0)
        super().__init__(self.made())

    def made(self) -> nn.Module:
        decoder = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, verbose=False, **self.options)
        return x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=128, attn_layers=decoder).eval()

    def anew(self, dtype: torch.dtype) -> Subject:
        """Softmax and biases are computed in float32 there, so no copy is judged in float64."""
        return super().anew(torch.float32 if dtype == torch.float64 else dtype)

    def answer(self, text: Text) -> Tensor:
        if not text.ids.numel():
            raise NotImplementedError("nothing is promised there of a batch without a row or a token")
        return self.module(text.ids, **self.padding(text))

    def padding(self, text: Text) -> dict[str, Tensor]:
        """What the library is told of padding."""
        if text.tokens.start == 0:
            return {}
        real = text.tokens.real
        if several(text.tokens) or not follows(text.tokens):
            raise NotImplementedError("of packed rows this library knows on a GPU alone, with its flash kernel")
        first, last = real.long().argmax(1), real.shape[1] - real.flip(1).long().argmax(1)
        right = torch.arange(real.shape[1]) < last[:, None]
        if (real != (right & (torch.arange(real.shape[1]) >= first[:, None]))).any():
            raise NotImplementedError("padding inside of a text has no word here")
        said = {} if right.all() else {"mask": right}
        return said if not first.any() else said | {"seq_start_pos": first}

    @torch.inference_mode()
    def by_pieces(self, text: Text, split: Sequence[int]) -> Tensor:
        if not self.module.can_cache_kv:
            raise NotImplementedError("this option has no cache, and the library says so")
        said = self.padding(text)
        if "mask" in said:
            raise NotImplementedError("padding on the right has no cache here")
        parts, cache = [], None
        for begin, end in itertools.pairwise([0, *itertools.accumulate(split)]):
            if begin == end:
                continue
            more = {} if cache is None else {"cache": cache, "cache_age": end - begin}
            logits, cache = self.module(text.ids[:, :end], return_intermediates=True, **said, **more)
            parts.append(logits)
        return torch.cat(parts, 1)

    def embedding(self) -> nn.Module:
        return self.module.token_emb

    @torch.inference_mode()
    def generated(self, prompts: Sequence[Sequence[int]], **choices: Any) -> list[list[int]]:
        if not isinstance(seed := choices.get("seed", 0), int) or len(choices.get("end_ids", ())) > 1:
            raise NotImplementedError("there is one seed for the batch, and one end token")
        if not choices["max_new_tokens"]:
            return [[] for _ in prompts]
        wrapped = x_transformers.AutoregressiveWrapper(self.module)
        how = {"temperature": choices.get("temperature", 0.0), "seq_len": choices["max_new_tokens"]}
        end = next(iter(choices.get("end_ids", ())), None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = wrapped.generate([torch.tensor(p) for p in prompts], eos_token=end, **how).tolist()
        return [row if end not in row else row[: row.index(end) + 1] for row in found]

    def fresh(self) -> Subject:
        return XSubject(self.options, name=self.name.split()[-1])


# -- torch ------------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """torch's encoder, as its tutorials wrap it: embeddings, learned positions, logits."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        nested = how.pop("enable_nested_tensor", True)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **how)
        self.embed, self.place = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and not how.get("norm_first"))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, pos: Tensor, **masks: Any) -> Tensor:
        return self.head(self.stack(self.embed(ids) + self.place(pos), **masks))


class Translator(nn.Module):
    """torch's `nn.Transformer`, wrapped likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.both = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, source_pos: Tensor, ids: Tensor, pos: Tensor, **masks: Any) -> Tensor:
        x, y = self.embed(source) + self.place(source_pos), self.embed(ids) + self.place(pos)
        return self.head(self.both(x, y, **masks))


class TorchSubject(Subject):
    """A model of `torch.nn`: padding as key padding masks, the future as its causal mask."""

    module: Any
    vocab_size, max_len = VOCAB, 64

    def __init__(self, make: Callable[[], nn.Module], *, name: str, causal: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(make().eval())
        self.make, self.name = make, f"torch {name}"
        self.sources = isinstance(self.module, Translator)
        self.causal = causal or self.sources

    def answer(self, text: Text) -> Tensor:
        masks = self.masks(text)
        if not self.sources:
            return self.module(text.ids, text.tokens.pos, **masks)
        return self.module(text.source, text.source_tokens.pos, text.ids, text.tokens.pos, **masks)

    def masks(self, text: Text) -> dict[str, Any]:
        if any(several(tokens) for tokens in (text.tokens, text.source_tokens) if tokens is not None):
            raise NotImplementedError("packed rows have no word here")
        if self.causal and bool((text.tokens.pos.diff(dim=1) < 0).any()):
            raise NotImplementedError("a decoder reads tokens in the order in which they stand")
        side = "tgt" if self.sources else "src"
        said: dict[str, Any] = {} if text.tokens.real.all() else {f"{side}_key_padding_mask": ~text.tokens.real}
        if self.causal:
            future = torch.ones(text.length, text.length, dtype=torch.bool).triu(1)
            said |= {f"{side}_mask" if self.sources else "mask": future}
        if self.sources and not text.source_tokens.real.all():
            hidden = ~text.source_tokens.real
            said |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        return said

    def embedding(self) -> nn.Module:
        return self.module.embed

    def fresh(self) -> Subject:
        return TorchSubject(self.make, name=self.name.removeprefix("torch "), causal=self.causal)


TORCH: dict[str, Make] = {
    "encoder": lambda: TorchSubject(Encoder, name="encoder"),
    "encoder, norm first": lambda: TorchSubject(lambda: Encoder(norm_first=True), name="encoder, norm first"),
    "encoder, causal": lambda: TorchSubject(Encoder, name="encoder, causal", causal=True),
    "transformer": lambda: TorchSubject(Translator, name="transformer"),
}


def told(name: str) -> HubSubject:
    """Asked with all that it can be told, and without the cache that is made by default."""
    subject = hub(name, positions=True)
    subject.name += ", told all"
    subject.given = {"use_cache": False} if subject.causal and not subject.sources else {}
    return subject


SUBJECTS: dict[str, Make] = {f"transformers {name}": lambda name=name: hub(name) for name in HUB}
SUBJECTS |= {f"transformers {name}, told all": lambda name=name: told(name) for name in HUB}
SUBJECTS |= {f"x-transformers {name}": lambda name=name: XSubject(X[name], name=name) for name in X}
SUBJECTS |= {f"torch {name}": make for name, make in TORCH.items()}
