"""Convert Anthropic messages, documents, search results and citations to engine messages and parameters."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from notso.documents.citations import QuotedSpan, replace_newlines
from notso.smollm3 import FixedPrefix, Message, RequestOptions, Tool, ToolCall, ToolName
from notso.web.api.messages.fields import (
    COUNT_NOTES,
    MESSAGE_NOTES,
    THREAD_ADVICE,
    WITHIN_MESSAGE,
    AnthropicTool,
    AnyChoice,
    AnyTurn,
    Applied,
    AssistantTurn,
    CompactionBlock,
    ContentSource,
    ContextManagement,
    CountFields,
    DocumentBlock,
    FileSource,
    MessageFields,
    NoChoice,
    OutputFormat,
    PdfSource,
    SearchResultBlock,
    ServerBlock,
    SystemTurn,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolChoiceByName,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UploadBlock,
    UserTurn,
    apply_edits,
)
from notso.web.api.request_fields.fields import (
    EFFORT_BUDGETS,
    MAX_TOOLS,
    RequestHint,
    check_functions,
    find_hints,
    hints_of_types,
    invalid_field,
    read_fields,
    schema_grammar,
    to_arguments_text,
    tool_options,
)
from notso.web.api.request_fields.sampling_fields import (
    create_sampling_params,
    find_value,
    read_parameters,
    sampling_names,
)
from notso.web.api.shared.api_request import ApiRequest
from notso.web.api.shared.given_documents import (
    NO_FILES,
    Files,
    RequestDocument,
    RequestDocuments,
    RequestFile,
    file_key,
)
from notso.web.edge.errors import ApiError
from notso.web.engine.port import ChatEngine
from notso.web.engine.running import count_prompt

PINNED_TTL = "1h"
"""`ttl` of cache breakpoints that keep the preceding part of the prompt on disk."""
BETWEEN_BLOCKS = "\n"
PDF_NAME = "document.pdf"
PLACES = {"document": "document_index", "search_result": "search_result_index"}


def find_files(body: Mapping[str, Any]) -> Iterator[RequestFile]:
    """Yield the PDFs and stored files of an unvalidated request."""
    turns = body.get("messages")
    for at, turn in enumerate(turns if isinstance(turns, list) else ()):
        content = turn.get("content") if isinstance(turn, dict) else None
        yield from _files(content, f"messages.{at}.content")


def _files(content: Any, param: str) -> Iterator[RequestFile]:
    for at, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        source, place = block.get("source"), f"{param}.{at}"
        if block.get("type") == "tool_result":
            yield from _files(block.get("content"), f"{place}.content")
        elif block.get("type") == "document" and isinstance(source, dict):
            data, kind = source.get("data"), (source.get("type"), source.get("media_type"))
            if isinstance(data, str) and kind == ("base64", "application/pdf"):
                yield RequestFile(data, PDF_NAME, f"{place}.source.data")
            elif source.get("type") == "file" and isinstance(source.get("file_id"), str):
                yield RequestFile("", "", f"{place}.source.file_id", source["file_id"])


def add_document(documents: RequestDocuments, block: DocumentBlock | SearchResultBlock, files: Files) -> str:
    """Add a document, and return its text for the prompt. Raises ApiError (400)."""
    is_quoted = bool(block.citations and block.citations.enabled)
    kind = "search_result" if isinstance(block, SearchResultBlock) else "document"
    facts: dict[str, Any] = {"type": kind, "title": block.title}
    if isinstance(block, SearchResultBlock):
        text, starts = _join_blocks(block.content)
        facts |= {"location": "search_result_location", "source": block.source}
        return documents.add(RequestDocument(block.title, text, is_quoted, starts, facts))
    source = block.source
    if isinstance(source, PdfSource | FileSource):
        document = files.get(source.file_id if isinstance(source, FileSource) else file_key(source.data, PDF_NAME))
        if document is None:
            raise invalid_field("messages", "this endpoint does not accept PDF documents or stored files")
        text, starts = document.text, document.pages
        has_pages = document.kind == "PDF"
        facts |= {"location": "page_location" if has_pages else "char_location"}
        if isinstance(source, FileSource):
            facts |= {"file_id": source.file_id, "title": block.title or document.title}
    elif isinstance(source, ContentSource):
        blocks = [TextBlock(type="text", text=source.content)] if isinstance(source.content, str) else source.content
        text, starts = _join_blocks(blocks)
        facts["location"] = "content_block_location"
    else:
        text, starts = source.data, (0,)
        facts["location"] = "char_location"
    return documents.add(RequestDocument(facts["title"] or "", text, is_quoted, starts, facts), block.context or "")


def _join_blocks(blocks: Sequence[TextBlock]) -> tuple[str, tuple[int, ...]]:
    texts = [block.text for block in blocks]
    sizes = (len(text) + len(BETWEEN_BLOCKS) for text in texts[:-1])
    return BETWEEN_BLOCKS.join(texts), tuple(accumulate(sizes, initial=0))


def to_citation(documents: RequestDocuments, quotation: QuotedSpan) -> dict[str, Any] | None:
    """Return a quotation's citation, or None if the document does not contain the quotation."""
    found = documents.find_quotation(quotation.number, quotation.words)
    if found is None:
        return None
    document, start, end = found
    facts = document.facts
    index = documents.numbers(facts["type"]).index(quotation.number)
    first, last = bisect_right(document.starts, start), bisect_right(document.starts, end - 1)
    cited: dict[str, Any] = {"type": facts["location"], "cited_text": document.text[start:end]}
    cited[PLACES[facts["type"]]] = index
    match facts["location"]:
        case "char_location":
            place = {"start_char_index": start, "end_char_index": end}
        case "page_location":
            place = {"start_page_number": first, "end_page_number": last + 1}
        case _:
            place = {"start_block_index": first - 1, "end_block_index": last}
    if facts["type"] == "search_result":
        return cited | {"source": facts["source"], "title": facts["title"]} | place
    return cited | {"document_title": facts["title"], "file_id": facts.get("file_id")} | place


def cited_text(documents: RequestDocuments, block: TextBlock) -> str:
    """Return an earlier block's text as it was generated: preceded by its citations as quotations."""
    quotations = []
    for each in block.citations or ():
        for kind, name in PLACES.items():
            index, numbers = each.get(name), documents.numbers(kind)
            if isinstance(index, int) and 0 <= index < len(numbers) and isinstance(each.get("cited_text"), str):
                quotations.append(f"[[{numbers[index]}: {replace_newlines(each['cited_text'])}]]")
    return " ".join([*quotations, block.text])


# Name -> pattern of a line that changes with every request and would prevent the reuse of cached prompts. A line is
# removed only from the start of the system prompt, and only if the pattern matches the whole line. Quantifiers are
# possessive, so that malicious input cannot cause slow backtracking.
VOLATILE_LINES: Mapping[str, re.Pattern[str]] = {
    # Claude Code's version and launch mode, and a checksum that differs in every request.
    "x-anthropic-billing-header": re.compile(
        r"x-anthropic-billing-header:(?:[ \t]*+[a-z_]++=[\w.\-]*+;?+)++[ \t]*+(?:\n|\Z)"
    )
}


def strip_volatile_lines(system: str) -> tuple[str, tuple[str, ...]]:
    """Return a system prompt without a volatile first line, and the line's name, if any."""
    for name, line in VOLATILE_LINES.items():
        if found := line.match(system):
            return system[found.end() :], (name,)
    return system, ()


NAMES = {
    **sampling_names("anthropic"),
    "thinking_budget": "thinking.budget_tokens",
    "response_format": "output_config.format.schema",
}
"""Engine parameter -> API field."""


FOUND_TOOL = "The tool {name} was found."
"""Replaces a tool reference in the prompt; the tool itself is added to the prompt's tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(ApiRequest):
    hides_reasoning: bool = False  # return reasoning blocks without their text
    management: ContextManagement | None = None  # edits to apply
    applied: Applied = ()  # edits that had an effect
    documents: RequestDocuments = field(default_factory=RequestDocuments)

    def apply_edits(self, engine: ChatEngine) -> MessageRequest:
        """Apply the context edits. Raises the same errors as `count_prompt`."""
        if self.management is None or not self.management.edits:
            return self
        messages, applied = apply_edits(
            self.messages, self.management, lambda messages: count_prompt(engine, messages, self.options)
        )
        return replace(self, prompts=(messages,), applied=applied)


def parse_message_request(
    body: Mapping[str, Any], files: Files = NO_FILES, *, keep_volatile: bool = False
) -> MessageRequest:
    """Validate a message request. Raises ApiError (400) naming the field."""
    if body.get("thread") is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            f"thread is not supported: {THREAD_ADVICE}",
            param="thread",
            # Anthropic's client recognizes these details and retries without `thread`.
            details={"error_code": "thread_unsupported_request"},
        )
    fields = read_fields(MessageFields, body, MESSAGE_NOTES, WITHIN_MESSAGE)
    budget = _budget(fields)
    if isinstance(fields.thinking, ThinkingOn) and fields.thinking.budget_tokens >= fields.max_tokens:
        raise invalid_field("thinking.budget_tokens", "thinking.budget_tokens must be below max_tokens")
    # A max_tokens of 0 fills the prompt cache without generating. The engine's option for this is `prompt_only`.
    chosen = {"max_tokens": fields.max_tokens or None, "thinking_budget": budget}
    params = create_sampling_params(NAMES, read_parameters(fields, "anthropic") | chosen)
    return _request(fields, body, files, keep_volatile, params=(params,), stream=bool(fields.stream))


def parse_count_request(
    body: Mapping[str, Any], files: Files = NO_FILES, *, keep_volatile: bool = False
) -> MessageRequest:
    """Validate a token count request. Raises ApiError (400) naming the field."""
    fields = read_fields(CountFields, body, COUNT_NOTES, WITHIN_MESSAGE)
    return _request(fields, body, files, keep_volatile, params=(create_sampling_params(NAMES, {}),))


def _request(
    fields: CountFields, body: Mapping[str, Any], files: Files, keep_volatile: bool, **more: Any
) -> MessageRequest:
    full_system = _text(fields.system or "")
    system, ignored = (full_system, ()) if keep_volatile else strip_volatile_lines(full_system)
    documents = RequestDocuments()
    pins = PinnedPrefix()
    conversation = tuple(_conversation(fields, system, documents, files, pins))
    messages = documents.with_quotation_request(conversation)
    output_format, format_field = _format(fields)
    return MessageRequest(
        model=fields.model,
        prompts=(messages,),
        names=NAMES | {"response_format": format_field},
        management=fields.context_management,
        hides_reasoning=getattr(fields.thinking, "display", None) == "omitted",
        documents=documents,
        options=documents.options(
            RequestOptions(
                thinking=not isinstance(fields.thinking, ThinkingOff | None),
                **tool_options(((_tool(each), each.strict) for each in _prompt_tools(fields)), _choice(fields)),
                parallel_tool_calls=not getattr(fields.tool_choice, "disable_parallel_tool_use", False),
                grammar=None if output_format is None else schema_grammar(format_field, output_format.schema_),
                continue_last=messages[-1].role == "assistant",
                prefix=None if fields.context_management else pins.find_prefix(conversation),
                prompt_only=getattr(fields, "max_tokens", None) == 0,
            )
        ),
        ignored=ignored,
        hints=_find_hints(fields, body),
        **more,
    )


def _format(fields: CountFields) -> tuple[OutputFormat | None, str]:
    # Returns the format, and the name of the field that contains the schema.
    newer = fields.output_config.format if fields.output_config else None
    name, found = find_value({"output_config.format": newer, "output_format": fields.output_format})
    return found, f"{name}.schema" if name else NAMES["response_format"]


def _budget(fields: CountFields) -> int | None:
    if isinstance(fields.thinking, ThinkingOn):
        return fields.thinking.budget_tokens
    if isinstance(fields.thinking, ThinkingOff | None) or fields.output_config is None:
        return None
    return EFFORT_BUDGETS.get(fields.output_config.effort or "")


def _find_hints(fields: CountFields, body: Mapping[str, Any]) -> tuple[RequestHint, ...]:
    # Blocks of server tools and upload blocks are left out of the prompt. The response names each omitted type.
    left_out = hints_of_types(
        (f"messages.{number}.content.{at}", block.type)
        for number, turn in enumerate(fields.messages)
        for at, block in enumerate(() if isinstance(turn.content, str) else turn.content)
        if isinstance(block, ServerBlock | UploadBlock)
    )
    hints = (*find_hints(fields, body), *left_out)
    has_effort = fields.output_config is not None and fields.output_config.effort is not None
    if not has_effort or isinstance(fields.thinking, ThinkingAdaptive):
        return hints
    return (*hints, RequestHint("output_config.effort", "output_config.effort", False))  # because `_budget` ignores it


def _prompt_tools(fields: CountFields) -> list[AnthropicTool]:
    # Returns the tools of the prompt, ending with the deferred tools that a tool search found.
    check_functions(
        (f"tools.{index}", tool.name, {"input_schema": tool.input_schema, "input_examples": tool.input_examples})
        for index, tool in enumerate(fields.tools or ())
    )
    deferred = {tool.name: tool for tool in fields.tools or () if tool.defer_loading}
    found = (block.tool_name for turn in fields.messages if deferred for block in _references(turn))
    loaded = [deferred[name] for name in dict.fromkeys(found) if name in deferred]
    tools = [*(tool for tool in fields.tools or () if not tool.defer_loading), *loaded]
    if len(tools) > MAX_TOOLS:
        raise invalid_field("tools", f"tools has more than {MAX_TOOLS} functions that are not deferred")
    return tools


def _references(turn: AnyTurn) -> Iterator[ToolReference]:
    results = turn.content if isinstance(turn, UserTurn) and not isinstance(turn.content, str) else []
    for result in results:
        if isinstance(result, ToolResultBlock) and isinstance(result.content, list):
            yield from (block for block in result.content if isinstance(block, ToolReference))


def _tool(tool: AnthropicTool) -> Tool:
    parameters = tool.input_schema | ({"examples": tool.input_examples} if tool.input_examples else {})
    description = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": parameters}}


def _choice(fields: CountFields) -> str | ToolName:
    match fields.tool_choice:
        case AnyChoice():
            return "required"
        case ToolChoiceByName(name=name):
            return ToolName(name)
        case NoChoice():
            return "none"
    return "auto"


@dataclass(slots=True)
class PinnedPrefix:
    """The last cache breakpoint that pins a prefix, if any."""

    message: Message | None = None  # the message that contains the breakpoint
    characters: int = 0  # length of the content before the breakpoint

    def record(self, blocks: Sequence[object], parts: Sequence[str], message: Message) -> None:
        """Record a message's last pinning breakpoint, if any."""
        # `parts` are the texts of `blocks`. The message ends with them, joined by line breaks.
        for number, block in enumerate(blocks, start=1):
            control = getattr(block, "cache_control", None)
            if control is not None and control.ttl == PINNED_TTL:
                self.message = message
                self.characters = len(message.content) - len("\n".join(parts)) + len("\n".join(parts[:number]))

    def find_prefix(self, messages: Sequence[Message]) -> FixedPrefix | None:
        at = next((at for at, each in enumerate(messages) if each is self.message), None)
        if at is None or self.characters <= 0:
            return None
        contents = [(each.role, each.content) for each in messages[:at]]
        contents.append((messages[at].role, messages[at].content[: self.characters]))
        digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
        return FixedPrefix(at, self.characters, reading=digest[:32])


def _conversation(
    fields: CountFields, system: str, documents: RequestDocuments, files: Files, pins: PinnedPrefix
) -> Iterator[Message]:
    if system:
        first = Message("system", system)
        if not isinstance(fields.system, str | None):
            pins.record(fields.system, [each.text for each in fields.system], first)
        yield first
    # Reasoning is kept in the last `kept_turns` turns. User messages with tool results do not begin a turn.
    turn_starts = [-1, *(at for at, turn in enumerate(fields.messages) if _starts_turn(turn))]
    management = fields.context_management or ContextManagement()
    kept_turns = management.kept_thinking_turns
    kept_from = -1 if kept_turns is None else turn_starts[max(0, len(turn_starts) - kept_turns)]
    for at, turn in enumerate(fields.messages):
        match turn:
            case SystemTurn():
                yield Message("system", _text(turn.content))
            case AssistantTurn():
                yield _assistant_message(turn, documents, keeps_reasoning=at > kept_from)
            case UserTurn():
                yield from _user_message(turn, documents, files, pins)


def _starts_turn(turn: AnyTurn) -> bool:
    if not isinstance(turn, UserTurn):
        return False
    return isinstance(turn.content, str) or not any(isinstance(block, ToolResultBlock) for block in turn.content)


def _user_message(turn: UserTurn, documents: RequestDocuments, files: Files, pins: PinnedPrefix) -> Iterator[Message]:
    # Adjacent texts and documents become one message; each tool result becomes a separate message.
    if isinstance(turn.content, str):
        yield Message("user", turn.content)
        return
    content = [block for block in turn.content if not isinstance(block, UploadBlock)]
    if not content:
        yield Message("user", "")
    for are_results, blocks in groupby(content, lambda block: isinstance(block, ToolResultBlock)):
        if are_results:
            yield from (_result(block, documents, files) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            texts = [block for block in blocks if not isinstance(block, ToolResultBlock)]
            parts = _parts(texts, documents, files)
            message = Message("user", "\n".join(parts))
            pins.record(texts, parts, message)
            yield message


def _assistant_message(turn: AssistantTurn, documents: RequestDocuments, *, keeps_reasoning: bool) -> Message:
    # By default, reasoning stays in the prompt until the next turn starts. The edit `clear_thinking` specifies how many
    # turns keep it.
    if isinstance(turn.content, str):
        return Message("assistant", turn.content)
    reasoning = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = tuple(
        ToolCall(block.id, block.name, to_arguments_text(block.input))
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    )
    texts = []
    for block in turn.content:
        if isinstance(block, TextBlock):
            texts.append(cited_text(documents, block))
        elif isinstance(block, CompactionBlock) and block.content:
            texts.append(block.content)
    joined = "\n".join(reasoning) or None
    return Message("assistant", "\n".join(texts), joined, calls, keep_reasoning=keeps_reasoning and joined is not None)


def _result(block: ToolResultBlock, documents: RequestDocuments, files: Files) -> Message:
    text = _text(block.content or "", documents, files)
    return Message("tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


def _text(
    content: str | Sequence[TextBlock | ToolReference | DocumentBlock | SearchResultBlock],
    documents: RequestDocuments | None = None,
    files: Files = NO_FILES,
) -> str:
    return content if isinstance(content, str) else "\n".join(_parts(content, documents, files))


def _parts(
    content: Sequence[TextBlock | ToolReference | DocumentBlock | SearchResultBlock],
    documents: RequestDocuments | None,
    files: Files,
) -> list[str]:
    parts = []
    for block in content:
        match block:
            case TextBlock():
                parts.append(block.text)
            case ToolReference():
                parts.append(FOUND_TOOL.format(name=block.tool_name))
            case _ if documents is not None:
                parts.append(f"{add_document(documents, block, files)}\n")
    return parts
