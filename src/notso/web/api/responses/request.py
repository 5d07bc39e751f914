"""Conversion of Responses requests to engine messages and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from notso.smollm3 import Grammar, Message, RequestOptions, Tool, ToolCall, ToolChoice
from notso.web.api.request_fields.fields import (
    EFFORT_BUDGETS,
    check_depth,
    checked_choice,
    hints_of,
    invalid,
    read_fields,
    schema_grammar,
    strict_names,
)
from notso.web.api.request_fields.sampling_fields import (
    MAX_TOOLS,
    checked_params,
    parameters_in,
    sampling_names,
)
from notso.web.api.responses.fields import (
    INPUT_TOKEN_NOTES,
    LOGPROBS,
    RESPONSE_NOTES,
    SEARCH_RESULTS,
    WITHIN_RESPONSE,
    CallItem,
    CallOutputItem,
    FileSearchTool,
    FunctionChoice,
    FunctionTool,
    InputTokenFields,
    ItemContent,
    ItemReference,
    MessageItem,
    NamespaceTool,
    ObjectFormat,
    ReasoningItem,
    ResponseFields,
    SchemaFormat,
    SearchCallItem,
    SearchChoice,
    SpeltOutItem,
)
from notso.web.api.responses.items import Item, Reference
from notso.web.api.shared.api_request import ApiRequest
from notso.web.api.shared.given_documents import GivenDocuments

NAMES = {
    **sampling_names("responses"),
    "messages": "input",
    "thinking_budget": "reasoning.effort",
    "response_format": "text.format.schema",
}
"""Engine parameter -> API field."""

SCHEMA = "text.format.schema"

Functions = dict[str, tuple[FunctionTool, NamespaceTool | None]]
"""Functions by the name shown to the model, with their namespace."""


@dataclass(frozen=True, slots=True)
class FileSearch:
    """The search that a request's file_search tool stands for, and what it found."""

    tool: FileSearchTool
    shows_results: bool
    queries: tuple[str, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()
    documents: GivenDocuments = field(default_factory=GivenDocuments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ApiRequest):
    """A checked response request."""

    said: tuple[Message, ...]  # conversation without instructions
    items: tuple[Item, ...]  # input as given
    references: tuple[Reference, ...] = ()  # to load before answering
    namespaces: Mapping[str, str]  # by the name shown to the model
    instructions: str | None = None
    previous_id: str | None = None
    keep: bool = True
    search: FileSearch | None = None
    echoed: Mapping[str, Any]  # fields repeated in the response

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(each for each in self.prompts[0] if isinstance(each, Message))

    def after(self, earlier: Sequence[Message]) -> ResponseRequest:
        """Prepend an earlier conversation."""
        return with_conversation(self, (*earlier, *self.said))


def parse_input_token_request(body: Mapping[str, Any], stored: Mapping[str, Item] | None = None) -> ResponseRequest:
    """Validate a count request. Raises like `parse_response_request`."""
    read_fields(InputTokenFields, _typed(body, stored or {}), INPUT_TOKEN_NOTES | WITHIN_RESPONSE)
    return parse_response_request(body, stored)


def parse_response_request(body: Mapping[str, Any], stored: Mapping[str, Item] | None = None) -> ResponseRequest:
    """Validate a request, resolving references from `stored`. Raise ApiError (400) naming the field."""
    typed = _typed(body, stored or {})
    fields = read_fields(ResponseFields, typed, RESPONSE_NOTES | WITHIN_RESPONSE)
    if fields.background and fields.store is False:
        raise invalid("background", "background requires store")
    effort = fields.reasoning.effort if fields.reasoning else None
    sampling = parameters_in(fields, "responses")
    params = checked_params(NAMES, sampling | {"thinking_budget": EFFORT_BUDGETS.get(effort or "")})
    items = [] if isinstance(fields.input, str) else fields.input
    references = tuple((at, item.id) for at, item in enumerate(items) if isinstance(item, ItemReference))
    spelt_out = [item for item in items if not isinstance(item, ItemReference | SearchCallItem)]
    said = (Message("user", fields.input),) if isinstance(fields.input, str) else tuple(_messages(spelt_out))
    functions = _functions(fields)
    asked = ResponseRequest(
        model=fields.model,
        prompts=(),
        params=(params,),
        names=NAMES,
        hints=hints_of(fields, typed),
        options=RequestOptions(
            thinking=effort != "none",
            tools=_tools(fields, functions),
            tool_choice=_tool_choice(fields, functions),
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            strict_tools=strict_names((name, function.strict) for name, (function, _) in functions.items()),
            grammar=_grammar(fields),
            top_logprobs=_top_logprobs(fields),
            when_full="drop_oldest" if fields.truncation == "auto" else "stop",
        ),
        stream=bool(fields.stream),
        said=said,
        items=_items(typed["input"]),
        references=references,
        namespaces={name: within.name for name, (_, within) in functions.items() if within is not None},
        instructions=fields.instructions,
        previous_id=fields.previous_response_id or None,
        keep=fields.store is not False,
        background=bool(fields.background),
        search=_search(fields),
        echoed=_echoed(fields, body, sampling),
    )
    return with_conversation(asked, said)


def with_conversation(asked: ResponseRequest, said: tuple[Message, ...]) -> ResponseRequest:
    """Replace the conversation, keeping reasoning while its calls are answered."""
    asked_at = max((at for at, message in enumerate(said) if message.role == "user"), default=-1)
    said = tuple(
        replace(message, keep_reasoning=bool(message.reasoning_content and message.tool_calls and at > asked_at))
        for at, message in enumerate(said)
    )
    before = (Message("system", asked.instructions),) if asked.instructions else ()
    goes_on = bool(said) and said[-1].role == "assistant" and not said[-1].tool_calls
    options = replace(asked.options, continue_last=goes_on)
    return replace(asked, said=said, prompts=((*before, *said),), options=options)


def _typed(body: Mapping[str, Any], stored: Mapping[str, Item]) -> Mapping[str, Any]:
    # Messages and references may omit their type.
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return {**body, "input": [_typed_item(item, stored) for item in items]}


def _typed_item(item: Any, stored: Mapping[str, Item]) -> Any:
    if not isinstance(item, dict):
        return item
    if "role" in item and "type" not in item:
        return {"type": "message", **item}
    is_name = item.get("type", "item_reference") in ("item_reference", None) and item.keys() <= {"type", "id"}
    if not is_name:
        return item
    id = item.get("id")
    return stored[id] if isinstance(id, str) and id in stored else {**item, "type": "item_reference"}


def _items(given: str | list[Item]) -> tuple[Item, ...]:
    return ({"type": "message", "role": "user", "content": given},) if isinstance(given, str) else tuple(given)


def _messages(items: Sequence[SpeltOutItem]) -> Iterator[Message]:
    # Adjacent reasoning, text and calls of the assistant form one message.
    for by_assistant, run in groupby(items, _is_assistant):
        if by_assistant:
            yield _assistant_message(list(run))
        else:
            yield from map(_message, run)


def _is_assistant(item: SpeltOutItem) -> bool:
    return isinstance(item, ReasoningItem | CallItem) or (isinstance(item, MessageItem) and item.role == "assistant")


def _assistant_message(items: Sequence[SpeltOutItem]) -> Message:
    reasoning = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    texts = [_text(item.content) for item in items if isinstance(item, MessageItem)]
    calls = tuple(_call(item) for item in items if isinstance(item, CallItem))
    return Message("assistant", "\n".join(texts), "\n".join(reasoning) or None, calls)


def _call(item: CallItem) -> ToolCall:
    return ToolCall(item.call_id, known_as(item.name, item.namespace), item.arguments)


def _message(item: SpeltOutItem) -> Message:
    if isinstance(item, CallOutputItem):
        return Message("tool", _text(item.output), tool_call_id=item.call_id)
    if isinstance(item, MessageItem):
        return Message("user" if item.role == "user" else "system", _text(item.content))
    return _assistant_message([item])


def _text(content: ItemContent) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def known_as(name: str, namespace: str | None) -> str:
    """Return the function's name shown to the model."""
    return name if namespace is None else f"{namespace}.{name}"


def _functions(fields: ResponseFields) -> Functions:
    """Raise ApiError (400) for deep schemas or too many functions."""
    functions: Functions = {}
    for index, tool in enumerate(fields.tools or ()):
        within = tool if isinstance(tool, NamespaceTool) else None
        inner = within.tools if within else [tool] if isinstance(tool, FunctionTool) else []
        for at, function in enumerate(inner):
            check_depth(f"tools.{index}{f'.tools.{at}' if within else ''}.parameters", function.parameters)
            functions[known_as(function.name, within.name if within else None)] = function, within
    if len(functions) > MAX_TOOLS:
        raise invalid("tools", f"tools has more than {MAX_TOOLS} functions")
    return functions


def _tools(fields: ResponseFields, functions: Functions) -> tuple[Tool, ...] | None:
    if not functions or fields.tool_choice == "none":
        return None
    return tuple(_tool(name, *function) for name, function in functions.items())


def _tool(name: str, function: FunctionTool, within: NamespaceTool | None) -> Tool:
    # The namespace's description is repeated for each of its functions.
    told = function.model_dump(exclude_none=True, exclude={"type", "strict"}) | {"name": name}
    if within is not None and within.description:
        told["description"] = "\n".join(filter(None, (within.description, function.description)))
    return {"type": "function", "function": told}


def _search(fields: InputTokenFields) -> FileSearch | None:
    """Raise ApiError (400) for more than one file_search tool."""
    tools = [each for each in fields.tools or () if isinstance(each, FileSearchTool)]
    if len(tools) > 1:
        raise invalid("tools", "tools has more than one file_search; list all vector stores in one")
    if not tools or fields.tool_choice == "none":
        return None
    return FileSearch(tools[0], SEARCH_RESULTS in (getattr(fields, "include", None) or ()))


def _tool_choice(fields: ResponseFields, functions: Functions) -> ToolChoice:
    choice = fields.tool_choice
    is_met = isinstance(choice, SearchChoice) or (choice == "required" and not functions and _search(fields))
    if choice is None or choice in ("none", "auto") or is_met:
        return "auto"  # also without tools
    name = choice.name if isinstance(choice, FunctionChoice) else None
    return checked_choice("tool_choice", name, [*functions])


def _top_logprobs(fields: ResponseFields) -> int | None:
    wanted = fields.top_logprobs is not None or LOGPROBS in (fields.include or ())
    return fields.top_logprobs or 0 if wanted else None


def _grammar(fields: ResponseFields) -> Grammar | None:
    match fields.text.format if fields.text else None:
        case ObjectFormat():
            return Grammar("json_object")
        case SchemaFormat(schema_=schema):
            return schema_grammar(SCHEMA, schema)
    return None


def _echoed(fields: ResponseFields, body: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id or None,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
        "store": fields.store is not False,
        "temperature": sampling["temperature"],
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": fields.top_logprobs,
        "top_p": sampling["top_p"],
        "truncation": fields.truncation or "disabled",
    }
