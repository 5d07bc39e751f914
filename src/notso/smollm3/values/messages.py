"""What crosses the border between the model's floor and those above: frozen values, no behaviour."""

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
    """One call the model made. `arguments` is JSON text (an object), exactly as the API shows it; of a past call it may
    be any text, for an answer may have been cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Its text is content, never markup: a control token's spelling stays plain text.

    An earlier turn's `reasoning_content` is left out of the prompt unless `keep_reasoning` asks for it.
    """

    role: Role
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    keep_reasoning: bool = False


Tool = Mapping[str, Any]
"""A tool as the OpenAI API writes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


def thinking_set_by(system_text: object) -> bool | None:
    """Whether instructions switch thinking on or off by `/think` or `/no_think`, as SmolLM3's templates look for them:
    anywhere, and stronger than what is asked for. None where they say nothing."""
    if not isinstance(system_text, str) or "/think" not in system_text.replace("/no_think", "/think"):
        return None
    return "/no_think" not in system_text
