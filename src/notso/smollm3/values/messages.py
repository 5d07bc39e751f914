"""Messages and tool calls: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Priority = Literal["interactive", "api", "background"]
WhenFull = Literal["stop", "drop_oldest"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text, or any text if a past call was cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; control tokens in its text stay text."""

    role: Role
    content: str
    reasoning_content: str | None = None  # only in the prompt with `keep_reasoning`
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    keep_reasoning: bool = False


# OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
Tool = Mapping[str, Any]


def thinking_set_by(system_text: object) -> bool | None:
    """Return thinking as a system message sets it by `/think` or `/no_think`, or None."""
    # As in SmolLM3's templates: anywhere in the text, and with precedence over the request.
    if not isinstance(system_text, str) or "/think" not in system_text.replace("/no_think", "/think"):
        return None
    return "/no_think" not in system_text
