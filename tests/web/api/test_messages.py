"""The Anthropic API, through Anthropic's client and through plain HTTP."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import ContextLengthError, Engine, EngineError, Event, Message, ToolCall, ToolName
from notso.web.edge.limits import MAX_REQUEST_BYTES

Start = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
KEY = "correct horse battery staple"
URL = "/v1/messages"
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SHORT: dict[str, Any] = {"max_tokens": 60, "messages": HELLO}
TEXT = 'one\n\ndata: {"forged": true}\r\nevent: message_stop\u2028\x85two \u00e9\U0001f600\n\n'


def client_of(server: Any, key: str = "none", **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key=key, **({"max_retries": 0} | options))


def tricky(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say(TEXT, "Hm, \n\nlet me see." if thinking else "", piece=3)


def calls(messages: Sequence[Message], thinking: bool) -> list[Event]:
    first, second = ToolCall("call_1", "add", '{"a": [1, "\u00e9"]}'), ToolCall("call_2", "sub", "{}")
    return [*say("Let me see."), Event("tool_call", tool_call=first), Event("tool_call", tool_call=second)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("anthropic"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


# Anthropic's client with the real engine


def test_anthropic_client_gets_message(served: Any) -> None:
    message = client_of(served).messages.create(
        model="notso-demo", max_tokens=60, system="Be kind.", messages=HELLO, extra_body={"temperature": 0}
    )
    (block,) = message.content
    assert block.type == "text" and block.text and "<think>" not in block.text
    assert message.stop_reason == "end_turn" and message.role == "assistant" and message.id.startswith("msg_")
    assert message.usage.input_tokens > 10 and 0 < message.usage.output_tokens <= 60
    assert message._request_id and message._request_id.startswith("req_")


def test_thinking_is_returned_as_separate_block(served: Any) -> None:
    message = client_of(served).messages.create(
        model="notso-demo", max_tokens=300, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 40}
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought = message.content[0]
    assert thought.type == "thinking" and thought.thinking
    details = message.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < message.usage.output_tokens


def test_stream_matches_whole_message(served: Any) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "max_tokens": 200, "messages": HELLO}
    ask |= {"thinking": {"type": "adaptive"}, "extra_body": {"temperature": 0}}
    whole = client_of(served).messages.create(**ask)
    with client_of(served).messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    told, before = streamed.usage, whole.usage
    assert told.input_tokens + (told.cache_read_input_tokens or 0) == before.input_tokens + (
        before.cache_read_input_tokens or 0
    )
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("message_delta") == 1


def test_count_tokens_matches_message_usage(served: Any) -> None:
    client = client_of(served)
    for more in ({}, {"system": "Be kind."}, {"tools": [TOOL]}, {"thinking": {"type": "adaptive"}}):
        counted = client.messages.count_tokens(model="notso-demo", messages=HELLO, **more)
        message = client.messages.create(model="notso-demo", max_tokens=1, messages=HELLO, **more)
        used = message.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_trailing_assistant_message_is_continued(served: Any) -> None:
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "Hello! How can"}]
    greedy = {"temperature": 0}
    message = client_of(served).messages.create(model="notso-demo", max_tokens=20, messages=begun, extra_body=greedy)
    assert message.content[0].type == "text" and message.content[0].text.startswith(" I help")


def test_max_tokens_ends_message(served: Any) -> None:
    message = client_of(served).messages.create(model="notso-demo", max_tokens=3, messages=HELLO)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3


def test_stop_sequence_within_call_is_reported_instead_of_tool_use(served: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tool: Any = {"name": "calculator", "input_schema": schema}
    ask: dict[str, Any] = {"model": "notso-demo", "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}}
    ask["messages"] = [{"role": "user", "content": "What is 12 * 34?"}]
    assert client_of(served).messages.create(**ask).stop_reason == "tool_use"
    cut = client_of(served).messages.create(**ask, stop_sequences=["*"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "*")
    with client_of(served).messages.stream(**ask, stop_sequences=["*"]) as stream:
        assert stream.get_final_message().stop_reason == "stop_sequence"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_of_0_fills_prompt_cache(served: Any, stream: bool) -> None:
    client = client_of(served)
    ask: dict[str, Any] = {"model": "notso-demo", "messages": [{"role": "user", "content": f"{stream} " * 300}]}
    if stream:
        with client.messages.stream(**ask, max_tokens=0) as events:
            empty = events.get_final_message()
    else:
        empty = client.messages.create(**ask, max_tokens=0)
    assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
    assert empty.usage.input_tokens + (empty.usage.cache_read_input_tokens or 0) > 300
    assert (client.messages.create(**ask, max_tokens=1).usage.cache_read_input_tokens or 0) > 290


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_ends_message_and_is_reported(served: Any, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "max_tokens": 60, "messages": HELLO, "extra_body": {"temperature": 0}}
    whole = client_of(served).messages.create(**ask)
    assert whole.stop_sequence is None and whole.content[0].type == "text"
    word = whole.content[0].text.split()[2]
    if stream:
        with client_of(served).messages.stream(**ask, stop_sequences=["nowhere", word]) as events:
            cut = events.get_final_message()
    else:
        cut = client_of(served).messages.create(**ask, stop_sequences=["nowhere", word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].type == "text" and whole.content[0].text.startswith(cut.content[0].text)
    assert word not in cut.content[0].text


def test_failed_requests_raise_anthropic_client_errors(served: Any) -> None:
    client = client_of(served)
    with pytest.raises(anthropic.BadRequestError) as caught:
        far: Any = [{"role": "user", "content": "word " * 9000}]
        client.messages.create(model="notso-demo", max_tokens=50, messages=far)
    assert "4,096" in caught.value.message and caught.value.body["error"]["code"] == "context_length_exceeded"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-haiku", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="notso-demo", messages=[])


def test_invalid_request_error_names_field(served: Any) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.enabled.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL | {"type": "bash_20250124"}]}, "tools.0.type"),
        ({"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages.0.content.0.type"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ]
    for fields, param in rows:
        answer = served.client.post(URL, json=SHORT | fields)
        body = answer.json()
        error = body["error"]
        assert body["type"] == "error" and error["type"] == "invalid_request_error", fields
        assert answer.status_code == 400, fields
        assert error["param"].replace("thinking.enabled", "thinking") == param.replace("thinking.enabled", "thinking")


# Plain HTTP with a scripted engine


def test_messages_are_converted_to_engine_request(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "\u00e9"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
    ]
    client_of(server).messages.create(
        model="scripted",
        max_tokens=500,
        system=[{"type": "text", "text": "Be kind."}],
        messages=conversation,
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        stop_sequences=["END"],
        extra_body={"top_k": 5},
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    (asked,) = engine.requests
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    system, question, answer, result, failed, last = asked.messages
    assert (system.content, question.content, last.content) == ("Be kind.", "one\ntwo", "And?")
    assert (answer.content, answer.reasoning_content) == ("Let me see.", "Hm")
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [("c1", "add", '{"a": "\u00e9"}')]
    assert (result.content, result.tool_call_id, failed.content) == ("4", "c1", "Error: no")
    assert asked.options.thinking and asked.params.thinking_budget == 256 and asked.params.max_tokens == 500
    assert (asked.params.stop, asked.params.top_k, asked.options.priority) == (("END",), 5, "api")
    assert asked.options.tool_choice == ToolName("add") and not asked.options.parallel_tool_calls
    assert asked.options.tools is not None
    assert asked.options.tools[0]["function"]["parameters"] == {"type": "object"}


def test_blocks_of_other_servers_are_left_out_of_prompt(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    answer: list[Any] = [
        {"type": "compaction", "content": "A greeting.", "encrypted_content": "gAAA", "signature": "x"},
        {"type": "compaction", "content": None},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "storks"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [{"type": "web_search_result", "url": "https://example.org", "encrypted_content": "gAAA"}],
        },
        {"type": "text", "text": "It is cold."},
    ]
    upload = {"type": "container_upload", "file_id": "file_1"}
    question = {"role": "user", "content": [{"type": "text", "text": "Is it cold?"}, upload]}
    conversation = [*HELLO, {"role": "assistant", "content": answer}, question]
    for path in (URL, f"{URL}/count_tokens"):
        asked = {"messages": conversation} | ({"max_tokens": 60} if path == URL else {})
        response = server.client.post(path, json=asked)
        assert response.status_code == 200
        assert response.headers["x-notso-ignored"] == "server_tool_use, web_search_tool_result, container_upload"
    assert engine.requests[0].messages[1:] == (
        Message("assistant", "A greeting.\nIt is cold."),
        Message("user", "Is it cold?"),
    )
    refused = server.client.post(URL, json=SHORT | {"messages": [{"role": "user", "content": answer[2:3]}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0.type")


def test_strict_fields_refuses_blocks_of_other_servers(start: Start) -> None:
    server = start(ScriptedEngine(), strict_fields=True).ready()
    use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, use]}
    refused = server.client.post(URL, json=SHORT | {"messages": [*HELLO, answer, *HELLO]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.1.content.1")


def test_generated_text_cannot_forge_sse_events(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    ask: dict[str, Any] = SHORT | {"model": "scripted", "thinking": {"type": "adaptive"}}
    with client_of(server).messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
    answer = server.client.post(URL, json=ask | {"stream": True})
    names = re.findall(r"^event: (.*)$", answer.text, re.MULTILINE)
    assert names.count("message_stop") == 1 and names[-1] == "message_stop"
    assert set(names) <= {f"content_block_{step}" for step in ("start", "delta", "stop")} | {
        *("message_start", "message_delta", "message_stop")
    }
    for name, data in re.findall(r"^event: (.*)\ndata: (.*)$", answer.text, re.MULTILINE):
        assert json.loads(data)["type"] == name


def test_omitted_thinking_display_hides_thinking_text(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    ask: dict[str, Any] = SHORT | {"thinking": {"type": "adaptive", "display": "omitted"}}
    blocks = server.client.post(URL, json=ask).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"] and blocks[0]["thinking"] == ""
    assert "let me see" not in server.client.post(URL, json=ask | {"stream": True}).text


def test_tool_calls_are_returned_whole_and_streamed(start: Start) -> None:
    server = start(ScriptedEngine(calls)).ready()
    ask: dict[str, Any] = SHORT | {"model": "scripted", "tools": [TOOL]}
    whole = client_of(server).messages.create(**ask)
    with client_of(server).messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        first, second = message.content[1:]
        assert first.type == "tool_use" and (first.id, first.name, first.input) == (
            "call_1",
            "add",
            {"a": [1, "\u00e9"]},
        )
        assert second.type == "tool_use" and second.input == {}


def test_tool_call_with_lone_surrogate_and_huge_number_is_returned(start: Start) -> None:
    call = ToolCall("call_1", "add", r'{"a": "\ud83d", "b": [-1e999], "c": "\ud83d\ude00"}')
    server = start(ScriptedEngine(lambda messages, thinking: [Event("tool_call", tool_call=call)])).ready()
    answer = server.client.post(URL, json=SHORT | {"tools": [TOOL]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["input"] == {"a": "\ufffd", "b": [-sys.float_info.max], "c": "\U0001f600"}


def test_engine_failure_ends_stream_with_one_error(start: Start) -> None:
    server = start(ScriptedEngine(tricky, failure=EngineError("a logit was not finite"))).ready()
    text = server.client.post(URL, json=SHORT | {"stream": True}).text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert names[-1] == "error" and names.count("error") == 1 and "message_stop" not in names
    assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError), client_of(server).messages.stream(**SHORT | {"model": "x"}) as stream:
        list(stream)
    answer = server.client.post(URL, json=SHORT)
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "a logit was not finite"


def test_errors_use_anthropic_format(start: Start) -> None:
    server = start(ScriptedEngine(refusal=ContextLengthError(9120, 8192)), api_key=KEY).ready()
    held = {"x-api-key": KEY}
    plain = held | {"Content-Type": "application/json"}
    post = server.client.post
    rows = [
        (post(URL, json=SHORT), 401, "authentication_error"),
        (post(URL, json=SHORT, headers=held), 400, "invalid_request_error"),
        (post(URL, headers=plain, content=b"{"), 400, "invalid_request_error"),
        (post(URL, headers=held, content=b"{}"), 415, "invalid_request_error"),
        (post(URL, headers=plain, content=b" " * MAX_REQUEST_BYTES + b"{}"), 413, "request_too_large"),
        (post(URL, headers=plain | {"Origin": "http://evil.example"}, content=b"{}"), 403, "permission_error"),
        (server.client.get(URL, headers=held), 405, "invalid_request_error"),
        (post(f"{URL}/batches", headers=held), 404, "not_found_error"),
    ]
    for answer, status, kind in rows:
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), answer.text
        assert body["error"]["message"] and answer.headers["request-id"].startswith("req_")
    with pytest.raises(anthropic.AuthenticationError):
        client_of(server, "wrong").messages.create(model="x", **SHORT)


def test_disconnect_stops_message_unless_conversation_is_named(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 20_000, piece=5), pace_seconds=0.02)
    server = start(engine).ready()
    for headers, goes_on in (({}, False), ({"X-Conversation-Id": "c1"}, True)):
        with (
            httpx.Client(base_url=server.address, timeout=20) as client,
            client.stream("POST", URL, json=SHORT | {"stream": True}, headers=headers) as answer,
        ):
            for chunk in answer.iter_text():
                if "text_delta" in chunk:
                    break
        if goes_on:
            assert engine.stats().running == 1
            assert server.client.delete("/v1/stream?conv_id=c1").json()["id"].startswith("msg_")
            again = server.client.get("/v1/stream?conv_id=c1").text
            assert again.startswith("id: 0\nevent: message_start\n") and again.count("event: message_stop") == 1
        server.wait(lambda: engine.stats().running == 0)


def test_thread_field_is_rejected_with_anthropic_error_code(start: Start) -> None:
    engine = ScriptedEngine(calls)
    server = start(engine).ready()
    answer = server.client.post(URL, json=SHORT | {"thread": {"type": "create"}, "temperature": 9})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert server.client.post(URL, json=SHORT | {"thread": None}).status_code == 200
    assert "details" not in server.client.post(URL, json=SHORT | {"temperature": 9}).json()["error"]


def test_eager_input_streaming_is_reported_as_ignored(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    for path, body in ((URL, SHORT), (f"{URL}/count_tokens", {"messages": HELLO})):
        for is_eager, ignored in ((True, "tools.eager_input_streaming"), (False, None), (None, None)):
            answer = server.client.post(path, json=body | {"tools": [TOOL | {"eager_input_streaming": is_eager}]})
            assert (answer.status_code, answer.headers.get("x-notso-ignored")) == (200, ignored), answer.text


def test_message_start_reports_prompt_token_usage(served: Any) -> None:
    client = client_of(served)
    ask: dict[str, Any] = {"model": "notso-demo", "messages": [{"role": "user", "content": "word " * 300}]}
    counted = client.messages.count_tokens(**ask).input_tokens
    for is_known in (False, True):
        with client.messages.stream(**ask, max_tokens=2) as stream:
            begun = next(event.message.usage for event in stream if event.type == "message_start")
            told = stream.get_final_message().usage
        assert (begun.input_tokens, begun.cache_read_input_tokens) == (told.input_tokens, told.cache_read_input_tokens)
        assert begun.input_tokens + (begun.cache_read_input_tokens or 0) == counted
        assert ((begun.cache_read_input_tokens or 0) > 200) == is_known


def test_thinking_is_counted_until_next_user_message(served: Any) -> None:
    client = client_of(served)
    thought: dict[str, Any] = {"type": "thinking", "thinking": "word " * 50, "signature": ""}
    call: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]}

    def counted(blocks: list[Any], *more: Any, kind: str = "adaptive") -> int:
        ask: Any = {"messages": [*HELLO, {"role": "assistant", "content": blocks}, result, *more], "tools": [TOOL]}
        ask |= {"model": "notso-demo", "thinking": {"type": kind}}
        count = client.messages.count_tokens(**ask).input_tokens
        used = client.messages.create(**ask, max_tokens=2).usage
        assert count == used.input_tokens + (used.cache_read_input_tokens or 0)
        return count

    assert counted([thought, call]) >= counted([call]) + 50
    assert counted([thought, call], *HELLO) == counted([call], *HELLO)
    assert counted([thought, call], kind="disabled") == counted([call], kind="disabled")


def test_last_of_64_stop_sequences_ends_message(served: Any) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "max_tokens": 60, "messages": HELLO, "extra_body": {"temperature": 0}}
    word = client_of(served).messages.create(**ask).content[0].text.split()[2]
    stops = [f"nowhere {number}" for number in range(63)]
    assert client_of(served).messages.create(**ask, stop_sequences=[*stops, word]).stop_sequence == word


def test_one_hour_cache_breakpoint_pins_prefix(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("So."))
    client = client_of(start(engine).ready())

    def pinned(system: Any, content: Any, **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": content}]
        client.messages.create(model="scripted", max_tokens=9, system=system, messages=messages, **more)
        return engine.requests[-1].options.prefix

    hour, usual = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "And kind.", "cache_control": hour}]
    first = pinned(system, "Hello")
    assert (first.message, first.characters, first.scope) == (0, len("Be brief.\nAnd kind."), None)
    assert pinned(system, "Other") == first
    assert pinned([system[0], {**system[1], "text": "And rude."}], "Hello").reading != first.reading
    assert pinned("Be brief.", "Hello") is None
    assert pinned([{**system[1], "cache_control": usual}], "Hello") is None
    herons = {"type": "text", "media_type": "text/plain", "data": "Herons eat fish."}
    document = {"type": "document", "source": herons, "citations": {"enabled": True}, "cache_control": hour}
    later = pinned(system, [document, {"type": "text", "text": "What do they eat?"}])
    shown = engine.requests[-1].messages[1].content
    assert later.message == 1 and shown[: later.characters].endswith("--- end of document 1 ---\n")
    assert shown[later.characters :].startswith("\nWhat do they eat?")
    assert pinned(system, [document, {"type": "text", "text": "And drink?"}]) == later
