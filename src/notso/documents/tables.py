"""Convert delimited text and spreadsheets to Markdown tables."""

from __future__ import annotations

import csv
import io
import posixpath
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, time, timedelta
from itertools import groupby
from math import isfinite
from operator import itemgetter
from typing import Any, BinaryIO, Generic, TypeVar

from notso.documents.archives import Archive, XMLEvent, has_zip_signature, outside, xml_events
from notso.documents.formulas import SCRIPTS, Struck, joined
from notso.documents.values import MAX_CHARACTERS, UnreadableError, too_many_characters

T = TypeVar("T", bound=tuple[Any, ...])

HEADER_EVERY = 40
"""Number of rows after which the header is repeated, so that every part of a long table has it."""

MAX_CELLS = 2_000_000
MAX_INTEGER = 1 << 53  # floats represent all integers up to this one exactly
_DELIMITERS = "\t;|,"  # in order of preference; the comma is last, because it is common within cells
_DECLARED = re.compile(r"sep=([\t;|,])\r?\n")  # optional first line of files for Excel
_QUOTED = re.compile(r'(?<![^\t;|,\r\n ])"(?:[^"]++|"")*+"')  # a cell, which may contain delimiters and line breaks
# A column's name, followed by lines that are numbers with decimal commas.
_DECIMALS = re.compile(r"[^\t;|,\r\n]+(?:[\r\n]++[-+]?[0-9.]++,[0-9]++)++\s*")
_SAMPLE = 1 << 16

# Cells in the XML of a sheet: those with a formula, and those with an attribute that is inserted with `%`. The groups
# match the cell's attributes, and its stored value or text.
_FORMULA = rb"<(?:\w+:)?f\b[^<>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*"
_VALUE = rb"(<(?:\w+:)?v\b[^<>]*>[^<]+|<(?:\w+:)?is>(?:[^<]|<(?!/?(?:\w+:)?(?:is|c)\b))*)?"
_FORMULA_CELL = re.compile(rb"<(?:\w+:)?c\b([^<>]*)>\s*%b%b" % (_FORMULA, _VALUE))
_CELL = rb"<(?:\w+:)?c\b(?=[^<>]*\s(?:%%b))([^<>]*)>\s*(?:%b)?%b" % (_FORMULA, _VALUE)
_PLACE = re.compile(rb"""\sr=["']([A-Z]{1,3})([0-9]{1,7})["']""")
_STYLE = re.compile(rb"""\ss=["']([0-9]{1,7})["']""")
_TYPE = re.compile(rb"""\st=["'](e|s|str|inlineStr)["']""")
_CELL_START = re.compile(rb"<(?:\w+:)?c\b")
_FORMS = re.compile(rb"vertAlign|strike")
_NAMESPACES = re.compile(rb"(</?)\w+:")
# Tags of tables in ODS files, with the content that follows them.
_ODS_START = re.compile(rb"</?table:")
_ODS_PLACE = re.compile(
    rb"<(/?)table:(table|table-row|(?:covered-)?table-cell)\b(?!-)([^<>]*)>([^<]*+(?:<(?!/?table:)[^<]*+)*+)"
)
_ODS_UNIT = re.compile(
    rb"""value-type=["'](?:(percentage)|currency["'].{0,200}?currency=["']([^"'<>&]{1,9})["'])""", re.DOTALL
)
_ODS_ERROR_TYPE = re.compile(rb"""value-type=["']error["']""")
_ODS_ERROR = re.compile(rb"\s*<text:p>([^<>]{1,100})<")
_REPEATED = re.compile(rb"""-repeated=["']([0-9]{1,7})["']""")
_MAX_COLUMNS = 1_000  # maximum number of times that a repeated cell is read
_MAX_SHEET_COLUMNS = 16_384
_MAX_FORMAT = 255  # maximum length of a number format
_SIGNS = "-\u2212() "
_SECTION = re.compile(r'(?:"[^"]*"|[\\_*].|\[[^][]*\]|[^;])*')  # a section of a number format
_MAX_STYLES = 100  # maximum number of styles that a pattern lists; otherwise, it matches all styles
_ODF_DURATION = re.compile(r"(-?)PT([0-9]{1,9})H([0-9]{1,2})M([0-9]{1,2})(?:\.[0-9]+)?S")
_MAX_CELL_BYTES = 1 << 20
_SHORT_CELLS = range(12, 19)
"""Types of XLSB records that SheetJS writes for cells without a column number. The library skips these cells."""
_UNITS = {9: "%", 10: "%"}
"""Units of the built-in number formats."""
_ERRORS = {0: "#NULL!", 7: "#DIV/0!", 15: "#VALUE!", 23: "#REF!", 29: "#NAME?", 36: "#NUM!", 42: "#N/A"}
"""Error codes in XLS and XLSB files, and the texts that programs show for them."""
_LONG_CELLS = range(2, 12)
"""Types of XLSB records for cells that are not empty. Types 3 and 11 contain errors."""
_FONT_STRUCK = 0x08  # the strikethrough flag of fonts in XLS and XLSB files
_STRUCK = "~~"
_MAX_CHART_COLUMNS = 20  # maximum number per series, including its values and the levels of its categories
_CHART_VALUES = ("val", "yVal", "bubbleSize")
_IDS = ("numFmtId", "fontId")
_BOF, _EOF = 0x809, 0x0A  # types of records of XLS files


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
    # Returns the number of rows that have the most common number of cells, ignoring rows with one cell. csv.Sniffer is
    # not used: it also guesses how cells are quoted, and is misled by apostrophes and doubled quotation marks.
    widths = Counter(len(row) for row in _rows(text, delimiter) if len(row) > 1)
    return max(widths.values(), default=0)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)


def read_spreadsheet(
    file: BinaryIO,
    warnings: list[str],
    read_drawings: Callable[[str], str] = lambda part: "",
    read_ods_text: Callable[[bytes], str] = lambda cell: "",
) -> Iterator[str]:
    """Yield the visible sheets of an XLSX, XLSB, XLS or ODS file, each as a page. Raises UnreadableError.

    read_drawings: returns the text of the charts and text boxes of a sheet, given its part of an XLSX or XLSB file.
    read_ods_text: returns the text of an ODS cell, given its XML, if it has superscripts or similar; otherwise "".
    """
    import python_calamine

    if has_zip_signature(file):
        archive = Archive(file)  # checks sizes before the library inflates any member
        _check_cells(archive, warnings)
        # A second Archive is needed, because each one inflates only a limited amount of data.
        shown: _Shown = _ShownInArchive(Archive(file), read_ods_text)
    else:
        file.seek(0)
        shown = _ShownInXLS(file.read())
    file.seek(0)
    try:
        workbook = python_calamine.CalamineWorkbook.from_filelike(file)
        for number, sheet in enumerate(workbook.sheets_metadata):
            if sheet.visible is not python_calamine.SheetVisibleEnum.Visible:
                continue
            lines = list[str]()
            is_table = sheet.typ is python_calamine.SheetTypeEnum.WorkSheet
            if is_table:
                cells = workbook.get_sheet_by_name(sheet.name)
                left = cells.start[1] if cells.start is not None else 0
                lines += markdown_lines(shown.added(number, sheet.name, cells.iter_rows(), left))
            drawings = read_drawings(shown.parts.get(sheet.name, ""))
            if is_table or drawings:
                lines += [""] * bool(lines and drawings) + [drawings] * bool(drawings)
                yield "\n".join([f"## {_cell(sheet.name)}", "", *lines])
    except python_calamine.PasswordError:
        raise UnreadableError("is encrypted", "document_encrypted") from None
    except python_calamine.CalamineError as error:
        if "password" in str(error).casefold():
            raise UnreadableError("is encrypted", "document_encrypted") from None
        raise UnreadableError("is damaged: its sheets cannot be read", "document_damaged") from None


class _Shown:
    # Adds what the library does not read: units such as % and currencies (which are in the formats of cells, except in
    # ODS files), errors, superscripts, subscripts and strikethrough.
    def __init__(self) -> None:
        self.parts: dict[str, str] = {}  # sheet name -> part of the file
        self._units: list[str] = []  # by style number

    def cells(self, sheet: int, name: str) -> Iterable[tuple[int, int, str, str]]:
        """Yield row, column, unit and text."""
        raise NotImplementedError

    def unit(self, style: int) -> str:
        return self._units[style] if style < len(self._units) else ""

    def added(self, sheet: int, name: str, rows: Iterable[Sequence[Any]], left: int) -> Iterator[list[str]]:
        # Yields the texts of each row. left: number of the first column.
        groups = _Groups(self.cells(sheet, name))
        for number, row in enumerate(rows):
            yield _added_to(row, groups.get(number), left)
        # In XLSB files, the library skips formulas that return errors, so `rows` may lack the last rows.
        yield from (_added_to((), cells, left) for _, cells in groups.rest())


def _added_to(row: Sequence[Any], cells: Iterable[tuple[int, int, str, str]], left: int) -> list[str]:
    texts = [_format_value(each) for each in row]
    for _, column, unit, text in cells:
        value = row[column - left] if left <= column < left + len(row) else None
        is_struck, unit = unit.startswith(_STRUCK), unit.removeprefix(_STRUCK)
        if unit and isinstance(value, int | float) and not isinstance(value, bool):
            text = _with_unit(value, unit)
        if is_struck and _STRUCK not in text and (text := text or "".join(texts[max(0, column - left) :][:1])):
            text = f"{_STRUCK}{text}{_STRUCK}"
        if text and 0 <= column - left < _MAX_SHEET_COLUMNS:
            texts += [""] * (column - left + 1 - len(texts))
            texts[column - left] = text
    return texts


class _ShownInArchive(_Shown):
    def __init__(self, archive: Archive, read_ods_text: Callable[[bytes], str]) -> None:
        super().__init__()
        self._archive = archive
        self._read_ods_text = read_ods_text
        self._ods_sheets = _Groups(self._ods_cells())
        is_binary = "xl/workbook.bin" in archive.names
        rels = self._elements(f"_rels/workbook.{'bin' if is_binary else 'xml'}.rels")
        targets = {each.get("Id", ""): each.get("Target", "") for _, each in rels}
        self._strings: dict[int, str] = {}  # shared texts with superscripts, subscripts or strikethrough, by index
        sheets, forms, struck, styles = self._read_binary() if is_binary else self._read_xml()
        self.parts = {name: posixpath.join("/xl", targets.get(id, ""))[1:] for name, id in sheets.items()}
        units = _UNITS | {number: _unit(form) for number, form in forms.items()}
        self._units = [_STRUCK * (font in struck) + units.get(form, "") for form, font in styles]

    def _read_xml(self) -> tuple[dict[str, str], dict[int, str], set[int], list[tuple[int, int]]]:
        # Returns relationship ids by sheet name, formats by number, the numbers of strikethrough fonts, and for each
        # style, the numbers of its format and its font.
        sheets = {
            each["name"]: each.get("id", "")
            for name, each in self._elements("workbook.xml")
            if name == "sheet" and "name" in each
        }
        forms, fonts, struck, styles, part = dict[int, str](), 0, set[int](), list[tuple[int, int]](), ""
        for name, each in self._elements("styles.xml"):
            part = name if name in ("fonts", "fills", "cellXfs", "cellStyles", "dxfs") else part
            form, font = (
                int(number) if number[:9].isdecimal() and len(number) < 10 else 0
                for number in map(each.get, _IDS, ("", ""))
            )
            if name == "numFmt":
                forms[form] = each.get("formatCode", "")
            elif name == "font" and part == "fonts":
                fonts += 1
            elif name == "strike" and part == "fonts" and each.get("val", "1") in ("1", "true"):
                struck.add(fonts - 1)
            elif name == "xf" and part == "cellXfs":
                styles.append((form, font))
        strings = self._archive.read("xl/sharedStrings.xml") if "xl/sharedStrings.xml" in self._archive.names else b""
        if _FORMS.search(strings):
            with suppress(UnreadableError):
                self._strings = {at: text for at, text in enumerate(_rich_texts(strings)) if text}
        return sheets, forms, struck, styles

    def _read_binary(self) -> tuple[dict[str, str], dict[int, str], set[int], list[tuple[int, int]]]:
        sheets, forms, fonts, struck = dict[str, str](), dict[int, str](), 0, set[int]()
        styles, is_of_cells = list[tuple[int, int]](), False
        for kind, content in self._records("xl/workbook.bin"):
            if kind == 156:  # BrtBundleSh: two numbers, the id of a relationship, and the name
                relationship, end = _wide_text(content, 8)
                sheets[_wide_text(content, end)[0]] = relationship
        for kind, content in self._records("xl/styles.bin"):
            if kind in (617, 618):  # BrtBeginCellXFs, BrtEndCellXFs
                is_of_cells = kind == 617
            elif kind == 44:  # BrtFmt
                forms[int.from_bytes(content[:2], "little")] = _wide_text(content, 2)[0]
            elif kind == 47 and is_of_cells:  # BrtXF
                styles.append((int.from_bytes(content[2:4], "little"), int.from_bytes(content[4:6], "little")))
            elif kind == 43:  # BrtFont
                struck |= {fonts} if content[2:3] and content[2] & _FONT_STRUCK else set()
                fonts += 1
        return sheets, forms, struck, styles

    def _elements(self, part: str) -> Iterator[tuple[str, dict[str, str]]]:
        with suppress(UnreadableError):  # the library reports damaged files
            for event in xml_events(self._archive.pieces(f"xl/{part}")):
                if event.kind == "start":
                    yield event.name, event.attributes

    def _records(self, part: str) -> Iterator[tuple[int, bytes]]:
        return _binary_records(self._archive.read(part) if part in self._archive.names else b"")

    def cells(self, sheet: int, name: str) -> Iterable[tuple[int, int, str, str]]:
        part = self.parts.get(name, "")
        if not part:
            return (place[1:] for place in self._ods_sheets.get(sheet))
        return self._xlsb_cells(part) if part.endswith(".bin") else self._xlsx_cells(part)

    def _xlsx_cells(self, part: str) -> Iterator[tuple[int, int, str, str]]:
        types = rb"""t=["'](?:e|inlineStr%b)["']""" % (b"|s" if self._strings else b"")
        numbers = [b"%d" % at for at, unit in enumerate(self._units) if unit]
        styles = b"|".join(numbers) if len(numbers) <= _MAX_STYLES else b"[0-9]+"
        cell = re.compile(_CELL % (types + rb"""|s=["'](?:%b)["']""" % styles if styles else types))
        for attributes, value in _found(cell, self._archive, part):
            style, text = _STYLE.search(attributes), self._text(attributes, value)
            unit = self.unit(int(style[1])) if style is not None else ""
            if (unit or text) and (place := _PLACE.search(attributes)) is not None:
                column = 0
                for letter in place[1]:
                    column = 26 * column + letter - 64
                yield int(place[2]) - 1, column - 1, unit, text

    def _xlsb_cells(self, part: str) -> Iterator[tuple[int, int, str, str]]:
        row = 0
        for kind, content in self._records(part):
            if kind == 0:  # BrtRowHdr
                row = int.from_bytes(content[:4], "little")
            elif kind in _LONG_CELLS:
                unit = self.unit(int.from_bytes(content[4:7], "little"))
                text = _error(content[8:9]) if kind in (3, 11) else ""
                if unit or text:
                    yield row, int.from_bytes(content[:4], "little"), unit, text

    def _text(self, attributes: bytes, value: bytes) -> str:
        # Returns the cell's error, or its text if it has superscripts, subscripts or strikethrough; otherwise "".
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
        # Yields sheet, row, column, unit and text.
        sheet, row, column, times, added, left = -1, 0, 0, 1, list[tuple[int, str, str]](), MAX_CELLS
        for end, name, attributes, content in _found(_ODS_PLACE, self._archive, "content.xml", _ODS_START):
            if name == b"table":
                sheet, row = sheet + (not end), 0
            elif name == b"table-row" and not end:
                column, times, added = 0, _repeated(attributes), []
            elif name != b"table-row" and not end:
                found, error = _ODS_UNIT.search(attributes), None
                if _ODS_ERROR_TYPE.search(attributes):
                    error = _ODS_ERROR.match(content)
                unit = "" if found is None else "%" if found[1] else found[2].decode("utf-8", "replace")
                text = error[1].decode("utf-8", "replace") if error is not None else self._read_ods_text(content)
                columns = _repeated(attributes)
                if unit or text:
                    added += [(column + each, unit, text) for each in range(min(columns, _MAX_COLUMNS))]
                column += columns
            if name == b"table-row" and (end or attributes.endswith(b"/")):
                for _ in range(times if added else 0):
                    left -= len(added)
                    if left < 0:
                        return
                    yield from ((sheet, row, *each) for each in added)
                    row += 1
                row += 0 if added else times
                added = []


class _ShownInXLS(_Shown):
    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._workbook, self._starts = b"", list[int]()
        with suppress(struct.error, LookupError, ValueError):  # the library reports damaged files
            self._workbook = _ole_stream(data, ("Workbook", "Book"))
            units, version, fonts, struck = dict(_UNITS), 0, 0, set[int]()
            for kind, content in self._records(0):
                if kind == _BOF:
                    (version,) = struct.unpack_from("<H", content)
                elif kind == 0x85:  # BoundSheet8
                    self._starts += struct.unpack_from("<I", content)
                elif kind == 0x41E:  # Format
                    number, length = struct.unpack_from("<HH" if version >= 0x600 else "<HB", content)
                    is_wide = version >= 0x600 and content[4] & 1
                    text = content[5 if version >= 0x600 else 3 :][: length << is_wide]
                    units[number] = _unit(text.decode("utf-16-le" if is_wide else "cp1252", "replace"))
                elif kind == 0xE0:  # XF
                    font, number = struct.unpack_from("<HH", content)
                    self._units.append(_STRUCK * (font in struck) + units.get(number, ""))
                elif kind == 0x31:  # Font
                    number = fonts + (fonts > 3)  # the number 4 is never used
                    struck |= {number} if struct.unpack_from("<HH", content)[1] & _FONT_STRUCK else set()
                    fonts += 1

    def _records(self, at: int) -> Iterator[tuple[int, bytes]]:
        # Yields the records of the part of the workbook that starts at `at`, without those of its charts.
        depth = 0
        while at + 4 <= len(self._workbook):
            kind, size = struct.unpack_from("<HH", self._workbook, at)
            depth += kind == _BOF
            if depth == 1:
                yield kind, self._workbook[at + 4 : at + 4 + size]
            depth -= kind == _EOF
            if depth < 1:
                return
            at += 4 + size

    def cells(self, sheet: int, name: str) -> Iterator[tuple[int, int, str, str]]:
        with suppress(struct.error, LookupError):
            for kind, content in self._records(self._starts[sheet]):
                if kind == 0xBD:  # MulRk: several numbers
                    row, column = struct.unpack_from("<HH", content)
                    styles = struct.iter_unpack("<HI", content[4 : 4 + (len(content) - 6) // 6 * 6])
                    for at, (style, _) in enumerate(styles, start=column):
                        if unit := self.unit(style):
                            yield row, at, unit, ""
                elif kind in (0xFD, 0x204):  # LabelSst, Label
                    row, column, style = struct.unpack_from("<HHH", content)
                    if unit := self.unit(style):
                        yield row, column, unit, ""
                elif kind in (0x06, 0x203, 0x205, 0x27E):  # Formula, Number, BoolErr, RK
                    row, column, style = struct.unpack_from("<HHH", content)
                    has_error = content[7] if kind == 0x205 else content[12:14] == b"\xff\xff" and content[6] == 2
                    text = _error(content[6:7] if kind == 0x205 else content[8:9]) if has_error else ""
                    if (unit := self.unit(style)) or text:
                        yield row, column, unit, text


def _ole_stream(data: bytes, names: Sequence[str]) -> bytes:
    # Returns a stream of a Compound File ([MS-CFB]). Raises struct.error or LookupError for damaged files.
    shift, short_shift = struct.unpack_from("<HH", data, 30)
    if shift not in (9, 12) or short_shift != 6:
        raise LookupError
    (directory,), (short_limit, short_table) = struct.unpack_from("<I", data, 48), struct.unpack_from("<II", data, 56)

    def sectors(numbers: Iterable[int]) -> bytes:
        return b"".join(data[(each + 1) << shift : (each + 2) << shift] for each in numbers)

    def chain(start: int, table: Sequence[int], unit: int = shift) -> Iterator[int]:
        for _ in range(len(data) >> unit):  # a damaged chain may be circular
            if start >= len(table):
                return
            yield start
            start = table[start]

    def numbers(content: bytes) -> Sequence[int]:
        return struct.unpack(f"<{len(content) // 4}I", content[: len(content) // 4 * 4])

    table_sectors, (further,) = list(numbers(data[76:512])), struct.unpack_from("<I", data, 68)
    for _ in range(len(data) >> shift):
        if (further + 1) << shift >= len(data):
            break
        *more, further = numbers(sectors([further]))
        table_sectors += more
    table_sectors = [each for each in table_sectors if (each + 1) << shift < len(data)]
    table = numbers(sectors(table_sectors[: len(data) >> shift]))
    entries = sectors(chain(directory, table))
    for at in range(0, len(entries) - 127, 128):
        (length,) = struct.unpack_from("<H", entries, at + 64)
        if entries[at : at + max(0, length - 2)].decode("utf-16-le", "replace") in names and length <= 64:
            start, size = struct.unpack_from("<II", entries, at + 116)
            if size >= short_limit:
                return sectors(chain(start, table))[:size]
            # Short streams are stored within the stream of the root entry.
            stream = sectors(chain(struct.unpack_from("<I", entries, 116)[0], table))
            places = chain(start, numbers(sectors(chain(short_table, table))), short_shift)
            return b"".join(stream[each << 6 : (each + 1) << 6] for each in places)[:size]
    raise LookupError


def _wide_text(content: bytes, at: int) -> tuple[str, int]:
    # Returns a string in an XLSB record and the offset of its end.
    start = at + 4
    end = start + 2 * int.from_bytes(content[at:start], "little")
    return content[start:end].decode("utf-16-le", "replace"), end


def _error(code: bytes) -> str:
    return _ERRORS.get(code[0], "#VALUE!") if code else ""


class _Groups(Generic[T]):
    # Groups items by their first number. The items must be in the order of these numbers.
    def __init__(self, items: Iterable[T]) -> None:
        self._groups = groupby(items, key=itemgetter(0))
        self._next: tuple[int, Iterator[T]] | None = (-1, iter(()))

    def get(self, number: int) -> Iterable[T]:
        while self._next is not None and self._next[0] < number:
            self._next = next(self._groups, None)
        return self._next[1] if self._next is not None and self._next[0] == number else ()

    def rest(self) -> Iterator[tuple[int, Iterator[T]]]:
        yield from [self._next] if self._next is not None else ()
        yield from self._groups


def _rich_texts(data: bytes) -> Iterator[str]:
    # Yields each text in spreadsheet XML with its superscripts or strikethrough; an empty string if it has neither.
    pieces, in_text = list[str](), False
    form: type[str] = str
    for event in outside(xml_events(iter((data,))), lambda each: each.name == "rPh"):  # omits phonetic text
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


class Chart:
    """A chart in Office Open XML, as a table with columns for the categories and for each series."""

    def __init__(self, events: Iterable[XMLEvent]) -> None:
        self._titles = list[str]()
        self._columns = list[dict[int, str]]()
        # Parts of the current series: element -> number of the value (0: the series' name) -> text.
        self._series: dict[str, dict[int, str]] = {}
        self._categories: dict[str, dict[int, str]] = {}  # of the last series
        self._opened = list[str]()
        self._place, self._form, self._value, self._is_1904 = 0, "", "", False
        read = {"start": self._start, "text": self._read_text, "end": self._end}
        for event in events:
            read[event.kind](event)

    def titles(self) -> str:
        return ", ".join(filter(None, self._titles))

    def rows(self) -> Iterator[list[str]]:
        places = {0}.union(*self._columns) if self._columns else ()
        return ([each.get(at, "") for each in self._columns] for at in sorted(places))

    def _start(self, event: XMLEvent) -> None:
        self._opened.append(event.name)
        match event.name:
            case "title":
                self._titles.append("")
            case "date1904":
                self._is_1904 = event.is_on
            case "ser":
                self._series = {each: {} for each in ("cat", "xVal", "tx", *_CHART_VALUES)}
            case "lvl" if 0 < len(self._series) < _MAX_CHART_COLUMNS:
                # In the file, outer levels of categories, such as years, follow the inner ones, such as quarters.
                self._opened[-1] = f"lvl {len(self._series)}"
                self._series = {self._opened[-1]: {}, **self._series}
            case "pt":
                self._place = 1 + event.number("idx")
            case "numCache" | "numLit":
                self._form = ""

    def _read_text(self, event: XMLEvent) -> None:  # an element's text may arrive in several events
        if "title" in self._opened and self._opened[-1] in ("t", "v"):
            self._titles[-1] += event.name
        elif self._opened[-1] == "formatCode":
            self._form += event.name
        elif self._opened[-1] == "v":
            self._value += event.name

    def _end(self, _: XMLEvent) -> None:
        ended, value, self._value = self._opened.pop(), self._value, ""
        if ended == "v" and (part := next((each for each in reversed(self._opened) if each in self._series), "")):
            if {"numCache", "numLit"} & {*self._opened}:
                value = format_number(value, self._form, self._is_1904)
            self._series[part].setdefault(self._place if part != "tx" else 0, value)
        elif ended == "ser" and self._series:
            series, self._series = self._series, {}
            name = series.pop("tx")
            values = [series.pop(each) for each in _CHART_VALUES]
            if any(series.values()) and series != self._categories:
                self._categories = series
                self._columns += filter(None, series.values())
            self._columns += [name | each for each in values if each]


def _repeated(attributes: bytes) -> int:
    found = _REPEATED.search(attributes)
    return int(found[1]) if found else 1


def format_number(text: str, form: str, is_1904: bool = False) -> str:
    """Return a stored number as its number format shows it: with a percent sign or currency, or as a date.

    is_1904: dates are counted from 1904.
    """
    letters = re.sub(r'"[^"]*"|[\\_*].|\[(?![hmsHMS]+\])[^][]*\]|General', "", form[:_MAX_FORMAT])
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
    # Returns what a format adds to positive numbers: the percent sign, text with a currency (such as "k€"), or a unit
    # after the number (such as "kg").
    sections, form = form[:_MAX_FORMAT], (_SECTION.match(form[:_MAX_FORMAT]) or [""])[0]
    if re.search(r"\[[<>=]", form):  # a condition: the unit depends on the number
        return ""
    marks = re.sub(r'"[^"]*"|[\\_*].|\[[^][]*\]', "", form)
    if "%" in marks:
        return "%"
    text, negative = (
        re.sub(r'"([^"]*)"|\\(.)|[_*].|\[(?:\$([^][-]*+))?[^][]*\]|General|[#0?.,()+-]', r"\1\2\3", each).strip()
        for each in (form, (_SECTION.match(sections, len(form) + 1) or [""])[0])
    )
    is_currency = re.search("[$€£¥₩₹₽]", text) or re.search(r"\[\$[^]-]", form)
    places = re.sub(
        r'"([^"]*)"|\\(.)|[_*].|\[[^][]*\]', lambda found: "x" if (found[1] or found[2] or "").strip() else "", form
    )
    is_unit = (
        re.search(r"[^\W\d_]|[°‰′″]", text)
        and not re.match(r"[\d.,]", text)  # not a unit: 0"000k" shows 5 as 5000k
        and negative.strip(_SIGNS) in ("", text.strip(_SIGNS))  # excludes pairs such as Cr and Dr
        # Digits after the text belong to the number, as in 1h30.
        and re.fullmatch(r"[\s(+-]*(?:[#0?][#0?.,\s]*+|General)[\sx()°‰′″+-]*", places)
    )
    is_scaled = re.search("[#0?],+(?![#0?,])", marks)  # divides by 1,000: 5,000 is shown as 5
    return text if (is_currency or is_unit) and not is_scaled and re.fullmatch(r"\S{1,9}", text) else ""


def _check_cells(archive: Archive, warnings: list[str]) -> None:
    # Programs that do not compute formulas either store no results, or store 0 and request that they be computed.
    missing = 0
    workbook = archive.read("xl/workbook.xml") if "xl/workbook.xml" in archive.names else b""
    wants_results = b'fullCalcOnLoad="1"' in workbook
    for name in sorted(archive.names):
        if re.fullmatch(r"xl/worksheets/[^/]+\.xml", name):
            missing += sum(
                # If a formula returns an empty string, no result is stored.
                wants_results or not (value or ((kind := _TYPE.search(attributes)) and kind[1] == b"str"))
                for attributes, value in _found(_FORMULA_CELL, archive, name)
            )
        elif re.fullmatch(r"xl/worksheets/[^/]+\.bin", name) and any(
            kind in _SHORT_CELLS for kind, _ in _binary_records(archive.read(name))
        ):
            raise UnreadableError("is an XLSB file of an unsupported variant; save it as XLSX")
    if missing:
        warnings.append(f"formulas whose results may be missing: {missing:,}; save the file in a spreadsheet program")


def _found(
    pattern: re.Pattern[bytes], archive: Archive, part: str, start: re.Pattern[bytes] = _CELL_START
) -> Iterator[tuple[bytes, ...]]:
    # Yields the matches of a pattern in a part, if it exists. Each match of the pattern begins with a match of `start`.
    rest = b""
    for piece in archive.pieces(part) if part in archive.names else ():
        text = rest + piece
        last = text.rfind(b"<")
        for found in start.finditer(text):  # the last match may continue in the next piece
            last = found.start()
        if last < 0 or len(text) - last > _MAX_CELL_BYTES:
            last = len(text)
        yield from pattern.findall(text[:last])
        rest = text[last:]
    yield from pattern.findall(rest)


def _binary_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    # Yields the records of a part of an XLSB file: a type and a size, in 7 bits per byte, and the content.
    at = 0
    while at < len(data):
        kind, size, number = data[at] & 0x7F, 0, 0
        if data[at] & 0x80 and at + 1 < len(data):
            at += 1
            kind |= (data[at] & 0x7F) << 7
        while number < 4 and (at := at + 1) < len(data):
            size |= (data[at] & 0x7F) << 7 * number
            number = number + 1 if data[at] & 0x80 else 4
        at += 1
        yield kind, data[at : at + size]
        at += size


def _cell(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise too_many_characters()
    return " ".join(text.split()).replace("|", "\\|")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        is_integer = value.is_integer() and abs(value) < MAX_INTEGER
        return str(int(value)) if is_integer else f"{value:.15g}"  # like spreadsheet programs: 0.1 + 0.2 is 0.3
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ", "seconds")
    if isinstance(value, timedelta):
        seconds = round(abs(value).total_seconds())
        return f"{'-' * (value < timedelta())}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if isinstance(value, str) and (found := _ODF_DURATION.fullmatch(value)):
        return f"{found[1]}{int(found[2])}:{found[3]:0>2}:{found[4]:0>2}"
    return str(value)
