"""What is read from charts and diagrams in documents."""

from __future__ import annotations

import pytest
from documents.made import (
    GRID,
    ODF,
    RELATIONSHIPS,
    A,
    cell,
    docx,
    odt,
    paragraph,
    pptx,
    relations,
    xlsx,
)
from documents.test_traps import read_here

from notso.documents.tables import format_number


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


@pytest.mark.parametrize("inner", ["<text:object/>", "<text:chart/>"])
def test_odf_elements_around_the_body_and_around_objects_are_ignored(inner: str) -> None:
    def within(content: str) -> str:
        for name in ("text:p", "text:span", "text:list", "text:note-citation", "text:note-body", "table:table-cell"):
            content = f"<{name}>{content}</{name}>"
        return content

    body = f"<office:body><office:text><text:p>a<text:object>{within(inner)}</text:object>b</text:p></office:text>"
    document = f"<office:document {ODF}>{within(f'{body}</office:body>')}</office:document>"
    expected = "ab\n\nChart:" if "chart" in inner else "ab"
    assert read_here(document.encode(), "a.fodt").text.strip() == expected
