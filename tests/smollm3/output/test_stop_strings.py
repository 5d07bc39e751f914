"""Stop strings are found however the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.smollm3.output.lookahead import StopStrings, pending_length


def read(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    reader = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stopped = reader.push(piece)
        shown += text
        if stopped:
            assert reader.push("more") == ("", True)
            assert reader.finish() == ""
            return shown, True
    return shown + reader.finish(), False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], ("ab", False)),
        (["STOP"], ["one ST", "OP two"], ("one ", True)),
        (["STOP"], ["one ", "S", "T", "O", "P"], ("one ", True)),
        (["STOP"], ["one ST", "AND"], ("one STAND", False)),
        (["STOP"], ["one STO"], ("one STO", False)),
        (["STOP"], ["SSTOP"], ("S", True)),
        (["aab"], ["aa", "aa", "b"], ("aa", True)),
        (["abab"], ["abaabab"], ("aba", True)),
        (["two", "one"], ["x one two"], ("x ", True)),
        (["abc", "b"], ["ab", "c"], ("a", True)),  # the stop string that is complete first
        (["abc", "b"], ["abc"], ("a", True)),  # the same in one piece
        (["xabc", "bc"], ["1xabc2"], ("1", True)),  # if both are complete in the same piece, the longer one
        (["\n\n"], ["a\n", "\nb"], ("a", True)),
        (["é👩"], ["é", "👩!"], ("", True)),
        (["a"], ["a"], ("", True)),
    ],
)
def test_the_first_stop_string_ends_the_text(stops: list[str], pieces: list[str], expected: tuple[str, bool]) -> None:
    assert read(stops, pieces) == expected


def test_only_a_possible_stop_string_is_held_back() -> None:
    reader = StopStrings(["END", "ENOUGH"])
    assert reader.push("the EN") == ("the ", False)
    assert reader.push("O") == ("", False)
    assert reader.push("R") == ("ENOR", False)
    assert reader.push("E") == ("", False)
    assert reader.finish() == "E"


def by_character(stops: list[str], text: str) -> tuple[str, bool]:
    """Apply the rule directly, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=400)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=20),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_result_does_not_depend_on_chunk_boundaries(stops: list[str], pieces: list[str]) -> None:
    assert read(stops, pieces) == by_character(stops, "".join(pieces))


@settings(max_examples=200)
@given(text=st.text("ab<", max_size=8), patterns=st.lists(st.text("ab<", max_size=5), max_size=3))
def test_pending_length_is_the_longest_pattern_prefix_at_the_end(text: str, patterns: list[str]) -> None:
    fits = [n for n in range(len(text) + 1) for p in patterns if n < len(p) and p.startswith(text[len(text) - n :])]
    assert pending_length(text, patterns) == max(fits, default=0)


def test_matched_stop_string_is_reported() -> None:
    reader = StopStrings(["END", "ND", "X"])
    assert reader.matched is None
    for piece in ("a E", "N", "D X"):
        reader.push(piece)
    assert reader.matched == "END"
