"""What the library for spreadsheets does not read: units, errors, superscripts, charts and text boxes."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from documents.made import ODF, A, archive, cell, compound_file, odt, relations, xlsx
from documents.test_kinds import CHART, series
from documents.test_traps import read_here

from notso.documents import archives, tables


def test_errors_and_units_of_xlsb_are_read() -> None:
    def record(kind: int, content: bytes = b"") -> bytes:
        return bytes([kind & 127 | 128, kind >> 7] if kind > 127 else [kind]) + bytes([len(content)]) + content

    def wide(text: str) -> bytes:
        return struct.pack("<I", len(text)) + text.encode("utf-16-le")

    def number(column: int, style: int, value: float) -> bytes:
        return record(5, struct.pack("<IId", column, style, value))

    rows = (
        number(0, 0, 0.5) + number(1, 1, 0.5) + number(2, 2, 5),
        b"".join(record(3, struct.pack("<IIB", column, 0, code)) for column, code in enumerate((7, 42, 23))),
        record(11, struct.pack("<IIBHI", 1, 1, 36, 0, 0)),
    )
    sheet = record(148, struct.pack("<4I", 0, len(rows) - 1, 0, 2)) + record(145)
    for at, row in enumerate(rows):
        sheet += record(0, struct.pack("<II9x", at, 0)) + row
    styles = record(44, struct.pack("<H", 200) + wide('0 "€"')) + record(43, bytes(21))
    styles += record(43, struct.pack("<HH17x", 200, 8)) + record(617, bytes(4))
    styles += b"".join(record(47, struct.pack("<HHH10x", 0, form, form == 9)) for form in (0, 9, 200)) + record(618)
    made = archive(
        {
            "[Content_Types].xml": "<Types/>",
            "xl/workbook.bin": record(143)
            + record(156, struct.pack("<II", 0, 1) + wide("r1") + wide("S"))
            + record(144)
            + record(157),
            "xl/_rels/workbook.bin.rels": relations({"r1": ("worksheet", "worksheets/sheet1.bin")}),
            "xl/worksheets/sheet1.bin": sheet + record(146),
            "xl/styles.bin": styles,
        }
    )
    lines = read_here(made, "a.xlsb").text.splitlines()[2:]
    assert lines[:1] + lines[2:] == ["| 0.5 | ~~50%~~ | 5 € |", "| #DIV/0! | #N/A | #REF! |", "|  | ~~#NUM!~~ |"]


@pytest.mark.parametrize("form", ["", "short", "old"])
def test_errors_and_units_of_xls_are_read(form: str) -> None:
    def record(kind: int, *values: Any, content: bytes = b"") -> bytes:
        packed = b"".join(struct.pack("<H", each) if isinstance(each, int) else each for each in values) + content
        return struct.pack("<HH", kind, len(packed)) + packed

    def workbook(start: int) -> bytes:
        name, euro = b"S", '0 "€"'
        version = 0x500 if form == "old" else 0x600
        shown = struct.pack("<B", len(euro)) + euro.encode("cp1252")
        if form != "old":
            name, shown = b"\0S", struct.pack("<HB", len(euro), 1) + euro.encode("utf-16-le")
        made = record(0x809, version, 5, 0, 0) + record(0x41E, 200, content=shown)
        made += b"".join(record(0x31, 200, 8 * (each == 4), content=bytes(12)) for each in range(5))
        made += b"".join(record(0xE0, 5 * (each == 9), each, content=bytes(16)) for each in (0, 9, 200))
        return made + record(0x85, struct.pack("<IHB", start, 0, 1), content=name) + record(0x0A)

    def formula(column: int, result: bytes) -> bytes:
        return record(0x06, 2, column, 0, result, 0, 0, 0, 3, content=b"\x1e\0\0")

    version = 0x500 if form == "old" else 0x600
    chart = record(0x809, version, 0x20, 0, 0) + record(0x205, 0, 0, 0, b"\x07\x01") + record(0x0A)
    sheet = record(0x809, version, 0x10, 0, 0) + chart + record(0x203, 0, 0, 0, struct.pack("<d", 0.5))
    sheet += record(0xBD, 0, 1, 1, struct.pack("<I", (50 << 2) | 3), 2, struct.pack("<I", (5 << 2) | 2), 2)
    sheet += b"".join(
        record(0x205, 1, column, 0, bytes([code, 1])) for column, code in enumerate((7, 42, 23))
    ) + formula(0, b"\x02\0\x0f\0\0\0\xff\xff")
    sheet += formula(1, struct.pack("<d", 3)) + record(0x205, 2, 2, 0, b"\x01\0") + record(0x0A)
    book = workbook(len(workbook(0))) + sheet
    made = compound_file("Book" if form == "old" else "Workbook", book if form == "short" else book.ljust(4096, b"\0"))
    lines = read_here(made, "a.xls").text.splitlines()[2:]
    assert lines[:1] + lines[2:] == ["| 0.5 | ~~50%~~ | 5 € |", "| #DIV/0! | #N/A | #REF! |", "| #VALUE! | 3 | TRUE |"]
    for at in range(0, len(made), 7):  # damage is reported by the library
        damaged = made[:at] + bytes(each ^ 0xFF for each in made[at : at + 4]) + made[at + 4 :]
        tables._ShownInXLS(damaged).cells(0, "S")
        list(tables._ShownInXLS(damaged).cells(0, "S"))
    further = struct.pack("<I", len(made) // 512 - 1)  # a sector of which two bytes are left
    assert not list(tables._ShownInXLS(made[:68] + further + made[72:] + b"\0\0").cells(0, "S"))


def test_cells_with_struck_text_are_marked() -> None:
    fonts = (
        "<fonts><font/><font><strike/></font><font><strike val='0'/></font></fonts><dxfs><font><strike/></font></dxfs>"
    )
    xfs = "<cellXfs><xf/><xf fontId='1'/><xf fontId='1' numFmtId='9'/><xf fontId='2'/><xf fontId='3'/></cellXfs>"
    cells = "".join(f"<c r='{place}1' s='{at}'><v>0.5</v></c>" for at, place in enumerate("ABCDE"))
    cells += cell("F1", "old").replace("t=", "s='1' t=") + "<c r='G1' s='1'/><c r='H1'><v>1</v></c>"
    made = xlsx(f"<row r='1'>{cells}</row>", **{"xl/styles.xml": f"<styleSheet>{fonts}{xfs}</styleSheet>"})
    assert read_here(made, "a.xlsx").text.splitlines()[2] == "| 0.5 | ~~0.5~~ | ~~50%~~ | 0.5 | 0.5 | ~~old~~ |  | 1 |"


def test_charts_and_text_boxes_of_xlsx_are_read() -> None:
    plotted = f"<c:x {CHART}><c:title><a:t xmlns:a='a'>Sales</a:t></c:title>{series('S', '', 10, 20)}</c:x>"
    box = "<xdr:sp xmlns:xdr='x'><xdr:txBody><a:p><a:r><a:t>42 tons</a:t></a:r></a:p></xdr:txBody></xdr:sp>"
    made = xlsx(
        f'<row r="1">{cell("A1", "a")}</row>',
        **{
            "xl/worksheets/_rels/sheet1.xml.rels": relations({"r1": ("drawing", "../drawings/drawing1.xml")}),
            "xl/drawings/drawing1.xml": f"<x {A}>{box}<c:chart {CHART} r:id='r2'/></x>",
            "xl/drawings/_rels/drawing1.xml.rels": relations({"r2": ("chart", "/xl/charts/chart1.xml")}),
            "xl/charts/chart1.xml": plotted,
        },
    )
    shown = "## Prices\n\n| a |\n| --- |\n\n42 tons\n\nChart: Sales\n\n| S |\n| --- |\n| 10 |\n| 20 |"
    assert read_here(made, "a.xlsx").text == shown


def test_superscripts_and_errors_of_ods_are_read() -> None:
    styles = "".join(
        f'<style:style style:name="{name}"><style:text-properties style:text-position="{at} 58%"/></style:style>'
        for name, at in (("T1", "super"), ("T2", "sub"))
    )
    text = '<table:table-cell office:value-type="string"{}><text:p>{}</text:p></table:table-cell>'
    note = '<office:annotation><text:p>x<text:span text:style-name="T1">9</text:span></text:p></office:annotation>'
    cells = (
        text.format("", '10<text:span text:style-name="T1">6</text:span> &gt;<text:s/>5'),
        text.format("", f'{"a" * 70_000}</text:p>{note}<text:p>101<text:span text:style-name="T2">2</text:span>'),
        text.format("", f"a</text:p>{note}<text:p>b"),
        text.format(' office:string-value="" calcext:value-type="error"', "#DIV/0!"),
        text.format(' calcext:value-type="error"', "Err:508"),
    )
    made = odt(
        "",
        "spreadsheet",
        **{
            "META-INF/manifest.xml": "<manifest/>",
            "content.xml": f"<office:document-content {ODF} xmlns:style='s' xmlns:calcext='c'>"
            f"<office:automatic-styles>{styles}</office:automatic-styles><office:body><office:spreadsheet>"
            f'<table:table table:name="S"><table:table-row>{"".join(cells)}</table:table-row></table:table>'
            "</office:spreadsheet></office:body></office:document-content>",
        },
    )
    line = f"| 10⁶ > 5 | {'a' * 70_000} 101_2 | a b | #DIV/0! | Err:508 |"
    assert read_here(made, "a.ods").text.splitlines()[2] == line


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\r\n"])
def test_units_of_cells_at_the_ends_of_pieces_are_read(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    styles = "<styleSheet><cellXfs><xf/><xf numFmtId='9'/></cellXfs></styleSheet>"
    row = f"<x:row r='1'><x:c{space}r='A1'{space}s='1'><x:v>0.5</x:v></x:c></x:row>"
    sheet = f"<x:worksheet xmlns:x='http://schemas.openxmlformats.org/spreadsheetml/2006/main'><x:sheetData>{row * 2}"
    made = xlsx("", **{"xl/styles.xml": styles, "xl/worksheets/sheet1.xml": f"{sheet}</x:sheetData></x:worksheet>"})
    for size in range(1, 90):
        monkeypatch.setattr(archives, "_PIECE", size)
        shown = tables._ShownInArchive(archives.Archive(io.BytesIO(made)), lambda _: "")
        assert list(shown.cells(0, "Prices")) == [(0, 0, "%", "")] * 2, size
