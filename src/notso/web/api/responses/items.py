"""Items of stored responses: ids, listing and resolution of references."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from notso.web.api.request_fields.fields import invalid
from notso.web.api.shared.serializer import as_json
from notso.web.edge.api_error import ApiError
from notso.web.store.protocol import StoredResponse

Item = Mapping[str, Any]
Reference = tuple[int, str]
"""Index in the input, and item id."""

MAX_REFERENCED_RESPONSES = 256
MAX_REFERENCED_CHARACTERS = 1 << 22
"""Limit of all items that a request references; more fits no context."""

_MARKS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "file_search_call": "fs",
}
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{24})(?:in)?[0-9a-f]{2,4}")


def item_id(response_id: str, kind: str, index: int, *, is_input: bool = False) -> str:
    """Return an item's id, which contains the response's id."""
    return f"{_MARKS[kind]}_{response_id.partition('_')[2]}{'in' if is_input else ''}{index:02x}"


def kept_input(items: Iterable[Item], response_id: str) -> tuple[Item, ...]:
    """Return input items as listed: with ids, status and content parts."""
    return tuple(_kept(item, response_id, index) for index, item in enumerate(items))


async def referenced_items(
    references: Sequence[Reference], stored: Callable[[str], Awaitable[StoredResponse | None]]
) -> dict[str, Item]:
    """Load referenced items by id.

    Raises ApiError: 404 if unknown, 400 for duplicates or too many.
    """
    ids = [id for _, id in references]
    responses: dict[str, dict[str, Item]] = {}
    found: dict[str, Item] = {}
    size = 0
    for index, id in references:
        param = f"input.{index}.id"
        if ids.index(id) != len(found):
            raise invalid(param, f"{param} refers to an item twice")
        named = _ITEM_ID.fullmatch(id)
        response_id = f"resp_{named[1]}" if named else ""
        if response_id and response_id not in responses:
            if len(responses) == MAX_REFERENCED_RESPONSES:
                raise invalid(param, f"input refers to items of more than {MAX_REFERENCED_RESPONSES} responses")
            responses[response_id] = _by_id(await stored(response_id))
        item = responses.get(response_id, {}).get(id)
        if item is None:
            raise ApiError(404, "not_found", "no item with that id is stored (with store: false, none is)", param=param)
        size += len(as_json(item))
        if size > MAX_REFERENCED_CHARACTERS:
            raise invalid(param, f"the items referenced by input exceed {MAX_REFERENCED_CHARACTERS:,} characters")
        found[id] = item
    return found


def _by_id(response: StoredResponse | None) -> dict[str, Item]:
    items = (*response.input, *response.body["output"]) if response is not None else ()
    return {item["id"]: item for item in items}


def _kept(item: Item, response_id: str, index: int) -> Item:
    kind = item["type"]
    kept = {name: value for name, value in item.items() if value is not None}
    kept["id"] = kept.get("id") or item_id(response_id, kind, index, is_input=True)
    kept.setdefault("status", "completed")
    if kind == "reasoning":
        kept.setdefault("summary", [])
    if kind == "message":
        content = item["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        is_answer = item["role"] == "assistant"
        empty: dict[str, Any] = {"annotations": [], "logprobs": []} if is_answer else {}
        kind_of_part = "output_text" if is_answer else "input_text"
        kept["content"] = [{**empty, **part, "type": kind_of_part} for part in parts]
    return kept
