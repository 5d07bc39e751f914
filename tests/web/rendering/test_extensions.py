"""Markup that models write beyond CommonMark: inert HTML, foldable sections, alerts, formulas, emphasis in CJK text."""

from __future__ import annotations

import os
import random

import pytest

from notso.web.rendering.extensions import translate_labels
from notso.web.rendering.markdown import render_markdown
from notso.web.rendering.streaming import StreamingMarkdown
from notso.web.values.wording import language

INERT = [
    ("a<br>b<BR/>c<br />d", "<p>a<br>b<br>c<br>d</p>"),
    ("H<sub>2</sub>O, x<sup>2</sup>", "<p>H<sub>2</sub>O, x<sup>2</sup></p>"),
    ("<kbd>Ctrl</kbd> <mark>m</mark> <ins>i</ins>", "<p><kbd>Ctrl</kbd> <mark>m</mark> <ins>i</ins></p>"),
    ("a<!-- hidden **x** -->b", "<p>ab</p>"),
    ("`<br>`", "<p><code>&lt;br&gt;</code></p>"),
    ("<sub>open", "<p><sub>open</sub></p>"),
    ("<sub onclick=x>y", "<p>&lt;sub onclick=x&gt;y</p>"),
    ("<mark class=toast>y", "<p>&lt;mark class=toast&gt;y</p>"),
    ("<b>y</b>", "<p>&lt;b&gt;y&lt;/b&gt;</p>"),
]


@pytest.mark.parametrize(("text", "html"), INERT)
def test_inert_tags_without_attributes_are_markup(text: str, html: str) -> None:
    assert render_markdown(text).strip() == html


def test_br_in_table_cell_is_a_line_break() -> None:
    html = render_markdown("|a|\n|-|\n|x<br>y|\n")
    assert "<td>x<br>y</td>" in html and '<table dir="auto">' in html


def test_details_element_may_contain_blocks() -> None:
    html = render_markdown("<details>\n<summary>More *here*</summary>\n\n- a\n\n```\nx\n```\n</details>\n\nafter")
    inside, _, after = html.partition("</details>")
    assert "<summary>More <em>here</em></summary>" in inside and "<li>a</li>" in inside and "code-block" in inside
    assert after.strip() == "<p>after</p>"
    nested = render_markdown("<details>\n\n<details>\n\na\n\n</details>\n\nb\n\n</details>\n\nc")
    assert nested.count("<details>") == 2 and nested.rstrip().endswith("</details>\n<p>c</p>")
    assert "<summary>Details</summary>" in nested


def test_unclosed_details_element_ends_with_its_list_item() -> None:
    for text in ("- <details>\n  a\n\noutside\n</details>\n\nafter", "> <details>\noutside\n\nafter"):
        inside, outside, after = render_markdown(text).partition("outside")
        assert "</details>" in inside and outside and "<p>after</p>" in after
    closed = render_markdown("- <details>\n\n  a\n\n</details>\n\nafter")
    assert "&lt;" not in closed and "<p>after</p>" in closed


def test_alert_blockquotes_are_rendered_and_localized() -> None:
    html = render_markdown("> [!NOTE]\n> Some *text*")
    assert html.startswith('<blockquote class="alert alert-note">\n<p class="alert-title">Note</p>\n<p>Some <em>text')
    assert "alert" not in render_markdown("> [!OTHER]\n> text") + render_markdown("> text\n> [!NOTE]")
    token = language.set("de")
    assert '<p class="alert-title">Hinweis</p>' in translate_labels(html)
    language.reset(token)


@pytest.mark.parametrize("name", ["mermaid", "csv", "svg", "md", "objective-c", "f#"])
def test_code_fence_keeps_its_language_name(name: str) -> None:
    assert f"<span>{name}</span>" in render_markdown(f"```{name}\nx\n```")


def test_markup_in_code_fence_language_is_dropped() -> None:
    assert "<span>code</span>" in render_markdown("```<b>x\ny\n```")
    assert "<span>code</span>" in render_markdown("```\ny\n```")


FORMULAS = [
    ("```math\na^2\n```", '<div class="math display">a^2</div>'),
    ("$ a = b $", '<p><span class="math inline">a = b</span></p>'),
    (
        "\\begin{align}\na &= b\n\\end{align}",
        '<div class="math display">\\begin{align}\na &amp;= b\n\\end{align}</div>',
    ),
    ("$ 5 and $ 6, $5 and $6", "<p>$ 5 and $ 6, $5 and $6</p>"),
    ("\\begin{align}\nopen", '<p class="plain">\\begin{align}\nopen</p>'),
]


@pytest.mark.parametrize(("text", "html"), FORMULAS)
def test_extended_math_syntax_is_rendered(text: str, html: str) -> None:
    assert render_markdown(text).strip() == html


EMPHASIS = [
    ("**注意：**这", "<strong>注意：</strong>这"),
    ("这是**“重点”**内容", "这是<strong>“重点”</strong>内容"),
    ("**太郎は「はい」**と言った", "<strong>太郎は「はい」</strong>と言った"),
    ("**중요(重要)**은", "<strong>중요(重要)</strong>은"),
    ("中文*强调*中文", "中文<em>强调</em>中文"),
    ("a * b * c, snake_case_x, 2*3*4", "a * b * c, snake_case_x, 2<em>3</em>4"),
    ("**Note:**text", "**Note:**text"),
]


@pytest.mark.parametrize(("text", "html"), EMPHASIS)
def test_emphasis_beside_cjk_text(text: str, html: str) -> None:
    assert render_markdown(text).strip() == f"<p>{html}</p>"


def test_growing_text_never_changes_a_block_already_shown() -> None:
    dice = random.Random(int(os.environ.get("FUZZ_SEED", "41")))
    texts = [text for text, _ in INERT + FORMULAS + EMPHASIS]
    texts += ["<details>", "<summary>s</summary>", "</details>", "> [!TIP]", "> x", "", "", "plain", "- item", "```"]
    for _ in range(150):
        text = "\n".join(dice.choices(texts, k=dice.randint(1, 12)))
        stream, closed, at = StreamingMarkdown(), "", 0
        while at < len(text):
            size = dice.randint(1, 12)
            closed += stream.feed(text[at : at + size]).closed
            at += size
        closed += stream.finish().closed
        assert closed == render_markdown(text), text
