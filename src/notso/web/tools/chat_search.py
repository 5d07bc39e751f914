"""Finds the owner's own chats by their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notso.web.store.protocol import SearchHit
from notso.web.tools.chat_tool import ChatTool, Surroundings
from notso.web.values.errors import ToolError

MAX_HITS = 5
LOOKED_AT = 40  # the chat that asks holds the words itself, and is left out
MAX_QUERY_CHARACTERS = 200


async def _run(arguments: Mapping[str, Any], surroundings: Surroundings) -> str:
    query = arguments["query"].strip()
    if not query or len(query) > MAX_QUERY_CHARACTERS:
        raise ToolError(f"the query needs 1 to {MAX_QUERY_CHARACTERS} characters")
    found = await surroundings.store.search(surroundings.owner, query, LOOKED_AT)
    hits = [hit for hit in found if hit.chat_id != surroundings.chat_id][:MAX_HITS]
    if not hits:
        return "nothing found: all words must occur in the same message, so try fewer words"
    return "\n".join(f"{number}. {_line(hit)}" for number, hit in enumerate(hits, start=1))


def _line(hit: SearchHit) -> str:
    title = " ".join(hit.title.split())
    if hit.message_id is None:
        return f'Chat "{title}"'
    said = " ".join(hit.snippet.replace("\x02", "").replace("\x03", "").split())
    return f'Chat "{title}": {said}'


CHAT_SEARCH = ChatTool(
    name="search_chats",
    description="Search the user's other chats for words.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words that must all occur"}},
        "required": ["query"],
    },
    run=_run,
)
