"""Streaming readers of PPTX, OpenDocument, EPUB and FB2, and parts of the reader of DOCX."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import BinaryIO
from urllib.parse import unquote

from notso.documents.archives import Archive, XMLEvent, outside, xml_events
from notso.documents.formulas import (
    MAX_LEVEL,
    Formula,
    ListLevel,
    ListNumbers,
    Lowered,
    Raised,
    Struck,
    formulas_as_text,
    joined,
    slide_label,
    unicode_text,
)
from notso.documents.markup import class_forms, html_text
from notso.documents.plain import decode_guessing
from notso.documents.tables import format_number, line_of, markdown_lines, read_spreadsheet
from notso.documents.values import UnreadableError, check_pages

_STYLE_NAME = re.compile(rb"""style-name=["']([^"'<>]*)""")
MAX_REPEATED = 1_000
"""Limit on the repetitions of a cell or space, and on the columns that a cell spans: even small files can state huge
numbers."""

TRUE = ("1", "true", "on")
_TABLE_PARTS = {
    **{"tbl": "table", "table": "table", "tr": "row", "table-row": "row", "gridSpan": "span", "gridBefore": "before"},
    **dict.fromkeys(("tc", "td", "th", "table-cell", "covered-table-cell"), "cell"),
}
_MAX_CHART_COLUMNS = 20  # per series: its values, and the levels of its categories
_CHART_VALUES = ("val", "yVal", "bubbleSize")
_FB2_FORMS: dict[str, type[str]] = {"sup": Raised, "sub": Lowered, "strikethrough": Struck}
_ODF_OMITTED = {
    *("tracked-changes", "annotation", "sequence-decls", "automatic-styles", "number", "desc", "binary-data"),
    *("header-decl", "footer-decl", "date-time-decl"),
}
_ODF_HIDING = (("text-properties", "none"), ("table-properties", "false"))  # elements of styles, and their `display`


@dataclass
class Page:
    blocks: list[str] = field(default_factory=list)
    paragraph: list[str] = field(default_factory=list)
    prefix: str = ""
    tables: list[list[list[list[str]]]] = field(default_factory=list)  # table, row, cell, blocks
    spans: list[int] = field(default_factory=list)  # number of columns that each open cell spans

    def end_paragraph(self) -> None:
        text = joined(self.paragraph).strip()
        if text or self.prefix.strip("#- "):  # a paragraph may have only an automatic number
            self._open_blocks().append((self.prefix + text).strip())
        self.paragraph, self.prefix = [], ""

    def add_mark(self, mark: str) -> None:
        # Without brackets, letters would continue the word, and a number would continue the superscript before it or
        # look like an exponent of the digit before it.
        last = (self.paragraph or [""])[-1]
        is_apart = any(map(str.isdecimal, mark)) and not (isinstance(last, Raised) or last[-1:].isdecimal())
        self.paragraph.append(Raised(mark) if is_apart else f"[{mark}]")

    def cut_reading(self, start: int) -> str:
        """Remove a ruby annotation, which begins at piece `start`, and return it in parentheses."""
        reading = joined(self.paragraph[start:]).strip()
        del self.paragraph[start:]
        return reading and f"({reading})"

    def read_table(self, event: XMLEvent) -> bool:
        """Handle a tag of a table, row or cell; return False for other tags."""
        start = event.kind == "start"
        match _TABLE_PARTS.get(event.name):
            case "table":
                self.end_paragraph()
                if start:
                    self.tables.append([])
                elif self.tables:
                    self._add_table([" ".join(cell) for cell in row] for row in self.tables.pop())
            case "row":
                if start and self.tables:
                    self.tables[-1].append([])
            case "cell":
                self.end_paragraph()
                if start:
                    self._start_cells(count_of(event, "number-columns-repeated"))
                    self.spans.append(count_of(event, "colspan"))
                else:
                    self._start_cells(self.spans.pop() - 1)
            case "span":
                if start and self.spans:
                    self.spans[-1] = count_of(event, "val")
            case "before":
                if start:
                    self._start_cells(count_of(event, "val"))
            case _:
                return False
        return True

    def _start_cells(self, count: int) -> None:
        for _ in range(min(MAX_REPEATED, count) if self.tables and self.tables[-1] else 0):
            self.tables[-1][-1].append([])

    def repeat_row(self, times: int) -> None:
        if self.tables and self.tables[-1] and any(self.tables[-1][-1]):
            if times > MAX_REPEATED:
                raise UnreadableError(f"repeats a row more than {MAX_REPEATED:,} times")
            self.tables[-1] += [self.tables[-1][-1]] * times

    def add_chart(self, events: Iterable[XMLEvent]) -> None:
        """Add the titles and values of a chart in Office Open XML."""
        self.end_paragraph()
        titles, rows = _read_chart(events)
        self._open_blocks().append(f"Chart: {titles}".rstrip(" :"))
        self._add_table(rows)

    def add_blocks(self, blocks: list[str]) -> None:
        """Move all blocks of a list to the end."""
        self._open_blocks().extend(filter(None, blocks))
        blocks.clear()

    def _add_table(self, rows: Iterable[Sequence[str]]) -> None:
        blocks = self._open_blocks()
        if text := "\n".join(markdown_lines(rows)) if blocks is self.blocks else line_of(rows):
            blocks.append(text)

    def text(self) -> str:
        self.end_paragraph()
        text, self.blocks = "\n\n".join(self.blocks), []
        return text

    def text_before_break(self) -> str:
        # If a paragraph has no text before the break, its number and heading mark move to the next page.
        prefix = "" if any(map(str.strip, self.paragraph)) else self.prefix
        self.prefix = self.prefix.removeprefix(prefix)
        text, self.prefix = self.text(), prefix
        return text

    def _open_blocks(self) -> list[str]:
        is_in_cell = self.tables and self.tables[-1] and self.tables[-1][-1]
        return self.tables[-1][-1][-1] if is_in_cell else self.blocks


def _read_chart(events: Iterable[XMLEvent]) -> tuple[str, Iterator[list[str]]]:
    # Returns the titles, and the rows of a table with columns for the categories and for each series.
    titles, columns = list[str](), list[dict[int, str]]()
    series: dict[str, dict[int, str]] = {}  # element -> number of the value (0: name of the series) -> text
    categories: dict[str, dict[int, str]] = {}  # of the last series
    opened, place, form, value, is_1904 = list[str](), 0, "", "", False
    for event in events:
        if event.kind == "start":
            opened.append(event.name)
            if event.name == "title":
                titles.append("")
            elif event.name == "date1904":
                is_1904 = event.attributes.get("val", "1") in TRUE
            elif event.name == "ser":
                series = {each: {} for each in ("cat", "xVal", "tx", *_CHART_VALUES)}
            elif event.name == "lvl" and 0 < len(series) < _MAX_CHART_COLUMNS:
                # The outer levels of categories, such as the years of quarters, follow the inner ones.
                opened[-1] = f"lvl {len(series)}"
                series = {opened[-1]: {}, **series}
            elif event.name == "pt":
                place = 1 + count_of(event, "idx")
            elif event.name in ("numCache", "numLit"):
                form = ""
        elif event.kind == "text":  # the text of an element may be in several events
            if "title" in opened and opened[-1] in ("t", "v"):
                titles[-1] += event.name
            elif opened[-1] == "formatCode":
                form += event.name
            elif opened[-1] == "v":
                value += event.name
        else:
            ended = opened.pop()
            if ended == "v" and (part := next((each for each in reversed(opened) if each in series), "")):
                text = format_number(value, form, is_1904) if {"numCache", "numLit"} & {*opened} else value
                series[part].setdefault(place if part != "tx" else 0, text)
            elif ended == "ser" and series:
                name = series.pop("tx")
                values = [series.pop(each) for each in _CHART_VALUES]
                if any(series.values()) and series != categories:
                    categories = series
                    columns += filter(None, series.values())
                columns += [name | each for each in values if each]
                series = {}
            value = ""
    places = sorted({0}.union(*columns) if columns else ())
    return ", ".join(filter(None, titles)), ([each.get(at, "") for each in columns] for at in places)


def read_pptx(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the slides of a presentation in order, each with its notes."""
    archive = Archive(file)
    main = main_part(archive) or "ppt/presentation.xml"
    targets = relationships(archive, main)
    # Read only the list of slides: the list of sections after it has `sldId` elements with ids of another kind.
    slides = takewhile(lambda each: each != XMLEvent("end", "sldIdLst", {}), xml_events(archive.pieces(main)))
    order = [each.get("id", "") for each in elements(slides, "sldId")]
    for relationship_id in filter(None, order):
        slide = targets.get(relationship_id, ("", ""))[1]
        if not slide:
            raise UnreadableError("is damaged: a part is missing", "document_damaged")
        parts = relationships(archive, slide)
        text = drawing_text(archive, parts, slide)
        for kind, label in (("diagramData", ""), ("notesSlide", "Notes: ")):
            for relationship, part in parts.values():
                if relationship.endswith(f"/{kind}") and (further := drawing_text(archive, {}, part)):
                    text += f"\n\n{label}{further}"
        yield text


def read_xlsx(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the visible sheets of an XLSX or XLSB file with their charts and text boxes."""
    archive = Archive(file)

    def read_drawings(sheet: str) -> str:
        texts = list[str]()
        with suppress(UnreadableError):
            for kind, part in relationships(archive, sheet).values() if sheet else ():
                if kind.endswith("/drawing"):
                    parts = relationships(archive, part)
                    texts.append(drawing_text(archive, parts, part))
                    texts += [
                        drawing_text(archive, {}, each)
                        for kind, each in parts.values()
                        if kind.endswith("/diagramData")
                    ]
        return "\n\n".join(filter(None, texts))

    yield from read_spreadsheet(file, warnings, read_drawings)


def read_ods(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the visible sheets of an OpenDocument spreadsheet."""
    archive, styles = Archive(file), _ODFStyles()
    styles.read(optional_events(archive, "styles.xml"), "automatic-styles")
    styles.read(optional_events(archive, "content.xml"), "body")
    names = {each.encode() for each, form in styles.forms.items() if form is not str}
    start = next(archive.pieces("content.xml"), b"") if names and "content.xml" in archive.names else b""
    root = re.search(rb"<([\w:-]+document-content)\b[^<>]*>", start)  # with the declarations of namespaces

    def read_text(cell: bytes) -> str:
        with suppress(UnreadableError):
            if root is not None and not names.isdisjoint(_STYLE_NAME.findall(cell)):
                return "\n".join(_odf_pages(styles, xml_events(iter((b"%b%b</%b>" % (root[0], cell, root[1]),)))))
        return ""

    try:
        yield from list(read_spreadsheet(file, warnings, read_ods_text=read_text))
    except UnreadableError as error:
        if error.code != "document_damaged":
            raise
        # The library does not accept XML with indentation, which SheetJS writes.
        yield from read_odf(file, warnings)


def read_odf(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the pages of an OpenDocument text, split as in `read_docx`, or the slides or sheets of another file."""
    archive = Archive(file)
    _refuse_encrypted_odf(archive)
    styles = _ODFStyles()
    styles.read(optional_events(archive, "styles.xml"), "automatic-styles")  # of headers and footers
    styles.read(xml_events(archive.pieces("content.xml")), "body")
    yield from _odf_pages(styles, dropwhile(_is_before_body, xml_events(archive.pieces("content.xml"))), archive)


def read_flat_odf(data: bytes) -> Iterator[str]:
    """Yield the pages of an OpenDocument file that is one XML document."""
    styles = _ODFStyles()
    styles.read(xml_events(iter((data,))), "body")
    yield from _odf_pages(styles, dropwhile(_is_before_body, xml_events(iter((data,)))))


def _is_before_body(event: XMLEvent) -> bool:
    return event.kind != "start" or event.name != "body"


def _odf_pages(styles: _ODFStyles, events: Iterator[XMLEvent], archive: Archive | None = None) -> Iterator[str]:
    page, reading_start = Page(), 0
    main, notes, citation = page, Page(), ""  # `page` is the main text or the notes
    repeated: list[int] = []  # number of rows that each open row stands for
    is_spreadsheet = is_presentation = is_slide_title = False
    notes_start = 0  # of a slide
    charts: list[str] = []  # in the current paragraph or slide
    numbers = _ODFNumbers(styles)
    outer: list[tuple[Page, str, list[str], _ODFNumbers]] = []  # paragraphs with the current note or text box
    forms: list[type[str] | None] = []  # of the open paragraphs and spans
    in_frame = ""
    shown = outside(events, lambda each: each.name in _ODF_OMITTED or styles.hide(each) or in_frame == each.name)
    for event in shown:
        start = event.kind == "start"
        if event.kind == "text":
            text = re.sub(r"\s+", " ", event.name)
            page.paragraph.append(next((each for each in reversed(forms) if each is not None), str)(text))
        elif event.name == "frame":
            in_frame = "title" if start else ""  # in a frame, a title is alternative text; elsewhere, a field
            is_slide_title = event.attributes.get("class") == "title"
        elif event.name in ("span", "note-citation"):
            if start:
                is_span = event.name == "span"
                forms.append(styles.forms.get(event.attributes.get("style-name", "")) if is_span else Raised)
            elif forms.pop() and event.name != "span" and page.paragraph:
                page.add_mark(page.paragraph.pop())
                citation = page.paragraph[-1]
        elif event.name in ("note-body", "text-box"):
            in_frame = "title" if event.name == "text-box" and not start else ""
            if start:
                outer.append((page, page.prefix, page.paragraph, numbers))
                page, numbers = notes if event.name == "note-body" else page, _ODFNumbers(styles)
                page.prefix, page.paragraph = "", []
            else:
                page.end_paragraph()
                page, prefix, pieces, numbers = outer.pop()
                page.prefix, page.paragraph = prefix, pieces
        elif event.name == "ruby-text":
            if start:
                reading_start = len(page.paragraph)
            else:
                page.paragraph.append(page.cut_reading(reading_start))
        elif event.name in ("p", "h"):
            page.end_paragraph()
            forms[len(forms) if start else -1 :] = [styles.forms.get(event.attributes.get("style-name", ""))] * start
            if not start:
                page.add_blocks(charts)
            elif is_slide_title:
                page.prefix, is_slide_title = "# ", False
            if start and event.name == "h":
                page.prefix = f"{'#' * min(6, count_of(event, 'outline-level'))} "
            elif start and page is notes and citation:
                page.paragraph, citation = [citation, " "], ""
            if start and (label := numbers.label(event)):
                page.prefix += f"{label} "
        elif event.name in ("list", "list-item", "list-header"):
            (numbers.start if start else numbers.end)(event)
        elif event.name == "table":
            if start and is_spreadsheet and not page.tables:
                page.blocks.append(f"## {event.attributes.get('name', '')}".rstrip())
            page.read_table(event)
            if is_spreadsheet and not page.tables:
                yield page.text()
        elif page.read_table(event):
            if event.name == "table-row" and start:
                repeated.append(count_of(event, "number-rows-repeated"))
            elif event.name == "table-row":
                times = repeated.pop()
                if times <= MAX_REPEATED or is_spreadsheet:  # in other files, more repetitions are a mistake
                    page.repeat_row(times - 1)
        elif event.name in ("spreadsheet", "presentation"):
            is_spreadsheet, is_presentation = event.name == "spreadsheet", event.name == "presentation"
        elif start and event.name == "s":
            page.paragraph.append(" " * min(MAX_REPEATED, count_of(event, "c")))
        elif start and event.name in ("tab", "line-break"):
            page.paragraph.append("\t" if event.name == "tab" else "\n")
        elif start and event.name in ("object", "object-ole"):
            href = posixpath.normpath(event.attributes.get("href", "")).lstrip("/")
            within = takewhile(lambda each: each.kind != "end" or each.name not in ("object", "object-ole"), events)
            member = f"{href}/content.xml"
            formula, chart = _odf_object(optional_events(archive, member) if archive is not None else within)
            page.paragraph.append(formula)
            charts += [chart] if chart and not is_spreadsheet else []  # in a spreadsheet, cells have the values
        elif event.name == "page":
            page.end_paragraph()
            page.add_blocks(charts)
            if not start:
                yield page.text()
        elif event.name == "notes":
            page.end_paragraph()
            if start:
                notes_start = len(page.blocks)
            elif page.blocks[notes_start:]:
                page.blocks[notes_start] = f"Notes: {page.blocks[notes_start]}"
        elif start and event.name == "soft-page-break" and page is main and not page.tables:
            yield page.text_before_break()
    if not (is_spreadsheet or is_presentation):  # otherwise, all pages were yielded above
        page.add_blocks(charts)
        yield page.text()
    if text := notes.text():
        yield f"## Footnotes\n\n{text}"


def _odf_object(events: Iterator[XMLEvent]) -> tuple[str, str]:
    # Returns the text of an embedded formula, in one line, or else the text of an embedded chart, in paragraphs.
    formula, is_formula = Formula(), True
    for event in events:
        if event.kind == "start" and event.name == "chart":
            return "", "\n\n".join(["Chart:", *_odf_pages(_ODFStyles(), events)])
        is_formula = is_formula and not (event.kind == "start" and event.name.startswith("document"))
        if not is_formula:
            continue
        if event.kind == "text":
            formula.add(event.name)
        elif event.kind == "end":
            formula.end(event.name)
        else:
            formula.start(event.name, event.attributes)
    return formula.text(), ""


def read_fb2(data: bytes) -> Iterator[str]:
    """Yield the chapters of a FictionBook file."""
    page, depth, in_title, note_start = Page(), 0, False, 0
    form: type[str] = str
    for event in outside(xml_events(iter((data,))), lambda each: each.name in ("description", "binary", "stylesheet")):
        start = event.kind == "start"
        if event.kind == "text":
            page.paragraph.append(form(re.sub(r"\s+", " ", event.name)))
        elif event.name in _FB2_FORMS:
            form = _FB2_FORMS[event.name] if start else str
        elif event.name == "a" and start:
            note_start = len(page.paragraph) if event.attributes.get("type") == "note" else -1
        elif event.name == "a" and note_start >= 0:
            mark = "".join(page.paragraph[note_start:]).strip(" []")
            del page.paragraph[note_start:]
            page.add_mark(mark)
        elif event.name == "section":
            page.end_paragraph()
            depth += 1 if start else -1
            if page.blocks and depth == (1 if start else 0):
                yield page.text()
        elif event.name == "title":
            page.end_paragraph()
            in_title = start
        elif event.name in ("p", "v", "subtitle", "text-author"):
            page.end_paragraph()
            if start and (in_title or event.name == "subtitle"):
                page.prefix = f"{'#' * min(6, depth + 1 + (not in_title))} "
        else:
            page.read_table(event)
    if page.blocks or page.paragraph:
        yield page.text()


def read_epub(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the chapters of a book in order. Raises UnreadableError if none can be read."""
    archive = Archive(file)
    if "META-INF/rights.xml" in archive.names:
        raise UnreadableError("is protected by DRM", "document_protected")
    rootfile = next(elements(xml_events(archive.pieces("META-INF/container.xml")), "rootfile"), {})
    package = rootfile.get("full-path", "")
    files: dict[str, str] = {}
    spine: list[str] = []
    for event in xml_events(archive.pieces(package)):
        if event.kind == "start" and event.name == "item":
            files[event.attributes.get("id", "")] = event.attributes.get("href", "")
        elif event.kind == "start" and event.name == "itemref":
            spine.append(event.attributes.get("idref", ""))
    check_pages(len(spine), "chapters")
    chapters, problems, forms = dict.fromkeys(spine), list[UnreadableError](), dict[str, type[str]]()
    folder = posixpath.dirname(package)
    for each in files.values():
        if each.endswith(".css"):
            with suppress(UnreadableError):
                forms |= class_forms(decode_guessing(archive.read(resolve_member(folder, unquote(each))))[0])
    for each in chapters:
        try:
            name = resolve_member(folder, unquote(files.get(each, "").partition("#")[0]))
            _, text = html_text(decode_guessing(archive.read(name), is_markup=True)[0], forms)
        except UnreadableError as error:  # a missing file or an image
            problems.append(error)
            continue
        if text:
            yield text
    if len(problems) == len(chapters) and problems:
        raise problems[0]
    if problems:
        warnings.append(f"{len(problems)} of {len(chapters)} chapters cannot be read and were left out")


def office_title(file: BinaryIO) -> str:
    archive = Archive(file)
    titles = (title_of(optional_events(archive, name), "title") for name in ("docProps/core.xml", "meta.xml"))
    return next(filter(None, titles), "")


def title_of(events: Iterable[XMLEvent], name: str) -> str:
    """Return the text of the first element of this name before the body."""
    inside = False
    for event in takewhile(_is_before_body, events):
        if inside and event.kind == "text":
            return event.name
        inside = event.kind == "start" and event.name == name
    return ""


def elements(events: Iterable[XMLEvent], name: str) -> Iterator[dict[str, str]]:
    # Yields the attributes of each element with this name.
    return (event.attributes for event in events if event.kind == "start" and event.name == name)


def optional_events(archive: Archive, name: str) -> Iterator[XMLEvent]:
    # A missing or damaged part ends the events without an error, because the text can be read without this part.
    with suppress(UnreadableError):
        yield from xml_events(archive.pieces(name))


def in_order_of_inheritance(bases: Mapping[str, str]) -> Iterator[str]:
    # Yields each style after the style that it is based on.
    found = set[str]()
    for style in bases:
        chain: list[str] = []
        while style in bases and style not in found:
            found.add(style)
            chain.append(style)
            style = bases[style]
        yield from reversed(chain)


def level_of(text: str) -> int:
    return min(MAX_LEVEL, int(text)) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


class _ODFStyles:
    def __init__(self) -> None:
        self.forms: dict[str, type[str]] = {}
        self._hidden = set[str]()
        self.lists: dict[str, dict[int, ListLevel]] = {}
        self.outline: dict[int, ListLevel] = {}
        self.list_styles: dict[str, str | None] = {}  # style of a paragraph -> style of its list ("": none)
        self._bases: dict[str, str] = {}

    def read(self, events: Iterable[XMLEvent], end: str) -> None:
        # Reads the styles before the element `end`.
        style, levels = "", dict[int, ListLevel]()
        for event in takewhile(lambda each: each.kind == "text" or each.name != end, events):
            if event.kind != "start":
                continue
            name = event.attributes.get("name", "")
            if event.name == "style":
                style = name
                self._bases[style] = event.attributes.get("parent-style-name", "")
                self.list_styles[style] = event.attributes.get("list-style-name")
            elif event.name == "list-style":
                levels = self.lists.setdefault(name, {})
            elif event.name == "outline-style":
                levels = self.outline
            elif "level-style" in event.name:
                levels[count_of(event, "level") - 1] = _odf_level(event)
            elif (event.name, event.attributes.get("display")) in _ODF_HIDING:
                self._hidden.add(style)
            elif event.attributes.get("text-line-through-style", "none") != "none":
                self.forms[style] = Struck
            elif re.match("super|[1-9]", event.attributes.get("text-position", "")):
                self.forms[style] = Raised
            elif re.match("sub|-", event.attributes.get("text-position", "")):
                self.forms[style] = Lowered
            elif event.attributes.keys() & {"text-position", "text-line-through-style"}:
                self.forms[style] = str
        for style in in_order_of_inheritance(self._bases):
            if style not in self.forms and self._bases[style] in self.forms:
                self.forms[style] = self.forms[self._bases[style]]
            if self.list_styles[style] is None:
                self.list_styles[style] = self.list_styles.get(self._bases[style])

    def hide(self, event: XMLEvent) -> bool:
        given = event.attributes
        return (
            (event.name in ("span", "p", "h", "table") and given.get("style-name") in self._hidden)
            or (event.name == "section" and given.get("display") == "none")
            or (event.name == "hidden-text" and given.get("is-hidden") == "true")
        )


def _odf_level(event: XMLEvent) -> ListLevel:
    given, level = event.attributes, min(MAX_LEVEL + 1, count_of(event, "level"))
    form = given.get("num-format", "") or "none"
    if form in ("a", "A") and given.get("num-letter-sync") == "true":
        form = "lowerLetter" if form == "a" else "upperLetter"
    shown = ".".join(f"%{each}" for each in range(max(1, level - count_of(event, "display-levels") + 1), level + 1))
    text = given.get("num-prefix", "") + shown * (form != "none") + given.get("num-suffix", "")
    text = re.sub("%([1-9])%", r"%\1", given.get("num-list-format", "")) or text  # LibreOffice's
    if form == "none" and (event.name == "list-level-style-bullet" or not re.search(r"[^\W\d]", text)):
        text = ""
    return ListLevel(form, text, count_of(event, "start-value"))


class _ODFNumbers:
    # The numbers of the lists and headings of a text.
    def __init__(self, styles: _ODFStyles) -> None:
        self._styles = styles
        self._outline = ListNumbers()
        self._open: list[tuple[str, ListNumbers]] = []  # style and numbers of the open lists
        self._by_id: dict[str, ListNumbers] = {}
        self._by_style: dict[str, ListNumbers] = {}
        self._item: XMLEvent | None = None  # the open item, until its first paragraph

    def start(self, event: XMLEvent) -> None:
        given = event.attributes
        item, self._item = self._item, event if event.name == "list-item" else None
        if event.name == "list":
            style, numbers = self._open[-1] if self._open else ("", None)
            style = given.get("style-name", style)
            if numbers is not None and item is None:  # the item has other lists before this one
                numbers.restart(len(self._open))
            elif numbers is None and given.get("continue-numbering") == "true":
                numbers = self._by_style.get(style)
            numbers = self._by_id.get(given.get("continue-list", ""), numbers) or ListNumbers()
            self._by_style[style] = numbers
            if "id" in given:
                self._by_id[given["id"]] = numbers
            self._open.append((style, numbers))

    def end(self, event: XMLEvent) -> None:
        self._item = None
        if event.name == "list":
            self._open.pop()

    def label(self, paragraph: XMLEvent) -> str:
        # Returns the number of a paragraph or heading, if it has one.
        style, numbers = self._open[-1] if self._open else ("", self._outline)
        item, self._item, given = self._item, None, paragraph.attributes
        style = item.attributes.get("style-override", style) if item else style
        levels, level = self._styles.lists.get(style), len(self._open) - 1
        if levels is None and paragraph.name == "h" and given.get("is-list-header") != "true":
            if self._styles.list_styles.get(given.get("style-name", "")) == "":
                return ""
            levels, numbers, level = self._styles.outline, self._outline, count_of(paragraph, "outline-level") - 1
            item = paragraph
        if levels is None or item is None or not 0 <= level <= MAX_LEVEL:
            return ""
        return numbers.next(levels, level, count_of(item, "start-value") if "start-value" in item.attributes else None)


def drawing_text(archive: Archive, parts: Mapping[str, tuple[str, str]], slide: str) -> str:
    # Returns the text of a slide, or of drawings in another file. parts: the relationships of the slide.
    page, in_text = Page(), False
    run_form: type[str] = str
    font = symbol_font = ""
    level, form = 0, ("", 1)  # of the current paragraph; a form is a type and the first number
    numbers: dict[int, tuple[tuple[str, int], int]] = {}  # level -> form and number of the last paragraph
    # A Fallback element has the content of the Choice element before it, in a form for older programs.
    for event in formulas_as_text(outside(xml_events(archive.pieces(slide)), lambda each: each.name == "Fallback")):
        start = event.kind == "start"
        if event.kind == "text":
            if in_text:
                text = unicode_text(unicode_text(event.name, font), symbol_font, is_private=True)
                page.paragraph.append(run_form(text))
        elif event.name == "t":
            in_text = start
        elif event.name in ("r", "fld"):
            run_form, font, symbol_font = str, "", ""
        elif event.name == "latin" and start:
            font = event.attributes.get("typeface", "")
        elif event.name == "sym" and start:
            symbol_font = event.attributes.get("typeface", "")
        elif event.name == "rPr" and start:
            baseline = event.attributes.get("baseline", "0").lstrip("0")
            run_form = Lowered if baseline.startswith("-") else Raised if baseline else str
            run_form = Struck if event.attributes.get("strike", "noStrike") != "noStrike" else run_form
        elif event.name == "p" and start:
            level, form = 0, ("", 1)
        elif event.name == "p":
            if any(map(str.strip, page.paragraph)):  # empty paragraphs have no number
                last_form, last = numbers.get(level, (form, form[1] - 1))
                numbers = {outer: each for outer, each in numbers.items() if outer < level}
                if form[0]:
                    numbers[level] = form, last + 1 if last_form == form else form[1]
                    page.prefix += f"{slide_label(form[0], numbers[level][1])} "
            page.end_paragraph()
        elif event.name == "txBody" and start:
            numbers = {}
        elif event.name == "pPr" and start and "lvl" in event.attributes:
            level = level_of(event.attributes["lvl"])
        elif event.name == "buAutoNum" and start:
            form = event.attributes.get("type", ""), count_of(event, "startAt")
        elif event.name == "br" and start:
            page.paragraph.append("\n")
        elif event.name == "ph" and start and event.attributes.get("type") in ("title", "ctrTitle"):
            page.prefix = "# "
        elif event.name == "chart" and start and "id" in event.attributes:  # otherwise, an animation of a chart
            page.add_chart(optional_events(archive, parts.get(event.attributes.get("id", ""), ("", ""))[1]))
        else:
            page.read_table(event)
    return page.text()


def relationships(archive: Archive, part: str) -> dict[str, tuple[str, str]]:
    # Returns the relationships of a part (a member of the archive): id -> (type, name of the related member).
    folder, name = posixpath.split(part)
    rels_name = f"{folder}/_rels/{name}.rels"
    if rels_name not in archive.names:
        return {}
    return {
        each.get("Id", ""): (each.get("Type", ""), resolve_member(folder, each.get("Target", "")))
        for each in elements(xml_events(archive.pieces(rels_name)), "Relationship")
        if each.get("TargetMode") != "External"
    }


def main_part(archive: Archive) -> str:
    if "_rels/.rels" in archive.names:
        for each in elements(xml_events(archive.pieces("_rels/.rels")), "Relationship"):
            if each.get("Type", "").endswith("/officeDocument"):
                return resolve_member("", each.get("Target", ""))
    return ""


def resolve_member(folder: str, target: str) -> str:
    # The path names a member of the archive, so `..` must not lead out of the archive.
    joined = posixpath.normpath(posixpath.join(folder, target)) if not target.startswith("/") else target[1:]
    if joined.startswith(".."):
        raise UnreadableError("refers to files outside the archive")
    return joined


def _refuse_encrypted_odf(archive: Archive) -> None:
    if "META-INF/manifest.xml" in archive.names and any(
        event.name == "encryption-data" for event in xml_events(archive.pieces("META-INF/manifest.xml"))
    ):
        raise UnreadableError("is encrypted", "document_encrypted")


def count_of(event: XMLEvent, name: str) -> int:
    value = event.attributes.get(name, "1")
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else MAX_REPEATED
