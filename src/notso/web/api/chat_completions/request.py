"""The body of a chat completion becomes messages and parameters, or one refusal that names the field at fault.

Used by the HTTP route and by `notso batch`, so that a line of a batch file means what the same request means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notso.smollm3 import Grammar, Message, RequestOptions, Tool, ToolCall, ToolChoice, thinking_set_by
from notso.web.api.chat_completions.fields import (
    CHAT_NOTES,
    WITHIN_CHAT,
    AllowedToolsChoice,
    AnyMessage,
    AssistantMessage,
    ChatFields,
    NamedTool,
    ObjectFormat,
    SchemaFormat,
    ThinkingOptions,
    ToolMessage,
)
from notso.web.api.request_fields.field_reader import check_depth, invalid, read_fields
from notso.web.api.request_fields.fields import joined
from notso.web.api.request_fields.grammar_fields import grammar_of
from notso.web.api.request_fields.hints import hints_of
from notso.web.api.request_fields.request_checks import EFFORT_BUDGETS, checked_choice, schema_grammar, strict_names
from notso.web.api.request_fields.sampling_fields import check_stream_options, either, sampling_of
from notso.web.api.shared.api_request import ApiRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    """What a program asked for, checked.

    `raw_thinking`: thoughts come as text within tags.
    """

    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    raw_thinking: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation."""
        return tuple(each for each in self.prompts[0] if isinstance(each, Message))

    @property
    def reasoning_mode(self) -> str:
        """Whether the template makes the model think: what the instructions say beats what was asked for."""
        first = self.messages[0]
        fixed = thinking_set_by(first.content) if first.role == "system" else None
        return "think" if (self.options.thinking if fixed is None else fixed) else "no_think"


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a chat completion. Raises ApiError (400), whose `param` names the field."""
    fields = read_fields(ChatFields, body, CHAT_NOTES | WITHIN_CHAT)
    check_stream_options(fields)
    messages = tuple(_message(message) for message in fields.messages)
    thinking, budget = _thinking(fields)
    top_logprobs = _top_logprobs(fields)
    tools = _tools(fields)
    grammar, said_by = grammar_of(fields, _format(fields))
    longest = either(fields, "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
    return ChatRequest(
        model=fields.model,
        prompts=(messages,),
        params=sampling_of(fields, longest, budget, top_logprobs),
        options=RequestOptions(
            thinking=thinking,
            tools=tools,
            tool_choice=_tool_choice(fields),
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            strict_tools=strict_names((tool.function.name, tool.function.strict) for tool in fields.tools or ()),
            grammar=grammar,
            logits_processors=tuple(fields.logits_processors or ()),
            top_logprobs=top_logprobs,
            continue_last=_continues(fields, messages),
        ),
        names={"response_format": said_by},
        hints=hints_of(fields, body),
        stream=bool(fields.stream),
        fresh=fields.cache_prompt is False,
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_progress=bool(fields.return_progress),
        timings_per_token=bool(fields.timings_per_token),
        raw_thinking=fields.reasoning_format == "none",
    )


def _thinking(fields: ChatFields) -> tuple[bool, int | None]:
    """Whether to think, and for how many tokens at most."""
    options, reasoning = fields.thinking, fields.reasoning
    switches = {
        "chat_template_kwargs": fields.chat_template_kwargs.enable_thinking if fields.chat_template_kwargs else None,
        "enable_thinking": fields.enable_thinking,
        "thinking": options.type != "disabled" if isinstance(options, ThinkingOptions) else options,
        "think": fields.think if isinstance(fields.think, bool) else None,
        "reasoning.enabled": reasoning.enabled if reasoning else None,
    }
    efforts = {
        "reasoning_effort": fields.reasoning_effort,
        "reasoning.effort": reasoning.effort if reasoning else None,
        "think": None if isinstance(fields.think, bool) else fields.think,
    }
    name, asked = next(((name, value) for name, value in switches.items() if value is not None), ("", None))
    said, effort = next(((name, value) for name, value in efforts.items() if value is not None), ("", None))
    for names, first, value in ((switches, name, asked), (efforts, said, effort)):
        for other, given in names.items():
            if given not in (None, value):
                raise invalid(other, f"{first} and {other} contradict each other")
    if effort is not None and asked is not None and asked == (effort == "none"):
        raise invalid(said, f"{said} and {name} contradict each other")
    thinking = effort != "none" if effort is not None else asked is not False
    budgets = (
        *(fields.thinking_budget, options.budget_tokens if isinstance(options, ThinkingOptions) else None),
        *(reasoning.max_tokens if reasoning else None, EFFORT_BUDGETS.get(effort or "")),
    )
    budget = next((each for each in budgets if each is not None), None)
    return thinking, budget if thinking else None


def _continues(fields: ChatFields, messages: Sequence[Message]) -> bool:
    """Whether more of the last message is to be written. Raises ApiError where that is asked of a user's message."""
    wanted, begun = fields.continue_final_message, fields.add_generation_prompt
    for name, contradicts in (("continue_final_message", wanted is True), ("add_generation_prompt", begun is False)):
        if contradicts and messages[-1].role != "assistant":
            raise invalid(name, f"{name}: there is no assistant's message at the end to be continued")
    return messages[-1].role == "assistant" and wanted is not False


def _top_logprobs(fields: ChatFields) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    return fields.top_logprobs or 0 if fields.logprobs else None


def _format(fields: ChatFields) -> Grammar | None:
    match fields.response_format:
        case ObjectFormat(schema_=schema) if schema is not None:
            return schema_grammar("response_format.schema", schema)
        case ObjectFormat():
            return Grammar("json_object")
        case SchemaFormat(json_schema=asked):
            return schema_grammar("response_format.json_schema.schema", asked.schema_)
    return None


def _tools(fields: ChatFields) -> tuple[Tool, ...] | None:
    if not fields.tools or fields.tool_choice == "none":
        return None
    for index, tool in enumerate(fields.tools):
        check_depth(f"tools.{index}.function.parameters", tool.function.parameters)
    choice = fields.tool_choice
    allowed = (
        {tool.function.name for tool in choice.allowed_tools.tools} if isinstance(choice, AllowedToolsChoice) else None
    )
    return tuple(
        tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
        for tool in fields.tools
        if allowed is None or tool.function.name in allowed
    )


def _tool_choice(fields: ChatFields) -> ToolChoice:
    choice = fields.tool_choice
    names = [tool.function.name for tool in fields.tools or ()]
    if isinstance(choice, AllowedToolsChoice):
        for tool in choice.allowed_tools.tools:
            checked_choice("tool_choice", tool.function.name, names)
        choice = choice.allowed_tools.mode
    if choice is None or choice in ("none", "auto"):
        return "auto"  # without tools there is nothing to choose
    return checked_choice("tool_choice", choice.function.name if isinstance(choice, NamedTool) else None, names)


def _message(message: AnyMessage) -> Message:
    if isinstance(message, AssistantMessage):
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "") for call in message.tool_calls or ()
        )
        said = joined(message.content) or message.refusal or ""
        return Message("assistant", said, message.reasoning_content or message.reasoning, calls)
    if isinstance(message, ToolMessage):
        return Message("tool", joined(message.content), tool_call_id=message.tool_call_id)
    return Message("user" if message.role == "user" else "system", joined(message.content))
