"""Parse batch file lines in OpenAI's format, for the API and `notso batch`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from notso.web.api.request_fields.fields import invalid_field, parse_object, unsupported_field
from notso.web.edge.errors import ApiError
from notso.web.edge.limits import MAX_REQUEST_BYTES

MAX_LINE_BYTES = MAX_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]
    ignored: tuple[str, ...] = ()  # names of unknown fields


def read_line(content: bytes, urls: Collection[str]) -> BatchLine:
    """Parse a line, but check only `stream` and `background` in its body. Raises ApiError."""
    if len(content) > MAX_LINE_BYTES:
        raise line_too_long()
    entry = parse_object(content)
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise invalid_field("custom_id", "custom_id must be a non-empty string")
    if entry.get("method") != "POST":
        raise invalid_field("method", "method must be POST")
    if not isinstance(url, str) or url not in urls:
        raise invalid_field("url", f"url must be {' or '.join(sorted(urls))}", "not_supported")
    if not isinstance(body, dict):
        raise invalid_field("body", "body must be an object")
    for name in ("stream", *(["background"] if url == "/v1/responses" else [])):
        if body.get(name):
            raise unsupported_field(name, f"{name} is not supported in a batch")
    unknown = tuple(name[:80] for name in entry if name not in ("custom_id", "method", "url", "body"))
    return BatchLine(custom_id, url, body, unknown)


def line_too_long() -> ApiError:
    return ApiError(413, "request_too_large", f"the line is longer than {MAX_LINE_BYTES:,} bytes")
