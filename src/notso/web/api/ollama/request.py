"""The body of /api/chat or /api/generate becomes messages and parameters, or one refusal that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notso.smollm3 import Grammar, Message, RequestOptions, Tool, ToolCall
from notso.web.api.ollama.fields import (
    CHAT_NOTES,
    GENERATE_NOTES,
    WITHIN_ANSWER,
    WITHIN_CHAT,
    AnswerFields,
    GenerateFields,
    KeepAlive,
    OllamaChatFields,
    OllamaMessage,
)
from notso.web.api.ollama.options import PARAMS, OptionFields, sampling_of
from notso.web.api.request_fields.field_reader import check_depth, invalid, read_fields
from notso.web.api.request_fields.hints import hints_of
from notso.web.api.request_fields.request_checks import EFFORT_BUDGETS, schema_grammar
from notso.web.api.shared.api_request import ApiRequest, Prompt
from notso.web.values.durations import duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(ApiRequest):
    """What a program asked for, checked. `given_name`: the model as it calls it.

    `only_loads`: nothing is to be answered.
    """

    only_loads: bool = False
    given_name: str | None = None


def parse_chat(body: Mapping[str, Any]) -> OllamaRequest:
    """Check the body of POST /api/chat. Raises ApiError (400) that names the field."""
    fields = read_fields(OllamaChatFields, body, WITHIN_CHAT | CHAT_NOTES)
    messages = tuple(map(_message, fields.messages or ()))
    is_continued = bool(messages) and messages[-1].role == "assistant"
    return _request(fields, body, messages, tools=_tools(fields), continue_last=is_continued)


def parse_generate(body: Mapping[str, Any]) -> OllamaRequest:
    """Check the body of POST /api/generate. Raises ApiError (400) that names the field."""
    fields = read_fields(GenerateFields, body, GENERATE_NOTES | WITHIN_ANSWER)
    prompt = fields.prompt or ""
    if not prompt:
        return _request(fields, body, ())
    if fields.raw:
        if fields.system:
            raise invalid("system", "system has no place in a raw prompt: leave out one of the two")
        if fields.think:
            raise invalid("think", "think has no place beside a raw prompt: leave out one of the two")
        if fields.format:
            raise invalid("format", "format has no place beside a raw prompt: leave out one of the two")
        return _request(fields, body, prompt)
    system = (Message("system", fields.system),) if fields.system else ()
    return _request(fields, body, (*system, Message("user", prompt)))


def _request(
    fields: AnswerFields,
    body: Mapping[str, Any],
    prompt: Prompt,
    *,
    tools: tuple[Tool, ...] | None = None,
    continue_last: bool = False,
) -> OllamaRequest:
    options = fields.options or OptionFields()
    is_raw = isinstance(prompt, str)
    budget = EFFORT_BUDGETS.get(fields.think) if isinstance(fields.think, str) else None
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    return OllamaRequest(
        prompts=(prompt,),
        params=(sampling_of(options, budget),),
        names=PARAMS | {"response_format": "format"} | ({"messages": "prompt"} if is_raw else {}),
        options=RequestOptions(
            thinking=fields.think is not False and not is_raw,
            tools=tools,
            grammar=_grammar(fields),
            top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            continue_last=continue_last,
        ),
        stream=fields.stream is not False,
        only_loads=not prompt,
        given_name=fields.model,
        keep_alive_s=_seconds(fields.keep_alive),
        hints=hints_of(fields, body),
    )


def _grammar(fields: AnswerFields) -> Grammar | None:
    if isinstance(fields.format, dict):
        return schema_grammar("format", fields.format)
    return Grammar("json_object") if fields.format else None


def _tools(fields: OllamaChatFields) -> tuple[Tool, ...] | None:
    for index, tool in enumerate(fields.tools or ()):
        check_depth(f"tools.{index}.function.parameters", tool.function.parameters)
    return tuple(tool.model_dump(exclude_none=True) for tool in fields.tools or ()) or None


def _message(message: OllamaMessage) -> Message:
    content = message.content or ""
    match message.role:
        case "assistant":
            calls = tuple(
                ToolCall(
                    call.id or f"call_{index}",
                    call.function.name,
                    json.dumps(call.function.arguments, ensure_ascii=False),
                )
                for index, call in enumerate(message.tool_calls or ())
            )
            return Message("assistant", content, message.thinking, calls)
        case "tool":
            return Message("tool", content, tool_call_id=message.tool_call_id)
    return Message(message.role, content)


def _seconds(given: KeepAlive | None) -> float | None:
    """Seconds, or a duration as Go spells it. Raises ApiError (400)."""
    if given is None or isinstance(given, (int, float)):
        seconds = given
    else:
        seconds = duration_s(given)
        if seconds is None:
            raise invalid("keep_alive", "keep_alive must be seconds, or a duration such as 30s, 5m or 1h30m")
    if seconds is not None and not math.isfinite(seconds):
        raise invalid("keep_alive", "keep_alive must be a number that is finite")
    return None if seconds is None else float(seconds)
