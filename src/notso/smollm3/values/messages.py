"""Represent messages and tool calls as immutable values."""

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
    """A tool call. `arguments` is JSON text, or any text if the call was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Control tokens in its text are treated as plain text."""

    role: Role
    content: str
    reasoning_content: str | None = None  # omitted from prompts, except with `keep_reasoning` or `continue_last`
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    keep_reasoning: bool = False


# OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
Tool = Mapping[str, Any]


def thinking_set_by(system_text: object) -> bool | None:
    """Return False if a system message contains `/no_think`, True if it contains `/think`, else None."""
    # As in SmolLM3's templates, the flags may be anywhere in the text and take precedence over the request.
    if not isinstance(system_text, str) or "/think" not in system_text.replace("/no_think", "/think"):
        return None
    return "/no_think" not in system_text
