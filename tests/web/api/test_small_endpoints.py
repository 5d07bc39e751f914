"""Small endpoints for clients of vLLM, SageMaker, llama-server and Anthropic, and some of OpenAI's fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

Start = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(lambda *_: iter(say("Hi", "")))).ready()


def test_vllm_version_load_and_ping_are_served(server: Any) -> None:
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/load").json() == {"server_load": 0}
    for method in ("get", "post"):
        assert getattr(server.client, method)("/ping").json()["status"] == "ok"


def test_version_and_load_require_key_but_ping_does_not(start: Start) -> None:
    server = start(ScriptedEngine, api_key="a key of twenty letters").ready()
    assert [server.client.get(path).status_code for path in ("/version", "/load", "/ping")] == [401, 401, 200]


def test_tokenized_messages_match_rendered_template(server: Any) -> None:
    name = server.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": HELLO, "add_generation_prompt": True, "return_token_strs": True}
    rendered = server.client.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    told = server.client.post("/tokenize", json=body).json()
    assert "".join(told["token_strs"]) == rendered and told["count"] == len(told["tokens"]) > 0
    assert told["max_model_len"] > 0
    assert "token_strs" not in server.client.post("/tokenize", json={"prompt": "a"}).json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"prompt": "a", "messages": HELLO}, "content"),
        ({"content": "a", "prompt": "b"}, "content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": HELLO, "tools": 3}, "tools"),
        ({"prompt": "a", "model": "no-such-model"}, "model"),
    ],
)
def test_invalid_tokenize_request_error_names_field(server: Any, body: dict[str, Any], param: str) -> None:
    answer = server.client.post("/tokenize", json=body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


def test_models_use_anthropic_format_with_version_header(server: Any) -> None:
    plain = server.client.get("/v1/models").json()["data"]
    page = server.client.get("/v1/models", headers=ANTHROPIC).json()
    assert [each["id"] for each in page["data"]] == [each["id"] for each in plain]
    first = page["data"][0]
    assert first["type"] == "model" and first["display_name"] and first["created_at"].endswith("Z")
    assert page["has_more"] is False and page["first_id"] == first["id"] and page["last_id"] == page["data"][-1]["id"]
    assert server.client.get(f"/v1/models/{first['id']}", headers=ANTHROPIC).json() == first
    after = server.client.get("/v1/models", headers=ANTHROPIC, params={"after_id": page["last_id"]}).json()
    assert after == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"limit": "1001"}, {"after_id": "none"}, {"before_id": "none"}):
        assert server.client.get("/v1/models", headers=ANTHROPIC, params=wrong).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models/none", "/v1/files/none", "/v1/files?limit=0"])
def test_errors_use_anthropic_format_with_version_header(server: Any, path: str) -> None:
    plain, answer = server.client.get(path), server.client.get(path, headers=ANTHROPIC)
    assert plain.status_code == answer.status_code and "type" not in plain.json() and "request-id" not in plain.headers
    assert answer.json()["type"] == "error" and answer.headers["request-id"]
    kind = "not_found_error" if answer.status_code == 404 else "invalid_request_error"
    assert answer.json()["error"] == plain.json()["error"] | {"type": kind}
    method = server.client.patch(path, headers=ANTHROPIC)
    assert method.status_code == 405 and method.json()["type"] == "error"


def test_key_error_uses_anthropic_format_with_version_header(start: Start) -> None:
    server = start(ScriptedEngine(), api_key="a key for this test").ready()
    answer = server.client.get("/v1/files", headers=ANTHROPIC)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/messages/nothing", "/api/nothing"])
def test_error_of_an_unknown_endpoint_names_the_list_of_endpoints(server: Any, path: str) -> None:
    answer = server.client.post(path, json={})
    error = answer.json()["error"]
    assert answer.status_code == 404 and "/docs" in (error if path.startswith("/api/") else error["message"])


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/openai/v1/chat/completions", "/lora-adapters"])
def test_errors_outside_the_api_are_json_except_for_browsers(server: Any, path: str) -> None:
    """API clients with a wrong base URL show their users the response."""
    answer = server.client.post(server.address + path, json={"messages": HELLO}, headers={"accept": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = server.client.put("/settings", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST", "each method has a route of its own"
    assert server.client.put("/v1/responses/resp_1", json={}).headers["allow"] == "DELETE, GET"
    answer = server.client.get(server.address + path, headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404 and answer.text.startswith("<!doctype html>")


@pytest.mark.parametrize(
    "headers",
    [
        {"accept": "application/json"},
        {"accept": "*/*", "authorization": "Bearer none"},
        {"accept": "*/*", "x-api-key": "none"},
    ],
)
def test_programs_without_v1_in_their_address_list_models(server: Any, headers: dict[str, str]) -> None:
    answer = server.client.get("/models", headers=headers)
    assert answer.json() == server.client.get("/v1/models").json()


@pytest.mark.parametrize(
    "headers",
    [
        {"accept": "text/html,application/json", "authorization": "Bearer of-a-proxy"},
        {"accept": "application/json", "hx-request": "true"},
        {"accept": "*/*"},
    ],
)
def test_browsers_get_the_models_page(server: Any, headers: dict[str, str]) -> None:
    assert "text/html" in server.client.get("/models", headers=headers).headers["content-type"]


def test_anthropic_api_is_served_without_v1(server: Any) -> None:
    # The AI SDK and Cline append /messages to the configured address, Anthropic's own client /v1/messages.
    ask = {"messages": HELLO, "max_tokens": 9}
    told = server.client.post("/messages", json=ask, headers=ANTHROPIC).json()
    assert (told["type"], told["content"][0]["text"]) == ("message", "Hi")
    assert server.client.post("/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"] > 0
    refused = server.client.post("/messages", json={"messages": HELLO}).json()
    assert refused["type"] == "error" and refused["error"]["param"] == "max_tokens"


def test_list_of_models_without_v1_requires_the_key(start: Start) -> None:
    server = start(ScriptedEngine, api_key="a key of twenty letters").ready()
    refused = server.client.get("/models", headers={"authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/models", "/chats/none/export/json"])
def test_error_distinguishes_a_wrong_key_from_no_key(start: Start, path: str) -> None:
    get = start(ScriptedEngine, api_key="a key of twenty letters").ready().client.get
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Basic YTpi"}):
        assert "An API key is required." in get(path, headers=headers).text
    for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        refused = get(path, headers=headers)
        assert refused.status_code == 401 and "Incorrect key." in refused.text


def test_trailing_slash_is_redirected_with_relative_address(server: Any) -> None:
    """Behind a proxy that terminates TLS, an absolute address would have the scheme http."""
    answer = server.client.post("/v1/chat/completions/?a=b", json={"messages": HELLO})
    assert (answer.status_code, answer.headers["location"]) == (307, "/v1/chat/completions?a=b")
    assert server.client.get("/v1/models/").json() == server.client.get("/v1/models").json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_empty_model_name_selects_default_model(server: Any, path: str) -> None:
    answer = server.client.post(path, json={"model": "", "messages": HELLO, "stream": False})
    assert answer.status_code == 200 and answer.json()["model"].startswith("scripted")


def test_props_include_template_and_special_tokens(server: Any) -> None:
    props = server.client.get("/props").json()
    assert {"chat_template", "bos_token", "eos_token"} <= set(props)


def test_refusal_and_usage_fields_follow_openai_format(server: Any) -> None:
    url = "/v1/chat/completions"
    assert server.client.post(url, json={"messages": HELLO}).json()["choices"][0]["message"]["refusal"] is None
    for path, body in ((url, {"messages": HELLO}), ("/v1/completions", {"prompt": "Hello"})):
        for asked in (True, False):
            options = {"stream_options": {"include_usage": True}} if asked else {}
            lines = server.client.post(path, json={**body, "stream": True, **options}).text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            told = [each.get("usage", "absent") for each in chunks]
            assert (set(map(str, told[:-1])), bool(told[-1] and told[-1] != "absent")) == (
                ({"None"}, True) if asked else ({"absent"}, False)
            )
            if path == url:
                assert chunks[0]["choices"][0]["delta"]["refusal"] is None
