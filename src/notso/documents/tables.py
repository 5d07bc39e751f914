"""Conversion of delimited text and spreadsheets to Markdown tables."""

from __future__ import annotations

import csv
import io
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, time, timedelta
from itertools import groupby
from math import isfinite
from operator import itemgetter
from typing import Any, BinaryIO, Generic, TypeVar

from notso.documents.archives import Archive, has_zip_signature, outside, xml_events
from notso.documents.formulas import SCRIPTS, Struck, joined
from notso.documents.values import MAX_CHARACTERS, UnreadableError, too_many_characters

T = TypeVar("T", bound=tuple[Any, ...])

HEADER_EVERY = 40
"""Number of rows after which the header is repeated, so that every part of a long table has it."""

MAX_CELLS = 2_000_000
MAX_INTEGER = 1 << 53  # integers up to this one are exact floats
_DELIMITERS = "\t;|,"  # in order of preference; the comma is last, because it is common within cells
_DECLARED = re.compile(r"sep=([\t;|,])\r?\n")  # the first line of files for Excel
_QUOTED = re.compile(r'(?<![^\t;|,\r\n ])"(?:[^"]++|"")*+"')  # a cell, which may contain delimiters and line breaks
# A column of numbers with decimal commas, below its name.
_DECIMALS = re.compile(r"[^\t;|,\r\n]+(?:[\r\n]++[-+]?[0-9.]++,[0-9]++)++\s*")
_SAMPLE = 1 << 16

# Cells in the XML of a sheet: those with a formula, and those with an attribute that is inserted by `%`. The groups
# are the cell's attributes, and its stored value or text.
_FORMULA = rb"<(?:\w+:)?f\b[^<>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*"
_VALUE = rb"(<(?:\w+:)?v\b[^<>]*>[^<]+|<(?:\w+:)?is>(?:[^<]|<(?!/?(?:\w+:)?(?:is|c)\b))*)?"
_FORMULA_CELL = re.compile(rb"<(?:\w+:)?c\b([^<>]*)>\s*%b%b" % (_FORMULA, _VALUE))
_CELL = rb"<(?:\w+:)?c\b(?=[^<>]*\s(?:%%b))([^<>]*)>\s*(?:%b)?%b" % (_FORMULA, _VALUE)
_PLACE = re.compile(rb"""\sr=["']([A-Z]{1,3})([0-9]{1,7})["']""")
_STYLE = re.compile(rb"""\ss=["']([0-9]{1,7})["']""")
_TYPE = re.compile(rb"""\st=["'](e|s|str|inlineStr)["']""")
_FORMS = re.compile(rb"vertAlign|strike")
_NAMESPACES = re.compile(rb"(</?)\w+:")
_ODS_PLACE = re.compile(rb"<(/?)table:(table|table-row|(?:covered-)?table-cell)\b(?!-)([^<>]*)>")
_ODS_UNIT = re.compile(
    rb"""value-type=["'](?:(percentage)|currency["'].{0,200}?currency=["']([^"'<>&]{1,9})["'])""", re.DOTALL
)
_REPEATED = re.compile(rb"""-repeated=["']([0-9]{1,7})["']""")
_MAX_COLUMNS = 1_000  # repetitions of a cell
_MAX_FORMAT = 255  # characters
_MAX_STYLES = 100  # in a pattern
_ODF_DURATION = re.compile(r"(-?)PT([0-9]{1,9})H([0-9]{1,2})M([0-9]{1,2})(?:\.[0-9]+)?S")
_MAX_CELL_BYTES = 1 << 20
_SHORT_CELLS = range(12, 19)
"""Types of XLSB records for cells without a column, which SheetJS writes. The library skips these cells."""


def markdown_lines(table: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table's Markdown lines; the first row is the header. Raises UnreadableError."""
    header: list[str] = []
    written = cells = 0
    for row in table:
        texts = [_cell(each) for each in row]
        while texts and not texts[-1]:
            texts.pop()
        cells += len(texts) + 1
        if cells > MAX_CELLS:
            raise UnreadableError(f"has more than {MAX_CELLS:,} cells")
        if not texts:
            continue
        line = f"| {' | '.join(texts)} |"
        if not header:
            header = [line, f"|{' --- |' * len(texts)}"]
            yield from header
            continue
        if written and written % HEADER_EVERY == 0:
            yield ""
            yield from header
        yield line
        written += 1


def line_of(table: Iterable[Sequence[str]]) -> str:
    """Return a table as one line, for a cell of another table."""
    rows = (", ".join(text for each in row if (text := " ".join(each.split()))) for row in table)
    return "; ".join(row for row in rows if row)


def format_delimited(text: str) -> str:
    """Return comma-, semicolon-, tab- or |-separated text as a table, or unchanged if it is not a table.

    Raises UnreadableError.
    """
    csv.field_size_limit(1 << 20)
    declared = _DECLARED.match(text)
    if declared:
        text = text[declared.end() :]
    try:
        sample = _QUOTED.sub("", text[:_SAMPLE])
        delimiter = declared[1] if declared else max(_DELIMITERS, key=lambda each: _uniform_rows(sample, each))
        if not declared and _DECIMALS.fullmatch(text):
            delimiter = "\t"
        return "\n".join(markdown_lines(_rows(text, delimiter)))
    except csv.Error:
        return text


def _uniform_rows(text: str, delimiter: str) -> int:
    # Returns how many rows have the most frequent number of cells, ignoring rows with one cell. csv.Sniffer is not
    # used, because it also guesses how cells are quoted, and apostrophes and doubled quotation marks mislead it.
    widths = Counter(len(row) for row in _rows(text, delimiter) if len(row) > 1)
    return max(widths.values(), default=0)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)


def read_spreadsheet(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    """Yield the visible sheets of an XLSX, XLSB, XLS or ODS file, each as a page. Raises UnreadableError."""
    import python_calamine

    shown = None
    if has_zip_signature(file):
        archive = Archive(file)  # checks sizes before the library inflates any member
        _check_cells(archive, warnings)
        shown = _Shown(Archive(file))  # a second Archive, because each limits what it inflates
    file.seek(0)
    try:
        workbook = python_calamine.CalamineWorkbook.from_filelike(file)
        for number, sheet in enumerate(workbook.sheets_metadata):
            is_visible = sheet.visible is python_calamine.SheetVisibleEnum.Visible
            if is_visible and sheet.typ is python_calamine.SheetTypeEnum.WorkSheet:
                cells = workbook.get_sheet_by_name(sheet.name)
                rows: Iterator[list[str]] = ([_format_value(each) for each in row] for row in cells.iter_rows())
                if shown is not None and cells.start is not None:
                    rows = shown.added(number, sheet.name, cells.iter_rows(), cells.start[1])
                lines = markdown_lines(rows)
                yield "\n".join([f"## {_cell(sheet.name)}", "", *lines])
    except python_calamine.PasswordError:
        raise UnreadableError("is encrypted", "document_encrypted") from None
    except python_calamine.CalamineError as error:
        if "password" in str(error).casefold():
            raise UnreadableError("is encrypted", "document_encrypted") from None
        raise UnreadableError("is damaged: its sheets cannot be read", "document_damaged") from None


class _Shown:
    # What the library does not read: percent signs and currencies (in XLSX files, they are in the formats of cells),
    # errors, and superscripts.
    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._ods_sheets = _Groups(self._ods_cells())
        targets = {each.get("Id", ""): each.get("Target", "") for _, each in self._elements("_rels/workbook.xml.rels")}
        self._parts = {  # by name of the sheet
            each["name"]: posixpath.join("/xl", targets.get(each.get("id", ""), ""))[1:]
            for name, each in self._elements("workbook.xml")
            if name == "sheet" and "name" in each
        }
        units, is_of_cells, self._units = {"9": "%", "10": "%"}, False, list[str]()  # `_units`: by number of the style
        for name, each in self._elements("styles.xml"):
            is_of_cells = name == "cellXfs" or (is_of_cells and name not in ("cellStyles", "dxfs"))
            if name == "numFmt":
                units[each.get("numFmtId", "")] = _unit(each.get("formatCode", ""))
            elif name == "xf" and is_of_cells:
                self._units.append(units.get(each.get("numFmtId", ""), ""))
        self._strings: dict[int, str] = {}  # shared texts with superscripts, by number
        strings = archive.read("xl/sharedStrings.xml") if "xl/sharedStrings.xml" in archive.names else b""
        if _FORMS.search(strings):
            with suppress(UnreadableError):
                self._strings = {at: text for at, text in enumerate(_rich_texts(strings)) if text}

    def _elements(self, part: str) -> Iterator[tuple[str, dict[str, str]]]:
        with suppress(UnreadableError):  # the library reports damaged files
            for event in xml_events(self._archive.pieces(f"xl/{part}")):
                if event.kind == "start":
                    yield event.name, event.attributes

    def added(self, sheet: int, name: str, rows: Iterable[Sequence[Any]], left: int) -> Iterator[list[str]]:
        # Yields the texts of each row. left: the first column.
        part = self._parts.get(name, "")
        units = _Groups(self._xlsx_cells(part) if part else (place[1:] for place in self._ods_sheets.get(sheet)))
        for number, row in enumerate(rows):
            texts = [_format_value(each) for each in row]
            for _, column, unit, text in units.get(number):
                value = row[column - left] if left <= column < left + len(row) else None
                if unit and isinstance(value, float):
                    text = _with_unit(value, unit)
                if text and value is not None:
                    texts[column - left] = text
            yield texts

    def _xlsx_cells(self, part: str) -> Iterator[tuple[int, int, str, str]]:
        # Yields row, column, unit and text.
        types = rb"""t=["'](?:e|inlineStr%b)["']""" % (b"|s" if self._strings else b"")
        numbers = [b"%d" % at for at, unit in enumerate(self._units) if unit]
        styles = b"|".join(numbers) if len(numbers) <= _MAX_STYLES else b"[0-9]+"
        cell = re.compile(_CELL % (types + rb"""|s=["'](?:%b)["']""" % styles if styles else types))
        for attributes, value in _found(cell, self._archive, part):
            style, text = _STYLE.search(attributes), self._text(attributes, value)
            unit = self._units[int(style[1])] if style is not None and int(style[1]) < len(self._units) else ""
            if (unit or text) and (place := _PLACE.search(attributes)) is not None:
                column = 0
                for letter in place[1]:
                    column = 26 * column + letter - 64
                yield int(place[2]) - 1, column - 1, unit, text

    def _text(self, attributes: bytes, value: bytes) -> str:
        # Returns an error or a text with superscripts. The library reads the texts of other cells.
        kind = _TYPE.search(attributes)
        if kind is None or not value:
            return ""
        if kind[1] == b"inlineStr" and _FORMS.search(value):
            with suppress(UnreadableError):
                return next(_rich_texts(_NAMESPACES.sub(rb"\1", value) + b"</is>"), "")
        content = value.rpartition(b">")[2].strip()
        if kind[1] == b"s" and self._strings:
            return self._strings.get(int(content), "") if content.isdigit() else ""
        return content.decode("utf-8", "replace") if kind[1] == b"e" else ""

    def _ods_cells(self) -> Iterator[tuple[int, int, int, str, str]]:
        # Yields sheet, row, column, unit, and an empty text.
        sheet, row, column, times, units, left = -1, 0, 0, 1, list[tuple[int, str]](), MAX_CELLS
        for end, name, attributes in _found(_ODS_PLACE, self._archive, "content.xml", (b"<",)):
            if name == b"table":
                sheet, row = sheet + (not end), 0
            elif name == b"table-row" and not end:
                column, times, units = 0, _repeated(attributes), []
            elif name != b"table-row" and not end:
                unit = _ODS_UNIT.search(attributes)
                columns = _repeated(attributes)
                if unit is not None:
                    text = "%" if unit[1] else unit[2].decode("utf-8", "replace")
                    units += [(column + each, text) for each in range(min(columns, _MAX_COLUMNS))]
                column += columns
            if name == b"table-row" and (end or attributes.endswith(b"/")):
                for _ in range(times if units else 0):
                    left -= len(units)
                    if left < 0:
                        return
                    yield from ((sheet, row, at, unit, "") for at, unit in units)
                    row += 1
                row += 0 if units else times
                units = []


class _Groups(Generic[T]):
    # Groups items by their first number, which never decreases.
    def __init__(self, items: Iterable[T]) -> None:
        self._groups = groupby(items, key=itemgetter(0))
        self._next: tuple[int, Iterator[T]] | None = (-1, iter(()))

    def get(self, number: int) -> Iterable[T]:
        while self._next is not None and self._next[0] < number:
            self._next = next(self._groups, None)
        return self._next[1] if self._next is not None and self._next[0] == number else ()


def _rich_texts(data: bytes) -> Iterator[str]:
    # Yields each text of spreadsheet XML with its superscripts; empty: the text has none.
    pieces, in_text = list[str](), False
    form: type[str] = str
    for event in outside(xml_events(iter((data,))), lambda each: each.name == "rPh"):  # phonetic text
        start = event.kind == "start"
        if event.kind == "text":
            if in_text:
                pieces.append(form(event.name))
        elif event.name == "t":
            in_text = start
        elif event.name == "r":
            form = str
        elif event.name == "vertAlign" and start:
            form = SCRIPTS.get(event.attributes.get("val", ""), form)
        elif event.name == "strike" and start and event.attributes.get("val", "1") in ("1", "true"):
            form = Struck
        elif event.name in ("si", "is") and not start:
            yield joined(pieces) if any(type(each) is not str for each in pieces) else ""
            pieces, form = [], str


def _repeated(attributes: bytes) -> int:
    found = _REPEATED.search(attributes)
    return int(found[1]) if found else 1


def format_number(text: str, form: str, is_1904: bool = False) -> str:
    """Return a stored number as its number format shows it: with a percent sign or currency, or as a date.

    is_1904: dates are counted from 1904.
    """
    letters = re.sub(r'"[^"]*"|[\\_*].|\[(?![hmsHMS]+\])[^]]*\]|General', "", form[:_MAX_FORMAT])
    has_time = re.search("(?i)[hs]", letters)
    try:
        number = float(text)
        if re.search("(?i)[yd]", letters) or (not has_time and re.search("(?i)m", letters)):
            first = datetime(1904, 1, 1) if is_1904 else datetime(1899, 12, 30)
            if has_time:
                return _format_value(first + timedelta(seconds=round(86_400 * number)))
            return (first + timedelta(days=number)).date().isoformat()
        if has_time:
            return _format_value(timedelta(days=number))
        return _with_unit(number, _unit(form)) if isfinite(number) else text
    except (ValueError, OverflowError):
        return text


def _with_unit(value: float, unit: str) -> str:
    return f"{_format_value(value * 100)}%" if unit == "%" else f"{_format_value(value)} {unit}".rstrip()


def _unit(form: str) -> str:
    # Returns the percent sign, or the text with a currency (such as "k€"), that a format adds to positive numbers.
    form = (re.match(r'(?:"[^"]*"|[\\_*].|\[[^]]*\]|[^;])*', form[:_MAX_FORMAT]) or [""])[0]
    if re.search(r"\[[<>=]", form):  # the unit depends on the number
        return ""
    marks = re.sub(r'"[^"]*"|[\\_*].|\[[^]]*\]', "", form)
    if "%" in marks:
        return "%"
    text = re.sub(r'"([^"]*)"|\\(.)|[_*].|\[(?:\$([^][-]*+))?[^][]*\]|General|[#0?.,()+-]', r"\1\2\3", form).strip()
    is_currency = re.search("[$€£¥₩₹₽]", text) or re.search(r"\[\$[^]-]", form)
    is_scaled = re.search("[#0?],+(?![#0?,])", marks)  # shows 5 for 5,000
    return text if is_currency and not is_scaled and re.fullmatch(r"\S{1,9}", text) else ""


def _check_cells(archive: Archive, warnings: list[str]) -> None:
    # Programs that do not compute formulas store no results, or 0 and the request to compute them.
    missing = 0
    workbook = archive.read("xl/workbook.xml") if "xl/workbook.xml" in archive.names else b""
    wants_results = b'fullCalcOnLoad="1"' in workbook
    for name in sorted(archive.names):
        if re.fullmatch(r"xl/worksheets/[^/]+\.xml", name):
            missing += sum(
                # A formula may return an empty text, which is then not stored.
                wants_results or not (value or ((kind := _TYPE.search(attributes)) and kind[1] == b"str"))
                for attributes, value in _found(_FORMULA_CELL, archive, name)
            )
        elif re.fullmatch(r"xl/worksheets/[^/]+\.bin", name) and _has_short_cells(archive.read(name)):
            raise UnreadableError("is an XLSB file of an unsupported variant; save it as XLSX")
    if missing:
        warnings.append(f"formulas whose results may be missing: {missing:,}; save the file in a spreadsheet program")


def _found(
    pattern: re.Pattern[bytes], archive: Archive, part: str, starts: Sequence[bytes] = (b"<c ", b":c ")
) -> Iterator[tuple[bytes, ...]]:
    # Yields the matches of a pattern in a part, if it exists. The first tag of a match contains one of `starts`.
    rest = b""
    for piece in archive.pieces(part) if part in archive.names else ():
        text = rest + piece
        last = text.rfind(b"<", 0, max(map(text.rfind, starts)) + 1)  # may continue in the next piece
        if last < 0 or len(text) - last > _MAX_CELL_BYTES:
            last = len(text)
        yield from pattern.findall(text[:last])
        rest = text[last:]
    yield from pattern.findall(rest)


def _has_short_cells(data: bytes) -> bool:
    # A record is a type and a size, in 7 bits per byte, and its content.
    at = 0
    while at < len(data):
        kind, size, number = data[at] & 0x7F, 0, 0
        if data[at] & 0x80 and at + 1 < len(data):
            at += 1
            kind |= (data[at] & 0x7F) << 7
        if kind in _SHORT_CELLS:
            return True
        while number < 4 and (at := at + 1) < len(data):
            size |= (data[at] & 0x7F) << 7 * number
            number = number + 1 if data[at] & 0x80 else 4
        at += 1 + size
    return False


def _cell(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise too_many_characters()
    return " ".join(text.split()).replace("|", "\\|")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        is_integer = value.is_integer() and abs(value) < MAX_INTEGER
        return str(int(value)) if is_integer else f"{value:.15g}"  # as in spreadsheets, which show 0.1 + 0.2 as 0.3
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ", "seconds")
    if isinstance(value, timedelta):
        seconds = round(abs(value).total_seconds())
        return f"{'-' * (value < timedelta())}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if isinstance(value, str) and (found := _ODF_DURATION.fullmatch(value)):
        return f"{found[1]}{int(found[2])}:{found[3]:0>2}:{found[4]:0>2}"
    return str(value)
