"""`context_management`: clearing of old tool results and reasoning from long conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import Message
from notso.web.api.request_fields.fields import Fields, Hint, Name, Text

USUAL_TRIGGER = 100_000
"""Default in prompt tokens."""
USUALLY_KEPT_TOOL_USES = 3
CLEARED = "[This result was cleared to save space.]"
"""Replaces a cleared tool result in the prompt."""

Whole = Annotated[int, Field(ge=0)]


class InputTokens(Fields):
    """Number of prompt tokens."""

    type: Literal["input_tokens"]
    value: Whole


class ToolUses(Fields):
    """Number of tool calls with results."""

    type: Literal["tool_uses"]
    value: Whole


class ThinkingTurns(Fields):
    """Number of answers, each including its tool calls."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(Fields):
    """Everything."""

    type: Literal["all"]


class ClearToolUses(Fields):
    """Clears old tool results from long prompts."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    exclude_tools: Annotated[list[Name], Field(max_length=128, fail_fast=True)] | None = None
    clear_tool_inputs: bool | Annotated[list[Name], Field(max_length=128, fail_fast=True)] | None = None


class ClearThinking(Fields):
    """Drops the reasoning of all but the latest answers."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns | ThinkingTurns | None = None

    @property
    def kept_turns(self) -> int | None:
        # None: all of them.
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class Compact(Fields):
    """Summarization of long conversations; accepted but not done."""

    type: Annotated[Literal["compact_20260112"], Hint()]
    trigger: InputTokens | None = None
    instructions: Text | None = None
    pause_after_compaction: bool | None = None


Edit = Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]


class ContextManagement(Fields):
    """One edit of each kind."""

    edits: Annotated[list[Edit], Field(max_length=3, fail_fast=True)] | None = None

    def edit(self, kind: type[Fields]) -> Any:
        return next((edit for edit in self.edits or () if isinstance(edit, kind)), None)


Count = Callable[[Sequence[Message]], int]
Applied = tuple[Mapping[str, Any], ...]
"""Applied edits in the API's format."""


def edited(
    messages: tuple[Message, ...], management: ContextManagement, count: Count
) -> tuple[tuple[Message, ...], Applied]:
    """Apply the edits to a conversation; return it and the applied edits.

    `keep_reasoning` must be set already. Raises what `count` raises.
    """
    applied: list[Mapping[str, Any]] = []
    turns = sum(map(_is_thoughtless, messages[:-1]))
    if management.edit(ClearThinking) is not None and turns:
        whole = [replace(each, keep_reasoning=True) if _is_thoughtless(each) else each for each in messages[:-1]]
        saved = count([*whole, messages[-1]]) - count(messages)
        if saved > 0:
            counts = {"cleared_thinking_turns": turns, "cleared_input_tokens": saved}
            applied.append({"type": "clear_thinking_20251015", **counts})
    clearing: ClearToolUses | None = management.edit(ClearToolUses)
    ids = _old_uses(messages, clearing) if clearing is not None else set()
    if clearing is not None and ids:
        before, trigger = count(messages), clearing.trigger or InputTokens(type="input_tokens", value=USUAL_TRIGGER)
        shorter = tuple(_without(message, ids, clearing.clear_tool_inputs) for message in messages)
        saved = before - count(shorter)
        is_due = isinstance(trigger, ToolUses) or before > trigger.value
        if is_due and saved > 0 and saved >= (clearing.clear_at_least.value if clearing.clear_at_least else 0):
            messages, counts = shorter, {"cleared_tool_uses": len(ids), "cleared_input_tokens": saved}
            applied.append({"type": "clear_tool_uses_20250919", **counts})
    return messages, tuple(applied)


def _is_thoughtless(message: Message) -> bool:
    return bool(message.reasoning_content) and not message.keep_reasoning


def _old_uses(messages: Sequence[Message], clearing: ClearToolUses) -> set[str]:
    # None are cleared below the trigger.
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    results = [message.tool_call_id or "" for message in messages if message.role == "tool"]
    if isinstance(clearing.trigger, ToolUses) and len(results) <= clearing.trigger.value:
        return set()
    kept = clearing.keep.value if clearing.keep else USUALLY_KEPT_TOOL_USES
    excluded = clearing.exclude_tools or ()
    return {id for id in results[: max(0, len(results) - kept)] if id in names and names[id] not in excluded}


def _without(message: Message, ids: set[str], inputs: bool | list[str] | None) -> Message:
    if message.role == "tool" and message.tool_call_id in ids:
        return replace(message, content=CLEARED)
    calls = tuple(
        replace(call, arguments="{}")
        if call.id in ids and (inputs is True or (isinstance(inputs, list) and call.name in inputs))
        else call
        for call in message.tool_calls
    )
    return replace(message, tool_calls=calls) if calls != message.tool_calls else message
