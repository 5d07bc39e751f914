"""Convert requests of the Responses API to engine messages and parameters, and load stored items by id."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from notso.documents.citations import QuotedSpan
from notso.documents.passages import estimated_tokens
from notso.smollm3 import Grammar, Message, RequestOptions, Tool, ToolCall, ToolName
from notso.web.api.request_fields.fields import (
    EFFORT_BUDGETS,
    MAX_TOOLS,
    RequestHint,
    check_functions,
    find_hints,
    hints_of_types,
    invalid_field,
    join_text,
    read_fields,
    schema_grammar,
    to_arguments_text,
    tool_options,
)
from notso.web.api.request_fields.sampling_fields import create_sampling_params, read_parameters, sampling_names
from notso.web.api.responses.fields import (
    DEFAULT_RESULTS,
    INPUT_TOKEN_NOTES,
    LOGPROBS,
    RESPONSE_NOTES,
    SEARCH_RESULTS,
    WITHIN_RESPONSE,
    AllowedToolsChoice,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    FileSearchTool,
    FullItem,
    FunctionChoice,
    FunctionTool,
    InputTokenFields,
    ItemReference,
    MessageItem,
    NamespaceTool,
    ObjectFormat,
    ReasoningItem,
    ResponseFields,
    SchemaFormat,
    SearchCallItem,
    SearchChoice,
    ServerItem,
    WebSearchCallItem,
)
from notso.web.api.shared.api_request import ApiRequest, last_user_message
from notso.web.api.shared.background import echoed_fields
from notso.web.api.shared.given_documents import RequestDocument, RequestDocuments
from notso.web.api.shared.serializer import as_json
from notso.web.api.shared.services import ApiServices
from notso.web.api.shared.vector_search import get_library, map_file_ids, search_libraries, to_search_result
from notso.web.edge.errors import ApiError
from notso.web.store.protocol import StoredResponse
from notso.web.turns.documents import MAX_PASSAGE_TOKENS, NOTHING_FOUND, PASSAGES_FOLLOW

Item = Mapping[str, Any]
Reference = tuple[int, str]
"""Index of a reference in the input, and the id of the item to which it refers."""

MAX_REFERENCED_RESPONSES = 256
MAX_REFERENCED_CHARACTERS = 1 << 22
"""Maximum total size of the referenced items. More text would not fit any context."""

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "file_search_call": "fs",
    "web_search_call": "ws",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
}
_OTHER_ITEM = "itm"
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{24})(?:in)?[0-9a-f]{2,4}")


def item_id(response_id: str, kind: str, index: int, *, is_input: bool = False) -> str:
    """Return an item's id, which contains the response's id."""
    return f"{_ID_PREFIXES.get(kind, _OTHER_ITEM)}_{response_id.partition('_')[2]}{'in' if is_input else ''}{index:02x}"


def normalize_input(items: Iterable[Item], response_id: str) -> tuple[Item, ...]:
    """Return input items as the API lists them: with an id, a status and content parts."""
    return tuple(_normalize_item(item, response_id, index) for index, item in enumerate(items))


async def load_referenced_items(
    references: Sequence[Reference], load: Callable[[str], Awaitable[StoredResponse | None]]
) -> dict[str, Item]:
    """Load referenced items by id. Raises ApiError: 404 for unknown items, 400 for duplicates or too many."""
    ids = [id for _, id in references]
    responses: dict[str, dict[str, Item]] = {}
    found: dict[str, Item] = {}
    size = 0
    for index, id in references:
        param = f"input.{index}.id"
        if ids.index(id) != len(found):
            raise invalid_field(param, f"{param} is the id of an item that was already referenced")
        match = _ITEM_ID.fullmatch(id)
        response_id = f"resp_{match[1]}" if match else ""
        if response_id and response_id not in responses:
            if len(responses) == MAX_REFERENCED_RESPONSES:
                raise invalid_field(param, f"input refers to items of more than {MAX_REFERENCED_RESPONSES} responses")
            response = await load(response_id)
            stored = () if response is None else (*response.input, *response.body["output"])
            responses[response_id] = {item["id"]: item for item in stored}
        item = responses.get(response_id, {}).get(id)
        if item is None:
            raise ApiError(404, "not_found", "no stored item has that id (store: false disables storing)", param=param)
        size += len(as_json(item))
        if size > MAX_REFERENCED_CHARACTERS:
            raise invalid_field(param, f"the items referenced by input exceed {MAX_REFERENCED_CHARACTERS:,} characters")
        found[id] = item
    return found


def _normalize_item(item: Item, response_id: str, index: int) -> Item:
    kind = item["type"]
    normalized = {name: value for name, value in item.items() if value is not None}
    normalized["id"] = normalized.get("id") or item_id(response_id, kind, index, is_input=True)
    normalized.setdefault("status", "completed")
    if kind == "reasoning":
        normalized.setdefault("summary", [])
    if kind == "message":
        content = item["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        is_answer = item["role"] == "assistant"
        empty: dict[str, Any] = {"annotations": [], "logprobs": []} if is_answer else {}
        kind_of_part = "output_text" if is_answer else "input_text"
        normalized["content"] = [
            part if part.get("type") == "refusal" else {**empty, **part, "type": kind_of_part} for part in parts
        ]
    return normalized


NAMES = {
    **sampling_names("responses"),
    "messages": "input",
    "thinking_budget": "reasoning.effort",
    "response_format": "text.format.schema",
}
"""Engine parameter -> API field."""

Functions = dict[str, tuple[FunctionTool, NamespaceTool | None]]
"""Functions and their namespaces, by the functions' names in the prompt."""


@dataclass(frozen=True, slots=True)
class FileSearch:
    tool: FileSearchTool
    shows_results: bool
    queries: tuple[str, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()
    documents: RequestDocuments = field(default_factory=RequestDocuments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ApiRequest):
    conversation: tuple[Message, ...]  # the conversation without the instructions
    items: tuple[Item, ...]  # the input, in which stored items replace loaded references
    references: tuple[Reference, ...] = ()  # stored items to load
    namespaces: Mapping[str, str]  # function name in the prompt -> namespace
    instructions: str | None = None
    previous_id: str | None = None
    store: bool = True
    search: FileSearch | None = None
    echoed: Mapping[str, Any]  # fields repeated in the response

    def continue_from(self, earlier: Sequence[Message]) -> ResponseRequest:
        """Prepend earlier messages. Keep reasoning only in tool-calling messages after the last user message."""
        conversation = (*earlier, *self.conversation)
        last_user = last_user_message(conversation)
        conversation = tuple(
            replace(message, keep_reasoning=bool(message.reasoning_content and message.tool_calls and at > last_user))
            for at, message in enumerate(conversation)
        )
        instructions = (Message("system", self.instructions),) if self.instructions else ()
        continues = bool(conversation) and conversation[-1].role == "assistant" and not conversation[-1].tool_calls
        options = replace(self.options, continue_last=continues)
        return replace(self, conversation=conversation, prompts=((*instructions, *conversation),), options=options)


def parse_input_token_request(body: Mapping[str, Any], stored: Mapping[str, Item] | None = None) -> ResponseRequest:
    """Validate a token count request. Raises the same errors as `parse_response_request`."""
    typed = _add_item_types(body, stored or {})
    fields = read_fields(InputTokenFields, typed, INPUT_TOKEN_NOTES, WITHIN_RESPONSE)
    hints = _hints(fields, typed)
    used = InputTokenFields.model_fields.keys() - {hint.name for hint in hints}
    known = {name: value for name, value in body.items() if name in used}
    return replace(parse_response_request(known, stored), hints=hints)


def parse_response_request(body: Mapping[str, Any], stored: Mapping[str, Item] | None = None) -> ResponseRequest:
    """Validate a request, and replace references with items in `stored`. Raises ApiError (400) naming the field."""
    typed = _add_item_types(body, stored or {})
    fields = read_fields(ResponseFields, typed, RESPONSE_NOTES, WITHIN_RESPONSE)
    if fields.background and fields.store is False:
        raise invalid_field("background", "background requires store")
    effort = fields.reasoning.effort if fields.reasoning else None
    sampling = read_parameters(fields, "responses")
    params = create_sampling_params(NAMES, sampling | {"thinking_budget": EFFORT_BUDGETS.get(effort or "")})
    items = [] if isinstance(fields.input, str) else fields.input
    references = tuple((at, item.id) for at, item in enumerate(items) if isinstance(item, ItemReference))
    left_out = ItemReference | SearchCallItem | WebSearchCallItem | ServerItem
    full_items = [item for item in items if not isinstance(item, left_out)]
    conversation = (Message("user", fields.input),) if isinstance(fields.input, str) else tuple(_messages(full_items))
    functions = _functions(fields)
    api_request = ResponseRequest(
        model=fields.model,
        prompts=(),
        params=(params,),
        names=NAMES,
        hints=_hints(fields, typed),
        options=RequestOptions(
            thinking=effort != "none",
            **_tool_options(fields, functions),
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            grammar=_grammar(fields),
            top_logprobs=_top_logprobs(fields),
            when_full="drop_oldest" if fields.truncation == "auto" else "stop",
        ),
        stream=bool(fields.stream),
        conversation=conversation,
        items=tuple(typed["input"]) if items else ({"type": "message", "role": "user", "content": fields.input},),
        references=references,
        namespaces={name: namespace.name for name, (_, namespace) in functions.items() if namespace is not None},
        instructions=fields.instructions,
        previous_id=fields.previous_response_id or None,
        store=fields.store is not False,
        background=bool(fields.background),
        search=_search(fields),
        echoed=echoed_fields(body),
    )
    return api_request.continue_from(())


def _hints(fields: InputTokenFields, typed: Mapping[str, Any]) -> tuple[RequestHint, ...]:
    items = enumerate(() if isinstance(fields.input, str) else fields.input)
    left_out = hints_of_types((f"input.{number}", item.type) for number, item in items if isinstance(item, ServerItem))
    return (*find_hints(fields, typed), *left_out)


def _add_item_types(body: Mapping[str, Any], stored: Mapping[str, Item]) -> Mapping[str, Any]:
    # Adds the type to messages and references, which may omit it, and replaces references with the items in `stored`.
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return {**body, "input": [_add_item_type(item, stored) for item in items]}


def _add_item_type(item: Any, stored: Mapping[str, Item]) -> Any:
    if not isinstance(item, dict):
        return item
    if "role" in item and item.get("type") is None:
        item = {"type": "message"} | {name: value for name, value in item.items() if name != "type"}
    if item.get("role") == "assistant" and item.get("content") == []:  # an answer that ended before any text
        item = {**item, "content": ""}
    if item.get("type") == "message":
        return item
    is_reference = item.get("type", "item_reference") in ("item_reference", None) and item.keys() <= {"type", "id"}
    if not is_reference:
        return item
    id = item.get("id")
    return stored[id] if isinstance(id, str) and id in stored else {**item, "type": "item_reference"}


def _messages(items: Sequence[FullItem]) -> Iterator[Message]:
    # Adjacent reasoning, text and calls of the assistant form one message.
    for by_assistant, run in groupby(items, _is_assistant):
        if by_assistant:
            yield _assistant_message(list(run))
            continue
        for item in run:
            if isinstance(item, CallOutputItem):
                yield Message("tool", join_text(item.output), tool_call_id=item.call_id)
            elif isinstance(item, MessageItem):
                yield Message("user" if item.role == "user" else "system", join_text(item.content))


def _is_assistant(item: FullItem) -> bool:
    is_answer = isinstance(item, MessageItem) and item.role == "assistant"
    return is_answer or isinstance(item, ReasoningItem | CallItem | CustomCallItem)


def _assistant_message(items: Sequence[FullItem]) -> Message:
    reasoning = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    texts = [join_text(item.content) for item in items if isinstance(item, MessageItem)]
    calls = tuple(
        ToolCall(item.call_id, qualified_name(item.name, item.namespace), _arguments(item))
        for item in items
        if isinstance(item, CallItem | CustomCallItem)
    )
    return Message("assistant", "\n".join(texts), "\n".join(reasoning) or None, calls)


def _arguments(item: CallItem | CustomCallItem) -> str:
    return item.arguments if isinstance(item, CallItem) else to_arguments_text({"input": item.input})


def qualified_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _functions(fields: ResponseFields) -> Functions:
    functions: Functions = {}
    paths: list[tuple[str, str]] = []
    for index, tool in enumerate(fields.tools or ()):
        namespace = tool if isinstance(tool, NamespaceTool) else None
        inner = namespace.tools if namespace else [tool] if isinstance(tool, FunctionTool) else []
        for at, function in enumerate(inner):
            name = qualified_name(function.name, namespace.name if namespace else None)
            paths.append((f"tools.{index}{f'.tools.{at}' if namespace else ''}", name))
            functions.setdefault(name, (function, namespace))
    check_functions((path, name, {"parameters": functions[name][0].parameters}) for path, name in paths)
    if len(functions) > MAX_TOOLS:
        raise invalid_field("tools", f"tools has more than {MAX_TOOLS} functions")
    return functions


def _tool(name: str, function: FunctionTool, namespace: NamespaceTool | None) -> Tool:
    # Each function repeats the description of its namespace, because the prompt lists only functions.
    described = (namespace.description if namespace else None, function.description)
    description = {"description": "\n".join(filter(None, described))} if any(described) else {}
    definition = function.model_dump(exclude_none=True, exclude={"type", "strict", "name", "description"})
    return {"type": "function", "function": {"name": name, **description, **definition}}


def _search(fields: ResponseFields) -> FileSearch | None:
    tools = [each for each in fields.tools or () if isinstance(each, FileSearchTool)]
    if len(tools) > 1:
        raise invalid_field("tools", "tools has more than one file_search; list all vector stores in one")
    choice = fields.tool_choice
    is_excluded = isinstance(choice, AllowedToolsChoice) and not any(
        isinstance(each, SearchChoice) for each in choice.tools
    )
    if not tools or is_excluded or choice == "none":
        return None
    return FileSearch(tools[0], SEARCH_RESULTS in (fields.include or ()))


def _tool_options(fields: ResponseFields, functions: Functions) -> dict[str, Any]:
    choice, allowed = fields.tool_choice, None
    search = _search(fields)
    if isinstance(choice, AllowedToolsChoice):
        if search is None and any(isinstance(each, SearchChoice) for each in choice.tools):
            raise invalid_field("tool_choice", "tool_choice allows file_search, which is not in tools")
        allowed = [each.name for each in choice.tools if isinstance(each, FunctionChoice)]
        choice = choice.mode
    # The search always runs, which satisfies the choice `file_search` and, if no functions are allowed, `required`.
    if isinstance(choice, SearchChoice) or (
        choice == "required" and search and not (functions if allowed is None else allowed)
    ):
        choice = "auto"
    offered = ((_tool(name, *each), each[0].strict) for name, each in functions.items())
    return tool_options(offered, ToolName(choice.name) if isinstance(choice, FunctionChoice) else choice, allowed)


def _top_logprobs(fields: ResponseFields) -> int | None:
    is_requested = fields.top_logprobs is not None or LOGPROBS in (fields.include or ())
    return fields.top_logprobs or 0 if is_requested else None


def _grammar(fields: ResponseFields) -> Grammar | None:
    match fields.text.format if fields.text else None:
        case ObjectFormat():
            return Grammar("json_object")
        case SchemaFormat(schema_=schema):
            return schema_grammar(NAMES["response_format"], schema)
    return None


MAX_QUERY_CHARACTERS = 2_000


async def insert_passages(services: ApiServices, owner: str, api_request: ResponseRequest) -> ResponseRequest:
    """Insert passages found for the last user message. Raises ApiError (404) for an unknown vector store."""
    search, messages = api_request.search, api_request.messages
    at = last_user_message(messages)
    if search is None or at < 0:
        return replace(api_request, search=None)
    tool = search.tool
    names = dict.fromkeys(tool.vector_store_ids)
    param = "tools.vector_store_ids"
    libraries = [await get_library(services, owner, each, param) for each in names]
    query = messages[at].content[:MAX_QUERY_CHARACTERS]
    limit = tool.max_num_results or DEFAULT_RESULTS
    hits = await search_libraries(services, owner, libraries, [query], limit, tool.ranking_options)
    file_ids = await map_file_ids(services, owner, (each.document for each in hits))
    documents, parts, remaining_tokens = RequestDocuments(), list[str](), MAX_PASSAGE_TOKENS
    for hit in hits:
        remaining_tokens -= estimated_tokens(hit.text)
        if remaining_tokens < 0 and parts:
            break
        facts = {"file_id": file_ids[hit.document.id], "filename": hit.document.name}
        is_quoted = api_request.options.grammar is None
        parts.append(documents.add(RequestDocument(hit.document.name, hit.text, is_quoted, facts=facts)))
    count = len({each.document.id for each in hits})
    described = "the document" if count == 1 else f"{count} documents" if count else "the documents"
    passages = (PASSAGES_FOLLOW if parts else NOTHING_FOUND).format(documents=described)
    question = replace(messages[at], content="\n\n".join([passages, *parts, messages[at].content]))
    results = tuple(to_search_result(hit, file_ids[hit.document.id]) for hit in hits[: len(parts)])
    with_passages: tuple[Message, ...] = (*messages[:at], question, *messages[at + 1 :])
    return replace(
        api_request,
        prompts=(documents.with_quotation_request(with_passages),),
        options=documents.options(api_request.options),
        search=replace(search, queries=(query,), results=results, documents=documents),
    )


def to_annotation(documents: RequestDocuments, quotation: QuotedSpan, index: int) -> Mapping[str, Any] | None:
    """Return a quotation's annotation at character `index`, or None if the passage lacks the quotation."""
    found = documents.find_quotation(quotation.number, quotation.words)
    return None if found is None else {"type": "file_citation", "index": index, **found[0].facts}
