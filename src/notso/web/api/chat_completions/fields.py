"""The fields of a chat completion's body, as the OpenAI API spells them: strict types, nothing unknown, every length
bounded. What cannot be honoured has no field here, so it is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import MAX_TOP_LOGPROBS
from notso.web.api.request_fields.absent_samplers import Whole
from notso.web.api.request_fields.fields import Content, Fields, Name, Notes, Text, hint, inert, refused, works
from notso.web.api.request_fields.grammar_fields import GRAMMAR_NOTES, GrammarFields
from notso.web.api.request_fields.hints import TELLS, Hint
from notso.web.api.request_fields.request_checks import EFFORT_ADVICE, EFFORTS, Effort
from notso.web.api.request_fields.sampling_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    WITHIN_SAMPLING,
)


class SystemMessage(Fields):
    """What the model is told beforehand; `developer` is the newer name for the same."""

    role: Literal["system", "developer"]
    content: Content
    name: Annotated[Name | None, Hint()] = None


class UserMessage(Fields):
    """What a person says."""

    role: Literal["user"]
    content: Content
    name: Annotated[Name | None, Hint()] = None


class CalledFunction(Fields):
    """A past call: `arguments` is text as the answer had it, JSON unless it was cut."""

    name: Name
    arguments: Text | None = None


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
    reasoning: Text | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    refusal: Text | None = None
    # What client libraries copy from an answer without a meaning for us.
    name: Annotated[Name | None, Hint()] = None
    annotations: Annotated[list[Any] | None, Hint(done=([],))] = None
    reasoning_details: Annotated[list[Any] | None, Hint(done=([],))] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, Hint(done=({},))] = None
    audio: None = None
    function_call: None = None


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

    name: Name | None = None
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


class ThinkingOptions(Fields):
    """Thinking as Anthropic and DeepSeek spell it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None


class ReasoningOptions(Fields):
    """Thinking as the Responses API and OpenRouter spell it."""

    effort: Literal["none"] | Effort | None = None
    max_tokens: Whole | None = None
    enabled: bool | None = None
    exclude: Annotated[bool | None, Hint(done=(False,))] = None
    summary: Annotated[Name | None, Hint()] = None


class AllowedTools(Fields):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Fields):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatFields(GrammarFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: AnyFormat | None = None
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none"] | Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOptions | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Whole | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    store: Annotated[bool | None, Hint(done=(False,))] = None
    service_tier: Annotated[Name | None, Hint(done=("auto", "default"))] = None
    safety_identifier: Annotated[Name | None, TELLS] = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Annotated[Name | None, Hint()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Hint(done=({},))] = None
    metadata: Annotated[dict[str, Any] | None, Hint(done=({},), tells=True)] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Hint(done=("medium",))] = None
    prediction: Annotated[dict[str, Any] | None, Hint()] = None
    # Fields whose value, if it is one of these, asks for nothing.
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    include_reasoning: Literal[True] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    moderation: None = None
    web_search_options: None = None


CHAT_NOTES: Notes = GRAMMAR_NOTES | {
    "messages": works(
        "1 to 2,048; roles system, developer, user, assistant, tool; content is text, or parts of type text. "
        "An assistant's message at the end is continued"
    ),
    "max_tokens": works("longest answer, thinking included; what fits if left out, -1, or more than that"),
    "max_completion_tokens": works("the newer name of `max_tokens`"),
    "logprobs": works("log probabilities of the answer's tokens, by the model alone, before any filter"),
    "top_logprobs": works("0 to 20 likeliest tokens with each; needs `logprobs`"),
    "response_format": works(
        "`text`, `json_object` (with `schema`, as llama.cpp has it) or `json_schema`; the answer after the thoughts is "
        "held to it, whatever `strict` says: see structured-output.md"
    ),
    "tools": works("functions, up to 128, their schemas up to 32 levels deep"),
    "tool_choice": works(
        "`none`, `auto`, `required` (`any`), one function, or `allowed_tools`",
        "give none, auto, required or one function by its name",
    ),
    "parallel_tool_calls": works("false: at most one call"),
    "chat_template_kwargs": works("only `enable_thinking`, true or false"),
    "reasoning_effort": works(
        f"`none` answers at once; {EFFORTS}",
        f"{EFFORT_ADVICE}, or thinking_budget in tokens",
    ),
    "enable_thinking": works("another way to say `chat_template_kwargs.enable_thinking`"),
    "thinking": works("true or false, or `type` `enabled`, `disabled`, `adaptive` with `budget_tokens`"),
    "think": works("true or false, or an effort as in `reasoning_effort`"),
    "reasoning": works("`effort` as in `reasoning_effort`, `max_tokens` as `thinking_budget`, `enabled`"),
    "thinking_budget": works("the same in tokens; beats `reasoning_effort`"),
    "reasoning_format": works(
        "`auto` and `deepseek` put thoughts into `reasoning_content`; `none` leaves them in the text, within tags"
    ),
    "store": hint("chat completions are not stored; /v1/responses are", "false"),
    "service_tier": hint("there is one tier", "`auto`, `default`"),
    "safety_identifier": hint("tells of the caller"),
    "prompt_cache_key": works("every prompt's beginning is found again, with and without it"),
    "prompt_cache_retention": hint("what was read is kept as long as there is room"),
    "prompt_cache_options": hint("what was read is kept as long as there is room"),
    "metadata": hint("tells of the caller; comes back with /v1/responses only"),
    "verbosity": hint("say it in the messages", "`medium`", "use low, medium or high"),
    "prediction": hint("what repeats the prompt is guessed ahead anyway"),
    "modalities": inert("`text`", "the model reads and writes text only"),
    "include_reasoning": inert("true", "use reasoning_effort none, or leave the thoughts unread"),
    "add_generation_prompt": works("false: the assistant's message at the end is continued"),
    "continue_final_message": works("false: the assistant's message at the end is not continued, another follows it"),
    "functions": inert("null", "use tools"),
    "function_call": inert("null", "use tool_choice"),
    "audio": inert("null", "the model reads and writes text only"),
    "moderation": inert("null", "nothing is moderated here; leave this out"),
    "web_search_options": inert("null", "give a tool that searches"),
}

WITHIN_CHAT: Notes = WITHIN_SAMPLING | {
    "image_url": refused("the model reads text only"),
    "input_audio": refused("the model reads text only"),
    "file": refused("the model reads text only; put the file's text into the message"),
    "name": hint("of a message: the model's template has no names; say in the text who speaks"),
    "refusal": works("of an assistant's message: stands for its content, where there is none"),
    "reasoning_details": hint("of an assistant's message: past thoughts are left out of the prompt"),
    "annotations": hint("of an assistant's message: its text says what they point at", "an empty list"),
    "provider_specific_fields": hint("of an assistant's message: what another server meant by them is not known"),
    "strict": works("of a tool: its arguments follow their schema; where a call is asked for, those of all tools do"),
}
"""Of what lies within those."""
