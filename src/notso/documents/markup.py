"""Extraction of the visible text of HTML. Nothing is fetched; scripts, styles and hidden elements are omitted."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from notso.documents.tables import markdown_lines
from notso.documents.values import UnreadableError

MAX_DEPTH = 5_000  # maximum nesting of elements
_SILENT = {
    *("script", "style", "template", "noscript", "svg", "math", "iframe", "object", "audio", "video", "canvas"),
    *("select", "datalist", "head"),
}
_VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr", "param"),
}
_IMPLIED_ENDS = {  # innermost open elements that a start tag closes implicitly
    "p": {"p"}, "li": {"li", "p"}, "dt": {"dt", "dd", "p"}, "dd": {"dt", "dd", "p"}, "td": {"td", "th", "p"},
    "th": {"td", "th", "p"}, "tr": {"td", "th", "tr", "p"}, "option": {"option"},
}  # fmt: skip
_BLOCKS = {
    *("p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "dl", "dt", "dd"),
    *("blockquote", "figure", "figcaption", "form", "fieldset", "address", "details", "summary", "body", "html"),
    *("table", "thead", "tbody", "tfoot", "caption", "hr", "pre", "li", "h1", "h2", "h3", "h4", "h5", "h6"),
}
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d])|opacity\s*:\s*0(?![.\d])"
)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._pieces: list[str] = []
        self._open: list[tuple[str, bool]] = []  # open elements: name, whether it hides its contents
        self._hidden = 0
        self._in_title = False
        self._verbatim = 0
        self._tables: list[tuple[list[str], list[list[str]]]] = []  # open tables: text before the table, rows

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and not self.title:
            self._in_title = True
        if tag in _VOID:
            if tag in ("br", "hr"):
                self._pieces.append("\n")
            return
        while self._open and self._open[-1][0] in _IMPLIED_ENDS.get(tag, ()):
            self._hidden -= self._open.pop()[1]
        values = dict(attrs)
        hides = tag in _SILENT or "hidden" in values or bool(_HIDDEN_STYLE.search((values.get("style") or "").lower()))
        if tag == "body":  # a head element that was not closed ends here
            self._open = [each for each in self._open if each[0] != "head"]
            self._hidden = sum(hiding for _, hiding in self._open)
        self._open.append((tag, hides))
        self._hidden += hides
        if len(self._open) > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH:,} levels deep", "document_deep")
        if self._hidden:
            return
        if tag in _BLOCKS:
            self._pieces.append("\n")
        if tag == "pre":
            self._verbatim += 1
        elif re.fullmatch("h[1-6]", tag):
            self._pieces.append(f"\n{'#' * int(tag[1])} ")
        elif tag == "li":
            self._pieces.append("- ")
        elif tag == "table":
            self._tables.append((self._pieces, []))
            self._pieces = []
        elif tag == "tr" and self._tables:
            self._end_cell()
            self._tables[-1][1].append([])
        elif tag in ("td", "th") and self._tables:
            self._end_cell()

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag == "br":
            self._pieces.append("\n")
        place = next((at for at in range(len(self._open) - 1, -1, -1) if self._open[at][0] == tag), None)
        if place is None:
            return
        visible = not self._hidden
        for name, hides in self._open[place:]:
            self._hidden -= hides
            self._verbatim -= name == "pre" and self._verbatim > 0
        del self._open[place:]
        if not visible:
            return
        if tag in ("td", "th", "tr") and self._tables:
            self._end_cell(keep_empty=tag != "tr")
        elif tag == "table" and self._tables:
            self._end_table()
        elif tag in _BLOCKS:
            self._pieces.append("\n\n" if tag in ("p", "h1", "h2", "h3", "h4", "h5", "h6") else "\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._hidden:
            self._pieces.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def unknown_decl(self, data: str) -> None:
        """Ignore declarations such as `<![CDATA[`, as browsers do."""

    def text(self) -> str:
        while self._tables:
            self._end_table()
        lines = [line.rstrip() for line in "".join(self._pieces).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")

    def _end_cell(self, keep_empty: bool = False) -> None:
        # Text between cells belongs to the preceding cell.
        text, rows = " ".join("".join(self._pieces).split()), self._tables[-1][1]
        self._pieces = []
        if text or keep_empty:
            if not rows:
                rows.append([])
            rows[-1].append(text)

    def _end_table(self) -> None:
        self._end_cell()
        outer, rows = self._tables.pop()
        if sum(len(row) > 1 for row in rows):
            outer += ["\n", "\n".join(markdown_lines(rows)), "\n\n"]
        else:  # a table used for layout
            outer += ["\n".join(cell for row in rows for cell in row), "\n"]
        self._pieces = outer


def html_text(html: str) -> tuple[str, str]:
    """Return title and visible text. Raises UnreadableError."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return parser.title, parser.text()
