"""Small documents of every kind, created in memory."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
A = (
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
    'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
)
WORDS = ["heron", "stork", "crane", "egret"]
GRID = "<w:tbl>{}</w:tbl>"  # of DOCX; with rows
FONTS = b"<< /Font << /F1 3 0 R >> >>"  # resources of a page
RELATIONSHIPS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
ODF = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"'
)


def archive(members: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", method) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return held.getvalue()


def relations(given: Mapping[str, tuple[str, str]]) -> str:
    rows = "".join(
        f'<Relationship Id="{i}" Type="{RELATIONSHIPS}/{kind}" Target="{to}"/>' for i, (kind, to) in given.items()
    )
    return f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{rows}</Relationships>'


def docx(body: str, **members: str | bytes) -> bytes:
    """Create a Word document. `body` is the content of w:body; further members are added, or replace its files."""
    own: dict[str, str | bytes] = {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": relations({"rId1": ("officeDocument", "word/document.xml")}),
        "word/document.xml": f"<w:document {W}><w:body>{body}</w:body></w:document>",
    }
    return archive(own | members)


def paragraph(text: str, style: str = "") -> str:
    marked = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{marked}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def pptx(slides: Iterable[str], **members: str | bytes) -> bytes:
    texts = list(slides)
    ids = "".join(f'<p:sldId r:id="rId{n}" id="{255 + n}"/>' for n in range(1, len(texts) + 1))
    own: dict[str, str | bytes] = {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": relations({"rId1": ("officeDocument", "ppt/presentation.xml")}),
        "ppt/presentation.xml": f"<p:presentation {A}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>",
        "ppt/_rels/presentation.xml.rels": relations(
            {f"rId{n}": ("slide", f"slides/slide{n}.xml") for n in range(1, len(texts) + 1)}
        ),
    }
    for n, text in enumerate(texts, start=1):
        own[f"ppt/slides/slide{n}.xml"] = f"<p:sld {A}>{text}</p:sld>"
    return archive(own | members)


def odt(body: str, kind: str = "text", **members: str | bytes) -> bytes:
    own: dict[str, str | bytes] = {
        "mimetype": f"application/vnd.oasis.opendocument.{kind}",
        "content.xml": f"<office:document-content {ODF}><office:body><office:{kind}>{body}</office:{kind}>"
        "</office:body></office:document-content>",
    }
    return archive(own | members)


def epub(chapters: Mapping[str, str], **members: str | bytes) -> bytes:
    items = "".join(f'<item id="c{n}" href="{name}"/>' for n, name in enumerate(chapters))
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    own: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        "OPS/book.opf": f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>",
    }
    return archive(own | {f"OPS/{name}": text for name, text in chapters.items()} | members)


def xlsx(cells: str, name: str = "Prices", **members: str | bytes) -> bytes:
    """Create a workbook with one sheet; `cells` is the content of sheetData."""
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    own: dict[str, str | bytes] = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "_rels/.rels": relations({"rId1": ("officeDocument", "xl/workbook.xml")}),
        "xl/workbook.xml": f'<workbook {main} xmlns:r="{RELATIONSHIPS}"><sheets>'
        f'<sheet name="{name}" sheetId="1" r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": relations({"rId1": ("worksheet", "worksheets/sheet1.xml")}),
        "xl/worksheets/sheet1.xml": f"<worksheet {main}><sheetData>{cells}</sheetData></worksheet>",
    }
    return archive(own | members)


def compound_file(name: str, content: bytes) -> bytes:
    """Create a compound file ([MS-CFB]) with one stream, which is in the short stream if it is below 4,096 bytes."""

    def entry(text: str, kind: int, child: int, start: int, size: int) -> bytes:
        held = text.encode("utf-16-le") + b"\0\0" if text else b""
        links = struct.pack("<HBB3I36x", len(held), kind, 1, END, END, child)
        return held.ljust(64, b"\0") + links + struct.pack("<IQ", start, size)

    END, is_short = 0xFFFFFFFF, len(content) < 4096
    held = content.ljust(-(-len(content) // 512) * 512, b"\0")
    count = len(held) // 512  # sectors 3 and following; 0: table, 1: directory, 2: table of short sectors
    chain = [*range(4, 3 + count), END - 1]
    table = struct.pack("<128I", *[END - 2, END - 1, END - 1, *chain], *[END] * (125 - count))
    short = [*range(1, count * 8), END - 1] if is_short else []
    short_table = struct.pack("<128I", *short, *[END] * (128 - len(short)))
    root = entry("Root Entry", 5, 1, 3 if is_short else END - 1, len(held) if is_short else 0)
    directory = root + entry(name, 2, END, 0 if is_short else 3, len(content)) + entry("", 0, END, 0, 0) * 2
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + struct.pack("<16x5H6x", 0x3E, 3, 0xFFFE, 9, 6)
    header += struct.pack("<9I", 0, 1, 1, 0, 4096, 2, 1, END - 1, 0) + struct.pack("<109I", 0, *[END] * 108)
    return header + table + directory + short_table + held


def cell(place: str, text: str) -> str:
    return f'<c r="{place}" t="inlineStr"><is><t>{text}</t></is></c>'


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), entries, content)


def deflated(content: bytes, times: int = 1) -> bytes:
    for _ in range(times):
        content = zlib.compress(content, 9)
    return stream(content, b"/Filter [%s]" % (b" /FlateDecode" * times))


def pdf_of(objects: Mapping[int, bytes], trailer: bytes = b"") -> bytes:
    """Create a PDF from numbered objects; object 1 is the catalog."""
    made, places = b"%PDF-1.7\n", {}
    for number, content in objects.items():
        places[number] = len(made)
        made += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start, size = len(made), max(objects) + 1
    rows = b"".join(
        b"%010d 00000 n \n" % places[number] if number in places else b"0000000000 65535 f \n" for number in range(size)
    )
    end = b"trailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, start)
    return made + b"xref\n0 %d\n%s%s" % (size, rows, end)


def text_operators(lines: Iterable[str]) -> bytes:
    shown = b" T* ".join(b"(%s) Tj" % line.encode("latin-1") for line in lines)
    return b"BT /F1 12 Tf 14 TL 50 750 Td %s ET" % shown


def pdf(pages: Iterable[bytes], trailer: bytes = b"", catalog: bytes = b"") -> bytes:
    """Create a PDF from the content streams of its pages (see `stream` and `deflated`)."""
    contents = list(pages)
    kids = b" ".join(b"%d 0 R" % (10 + 2 * n) for n in range(len(contents)))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R %s >>" % catalog,
        2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for n, content in enumerate(contents):
        objects[10 + 2 * n] = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            b"/Contents %d 0 R >>" % (11 + 2 * n)
        )
        objects[11 + 2 * n] = content
    return pdf_of(objects, trailer)


def text_pdf(*pages: Iterable[str]) -> bytes:
    return pdf([stream(text_operators(lines)) for lines in pages])


def annotated_pdf(
    text: bytes, annotations: Mapping[int, bytes], others: Mapping[int, bytes], form: bytes = b""
) -> bytes:
    """Create a PDF with one page, which has annotations, such as the fields of a form (objects from number 20)."""
    fields, all_of_them = (
        b" ".join(b"%d 0 R" % each for each, held in annotations.items() if kind in held)
        for kind in (b"/Widget", b"/Annot")
    )
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources %s /Contents 11 0 R /Annots [%s] >>"
    own = {
        1: b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [%s] %s >> >>" % (fields, form),
        2: b"<< /Type /Pages /Kids [10 0 R] /Count 1 >>",
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        10: page % (FONTS, all_of_them),
        11: stream(text),
    }
    return pdf_of({**own, **annotations, **others})


def appearance(drawn: bytes, width: int, height: int) -> bytes:
    box = b"/Type /XObject /Subtype /Form /BBox [0 0 %d %d] /Resources %s" % (width, height, FONTS)
    return stream(drawn, box)


def form_pdf(value: str, remark: str) -> bytes:
    """Create a PDF with a field that has a value, but no appearance, and with a text annotation."""
    drawn = b"BT /F1 12 Tf 2 5 Td (%s) Tj ET" % remark.encode("latin-1")
    field = (
        b"/Type /Annot /Subtype /Widget /FT /Tx /T (name) /DA (/F1 12 Tf 0 g) /F 4 /Rect [100 740 300 760] /P 10 0 R"
    )
    annotations = {
        20: b"<< %s /V (%s) >>" % (field, value.encode("latin-1")),
        21: b"<< /Type /Annot /Subtype /FreeText /F 4 /Rect [100 440 300 460] /AP << /N 22 0 R >> >>",
    }
    text = text_operators(["Name:"])
    return annotated_pdf(text, annotations, {22: appearance(drawn, 200, 20)}, b"/DA (/F1 12 Tf 0 g) /DR " + FONTS)


def patched(data: bytes, name: bytes, offset: int, form: str, *values: int) -> bytes:
    """Overwrite values at an offset in the central directory entry of `name` in a ZIP archive (APPNOTE 4.3.12)."""
    at = data.rindex(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    changed = struct.pack(form, *values)
    return data[: at + offset] + changed + data[at + offset + len(changed) :]


def chrome_pdf(word: str) -> bytes:
    """Create a PDF with a word written from right to left, as Chrome does: letters from left to right, each declared
    separately."""
    letters = b"".join(
        b"/Span<</ActualText <FEFF%s> >> BDC\n(A) Tj\nEMC\n" % letter.encode("utf-16-be").hex().encode()
        for letter in reversed(word)
    )
    return pdf([stream(b"BT /F1 12 Tf 50 700 Td\n/ReversedChars BMC\n%sEMC\nET" % letters)])
