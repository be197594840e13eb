"""What is decoded: the same through a cache as in full, and generation that keeps to its limits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.accelerate.fast import accelerate
from anyformer.accelerate.operators import has_numba
from anyformer.check.law import ALLOWED, Law, Trial, Trials, apart, law, needs
from anyformer.check.layouts import marked, packed, padded, planning, steady, texts
from anyformer.check.ours import Ours
from anyformer.check.subject import Subject, Text
from anyformer.parts.attention import Attention
from anyformer.tokens import Tokens

__all__ = ["LAWS"]

LENGTH, FAR, NEW = 9, 64, 5
CUTS: dict[str, Sequence[int]] = {
    "whole": (),
    "one by one": range(1, LENGTH),
    "unevenly": (3, 4, 6),
    "a prompt, then one by one": range(5, LENGTH),
}
WITH_NOTHING = (0, 3, 3)
HOT = 100.0

Ids = list[int]


# -- the cache --------------------------------------------------------------------------------------------------------


@law("cache", "decoding by a cache, in any split, equals the full pass")
@torch.inference_mode()
def cache(s: Subject) -> Trials:
    """What is said of a token is the same whether its text is read at once or piece by piece, by a cache.

    A text of four tokens in every split; plain, padded and packed ones in several, against the full pass; texts that
    windows of up to 64 tokens do not reach across; in float32 also one by one by the accelerated decoder.
    """
    needs(s.causal, "an encoder reads its text at once")
    steady(s)
    plain = [marked(s, s.text(batch, s.longest(s.frontier + length))) for batch, length in ((1, 4), (2, LENGTH))]
    places = [cuts for count in range(4) for cuts in itertools.combinations((1, 2, 3), count)]
    yield from _split(s, plain[0], {f"cut at {[*cuts]}": cuts for cuts in places})
    yield from _split(s, plain[1], CUTS | ({"with empty pieces": WITH_NOTHING} if isinstance(s, Ours) else {}))
    unevenly, at_last_singly = ({name: CUTS[name]} for name in ("unevenly", "a prompt, then one by one"))
    rows = texts(s, [s.frontier + length for length in (6, 2, LENGTH - 1)])
    yield from _split(s, padded(s, rows, "left", 1), at_last_singly)
    yield from _split(s, padded(s, rows, "both", 2, source_side="right"), unevenly)
    yield from _split(s, packed(s, [texts(s, [s.frontier + length for length in (4, 1, 3)])], 1), at_last_singly)
    if isinstance(s, Ours):
        yield from _beyond(s)
        yield from _accelerated(s, plain[1])


def _split(s: Subject, text: Text, cuts: dict[str, Sequence[int]], more: str = "") -> Trials:
    """Each split of a text against the full pass; cuts are counted from the end of what all tokens see."""
    whole = s.answer(text)
    for name, places in cuts.items():
        split = _pieces(s, text, [s.frontier + place for place in places])
        yield _read(s, text, split, whole, f"{name}{more}")


def _read(s: Subject, text: Text, split: Sequence[int], whole: Float[Tensor, "B T X"], name: str) -> Trial:
    real = text.tokens.real
    documents = text.tokens.seg.tolist() if text.tokens.start is None else "plain"
    source = "" if text.source is None else f", source {text.source.tolist()}"
    said = f"ids {text.ids.tolist()}, documents {documents}{source}, read {name} in pieces of {[*split]}"
    return apart(s.by_pieces(text, split)[real], whole[real], said)


def _pieces(s: Subject, text: Text, cuts: Sequence[int]) -> list[int]:
    """The lengths of the pieces, without the cuts that fall within what all tokens see, or behind the end."""
    legal = [cut for cut in cuts if cut < text.length and not _splits_prefix(text.tokens, cut, s.frontier)]
    return [end - begin for begin, end in itertools.pairwise([0, *legal, text.length])]


def _splits_prefix(tokens: Tokens, cut: int, frontier: int) -> bool:
    real = tokens.real[:, cut:]
    first = real & (real.cumsum(1) == 1)
    pos = tokens.pos[:, cut:]
    return bool((first & (pos > 0) & (pos < frontier)).any())


def _beyond(s: Ours) -> Trials:
    """A text longer than windows reach, in pieces shorter than a window, about as long, and single."""
    ops = [op for op in s.ops("decoder") if isinstance(op, Attention)]
    reach = max(((op.pattern.reach() or 0) + op.pattern.first() for op in ops), default=0)
    known, length = min(reach, FAR), s.longest(s.frontier + min(reach, FAR) + LENGTH)
    if reach < LENGTH - 2:
        return
    text = marked(s, s.text(2, length))
    cuts = {
        "a prompt, then one by one": range(max(known - 2, 1), length),
        "unevenly": (known // 2, known, known + 1, known + 5),
    }
    yield from _split(s, text, cuts, "" if reach < length else f" (a window of {reach} tokens is not left)")


def _accelerated(s: Ours, text: Text) -> Trials:
    if s.dtype != torch.float32 or s.device.type != "cpu" or not has_numba():
        return
    quick = s.replaced(accelerate(copy.deepcopy(s.model)))
    split = _pieces(s, text, range(s.frontier + 1, text.length))
    yield _read(quick, text, split, s.answer(text), "one by one by the accelerated decoder")


# -- generation -------------------------------------------------------------------------------------------------------


@law("generation", "generation stops, keeps its limits, and repeats with its seed", unit="wrong ids", limits=0.0)
@torch.inference_mode()
@planning
def generation(s: Subject) -> Trials:
    """Text is continued by the best tokens, for each prompt as if it were alone, up to an end token, the wanted length
    or the last position, and no further; what is drawn depends on the seed alone.

    Ids that the full pass rates below the best one (by more than rounding), that are missing, or that are too many: for
    single and ragged prompts, with and without end tokens; up to the last position, if this library's model has at most
    64 of them.
    Draws at a high temperature: twice with a seed, with another, and in float64 each row alone with its own seed.
    """
    shortest = s.frontier + 1
    lengths = sorted({min(shortest + more, s.longest(shortest + more + 1) - 1) for more in (0, 2, 4)})
    needs(lengths[0] >= shortest, f"it has {s.max_len} positions: too few for a new token")
    steady(s)
    prompts = [s.ids(length).tolist() for length in lengths]
    yield _continued(s, prompts[:1], 0)[0]
    yield _continued(s, prompts[:1], NEW)[0]
    trial, new = _continued(s, prompts, NEW)
    yield trial
    yield _continued(s, prompts, NEW, [max(new[0], key=new[0].index)])[0]
    if isinstance(s, Ours) and s.max_len is not None and s.max_len <= FAR:
        yield _continued(s, [s.ids(s.max_len - 1).tolist(), prompts[0]], NEW)[0]
    yield from _drawn(s, prompts)


def _continued(s: Subject, prompts: Sequence[Ids], most: int, ends: Sequence[int] = ()) -> tuple[Trial, list[Ids]]:
    new = s.generated(prompts, max_new_tokens=most, end_ids=ends, temperature=0.0)
    wrong = sum(_wrong(s, prompt, ids, most, ends) for prompt, ids in zip(prompts, new, strict=True))
    return Trial(float(wrong), f"prompts {prompts}, max_new_tokens={most}, end_ids={[*ends]}: {new}"), new


def _wrong(s: Subject, prompt: Ids, new: Ids, most: int, ends: Sequence[int]) -> int:
    """How many of the new ids should not be there, are not the best ones, or are missing."""
    room = most if s.max_len is None else min(most, s.max_len - len(prompt))
    stop = next((place + 1 for place, token in enumerate(new) if token in ends), room)
    kept = new[: min(stop, room)]
    return abs(len(new) - min(stop, room)) + _not_best(s, prompt, kept)


def _not_best(s: Subject, prompt: Ids, new: Ids) -> int:
    text = _asked(s, [*prompt, *new[:-1]])
    if text is None or not new:
        return 0
    logits = s.answer(text)[0, len(prompt) - 1 :].double()
    best, chosen = logits.amax(-1), logits.gather(1, torch.tensor(new, device=s.device)[:, None])[:, 0]
    rounding = ALLOWED[s.dtype] * torch.finfo(s.dtype).eps * logits.abs().amax(-1).clamp(min=1.0)
    return int((best - chosen > rounding).sum())


def _asked(s: Subject, ids: Ids) -> Text | None:
    """The text that is continued, behind the source that `generated` reads; None where that is not known."""
    rows = torch.tensor([ids], device=s.device)
    tokens = Tokens.arange(1, len(ids), device=s.device)
    if not s.sources:
        return Text(rows, tokens)
    if not isinstance(s, Ours):
        return None
    return Text(rows, tokens, s.read(), Tokens.arange(1, 3, device=s.device))


def _drawn(s: Subject, prompts: Sequence[Ids]) -> Trials:
    choices = {"max_new_tokens": NEW, "temperature": HOT}
    said = f"prompts {prompts}, temperature={HOT}"
    first = s.generated(prompts, seed=1, **choices)
    yield Trial(_unlike(s.generated(prompts, seed=1, **choices), first), f"{said}: seed 1 does not repeat {first}")
    if s.vocab_size ** len(first[0]) > 1e5:
        other = s.generated(prompts, seed=2, **choices)
        yield Trial(float(other[0] == first[0]), f"{said}: seeds 1 and 2 both give {first[0]}")
    if not isinstance(s, Ours) or s.dtype != torch.float64:
        return
    seeds = tuple(11 * len(prompt) for prompt in prompts)
    together = s.generated(prompts, seed=seeds, **choices)
    for seed, prompt, ids in [*zip(seeds, prompts, together, strict=True)][-2:]:
        alone = s.generated([prompt], seed=seed, **choices)
        yield Trial(_unlike(alone, [ids]), f"prompt {prompt}, seed {seed}: alone {alone[0]}, in a batch {ids}")


def _unlike(a: Sequence[Ids], b: Sequence[Ids]) -> float:
    """In how many places rows of ids differ."""
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in itertools.zip_longest(x, y)]
    return float(sum(x != y for x, y in pairs))


LAWS: tuple[Law, ...] = (cache, generation)
