"""Family: published models of one kind. A spec from their config, a config from a spec, and the names of tensors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from anyformer.block import Block
from anyformer.families.rules import Rule
from anyformer.model import TransformerSpec
from anyformer.parts.attention import Attention
from anyformer.parts.op import Op

__all__ = ["Config", "Family", "model_type", "shortest", "write_activation"]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

REQUIRED = object()

QUIET = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"),
    *(
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "onnx_export",
        "is_decoder",
    ),
    *("initializer_range", "initializer_factor", "init_std", "_attn_implementation", "gradient_checkpointing"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "language"),
    *("_num_labels", "use_bfloat16", "pruned_heads", "tokenizer_class", "prefix", "name_or_path", "model_max_length"),
    *("is_llama_config", "cache_implementation", "max_length", "min_length", "num_beams", "early_stopping"),
    *("length_penalty", "no_repeat_ngram_size", "do_sample", "temperature", "top_k", "top_p", "n_positions_pretrained"),
    *(
        "_commit_hash",
        "transformers.js_config",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "license",
        "ignore_keys",
    ),
}
"""Keys that change neither arithmetic nor shapes: ids, generation, bookkeeping."""


class Config:
    """A foreign config that remembers what was read: what nobody read is an error, in `finish`.

    `tensors` are the names in the checkpoint, for the few things that configs leave open.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
        self.values, self.tensors = dict(values), tensors
        self._read: set[str] = set()
        self._ignored: set[str] = set()

    def __call__(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of `key`; without it, or with null in place of a default, the `default`."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None and default is REQUIRED:
            raise ValueError(f"config.json lacks {key!r}, which a {model_type(self.values)} model needs")
        return default if value is None else value

    def choose(self, key: str, known: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """What `known` makes of the value."""
        value = self(key, default)
        if value not in known:
            close = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"config.json: {key!r} is {value!r}; {hint}known: {', '.join(map(str, known))}")
        return known[value]

    def activation(self, key: str, default: str) -> Any:
        return self.choose(key, ACTIVATIONS, default)

    def expect(self, key: str, *allowed: Any) -> None:
        """`key` may be absent, null, or one of `allowed`: anything else would change the arithmetic."""
        value = self(key, None)
        if value is not None and value not in allowed:
            raise ValueError(
                f"config.json: {key!r} must be {' or '.join(map(repr, allowed))}, but is {value!r}: not supported"
            )

    def ignore(self, *keys: str) -> None:
        """Keys of this family that change nothing that we compute."""
        self._read.update(keys)
        self._ignored.update(keys)

    def rest(self) -> dict[str, Any]:
        """What a spec does not hold, to be written back as it was."""
        return {key: value for key, value in self.values.items() if key in self._ignored | QUIET}

    def head(self, known: Mapping[str, Any]) -> Any:
        """What `known` says of the architecture, by the end of its class name; the first is meant if none is named."""
        names = self.values.get("architectures") or [None]
        if names[0] is None:
            return next(iter(known.values()))
        for ending, made in known.items():
            if names[0].endswith(ending):
                return made
        raise ValueError(f"config.json: architecture {names[0]!r} is not supported; known endings: {', '.join(known)}")

    def labels(self) -> int:
        """How many labels a classifier has."""
        return len(self.values.get("id2label") or range(self.values.get("num_labels") or 2))

    def finish(self) -> None:
        """ValueError that names the keys that were neither read nor known to say nothing."""
        left = sorted(self.values.keys() - self._read - QUIET)
        if left:
            raise ValueError(f"config.json has keys that nobody reads, so the model might differ: {', '.join(left)}")


class Family(NamedTuple):
    """`spec` and `config` are each other's inverse. `prefix` is what files saved without their head leave out of each
    name. `older` are spellings of earlier files, as (theirs, today's) endings of names. `defaults` are what keys mean
    that a config leaves out, where that is not what null means."""

    model_types: tuple[str, ...]
    spec: Callable[[Config], TransformerSpec]
    config: Callable[[TransformerSpec], dict[str, Any]]
    rules: Callable[[TransformerSpec], Sequence[Rule]]
    prefix: str = ""
    older: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})

    def read(self, values: Mapping[str, Any], tensors: Collection[str] = ()) -> tuple[TransformerSpec, dict[str, Any]]:
        """The spec of a config, all of whose keys are accounted for, and what of the config the spec does not hold."""
        config = Config({**self.defaults, **values}, tensors)
        spec = self.spec(config)
        config.finish()
        return shortest(spec), config.rest()

    def today(self, tensors: Iterable[str]) -> dict[str, str]:
        """The names of a file's tensors as the rules spell them: {today's: the file's}."""
        listed = list(tensors)
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in listed)
        found = {}
        for name in listed:
            new = self.prefix + name if bare else name
            for old, now in self.older:
                new = new.removesuffix(old) + now if new.endswith(old) else new
            found[new] = name
        return found


def shortest(spec: TransformerSpec) -> TransformerSpec:
    """The same model, with everything left out of its attentions that they would take by themselves."""

    def op(op: Op) -> Op:
        if not isinstance(op, Attention):
            return op
        width = op.width(spec.dim)
        return op.replace(
            head_dim=None if width * op.num_heads == spec.dim else width,
            num_kv_heads=None if op.kv_heads == op.num_heads else op.kv_heads,
            scale=None if op.scale == width**-0.5 else op.scale,
        )

    def block(block: Block) -> Block:
        return block.replace(branches=tuple(branch.replace(op=op(branch.op)) for branch in block.branches))

    stacks = {name: tuple(map(block, blocks)) for name, blocks in spec.stacks().items()}
    return spec.replace(**stacks)


def write_activation(name: str) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def model_type(values: Mapping[str, Any]) -> str:
    return str(values.get("model_type", "?"))
