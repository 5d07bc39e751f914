"""The body of a chat completion: what it is parsed to, and how invalid bodies are refused."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import (
    ContextLengthError,
    EngineError,
    EngineLostError,
    Grammar,
    InvalidRequestError,
    OutOfMemoryError,
    RequestOptions,
    SamplingParams,
    TemplateError,
    ToolName,
)
from notso.web.api.chat_completions.fields import CHAT_NOTES, ChatFields, ChatRequest, parse_chat_request
from notso.web.api.request_fields.fields import MAX_DEPTH, parse_object
from notso.web.api.shared.api_request import check_work
from notso.web.edge.errors import ApiError, api_error_of
from notso.web.values.errors import EngineUnavailableError

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def ask(**fields: Any) -> ChatRequest:
    return parse_chat_request({"messages": HELLO} | fields)


def refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(body)
    error = caught.value
    assert error.status == 400 and "\n" not in error.message
    return error


def test_omitted_fields_use_model_defaults() -> None:
    request = ask()
    (params,) = request.params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.6, 0.95, None, None)
    assert request.options == RequestOptions() and not request.stream
    assert ask(temperature=None, stop=None, tools=None, n=None, stream=None) == request


def test_sampling_fields_are_parsed() -> None:
    (params,) = ask(
        max_completion_tokens=50,
        temperature=1,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repeat_penalty=1.1,
        frequency_penalty=-1,
        presence_penalty=2,
        stop=["a", "b"],
        seed=9,
        logit_bias={"42": -100, "7": 3.5},
        thinking_budget=0,
    ).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (50, 1, 0.5, 7, 0.1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, -1, 2)
    assert (params.stop, params.seed, params.thinking_budget) == (("a", "b"), 9, 0)
    assert dict(params.logit_bias) == {42: -100, 7: 3.5}


def test_messages_of_every_role_are_parsed() -> None:
    request = ask(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm",
                "refusal": None,
                "audio": None,
                "function_call": None,
                "annotations": [],
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
        ]
    )
    system, user, assistant, tool = request.messages
    assert (system.role, user.content) == ("system", "one\ntwo")
    assert assistant.content == "" and assistant.reasoning_content == "Hm"
    assert (assistant.tool_calls[0].name, assistant.tool_calls[0].arguments) == ("add", "{}")
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "c1", "4")


def test_calls_of_other_servers_are_accepted() -> None:
    """Some servers leave ids empty, and some programs send arguments as an object and results without content."""
    calls = [
        {"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": None, "index": 999, "function": {"name": "add", "arguments": []}},
        {"index": "1", "function": {"name": "add"}},
    ]
    results = [{"tool_call_id": ""}, {"tool_call_id": None, "content": None, "name": ""}, {"content": []}]
    request = ask(messages=[{"role": "assistant", "tool_calls": calls}, *({"role": "tool"} | each for each in results)])
    assistant, *tools = request.messages
    assert [call.arguments for call in assistant.tool_calls] == ['{"a": 1}', "", ""]
    assert [tool.content for tool in tools] == ["", "", ""]
    assert not request.hints


def test_reasoning_parts_of_other_servers_are_left_out() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
        {"type": "reasoning", "text": "Hm"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So."},
    ]
    request = ask(messages=[{"role": "assistant", "content": parts}, *HELLO])
    assert request.messages[0].content == "So." and not request.messages[0].reasoning_content
    assert [hint.name.rpartition(".")[2] for hint in request.hints] == ["thinking", "text", "data"]


def test_empty_values_count_as_omitted() -> None:
    """Programs send them for empty input fields."""
    request = ask(model="", stop=["", "end", ""])
    assert request.params[0].stop == ("end",) and ask(stop="") == ask()
    assert replace(request, model=None) == ask(stop=["end"])
    assert ask(stream_options={"include_usage": True}).options == ask().options  # usage is part of whole responses
    named = [{"type": "json_schema", "json_schema": {"name": name, "schema": {}}} for name in ("", "x")]
    assert ask(response_format=named[0]).options == ask(response_format=named[1]).options


def test_trailing_assistant_message_sets_continue_last() -> None:
    assert ask(messages=[*HELLO, {"role": "assistant", "content": "Once upon"}]).options.continue_last


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, 256),
        ({"reasoning_effort": "medium"}, True, 1024),
        ({"reasoning_effort": "high"}, True, 4096),
        ({"reasoning_effort": "high", "thinking_budget": 5}, True, 5),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 9}, True, 9),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, True, 256),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}, "thinking": {"type": "disabled"}},
            False,
            None,
        ),
    ],
)
def test_reasoning_fields_set_thinking_and_budget(fields: dict[str, Any], thinking: bool, budget: int | None) -> None:
    request = ask(**fields)
    assert (request.options.thinking, request.params[0].thinking_budget) == (thinking, budget)


@pytest.mark.parametrize(
    ("groq", "plain"),
    [
        ({"reasoning_effort": "default"}, {}),
        ({"reasoning_effort": "default", "enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_format": "parsed"}, {"reasoning_format": "deepseek"}),
        ({"reasoning_format": "raw"}, {"reasoning_format": "none"}),
    ],
)
def test_groq_reasoning_values_are_aliases(groq: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ask(**groq) == ask(**plain)


def test_random_seed_is_alias_of_seed() -> None:
    assert ask(random_seed=7) == ask(seed=7)
    assert refusal({"messages": HELLO, "seed": 7, "random_seed": 8}).param == "random_seed"


def test_each_choice_gets_next_seed() -> None:
    assert [params.seed for params in ask(n=3, seed=5).params] == [5, 6, 7]
    assert [params.seed for params in ask(n=2, seed=2**64 - 1).params] == [2**64 - 1, 0]
    for random in ({}, {"seed": -1}, {"seed": -1.0}):
        assert [params.seed for params in ask(n=2, **random).params] == [None, None]


def test_tools_are_passed_unchanged() -> None:
    assert ask(tools=[TOOL], tool_choice="auto").options.tools == (TOOL,)
    assert ask(tools=[TOOL], tool_choice="none").options.tools is None
    assert ask(tools=[]).options.tools is None


def test_tool_choice_is_parsed() -> None:
    for plain in (ask(), ask(tools=[TOOL]), ask(tool_choice="auto")):
        assert plain.options.tool_choice == "auto"
    assert ask(tools=[TOOL], tool_choice="required").options.tool_choice == "required"
    named = {"type": "function", "function": {"name": "add"}}
    assert ask(tools=[TOOL], tool_choice=named).options.tool_choice == ToolName("add")
    assert ask(tools=[TOOL], tool_choice="none").options.tools is None
    assert ask(tools=[TOOL], parallel_tool_calls=False).options.parallel_tool_calls is False


def test_response_format_becomes_grammar() -> None:
    assert ask(response_format={"type": "text"}).options.grammar is None
    assert ask(response_format={"type": "json_object"}).options.grammar == Grammar("json_object")
    schema = {"type": "object", "properties": {"a": {"enum": ["\u00e9", 1]}}}
    wanted = {"name": "x", "schema": schema, "strict": True, "description": "d"}
    grammar = ask(response_format={"type": "json_schema", "json_schema": wanted}).options.grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.source) == schema


def test_logprobs_fields_are_parsed() -> None:
    assert ask().options.top_logprobs is None and ask(logprobs=False).options.top_logprobs is None
    assert ask(logprobs=True).options.top_logprobs == 0
    assert ask(logprobs=True, top_logprobs=20).options.top_logprobs == 20


def test_logprobs_may_be_number_as_in_together() -> None:
    assert ask(logprobs=0) == ask(logprobs=False) and ask(logprobs=0, top_logprobs=0) == ask()
    assert ask(logprobs=1) == ask(logprobs=True, top_logprobs=1) != ask(logprobs=True)
    assert ask(logprobs=5.0) == ask(logprobs=True, top_logprobs=5)
    assert ask(logprobs=1, top_logprobs=3) == ask(logprobs=True, top_logprobs=3)
    assert ask(logprobs=2, top_logprobs=0) == ask(logprobs=True)
    assert "less than or equal to 20" in refusal({"messages": HELLO, "logprobs": 21}).message


def test_usage_may_be_requested_as_in_openrouter() -> None:
    assert ask(usage={"include": True}) == ask(stream_options={"include_usage": True}) != ask()
    assert ask(usage={"include": False}) == ask() == ask(usage={}) == ask(usage=None)
    both = ask(usage={"include": False}, stream_options={"include_usage": True})
    assert both.include_usage and not both.hints
    assert ask(n=64, max_tokens=62_500).params[0].max_tokens == 62_500


def test_fields_with_default_values_are_accepted() -> None:
    inert = {"store": False, "service_tier": "auto", "verbosity": "medium", "logprobs": False, "top_k": -1}
    inert |= {"top_logprobs": 0, "response_format": {"type": "text"}, "parallel_tool_calls": True, "functions": None}
    assert ask(**inert) == ask()


@pytest.mark.parametrize("empty", [None, "", False])
def test_empty_structural_tag_is_accepted(empty: object) -> None:
    assert ask(structured_outputs={"regex": "a", "structural_tag": empty}) == ask(structured_outputs={"regex": "a"})


REFUSED = [
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"grammar_lazy": True}, "grammar_lazy"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"mirostat": 2}, "mirostat"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_field_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal({"messages": HELLO} | fields)
    assert error.code == "unsupported_parameter"
    assert error.param is not None and error.param.endswith(param) and param in error.message


INVALID = [
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": 5}]}, "messages.0.content"),
    ({"messages": HELLO * 2049}, "messages"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"seed": 1.5}, "seed"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 0, "top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": "true"}, "logprobs"),
    ({"usage": {"include": "yes"}}, "usage.include"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]}, "tool_choice"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
    ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "enable_thinking"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_value_error_names_field(fields: dict[str, Any], param: str) -> None:
    error = refusal({"messages": HELLO} | fields)
    assert (error.code, error.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "context", "fits"),
    [
        ({"n": 4, "max_tokens": 65_536, "logprobs": True, "top_logprobs": 20}, 8192, True),
        ({"n": 4, "max_tokens": 65_536, "logprobs": True, "top_logprobs": 20}, 65_536, False),
        ({"n": 4, "logprobs": True, "top_logprobs": 20}, 65_536, False),
        ({"n": 4, "max_tokens": 100, "logprobs": True, "top_logprobs": 20}, 65_536, True),
        ({"n": 64}, 65_536, True),
        ({"n": 64}, 65_537, False),
    ],
)
def test_size_of_response_is_limited(fields: dict[str, Any], context: int, fits: bool) -> None:
    info = replace(ScriptedEngine().info, context_tokens=context)
    with contextlib.nullcontext() if fits else pytest.raises(ApiError, match="max_tokens x n"):
        check_work(info, ask(**fields))


def test_error_uses_field_name_from_request() -> None:
    assert refusal({"messages": HELLO, "repeat_penalty": 0}).message.startswith("repeat_penalty must be ")


def test_empty_messages_return_empty_prompt() -> None:
    error = refusal({"messages": []})
    assert (error.code, error.param) == ("empty_prompt", "messages")


def test_error_does_not_repeat_long_values() -> None:
    secret = "secret" * 100
    bodies: list[dict[str, Any]] = [
        {"messages": HELLO, "temperature": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": "user", "content": {"a": secret}}]},
        {"messages": HELLO, "tool_choice": {"type": secret}},
    ]
    assert all(secret not in refusal(body).message for body in bodies)


def test_too_deep_tool_schema_is_rejected() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"properties": schema}
    error = refusal(
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "x", "parameters": schema}}]}
    )
    assert error.param == "tools.0.function.parameters" and "32" in error.message


def test_field_notes_match_accepted_and_rejected_fields() -> None:
    for name in ChatFields.model_fields:
        assert CHAT_NOTES[name].is_accepted, name
    for name in CHAT_NOTES.keys() - ChatFields.model_fields.keys():
        error = refusal({"messages": HELLO, name: 1})
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert CHAT_NOTES[name].state in ("refused", "later") and CHAT_NOTES[name].text in error.message


BAD_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e400}',
    b'{"a": 1, "a": 2}',
    b'{"a": "\\ud800"}',
    b'{"\\udc00": 1}',
    b'{"a": ["\\u0000"]}',
    b'{"a": "\x00"}',
    b'{"a": "\xff"}',
    b'{"a": 18446744073709551616}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    b'{"a": ' + b'{"a":' * 100_000,
]


@pytest.mark.parametrize("body", BAD_JSON, ids=lambda value: str(value[:30]))
def test_invalid_json_is_rejected_quickly(body: bytes) -> None:
    started = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    is_text = any(part in body for part in (b"ud800", b"udc00", b"u0000"))
    assert (caught.value.status, caught.value.code) == (400, "invalid_text" if is_text else "invalid_json")
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 500_000, b'{"a": "' + b"\\\\" * 400_000, b'""' * 500_000])
def test_json_parser_takes_linear_time(body: bytes) -> None:
    started = time.thread_time()
    with pytest.raises(ApiError):
        parse_object(body)
    assert time.thread_time() - started < 5  # quadratic time would take hours


def test_valid_json_is_parsed() -> None:
    assert parse_object(b'{"a": [1, -1.5, "\\ud83d\\ude00", "[[[{{{", true, null], "s": 18446744073709551615}') == {
        "a": [1, -1.5, "😀", "[[[{{{", True, None],
        "s": 2**64 - 1,
    }
    assert parse_object(b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")


def test_engine_errors_map_to_api_errors() -> None:
    rows = [
        (ContextLengthError(9, 8), 400, "context_length_exceeded"),
        (InvalidRequestError("x", param="seed"), 400, "invalid_value"),
        (TemplateError("x"), 400, "template_error"),
        (EngineError("x"), 500, "engine_error"),
        (EngineLostError("x"), 503, "engine_lost"),
        (EngineUnavailableError("x"), 503, "engine_unavailable"),
        (OutOfMemoryError("x", needed_bytes=2, available_bytes=1), 507, "out_of_memory"),
        (ZeroDivisionError("a path or a prompt"), 500, "internal_error"),
    ]
    for error, status, code in rows:
        mapped = api_error_of(error)
        assert (mapped.status, mapped.code) == (status, code)
        assert "a path or a prompt" not in mapped.message
    kept = ApiError(418, "x", "y")
    assert api_error_of(kept) is kept


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({"enable_thinking": False}, False, None),
        ({"thinking": False}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, True, 300),
        ({"thinking": {"type": "adaptive"}}, True, None),
        ({"think": False}, False, None),
        ({"think": "low"}, True, 256),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"effort": "high", "exclude": True}}, True, 4096),
        ({"reasoning": {"max_tokens": 77}}, True, 77),
        ({"reasoning": {"max_tokens": 77}, "thinking_budget": 77}, True, 77),
        ({"reasoning": {"max_tokens": 77}, "thinking_budget": -1}, True, 77),
        ({"reasoning": {"max_tokens": -1}}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}, "reasoning_effort": "low"}, True, 256),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "tokenize": True}}, False, None),
        ({"think": True, "reasoning_effort": "low", "enable_thinking": True}, True, 256),
    ],
)
def test_thinking_aliases_set_thinking_and_budget(fields: dict[str, Any], thinking: bool, budget: int | None) -> None:
    asked = parse_chat_request({"messages": HELLO} | fields)
    assert (asked.options.thinking, asked.params[0].thinking_budget) == (thinking, budget)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": False, "enable_thinking": True},
        {"think": "low", "reasoning_effort": "high"},
        {"reasoning": {"effort": "none"}, "think": True},
        {"thinking_token_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
        {"thinking": {"type": "enabled", "budget_tokens": 6}, "reasoning": {"max_tokens": 7}},
    ],
)
def test_contradictory_thinking_fields_are_rejected(fields: dict[str, Any]) -> None:
    error = refusal({"messages": HELLO} | fields)
    assert "contradict" in error.message and all(name in error.message for name in fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": False, "reasoning": {"exclude": False}},
        {"include_reasoning": True, "reasoning": {"exclude": True}},
        {"reasoning_format": "none", "reasoning": {"exclude": True}},
        {"reasoning_format": "none", "include_reasoning": False},
        {"reasoning_format": "raw", "include_reasoning": False},
        {"reasoning_format": "hidden", "include_reasoning": True},
        {"reasoning_format": "hidden", "reasoning": {"exclude": False}},
    ],
)
def test_contradictory_reasoning_output_fields_are_rejected(fields: dict[str, Any]) -> None:
    error = refusal({"messages": HELLO} | fields)
    assert "contradict" in error.message and all(name in error.message for name in fields)


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking.budget_tokens", "reasoning.max_tokens"])
def test_invalid_thinking_budget_error_names_field(name: str) -> None:
    outer, _, inner = name.partition(".")
    given = {"type": "enabled", inner: -2} if outer == "thinking" else {inner: -2} if inner else -2
    assert refusal({"messages": HELLO, outer: given}).param == name


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 5.0, "top_k": 3.0, "seed": 2.0}, {"max_tokens": 5, "top_k": 3, "seed": 2}),
        ({"top_p": 0}, {"top_k": 1}),
        ({"dry_sequence_breakers": '["\\n", ":"]'}, {"dry_sequence_breakers": ("\n", ":")}),
        ({"dry_sequence_breakers": '"a", "b"'}, {"dry_sequence_breakers": ("a", "b")}),
        ({"do_sample": False, "temperature": 1.0}, {"temperature": 0.0}),
        ({"do_sample": True, "num_beams": 1, "skip_special_tokens": True, "best_of": 1}, {}),
        ({"samplers": ["top_k", "temperature"], "temperature_last": True, "early_stopping": False}, {}),
    ],
)
def test_sampling_aliases_of_other_servers_are_parsed(fields: dict[str, Any], params: dict[str, Any]) -> None:
    assert parse_chat_request({"messages": HELLO} | fields).params == (SamplingParams(**params),)


def test_continue_final_message_overrides_default() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    for fields, continued in (
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, False),
    ):
        assert parse_chat_request({"messages": begun} | fields).options.continue_last is continued
        if continued and fields:
            assert refusal({"messages": HELLO} | fields).param == "continue_final_message"
        else:
            assert not parse_chat_request({"messages": HELLO} | fields).options.continue_last


@pytest.mark.parametrize("value", [True, False])
def test_contradictory_prompt_flags_are_rejected(value: bool) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    error = refusal({"messages": begun, "continue_final_message": value, "add_generation_prompt": value})
    assert error.param == "continue_final_message" and "add_generation_prompt" in error.message


def test_allowed_tools_limits_tools_in_prompt() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]

    def choice(mode: str, *names: str) -> dict[str, Any]:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    for mode, expected in (("auto", "auto"), ("required", "required")):
        asked = parse_chat_request({"messages": HELLO, "tools": tools, "tool_choice": choice(mode, "a", "c")})
        assert asked.options.tool_choice == expected
        assert [tool["function"]["name"] for tool in asked.options.tools or ()] == ["a", "c"]
    assert (
        "is not the name of a tool"
        in refusal({"messages": HELLO, "tools": tools, "tool_choice": choice("auto", "d")}).message
    )
