"""The access log shows, by request id, why a stream ended."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError, Event, Message
from notso.web.values.request_id import request_id

HELLO = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str | None, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = f": {record.exc_info[1]}" if record.exc_info else ""
        self.lines.append((request_id.get(), record.getMessage() + error))

    def of(self, name: str) -> str:
        return "\n".join(line for of, line in list(self.lines) if of == name)


@pytest.fixture
def records() -> Iterator[Records]:
    handler, log = Records(), logging.getLogger("notso.access")
    before = log.level
    logging.getLogger("notso").addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    logging.getLogger("notso").removeHandler(handler)
    log.setLevel(before)


def endless(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
    while True:
        yield from say("word " * 200, piece=1000)


def begun(server: Any, name: str, **more: Any) -> Any:
    """Start a stream and read its first chunk."""
    stream = server.client.stream("POST", "/v1/chat/completions", json=HELLO | more, headers={"X-Request-Id": name})
    response = stream.__enter__()
    next(response.iter_raw())
    return stream


def test_requests_are_logged_with_request_id(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine()).ready()
    made = server.client.get("/v1/models").headers["x-request-id"]
    assert re.fullmatch("req_[0-9a-f]{24}", made)
    assert server.client.get("/v1/models", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for odd in ("x" * 65, "a b", "<b>", ""):
        assert server.client.get("/", headers={"X-Request-Id": odd}).headers["x-request-id"].startswith("req_")
    server.wait(lambda: "GET /v1/models 200" in records.of("mine-1"))
    assert "GET /v1/models 200" in records.of(made)
    server.client.get("/livez", headers={"X-Request-Id": "quiet"})
    server.client.get("/chats/no-such-chat?secret", headers={"X-Request-Id": "path"})
    server.wait(lambda: "404" in records.of("path"))
    assert not records.of("quiet") and "secret" not in records.of("path") and "no-such" not in records.of("path")


def test_route_of_cross_origin_request_is_logged_and_counted(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(), allowed_origins=("app://obsidian.md",)).ready()
    server.client.get("/v1/models", headers={"X-Request-Id": "abroad", "Origin": "app://obsidian.md"})
    server.wait(lambda: "GET /v1/models 200" in records.of("abroad"))
    counted = 'notso_http_requests_total{method="GET",route="/v1/models",status="200"} 1.0'
    assert counted in server.client.get("/metrics").text


@pytest.mark.parametrize(
    ("limit", "said"), [(None, "generation ended: stop; id "), (3, "generation ended: length (max_tokens); id ")]
)
def test_finish_reason_is_logged(start: Callable[..., Any], records: Records, limit: int | None, said: str) -> None:
    server = start(ScriptedEngine(ends_at_limit=True)).ready()
    asked = HELLO | ({"max_tokens": limit} if limit else {})
    answer = server.client.post("/v1/chat/completions", json=asked | {"stream": False}, headers={"X-Request-Id": "one"})
    said += answer.json()["id"]
    server.wait(lambda: said in records.of("one") and "POST /v1/chat/completions 200" in records.of("one"))
    assert "disconnected" not in records.of("one")


def test_client_disconnect_is_logged(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(endless, pace_seconds=0.001)).ready()
    begun(server, "left").__exit__(None, None, None)
    server.wait(lambda: "client disconnected" in records.of("left") and "ended: cancelled" in records.of("left"))


def test_send_timeout_is_logged(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(endless), send_timeout_seconds=0.2).ready()
    address = httpx.URL(server.address)
    body = json.dumps(HELLO).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nX-Request-Id: slow\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.host, address.port or 80)) as reader:
        reader.sendall(head.encode() + body)
        server.wait(lambda: "read nothing for 0.2 s; connection dropped" in records.of("slow"))
    server.wait(lambda: "client disconnected" in records.of("slow") and "ended: cancelled" in records.of("slow"))


def test_engine_failure_is_logged(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(failure=EngineError("a logit was not finite"))).ready()
    server.client.post("/v1/chat/completions", json=HELLO, headers={"X-Request-Id": "failed"})
    server.wait(lambda: "generation ended: failed" in records.of("failed"))
    assert records.of("failed").index("generation failed: a logit was not finite") < records.of("failed").index("ended")
    assert "notso_request_failed_total 1.0" in server.client.get("/metrics").text


def test_failed_step_is_logged_for_each_request(
    start: Callable[..., Any], records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(None, threads=1)

    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(engine._core, "_step", fail)
    server = start(lambda: engine).ready()
    server.client.post("/v1/chat/completions", json=HELLO | {"n": 2}, headers={"X-Request-Id": "step"})
    server.wait(lambda: records.of("step").count("generation ended: failed") == 2)
    assert records.of("step").index("a step failed: a bug") < records.of("step").index("generation failed: the engine")
    assert "a step failed" not in records.of(None)


def test_context_is_named_as_reached_limit(start: Callable[..., Any], records: Records) -> None:
    server = start(lambda: Engine.load(None, threads=1, context_tokens=64)).ready()
    asked = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
    server.client.post("/v1/completions", json=asked, headers={"X-Request-Id": "full"}).raise_for_status()
    server.wait(lambda: "generation ended: length (context)" in records.of("full"))
    server.client.post("/v1/embeddings", json={"input": "Once"}, headers={"X-Request-Id": "read"}).raise_for_status()
    server.wait(lambda: "generation ended: length (prompt only)" in records.of("read"))


def test_stopped_turn_is_logged_under_original_request_id(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(endless, pace_seconds=0.001)).ready()
    server.client.headers["X-Request-Id"] = "asked"
    asked = server.ask("hello")
    server.client.headers["X-Request-Id"] = "stopped"
    server.wait(lambda: server.client.post(f"/generations/{asked.generation_id}/stop").status_code < 400)
    server.finished(asked)
    server.wait(lambda: f"generation ended: stopped by the user; id {asked.generation_id};" in records.of("asked"))
    assert f"stop requested; id {asked.generation_id}" in records.of("stopped")
    assert "POST /generations/{generation_id}/stop" in records.of("stopped")


def test_continued_turn_is_logged_under_its_id(start: Callable[..., Any], records: Records) -> None:
    server = start(ScriptedEngine(endless, pace_seconds=0.001), drain_seconds=0.0).ready()
    asked = server.ask("hello")
    server.wait(lambda: "word" in server.client.get(f"/chats/{asked.chat_id}").text)
    server.close()
    again = start(ScriptedEngine(failure=EngineError("a logit was not finite"))).ready()
    again.finished(asked)
    again.wait(lambda: f"generation ended: failed; id {asked.generation_id}" in records.of(asked.generation_id))
    assert "generation failed: a logit was not finite" in records.of(asked.generation_id)
    taken = f"turn continued: the server that generated it has ended; id {asked.generation_id}"
    assert taken in records.of(None)
