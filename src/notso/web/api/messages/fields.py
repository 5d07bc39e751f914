"""Request fields of Anthropic's Messages API, and the edits that `context_management` requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from notso.smollm3 import Message
from notso.web.api.request_fields.fields import (
    DESCRIBES_CALLER,
    EFFORTS,
    STRICT_TOOL,
    Arguments,
    Description,
    Effort,
    Fields,
    Id,
    Label,
    Name,
    Notes,
    Parts,
    SomeMessages,
    SomeParts,
    Text,
    accepting,
    hint,
    inert,
    notes_in,
    refused,
    works,
)
from notso.web.api.request_fields.sampling_fields import Whole, sampling_notes, with_sampling

DEFAULT_TRIGGER = 100_000
"""Number of prompt tokens above which old tool results are cleared, if the request sets no `trigger`."""
DEFAULT_KEPT_TOOL_USES = 3
CLEARED = "[This result was cleared to save space.]"
"""Replaces a cleared tool result in the prompt."""

MAX_EDITS = 8
MAX_LISTED_TOOLS = 1024
"""Maximum number of tools, including deferred ones. Claude Code, for example, lists the tools of all MCP servers."""

Amount = Annotated[int, Field(ge=0)]


class InputTokens(Fields):
    type: Literal["input_tokens"]
    value: Amount


class ToolUses(Fields):
    """Number of tool calls with results."""

    type: Literal["tool_uses"]
    value: Amount


class ThinkingTurns(Fields):
    """Number of answers; their tool calls do not count separately."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(Fields):
    """All answers."""

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
        # Returns None if the reasoning of all answers is kept.
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


_NO_COMPACTION = hint("conversations are not summarized; prompts that do not fit are refused", is_checked=True)


class Compact(Fields):
    """Summarization of long conversations; accepted, but not performed."""

    type: Annotated[Literal["compact_20260112"], _NO_COMPACTION]
    trigger: InputTokens | None = None
    instructions: Text | None = None
    pause_after_compaction: bool | None = None


Edit = Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]


E = TypeVar("E", bound=Fields)


class ContextManagement(Fields):
    """Edits of a conversation."""

    edits: Annotated[list[Edit], Field(max_length=MAX_EDITS, fail_fast=True)] | None = None

    def of_kind(self, kind: type[E]) -> list[E]:
        return [edit for edit in self.edits or () if isinstance(edit, kind)]

    @property
    def kept_thinking_turns(self) -> int | None:
        """Return in how many of the latest turns answers keep their reasoning (None: all)."""
        edits = self.of_kind(ClearThinking)
        return min((edit.kept_turns for edit in edits if edit.kept_turns is not None), default=None if edits else 1)


Count = Callable[[Sequence[Message]], int]
Applied = tuple[Mapping[str, Any], ...]
"""Applied edits in the API's format."""


def apply_edits(
    messages: tuple[Message, ...], management: ContextManagement, count: Count
) -> tuple[tuple[Message, ...], Applied]:
    """Return the edited conversation, and the edits that had an effect. Raises the same errors as `count`."""
    # The caller has applied `clear_thinking` by setting `keep_reasoning`. Here, only the number of tokens that it saved
    # is computed. Several such edits are reported as one, because only the strictest has an effect.
    applied: list[Mapping[str, Any]] = []
    turns = sum(map(_drops_reasoning, messages[:-1]))
    if turns and management.of_kind(ClearThinking):
        whole = [replace(each, keep_reasoning=True) if _drops_reasoning(each) else each for each in messages[:-1]]
        saved = count([*whole, messages[-1]]) - count(messages)
        if saved > 0:
            counts = {"cleared_thinking_turns": turns, "cleared_input_tokens": saved}
            applied.append({"type": "clear_thinking_20251015", **counts})
    for clearing in management.of_kind(ClearToolUses):
        ids = _clearable_calls(messages, clearing)
        if not ids:
            continue
        before, trigger = count(messages), clearing.trigger or InputTokens(type="input_tokens", value=DEFAULT_TRIGGER)
        shorter = tuple(_clear_tool_use(message, ids, clearing.clear_tool_inputs) for message in messages)
        saved = before - count(shorter)
        is_due = isinstance(trigger, ToolUses) or before > trigger.value
        if is_due and saved > 0 and saved >= (clearing.clear_at_least.value if clearing.clear_at_least else 0):
            counts = {"cleared_tool_uses": _count_cleared_uses(messages, shorter), "cleared_input_tokens": saved}
            messages = shorter
            applied.append({"type": "clear_tool_uses_20250919", **counts})
    return messages, tuple(applied)


def _count_cleared_uses(before: Sequence[Message], after: Sequence[Message]) -> int:
    # Compares the messages, because an earlier edit may already have cleared some of the results.
    ids: set[str | None] = set()
    for old, new in zip(before, after, strict=True):
        if old.content != new.content:
            ids.add(old.tool_call_id)
        ids.update(call.id for call, other in zip(old.tool_calls, new.tool_calls, strict=True) if call != other)
    return len(ids)


def _drops_reasoning(message: Message) -> bool:
    return bool(message.reasoning_content) and not message.keep_reasoning


def _clearable_calls(messages: Sequence[Message], clearing: ClearToolUses) -> set[str]:
    # The caller checks triggers of type `input_tokens`.
    calls = [call for message in messages for call in message.tool_calls]
    names, uses = {call.id: call.name for call in calls}, Counter(call.id for call in calls)
    results = [message.tool_call_id or "" for message in messages if message.role == "tool"]
    if isinstance(clearing.trigger, ToolUses) and len(results) <= clearing.trigger.value:
        return set()
    keep_count = clearing.keep.value if clearing.keep else DEFAULT_KEPT_TOOL_USES
    excluded = clearing.exclude_tools or ()
    # If no call or several calls have an id, it does not identify a single call, so its results are kept.
    return {id for id in results[: max(0, len(results) - keep_count)] if uses[id] == 1 and names[id] not in excluded}


def _clear_tool_use(message: Message, ids: set[str], inputs: bool | list[str] | None) -> Message:
    if message.role == "tool" and message.tool_call_id in ids:
        return replace(message, content=CLEARED)
    calls = tuple(
        replace(call, arguments="{}")
        if call.id in ids and (inputs is True or (isinstance(inputs, list) and call.name in inputs))
        else call
        for call in message.tool_calls
    )
    return replace(message, tool_calls=calls) if calls != message.tool_calls else message


THREAD_ADVICE = "send the whole conversation, as Anthropic's client does automatically after this error"


MAX_DOCUMENT_CHARACTERS = 1 << 22
MAX_BLOCKS = 4_096  # per document


class CacheControl(Fields):
    """Cache breakpoint. A one-hour `ttl` can pin the preceding part of the prompt on disk."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Name | None = None


class Cached(Fields):
    cache_control: CacheControl | None = None


class TextBlock(Cached):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Parts[dict[str, Any]] | None = None


class Citations(Fields):
    """Whether the answer may cite a document."""

    enabled: bool | None = None


class TextSource(Fields):
    """A document's text."""

    type: Literal["text"]
    data: Annotated[str, Field(max_length=MAX_DOCUMENT_CHARACTERS)]
    media_type: Literal["text/plain"]


class PdfSource(Fields):
    """A PDF file."""

    type: Literal["base64"]
    data: str
    media_type: Literal["application/pdf"]


class FileSource(Fields):
    """A stored file."""

    type: Literal["file"]
    file_id: Name


class ContentSource(Fields):
    """A document's text in blocks, which are cited by number."""

    type: Literal["content"]
    content: Text | Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]


DocumentSource = Annotated[TextSource | PdfSource | FileSource | ContentSource, Field(discriminator="type")]


class DocumentBlock(Cached):
    """A document, which the answer may cite."""

    type: Literal["document"]
    source: DocumentSource
    title: Annotated[str, Field(max_length=1_000)] | None = None
    context: Text | None = None
    citations: Citations | None = None


class SearchResultBlock(Cached):
    """A search result, which the answer may cite."""

    type: Literal["search_result"]
    content: Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]
    source: Annotated[str, Field(max_length=4_096)]
    title: Annotated[str, Field(max_length=1_000)]
    citations: Citations | None = None


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer; any `signature` is accepted."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedBlock(Fields):
    """Encrypted reasoning; left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Text | None = None


# All fields of these blocks are declared, so that only the type is reported as ignored.
@accepting("id tool_use_id name server_name input content is_error tools file_id caller to trigger")
class ServerBlock(Cached):
    """A block of a tool run by another server; left out of the prompt."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "container_upload",
        "fallback",
    ]
    from_: Annotated[Any, Field(alias="from")] = None


class CompactionBlock(Cached):
    """A summary from another server; `content` is null if summarization failed."""

    type: Literal["compaction"]
    content: Text | None = None
    encrypted_content: Any = None
    signature: Any = None


class ToolUseBlock(Cached):
    """A past call. `input` is a string if its JSON was cut off."""

    type: Literal["tool_use"]
    id: Id
    name: Name
    input: Arguments | None = None
    caller: Annotated[
        dict[str, Any] | None,
        hint("in tool calls: only the model calls tools", "`direct`", done=({"type": "direct"},)),
    ] = None


class ToolReference(Cached):
    """Result of a tool search; adds a deferred tool to the prompt."""

    type: Literal["tool_reference"]
    tool_name: Name


ResultBlock = Annotated[TextBlock | ToolReference | DocumentBlock | SearchResultBlock, Field(discriminator="type")]


class ToolResultBlock(Cached):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Text | Parts[ResultBlock] | None = None
    is_error: bool | None = None


class UploadBlock(Cached):
    """A file for code execution by another server; left out of the prompt."""

    type: Literal["container_upload"]
    file_id: Any = None


UserBlock = Annotated[
    TextBlock | ToolResultBlock | DocumentBlock | SearchResultBlock | UploadBlock, Field(discriminator="type")
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ServerBlock | CompactionBlock | ToolUseBlock,
    Field(discriminator="type"),
]


class UserTurn(Fields):
    """A user message, possibly with tool results."""

    role: Literal["user"]
    content: Text | SomeParts[UserBlock]


class AssistantTurn(Fields):
    """An earlier answer. If it is the last message, it is continued."""

    role: Literal["assistant"]
    content: Text | Parts[AssistantBlock]


class SystemTurn(Fields):
    """A system message within the conversation."""

    role: Literal["system"]
    content: Text | SomeParts[TextBlock]


AnyTurn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def _require_direct(callers: list[str]) -> list[str]:
    if callers and "direct" not in callers:
        raise ValueError("it should contain direct, because only the model calls tools")
    return callers


class AnthropicTool(Cached):
    """A function the model may call."""

    name: Name
    input_schema: dict[str, Any]
    description: Description | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: (
        Annotated[list[Name], Field(max_length=8, fail_fast=True), AfterValidator(_require_direct)] | None
    ) = None
    input_examples: Parts[dict[str, Any]] | None = None
    eager_input_streaming: Annotated[
        bool | None,
        hint(
            "arguments with an enforced schema are always streamed; others are sent as a whole", "false", done=(False,)
        ),
    ] = None


class AutoChoice(Fields):
    """The model decides whether to call tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Fields):
    """A tool must be called."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceByName(Fields):
    """The named tool must be called."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(Fields):
    """No tool may be called."""

    type: Literal["none"]


AnyToolChoice = Annotated[AutoChoice | AnyChoice | ToolChoiceByName | NoChoice, Field(discriminator="type")]


class ThinkingOn(Fields):
    """Reasoning with a token budget."""

    type: Literal["enabled"]
    budget_tokens: Annotated[Whole, Field(ge=1)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Fields):
    """Reasoning limited by `effort`, if given."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(Fields):
    """No reasoning."""

    type: Literal["disabled"]


AnyThinking = Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")]


class OutputFormat(Fields):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """Reasoning effort and answer format."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountFields(Cached):
    """The body of POST /v1/messages/count_tokens."""

    messages: SomeMessages[AnyTurn]
    model: Label | None = None
    system: Text | Parts[TextBlock] | None = None
    thinking: AnyThinking | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnyToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    speed: Annotated[
        Literal["standard", "fast"] | None,
        hint("there is only one speed", "`standard`", "remove this field", done=("standard",), is_checked=True),
    ] = None
    user_profile_id: Annotated[Name | None, DESCRIBES_CALLER] = None
    workspace_id: Annotated[Name | None, DESCRIBES_CALLER] = None


@with_sampling("anthropic")
class MessageFields(CountFields):
    """The body of POST /v1/messages."""

    max_tokens: Whole
    stream: bool | None = None
    metadata: Annotated[dict[str, Any] | None, replace(DESCRIBES_CALLER, done=({},))] = None
    diagnostics: Annotated[dict[str, Any] | None, hint("usage and cached tokens are always reported")] = None
    # The following fields are accepted only with values that have no effect.
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    inference_geo: Literal["global"] | None = None


COUNT_NOTES: Notes = {
    "messages": works(
        "1 to 2,048 messages with the roles user, assistant and system; `content` is a string, or a list of blocks of "
        "type text, document (text, content, PDF as base64, or a stored file), search_result, tool_use, tool_result "
        "and thinking. A final assistant message is continued"
    ),
    "model": works("a name listed by `GET /v1/models`; optional"),
    "system": works("a string, or a list of text blocks"),
    "thinking": works(
        "`type`: `enabled`, with a `budget_tokens` of less than `max_tokens`; `adaptive`; or `disabled` (default). "
        "`display`: `omitted` leaves the thinking block empty; `summarized` returns the full reasoning",
        "use enabled, adaptive or disabled",
    ),
    "tools": works(
        "up to 128 functions with schemas of up to 32 levels; up to 1,024 including those with `defer_loading`"
    ),
    "tool_choice": works(
        "`auto`, `any`, `tool` with a name, or `none`; `disable_parallel_tool_use` true: at most one call per response"
    ),
    "output_config": works(
        "`format`: a JSON schema, enforced after the reasoning; `effort`: limits adaptive thinking, see "
        "below, and is otherwise ignored"
    ),
    "output_format": works("older name for `output_config.format`"),
    "cache_control": works(
        "prompts are always cached; a `ttl` of `1h` in a block of `system` or of a user message, except a tool result, "
        "pins the prompt up to that block on disk"
    ),
    **notes_in(CountFields),
    "mcp_servers": refused("connect to MCP servers in the client, and pass their tools as functions"),
    "context_management": works(
        "`edits` that clear old tool results and reasoning from the prompt; the response reports what was cleared"
    ),
}

MESSAGE_NOTES: Notes = COUNT_NOTES | {
    "max_tokens": works(
        "required: maximum tokens, including reasoning; if the context is full first, `stop_reason` is "
        "`model_context_window_exceeded`. 0: fill the prompt cache without generating"
    ),
    **sampling_notes("anthropic"),
    "stream": works("true: stream this API's events"),
    **notes_in(MessageFields),
    "service_tier": inert(
        "`auto` or `standard_only`; there is only one tier", "there is only one tier; remove this field"
    ),
    "container": inert("null", "code execution is not available"),
    "thread": refused(THREAD_ADVICE),
    "inference_geo": inert("`global`", "responses are generated on the server's machine; remove this field"),
}

WITHIN_MESSAGE: Notes = {
    "image": refused("the model reads text only"),
    "url": refused("URLs are not fetched; send the document as base64 or as text"),
    "media_type": works("in documents: application/pdf or text/plain", "send a PDF or plain text"),
    "thinking": works("in messages: reasoning stays in the prompt until the next user message without tool results"),
    "redacted_thinking": works("in messages: left out of the prompt, because it is encrypted"),
    "server_tool_use": works(
        "in assistant messages: left out of the prompt and reported as ignored, like all blocks of tools that another "
        "server ran"
    ),
    "compaction": works("in assistant messages: the summary is part of the text"),
    "effort": works(EFFORTS, "use minimal, low, medium, high, xhigh or max, or thinking with budget_tokens"),
    **notes_in(ToolUseBlock),
    "strict": STRICT_TOOL,
    "type": inert(
        "in tools: `custom`",
        "of tools, only your own (type custom) can be called; of content, only text and documents can be read",
    ),
    "citations": works(
        "in documents and search results: with `enabled`, the answer quotes them verbatim; every citation is verified"
    ),
    "input_examples": works("in tools: added to the tool's schema in the prompt, as `examples`"),
    "defer_loading": works(
        "in tools: true omits the tool from the prompt until a `tool_reference` in a tool result names it"
    ),
    "allowed_callers": works("in tools: a list that contains `direct`, because only the model calls tools"),
    "clear_tool_uses_20250919": works(f"results of all but the newest tool calls are replaced by `{CLEARED}`"),
    "clear_thinking_20251015": works("`keep`: the number of responses whose reasoning stays in the prompt, or `all`"),
    "compact_20260112": _NO_COMPACTION,
    **notes_in(AnthropicTool),
    "between_tools": refused("use enabled, adaptive or disabled"),
}
"""Notes on nested fields."""
