"""Cursor pagination of OpenAI's list endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from notso.web.api.request_fields.fields import invalid_field

_NUMBER = re.compile(r"[0-9]{1,9}")


def paginate(
    items: Sequence[Mapping[str, Any]],
    query: Mapping[str, str | None],
    *,
    default_limit: int = 20,
    max_limit: int = 100,
) -> dict[str, Any]:
    """Return a page of `items` (oldest first) in the API's format.

    `query` has the parameters `limit` (1 to `max_limit`), `order` (default `desc`) and `after` (an item's id). Raises
    ApiError (400) naming the parameter.
    """
    limit, order, after = (query.get(name) for name in ("limit", "order", "after"))
    if order not in (None, "asc", "desc"):
        raise invalid_field("order", "order must be asc or desc")
    size = int(limit) if limit is not None and _NUMBER.fullmatch(limit) else default_limit if limit is None else 0
    if not 1 <= size <= max_limit:
        raise invalid_field("limit", f"limit must be 1 to {max_limit:,}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise invalid_field("after", "after must be the id of an item of this list")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + size]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + size < len(ordered),
    }
