"""HTML sanitizer, the last step for HTML made from model text: nothing may rewrite it afterwards."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import nh3

from notso.web.rendering.code import TOKEN_CLASSES
from notso.web.rendering.extensions import ALERTS

_TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "figure", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("hr", "li", "ol", "p", "pre", "s", "span", "strong", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"),
    *("details", "ins", "kbd", "mark", "sub", "summary"),
}
_CLEANER = nh3.Cleaner(
    tags=_TAGS,
    clean_content_tags={"script", "style"},
    attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
    url_schemes={"http", "https", "mailto"},
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={
        "a": {"target": "_blank"},
        "button": {"type": "button"},  # of code blocks; Markdown cannot produce buttons
        "pre": {"tabindex": "0"},  # scrollable elements must be reachable by keyboard
        "figure": {"tabindex": "0"},
        "table": {"dir": "auto"},  # columns run as the table's own text does
    },
    allowed_classes={
        "span": {*TOKEN_CLASSES, "math", "inline", "display", "quote"},
        "div": {"code-block", "code-label", "long", "math", "display"},
        "blockquote": {"alert", *(f"alert-{kind}" for kind in ALERTS)},
        "button": {"copy-code", "wrap-code", "preview-code", "whole-code"},
        "figure": {"wide-table"},
        "p": {"plain", "alert-title"},
        "li": {"task"},
        "td": {"align-left", "align-right", "align-center"},
        "th": {"align-left", "align-right", "align-center"},
    },
)

# htmx 4 rewrites `<hx-name ` in raw text before parsing, and obeys hx- attributes everywhere.
_HTMX_TAG = re.compile(r"</?hx-", re.IGNORECASE)


class UnsafeHTMLError(ValueError):
    """Sanitized HTML still contains htmx markup: a bug. The text is shown plain."""


def sanitise(html: str) -> str:
    """Reduce HTML to the allow-list. Raises UnsafeHTMLError."""
    clean = _CLEANER.clean(html)
    if _HTMX_TAG.search(clean):
        raise UnsafeHTMLError("an htmx tag survived")
    if "hx-" in clean.lower():
        _AttributeCheck().feed(clean)
    return clean


class _AttributeCheck(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, _ in attrs:
            if name.startswith(("hx-", "data-hx-")):
                raise UnsafeHTMLError("an htmx attribute survived")
