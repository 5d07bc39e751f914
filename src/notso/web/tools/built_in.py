"""Define the built-in tools, which run in the server's process."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from notso.web.store.protocol import Attachment, Memory, SearchHit
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_tool import ChatTool, ToolContext, arguments_schema
from notso.web.tools.fetch import FETCH
from notso.web.values.durations import current_ms
from notso.web.values.errors import ToolError
from notso.web.values.ids import new_id
from notso.web.values.visible_text import sanitize_line

MAX_HITS = 5
REQUESTED_HITS = 40  # hits requested from the store; more than MAX_HITS, because hits in the current chat are skipped
MAX_QUERY_CHARACTERS = 200


async def _search_chats(arguments: Mapping[str, Any], context: ToolContext) -> str:
    query = arguments["query"].strip()
    if not query or len(query) > MAX_QUERY_CHARACTERS:
        raise ToolError(f"the query needs 1 to {MAX_QUERY_CHARACTERS} characters")
    found = await context.store.search(context.owner, query, REQUESTED_HITS)
    hits = [hit for hit in found if hit.chat_id != context.chat_id][:MAX_HITS]
    if not hits:
        return "nothing found: all words must occur in the same message, so try fewer words"
    return "\n".join(f"{number}. {_line(hit)}" for number, hit in enumerate(hits, start=1))


def _line(hit: SearchHit) -> str:
    title = " ".join(hit.title.split())
    if hit.message_id is None:
        return f'Chat "{title}"'
    snippet = " ".join(hit.snippet.replace("\x02", "").replace("\x03", "").split())
    return f'Chat "{title}": {snippet}'


CHAT_SEARCH = ChatTool(
    name="search_chats",
    description="Search the user's other chats for words.",
    parameters=arguments_schema({"query": ("string", "Words that must all occur")}, "query"),
    run=_search_chats,
)


MAX_MEMORY_ENTRY = 500  # characters


async def _remember(arguments: Mapping[str, Any], context: ToolContext) -> str:
    text = sanitize_line(arguments["text"], MAX_MEMORY_ENTRY + 1)
    if not 1 <= len(text) <= MAX_MEMORY_ENTRY:
        raise ToolError(f"the text needs 1 to {MAX_MEMORY_ENTRY} characters")
    memories = await context.store.memories(context.owner)
    if any(each.text == text for each in memories):
        return "this is remembered already"
    entry = Memory(new_id(), text, current_ms())
    if not await context.store.save_memory(context.owner, entry):
        raise ToolError("the memory is full: the user has to delete entries first")
    return "remembered, for this and other chats"


REMEMBER = ChatTool(
    name="remember",
    description="Remember a fact or wish for all later chats, if the user asks for it.",
    parameters=arguments_schema({"text": ("string", "One sentence that is clear on its own")}, "text"),
    run=_remember,
    always_asks=True,
)


MAX_LINES = 200
MAX_CHARACTERS = 6_000


async def _read_attachment(arguments: Mapping[str, Any], context: ToolContext) -> str:
    attachments, name = context.attachments, arguments["name"]
    file = _newest(attachments, name)
    if file is not None and file.document:
        document = await context.store.documents.text(context.owner, file.document)
        if document is None:
            raise ToolError("this document was deleted")
        attachments = (replace(file, text=document.text),)
    return await asyncio.to_thread(attachment_excerpt, attachments, name, arguments.get("first_line", 1))


def _newest(attachments: tuple[Attachment, ...], name: str) -> Attachment | None:
    return next((each for each in reversed(attachments) if each.name == name.strip()), None)


def attachment_excerpt(attachments: tuple[Attachment, ...], name: str, first_line: int) -> str:
    """Return an excerpt of the newest attachment called `name`, from line `first_line` (1-based). Raises ToolError."""
    file = _newest(attachments, name)
    if file is None:
        names = ", ".join(dict.fromkeys(each.name for each in attachments))
        raise ToolError(f"there is no file with that name; available: {names}" if names else "this chat has no files")
    lines = file.text.split("\n")
    if not 1 <= first_line <= len(lines):
        raise ToolError(f"first_line must be from 1 to {len(lines)}")
    shown = "\n".join(lines[first_line - 1 : first_line - 1 + MAX_LINES])[:MAX_CHARACTERS]
    last = first_line + shown.count("\n")
    return f"{file.name}, lines {first_line} to {last} of {len(lines)}:\n{shown}"


ATTACHMENT_READER = ChatTool(
    name="read_attachment",
    description="Read a text file that the user attached earlier in this chat.",
    parameters=arguments_schema(
        {"name": ("string", "The file's name"), "first_line": ("integer", "Where to begin; 1 if left out")}, "name"
    ),
    run=_read_attachment,
)


MAX_NAME_CHARACTERS = 64


def format_time(zone: str, now: datetime) -> str:
    """Format an aware datetime in a time zone, or in local time if `zone` is ''. Raises ToolError."""
    name = find_time_zone(zone) if zone.strip() else ""
    local = now.astimezone(ZoneInfo(name)) if name else now.astimezone()
    offset = local.strftime("%z")
    where = name or local.tzname() or "local time"
    return f"{local:%A}, {local.day} {local:%B %Y}, {local:%H:%M:%S} ({where}, UTC{offset[:3]}:{offset[3:5]})"


def find_time_zone(text: str) -> str:
    """Find a time zone by name or city. Raises ToolError."""
    key = text.strip().replace(" ", "_").lower()
    if len(key) <= MAX_NAME_CHARACTERS:
        if key in _zones():
            return _zones()[key]
        close = difflib.get_close_matches(key, _zones(), n=3, cutoff=0.7)
        if close:
            raise ToolError(f"there is no zone {text!r}; similar names: {', '.join(_zones()[name] for name in close)}")
    raise ToolError("unknown time zone; use a name such as Europe/Paris, or a city")


@cache
def _zones() -> dict[str, str]:
    # The keys are lower-case names of zones, and of cities that occur in only one zone.
    names = sorted(name for name in available_timezones() if not name.startswith(("posix", "right", "System")))
    cities: dict[str, list[str]] = {}
    for name in names:
        if "/" in name and not name.startswith("Etc/"):
            cities.setdefault(name.rpartition("/")[2].lower(), []).append(name)
    unique = {city: found[0] for city, found in cities.items() if len(found) == 1}
    return unique | {name.lower(): name for name in names}


async def _get_time(arguments: Mapping[str, Any], context: ToolContext) -> str:
    return await asyncio.to_thread(format_time, arguments.get("zone", ""), datetime.now(UTC))


CLOCK = ChatTool(
    name="clock",
    description="Get today's date and the time of day, here or in a time zone.",
    parameters=arguments_schema({"zone": ("string", "For example Europe/Paris; left out: here")}),
    run=_get_time,
)


BUILT_IN_TOOLS: tuple[ChatTool, ...] = (CALCULATOR, CLOCK, CHAT_SEARCH, ATTACHMENT_READER, FETCH, REMEMBER)
