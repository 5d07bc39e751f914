"""The time budget for laying out a message: where layout ends, what is shown then, and that no text is lost."""

from __future__ import annotations

import re
import time
from html import unescape

import pytest

from notso.web.rendering.budget import MAX_HTML_CHARACTERS, Budget, OverBudgetError
from notso.web.rendering.markdown import render_block, render_markdown
from notso.web.rendering.streaming import StreamingMarkdown, complete
from notso.web.values.wording import words

SLOW = "[a](" * 4_000
"""One paragraph that takes seconds to parse for links."""
# the most that may pass between two checks of the clock; parsing the whole paragraph takes far longer
SECONDS_MORE = 0.5


def shown(html: str) -> str:
    """Return the visible text of the page."""
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def test_budget_interrupts_rendering_within_a_block() -> None:
    began = time.thread_time()
    with pytest.raises(OverBudgetError):
        render_block(SLOW, Budget(0.05))
    assert time.thread_time() - began < 0.05 + SECONDS_MORE


@pytest.mark.parametrize(
    "text",
    [
        *(SLOW, "- a\n" * 40_000, "a\n===\n" * 30_000, "> a\n\n" * 30_000, "|a|b|\n|-|-|\n" + "|c|d|\n" * 20_000),
        *("```python\n" + "(\n" * 9_500 + "```\n", "```html\n" + "<a b=\n" * 3_200 + "```\n"),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_text_over_budget_is_plain_with_a_single_note(text: str) -> None:
    html = render_markdown("*first*\n\n" + text, budget=Budget(0.005))
    assert html.count(words["unformatted"]) == 1 and len(html) <= 3 * len(text)
    assert shown(html).endswith(text.strip()[-40:])


def test_html_output_counts_against_the_budget() -> None:
    text = "*first*\n\n" + "`a` " * 1_000
    assert words["unformatted"] not in render_markdown(text)
    html = render_markdown(text, budget=Budget(characters=2_000))
    assert html.startswith("<p><em>first</em></p>") and html.count(words["unformatted"]) == 1
    assert len(text) * 2 < MAX_HTML_CHARACTERS


def test_stream_over_budget_continues_as_plain_text() -> None:
    budget = Budget(0.05)
    answer, thoughts = StreamingMarkdown(budget), StreamingMarkdown(budget)
    html = answer.feed(f"*first*\n\n{SLOW}\n\n").closed + answer.feed("*next*\n\n*last*").closed
    assert "<em>first</em>" in html
    html += answer.feed("\n\n*more*").closed + answer.finish().closed + thoughts.feed("*t*\n\nu").closed
    html += thoughts.finish().closed
    assert html.count(words["unformatted"]) == 1
    assert [line for line in shown(html).split() if "*" in line] == ["*next*", "*last*", "*more*", "*t*"]


def test_slow_tail_is_not_rendered_on_every_update() -> None:
    stream, began = StreamingMarkdown(), time.thread_time()
    for _ in range(10):
        assert stream.feed("[a](" * 390).tail
    assert time.thread_time() - began < 2 * 0.05 + SECONDS_MORE + 10 * 0.05


@pytest.mark.parametrize("unit", ["`", "` ", "``a`b", "[a](", "*a_", "**a ", "$", "~~a", "_*"])
def test_unfinished_markup_is_closed_in_linear_time(unit: str) -> None:
    """Closing unfinished markup takes linear time: eight times the text takes eight times as long, not sixty-four."""

    def seconds(characters: int) -> float:
        began = time.thread_time()
        complete(unit * (characters // len(unit)))
        return time.thread_time() - began

    small = min(seconds(16_000) for _ in range(3))
    assert min(seconds(128_000) for _ in range(2)) < 18 * small + 0.01
