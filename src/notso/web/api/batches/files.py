"""Routes for uploaded files and the output files of batches."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from notso.web.api.request_fields.fields import RequestHint, invalid_field
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.given_documents import DOCUMENT_PURPOSES, get_stored_file, is_expired
from notso.web.api.shared.listing import PAGE, paginate
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import Owner, hint_headers
from notso.web.edge.access import GUARDED
from notso.web.edge.errors import ApiError
from notso.web.edge.forms import multipart_boundary
from notso.web.store.records import StoredFile
from notso.web.values.durations import current_ms

router = APIRouter()

MAX_NAME = 255
MAX_PARTS, MAX_HEAD_BYTES = 16, 8192  # maximum number of fields in a form, and of bytes in a field's headers
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86_400  # seconds, as documented by OpenAI
_NAMES = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


@router.post("/v1/files", dependencies=[GUARDED])
async def upload(request: Request, services: Services, owner: Owner) -> Response:
    """Store a file sent as multipart/form-data: the input of a batch, or a document for later requests."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(415, "unsupported_media_type", "the body must be multipart/form-data with a file and a purpose")
    body = await request.body()
    now_ms = current_ms()
    work = services.shared.large_work
    default_purpose = DOCUMENT_PURPOSES[0] if is_anthropic(request) else ""
    file, content, ignored = await work.run(lambda: _read_upload(kind, body, now_ms, default_purpose), len(body), owner)
    headers = hint_headers(request, ignored)
    await services.shared.store.records.add_file(owner, file, content)
    return JSONResponse(_object(request, file), headers=headers)


@router.get("/v1/files", dependencies=[GUARDED])
async def files(request: Request, services: Services, owner: Owner) -> Response:
    """List files, newest first."""
    purpose = request.query_params.get("purpose")
    found = reversed(await services.shared.store.records.files(owner))
    shown = [_object(request, each) for each in found if purpose in (None, each.purpose) and not is_expired(each)]
    page = paginate(shown, request.query_params, default_limit=10_000, max_limit=10_000)
    if is_anthropic(request):
        del page["object"]
        has_next = page["has_more"] and not request.query_params.get("before_id")
        page["next_page"] = f"{PAGE}{page['last_id']}" if has_next else None
    return JSONResponse(page)


@router.get("/v1/files/{file_id}", dependencies=[GUARDED])
async def show(request: Request, services: Services, owner: Owner, file_id: str) -> Response:
    """Return the description of a file."""
    return JSONResponse(_object(request, await get_stored_file(services, owner, file_id)))


@router.get("/v1/files/{file_id}/content", dependencies=[GUARDED])
async def content(services: Services, owner: Owner, file_id: str) -> Response:
    """Return the bytes of a file."""
    file = await get_stored_file(services, owner, file_id)
    headers = {
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(file.name)}",
        "Content-Length": str(file.size),
    }
    parts = services.shared.store.records.content(owner, file_id)
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}", dependencies=[GUARDED])
async def delete(request: Request, services: Services, owner: Owner, file_id: str) -> Response:
    """Delete a file. Batches that still need it will fail."""
    await get_stored_file(services, owner, file_id)
    await services.shared.store.records.delete_file(owner, file_id)
    if is_anthropic(request):
        return JSONResponse({"id": file_id, "type": "file_deleted"})
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _object(request: Request, file: StoredFile) -> dict[str, Any]:
    if is_anthropic(request):
        return {
            "id": file.id,
            "type": "file",
            "filename": file.name,
            "mime_type": mimetypes.guess_type(file.name)[0] or "application/octet-stream",
            "size_bytes": file.size,
            "created_at": _timestamp(file.created_ms),
            "expires_at": _timestamp(file.expires_ms) if file.expires_ms else None,
            "downloadable": True,
        }
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_ms // 1000,
        "expires_at": file.expires_ms // 1000 or None,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _timestamp(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat().replace("+00:00", "Z")


def expiry_ms(expires_after: Mapping[str, Any], now_ms: int, param: str) -> int:
    """Convert `expires_after` to an expiry time. Raises ApiError (400) if it is invalid."""
    seconds = str(expires_after.get("seconds", ""))
    if expires_after.get("anchor") != "created_at":
        raise invalid_field(f"{param}.anchor", f"{param}.anchor must be created_at")
    if not re.fullmatch(r"[0-9]{1,8}", seconds) or not MIN_EXPIRY <= int(seconds) <= MAX_EXPIRY:
        raise invalid_field(f"{param}.seconds", f"{param}.seconds must be {MIN_EXPIRY:,} to {MAX_EXPIRY:,}")
    return now_ms + 1000 * int(seconds)


def _read_upload(
    kind: str, body: bytes, now_ms: int, default_purpose: str
) -> tuple[StoredFile, bytes, list[RequestHint]]:
    fields: dict[str, str] = {}
    found: tuple[str, bytes] | None = None
    ignored = []
    for part, value in _parts(kind, body):
        try:
            name, filename = str(part.get_param("name", "", header="content-disposition")), part.get_filename("file")
        except (LookupError, ValueError, TypeError):  # malformed headers; see `multipart_boundary`
            raise invalid_field("file", "the headers of a form field cannot be read") from None
        if name == "file":
            found = _safe_name(filename), value
        elif name in _NAMES:
            fields[name] = value[:80].decode("utf-8", "replace")
        else:
            ignored.append(RequestHint(name, name, False))
    if found is None:
        raise invalid_field("file", "file is required: a form field with the file's content")
    purpose = fields.get("purpose", default_purpose)
    if purpose not in ("batch", *DOCUMENT_PURPOSES):
        raise invalid_field(
            "purpose", f"purpose must be batch, {' or '.join(DOCUMENT_PURPOSES)}; other purposes are not supported"
        )
    after = {name.removeprefix("expires_after[")[:-1]: fields[name] for name in _NAMES[2:] if name in fields}
    expires_ms = expiry_ms(after, now_ms, "expires_after") if after else 0
    name, value = found
    return StoredFile(new_id("file-"), name, purpose, len(value), now_ms, expires_ms), value, ignored


def _parts(kind: str, body: bytes) -> Iterator[tuple[Message, bytes]]:
    # Only the headers of fields are parsed with the `email` package, because it would split values into lines and parse
    # nested forms.
    boundary = multipart_boundary(kind)
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_PARTS + 2) if boundary else []
    if len(pieces) > MAX_PARTS + 2:
        raise invalid_field("file", f"the form has more than {MAX_PARTS} fields")
    for piece in pieces[1:]:
        head, blank, value = piece.partition(b"\r\n\r\n")
        if piece.startswith(b"--") or not blank or len(head) > MAX_HEAD_BYTES:
            return
        yield HeaderParser().parsestr(head.lstrip().decode("utf-8", "replace")), value


def _safe_name(name: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in re.split(r"[/\\]", name)[-1][:MAX_NAME])
    return shown or "file"
