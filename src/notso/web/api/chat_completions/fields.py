"""Fields of an OpenAI chat completion request, and their conversion to messages and parameters.

Shared by the HTTP route and `notso batch`, so that both treat requests alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import MAX_TOP_LOGPROBS, Grammar, Message, RequestOptions, ToolCall, ToolName, thinking_set_by
from notso.web.api.request_fields.fields import (
    CACHED_AS_LONG_AS_POSSIBLE,
    DESCRIBES_CALLER,
    EFFORT_ADVICE,
    EFFORT_BUDGETS,
    EFFORTS,
    ONE_TIER,
    STRICT_TOOL,
    Arguments,
    Content,
    Description,
    Effort,
    Fields,
    Id,
    Label,
    Name,
    Notes,
    Parts,
    RefusalPart,
    SomeMessages,
    SomeTools,
    Text,
    TextPart,
    Tools,
    Verbosity,
    check_functions,
    find_hints,
    hint,
    inert,
    invalid_field,
    join_text,
    notes_in,
    read_fields,
    refused,
    schema_grammar,
    to_arguments_text,
    tool_options,
    verbosity_hint,
    works,
)
from notso.web.api.request_fields.sampling_fields import (
    GRAMMAR_NOTES,
    WITHIN_SAMPLING,
    GrammarFields,
    TextFormat,
    Whole,
    find_value,
    get_by_alias,
    read_grammar,
    to_sampling_params,
)
from notso.web.api.shared.api_request import ApiRequest

NO_BUDGET = -1
"""Value of `thinking_budget` that counts as omitted, so that limits set by other fields apply."""
BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
"""Names of one field: the main name and its aliases."""
Budget = Annotated[Whole, Field(ge=NO_BUDGET)]


class ReasoningPart(Fields):
    """Reasoning in an answer from another server; left out of the prompt."""

    type: Literal["thinking", "redacted_thinking", "reasoning"]


AnswerPart = Annotated[TextPart | RefusalPart | ReasoningPart, Field(discriminator="type")]


_NAME = hint("in messages: the model's template ignores names; mention the name in the text")


class SystemMessage(Fields):
    """A system prompt; `developer` is the newer name of the role."""

    role: Literal["system", "developer"]
    content: Content
    name: Annotated[Name | None, _NAME] = None


class UserMessage(Fields):
    """A user message."""

    role: Literal["user"]
    content: Content
    name: Annotated[Name | None, _NAME] = None


class CalledFunction(Fields):
    """The function of a past call."""

    name: Name
    arguments: Arguments | None = None


class Call(Fields):
    """A past tool call. Its id is not part of the prompt."""

    id: Id | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    # Clients send this field if they have copied the call from the chunks of a stream.
    index: Any = None


class AssistantMessage(Fields):
    """An earlier answer. As the last message, it is continued by default."""

    role: Literal["assistant"]
    content: Text | Parts[AnswerPart] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Tools[Call] | None = None
    refusal: Text | None = None
    # The following fields have no effect. Client libraries copy most of them from earlier responses.
    name: Annotated[Name | None, _NAME] = None
    reasoning_details: Annotated[
        list[Any] | None, hint("in assistant messages: earlier reasoning is left out of the prompt", done=([],))
    ] = None
    annotations: Annotated[
        list[Any] | None,
        hint("in assistant messages: annotations only mark parts of the text", "an empty list", done=([],)),
    ] = None
    provider_specific_fields: Annotated[
        dict[str, Any] | None,
        hint("in assistant messages: only the server that added these fields uses them", done=({},)),
    ] = None
    audio: None = None
    function_call: None = None


class ToolMessage(Fields):
    """The result of the call `tool_call_id`; empty without `content`."""

    role: Literal["tool"]
    content: Text | Parts[TextPart] | None = None
    tool_call_id: Id | None = None
    name: Label | None = None


AnyMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Fields):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolEntry(Fields):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """Name of a function."""

    name: Name


class NamedTool(Fields):
    """A function, selected by name."""

    type: Literal["function"]
    function: NamedFunction


class ObjectFormat(Fields):
    """JSON that matches `schema` (llama.cpp) or `value` (TGI); without these, any object."""

    type: Literal["json_object", "json"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    value: dict[str, Any] | None = None


class RegexFormat(Fields):
    """A regular expression that must match the whole answer: `value` (TGI) or `pattern` (Together AI)."""

    type: Literal["regex"]
    value: Text | None = None
    pattern: Text | None = None


class Schema(Fields):
    """A JSON schema, enforced regardless of `strict`."""

    name: Label | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Description | None = None
    strict: bool | None = None


class SchemaFormat(Fields):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: Schema | None = None
    value: Schema | None = None  # TGI's name
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # Together AI's form, without a name


AnyFormat = Annotated[TextFormat | ObjectFormat | RegexFormat | SchemaFormat, Field(discriminator="type")]


class TemplateOptions(Fields):
    """Chat template variables that clients may set; `thinking` is an alias of `enable_thinking`."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["none"] | Effort | None = None


class ThinkingOptions(Fields):
    """Reasoning options of Anthropic and DeepSeek."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class ReasoningOptions(Fields):
    """Reasoning options of the Responses API and OpenRouter."""

    effort: Literal["none"] | Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: Annotated[Name | None, hint("reasoning is returned in full")] = None


class AllowedTools(Fields):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: SomeTools[NamedTool]


class AllowedToolsChoice(Fields):
    """Limits which tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatFields(GrammarFields):
    """The body of POST /v1/chat/completions."""

    messages: SomeMessages[AnyMessage]
    max_completion_tokens: Whole | None = None
    logprobs: bool | Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: AnyFormat | None = None
    tools: Tools[ToolEntry] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "default"] | Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOptions | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_format: Literal["auto", "deepseek", "parsed", "none", "raw", "hidden"] | None = None
    include_reasoning: bool | None = None
    store: Annotated[
        bool | None,
        hint(
            "chat completions are not stored (responses of /v1/responses are); if the request has an X-Conversation-Id "
            "header, `store: true` lets the stream continue after a restart",
            "false",
            done=(False,),
        ),
    ] = None
    service_tier: Annotated[Label | None, ONE_TIER] = None
    safety_identifier: Annotated[Label | None, DESCRIBES_CALLER] = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Annotated[Label | None, CACHED_AS_LONG_AS_POSSIBLE] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, CACHED_AS_LONG_AS_POSSIBLE] = None
    metadata: Annotated[
        dict[str, Any] | None,
        hint("describes the caller; returned by /v1/responses only", done=({},), describes_caller=True),
    ] = None
    verbosity: Annotated[Verbosity | None, verbosity_hint("messages")] = None
    prediction: Annotated[dict[str, Any] | None, hint("speculative decoding is automatic")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # The following fields are accepted only with values that have no effect.
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    separate_reasoning: Literal[True] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    moderation: None = None
    web_search_options: None = None


CHAT_NOTES: Notes = GRAMMAR_NOTES | {
    "messages": works(
        "1 to 2,048 messages with the roles system, developer, user, assistant and tool; `content` is a string, or a "
        "list of parts of type text or file. A final assistant message is continued"
    ),
    "max_tokens": works(
        "maximum tokens, including reasoning; if it is omitted, -1, or larger than the remaining context, as many as "
        "fit"
    ),
    "max_completion_tokens": works("newer name for `max_tokens`"),
    "logprobs": works(
        "true: return the log probabilities of the generated tokens, before temperature and filters; a number above 0, "
        "as in Together AI: like true, with this number as the default of `top_logprobs`; 0: false"
    ),
    "top_logprobs": works("number of most likely tokens to return at each position, 0 to 20; requires `logprobs`"),
    "response_format": works(
        "`text`; `json_object`, optionally with `schema`, as in llama.cpp; `json_schema`, with `json_schema` or "
        "`schema`; TGI's `json`, with `value`; or `regex`, with `value` (TGI) or `pattern` (Together AI). Enforced "
        "after the reasoning, even if `strict` is false: see structured-output.md"
    ),
    "tools": works("up to 128 functions with schemas of up to 32 levels"),
    "tool_choice": works(
        "`none`, `auto`, `required` or its alias `any`, one function, or `allowed_tools`",
        "use none, auto, required or the name of a function",
    ),
    "parallel_tool_calls": works("false: at most one call per response"),
    "chat_template_kwargs": works("`enable_thinking` or its alias `thinking` (true or false), and `reasoning_effort`"),
    "reasoning_effort": works(
        f"`none` disables thinking; {EFFORTS}; `default` counts as omitted",
        f"{EFFORT_ADVICE}, or thinking_budget in tokens",
    ),
    "enable_thinking": works("alias of `chat_template_kwargs.enable_thinking`"),
    "thinking": works(
        "true, false, or an object with `type` (`enabled`, `disabled` or `adaptive`) and optionally `budget_tokens`"
    ),
    "think": works(
        "true, false, or an effort, as in `reasoning_effort`",
        "use true, false, minimal, low, medium, high, xhigh or max",
    ),
    "reasoning": works(
        "an object with `enabled` (true or false); `effort`, like `reasoning_effort`; `max_tokens`, like "
        "`thinking_budget`; and `exclude`, the opposite of `include_reasoning`"
    ),
    "thinking_budget": works(
        "maximum reasoning tokens; overrides the limit that an effort sets. No effect if reasoning is disabled; -1 "
        "counts as omitted"
    ),
    "thinking_token_budget": works("vLLM's name for `thinking_budget`"),
    "thinking_budget_tokens": works("llama.cpp's name for `thinking_budget`"),
    "reasoning_budget_tokens": works("llama.cpp's newer name for `thinking_budget`"),
    "reasoning_format": works(
        "`auto`, `deepseek` and `parsed` return reasoning in `reasoning_content`; `none` and `raw` leave it in the "
        "text, within tags; `hidden` leaves it out of the response"
    ),
    "include_reasoning": works("false: leave the reasoning out of the response"),
    "prompt_cache_key": works("no effect: prompts are always cached"),
    **notes_in(ChatFields),
    "modalities": inert("`text`", "the model reads and writes text only"),
    "separate_reasoning": inert("true", "use reasoning_format none"),
    "chat_template": refused("start the server with --chat-template-file"),
    "documents": refused("insert the documents into a message"),
    "echo": refused("available in /v1/completions only"),
    "input_ids": refused("send the tokens as the prompt of /v1/completions"),
    "response_prefix": refused("send it as a final assistant message, which is continued"),
    "add_generation_prompt": works(
        "false: the last message must be from the assistant, and is continued; true has no effect"
    ),
    "continue_final_message": works(
        "true: the last message must be from the assistant, and is continued; false: a final assistant message is not "
        "continued, but followed by another"
    ),
    "functions": inert("an empty list", "use tools"),
    "function_call": inert(
        "`none` or `auto`; no effect, because `functions` must be empty", "use tool_choice and, in messages, tool_calls"
    ),
    "audio": inert("null", "the model reads and writes text only"),
    "moderation": inert("null", "moderation is not available; remove this field"),
    "web_search_options": inert("null", "provide a search tool"),
}

WITHIN_CHAT: Notes = WITHIN_SAMPLING | {
    "image_url": refused("the model reads text only"),
    "input_audio": refused("the model reads text only"),
    "file": works(
        "a PDF, office document, table, e-mail or text, given as `file_id`, or as `file_data` (base64 or a data URL) "
        "with `filename`; replaced by the text of the file",
        "send file_data with a filename, or file_id",
    ),
    "name": _NAME,
    "refusal": works(
        "in assistant messages: used as the content if `content` is missing; a content part of type `refusal` counts "
        "as text"
    ),
    **notes_in(AssistantMessage),
    "strict": STRICT_TOOL,
}
"""Notes on nested fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    raw_thinking: bool = False  # include the reasoning in the content, within tags
    hides_reasoning: bool = False  # leave the reasoning out of the response

    @property
    def reasoning_mode(self) -> str:
        """Return `think` or `no_think`. A flag in the system prompt overrides the options."""
        first = self.messages[0]
        fixed = thinking_set_by(first.content) if first.role == "system" else None
        return "think" if (self.options.thinking if fixed is None else fixed) else "no_think"


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Validate a chat completion request. Raises ApiError (400), which names the field."""
    fields = read_fields(ChatFields, body, CHAT_NOTES, WITHIN_CHAT)
    messages = tuple(_message(message) for message in fields.messages)
    thinking, budget = _thinking(fields)
    top_logprobs = _top_logprobs(fields)
    grammar, grammar_field = read_grammar(fields, _format(fields))
    max_tokens = get_by_alias(fields, "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
    return ChatRequest(
        **fields.common,
        prompts=(messages,),
        params=to_sampling_params(fields, max_tokens, budget),
        options=RequestOptions(
            thinking=thinking,
            **_tool_options(fields),
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            grammar=grammar,
            logits_processors=tuple(fields.logits_processors or ()),
            top_logprobs=top_logprobs,
            continue_last=_continues_last_message(fields, messages),
        ),
        names={"response_format": grammar_field},
        hints=find_hints(fields, body),
        keep_stream=bool(fields.store),
        raw_thinking=fields.reasoning_format in ("none", "raw"),
        hides_reasoning=_hides_reasoning(fields),
    )


def _thinking(fields: ChatFields) -> tuple[bool, int | None]:
    # Thinking options have several names. If a request sets an option under more than one name, the values must agree.
    options, reasoning, template = fields.thinking, fields.reasoning, fields.chat_template_kwargs
    switches = {
        "chat_template_kwargs": template.enable_thinking if template else None,
        "chat_template_kwargs.thinking": template.thinking if template else None,
        "enable_thinking": fields.enable_thinking,
        "thinking": options.type != "disabled" if isinstance(options, ThinkingOptions) else options,
        "think": fields.think if isinstance(fields.think, bool) else None,
        "reasoning.enabled": reasoning.enabled if reasoning else None,
    }
    efforts = {
        "reasoning_effort": None if fields.reasoning_effort == "default" else fields.reasoning_effort,
        "reasoning.effort": reasoning.effort if reasoning else None,
        "chat_template_kwargs.reasoning_effort": template.reasoning_effort if template else None,
        "think": None if isinstance(fields.think, bool) else fields.think,
    }
    switch, enabled = find_value(switches, "contradict each other")
    effort_field, effort = find_value(efforts, "contradict each other")
    if effort is not None and enabled is not None and enabled == (effort == "none"):
        raise invalid_field(effort_field, f"{effort_field} and {switch} contradict each other")
    thinking = effort != "none" if effort is not None else enabled is not False
    budget_field, budget = find_value({name: getattr(fields, name) for name in BUDGETS})
    budgets = {
        budget_field: budget,
        "thinking.budget_tokens": options.budget_tokens if isinstance(options, ThinkingOptions) else None,
        "reasoning.max_tokens": reasoning.max_tokens if reasoning else None,
    }
    chosen = {name: value for name, value in budgets.items() if value != NO_BUDGET}
    _, budget = find_value(chosen, "contradict each other")
    if budget is None:
        budget = EFFORT_BUDGETS.get(effort or "")
    return thinking, budget if thinking else None


def _hides_reasoning(fields: ChatFields) -> bool:
    excluded = fields.reasoning.exclude if fields.reasoning else None
    shown = {
        "include_reasoning": fields.include_reasoning,
        "reasoning.exclude": None if excluded is None else not excluded,
        "reasoning_format": {"none": True, "raw": True, "hidden": False}.get(fields.reasoning_format or ""),
    }
    return find_value(shown, "contradict each other")[1] is False


def _continues_last_message(fields: ChatFields, messages: Sequence[Message]) -> bool:
    continue_last, add_prompt = fields.continue_final_message, fields.add_generation_prompt
    if continue_last is not None and continue_last == add_prompt:
        message = "add_generation_prompt and continue_final_message contradict each other"
        raise invalid_field("continue_final_message", message)
    requires_answer = {"continue_final_message": continue_last is True, "add_generation_prompt": add_prompt is False}
    for name, is_required in requires_answer.items():
        if is_required and messages[-1].role != "assistant":
            raise invalid_field(name, f"{name}: there is no final assistant message to continue")
    return messages[-1].role == "assistant" and continue_last is not False


def _top_logprobs(fields: ChatFields) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid_field("top_logprobs", "top_logprobs requires logprobs: true")
    if not fields.logprobs:
        return None
    count = fields.logprobs if fields.top_logprobs is None else fields.top_logprobs
    return 0 if count is True else count


def _schema_in(schema: Schema | dict[str, Any] | None) -> dict[str, Any] | None:
    return schema.schema_ if isinstance(schema, Schema) else schema


def _format(fields: ChatFields) -> Grammar | None:
    match fields.response_format:
        case ObjectFormat(schema_=None, value=None):
            return Grammar("json_object")
        case RegexFormat() as regex:
            _, expression = find_value(
                {f"response_format.{name}": getattr(regex, name) for name in ("value", "pattern")}
            )
            if expression is None:
                raise invalid_field("response_format.value", "response_format.value is required")
            return Grammar("regex", expression)
        case ObjectFormat() | SchemaFormat() as json_format:
            value = json_format.value
            found = {
                f"response_format.{name}": schema
                for name, schema in (
                    ("json_schema.schema", _schema_in(getattr(json_format, "json_schema", None))),
                    ("schema", json_format.schema_),
                    ("value.schema" if isinstance(value, Schema) else "value", _schema_in(value)),
                )
                if schema is not None
            }
            if len(found) > 1:
                raise invalid_field([*found][1], f"{' and '.join(found)} are aliases: use only one")
            if not found:
                raise invalid_field("response_format.json_schema", "response_format.json_schema is required")
            return schema_grammar(*found.popitem())
    return None


def _tool_options(fields: ChatFields) -> dict[str, Any]:
    tools, choice = fields.tools or (), fields.tool_choice
    if choice != "none":
        check_functions(
            (f"tools.{index}.function", tool.function.name, {"parameters": tool.function.parameters})
            for index, tool in enumerate(tools)
        )
    offered = [
        (tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}), tool.function.strict) for tool in tools
    ]
    if isinstance(choice, AllowedToolsChoice):
        return tool_options(
            offered, choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
        )
    return tool_options(offered, ToolName(choice.function.name) if isinstance(choice, NamedTool) else choice)


def _without_reasoning(content: Sequence[AnswerPart]) -> list[TextPart | RefusalPart]:
    return [part for part in content if not isinstance(part, ReasoningPart)]


def _message(message: AnyMessage) -> Message:
    if isinstance(message, AssistantMessage):
        calls = tuple(
            ToolCall(call.id or "", call.function.name, to_arguments_text(call.function.arguments))
            for call in message.tool_calls or ()
        )
        content = message.content or ""
        text = content if isinstance(content, str) else join_text(_without_reasoning(content))
        return Message(
            "assistant", text or message.refusal or "", message.reasoning_content or message.reasoning, calls
        )
    if isinstance(message, ToolMessage):
        return Message("tool", join_text(message.content), tool_call_id=message.tool_call_id)
    return Message("user" if message.role == "user" else "system", join_text(message.content))
