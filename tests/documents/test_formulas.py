"""Superscripts, marks of footnotes and formulas are not read as digits of the number before them."""

from __future__ import annotations

import re
import unicodedata

import pytest
from documents.made import A, W, docx, odt, pdf, pdf_of, pptx, stream, xlsx
from documents.test_traps import read_here

from notso.documents.formulas import raised

M = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
MATHML = 'xmlns="http://www.w3.org/1998/Math/MathML"'


def run(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t xml:space='preserve'>{text}</w:t></w:r>"


def office_math(content: str) -> str:
    return read_here(docx(f"<w:p {M}><m:oMath>{content}</m:oMath></w:p>"), "a.docx").text


def value(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("6", "⁶"), ("-12", "⁻¹²"), ("2k", "^(2k)"), (" 2 ", " ² "), ("1,3", "^(1,3)")),
        *(("st", "st"), ("e", "e"), ("x", "x"), ("®", "®"), ("[1]", "[1]"), ("°", "°"), ("", ""), (" ", " ")),
        ("All prices of 2024", "All prices of 2024"),
    ],
)
def test_superscripts_are_marked_unless_they_are_words(text: str, shown: str) -> None:
    assert raised(text) == shown


def test_superscripts_of_docx_do_not_change_numbers() -> None:
    high = '<w:vertAlign w:val="superscript"/>'
    text = run("In 2020") + run("1", high) + run(" there were 10") + run("6", high) + run(" things")
    assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "In 2020¹ there were 10⁶ things"
    text = run("10") + run("-", high) + run("6", high) + run(" m") + run("2", high)
    assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "10⁻⁶ m²"


def test_hidden_text_of_docx_is_omitted() -> None:
    shown = run("b", '<w:vanish w:val="0"/>')
    assert read_here(docx(f"<w:p>{run('a')}{run('hidden', '<w:vanish/>')}{shown}</w:p>"), "a.docx").text == "ab"


def test_properties_of_docx_before_a_tracked_change_do_not_apply() -> None:
    for old in ('<w:vertAlign w:val="superscript"/>', "<w:vanish/>"):
        text = run("10") + run("6", f"<w:rPrChange><w:rPr>{old}</w:rPr></w:rPrChange>")
        assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "106"
    old = '<w:pPr><w:pPrChange><w:pPr><w:pStyle w:val="Heading1"/></w:pPr></w:pPrChange></w:pPr>'
    assert read_here(docx(f"<w:p>{old}{run('a')}</w:p>"), "a.docx").text == "a"


@pytest.mark.parametrize("slash", ["/", "\u2044"])
def test_fractions_of_docx_are_not_powers(slash: str) -> None:
    def run(text: str, align: str = "baseline") -> str:
        return f'<w:r><w:rPr><w:vertAlign w:val="{align}"/></w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'

    half = run("1", "superscript") + run(slash) + run("2", "subscript")
    shown = f"<w:p>{run('3')}{half}{run(' cups, ')}{half}{run(' kg, 10')}{run('3', 'superscript')}{run('/2')}</w:p>"
    assert read_here(docx(shown), "a.docx").text == f"3 1{slash}2 cups, 1{slash}2 kg, 10³/2"


def test_superscripts_of_pptx_do_not_change_numbers() -> None:
    runs = (("10", 0), ("6", 30000), (" of 2", -25000), (" and 3", 0))
    text = "".join(f'<a:r><a:rPr baseline="{at}"/><a:t>{each}</a:t></a:r>' for each, at in runs)
    assert read_here(pptx([f"<a:p>{text}</a:p>"]), "a.pptx").text == "10⁶ of 2 and 3"


@pytest.mark.parametrize("prefix", ["", "x:"])
def test_superscripts_of_xlsx_do_not_change_numbers(prefix: str) -> None:
    run = "<r><rPr>{}</rPr><t xml:space='preserve'>{}</t></r>"
    high, low, struck = '<vertAlign val="superscript"/>', '<vertAlign val="subscript"/>', "<strike/>"
    power = run.format("", "10") + run.format(high, "6") + "<rPh><t>read</t></rPh>"
    base, price = run.format("", "101") + run.format(low, "2"), run.format(struck, "100") + run.format("", "80")
    main = "xmlns{}='http://schemas.openxmlformats.org/spreadsheetml/2006/main'"
    strings = f"<sst {main.format('')}><si><t>106</t></si><si>{power}</si><si>{base}</si><si>{price}</si></sst>"
    cells = "".join(f'<c r="{at}1" t="s"><v>{number}</v></c>' for number, at in enumerate("BCDE"))
    inline = f'<c r="F1" t="inlineStr"><is>{power}</is></c><c r="G1" t="inlineStr"><is><t>106</t></is></c>'
    error = '<c r="H1" t="e"><f>1/0</f><v>#DIV/0!</v></c><c r="I1"><v>7</v></c><c r="J1" t="e"><v>#N/A</v></c>'
    sheet = f"<worksheet {main.format('')}><sheetData><row r='1'>{cells}{inline}{error}</row></sheetData></worksheet>"
    if prefix:
        sheet = re.sub("(</?)(?=[a-z])", r"\1x:", sheet).replace("xmlns=", "xmlns:x=")
    made = xlsx("", **{"xl/worksheets/sheet1.xml": sheet, "xl/sharedStrings.xml": strings})
    line = read_here(made, "a.xlsx").text.splitlines()[2]
    assert line == "| 106 | 10⁶ | 101_2 | ~~100~~80 | 10⁶ | 106 | #DIV/0! | 7 | #N/A |"


def test_superscripts_and_notes_of_odt_do_not_change_numbers() -> None:
    style = 'xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0"'
    styles = f'<s {style}><style:style style:name="T{{}}"><style:text-properties style:text-position="{{}} 58%"/>'
    high = styles.format(1, "super") + "</style:style></s>"
    low = styles.format(2, "sub") + "</style:style></s>"
    note = (
        "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>A note.</text:p>"
        "<text:p>More.</text:p></text:note-body></text:note>"
    )
    text = f'In 2020{note} there were 10<text:span text:style-name="T1">6</text:span>'
    body = f'<text:p>{text} H<text:span text:style-name="T2">2</text:span>O</text:p><text:p>end</text:p>'
    for made in (
        odt(f"<office:automatic-styles>{high}{low}</office:automatic-styles>{body}"),
        odt(body, **{"styles.xml": f"<styles>{high}{low}</styles>"}),
    ):
        document = read_here(made, "a.odt")
        plain = document.text.replace("10⁶", "106")
        assert plain == "In 2020[1] there were 106 H2O\n\nend\n\n## Footnotes\n\n[1] A note.\n\nMore."
    assert "106 H2O" in document.text or "10⁶ H2O" in document.text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (b"(In 2020) Tj %s (1) Tj %s ( there were 10) Tj %s (6) Tj %s ( things) Tj", "In 2020¹ there were 10⁶ things"),
        (b"(10) Tj %s (-12) Tj %s 30 0 Td (m) Tj", "10⁻¹² m"),
        (b"(10) Tj %s (6) Tj %s 0 -20 Td (next) Tj", "10⁶\nnext"),
        (b"(H) Tj /F1 8 Tf -3 Ts (2) Tj 0 Ts /F1 12 Tf (O) Tj", "H2O"),
        (b"(Total) Tj /F1 8 Tf 90 3 Td (2) Tj", "Total 2"),
        (b"(2020) Tj 40 0 Td (1) Tj", "2020 1"),
        (b"/F1 36 Tf (A) Tj /F1 12 Tf 13 Ts (2019 report found) Tj", "A\n2019 report found"),
    ],
)
def test_superscripts_of_pdf_do_not_change_numbers(shown: bytes, text: str) -> None:
    high, normal = b"/F1 8 Tf 5 Ts", b"0 Ts /F1 12 Tf"
    for change in (high, normal) * shown.count(b"%s"):
        shown = shown.replace(b"%s", change, 1)
    assert read_here(pdf([stream(b"BT /F1 12 Tf 50 700 Td %s ET" % shown)]), "a.pdf").text == text


@pytest.mark.parametrize(
    ("size", "rise", "shown", "text"),
    [
        (8, -3, b"(H) Tj %s (2) Tj %s (O and CO) Tj %s (2) Tj %s ( gas) Tj", "H2O and CO2 gas"),
        (8, -3, b"(101) Tj %s (2) Tj %s ( = 5) Tj", "101_2 = 5"),
        (8, 0, b"(19) Tj %s (99) Tj %s ( EUR) Tj", "1999 EUR"),
        (8, 5, b"(3) Tj %s (1) Tj 0 Ts /F1 12 Tf (/) Tj /F1 8 Tf (2) Tj %s ( cups) Tj", "3 1/2 cups"),
        (8, 5, b"(10) Tj %s (3) Tj %s (/2) Tj", "10\u00b3/2"),
        (8, -3, b"(log) Tj %s (10) Tj %s (100) Tj", "log10 100"),
        (8, 5, b"(In 2020) Tj %s (1) Tj %s", "In 2020\u00b9"),  # at the end of the page
        (8, 5, b"(2) Tj %s (1/12) Tj %s ( as a factor) Tj", "2^(1/12) as a factor"),
    ],
)
def test_subscripts_of_pdf_do_not_change_numbers(size: int, rise: int, shown: bytes, text: str) -> None:
    for change in (b"/F1 %d Tf %d Ts" % (size, rise), b"0 Ts /F1 12 Tf") * shown.count(b"%s"):
        shown = shown.replace(b"%s", change, 1)
    assert read_here(pdf([stream(b"BT /F1 12 Tf 50 700 Td %s ET" % shown)]), "a.pdf").text == text


def test_superscripts_of_pdf_after_characters_of_two_units_are_marked() -> None:
    shown = b"(AA in 2020 there were 10) Tj /F1 8 Tf 5 Ts (6) Tj 0 Ts /F1 12 Tf ( things) Tj"
    letter_a = b"begincmap 1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <41> <D83DDE00> endbfchar"
    made = pdf_of(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [10 0 R] /Count 1 >>",
            3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 4 0 R >>",
            4: stream(letter_a + b" endcmap"),
            10: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            b"/Contents 11 0 R >>",
            11: stream(b"BT /F1 12 Tf 50 700 Td %s ET" % shown),
        }
    )
    assert read_here(made, "a.pdf").text == "\U0001f600\U0001f600 in 2020 there were 10⁶ things"


def test_pdf_characters_without_a_box_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pypdfium2 = pytest.importorskip("pypdfium2")

    def fail(*_: object, **__: object) -> None:
        raise pypdfium2.PdfiumError("no box")

    monkeypatch.setattr(pypdfium2.PdfTextPage, "get_charbox", fail)
    assert read_here(pdf([stream(b"BT /F1 12 Tf 50 700 Td (In 2020 or 21) Tj ET")]), "a.pdf").text == "In 2020 or 21"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("10<sup>6</sup> m<sup>2</sup>, 1<sup>st</sup>, x<sup><i>3</i></sup>", "10⁶ m², 1st, x³"),
        ("in 2020<sup><a href='#1'>1</a></sup>, wiki<sup>[<a>2</a>]</sup>", "in 2020¹, wiki[2]"),
        ("in 2020<a epub:type='noteref'>1</a> or 2021<a role='doc-noteref'>2</a>", "in 2020¹ or 2021²"),
        ("10<sup><span>-</span><span>6</span></sup>, 2<sup>1</sup>/<sup>3</sup>", "10⁻⁶, 2¹/³"),
        ("let <math><mfrac><mn>1</mn><mn>3</mn></mfrac></math> be", "let 1/3 be"),
        ("<math alttext='\\frac{1}{3}'><mfrac><mn>1</mn><mn>3</mn></mfrac></math>", "$\\frac{1}{3}$"),
        (
            "<math><semantics><mrow><mi>x</mi></mrow><annotation encoding='application/x-tex'>\\vec x"
            "</annotation></semantics></math> is",
            "$\\vec x$ is",
        ),
        (
            "<math><semantics>\n<mrow><msup><mi>x</mi><mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow></msup></mrow>\n"
            "<annotation encoding='StarMath 5.0'>x^{n+1}</annotation></semantics></math>",
            "xⁿ⁺¹",
        ),
        ("<math><msqrt><mi>a</mi><mo>+</mo><mi>b</mi></msqrt></math>", "√(a+b)"),
        ("<math><mroot><mn>8</mn><mn>3</mn></mroot></math>", "³√8"),
        ("<math><msubsup><mo>∑</mo><mn>1</mn><mi>k</mi></msubsup></math>", "∑_1^k"),
        ("<math><mn>1</mn><mfrac><mn>1</mn><mn>2</mn></mfrac><mn>3</mn></math>", "1 1/2 3"),
        ("<math><mfrac><mn>1</mn><mi>x</mi></mfrac><mi>y</mi><mn>1</mn><mn>2</mn></math>", "1/x y12"),
        ("<math><mstyle><mfrac><mi>a</mi><mn>2</mn></mfrac></mstyle><mo>=</mo><mi>c</mi></math>", "a/2=c"),
        ("<math><msup><msup><mi>x</mi><mn>2</mn></msup><mn>3</mn></msup><mi>y</mi></math>", "(x²)³y"),
        ("<math><msub><mi>x</mi><mn>1</mn></msub><mn>2</mn></math>", "x_1 2"),
        ("<math><mn>2</mn><msup><mn>10</mn><mn>6</mn></msup></math>", "2 10⁶"),
        (
            "<math><mmultiscripts><mi>C</mi><none/><mo>+</mo><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts></math>",
            "_6¹⁴C⁺",
        ),
        ("<math><mmultiscripts><mi>C</mi><mprescripts/><mn>6</mn><none/></mmultiscripts></math>", "_6 C"),
        ("<math><mmultiscripts></mmultiscripts><mi>a</mi></math>", "a"),
        ("<math><mfenced open='['><mi>a</mi><mi>b</mi></mfenced></math>", "[a, b)"),
        (
            "<math><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd></mtr></mtable>",
            "[1, 2; 3]",
        ),
        ("<math><mrow><mi>x</mi><p>not closed</p>", "x\nnot closed"),
        ("<m:math><m:mfrac><m:mn>1</m:mn><m:mn>2</m:mn></m:mfrac></m:math>", "1/2"),
        ("<math hidden><mi>x</mi></math>a<math style='display: none'><mi>x</mi></math>", "a"),
        ("<math><style>mi { color: red }</style><mi>x</mi></math>", "x"),
        ("<math><semantics><mi>x</mi><mo>=</mo><annotation>y</annotation></semantics></math>", "x="),
        ("<p hidden><math><mi>x</mi></math></p>a</math></mi>", "a"),
        (
            "<span class='katex'><math><mn>2</mn></math><span class='katex-html'>2</span></span> is",
            "2 is",
        ),
    ],
)
def test_formulas_and_superscripts_of_html_are_read(html: str, text: str) -> None:
    assert read_here(html.encode(), "a.html").text == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (f"<m:f><m:num>{value('1')}</m:num><m:den>{value('3')}</m:den></m:f>", "1/3"),
        (f"<m:f><m:num>{value('a+1')}</m:num><m:den>{value('b')}</m:den></m:f>", "(a+1)/b"),
        (
            f"<m:f><m:fPr><m:type m:val='noBar'/></m:fPr><m:num>{value('n')}</m:num><m:den>{value('k')}</m:den></m:f>",
            "(n; k)",
        ),
        (f"<m:sSup><m:e>{value('10')}</m:e><m:sup>{value('6')}</m:sup></m:sSup>", "10⁶"),
        (f"<m:sSub><m:e>{value('x')}</m:e><m:sub>{value('10')}</m:sub></m:sSub>{value('2')}", "x_10 2"),
        (f"{value('2')}<m:d><m:e>{value('x+1')}</m:e></m:d>", "2(x+1)"),
        (
            f"<m:d><m:dPr><m:begChr m:val='['/><m:endChr m:val=''/></m:dPr><m:e>{value('x')}</m:e></m:d>",
            "[x",
        ),
        (f"<m:rad><m:radPr><m:degHide m:val='1'/></m:radPr><m:deg/><m:e>{value('2x')}</m:e></m:rad>", "√2x"),
        (
            f"<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub>{value('i=0')}</m:sub><m:sup>{value('k')}</m:sup>"
            f"<m:e>{value('i')}</m:e></m:nary>",
            "∑_(i=0)^k i",
        ),
        (f"<m:func><m:fName>{value('sin')}</m:fName><m:e>{value('x')}</m:e></m:func>", "sin x"),
        (f"{value('x')}<w:del>{value('1')}</w:del><w:moveFrom>{value('2')}</w:moveFrom>{value('3')}", "x3"),
        (f"{value('x')}<w:del><m:oMath>{value('1')}</m:oMath></w:del><m:oMath>{value('3')}</m:oMath>", "x3"),
        (f"<m:m><m:mr><m:e>{value('1')}</m:e><m:e>{value('2')}</m:e></m:mr></m:m>", "[1, 2]"),
    ],
)
def test_formulas_of_docx_are_read(content: str, text: str) -> None:
    assert office_math(content) == text


def test_text_after_nested_formulas_of_docx_is_read() -> None:
    fallback = f"<w:Fallback><m:oMath>{value('2')}</m:oMath></w:Fallback>"
    made = docx(f"<w:p {M}><m:oMath>{value('1')}{fallback}</m:oMath>{run(' end')}</w:p>")
    assert read_here(made, "a.docx").text == "1 end"


def test_formulas_of_pptx_and_odt_are_read() -> None:
    fraction = f"<m:oMath {M}><m:f><m:num>{value('1')}</m:num><m:den>{value('3')}</m:den></m:f></m:oMath>"
    choice = f"<x:AlternateContent {A} xmlns:x='x'><x:Choice><a:p>{fraction}</a:p></x:Choice>"
    made = pptx([f"{choice}<x:Fallback><a:p><a:r><a:t>image</a:t></a:r></a:p></x:Fallback></x:AlternateContent>"])
    assert read_here(made, "a.pptx").text == "1/3"
    link = 'xmlns:xlink="http://www.w3.org/1999/xlink" xlink:href="./{}"'
    body = "".join(f"<office:object {link.format(name)}/> and " for name in ("Object 1", "Object 2", "Object 3"))
    body += f"<office:object {link.format('../../sheet.ods')}/>"
    formula = f"<math {MATHML}><mfrac><mn>1</mn><mn>3</mn></mfrac></math>"
    sheet = "<document-content><p>cell</p></document-content>"
    parts = {"Object 1/content.xml": formula, "Object 2/content.xml": sheet}
    assert read_here(odt(f"<text:p>{body}end</text:p>", **parts), "a.odt").text == "1/3 and  and  and end"


def test_struck_text_is_marked() -> None:
    """Otherwise, 100 struck through and replaced by 80 would be 10080."""
    html = b"<p>Was <del>1</del><del>00</del>80 m<s><b> old</b> </s>x<i style='text-decoration:line-through'>y</i>"
    assert read_here(html, "a.html").text == "Was ~~100~~80 m ~~old~~ x~~y~~"
    forms = ("", "<w:strike/>", '<w:strike w:val="0"/>', "<w:dstrike/><w:vanish/>", '<w:dstrike/><w:strike w:val="0"/>')
    texts = "".join(map(run, ("Was ", "100", "80", "hidden", "x"), forms))
    assert read_here(docx(f"<w:p>{texts}</w:p>"), "a.docx").text == "Was ~~100~~80~~x~~"
    runs = '<a:r><a:rPr strike="sngStrike"/><a:t>100</a:t></a:r><a:r><a:rPr strike="noStrike"/><a:t>80</a:t></a:r>'
    style = '<style:style style:name="T1"><style:text-properties style:text-line-through-style="{}"/></style:style>'
    styles = f'<s xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0">{style.format("solid")}</s>'
    text = '<text:p><text:span text:style-name="T1">100</text:span>80</text:p>'
    for made, name in ((pptx([f"<a:p>{runs}</a:p>"]), "a.pptx"), (odt(text, **{"styles.xml": styles}), "a.odt")):
        assert read_here(made, name).text == "~~100~~80"


def test_text_in_symbol_fonts_is_read() -> None:
    """10 m in the font Symbol is shown as 10 μ."""
    font = '<w:rFonts w:ascii="{0}" w:hAnsi="{0}"/>'
    text = (
        run("10 ") + run("m\uf06d1", font.format("Symbol")) + run("g\uf06d ") + run("\u00fc", font.format("Wingdings"))
    )
    assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "10 μμ1g\uf06d ✓"
    runs = "".join(
        f"<a:r><a:rPr>{form}</a:rPr><a:t>{each}</a:t></a:r>"
        for each, form in (
            ("m", '<a:latin typeface="Symbol"/>'),
            ("m\uf0e0", '<a:sym typeface="Wingdings"/>'),
            ("m", ""),
        )
    )
    assert read_here(pptx([f"<a:p>{runs}</a:p>"]), "a.pptx").text == "μm→m"


def test_notes_of_docx_are_read_with_their_marks() -> None:
    mark = '<w:r><w:{}Reference w:id="{}"/></w:r>'
    own = '<w:r><w:footnoteReference w:id="9" w:customMarkFollows="1"/><w:t>*</w:t></w:r>'
    note = '<w:{0} w:id="{1}"><w:p><w:r><w:{0}Ref/></w:r><w:r><w:t xml:space="preserve"> {2}</w:t></w:r></w:p></w:{0}>'
    footnotes = note.format("footnote", 7, "second") + note.format("footnote", 3, "first")
    document = read_here(
        docx(
            f"<w:p>{run('a')}{mark.format('footnote', 3)}{run(' b')}{own}{run('c')}{mark.format('footnote', 7)}"
            f"{run('d')}{mark.format('endnote', 3)}</w:p>",
            **{
                "word/footnotes.xml": f"<w:footnotes {W}>{footnotes}</w:footnotes>",
                "word/endnotes.xml": f"<w:endnotes {W}>{note.format('endnote', 3, 'end')}</w:endnotes>",
            },
        ),
        "a.docx",
    )
    assert document.text == "a¹ b*c²d[i]\n\n## Footnotes\n\n² second\n\n¹ first\n\n## Endnotes\n\n[i] end"


def test_letters_of_odt_notes_do_not_continue_words() -> None:
    body = "<text:note-body><text:p>A note.</text:p></text:note-body>"
    note = f"<text:note><text:note-citation>i</text:note-citation>{body}</text:note>"
    document = read_here(odt(f"<text:p>price{note}</text:p>"), "a.odt")
    assert document.text == "price[i]\n\n## Footnotes\n\n[i] A note."


def test_notes_of_docx_are_marked_as_its_settings_state() -> None:
    marks = "".join(f'<w:r><w:{kind}noteReference w:id="2"/></w:r>' for kind in ("foot", "end"))
    forms = (
        '<w:footnotePr><w:numFmt w:val="lowerLetter"/><w:numStart w:val="2"/></w:footnotePr>'
        '<w:endnotePr><w:numFmt w:val="decimal"/></w:endnotePr>'
    )
    made = docx(f"<w:p>{run('a')}{marks}</w:p>", **{"word/settings.xml": f"<w:settings {W}>{forms}</w:settings>"})
    assert read_here(made, "a.docx").text == "a[b]¹"


@pytest.mark.parametrize(
    ("settings", "sections", "marks"),
    [
        ('<w:numRestart w:val="eachPage"/>', ("", ""), "1 2 1 1 2"),
        ('<w:numRestart w:val="eachSect"/>', ("", ""), "1 2 3 1 2"),
        (
            "",
            ('<w:numFmt w:val="lowerLetter"/>', '<w:numRestart w:val="eachSect"/><w:numStart w:val="4"/>'),
            "a b c 4 5",
        ),
        ("", ("", '<w:numFmt w:val="upperRoman"/>'), "1 2 3 IV V"),
    ],
)
def test_note_marks_of_docx_restart(settings: str, sections: tuple[str, str], marks: str) -> None:
    note = 'w <w:footnoteReference w:id="{}"/>'
    first, last = (f"<w:sectPr><w:footnotePr>{each}</w:footnotePr></w:sectPr>" for each in sections)
    old = "<w:sectPrChange><w:sectPr/></w:sectPrChange></w:sectPr>"
    body = (
        f"<w:p><w:pPr>{first.replace('</w:sectPr>', old)}</w:pPr><w:r><w:t>w</w:t>{note.format(1)}{note.format(2)}"
        f'<w:br w:type="page"/>{note.format(3)}</w:r></w:p>'
        f"<w:p><w:r><w:lastRenderedPageBreak/>{note.format(4)}{note.format(5)}</w:r></w:p>{last}"
    )
    own = "".join(f'<w:footnote w:id="{at}"><w:p><w:r><w:footnoteRef/></w:r></w:p></w:footnote>' for at in range(1, 6))
    made = docx(
        body,
        **{
            "word/settings.xml": f"<w:settings {W}><w:footnotePr>{settings}</w:footnotePr></w:settings>",
            "word/footnotes.xml": f"<w:footnotes {W}>{own}</w:footnotes>",
        },
    )
    notes = read_here(made, "a.docx").text.partition("## Footnotes")[2]
    assert [each.strip("[]") for each in unicodedata.normalize("NFKC", notes).split()] == marks.split()


def test_note_marks_of_docx_after_numbers_are_not_powers() -> None:
    note = '<w:r><w:footnoteReference w:id="{}"/></w:r>'
    text = run("w") + note.format(1) + run(" costs 10") + note.format(2)
    assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "w¹ costs 10[2]"


def test_signs_of_symbol_fonts_are_read() -> None:
    codes = ("F0D7", "F03C", "F02D", "D800", "E000")
    signs = run("5").join(f'<w:r><w:sym w:font="Symbol" w:char="{each}"/></w:r>' for each in codes)
    other = '<w:r><w:sym w:font="Arial" w:char="2264"/><w:sym w:font="Arial" w:char="D800"/></w:r>'
    text = run("\uf02b\uf0d7", '<w:rFonts w:ascii="Symbol"/>')
    assert read_here(docx(f"<w:p>{signs}{other}{text}</w:p>"), "a.docx").text == "⋅5<5-55≤+⋅"


def test_subscripts_beside_digits_are_separated() -> None:
    """Otherwise, the logarithm to the base 10 of 100 would be log10100."""
    texts = (("log", 0), ("10", -25000), ("100 H", 0), ("2", -25000), ("O 101", 0), ("2", -25000), (".", 0))
    shown = "log10 100 H2O 101_2."
    html = "".join(f"<sub>{text}</sub>" if low else text for text, low in texts)
    assert read_here(f"<p>{html}".encode(), "a.html").text == shown
    low = '<w:vertAlign w:val="subscript"/>'
    word = "".join(run(text, low if below else "") for text, below in texts)
    assert read_here(docx(f"<w:p>{word}</w:p>"), "a.docx").text == shown
    slide = "".join(f'<a:r><a:rPr baseline="{below}"/><a:t>{text}</a:t></a:r>' for text, below in texts)
    assert read_here(pptx([f"<a:p>{slide}</a:p>"]), "a.pptx").text == shown
    style = '<style:style style:name="T1"><style:text-properties style:text-position="sub 58%"/></style:style>'
    styles = f'<s xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0">{style}</s>'
    writer = "".join(f'<text:span text:style-name="T1">{text}</text:span>' if low else text for text, low in texts)
    assert read_here(odt(f"<text:p>{writer}</text:p>", **{"styles.xml": styles}), "a.odt").text == shown


def test_note_marks_after_superscripts_are_separate() -> None:
    reference = '<w:r><w:footnoteReference w:id="2"/></w:r>'
    text = run("5 m") + run("2", '<w:vertAlign w:val="superscript"/>') + reference
    assert read_here(docx(f"<w:p>{text}</w:p>"), "a.docx").text == "5 m²[1]"
