"""Code is highlighted in a separate process, which is restarted if it dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from notso.web.rendering import code
from notso.web.rendering.budget import Budget, OverBudgetError
from notso.web.rendering.code import BLOCK_SECONDS, Highlighter, code_block
from notso.web.rendering.markdown import render_markdown

SLOW = "a " + "\n" * 19_000  # a regular expression of the C lexer takes 45 s on this text
PLAIN = "int main(void) { return 0; }\n"


@pytest.fixture
def colors() -> Iterator[Highlighter]:
    made = Highlighter()
    yield made
    made.close()


def test_highlighter_output_matches_pygments(colors: Highlighter) -> None:
    for text, language in ((PLAIN, "c"), ("def f(x): return '<&>\u2028'", "python"), ("", "json"), ("\n\n x", "yaml")):
        whole = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
        assert colors.html(text, language)[0] == whole


def test_slow_code_is_not_highlighted_and_the_next_block_is(colors: Highlighter) -> None:
    assert colors.html(SLOW, "c") == (None, BLOCK_SECONDS)
    assert "<span" in str(colors.html(PLAIN, "c")[0])


def test_killed_highlighter_process_is_restarted(colors: Highlighter) -> None:
    colors.html(PLAIN, "c")
    assert colors._process is not None
    colors._process.kill()
    colors._process.wait()
    colors.html(PLAIN, "c")
    assert "<span" in str(colors.html(PLAIN, "c")[0])


def test_code_is_plain_if_the_process_cannot_start(colors: Highlighter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.sys, "executable", "/nowhere")
    assert colors.html(PLAIN, "c")[0] is None


def test_highlighter_time_counts_against_the_render_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.HIGHLIGHTER, "html", lambda text, language: (None, 400.0))
    budget = Budget(1_000.0)
    for _ in range(2):
        with budget.spending() as deadline:
            assert "<span" not in code_block(PLAIN, "c", deadline=deadline, color=True).partition("<pre>")[2]
    with pytest.raises(OverBudgetError), budget.spending() as deadline:
        code_block(PLAIN, "c", deadline=deadline, color=True)
    assert budget.is_spent


def test_message_of_slow_code_blocks_is_not_highlighted() -> None:
    html = render_markdown(f"```c\n{SLOW}\n```\n\n" * 8 + f"```c\n{PLAIN}```\n")
    assert "<span class" not in html
