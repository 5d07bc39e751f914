"""Ollama's API, through its client (if installed) with the demo model and through plain HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError, Event, LocalModel, Message, ModelInfo, ToolCall
from notso.web.api.ollama.routes import _installed_entry, resolve_ollama_name
from notso.web.api.shared.listing import modified_ns
from notso.web.engine.models import InstalledModel

Start = Callable[..., Any]
CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 24}
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("ollama"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


@pytest.fixture
def client(served: Any) -> Any:
    """Return Ollama's own client."""
    ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed: pip install ollama")
    return ollama.Client(host=served.address)


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.content.split(b"\n") if line]


def tricky(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say('one\n{"done": true}\r\n\u2028\x85two \u00e9\U0001f600\n', "let me\nsee", piece=3)


def test_ollama_client_gets_chat_and_generate_answers(client: Any) -> None:
    whole = client.chat(model="notso-demo", messages=HELLO, options=GREEDY)
    assert whole.done and whole.done_reason in ("stop", "length") and whole.message.role == "assistant"
    assert 0 < whole.eval_count <= 24 and whole.prompt_eval_count > 0 and whole.eval_duration > 0
    chunks = list(client.chat(model="notso-demo", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == (whole.message.thinking or "")
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    single = client.generate(model="notso-demo", prompt="Hello", options=GREEDY)
    assert (single.response, single.thinking) == (whole.message.content, whole.message.thinking)


def test_format_schema_constrains_answer(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    options = {"temperature": 0, "num_predict": 200}
    answer = client.chat(model="notso-demo", messages=HELLO, format=schema, think=False, options=options)
    assert answer.done_reason == "length" or isinstance(json.loads(answer.message.content)["n"], int)


def test_ollama_client_lists_and_shows_models(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == "notso-demo:latest" and listed.size > 0 and len(listed.digest) == 64
    shown = client.show("notso-demo")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.modelinfo["smollm3.context_length"] > 0
    (loaded,) = client.ps().models
    assert loaded.model == listed.model and loaded.context_length == shown.modelinfo["smollm3.context_length"]


def test_ollama_client_raises_response_errors(client: Any) -> None:
    ollama = pytest.importorskip("ollama")
    with pytest.raises(ollama.ResponseError) as refused:
        client.pull("llama3.2")
    assert refused.value.status_code == 400 and "not" in refused.value.error
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat(model="llama3.2", messages=HELLO)
    assert unknown.value.status_code == 404


def test_installed_model_is_pulled_without_a_download(shared: Any) -> None:
    # `codex --oss -m NAME` pulls a model that is listed as NAME:latest.
    listed = shared.client.get("/api/tags").json()["models"][0]["name"]
    for name in (listed, listed.removesuffix(":latest")):
        assert lines_of(shared.client.post("/api/pull", json={"name": name})) == [{"status": "success"}]
        whole = shared.client.post("/api/pull", json={"model": name, "stream": False})
        assert whole.json() == {"status": "success"}
    refused = shared.client.post("/api/pull", json={"name": "llama3.2", "stream": True})
    assert refused.status_code == 400 and "notso pull" in refused.json()["error"]
    assert shared.client.post("/api/pull", json={}).json() == {"error": "model is required"}


def test_model_name_accepts_latest_tag_in_any_case(shared: Any) -> None:
    listed = shared.client.get("/api/tags").json()["models"][0]["name"]
    base = listed.removesuffix(":latest")
    assert base != listed
    for spelling in (base, listed, listed.upper()):
        assert shared.client.post("/api/show", json={"model": spelling}).status_code == 200, spelling
    assert shared.client.post("/api/show", json={"model": f"{base}:7b"}).status_code == 404


def test_go_client_shows_models(shared: Any) -> None:
    # It sends all fields, also the older `name`, even if they are empty.
    listed = shared.client.get("/api/tags").json()["models"][0]["name"]
    empty = {"model": "", "system": "", "template": "", "verbose": False, "options": None, "name": ""}
    shown = shared.client.post("/api/show", json=empty | {"model": listed})
    assert shown.status_code == 200 and "x-notso-ignored" not in shown.headers
    assert shared.client.post("/api/show", json=empty | {"name": listed}).status_code == 200
    refused = shared.client.post("/api/show", json=empty)
    assert (refused.status_code, refused.json()) == (400, {"error": "model is required"})


def test_reported_version_has_the_responses_and_messages_apis(shared: Any) -> None:
    # `codex --oss` stops at versions before 0.13.4; the Messages API began with 0.14.
    reported = shared.client.get("/api/version").json()["version"]
    assert tuple(map(int, reported.split("."))) >= (0, 14, 2)
    for url in ("/v1/responses", "/v1/messages"):
        assert shared.client.get(url).status_code == 405


def test_ollama_library_names_map_to_smollm3() -> None:
    info = ModelInfo("SmolLM3-3B", "", False, 1, 1, 4096)
    for name in ("smollm3", "smollm3:latest", "SmolLM3:3b", "smollm3-3b:latest"):
        assert resolve_ollama_name(name, info) == "smollm3-3b", name
    for name in ("smollm3:7b", "llama3.2:latest"):
        assert resolve_ollama_name(name, info) == name


def test_streamed_lines_match_whole_answer(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    expected = "".join(event.text for event in tricky([], True) if event.kind == "text")
    for url, ask in ((CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "Hello"})):
        answer = server.client.post(url, json=ask)
        assert len(answer.text.splitlines()) == answer.text.count("\n"), "clients could split a line at this character"
        lines = lines_of(answer)
        said = [line.get("message", line) for line in lines]
        key = "content" if url == CHAT else "response"
        assert "".join(each[key] for each in said) == expected
        assert "".join(each.get("thinking", "") for each in said) == "let me\nsee"
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1].keys() >= COUNTS and lines[-1]["done_reason"] == "stop"
        whole = server.client.post(url, json=ask | {"stream": False}).json()
        told = whole.get("message", whole)
        assert (told[key], told["thinking"]) == (expected, "let me\nsee") and whole.keys() >= COUNTS


def test_tool_call_arguments_are_json_objects(start: Start) -> None:
    heard: list[Sequence[Message]] = []

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        heard.append(messages)
        return [Event("tool_call", tool_call=ToolCall("call_a", "weather", '{"city": "Oslo"}'))]

    engine = ScriptedEngine(script)
    server = start(engine).ready()
    asked = {"messages": HELLO, "tools": [WEATHER | {"type": None}], "think": False}
    called = {"id": "call_a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}
    lines = lines_of(server.client.post(CHAT, json=asked))
    assert [line["message"].get("tool_calls") for line in lines] == [[called], None]
    whole = server.client.post(CHAT, json=asked | {"stream": False}).json()
    assert whole["message"]["tool_calls"] == [called] and whole["done_reason"] == "stop"
    history = [*HELLO, whole["message"], {"role": "tool", "tool_name": "weather", "content": "12 C"}]
    assert server.client.post(CHAT, json=asked | {"messages": history}).status_code == 200
    assert engine.requests[-1].options.tools == (WEATHER,)
    _, past, result = heard[-1]
    assert past.tool_calls == (ToolCall("call_a", "weather", '{"city": "Oslo"}'),)
    assert (result.role, result.content) == ("tool", "12 C")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_with_lone_surrogate_and_huge_number_is_returned(start: Start, stream: bool) -> None:
    call = ToolCall("call_a", "weather", r'{"city": "Oslo \ud83d", "days": 1e999}')
    server = start(ScriptedEngine(lambda messages, thinking: [Event("tool_call", tool_call=call)])).ready()
    answer = server.client.post(CHAT, json={"messages": HELLO, "tools": [WEATHER], "stream": stream})
    assert answer.status_code == 200, answer.text
    (told,) = json.loads(answer.text.splitlines()[0])["message"]["tool_calls"]
    assert told["function"]["arguments"] == {"city": "Oslo \ufffd", "days": sys.float_info.max}


def test_tool_call_that_is_cut_off_is_left_out(start: Start) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        begun = ToolCall("call_a", "weather", "")
        return [*say("Let me see."), Event("tool_call_part", '{"city": "Os', begun_call=begun)]

    server = start(ScriptedEngine(script)).ready()
    asked = {"messages": HELLO, "tools": [WEATHER], "think": False}
    whole = server.client.post(CHAT, json=asked | {"stream": False})
    assert whole.status_code == 200, whole.text
    assert whole.json()["message"] == {"role": "assistant", "content": "Let me see."}
    lines = lines_of(server.client.post(CHAT, json=asked))
    assert "".join(line["message"]["content"] for line in lines) == "Let me see."
    assert not any("tool_calls" in line["message"] for line in lines)


@pytest.mark.parametrize(("think", "thinks"), [(None, True), (True, True), (False, False), ("low", True)])
def test_think_field_controls_thinking(start: Start, think: Any, thinks: bool) -> None:
    heard: list[bool] = []

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        heard.append(thinking)
        return say("x")

    server = start(ScriptedEngine(script)).ready()
    assert server.client.post(CHAT, json={"messages": HELLO, "think": think, "stream": False}).status_code == 200
    assert heard == [thinks]


def test_ignored_fields_are_named_in_response_header(shared: Any) -> None:
    asked = {"messages": HELLO, "keep_alive": "5m", "options": {"num_ctx": 8192, "num_gpu": 99, "top_k": 40.0}}
    for stream in (True, False):
        answer = shared.client.post(CHAT, json=asked | {"stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-notso-ignored"] == "options.num_ctx, options.num_gpu"
    assert "x-notso-ignored" not in shared.client.post(CHAT, json={"messages": HELLO}).headers


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"mirostat": 2}}, "options.mirostat"),
    ({"options": {"typical_p": 0}}, "options.typical_p"),
    ({"options": {"temperature": 9}}, "options.temperature"),
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ({"options": {"top_k": 40.5}}, "options.top_k"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ({"think": "hard"}, "think"),
    ({"format": "xml"}, 'format: it should be "json" or a JSON schema'),
    ({"format": ["json"]}, 'format: it should be "json" or a JSON schema'),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "role"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_chat_request_error_names_field(shared: Any, body: dict[str, Any], named: str) -> None:
    answer = shared.client.post(CHAT, json={"messages": HELLO} | body)
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    assert named in answer.json()["error"], answer.json()


GENERATE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"context": [1, 2]}, "context"),
    ({"raw": True, "system": "x"}, "system"),
    ({"images": ["aGk="]}, "images"),
]


@pytest.mark.parametrize(("body", "named"), GENERATE_REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_generate_request_error_names_field(shared: Any, body: dict[str, Any], named: str) -> None:
    answer = shared.client.post(GENERATE, json={"prompt": "x"} | body)
    assert answer.status_code == 400 and named in answer.json()["error"], answer.json()


def test_format_applies_to_a_raw_prompt(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 60}
    answer = client.generate(model="notso-demo", prompt="7 is", raw=True, format=schema, options=options)
    assert json.loads(answer.response) == {"n": 7} and answer.prompt_eval_count < 10, "there is no template"


@pytest.mark.parametrize("think", [True, False, "low"])
def test_thinking_has_no_effect_on_a_raw_prompt(shared: Any, think: Any) -> None:
    ask = {"prompt": "7 is", "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 9}}
    plain, answer = shared.client.post(GENERATE, json=ask), shared.client.post(GENERATE, json=ask | {"think": think})
    assert answer.status_code == 200 and answer.json()["response"] == plain.json()["response"] != ""
    assert answer.json()["prompt_eval_count"] == plain.json()["prompt_eval_count"]
    assert answer.headers.get("x-notso-ignored") == ("think" if think else None)


@pytest.mark.parametrize("url", [CHAT, GENERATE])
def test_empty_request_reports_loaded_model(shared: Any, url: str) -> None:
    answer = shared.client.post(url, json={"keep_alive": -1}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert shared.client.post(url, json={"model": "other"}).status_code == 404


def test_head_requests_are_answered_without_body(shared: Any) -> None:
    for url in ("/", "/api/version", "/api/tags"):
        answer = shared.client.head(url)
        assert answer.status_code == 200 and not answer.content, url
    assert "text/html" in shared.client.get("/").headers["content-type"]


def test_json_body_is_accepted_with_form_content_type(shared: Any) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = shared.client.post(CHAT, content=json.dumps({"messages": HELLO, "stream": False}), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("think", ["minimal", "", 3, {"type": "enabled"}])
def test_error_for_think_names_all_values(shared: Any, think: Any) -> None:
    ask = {"messages": HELLO, "think": think}
    told = shared.client.post(CHAT, json=ask).json()["error"]
    assert told == "this value of think is not supported: use true, false, low, medium, high or max"
    error = shared.client.post("/v1/chat/completions", json=ask | {"think": "fast"}).json()["error"]
    assert error["param"] == "think" and "xhigh" in error["message"]


def test_errors_use_ollama_format(shared: Any) -> None:
    for method, url, status in (("GET", "/api/nothing", 404), ("GET", CHAT, 405), ("POST", "/api/pull", 400)):
        answer = shared.client.request(method, url)
        assert answer.status_code == status
        assert isinstance(answer.json()["error"], str), url
    answer = shared.client.post(CHAT, json={"messages": HELLO}, headers={"X-Conversation-Id": "a"})
    assert answer.status_code == 400


def test_engine_failure_is_last_line_of_stream(start: Start) -> None:
    server = start(ScriptedEngine(tricky, failure=EngineError("a logit was not finite"))).ready()
    lines = lines_of(server.client.post(CHAT, json={"messages": HELLO}))
    assert lines[-1] == {"error": "a logit was not finite"} and not any(line.get("done") for line in lines[:-1])


def test_logprobs_are_returned_whole_and_streamed(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("Hello you", piece=3))).ready()
    asked = {"messages": HELLO, "think": False, "logprobs": True, "top_logprobs": 2}
    whole = server.client.post(CHAT, json=asked | {"stream": False}).json()["logprobs"]
    assert [each["token"] for each in whole] == ["Hel", "lo ", "you"]
    assert [len(each["top_logprobs"]) for each in whole] == [2] * 3
    lines = lines_of(server.client.post(CHAT, json=asked))
    assert [each for line in lines for each in line.get("logprobs", ())] == whole


@pytest.mark.parametrize("path", ["/absent", "a" * 300])
def test_date_of_an_unreadable_model_file_is_1970(path: str) -> None:
    assert modified_ns(path) == modified_ns(Path(path)) == 0
    removed = LocalModel("Other", Path(path), 5, "Q4_K_M", "folder", "no")
    entry = _installed_entry(InstalledModel("key", removed, in_use=False))
    assert entry["modified_at"].startswith("1970-01-01") and entry["size"] == 5


@pytest.mark.parametrize(("quantization", "shown"), [("Q4_K_M", "Q4_K_M"), ("", "unknown")])
def test_installed_models_have_all_details_before_loading(quantization: str, shown: str) -> None:
    # Strictly typed clients show no models at all if one of them lacks a field.
    model = LocalModel("Other", Path("/absent"), 5, quantization, "folder", "no")
    details = _installed_entry(InstalledModel("key", model, in_use=False))["details"]
    assert (details["parameter_size"], details["quantization_level"]) == ("", shown)
