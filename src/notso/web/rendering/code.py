"""Colour for code: Pygments classes from a fixed set of languages, never inline styles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from html import escape
from typing import Any

from pygments import format as write_code  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import STANDARD_TYPES  # type: ignore[import-untyped]

from notso.web.rendering.budget import Deadline
from notso.web.values.wording import words

MAX_HIGHLIGHTED_CHARACTERS = 20_000
MAX_HIGHLIGHTED_LINE = 1_000  # one expression of a lexer can read a line in time of its length squared, uninterrupted
MAX_UNFOLDED_LINES = 40

LANGUAGES: dict[str, str] = {
    **{name: name for name in ("bash", "c", "cpp", "css", "diff", "go", "html", "ini", "java", "javascript", "json")},
    **{name: name for name in ("kotlin", "lua", "makefile", "php", "python", "ruby", "rust", "sql", "swift", "toml")},
    **{name: name for name in ("typescript", "xml", "yaml")},
    **{"c++": "cpp", "htm": "html", "js": "javascript", "py": "python", "python3": "python", "rb": "ruby"},
    **{"rs": "rust", "sh": "bash", "shell": "bash", "ts": "typescript", "yml": "yaml"},
}
"""What a person or model may write after the fence, and the language meant."""

TOKEN_CLASSES: frozenset[str] = frozenset(name for name in STANDARD_TYPES.values() if name)
"""Every class the highlighter can write, and so every class the sanitiser lets through on a span."""


def language_of(info: str) -> str:
    """The known language named by a fence's info string, or ''."""
    words = info.split(maxsplit=1)
    return LANGUAGES.get(words[0].lower(), "") if words else ""


def code_block(code: str, info: str, *, deadline: Deadline, colour: bool) -> str:
    """A whole code block as HTML: above it its language and what one can do with it, folded if long.

    Raises OverBudgetError.
    """
    language = language_of(info)
    if colour and language and _is_short(code):
        body = write_code(_tokens(code, language, deadline), HtmlFormatter(nowrap=True))
    else:
        body = escape(code)
    long = code.count("\n") > MAX_UNFOLDED_LINES
    tools = _button("copy-code", words["code_copy"]) + _button("wrap-code", words["code_wrap"])
    tools += _button("whole-code", words["code_whole"]) if long else ""
    label = f'<div class="code-label"><span>{language or words["code"]}</span>{tools}</div>'
    return f'<div class="code-block{" long" if long else ""}">{label}<pre><code>{body}</code></pre></div>\n'


def _is_short(code: str) -> bool:
    return len(code) <= MAX_HIGHLIGHTED_CHARACTERS and max(map(len, code.split("\n"))) <= MAX_HIGHLIGHTED_LINE


def _tokens(code: str, language: str, deadline: Deadline) -> Iterator[Any]:
    for token in _lexer(language).get_tokens(code):
        deadline.check()
        yield token


def _button(name: str, label: str) -> str:
    return f'<button class="{name}">{escape(label)}</button>'


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(language, stripnl=False)
