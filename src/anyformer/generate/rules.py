"""The rules of sampling, as functions of logits; `sampling` joins them.

`penalize` and `discount` change logits (B, V). `cooled` makes scores (B, V) of them: the best is 0, a forbidden token
-inf. `top_k`, `top_p`, `min_p` and `typical` set more scores to -inf, and leave at least one token. A rule that is off
returns what it was given.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "at_least_float32",
    "check_penalty",
    "check_rows",
    "cooled",
    "discount",
    "draw",
    "finite_best",
    "min_p",
    "penalize",
    "top_k",
    "top_p",
    "typical",
    "wide",
]

_HEAD = 1024  # first tokens that are tried before the whole vocabulary is sorted for top-p and typical


def penalize(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float) -> Float[Tensor, "B V"]:
    """CTRL's repetition penalty (Keskar et al. 2019, section 4.1) on the tokens that a row has seen.

    A positive logit is divided by `penalty`, a negative one multiplied, so that both become less likely; once,
    however often the token was seen. A penalty below 1 rewards instead; 1 changes nothing. ValueError if it is <= 0.
    """
    check_penalty(penalty)
    if penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def discount(
    logits: Float[Tensor, "B V"], counts: Int[Tensor, "B V"], frequency: float, presence: float
) -> Float[Tensor, "B V"]:
    """Subtract `frequency` for each time that a row made a token, and `presence` once if it did (OpenAI's API).

    Numbers below 0 reward instead. Tokens that were not made keep every bit.
    """
    return torch.where(counts > 0, logits - (counts.to(logits.dtype) * frequency + presence), logits)


def cooled(logits: Float[Tensor, "B V"], temperature: float | tuple[float, ...]) -> Float[Tensor, "B V"]:
    """(logits - best) / temperature: never above 0, so no temperature overflows. At 0 all but the best are -inf.

    ValueError if a row has no finite best, or if the temperatures do not fit the rows.
    """
    best = finite_best(logits)
    degrees = _degrees(logits, temperature)
    scores = (logits - best) / degrees.clamp(min=torch.finfo(logits.dtype).tiny)
    if temperature != 0 and not (isinstance(temperature, tuple) and 0 in temperature):
        return scores
    ids = torch.arange(logits.shape[1], device=logits.device)
    return scores.masked_fill((degrees == 0) & (ids != logits.argmax(-1, keepdim=True)), -math.inf)


def top_k(scores: Float[Tensor, "B V"], count: int) -> Float[Tensor, "B V"]:
    """The `count` best stay (ties: lowest ids); 0, or the vocabulary's size or more, keeps all."""
    if not 0 < count < scores.shape[1]:
        return scores
    return _best(scores, count, scores.topk(count).values[:, -1:])


def top_p(scores: Float[Tensor, "B V"], mass: float) -> Float[Tensor, "B V"]:
    """The fewest best whose probabilities reach `mass` stay (ties: lowest ids; Holtzman et al. 2020); 1 keeps all."""
    if mass >= 1:
        return scores
    return _best(scores, *_reaching(scores, scores - scores.logsumexp(-1, keepdim=True), mass))


def min_p(scores: Float[Tensor, "B V"], share: float) -> Float[Tensor, "B V"]:
    """Tokens less likely than `share` times the best one go (Nguyen et al. 2024); 0 keeps all."""
    if share <= 0:
        return scores
    return scores.masked_fill(scores.exp() < share, -math.inf)  # exp(score) is relative to the best, whose score is 0


def typical(scores: Float[Tensor, "B V"], mass: float) -> Float[Tensor, "B V"]:
    """The fewest most typical tokens whose probabilities reach `mass` stay (Meister et al. 2023); 1 keeps all.

    A token is the more typical the nearer its surprise, -log p, is to the mean surprise, the entropy. Tokens as typical
    as the last one that is needed stay too, as in `transformers`: equals are not parted.
    """
    if mass >= 1:
        return scores
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs).nansum(-1, keepdim=True)  # a forbidden token gives 0 · -inf, and adds nothing
    typicality = -(logs + entropy).abs()
    return scores.masked_fill(typicality < _reaching(typicality, logs, mass)[1], -math.inf)


def draw(probs: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> Int[Tensor, "B"]:
    """Invert the cumulative distribution at `uniform`, in [0, 1): the first id whose running sum exceeds it."""
    total = probs.cumsum(-1, dtype=uniform.dtype)
    ids = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=probs.shape[1] - 1)
    # A parallel sum may wobble in its last bit and so land on a forbidden token: take the best instead.
    return torch.where(probs.gather(1, ids) > 0, ids, probs.argmax(-1, keepdim=True)).squeeze(1)


def finite_best(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B 1"]:
    """The largest logit of each row. ValueError if one is not finite: all are forbidden, or the model overflowed."""
    best = logits.amax(-1, keepdim=True)
    if not best.isfinite().all():
        row = int((~best[:, 0].isfinite()).nonzero()[0])
        raise ValueError(
            f"the largest logit of a row must be finite, but that of row {row} is {float(best[row])}; "
            "leave at least one token allowed, and look for NaN or overflow in the model."
        )
    return best


def at_least_float32(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Half precision as float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def wide(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def check_rows(name: str, value: object, batch: int) -> None:
    """ValueError if `value` is a tuple whose length is not the number of rows."""
    if isinstance(value, tuple) and len(value) != batch:
        raise ValueError(f"{name} must be one number or one per row ({batch}), but {len(value)} are given: {value}.")


def check_penalty(penalty: object) -> None:
    """ValueError unless `penalty` is one that `penalize` can divide by."""
    if not isinstance(penalty, Real) or isinstance(penalty, bool) or not 0 < float(penalty) < math.inf:
        raise ValueError(f"repetition_penalty must be a finite number > 0 (1 is off), but is {penalty!r}.")


def _degrees(logits: Tensor, temperature: float | tuple[float, ...]) -> Tensor:
    """(B, 1) temperatures, kept within the dtype: one too small for it must not become 0, which would mean greedy."""
    check_rows("temperature", temperature, len(logits))
    tiny = torch.finfo(logits.dtype).tiny
    if not isinstance(temperature, tuple):
        return logits.new_full((len(logits), 1), _within(temperature, tiny), dtype=logits.dtype)
    return logits.new_tensor([[_within(degree, tiny)] for degree in temperature])


def _within(degree: float, tiny: float) -> float:
    return min(max(float(degree), tiny), 1 / tiny) if degree else 0.0


def _reaching(keys: Tensor, logs: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """(B, 1) twice: how many tokens of the greatest keys it takes to reach `mass`, and the least of these keys.

    The probability before a token decides: it stays if those ahead alone do not reach `mass`. The first few usually
    do, so the whole vocabulary is sorted only if they do not.
    """
    ordered, ids = keys.topk(min(_HEAD, keys.shape[1]))
    reached = _running_sum(logs, ids)
    if not (reached[:, -1] >= mass).all():
        ordered, ids = keys.sort(-1, descending=True)
        reached = _running_sum(logs, ids)
    count = 1 + (reached[:, :-1] < mass).sum(-1, keepdim=True)
    return count, ordered.gather(1, count - 1)


def _running_sum(logs: Tensor, ids: Tensor) -> Tensor:
    """(B, n) probability of the first 1..n of the `ids`, given the logs of all probabilities."""
    return logs.gather(1, ids).exp().cumsum(-1, dtype=wide(logs.device))


def _best(scores: Tensor, count: Tensor | int, least: Tensor) -> Tensor:
    """Keep the `count` (one, or (B, 1)) best scores, given the least of them; of equals at the edge the lowest ids."""
    above, level = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | (level & (level.cumsum(-1) <= room))), -math.inf)
