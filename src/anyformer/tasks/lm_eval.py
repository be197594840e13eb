"""A model for lm-evaluation-harness, which is installed with anyformer[eval].

from lm_eval import simple_evaluate
from anyformer.tasks.lm_eval import HarnessLM

model, tokenizer, _ = anyformer.load("runs/gpt-mini")
simple_evaluate(HarnessLM(model, tokenizer), tasks=["lambada_openai"])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from anyformer.generate.loop import left_padded, start_id, steps
from anyformer.generate.sampling import Sampling
from anyformer.generate.stops import StopStrings
from anyformer.model import Transformer
from anyformer.tasks.scoring import front, loglikelihood, score
from anyformer.text.tokenizer import Tokenizer

try:
    from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
except ImportError:
    raise ImportError("lm-evaluation-harness is not installed: pip install anyformer[eval]") from None

__all__ = ["HarnessLM"]

logger = logging.getLogger(__name__)

MOST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing; the first counts
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


class HarnessLM(TemplateLM):
    """A decoder-only model, or an encoder-decoder, and its tokenizer, as the harness asks them.

    `max_length` (None: the model's positions, or what it was published for, or no limit) bounds context and
    continuation together: contexts that are too long lose their beginning, and `loglikelihood_rolling` reads windows of
    so many tokens, side by side. `batch_size` rows are read, or continued, at a time. Text is data: special tokens
    written in it are plain text, and there are no chat templates.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, *, batch_size: int = 16, max_length: int | None = None
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.backend = "causal" if model.encoder is None else "seq2seq"
        self.max_length = max_length or model.max_len or model.origin.get("max_position_embeddings")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token in place of an empty context."""
        return (front(self.tokenizer) or [self.eot_token_id])[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, and around it what the model expects; a decoder expects something only before it."""
        ids = self.tokenizer.encode(string)
        if add_special_tokens is False:
            return ids
        if self.backend == "seq2seq":
            return self.tokenizer.frame.around(ids)
        first = self.tokenizer.frame.ends[0]
        return ids if first is None else [first, *ids]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats of each text, all of it, after the prefix token."""
        texts = [self.tokenizer.encode(request.args[0]) for request in requests]
        before, most = [self.prefix_token_id], self.max_length
        return [
            score(self.model, ids, front=before, window=most, stride=most).total
            for ids in tqdm(texts, desc="Reading texts", disable=disable_tqdm)
        ]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a stop string, an end token, or the most tokens."""
        groups: dict[_Choices, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_Choices.of(request.args[1]), []).append(i)
        said: dict[int, str] = {}
        with tqdm(total=len(requests), desc="Writing texts", disable=disable_tqdm) as bar:
            for choices, rows in groups.items():
                rows.sort(key=lambda i: -len(requests[i].args[0]))
                for begin in range(0, len(rows), self.batch_size):
                    some = rows[begin : begin + self.batch_size]
                    texts = self._continued([requests[i].args[0] for i in some], choices)
                    said |= zip(some, texts, strict=True)
                    bar.update(len(some))
        return [said[i] for i in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(self._cut(context, len(ids) - 1), ids) for _, context, ids in requests]
        with tqdm(total=len(pairs), desc="Comparing continuations", disable=disable_tqdm) as bar:
            found = loglikelihood(
                self.model, pairs, batch_size=self.batch_size, tell=lambda count: bar.update(count - bar.n)
            )
        return [(pair.total, pair.greedy) for pair in found]

    def _cut(self, ids: list[int], more: int) -> list[int]:
        """The last ids, so many that `more` tokens fit behind them; one at least. A source needs no room behind it."""
        room = max((self.max_length or sys.maxsize) - (more if self.backend == "causal" else 0), 1)
        if len(ids) > room:
            logger.warning("a context of %d tokens is cut to its last %d, as the model takes no more", len(ids), room)
        return ids[-room:]

    def _continued(self, contexts: Sequence[str], choices: _Choices) -> list[str]:
        """One batch; it ends when every row has."""
        prompts = [self._cut(self.tok_encode(text) or [self.prefix_token_id], choices.most) for text in contexts]
        source = source_tokens = None
        if self.backend == "seq2seq":
            source, source_tokens = left_padded(prompts, self.model.device)
            prompts = [[start_id(self.model)] for _ in prompts]
        rows = [_Row(self.tokenizer, choices.stops) for _ in prompts]
        run = steps(
            self.model,
            prompts,
            choices.sampling,
            max_new_tokens=choices.most,
            end_ids=self.tokenizer.end_ids,
            source=source,
            source_tokens=source_tokens,
        )
        for step in run:
            for i, (row, token, live) in enumerate(zip(rows, step.ids.tolist(), step.live.tolist(), strict=True)):
                if live and step.ended.get(i) != "end":
                    row.push(token)
            if all(row.stopped or not live for row, live in zip(rows, step.live.tolist(), strict=True)):
                break
        return [row.whole() for row in rows]


class _Choices(NamedTuple):
    """How to continue: rows of equal choices go together."""

    most: int
    stops: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def of(cls, asked: dict[str, Any]) -> _Choices:
        """From `generation_kwargs`; without `do_sample` and `temperature`, greedy. ValueError for what is unknown."""
        unknown = set(asked) - {*MOST, *SAMPLING, "until", "do_sample", "temperature", "num_beams"}
        if asked.get("num_beams", 1) != 1:
            unknown.add("num_beams")
        if unknown:
            raise ValueError(
                f"generation_kwargs asks for {', '.join(sorted(unknown))}, which is not known: leave it out"
            )
        drawn = asked.get("do_sample", True)
        temperature = float(asked.get("temperature", 1.0 if asked.get("do_sample") else 0.0)) if drawn else 0.0
        most = next((int(asked[name]) for name in MOST if asked.get(name) is not None), 256)
        until = asked.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        more = {name: asked[name] for name in SAMPLING if asked.get(name) is not None}
        return cls(most, tuple(stop for stop in stops if stop), Sampling(temperature=temperature, **more))


class _Row:
    """The text of one row, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.text, self.stops, self.said = tokenizer.stream(), StopStrings(stops), ""

    @property
    def stopped(self) -> bool:
        return self.stops.hit is not None

    def push(self, token: int) -> None:
        self.said += self.stops.push(self.text.push(token))[0]

    def whole(self) -> str:
        """What was said, and what was held back."""
        return self.said + self.stops.push(self.text.flush())[0] + self.stops.flush()
