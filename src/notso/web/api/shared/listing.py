"""Paginate lists in OpenAI's and Anthropic's APIs with cursors, and date the listed model files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from notso.web.api.request_fields.fields import invalid_field

PAGE = "page_"
"""Prefix of the cursor that Anthropic's API returns as `next_page` and accepts as the next request's `page`."""

NANOSECONDS_PER_SECOND = 1_000_000_000
# Start of the last day that `datetime` can represent. Rounding a time near the end of that day could give the year
# 10000.
_LATEST_NS = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp()) * NANOSECONDS_PER_SECOND

_NUMBER = re.compile(r"[0-9]{1,9}")
_AFTER, _BEFORE = ("after", "after_id", "page"), ("before", "before_id")  # aliases


def paginate(
    items: Sequence[Mapping[str, Any]],
    query: Mapping[str, str | None],
    *,
    default_limit: int = 20,
    max_limit: int = 100,
) -> dict[str, Any]:
    """Return a page of `items` (given oldest first) in the API's format. Raises ApiError (400)."""
    # The page begins after the item with the id `after`, or ends just before the item with the id `before`. Anthropic
    # calls these parameters `after_id` or `page`, and `before_id`.
    limit, order = query.get("limit"), query.get("order")
    if order not in (None, "asc", "desc"):
        raise invalid_field("order", "order must be asc or desc")
    size = int(limit) if limit is not None and _NUMBER.fullmatch(limit) else default_limit if limit is None else 0
    if not 1 <= size <= max_limit:
        raise invalid_field("limit", f"limit must be 1 to {max_limit:,}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    after, before = _find_cursor(ids, query, _AFTER), _find_cursor(ids, query, _BEFORE)
    first, stop = 0 if after is None else after + 1, len(ids) if before is None else before
    start = first if before is None else max(first, stop - size)
    page = ordered[start:stop][:size]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + size < stop if before is None else start > first,
    }


def modified_ns(path: str | Path) -> int:
    """Return a model file's modification time in ns (years 1970 to 9999), or 0 if `path` is empty or unreadable."""
    try:
        return max(0, min(Path(path).stat().st_mtime_ns, _LATEST_NS)) if path else 0
    except OSError:  # removed, moved or no longer readable
        return 0


def _find_cursor(ids: Sequence[str], query: Mapping[str, str | None], names: Sequence[str]) -> int | None:
    # Returns the position of the item whose id the query contains under one of `names`. Raises ApiError (400).
    given = {name: value.removeprefix(PAGE if name == "page" else "") for name in names if (value := query.get(name))}
    for name, value in given.items():
        if value not in ids:
            raise invalid_field(name, f"{name} must be the id of an item of this list")
        if value != next(iter(given.values())):
            raise invalid_field(name, f"{next(iter(given))} and {name} are aliases: use only one")
    return ids.index(next(iter(given.values()))) if given else None
