"""Causal language modelling: text in, a model that continues text out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.data.baselines import bigram_bits_per_byte, gzip_bits_per_byte
from anyformer.data.documents import Document, Skipped, read_documents
from anyformer.data.store import IGNORE, Batch, TokenStore, Windows, evaluation_windows, split_documents
from anyformer.files import write_text
from anyformer.generate.sampling import Sampling
from anyformer.generate.text import stream
from anyformer.model import Transformer
from anyformer.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from anyformer.tokens import Tokens
from anyformer.train.loop import Loss, Task
from anyformer.train.loss import cross_entropy

__all__ = ["CausalLM", "Corpus", "logits_and_aux", "prepare", "reopen"]


ENCODED_AT_ONCE = 64

Tell = Callable[..., None]
"""`tell(stage, share)`: what is being done, and how much of it is done, if known."""


class Corpus(NamedTuple):
    """Text, ready to train on. `baselines` are bits per byte of the held-out text under simple models."""

    tokenizer: Tokenizer
    train: TokenStore
    held_out: TokenStore
    baselines: dict[str, float]
    skipped: list[Skipped]


def prepare(
    source: str,
    folder: Path,
    *,
    vocab_size: int | None,
    held_out: float = 0.1,
    seed: int = 0,
    tell: Tell = lambda stage, share=None: None,
) -> Corpus:
    """Read `source`, split it by document, train a tokenizer on the training part, and write both parts as tokens.

    `vocab_size` None means plain bytes. `tell` hears of each stage as it begins, and of the share of it that is done.
    """
    tell(f"reading {source}")
    documents, skipped = read_documents(source)
    train, rest = split_documents(documents, held_out, seed)
    if vocab_size is not None:
        tell(f"training a tokenizer of {vocab_size} tokens on {_size(train)}")
    tokenizer = _tokenizer(train, vocab_size)
    tokenizer.save(folder)
    seen = _store(folder / "train.tokens", train, tokenizer, tell)
    unseen = _store(folder / "held_out.tokens", rest, tokenizer, tell)
    tell("measuring gzip and a bigram model, to compare with")
    baselines = {
        "gzip": gzip_bits_per_byte([document.text for document in rest]),
        "bigram": bigram_bits_per_byte(seen, unseen, tokenizer.vocab_size),
    }
    write_text(folder / "baselines.json", json.dumps(baselines))
    return Corpus(tokenizer, seen, unseen, baselines, skipped)


def reopen(folder: Path) -> Corpus:
    """The corpus that `prepare` wrote."""
    seen, unseen = (TokenStore.open(folder / f"{name}.tokens") for name in ("train", "held_out"))
    baselines = json.loads((folder / "baselines.json").read_text(encoding="utf-8"))
    return Corpus(load_tokenizer(folder), seen, unseen, baselines, [])


class CausalLM(Task):
    """Predict each next token; documents do not see one another, and no label crosses from one to the next.

    `forward` is `logits_and_aux`, or a compiled form of it.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch_size: int,
        length: int,
        seed: int,
        prompt: str = "",
        forward: Forward | None = None,
    ) -> None:
        self.corpus, self.batch_size, self.length, self.prompt = corpus, batch_size, length, prompt
        self.forward = forward or logits_and_aux
        self.windows = Windows(corpus.train, length, seed)

    def batch(self, step: int) -> Batch:
        return self.windows.batch(step, self.batch_size)

    def loss(self, model: Transformer, batch: Batch) -> Loss:
        ids, targets, document = (torch.from_numpy(part).to(model.device) for part in batch)
        logits, aux = self.forward(model, ids, Tokens.packed(_from_zero(document)))
        total = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return Loss(total, (targets != IGNORE).sum(), aux)

    def evaluate(self, model: Transformer, last: bool) -> dict[str, float]:
        """Nats per token and bits per byte on held-out text: all at the last, 32 batches from all over before."""
        batches = list(evaluation_windows(self.corpus.held_out, self.length, 16))
        some = batches if last else batches[:: max(len(batches) // 32, 1)]
        losses = [self.loss(model, batch) for batch in some]
        targets = sum(int(loss.targets) for loss in losses)
        nats = sum(loss.total.item() for loss in losses) / max(targets, 1)
        return {"held_out_loss": nats, "bits_per_byte": nats * _targets_per_byte(self.corpus.held_out) / math.log(2)}

    def sample(self, model: Transformer) -> str:
        tokenizer, choice = self.corpus.tokenizer, Sampling(temperature=0.8, top_p=0.95, seed=0)
        return self.prompt + "".join(stream(model, tokenizer, self.prompt, max_new_tokens=120, sampling=choice))


Forward = Callable[[Transformer, Tensor, Tokens], tuple[Tensor, Tensor | None]]


def logits_and_aux(model: Transformer, ids: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """Logits (B, T, V), and the auxiliary loss or None."""
    states = model.decode(ids, tokens)
    return model.head(states.x), states.aux


def _from_zero(document: Tensor) -> Tensor:
    """Documents numbered from 0 in each row: a batch with one document a row is then seen to be plain text."""
    return (document - document[:, :1]).masked_fill(document < 0, -1)


def _tokenizer(documents: Sequence[Document], vocab_size: int | None) -> Tokenizer:
    if vocab_size is None:
        return ByteTokenizer()
    return BPETokenizer.train([document.text for document in documents], vocab_size)


def _store(path: Path, documents: Sequence[Document], tokenizer: Tokenizer, tell: Tell) -> TokenStore:
    """Each document between two end tokens: the first one predicts how a text begins."""
    size = sum(len(document.text.encode("utf-8", "surrogatepass")) for document in documents)
    stage = f"turning {_size(documents)} into tokens, {path.stem.replace('_', ' ')}"
    ids = _encoded(documents, tokenizer, lambda share: tell(stage, share))
    return TokenStore.write(path, ids, vocab_size=tokenizer.vocab_size, num_bytes=size)


def _encoded(documents: Sequence[Document], tokenizer: Tokenizer, tell: Callable[[float], None]) -> Iterator[list[int]]:
    """The ids of each document, encoded some at a time, on all cores."""
    end = tokenizer.end_id
    tell(0.0)
    for begin in range(0, len(documents), ENCODED_AT_ONCE):
        some = documents[begin : begin + ENCODED_AT_ONCE]
        for ids in tokenizer.encode_batch([document.text for document in some]):
            yield [end, *ids, end]
        tell((begin + len(some)) / len(documents))


def _targets_per_byte(store: TokenStore) -> float:
    return (len(store) - len(store.starts)) / max(store.num_bytes, 1)


def _size(documents: Sequence[Document]) -> str:
    return f"{sum(len(document.text) for document in documents) / 1e6:.1f} M characters"
