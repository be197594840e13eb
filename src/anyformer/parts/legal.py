"""Legal: which parts go together, and why others do not. One table, which

- refuses a spec as it is made, with the reason (`refuse`),
- is printed in docs/combinations.md,
- leaves what `anyformer check --all` lists and holds to the laws.

A rule speaks of what parts say of themselves (`position.acts`, `pattern.frontier()`), so parts from elsewhere obey it.
What is wrong with the numbers of one part alone (a dropout of 2) is that part's own affair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from anyformer.spec import Path, SpecError

__all__ = ["RULES", "Rule", "refuse"]


class Rule(NamedTuple):
    """`asked`: about what it is asked; `between`: the slots that it joins; `says`: the rule in words; `broken`: why
    it is broken, or None."""

    asked: str
    between: str
    says: str
    broken: Callable[..., str | None]


RULES: list[Rule] = []


def rule(asked: str, between: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Put a function into the table; its docstring is the rule."""

    def kept(broken: Callable[..., str | None]) -> Callable[..., str | None]:
        RULES.append(Rule(asked, between, " ".join((inspect.getdoc(broken) or "").split()), broken))
        return broken

    return kept


def refuse(asked: str, *about: Any, path: Path = ()) -> None:
    """SpecError with the reason of the first rule that is broken."""
    for known in RULES:
        reason = known.broken(*about) if known.asked == asked else None
        if reason is not None:
            raise SpecError(reason, path)


@rule("attention", "mixer × position")
def input_position_in_mixer(mixer: Any) -> str | None:
    """A position that acts on the input (learned, sinusoidal) stands in `embed.position`, not in a mixer."""
    if mixer.position is None or mixer.position.acts != "input":
        return None
    return f"position {mixer.position.kind!r} acts on the input: put it in `embed.position`"


@rule("attention", "heads × pattern")
def heads_share_patterns(mixer: Any) -> str | None:
    """The patterns of a `PerHead` are shared out evenly, and query heads that read one key-value head follow one."""
    return None if mixer.pattern.heads_alike else mixer.pattern.misfit(mixer.num_heads, mixer.kv_heads)


@rule("cross_attention", "cross-attention × pattern, position")
def cross_sees_all(mixer: Any) -> str | None:
    """Cross-attention sees the whole source, and has no position scheme: two texts have no common distance."""
    if mixer.position is None and mixer.pattern.kind == "full":
        return None
    return "positions of two different texts cannot be compared: leave `pattern` and `position` out"


@rule("linear_attention", "linear attention × pattern")
def linear_sums(mixer: Any) -> str | None:
    """Linear attention follows `Causal()` or `Full()`: out of its one sum nothing can be taken."""
    if mixer.pattern.kind in ("causal", "full"):
        return None
    return (
        "linear attention keeps one sum of what it has seen, out of which nothing can be taken: `pattern` must "
        f"be Causal() or Full(), but is {mixer.pattern!r}"
    )


@rule("linear_attention", "linear attention × position")
def linear_has_no_scores(mixer: Any) -> str | None:
    """Linear attention takes rotary positions only: it has no scores to add to."""
    if mixer.position is None or mixer.position.acts == "heads":
        return None
    place = "put it in `embed.position`" if mixer.position.acts == "input" else "there are none: use rotary"
    return f"position {mixer.position.kind!r} acts on the {mixer.position.acts}: {place}"


@rule("embed", "embedding × position")
def mixer_position_in_embed(embed: Any) -> str | None:
    """A position that acts on heads or scores (rotary, ALiBi, T5's) stands in the mixers, not in `embed.position`."""
    if embed.position is None or embed.position.acts == "input":
        return None
    return f"position {embed.position.kind!r} acts on {embed.position.acts}: put it in the mixers"


@rule("pattern", "pattern × pattern")
def alike_in_formulas(whole: Any, parts: tuple[Any, ...]) -> str | None:
    """`&`, `|` and `~` join patterns that are the same for all heads; a `PerHead` holds them, and is held by none."""
    name = type(whole).__name__
    if not parts:
        return f"{name} needs at least one pattern"
    if all(part.heads_alike for part in parts):
        return None
    return f"{name} cannot hold a PerHead: combine inside it, as in PerHead((a & b, a & c))"


@rule("moe", "mixture of experts × feed-forward")
def experts_do_not_route(moe: Any) -> str | None:
    """An expert is a plain feed-forward, not a mixture of experts itself."""
    if not any(part is not None and part.routes for part in (moe.expert, moe.shared)):
        return None
    return "an expert cannot be a mixture of experts itself: use a dense_ffn or a gated_ffn"


@rule("block", "wiring × norm")
def one_norm_is_parallel(block: Any) -> str | None:
    """One norm before all branches (`norm`) is for parallel blocks: in a sequence each branch has its own `pre`."""
    if block.join == "parallel" or block.norm is None:
        return None
    return "`norm` is for parallel blocks: in a sequence each branch has its own `pre`"


@rule("block", "wiring × norm")
def parallel_has_no_after(block: Any) -> str | None:
    """A parallel block has one sum, so no branch of it has a norm `after`: post-LN is for sequences."""
    if block.join == "sequence" or not any(branch.after for branch in block.branches):
        return None
    return "a parallel block has one sum, so its branches cannot have `after`"


@rule("decoder", "decoder × pattern")
def no_look_ahead(op: Any) -> str | None:
    """A decoder's patterns do not look ahead, but for a prefix (`Causal() | Prefix(n)`): write `Causal() & ...`."""
    if not op.looks_ahead():
        return None
    return f"pattern {op.pattern!r} looks ahead, which a decoder must not: write `Causal() & ...`"


@rule("decoder", "decoder × mixer")
def marked_in_encoder(op: Any) -> str | None:
    """Global attention stands in an encoder: it lets marked tokens see their whole document, later tokens too."""
    if not op.marked_see_all:
        return None
    return (
        f"{op.kind!r} lets marked tokens see their whole document, which a decoder must not: use attention with "
        "`Causal() & (... | Global())`"
    )


@rule("encoder", "encoder × mixer")
def recurrent_in_decoder(op: Any) -> str | None:
    """A recurrent network stands in a decoder: it reads left to right."""
    if not op.one_way:
        return None
    return "a recurrent network reads left to right, so in an encoder no token would see a later one: use a decoder"


@rule("encoder", "encoder × cross-attention")
def cross_in_decoder(op: Any) -> str | None:
    """Cross-attention stands in a decoder: an encoder has no other text to attend to."""
    if not op.reads_memory:
        return None
    return "cross-attention belongs in a decoder: an encoder has no other text to attend to"


@rule("decoder alone", "stacks × cross-attention")
def cross_needs_encoder(op: Any) -> str | None:
    """Cross-attention needs an encoder in the model."""
    return "cross-attention needs an encoder, but there is none" if op.reads_memory else None


@rule("model", "stacks × cross-attention")
def encoder_is_read(spec: Any) -> str | None:
    """The decoder of an encoder-decoder has cross-attention, or it would never read the encoder."""
    if not (spec.encoder and spec.decoder):
        return None
    if any(branch.op.reads_memory for block in spec.decoder for branch in block.branches):
        return None
    return "the decoder has no cross-attention, so it would never read the encoder: add a branch"


@rule("model", "stacks × head")
def pooled_sees_text(spec: Any) -> str | None:
    """A head that pools the first token is for encoders: in a decoder that token has seen nothing but itself."""
    if spec.head is None or not spec.head.pools or not spec.decoder:
        return None
    return f"head {spec.head.kind!r} reads the first token, which in a decoder sees only itself: use an encoder"
