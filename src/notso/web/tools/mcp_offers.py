"""List and load the prompts and text resources of MCP servers, which the chat page offers as slash commands."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mcp import Client
from mcp.types import (
    EmbeddedResource,
    GetPromptResult,
    ListPromptsResult,
    Prompt,
    ReadResourceResult,
    TextContent,
    TextResourceContents,
)

from notso.web.tools.mcp_config import unique_name
from notso.web.values.errors import ToolError
from notso.web.values.visible_text import sanitize_line

MAX_OFFERS = 60  # per server and kind
MAX_PAGES = 10
MAX_PROMPT_CHARACTERS = 20_000
MAX_DESCRIPTION_CHARACTERS = 160
MAX_COMMAND_CHARACTERS = 64
MAX_ARGUMENTS = 12
MAX_NAME_CHARACTERS = 60

_UNFIT = re.compile(r"[^a-z0-9_-]+")
_NAMED = re.compile(r"""(?<!\S)([^\s=]+)=(?:"([^"]*)"|'([^']*)'|(\S+))""")
_TEXT_TYPES = re.compile(r"text/|application/(?:json|xml|yaml|toml|javascript|sql|x-)|.*\+(?:json|xml)$")


@dataclass(frozen=True, slots=True)
class Offer:
    kind: Literal["prompt", "resource"]
    command: str  # name of the slash command
    usage: str  # syntax of the command's arguments
    description: str
    name: str
    fetch: Callable[[str], Awaitable[str]]  # takes the arguments that the user typed; returns text or raises ToolError


async def list_offers(client: Client, kind: Literal["prompt", "resource"]) -> AsyncIterator[Any]:
    """Yield at most MAX_OFFERS prompts or resources of a server."""
    count, cursor = 0, None
    for _ in range(MAX_PAGES):
        page = await (client.list_prompts if kind == "prompt" else client.list_resources)(cursor=cursor)
        found: Sequence[Any] = page.prompts if isinstance(page, ListPromptsResult) else page.resources
        for each in found[: MAX_OFFERS - count]:
            count += 1
            yield each
        cursor = page.next_cursor
        if not cursor or count == MAX_OFFERS:
            return


def is_text(mime_type: str | None) -> bool:
    """Return whether a resource of this media type, or of unknown type (None), may be text."""
    return mime_type is None or _TEXT_TYPES.match(mime_type.lower()) is not None


def unique_command(server: str, name: str, taken: Mapping[str, object]) -> str:
    """Return the command `server:name`, with invalid characters replaced and a number appended if it is taken."""
    start = f"{_UNFIT.sub('-', server.lower()).strip('-')}:{_UNFIT.sub('-', name.lower()).strip('-') or 'item'}"
    return unique_name(start, taken, MAX_COMMAND_CHARACTERS, "-")


def offer_description(title: str | None, description: str | None) -> str:
    return sanitize_line(description or title or "", MAX_DESCRIPTION_CHARACTERS)


def usage_of(prompt: Prompt) -> str:
    """Return the syntax of a prompt's arguments: `NAME` for a single argument, `name=...` for several."""
    rows = prompt.arguments or []
    names = [(sanitize_line(each.name, MAX_NAME_CHARACTERS), bool(each.required)) for each in rows]
    if len(names) == 1:
        return names[0][0].upper() if names[0][1] else f"[{names[0][0].upper()}]"
    return " ".join(f"{name}=..." if required else f"[{name}=...]" for name, required in names)


def parse_prompt_arguments(prompt: Prompt, typed: str) -> dict[str, str]:
    """Parse `name=value` and `name="a b"` if the prompt has several arguments. Other text is the value of the first
    argument not given by name. Raises ToolError."""
    rows, found = (prompt.arguments or [])[:MAX_ARGUMENTS], dict[str, str]()
    names = {each.name for each in rows}

    def keep(match: re.Match[str]) -> str:
        name, *values = match.groups()
        if name not in names:
            return match[0]
        found[name] = next(each for each in values if each is not None)
        return " "

    if len(rows) > 1:
        typed = _NAMED.sub(keep, typed)
    rest = typed.strip()
    if rest:
        free = next((each.name for each in rows if each.name not in found), None)
        if free is None:
            raise ToolError(f"this prompt takes {'no arguments' if not rows else usage_of(prompt)}")
        found[free] = rest
    missing = [
        sanitize_line(each.name, MAX_NAME_CHARACTERS) for each in rows if each.required and each.name not in found
    ]
    if missing:
        raise ToolError(f"missing: {', '.join(missing)}")
    return found


def prompt_text(result: GetPromptResult) -> str:
    """Return the text of a prompt's messages, in order. Raises ToolError."""
    parts = []
    for message in result.messages:
        content = message.content
        if isinstance(content, TextContent):
            parts.append(content.text)
        elif isinstance(content, EmbeddedResource) and isinstance(content.resource, TextResourceContents):
            parts.append(content.resource.text)
        else:
            raise ToolError(f"the prompt contains content of the type {content.type}, which is not supported")
    text = "\n\n".join(parts).strip()
    if not text or len(text) > MAX_PROMPT_CHARACTERS:
        raise ToolError(f"the prompt has {len(text):,} characters; it must have 1 to {MAX_PROMPT_CHARACTERS:,}")
    return text


def resource_text(result: ReadResourceResult) -> str:
    """Return the text of a resource. Raises ToolError."""
    texts = [each.text for each in result.contents if isinstance(each, TextResourceContents)]
    if len(texts) < len(result.contents) or not texts:
        raise ToolError("the resource is not text")
    return "\n".join(texts)
