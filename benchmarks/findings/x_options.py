"""The options of a decoder of x-transformers, each alone, from the signatures of its parts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import x_transformers
from torch import nn
from x_transformers.x_transformers import Attention, AttentionLayers, FeedForward, TransformerWrapper

Options = dict[str, Any]
PARTS = {"": AttentionLayers, "attn_": Attention, "ff_": FeedForward}
"""What `Decoder` takes, by prefix; the rest is the wrapper's."""

VALUES: Options = {
    "shift_tokens": 1,
    "num_residual_streams": 2,
    "scale_residual_constant": 0.5,
    "sandwich_coef": 1,
    "par_ratio": 2,
    "disable_abs_pos_emb": True,
    "attn_num_mem_kv": 2,
    "attn_kv_heads": 2,
    "attn_value_dim_head": 8,
    "attn_max_attend_past": 3,
    "attn_sparse_topk": 1,
    "ff_mult": 2,
    "ff_softclamp_value": 1.0,
    "emb_dim": 16,
    "num_memory_tokens": 2,
    "emb_frac_gradient": 0.5,
}
"""What numbers are set to, and what has no default; a boolean is set to what it is not by default."""

SIZED: dict[str, Options] = {
    "attn_use_latent_q": {"attn_dim_latent_q": 8},
    "attn_use_latent_kv": {"attn_dim_latent_kv": 8},
    "attn_aggregated_residuals": {"attn_aggregated_residual_kwargs": {"lora_rank": 8}},
    "gated_multi_residual": {"num_residual_streams": 2, "residual_fn_kwargs": {"read_gate_rank": 8}},
}
"""Options that cannot be built at this width without a size of their own."""

LEFT_OUT = {
    "every decoder here has it": "dim depth heads verbose attn_dim_head num_tokens max_seq_len attn_layers",
    "the layers give it to their parts": "causal attn_dim attn_heads attn_causal attn_qkv_receive_diff_residuals "
    "attn_learned_value_residual_mix attn_rotate_num_heads attn_output_proj_depth ff_dim ff_output_proj_depth",
    "it is a part of another option": "dynamic_tanh_init_alpha alibi_num_heads rel_pos_num_buckets "
    "rel_pos_max_distance dynamic_pos_bias_log_distance dynamic_pos_bias_mlp_depth dynamic_pos_bias_norm "
    "rotary_emb_dim rotary_interpolation_factor rotary_xpos_scale_base rotary_base_rescale_factor rotate_num_heads "
    "polar_bias_uniform_init softclamp_output_value layerscale_init_value layer_integrate_use_softmax "
    "qkv_receive_diff_residuals hyper_conn_sinkhorn_iters learned_reinject_input_gate learned_value_residual_mix "
    "attn_sparse_topk_straight_through attn_swiglu_values attn_gate_values_rank attn_gate_values_headwise "
    "attn_output_gate_rank attn_output_gate_headwise attn_low_rank_silu_gates attn_qk_norm_groups attn_qk_norm_scale "
    "attn_qk_norm_dim_scale attn_gumbel_softmax_temp attn_gumbel_softmax_hard attn_hybrid_fold_axial_dim "
    "attn_hybrid_learned_mix attn_hybrid_mask_kwarg attn_data_dependent_alibi_per_row "
    "attn_data_dependent_alibi_per_row_dim_head attn_rel_proj_num_distance_basis attn_rel_proj_max_dist "
    "attn_cope_max_pos attn_cope_soft_onehot_pos attn_cope_talking_heads attn_logit_softclamp_value "
    "attn_laser_softclamp_value attn_dim_latent_q attn_dim_latent_kv attn_latent_rope_subheads ff_glu_mult_bias "
    "ff_glu_softclamp ff_glu_gate_softclamp_value ff_glu_up_softclamp_value memory_tokens_interspersed_every "
    "tie_embedding_scale mixture_of_softmax_k looped max_looped_steps train_max_recycle_steps num_cls_tokens "
    "num_pooled_tokens attn_pool_depth dim_pooled_tokens shift_mem_down",
    "for attention to another text": "cross_attend only_cross cross_residual_attn cross_attn_tokens_dropout "
    "attn_dim_context attn_inverted_attention",
    "for a model with a condition": "use_adaptive_layernorm use_adaptive_rmsnorm use_adaptive_layerscale dim_condition "
    "adaptive_condition_mlp adaptive_condition_mlp_expansion",
    "for an answer a text, or for other answers than logits over the vocabulary": "average_pool_embed use_cls_token "
    "attn_pool return_only_embed num_output_heads squeeze_out_last_dim logits_dim attn_dim_out attn_project_out "
    "ff_dim_out",
    "a module, a function or a list of layers": "custom_layers layers_execute_order attn_custom_attn_fn "
    "attn_hybrid_module ff_custom_activation token_emb to_logits",
    "it drops at random, or weighs a loss, in training alone": "layer_dropout attn_dropout attn_sublayer_dropout "
    "ff_dropout ff_sublayer_dropout emb_dropout attn_z_loss_weight",
    "it draws at random in evaluation too, as its name says": "attn_gumbel_softmax",
    "a model that is asked in another way (steps, memories, a cache given apart)": "recycling max_mem_len "
    "input_not_include_cache",
    "known on a GPU alone": "attn_flash_pack_seq",
}
"""Names by the reason for which they are not tried alone."""


def alone() -> dict[str, Options]:
    """What is asked for, by what a subject is called.

    Raises:
        ValueError: an option of this version is neither tried nor left out, or a table names one that is unknown.
    """
    tables = {*VALUES, *SIZED, *(name for names in LEFT_OUT.values() for name in names.split())}
    found: dict[str, Options] = {"plain": {}}
    known = dict(_defaults())
    untold = [name for name, default in known.items() if name not in tables and not isinstance(default, bool)]
    if odd := [*untold, *(tables - known.keys())]:
        raise ValueError(f"x_options.py does not fit this version of x-transformers: {', '.join(sorted(odd))}")
    for name, default in known.items():
        if name in SIZED:
            found[name] = {name: True} | SIZED[name]
        elif name in VALUES or name not in tables:
            value = VALUES.get(name, not default)
            found[name if value is True else f"{name}={value}"] = {name: value}
    return found


def _defaults() -> Iterator[tuple[str, object]]:
    """Every option and its default, but for those that are dictionaries of options themselves."""
    for prefix, part in {**PARTS, "wrapper": TransformerWrapper}.items():
        for name, parameter in inspect.signature(part).parameters.items():
            if parameter.kind != parameter.VAR_KEYWORD and not isinstance(parameter.default, dict):
                yield (name if prefix == "wrapper" else prefix + name), parameter.default


def decoder(options: Options, *, vocab: int, length: int) -> nn.Module:
    """A tiny decoder in evaluation; each option goes to where it belongs."""
    outer = inspect.signature(TransformerWrapper).parameters
    inner = {name: value for name, value in options.items() if name not in outer}
    layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, verbose=False, **inner)
    given = {name: value for name, value in options.items() if name in outer}
    return TransformerWrapper(num_tokens=vocab, max_seq_len=length, attn_layers=layers, **given).eval()
