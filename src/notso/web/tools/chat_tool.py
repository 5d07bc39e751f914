"""Define tools: the description for the model, the function to call, and the context of a call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from notso.smollm3 import Tool
from notso.web.store.protocol import Attachment, ChatStore
from notso.web.tools.elicitation import Ask
from notso.web.values.errors import ToolError

MAX_ARGUMENT_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True)
class ToolContext:
    owner: str
    chat_id: str
    store: ChatStore
    attachments: tuple[Attachment, ...] = ()  # attachments of the chat's current branch
    ask: Ask | None = None  # requests input from the user; None if that is impossible


CHANGED = "the tool has changed since it was offered; it was not run, and the next call requires approval again"
Run = Callable[[Mapping[str, Any], ToolContext], Awaitable[str]]
"""Function that takes the arguments and returns the result for the model. It may raise ToolError."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatTool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    run: Run
    origin: str = ""  # name of the MCP server or plugin; empty for built-in tools
    seconds: float = 10.0  # timeout of a call
    remote_name: str = ""  # name of the tool on the MCP server
    always_asks: bool = False  # whether the user must permit each call

    @property
    def digest(self) -> str:
        content = [self.origin, self.name, self.remote_name, self.description, self.parameters]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def definition(self) -> Tool:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def arguments_schema(properties: Mapping[str, tuple[str, str]], *required: str) -> dict[str, Any]:
    """Return the JSON schema of arguments, given as name -> (type, description)."""
    rows = {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()}
    return {"type": "object", "properties": rows} | ({"required": list(required)} if required else {})


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check the names, types and lengths of a built-in tool's arguments. Raises ToolError."""
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"the argument {name} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"unknown argument {name}; available: {', '.join(properties) or 'none'}")
        kind = properties[name].get("type")
        if kind == "string" and not isinstance(value, str):
            raise ToolError(f"the argument {name} must be text")
        if kind == "integer" and (not isinstance(value, int) or isinstance(value, bool)):
            raise ToolError(f"the argument {name} must be an integer")
        if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARACTERS:
            raise ToolError(f"the argument {name} is longer than {MAX_ARGUMENT_CHARACTERS} characters")
