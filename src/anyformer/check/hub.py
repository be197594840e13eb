"""Hub: a model of `transformers`, as a subject: asked through its own forward pass, cache and generation."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.check.subject import NotApplicable, Subject, Text
from anyformer.tokens import Tokens

__all__ = ["HubSubject", "open_hub"]

Keywords = dict[str, Any]
TABLE = re.compile(r"wpe$|position_embeddings$|embed_positions$")
"""What a table of positions is called; models without one have no last position."""


class HubSubject(Subject):
    """A model of `transformers`, asked as its users ask it.

    Plain text is given as ids alone; padding as `attention_mask`, and if `positions` also as `position_ids`; packed
    documents as `position_ids` that begin anew, without a mask. `given` goes with every forward pass, as
    `use_cache=False` does. Norms and phases are computed in float32 there, so no copy is judged in float64.
    """

    module: Any
    pad: Any

    def __init__(self, module: nn.Module, *, name: str = "", positions: bool = False, seed: int = 0, **given: Any):
        super().__init__(module, seed=seed)
        config, parts = self.module.config, list(module.modules())
        self.name, self.positions, self.given = name or config.model_type, positions, given
        self.takes = frozenset(inspect.signature(module.forward).parameters)
        self.vocab_size, self.pad = config.vocab_size, getattr(config, "pad_token_id", None)
        self.sources = bool(config.is_encoder_decoder)
        masked = any(getattr(part, "is_causal", False) is True for part in parts)
        self.causal = self.sources or masked or self.module.can_generate()
        if not positions and "position_ids" in self.takes:
            self.notes = ("padding was given as attention_mask alone, without position_ids, as most users give it",)
        self.numbered = any(hasattr(part, "create_position_ids_from_input_ids") for part in parts)
        self.first = self.pad + 1 if self.numbered else 0
        tabled = any(isinstance(part, nn.Embedding) and TABLE.search(name) for name, part in module.named_modules())
        self.max_len = config.max_position_embeddings - self.first if tabled else None

    # -- words --------------------------------------------------------------------------------------------------------

    def ids(self, *shape: int) -> Int[Tensor, "*B"]:
        """Random ids, never the one that stands for padding."""
        return self.unlike_pad(super().ids(*shape))

    def other(self, ids: Int[Tensor, "*B"]) -> Int[Tensor, "*B"]:
        drawn = self.unlike_pad(super().other(ids))
        return drawn.where(drawn != ids, self.unlike_pad((ids + 2) % self.vocab_size))

    def unlike_pad(self, ids: Int[Tensor, "*B"]) -> Int[Tensor, "*B"]:
        return ids if self.pad is None else ids.where(ids != self.pad, (ids + 1) % self.vocab_size)

    # -- what a model answers -----------------------------------------------------------------------------------------

    def answer(self, text: Text) -> Float[Tensor, "B T X"]:
        """Logits; of a head that pools, the hidden states under it."""
        if not text.ids.numel():
            raise NotApplicable("nothing is promised there of a batch without a row or a token")
        said = self.said(text)
        out = self.module(**said, **self.given)
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if name in out and out[name].dim() == 3:
                return out[name]
        return self.module.base_model(**said, **self.given).last_hidden_state

    def said(self, text: Text) -> Keywords:
        """The keywords of a forward pass."""
        words = self.words(text.ids, text.tokens, "decoder_" if self.sources else "")
        if text.source is not None and text.source_tokens is not None:
            words |= self.words(text.source, text.source_tokens)
        return words

    def words(self, ids: Int[Tensor, "B T"], tokens: Tokens, side: str = "") -> Keywords:
        """Ids, and where they sit as a user of `transformers` says it."""
        if self.numbered:  # this family counts the ids that are not padding, so padding must be their pad
            ids = ids.where(tokens.real, self.pad)
        words = {f"{side}input_ids": ids}
        if tokens.start == 0 and tokens.ordered and not self.positions:
            return words
        packed, counted = several(tokens), follows(tokens)
        if packed and (side or self.sources or not self.causal):
            raise NotApplicable("rows of several documents are known to decoders alone")
        if not packed and not (tokens.real.all() and counted):
            words[f"{side}attention_mask"] = tokens.real.long()
        if packed or not counted or (self.positions and f"{side}position_ids" in self.takes):
            words[f"{side}position_ids"] = self.placed(tokens, f"{side}position_ids")
        return words

    def placed(self, tokens: Tokens, name: str) -> Int[Tensor, "B T"]:
        """Positions as this model counts them."""
        if name not in self.takes:
            raise NotApplicable("this kind of model cannot be told positions")
        if self.causal and not several(tokens) and bool((tokens.pos.diff(dim=1) < 0).any()):
            raise NotApplicable("a decoder reads tokens in the order in which they stand")
        return tokens.pos + self.first

    @torch.inference_mode()
    def by_pieces(self, text: Text, split: Sequence[int]) -> Float[Tensor, "B T X"]:
        """Empty pieces are left out: there is no call without a token."""
        name = next((name for name in ("cache", "past_key_values") if name in self.takes), None)
        if not self.causal or name is None:
            raise NotApplicable("it is not known to read a text piece by piece, by a cache")
        if several(text.tokens):
            raise NotApplicable("rows of several documents are known without a cache alone")
        side, said = "decoder_" if self.sources else "", self.said(text)
        if self.sources:
            source = {"input_ids": said.pop("input_ids"), "attention_mask": said.get("attention_mask")}
            said["encoder_outputs"] = self.module.get_encoder()(**source)
        said[f"{side}attention_mask"] = text.tokens.real.long()
        parts, kept = [], None
        for begin, end in itertools.pairwise([0, *itertools.accumulate(split)]):
            if begin == end:
                continue
            cuts = {f"{side}input_ids": begin, f"{side}position_ids": begin, f"{side}attention_mask": 0}
            piece = {key: value[:, cuts[key] : end] if key in cuts else value for key, value in said.items()}
            out = self.module(**piece, **{name: kept}, **(self.given | {"use_cache": True}))
            kept = out[name]
            parts.append(out["logits"] if "logits" in out else out["last_hidden_state"])
        return torch.cat(parts, 1)

    def embedding(self) -> nn.Module:
        stack = self.module.get_decoder() if self.sources else self.module
        table: nn.Module = stack.get_input_embeddings()
        return table

    @torch.inference_mode()
    def generated(self, prompts: Sequence[Sequence[int]], **choices: Any) -> list[list[int]]:
        """Prompts are padded on the left, as `transformers` asks of generation; it refuses to make no token at all."""
        if not self.module.can_generate():
            raise NotApplicable("only a decoder with logits over its vocabulary generates")
        seed, end_ids, heat = choices.get("seed", 0), choices.get("end_ids", ()), choices.get("temperature", 0.0)
        if not isinstance(seed, int):
            raise NotApplicable("a seed is for the whole batch")
        if not choices["max_new_tokens"]:
            return [[] for _ in prompts]
        longest, pad = max(map(len, prompts)), self.pad or 0
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        said: Keywords = {"input_ids": ids, "attention_mask": mask}
        if self.sources:
            said = {f"decoder_{key}": value for key, value in said.items()}
            said |= {"input_ids": self.read().cpu().expand(len(ids), -1), "decoder_start_token_id": ids[:, 0]}
        how = {"do_sample": heat > 0, "eos_token_id": [*end_ids] or [self.vocab_size], "pad_token_id": pad}
        how |= {"temperature": heat, "top_k": 0} if heat > 0 else {}
        said = {key: value.to(self.device) for key, value in said.items()}
        own = self.module.generation_config  # a penalty that a folder asks for is none of ours
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module.generation_config = type(own)()
            try:
                found = self.module.generate(**said, **how, max_new_tokens=choices["max_new_tokens"])
            finally:
                self.module.generation_config = own
        return [through(row, end_ids) for row in found[:, longest:].tolist()]

    def reloaded(self, folder: str) -> HubSubject:
        self.module.save_pretrained(folder)
        kept = self.module.config._attn_implementation
        return self.like(type(self.module).from_pretrained(folder, dtype=self.dtype, attn_implementation=kept))

    def fresh(self) -> HubSubject:
        return self.like(type(self.module)(copy.deepcopy(self.module.config)).to(self.device, self.dtype))

    def like(self, module: nn.Module) -> HubSubject:
        """The same questions to another model."""
        other = copy.copy(self)
        other.module, other.random = module.eval(), torch.Generator().manual_seed(self.seed)
        return other

    def anew(self, dtype: torch.dtype) -> HubSubject:
        other = super().anew(torch.float32 if dtype == torch.float64 else dtype)
        assert isinstance(other, HubSubject)
        return other


def several(tokens: Tokens) -> bool:
    """Whether a row holds more than one document."""
    most = tokens.seg.amax(1, keepdim=True) if tokens.length else tokens.seg
    return bool(((tokens.seg != most) & tokens.real).any())


def follows(tokens: Tokens) -> bool:
    """Whether the real tokens of each row are counted from 0 on, in order."""
    count = tokens.real.long().cumsum(1) - 1
    return bool(((tokens.pos == count) | ~tokens.real).all())


def through(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    """Up to the first end, it included."""
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids))
    return ids[: end + 1]


def open_hub(path: str | Path) -> HubSubject:
    """The model in a folder as `transformers` saves it, of the class that its config names first.

    Raises:
        ValueError: `transformers` is not installed; the folder is none, or names no class that can be loaded from it.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "such a folder is read by `transformers`, which is not installed: pip install transformers"
        ) from None
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} is no folder of a model: it holds no config.json")
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        name = (config.architectures or [""])[0]
        kind = getattr(transformers, name, None)
        if kind is None:
            raise ValueError(f"`transformers` has no class {name!r}, which its config names under `architectures`")
        model = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
        return HubSubject(model.eval(), name=Path(path).name)
    except Exception as error:  # the library raises a dozen classes, of several packages
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be loaded by transformers (code in a folder is never run): {why}") from error
