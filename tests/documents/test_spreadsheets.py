"""What the library for spreadsheets does not read: units, errors, superscripts, charts and text boxes."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from documents.made import ODF, A, archive, cell, compound_file, odt, relations, xlsx
from documents.test_charts import CHART, series
from documents.test_traps import read_here

from notso.documents import archives, tables
from notso.documents.tables import HEADER_EVERY, markdown_lines
from notso.documents.values import UnreadableError


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


def test_xlsx_sheet_is_read_as_a_table() -> None:
    cells = (
        f'<row r="1">{cell("A1", "Fruit")}{cell("B1", "Price")}</row>'
        f'<row r="2">{cell("A2", "pear")}<c r="B2"><v>0.30000000000000004</v></c></row>'
    )
    document = read_here(xlsx(cells), "a.xlsx")
    assert document.text == "## Prices\n\n| Fruit | Price |\n| --- | --- |\n| pear | 0.3 |"
    assert document.kind == "XLSX"


def test_integers_of_spreadsheets_keep_their_digits() -> None:
    values = {"1234567890123456": "1234567890123456", "1e15": "1000000000000000", "-3": "-3", "1e300": "1e+300"}
    cells = "".join(f'<row r="{at}"><c r="A{at}"><v>{each}</v></c></row>' for at, each in enumerate(values, start=1))
    rows = read_here(xlsx(cells), "a.xlsx").text.splitlines()[2:]
    assert [row.strip("| ") for row in rows if "---" not in row] == list(values.values())


def test_percentages_currencies_and_durations_of_xlsx_are_read() -> None:
    forms = ("0.0%", "#,##0.00 [$€-407]", '"$"0;[Red]("$"0)', "[h]:mm", '0 "%"', "[$-409]d-mmm-yy", '[$CHF-807]0;"-"')
    custom = "".join(f"<numFmt numFmtId='{200 + n}' formatCode='{each}'/>" for n, each in enumerate(forms))
    ids = [0, 9, *range(200, 200 + len(forms))]
    styles = (
        f"<styleSheet xmlns='http://schemas.openxmlformats.org/spreadsheetml/2006/main'><numFmts>{custom}</numFmts>"
        "<cellStyleXfs><xf numFmtId='10'/></cellStyleXfs><cellXfs>"
        + "".join(f"<xf numFmtId='{each}'/>" for each in ids)
        + "</cellXfs></styleSheet>"
    )
    row = "<row r='{0}'><c r='B{0}'><v>1</v></c><c r='AC{0}' s='{1}'><v>{2}</v></c></row>"
    values = (0.07, 0.07, 0.07, 12.5, -3, -1.0625, 7, 45000, 7)
    rows = "".join(row.format(2 * at + 3, at, value) for at, value in enumerate(values))
    text = f"<row r='99'>{cell('AC99', 'word')}</row>".replace("t=", "s='1' t=")
    lines = read_here(xlsx(rows + text, **{"xl/styles.xml": styles}), "a.xlsx").text.splitlines()[2:]
    shown = [each.strip("| ").split(" | ")[-1].strip("| ") for each in lines if "---" not in each]
    assert shown == ["0.07", "7%", "7%", "12.5 €", "-3 $", "-25:30:00", "7", "2023-03-15", "7 CHF", "word"]
    many = "<styleSheet><cellXfs>" + "<xf numFmtId='9'/>" * 6_000 + "</cellXfs></styleSheet>"
    percent = xlsx(row.format(1, 5_999, 0.07), **{"xl/styles.xml": many})
    assert read_here(percent, "a.xlsx").text.splitlines()[2].endswith(" 7% |")


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        *(('_-* #,##0.00\\ _€_-;_-* "-"\\ _€_-;_-@_-', ""), ('_("$"* #,##0.00_);_("$"* \\(#,##0.00\\)', "$")),
        *(('"R$"\\ #,##0.00', "R$"), ("[$R$-416] 0", "R$"), ('"HK$"#,##0', "HK$"), ("#,##0.00 \\€", "€")),
        *(('0.0 "k€"', "k€"), ('0.00 "€/m²"', "€/m²"), ('$0.0"M"', "$M"), ('$0.0,,"M"', ""), ('"from "$0', "")),
        *(("[<1]0%;0", ""), ("[Red]0.0%;0", "%"), ('0" %"', ""), ("[$-409]0.00", ""), ("[" * 999, "")),
        *(('0";€"', ";€"), ('General"€"', "€"), ("0.00E+00", ""), ('0" kg"', "kg")),
        *(
            ('_-* #,##0.00 "zł"_-', "zł"),
            ("0\\ \\d", "d"),
            ('General"°C"', "°C"),
            ('"Nr. "0', ""),
            ('"Yes";;"No"', ""),
        ),
        *(
            ('#,##0,"K"', ""),
            ("# ?/?", ""),
            ("00-00", ""),
            ("0‰", "‰"),
            ('d" days"', ""),
            ('0" of 9"', ""),
            ('[=1]0" day";0" days"', ""),
            ('0"h"00', ""),
            ('00"°"00"′"00"″"', ""),
            ('0"000k"', ""),
            ('0" Cr";0" Dr"', ""),
            ('0" kg";[Red]-0" kg"', "kg"),
            ('0" " "kg";;', "kg"),
            ('0" kg";\\-0" kg"', "kg"),
        ),
    ],
)
def test_units_of_number_formats_are_read(form: str, unit: str) -> None:
    assert tables._unit(form) == unit


def test_percentages_and_currencies_of_ods_are_read() -> None:
    value = '<table:table-cell office:value-type="{}" {}office:value="{}"{}/>'
    cells = (
        value.format("float", "", 0.5, ' table:number-columns-repeated="2"'),
        value.format("percentage", "", 0.07, ' table:number-columns-repeated="2"'),
        '<table:covered-table-cell table:number-columns-repeated="2"/>',
        value.format("currency", 'office:currency="EUR" ', 2.5, ""),
        '<table:table-cell office:value-type="string"><text:p>a &gt; b</text:p></table:table-cell>',
    )
    empty = '<table:table-row table:number-rows-repeated="{}"><table:table-cell/></table:table-row>'
    rows = empty.format(3) + f'<table:table-row table:number-rows-repeated="2">{"".join(cells)}</table:table-row>'
    last = f"<table:table-row/><table:table-row>{cells[0]}</table:table-row>{empty.format(999_999)}"
    sheet = f'<table:table table:name="{{}}">{rows}{last}</table:table>'
    made = odt(sheet.format("S") + sheet.format("T"), "spreadsheet", **{"META-INF/manifest.xml": "<manifest/>"})
    line = "| 0.5 | 0.5 | 7% | 7% |  |  | 2.5 EUR | a > b |"
    lines = [each for each in read_here(made, "a.ods").text.splitlines() if each and "---" not in each]
    assert lines == ["## S", line, line, "| 0.5 | 0.5 |", "## T", line, line, "| 0.5 | 0.5 |"]


def test_currencies_of_ods_are_searched_only_beside_the_type() -> None:
    """Otherwise, the time would be quadratic in the length of an attribute."""
    found = [tables._ODS_UNIT.search(b"value-type='currency'" + b" " * gap + b"currency='EUR'") for gap in (1, 1_000)]
    assert found[0] and found[0][2] == b"EUR" and found[1] is None


def test_durations_of_ods_are_read() -> None:
    value = '<table:table-cell office:value-type="time" office:time-value="{}"/>'
    row = "".join(map(value.format, ("PT25H30M00S", "-PT01H05M00.5S")))
    table = f'<table:table table:name="S"><table:table-row>{row}</table:table-row></table:table>'
    made = odt(table, "spreadsheet", **{"META-INF/manifest.xml": "<manifest/>"})
    assert read_here(made, "a.ods").text.splitlines()[2] == "| 25:30:00 | -1:05:00 |"


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ('<c r="A1"><v>1</v></c><c r="B1"><f>A1+1</f><v>2</v></c>', 0),
        ('<c r="A1"><v>1</v></c><c r="B1"><f>A1+1</f><v></v></c><c r="C1"><f>A1+2</f></c>', 2),  # openpyxl, exceljs
        ('<c r="A1"><v>1</v></c><c r="B1" t="str"><f>""</f><v></v></c>', 0),
        ('<c r="A1"><v>1</v></c><c r="B1"><f t="shared" si="0"/></c>', 1),
        ('<c r="A1"><v>1</v></c>' + '<c r="B1"><f>A1+1</f></c>' * 9_000, 9_000),
    ],
)
def test_formulas_without_results_are_reported(cells: str, missing: int) -> None:
    reported = f"formulas whose results may be missing: {missing:,}; save the file in a spreadsheet program"
    assert read_here(xlsx(f'<row r="1">{cells}</row>'), "a.xlsx").warnings == ((reported,) if missing else ())


def test_results_that_a_program_is_asked_to_compute_are_reported() -> None:
    """XlsxWriter stores 0 as the result of each formula."""
    workbook = archives.Archive(io.BytesIO(xlsx(""))).read("xl/workbook.xml").decode()
    workbook = workbook.replace("</workbook>", '<calcPr fullCalcOnLoad="1"/></workbook>')
    made = xlsx('<row r="1"><c r="A1"><f>1+1</f><v>0</v></c></row>', **{"xl/workbook.xml": workbook})
    assert "may be missing: 1" in read_here(made, "a.xlsx").warnings[0]


def test_ods_with_indented_xml_is_read() -> None:
    """SheetJS indents it, and the library does not accept this."""
    row = '<table:table-row table:number-rows-repeated="2">\n {}</table:table-row>\n'
    cells = (f"<table:table-cell><text:p>{each}</text:p></table:table-cell>\n" for each in ("a", "b"))
    table = f'<table:table table:name="S">\n{row.format("".join(cells))}</table:table>\n'
    assert read_here(odt(table, "spreadsheet"), "a.ods").text == "## S\n\n| a | b |\n| --- | --- |\n| a | b |"


def test_malformed_ods_is_refused_before_the_library_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library never ends if a tag is cut off."""
    monkeypatch.setattr("python_calamine.CalamineWorkbook", None)
    with pytest.raises(UnreadableError, match="its XML is malformed"):
        read_here(odt('<table:table table:name="S"></table:table', "spreadsheet"), "a.ods")


def test_xlsb_cells_that_would_be_skipped_are_refused() -> None:
    """SheetJS writes cells without a column, which the library skips. 0: a row; 17: a short cell."""
    for kind, sentence in ((17, "XLSB file of an unsupported variant"), (7, "damaged")):
        sheet = bytes([0x81, 0x01, 0, 0, 2, 1, 1, kind, 0x83, 0x00, 1, 1, 1])
        with pytest.raises(UnreadableError, match=sentence):
            read_here(xlsx("", **{"xl/worksheets/sheet1.bin": sheet, "xl/workbook.xml": "<x"}), "a.xlsb")


def test_the_header_of_a_long_table_is_repeated() -> None:
    lines = list(markdown_lines([["n"], *([str(n)] for n in range(HEADER_EVERY + 1))]))
    assert lines.count("| n |") == 2 and lines[-1] == f"| {HEADER_EVERY} |"
