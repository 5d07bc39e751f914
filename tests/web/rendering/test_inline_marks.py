"""Bare URLs, footnotes and task-list checkboxes, rendered whole and while they stream."""

from __future__ import annotations

import re

import pytest

from notso.web.rendering.markdown import render_markdown


def links(text: str) -> list[tuple[str, str]]:
    """Return the address and text of each link."""
    return re.findall(r'<a href="([^"]*)"[^>]*>(.*?)</a>', render_markdown(text))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("See https://example.org.", "https://example.org"),
        ("(http://example.org/a_b(c))", "http://example.org/a_b(c)"),
        ("HTTPS://Example.org/?q=1&r=2, and", "HTTPS://Example.org/?q=1&amp;r=2"),
        ("*https://example.org/x*", "https://example.org/x"),
        ("https://example.org/a~b_c_d!", "https://example.org/a~b_c_d"),
        ("one https://example.org/…", "https://example.org/"),
    ],
)
def test_bare_url_is_linked_without_trailing_punctuation(text: str, address: str) -> None:
    [(target, words)] = links(text)
    assert words == address
    assert target.lower() == address.lower()


@pytest.mark.parametrize(
    "text", ["javascript://example.org", "xhttp://example.org", "http://", "`https://example.org`", "ftp://a.b", "a://"]
)
def test_text_that_is_not_a_web_url_is_not_linked(text: str) -> None:
    assert links(text) == []


def test_url_as_link_text_is_not_linked_again() -> None:
    assert links("[https://a.example](https://b.example)") == [("https://b.example", "https://a.example")]


def test_five_hundred_bare_urls_are_linked() -> None:
    assert len(links(" ".join(f"https://example.org/{at}" for at in range(500)))) == 500


def test_footnotes_are_rendered_as_superscript() -> None:
    html = render_markdown("Said[^1], once[^long-one].\n\n[^1]: Why.\n[^long-one]: Because.\n")
    assert "Said<sup>1</sup>, once<sup>long-one</sup>." in html
    assert "<sup>1</sup> Why.<br>" in html and "<sup>long-one</sup> Because." in html
    assert "<sup>" not in render_markdown("[^x](https://a.example) [^a b] [^] `[^1]`")
    assert "<sup>&lt;b&gt;</sup>" in render_markdown("[^<b>]")


def test_task_list_items_are_rendered_with_checkbox_characters() -> None:
    html = render_markdown("- [ ] open *now*\n- [x] done\n- [X] too\n- plain [ ] box\n\n1. [ ] first\n")
    assert html.count('<li class="task">') == 4
    assert "☐ open <em>now</em>" in html and "☑ done" in html and "☑ too" in html and "plain [ ] box" in html
