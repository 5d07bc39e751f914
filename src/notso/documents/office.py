"""Read PPTX, OpenDocument, EPUB and FB2 as streams. Parts of this module also serve DOCX and XLSX."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import BinaryIO, ClassVar
from urllib.parse import unquote

from notso.documents.archives import MAX_REPEATED, Archive, Tags, XMLEvent, check_xml, outside, paired, xml_events
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
from notso.documents.tables import Chart, line_of, markdown_lines, read_spreadsheet
from notso.documents.values import UnreadableError, check_pages

_STYLE_NAME = re.compile(rb"""style-name=["']([^"'<>]*)""")
_TABLE_PARTS = {
    **{"tbl": "table", "table": "table", "tr": "row", "table-row": "row", "gridSpan": "span", "gridBefore": "before"},
    **dict.fromkeys(("tc", "td", "th", "table-cell", "covered-table-cell"), "cell"),
}
_FB2_FORMS: dict[str, type[str]] = {"sup": Raised, "sub": Lowered, "strikethrough": Struck}
_ODF_OMITTED = {
    *("tracked-changes", "annotation", "sequence-decls", "automatic-styles", "number", "desc", "binary-data"),
    *("header-decl", "footer-decl", "date-time-decl"),
}
# Elements of a style, and the value of `display` with which they hide text that has the style.
_ODF_HIDING = (("text-properties", "none"), ("table-properties", "false"))


@dataclass
class Page:
    blocks: list[str] = field(default_factory=list)
    paragraph: list[str] = field(default_factory=list)
    prefix: str = ""
    tables: list[list[list[list[str]]]] = field(default_factory=list)  # nesting: table, row, cell, block
    spans: list[int] = field(default_factory=list)  # number of columns that each open cell spans
    reading_start: int = 0  # start of the last ruby annotation
    outer: list[tuple[str, list[str]]] = field(default_factory=list)  # paragraphs around the open notes and text boxes

    def end_paragraph(self) -> None:
        text = joined(self.paragraph).strip()
        if text or self.prefix.strip("#- "):  # a paragraph may have only an automatic number
            self._open_blocks().append((self.prefix + text).strip())
        self.paragraph, self.prefix = [], ""

    def add_mark(self, mark: str) -> None:
        # Without brackets, a letter would continue the word, and a number would continue the superscript before it or
        # look like an exponent of the digit before it.
        last = (self.paragraph or [""])[-1]
        is_apart = any(map(str.isdecimal, mark)) and not (isinstance(last, Raised) or last[-1:].isdecimal())
        self.paragraph.append(Raised(mark) if is_apart else f"[{mark}]")

    def start_box(self) -> None:
        # Begins a note or a text box within the paragraph. The paragraph continues after `end_box`.
        self.outer.append((self.prefix, self.paragraph))
        self.prefix, self.paragraph = "", []

    def end_box(self) -> None:
        self.end_paragraph()
        self.prefix, self.paragraph = self.outer.pop()

    def read_reading(self, event: XMLEvent) -> str:
        """Handle a tag of a ruby annotation. At the end tag, cut it from the paragraph and return it in parentheses."""
        if event.is_start:
            self.reading_start = len(self.paragraph)
            return ""
        reading = joined(self.paragraph[self.reading_start :]).strip()
        del self.paragraph[self.reading_start :]
        return reading and f"({reading})"

    def read_table(self, event: XMLEvent) -> None:
        # Handles a tag of a table, row or cell, and ignores other tags.
        start = event.is_start
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
                    self._start_cells(event.number("number-columns-repeated"))
                    self.spans.append(event.number("colspan"))
                else:
                    self._start_cells(self.spans.pop() - 1)
            case "span":
                if start and self.spans:
                    self.spans[-1] = event.number("val")
            case "before":
                if start:
                    self._start_cells(event.number("val"))

    def _start_cells(self, count: int) -> None:
        for _ in range(min(MAX_REPEATED, count) if self.tables and self.tables[-1] else 0):
            self.tables[-1][-1].append([])

    def repeat_row(self, times: int) -> None:
        if self.tables and self.tables[-1] and any(self.tables[-1][-1]):
            if times > MAX_REPEATED:
                raise UnreadableError(f"repeats a row more than {MAX_REPEATED:,} times")
            self.tables[-1] += [self.tables[-1][-1]] * times

    def add_chart(self, events: Iterable[XMLEvent]) -> None:
        # Adds the titles and values of a chart in Office Open XML.
        self.end_paragraph()
        chart = Chart(events)
        self._open_blocks().append(f"Chart: {chart.titles()}".rstrip(" :"))
        self._add_table(chart.rows())

    def add_blocks(self, blocks: list[str]) -> None:
        # Moves all of `blocks` to the end of the page or of the open cell.
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


class PageReader:
    """Base class of XML readers, which have a method per kind of tag. Other tags are ignored or belong to tables."""

    reads: ClassVar = Tags()

    def __init__(self) -> None:
        self.page = Page()
        self.finished: list[str] = []  # pages that have not been yielded yet
        self.in_text = False

    def pages(self, events: Iterable[XMLEvent]) -> Iterator[str]:
        for event in events:
            if event.kind == "text":
                self.read_text(event.name)
            elif method := self.reads.get((event.kind, event.name)):
                method(self, event)
            else:
                self.page.read_table(event)
            if self.finished:
                yield from self.finished
                self.finished.clear()
        self.end()
        yield from self.finished

    def read_text(self, text: str) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.finished.append(self.page.text())

    @reads("t")
    def _read_text_tag(self, event: XMLEvent) -> None:
        self.in_text = event.is_start


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
    root = re.search(rb"<([\w:-]+document-content)\b[^<>]*>", start)  # with the namespace declarations

    def read_text(cell: bytes) -> str:
        with suppress(UnreadableError):
            if root is not None and not names.isdisjoint(_STYLE_NAME.findall(cell)):
                document = b"%b%b</%b>" % (root[0], cell, root[1])
                return "\n".join(_ODFReader(styles, xml_events(iter((document,)))).read())
        return ""

    try:
        if "content.xml" in archive.names:
            check_xml(Archive(file).pieces("content.xml"))  # the library may never return if a tag is cut off
        yield from list(read_spreadsheet(file, warnings, read_ods_text=read_text))
    except UnreadableError as error:
        if error.code != "document_damaged":
            raise
        # The library does not accept XML with indentation, which SheetJS writes.
        yield from read_odf(file, warnings)


def read_odf(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the slides or sheets of an OpenDocument file, or the pages of a text document, split as in `read_docx`."""
    archive = Archive(file)
    _refuse_encrypted_odf(archive)
    styles = _ODFStyles()
    # The automatic styles in styles.xml are those of headers and footers, so reading stops before them.
    styles.read(optional_events(archive, "styles.xml"), "automatic-styles")
    styles.read(xml_events(archive.pieces("content.xml")), "body")
    events = dropwhile(_is_before_body, xml_events(archive.pieces("content.xml")))
    yield from _ODFReader(styles, events, archive).read()


def read_flat_odf(data: bytes) -> Iterator[str]:
    """Yield the pages of an OpenDocument file that is one XML document."""
    styles = _ODFStyles()
    styles.read(xml_events(iter((data,))), "body")
    yield from _ODFReader(styles, dropwhile(_is_before_body, xml_events(iter((data,))))).read()


def _is_before_body(event: XMLEvent) -> bool:
    return event.kind != "start" or event.name != "body"


class _ODFReader(PageReader):
    # Reads the pages of a text document, the slides of a presentation, or the sheets of a spreadsheet.
    reads = Tags()

    def __init__(self, styles: _ODFStyles, events: Iterator[XMLEvent], archive: Archive | None = None) -> None:
        super().__init__()
        self._styles, self._events, self._archive = styles, paired(events), archive
        self._main, self._notes = self.page, Page()  # `page` is one of them
        self._citation = ""  # mark of the next note
        self._numbers = _ODFNumbers(styles)
        self._outer: list[tuple[Page, _ODFNumbers]] = []  # paragraphs that contain the current note or text box
        self._forms: list[type[str] | None] = []  # of the open paragraphs and spans
        self._repeated: list[int] = []  # number of rows that each open row stands for
        self._kind = ""  # of the document: presentation, spreadsheet, or empty
        self._is_slide_title = False
        self._slide_notes = 0  # number of blocks before the notes of a slide
        self._charts: list[str] = []  # in the current paragraph or slide
        self._frame_title = ""  # "title": in a frame, a title is alternative text; elsewhere, it is a field

    def read(self) -> Iterator[str]:
        return self.pages(outside(self._events, self._omits))

    def _omits(self, event: XMLEvent) -> bool:
        return event.name in _ODF_OMITTED or self._styles.hide(event) or event.name == self._frame_title

    def read_text(self, text: str) -> None:
        form = next((each for each in reversed(self._forms) if each is not None), str)
        self.page.paragraph.append(form(re.sub(r"\s+", " ", text)))

    def end(self) -> None:
        if not self._kind:  # otherwise, all pages are already finished
            self.page.add_blocks(self._charts)
            self.finished.append(self.page.text())
        if text := self._notes.text():
            self.finished.append(f"## Footnotes\n\n{text}")

    @reads("spreadsheet", "presentation")
    def _read_kind(self, event: XMLEvent) -> None:
        self._kind = event.name

    @reads("p", "h")
    def _read_paragraph(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        if not event.is_start:
            self._forms.pop()
            self.page.add_blocks(self._charts)
            return
        self._forms.append(self._styles.forms.get(event.get("style-name")))
        if self._is_slide_title:
            self.page.prefix, self._is_slide_title = "# ", False
        if event.name == "h":
            self.page.prefix = f"{'#' * min(6, event.number('outline-level'))} "
        elif self.page is self._notes and self._citation:
            self.page.paragraph, self._citation = [self._citation, " "], ""
        if label := self._numbers.label(event):
            self.page.prefix += f"{label} "

    @reads("span")
    def _read_span(self, event: XMLEvent) -> None:
        if event.is_start:
            self._forms.append(self._styles.forms.get(event.get("style-name")))
        else:
            self._forms.pop()

    @reads("note-citation")
    def _read_citation(self, event: XMLEvent) -> None:
        if event.is_start:
            self._forms.append(Raised)
        elif self._forms.pop() and self.page.paragraph:
            self.page.add_mark(self.page.paragraph.pop())
            self._citation = self.page.paragraph[-1]

    @reads("note-body", "text-box")
    def _read_box(self, event: XMLEvent) -> None:
        self._frame_title = "title" if event.name == "text-box" and not event.is_start else ""
        if event.is_start:
            self._outer.append((self.page, self._numbers))
            self.page = self._notes if event.name == "note-body" else self.page
            self._numbers = _ODFNumbers(self._styles)
            self.page.start_box()
        else:
            self.page.end_box()
            self.page, self._numbers = self._outer.pop()

    @reads("frame")
    def _read_frame(self, event: XMLEvent) -> None:
        self._frame_title = "title" if event.is_start else ""
        self._is_slide_title = event.get("class") == "title"

    @reads("ruby-text")
    def _read_ruby(self, event: XMLEvent) -> None:
        reading = self.page.read_reading(event)
        if not event.is_start:
            self.page.paragraph.append(reading)

    @reads("list", "list-item", "list-header")
    def _read_list(self, event: XMLEvent) -> None:
        if event.is_start:
            self._numbers.start(event)
        else:
            self._numbers.end(event)

    @reads("table")
    def _read_table(self, event: XMLEvent) -> None:
        is_sheet = self._kind == "spreadsheet"
        if event.is_start and is_sheet and not self.page.tables:
            self.page.blocks.append(f"## {event.get('name')}".rstrip())
        self.page.read_table(event)
        if is_sheet and not self.page.tables:
            self.finished.append(self.page.text())

    @reads("table-row")
    def _read_row(self, event: XMLEvent) -> None:
        self.page.read_table(event)
        if event.is_start:
            self._repeated.append(event.number("number-rows-repeated"))
        else:
            times = self._repeated.pop()
            if times <= MAX_REPEATED or self._kind == "spreadsheet":  # in other files, more repetitions are a mistake
                self.page.repeat_row(times - 1)

    @reads("<s>", "<tab>", "<line-break>")
    def _add_character(self, event: XMLEvent) -> None:
        space = " " * min(MAX_REPEATED, event.number("c"))
        self.page.paragraph.append({"tab": "\t", "line-break": "\n"}.get(event.name, space))

    @reads("<object>", "<object-ole>")
    def _read_object(self, event: XMLEvent) -> None:
        events = paired(self._events, is_element=True)
        if self._archive is not None:
            href = posixpath.normpath(event.get("href")).lstrip("/")
            events = optional_events(self._archive, f"{href}/content.xml")
        formula, chart = _odf_object(events)
        self.page.paragraph.append(formula)
        if chart and self._kind != "spreadsheet":  # in a spreadsheet, the values are in cells
            self._charts.append(chart)

    @reads("page")
    def _read_slide(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        self.page.add_blocks(self._charts)
        if not event.is_start:
            self.finished.append(self.page.text())

    @reads("notes")
    def _read_slide_notes(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        if event.is_start:
            self._slide_notes = len(self.page.blocks)
        elif self.page.blocks[self._slide_notes :]:
            self.page.blocks[self._slide_notes] = f"Notes: {self.page.blocks[self._slide_notes]}"

    @reads("<soft-page-break>")
    def _end_page(self, event: XMLEvent) -> None:
        if self.page is self._main and not self.page.tables:
            self.finished.append(self.page.text_before_break())


def _odf_object(events: Iterator[XMLEvent]) -> tuple[str, str]:
    # Returns the text of an embedded formula, on one line, or else the text of an embedded chart, in paragraphs.
    formula, is_formula = Formula(), True
    for event in events:
        if event.kind == "start" and event.name == "chart":
            return "", "\n\n".join(["Chart:", *_ODFReader(_ODFStyles(), events).read()])
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
    omitted = ("description", "binary", "stylesheet")
    return _FB2Reader().pages(outside(xml_events(iter((data,))), lambda each: each.name in omitted))


class _FB2Reader(PageReader):
    reads = Tags()

    def __init__(self) -> None:
        super().__init__()
        self._depth, self._in_title = 0, False
        self._form: type[str] = str
        self._note_start = 0  # start of the last link in its paragraph; negative if that link does not lead to a note

    def read_text(self, text: str) -> None:
        self.page.paragraph.append(self._form(re.sub(r"\s+", " ", text)))

    def end(self) -> None:
        if self.page.blocks or self.page.paragraph:
            super().end()

    @reads(*_FB2_FORMS)
    def _read_form(self, event: XMLEvent) -> None:
        self._form = _FB2_FORMS[event.name] if event.is_start else str

    @reads("a")
    def _read_link(self, event: XMLEvent) -> None:
        paragraph = self.page.paragraph
        if event.is_start:
            self._note_start = len(paragraph) if event.get("type") == "note" else -1
        elif self._note_start >= 0:
            mark = "".join(paragraph[self._note_start :]).strip(" []")
            del paragraph[self._note_start :]
            self.page.add_mark(mark)

    @reads("section")
    def _read_section(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        self._depth += 1 if event.is_start else -1
        if self.page.blocks and self._depth == (1 if event.is_start else 0):
            self.finished.append(self.page.text())

    @reads("title")
    def _read_title(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        self._in_title = event.is_start

    @reads("p", "v", "subtitle", "text-author")
    def _read_paragraph(self, event: XMLEvent) -> None:
        self.page.end_paragraph()
        if event.is_start and (self._in_title or event.name == "subtitle"):
            self.page.prefix = f"{'#' * min(6, self._depth + 1 + (not self._in_title))} "


def read_epub(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the chapters of a book in order. Raises UnreadableError if no chapter can be read."""
    archive = Archive(file)
    if "META-INF/rights.xml" in archive.names:
        raise UnreadableError("is protected by DRM", "document_protected")
    rootfile = next(elements(xml_events(archive.pieces("META-INF/container.xml")), "rootfile"), {})
    package = rootfile.get("full-path", "")
    files: dict[str, str] = {}
    spine: list[str] = []
    for event in xml_events(archive.pieces(package)):
        if event.kind == "start" and event.name == "item":
            files[event.get("id")] = event.get("href")
        elif event.kind == "start" and event.name == "itemref":
            spine.append(event.get("idref"))
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
        except UnreadableError as error:  # the file is missing or is an image
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
    """Return the text of the first element with this name before the body."""
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
            name = event.get("name")
            if event.name == "style":
                style = name
                self._bases[style] = event.get("parent-style-name")
                self.list_styles[style] = event.attributes.get("list-style-name")
            elif event.name == "list-style":
                levels = self.lists.setdefault(name, {})
            elif event.name == "outline-style":
                levels = self.outline
            elif "level-style" in event.name:
                levels[event.number("level") - 1] = _odf_level(event)
            elif (event.name, event.get("display")) in _ODF_HIDING:
                self._hidden.add(style)
            elif event.get("text-line-through-style", "none") != "none":
                self.forms[style] = Struck
            elif re.match("super|[1-9]", event.get("text-position")):
                self.forms[style] = Raised
            elif re.match("sub|-", event.get("text-position")):
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
    given, level = event.attributes, min(MAX_LEVEL + 1, event.number("level"))
    form = given.get("num-format", "") or "none"
    if form in ("a", "A") and given.get("num-letter-sync") == "true":
        form = "lowerLetter" if form == "a" else "upperLetter"
    shown = ".".join(f"%{each}" for each in range(max(1, level - event.number("display-levels") + 1), level + 1))
    text = given.get("num-prefix", "") + shown * (form != "none") + given.get("num-suffix", "")
    text = re.sub("%([1-9])%", r"%\1", given.get("num-list-format", "")) or text  # LibreOffice's attribute
    if form == "none" and (event.name == "list-level-style-bullet" or not re.search(r"[^\W\d]", text)):
        text = ""
    return ListLevel(form, text, event.number("start-value"))


class _ODFNumbers:
    # The numbers of the lists and headings of a text document.
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
            if numbers is not None and item is None:  # text or another list precedes this one in the item
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
            levels, numbers, level = self._styles.outline, self._outline, paragraph.number("outline-level") - 1
            item = paragraph
        if levels is None or item is None or not 0 <= level <= MAX_LEVEL:
            return ""
        return numbers.next(levels, level, item.number("start-value") if "start-value" in item.attributes else None)


def drawing_text(archive: Archive, parts: Mapping[str, tuple[str, str]], slide: str) -> str:
    # Returns the text of a slide, or of drawings in another file. parts: the relationships of the slide.
    # A Fallback element has the content of the Choice element before it, in a form for older programs.
    events = outside(xml_events(archive.pieces(slide)), lambda each: each.name == "Fallback")
    return "".join(_DrawingReader(archive, parts).pages(formulas_as_text(events)))


class _DrawingReader(PageReader):
    reads = Tags(PageReader.reads)

    def __init__(self, archive: Archive, parts: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self._archive, self._parts = archive, parts
        self._run_form: type[str] = str
        self._font = self._symbol_font = ""
        self._level, self._form = 0, ("", 1)  # of the current paragraph; a form is a type and the first number
        self._numbers: dict[int, tuple[tuple[str, int], int]] = {}  # level -> form and number of the last paragraph

    def read_text(self, text: str) -> None:
        if self.in_text:
            text = unicode_text(unicode_text(text, self._font), self._symbol_font, is_private=True)
            self.page.paragraph.append(self._run_form(text))

    @reads("r", "fld")
    def _reset_run(self, event: XMLEvent) -> None:
        self._run_form, self._font, self._symbol_font = str, "", ""

    @reads("<rPr>")
    def _read_run(self, event: XMLEvent) -> None:
        baseline = event.get("baseline").lstrip("0")
        self._run_form = Lowered if baseline.startswith("-") else Raised if baseline else str
        if event.get("strike", "noStrike") != "noStrike":
            self._run_form = Struck

    @reads("<latin>", "<sym>")
    def _read_font(self, event: XMLEvent) -> None:
        if event.name == "latin":
            self._font = event.get("typeface")
        else:
            self._symbol_font = event.get("typeface")

    @reads("<txBody>")
    def _start_body(self, event: XMLEvent) -> None:
        self._numbers = {}

    @reads("<p>")
    def _start_paragraph(self, event: XMLEvent) -> None:
        self._level, self._form = 0, ("", 1)

    @reads("<pPr>", "<buAutoNum>")
    def _read_properties(self, event: XMLEvent) -> None:
        if event.name == "buAutoNum":
            self._form = event.get("type"), event.number("startAt")
        elif "lvl" in event.attributes:
            self._level = level_of(event.get("lvl"))

    @reads("</p>")
    def _end_paragraph(self, event: XMLEvent) -> None:
        level, form = self._level, self._form
        if any(map(str.strip, self.page.paragraph)):  # empty paragraphs have no number
            last_form, last = self._numbers.get(level, (form, form[1] - 1))
            self._numbers = {outer: each for outer, each in self._numbers.items() if outer < level}
            if form[0]:
                self._numbers[level] = form, last + 1 if last_form == form else form[1]
                self.page.prefix += f"{slide_label(form[0], self._numbers[level][1])} "
        self.page.end_paragraph()

    @reads("<br>")
    def _break_line(self, event: XMLEvent) -> None:
        self.page.paragraph.append("\n")

    @reads("<ph>")
    def _read_placeholder(self, event: XMLEvent) -> None:
        if event.get("type") in ("title", "ctrTitle"):
            self.page.prefix = "# "

    @reads("<chart>")
    def _read_chart(self, event: XMLEvent) -> None:
        if "id" in event.attributes:  # otherwise, the tag belongs to an animation of a chart
            self.page.add_chart(optional_events(self._archive, self._parts.get(event.get("id"), ("", ""))[1]))


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
