"""What training needs: gradients that are right, reach everything, and cannot learn what is not there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from anyformer.block import BranchModule
from anyformer.check.changed import small, undropped, without_dropout
from anyformer.check.law import INTEGERS, Law, Trial, Trials, apart, law, needs
from anyformer.check.layouts import marked
from anyformer.check.ours import Ours, ours
from anyformer.check.subject import Subject, Text, stir
from anyformer.parts.attention import Attention, AttentionModule
from anyformer.parts.head import LMHead, LMHeadModule, PooledHead
from anyformer.parts.moe import MoEModule
from anyformer.parts.per_head import PerHead
from anyformer.parts.precision import at_least_float32
from anyformer.tokens import Tokens
from anyformer.train.loop import Loss
from anyformer.train.loss import IGNORE, cross_entropy

__all__ = ["LAWS"]

STILL = "none of its parameters takes gradients"


@law("accumulation", "accumulated gradients equal the big batch's")
def accumulation(s: Subject) -> Trials:
    """A batch may be read in pieces of unequal counts: their summed losses, divided once by the count of all targets,
    have the gradients of the whole. So no row feels its neighbours, and no piece is averaged by itself.

    Rows of unequal lengths, padded, with random targets; first at once (the mean loss), then piece by piece.
    """
    needs(not s.fixed, INTEGERS)
    needs(any(p.requires_grad for p in s.module.parameters()), STILL)
    if isinstance(s, Ours):
        s = undropped(s)
        s.module.train()
    for pieces in ([[2], [2, 1]], [[7, 3], [7, 1, 5], [7]]):
        lengths = [s.longest(length) for piece in pieces for length in piece]
        text, targets = _ragged(s, lengths)
        whole = _gradients(s.module, [_loss(s, text, targets).mean()])
        losses = [_loss(s, text.rows(rows), targets[rows]) for rows in _rows(pieces)]
        count = torch.stack([loss.targets for loss in losses]).sum().clamp(min=1)
        summed = _gradients(s.module, [loss.total / count for loss in losses])
        said = f"rows of {lengths} tokens {text.ids.tolist()} in pieces of {[len(piece) for piece in pieces]} rows"
        yield max(
            (apart(summed[name], whole[name], f"{said}: gradient of {name}") for name in whole),
            key=lambda trial: trial.error,
        )


@law("initial_loss", "a new model guesses evenly", unit="nats", limits=1.0, anew=False)
@torch.inference_mode()
def initial_loss(s: Subject) -> Trials:
    """Before training no word is favoured: the loss is about ln V.

    The mean over three new models on random text with random targets. The token itself is left out of the words to
    choose from, as a tied table favours it by its nature; logits that vary by 1, as a tied table's may, cost half a
    nat.
    """
    losses = []
    for seed in range(3):
        torch.manual_seed(s.seed + seed)
        new = s.fresh()
        new.module.eval()
        needs(new.vocab_size > 2, "its vocabulary is too small to choose from")
        text = new.text(4, new.longest(24))
        answer = new.answer(text)
        needs(_speaks(new, answer), "its answers are no logits over the vocabulary")
        logits = answer.double().scatter(-1, text.ids[..., None], -torch.inf)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), new.other(text.ids).flatten()).item())
    even = math.log(s.vocab_size - 1)
    told = ", ".join(f"{loss:.3f}" for loss in losses)
    said = f"seeds from {s.seed} on: losses of {told} nats, where an even guess gives {even:.3f}"
    yield Trial(abs(sum(losses) / len(losses) - even), said)


STEPS, LAST, ROWS, LENGTH = 60, 20, 32, 9


@law("noise", "what cannot be learned is not learned", unit="nats", limits=0.05, anew=False, once=True)
@torch.enable_grad()
def noise(s: Subject) -> Trials:
    """Random tokens cannot be foretold: a model that does better than chance has seen what it should foretell.

    A small model of the same parts, trained for 60 steps on new random tokens each; the mean loss of the last 20 falls
    short of that of an even guess.
    """
    needs(s.causal, "an encoder may look ahead")
    s = ours(s)
    needs(s.frontier <= 64, f"all may see the first {s.frontier} tokens: a longer text would take too long to learn")
    spec = small(without_dropout(s.spec))
    spec = spec if isinstance(spec.head, LMHead) else spec.replace(head=LMHead())
    pupil = Ours(spec.build(device=s.device).train(), kernel=s.kernel, seed=s.seed)
    hidden = max(pupil.frontier, 1)
    length = pupil.longest(hidden + LENGTH - 1)
    needs(length > hidden, "it has no positions for a token that is hidden from another")
    losses = list(itertools.islice(_learning(pupil, length, hidden), STEPS))
    mean, even = sum(losses[-LAST:]) / LAST, math.log(spec.vocab_size)
    said = (
        f"{ROWS} texts of {length} random ids below {spec.vocab_size} a step, from seed {s.seed}: a loss of {mean:.3f}"
    )
    yield Trial(max(even - mean, 0.0), f"{said} nats, where nothing below {even:.3f} can be learned")


def _learning(s: Ours, length: int, hidden: int) -> Iterator[float]:
    """The loss of each step of training to foretell the next token, of those from place `hidden` on."""
    optimizer = torch.optim.Adam(s.module.parameters(), lr=0.02)
    while True:
        text = s.text(ROWS, length)
        logits = s.answer(text)[:, hidden - 1 : -1]
        loss = cross_entropy(logits.flatten(0, 1), text.ids[:, hidden:].flatten()) / (ROWS * (length - hidden))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


ROUNDS = 40


@law("dead", "gradients reach every parameter", unit="parameters", limits=0.0)
def dead(s: Subject) -> Trials:
    """Every parameter is taught: none is left out of the graph, unused, or cut off from the loss.

    The loss on random texts, with the auxiliary loss and some marked tokens; up to 40 batches, each with weights drawn
    anew, until each expert had its turn. What cannot matter by the arithmetic itself is let pass: a bias of keys that
    nothing turns (it adds the same to all scores of a query), queries and keys where only one key is seen, and a router
    without a choice.
    """
    s = ours(s)
    needs(not s.fixed, INTEGERS)
    needs(torch.finfo(s.dtype).eps < 1e-6, "half precision rounds small gradients to zero")
    length = s.longest(12)
    needs(length > 1, "it has one position, so no token meets another")
    text = marked(s, s.text(16, length, source=length))
    mute = {id(parameter) for parameter in _mute(s, text)}
    left = {name: p for name, p in s.module.named_parameters() if p.requires_grad and id(p) not in mute}
    needs(left, STILL)
    for seed in range(ROUNDS):
        stir(s.module, seed)
        s.module.zero_grad(set_to_none=True)
        _taught(s, text).backward()
        left = {name: p for name, p in left.items() if p.grad is None or not p.grad.any()}
        if not left:
            break
        text = text.saying(s.ids(*text.ids.shape))
    yield Trial(float(len(left)), f"no gradient reaches {', '.join(left)}")


def _taught(s: Ours, text: Text) -> Tensor:
    """The mean loss of a batch with random targets, and the auxiliary loss."""
    states = s.states(text)
    total = _loss_of(s, s.head(states), s.ids(*text.ids.shape)).mean()
    if isinstance(s.spec.head, PooledHead):
        total = total + s.model.head(states.x, states.tokens).square().sum()
    return total if states.aux is None else total + states.aux


def _mute(s: Ours, text: Text) -> Iterator[nn.Parameter]:
    """Parameters that cannot matter to any answer, whatever they are."""
    for branch in s.module.modules():
        if not isinstance(branch, BranchModule):
            continue
        op = branch.op
        if isinstance(op, AttentionModule):
            seen = _most_seen(op.spec, text.tokens)
            yield from branch.pre.parameters() if seen == 0 else ()
            yield from _mute_in_attention(op, seen)
        elif isinstance(op, MoEModule):
            alone = op.spec.num_experts == 1 and not op.spec.z
            untaught = op.spec.top_k == 1 and op.spec.renormalize and not (op.spec.balance or op.spec.z)
            yield from op.router.parameters() if alone or untaught else ()


def _most_seen(op: Attention, tokens: Tokens) -> int:
    """How many keys some query sees, at most."""
    patterns = op.pattern.patterns if isinstance(op.pattern, PerHead) else (op.pattern,)
    return max(int(pattern.mask(tokens, tokens).sum(-1).max()) for pattern in patterns)


def _mute_in_attention(op: AttentionModule, seen: int) -> Iterator[nn.Parameter]:
    if seen == 0:
        yield from (p for name, p in op.named_parameters() if name != "out.bias")
    elif seen == 1:
        for part in (op.q, op.k, op.q_norm, op.k_norm, op.position):
            yield from part.parameters()
    elif op.spec.softcap is None and getattr(op.position.spec, "acts", None) != "heads":
        last = "k_norm.bias" if op.spec.qk_norm else "k.bias"
        yield from (p for name, p in op.named_parameters() if name in (last, "k_global.bias"))


def _speaks(s: Subject, answer: Tensor) -> bool:
    """Whether these are logits over the vocabulary."""
    return isinstance(s.model.head, LMHeadModule) if isinstance(s, Ours) else answer.shape[-1] == s.vocab_size


def _loss(s: Subject, text: Text, targets: Int[Tensor, "B T"]) -> Loss:
    """Cross-entropy where the answers are logits over the vocabulary, else their squares; of tokens with a target."""
    return _loss_of(s, s.answer(text), targets)


def _loss_of(s: Subject, answer: Tensor, targets: Int[Tensor, "B T"]) -> Loss:
    known = targets != IGNORE
    if _speaks(s, answer):
        total = cross_entropy(answer.flatten(0, 1), targets.flatten())
    else:
        total = at_least_float32(answer[known]).square().sum()
    return Loss(total, known.sum())


def _ragged(s: Subject, lengths: Sequence[int]) -> tuple[Text, Int[Tensor, "B T"]]:
    """Random rows of these lengths, padded on the right, with random targets."""
    keep = torch.arange(max(lengths), device=s.device) < torch.tensor(lengths, device=s.device)[:, None]
    text = s.text(*keep.shape, tokens=Tokens.padded(keep))
    return text, s.ids(*keep.shape).masked_fill(~keep, IGNORE)


def _rows(pieces: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of the rows of each piece: ((2,), (2, 1)) has the rows 0, then 1 and 2."""
    ends = itertools.accumulate(len(piece) for piece in pieces)
    return [list(range(end - len(piece), end)) for piece, end in zip(pieces, ends, strict=True)]


def _gradients(module: nn.Module, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """What these losses, one after another, add up to."""
    module.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    parameters = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}


LAWS: tuple[Law, ...] = (accumulation, initial_loss, noise, dead)
