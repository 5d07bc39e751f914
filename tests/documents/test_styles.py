"""What styles, fields and form elements change in the text of DOCX, OpenDocument and HTML files."""

from __future__ import annotations

from documents.made import (
    GRID,
    ODF,
    WORDS,
    W,
    docx,
    epub,
    odt,
    paragraph,
)
from documents.test_traps import read_here

from notso.documents.formulas import MAX_DEPTH


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


def test_choices_from_lists_of_docx_forms_are_read() -> None:
    field = "<w:r><w:fldChar><w:ffData><w:ddList>{}</w:ddList></w:ffData></w:fldChar></w:r>"
    entries = "".join(f'<w:listEntry w:val="{each}"/>' for each in WORDS)
    states = ("", '<w:default w:val="2"/>', '<w:result w:val="1"/><w:default w:val="2"/>', '<w:result w:val="9"/>')
    fields = "<w:r><w:tab/></w:r>".join(field.format(state + entries) for state in states)
    box = "<w:r><w:fldChar><w:ffData><w:checkBox/></w:ffData></w:fldChar></w:r>"
    assert read_here(docx(f"<w:p>{fields}{box}</w:p>"), "a.docx").text == "heron\tcrane\tstork\t☐"


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
