"""Subjects of x-transformers: a decoder, with each option alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import x_transformers
from torch import Tensor, nn

from anyformer.check.hub import follows, several
from anyformer.check.subject import NotApplicable, Subject, Text, stir
from findings.x_options import Options, alone, decoder

VOCAB, LENGTH = 99, 128


class XSubject(Subject):
    """A decoder of x-transformers: padding on the right as `mask`, on the left as `seq_start_pos`."""

    module: Any
    vocab_size, max_len = VOCAB, LENGTH

    def __init__(self, options: Options, *, name: str) -> None:
        super().__init__(decoder(options, vocab=VOCAB, length=LENGTH))
        self.options, self.name = options, name

    def anew(self, dtype: torch.dtype) -> Subject:
        """Built again, since some cannot be copied. Softmax and biases are computed in float32 there, so no copy is
        judged in float64."""
        torch.manual_seed(self.seed)
        other = self.fresh()
        other.module.to(torch.float32 if dtype == torch.float64 else dtype)
        stir(other.module, self.seed)
        return other

    def answer(self, text: Text) -> Tensor:
        if not text.ids.numel():
            raise NotApplicable("nothing is promised there of a batch without a row or a token")
        return self.module(text.ids, **self.padding(text))

    def padding(self, text: Text) -> dict[str, Tensor]:
        """What the library is told of padding."""
        if text.tokens.start == 0:
            return {}
        real = text.tokens.real
        if several(text.tokens) or not follows(text.tokens):
            raise NotApplicable("of packed rows this library knows on a GPU alone, with its flash kernel")
        first, last = real.long().argmax(1), real.shape[1] - real.flip(1).long().argmax(1)
        right = torch.arange(real.shape[1]) < last[:, None]
        if (real != (right & (torch.arange(real.shape[1]) >= first[:, None]))).any():
            raise NotApplicable("padding inside of a text has no word here")
        said = {} if right.all() else {"mask": right}
        return said if not first.any() else said | {"seq_start_pos": first}

    @torch.inference_mode()
    def by_pieces(self, text: Text, split: Sequence[int]) -> Tensor:
        if not self.module.can_cache_kv:
            raise NotApplicable("this option has no cache, and the library says so")
        said = self.padding(text)
        if "mask" in said:
            raise NotApplicable("padding on the right has no cache here")
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
            raise NotApplicable("there is one seed for the batch, and one end token")
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
        return XSubject(self.options, name=self.name)


X_SUBJECTS = {
    (called := f"x-transformers {name}"): functools.partial(XSubject, options, name=called)
    for name, options in alone().items()
}
