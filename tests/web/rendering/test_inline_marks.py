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
def test_a_bare_address_is_a_link_without_the_sentence_s_own_marks(text: str, address: str) -> None:
    [(target, words)] = links(text)
    assert words == address
    assert target.lower() == address.lower()


@pytest.mark.parametrize(
    "text", ["javascript://example.org", "xhttp://example.org", "http://", "`https://example.org`", "ftp://a.b", "a://"]
)
def test_what_is_no_address_of_a_page_stays_text(text: str) -> None:
    assert links(text) == []


def test_an_address_within_a_link_is_that_link_s_words() -> None:
    assert links("[https://a.example](https://b.example)") == [("https://b.example", "https://a.example")]


def test_many_addresses_cost_no_more_than_their_length() -> None:
    assert len(links(" ".join(f"https://example.org/{at}" for at in range(500)))) == 500


def test_notes_are_raised_where_they_are_meant_and_explained() -> None:
    html = render_markdown("Said[^1], once[^long-one].\n\n[^1]: Why.\n[^long-one]: Because.\n")
    assert "Said<sup>1</sup>, once<sup>long-one</sup>." in html
    assert "<sup>1</sup> Why.<br>" in html and "<sup>long-one</sup> Because." in html
    assert "<sup>" not in render_markdown("[^x](https://a.example) [^a b] [^] `[^1]`")
    assert "<sup>&lt;b&gt;</sup>" in render_markdown("[^<b>]")


def test_boxes_of_a_task_list() -> None:
    html = render_markdown("- [ ] open *now*\n- [x] done\n- [X] too\n- plain [ ] box\n\n1. [ ] first\n")
    assert html.count('<li class="task">') == 4
    assert "☐ open <em>now</em>" in html and "☑ done" in html and "☑ too" in html and "plain [ ] box" in html
