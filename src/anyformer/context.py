"""Context: the side facts of one forward pass, handed down read-only through every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from anyformer.tokens import Tokens

__all__ = ["Context", "once"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """`tokens` of x; `memory` (B, S, D) and its tokens for cross-attention; `store`, this branch's part of the cache;
    `kernel`, a forced attention kernel; `context_len`, the length that
    length-dependent schedules plan for (None: that of the tokens); `memo`,
    what was derived in this pass and is shared by all layers (masks, rotary phases): it lives as long as the pass.
    """

    tokens: Tokens
    memory: Tensor | None = None
    memory_tokens: Tokens | None = None
    store: Any = None
    kernel: Any = None
    context_len: int | None = None
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    def at(self, store: Any) -> Context:
        """The same context, with the cache store of one branch."""
        return self if store is self.store else dataclasses.replace(self, store=store)

    def once(self, key: Hashable, tokens: tuple[Tokens, ...], make: Callable[[], T]) -> T:
        """`make()`, but only the first time in this pass that `key` is asked for with these very `tokens`."""
        return once(self.memo, key, tokens, make)


def once(memo: dict[Hashable, Any], key: Hashable, tokens: tuple[Tokens, ...], make: Callable[[], T]) -> T:
    """What `memo` holds for `key` and these very `tokens`; made if it is not there.

    Tokens are compared with `is`, not hashed: a compiler would hash their fields, and compile each step anew.
    """
    known = memo.setdefault(key, [])
    for made_for, value in known:
        if all(a is b for a, b in zip(made_for, tokens, strict=True)):
            found: T = value
            return found
    made = make()
    known.append((tokens, made))
    return made
