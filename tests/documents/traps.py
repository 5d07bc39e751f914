"""Malicious documents that try to exhaust, mislead or crash the reader, each with the error in which it ends.

An empty error means that the document is read without harm. `TRAPS` are rejected by checks before and during reading;
`BOMBS` are read in a separate child process, most of them until it exceeds its limits.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from functools import partial

from documents import made
from documents.made import cell, deflated, docx, epub, odt, paragraph, pdf, pdf_of, pptx, stream, text_pdf, xlsx

SECRET = "root:"
LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
ITEM = '<itemref idref="a"/>'
OUTSIDE = "file:///etc/passwd"
METHODS = {"deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "LZMA": zipfile.ZIP_LZMA}
if zstandard := getattr(zipfile, "ZIP_ZSTANDARD", 0):  # from Python 3.14
    METHODS["Zstandard"] = zstandard

Trap = tuple[str, Callable[[], bytes], str]  # name, function that creates the content, error


def _with_doctype(doctype: str, use: str = "") -> bytes:
    document = f"<?xml version='1.0'?>{doctype}<w:document {made.W}><w:body><w:p><w:r><w:t>{use}a</w:t></w:r></w:p>"
    return docx("", **{"word/document.xml": f"{document}</w:body></w:document>"})


def _quine_like() -> bytes:
    inner = made.archive({"a.txt": "a"})
    for _ in range(20):
        inner = made.archive({"again.zip": inner})
    return inner


def _overlapping() -> bytes:
    data = made.archive({"a.txt": "a" * 1000, "b.txt": "b" * 1000}, zipfile.ZIP_STORED)
    return made.patched(data, b"b.txt", 42, "<I", 0)  # both entries point to the first file


def _damaged(method: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(docx(paragraph(" ".join(map(str, range(2000))))))) as original:
        data = made.archive({name: original.read(name) for name in original.namelist()}, method)
    third = len(data) // 3
    return data[:third] + bytes(byte ^ 0xFF for byte in data[third : 2 * third]) + data[2 * third :]


def _ole(*names: str) -> bytes:
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 504 + b"".join(name.encode("utf-16-le") for name in names)


def _pages(count: int) -> bytes:
    kids = b" ".join([b"3 0 R"] * count)
    return pdf_of(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
            3: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] >>",
        }
    )


def _image_pdf() -> bytes:
    return pdf([stream(b"q 100 0 0 100 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \xff EI Q")])


def _self_drawn_form() -> bytes:
    return pdf_of(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            3: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >> "
            b"/Contents 4 0 R >>",
            4: stream(b"/X Do"),
            5: stream(
                b"/X Do /X Do",
                b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>",
            ),
        }
    )


def _message(parts: int, depth: int = 0) -> bytes:
    head = b"Subject: a\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b0\n\n"
    if depth:
        nested = b"".join(b"--b%d\nContent-Type: multipart/mixed; boundary=b%d\n\n" % (n, n + 1) for n in range(depth))
        return head + nested
    return head + b"--b0\nContent-Type: text/plain\n\nx\n" * parts + b"--b0--\n"


ARCHIVES: dict[str, Trap] = {
    "cut short": ("a.docx", lambda: docx(paragraph("a"))[:200], "is damaged: it is not a complete archive"),
    "too many files": (
        *("a.docx", lambda: docx(paragraph("a"), **{f"f{n}": "" for n in range(2_000)})),
        "contains more than 2,000 files",
    ),
    "300 MiB of zeros": (
        *("a.docx", lambda: made.patched(docx(paragraph("a"), zeros=b"0"), b"zeros", 24, "<I", 300 << 20)),
        "inflates to more than 256 MiB",
    ),
    "compressed 1,000 times": (
        *("a.docx", lambda: docx(paragraph("a"), zeros=bytes(3 << 20))),
        "has a compression ratio above 200",
    ),
    "encrypted": ("a.docx", lambda: made.patched(docx("", secret="a"), b"secret", 8, "<H", 1), "is encrypted"),
    "overlapping files": ("a.docx", _overlapping, "is damaged: its files overlap"),
    "archive in archives": ("a.zip", _quine_like, "is an archive; attach the files in it instead"),
    "claims fewer bytes": (
        *("a.docx", lambda: made.patched(docx(paragraph("a" * 500)), b"word/document.xml", 24, "<I", 9)),
        "is damaged",
    ),
    "wrong checksum": (
        *("a.docx", lambda: made.patched(docx(paragraph("a")), b"word/document.xml", 16, "<I", 9)),
        "is damaged: a part cannot be inflated",
    ),
    "unknown compression": (
        *("a.docx", lambda: made.patched(docx(paragraph("a")), b"word/document.xml", 10, "<H", 99)),
        "is damaged: a part cannot be inflated",
    ),
    **{
        f"damaged {name}": ("a.docx", partial(_damaged, method), "is damaged: a part cannot be inflated")
        for name, method in METHODS.items()
    },
    "names that climb": ("a.docx", lambda: docx(paragraph("safe"), **{"../../../tmp/planted": "a", "/etc/x": "b"}), ""),
    "gzip": ("a.docx", lambda: b"\x1f\x8b\x08" + bytes(100), "is a compressed file, which cannot be read"),
    "xz": ("a.txt", lambda: b"\xfd7zXZ\0" + bytes(100), "is a compressed file, which cannot be read"),
    "7z": ("a.pdf", lambda: b"7z\xbc\xaf\x27\x1c" + bytes(100), "is a compressed file, which cannot be read"),
    "rar": ("a.txt", lambda: b"Rar!\x1a\x07" + bytes(100), "is a compressed file, which cannot be read"),
    "tar": ("a.txt", lambda: b"name" + bytes(253) + b"ustar\0" + bytes(300), "is neither text nor any other kind"),
}
XML: dict[str, Trap] = {
    "billion laughs": (
        *("a.docx", lambda: _with_doctype(f'<!DOCTYPE d [<!ENTITY l0 "ha">{LAUGHS}]>', "&l9;")),
        "declares an XML document type",
    ),
    "external entity": (
        *("a.docx", lambda: _with_doctype(f'<!DOCTYPE d [<!ENTITY x SYSTEM "{OUTSIDE}">]>', "&x;")),
        "declares an XML document type",
    ),
    "document type over http": (
        *("a.docx", lambda: _with_doctype('<!DOCTYPE d SYSTEM "http://127.0.0.1:9/d.dtd">')),
        "declares an XML document type",
    ),
    "parameter entity": (
        *("a.docx", lambda: _with_doctype(f'<!DOCTYPE d [<!ENTITY % p SYSTEM "{OUTSIDE}"> %p;]>')),
        "declares an XML document type",
    ),
    "document type of ODT": (
        *("a.odt", lambda: odt("", **{"content.xml": f'<!DOCTYPE d SYSTEM "{OUTSIDE}"><d/>'})),
        "declares an XML document type",
    ),
    "document type of EPUB": (
        *("a.epub", lambda: epub({"a": "a"}, **{"OPS/book.opf": f'<!DOCTYPE d SYSTEM "{OUTSIDE}"><d/>'})),
        "declares an XML document type",
    ),
    "unknown entity": ("a.docx", lambda: docx(paragraph("&x;")), "is damaged: its XML is malformed"),
    "inclusion": (
        "a.docx",
        lambda: docx(
            paragraph("safe")
            + f'<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="{OUTSIDE}" parse="text"/>'
        ),
        "",
    ),
    "deep": ("a.docx", lambda: docx("<w:p>" * 100_000), "is nested more than 256 levels deep"),
    "malformed": ("a.docx", lambda: docx("<w:p><w:r></w:p>"), "is damaged: its XML is malformed"),
    "unknown encoding": (
        *("a.docx", lambda: docx("", **{"word/document.xml": "<?xml version='1.0' encoding='x-none'?><d/>"})),
        "is damaged: its XML is malformed",
    ),
    "NUL": ("a.docx", lambda: docx("<w:p>\0</w:p>"), "is damaged: its XML is malformed"),
}
OFFICE: dict[str, Trap] = {
    "document missing": (
        *("a.docx", lambda: made.archive({"[Content_Types].xml": "<Types/>", "word/x.xml": ""})),
        "is damaged: a part is missing",
    ),
    "document outside": (
        "a.docx",
        lambda: docx("", **{"_rels/.rels": made.relations({"r": ("officeDocument", "../../../../etc/passwd")})}),
        "refers to files outside the archive",
    ),
    "document of an absolute path": (
        "a.docx",
        lambda: docx("", **{"_rels/.rels": made.relations({"r": ("officeDocument", "/etc/passwd")})}),
        "is damaged: a part is missing",
    ),
    "no text": ("a.docx", lambda: docx(""), "has no text"),
    "macros": ("a.docm", lambda: docx(paragraph("safe"), **{"word/vbaProject.bin": b"Shell"}), ""),
    "deleted and field text": (
        "a.docx",
        lambda: docx(
            f"{paragraph('safe')}<w:p><w:del><w:r><w:t>{SECRET}</w:t></w:r></w:del><w:r>"
            f"<w:instrText>INCLUDETEXT {SECRET}</w:instrText></w:r></w:p>"
        ),
        "",
    ),
    "table without a row": ("a.docx", lambda: docx(f"<w:tbl><w:tc>{paragraph('a')}</w:tc></w:tbl>"), ""),
    "slide missing": (
        *(
            "a.pptx",
            lambda: pptx(
                [], **{"ppt/presentation.xml": f'<p:presentation {made.A}><p:sldId r:id="rId9"/></p:presentation>'}
            ),
        ),
        "is damaged: a part is missing",
    ),
    "slide that is its own notes": (
        "a.pptx",
        lambda: pptx(
            ["<a:p><a:r><a:t>safe</a:t></a:r></a:p>"],
            **{"ppt/slides/_rels/slide1.xml.rels": made.relations({"r": ("notesSlide", "slide1.xml")})},
        ),
        "",
    ),
    "no slide": ("a.pptx", lambda: pptx([]), "has no text"),
    "10^9 cells of ODT": (
        "a.odt",
        lambda: odt(
            '<table:table><table:table-row><table:table-cell table:number-columns-repeated="1000000000">'
            "<text:p>safe</text:p></table:table-cell></table:table-row></table:table>"
        ),
        "",
    ),
    "10^9 blanks": ("a.odt", lambda: odt('<text:p>a<text:s text:c="1000000000"/>b</text:p>'), ""),
    "encrypted ODT": (
        *("a.odt", lambda: odt("", **{"META-INF/manifest.xml": "<m><file-entry><encryption-data/></file-entry></m>"})),
        "is encrypted",
    ),
    "OpenDocument drawing": ("a.odg", lambda: odt("", "graphics"), "is an OpenDocument file of a kind"),
    "chapter outside": ("a.epub", lambda: epub({"../../../etc/passwd": "a"}), "refers to files outside the archive"),
    "chapter missing": (
        *("a.epub", lambda: epub({}, **{"OPS/book.opf": '<p><item id="a" href="a"/><itemref idref="a"/></p>'})),
        "is damaged: a part is missing",
    ),
    "the same chapter 10,000 times": (
        "a.epub",
        lambda: epub({}, **{"OPS/a": "safe", "OPS/book.opf": f'<p><item id="a" href="a"/>{ITEM * 10_000}</p>'}),
        "",
    ),
    "deep formula": (
        *("a.html", lambda: b"<math>" + b"<mfrac>" * 100_000 + b"</msup>" * 100_000),
        "has a formula nested more than 500 levels deep",
    ),
    "RTF": ("a.rtf", lambda: b"{\\rtf1\\ansi a}", "is an RTF document; save it as DOCX"),
    "RTF named DOC": ("a.doc", lambda: b"\n{\\rtf1\\ansi a}", "is an RTF document; save it as DOCX"),
    "10,001 chapters": (
        *("a.epub", lambda: epub({}, **{"OPS/book.opf": f"<p>{ITEM * 10_001}</p>"})),
        "has more than 10,000 chapters",
    ),
    "protected book": (
        *("a.epub", lambda: epub({"a": "a"}, **{"META-INF/rights.xml": "<r/>"})),
        "is protected by DRM",
    ),
    "no package": ("a.epub", lambda: epub({}, **{"META-INF/container.xml": "<c/>"}), "is damaged: a part is missing"),
    "encrypted workbook": ("a.xlsx", lambda: _ole("EncryptionInfo", "EncryptedPackage"), "is encrypted"),
    "old Word document": ("a.doc", lambda: _ole("WordDocument"), "is a Word 97 document; save it as DOCX"),
    "old presentation": ("a.ppt", lambda: _ole("PowerPoint Document"), "is a PowerPoint 97 presentation"),
    "Outlook message": ("a.msg", lambda: _ole("__properties_version1.0"), "is an Outlook message; save it as EML"),
    "old workbook cut short": ("a.xls", lambda: _ole("Workbook"), "is damaged"),
    "sheet missing": (
        *("a.xlsx", lambda: made.archive({"[Content_Types].xml": "<Types/>", "xl/workbook.xml": "<workbook/>"})),
        "has no text|is damaged",
    ),
    "sheet of garbage": ("a.xlsx", lambda: xlsx("</sheetData><<<"), "|is damaged"),
    "shared string out of range": (
        "a.xlsx",
        lambda: xlsx('<row r="1"><c r="A1" t="s"><v>999999999</v></c></row>'),
        "has no text|is damaged|",
    ),
}
PDFS: dict[str, Trap] = {
    "cut short": ("a.pdf", lambda: b"%PDF-1.7\n1 0 obj", "is damaged: it is not a complete PDF"),
    "no pages": ("a.pdf", lambda: pdf([]), "is damaged"),
    "dynamic XFA form": (
        "a.pdf",
        lambda: pdf(
            [stream(made.text_operators(["Please wait..."]))],
            catalog=b"/NeedsRendering true /AcroForm << /XFA 20 0 R /Fields [] >>",
        ),
        "is a dynamic XFA form; print it to a PDF file",
    ),
    "10,001 pages": ("a.pdf", lambda: _pages(10_001), "has more than 10,000 pages"),
    "claims 10^9 pages": (
        "a.pdf",
        lambda: pdf_of({1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: b"<< /Type /Pages /Kids [] /Count 1000000000 >>"}),
        "is damaged|has more than 10,000 pages|has no text",
    ),
    "tree that contains itself": (
        *(
            "a.pdf",
            lambda: pdf_of({1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"}),
        ),
        "is damaged|has no text",
    ),
    "catalog that is its pages": (
        "a.pdf",
        lambda: pdf_of({1: b"<< /Type /Catalog /Pages 1 0 R >>"}),
        "is damaged|has no text",
    ),
    "object that is itself": (
        *("a.pdf", lambda: pdf_of({1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: b"2 0 R"})),
        "is damaged|has no text",
    ),
    "previous table is this one": (
        *("a.pdf", lambda: text_pdf(["safe"]).replace(b"/Root 1 0 R", b"/Root 1 0 R /Prev 9")),
        "",
    ),
    "scan": ("a.pdf", _image_pdf, "has no text: it is probably a scan"),
    "unknown font": (
        *("a.pdf", lambda: text_pdf(["safe"]).replace(b"/BaseFont /Helvetica", b"/BaseFont /" + b"A" * 9)),
        "",
    ),
    "script and program": (
        "a.pdf",
        lambda: pdf(
            [stream(made.text_operators(["safe"]))],
            catalog=b"/OpenAction << /S /Launch /F (/bin/sh) /Next << /S /JavaScript /JS (app.alert(1)) >> >>",
        ),
        "",
    ),
    "also a web page": ("a.pdf", lambda: text_pdf(["safe"]) + b"<html><script>alert(1)</script>", ""),
    "also an archive": ("a.pdf", lambda: text_pdf(["safe"]) + made.archive({"word/document.xml": "a"}), ""),
    "unknown filter": ("a.pdf", lambda: pdf([stream(b"x", b"/Filter /None")]), "has no text"),
    "filters 200 deep": ("a.pdf", lambda: pdf([deflated(b"", 200)]), "has no text"),
    "huge numbers": (
        *("a.pdf", lambda: pdf([stream(b"BT /F1 1e38 Tf 1e38 1e38 Td (safe) Tj ET 99999999999999999999 w")])),
        "|has no text",
    ),
    "nested arrays": ("a.pdf", lambda: pdf([stream(b"[" * 100_000)]), "has no text"),
}
TEXTS: dict[str, Trap] = {
    "nothing": ("a.txt", lambda: b"", "is empty"),
    "blanks": ("a.txt", lambda: b" \n\t " * 100, "is empty"),
    "NULs": ("a.txt", lambda: b"a\0b\0\0\0c", "is neither text nor any other kind of file that can be read"),
    "noise": ("a.bin", lambda: zlib.compress(bytes(range(256)) * 9), "is neither text nor any"),
    "half of UTF-16": (
        "a.txt",
        lambda: b"\xff\xfea\0b",
        "is damaged: it begins with the UTF-16 byte order mark",
    ),
    "lone surrogates": ("a.txt", lambda: b"safe \xed\xa0\x80", ""),
    "reversed text": ("a.txt", lambda: "safe \u202egpj.exe\u2066\U000e0041".encode(), ""),
    "20 million characters": ("a.txt", lambda: b"a" * 20_000_001, "has more than 20,000,000 characters"),
    "2 million cells": ("a.csv", lambda: b"," * 2_000_001 + b"x", "has more than 2,000,000 cells"),
    "a cell of 2 MiB": ("a.csv", lambda: b'a,b\n1,"' + b"x" * (2 << 20) + b'"', ""),
    "deep HTML": ("a.html", lambda: b"<div>" * 100_000, "is nested more than 5,000 levels deep"),
    "deep tables": ("a.html", lambda: b"<table><tr><td>" * 1_000 + b"safe", ""),
    "hidden HTML": ("a.html", lambda: b"<p style='Display : NONE'>root:</p><script>root:</script>", "shows no text"),
    "open comment": ("a.html", lambda: b"<p>safe<!--" + b"<!-" * 1_000, ""),
    "unknown charset": ("a.html", lambda: b"<meta charset='x-none'><p>safe", ""),
    "charset of no text": ("a.html", lambda: b"<meta charset='hex'><p>safe", ""),
    "inclusion in HTML": (
        "a.html",
        lambda: f"<p>safe<iframe src='{OUTSIDE}'></iframe><object data='{OUTSIDE}'>".encode(),
        "",
    ),
    "parts in parts": ("a.eml", lambda: _message(0, depth=3_000), "is nested too deeply|is damaged|"),
    "1,001 parts": ("a.eml", lambda: _message(1_001), "has more than 1,000 parts"),
    "malformed header": ("a.eml", lambda: b"From: =?x?q?=\nTo: <<<@,;:\nContent-Type: ;;;\n\nsafe", "|is damaged"),
    "unknown charset of e-mail": ("a.eml", lambda: b"Content-Type: text/plain; charset=x-none\n\nsafe", ""),
    "base64 of nothing": ("a.eml", lambda: b"Content-Transfer-Encoding: base64\n\nsafe!?=", "|has no text"),
    "deep JSON": ("a.json", lambda: b"[" * 1_000_000, ""),
    "picture": ("a.txt", lambda: b"\x89PNG\r\n\x1a\n", "is an image, which cannot be read"),
    "program": ("a.txt", lambda: b"\x7fELF" + bytes(60), "is a program, which cannot be read"),
}
TRAPS = {
    f"{group}: {name}": trap
    for group, traps in (("archive", ARCHIVES), ("XML", XML), ("office", OFFICE), ("PDF", PDFS), ("text", TEXTS))
    for name, trap in traps.items()
}

OVER = "could not be read: it failed, or exceeded|needs more than 1,024 MiB of memory|could not be read: it took more"


def _inflating(count: int) -> bytes:
    """Return deflated bytes that inflate to `count` times 700 KB of text operators, without creating that text."""
    packer, held = zlib.compressobj(9), io.BytesIO()
    held.write(packer.compress(b"BT /F1 12 Tf "))
    piece = b"(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa) Tj " * 10_000
    for _ in range(count):
        held.write(packer.compress(piece))
    held.write(packer.flush())
    return held.getvalue()


BOMBS: dict[str, Trap] = {
    # PDFium keeps this error for later documents in the same process.
    "encrypted": (
        "a.pdf",
        lambda: pdf(
            [stream(b"")],
            b"/Encrypt << /Filter /Standard /V 2 /R 3 /Length 128 /P -44 /O (%s) /U (%s) >> /ID [(a) (a)]"
            % (b"o" * 32, b"u" * 32),
        ),
        "is encrypted",
    ),
    "form that draws itself twice": ("a.pdf", _self_drawn_form, OVER),
    "10^9 empty cells of XLSX": (
        *(
            "a.xlsx",
            lambda: xlsx(f'<row r="1">{cell("A1", "a")}</row><row r="1048576">{cell("XFD1048576", "b")}</row>'),
        ),
        OVER + "|has more than 2,000,000 cells",
    ),
    "10^9 cells of ODS": (
        "a.ods",
        lambda: odt(
            '<table:table table:name="a"><table:table-row table:number-rows-repeated="1000000"><table:table-cell '
            'table:number-columns-repeated="16000" office:value-type="string"><text:p>a</text:p></table:table-cell>'
            "</table:table-row></table:table>",
            "spreadsheet",
        ),
        OVER + "|has more than 2,000,000 cells|is damaged|repeats a row more than 1,000 times",
    ),
    "a petabyte in a chain of filters": (
        *("a.pdf", lambda: pdf([deflated(bytes(1 << 30 >> 4), 3)])),
        OVER + "|has no text|is damaged",
    ),
    "a page of much text": (
        *("a.pdf", lambda: pdf([stream(_inflating(60), b"/Filter /FlateDecode")])),
        OVER + "|has more than 20,000,000 characters",
    ),
}
