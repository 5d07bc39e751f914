"""Reads a file of this chat again: useful once a summary, or a full context, has taken it out of the model's sight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notso.web.store.protocol import Attachment
from notso.web.tools.chat_tool import ChatTool, Surroundings
from notso.web.values.errors import ToolError

MAX_LINES = 200
MAX_CHARACTERS = 6_000


async def _run(arguments: Mapping[str, Any], surroundings: Surroundings) -> str:
    return part_of(surroundings.attachments, arguments["name"], arguments.get("first_line", 1))


def part_of(attachments: tuple[Attachment, ...], name: str, first_line: int) -> str:
    """Lines of the newest file of that name from `first_line` (1 is the first) on. Raises ToolError."""
    file = next((each for each in reversed(attachments) if each.name == name.strip()), None)
    if file is None:
        names = ", ".join(dict.fromkeys(each.name for each in attachments))
        raise ToolError(f"there is no file of that name; available: {names}" if names else "this chat has no files")
    lines = file.text.split("\n")
    if not 1 <= first_line <= len(lines):
        raise ToolError(f"first_line must be from 1 to {len(lines)}")
    shown = "\n".join(lines[first_line - 1 : first_line - 1 + MAX_LINES])[:MAX_CHARACTERS]
    last = first_line + shown.count("\n")
    return f"{file.name}, lines {first_line} to {last} of {len(lines)}:\n{shown}"


ATTACHMENT_READER = ChatTool(
    name="read_attachment",
    description="Read a text file that the user attached earlier in this chat.",
    parameters={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The file's name"},
            "first_line": {"type": "integer", "description": "Where to begin; 1 if left out"},
        },
        "required": ["name"],
    },
    run=_run,
)
