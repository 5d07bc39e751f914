"""Decoding of text in any encoding, and extraction of text from e-mail."""

from __future__ import annotations

import codecs
import re
from email import policy
from email.errors import MessageError
from email.message import EmailMessage
from email.parser import BytesParser

from notso.documents.markup import html_text
from notso.documents.values import UnreadableError, one_line

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8"),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
_DECLARED = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?([A-Za-z0-9_.:-]{2,40})""")
_SAMPLE = 1 << 16
_UNTEXTUAL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
MAX_UNTEXTUAL_SHARE = 0.01
MAX_PARTS = 1_000


def decode_guessing(data: bytes, is_html: bool = False) -> tuple[str, str]:
    """Return the text, and its encoding if it was guessed. HTML may declare its encoding.

    Raises UnreadableError.
    """
    for mark, encoding, label in _MARKS:
        if data.startswith(mark):
            try:
                return _require_text(data.decode(encoding)), ""
            except UnicodeDecodeError:
                raise UnreadableError(
                    f"is damaged: it begins with the {label} byte order mark, but is not valid {label}",
                    "document_damaged",
                ) from None
    if is_html and (declared := _DECLARED.search(data[:4096])):
        try:
            return _require_text(data.decode(declared[1].decode("ascii"))), ""
        except (LookupError, UnicodeError, ValueError):
            pass  # an unknown or wrong encoding
    try:
        return _require_text(data.decode("utf-8")), ""
    except UnicodeDecodeError:
        pass
    sample = data[:_SAMPLE]
    for encoding, zeros, others in (("utf-16-le", sample[1::2], sample[::2]), ("utf-16-be", sample[::2], sample[1::2])):
        if zeros.count(0) > 0.4 * len(zeros) and others.count(0) < 0.05 * max(1, len(others)):
            return _require_text(data.decode(encoding, "replace")), encoding.upper()
    try:
        return _require_text(data.decode("cp1252")), "Windows-1252"
    except UnicodeDecodeError:
        return _require_text(data.decode("latin-1")), "ISO-8859-1"


def _require_text(text: str) -> str:
    sample = text[:_SAMPLE]
    if "\0" in sample or len(_UNTEXTUAL.findall(sample)) > MAX_UNTEXTUAL_SHARE * len(sample):
        raise UnreadableError("is neither text nor any other kind of file that can be read", "document_not_text")
    return text


def email_text(data: bytes) -> tuple[str, str, list[str]]:
    """Return subject, text and warnings of a message; attachments are listed but not read. Raises UnreadableError."""
    try:
        message = BytesParser(_class=EmailMessage, policy=policy.default).parsebytes(data)
        lines = [
            f"{name}: {one_line(str(message[name]), 1000)}"
            for name in ("From", "To", "Cc", "Date", "Subject")
            if message[name]
        ]
        attached, bodies, pages = [], [], []
        for count, part in enumerate(message.walk()):
            if count > MAX_PARTS:
                raise UnreadableError(f"has more than {MAX_PARTS:,} parts")
            if part.is_multipart():
                continue
            if part.is_attachment() or part.get_content_maintype() != "text":
                attached.append(one_line(part.get_filename() or part.get_content_type(), 120))
            elif part.get_content_subtype() == "html":
                pages.append(html_text(_content(part))[1])
            else:
                bodies.append(_content(part))
    except (MessageError, LookupError, ValueError, TypeError, AttributeError, IndexError):
        # The standard library raises any of these for malformed headers.
        raise UnreadableError("is damaged: its headers are malformed", "document_damaged") from None
    if attached:
        lines.append(f"Attachments: {', '.join(attached)}")
    warnings = [f"attachments not read: {len(attached)}"] if attached else []
    return str(message["Subject"] or ""), "\n".join([*lines, "", *(bodies or pages)]), warnings


def _content(part: EmailMessage) -> str:
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes):
        return ""
    try:
        return data.decode(part.get_content_charset() or "utf-8")
    except (LookupError, UnicodeError):
        return decode_guessing(data)[0]
