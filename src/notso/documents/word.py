"""Streaming reader of DOCX files."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from notso.documents.archives import Archive, XMLEvent, outside, xml_events
from notso.documents.formulas import (
    MAX_DEPTH,
    MAX_LEVEL,
    SCRIPTS,
    ListLevel,
    ListNumbers,
    Struck,
    formulas_as_text,
    numeral,
    symbol,
    unicode_text,
)
from notso.documents.office import (
    TRUE,
    Page,
    count_of,
    drawing_text,
    in_order_of_inheritance,
    level_of,
    main_part,
    optional_events,
    relationships,
)
from notso.documents.plain import chunk_text
from notso.documents.values import UnreadableError

_LIST_FIELD = re.compile(r'\s*LISTNUM\s*(?:"([^"]*)"|([^"\s\\]*))', re.IGNORECASE)
_FIELD_SWITCH = re.compile(r"\\([ls])\s*([0-9]{1,9})")
# Lists of LISTNUM fields: the label of the first item of each level.
_FIELD_LISTS = {
    "numberdefault": ("1)", "a)", "i)", "(1)", "(a)", "(i)", "1.", "a.", "i."),
    "outlinedefault": ("I.", "A.", "1.", "a)", "(1)", "(a)", "(i)", "(a)", "(i)"),
    "legaldefault": tuple("1." * level for level in range(1, MAX_LEVEL + 2)),
}
_FIELD_FORMS = {"1": "decimal", "a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_RUN_PROPERTIES = ("rStyle", "rFonts", "strike", "dstrike", "vertAlign", "vanish")
_FORM_FIELD = ("checkBox", "ddList", "listEntry", "result", "default", "checked")
_HEADING = re.compile(r"(?:heading|title|berschrift|titre|titolo|t.tulo)\s?(\d?)", re.IGNORECASE)


def read_docx(file: BinaryIO, warnings: list[str], is_chunk: bool = False) -> Iterator[str]:
    """Yield the pages of a Word document (split at its stored page breaks), then its footnotes and endnotes.

    is_chunk: the file is part of another document.
    """
    archive = Archive(file)
    main = main_part(archive) or "word/document.xml"
    folder = posixpath.dirname(main)
    lists = _WordLists(optional_events(archive, f"{folder}/numbering.xml"))
    styles = _word_styles(optional_events(archive, f"{folder}/styles.xml"), lists)
    kinds_of_notes = [each for each in ("footnotes", "endnotes") if f"{folder}/{each}.xml" in archive.names]
    sections = Archive(file) if kinds_of_notes else None  # each Archive limits what it inflates
    notes = _Notes(
        next(_note_settings(optional_events(archive, f"{folder}/settings.xml"))),
        _note_settings(optional_events(sections, main) if sections is not None else ()),
    )
    document = _WordDocument(archive, styles, lists, notes, warnings, is_chunk)
    yield from _word_pages(document, main)
    for kind in kinds_of_notes:
        if text := "\n\n".join(_word_pages(document, f"{folder}/{kind}.xml")):
            yield f"## {kind.capitalize()}\n\n{text}"


@dataclass(slots=True)
class _WordStyle:
    name: str = ""
    base: str = ""
    list_id: str = ""
    level: int | None = None
    is_hidden: bool | None = None
    is_struck: bool | None = None
    form: type[str] | None = None


def _word_styles(events: Iterable[XMLEvent], lists: _WordLists) -> dict[str, _WordStyle]:
    # Style ids are in the word processor's language ("Kop1" in Dutch), but style names are in English ("heading 1").
    styles: dict[str, _WordStyle] = {}
    style = _WordStyle()
    for event in events:
        if event.kind != "start":
            continue
        value = event.attributes.get("val", "")
        match event.name:
            case "style":
                style = styles.setdefault(event.attributes.get("styleId", ""), _WordStyle())
            case "name":
                style.name = style.name or value
            case "basedOn":
                style.base = value
            case "numId":
                style.list_id = style.list_id or value
            case "vanish":
                style.is_hidden = event.attributes.get("val", "1") in TRUE
            case "strike" | "dstrike":
                style.is_struck = bool(style.is_struck) or event.attributes.get("val", "1") in TRUE
            case "vertAlign":
                style.form = SCRIPTS.get(value, str)
            case "ilvl" if style.level is None:
                style.level = level_of(value)
    for style_id in in_order_of_inheritance({name: each.base for name, each in styles.items()}):
        style = styles[style_id]
        base = styles.get(style.base, style)
        style.list_id = style.list_id or base.list_id
        linked = lists.linked_level(style.list_id, style_id)
        style.level = linked if linked is not None else base.level if style.level is None else style.level
        style.is_hidden = base.is_hidden if style.is_hidden is None else style.is_hidden
        style.is_struck = base.is_struck if style.is_struck is None else style.is_struck
        style.form = style.form or base.form
    return styles


@dataclass(slots=True)
class _WordList:
    definition: str = ""  # id of the abstract list
    levels: dict[int, ListLevel] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)  # where this list restarts the numbers of its definition


class _WordLists:
    # Lists by id, or by `name:` and their name. Lists with the same definition continue each other's numbers.
    def __init__(self, events: Iterable[XMLEvent]) -> None:
        self._linked_levels: dict[tuple[str, str], int] = {}  # definition and paragraph style -> level
        self._lists = {f"name:{name}": _WordList(name, _field_levels(each)) for name, each in _FIELD_LISTS.items()}
        definitions: dict[str, dict[int, ListLevel]] = {}
        styled: dict[str, str] = {}  # numbering style -> definition
        links: dict[str, str] = {}  # definition -> numbering style
        definition, levels, at, level, listed = "", dict[int, ListLevel](), 0, ListLevel(), _WordList()
        for event in events:
            if event.kind != "start":
                continue
            value = event.attributes.get("val", "")
            match event.name:
                case "abstractNum":
                    definition = event.attributes.get("abstractNumId", "")
                    levels = definitions.setdefault(definition, {})
                case "name":
                    self._lists[f"name:{value.lower()}"] = _WordList(definition)
                case "styleLink":
                    styled[value] = definition
                case "numStyleLink":
                    links[definition] = value
                case "num":
                    listed = self._lists.setdefault(event.attributes.get("numId", ""), _WordList())
                    levels = listed.levels
                case "abstractNumId":
                    listed.definition = value
                case "lvlOverride":
                    at = level_of(event.attributes.get("ilvl", ""))
                case "startOverride":
                    listed.starts[at] = count_of(event, "val")
                case "lvl":
                    at = level_of(event.attributes.get("ilvl", ""))
                    level = levels[at] = ListLevel(restarts_after=at)
                case "start":
                    level.start = count_of(event, "val")
                case "numFmt":  # the first one: a fallback may follow
                    own = event.attributes.get("format", "").partition(",")[0] if value == "custom" else ""
                    level.form = level.form or own or value
                case "lvlText":
                    level.text = value
                case "lvlRestart":
                    level.restarts_after = min(at, count_of(event, "val"))
                case "isLgl":
                    level.is_decimal = value in ("", *TRUE)
                case "pStyle":
                    self._linked_levels[definition, value] = at
        for listed in self._lists.values():
            listed.definition = styled.get(links.get(listed.definition, ""), listed.definition)
            levels = definitions.get(listed.definition, {})
            listed.levels = levels | listed.levels if listed.levels or listed.starts else levels
            for at, start in listed.starts.items():
                listed.levels[at] = replace(listed.levels.get(at, ListLevel()), start=start)
        self.restart()

    def restart(self) -> None:
        self._numbers: dict[str, ListNumbers] = {}
        self._started = set[tuple[str, int]]()

    def linked_level(self, list_id: str, style_id: str) -> int | None:
        return self._linked_levels.get((self._lists.get(list_id, _WordList()).definition, style_id))

    def label(self, list_id: str, level: int, start: int | None = None) -> str:
        # Numbers a paragraph, and returns its number or a bullet.
        listed = self._lists.get(list_id)
        if listed is None:
            return "-"
        if start is None and (list_id, level) not in self._started:
            start = listed.starts.get(level)
        self._started.add((list_id, level))
        label = self._numbers.setdefault(listed.definition, ListNumbers()).next(listed.levels, level, start)
        return "-" if level in listed.levels and listed.levels[level].form == "bullet" else label

    def field_label(self, instruction: str, list_id: str, level: int) -> str:
        # Returns the number that a LISTNUM field shows. list_id, level: those of its paragraph.
        found = _LIST_FIELD.match(instruction)
        if found is None:
            return ""
        named = f"name:{(found[1] or found[2] or '').lower()}"
        if named in self._lists or list_id not in self._lists:
            list_id, level = named if named in self._lists else "name:numberdefault", -1
        switches = {name: int(number) for name, number in _FIELD_SWITCH.findall(instruction)}
        return self.label(list_id, min(MAX_LEVEL, max(0, switches.get("l", level + 2) - 1)), switches.get("s"))


def _field_levels(labels: Iterable[str]) -> dict[int, ListLevel]:
    levels = dict[int, ListLevel]()
    for level, label in enumerate(labels):
        digit = label.strip(".()")[-1]
        text, *after = label.split(digit)
        for place, each in enumerate(after, start=level + 2 - len(after)):  # several digits: those of outer levels
            text += f"%{place}{each}"
        levels[level] = ListLevel(_FIELD_FORMS[digit], text, 1, level)
    return levels


class _Notes:
    # The marks of footnotes ("f") and endnotes ("e").
    def __init__(self, settings: dict[str, XMLEvent], sections: Iterator[dict[str, XMLEvent]]) -> None:
        self._settings = settings
        self._sections = sections
        self._section = next(sections, {})
        self._counts = {"f": 0, "e": 0}  # notes since the numbering last started
        self._marks: dict[tuple[str, str], str] = {}

    def mark(self, kind: str, note: str) -> str:
        # Returns the mark of the next reference.
        if (kind, note) not in self._marks:
            form = self._value(kind, "numFmt") or {"f": "decimal", "e": "lowerRoman"}[kind]
            start = self._section.get(f"{kind}numStart") or self._settings.get(f"{kind}numStart")
            number = self._counts[kind] + (count_of(start, "val") if start is not None else 1)
            self._marks[kind, note] = numeral(number, form)
            self._counts[kind] += 1
        return self._marks[kind, note]

    def own_mark(self, kind: str, note: str) -> str:
        # Returns the mark that is shown in the note itself.
        return self._marks.get((kind, note), "*")

    def end_page(self) -> None:
        self._restart("eachPage")

    def end_section(self) -> None:
        self._section = next(self._sections, {})
        self._restart("eachSect")

    def _restart(self, where: str) -> None:
        for kind in self._counts:
            if self._value(kind, "numRestart") == where:
                self._counts[kind] = 0

    def _value(self, kind: str, name: str) -> str:
        event = self._section.get(f"{kind}{name}") or self._settings.get(f"{kind}{name}")
        return event.attributes.get("val", "") if event is not None else ""


def _note_settings(events: Iterable[XMLEvent]) -> Iterator[dict[str, XMLEvent]]:
    # Yields the settings of notes in each section, or of a part without sections.
    found, kind = dict[str, XMLEvent](), ""
    for event in outside(events, _has_replaced_content):
        if event.kind == "text":
            continue
        if event.name in ("footnotePr", "endnotePr"):
            kind = event.name[0] if event.kind == "start" else ""
        elif event.kind == "start" and kind:
            found[f"{kind}{event.name}"] = event
        elif event.kind == "end" and event.name == "sectPr":
            yield found
            found = {}
    yield found


@dataclass(slots=True)
class _Run:
    # The properties of a piece of text.
    form: type[str] = str
    is_struck: bool = False
    is_style_struck: bool = False
    is_hidden: bool = False
    font: str = ""

    def read(self, event: XMLEvent, styles: Mapping[str, _WordStyle]) -> None:
        value, is_on = event.attributes.get("val", ""), event.attributes.get("val", "1") in TRUE
        match event.name:
            case "rStyle":
                style = styles.get(value, _WordStyle())
                self.is_hidden = self.is_hidden or bool(style.is_hidden)
                self.is_style_struck = self.is_style_struck if style.is_struck is None else style.is_struck
                self.form = style.form or self.form
            case "rFonts":
                self.font = event.attributes.get("ascii", "")
            case "strike" | "dstrike":
                self.is_struck = self.is_struck or is_on
                self.is_style_struck = self.is_style_struck and event.name == "dstrike"
            case "vertAlign":
                self.form = SCRIPTS.get(value, str)
            case "vanish":
                self.is_hidden = is_on

    def text(self, text: str) -> str:
        text = unicode_text(text, self.font)
        return Struck(text) if self.is_struck or self.is_style_struck else self.form(text)


@dataclass(slots=True)
class _FormField:
    # A check box or a list of choices. Elements within it contain its state.
    is_checked: bool = False
    choices: list[str] = field(default_factory=list)
    choice: int = -1

    def read(self, event: XMLEvent) -> str:
        # Returns the text of the field at its end.
        start = event.kind == "start"
        if start and event.name == "listEntry":
            self.choices.append(event.attributes.get("val", ""))
        elif start and event.name in ("result", "default", "checked"):
            self.is_checked = event.attributes.get("val", "1") in TRUE
            self.choice = count_of(event, "val") if event.name == "result" or self.choice < 0 else self.choice
        elif not start and event.name == "checkBox":
            return "\u2612" if self.is_checked else "\u2610"
        elif not start and event.name == "ddList":
            return "".join(self.choices[max(0, self.choice) :][:1])
        return ""


@dataclass(frozen=True, slots=True)
class _WordDocument:
    archive: Archive
    styles: Mapping[str, _WordStyle]
    lists: _WordLists
    notes: _Notes
    warnings: list[str]
    is_chunk: bool

    def chunk(self, part: str) -> str:
        """Return the text of a file that is inserted where the document refers to it."""
        with suppress(UnreadableError):
            data = self.archive.read(part)
            if not data.startswith(b"PK"):
                return chunk_text(data)
            if not self.is_chunk:
                return "\n\n".join(read_docx(io.BytesIO(data), self.warnings, is_chunk=True))
        warning = "inserted files that cannot be read were left out"
        if warning not in self.warnings:
            self.warnings.append(warning)
        return ""


def _has_replaced_content(event: XMLEvent) -> bool:
    # A Fallback element has the content of the Choice element before it, in a form for older programs; the others have
    # properties before a tracked change.
    return event.name in ("Fallback", "rPrChange", "pPrChange", "sectPrChange")


def _word_pages(document: _WordDocument, part: str) -> Iterator[str]:
    styles, lists, notes = document.styles, document.lists, document.notes
    parts: dict[str, tuple[str, str]] = {}
    with suppress(UnreadableError):
        parts = relationships(document.archive, part)
    charts, diagrams = list[str](), list[str]()  # in the current paragraph
    page, in_text = Page(), False
    in_instruction, instruction = False, ""  # of a field
    fields: list[
        bool
    ] = []  # whether the result of each open field has begun: results within instructions are not shown
    style, list_id = _WordStyle(), ""  # of the current paragraph
    level: int | None = None
    is_in_properties = is_section_over = False
    is_continued = False  # the end of the current paragraph is deleted or hidden; the next one continues it
    outer: list[tuple[str, list[str], _WordStyle, bool]] = []  # paragraphs that contain the current text box
    lists.restart()
    reading, reading_start = "", 0
    run, form_field = _Run(), _FormField()
    note = ""
    events = outside(
        xml_events(document.archive.pieces(part)),
        # In the properties of a paragraph, these elements mean that only its end was deleted or moved.
        lambda each: _has_replaced_content(each) or (each.name in ("del", "moveFrom") and not is_in_properties),
    )
    for event in formulas_as_text(events):
        start = event.kind == "start"
        if is_in_properties and start and event.name in ("del", "moveFrom", "vanish", "specVanish"):
            # With specVanish, Word shows a heading and the next paragraph in one line; here, they stay separate.
            is_continued = event.name != "specVanish" and (is_continued or event.attributes.get("val", "1") in TRUE)
        if event.kind == "text":
            if in_instruction:
                instruction += event.name
            elif in_text and not run.is_hidden and all(fields):
                page.paragraph.append(run.text(event.name))
        elif event.name == "t":
            in_text = start
        elif event.name == "instrText":
            in_instruction = start
        elif event.name in ("fldChar", "fldSimple") and start:
            match event.attributes.get("fldCharType"):
                case "begin" if len(fields) < MAX_DEPTH:
                    fields.append(False)
                case "separate" | "end" as kind if fields:
                    fields[-1:] = [True] * (kind == "separate")
            instruction = event.attributes.get("instr", instruction)
            label = lists.field_label(instruction, list_id, (style.level or 0) if level is None else level)
            if label and not run.is_hidden and event.attributes.get("fldCharType") != "separate":  # its result follows
                page.paragraph.append(label)
            instruction = ""
        elif event.name == "rt":  # stored before the base text
            reading, reading_start = "" if start else page.cut_reading(reading_start), len(page.paragraph)
        elif event.name == "ruby" and not start:
            page.paragraph.append(reading)
            reading = ""
        elif event.name == "r":
            run = _Run(style.form or str, False, bool(style.is_struck), bool(style.is_hidden))
        elif event.name in _RUN_PROPERTIES:
            if start:
                run.read(event, styles)
        elif event.name == "sectPr":
            is_section_over = not start
        elif event.name == "p":
            if is_section_over:  # after the paragraph with the properties of the section
                notes.end_section()
                is_section_over = False
            if not is_continued:
                page.end_paragraph()
            page.add_blocks(diagrams)
            while charts:
                page.add_chart(optional_events(document.archive, charts.pop(0)))
            is_continued &= not start
            fields = [each for each in fields if each]  # damaged files may lack the end of a field
            run = _Run()
            style = _WordStyle() if start else style
        elif event.name == "altChunk" and start:
            page.end_paragraph()
            page.add_blocks([document.chunk(parts.get(event.attributes.get("id", ""), ("", ""))[1])])
        elif event.name == "chart" and start:
            charts.append(parts.get(event.attributes.get("id", ""), ("", ""))[1])
        elif event.name == "relIds" and start:  # of SmartArt
            with suppress(UnreadableError):
                diagram = parts.get(event.attributes.get("dm", ""), ("", ""))[1]
                diagrams.append(drawing_text(document.archive, {}, diagram))
        elif event.name == "txbxContent":
            if start:
                outer.append((page.prefix, page.paragraph, style, is_continued))
                page.prefix, page.paragraph = "", []
            else:
                page.end_paragraph()
                page.prefix, page.paragraph, style, is_continued = outer.pop()
        elif event.name == "pPr":
            is_in_properties = start
            if start:
                style, list_id, level = _WordStyle(), "", None
            elif is_continued or style.is_hidden:
                page.prefix, is_continued = "", True
            elif (list_id := list_id or style.list_id) not in ("", "0"):
                number = lists.label(list_id, (style.level or 0) if level is None else level)
                page.prefix += f"{number} " * (number not in ("", "-" * bool(page.prefix)))
        elif event.name == "numPr" and start:
            list_id = style.list_id or "unknown"
        elif event.name == "numId" and start:
            list_id = event.attributes.get("val", "")
        elif event.name == "ilvl" and start:
            level = level_of(event.attributes.get("val", ""))
        elif event.name == "pStyle" and start:
            value = event.attributes.get("val", "")
            style = styles.get(value, _WordStyle(value))
            # LibreOffice has a style named "Table Heading" for cells.
            if not page.tables and (heading := _HEADING.search(style.name)):
                page.prefix = f"{'#' * max(1, min(6, int(heading[1] or 1)))} "
        elif event.name in _FORM_FIELD:
            if start and event.name in ("checkBox", "ddList"):
                form_field = _FormField()
            if shown := form_field.read(event):
                page.paragraph.append(shown)
        elif event.name in ("footnote", "endnote") and start:
            note = event.attributes.get("id", "")
        elif start and event.name in ("footnoteReference", "endnoteReference"):
            if "customMarkFollows" not in event.attributes:
                page.add_mark(notes.mark(event.name[0], event.attributes.get("id", "")))
        elif start and event.name in ("footnoteRef", "endnoteRef"):
            page.add_mark(notes.own_mark(event.name[0], note))
        elif start and event.name == "sym":
            page.paragraph.append(symbol(event.attributes.get("font", ""), event.attributes.get("char", "")))
        elif start and event.name in ("tab", "ptab", "noBreakHyphen"):
            # A `tab` element with a position is a tab stop, not a tab character.
            if "pos" not in event.attributes:
                page.paragraph.append("-" if event.name == "noBreakHyphen" else "\t")
        elif start and event.name in ("br", "cr", "lastRenderedPageBreak"):
            if event.name != "lastRenderedPageBreak" and event.attributes.get("type") != "page":
                page.paragraph.append("\n")
                continue
            notes.end_page()
            if not page.tables and (page.blocks or any(each.strip() for each in page.paragraph)):
                yield page.text_before_break()
        else:
            page.read_table(event)
    yield page.text()
