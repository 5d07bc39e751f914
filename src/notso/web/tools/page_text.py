"""Extract the text of a fetched HTML page in a child process with limited CPU time and memory.

The child process runs `main` of this module.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

from notso.system.confinement import Limits, serve_confined

LIMITS = Limits(cpu_s=2, memory_bytes=512 << 20, wall_s=10.0, answer_bytes=4 << 20)

_PROGRAM = "from notso.web.tools.page_text import main; main()"
_HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "head", "iframe", "nav", "footer"})
_HEAD_CONTENT = frozenset({"title", "meta", "link", "base", "script", "style", "noscript", "template"})
_BLOCKS = frozenset(
    {
        *("p", "div", "section", "article", "main", "header", "li", "ul", "ol", "table", "tr", "br", "hr", "pre"),
        *("blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "figcaption", "option"),
    }
)


async def page_text(html: str) -> str:
    """Return the readable text of a page. Raises ConfinedWorkError."""
    # Imported here, because it loads asyncio, which the child process does not need.
    from notso.web.values.child_work import run_confined

    return (await run_confined(_PROGRAM, html.encode("utf-8", "replace"), LIMITS)).decode()


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.parts: list[str] = []
        self._hidden: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        if tag not in _HEAD_CONTENT:
            self._end_head()
        if tag in _HIDDEN and len(self._hidden) < 100:
            self._hidden.append(tag)
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        elif tag == "body":
            self._hidden.clear()
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title and not self.title:
            self.title = " ".join(data.split())
            return
        if not self._in_title and not data.isspace():
            self._end_head()
        if not self._hidden:
            self.parts.append(data)

    def _end_head(self) -> None:
        # The tag </head> is optional: other content ends the head.
        if self._hidden == ["head"]:
            self._hidden.clear()


def extract_text(html: str) -> str:
    """Return the title and text of a page, without scripts, styles or navigation."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return f"{parser.title}\n\n{text}" if parser.title else text


def main() -> None:
    """Convert HTML on stdin to text on stdout."""
    serve_confined(lambda html: extract_text(html.decode()).encode("utf-8", "replace"), LIMITS)
