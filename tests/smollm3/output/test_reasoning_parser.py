"""Reasoning and answer are separated, however the model uses its tags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.smollm3.output.reasoning_parser import ReasoningParser, ends_in_reasoning
from notso.smollm3.text.tokenizer import Tokenizer

OPEN, CLOSE = 1, 2
PLAIN = 0

TEXT_OF = {OPEN: "<think>", CLOSE: "</think>"}
Step = int | str  # the id of a tag, or the text of an ordinary token


def read(steps: list[Step], starts_inside: bool = False) -> tuple[str, str]:
    """Return all reasoning and all text of an answer."""
    parser = ReasoningParser(OPEN, CLOSE, starts_inside)
    pieces = []
    for step in steps:
        pieces += parser.feed(PLAIN, step) if isinstance(step, str) else parser.feed(step, TEXT_OF[step])
    pieces += parser.finish()
    assert parser.finish() == []
    assert all(text for _, text in pieces)
    return tuple("".join(text for kind, text in pieces if kind == which) for which in ("reasoning", "text"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # as the official model generates
        ([OPEN, "\n", "Let me", " see.", "\n", CLOSE, "\n", "Four", "."], ("Let me see.", "Four.")),
        ([OPEN, "\n\n", CLOSE, "\n", "Hi"], ("", "Hi")),
        (["Hi", " there"], ("", "Hi there")),
        (["Hi\n", "\nthere\n"], ("", "Hi\n\nthere\n")),
        ([OPEN, "a\n\nb", CLOSE, "\n\nc\n\nd"], ("a\n\nb", "c\n\nd")),
        # tags as ordinary text, in one token and split
        (["<think>", "\nhm\n", "</think>", "\nyes"], ("hm", "yes")),
        (["<", "think", ">", "hm", "</", "think", ">", "yes"], ("hm", "yes")),
        (["<thi", "nk>hm</th", "ink>yes"], ("hm", "yes")),
        (["<think>hm</think>yes"], ("hm", "yes")),
        ([" \n<th", "ink>\n", "hm", CLOSE, "yes"], ("hm", "yes")),
        ([OPEN, "hm</thi", "nk>\nyes"], ("hm", "yes")),
        # text that only resembles a tag
        (["<thin", " ice"], ("", "<thin ice")),
        (["<b>", "bold"], ("", "<b>bold")),
        ([OPEN, "a </th", "ree b", CLOSE], ("a </three b", "")),
        ([OPEN, "a < b", CLOSE, "c < d"], ("a < b", "c < d")),
        # later in an answer, tags are ordinary text
        (["The tag <think>", " opens, </think> closes."], ("", "The tag <think> opens, </think> closes.")),
        # missing, doubled and stray tags
        ([CLOSE, "\nyes"], ("", "yes")),
        (["</think>\n", "yes"], ("", "yes")),
        (["So", " far", CLOSE, " good"], ("", "So far good")),
        (["So far", CLOSE, "\n<think>"], ("", "So far\n<think>")),
        ([OPEN, OPEN, "hm", CLOSE, CLOSE, "yes"], ("hm", "yes")),
        ([OPEN, "<think>", "hm", CLOSE, "yes"], ("hm", "yes")),
        ([OPEN, "a", CLOSE, OPEN, "b", CLOSE, "yes"], ("ab", "yes")),
        ([OPEN, "a", CLOSE, "yes", OPEN, "b", CLOSE, "no"], ("ab", "yesno")),
        # truncated answers
        ([OPEN, "never", " ends"], ("never ends", "")),
        ([OPEN, "hm\n", "</thi"], ("hm", "")),
        (["<thi"], ("", "")),
        (["\n <"], ("", " <")),
        ([OPEN], ("", "")),
        ([OPEN, "\n"], ("", "")),
        (["\n", " "], ("", "")),
        ([], ("", "")),
    ],
)
def test_answer_is_split_into_reasoning_and_text(steps: list[Step], expected: tuple[str, str]) -> None:
    assert read(steps) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["hm\n", CLOSE, "\nyes"], ("hm", "yes")),
        (["hm", "</think>", "yes"], ("hm", "yes")),
        (["hm"], ("hm", "")),
        ([OPEN, "\nhm", CLOSE, "yes"], ("hm", "yes")),
        (["<thi", "nk>\nhm", CLOSE, "yes"], ("hm", "yes")),
        ([CLOSE, "yes"], ("", "yes")),
    ],
)
def test_answer_starting_inside_reasoning_is_split(steps: list[Step], expected: tuple[str, str]) -> None:
    assert read(steps, starts_inside=True) == expected


def test_unambiguous_text_is_released_immediately() -> None:
    parser = ReasoningParser(OPEN, CLOSE)
    assert parser.feed(PLAIN, "\n") == []
    assert not parser.in_reasoning
    assert parser.feed(OPEN, "<think>") == []
    assert parser.in_reasoning
    assert parser.feed(PLAIN, "\n") == []
    assert parser.feed(PLAIN, "one\n") == [("reasoning", "one")]
    assert parser.feed(PLAIN, " two <") == [("reasoning", "\n two ")]
    assert parser.feed(PLAIN, " 3") == [("reasoning", "< 3")]
    assert parser.feed(CLOSE, "</think>") == []
    assert not parser.in_reasoning
    assert parser.feed(PLAIN, "\n") == []
    assert parser.feed(PLAIN, "yes <think") == [("text", "yes <think")]
    assert parser.finish() == []


def test_text_in_the_same_piece_as_a_tag_is_kept() -> None:
    """An incomplete character before a tag is shown as U+FFFD together with the tag's text."""
    parser = ReasoningParser(OPEN, CLOSE)
    parser.feed(OPEN, "<think>")
    assert parser.feed(CLOSE, "\ufffd</think>") == [("reasoning", "\ufffd")]
    assert parser.feed(OPEN, "\ufffd<think>") == [("text", "\ufffd")]
    assert parser.feed(PLAIN, "x") == [("reasoning", "x")]


def test_tag_tokens_may_have_no_text_or_be_missing() -> None:
    parser = ReasoningParser(OPEN, CLOSE)
    assert parser.feed(OPEN, "") == []
    assert parser.feed(PLAIN, "hm") == [("reasoning", "hm")]
    assert parser.feed(CLOSE, "") == []
    assert parser.feed(PLAIN, "yes") == [("text", "yes")]
    without = ReasoningParser(None, None)
    assert without.feed(PLAIN, "<think>hm</think>yes") == [("reasoning", "hm"), ("text", "yes")]


PIECES = st.lists(
    st.sampled_from([OPEN, CLOSE, "<think>", "</think>", "<", "/", "think", ">", "a", "b ", "\n", " ", "</", "<th"]),
    max_size=14,
)


@settings(max_examples=600)
@given(steps=PIECES, starts_inside=st.booleans(), data=st.data())
def test_parsing_does_not_depend_on_chunk_boundaries(
    steps: list[Step], starts_inside: bool, data: st.DataObject
) -> None:
    """Text between two tags gives the same parts if it is split differently."""
    cut: list[Step] = []
    for step in steps:
        if isinstance(step, int):
            cut.append(step)
        elif cut and isinstance(cut[-1], str) and data.draw(st.booleans()):
            cut[-1] += step
        else:
            cut += list(step) if data.draw(st.booleans()) else [step]
    assert read(cut, starts_inside) == read(steps, starts_inside)


@settings(max_examples=300)
@given(steps=PIECES)
def test_think_tags_do_not_leak_into_the_parts(steps: list[Step]) -> None:
    reasoning, text = read(steps)
    assert "</think>" not in reasoning
    assert not reasoning.startswith("<think>")
    runs = "".join(step if isinstance(step, str) else "\0" for step in steps).split("\0")
    for tag in ("<think>", "</think>"):  # a token within a tag leaves letters that only resemble a tag
        assert not text.startswith(tag) or not any(tag in run for run in runs)
    plain = "".join(step for step in steps if isinstance(step, str))
    for shown in (reasoning, text):
        letters = iter(plain)
        assert all(character in letters for character in shown)  # in order, without additions


def test_opens_thinking_detects_an_unclosed_think_tag(small_tokenizer: Tokenizer) -> None:
    ids = (small_tokenizer.think_open_id, small_tokenizer.think_close_id)
    for prompt, opened in (
        ("hi", False),
        ("<think> ... </think> hi", False),
        ("hi<think>\n", True),
        ("<think>a</think>b<think>", True),
        ("<think>\n\n</think>\n", False),
        ("", False),
    ):
        assert ends_in_reasoning(small_tokenizer.encode(prompt, control=True), *ids) is opened
        assert ends_in_reasoning(small_tokenizer.encode(prompt), *ids) is False
    assert ends_in_reasoning([1, 2, 3], None, None) is False
