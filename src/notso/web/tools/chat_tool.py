"""A tool as a plain value: what the model is told of it, and the function behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from notso.web.engine.port import Tool
from notso.web.store.protocol import Attachment, ChatStore
from notso.web.tools.elicitation import Ask
from notso.web.values.errors import ToolError

MAX_ARGUMENT_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a tool may know of the chat it is called in. `attachments` are those of the branch the model answers in;
    `ask` puts a question to the person at the page, where there is one."""

    owner: str
    chat_id: str
    store: ChatStore
    attachments: tuple[Attachment, ...] = ()
    ask: Ask | None = None


CHANGED = "the tool has changed since it was offered; it was not run, and the next call requires approval again"
Run = Callable[[Mapping[str, Any], Surroundings], Awaitable[str]]
"""From checked arguments to the text the model reads. Raises ToolError, whose sentence the model reads instead."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatTool:
    """`parameters` is the JSON schema of the arguments; `origin` names the server it comes from ('': built in), and
    `name_there` is what it calls the tool, where that is another name.

    After `seconds` a call is given up. `always_asks`: permission is for one call only.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Run
    origin: str = ""
    seconds: float = field(default=10.0)
    name_there: str = ""
    always_asks: bool = False

    @property
    def digest(self) -> str:
        """Of all that a person is told who permits it; another tool of that name has another one."""
        told = [self.origin, self.name, self.name_there, self.description, self.parameters]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def definition(self) -> Tool:
        """The tool as the engine is given it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Hold arguments to the little of JSON schema that built-in tools use: which there are, and their types.

    Raises ToolError, which names what is missing, unknown or of another type.
    """
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
