"""Receipts in the responses of all APIs: each is present once if requested, and the engine can verify it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from notso.smollm3 import Engine

HELLO = [{"role": "user", "content": "Tell me something"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "temperature": 1.3, "max_tokens": 40}),
    "chat usage": (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 30, "stream_options": {"include_usage": True}},
    ),
    "tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "What is 12 * 34?"}],
            "tools": [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}],
        },
    ),
    "text": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 12}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 40}),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}),
    "ollama": ("/api/chat", {"messages": HELLO, "options": {"num_predict": 20}}),
    "generate": ("/api/generate", {"prompt": "Hello", "options": {"num_predict": 20}}),
    "llama.cpp": ("/completion", {"prompt": "Once upon", "n_predict": 9}),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(threads=1, context_tokens=1024)


@pytest.fixture(scope="module")
def served(engine: Engine, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("api"))
    server = type(shared)(lambda: engine, settings)
    yield server.ready()
    server.close()


def objects(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("form", ["open", "sealed"])
@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_each_api_returns_valid_receipt(
    served: Any, engine: Engine, path: str, body: dict[str, Any], form: str
) -> None:
    headers = {"x-notso-receipt": form}
    model = {"model": served.client.get("/v1/models").json()["data"][0]["id"]}
    plain = {key: value for key, value in body.items() if key != "stream_options"} | {"stream": False}
    whole = served.client.post(path, json=model | plain, headers=headers)
    assert whole.status_code == 200, whole.text
    frames = objects(served.client.post(path, json=model | body | {"stream": True}, headers=headers).text)
    assert [("notso_receipt" in frame) for frame in frames] == [False] * (len(frames) - 1) + [True]
    for receipt in (whole.json()["notso_receipt"], frames[-1]["notso_receipt"]):
        assert receipt["form"] == form, receipt
        if form == "open":
            assert engine.check_receipt(receipt).problem == "" and receipt["answer"]["tokens"] > 0
        else:
            assert "ids" not in receipt["prompt"]
    without = served.client.post(path, json=model | plain)
    assert "notso_receipt" not in without.text


@pytest.mark.parametrize("prompt", [["Once upon"], ["Once upon", "One day"]])
def test_each_object_of_list_has_receipt(served: Any, engine: Engine, prompt: list[str]) -> None:
    body = {"prompt": prompt, "n_predict": 4}
    whole = served.client.post("/completion", json=body, headers={"x-notso-receipt": "open"})
    assert whole.status_code == 200, whole.text
    assert len(whole.json()) == len(prompt)
    for each, text in zip(whole.json(), prompt, strict=True):
        assert engine.check_receipt(each["notso_receipt"]).problem == "" and each["prompt"] == text


def test_each_choice_has_receipt_and_unknown_form_is_rejected(served: Any, engine: Engine) -> None:
    body = {"model": served.client.get("/v1/models").json()["data"][0]["id"], "messages": HELLO, "n": 2}
    receipts = served.client.post("/v1/chat/completions", json=body, headers={"x-notso-receipt": "open"}).json()
    assert [engine.check_receipt(each).problem for each in receipts["notso_receipt"]] == ["", ""]
    refused = served.client.post("/v1/chat/completions", json=body, headers={"x-notso-receipt": "yes"})
    assert refused.status_code == 400 and "x-notso-receipt" in refused.json()["error"]["message"]


def test_stored_response_keeps_requested_receipt(served: Any, engine: Engine) -> None:
    body = {"input": "Hello", "max_output_tokens": 30, "background": True}
    for form in ("open", "sealed"):
        id = served.client.post("/v1/responses", json=body, headers={"x-notso-receipt": form}).json()["id"]
        url = f"/v1/responses/{id}"
        assert served.client.get(f"{url}/input_items").json()["data"], "the response is still being written"
        served.wait(lambda url=url: served.client.get(url).json()["status"] not in ("queued", "in_progress"))
        told = served.client.get(url).json()
        # the server drops finished streams from memory after a while
        served.on_loop(lambda id=id: served.api.resumable_streams.forget("local", id))
        assert served.client.get(url).json() == told and told["notso_receipt"]["form"] == form
    whole = served.client.post("/v1/responses", json={"input": "Hello"}, headers={"x-notso-receipt": "open"}).json()
    stored = served.client.get(f"/v1/responses/{whole['id']}").json()
    assert (
        stored["notso_receipt"] == whole["notso_receipt"] and not engine.check_receipt(stored["notso_receipt"]).problem
    )
