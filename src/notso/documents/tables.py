"""Conversion of delimited text and spreadsheets to Markdown tables."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, time
from typing import Any, BinaryIO

from notso.documents.archives import Archive, has_zip_signature
from notso.documents.values import MAX_CHARACTERS, UnreadableError, too_many_characters

HEADER_EVERY = 40
"""Number of rows after which the header is repeated, so that every part of a long table has it."""

MAX_CELLS = 2_000_000
MAX_INTEGER = 1 << 53  # integers up to this one are exact floats
_DELIMITERS = "\t;|,"  # in order of preference; the comma is last, because it is common within cells
_DECLARED = re.compile(r"sep=([\t;|,])\r?\n")  # the first line of files for Excel
_QUOTED = re.compile(r'(?<![^\t;|,\r\n ])"(?:[^"]++|"")*+"')  # a cell, which may contain delimiters and line breaks
_SAMPLE = 1 << 16

# A cell with a formula in the XML of a sheet: attributes, and the stored result.
_FORMULA = re.compile(
    rb"<(?:\w+:)?c\b([^<>]*)>\s*<(?:\w+:)?f\b[^<>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*(<(?:\w+:)?v\b[^<>]*>[^<]+)?"
)
_TEXT_CELL = re.compile(rb"""\bt=["']str["']""")  # its formula may return an empty text, which is then not stored
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

    if has_zip_signature(file):
        archive = Archive(file)  # checks sizes before the library inflates any member
        _check_cells(archive, warnings)
    file.seek(0)
    try:
        workbook = python_calamine.CalamineWorkbook.from_filelike(file)
        for sheet in workbook.sheets_metadata:
            is_visible = sheet.visible is python_calamine.SheetVisibleEnum.Visible
            if is_visible and sheet.typ is python_calamine.SheetTypeEnum.WorkSheet:
                rows = workbook.get_sheet_by_name(sheet.name).iter_rows()
                lines = markdown_lines([_format_value(each) for each in row] for row in rows)
                yield "\n".join([f"## {_cell(sheet.name)}", "", *lines])
    except python_calamine.PasswordError:
        raise UnreadableError("is encrypted", "document_encrypted") from None
    except python_calamine.CalamineError as error:
        if "password" in str(error).casefold():
            raise UnreadableError("is encrypted", "document_encrypted") from None
        raise UnreadableError("is damaged: its sheets cannot be read", "document_damaged") from None


def _check_cells(archive: Archive, warnings: list[str]) -> None:
    # Programs that do not compute formulas store no results, or 0 and the request to compute them.
    missing = 0
    workbook = archive.read("xl/workbook.xml") if "xl/workbook.xml" in archive.names else b""
    wants_results = b'fullCalcOnLoad="1"' in workbook
    for name in sorted(archive.names):
        if re.fullmatch(r"xl/worksheets/[^/]+\.xml", name):
            missing += sum(
                wants_results or not (result or _TEXT_CELL.search(attributes))
                for attributes, result in _formulas(archive.pieces(name))
            )
        elif re.fullmatch(r"xl/worksheets/[^/]+\.bin", name) and _has_short_cells(archive.read(name)):
            raise UnreadableError("is an XLSB file of an unsupported variant; save it as XLSX")
    if missing:
        warnings.append(f"formulas whose results may be missing: {missing:,}; save the file in a spreadsheet program")


def _formulas(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    rest = b""
    for piece in pieces:
        text = rest + piece
        last = text.rfind(b"<", 0, max(text.rfind(b"<c "), text.rfind(b":c ")) + 1)  # may continue in the next piece
        if last < 0 or len(text) - last > _MAX_CELL_BYTES:
            last = len(text)
        yield from _FORMULA.findall(text[:last])
        rest = text[last:]
    yield from _FORMULA.findall(rest)


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
    return str(value)
