"""Extract the visible text of HTML. Nothing is fetched; scripts, styles and hidden elements are omitted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TypeAlias

from notso.documents.formulas import Formula, Lowered, Raised, Struck, joined, numeral
from notso.documents.tables import line_of, markdown_lines
from notso.documents.values import UnreadableError

MAX_DEPTH = 5_000  # maximum nesting of elements
MAX_SPAN = 1_000  # maximum number of columns or rows that a cell spans
_SILENT = {
    *("script", "style", "template", "noscript", "svg", "iframe", "object", "audio", "video", "canvas"),
    *("datalist", "head"),
    "rp",  # readings (`rt`) are always written in parentheses
    "epub:case",  # an alternative to the `epub:default` after it, for programs that support another vocabulary
}
_VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr", "param"),
}
_IMPLIED_ENDS = {  # start tag -> elements that it closes implicitly if they are innermost
    "p": {"p"}, "li": {"li", "p"}, "dt": {"dt", "dd", "p"}, "dd": {"dt", "dd", "p"}, "td": {"td", "th", "p"},
    "th": {"td", "th", "p"}, "tr": {"td", "th", "tr", "p"}, "option": {"option"},
    "rt": {"rt", "rp"}, "rp": {"rt", "rp"},
}  # fmt: skip
_IN_HEAD = {"title", "meta", "link", "base", "style", "script", "noscript", "template"}  # other tags end the head
_BLOCKS = {
    *("p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "dl", "dt", "dd"),
    *("blockquote", "figure", "figcaption", "form", "fieldset", "address", "details", "summary", "body", "html"),
    *("table", "thead", "tbody", "tfoot", "caption", "hr", "pre", "li", "h1", "h2", "h3", "h4", "h5", "h6"),
}
_UNSEEN_INPUTS = ("hidden", "password", "submit", "button", "reset", "image", "file", "range", "color")
_FORMS: dict[str, type[str]] = {"sup": Raised, "sub": Lowered, "del": Struck, "s": Struck, "strike": Struck}
_ALIGNED = re.compile(r"vertical-align\s*:\s*(super|sub)\b")
_CLASS = re.compile(r"[a-z]*\.([\w-]+)", re.IGNORECASE)  # a class selector
_BULLETED = ("ul", "menu", "dir")
# Inserted before the text of these elements.
_MARKS = {"rt": "(", "option": " "} | {f"h{level}": f"\n{'#' * level} " for level in range(1, 7)}
_LIST_STYLE = re.compile(
    r"list-style(?:-type)?\s*:[^;]{0,99}?\b"
    r"(none|disc|circle|square|decimal(?:-leading-zero)?|(?:low|upp)er-(?:alpha|latin|roman))\b"
)
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d])|opacity\s*:\s*0(?![.\d])"
)


# Text, or a table in two forms: as Markdown, and on one line for a cell of another table (Markdown tables cannot be
# nested).
_Piece: TypeAlias = str | tuple[str, str]


@dataclass
class _Table:
    before: list[_Piece]  # text before the table
    rows: list[list[str]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)  # the cells with their line breaks, for a table used for layout
    in_cell: bool = False
    span: tuple[int, int] = (1, 1)  # columns and rows that the open cell spans
    covered: Counter[int] = field(default_factory=Counter)  # column -> further rows covered by a cell above

    def add_cell(self, text: str) -> None:
        if not self.rows:
            self.rows.append([])
        row, (columns, rows) = self.rows[-1], self.span
        while self.covered[len(row)] > 0:
            self.covered[len(row)] -= 1
            row.append("")
        for number in range(columns):
            self.covered[len(row)] = rows - 1
            row.append("" if number else text)
        self.span = (1, 1)

    def add_row(self) -> None:
        if self.rows:
            self.covered -= Counter(each for each in self.covered if each >= len(self.rows[-1]))
        self.rows.append([])


@dataclass
class _List:
    form: str = ""  # format of the numbers; empty: the items have bullets
    number: int | None = None  # number of the next item; None: the list is reversed, and its last item is number 1
    step: int = 1
    items: int = 0
    unnumbered: list[int] = field(default_factory=list)  # positions of items whose number is not known yet

    def label(self, values: Mapping[str, str | None], place: int) -> str:
        form, self.items = _number_form(values, self.form), self.items + 1
        if (number := _integer(values.get("value"))) is not None:
            self.number = number
        if self.number is None:
            self.unnumbered.append(place)
            return "- "
        self.number += self.step
        return f"{numeral(self.number - self.step, form)}. " if form else "- "


class _Text(HTMLParser):
    def __init__(self, forms: Mapping[str, type[str]]) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._class_forms = dict(forms)
        self._pieces: list[_Piece] = []
        # Open elements: name, whether it hides its contents, and the form of its text.
        self._open: list[tuple[str, bool, type[str]]] = []
        self._hidden = 0
        self._in_title = False
        self._verbatim = 0
        self._navigation = 0  # > 0: in a table of contents or breadcrumbs, where lists have no numbers
        self._tables: list[_Table] = []  # open tables
        self._lists: list[_List] = []  # open lists
        self._item = -1  # position after the bullet or number of the last item
        self._formula: Formula | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        hides = tag in _SILENT or "hidden" in values or bool(_HIDDEN_STYLE.search((values.get("style") or "").lower()))
        hides = hides or (tag == "option" and "selected" not in values)
        if self._starts_in_formula(tag, values, bool(self._hidden or hides)):
            return
        if tag == "title" and not self.title:
            self._in_title = True
        if tag in _VOID:
            if tag in ("br", "hr"):
                self._pieces.append("\n")
            elif tag == "input" and not (self._hidden or hides):
                self._pieces.append(_input_text(values))
            return
        self._close_before(tag)
        hides = hides or values.get("class") == "katex-html"  # repeats the MathML before it
        self._open.append((tag, hides, self._form(tag, values)))
        self._hidden += hides
        if len(self._open) > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH:,} levels deep", "document_deep")
        if not self._hidden:
            self._start_shown(tag, values)

    def _starts_in_formula(self, tag: str, values: Mapping[str, str | None], is_hidden: bool) -> bool:
        # Handles the tag if it is part of a formula, and returns whether it is.
        name, formula = tag.rpartition(":")[2], self._formula_with(tag)
        if formula is None and (name != "math" or is_hidden):
            return False
        self._formula = formula or Formula()
        self._formula.start(name, {key: value or "" for key, value in values.items()})
        return True

    def _formula_with(self, tag: str) -> Formula | None:
        # Returns the formula that contains the tag. HTML elements end a formula that was not closed.
        if tag in _BLOCKS or tag in _IMPLIED_ENDS:
            self._end_formula()
        return self._formula

    def _form(self, tag: str, values: Mapping[str, str | None]) -> type[str]:
        classes = (self._class_forms.get(each) for each in (values.get("class") or "").split())
        form = _style_form(values.get("style") or "") or next(filter(None, classes), None) or _FORMS.get(tag)
        is_inline = tag not in _BLOCKS and tag not in ("tr", "td", "th")  # blocks cannot be superscripts
        if form is None or not (is_inline or form is Struck):
            form = self._open[-1][2] if self._open else str
        is_note = "noteref" in (values.get("epub:type") or values.get("role") or "")
        return Raised if is_note and form is not Struck else form

    def _close_before(self, tag: str) -> None:
        # Closes the elements that end where this one starts.
        implied_ends = _IMPLIED_ENDS.get(tag, {"p"} if tag in _BLOCKS else set())
        while self._open and (
            self._open[-1][0] in implied_ends or (self._open[-1][0] == "head" and tag not in _IN_HEAD)
        ):
            self._close_innermost()
        if tag == "body":  # a head element that was not closed ends here
            self._open = [each for each in self._open if each[0] != "head"]
            self._hidden = sum(hiding for _, hiding, _ in self._open)

    def _start_shown(self, tag: str, values: Mapping[str, str | None]) -> None:
        if self._item == len(self._pieces) - 1 and self._pieces[-1:] == [" "]:
            self._pieces.pop()
        if tag in _BLOCKS and not (tag in ("p", "div") and self._item == len(self._pieces)):
            self._pieces.append("\n")
        if tag in ("ol", "li", *_BULLETED):
            self._start_list(tag, values)
        elif tag in ("table", "tr", "td", "th"):
            self._start_table(tag, values)
        elif tag == "pre":
            self._verbatim += 1
        elif tag == "nav":
            self._navigation += 1
        elif tag in _MARKS:
            self._pieces.append(_MARKS[tag])

    def _start_list(self, tag: str, values: Mapping[str, str | None]) -> None:
        if tag == "li":
            self._pieces.append((self._lists[-1] if self._lists else _List()).label(values, len(self._pieces)))
            self._item = len(self._pieces)
        elif tag == "ol":
            start, is_reversed = _integer(values.get("start")), "reversed" in values
            number = start if is_reversed or start is not None else 1
            numbers = _number_form(values, "" if self._navigation else "1")
            self._lists.append(_List(numbers, number, -1 if is_reversed else 1))
        else:
            self._lists.append(_List(number=1))

    def _start_table(self, tag: str, values: Mapping[str, str | None]) -> None:
        if tag == "table":
            self._tables.append(_Table(self._pieces))
            self._pieces, self._item = [], -1
        elif self._tables:
            self._end_cell()
            if tag == "tr":
                self._tables[-1].add_row()
            else:
                self._tables[-1].in_cell = True
                self._tables[-1].span = _span(values.get("colspan")), _span(values.get("rowspan"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:  # `<br/>` is one line break, but `<br></br>` is two
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if (formula := self._formula_with(tag)) is not None:
            formula.end(tag.rpartition(":")[2])
            if tag.rpartition(":")[2] == "math":
                self._end_formula()
            return
        if tag == "title":
            self._in_title = False
        if tag == "br":
            self._pieces.append("\n")
        place = next((at for at in range(len(self._open) - 1, -1, -1) if self._open[at][0] == tag), None)
        if place is None:
            return
        visible = not self._hidden
        while len(self._open) > place:
            self._close_innermost()
        if not visible:
            return
        if tag in ("td", "th", "tr") and self._tables:
            self._end_cell()
        elif tag == "table" and self._tables:
            self._end_table()
        elif tag == "caption" and self._tables:
            self._tables[-1].before += ["\n", *self._pieces]
            self._pieces, self._item = [], -1
        elif tag in _BLOCKS:
            self._pieces.append("\n\n" if tag in ("p", "h1", "h2", "h3", "h4", "h5", "h6") else "\n")

    def handle_data(self, data: str) -> None:
        data = data.replace("\u00ad", "")  # an invisible soft hyphen would split the word for searches
        if self._formula is not None:
            self._formula.add(data)
        elif self._in_title:
            self.title += data
        elif self._open and self._open[-1][0] == "style":
            self._class_forms |= class_forms(data)
        elif not self._hidden:
            text = data if self._verbatim else re.sub(r"\s+", " ", data)
            if self._item == len(self._pieces) and text.split(maxsplit=1)[:1] == str(self._pieces[-1]).split():
                self._pieces[-1], text = "", text.lstrip()  # the text repeats the number
            self._pieces.append((self._open[-1][2] if self._open else str)(text))

    def unknown_decl(self, data: str) -> None:
        """Ignore declarations such as `<![CDATA[`, as browsers do."""

    def text(self) -> str:
        self._end_formula()
        while self._open:
            self._close_innermost()
        while self._tables:
            self._end_table()
        lines = [line.rstrip() for line in _join(self._pieces, 0).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")

    def _close_innermost(self) -> None:
        name, hides, _ = self._open.pop()
        if name == "rt" and not self._hidden:
            self._end_reading()
        elif name in ("ol", *_BULLETED) and not self._hidden and self._lists:
            self._end_list()
        elif name == "nav" and not self._hidden:
            self._navigation = max(0, self._navigation - 1)
        self._hidden -= hides
        self._verbatim -= name == "pre" and self._verbatim > 0

    def _end_reading(self) -> None:
        if self._pieces[-1:] == [" "]:
            self._pieces.pop()
        if self._pieces and self._pieces[-1] == "(":  # the reading is empty
            self._pieces.pop()
        else:
            self._pieces.append(")")

    def _end_list(self) -> None:
        ended = self._lists.pop()
        for number, place in enumerate(ended.unnumbered):
            if ended.form and self._pieces[place : place + 1] == ["- "]:
                self._pieces[place] = f"{numeral(ended.items - number, ended.form)}. "

    def _end_formula(self) -> None:
        if self._formula is not None:
            self._pieces.append(self._formula.text())
            self._formula = None

    def _end_cell(self) -> None:
        table, text = self._tables[-1], " ".join(_join(self._pieces, 1).split())
        table.blocks += [_join(self._pieces, 0).strip()] * bool(text)
        self._pieces, self._item = [], -1
        if not table.in_cell and text and table.rows and table.rows[-1]:
            # Text between cells is added to the cell before it, because a separate cell would shift the cells after it.
            table.rows[-1][-1] = f"{table.rows[-1][-1]} {text}".strip()
        elif table.in_cell or text:
            table.add_cell(text)
        table.in_cell = False

    def _end_table(self) -> None:
        self._end_cell()
        table = self._tables.pop()
        if any(any(row[1:]) for row in table.rows):
            text, line = "\n".join(["", *markdown_lines(table.rows), "", ""]), line_of(table.rows)
        else:  # a table used for layout
            text, line = "\n".join([*table.blocks, ""]), " ".join(cell for row in table.rows for cell in row)
        self._pieces = [*table.before, (text, f" {line} ")]


def _join(pieces: list[_Piece], form: int) -> str:
    return joined(each if isinstance(each, str) else each[form] for each in pieces)


def _input_text(values: Mapping[str, str | None]) -> str:
    kind = (values.get("type") or "text").lower()
    if kind in ("checkbox", "radio"):
        return "\u2612" if "checked" in values else "\u2610"
    value = values.get("value") if kind not in _UNSEEN_INPUTS else ""
    return f" {value} " if value else ""  # separated from adjacent digits and words


def _integer(value: str | None) -> int | None:
    found = re.match(r"\s*([-+]?[0-9]{1,9})", value or "")
    return int(found[1]) if found else None


def _number_form(values: Mapping[str, str | None], default: str) -> str:
    # Returns the number format of a list, or of an item in a list of format `default` (empty: bullets).
    styles = _LIST_STYLE.findall(values.get("style") or "")
    form = styles[-1] if styles else values.get("type") or default
    return form if default and form not in ("none", "disc", "circle", "square") else ""


def _span(value: str | None) -> int:
    return max(1, min(MAX_SPAN, int(value[:9]))) if value and value.isascii() and value.isdecimal() else 1


def _style_form(style: str) -> type[str] | None:
    found = _ALIGNED.search(style)
    if "line-through" in style:
        return Struck
    return None if found is None else Raised if found[1] == "super" else Lowered


def class_forms(sheet: str) -> dict[str, type[str]]:
    """Return the classes that a style sheet defines for superscripts, subscripts and struck-through text."""
    forms: dict[str, type[str]] = {}
    for rule in sheet.split("}"):
        selectors, _, style = rule.rpartition("{")
        if (form := _style_form(style)) is not None:
            selectors = selectors.rpartition("{")[2].rpartition("*/")[2]
            forms |= {found[1]: form for each in selectors.split(",") if (found := _CLASS.fullmatch(each.strip()))}
    return forms


def html_text(html: str, forms: Mapping[str, type[str]] | None = None) -> tuple[str, str]:
    """Return the title and the visible text. Raises UnreadableError.

    forms: the result of `class_forms` for style sheets in other files.
    """
    parser = _Text(forms or {})
    parser.feed(html)
    parser.close()
    return parser.title, parser.text()
