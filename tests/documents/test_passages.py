"""Documents are split into passages without losing text."""

from __future__ import annotations

import itertools
import random

import pytest

from notso.documents.passages import PASSAGE_TOKENS, estimated_tokens, page_at, split_into_passages

SENTENCE = "The heron stands in the reeds of the old river, and waits. "


@pytest.mark.parametrize("seed", range(40))
def test_passages_cover_the_text_and_never_cross_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pieces = (
        SENTENCE,
        "\n",
        "\n\n",
        " ",
        "日本語を勉強しています。",
        "x" * 700,
        "Why? ",
        "- a list\n",
        "…",
        "e.g. 3.14 ",
    )
    pages = ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(rng.randrange(1, 6))]
    starts = [sum(map(len, pages[:number])) for number in range(len(pages))]
    text = "".join(pages)
    found = list(split_into_passages(text, starts))
    for passage in found:
        assert passage.page == page_at(starts, passage.start) == page_at(starts, passage.end - 1)
        assert estimated_tokens(text[passage.start : passage.end]) < 2 * PASSAGE_TOKENS
    between = [text[first.end : second.start] for first, second in itertools.pairwise(found)]
    ends = [text[: found[0].start], text[found[-1].end :]] if found else [text]
    assert not "".join([*between, *ends]).strip()


def test_passages_end_with_sentences_and_are_about_equally_long() -> None:
    text = SENTENCE * 40
    found = [text[each.start : each.end] for each in split_into_passages(text, (0,))]
    sizes = [estimated_tokens(each) for each in found]
    assert len(found) == 3 and max(sizes) <= PASSAGE_TOKENS and min(sizes) > 0.8 * PASSAGE_TOKENS
    assert all(each.endswith("waits.") and each.startswith("The heron") for each in found)


def test_empty_pages_have_no_passage() -> None:
    assert [each.page for each in split_into_passages("\n\n  \n\na\n\n", (0, 2, 6))] == [3]
    assert list(split_into_passages("", (0,))) == []


def test_passages_do_not_end_within_numbers_or_names() -> None:
    rows = "".join(f"| {n * 1.37:.2f} | {n * 2.74:.2f} | www.example.org |\n" for n in range(400))
    ends = [rows[each.end - 1] for each in split_into_passages(rows, (0,))]
    assert len(ends) > 10 and set(ends) == {"|"}
    spoken = 'He asked, "Why?" ' * 200
    assert all(spoken[each.end - 1] == '"' for each in split_into_passages(spoken, (0,)))


def test_a_run_of_full_stops_takes_linear_time() -> None:
    text = "." * 2_000_000 + "x"
    assert sum(each.end - each.start for each in split_into_passages(text, (0,))) == len(text)
