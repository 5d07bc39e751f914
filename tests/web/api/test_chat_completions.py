"""OpenAI's chat completions, through OpenAI's client and through plain HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import ContextLengthError, Engine, EngineError, Event, Message, Progress, ToolCall
from notso.web.api.shared import serving
from notso.web.api.shared.serializer import PING
from notso.web.app import drain_work as stop_serving
from notso.web.edge.limits import LARGER_BODIES, MAX_FILE_BYTES, MAX_REQUEST_BYTES
from notso.web.engine import running
from notso.web.values.ids import new_id

Start = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
KEY = "correct horse battery staple"
PLAIN = {"Content-Type": "application/json"}


def client_of(server: Any, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, **({"max_retries": 0} | options))


def tricky(messages: Sequence[Message], thinking: bool) -> list[Event]:
    """Text that tries to forge stream events, in pieces that split it at arbitrary positions."""
    answer = 'one\n\ndata: {"forged": true}\r\nevent: error\u2028two \u00e9\U0001f600 [DONE]\n\n'
    return say(answer, "Hm, \n\nlet me see." if thinking else "", piece=3)


def calls(messages: Sequence[Message], thinking: bool) -> list[Event]:
    first, second = ToolCall("call_1", "add", '{"a": 1}'), ToolCall("call_2", "sub", "{}")
    return [
        Event("text", text="Let me see."),
        Event("tool_call", tool_call=first),
        Event("tool_call", tool_call=second),
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("api"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


# OpenAI's client with the real engine


def test_openai_client_gets_model_and_chat_completion(served: Any) -> None:
    client = client_of(served)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "notso-demo" and model.created > 0
    answer = client.chat.completions.create(model=model.id, messages=HELLO, temperature=0, max_tokens=80)
    choice = answer.choices[0]
    assert choice.message.content and choice.finish_reason == "stop" and answer.model == model.id
    assert "<think>" not in choice.message.content and choice.message.reasoning_content  # type: ignore[attr-defined]
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details and answer.usage.completion_tokens_details.reasoning_tokens
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint and answer.created > 1.7e9
    assert answer._request_id and answer._request_id.startswith("req_")


def test_client_of_hugging_face_needs_no_model_name(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say('{"n": 1}'))).ready()
    client = InferenceClient(base_url=server.address, api_key="-")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    messages = [{"role": "user", "content": "Hello"}]
    for model in (None, "tgi"):
        answer = client.chat_completion(messages, model=model, response_format=wanted)
        assert answer.choices[0].message.content == '{"n": 1}'
    streamed = client.chat_completion(messages, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in streamed if each.choices) == '{"n": 1}'


def test_stream_matches_whole_completion(served: Any) -> None:
    client = client_of(served)
    ask: dict[str, Any] = {"model": "notso-demo", "messages": HELLO, "seed": 7, "max_tokens": 60}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    thought = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", "") or "" for chunk in chunks if chunk.choices
    )
    assert text == whole.choices[0].message.content
    assert thought == whole.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1


def test_n_choices_respect_max_tokens_without_reasoning(served: Any) -> None:
    client = client_of(served)
    answer = client.chat.completions.create(
        model="notso-demo", messages=HELLO, n=3, max_tokens=3, reasoning_effort="none", temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert all("reasoning_content" not in (choice.message.model_extra or {}) for choice in answer.choices)
    assert answer.usage and answer.usage.completion_tokens == 9


def test_no_think_in_system_prompt_overrides_reasoning_effort(served: Any) -> None:
    rows = [("Be kind.", "none", "no_think"), ("Be kind.", "low", "think"), ("Be kind. /no_think", "low", "no_think")]
    for system, effort, mode in rows:
        body = {"messages": [{"role": "system", "content": system}, *HELLO], "reasoning_effort": effort, "seed": 1}
        answer = served.client.post("/v1/chat/completions", json=body).json()
        assert answer["timings"]["reasoning_mode"] == mode
        assert ("reasoning_content" in answer["choices"][0]["message"]) == (mode == "think")


def test_trailing_assistant_message_is_continued(served: Any) -> None:
    client = client_of(served)
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "Hello! How can"}]
    answer = client.chat.completions.create(model="notso-demo", messages=begun, temperature=0, max_tokens=20)
    assert (answer.choices[0].message.content or "").startswith(" I help")


def test_rejected_requests_raise_openai_client_errors(served: Any) -> None:
    client = client_of(served)
    for fields, param in (({"temperature": 9}, "temperature"), ({"top_logprobs": 3}, "top_logprobs"), ({"n": 17}, "n")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="notso-demo", messages=HELLO, **fields)  # type: ignore[call-overload]
        assert caught.value.param == param and param in caught.value.message
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="notso-demo", messages=[{"role": "user", "content": "word " * 9000}])
    assert too_long.value.code == "context_length_exceeded" and "4,096" in too_long.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert unknown.value.code == "model_not_found" and "notso-demo" in unknown.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# Plain HTTP with a scripted engine


def stream_lines(server: Any, **fields: Any) -> list[str]:
    body = {"messages": HELLO, "stream": True} | fields
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)


def test_generated_text_cannot_forge_sse_events(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    expected = "".join(event.text for event in tricky([], False))
    lines = stream_lines(server)
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected
    assert not any("forged" in chunk for chunk in chunks)
    whole = server.client.post("/v1/chat/completions", json={"messages": HELLO}).json()
    assert whole["choices"][0]["message"]["content"] == expected
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client_of(server).chat.completions.create(model="scripted", messages=HELLO, stream=True)
    )
    assert text == expected


@pytest.mark.parametrize("form", ["none", "raw"])
def test_reasoning_format_none_puts_thinking_in_content(start: Start, form: str) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    body = {"messages": HELLO, "reasoning_format": form}
    message = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"].startswith("<think>\nHm, \n\nlet me see.\n</think>\none\n\n")
    assert "reasoning_content" not in message
    chunks = [json.loads(line) for line in stream_lines(server, reasoning_format=form)[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == message["content"]


@pytest.mark.parametrize(
    "fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}, {"reasoning_format": "hidden"}]
)
def test_excluded_reasoning_is_left_out_of_response(start: Start, fields: dict[str, Any]) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO} | fields)
    message = answer.json()["choices"][0]["message"]
    assert message["content"].startswith("one\n\n") and "reasoning_content" not in message
    assert "x-notso-ignored" not in answer.headers
    lines = stream_lines(server, **fields)
    assert "let me see" not in "".join(lines)
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_stream_is_kept_alive_while_reasoning_is_left_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PING_SECONDS", 0)  # after each event
    server = start(ScriptedEngine(tricky)).ready()
    asked = {"messages": HELLO, "stream": True, "include_reasoning": False}
    before, _, _ = server.client.post("/v1/chat/completions", json=asked).text.partition('"content":"one')
    assert PING.decode() in before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "one two three", "max_tokens": 1}),
        ("/completion", {"prompt": "one two three", "n_predict": 1}),
        ("/v1/embeddings", {"input": "one two three"}),
    ],
)
def test_prompts_are_refused_instead_of_being_cut(served: Any, path: str, body: dict[str, Any]) -> None:
    for limit, status in ((-1, 200), (1000, 200), (2, 400)):
        answer = served.client.post(path, json=body | {"truncate_prompt_tokens": limit})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["param"] == "truncate_prompt_tokens"
        assert "x-notso-ignored" not in answer.headers


def test_tool_calls_are_returned_whole_and_streamed(start: Start) -> None:
    engine = ScriptedEngine(calls)
    server = start(engine).ready()
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    client = client_of(server)
    answer = client.chat.completions.create(model="scripted", messages=HELLO, tools=[tool])
    (first, second) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and (first.id, second.id) == ("call_1", "call_2")
    assert first.type == "function" and first.function.arguments == '{"a": 1}'
    found: dict[int, str] = {}
    for chunk in client.chat.completions.create(model="scripted", messages=HELLO, tools=[tool], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            found[call.index] = (call.function and call.function.name) or ""
    assert found == {0: "add", 1: "sub"}


def test_call_that_is_cut_off_by_stop_string_is_no_tool_call(start: Start) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        return [Event("tool_call_part", '{"a": ', begun_call=ToolCall("call_1", "add", ""))]

    server = start(ScriptedEngine(script)).ready()
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    client = client_of(server)
    answer = client.chat.completions.create(model="scripted", messages=HELLO, tools=[tool], stop="}")
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(model="scripted", messages=HELLO, tools=[tool], stop="}", stream=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_prompt_progress_is_streamed_only_on_request(start: Start) -> None:
    def reads(messages: Sequence[Message], thinking: bool) -> list[Event]:
        return [Event("progress", progress=Progress(100, 400, 60, 80.0)), Event("text", text="Hi")]

    server = start(ScriptedEngine(reads)).ready()
    chunks = [json.loads(line) for line in stream_lines(server, return_progress=True)[:-1]]
    shown = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert {"total": 400, "cache": 60, "processed": 100, "time_ms": 500} in shown
    assert not any("prompt_progress" in line for line in stream_lines(server))


def test_engine_failure_ends_stream_with_one_error(start: Start) -> None:
    server = start(ScriptedEngine(tricky, failure=EngineError("a logit was not finite"))).ready()
    lines = stream_lines(server)
    assert "[DONE]" not in lines
    assert json.loads(lines[-1])["error"]["code"] == "engine_error"
    assert not any('finish_reason":"' in line for line in lines)
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "a logit was not finite"
    with pytest.raises(openai.APIError):
        list(client_of(server).chat.completions.create(model="scripted", messages=HELLO, stream=True))


def test_context_length_error_is_returned_before_stream_starts(start: Start) -> None:
    server = start(ScriptedEngine(refusal=ContextLengthError(9120, 8192))).ready()
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "9,120" in answer.text and "8,192" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels_generation(start: Start, stream: bool) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 20_000, piece=5), pace_seconds=0.02)
    server = start(engine).ready()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.7) as client:
        body = {"messages": HELLO, "stream": stream}
        with client.stream("POST", f"{server.address}/v1/chat/completions", json=body) as answer:
            for _ in answer.iter_raw():
                if stream:
                    raise httpx.ReadTimeout("left on purpose")
    server.wait(lambda: engine.stats().running == 0 and engine.stats().waiting == 0)
    server.wait(lambda: "notso_request_cancelled_total" in server.client.get("/metrics").text)


def test_full_queue_returns_429_with_retry_after(start: Start) -> None:
    engine = ScriptedEngine(slots=1)
    engine.gate.clear()
    server = start(engine, max_waiting_turns=1).ready()
    waiting = [threading.Thread(target=lambda: stream_lines(server), daemon=True) for _ in range(2)]
    waiting[0].start()
    server.wait(lambda: engine.stats().running == 1)
    waiting[1].start()
    server.wait(lambda: engine.stats().waiting >= 1)
    # must be refused: if it were queued, it would never return
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    engine.gate.set()
    for thread in waiting:
        thread.join(60)


def test_request_being_submitted_counts_toward_queue_limit(start: Start) -> None:
    """A request that is still being submitted counts toward the limit before the engine has seen it."""
    engine, asking, go_on = ScriptedEngine(), threading.Event(), threading.Event()
    server = start(engine, max_waiting_turns=1).ready()
    submit = engine.submit

    def slow(*args: Any, **options: Any) -> Any:
        asking.set()
        assert go_on.wait(60)
        return submit(*args, **options)

    engine.submit = slow  # type: ignore[method-assign]
    first = threading.Thread(target=lambda: stream_lines(server), daemon=True)
    first.start()
    assert asking.wait(60)
    assert server.client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 429
    assert server.client.post("/chats", data={"text": "Hello", "key": new_id()}).status_code == 429
    go_on.set()
    first.join(60)
    assert server.client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 200


def test_loading_model_returns_503_with_retry_after(start: Start) -> None:
    gate = threading.Event()

    def slow() -> ScriptedEngine:
        gate.wait(60)
        return ScriptedEngine()

    server = start(slow)
    assert server.client.get("/v1/models").json() == {"object": "list", "data": []}
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_loading"
    assert answer.headers["retry-after"] == "5"
    gate.set()
    server.ready()
    assert server.client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 200


def test_openai_client_retries_after_retry_after(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine, max_waiting_turns=1).ready()
    # one finished answer, so that the server can estimate how long answers take
    server.client.post("/v1/chat/completions", json={"messages": HELLO})
    real, seen = server.shared.requests.admit, []

    def busy_at_first(*args: Any, **kwargs: Any) -> Any:
        seen.append(time.monotonic())
        return None if len(seen) == 1 else real(*args, **kwargs)

    server.shared.requests.admit = busy_at_first
    answer = client_of(server, max_retries=2).chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content
    assert len(seen) == 2 and seen[1] - seen[0] > 0.9, "the client must not retry before the time in Retry-After"


@pytest.mark.parametrize("name", ["rerank", "reranking", "infill"])
@pytest.mark.parametrize("prefix", ["/v1/", "/"])
def test_unsupported_endpoint_returns_not_supported(served: Any, prefix: str, name: str) -> None:
    answer = served.client.post(prefix + name, json={})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_supported"


def drain_work(server: Any) -> threading.Thread:
    """Begin shutdown as the first SIGTERM does."""
    thread = threading.Thread(target=lambda: server.on_loop(lambda: stop_serving(server.app.state.parts)), daemon=True)
    thread.start()
    server.wait(lambda: server.shared.stopping)
    return thread


def test_shutdown_waits_for_running_stream(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 20, piece=5))
    engine.gate.clear()
    server = start(engine, drain_seconds=60).ready()
    found: list[list[str]] = []
    reading = threading.Thread(target=lambda: found.append(stream_lines(server)), daemon=True)
    reading.start()
    server.wait(lambda: engine.stats().running == 1)
    stopping = drain_work(server)
    refused = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    engine.gate.set()
    reading.join(60)
    stopping.join(60)
    assert not stopping.is_alive() and found[0][-1] == "[DONE]"


def test_shutdown_ends_stream_after_drain_timeout(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 20_000, piece=5), pace_seconds=0.05)
    server = start(engine, drain_seconds=0.3).ready()
    found: list[list[str]] = []
    reading = threading.Thread(target=lambda: found.append(stream_lines(server)), daemon=True)
    reading.start()
    server.wait(lambda: engine.stats().running == 1)
    drain_work(server).join(60)
    reading.join(60)
    assert "[DONE]" not in found[0] and json.loads(found[0][-1])["error"]["code"] == "shutting_down"


def test_large_body_is_not_read_without_a_key(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY).ready()
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{}\r\nConnection: close\r\n\r\n"
    paths = [path for path in LARGER_BODIES if not path.startswith("/engine")]
    for length in (f"Content-Length: {MAX_FILE_BYTES}", "Transfer-Encoding: chunked"):
        for path in paths:
            # The body never comes.
            assert server.raw(head.format(path, length).encode()).split()[1] in (b"401", b"303"), path


@pytest.mark.parametrize("when", ["before", "during"])
def test_request_stopped_before_its_submission_returns_503(
    start: Start, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The server stops all requests when one has its model, or waits for the thread that submits it."""
    server = start(ScriptedEngine()).ready()
    wait, submit = running.RunningRequest.load, running.RunningRequest._submit

    async def stop_after_load(self: running.RunningRequest, *arguments: Any) -> Any:
        engine = await wait(self, *arguments)
        self.stop()
        return engine

    def stop_before_submit(self: running.RunningRequest, *arguments: Any) -> None:
        self.stop()
        submit(self, *arguments)

    if when == "before":
        monkeypatch.setattr(running.RunningRequest, "load", stop_after_load)
    else:
        monkeypatch.setattr(running.RunningRequest, "_submit", stop_before_submit)
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    streamed = server.client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}).text
    assert '"shutting_down"' in streamed and "[DONE]" not in streamed


def test_v1_errors_are_json(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY)
    server.wait(lambda: server.client.get("/health").status_code == 200)
    held = {"Authorization": f"Bearer {KEY}"}
    post, url = server.client.post, "/v1/chat/completions"
    rows = [
        (server.client.get("/v1/models"), 401, "invalid_api_key"),
        (server.client.get("/v1/models", headers={"Accept": "text/html"}), 401, "invalid_api_key"),
        (server.client.get("/v1/nowhere", headers=held), 404, "not_found"),
        (server.client.get(url, headers=held), 405, "method_not_allowed"),
        (post(url, headers=held, content=b"{}"), 415, "unsupported_media_type"),
        (post(url, headers=held | PLAIN, content=b"{"), 400, "invalid_json"),
        (post(url, headers=held | PLAIN, content=b"[1e999]"), 400, "invalid_json"),
        (post(url, headers=held | PLAIN, content=b" " * MAX_REQUEST_BYTES + b"{}"), 413, "request_too_large"),
        (post(url, headers=held | PLAIN | {"Origin": "http://evil.example"}, content=b"{}"), 403, "cross_site"),
        (server.client.get("/v1/models", headers=held | {"Host": "evil.example"}), 421, "unknown_host"),
        (server.client.get("/v1/models", headers=held | {"X-Long": "x" * 17_000}), 431, "request_too_large"),
    ]
    for answer, status, code in rows:
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json", (status, answer.text)
        error = answer.json()["error"]
        assert error["code"] == code and error["message"] and error.keys() == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    assert client_of(server, KEY).models.list().data[0].id == "scripted"
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").models.list()


def test_internal_error_hides_exception_details(start: Start) -> None:
    server = start(ScriptedEngine(refusal=ZeroDivisionError("the prompt was: Hello"))).ready()
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "prompt was" not in answer.text and "Traceback" not in answer.text


def test_requests_share_owner_unless_cache_prompt_is_false(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    for extra in ({}, {}, {"cache_prompt": False}, {"cache_prompt": False}):
        server.client.post("/v1/chat/completions", json={"messages": HELLO} | extra)
    owners = [request.options.owner for request in engine.requests]
    assert owners[0] == owners[1] and len({owners[0], owners[2], owners[3]}) == 3
    assert {request.options.priority for request in engine.requests} == {"api"}


def test_base_url_without_v1_serves_same_api(served: Any) -> None:
    client = openai.OpenAI(base_url=served.address, api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "notso-demo", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    generations = [each.chat.completions.create(**ask).choices[0].message for each in (client, client_of(served))]
    assert generations[0] == generations[1]
    assert client.responses.create(model="notso-demo", input="Hello", max_output_tokens=8, store=False).output


@pytest.mark.parametrize(("method", "url"), [("GET", "/chat/completions"), ("GET", "/v1/none"), ("PUT", "/responses")])
def test_unknown_path_or_method_returns_json_error(served: Any, method: str, url: str) -> None:
    answer = served.client.request(method, url, headers={"Accept": "text/html"})
    assert answer.status_code in (404, 405) and answer.json()["error"]["code"] in ("not_found", "method_not_allowed")
