"""The body of a chat completion becomes messages and parameters, or one refusal that names the field at fault.

Used by the HTTP route and by `notso batch`, so that a line of a batch file means what the same request means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from notso.smollm3 import Message, SamplingParams, Tool, ToolCall
from notso.web.api.api_error import ApiError, api_error_of
from notso.web.api.chat_fields import ADVICE, AnyMessage, AssistantMessage, ChatFields, Content, ToolMessage

MAX_SCHEMA_DEPTH = 32
EFFORT_BUDGETS = {"low": 256, "medium": 1024, "high": 4096}
"""Tokens of thinking that each `reasoning_effort` grants."""

_SHOWN_CHARACTERS = 80  # of a field's name that nobody here chose


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a program asked for, checked.

    `params` holds one for each of the choices (`n`), which differ in their seed. `continue_last`: the last message is
    an answer to be extended. `fresh`: nothing cached may be used. `raw_thinking`: thoughts come as text within tags.
    """

    model: str | None
    messages: tuple[Message, ...]
    params: tuple[SamplingParams, ...]
    thinking: bool
    tools: tuple[Tool, ...] | None
    continue_last: bool
    stream: bool
    include_usage: bool
    return_progress: bool
    raw_thinking: bool
    fresh: bool


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a chat completion. Raises ApiError (400), whose `param` names the field."""
    try:
        fields = ChatFields.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, body) from None
    messages = tuple(_message(message) for message in fields.messages)
    thinking, budget = _thinking(fields)
    if not fields.stream and fields.stream_options is not None:
        raise _invalid("stream_options", "stream_options needs stream: true")
    return ChatRequest(
        model=fields.model,
        messages=messages,
        params=_params(fields, budget),
        thinking=thinking,
        tools=_tools(fields),
        continue_last=messages[-1].role == "assistant",
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_progress=bool(fields.return_progress),
        raw_thinking=fields.reasoning_format == "none",
        fresh=fields.cache_prompt is False,
    )


def _params(fields: ChatFields, budget: int | None) -> tuple[SamplingParams, ...]:
    chosen: dict[str, Any] = {
        "max_tokens": _either(fields, "max_tokens", "max_completion_tokens"),
        "thinking_budget": budget,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "repetition_penalty": _either(fields, "repeat_penalty", "repetition_penalty"),
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "stop": (fields.stop,) if isinstance(fields.stop, str) else fields.stop and tuple(fields.stop),
        "logit_bias": fields.logit_bias and {int(token): bias for token, bias in fields.logit_bias.items()},
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    choices = fields.n or 1
    # Choices that shared a seed would be the same text. The last ones of the range wrap round, into the same range.
    seeds = [None if fields.seed is None else _wrapped(fields.seed + index) for index in range(choices)]
    try:
        return tuple(SamplingParams(seed=seed, **given) for seed in seeds)
    except ValueError as error:  # InvalidRequestError, which names the field
        raise api_error_of(error) from None


def _wrapped(seed: int) -> int:
    return seed if seed < 1 << 64 else seed - (1 << 64)


def _either(fields: ChatFields, first: str, second: str) -> Any:
    """Two spellings of one field. Raises ApiError if both are given and differ."""
    one, other = getattr(fields, first), getattr(fields, second)
    if one is not None and other is not None and one != other:
        raise _invalid(second, f"{first} and {second} mean the same: give one of them")
    return other if one is None else one


def _thinking(fields: ChatFields) -> tuple[bool, int | None]:
    """Whether to think, and for how many tokens at most."""
    asked = fields.chat_template_kwargs.enable_thinking if fields.chat_template_kwargs else None
    effort = fields.reasoning_effort
    if effort is not None and asked is not None and asked == (effort == "none"):
        raise _invalid("reasoning_effort", "reasoning_effort and enable_thinking contradict each other")
    thinking = effort != "none" if effort is not None else asked is not False
    budget = EFFORT_BUDGETS.get(effort or "") if fields.thinking_budget is None else fields.thinking_budget
    return thinking, budget if thinking else None


def _tools(fields: ChatFields) -> tuple[Tool, ...] | None:
    if not fields.tools or fields.tool_choice == "none":
        return None
    for index, tool in enumerate(fields.tools):
        if _depth(tool.function.parameters) > MAX_SCHEMA_DEPTH:
            param = f"tools.{index}.function.parameters"
            raise _invalid(param, f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return tuple(tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in fields.tools)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _message(message: AnyMessage) -> Message:
    if isinstance(message, AssistantMessage):
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        )
        return Message("assistant", _text(message.content), message.reasoning_content, calls)
    if isinstance(message, ToolMessage):
        return Message("tool", _text(message.content), tool_call_id=message.tool_call_id)
    return Message("user" if message.role == "user" else "system", _text(message.content))


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _refusal(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """One of the faults, in our words: pydantic's may repeat what was sent."""
    faults = error.errors(include_url=False, include_context=True, include_input=False)
    # Where a value may be one of several kinds there is a fault for each: the deepest is of the kind that was meant.
    fault = max(faults, key=lambda each: (len(_path(each["loc"], body)), each["type"] == "extra_forbidden"))
    path = _path(fault["loc"], body)
    advised = next((index for index, part in enumerate(path) if part in ADVICE), None)
    advice = "" if advised is None else ADVICE[str(path[advised])]
    path = path if advised is None else path[: advised + 1]
    param = ".".join(map(str, path)) or None
    shown = _printable(param or "the body")
    match fault["type"]:
        case "extra_forbidden":
            return _unsupported(shown, f"{shown} is not supported" + (f": {advice}" if advice else ""))
        case "missing":
            missing = f"{shown}.{fault['loc'][-1]}" if param else str(fault["loc"][-1])
            return _invalid(missing, f"{missing} is required")
        case "union_tag_invalid" | "union_tag_not_found":
            return _invalid(f"{shown}.role", f"{shown}.role must be system, developer, user, assistant or tool")
        case "literal_error" | "none_required" | "too_long" if advice:
            return _unsupported(shown, f"this value of {shown} is not supported: {advice}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return _invalid(shown, f"{shown} must be an object")
    said = re.sub(r"^(Input|List|String|Dictionary|Value) should", "it should", fault["msg"])
    return _invalid(shown, f"{shown}: {said}")


def _path(location: Sequence[int | str], body: Any) -> list[int | str]:
    """Where in the body a fault lies; pydantic's own path also names the types it tried."""
    path: list[int | str] = []
    for part in location:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, Mapping) and part in body):
            path.append(part)
            body = body[part]
    return path


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_SHOWN_CHARACTERS])


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", message, param=param)
