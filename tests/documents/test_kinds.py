"""What is read from each kind of document: text, pages, tables, titles and warnings."""

from __future__ import annotations

import base64
import io
import json

import pytest
from documents.made import (
    ODF,
    RELATIONSHIPS,
    A,
    W,
    cell,
    chrome_pdf,
    docx,
    epub,
    form_pdf,
    odt,
    paragraph,
    pdf_of,
    pptx,
    relations,
    stream,
    text_operators,
    text_pdf,
    xlsx,
)
from documents.test_traps import read_here

from notso.documents import archives, plain, tables
from notso.documents.formulas import MAX_DEPTH
from notso.documents.pdf import _PageText, join_hyphenated, remove_margins
from notso.documents.tables import HEADER_EVERY, format_number, markdown_lines
from notso.documents.values import UnreadableError

BREAK = "<w:p><w:r><w:br w:type='page'/></w:r></w:p>"
WORDS = ["heron", "stork", "crane", "egret"]
GRID = "<w:tbl>{}</w:tbl>"


def row(*texts: str) -> str:
    return "<w:tr>" + "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in texts) + "</w:tr>"


def test_docx_headings_lists_tables_and_pages_are_read() -> None:
    listed = (
        "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>first</w:t><w:tab/><w:t>tab</w:t><w:cr/><w:t>end</w:t></w:r></w:p>"
    )
    table = GRID.format(row("Name", "Price") + row("pear | plum", "2"))
    core = '<c xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Prices\n2025</dc:title></c>'
    notes = (
        f'<w:footnotes xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">{paragraph("A note.")}'
    )
    document = read_here(
        docx(
            paragraph("Report", "Heading1")
            + paragraph("Parts", "Heading2")
            + listed
            + table
            + BREAK
            + paragraph("end"),
            **{"docProps/core.xml": core, "word/footnotes.xml": f"{notes}</w:footnotes>"},
        ),
        "a.docx",
    )
    assert document.text == (
        "# Report\n\n## Parts\n\n- first\ttab\nend\n\n| Name | Price |\n| --- | --- |\n| pear \\| plum | 2 |\n\nend\n\n"
        "## Footnotes\n\nA note."
    )
    assert [document.text[at : at + 4] for at in document.pages] == ["# Re", "end\n", "## F"]
    assert (document.kind, document.title, document.warnings) == ("DOCX", "Prices 2025", ())


def test_cells_of_docx_stay_below_their_columns() -> None:
    wide = f'<w:tc><w:tcPr><w:gridSpan w:val="2"/></w:tcPr>{paragraph("wide")}</w:tc><w:tc>{paragraph("C")}</w:tc>'
    document = read_here(docx(GRID.format(f"<w:tr>{wide}</w:tr>" + row("a", "b", "c"))), "a.docx")
    assert document.text == "| wide |  | C |\n| --- | --- | --- |\n| a | b | c |"


def test_docx_table_within_a_cell_is_one_line_of_it() -> None:
    inner = GRID.format(row("S", "M") + row("1", ""))
    outer = GRID.format(row("A", "B") + f"<w:tr><w:tc>{paragraph('s')}{inner}{paragraph('t')}</w:tc></w:tr>")
    assert read_here(docx(outer), "a.docx").text == "| A | B |\n| --- | --- |\n| s S, M; 1 t |"


def test_docx_paragraph_that_fills_a_page_is_split_between_pages() -> None:
    parts = "<w:lastRenderedPageBreak/>".join(f"<w:t>{word}</w:t>" for word in WORDS)
    document = read_here(docx(f"<w:p><w:r>{parts}</w:r></w:p>" + BREAK + paragraph("end")), "a.docx")
    assert document.text == "heron\n\nstork\n\ncrane\n\negret\n\nend" and len(document.pages) == 5


def test_headings_of_docx_are_found_in_every_language() -> None:
    styles = f'<w:styles {W}><w:style w:styleId="Kop2"><w:name w:val="heading 2"/></w:style></w:styles>'
    document = read_here(docx(paragraph("Deel", "Kop2"), **{"word/styles.xml": styles}), "a.docx")
    assert document.text == "## Deel"


def test_paragraphs_of_docx_that_leave_a_list_have_no_bullet() -> None:
    number = "<w:pPr><w:numPr><w:numId w:val='{}'/></w:numPr></w:pPr><w:r><w:t>{}</w:t></w:r>"
    body = "".join(f"<w:p>{number.format(*each)}</w:p>" for each in ((2, "in"), (0, "out")))
    assert read_here(docx(body), "a.docx").text == "- in\n\nout"


def test_choices_in_forms_and_symbols_of_docx_are_read() -> None:
    box = "<w:r><w:fldChar w:fldCharType='begin'><w:ffData><w:checkBox>{}</w:checkBox></w:ffData></w:fldChar></w:r>"
    states = ("", '<w:default w:val="1"/>', '<w:default w:val="1"/><w:checked w:val="0"/>', "<w:checked/>")
    boxes = "".join(box.format(f"<w:sizeAuto/>{state}") for state in states)
    fonts = (("Wingdings", "F0FE f0a8 FC"), ("Symbol", "F06D F0A3 F071 F0B0"), ("Other", "F041 x F0FE"))
    signs = "".join(
        f'<w:r><w:sym w:font="{font}" w:char="{char}"/></w:r>' for font, codes in fonts for char in codes.split()
    )
    assert read_here(docx(f"<w:p>{boxes}{signs}</w:p>"), "a.docx").text == "☐☒☐☒☑☐✓μ≤θ°"


def test_table_headings_of_libreoffice_are_not_headings() -> None:
    styles = f'<w:styles {W}><w:style w:styleId="T"><w:name w:val="Table Heading"/></w:style></w:styles>'
    table = GRID.format(f"<w:tr><w:tc>{paragraph('Name', 'T')}</w:tc></w:tr>")
    assert read_here(docx(table, **{"word/styles.xml": styles}), "a.docx").text == "| Name |\n| --- |"


def test_damaged_parts_without_text_do_not_prevent_reading() -> None:
    for name in ("word/styles.xml", "docProps/core.xml"):
        document = read_here(docx(paragraph("Part", "Heading1"), **{name: "<x><y></x>"}), "a.docx")
        assert (document.text, document.title) == ("# Part", "")


def test_pptx_slides_are_read_in_order_with_notes() -> None:
    title = '<p:sp><p:nvPr><p:ph type="title"/></p:nvPr><a:p><a:r><a:t>{}</a:t></a:r></a:p></p:sp>'
    note = '<n xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"><a:p><a:t>say this</a:t></a:p></n>'
    document = read_here(
        pptx(
            [title.format("One"), title.format("Two")],
            **{
                "ppt/slides/_rels/slide2.xml.rels": relations({"rId1": ("notesSlide", "../notesSlides/n.xml")}),
                "ppt/notesSlides/n.xml": note,
            },
        ),
        "a.pptx",
    )
    assert document.text == "# One\n\n# Two\n\nNotes: say this" and len(document.pages) == 2


def test_text_of_smartart_is_read() -> None:
    points = "".join(f"<d:pt><d:t><a:p><a:r><a:t>{each}</a:t></a:r></a:p></d:t></d:pt>" for each in ("Plan", "Do"))
    related = {"rId1": ("diagramData", "../diagrams/data1.xml")}
    document = read_here(
        pptx(
            ["<a:p><a:r><a:t>Steps</a:t></a:r></a:p>"],
            **{
                "ppt/slides/_rels/slide1.xml.rels": relations(related),
                "ppt/diagrams/data1.xml": f"<d:dataModel {A} xmlns:d='d'>{points}</d:dataModel>",
            },
        ),
        "a.pptx",
    )
    assert document.text == "Steps\n\nPlan\n\nDo"


def test_files_inserted_in_docx_are_read_in_their_place() -> None:
    page = "<html><p>über</p></html>"
    inner = docx("<w:altChunk xmlns:r='r' r:id='r1'/>" + paragraph("word"))
    archive = f"MIME-Version: 1.0\nContent-Type: text/html; charset=utf-8\n\n{page}"
    files = {"r1": page, "r2": archive, "r3": "plain", "r4": inner, "r5": "{\\rtf1 a}", "r6": "PK"}
    files["r8"] = "<p>ü</p>".encode("utf-16")
    members = {f"word/{name}": content for name, content in files.items()}
    members["word/_rels/document.xml.rels"] = relations({each: ("aFChunk", each) for each in files})
    chunks = "".join(f"<w:altChunk xmlns:r='{RELATIONSHIPS}' r:id='{each}'/>" for each in (*files, "r7"))
    document = read_here(docx(paragraph("a") + chunks + paragraph("b"), **members), "a.docx")
    assert document.text == "a\n\nüber\n\nüber\n\nplain\n\nword\n\nü\n\nb"
    assert document.warnings == ("inserted files that cannot be read were left out",)


def test_diagrams_of_docx_and_xlsx_are_read() -> None:
    shown = "".join(f"<d:pt><d:t><a:p><a:r><a:t>{each}</a:t></a:r></a:p></d:t></d:pt>" for each in ("Plan", "Act"))
    data = f"<d:dataModel {A} xmlns:d='d'><d:ptLst>{shown}</d:ptLst></d:dataModel>"
    related = relations({"r1": ("diagramData", "/d/data1.xml"), "r2": ("diagramLayout", "/d/x")})
    drawn = "<d:relIds xmlns:d='d' xmlns:r='r' r:dm='{}'/>"
    body = f"<w:p><w:r><w:t>a</w:t>{drawn.format('r1')}{drawn.format('r9')}</w:r></w:p>{paragraph('b')}"
    made = docx(body, **{"word/_rels/document.xml.rels": related, "d/data1.xml": data})
    assert read_here(made, "a.docx").text == "a\n\nPlan\n\nAct\n\nb"
    made = xlsx(
        f'<row r="1">{cell("A1", "a")}</row>',
        **{
            "xl/worksheets/_rels/sheet1.xml.rels": relations({"r1": ("drawing", "../drawings/drawing1.xml")}),
            "xl/drawings/drawing1.xml": f"<x>{drawn.format('r1')}</x>",
            "xl/drawings/_rels/drawing1.xml.rels": related,
            "d/data1.xml": data,
        },
    )
    assert read_here(made, "a.xlsx").text.endswith("| a |\n| --- |\n\nPlan\n\nAct")


def test_titles_and_values_of_charts_are_read() -> None:
    def cache(part: str, kind: str, form: str, *values: str) -> str:
        points = "".join(f'<c:pt idx="{at}"><c:v>{each}</c:v></c:pt>' for at, each in enumerate(values) if each)
        return f"<c:{part}><c:{kind}><c:formatCode>{form}</c:formatCode>{points}</c:{kind}></c:{part}>"

    def title(text: str) -> str:
        return f"<c:title><c:tx><c:rich><a:p><a:r><a:t>{text}</a:t></a:r></a:p></c:rich></c:tx></c:title>"

    quarters = cache("cat", "strCache", "", "Q1", "007", "Q3")
    days = cache("xVal", "numLit", "yyyy\\-mm\\-dd", "45000")
    series = (
        cache("tx", "strCache", "", "North | East") + quarters + cache("val", "numCache", "General", "1.10", "", "3"),
        cache("tx", "strCache", "", "Share") + quarters + cache("val", "numCache", "0%", "0.07", "", ""),
        days + cache("yVal", "numCache", "General", "1e3"),
    )
    plotted = "".join(f"<c:ser>{each}</c:ser>" for each in series)
    chart = f"<c:chartSpace xmlns:c='c' {A}><c:chart>{title('Sales')}{plotted}{title('Year')}</c:chart></c:chartSpace>"
    shown = (
        "Chart: Sales, Year\n\n|  | North \\| East | Share |  |  |\n| --- | --- | --- |\n"
        "| Q1 | 1.1 | 7% | 2023-03-15 | 1000 |\n| 007 |\n| Q3 | 3 |"
    ).replace("| Share |  |  |", "| Share |")
    drawn = f"<c:chart xmlns:c='c' xmlns:r='{RELATIONSHIPS}' r:id='rId7'/>"
    related = {"rId7": ("chart", "/charts/chart1.xml")}
    word = docx(
        f"<w:p><w:r><w:t>a</w:t><w:drawing>{drawn}</w:drawing><w:t>b</w:t></w:r></w:p>",
        **{"word/_rels/document.xml.rels": relations(related), "charts/chart1.xml": chart},
    )
    assert read_here(word, "a.docx").text == f"ab\n\n{shown}"
    slide = pptx([drawn], **{"ppt/slides/_rels/slide1.xml.rels": relations(related), "charts/chart1.xml": chart})
    assert read_here(slide, "a.pptx").text == shown
    row_of_chart = GRID.format(f"<w:tr><w:tc><w:p><w:r>{drawn}</w:r></w:p></w:tc></w:tr>")
    damaged = {"word/_rels/document.xml.rels": relations({"rId7": ("chart", "../../x")}), "charts/chart1.xml": chart}
    assert read_here(docx(row_of_chart + paragraph("a"), **damaged), "a.docx").text == "| Chart |\n| --- |\n\na"


CHART = f"xmlns:c='c' xmlns:r='{RELATIONSHIPS}'"


def chart_of(*parts: str) -> str:
    """Read a DOCX file with a chart; return the chart's lines below its titles."""
    related = relations({"r1": ("chart", "chart1.xml")})
    members = {"word/_rels/document.xml.rels": related, "word/chart1.xml": f"<c:x {CHART}>{''.join(parts)}</c:x>"}
    return read_here(docx(f"<w:p><c:chart {CHART} r:id='r1'/></w:p>", **members), "a.docx").text.partition("\n\n")[2]


def series(name: str, categories: str, *values: object, form: str = "General") -> str:
    return (
        f"<c:ser><c:tx><c:v>{name}</c:v></c:tx><c:cat>{categories}</c:cat>"
        f"<c:val><c:numCache><c:formatCode>{form}</c:formatCode>{points(*values)}</c:numCache></c:val></c:ser>"
    )


def points(*values: object) -> str:
    return "".join(f'<c:pt idx="{at}"><c:v>{each}</c:v></c:pt>' for at, each in enumerate(values) if each != "")


def test_values_of_large_charts_are_not_cut() -> None:
    # The XML is parsed in pieces of 64 KiB. With these comments, the first piece ends in a value.
    numbers = range(123_456_789_000, 123_456_790_500)
    for padding in range(0, 60, 4):
        rows = chart_of(f"<!--{'x' * padding}-->", series("S", "", *numbers)).splitlines()[2:]
        assert [row for row in rows if row.startswith("| 12")] == [f"| {each} |" for each in numbers]


def test_categories_of_charts_keep_their_levels_and_order() -> None:
    levels = f"<c:lvl>{points('Q1', 'Q2', 'Q1')}</c:lvl><c:lvl>{points('2023', '', '2024')}</c:lvl>"
    shown = "|  |  | S |\n| --- | --- | --- |\n| 2023 | Q1 | 1 |\n|  | Q2 | 2 |\n| 2024 | Q1 | 3 |"
    assert chart_of(series("S", f"<c:multiLvlStrCache>{levels}</c:multiLvlStrCache>", 1, 2, 3)) == shown
    a, b = (f"<c:strCache>{points(each)}</c:strCache>" for each in "ab")
    shown = "|  | s | t |  | u |  | v |\n| --- | --- | --- | --- | --- | --- | --- |\n| a | 1 | 2 | b | 3 | a | 4 |"
    assert chart_of(series("s", a, 1), series("t", a, 2), series("u", b, 3), series("v", a, 4)) == shown
    nested = "<c:ser><c:lvl/><c:ser></c:ser><c:lvl/></c:ser>"
    assert chart_of(nested, "<c:lvl/>", nested, series("s", "", 1)) == "| s |\n| --- |\n| 1 |"


def test_dates_of_charts_have_the_epoch_of_the_file_and_times() -> None:
    def dates(form: str, epoch: str = "") -> str:
        cache = f"<c:numCache><c:formatCode>{form}</c:formatCode>{points(45000, 45000.25)}</c:numCache>"
        return " ".join(row.split("|")[1].strip() for row in chart_of(epoch, series("s", cache, 1, 2)).split("\n")[2:])

    assert dates("m/d/yyyy") == "2023-03-15 2023-03-15"
    assert dates("yyyy\\-mm\\-dd\\ hh:mm") == "2023-03-15 2023-03-15 06:00:00"
    assert dates("m/d/yyyy", '<c:date1904 val="1"/>') == "2027-03-16 2027-03-16"
    assert dates("m/d/yyyy", '<c:date1904 val="0"/>') == "2023-03-15 2023-03-15"


def test_animations_of_charts_are_not_taken_for_charts() -> None:
    text, animation = "<a:p><a:r><a:t>a</a:t></a:r></a:p>", "<p:graphicEl><a:chart seriesIdx='-3'/></p:graphicEl>"
    assert read_here(pptx([text + animation]), "a.pptx").text == "a"


def test_sections_of_pptx_are_not_taken_for_slides() -> None:
    slides = '<p:sldIdLst><p:sldId id="256" r:id="rId1"/></p:sldIdLst>'
    sections = '<p:extLst><s:sldIdLst xmlns:s="sections"><s:sldId id="256"/></s:sldIdLst></p:extLst>'
    presentation = f"<p:presentation {A}>{slides}{sections}</p:presentation>"
    made = pptx(["<a:p><a:r><a:t>One</a:t></a:r></a:p>"], **{"ppt/presentation.xml": presentation})
    assert read_here(made, "a.pptx").text == "One"


@pytest.mark.parametrize("name", ["a.docx", "a.pptx"])
def test_content_with_a_fallback_is_read_once(name: str) -> None:
    branch = paragraph("sum") if name == "a.docx" else "<p:sp><a:p><a:r><a:t>sum</a:t></a:r></a:p></p:sp>"
    content = (
        '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
        f'<mc:Choice Requires="a14">{branch}</mc:Choice><mc:Fallback>{branch}</mc:Fallback></mc:AlternateContent>'
    )
    assert read_here(docx(content) if name == "a.docx" else pptx([content]), name).text == "sum"


def test_odt_headings_and_tables_are_read_without_deletions() -> None:
    table = (
        "<table:table><table:table-row><table:table-cell><text:p>A</text:p></table:table-cell><table:table-cell>"
        "<text:p>B</text:p></table:table-cell></table:table-row><table:table-row><table:table-cell "
        'table:number-columns-repeated="2"><text:p>1</text:p></table:table-cell></table:table-row></table:table>'
    )
    removed = "<text:tracked-changes><text:p>gone</text:p></text:tracked-changes>"
    document = read_here(
        odt(f'{removed}<text:h text:outline-level="2">Head</text:h><text:p>a<text:s text:c="2"/>b</text:p>{table}'),
        "a.odt",
    )
    assert document.text.startswith("## Head\n\na  b\n\n| A | B |\n| --- | --- |\n|")
    assert "gone" not in document.text


def test_texts_that_are_names_of_elements_are_read() -> None:
    names = ("frame", "body", "page", "title", "section", "table", "document", "chart", "t", "Fallback", "sectPr")
    shown = "\n\n".join(names)
    assert read_here(odt("".join(f"<text:p>{each}</text:p>" for each in names)), "a.odt").text == shown
    assert read_here(docx("".join(map(paragraph, names))), "a.docx").text == shown
    slide = "".join(f"<a:p><a:r><a:t>{each}</a:t></a:r></a:p>" for each in names)
    assert read_here(pptx([slide]), "a.pptx").text == shown
    book = "".join(f"<p>{each}</p>" for each in names)
    assert read_here(f"<FictionBook><body>{book}</body></FictionBook>".encode(), "a.fb2").text == shown


def test_slides_of_odp_are_read_with_titles_notes_and_charts() -> None:
    box = "<draw:frame {}><draw:text-box><text:p>{}</text:p></draw:text-box></draw:frame>"
    title, text = box.format("presentation:class='title'", "One"), box.format("", "text")
    drawn = '<draw:frame><draw:object xlink:href="./Object 1"/></draw:frame>'
    one = f"{title}{text}{drawn}<presentation:notes>{box.format('', 'say this')}</presentation:notes>"
    pages = "".join(f"<draw:page>{each}</draw:page>" for each in (one, box.format("", "Two")))
    slides = f"<presentation:footer-decl>x</presentation:footer-decl>{pages}"
    cells = "".join(f"<table:table-cell><text:p>{each}</text:p></table:table-cell>" for each in ("{}", "{}"))
    row = "<table:table-row>{}</table:table-row>"
    table = f"<table:table>{row.format(cells.format('', 'Rain'))}{row.format(cells.format('May', '7'))}</table:table>"
    spaces = "xmlns:draw='d' xmlns:presentation='p' xmlns:xlink='x' xmlns:chart='c'"
    chart = (
        f"<office:document-content {ODF} {spaces}><office:body><office:chart><chart:chart><chart:title>"
        f"<text:p>Wet</text:p></chart:title>{table}</chart:chart></office:chart></office:body></office:document-content>"
    )
    content = (
        f"<office:document-content {ODF} {spaces}><office:body><office:presentation>{slides}</office:presentation>"
        "</office:body></office:document-content>"
    )
    made = odt("", "presentation", **{"content.xml": content, "Object 1/content.xml": chart})
    document = read_here(made, "a.odp")
    shown = "# One\n\ntext\n\nNotes: say this\n\nChart:\n\nWet\n\n|  | Rain |\n| --- | --- |\n| May | 7 |\n\nTwo"
    assert (document.kind, document.text, len(document.pages)) == ("ODP", shown, 2)
    flat = content.replace("document-content", "document").replace(
        'xlink:href="./Object 1"/>', ">" + chart.replace("document-content", "document") + "</draw:object>"
    )
    assert read_here(flat.encode(), "a.fodp").text == shown


def test_flat_spreadsheets_are_read_without_charts_and_hidden_sheets() -> None:
    chart = "<office:document><c:chart><c:title><text:p>Wet</text:p></c:title></c:chart></office:document>"
    sheet = (
        "<table:table table:name='{0}' table:style-name='{0}'><table:shapes><d:object>{1}</d:object></table:shapes>"
        "<table:table-row><table:table-cell><text:p>{0}1</text:p></table:table-cell></table:table-row></table:table>"
    )
    styles = "<s:style s:name='B'><s:table-properties table:display='false'/></s:style>"
    made = (
        f"<office:document {ODF} xmlns:d='d' xmlns:c='c' xmlns:s='s'><office:automatic-styles>{styles}"
        f"</office:automatic-styles><office:body><office:spreadsheet>{sheet.format('A', chart)}"
        f"{sheet.format('B', '<d:title>x</d:title>')}</office:spreadsheet></office:body></office:document>"
    )
    document = read_here(made.encode(), "a.fods")
    assert (document.text, document.title) == ("## A\n\n| A1 |\n| --- |", "")
    assert read_here(f"<office:document-styles {ODF}/>".encode(), "a.xml").kind == "XML"


def test_flat_opendocument_files_are_read() -> None:
    meta = '<office:meta><dc:title xmlns:dc="d">Title</dc:title></office:meta>'
    math = "<m:math xmlns:m='m'><m:msup><m:mi>x</m:mi><m:mn>2</m:mn></m:msup></m:math>"
    body = (
        f'<text:p>10<text:span text:style-name="T1">6</text:span> <d:object xmlns:d="d">{math}</d:object>'
        "<d:image xmlns:d='d'><office:binary-data>AAAA</office:binary-data></d:image></text:p>"
    )
    styles = (
        '<office:automatic-styles xmlns:style="s"><style:style style:name="T1">'
        '<style:text-properties style:text-position="super 58%"/></style:style></office:automatic-styles>'
        "<office:master-styles><text:p>footer</text:p></office:master-styles>"
    )
    content = "<office:body><office:{0}>{1}</office:{0}></office:body>"
    flat = f"<?xml version='1.0'?>\n<office:document {ODF}>{meta}{styles}{content}</office:document>"
    document = read_here(flat.format("text", body).encode(), "a.fodt")
    assert (document.kind, document.title, document.text) == ("OpenDocument", "Title", "10⁶ x²")
    cell = "<table:table-row><table:table-cell><text:p>{}</text:p></table:table-cell></table:table-row>"
    sheets = "".join(f'<table:table table:name="{each}">{cell.format(each * 2)}</table:table>' for each in "AB")
    document = read_here(flat.format("spreadsheet", sheets).encode(), "a.xml")
    assert document.text == "## A\n\n| AA |\n| --- |\n\n## B\n\n| BB |\n| --- |" and len(document.pages) == 2


def test_chapters_of_fictionbook_are_read() -> None:
    book = (
        "<?xml version='1.0' encoding='windows-1251'?><FictionBook xmlns:l='l'><description><title-info>"
        "<book-title>Книга</book-title><annotation><p>x</p></annotation></title-info></description><body>"
        "<title><p>Книга</p></title>"
        "<section><title><p>Глава</p><p>1</p></title><p>10<sup>6</sup> <strong>слов</strong>"
        "<a l:href='#n1' type='note'>[1]</a></p>"
        "<subtitle>s</subtitle><section><title><p>b</p></title><poem><v>v</v></poem></section></section>"
        "<section><table><tr><th>A</th><td>B</td></tr></table></section></body>"
        "<body name='notes'><section id='n1'><p>note</p></section></body><binary>AAAA</binary></FictionBook>"
    )
    document = read_here(book.encode("cp1251"), "a.fb2")
    assert (document.kind, document.title, len(document.pages)) == ("FB2", "Книга", 4)
    assert document.text == (
        "# Книга\n\n## Глава\n\n## 1\n\n10⁶ слов¹\n\n### s\n\n### b\n\nv\n\n| A | B |\n| --- | --- |\n\nnote"
    )
    assert read_here(b"a <FictionBook>", "a.md").text == "a <FictionBook>"
    wide = "<tr><td colspan='2'>A</td><td>B</td></tr><tr><td>1</td><td>2</td><td>3</td></tr>"
    made = f"<FictionBook><body><table>{wide}</table></body></FictionBook>"
    assert read_here(made.encode(), "a.fb2").text == "| A |  | B |\n| --- | --- | --- |\n| 1 | 2 | 3 |"
    comments = b"<!-- -->" * 500  # an ambiguous pattern would need exponential time
    assert read_here(comments + book.partition("?>")[2].encode(), "a.xml").text == document.text
    assert read_here(comments + b"<x/>", "a.xml").kind == "XML"


def test_web_archives_and_mailboxes_are_read() -> None:
    part = "--b\nContent-Type: {}\nContent-Location: x\n\n{}\n"
    parts = part.format("text/html; charset=utf-8", "<title>T</title><p>ü</p>") + part.format("text/css", "p {}")
    page = f"From: <Saved by Blink>\nMIME-Version: 1.0\nContent-Type: multipart/related; boundary=b\n\n{parts}--b--\n"
    for name in ("a.mht", "a.mhtml"):
        document = read_here(page.encode(), name)
        assert (document.kind, document.title, document.text) == ("HTML", "T", "ü")
    assert read_here("<!DOCTYPE html><html><p>ü".encode(), "a.mht").text == "ü"
    messages = (
        "From a@b Mon Jan  1 00:00:00 2024\r\nSubject: one\r\n\r\ntext\r\n>From me\r\n\r\n"
        "From c@d Mon Jan  1 00:00:00 2024\r\nSubject: two\r\n\r\nFrom here\r\n"
    )
    document = read_here(b"From x 1:0\nA: b\n\none\n\nFrom there, at 9:30 we\nleft", "a.mbox")
    assert document.text.endswith("one\n\nFrom there, at 9:30 we\nleft")
    document = read_here(messages.encode(), "a.mbox")
    assert document.text == "Subject: one\n\ntext\nFrom me\n\nSubject: two\n\nFrom here" and len(document.pages) == 2
    for damaged in (b"text", b"From " + b"1:" * 500_000):  # the second one would need quadratic time
        with pytest.raises(UnreadableError, match="it has no messages"):
            read_here(damaged, "a.mbox")


@pytest.mark.parametrize(
    ("number", "form", "shown"),
    [
        ("45000", "m/d", "2023-03-15"),
        ("45000", "dd\\.mm\\.", "2023-03-15"),
        ("45000.25", "[$-409]m/d/yy h:mm AM/PM", "2023-03-15 06:00:00"),
        ("0.5", "h:mm", "12:00:00"),
        ("1.5", "[h]:mm", "36:00:00"),
        ("0.5", "[Red]0.0", "0.5"),
        ("12", '0 "days"', "12 days"),
        ("3", "General", "3"),
        ("nan", "0%", "nan"),
        ("1e400", "0", "1e400"),
    ],
)
def test_number_formats_of_charts(number: str, form: str, shown: str) -> None:
    assert format_number(number, form) == shown


def test_mailboxes_are_read_without_damaged_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "From a@b Mon Jan  1 00:00:00 2024\n{}\n\n"
    parts = "Content-Type: multipart/mixed; boundary=b\n\n" + "--b\n\nx\n" * (plain.MAX_PARTS + 2) + "--b--"
    document = read_here("".join(map(message.format, ("A: b\n\none", parts, "A: b\n\ntwo"))).encode(), "a.mbox")
    assert document.text.split() == ["one", "two"]
    assert document.warnings == ("1 of 3 messages cannot be read and were left out",)
    with pytest.raises(UnreadableError, match="parts"):
        read_here(message.format(parts).encode(), "a.mbox")
    monkeypatch.setattr(plain, "MAX_PAGES", 2)  # with more messages, a page has several
    document = read_here("".join(message.format("A: b\n\n" + each) for each in "012").encode(), "a.mbox")
    assert (document.text.split(), len(document.pages)) == (["0", "1", "2"], 2)


def test_superscripts_and_struck_text_of_docx_styles_are_read() -> None:
    style = '<w:style w:styleId="{}"><w:name w:val="{}"/><w:basedOn w:val="{}"/><w:rPr>{}</w:rPr></w:style>'
    styles = style.format("Own", "own", "Up", "") + style.format("Up", "up", "", '<w:vertAlign w:val="superscript"/>')
    styles += style.format("Old", "old", "", "<w:strike/>") + style.format("New", "new", "Old", '<w:strike w:val="0"/>')

    def run(text: str, properties: str = "") -> str:
        return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"

    def styled(text: str, name: str, more: str = "") -> str:
        return run(text, f'<w:rStyle w:val="{name}"/>{more}')

    texts = (
        run("10") + styled("6", "Own") + run(" ") + styled("7", "Up", '<w:vertAlign w:val="baseline"/>'),
        styled("100", "Old") + run(" ") + styled("80", "New") + run(" ") + styled("70", "Old", '<w:strike w:val="0"/>'),
    )
    body = "".join(f"<w:p>{each}</w:p>" for each in texts) + paragraph("all", "Old")
    body += f'<w:p><w:pPr><w:pStyle w:val="Old"/></w:pPr>{styled("kept", "New")}</w:p>'
    made = docx(body, **{"word/styles.xml": f"<w:styles {W}>{styles}</w:styles>"})
    assert read_here(made, "a.docx").text.split("\n\n") == ["10⁶ 7", "~~100~~ 80 70", "~~all~~", "kept"]


def test_superscripts_and_struck_text_of_odt_styles_are_read() -> None:
    style = '<style:style style:name="{}" style:parent-style-name="{}"><style:text-properties {}/></style:style>'
    styles = (
        style.format("T1", "Own", 'fo:font-weight="bold"')
        + style.format("Own", "Up", "")
        + style.format("Up", "", 'style:text-position="super 58%"')
        + style.format("P1", "Old", "")
        + style.format("Old", "", 'style:text-line-through-style="solid"')
        + style.format("T2", "", 'style:text-line-through-style="none"')
    )
    span = '<text:span text:style-name="{}">{}</text:span>'
    body = f"<text:p>10{span.format('T1', 6)} a</text:p>"
    body += (
        f'<text:p text:style-name="P1">100 {span.format("T3", 90)} {span.format("T2", 80)}</text:p><text:p>b</text:p>'
    )
    content = (
        f"<office:document-content {ODF} xmlns:style='s' xmlns:fo='f'><office:automatic-styles>{styles}"
        f"</office:automatic-styles><office:body><office:text>{body}</office:text></office:body></office:document-content>"
    )
    assert read_here(odt("", **{"content.xml": content}), "a.odt").text.split("\n\n") == ["10⁶ a", "~~100 90~~ 80", "b"]


def test_cells_and_blocks_of_html_are_not_superscripts() -> None:
    page = b"<style>.x{vertical-align:super}</style><p class=x>In 2024<table><tr class=x><td class=x>10<td class=x>20"
    assert read_here(page, "a.html").text == "In 2024\n\n| 10 | 20 |\n| --- | --- |"


def test_fields_within_instructions_of_docx_are_not_shown() -> None:
    begin, separate, end = (f'<w:r><w:fldChar w:fldCharType="{each}"/></w:r>' for each in ("begin", "separate", "end"))
    code, text = "<w:r><w:instrText> {} </w:instrText></w:r>", "<w:r><w:t>{}</w:t></w:r>"
    inner = begin + code.format("PAGE") + separate + text.format("3") + end
    field = begin + code.format("IF") + inner + code.format("&gt; 1 a b") + separate + text.format("a") + end
    toc = f"<w:p>{begin}{code.format('TOC')}{separate}{text.format('One')}{inner}</w:p>"
    toc += f"<w:p>{text.format('Two')}{end}</w:p>"
    broken = f"<w:p>{begin}{code.format('X')}{text.format('x')}</w:p>"
    broken += f"<w:p>{(begin + separate) * MAX_DEPTH}{begin}{text.format('deep')}</w:p>"
    made = docx(f"<w:p>{field}{text.format('b')}</w:p>{toc}{broken}{paragraph('end')}")
    assert read_here(made, "a.docx").text.split("\n\n") == ["ab", "One3", "Two", "deep", "end"]


def test_html_is_read_if_plain_text_of_an_email_is_only_a_hint() -> None:
    page = "<p>Dear Jane, your order of 3 herons for 42 EUR was sent on Monday.</p>"

    def shown(plain: str, *others: str) -> str:
        parts = "".join(f"--b\nContent-Type: text/html\n\n{each}\n" for each in others)
        head = "Content-Type: multipart/alternative; boundary=b\n\n"
        return read_here(f"{head}--b\n\n{plain}\n{parts}--b--".encode(), "a.eml").text.strip()

    assert shown("Please enable HTML.", page) == "Dear Jane, your order of 3 herons for 42 EUR was sent on Monday."
    assert shown("Your order of 3 herons for 42 EUR was sent.", page) == "Your order of 3 herons for 42 EUR was sent."
    assert shown("", page, "<p>a") == shown("Please enable HTML.", page) and shown("a", "", "") == "a"


def test_selected_options_of_html_are_read() -> None:
    options = "<option>red<option selected>blue<option>green</select>"
    shown = f"<p>Color:<select>\n {options}, size:<select><option>5</option></select><datalist>{options}.</datalist>end"
    assert read_here(shown.encode(), "a.html").text.split() == ["Color:", "blue,", "size:end"]


def test_readings_follow_their_base_text_in_parentheses() -> None:
    run = "<w:r><w:t>{}</w:t></w:r>"
    word = f"<w:ruby><w:rt>{run.format('kanji')}</w:rt><w:rubyBase>{run.format('漢字')}</w:rubyBase></w:ruby>"
    writer = "<text:ruby><text:ruby-base>漢字</text:ruby-base><text:ruby-text>kanji</text:ruby-text></text:ruby>"
    for content, name in (
        (docx(f"<w:p>{run.format('a')}<w:r>{word}</w:r>{run.format('b')}</w:p>"), "a.docx"),
        (odt(f"<text:p>a{writer}b</text:p>"), "a.odt"),
        ("<p>a<ruby>漢字<rt>kanji</rt></ruby>b".encode(), "a.html"),
        ("<p>a<ruby>漢字<rp>[<rt>kanji<rp>]</ruby>b".encode(), "b.html"),
        ("<p>a<ruby>漢<rt></rt>字<rt>kanji</ruby>b<ruby hidden>漢<rt>kan</ruby>".encode(), "c.html"),
        ("<p>a<ruby>漢<rt> </rt>字<rt>kanji<i hidden>x</rt></ruby>b".encode(), "d.html"),
    ):
        assert read_here(content, name).text == "a漢字(kanji)b", name
    assert read_here("<p>a<ruby>漢字<rt>kanji".encode(), "e.html").text == "a漢字(kanji)"


def test_superscripts_and_struck_text_of_style_sheets_are_read() -> None:
    sheet = (
        "/* a */ p, span.up {font-size: 70%; vertical-align : super} @media print {.old{text-decoration:line-through}}"
    )
    shown = '<p>10<span class="x up">6</span> 10<i style="vertical-align:super"><b><u><a><q>7</q></a></u></b></i> '
    shown += "<s><i><b><u><a><q>100</q></a></u></b></i></s> <b class=old>90</b> 80<p>101<b style='vertical-align:sub'>2"
    text = "10⁶ 10⁷ ~~100~~ ~~90~~ 80\n101_2"
    assert read_here(f"<html><style>{sheet}</style>{shown}".encode(), "a.html").text == text
    package = '<package><manifest><item id="s" href="../a%20b.css"/><item id="c" href="c"/></manifest>'
    package += '<spine><itemref idref="c"/></spine></package>'
    assert read_here(epub({"c": shown}, **{"OPS/book.opf": package, "a b.css": sheet}), "a.epub").text == text


def test_epub_switch_is_read_as_its_default() -> None:
    case = '<epub:case required-namespace="http://www.xml-cml.org/schema">H2O</epub:case>'
    chapter = f"<p>a</p><epub:switch>{case}<epub:default><p>water</p></epub:default></epub:switch>"
    assert read_here(epub({"a": chapter}), "a.epub").text == "a\n\nwater"


def test_epub_chapters_are_read_in_order() -> None:
    document = read_here(
        epub({"b.xhtml": "<h1>First</h1><p>a", "a%20b.xhtml": "<p>x"} | {"c": ""}, **{"OPS/a b.xhtml": "<p>second"}),
        "a.epub",
    )
    assert document.text == "# First\n\na\n\nsecond" and len(document.pages) == 2


def test_unreadable_chapters_do_not_prevent_reading_a_book() -> None:
    document = read_here(epub({"a": "<p>a", "b": "\x89PNG\0", "../../c": "", "d": "<p>d"}), "a.epub")
    assert document.text == "a\n\nd"
    assert document.warnings == ("2 of 4 chapters cannot be read and were left out",)


def test_folded_lines_of_calendars_and_cards_are_joined() -> None:
    calendar = "SUMMARY:Mee\r\n ting in K\xf6ln\r\n  at 9\r\nEND:VEVENT".encode().replace(b"\xc3", b"\xc3\r\n ")
    assert read_here(calendar, "a.ics").text == "SUMMARY:Meeting in K\xf6ln at 9\nEND:VEVENT"
    name = b"N;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:M=C3=BCller\r\n"
    lines = read_here(name + b"NOTE;quoted-printable:a=0D=0Ab=\r\nc=20", "a.vcf").text.split("\n")
    assert lines == ["N;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:M\xfcller", "NOTE;quoted-printable:a\\nbc "]


def test_data_in_text_is_omitted() -> None:
    image = base64.b64encode(bytes(range(256)) * 8 + b"ab").decode()
    wrapped = "\n".join(image[at : at + 76] for at in range(0, len(image), 76))
    for text, shown in (
        (f"![](data:image/png;base64,{image})\nend", "![](data:image/png;base64,[data left out])\nend"),
        (f"<binary>\n{wrapped}\n</binary>", "<binary>\n[data left out]\n</binary>"),
        (json.dumps({"image/png": wrapped + "\n", "a": 1}), '{"image/png": "[data left out]\\n", "a": 1}'),
    ):
        document = read_here(text.encode(), "a.md")
        assert document.text == shown and document.warnings == ("embedded data left out: 1",)
    for kept in ("ACGT" * 900, "0123456789abcdef" * 100, image[:900], "a/b" * 600):
        assert read_here(kept.encode(), "a.txt").text == kept


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


def test_repeated_rows_of_odt_are_read() -> None:
    row = "<table:table-row{}><table:table-cell>{}</table:table-cell></table:table-row>"
    inner = f"<table:table>{row.format('', '<text:p>x</text:p>')}</table:table>"
    twice = row.format(' table:number-rows-repeated="2"', f"<text:p>a</text:p>{inner}")
    many = row.format(' table:number-rows-repeated="5000"', "<text:p>b</text:p>")
    assert read_here(odt(f"<table:table>{twice}</table:table>"), "a.odt").text.count("a x") == 2
    assert read_here(odt(f"<table:table>{many}</table:table>"), "a.odt").text.count("b") == 1


def test_ods_with_indented_xml_is_read() -> None:
    """SheetJS indents it, and the library does not accept this."""
    row = '<table:table-row table:number-rows-repeated="2">\n {}</table:table-row>\n'
    cells = (f"<table:table-cell><text:p>{each}</text:p></table:table-cell>\n" for each in ("a", "b"))
    table = f'<table:table table:name="S">\n{row.format("".join(cells))}</table:table>\n'
    assert read_here(odt(table, "spreadsheet"), "a.ods").text == "## S\n\n| a | b |\n| --- | --- |\n| a | b |"


def test_xlsb_cells_that_would_be_skipped_are_refused() -> None:
    """SheetJS writes cells without a column, which the library skips. 0: a row; 17: a short cell."""
    for kind, sentence in ((17, "XLSB file of an unsupported variant"), (7, "damaged")):
        sheet = bytes([0x81, 0x01, 0, 0, 2, 1, 1, kind, 0x83, 0x00, 1, 1, 1])
        with pytest.raises(UnreadableError, match=sentence):
            read_here(xlsx("", **{"xl/worksheets/sheet1.bin": sheet, "xl/workbook.xml": "<x"}), "a.xlsb")


def test_values_of_pdf_forms_are_read_beside_their_labels() -> None:
    """PDFium returns them after the other text, in the order of the fields."""
    values = {(120, 736): b"200 EUR", (120, 750): b"100 EUR", (310, 750): b"2024", (50, 500): b"apart"}
    widgets, appearances = {}, {}
    for number, ((left, bottom), value) in enumerate(values.items()):
        widgets[20 + number] = (
            b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (f%d) /V (%s) /F 4 /P 10 0 R /Rect [%d %d %d %d]"
            b" /AP << /N %d 0 R >> >>" % (number, value, left, bottom - 3, left + 100, bottom + 10, 40 + number)
        )
        drawn = b"BT /F1 12 Tf 0 3 Td (%s) Tj ET" % value
        fonts = b"/Resources << /Font << /F1 3 0 R >> >>"
        appearances[40 + number] = stream(drawn, b"/Type /XObject /Subtype /Form /BBox [0 0 100 13] " + fonts)
    kids = b" ".join(b"%d 0 R" % each for each in widgets)
    made = pdf_of(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [%s] >> >>" % kids,
            2: b"<< /Type /Pages /Kids [10 0 R] /Count 1 >>",
            3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
            10: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            b" /Contents 11 0 R /Annots [%s] >>" % kids,
            11: stream(text_operators([f"Wages:{' ' * 55}Year:", "Tax:", "More text"])),
        }
        | widgets
        | appearances
    )
    lines = [" ".join(each.split()) for each in read_here(made, "a.pdf").text.split("\n")]
    assert [each for each in lines if each] == ["Wages: 100 EUR Year: 2024", "Tax: 200 EUR", "More text", "apart"]


def test_text_in_many_overlapping_fields_of_a_pdf_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_PageText, "box", lambda page, at: (at, 0, at + 1, 1))
    page = _PageText.__new__(_PageText)
    page.text = "label value"
    assert [text for _, _, text in page._field_values([((5, -1, 11, 2), "")] * 9) if text] == [" value"]


def test_check_boxes_of_pdf_forms_are_read_beside_their_labels() -> None:
    """The appearance of the first box is a letter of a font with symbols, as in files of Acrobat."""
    at_right, at_left = [(130, 745), (200, 745)], [(40, 730), (40, 716), (40, 702)]
    widgets, appearance = {}, b"BT /F1 12 Tf 1 1 Td (4) Tj ET"
    for number, (left, bottom) in enumerate([*at_right, *at_left]):
        kind = b"/Ff 32768" if number > 3 else b"/Ff 0"
        state = b"/Yes" if number in (0, 3) else b"/Off"
        widgets[20 + number] = (
            b"<< /Type /Annot /Subtype /Widget /FT /Btn %s /T (f%d) /F %d /P 10 0 R /V %s /AS %s"
            b" /Rect [%d %d %d %d] /AP << /N << /Yes 30 0 R >> >> >>"
            % (kind, number, 2 if number == 2 else 4, state, state, left, bottom, left + 9, bottom + 12)
        )
    kids = b" ".join(b"%d 0 R" % each for each in widgets)
    text = text_operators(["Agree (now):             No:", "a hidden box", "checked", "radio"]).replace(
        b"50 750", b"60 750"
    )
    made = pdf_of(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [%s] >> >>" % kids,
            2: b"<< /Type /Pages /Kids [10 0 R] /Count 1 >>",
            3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
            10: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            b" /Contents 11 0 R /Annots [%s] >>" % kids,
            11: stream(text),
            30: stream(
                appearance, b"/Type /XObject /Subtype /Form /BBox [0 0 9 12] /Resources << /Font << /F1 3 0 R >> >>"
            ),
        }
        | widgets
    )
    assert read_here(made, "a.pdf").text.split("\n") == [
        "Agree (now): \u2612 No: \u2610",
        "a hidden box",
        "\u2612 checked",
        "\u2610 radio",
    ]


def test_pdf_pages_are_read_without_headers_and_footers() -> None:
    document = read_here(text_pdf(*([f"Report {n}", word, f"Page {n}"] for n, word in enumerate(WORDS))), "a.pdf")
    assert document.text == "heron\n\nstork\n\ncrane\n\negret"
    assert [document.text[at : at + 5] for at in document.pages] == WORDS
    half = read_here(text_pdf(["some text"], []), "a.pdf")
    assert half.warnings == ("1 of 2 pages have no text; they may be scanned",)


def test_values_of_pdf_form_fields_and_text_annotations_are_read() -> None:
    assert read_here(form_pdf("Jane", "a remark"), "a.pdf").text == "Name: Jane\na remark"


def test_letters_of_words_from_right_to_left_are_in_reading_order() -> None:
    assert read_here(chrome_pdf("مرحبا"), "a.pdf").text == "مرحبا"
    assert read_here(chrome_pdf("שלום"), "a.pdf").text == "שלום"


def test_hyphenated_words_are_joined() -> None:
    assert join_hyphenated(
        "a hyphen-\r\nated word, hyphen\ufffe\r\nated; Anglo-\r\nSaxon, 1-\r\n2 pre\ufffeColumbian"
    ) == ("a hyphenated word, hyphenated; Anglo-\nSaxon, 1-\n2 pre-Columbian")


def test_margin_lines_shared_by_most_pages_are_removed() -> None:
    assert remove_margins(["T 1\na", "T 2\nb", "c"]) == ["T 1\na", "T 2\nb", "c"]
    assert remove_margins(["T\na\nb", "T\nc\nd", "T\ne\nf"]) == ["a\nb", "c\nd", "e\nf"]
    bills = [f"Bill 2024-{n}\n{word}\nTotal: {n * n * 137}.50" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(bills) == [f"{word}\nTotal: {n * n * 137}.50" for n, word in enumerate(WORDS, start=7)]
    lines = [f"{word}\n{n * n}\n{n}" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(lines) == [f"{word}\n{n * n}" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(["# 5\na", "3 5\nb", "3 5\nc", "3 5\nd"]) == ["# 5\na", "b", "c", "d"]
    assert remove_margins(["1" * 5_000 + f"\n{n}" for n in "abc"]) == ["a", "b", "c"]
    assert remove_margins(["Slide 1", "Slide 2", "Slide 3"]) == ["Slide 1", "Slide 2", "Slide 3"]


def test_the_header_of_a_long_table_is_repeated() -> None:
    lines = list(markdown_lines([["n"], *([str(n)] for n in range(HEADER_EVERY + 1))]))
    assert lines.count("| n |") == 2 and lines[-1] == f"| {HEADER_EVERY} |"


@pytest.mark.parametrize(
    ("data", "name", "text"),
    [
        (b"a;b\n1,5;2\n", "a.csv", "| a | b |\n| --- | --- |\n| 1,5 | 2 |"),
        (b'a,b\n"x\ny",2\n', "a.csv", "| a | b |\n| --- | --- |\n| x y | 2 |"),
        (
            b'a,b,c\n1,"say ""x, y"" now",2\n2,"z",3\n',
            *("a.csv", '| a | b | c |\n| --- | --- | --- |\n| 1 | say "x, y" now | 2 |\n| 2 | z | 3 |'),
        ),
        (
            b"id;text;n\r\n1;'tis a;2\r\n2;\"a; b\";3\r\n3;'x';4\r\n",
            *("a.csv", "| id | text | n |\n| --- | --- | --- |\n| 1 | 'tis a | 2 |\n| 2 | a; b | 3 |\n| 3 | 'x' | 4 |"),
        ),
        (b"price\n1,50\r\n-2.000,75\n", "a.csv", "| price |\n| --- |\n| 1,50 |\n| -2.000,75 |"),
        (b"1,5;2,5\n3,5;4,5\n", "a.csv", "| 1,5 | 2,5 |\n| --- | --- |\n| 3,5 | 4,5 |"),
        (b"sep=;\r\na;b\r\n1;2\r\n", "a.csv", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        (b'a,b\n1,"x;\ny;\nz;"\n', "a.csv", "| a | b |\n| --- | --- |\n| 1 | x; y; z; |"),
        (b"a, b\r1, 2\r", "a.csv", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        (b"<!DOCTYPE html><?php echo 1 ?>", "a.php", "<!DOCTYPE html><?php echo 1 ?>"),
        (b"def f():\n\treturn 1\n", "a.py", "def f():\n\treturn 1\n"),
        ("\ufeffsn\u00f8".encode(), "a.txt", "sn\u00f8"),
        ("sn\u00f8".encode("utf-16"), "a.txt", "sn\u00f8"),
        ("sn\u00f8, and more".encode("utf-16-le"), "a.txt", "sn\u00f8, and more"),
        (b"<ul><li>a<li>b</ul><pre>x\n  y</pre>", "a.html", "- a\n- b\n\nx\n  y"),
        (b"<meta charset=latin1><p>sn\xf8 \x80", "a.htm", "sn\u00f8 \u20ac"),
        (b"<meta CHARSET=gb2312><p>" + "\u9555".encode("gbk"), "a.htm", "\u9555"),
        (b"<meta charset=shift_jis><p>" + "\u2460".encode("cp932"), "a.htm", "\u2460"),
        (b"<?xml version='1.0' encoding='utf-16'?><html><p>ab", "a.xhtml", "ab"),
        ("<a encoding='cp1252'>\u00fc".encode(), "a.xml", "<a encoding='cp1252'>\u00fc"),
        (b"<meta charset=big5><p>\xc6\xcf", "a.html", "\u306b"),
        (b"<meta charset=ISO-8859-8-I><p>\xf9", "a.html", "\u05e9"),
        (b"Content-Type: text/plain; charset=x-cp1251\n\n\xe0", "a.eml", "\n\u0430"),
        (b"Content-Type: text/plain; charset=ks_c_5601-1989\n\n\xb0\xa1", "a.eml", "\n\uac00"),
        (b"<meta charset=iso88592><p>\xb1", "a.html", "\u0105"),
        (b"Content-Type: text/html\n\n<meta charset=cp1251><p>\xe0", "a.eml", "\n\u0430"),
        (b"Content-Type: text/html; charset=us-ascii\n\n<meta charset=cp1251><p>\xe0", "a.eml", "\n\u0430"),
        (
            b"<?xml version='1.0' encoding='windows-1251'?>\xe0",
            "a.xml",
            "<?xml version='1.0' encoding='windows-1251'?>\u0430",
        ),
        (b"sn\xc3\xb8 " * 20 + b"\xc3", "a.txt", "sn\u00f8 " * 20 + "\ufffd"),
        (b"<html><head><title>T</title><p>shown", "a.html", "shown"),
        (
            b"<input type=CHECKBOX checked>a<input type=radio>b <input value=c><input type=hidden value=x>",
            *("a.html", "\u2612a\u2610b  c"),
        ),
        (b"<p>3<input value=5>0", "a.html", "3 5 0"),
        (b"<p>Donau&shy;dampf", "a.html", "Donaudampf"),
        (b"<p/>a<br/>b<br>c<div/>d", "a.xhtml", "a\nb\nc\n\nd"),
        (b"a<p hidden>b<div>c</div>", "a.html", "a\nc"),
        (
            b"<table><caption>T</caption><tr><th colspan=2>A<th>B<tr><td rowspan=2>1<td>2<td>3<tr><td>4<td>5</table>",
            *("a.html", "T\n| A |  | B |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n|  | 4 | 5 |"),
        ),
        (
            b"<table><tr><td>a<td rowspan=2>b<tr><td>c<tr><td>d<td>e</table>",
            *("a.html", "| a | b |\n| --- | --- |\n| c |\n| d | e |"),
        ),
        (b"<table><tr><td><ul><li>a</ul><td>b <b>1</b><i>2</i><p>5", "a.html", "| - a | b 12 5 |\n| --- | --- |"),
        (
            b"<table><tr><td>a</td> x <td>b</td><tr><td><td>c</td> y</table>",
            *("a.html", "| a x | b |\n| --- | --- |\n|  | c y |"),
        ),
        (
            b"<table><tr><th>A<th>B<tr><td>x<td>s<table><tr><th>S<th>M<tr><td>1 | 2<td></table>t<tr><td>y<td>z</table>",
            *("a.html", "| A | B |\n| --- | --- |\n| x | s S, M; 1 \\| 2 t |\n| y | z |"),
        ),
        (
            b"<table><tr><td><h1>H</h1><p>a</p><p>b</p><tr><td><table><tr><th>S<th>M<tr><td>1<td>2</table></table>",
            *("a.html", "# H\n\na\n\nb\n| S | M |\n| --- | --- |\n| 1 | 2 |"),
        ),
        (
            b"<table><caption>c<table><tr><td>1<td>2</table></caption><tr><td>a<td>b</table>",
            *("a.html", "c\n\n| 1 | 2 |\n| --- | --- |\n\n| a | b |\n| --- | --- |"),
        ),
        (b"<table><tr><td rowspan=" + b"9" * 5000 + b">a<td>b</table>", "a.html", "| a | b |\n| --- | --- |"),
        (
            b"From: A <a@b>\nSubject: =?utf-8?q?s=C3=A9?=\nContent-Type: text/html\n\n<p>hello</p>",
            *("a.eml", "From: A <a@b>\nSubject: s\u00e9\n\nhello"),
        ),
        (b"\xef\xbb\xbf\r\nSubject: s\r\n\r\nhello", "a.eml", "Subject: s\n\nhello"),
        (b"MZ are initials, BZh is none", "a.txt", "MZ are initials, BZh is none"),
        (b"%PDF-1.7 is how a PDF begins."[1:], "a.txt", "PDF-1.7 is how a PDF begins."),
    ],
)
def test_text_formats_are_read(data: bytes, name: str, text: str) -> None:
    assert read_here(data, name).text == text


def test_the_first_alternative_of_an_email_that_has_text_is_read() -> None:
    plain, page = b"--b\nContent-Type: text/plain\n\n%s\n", b"--b\nContent-Type: text/html\n\n<p>page</p>\n--b--\n"
    head = b"Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/%s; boundary=b\n\n"
    for kind, text, expected in (
        *((b"alternative", b" ", "page"), (b"alternative", b"plain", "plain")),
        (b"mixed", b"plain", "plain\npage"),
    ):
        assert read_here(head % kind + plain % text + page, "a.eml").text == f"Subject: s\n\n{expected}"


@pytest.mark.parametrize("kind", ["calendar", "x-amp-html"])
def test_longer_alternatives_of_an_email_that_programs_do_not_show_are_not_read(kind: str) -> None:
    head = "Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/alternative; boundary=b\n\n"
    parts = {"plain": "lunch at noon", kind: "BEGIN:VCALENDAR\n" * 9, "html": "<p>lunch at noon"}
    body = "".join(f"--b\nContent-Type: text/{each}\n\n{text}\n" for each, text in parts.items())
    assert read_here((head + body + "--b--\n").encode(), "a.eml").text == "Subject: s\n\nlunch at noon"


def test_a_forwarded_email_is_read_with_its_sender() -> None:
    forwarded = b"From: a@b\nContent-Type: text/html; charset=iso-8859-1\n\n<p>9 \x80\n"
    message = (
        b"Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nsee below\n--b\n"
        b"Content-Type: message/rfc822\n\n" + forwarded + b"--b--\n"
    )
    assert read_here(message, "a.eml").text == "Subject: s\n\nsee below\nFrom: a@b\n\n9 \u20ac"


def test_guessed_encoding_is_reported() -> None:
    document = read_here(b"caf\xe9", "a.txt")
    assert document.text == "caf\u00e9" and document.warnings == ("its encoding was guessed: Windows-1252",)


def test_email_attachments_are_listed() -> None:
    message = (
        b"Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nbody\n--b\n"
        b"Content-Type: application/pdf\nContent-Disposition: attachment; filename=a.pdf\n\nx\n--b--\n"
    )
    document = read_here(message, "a.eml")
    assert "Attachments: a.pdf" in document.text and document.warnings == ("attachments not read: 1",)


def test_empty_document_is_unreadable() -> None:
    with pytest.raises(UnreadableError, match="is empty"):
        read_here(b"", "a.txt")


def test_choices_from_lists_of_docx_forms_are_read() -> None:
    field = "<w:r><w:fldChar><w:ffData><w:ddList>{}</w:ddList></w:ffData></w:fldChar></w:r>"
    entries = "".join(f'<w:listEntry w:val="{each}"/>' for each in WORDS)
    states = ("", '<w:default w:val="2"/>', '<w:result w:val="1"/><w:default w:val="2"/>', '<w:result w:val="9"/>')
    fields = "<w:r><w:tab/></w:r>".join(field.format(state + entries) for state in states)
    box = "<w:r><w:fldChar><w:ffData><w:checkBox/></w:ffData></w:fldChar></w:r>"
    assert read_here(docx(f"<w:p>{fields}{box}</w:p>"), "a.docx").text == "heron\tcrane\tstork\t☐"


def test_rows_of_docx_that_begin_later_stay_below_their_columns() -> None:
    late = '<w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>' + row("2").removeprefix("<w:tr>")
    assert read_here(docx(GRID.format(row("A", "B") + late)), "a.docx").text == "| A | B |\n| --- | --- |\n|  | 2 |"


def test_hidden_and_alternative_texts_of_odt_are_omitted() -> None:
    more = "xmlns:style='urn:oasis:names:tc:opendocument:xmlns:style:1.0' xmlns:draw='d' xmlns:svg='s'"
    hidden = '<style:style style:name="H"><style:text-properties text:display="none"/></style:style>'
    frame = "<draw:frame><svg:title>x</svg:title>{}<svg:title>x</svg:title><svg:desc>x</svg:desc></draw:frame>"
    box = frame.format("<draw:text-box><text:p>box <text:title>Title</text:title></text:p></draw:text-box>")
    body = (
        f'<text:p>a{frame.format("")}<text:span text:style-name="H">x<text:span>x</text:span></text:span>b '
        '<text:hidden-text text:is-hidden="true">x</text:hidden-text><text:title>Title</text:title></text:p>'
        '<text:h text:style-name="H">x</text:h><text:section text:display="none"><text:p>x</text:p></text:section>'
        f'<text:p>{box}<text:hidden-text text:is-hidden="false">c</text:hidden-text></text:p>'
    )
    parts = {
        "styles.xml": f"<s {ODF} {more}>{hidden}</s>",
        "content.xml": f"<c {ODF} {more}><office:body><office:text>{body}</office:text></office:body></c>",
    }
    document = read_here(odt("", **parts), "a.odt")
    assert document.text == "ab Title\n\nbox Title\n\nc"
