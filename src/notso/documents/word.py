"""Read DOCX files piece by piece."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from notso.documents.archives import TRUE, Archive, Tags, XMLEvent, outside, xml_events
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
    PageReader,
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
# Built-in lists of LISTNUM fields: for each level, the label of its first item.
_FIELD_LISTS = {
    "numberdefault": ("1)", "a)", "i)", "(1)", "(a)", "(i)", "1.", "a.", "i."),
    "outlinedefault": ("I.", "A.", "1.", "a)", "(1)", "(a)", "(i)", "(a)", "(i)"),
    "legaldefault": tuple("1." * level for level in range(1, MAX_LEVEL + 2)),
}
_FIELD_FORMS = {"1": "decimal", "a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
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
    # A second Archive is needed, because each one inflates only a limited amount of data.
    sections = Archive(file) if kinds_of_notes else None
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
        value = event.get("val")
        match event.name:
            case "style":
                style = styles.setdefault(event.get("styleId"), _WordStyle())
            case "name":
                style.name = style.name or value
            case "basedOn":
                style.base = value
            case "numId":
                style.list_id = style.list_id or value
            case "vanish":
                style.is_hidden = event.is_on
            case "strike" | "dstrike":
                style.is_struck = bool(style.is_struck) or event.is_on
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
    starts: dict[int, int] = field(default_factory=dict)  # level -> first number, if the list overrides it


class _WordLists:
    # Lists by id, or by `name:` and their name. Lists with the same definition share one numbering.
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
            value = event.get("val")
            match event.name:
                case "abstractNum":
                    definition = event.get("abstractNumId")
                    levels = definitions.setdefault(definition, {})
                case "name":
                    self._lists[f"name:{value.lower()}"] = _WordList(definition)
                case "styleLink":
                    styled[value] = definition
                case "numStyleLink":
                    links[definition] = value
                case "num":
                    listed = self._lists.setdefault(event.get("numId"), _WordList())
                    levels = listed.levels
                case "abstractNumId":
                    listed.definition = value
                case "lvlOverride":
                    at = level_of(event.get("ilvl"))
                case "startOverride":
                    listed.starts[at] = event.number("val")
                case "lvl":
                    at = level_of(event.get("ilvl"))
                    level = levels[at] = ListLevel(restarts_after=at)
                case "start":
                    level.start = event.number("val")
                case "numFmt":  # the first one is kept: a fallback may follow
                    own = event.get("format").partition(",")[0] if value == "custom" else ""
                    level.form = level.form or own or value
                case "lvlText":
                    level.text = value
                case "lvlRestart":
                    level.restarts_after = min(at, event.number("val"))
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
        for place, each in enumerate(after, start=level + 2 - len(after)):  # outer levels come first
            text += f"%{place}{each}"
        levels[level] = ListLevel(_FIELD_FORMS[digit], text, 1, level)
    return levels


class _Notes:
    # Numbers footnotes ("f") and endnotes ("e").
    def __init__(self, settings: dict[str, XMLEvent], sections: Iterator[dict[str, XMLEvent]]) -> None:
        self._settings = settings
        self._sections = sections
        self._section = next(sections, {})
        self._counts = {"f": 0, "e": 0}  # number of notes since numbering last restarted
        self._marks: dict[tuple[str, str], str] = {}

    def mark(self, kind: str, note: str) -> str:
        # Returns the mark of a note. Notes are numbered in the order of their first references.
        if (kind, note) not in self._marks:
            form = self._value(kind, "numFmt") or {"f": "decimal", "e": "lowerRoman"}[kind]
            start = self._section.get(f"{kind}numStart") or self._settings.get(f"{kind}numStart")
            number = self._counts[kind] + (start.number("val") if start is not None else 1)
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
        return event.get("val") if event is not None else ""


def _note_settings(events: Iterable[XMLEvent]) -> Iterator[dict[str, XMLEvent]]:
    # Yields the note settings of each section, or those of a part without sections.
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
        value, is_on = event.get("val"), event.is_on
        match event.name:
            case "rStyle":
                style = styles.get(value, _WordStyle())
                self.is_hidden = self.is_hidden or bool(style.is_hidden)
                self.is_style_struck = self.is_style_struck if style.is_struck is None else style.is_struck
                self.form = style.form or self.form
            case "rFonts":
                self.font = event.get("ascii")
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
    # A check box or a list of choices. Nested elements contain its state.
    is_checked: bool = False
    choices: list[str] = field(default_factory=list)
    choice: int = -1

    def read(self, event: XMLEvent) -> str:
        # Returns the field's text at its end tag, and an empty string before that.
        start = event.kind == "start"
        if start and event.name == "listEntry":
            self.choices.append(event.get("val"))
        elif start and event.name in ("result", "default", "checked"):
            self.is_checked = event.is_on
            self.choice = event.number("val") if event.name == "result" or self.choice < 0 else self.choice
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
        """Return the text of a file that the document inserts by reference."""
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
    # A Fallback element repeats the content of the preceding Choice element in a form for older programs. The other
    # elements contain the properties that a tracked change replaced.
    return event.name in ("Fallback", "rPrChange", "pPrChange", "sectPrChange")


class _WordReader(PageReader):
    # Reads a part of a document: the main text, the footnotes or the endnotes.
    reads = Tags(PageReader.reads)

    def __init__(self, document: _WordDocument, part: str) -> None:
        super().__init__()
        self._document, self._styles = document, document.styles
        self._lists, self._notes = document.lists, document.notes
        self._parts: dict[str, tuple[str, str]] = {}
        with suppress(UnreadableError):
            self._parts = relationships(document.archive, part)
        self._style, self._list_id = _WordStyle(), ""  # of the current paragraph
        self._level: int | None = None
        self._charts, self._diagrams = list[str](), list[str]()  # in the current paragraph
        self._in_properties = self._is_section_over = False
        # Whether the end of the current paragraph is deleted or hidden, so that the next paragraph continues it.
        self._is_continued = False
        self._outer: list[tuple[_WordStyle, str, int | None, bool]] = []  # paragraphs that contain the current text box
        self._run, self._form_field = _Run(), _FormField()
        self._in_instruction, self._instruction = False, ""  # whether a field's instruction is being read, and its text
        # For each open field, whether its result has begun. A result within another field's instruction is not shown.
        self._fields: list[bool] = []
        self._reading = ""
        self._note = ""
        self._lists.restart()

    def omits(self, event: XMLEvent) -> bool:
        # In the properties of a paragraph, these elements mean that only its end was deleted or moved.
        return _has_replaced_content(event) or (event.name in ("del", "moveFrom") and not self._in_properties)

    def read_text(self, text: str) -> None:
        if self._in_instruction:
            self._instruction += text
        elif self.in_text and not self._run.is_hidden and all(self._fields):
            self.page.paragraph.append(self._run.text(text))

    @reads("p")
    def _read_paragraph(self, event: XMLEvent) -> None:
        if self._is_section_over:  # at the end of the paragraph with the section's properties
            self._notes.end_section()
            self._is_section_over = False
        if not self._is_continued:
            self.page.end_paragraph()
        self.page.add_blocks(self._diagrams)
        while self._charts:
            self.page.add_chart(optional_events(self._document.archive, self._charts.pop(0)))
        self._is_continued &= not event.is_start
        self._fields = [each for each in self._fields if each]  # damaged files may lack the end of a field
        self._run = _Run()
        if event.is_start:
            self._style, self._list_id, self._level = _WordStyle(), "", None

    @reads("pPr")
    def _read_properties(self, event: XMLEvent) -> None:
        self._in_properties = event.is_start
        if event.is_start:
            return
        if self._is_continued or self._style.is_hidden:
            self.page.prefix, self._is_continued = "", True
            return
        self._list_id = self._list_id or self._style.list_id
        if self._list_id not in ("", "0"):
            number = self._lists.label(self._list_id, self._list_level())
            self.page.prefix += f"{number} " * (number not in ("", "-" * bool(self.page.prefix)))

    def _list_level(self) -> int:
        return (self._style.level or 0) if self._level is None else self._level

    @reads("<pStyle>")
    def _read_style(self, event: XMLEvent) -> None:
        self._style = self._styles.get(event.get("val"), _WordStyle(event.get("val")))
        # LibreOffice has a style named "Table Heading" for cells.
        if not self.page.tables and (heading := _HEADING.search(self._style.name)):
            self.page.prefix = f"{'#' * max(1, min(6, int(heading[1] or 1)))} "

    @reads("<numPr>", "<numId>", "<ilvl>")
    def _read_list(self, event: XMLEvent) -> None:
        if event.name == "ilvl":
            self._level = level_of(event.get("val"))
        else:
            self._list_id = event.get("val") if event.name == "numId" else self._style.list_id or "unknown"

    @reads("sectPr")
    def _read_section(self, event: XMLEvent) -> None:
        self._is_section_over = not event.is_start

    @reads("r")
    def _reset_run(self, event: XMLEvent) -> None:
        style = self._style
        self._run = _Run(style.form or str, False, bool(style.is_struck), bool(style.is_hidden))

    @reads("<rStyle>", "<rFonts>", "<strike>", "<dstrike>", "<vertAlign>", "<vanish>")
    def _read_run(self, event: XMLEvent) -> None:
        self._run.read(event, self._styles)
        if event.name == "vanish":
            self._hide_end(event)

    @reads("<del>", "<moveFrom>", "<specVanish>")
    def _hide_end(self, event: XMLEvent) -> None:
        # With specVanish, Word shows a heading and the next paragraph on one line; here, they stay separate.
        if self._in_properties:
            self._is_continued = event.name != "specVanish" and (self._is_continued or event.is_on)

    @reads("instrText")
    def _read_instruction(self, event: XMLEvent) -> None:
        self._in_instruction = event.is_start

    @reads("<fldChar>", "<fldSimple>")
    def _read_field(self, event: XMLEvent) -> None:
        kind = event.get("fldCharType")
        if kind == "begin" and len(self._fields) < MAX_DEPTH:
            self._fields.append(False)
        elif kind in ("separate", "end") and self._fields:
            self._fields[-1:] = [True] * (kind == "separate")
        instruction, self._instruction = event.get("instr", self._instruction), ""
        label = self._lists.field_label(instruction, self._list_id, self._list_level())
        if label and not self._run.is_hidden and kind != "separate":  # after "separate", the stored result follows
            self.page.paragraph.append(label)

    @reads("checkBox", "ddList", "<listEntry>", "<result>", "<default>", "<checked>")
    def _read_form_field(self, event: XMLEvent) -> None:
        if event.is_start and event.name in ("checkBox", "ddList"):
            self._form_field = _FormField()
        if shown := self._form_field.read(event):
            self.page.paragraph.append(shown)

    @reads("rt")
    def _read_reading(self, event: XMLEvent) -> None:
        self._reading = self.page.read_reading(event)

    @reads("</ruby>")
    def _end_ruby(self, event: XMLEvent) -> None:  # in the file, the base text follows its reading
        self.page.paragraph.append(self._reading)
        self._reading = ""

    @reads("txbxContent")
    def _read_text_box(self, event: XMLEvent) -> None:
        if event.is_start:
            self._outer.append((self._style, self._list_id, self._level, self._is_continued))
            self.page.start_box()
        else:
            self.page.end_box()
            self._style, self._list_id, self._level, self._is_continued = self._outer.pop()

    @reads("<altChunk>", "<chart>", "<relIds>")
    def _read_part(self, event: XMLEvent) -> None:
        attribute = "dm" if event.name == "relIds" else "id"
        part = self._parts.get(event.get(attribute), ("", ""))[1]
        if event.name == "chart":
            self._charts.append(part)
        elif event.name == "altChunk":
            self.page.end_paragraph()
            self.page.add_blocks([self._document.chunk(part)])
        else:  # SmartArt
            with suppress(UnreadableError):
                self._diagrams.append(drawing_text(self._document.archive, {}, part))

    @reads("<footnote>", "<endnote>")
    def _start_note(self, event: XMLEvent) -> None:
        self._note = event.get("id")

    @reads("<footnoteReference>", "<endnoteReference>", "<footnoteRef>", "<endnoteRef>")
    def _add_note_mark(self, event: XMLEvent) -> None:
        if event.name.endswith("Ref"):
            self.page.add_mark(self._notes.own_mark(event.name[0], self._note))
        elif "customMarkFollows" not in event.attributes:
            self.page.add_mark(self._notes.mark(event.name[0], event.get("id")))

    @reads("<sym>", "<tab>", "<ptab>", "<noBreakHyphen>")
    def _add_character(self, event: XMLEvent) -> None:
        if event.name == "sym":
            self.page.paragraph.append(symbol(event.get("font"), event.get("char")))
        elif "pos" not in event.attributes:  # a `tab` element with a position is a tab stop
            self.page.paragraph.append("-" if event.name == "noBreakHyphen" else "\t")

    @reads("<br>", "<cr>", "<lastRenderedPageBreak>")
    def _read_break(self, event: XMLEvent) -> None:
        if event.name != "lastRenderedPageBreak" and event.get("type") != "page":
            self.page.paragraph.append("\n")
            return
        self._notes.end_page()
        if not self.page.tables and (self.page.blocks or any(each.strip() for each in self.page.paragraph)):
            self.finished.append(self.page.text_before_break())


def _word_pages(document: _WordDocument, part: str) -> Iterator[str]:
    reader = _WordReader(document, part)
    return reader.pages(formulas_as_text(outside(xml_events(document.archive.pieces(part)), reader.omits)))
