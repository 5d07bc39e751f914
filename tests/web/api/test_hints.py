"""Fields that clients send by default and that do not affect an answer: accepted, named in a header, or refused on
demand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses.response_includable import ResponseIncludable
from scripted_engine import ScriptedEngine, say

from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.completions.fields import parse_text_request
from notso.web.api.messages.request import parse_message_request
from notso.web.api.ollama.fields import parse_chat as parse_ollama_chat
from notso.web.api.request_fields import fields as request_fields
from notso.web.api.request_fields.fields import MAX_HINTS, parse_repaired, reject_hints
from notso.web.api.responses.request import parse_response_request
from notso.web.edge.errors import ApiError
from notso.web.values.settings import Settings

Start = Callable[..., Any]
IGNORED = "x-notso-ignored"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CHAT: list[tuple[dict[str, Any], str]] = [
    # Fields that ask for the default behavior are not reported.
    ({"store": False, "service_tier": "auto", "verbosity": "medium", "metadata": {}, "modalities": ["text"]}, ""),
    ({"logprobs": False, "top_logprobs": 0, "n": 1, "prompt_cache_key": "k", "stop": None, "tools": None}, ""),
    ({"functions": None, "function_call": None, "audio": None, "prediction": None, "nobody_knows": None}, ""),
    ({"tfs_z": 1.0, "top_a": 0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "length_penalty": 1}, ""),
    ({"top_k": -1, "max_tokens": -1, "include_reasoning": True, "add_generation_prompt": True}, ""),
    # Caller metadata and hints are reported.
    ({"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}}, "user, safety_identifier, metadata"),
    ({"store": True, "service_tier": "flex", "verbosity": "low"}, "store, service_tier, verbosity"),
    (
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
        "prompt_cache_retention, prompt_cache_options",
    ),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"mirostat_tau": 5.0, "mirostat_eta": 0.1}, "mirostat_tau, mirostat_eta"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": True}}, ""),
    # Fields of messages are reported once, without the index of the message.
    (
        {
            "messages": [
                {"role": "system", "content": "x", "name": "boss"},
                {"role": "user", "content": "x", "name": "Ann"},
                {"role": "assistant", "content": "x", "name": "agent", "annotations": [{"type": "url_citation"}]},
                {"role": "user", "content": "x"},
            ]
        },
        "messages.name, messages.annotations",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": "", "reasoning_details": []}, *HELLO]}, ""),
    # Unknown names are reported.
    ({"never_heard": False, "of_these": "", "three": []}, "never_heard, of_these, three"),
    ({"messages": [{"role": "user", "content": "x", "odd": False}]}, "messages.odd"),
]

RESPONSES: list[tuple[dict[str, Any], str]] = [
    # Codex
    (
        {
            **{"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"}},
            **{"store": False, "stream": True, "prompt_cache_key": "k", "parallel_tool_calls": False, "tools": []},
            **{"text": {"verbosity": "low"}, "client_metadata": {"installation": "i"}},
        },
        "include, reasoning.summary, text.verbosity, client_metadata",
    ),
    ({"include": ["message.output_text.logprobs"], "text": {"verbosity": "medium"}}, ""),
    ({"include": [], "max_tool_calls": 5, "service_tier": "priority"}, "service_tier"),
    (
        {"reasoning": {"context": "auto", "mode": "standard", "generate_summary": "concise"}},
        "reasoning.generate_summary",
    ),
    (
        {
            "input": [
                *HELLO,
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text"}], "encrypted_content": "gAAA"},
                {"type": "message", "role": "assistant", "content": "x"},
                *HELLO,
            ]
        },
        "input.summary, input.encrypted_content",
    ),
]

MESSAGES: list[tuple[dict[str, Any], str]] = [
    # Claude Code
    (
        {
            "system": [
                {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
            ],
            **{"metadata": {"user_id": "u"}, "output_config": {"effort": "xhigh"}, "thinking": {"type": "adaptive"}},
        },
        "metadata",
    ),
    (
        {"speed": "fast", "service_tier": "standard_only", "diagnostics": {"previous_message_id": None}},
        "speed, diagnostics",
    ),
    # A budget, if given, overrides the effort.
    (
        {"thinking": {"type": "enabled", "budget_tokens": 20}, "output_config": {"effort": "low"}},
        "output_config.effort",
    ),
    ({"speed": "standard", "user_profile_id": "p", "workspace_id": "w"}, "user_profile_id, workspace_id"),
]

# Fields without effect are accepted with values of any type. PHP, for instance, writes empty objects as [].
OF_ANY_TYPE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"user": 5, "metadata": []}, "user, metadata"),
    ("/v1/chat/completions", {"metadata": "m", "safety_identifier": {"a": 1}}, "metadata, safety_identifier"),
    (
        "/v1/chat/completions",
        {"store": "false", "service_tier": 5, "prediction": []},
        "store, service_tier, prediction",
    ),
    ("/v1/chat/completions", {"id_slot": "0", "n_keep": "0", "mirostat_tau": "5"}, "id_slot, n_keep, mirostat_tau"),
    ("/v1/chat/completions", {"prompt_cache_options": True, "user": "x" * 999}, "prompt_cache_options, user"),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "x", "name": ""},
                {"role": "assistant", "content": "x", "annotations": {}, "provider_specific_fields": []},
                {"role": "assistant", "content": "x", "reasoning_details": "Hm."},
                {"role": "user", "content": "x", "name": 5},
            ]
        },
        "messages.name, messages.annotations, messages.provider_specific_fields, messages.reasoning_details",
    ),
    ("/v1/responses", {"user": 5, "client_metadata": []}, "user, client_metadata"),
    ("/v1/messages", {"metadata": [], "diagnostics": "on"}, "metadata, diagnostics"),
    ("/v1/completions", {"truncation_length": "4096", "early_stopping": "never"}, "truncation_length, early_stopping"),
    ("/api/chat", {"truncate": 1, "options": {"num_ctx": [4096]}}, "truncate, options.num_ctx"),
]

PARSERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "/v1/chat/completions": (parse_chat_request, {"messages": HELLO}),
    "/v1/responses": (parse_response_request, {"input": "Hello"}),
    "/v1/messages": (parse_message_request, {"messages": HELLO, "max_tokens": 50}),
    "/v1/completions": (parse_text_request, {"prompt": "Hello"}),
    "/api/chat": (parse_ollama_chat, {"messages": HELLO}),
}
ROWS = [
    *(("/v1/chat/completions", *row) for row in CHAT),
    *(("/v1/responses", *row) for row in RESPONSES),
    *(("/v1/messages", *row) for row in MESSAGES),
    *OF_ANY_TYPE,
    ("/v1/completions", {"user": "u", "echo": False, "odd": ""}, "user, odd"),
    (
        "/api/chat",
        {"keep_alive": 5, "truncate": True, "options": {"num_ctx": 9, "odd": False}},
        "truncate, options.num_ctx, options.odd",
    ),
]


def names(path: str, body: dict[str, Any]) -> str:
    parse, least = PARSERS[path]
    return ", ".join(hint.name for hint in parse(least | body).hints)


@pytest.mark.parametrize(("path", "body", "named"), ROWS, ids=lambda value: str(value)[:40])
def test_ignored_fields_are_accepted_and_reported(path: str, body: dict[str, Any], named: str) -> None:
    assert names(path, body) == named


@pytest.mark.parametrize(("path", "body", "named"), ROWS, ids=lambda value: str(value)[:40])
def test_ignored_fields_do_not_change_parsed_request(path: str, body: dict[str, Any], named: str) -> None:
    """Parsing the request without these fields gives the same prompts, parameters and options."""
    parse, least = PARSERS[path]
    tops = {name.partition(".")[0] for name in named.split(", ")} - {"messages", "input", "options", "stream_options"}
    kept = {name: value for name, value in body.items() if name not in tops or name in ("text", "reasoning")}
    one, other = parse(least | body), parse(least | kept)
    assert (one.prompts, one.params, one.options) == (other.prompts, other.params, other.options)


@pytest.mark.parametrize("path", PARSERS)
@pytest.mark.parametrize("value", [1, 0, True, "x", {}, [0], {"a": False}], ids=str)
def test_unknown_field_is_accepted_and_reported(path: str, value: Any) -> None:
    parse, least = PARSERS[path]
    asked, without = parse(least | {"odd": value}), parse(least)
    assert [(hint.name, hint.describes_caller) for hint in asked.hints] == [("odd", False)]
    assert (asked.prompts, asked.params, asked.options) == (without.prompts, without.params, without.options)
    with pytest.raises(ApiError) as caught:
        reject_hints(asked.hints)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "odd")


@pytest.mark.parametrize("name", ["web_search_options", "separate_reasoning", "audio"])
def test_unsupported_field_is_rejected_even_with_empty_value(name: str) -> None:
    for value in (False, "", []):
        with pytest.raises(ApiError) as caught:
            parse_chat_request({"messages": HELLO, name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    "name",
    [
        "grammar_lazy",
        "structural_tag",
        "grammar_triggers",
        "allowed_token_ids",
        "bad_words",
        "custom_token_bans",
        "custom_logit_processor",
        "lora_path",
        "chat_template",
        "documents",
        "echo",
        "input_ids",
        "response_prefix",
    ],
)
def test_unsupported_field_is_accepted_only_when_empty(name: str) -> None:
    for value in (None, False, "", []):
        assert parse_chat_request({"messages": HELLO, name: value}).options
    with pytest.raises(ApiError) as caught:
        parse_chat_request({"messages": HELLO, name: {"a": 1}})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


def test_unknown_nested_member_is_ignored_even_if_named_as_an_unsupported_field() -> None:
    message = {"role": "user", "content": "Hello", "echo": True, "documents": [1]}
    asked = parse_chat_request({"messages": [message]})
    assert [hint.name for hint in asked.hints] == ["messages.echo", "messages.documents"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tfs_z", 0.9),
        ("dynatemp_range", 0.5),
        ("length_penalty", 1.2),
        ("tfs_z", True),
        ("top_a", "0"),
        ("top_n_sigma", 1.5),
        ("min_keep", 2),
        ("num_beams", 4),
        ("typical", 0.5),
        ("penalty_alpha", 0.6),
        ("tfs", 0.9),
        ("mirostat_mode", 2),
        ("dynamic_temperature", True),
        ("no_stop_trim", True),
        ("separate_reasoning", False),
    ],
)
def test_unsupported_sampler_is_rejected_when_enabled(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request({"messages": HELLO, name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", ["user", "safety_identifier", "service_tier", "prompt_cache_key"])
def test_empty_string_in_ignored_field_is_accepted(path: str, name: str) -> None:
    parse, least = PARSERS[path]
    assert parse(least | {name: ""}).options == parse(least).options


def test_legacy_function_fields_without_functions_are_accepted() -> None:
    chat, responses = PARSERS["/v1/chat/completions"], PARSERS["/v1/responses"]
    for (parse, least), given in (
        (chat, {"functions": [], "function_call": "auto"}),
        (chat, {"functions": [], "function_call": "none"}),
        (responses, {"context_management": []}),
        (responses, {"previous_response_id": ""}),
    ):
        assert parse(least | given) == parse(least)
    for name, value in (("functions", [{"name": "f"}]), ("function_call", {"name": "f"})):
        with pytest.raises(ApiError, match="use tool"):
            parse_chat_request({"messages": HELLO, name: value})


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 5, "top_logprobs": 2, "repeat_last_n": 8, "seed": 3, "n": 1},
    "/v1/completions": {"max_tokens": 5, "logprobs": 2, "n": 1},
    "/v1/responses": {"max_output_tokens": 16, "top_logprobs": 2, "max_tool_calls": 3},
    "/v1/messages": {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 4}},
    "/api/chat": {"options": {"num_predict": 5, "num_ctx": 8192, "top_k": 4}},
}


@pytest.mark.parametrize("path", PARSERS)
def test_integer_field_accepts_whole_float(path: str) -> None:
    def floats(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: floats(each) for name, each in given.items()}
        return float(given) if isinstance(given, int) else given

    parse, least = PARSERS[path]
    logprobs = {"logprobs": True} if path == "/v1/chat/completions" else {}
    one, other = (parse(least | logprobs | each) for each in (WHOLE[path], floats(WHOLE[path])))
    assert (one.params, one.options) == (other.params, other.options)


def test_field_aliases_of_other_servers_are_parsed() -> None:
    asked = parse_chat_request({"messages": HELLO, "stopping_strings": ["x"], "thinking_token_budget": 5})
    assert (asked.params[0].stop, asked.params[0].thinking_budget) == (("x",), 5)
    both = parse_chat_request({"messages": HELLO, "stopping_strings": ["x"], "stop": ["x"]})
    assert both.params[0].stop == ("x",)
    with pytest.raises(ApiError, match="aliases"):
        parse_chat_request({"messages": HELLO, "stopping_strings": ["x"], "stop": ["y"]})


def test_number_of_reported_fields_is_limited() -> None:
    many = {f"nothing_{number}": False for number in range(5000)}
    assert len(parse_chat_request({"messages": HELLO} | many).hints) == MAX_HINTS


EFFORTS = [("none", False, None), ("minimal", True, 64), ("xhigh", True, 16_384), ("max", True, None)]


@pytest.mark.parametrize(("effort", "thinks", "budget"), EFFORTS)
def test_every_reasoning_effort_sets_thinking_and_budget(effort: str, thinks: bool, budget: int | None) -> None:
    asked = [
        parse_chat_request({"messages": HELLO, "reasoning_effort": effort}),
        parse_response_request({"input": "x", "reasoning": {"effort": effort}}),
    ]
    if thinks:
        config = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
        asked.append(parse_message_request({"messages": HELLO, "max_tokens": 50} | config))
    for each in asked:
        assert (each.options.thinking, each.params[0].thinking_budget, each.hints) == (thinks, budget, ())


FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
NESTED = {"type": "function", "function": FUNCTION}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}
TOOLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", NESTED, "tools.1.function.name"),
    ("/v1/responses", {"type": "function", **FUNCTION}, "tools.1.name"),
    ("/v1/responses", NAMESPACE, "tools.1.tools.0.name"),
    ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}}, "tools.1.name"),
    ("/api/chat", NESTED, "tools.1.function.name"),
]


@pytest.mark.parametrize(("path", "tool", "param"), TOOLS)
def test_tools_of_same_name_are_rejected(path: str, tool: dict[str, Any], param: str) -> None:
    parse, least = PARSERS[path]
    assert parse(least | {"tools": [tool]}).options.tools
    with pytest.raises(ApiError) as caught:
        parse(least | {"tools": [tool, tool]})
    assert caught.value.param == param and param.replace("1", "0", 1) in caught.value.message


def test_top_level_enable_thinking_must_agree_with_template_kwargs() -> None:
    assert not parse_chat_request({"messages": HELLO, "enable_thinking": False}).options.thinking
    both = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(ApiError, match="contradict"):
        parse_chat_request({"messages": HELLO} | both)


def test_every_include_value_of_openai_client_is_accepted() -> None:
    for each in ResponseIncludable.__args__:  # type: ignore[attr-defined]
        asked = parse_response_request({"input": "x", "include": [each]})
        has_effect = asked.options.top_logprobs is not None or each == "file_search_call.results"
        assert bool(asked.hints) != has_effect


BROKEN = ["", "{", '{"a": 1', "not JSON", "[1]"]


@pytest.mark.parametrize("arguments", [*BROKEN, None])
def test_invalid_tool_call_arguments_in_history_are_accepted(arguments: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    assert parse_chat_request({"messages": history}).messages[1].tool_calls[0].arguments == (arguments or "")
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
    ]
    asked = parse_message_request({"messages": turns, "max_tokens": 50})
    assert asked.messages[1].tool_calls[0].arguments == (arguments or "")


@pytest.mark.parametrize("id", ["", "x" * 1108])
def test_ids_of_other_servers_may_be_empty_or_long(id: str) -> None:
    """Gateways put the state of their models in ids."""
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": id, "content": "x"}]
    assert parse_chat_request({"messages": turns}).messages[1].tool_calls[0].id == id
    own = {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "f", "arguments": {}}}]}
    assert parse_ollama_chat({"messages": [*HELLO, own, {"role": "tool", "tool_call_id": id, "content": "x"}]})
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id}]},
    ]
    assert parse_message_request({"messages": [*HELLO, *blocks], "max_tokens": 5}).messages[2].tool_call_id == id
    items = [
        *HELLO,
        {"type": "reasoning", "id": id, "summary": []},
        {"type": "message", "id": id, "role": "assistant", "content": "x"},
        {"type": "function_call", "id": id, "call_id": id, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "id": id, "call_id": id, "output": "x"},
    ]
    assert parse_response_request({"input": items}).messages[-1].tool_call_id == id


def test_answers_of_other_servers_are_accepted_as_history() -> None:
    spoken = {"role": "assistant", "content": None, "refusal": "I must not.", "reasoning": "Hm", "tool_calls": []}
    answer = parse_chat_request({"messages": [*HELLO, spoken, *HELLO]}).messages[1]
    assert (answer.content, answer.reasoning_content) == ("I must not.", "Hm")
    blocks = [
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ]
    turns = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
    asked = parse_message_request({"messages": turns, "max_tokens": 50})
    assert len(asked.messages[1].tool_calls) == 1 and not asked.hints and not asked.messages[1].reasoning_content


@pytest.mark.parametrize(
    ("path", "bad", "param"),
    [
        ("/v1/chat/completions", {"role": "user", "content": 5}, "messages.3.content"),
        ("/v1/chat/completions", {"role": "user"}, "messages.3.content"),
        ("/v1/chat/completions", {"role": "assistant", "tool_calls": [CALL, {}]}, "messages.3.tool_calls.1.function"),
        ("/v1/chat/completions", {"role": "assistant", "audio": 5, "refusal": 5}, "messages.3.refusal"),
        ("/v1/messages", {"role": "user", "content": [{"type": "text", "text": 1}]}, "messages.3.content.0.text"),
        (
            "/v1/messages",
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 5}]},
            "messages.3.content.0.input",
        ),
        ("/v1/messages", {"role": "user"}, "messages.3.content"),
        ("/api/chat", {"role": "user", "content": 5}, "messages.3.content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_validation_error_names_message_index(path: str, bad: dict[str, Any], param: str) -> None:
    parse, least = PARSERS[path]
    with pytest.raises(ApiError) as caught:
        parse(least | {"messages": [*HELLO, {"role": "assistant", "content": "x"}, *HELLO, bad]})
    assert caught.value.param == param and caught.value.message.startswith(param)


# Over HTTP


def openai_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def anthropic_of(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)


def ask_chat(server: Any, **fields: Any) -> Any:
    completions = openai_of(server).chat.completions.with_raw_response
    return completions.create(model="scripted", messages=[{"role": "user", "content": "Hi", "name": "Ann"}], **fields)


def ask_response(server: Any, **fields: Any) -> Any:
    responses = openai_of(server).responses.with_raw_response
    return responses.create(
        model="scripted", input="Hi", reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"], **fields
    )


def ask_message(server: Any, **fields: Any) -> Any:
    messages = anthropic_of(server).messages.with_raw_response
    return messages.create(model="scripted", max_tokens=100_000, messages=HELLO, speed="fast", timeout=60, **fields)


CLIENTS = [
    (ask_chat, "messages.name", openai.BadRequestError, "messages.0.name"),
    (ask_response, "include, reasoning.summary", openai.BadRequestError, "include"),
    (ask_message, "speed", anthropic.BadRequestError, "speed"),
]


@pytest.mark.parametrize(("ask", "named", "error", "param"), CLIENTS)
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_named_in_response_header(
    start: Start, ask: Callable[..., Any], named: str, error: type[Exception], param: str, stream: bool
) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So."))).ready()
    answer = ask(server, stream=stream)
    assert answer.status_code == 200
    assert sorted(answer.headers[IGNORED].split(", ")) == sorted(named.split(", "))


@pytest.mark.parametrize(("ask", "named", "error", "param"), CLIENTS)
def test_strict_fields_rejects_ignored_fields(
    start: Start, ask: Callable[..., Any], named: str, error: type[Exception], param: str
) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So.")), strict_fields=True).ready()
    with pytest.raises(error) as caught:
        ask(server)
    body: Any = caught.value.body  # type: ignore[attr-defined]
    told = body.get("error", body)
    assert (told["code"], told["param"]) == ("unsupported_parameter", param)
    assert param in told["message"] and "remove it" in told["message"]


def test_strict_fields_accepts_default_values_and_caller_metadata(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So.")), strict_fields=True).ready()
    body = {"messages": HELLO, "user": "u", "metadata": {"a": "b"}, "store": False, "odd": None}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers[IGNORED] == "user, metadata"
    for path, fields in (("/v1/chat/completions", {"odd": False}), ("/api/chat", {"truncate": False})):
        answer = server.client.post(path, json={"messages": HELLO} | fields)
        assert answer.status_code == 400 and next(iter(fields)) in answer.text
    answer = server.client.post("/v1/messages/count_tokens", json={"messages": HELLO, "speed": "fast"})
    assert answer.json()["error"]["param"] == "speed"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a{}b😀"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a{}b😀"}], "max_tokens": 20}),
        ("/v1/responses", {"input": "a{}b😀"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a{}b😀"}]}),
    ],
)
@pytest.mark.parametrize("escape", [r"\u0000", r"\ud83d", r"\ude00"])
def test_nul_and_lone_surrogates_are_replaced_and_reported(
    start: Start, path: str, body: dict[str, Any], escape: str
) -> None:
    """Agents send such results of tools again with every later request, so an error would end their session."""
    engine = ScriptedEngine(lambda messages, thinking: say("So."))
    server = start(engine).ready()
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=json.dumps(body).replace("{}", escape), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "invalid characters"
    assert engine.requests[-1].messages[-1].content == "a\N{REPLACEMENT CHARACTER}b😀"
    answer = server.client.post(path, content=json.dumps({"{}": 1}).replace("{}", escape), headers=headers)
    assert answer.status_code == 400 and "lone surrogate" in answer.text
    answer = server.client.post(
        "/tokenize", content=json.dumps({"content": "{}"}).replace("{}", escape), headers=headers
    )
    assert answer.status_code == 400 and "lone surrogate" in answer.text, "its response cannot name the replacement"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_strict_fields_refuses_invalid_characters(start: Start, path: str) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So.")), strict_fields=True).ready()
    body = json.dumps({"messages": [{"role": "user", "content": "a{}b"}]})
    headers = {"content-type": "application/json"}
    assert server.client.post(path, content=body, headers=headers).status_code == 200
    answer = server.client.post(path, content=body.replace("{}", r"\ud83d"), headers=headers)
    assert answer.status_code == 400 and "lone surrogate" in answer.text


@pytest.mark.parametrize("piece", range(1, 13))
@pytest.mark.parametrize(("escape", "fit"), [(r"\u0000", "\ufffd"), (r"\ud83d", "\ufffd"), (r"\ud83d\ude00", "😀")])
def test_text_is_repaired_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, piece: int, escape: str, fit: str
) -> None:
    monkeypatch.setattr(request_fields, "_PIECE", piece)
    body = json.dumps({"a": ["b{}c😀", "{}"]}).replace("{}", escape).encode()
    assert parse_repaired(body) == ({"a": [f"b{fit}c😀", fit]}, "\ufffd" in fit)


def test_count_tokens_reports_ignored_fields(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    answer = server.client.post("/v1/messages/count_tokens", json={"messages": HELLO, "speed": "fast"})
    assert answer.status_code == 200 and answer.headers[IGNORED] == "speed"


OTHER_ENDPOINTS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"content": "one"}, "odd"),
    ("/tokenize", {"messages": [{"role": "user", "content": "one", "name": "Ann"}]}, "odd, messages.name"),
    ("/detokenize", {"tokens": [1]}, "odd"),
    ("/v1/embeddings", {"input": "one", "task": "retrieval"}, "task, odd"),
    ("/v1/vector_stores", {"name": "Birds"}, "odd"),
    ("/v1/responses/input_tokens", {"input": "one", "temperature": "hot", "store": False}, "temperature, store, odd"),
    ("/v1/responses/input_tokens", {"input": "one", "background": True, "store": False}, "background, store, odd"),
    ("/api/show", {"model": "scripted"}, "odd"),
    ("/api/pull", {"model": "scripted", "stream": False}, "odd"),
]


@pytest.mark.parametrize(("path", "body", "named"), OTHER_ENDPOINTS)
def test_other_endpoints_name_ignored_fields(shared: Any, path: str, body: dict[str, Any], named: str) -> None:
    answer = shared.client.post(path, json=body | {"odd": 1})
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[IGNORED].split(", ")) == sorted(named.split(", "))


def test_ignored_field_is_named_after_other_items_of_a_list(shared: Any) -> None:
    body = {"prompt": ["one", {"prompt_string": "two", "odd": 1}], "n_predict": 1}
    answer = shared.client.post("/completion", json=body)
    assert answer.status_code == 200 and answer.headers[IGNORED] == "prompt.odd", answer.text


CALLER: dict[str, Any] = {"user": "u", "safety_identifier": "s", "client_metadata": {"a": 1}, "metadata": {"a": 1}}


@pytest.mark.parametrize("strict", [False, True])
def test_token_count_accepts_fields_that_describe_the_caller(start: Start, strict: bool) -> None:
    server = start(ScriptedEngine(), strict_fields=strict).ready()
    answer = server.client.post("/v1/responses/input_tokens", json={"input": "one"} | CALLER)
    assert answer.status_code == 200 and answer.headers[IGNORED] == ", ".join(CALLER), answer.text


def test_token_count_refuses_stored_prompts(shared: Any) -> None:
    answer = shared.client.post("/v1/responses/input_tokens", json={"input": "one", "prompt": {"id": "pmpt_1"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("item", [1, 0.5, "a", [], [1]])
def test_search_for_ignored_fields_skips_items_that_are_not_objects(monkeypatch: pytest.MonkeyPatch, item: Any) -> None:
    searched: list[object] = []
    search = request_fields._hints
    monkeypatch.setattr(request_fields, "_hints", lambda value, raw: searched.append(raw) or search(value, raw))
    part = {"type": "output_text", "text": "one", "logprobs": [item] * 100}
    parse_response_request({"input": [{"type": "message", "role": "assistant", "content": [part]}]})
    assert len(searched) < 20


def test_strict_fields_applies_to_other_endpoints(start: Start) -> None:
    server = start(ScriptedEngine(), strict_fields=True).ready()
    for path, body, named in OTHER_ENDPOINTS:
        answer = server.client.post(path, json=body | {"odd": 1})
        assert answer.status_code == 400 and any(name in answer.text for name in named.split(", ")), (path, answer.text)
    form = {"files": {"file": ("a.txt", "x")}, "data": {"purpose": "user_data", "odd": "1"}}
    assert server.client.post("/v1/files", **form).json()["error"]["param"] == "odd"
    assert not server.client.get("/v1/files").json()["data"]


def test_strict_fields_is_off_by_default() -> None:
    assert not Settings().strict_fields
