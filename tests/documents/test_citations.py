"""Quotations in answers: parsed while streaming, located in a document, and rejected if the document lacks them."""

from __future__ import annotations

import os
import random

import pytest

from notso.documents.citations import (
    PIECE_CHARACTERS,
    Mark,
    MarkReader,
    agrees,
    claims_in,
    marks_in,
    place_of,
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
        place = place_of(text, words)
        assert place is not None and agrees(text, *place, words)
        place = place_of(text, reset(rng, words))
        assert place is not None and agrees(text, *place, words)
        begin, end = place
        # Plant errors in offsets, in the document, and in the words.
        step = rng.choice([-7, -3, 3, 7])
        moved = text[max(0, begin + step) : max(0, end + step)]
        other = rng.choice([each for each in texts if each is not text])
        at = rng.randrange(len(words))
        wrong = words[:at] + "q" + words[at:]
        assert not agrees(text, begin + step, end + step, words) or "".join(moved.split()) == "".join(words.split())
        assert not agrees(other, begin, end, words)
        assert not agrees(text, begin, end, wrong) and place_of(text, wrong) is None
        assert not agrees(text, begin, len(text) + 1, words) and not agrees(text, -1, end, words)


def test_words_are_found_and_errors_noticed() -> None:
    find_and_plant(100, 1)


@pytest.mark.long("quotes")
def test_many_words_are_found_and_errors_noticed() -> None:
    find_and_plant(QUOTES, 2)


@pytest.mark.parametrize("at", [0, PIECE_CHARACTERS - 10, PIECE_CHARACTERS + 5, 3 * PIECE_CHARACTERS])
def test_long_texts_are_searched_in_pieces(at: int) -> None:
    text = "x" * at + "The heron\nstands in the reeds." + "y" * PIECE_CHARACTERS
    found = place_of(text, "the HERON stands in the reeds")
    assert found == (at, at + len("The heron stands in the reeds"))
    assert place_of(text, "the heron stood in the reeds") is None
    assert place_of("a" * 300_000, "a" * 500 + "b" * 500) is None  # takes linear time


@pytest.mark.parametrize("seed", range(30))
def test_marks_are_read_while_they_are_written(seed: int) -> None:
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
    reader, read = MarkReader(), list[str | Mark]()
    at = 0
    while at < len(answer):
        size = rng.randint(1, 9)
        read += reader.feed(answer[at : at + size])
        at += size
    read.append(reader.end())
    expected = list(marks_in(answer))
    assert [each.words for each in read if isinstance(each, Mark)] == [each.words for each in expected]
    text, done = "", 0
    for mark in expected:
        text += answer[done : mark.start]
        done = mark.end
    assert "".join(each for each in read if isinstance(each, str)) == text + answer[done:]


def test_text_is_not_held_back_longer_than_needed() -> None:
    reader = MarkReader()
    assert list(reader.feed("see a[1] and [")) == ["see a[1] and "]
    assert list(reader.feed("x]")) == ["[x]"]
    assert list(reader.feed("[[1: " + "w" * 5_000))  # too long for a quotation


def test_claims_are_long_and_outside_of_code() -> None:
    answer = (
        'He said "short words" and “the heron stands in the reeds”, `print("a b c d e f g")`,\n'
        '```\nx = "one two three four five six"\n```\n'
        "[[1: “the quoted words are not claimed”]] «un deux trois quatre cinq»"
    )
    assert [each.words for each in claims_in(answer)] == ["the heron stands in the reeds", "un deux trois quatre cinq"]
    assert all(answer[each.start + 1 : each.end - 1] == each.words for each in claims_in(answer))
