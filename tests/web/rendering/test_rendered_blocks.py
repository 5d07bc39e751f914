"""Formulas, code blocks and tables as HTML: which text becomes one, and the controls the page attaches."""

from __future__ import annotations

import pytest

from notso.web.rendering.code import MAX_UNFOLDED_LINES
from notso.web.rendering.markdown import render_markdown
from notso.web.rendering.math import MAX_FORMULA_CHARACTERS
from notso.web.rendering.streaming import StreamingMarkdown

DISPLAY = '<div class="math display">{}</div>'
INLINE = '<span class="math inline">{}</span>'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("$x^2$", f"<p>{INLINE.format('x^2')}</p>"),
        ("so $a<b$, or \\(c\\).", f"<p>so {INLINE.format('a&lt;b')}, or {INLINE.format('c')}.</p>"),
        ("$a_1 + b_1$ *c*", f"<p>{INLINE.format('a_1 + b_1')} <em>c</em></p>"),
        ("in a line $$x$$ here", '<p>in a line <span class="math display">x</span> here</p>'),
        ("$5, $6 and $x$", f"<p>$5, $6 and {INLINE.format('x')}</p>"),
        ("$x\\$y$", f"<p>{INLINE.format(chr(120) + chr(92) + '$y')}</p>"),
        ("$$ x $$", DISPLAY.format("x")),
        ("$$\nx\n+ y\n$$", DISPLAY.format("x\n+ y")),
        ("\\[ \\frac{1}{2} \\]", DISPLAY.format("\\frac{1}{2}")),
        ("Thus:\n\\[\na *b* c\n\\]\nand", f"<p>Thus:</p>\n{DISPLAY.format('a *b* c')}\n<p>and</p>"),
        ("> $$\n> x\n> $$", f"<blockquote>\n{DISPLAY.format('x')}\n</blockquote>"),
    ],
)
def test_math_delimiters_produce_formulas(text: str, html: str) -> None:
    assert render_markdown(text).strip() == html


@pytest.mark.parametrize(
    "text",
    [
        *("costs $5 and $10 more", "from $5-$10", "US$5 or CA$6", "a $ b $ c", "\\$5 is $6", "$ x$ and $x $", "one $"),
        *("`$x$`", "    $$\n    x\n    $$", "```\n$$\nx\n$$\n```", "$$", "$$$ cash", "\\(", "\\[ \\]", "$$ $$"),
        *("$$\nx\n\ny\n$$", "$$ x", "$$\nx\n$$ y", f"$${'x' * (MAX_FORMULA_CHARACTERS + 1)}$$", "\\\\(x\\\\)"),
    ],
)
def test_prices_code_and_unclosed_math_are_not_formulas(text: str) -> None:
    assert 'class="math' not in render_markdown(text)


def test_unclosed_display_math_is_shown_as_plain_text() -> None:
    assert render_markdown("$$\na *b* <i>\n\nc") == '<p class="plain">$$\na *b* &lt;i&gt;</p>\n<p>c</p>\n'


def test_streamed_formula_is_rendered_once_its_delimiter_closes() -> None:
    stream = StreamingMarkdown()
    assert 'class="math' not in stream.feed("Thus\n\n$$\nx").tail
    assert 'class="math display">x</div>' in stream.feed("\n$$\n").tail
    assert 'class="math display">x</div>' in stream.feed("\nand more\n").closed


def test_code_block_has_language_label_and_buttons() -> None:
    html = render_markdown("```py\nx = 1\n```")
    assert '<div class="code-label"><span>python</span><button class="copy-code" type="button">Copy</button>' in html
    assert '<button class="wrap-code" type="button">Wrap</button></div><pre tabindex="0">' in html
    assert "<span>code</span>" in render_markdown("    indented")


@pytest.mark.parametrize("lines", [MAX_UNFOLDED_LINES, MAX_UNFOLDED_LINES + 1])
def test_only_long_code_blocks_are_folded(lines: int) -> None:
    html = render_markdown("```\n" + "x\n" * lines + "```")
    folded = lines > MAX_UNFOLDED_LINES
    assert ('class="code-block long"' in html) == folded == ("whole-code" in html)


def test_table_is_wrapped_in_a_scrollable_figure() -> None:
    html = render_markdown("|a|b|\n|-|-:|\n|1|2|")
    assert html.startswith('<figure class="wide-table" tabindex="0"><table dir="auto">')
    assert html.endswith("</table></figure>\n")
    assert '<td class="align-right">2</td>' in html


def test_html_buttons_in_markdown_are_not_rendered() -> None:
    assert "<button" not in render_markdown("<button class=copy-code onclick=x>y</button> <figure>")
