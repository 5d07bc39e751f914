"""Streaming readers of DOCX, PPTX, ODT and EPUB, which are archives of XML."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import BinaryIO
from urllib.parse import unquote

from notso.documents.archives import Archive, XMLEvent, xml_events
from notso.documents.formulas import Formula, Raised, joined
from notso.documents.markup import html_text
from notso.documents.plain import decode_guessing
from notso.documents.tables import line_of, markdown_lines
from notso.documents.values import MAX_PAGES, UnreadableError

MAX_REPEATED = 1_000
"""Limit on the repetitions of a cell or space, and on the columns that a cell spans: even small files can state huge
numbers."""

_TRUE = ("1", "true", "on")
# Characters of fonts without Unicode: font -> code -> character.
_SYMBOLS = {
    "Wingdings": dict(zip(b"o\xa8q\xfex\xfd\xfc\xfb\xe0", "☐☐☐☑☒☒✓✗→", strict=True)),
    "Wingdings 2": dict(zip(b"\xa3RTPO", "☐☑☒✓✗", strict=True)),
    "Symbol": dict(
        zip(
            b"ABGDEZHQIKLMNXOPRSTUFCYWabgdezhqiklmnxoprstufcyw\xa3\xb3\xb1\xb4\xb0\xb9\xbb\xa5\xb6\xd6\xe5\xf2\xae\xb8\xce",
            "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρστυφχψω≤≥±×°≠≈∞∂√∑∫→÷∈",
            strict=True,
        )
    ),
}
# Elements of Office Open XML with earlier content. For older programs, a Fallback element repeats the content of the
# Choice element before it.
_REPLACED = ("Fallback", "del", "moveFrom")
_HEADING = re.compile(r"(?:heading|title|berschrift|titre|titolo|t.tulo)\s?(\d?)", re.IGNORECASE)


@dataclass
class _Page:
    blocks: list[str] = field(default_factory=list)
    paragraph: list[str] = field(default_factory=list)
    prefix: str = ""
    tables: list[list[list[list[str]]]] = field(default_factory=list)  # table, row, cell, blocks
    spans: list[int] = field(default_factory=list)  # number of columns that each open cell spans (only DOCX)

    def end_paragraph(self) -> None:
        text = joined(self.paragraph).strip()
        if text:
            self._open_blocks().append(self.prefix + text)
        self.paragraph, self.prefix = [], ""

    def cut_reading(self, start: int) -> str:
        """Remove a ruby annotation, which begins at piece `start`, and return it in parentheses."""
        reading = joined(self.paragraph[start:]).strip()
        del self.paragraph[start:]
        return reading and f"({reading})"

    def start_table(self) -> None:
        self.end_paragraph()
        self.tables.append([])

    def start_row(self) -> None:
        if self.tables:
            self.tables[-1].append([])

    def repeat_row(self, times: int) -> None:
        if self.tables and self.tables[-1] and any(self.tables[-1][-1]):
            if times > MAX_REPEATED:
                raise UnreadableError(f"repeats a row more than {MAX_REPEATED:,} times")
            self.tables[-1] += [self.tables[-1][-1]] * times

    def start_cell(self) -> None:
        if self.tables and self.tables[-1]:
            self.tables[-1][-1].append([])

    def end_table(self) -> None:
        self.end_paragraph()
        if not self.tables:
            return
        rows = ([" ".join(cell) for cell in row] for row in self.tables.pop())
        blocks = self._open_blocks()
        blocks.append("\n".join(markdown_lines(rows)) if blocks is self.blocks else line_of(rows))

    def text(self) -> str:
        self.end_paragraph()
        text, self.blocks = "\n\n".join(self.blocks), []
        return text

    def _open_blocks(self) -> list[str]:
        is_in_cell = self.tables and self.tables[-1] and self.tables[-1][-1]
        return self.tables[-1][-1][-1] if is_in_cell else self.blocks


def read_docx(file: BinaryIO) -> Iterator[str]:
    """Yield the pages of a Word document (split at its stored page breaks), then its footnotes and endnotes."""
    archive = Archive(file)
    main = _main_part(archive) or "word/document.xml"
    folder = posixpath.dirname(main)
    styles = _style_names(archive, f"{folder}/styles.xml")
    yield from _word_pages(xml_events(archive.pieces(main)), styles)
    for notes in ("footnotes", "endnotes"):
        if f"{folder}/{notes}.xml" in archive.names:
            text = "\n\n".join(_word_pages(xml_events(archive.pieces(f"{folder}/{notes}.xml")), styles))
            if text:
                yield f"## {notes.capitalize()}\n\n{text}"


def read_pptx(file: BinaryIO) -> Iterator[str]:
    """Yield the slides of a presentation in order, each with its notes."""
    archive = Archive(file)
    main = _main_part(archive) or "ppt/presentation.xml"
    targets = _relationships(archive, main)
    # Read only the list of slides: the list of sections after it has `sldId` elements with ids of another kind.
    slides = takewhile(lambda each: each != XMLEvent("end", "sldIdLst", {}), xml_events(archive.pieces(main)))
    order = [each.get("id", "") for each in _elements(slides, "sldId")]
    for relationship_id in filter(None, order):
        slide = targets.get(relationship_id, ("", ""))[1]
        if not slide:
            raise UnreadableError("is damaged: a part is missing", "document_damaged")
        text = _slide_text(xml_events(archive.pieces(slide)))
        for kind, label in (("diagramData", ""), ("notesSlide", "Notes: ")):  # a diagram is SmartArt
            for relationship, part in _relationships(archive, slide).values():
                if relationship.endswith(f"/{kind}") and (further := _slide_text(xml_events(archive.pieces(part)))):
                    text += f"\n\n{label}{further}"
        yield text


def read_odt(file: BinaryIO) -> Iterator[str]:
    """Yield the pages of an OpenDocument text, split as in `read_docx`."""
    archive = Archive(file)
    _refuse_encrypted_odf(archive)
    page, skip_depth, reading_start = _Page(), 0, 0
    main, notes, citation = page, _Page(), ""  # `page` is the main text or the notes
    repeated: list[int] = []  # number of rows that each open row stands for
    is_spreadsheet = False
    superscripts = _superscript_styles(_optional_events(archive, "styles.xml"))
    superscripts |= _superscript_styles(xml_events(archive.pieces("content.xml")))
    raises: list[bool] = []  # whether each open span is a superscript
    skipped = ("tracked-changes", "annotation", "sequence-decls", "automatic-styles")
    for event in xml_events(archive.pieces("content.xml")):
        start = event.kind == "start"
        if event.kind != "text" and event.name in skipped:
            skip_depth += 1 if start else -1
        elif skip_depth:
            continue
        elif event.kind == "text":
            text = re.sub(r"\s+", " ", event.name)
            page.paragraph.append(Raised(text) if any(raises) else text)
        elif event.name in ("span", "note-citation"):
            if start:
                raises.append(event.name != "span" or event.attributes.get("style-name") in superscripts)
            elif raises.pop() and event.name != "span":
                citation = page.paragraph[-1] if page.paragraph else ""
        elif event.name == "note-body":
            if not start:
                page.end_paragraph()
            page = notes if start else main
        elif event.name == "ruby-text":
            if start:
                reading_start = len(page.paragraph)
            else:
                page.paragraph.append(page.cut_reading(reading_start))
        elif event.name in ("p", "h"):
            page.end_paragraph()
            if start and event.name == "h":
                page.prefix = f"{'#' * min(6, _count(event, 'outline-level'))} "
            elif start and page is notes and citation:
                page.paragraph, citation = [citation, " "], ""
        elif event.name == "table":
            (page.start_table if start else page.end_table)()
        elif event.name == "table-row" and start:
            page.start_row()
            repeated.append(_count(event, "number-rows-repeated"))
        elif event.name == "table-row":
            times = repeated.pop()
            if times <= MAX_REPEATED or is_spreadsheet:  # texts have such rows only by mistake
                page.repeat_row(times - 1)
        elif event.name == "spreadsheet":
            is_spreadsheet = True
        elif event.name in ("table-cell", "covered-table-cell"):
            page.end_paragraph()
            if start:
                for _ in range(min(MAX_REPEATED, _count(event, "number-columns-repeated"))):
                    page.start_cell()
        elif start and event.name == "s":
            page.paragraph.append(" " * min(MAX_REPEATED, _count(event, "c")))
        elif start and event.name in ("tab", "line-break"):
            page.paragraph.append("\t" if event.name == "tab" else "\n")
        elif start and event.name in ("object", "object-ole"):
            page.paragraph.append(_odf_formula(archive, event.attributes.get("href", "")))
        elif start and event.name == "soft-page-break" and page is main and not page.tables:
            yield page.text()
    yield page.text()
    if text := notes.text():
        yield f"## Footnotes\n\n{text}"


def read_epub(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the chapters of a book in order. Raises UnreadableError if none can be read."""
    archive = Archive(file)
    if "META-INF/rights.xml" in archive.names:
        raise UnreadableError("is protected by DRM", "document_protected")
    rootfile = next(_elements(xml_events(archive.pieces("META-INF/container.xml")), "rootfile"), {})
    package = rootfile.get("full-path", "")
    files: dict[str, str] = {}
    spine: list[str] = []
    for event in xml_events(archive.pieces(package)):
        if event.kind == "start" and event.name == "item":
            files[event.attributes.get("id", "")] = event.attributes.get("href", "")
        elif event.kind == "start" and event.name == "itemref":
            spine.append(event.attributes.get("idref", ""))
    if len(spine) > MAX_PAGES:
        raise UnreadableError(f"has more than {MAX_PAGES:,} chapters", "document_pages", limit=MAX_PAGES)
    chapters, problems = dict.fromkeys(spine), list[UnreadableError]()
    for each in chapters:
        try:
            name = _resolve_member(posixpath.dirname(package), unquote(files.get(each, "").partition("#")[0]))
            _, text = html_text(decode_guessing(archive.read(name), is_markup=True)[0])
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
    for name in ("docProps/core.xml", "meta.xml"):
        inside = False
        for event in _optional_events(archive, name):
            if inside and event.kind == "text":
                return event.name
            inside = event.kind == "start" and event.name == "title"
    return ""


def _elements(events: Iterable[XMLEvent], name: str) -> Iterator[dict[str, str]]:
    # Yields the attributes of each element with this name.
    return (event.attributes for event in events if event.kind == "start" and event.name == name)


def _optional_events(archive: Archive, name: str) -> Iterator[XMLEvent]:
    # A missing or damaged part ends the events without an error, because the text can be read without this part.
    with suppress(UnreadableError):
        yield from xml_events(archive.pieces(name))


def _style_names(archive: Archive, part: str) -> dict[str, str]:
    # Style ids are in the word processor's language ("Kop1" in Dutch), but style names are in English ("heading 1").
    names: dict[str, str] = {}
    style = ""
    for event in _optional_events(archive, part):
        if event.kind == "start" and event.name == "style":
            style = event.attributes.get("styleId", "")
        elif event.kind == "start" and event.name == "name":
            names.setdefault(style, event.attributes.get("val", ""))
    return names


def _formulas_as_text(events: Iterable[XMLEvent]) -> Iterator[XMLEvent]:
    # Replaces each formula in Office Math by one text.
    formula, depth, skip_depth, in_text = Formula(), 0, 0, False
    for event in events:
        step = {"start": 1, "text": 0, "end": -1}[event.kind]
        if step and event.name == "oMath":  # may be nested
            depth += step
            if not depth:
                yield from (XMLEvent("start", "t", {}), XMLEvent("text", formula.text(), {}), XMLEvent("end", "t", {}))
                formula = Formula()
        elif not depth:
            yield event
        elif step and event.name in _REPLACED:
            skip_depth += step
        elif skip_depth:
            continue
        elif not step:
            if in_text:
                formula.add(event.name)
        elif step > 0:
            in_text = event.name == "t"
            formula.start(event.name, event.attributes)
        else:
            in_text = False
            formula.end(event.name)


def _superscript_styles(events: Iterable[XMLEvent]) -> set[str]:
    # The styles of an OpenDocument file precede its body.
    found, style = set[str](), ""
    for event in takewhile(lambda each: each.kind == "text" or each.name != "body", events):
        if event.kind == "start" and event.name == "style":
            style = event.attributes.get("name", "")
        elif event.kind == "start" and re.match("super|[1-9]", event.attributes.get("text-position", "")):
            found.add(style)
    return found


def _odf_formula(archive: Archive, target: str) -> str:
    # Returns the text of an embedded object if it is a formula.
    name = f"{posixpath.normpath(target).lstrip('/')}/content.xml"
    formula = Formula()
    for event in _optional_events(archive, name) if name in archive.names else ():
        if event.kind == "text":
            formula.add(event.name)
        elif event.kind == "end":
            formula.end(event.name)
        elif event.name.startswith("document"):  # a spreadsheet or chart
            return ""
        else:
            formula.start(event.name, event.attributes)
    return formula.text()


def _word_pages(events: Iterator[XMLEvent], styles: Mapping[str, str]) -> Iterator[str]:
    page, skip_depth, in_text = _Page(), 0, False
    reading, reading_start = "", 0
    is_raised = is_hidden = False  # properties of the current run
    is_checked = False
    for event in _formulas_as_text(events):
        start = event.kind == "start"
        if event.kind != "text" and event.name in (*_REPLACED, "instrText", "rPrChange", "pPrChange"):
            skip_depth += 1 if start else -1
        elif skip_depth:
            continue
        elif event.kind == "text":
            if in_text and not is_hidden:
                page.paragraph.append(Raised(event.name) if is_raised else event.name)
        elif event.name == "t":
            in_text = start
        elif event.name == "rt":  # stored before the base text
            reading, reading_start = "" if start else page.cut_reading(reading_start), len(page.paragraph)
        elif event.name == "ruby" and not start:
            page.paragraph.append(reading)
            reading = ""
        elif event.name == "r":
            is_raised = is_hidden = False
        elif event.name == "vertAlign" and start:
            is_raised = event.attributes.get("val") == "superscript"
        elif event.name == "vanish" and start:
            is_hidden = event.attributes.get("val", "1") in _TRUE
        elif event.name == "p":
            page.end_paragraph()
            is_raised = is_hidden = False
        elif event.name == "pStyle" and start:
            style = event.attributes.get("val", "")
            # LibreOffice has a style named "Table Heading" for cells.
            if not page.tables and (heading := _HEADING.search(styles.get(style, style))):
                page.prefix = f"{'#' * max(1, min(6, int(heading[1] or 1)))} "
        elif event.name == "numPr" and start:
            page.prefix = page.prefix or "- "
        elif event.name == "numId" and start and event.attributes.get("val") == "0":  # not in a list
            page.prefix = page.prefix.removeprefix("- ")
        elif event.name == "tbl":
            (page.start_table if start else page.end_table)()
        elif event.name == "tr" and start:
            page.start_row()
        elif event.name == "tc":
            page.end_paragraph()
            if start:
                page.start_cell()
                page.spans.append(1)
            else:
                for _ in range(1, page.spans.pop()):
                    page.start_cell()
        elif event.name == "gridSpan" and start and page.spans:
            page.spans[-1] = min(MAX_REPEATED, _count(event, "val"))
        elif event.name == "checkBox":  # a form field; its states are in elements within it
            if not start:
                page.paragraph.append("\u2612" if is_checked else "\u2610")
            is_checked = False
        elif start and event.name in ("default", "checked"):
            is_checked = event.attributes.get("val", "1") in _TRUE
        elif start and event.name == "sym":
            page.paragraph.append(_symbol(event.attributes))
        elif start and event.name in ("tab", "noBreakHyphen"):
            # A `tab` element with a position is a tab stop, not a tab character.
            if "pos" not in event.attributes:
                page.paragraph.append("\t" if event.name == "tab" else "-")
        elif start and event.name in ("br", "cr", "lastRenderedPageBreak"):
            if event.name != "lastRenderedPageBreak" and event.attributes.get("type") != "page":
                page.paragraph.append("\n")
            elif not page.tables and (page.blocks or any(each.strip() for each in page.paragraph)):
                prefix, paragraph = page.prefix, page.paragraph  # the current paragraph continues on the next page
                page.prefix, page.paragraph = "", []
                if any(each.strip() for each in paragraph):
                    page.prefix, page.paragraph = prefix, paragraph
                    prefix = ""
                yield page.text()
                page.prefix = prefix
    yield page.text()


def _symbol(attributes: Mapping[str, str]) -> str:
    code = attributes.get("char", "")
    number = int(code, 16) & 0xFF if re.fullmatch("[0-9A-Fa-f]{1,4}", code) else 0
    return _SYMBOLS.get(attributes.get("font", ""), {}).get(number, "")


def _slide_text(events: Iterator[XMLEvent]) -> str:
    page, skip_depth, in_text, is_raised = _Page(), 0, False, False
    for event in _formulas_as_text(events):
        start = event.kind == "start"
        if event.kind != "text" and event.name == "Fallback":  # an image in place of a formula
            skip_depth += 1 if start else -1
        elif skip_depth:
            continue
        elif event.kind == "text":
            if in_text:
                page.paragraph.append(Raised(event.name) if is_raised else event.name)
        elif event.name == "t":
            in_text = start
        elif event.name in ("r", "fld"):
            is_raised = False
        elif event.name == "rPr" and start:
            is_raised = event.attributes.get("baseline", "0").lstrip("0")[:1] not in ("", "-")
        elif event.name == "p" and not start:
            page.end_paragraph()
        elif event.name == "br" and start:
            page.paragraph.append("\n")
        elif event.name == "ph" and start and event.attributes.get("type") in ("title", "ctrTitle"):
            page.prefix = "# "
        elif event.name == "tbl":
            (page.start_table if start else page.end_table)()
        elif event.name == "tr" and start:
            page.start_row()
        elif event.name == "tc":
            page.end_paragraph()
            if start:
                page.start_cell()
    return page.text()


def _relationships(archive: Archive, part: str) -> dict[str, tuple[str, str]]:
    # Returns the relationships of a part (a member of the archive): id -> (type, name of the related member).
    folder, name = posixpath.split(part)
    rels_name = f"{folder}/_rels/{name}.rels"
    if rels_name not in archive.names:
        return {}
    return {
        each.get("Id", ""): (each.get("Type", ""), _resolve_member(folder, each.get("Target", "")))
        for each in _elements(xml_events(archive.pieces(rels_name)), "Relationship")
        if each.get("TargetMode") != "External"
    }


def _main_part(archive: Archive) -> str:
    if "_rels/.rels" in archive.names:
        for each in _elements(xml_events(archive.pieces("_rels/.rels")), "Relationship"):
            if each.get("Type", "").endswith("/officeDocument"):
                return _resolve_member("", each.get("Target", ""))
    return ""


def _resolve_member(folder: str, target: str) -> str:
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


def _count(event: XMLEvent, name: str) -> int:
    value = event.attributes.get(name, "1")
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else MAX_REPEATED
