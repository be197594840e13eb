"""Context: the side facts of one forward pass, handed down read-only through every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from anyformer.tokens import Tokens

__all__ = ["Context"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """`tokens` of x; `memory` (B, S, D) and its tokens for cross-attention; `store`, this branch's part of the cache;
    `kernel`, a forced attention kernel; `context_len`, the length that length-dependent schedules plan for; `memo`,
    what was derived in this pass and is shared by all layers (masks, rotary phases): it lives as long as the pass.
    """

    tokens: Tokens
    memory: Tensor | None = None
    memory_tokens: Tokens | None = None
    store: Any = None
    kernel: Any = None
    context_len: int = 0
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    def at(self, store: Any) -> Context:
        """The same context, with the cache store of one branch."""
        return self if store is self.store else dataclasses.replace(self, store=store)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, but only the first time in this pass that `key` is asked for."""
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found
