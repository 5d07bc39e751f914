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
_DELIMITERS = "\t;|,"  # in order of preference; the comma is last, because it is common within cells
_DECLARED = re.compile(r"sep=([\t;|,])\r?\n")  # the first line of files for Excel
_QUOTED = re.compile(r'(?<![^\t;|,\r\n ])"(?:[^"]++|"")*+"')  # a cell, which may contain delimiters and line breaks
_SAMPLE = 1 << 16


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


def read_spreadsheet(file: BinaryIO) -> Iterator[str]:
    """Yield the visible sheets of an XLSX, XLSB, XLS or ODS file, each as a page. Raises UnreadableError."""
    import python_calamine

    if has_zip_signature(file):
        Archive(file)  # checks sizes before the library inflates any member
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


def _cell(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise too_many_characters()
    return " ".join(text.split()).replace("|", "\\|")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"{value:.15g}"  # as in spreadsheets, which show 0.1 + 0.2 as 0.3
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ", "seconds")
    return str(value)
