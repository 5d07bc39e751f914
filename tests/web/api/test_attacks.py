"""Malformed and hostile requests to every API endpoint, and a hundred clients at once."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.edge.limits import LARGER_BODIES, MAX_BODY_BYTES

Start = Callable[..., Any]
JSON = {"Content-Type": "application/json"}
ADDRESSES = [
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v1/chat/completions/control", "/tokenize", "/detokenize", "/apply-template"),
]
NASTY = [
    *(b"", b"{", b"[]", b"null", b'"x"', b"NaN", b'{"a": NaN}', b'{"a": 1e400}', b'{"a": 1, "a": 2}'),
    *(b'{"messages": "\\ud800"}', b'{"\\u0000": 1}', b'{"a": "\xff"}', b'{"a": ' + b"9" * 5000 + b"}"),
    *(b'{"a": ' + b"[" * 100_000, b'{"a": ' + b'{"a":' * 50_000, b"\x00", b"\xef\xbb\xbf{}", b"{}" * 1000),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_malformed_requests_return_4xx(shared: Any, address: str) -> None:
    for body in NASTY:
        began = time.monotonic()
        answer = shared.client.post(address, content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["message"], (address, body[:30])
        assert "Traceback" not in answer.text and time.monotonic() - began < 20
    assert shared.client.post(address, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert shared.client.post(address, content=b"{}", headers=JSON | {"Content-Encoding": "gzip"}).status_code == 415
    limit = LARGER_BODIES.get(address, MAX_BODY_BYTES)
    assert shared.client.post(address, content=b" " * limit + b"{}", headers=JSON).status_code == 413
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        answer = shared.client.request(method, address)
        assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("address", ADDRESSES)
def test_unknown_field_is_rejected_with_short_message(shared: Any, address: str) -> None:
    for name in ("temprature", "x" * 5000, "a\u2028b", "<script>"):
        error = shared.client.post(address, json={name: 1}).json()["error"]
        assert error["code"] in ("unsupported_parameter", "invalid_value") and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("clients", "address", "body", "end"),
    [
        (100, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "data: [DONE]"),
        (30, "/v1/completions", {"prompt": "x"}, "data: [DONE]"),
        (30, "/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}, "event: message_stop"),
        (30, "/v1/responses", {"input": "x"}, "event: response.completed"),
    ],
)
def test_concurrent_streams_survive_client_disconnects(
    start: Start, clients: int, address: str, body: dict[str, Any], end: str
) -> None:
    text = "word \r\n\u2028data: " * 20
    engine = ScriptedEngine(lambda messages, thinking: say(text, piece=7), pace_seconds=0.002, slots=100)
    server = start(engine, max_waiting_turns=1000).ready()
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        with (
            httpx.Client(base_url=server.address, timeout=120) as client,
            client.stream("POST", address, json=body | {"stream": True}) as answer,
        ):
            said = ""
            for chunk in answer.iter_text():
                said += chunk
                if number % 3 == 0 and len(said) > 500:
                    return
            found[number] = said

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert len(found) == clients - -(-clients // 3)
    for said in found.values():
        assert len(re.findall(f"^{re.escape(end)}", said, re.MULTILINE)) == 1
    deltas = [
        "".join(re.findall(r'(?:"content"|"text"|"delta"):("(?:[^"\\]|\\.)*")(?=[,}])', said))
        for said in found.values()
    ]
    assert len(set(deltas)) == 1, "all clients must receive the same answer"
    server.wait(lambda: engine.stats().running == 0 and not server.shared.requests._open, 60)


def test_huge_tool_schema_is_handled_quickly(shared: Any) -> None:
    for schema in (
        {"properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
        {"enum": ["x"] * 50_000},
    ):
        began = time.monotonic()
        function = {"name": "f", "parameters": schema}
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
        answer = shared.client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        assert answer.status_code == 200 and time.monotonic() - began < 20
