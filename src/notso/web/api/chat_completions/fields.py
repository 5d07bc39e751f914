"""The fields of a chat completion's body, as the OpenAI API spells them: strict types, nothing unknown, every length
bounded. What cannot be honoured has no field here, so it is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import MAX_TOP_LOGPROBS
from notso.web.api.request_fields.fields import Content, Fields, Name, Notes, Text, inert, refused, works
from notso.web.api.request_fields.grammar_fields import GRAMMAR_NOTES, GrammarFields
from notso.web.api.request_fields.sampling_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    WITHIN_SAMPLING,
)
from notso.web.values.strict_fields import at_most


class SystemMessage(Fields):
    """What the model is told beforehand; `developer` is the newer name for the same."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Fields):
    """What a person says."""

    role: Literal["user"]
    content: Content


class CalledFunction(Fields):
    """A past call: `arguments` is JSON text, as the answer had it."""

    name: Name
    arguments: Text


class Call(Fields):
    """A past tool call. `index` is there when a program sends back what it collected from a stream."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_TOOLS)] | None = None


class AssistantMessage(Fields):
    """An earlier answer, as programs send it back. As the last message it is an answer to be continued."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    # What client libraries copy from an answer without a meaning for us.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Fields):
    """What a tool returned. Its name is known by the call's id."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


AnyMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Fields):
    """A function the model may call; `parameters` is a JSON schema, shown to the model as it is."""

    name: Name
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolEntry(Fields):
    """One tool. Only functions exist."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """Which function."""

    name: Name


class NamedTool(Fields):
    """The one function that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Fields):
    """Any JSON object; one of `schema`, where llama.cpp's clients give one."""

    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Schema(Fields):
    """A JSON schema; the answer is held to it whatever `strict` says."""

    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Annotated[str, Field(max_length=65_536)] | None = None
    strict: bool | None = None


class SchemaFormat(Fields):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


AnyFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class TemplateOptions(Fields):
    """Of the chat template's variables this one may be set; the others are the server's business."""

    enable_thinking: bool | None = None


class ChatFields(GrammarFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: AnyFormat | None = None
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = None
    thinking_budget: int | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    # Fields whose value, if it is one of these, asks for nothing.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None


CHAT_NOTES: Notes = GRAMMAR_NOTES | {
    "messages": works(
        "1 to 2,048; roles system, developer, user, assistant, tool; content is text, or parts of type text. "
        "An assistant's message at the end is continued"
    ),
    "max_tokens": works("longest answer, thinking included; what fits if left out"),
    "max_completion_tokens": works("the newer name of `max_tokens`"),
    "logprobs": works("log probabilities of the answer's tokens, by the model alone, before any filter"),
    "top_logprobs": works("0 to 20 likeliest tokens with each; needs `logprobs`"),
    "response_format": works(
        "`text`, `json_object` (with `schema`, as llama.cpp has it) or `json_schema`; the answer after the thoughts is "
        "held to it, whatever `strict` says: see structured-output.md"
    ),
    "tools": works("functions, up to 128, their schemas up to 32 levels deep"),
    "tool_choice": works(
        "`none`, `auto`, `required`, or one function", "give none, auto, required or one function by its name"
    ),
    "parallel_tool_calls": works("false: at most one call"),
    "chat_template_kwargs": works("only `enable_thinking`, true or false"),
    "reasoning_effort": works(
        "`none` answers at once; `low`, `medium`, `high` think for at most 256, 1,024, 4,096 tokens",
        "use none, low, medium or high, or thinking_budget in tokens",
    ),
    "thinking_budget": works("the same in tokens; beats `reasoning_effort`"),
    "reasoning_format": works(
        "`auto` and `deepseek` put thoughts into `reasoning_content`; `none` leaves them in the text, within tags"
    ),
    "store": inert("false: chat completions are not stored", "chat completions are not stored; use /v1/responses"),
    "service_tier": inert("auto or default: there is one tier", "there is one tier; leave this out"),
    "safety_identifier": inert("tells of the caller; no effect"),
    "prompt_cache_key": inert("tells of the caller; every prompt's beginning is found again anyway"),
    "metadata": inert("tells of the caller; no effect"),
    "modalities": inert("text", "the model reads and writes text only"),
    "verbosity": inert("medium", "say so in the messages instead"),
    "functions": inert("null", "use tools"),
    "function_call": inert("null", "use tool_choice"),
    "audio": inert("null", "the model reads and writes text only"),
    "prediction": inert("null", "leave this out: what repeats the prompt is guessed ahead anyway"),
    "moderation": inert("null", "nothing is moderated here; leave this out"),
    "web_search_options": inert("null", "give a tool that searches"),
    "prompt_cache_options": refused("leave this out: every prompt's beginning is found again anyway"),
    "prompt_cache_retention": refused("leave this out: what was read is kept as long as there is room"),
}

WITHIN_CHAT: Notes = WITHIN_SAMPLING | {
    "image_url": refused("the model reads text only"),
    "input_audio": refused("the model reads text only"),
    "file": refused("the model reads text only; put the file's text into the message"),
    "allowed_tools": refused("give only the tools that may be called"),
    "name": refused("say in the text who speaks"),
    "strict": works("of a tool: its arguments follow their schema; where a call is asked for, those of all tools do"),
}
"""Of what lies within those."""
