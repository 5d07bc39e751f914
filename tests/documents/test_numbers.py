"""Numbers that programs write before paragraphs, but do not store in their text."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from documents.made import ODF, W, docx, odt, paragraph, pptx
from documents.test_traps import read_here

from notso.documents.formulas import numeral

STYLE = 'xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0"'
DELETED, HIDDEN = '<w:del w:id="1" w:author="a"/>', "<w:vanish/>"
CONTRACT = (
    ("upperRoman", "Article %1."),
    ("decimal", "%1.%2", "<w:isLgl/>"),
    ("lowerLetter", "(%3)"),
    ("bullet", "o"),
)
OUTLINE = (("decimal", "%1."), ("decimal", "%1.%2"))


def definition(number: int, levels: Iterable[tuple[str, ...]], more: str = "") -> str:
    texts = (
        f'<w:lvl w:ilvl="{at}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>{"".join(rest)}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
        for at, (form, text, *rest) in enumerate(levels)
    )
    return f'<w:abstractNum w:abstractNumId="{number}">{more}{"".join(texts)}</w:abstractNum>'


def listed(number: int, of: int, more: str = "") -> str:
    return f'<w:num w:numId="{number}"><w:abstractNumId w:val="{of}"/>{more}</w:num>'


def item(text: str, level: int | None = 0, number: int | None = 1, more: str = "", style: str = "") -> str:
    parts = [f'<w:pStyle w:val="{style}"/>'] * bool(style)
    if number is not None:
        at = "" if level is None else f'<w:ilvl w:val="{level}"/>'
        parts.append(f'<w:numPr>{at}<w:numId w:val="{number}"/></w:numPr>')
    return f"<w:p><w:pPr>{''.join(parts)}<w:rPr>{more}</w:rPr></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def word_lines(body: str, numbering: str, styles: str = "") -> list[str]:
    members = {
        "word/numbering.xml": f"<w:numbering {W}>{numbering}</w:numbering>",
        "word/styles.xml": f"<w:styles {W}>{styles}</w:styles>",
    }
    return read_here(docx(body, **members), "a.docx").text.split("\n\n")


def odt_lines(body: str, styles: str = "") -> list[str]:
    content = (
        f"<office:document-content {ODF} {STYLE}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:text>{body}</office:text></office:body></office:document-content>"
    )
    return read_here(odt("", **{"content.xml": content}), "a.odt").text.split("\n\n")


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        *(("decimal", "1 12 28 110"), ("unknown", "1 12 28 110"), ("decimalZero", "01 12 28 110")),
        *(("001", "001 012 028 110"), ("lowerRoman", "i xii xxviii cx"), ("upperRoman", "I XII XXVIII CX")),
        *(("lowerLetter", "a l bb fffff"), ("A", "A L AB DF"), ("ordinal", "1st 12th 28th 110th")),
        *(("chineseCountingThousand", "一 十二 二十八 一百一十"), ("japaneseCounting", "一 十二 二十八 百十")),
        *(("russianLower", "а м ю чччч"), ("decimalEnclosedCircle", "① ⑫ 28 110")),
        *(("cardinalText", "One Twelve 28 110"), ("First", "First Twelfth 28 110")),
    ],
)
def test_numbers_are_written_in_their_format(form: str, shown: str) -> None:
    assert " ".join(numeral(number, form) for number in (1, 12, 28, 110)) == shown
    assert (numeral(0, form)[-1], numeral(10**9, form)) >= ("0", "1000000000") or form == "A"


def test_numbers_of_docx_are_read() -> None:
    items = (("A", 0), ("b", 1), ("c", 1), ("d", 2), ("e", 2), ("f", 3), ("B", 0), ("g", 1), ("h", 2))
    lines = word_lines("".join(item(*each) for each in items), definition(0, CONTRACT) + listed(1, 0))
    assert lines == [
        *("Article I. A", "1.1 b", "1.2 c", "(a) d", "(b) e", "- f", "Article II. B", "2.1 g", "(a) h"),
    ]


def test_lists_of_docx_continue_or_restart_numbers() -> None:
    restarted = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="5"/></w:lvlOverride>'
    numbering = definition(0, OUTLINE) + listed(1, 0) + listed(2, 0) + listed(3, 0, restarted)
    body = "".join(item(text, 0, number) for text, number in (("a", 1), ("b", 2), ("c", 3), ("d", 3), ("e", 1)))
    assert word_lines(body, numbering) == ["1. a", "2. b", "5. c", "6. d", "7. e"]


def test_levels_of_docx_restart_as_defined() -> None:
    levels = (
        ("decimal", "%1."),
        ("lowerLetter", "%2)", '<w:lvlRestart w:val="0"/>'),
        ("decimal", "#%3", '<w:lvlRestart w:val="1"/>'),
    )
    body = "".join(item("x", level) for level in (0, 1, 2, 1, 2, 0, 1, 2))
    lines = word_lines(body, definition(0, levels) + listed(1, 0))
    assert [each.split()[0] for each in lines] == ["1.", "a)", "#1", "b)", "#2", "2.", "c)", "#1"]


def test_numbers_of_docx_styles_are_inherited() -> None:
    style = '<w:style w:styleId="{}"><w:name w:val="{}"/><w:basedOn w:val="{}"/><w:pPr>{}</w:pPr></w:style>'
    styles = (
        style.format("H1", "heading 1", "", '<w:numPr><w:numId w:val="1"/></w:numPr>')
        + style.format("Own", "own", "H2", "")  # before the style that it is based on
        + style.format("H2", "heading 2", "Own2", '<w:numPr><w:ilvl w:val="1"/></w:numPr>')
        + style.format("Own2", "own 2", "H1", "")
        + style.format("Linked", "linked", "Linked", '<w:numPr><w:numId w:val="1"/></w:numPr>')
    )
    levels = (("decimal", "%1"), ("decimal", "%1.%2", '<w:pStyle w:val="Linked"/>'))
    body = paragraph("A", "H1") + "".join(paragraph(each, each) for each in ("H2", "Own", "Linked"))
    body += item("off", None, 0, style="H2") + paragraph("B", "H1")
    lines = word_lines(body, definition(0, levels) + listed(1, 0), styles)
    assert lines == ["# 1 A", "## 1.1 H2", "1.2 Own", "1.3 Linked", "## off", "# 2 B"]


def test_levels_of_docx_styles_are_those_of_their_list() -> None:
    style = (
        '<w:style w:styleId="{0}"><w:name w:val="{0}"/><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    )
    levels = [(*level, f'<w:pStyle w:val="{name}"/>') for level, name in zip(OUTLINE, "AB", strict=True)]
    numbering = (
        definition(0, levels) + definition(1, levels[1:]) + listed(1, 0)
    )  # another list has B as its first level
    body = "".join(paragraph(each, each) for each in "ABA")
    assert word_lines(body, numbering, style.format("A") + style.format("B")) == ["1. A", "1.1 B", "2. A"]


def test_linked_lists_of_docx_are_numbered_as_one() -> None:
    numbering = definition(0, (), '<w:numStyleLink w:val="L"/>') + definition(1, OUTLINE, '<w:styleLink w:val="L"/>')
    assert word_lines(item("a") + item("b", 0, 2), numbering + listed(1, 0) + listed(2, 1)) == ["1. a", "2. b"]


def test_deleted_and_hidden_paragraphs_of_docx_are_not_numbered() -> None:
    gone = item("", more=DELETED).replace(
        "<w:r><w:t></w:t></w:r>", "<w:del><w:r><w:delText>x</w:delText></w:r></w:del>"
    )
    hidden = item("x", more=HIDDEN).replace("<w:r>", "<w:r><w:rPr><w:vanish/></w:rPr>")
    joined = item("b", more=DELETED) + item("c")
    run_in = item("d", more=f"{HIDDEN}<w:specVanish/>")
    lines = word_lines(item("a") + gone + hidden + joined + run_in, definition(0, OUTLINE) + listed(1, 0))
    assert lines == ["1. a", "2. bc", "3. d"]


def test_paragraphs_and_runs_of_hidden_docx_styles_are_omitted() -> None:
    style = '<w:style w:styleId="{}"><w:name w:val="{}"/><w:basedOn w:val="{}"/><w:rPr>{}</w:rPr></w:style>'
    styles = style.format("Note", "note", "", HIDDEN) + style.format("Sub", "sub", "Note", "")
    styles += style.format("Shown", "shown", "Note", '<w:vanish w:val="0"/>')
    run = '<w:r><w:rPr><w:rStyle w:val="Note"/></w:rPr><w:t>x</w:t></w:r>'
    box = f"<w:r><w:txbxContent>{paragraph('x', 'Sub')}</w:txbxContent></w:r>"
    body = item("a") + item("x", style="Sub") + item("b", style="Shown") + paragraph("c")
    body += (
        item("d").replace("</w:p>", f"{box}{run}<w:r><w:t>e</w:t></w:r></w:p>") + paragraph("x", "Sub") + paragraph("f")
    )
    assert word_lines(body, definition(0, OUTLINE) + listed(1, 0), styles) == ["1. a", "2. b", "c", "3. de", "f"]


def test_numbered_rows_and_text_boxes_of_docx_are_read() -> None:
    rows = "".join(f"<w:tr><w:tc>{item('')}</w:tc><w:tc>{paragraph(each)}</w:tc></w:tr>" for each in "xy")
    box = f"<w:r><w:txbxContent>{paragraph('box')}</w:txbxContent></w:r>"
    body = f"<w:tbl>{rows}</w:tbl>" + item("after").replace("<w:r>", f"{box}<w:r>", 1)
    lines = word_lines(body, definition(0, OUTLINE) + listed(1, 0))
    assert lines == ["| 1. | x |\n| --- | --- |\n| 2. | y |", "box", "3. after"]


def test_unusual_numbers_are_short() -> None:
    level = (("decimal", "%1" * 5_000, '<w:lvlRestart w:val="x"/>'),)
    numbering = definition(0, level).replace('w:start w:val="1"', 'w:start w:val="999999999"') + listed(1, 0)
    assert max(map(len, word_lines(item("a") + item("a", 10**6), numbering))) < 110
    style = (
        '<text:list-level-style-number text:level="999999999" text:display-levels="999999999" style:num-format="i"/>'
    )
    assert odt_lines("<text:p>a</text:p>", f'<text:list-style style:name="L">{style}</text:list-style>') == ["a"]


def test_numbers_of_odt_lists_are_read() -> None:
    level = '<text:list-level-style-{} text:level="{}" style:num-format="{}" {}/>'
    styles = (
        '<text:list-style style:name="L">'
        + level.format("number", 1, "I", 'style:num-prefix="Art. " text:start-value="3"')
        + level.format("number", 2, "1", 'style:num-suffix="." text:display-levels="2"')
        + level.format("number", 3, "a", 'loext:num-list-format="(%3%)" xmlns:loext="urn:loext"')
        + '</text:list-style><text:list-style style:name="B">'
        + level.format("bullet", 1, "", 'text:bullet-char="o"')
        + "</text:list-style>"
    )
    items = "<text:list-item{}>{}</text:list-item>"
    inner = f"<text:list>{items.format('', '<text:p>b</text:p><text:p>more</text:p>')}</text:list>"
    inner += "".join(
        f"<text:list>{items.format('', f'<text:list>{each}</text:list>')}</text:list>"
        for each in [
            items.format("", "<text:p>c</text:p>"),
            items.format(' text:start-value="5"', "<text:p>d</text:p>"),
        ]
    )
    other = items.format(' text:style-override="B"', "<text:p>other</text:p>")
    body = (
        f'<text:list xml:id="one" text:style-name="L"><text:list-header><text:p>head</text:p></text:list-header>'
        f"{items.format('', f'<text:p>A</text:p>{inner}')}</text:list>"
        f'<text:list text:style-name="B">{items.format("", "<text:p>bullet</text:p>")}</text:list>'
        f'<text:list text:style-name="L" text:continue-numbering="true">{items.format("", "<text:p>B</text:p>")}'
        f'</text:list><text:list text:style-name="L">{items.format("", "<text:p>new</text:p>")}</text:list>'
        f'<text:list text:style-name="L" text:continue-list="one">{items.format("", "<text:p>C</text:p>")}'
        f"{other}</text:list>"
    )
    assert odt_lines(body, styles) == [
        *("head", "Art. III A", "III.1. b", "more", "(a) c", "(e) d", "bullet", "Art. IV B", "Art. III new"),
        *("Art. V C", "other"),
    ]


def test_numbers_of_nested_odt_lists_are_read() -> None:
    """LibreOffice shows the same numbers."""
    level = '<text:list-level-style-number text:level="{}" style:num-format="{}" text:display-levels="2" {}/>'
    styles = (
        f'<text:list-style style:name="L">{level.format(1, "I", "")}{level.format(2, 1, "")}'
        + level.format(3, "", 'style:num-prefix="Note"')
        + "</text:list-style>"
        f'<text:list-style style:name="M">{level.format(1, "A", "")}</text:list-style>'
    )
    nested = "<text:list{}><text:list-item>{}</text:list-item></text:list>"
    inner = [nested.format(' text:style-name="L"', f"<text:p>{each}</text:p>") for each in ("b", "c")]
    deep = nested.format("", nested.format("", nested.format("", "<text:p>d</text:p>")))
    body = nested.format(' text:style-name="M"', f"<text:p>A</text:p>{''.join(inner)}")
    more = nested.format(' text:style-name="L" text:continue-numbering="true"', inner[0])
    body += more + deep.replace("<text:list>", '<text:list text:style-name="L">', 1)
    assert odt_lines(body, styles) == ["A A", "I.1 b", "I.1 c", "I.2 b", "Note d"]


def test_numbers_of_odt_headings_are_read() -> None:
    styles = (
        "<text:outline-style>"
        + "".join(
            f'<text:outline-level-style text:level="{level}" style:num-format="1" text:display-levels="{level}"/>'
            for level in (1, 2)
        )
        + '</text:outline-style><style:style style:name="Plain" style:list-style-name=""/>'
        '<style:style style:name="P1" style:parent-style-name="Plain"/>'
    )
    heading = '<text:h text:outline-level="{}"{}>{}</text:h>'
    frame = "<draw:text-box xmlns:draw='urn:draw'><text:p>box</text:p></draw:text-box>"
    headings = (
        *((1, "", f"{frame}A"), (2, "", "b"), (2, ' text:style-name="P1"', "x")),
        *((2, ' text:is-list-header="true"', "y"), (2, "", "<text:number>1.2</text:number>c"), (1, "", "B")),
    )
    body = "".join(heading.format(*each) for each in headings)
    body += heading.format(1, "", "<text:soft-page-break/>C") + heading.format(1, "", "D<text:soft-page-break/>d")
    lines = ["box", "# 1 A", "## 1.1 b", "## x", "## y", "## 1.2 c", "# 2 B", "# 3 C", "# 4 D", "d"]
    assert odt_lines(body, styles) == lines


def test_numbers_of_pptx_are_read() -> None:
    items = (
        *(("a", 0, "arabicPeriod", ""), ("b", 0, "arabicPeriod", ""), ("c", 1, "alphaLcParenBoth", ' startAt="3"')),
        *(("", 0, "arabicPeriod", ""), ("d", 0, "arabicPeriod", ""), ("e", 0, "", ""), ("f", 0, "arabicPeriod", "")),
        *(("g", 1, "romanUcPlain", ""), ("h", 10**6, "strange", "")),
    )
    text = "".join(
        f'<a:p><a:pPr lvl="{level}">{f"<a:buAutoNum type={form!r}{more}/>" if form else ""}</a:pPr><a:r><a:t>{each}'
        "</a:t></a:r></a:p>"
        for each, level, form, more in items
    )
    lines = read_here(pptx([f"<p:txBody>{text}</p:txBody>" * 2]), "a.pptx").text.split("\n\n")
    assert lines == ["1. a", "2. b", "(c) c", "3. d", "e", "1. f", "I g", "1. h"] * 2


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("<ol><li>a<li>b<ul><li>c</ul><li>d</ol>", "1. a|2. b|- c|3. d"),
        ("<ol start=3 type=a><li>a<li value=7>b<li>c</ol>", "c. a|g. b|h. c"),
        ("<ol reversed><li>a<li>b</ol><ol reversed start=9><li>c<li>d</ol>", "2. a|1. b|9. c|8. d"),
        ('<ol style="list-style: upper-roman inside"><li>a<ol><li>b</ol></ol>', "I. a|1. b"),
        ('<ol style="list-style:none"><li>a</ol><ol type=I><li hidden>x<li>b', "- a|I. b"),
        ("<ol start=x><li value=>a<li style='list-style-type:disc'>b<li>c</ol><li>d", "1. a|- b|3. c|- d"),
        ("x <b>y</b> <p>a<ul><li></li> </ul> <p>b", "x y|a|-|b"),
        ("<ol><li><p>a<li> <div>b</div><li><h1>c</h1>", "1. a|2. b|3.|# c"),
        ("<nav><ol><li>Preface<li>Chapter 1<ol><li>x</ol></ol></nav><ol><li>a", "- Preface|- Chapter 1|- x|1. a"),
        ("<ol><li> 1. a<li><p><a>2.</a> b<li>3.5<li>4) d<ul><li>- e", "1. a|2. b|3. 3.5|4. 4) d|- e"),
        ("<table><tr><td><ol reversed><li>a<td>b</table><ol start=-1><li>c<li>d<li>e", "| - a | b ||-1. c|0. d|1. e"),
    ],
)
def test_numbers_of_html_are_read(html: str, shown: str) -> None:
    lines = read_here(html.encode(), "a.html").text.split("\n")
    assert "|".join(each for each in lines if each and "---" not in each) == shown


def field(*instruction: str) -> str:
    code = "".join(f"<w:r><w:instrText>{each}</w:instrText></w:r>" for each in instruction)
    return f'<w:r><w:fldChar w:fldCharType="begin"/></w:r>{code}<w:r><w:fldChar w:fldCharType="end"/></w:r>'


def test_numbers_of_listnum_fields_are_read() -> None:
    simple = "<w:fldSimple w:instr=' LISTNUM \"Legal default\" '/>".replace(" default", "Default")
    fields = (
        *(field(" LIST", "NUM "), field("LISTNUM \\l 2"), field(" listnum NumberDefault \\l 2"), field("LISTNUM")),
        *(simple, field("LISTNUM LegalDefault \\l 3 \\s 4"), field("LISTNUM OutlineDefault \\l 2"), field("PAGE")),
        *(field('LISTNUM "Own"'), field("LISTNUM Own \\s 7"), field("LISTNUM Own")),
    )
    text = "<w:r><w:t>,</w:t></w:r>".join(fields)
    name = '<w:name w:val="Own"/>'
    body = f"<w:p>{text}</w:p>" + item("a", number=2).replace("</w:p>", field("LISTNUM") * 2 + "</w:p>")
    numbering = definition(1, [("upperLetter", "%1/")], name) + definition(2, OUTLINE) + listed(2, 2)
    lines = word_lines(body, numbering)
    assert lines == ["1),a),b),2),1.,1.1.4.,A.,,A/,G/,H/", "1. a1.11.2"]
    end = '<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    result = field("LISTNUM").replace(end, f"{end.replace('end', 'separate')}<w:r><w:t>1)</w:t></w:r>{end}")
    hidden = field("LISTNUM").replace("<w:r>", "<w:r><w:rPr><w:vanish/></w:rPr>")
    assert word_lines(f"<w:p>{result}</w:p><w:p>{hidden}<w:r><w:t>a</w:t></w:r></w:p>", numbering) == ["1)", "a"]


def test_listnum_fields_belong_to_the_list_of_their_paragraph() -> None:
    numbering = definition(2, OUTLINE) + listed(2, 2)
    plain = f"<w:p>{field('LISTNUM')}</w:p>"
    assert word_lines(item("a", number=2) + plain, numbering) == ["1. a", "1)"]
    box = f"<w:r><w:txbxContent>{plain}</w:txbxContent></w:r>"
    around = item("a", number=2).replace("</w:p>", f"{box}{field('LISTNUM')}</w:p>")
    assert word_lines(around, numbering) == ["1)", "1. a1.1"]
