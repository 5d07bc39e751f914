"""Parse urlencoded forms strictly, in threads, so that the event loop is not blocked."""

from __future__ import annotations

from email.parser import HeaderParser
from urllib.parse import unquote_to_bytes

from fastapi import Request

from notso.web.edge.access import owner_of
from notso.web.edge.work_queue import WorkQueue
from notso.web.values.errors import Problem
from notso.web.values.wording import words

MAX_FIELDS = 32
PIECE_BYTES = 64 * 1024
FORM_TYPE = "application/x-www-form-urlencoded"


async def read_form(request: Request, *, most: int = MAX_FIELDS) -> dict[str, str]:
    """Parse a form. Raises Problem: 415 for another media type, 429 if the queue is full, 400 for an invalid form."""
    body = await request.body()
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
        raise Problem(415, words["error_form"])
    queue: WorkQueue = request.app.state.forms
    return await queue.run(lambda: parse_form(body, most=most), len(body), owner_of(request))


def multipart_boundary(content_type: str) -> bytes:
    """Return the boundary given in a Content-Type, or b"" if it is missing or cannot be decoded."""
    try:
        boundary = HeaderParser().parsestr(f"Content-Type: {content_type}").get_boundary()
    except (LookupError, ValueError, TypeError):  # invalid charset, or only some of the RFC 2231 sections are numbered
        return b""
    return (boundary or "").encode("latin-1", "replace")


def parse_form(body: bytes, *, most: int = MAX_FIELDS) -> dict[str, str]:
    """Parse a form's body. Raises Problem (400)."""
    if body.count(b"&") >= most or not body.isascii():
        raise Problem(400, words["error_form"])
    fields: dict[str, str] = {}
    for pair in filter(None, body.split(b"&")):
        name, _, value = (_text(each) for each in pair.partition(b"="))
        if name in fields:
            raise Problem(400, words["error_form"])
        fields[name] = value.replace("\r\n", "\n")
    return fields


def _text(quoted: bytes) -> str:
    # unquote_to_bytes creates a list entry per escape. For a whole body, the list would take many times the memory of
    # the body, so decode in pieces.
    pieces, at = [], 0
    while at < len(quoted):
        end = at + PIECE_BYTES
        split = quoted.find(b"%", end - 2, end)  # start of an escape that the end of the piece would cut in two
        end = split if split > at else end
        pieces.append(unquote_to_bytes(quoted[at:end].replace(b"+", b" ")))
        at = end
    try:
        text = b"".join(pieces).decode()
    except UnicodeDecodeError:
        raise Problem(400, words["error_text"]) from None
    if "\x00" in text:
        raise Problem(400, words["error_text"])
    return text
