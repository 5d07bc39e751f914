"""What crosses the border between the model's floor and those above: frozen values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
EventKind = Literal["reasoning", "text", "tool_call", "usage", "end"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is JSON text (an object), exactly as the API shows it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Its text is content, never markup: a control token's spelling stays plain text."""

    role: Role
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens, times in milliseconds. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    prompt_ms: float = 0.0
    completion_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One step of an answer. A stream is any number of reasoning, text and tool_call events, one usage, one end.

    `text` is set for reasoning and text, `tool_call` for tool_call, `usage` for usage, `finish_reason` for end.
    """

    kind: EventKind
    text: str = ""
    tool_call: ToolCall | None = None
    usage: Usage | None = None
    finish_reason: FinishReason | None = None


Tool = Mapping[str, Any]
"""A tool as the OpenAI API writes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a page or a person may know of the loaded model. Sizes in bytes and tokens."""

    name: str
    path: str
    is_demo: bool
    size_bytes: int
    parameter_count: int
    context_tokens: int
    quantisation: Mapping[str, int] = field(default_factory=dict)  # format name -> number of tensors
    kernels: str = "generic"
    threads: int = 1
