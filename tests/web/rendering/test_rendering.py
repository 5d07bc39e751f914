"""Markdown to HTML: streaming gives the same result as one call, the output is always safe, and rendering is never
slow."""

from __future__ import annotations

import random
import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notso.web.rendering.code import LANGUAGES, TOKEN_CLASSES
from notso.web.rendering.extensions import ALERTS
from notso.web.rendering.markdown import (
    MAX_MARKDOWN_CHARACTERS,
    MAX_PARAGRAPH_CHARACTERS,
    UnsafeHTMLError,
    render_markdown,
    sanitize,
)
from notso.web.rendering.streaming import StreamingMarkdown

DOCUMENT = """# Title

A paragraph with **bold**, *soft*, ~~gone~~, `code`, [a link](https://example.org/a?b=1&c=2 "title") and <https://e.org>.
Second line\\
third after a hard break.

- one
- two

  still two
    1. deep
    2. deeper

> quoted
> > twice
lazy

```python
def f(x: int) -> str:  # comment

    return f"{x}"
```

    indented code

| a | b | c |
|:--|--:|:-:|
| 1 | 2 | `x` |

Setext
======

***

![picture](https://example.org/p.png) last &amp; least &lt;
"""

PIECES = (
    *(
        "# h\n",
        "a *b* ",
        "**c",
        "`d`",
        "```\n",
        "```py\nx = 1\n",
        "~~~\n",
        "- e\n",
        "  - f\n",
        "1. g\n",
        "2) h\n",
        "> i\n",
        "\n",
    ),
    *(
        "\n\n",
        "    code\n",
        "|a|b|\n",
        "|-|-|\n",
        "---\n",
        "===\n",
        "[x]: http://y\n",
        "[x]\n",
        "<b>",
        "\t",
        "\\",
        "\r\n",
        "\r",
    ),
    *(
        "\u2028",
        "\x0c",
        "word ",
        "\n- \n",
        "* * *\n",
        "+ j\n\n  k\n",
        "&lt;",
        "<!--",
        "-->\n",
        "![z](q)",
        "***\n",
        "\x0b\n",
    ),
    *("$$\n", "$$ x_1 $$\n", "$$ y", "$a$ ", "$5 ", "\\[\n", "\\]\n", "\\[ z \\]\n", "\\(b\\) ", "  $$\n"),
)


def whole_and_streamed(text: str, cuts: list[int]) -> tuple[str, str]:
    stream, html, last = StreamingMarkdown(), "", 0
    for cut in [*sorted(cuts), len(text)]:
        html += stream.feed(text[last:cut]).closed
        last = cut
    return render_markdown(text), html + stream.finish().closed


def test_document_streamed_by_character_equals_whole_render() -> None:
    whole, streamed = whole_and_streamed(DOCUMENT, list(range(len(DOCUMENT))))
    assert streamed == whole
    for needed in (
        "<h3>",
        '<table dir="auto">',
        "<strong>",
        "<ol>",
        "<blockquote>",
        'class="k"',
        "<hr>",
        "<s>",
        'class="align-right"',
    ):
        assert needed in whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.randoms(use_true_random=False))
@example("- a\n\n\n- b\n\ntext\n- c\n", random.Random(0))
@example("a\n\r\nb\r", random.Random(1))
@example("```\nx\n\n```\n2. y\n", random.Random(2))
def test_streamed_html_equals_whole_render(text: str, chance: random.Random) -> None:
    whole, streamed = whole_and_streamed(text, [chance.randrange(len(text) + 1) for _ in range(12)])
    assert streamed == whole


def test_closed_html_while_streaming_is_a_prefix_of_the_result() -> None:
    stream, closed, whole = StreamingMarkdown(), "", render_markdown(DOCUMENT)
    for at in range(0, len(DOCUMENT), 3):
        rendered = stream.feed(DOCUMENT[at : at + 3])
        closed += rendered.closed
        assert whole.startswith(closed)
        assert "**" not in rendered.tail and "](" not in rendered.tail
        assert_safe(rendered.tail)


def test_code_is_highlighted_when_its_block_closes() -> None:
    stream = StreamingMarkdown()
    assert "<code>x = 1\n</code>" in stream.feed("```python\nx = 1\n").tail
    assert '<span class="n">x</span>' in stream.feed("```\n\nafter\n").closed


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        ("a **bo", "<p>a <strong>bo</strong></p>"),
        ("a **bo ", "<p>a <strong>bo</strong></p>"),
        ("a **", "<p>a</p>"),
        ("a *", "<p>a</p>"),
        ("a **b *c", "<p>a <strong>b <em>c</em></strong></p>"),
        ("a **b** c", "<p>a <strong>b</strong> c</p>"),
        ("a `x = [", "<p>a <code>x = [</code></p>"),
        ("a `", "<p>a</p>"),
        ("a `**` b", "<p>a <code>**</code> b</p>"),
        ("see [the pa", "<p>see the pa</p>"),
        ("see [the page](https://exa", "<p>see the page</p>"),
        ("see ![pic](https://exa", "<p>see pic</p>"),
        ("3 * 4 is", "<p>3 * 4 is</p>"),
        ("snake_case", "<p>snake_case</p>"),
        ("- one\n- **two", "<ul>\n<li>one</li>\n<li><strong>two</strong></li>\n</ul>"),
        ("* one", "<ul>\n<li>one</li>\n</ul>"),
        ("~~go", "<p><s>go</s></p>"),
        ("# ", ""),
        ("a\n## ", "<p>a</p>"),
        ("a # ", "<p>a #</p>"),
        ("costs $5 and", "<p>costs $5 and</p>"),
        ("$$\na **b", '<p class="plain">$$\na **b</p>'),
        ("\\[ a [b", '<p class="plain">\\[ a [b</p>'),
    ],
)
def test_unfinished_markup_is_completed_in_the_tail(tail: str, shown: str) -> None:
    assert StreamingMarkdown().feed(tail).tail.strip().replace("\n</code>", "</code>") == shown


def test_images_become_links() -> None:
    html = render_markdown("![secret](https://evil.example/?q=words)")
    assert "<img" not in html
    assert html.startswith('<p><a href="https://evil.example/?q=words"')


def test_only_absolute_web_links_are_kept_and_have_safe_rel() -> None:
    html = render_markdown("[x](https://example.org)")
    assert 'rel="noopener noreferrer nofollow"' in html and 'target="_blank"' in html
    for address in (
        "/chats",
        "//evil.example",
        "javascript:alert(1)",
        "JaVaScRiPt:x",
        "data:text/html,x",
        "file:///etc",
        "x",
    ):
        assert "href" not in render_markdown(f"[x]({address})"), address


def test_code_in_every_known_language_is_rendered() -> None:
    for name in LANGUAGES:
        assert '<div class="code-label">' in render_markdown(f"```{name}\nx = 1\n```")


ALLOWED_ATTRIBUTES = {"class", "href", "rel", "target", "start", "type", "tabindex", "dir"}
ALLOWED_TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "figure", "h3", "h4", "h5", "h6"),
    *("hr", "li", "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
    *("details", "ins", "kbd", "mark", "sub", "summary", "sup"),
}
CLASSES = TOKEN_CLASSES | {
    *("code-block", "code-label", "long", "copy-code", "wrap-code", "whole-code", "plain", "wide-table"),
    *("preview-code", "task", "alert", "alert-title", *(f"alert-{kind}" for kind in ALERTS)),
    *("align-left", "align-right", "align-center", "math", "inline", "display"),
}


class Inspector(HTMLParser):
    """Fail on any tag or attribute that must not reach a browser."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED_TAGS, tag
        for name, value in attrs:
            assert name in ALLOWED_ATTRIBUTES, name
            assert (name, value) not in (("type", "submit"), ("tabindex", "-1"))
            if name == "href":
                assert (value or "").startswith(("http://", "https://", "mailto:")), value
            if name == "class":
                assert set((value or "").split()) <= CLASSES, value

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def assert_safe(html: str) -> None:
    Inspector().feed(html)
    assert not re.search(r"</?hx-", html, re.IGNORECASE)


ATTACKS = [
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>", "<iframe src=//evil>"),
    *("<hx-partial hx-target='body'>x</hx-partial>", "<HX-PARTIAL hx-target=body>", "</template><script>x</script>"),
    *(
        "<div hx-get=/x hx-trigger=load>",
        "<div data-hx-get=/x>",
        "<a hx-on:click=alert(1)>x</a>",
        "<p hx-swap-oob=true id=turns>",
    ),
    *(
        "<form action=//evil><input name=q>",
        "<base href=//evil>",
        "<meta http-equiv=refresh content=0;//evil>",
        "<link rel=stylesheet href=//e>",
    ),
    *(
        "<style>*{background:url(//e)}</style>",
        "<p style='background:url(//e)'>",
        "<math><mi//xlink:href='data:x,<script>'>",
    ),
    *(
        "[a](javascript:alert(1))",
        "[a](java\nscript:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](data:text/html,<script>)",
    ),
    *(
        "![a](javascript:alert(1))",
        '![a](x "<hx-partial>")',
        '[a](http://e "<hx-partial hx-target=body>")',
        "<javascript:alert(1)>",
    ),
    *(
        "[<hx-partial>](http://e)",
        "[a](http://e/<hx-partial>)",
        "[a](<http://e/ hx-partial>)",
        "`<hx-partial hx-target=x>`",
    ),
    *(
        "```<hx-partial\nx\n```",
        "```html\n<hx-partial hx-target=body>\n```",
        '```" onclick=x\ny\n```',
        '~~~ python" class="bubble\nx\n~~~',
    ),
    *(
        "<!-- --><script>x</script>",
        "<!--snapshot-->",
        "<![CDATA[<script>x</script>]]>",
        "<?php x ?>",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
    ),
    *(
        "<a href='http://e' target=_self id=status-label name=x class='bubble raised'>x</a>",
        "<details open ontoggle=x>",
        "<video src=//e>",
    ),
    *(
        "|<script>|\n|-|\n|<hx-oob>|",
        "# <hx-partial>",
        "> <hx-partial>",
        "- <hx-partial>",
        "1. </hx-partial>",
        "\\<hx-partial>",
    ),
    *(
        "\x00<script>",
        "<scr\x00ipt>",
        "<scr<script>ipt>",
        "<\u2028script>",
        "\ufeff<script>",
        "<title>x</title>",
        "<head><script>x</script></head>",
    ),
    *(
        "<body onload=x>",
        "<html><body>",
        "<template><script>x</script></template>",
        "<plaintext>",
        "<textarea><script>",
        "<noscript><p title='</noscript><img src=x onerror=x>'>",
    ),
    *(
        "{{ 7*7 }}",
        "{% include 'x' %}",
        "data: x\n\nevent: done\ndata: {}\n\n",
        "\revent: done\r\r",
        "id: 9999\n",
        ":comment\n",
    ),
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_markup_renders_to_safe_html(attack: str) -> None:
    for frame in ("{}", "a {} b", "> {}", "- {}", "**{}**", "[{}](http://e)", "{0}\n\n{0}", "| {} |\n|--|", "# {}"):
        text = frame.format(attack)
        assert_safe(render_markdown(text))
    stream = StreamingMarkdown()
    for character in f"{attack}\n\n{attack}":
        rendered = stream.feed(character)
        assert_safe(rendered.closed + rendered.tail)
    assert_safe(stream.finish().closed)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*ATTACKS, *PIECES]), max_size=6).map("".join))
def test_combined_hostile_markup_renders_to_safe_html(text: str) -> None:
    assert_safe(render_markdown(text))


def test_sanitizer_removes_htmx_markup() -> None:
    assert "<" not in re.sub(r"</?(p|a)\b[^>]*>", "", sanitize('<p><a href="http://e/?<hx-partial>">x</a></p>'))
    assert sanitize('<p hx-get="/x" data-hx-get="/y" id="z" onclick="w">x</p>') == "<p>x</p>"
    assert sanitize("<hx-partial hx-target=x>y</hx-partial>") == "y"


def test_sanitizer_failure_falls_back_to_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(html: str) -> str:
        raise UnsafeHTMLError

    monkeypatch.setattr("notso.web.rendering.markdown.sanitize", faulty)
    assert render_markdown("a <b> *c*") == '<p class="plain">a &lt;b&gt; *c*</p>\n'


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[" * 16_000,
            "![" * 8_000,
            "*a_" * 5_000,
            "<" * 16_000,
            "> " * 8_000,
            "- " * 8_000,
            "[a](" * 4_000,
            "`" * 16_000,
        ),
        *(
            "~~a" * 5_000,
            "&" * 16_000,
            "a**b" * 4_000,
            "<http://a" * 1_700,
            "\n".join(" " * n + "- x" for n in range(250)),
        ),
        *(
            "|a" * 3_000 + "\n" + "|-" * 3_000 + "\n" + "|b" * 3_000,
            "".join("`" * n + " " for n in range(170)),
            "x" * 200_000,
        ),
        *("$a " * 5_000, "$$" * 8_000, "\\(" * 8_000, "$a$" * 5_000, "$$x\n" * 5_000, "> $$\n" * 3_000),
        *("\n" * 100_000, "[a]: b\n" * 10_000, "# " * 8_000, "<!--" * 4_000, "\\" * 16_000, "_" * 16_000, "((" * 8_000),
    ],
    ids=lambda text: f"{text[:6]!r}x{len(text)}",
)
def test_pathological_text_is_rendered_within_time_limit(text: str) -> None:
    began = time.thread_time()
    html = render_markdown(text)
    assert time.thread_time() - began < 2.5
    assert_safe(html)


def test_overlong_text_and_paragraphs_are_shown_plain() -> None:
    assert render_markdown("*a* " * (MAX_MARKDOWN_CHARACTERS // 4 + 1)).startswith('<p class="plain">*a* ')
    long = "*a* " * (MAX_PARAGRAPH_CHARACTERS // 4 + 1)
    assert render_markdown(f"**x**\n\n{long}\n\n**y**").startswith('<p><strong>x</strong></p>\n<p class="plain">*a*')
    whole, streamed = whole_and_streamed(f"**x**\n\n{long}\n\n**y**", [10, 40_000])
    assert whole == streamed


@pytest.mark.parametrize("depth", [15, 16, 17, pytest.param(40, marks=pytest.mark.long("page"))])
@pytest.mark.parametrize("shape", ["lists", "lists in a line", "quotes"])
def test_deep_nesting_loses_no_text(depth: int, shape: str) -> None:
    if shape == "lists":
        deep = "".join("  " * level + f"- level {level}\n" for level in range(depth)) + "  " * depth + "innermost\n"
    else:
        deep = ("- " if shape == "lists in a line" else "> ") * depth + "innermost\n"
    text = f"before\n\n{deep}\n# Title\n\nafter **it**\n"
    html = render_markdown(text)
    assert html.count("innermost") == 1
    assert html.endswith("<h3>Title</h3>\n<p>after <strong>it</strong></p>\n")
    if shape == "lists":
        assert all(f"level {level}" in html for level in range(depth))
    assert html.count("<li>") + html.count("<blockquote>") == min(depth, 32 if shape == "quotes" else 16)
    assert ('class="plain"' in html) == (depth >= 33 if shape == "quotes" else depth >= 16)
    whole, streamed = whole_and_streamed(text, list(range(len(text))))
    assert whole == streamed


def test_line_breaks_in_a_paragraph_are_kept() -> None:
    assert render_markdown("A rose\nis a rose\n") == "<p>A rose<br>\nis a rose</p>\n"
