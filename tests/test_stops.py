"""Stop strings (FAULT 64): nothing of a stop leaks, nothing else is lost, and the cutting does not matter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from anyformer.generate.stops import StopStrings


def cuttings(text: str) -> Iterator[list[str]]:
    """All 2**(n-1) ways to cut `text` into pieces."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut]
        yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def streamed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """(all text shown, the stop that was hit), ending as a generation loop does."""
    watch, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = watch.push(piece)
        shown += text
        if stopped:
            break
    return shown + watch.flush(), watch.hit


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read the whole text at once: the first place where any stop stands, the shortest of those there."""
    for start in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, start):
                return text[:start], stop
    return text, None


def test_fault_64_stop_across_pieces_does_not_leak() -> None:
    watch = StopStrings(["DEFG"])
    assert [watch.push(piece) for piece in ("ab", "cD", "EF", "Gh")] == [
        ("ab", False),
        ("c", False),
        ("", False),
        ("", True),
    ]
    assert watch.flush() == ""
    assert watch.hit == "DEFG"


def test_fault_64_held_tail_is_flushed_at_the_end() -> None:
    watch = StopStrings(["DEFG"])
    assert [watch.push("cD"), watch.push("E")] == [("c", False), ("", False)]
    assert watch.flush() == "DE"
    assert watch.hit is None
    assert watch.flush() == ""


def test_fault_64_false_start_is_released() -> None:
    watch = StopStrings(["DEFG"])
    assert [watch.push("aD"), watch.push("Ex")] == [("a", False), ("DEx", False)]


def test_fault_64_overlapping_false_start() -> None:
    watch = StopStrings(["aab"])
    assert [watch.push("aa"), watch.push("a"), watch.push("b")] == [("", False), ("a", False), ("", True)]


@pytest.mark.parametrize("text", ["abcDEFGh", "cDE", "DEFG", "DDEFG"])
def test_fault_64_every_cutting_gives_the_same(text: str) -> None:
    assert {streamed(["DEFG"], pieces) for pieces in cuttings(text)} == {oracle(["DEFG"], text)}


@pytest.mark.parametrize(
    "stops",
    [
        ["DE", "DEFG"],
        ["DEFG", "EF"],
        ["cDEx", "EF", "FGh"],
        ["abcDEFGh", "b"],
        ["abcDEFGx", "EF", "Gh"],
        ["h"],
        ["x"],
        [],
    ],
)
def test_fault_64_leftmost_wins_in_every_cutting(stops: list[str]) -> None:
    assert {streamed(stops, pieces) for pieces in cuttings("abcDEFGh")} == {oracle(stops, "abcDEFGh")}


def test_every_short_text_and_pair_of_stops() -> None:
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product("ab", repeat=size)]
    for stops in itertools.combinations(words, 2):
        for text in map("".join, itertools.product("ab", repeat=5)):
            pieces = {streamed(list(stops), cut) for cut in cuttings(text)}
            assert pieces == {oracle(list(stops), text)}, (stops, text)


def test_fault_64_aa_in_aaa() -> None:
    assert streamed(["aa"], ["a", "a", "a"]) == streamed(["aa"], ["aaa"]) == ("", "aa")


def test_earlier_start_is_awaited_then_given_up() -> None:
    watch = StopStrings(["abcd", "bc"])
    assert watch.push("abc") == ("", False)
    assert watch.push("x") == ("a", True)
    assert watch.hit == "bc"


def test_stop_that_is_decided_only_by_the_end() -> None:
    watch = StopStrings(["abcd", "bc"])
    assert watch.push("abc") == ("", False)
    assert watch.flush() == "a"
    assert watch.hit == "bc"


def test_text_that_cannot_begin_a_stop_is_shown_at_once() -> None:
    watch = StopStrings(["\n\n"])
    assert watch.push("one\ntwo") == ("one\ntwo", False)
    assert watch.push("\n") == ("", False)


def test_nothing_is_shown_after_a_stop() -> None:
    watch = StopStrings(["x"])
    assert watch.push("axb") == ("a", True)
    assert watch.push("more") == ("", True)
    assert watch.flush() == ""


def test_fault_64_empty_stop_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least 1 character, but \['a', ''\] holds an empty one; drop it"):
        StopStrings(["a", ""])


def test_bare_string_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"list of strings, but is the string 'END'; write \['END'\]"):
        StopStrings("END")


def test_no_stops_pass_everything() -> None:
    watch = StopStrings([])
    assert watch.push("any") == ("any", False)
    assert watch.flush() == ""
