"""Request fields of OpenAI's Responses API, in which a request can continue a stored conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import MAX_TOP_LOGPROBS
from notso.web.api.request_fields.fields import (
    CACHED_AS_LONG_AS_POSSIBLE,
    DESCRIBES_CALLER,
    EFFORT_ADVICE,
    EFFORTS,
    ONE_TIER,
    STRICT_TOOL,
    Description,
    Effort,
    Fields,
    Id,
    Label,
    Name,
    Note,
    Notes,
    Parts,
    RefusalPart,
    SomeMessages,
    SomeTools,
    Text,
    Tools,
    Verbosity,
    accepting,
    hint,
    inert,
    notes_in,
    refused,
    verbosity_hint,
    works,
)
from notso.web.api.request_fields.sampling_fields import Whole, sampling_notes, with_sampling
from notso.web.api.shared.vector_search import MAX_RESULTS, RANKING_NOTES, RankingOptions
from notso.web.values.strict_fields import limit_entries

MAX_VECTOR_STORES = 8
DEFAULT_RESULTS = 10
LOGPROBS = "message.output_text.logprobs"
SEARCH_RESULTS = "file_search_call.results"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only LOGPROBS and SEARCH_RESULTS have an effect. The others concern encrypted reasoning, images or missing tools."""


class InputText(Fields):
    """A text part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[
        list[Any] | None, hint("annotations only mark parts of the text", "an empty list", done=([],))
    ] = None
    logprobs: list[Any] | None = None


TextParts = Parts[Annotated[InputText | RefusalPart, Field(discriminator="type")]]
ItemContent = Text | Annotated[TextParts, Field(min_length=1)]
Status = Literal["in_progress", "completed", "incomplete"] | None


class IdentifiedItem(Fields):
    id: Id | None = None
    status: Status = None


class MessageItem(IdentifiedItem):
    """A message of any role."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningText(Fields):
    """Reasoning text."""

    type: Literal["reasoning_text", "text"]
    text: Text


_SUMMARY = hint("reasoning is returned in full, as content of reasoning items", "an empty list", "use auto", done=([],))


class ReasoningItem(IdentifiedItem):
    """Earlier reasoning. If tool calls follow, it stays in the prompt until the next user message."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any] | None, _SUMMARY] = None
    content: Parts[ReasoningText] | None = None
    encrypted_content: Annotated[Text | None, hint("reasoning is returned unencrypted, in `content`", done=("",))] = (
        None
    )


class CallItem(IdentifiedItem):
    """A past call."""

    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: Text
    namespace: Name | None = None


class CustomCallItem(IdentifiedItem):
    """A past call to a tool whose input is plain text."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: Name
    input: Text
    namespace: Name | None = None


class CallOutputItem(IdentifiedItem):
    """A tool's result."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: Text | TextParts


class SearchCallItem(Fields):
    """A past search, whose passages are no longer in the prompt."""

    type: Literal["file_search_call"]
    id: Id | None = None
    queries: list[Any] | None = None
    results: list[Any] | None = None
    status: Literal["in_progress", "searching", "completed", "incomplete", "failed"] | None = None


class WebSearchCallItem(Fields):
    """A past web search by another server. Its results are left out of the prompt."""

    type: Literal["web_search_call"]
    id: Id | None = None
    action: dict[str, Any] | None = None
    status: Literal["in_progress", "searching", "completed", "failed"] | None = None


# All fields of these items are declared, so that only the type is reported as ignored.
@accepting(
    "id status call_id code container_id outputs result revised_prompt action background output_format quality size "
    "server_label tools error name arguments output approval_request_id approve reason execution"
)
class ServerItem(Fields):
    """An item that belongs to a tool run by another server. It is left out of the prompt."""

    type: Literal[
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "tool_search_call",
        "tool_search_output",
    ]


class ItemReference(Fields):
    """Reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: Name


FullItem = (
    MessageItem
    | ReasoningItem
    | CallItem
    | CustomCallItem
    | CallOutputItem
    | SearchCallItem
    | WebSearchCallItem
    | ServerItem
)
AnyItem = Annotated[FullItem | ItemReference, Field(discriminator="type")]


class FunctionTool(Fields):
    """A function the model may call."""

    type: Literal["function"]
    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Fields):
    """A group of functions; each call contains the group's name."""

    type: Literal["namespace"]
    name: Name
    tools: Tools[FunctionTool]
    description: Description | None = None


class WebSearchTool(Fields):
    """Server-side web search, which is ignored, because it is not available."""

    type: Annotated[
        Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"],
        hint("web search is not available", is_checked=True),
    ]
    external_web_access: bool | None = None
    filters: dict[str, Any] | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: dict[str, Any] | None = None


class FileSearchTool(Fields):
    """Searches vector stores for passages that match the last user message; the answer quotes them."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[Name], Field(min_length=1, max_length=MAX_VECTOR_STORES, fail_fast=True)]
    max_num_results: Annotated[Whole, Field(ge=1, le=MAX_RESULTS)] | None = None
    ranking_options: RankingOptions | None = None
    filters: None = None


AnyTool = Annotated[FunctionTool | NamespaceTool | WebSearchTool | FileSearchTool, Field(discriminator="type")]


class FunctionChoice(Fields):
    """A function, selected by name."""

    type: Literal["function"]
    name: Name


class SearchChoice(Fields):
    """The file search. As `tool_choice`, it means `auto`; in `allowed_tools`, it lets the search run."""

    type: Literal["file_search"]


class AllowedToolsChoice(Fields):
    """Limits which tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: SomeTools[Annotated[FunctionChoice | SearchChoice, Field(discriminator="type")]]


class PlainFormat(Fields):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Fields):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Description | None = None
    strict: bool | None = None


class TextConfig(Fields):
    """Answer format."""

    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Verbosity | None, verbosity_hint("instructions")] = None


Summary = Literal["auto", "concise", "detailed"]
_SUMMARY_REQUEST = replace(_SUMMARY, text="", done=(), is_checked=True)


class Reasoning(Fields):
    """Reasoning options."""

    effort: Literal["none"] | Effort | None = None
    summary: Annotated[Summary | None, _SUMMARY_REQUEST] = None
    generate_summary: Annotated[Summary | None, _SUMMARY_REQUEST] = None
    context: Literal["auto", "current_turn"] | None = None
    mode: Literal["standard"] | None = None


class Compaction(Fields):
    """Summarization of long conversations, which is not performed."""

    type: Literal["compaction"]
    compact_threshold: Whole | None = None


class ResponseStreamOptions(Fields):
    """Stream options, which have no effect."""

    include_obfuscation: Annotated[bool | None, hint("streams are not padded", "false", done=(False,))] = None


class InputTokenFields(Fields):
    """The body of POST /v1/responses/input_tokens."""

    input: Text | SomeMessages[AnyItem]
    model: Label | None = None
    instructions: Text | None = None
    previous_response_id: Label | None = None
    tools: Tools[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | SearchChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled", "auto"] | None = None
    conversation: None = None
    prompt: None = None
    user: Annotated[Label | None, DESCRIBES_CALLER] = None
    safety_identifier: Annotated[Label | None, DESCRIBES_CALLER] = None
    client_metadata: Annotated[dict[str, Any] | None, replace(DESCRIBES_CALLER, done=({},))] = None
    metadata: Annotated[dict[str, Any] | None, replace(DESCRIBES_CALLER, done=({},))] = None


@with_sampling("responses")
class ResponseFields(InputTokenFields):
    """The body of POST /v1/responses."""

    max_output_tokens: Whole | None = None
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[
        Annotated[list[Included], Field(fail_fast=True)] | None,
        hint(
            "reasoning is returned unencrypted, and the other values concern images and unavailable tools",
            f"`{LOGPROBS}`, `{SEARCH_RESULTS}`",
            f"use {LOGPROBS}, {SEARCH_RESULTS} or reasoning.encrypted_content",
            done=([], [LOGPROBS], [SEARCH_RESULTS], [LOGPROBS, SEARCH_RESULTS], [SEARCH_RESULTS, LOGPROBS]),
            is_checked=True,
        ),
    ] = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Annotated[Whole, Field(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16), limit_entries(16)] | None = None
    # The following fields have no effect.
    service_tier: Annotated[Label | None, ONE_TIER] = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Annotated[Name | None, CACHED_AS_LONG_AS_POSSIBLE] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, CACHED_AS_LONG_AS_POSSIBLE] = None
    context_management: Annotated[
        Annotated[list[Compaction], Field(max_length=8)] | None,
        hint(
            "conversations are not summarized; use truncation",
            "an empty list",
            "use an empty list or the type compaction",
            done=([],),
            is_checked=True,
        ),
    ] = None
    moderation: None = None


INPUT_TOKEN_NOTES: Notes = {
    "input": works(
        "a string, or a list of messages, tool calls, tool outputs, reasoning, and references to stored items"
    ),
    "model": works("a name listed by `GET /v1/models`; optional"),
    "instructions": works("the system prompt; applies to this response only"),
    "previous_response_id": works("id of a stored response; `input` continues its conversation"),
    "tools": works("up to 128 functions with schemas of up to 32 levels, and `file_search`"),
    "tool_choice": works(
        "`none`, `auto`, `required`, one function, `file_search`, or `allowed_tools`",
        "use none, auto, required or the name of a function",
    ),
    "parallel_tool_calls": works("false: at most one call per response"),
    "text": works("an object with `format`: `text`, `json_object` or `json_schema`"),
    "reasoning": works("an object with `effort`, which limits the reasoning: see below"),
    "truncation": works(
        "`disabled`: a prompt that does not fit is refused; `auto`: its oldest turns are dropped until it fits"
    ),
    "conversation": inert("null", "use previous_response_id"),
    "prompt": inert("null", "stored prompts are not available; use instructions"),
    **notes_in(InputTokenFields),
    "personality": refused("ask for it in the instructions"),
}

RESPONSE_NOTES: Notes = INPUT_TOKEN_NOTES | {
    **sampling_notes("responses"),
    "top_logprobs": works(
        "number of most likely tokens to return at each position, 0 to 20; if it is omitted, `include` with "
        "`message.output_text.logprobs` returns the log probabilities of the generated tokens only"
    ),
    "store": works(
        "true (default): the response is stored until it is deleted or 1,000 newer ones are stored; false: not stored"
    ),
    "stream": works("true: stream this API's events"),
    "stream_options": inert("no effect"),
    "metadata": works("returned with the response"),
    "background": works(
        "true: the response is generated in the background, even across restarts, and can be retrieved by its id; "
        "requires `store`"
    ),
    "prompt_cache_key": works("no effect: prompts are always cached"),
    "max_tool_calls": works(
        "1 or more; no effect: `file_search` runs at most once per response, and clients run functions themselves",
        "use 1 or more",
    ),
    **notes_in(ResponseFields),
    "moderation": inert("null", "moderation is not available; remove this field"),
    "access_programs": refused("not available"),
    "image": refused("the model reads and writes text only"),
    "messages": refused("use input"),
}

WITHIN_RESPONSE: Notes = {
    "input_image": refused("the model reads text only"),
    "input_file": works(
        "a PDF, office document, table, e-mail or text file, given as `file_id`, or as `file_data` (base64 or a data "
        "URL) with `filename`; replaced by the text of the file",
        "send file_data with a filename, or file_id; URLs are not fetched",
    ),
    "custom_tool_call": works("in `input`: a past call; in the prompt, its text is an argument named `input`"),
    "mcp_call": works(
        "in `input`: left out of the prompt and reported as ignored, like all items of tools that another server ran"
    ),
    "item_reference": works("in `input`: refers to the stored input or output item with this `id`"),
    "effort": works(f"`none` disables thinking; {EFFORTS}", EFFORT_ADVICE),
    "summary": _SUMMARY,
    "generate_summary": _SUMMARY_REQUEST,
    "context": inert(
        "`auto`, `current_turn`: reasoning before tool calls stays in the prompt until the next user message",
        "use auto",
    ),
    "mode": inert("`standard`", "remove this field"),
    **notes_in(ReasoningItem),
    **notes_in(InputText),
    **notes_in(TextConfig),
    "strict": STRICT_TOOL,
    "type": Note(
        "hint",
        "in tools: `function`, `namespace` (a group of functions), or `file_search`, which runs once per response",
        "the only available tools are functions and file_search, and the only types of content are text and files",
        "`web_search` is not available, and is omitted from the tools",
    ),
    "vector_store_ids": works(f"1 to {MAX_VECTOR_STORES} ids from `GET /v1/vector_stores`"),
    "max_num_results": works(
        f"maximum number of passages in the prompt, 1 to {MAX_RESULTS}; default {DEFAULT_RESULTS}; fewer if "
        "they are long"
    ),
    "ranking_options": works("an object with `score_threshold`"),
    "filters": inert("null", "use a separate vector store for each set of files to search"),
    **RANKING_NOTES,
    **notes_in(ResponseStreamOptions),
}
"""Notes on nested fields."""
