"""Detect a document's kind (by content, then by file name), and read its text."""

from __future__ import annotations

import codecs
import encodings
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, Literal

from notso.documents import office, pdf, word
from notso.documents.archives import Archive, xml_events
from notso.documents.markup import html_text
from notso.documents.plain import decode_guessing, email_text, mailbox_texts, omit_data, unfold_lines, web_archive_text
from notso.documents.tables import format_delimited, read_spreadsheet
from notso.documents.values import CODE, UnreadableError

Container = Literal["pdf", "zip", "ole", "text"]

NATIVE = {"PDF", "XLSX", "XLS", "ODS"}
"""Kinds that native code parses. By default, they are read only if the system supports Landlock and seccomp."""

_UNREADABLE_STARTS = {
    "an image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*"),
    "a media file": (b"RIFF", b"OggS", b"ID3"),
    "a compressed file": (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"(\xb5/\xfd"),
    "a program": (b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe"),
    "a database": (b"SQLite format 3",),
}
_BINARY = re.compile(rb"[\0-\x08\x0e-\x1a]")
_XML_ROOT = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*+(?:(?:<\?[^>]*+>|<!--(?:(?!-->)[\s\S])*+-->)\s*+)*+"
    rb"<(?:(FictionBook)|office:(document)(?:-content)?)[\s>]"
)
_OLE_START = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"

_MESSAGE = b"Subject: =?utf-8?q?a?=\nContent-Type: text/plain\nContent-Transfer-Encoding: base64\n\nYQ=="


def detect_container(head: bytes, extension: str) -> Container:
    """Detect a file's container from its first 1,024 bytes. Raises UnreadableError if it cannot be a document."""
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head.startswith(_OLE_START):
        return "ole"
    for what, starts in _UNREADABLE_STARTS.items():
        start = next(filter(head.startswith, starts), None)
        if start is not None and (not start.isascii() or _BINARY.search(head)):  # text may begin with "MZ", too
            raise UnreadableError(f"is {what}, which cannot be read", "document_not_text")
    # PDF readers accept other bytes before "%PDF-". Here, only a file named .pdf may begin with other bytes, because
    # text may mention "%PDF-".
    return "pdf" if head.lstrip().startswith(b"%PDF-") or (extension == "pdf" and b"%PDF-" in head) else "text"


def preload_modules(container: Container) -> None:
    """Import modules before the sandbox prevents opening files. Raises ImportError if a library is not installed."""
    for module in pkgutil.iter_modules(encodings.__path__):
        if module.name != "punycode":  # takes quadratic time: a document in this encoding could not be read in time
            with suppress(LookupError):
                codecs.lookup(module.name)
    if container == "pdf":
        import pypdfium2

        pypdfium2.raw.FPDF_GetLastError()
        return
    if container in ("zip", "ole"):
        import python_calamine  # noqa: F401
    # Some modules of the standard library are imported on first use.
    email_text(_MESSAGE)
    html_text("<p>&amp;")
    format_delimited("a,b\n1,2\n")
    "a".encode("idna")


def read(
    file: BinaryIO, container: Container, extension: str, warnings: list[str], announce: Callable[[int], None]
) -> tuple[str, Callable[[], str], Iterator[str]]:
    """Return the kind, a title function and the pages.

    Adds to `warnings`, and calls `announce` with the number of pages if it is known in advance. Raises UnreadableError,
    as do the title function and iteration over the pages.
    """
    if container == "pdf":
        return "PDF", lambda: pdf.pdf_title(file), pdf.read_pdf(file, warnings, announce)
    if container == "zip":
        kind = _zip_kind(file, warnings)
        return kind, lambda: office.office_title(file), _ARCHIVE_READERS[kind](file, warnings)
    if container == "ole":
        return "XLS", str, _read_ole(file, warnings)
    file.seek(0)
    return _read_text(file.read(), extension, warnings)


def _zip_kind(file: BinaryIO, warnings: list[str]) -> str:
    archive = Archive(file)
    if any(name.endswith("vbaProject.bin") for name in archive.names):
        warnings.append("its macros were not run")
    declared = b"".join(archive.pieces("mimetype")).strip()[:100] if "mimetype" in archive.names else b""
    if declared == b"application/epub+zip":
        return "EPUB"
    if declared.startswith(b"application/vnd.oasis.opendocument."):
        for name, kind in ((b"text", "ODT"), (b"spreadsheet", "ODS"), (b"presentation", "ODP")):
            if declared.rpartition(b".")[2].startswith(name):
                return kind
        raise UnreadableError("is an OpenDocument file of a kind that cannot be read", "document_not_text")
    for folder, kind in (("word/", "DOCX"), ("ppt/", "PPTX"), ("xl/", "XLSX")):
        if "[Content_Types].xml" in archive.names and any(name.startswith(folder) for name in archive.names):
            return kind
    raise UnreadableError("is an archive; attach the files in it instead", "document_archive")


_ARCHIVE_READERS: dict[str, Callable[[BinaryIO, list[str]], Iterator[str]]] = {
    "DOCX": word.read_docx,
    "PPTX": office.read_pptx,
    "ODT": office.read_odf,
    "ODP": office.read_odf,
    "EPUB": office.read_epub,
    "ODS": office.read_ods,
    "XLSX": office.read_xlsx,
}


def _read_ole(file: BinaryIO, warnings: list[str]) -> Iterator[str]:
    file.seek(0)
    data = file.read()
    errors = {
        "EncryptedPackage": UnreadableError("is encrypted", "document_encrypted"),
        "WordDocument": UnreadableError("is a Word 97 document; save it as DOCX", "document_word"),
        "PowerPoint Document": UnreadableError(
            "is a PowerPoint 97 presentation; save it as PPTX", "document_powerpoint"
        ),
        "__properties_version1.0": UnreadableError("is an Outlook message; save it as EML", "document_outlook"),
    }
    for stream, error in errors.items():
        if stream.encode("utf-16-le") in data:
            raise error
    yield from read_spreadsheet(file, warnings)


def _read_text(data: bytes, extension: str, warnings: list[str]) -> tuple[str, Callable[[], str], Iterator[str]]:
    if not data.strip():
        raise UnreadableError("is empty", "document_empty")
    if data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableError("is an RTF document; save it as DOCX", "document_rtf")
    if extension in ("ics", "vcf"):
        data = unfold_lines(data)
    root = _XML_ROOT.match(data[:4096]) if extension not in CODE else None
    if root is not None:
        read, title, kind = office.read_fb2, "book-title", "FB2"
        if root[2]:
            read, title, kind = office.read_flat_odf, "title", "OpenDocument"
        return kind, lambda: office.title_of(xml_events(iter((data,))), title), read(data)
    if extension == "mbox":
        return "e-mail", str, mailbox_texts(data, warnings)
    text, guessed = decode_guessing(data, is_markup=extension in ("html", "htm", "xhtml", "xml"))
    start = text.lstrip()[:500].lower()
    if extension in ("mht", "mhtml") and not start.startswith("<"):
        page_title, shown = web_archive_text(data)
        return "HTML", lambda: page_title, iter((shown,))
    if extension == "eml":
        subject, message, email_warnings = email_text(data)
        warnings += email_warnings
        return "e-mail", lambda: subject, iter((message,))
    if guessed:
        warnings.append(f"its encoding was guessed: {guessed}")
    is_page = start.startswith(("<!doctype html", "<html")) and extension not in CODE  # a PHP file may begin like HTML
    if extension in ("html", "htm", "xhtml") or is_page:
        title, shown = html_text(text)
        if not shown.strip():
            raise UnreadableError("shows no text", "document_no_text")
        return "HTML", lambda: title, iter((shown,))
    text, omitted = omit_data(text)
    if omitted:
        warnings.append(f"embedded data left out: {omitted}")
    if extension in ("csv", "tsv"):
        return "CSV", str, iter((format_delimited(text),))
    kinds = {"md": "Markdown", "markdown": "Markdown", "json": "JSON", "jsonl": "JSON", "xml": "XML", "log": "log"}
    return kinds.get(extension, "code" if extension in CODE else "text"), str, iter((text,))
