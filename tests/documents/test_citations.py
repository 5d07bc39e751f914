"""Quotations in answers: parsed while streaming, located in a document, and rejected if the document lacks them."""

from __future__ import annotations

import os
import random

import pytest

from notso.documents.citations import (
    PIECE_CHARACTERS,
    MarkedQuoteParser,
    QuotedSpan,
    find_claims,
    find_marked_quotes,
    locate_quote,
    matches_when_folded,
)

LETTERS = "abcdeéßжщאبकก的あ가 "
QUOTES = int(os.environ.get("NOTSO_QUOTES", "1000"))


def prose(rng: random.Random, words: int) -> str:
    made = ("".join(rng.choices(LETTERS.strip(), k=rng.randint(1, 8))) for _ in range(words))
    return "".join(each + rng.choice([" ", " ", " ", "\n", "  ", "-\n", ", "]) for each in made)


def reset(rng: random.Random, words: str) -> str:
    """Format words differently: case, spaces, hyphens and line ends."""
    changed = []
    for each in words:
        if each.isspace():
            changed.append(rng.choice([" ", "\n", "  "]))
        else:
            changed.append(each.upper() if rng.random() < 0.1 and len(each.upper()) == 1 else each)
            if rng.random() < 0.03 and each.isalpha():
                changed.append(rng.choice(["\u00ad", "-\n"]))
    return "".join(changed)


def find_and_plant(count: int, seed: int) -> None:
    """All quotations are found, however they are formatted, and all planted errors are detected."""
    rng = random.Random(seed)
    texts = [prose(rng, rng.choice([80, 400, 2000])) for _ in range(40)]
    for _ in range(count):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 60)
        words = text[start : start + rng.randint(12, 60)].strip(" \n,-")
        place = locate_quote(text, words)
        assert place is not None and matches_when_folded(text, *place, words)
        place = locate_quote(text, reset(rng, words))
        assert place is not None and matches_when_folded(text, *place, words)
        begin, end = place
        # Plant errors in offsets, in the document, and in the words.
        step = rng.choice([-7, -3, 3, 7])
        moved = text[max(0, begin + step) : max(0, end + step)]
        other = rng.choice([each for each in texts if each is not text])
        at = rng.randrange(len(words))
        wrong = words[:at] + "q" + words[at:]
        assert not matches_when_folded(text, begin + step, end + step, words) or "".join(moved.split()) == "".join(
            words.split()
        )
        assert not matches_when_folded(other, begin, end, words)
        assert not matches_when_folded(text, begin, end, wrong) and locate_quote(text, wrong) is None
        assert not matches_when_folded(text, begin, len(text) + 1, words) and not matches_when_folded(
            text, -1, end, words
        )


def test_quotations_are_located_and_errors_detected() -> None:
    find_and_plant(100, 1)


@pytest.mark.long("quotes")
def test_many_quotations_are_located_and_errors_detected() -> None:
    find_and_plant(QUOTES, 2)


@pytest.mark.parametrize("words", ["10^6 m2", "106 m²", "10⁶ m^2"])
def test_quotations_of_superscripts_are_located(words: str) -> None:
    assert locate_quote("has 10⁶ m² or", words) == (4, 10)
    assert locate_quote("10⁻⁶ m", words) is None


@pytest.mark.parametrize("at", [0, PIECE_CHARACTERS - 10, PIECE_CHARACTERS + 5, 3 * PIECE_CHARACTERS])
def test_quotations_are_located_across_pieces_of_long_texts(at: int) -> None:
    text = "x" * at + "The heron\nstands in the reeds." + "y" * PIECE_CHARACTERS
    found = locate_quote(text, "the HERON stands in the reeds")
    assert found == (at, at + len("The heron stands in the reeds"))
    assert locate_quote(text, "the heron stood in the reeds") is None
    assert locate_quote("a" * 300_000, "a" * 500 + "b" * 500) is None  # takes linear time


@pytest.mark.parametrize("seed", range(30))
def test_streamed_marks_equal_marks_of_the_whole_answer(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        "text ",
        "[",
        "]",
        "[[",
        "]]",
        "[[1: the words]]",
        "[[none]]",
        "[[12: a]b]]",
        "a[[1:2]]",
        "[[no",
        "[x](y)",
    ]
    answer = "".join(rng.choices(pieces, k=30))
    reader, read = MarkedQuoteParser(), list[str | QuotedSpan]()
    at = 0
    while at < len(answer):
        size = rng.randint(1, 9)
        read += reader.feed(answer[at : at + size])
        at += size
    read.append(reader.end())
    expected = list(find_marked_quotes(answer))
    assert [each.words for each in read if isinstance(each, QuotedSpan)] == [each.words for each in expected]
    text, done = "", 0
    for mark in expected:
        text += answer[done : mark.start]
        done = mark.end
    assert "".join(each for each in read if isinstance(each, str)) == text + answer[done:]


def test_text_is_released_once_no_mark_is_possible() -> None:
    reader = MarkedQuoteParser()
    assert list(reader.feed("see a[1] and [")) == ["see a[1] and "]
    assert list(reader.feed("x]")) == ["[x]"]
    assert list(reader.feed("[[1: " + "w" * 5_000))  # too long for a quotation


def test_claims_are_long_quotations_outside_code() -> None:
    answer = (
        'He said "short words" and “the heron stands in the reeds”, `print("a b c d e f g")`,\n'
        '```\nx = "one two three four five six"\n```\n'
        "[[1: “the quoted words are not claimed”]] «un deux trois quatre cinq»"
    )
    assert [each.words for each in find_claims(answer)] == [
        "the heron stands in the reeds",
        "un deux trois quatre cinq",
    ]
    assert all(answer[each.start + 1 : each.end - 1] == each.words for each in find_claims(answer))
