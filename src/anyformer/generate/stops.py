"""Stop strings in a stream: cut the text before a stop, wherever the pieces happen to be cut.

A stop may be spread over many tokens, so text that could still turn into one is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Watches the decoded pieces of one row's *generated* text; the prompt is not pushed, so it never stops anything.

    The stop that starts first wins (if two start together, the shorter: the shown text is the same). With stops "abcd"
    and "bc", the text "abc" is therefore undecided: "d" shows nothing, anything else shows "a". The shown text and
    `hit` depend on the whole text only, never on its cutting.

    hit: the stop that was found, or None.
    Raises ValueError for an empty stop string, and for a bare string in place of a list.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ValueError(f"stops must be a list of strings, but is the string {stops!r}; write [{stops!r}].")
        if "" in stops:
            raise ValueError(
                f"a stop string must have at least 1 character, but {list(stops)} holds an empty one; drop it."
            )
        self.hit: str | None = None
        self._stops = sorted(set(stops), key=len)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece: (text that may be shown now, whether a stop was hit). After a hit nothing is shown."""
        if self.hit is not None:
            return "", True
        self._held += piece
        start, stop = self._match()
        undecided = self._undecided()
        if stop is not None and start <= undecided:
            return self._cut(start, stop), True
        shown, self._held = self._held[:undecided], self._held[undecided:]
        return shown, False

    def flush(self) -> str:
        """The generation ended: the held tail, up to a stop if it holds one (then `hit` names it)."""
        start, stop = self._match()
        return self._cut(start, stop)

    def _cut(self, start: int, stop: str | None) -> str:
        shown, self._held, self.hit = self._held[:start], "", self.hit or stop
        return shown

    def _match(self) -> tuple[int, str | None]:
        """(where the first whole stop starts, that stop), or (length of the held text, None)."""
        found = [(self._held.find(stop), stop) for stop in self._stops]
        # min keeps the first of equals, and the stops are sorted by length.
        return min(((at, stop) for at, stop in found if at >= 0), key=lambda pair: pair[0], default=self._nothing())

    def _nothing(self) -> tuple[int, str | None]:
        return len(self._held), None

    def _undecided(self) -> int:
        """Where the longest tail starts that may yet become a stop (a whole stop is a match there anyway)."""
        end = len(self._held)
        for start in range(max(0, end - self._longest + 1), end):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return end
