"""What is read from each kind of document: text, pages, tables, titles and warnings."""

from __future__ import annotations

import base64
import json

import pytest
from documents.made import (
    GRID,
    ODF,
    RELATIONSHIPS,
    WORDS,
    A,
    docx,
    epub,
    odt,
    paragraph,
    pptx,
    relations,
)
from documents.test_traps import read_here

from notso.documents import plain
from notso.documents.values import UnreadableError

BREAK = "<w:p><w:r><w:br w:type='page'/></w:r></w:p>"


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


def test_html_is_read_if_plain_text_of_an_email_is_only_a_hint() -> None:
    page = "<p>Dear Jane, your order of 3 herons for 42 EUR was sent on Monday.</p>"

    def shown(plain: str, *others: str) -> str:
        parts = "".join(f"--b\nContent-Type: text/html\n\n{each}\n" for each in others)
        head = "Content-Type: multipart/alternative; boundary=b\n\n"
        return read_here(f"{head}--b\n\n{plain}\n{parts}--b--".encode(), "a.eml").text.strip()

    assert shown("Please enable HTML.", page) == "Dear Jane, your order of 3 herons for 42 EUR was sent on Monday."
    assert shown("Your order of 3 herons for 42 EUR was sent.", page) == "Your order of 3 herons for 42 EUR was sent."
    assert shown("", page, "<p>a") == shown("Please enable HTML.", page) and shown("a", "", "") == "a"


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


def test_repeated_rows_of_odt_are_read() -> None:
    row = "<table:table-row{}><table:table-cell>{}</table:table-cell></table:table-row>"
    inner = f"<table:table>{row.format('', '<text:p>x</text:p>')}</table:table>"
    twice = row.format(' table:number-rows-repeated="2"', f"<text:p>a</text:p>{inner}")
    many = row.format(' table:number-rows-repeated="5000"', "<text:p>b</text:p>")
    assert read_here(odt(f"<table:table>{twice}</table:table>"), "a.odt").text.count("a x") == 2
    assert read_here(odt(f"<table:table>{many}</table:table>"), "a.odt").text.count("b") == 1


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


def test_rows_of_docx_that_begin_later_stay_below_their_columns() -> None:
    late = '<w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>' + row("2").removeprefix("<w:tr>")
    assert read_here(docx(GRID.format(row("A", "B") + late)), "a.docx").text == "| A | B |\n| --- | --- |\n|  | 2 |"
