"""An answer of a named conversation can be read again and stopped at a replica that is not writing it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event
from notso.web.api.shared import resumable

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
NAMED = {"X-Conversation-Id": "c1"}

Replica = Callable[..., Any]


class QuotaCheck:
    """Engine that generates a few words and waits for `go` before the rest."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, messages: object, thinking: bool) -> Iterator[Event]:
        yield from say("word data: \u2028 " * 4)
        self.go.wait(60)
        yield from say("the last word")


@pytest.fixture
def gate() -> Iterator[QuotaCheck]:
    gate = QuotaCheck()
    yield gate
    gate.go.set()


def endless(messages: object, thinking: bool) -> Iterator[Event]:
    while True:
        yield from say("word ")


def two(replica: Replica, script: Any) -> tuple[Any, Any]:
    servers = replica(ScriptedEngine(script, pace_seconds=0.01)), replica(ScriptedEngine(script, pace_seconds=0.01))
    for server in servers:
        server.wait(lambda server=server: server.shared.exchange._at is not None)
    return servers


def begin(server: Any, frames: int = 3, path: str = CHAT, **fields: Any) -> str:
    """Send a request, read a few frames, disconnect, and return what was read."""
    text = ""
    with (
        httpx.Client(base_url=server.address, timeout=60) as client,
        client.stream("POST", path, json={**BODY, **fields}, headers=NAMED) as answer,
    ):
        for chunk in answer.iter_text():
            text += chunk
            if text.count("\n\n") >= frames:
                break
    return text


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^id: (\d+)$", text, re.MULTILINE)]


def test_stream_can_be_resumed_at_another_replica(replica: Replica, gate: QuotaCheck) -> None:
    here, there = two(replica, gate)
    begin(here)
    with there.client.stream("GET", "/v1/stream?conv_id=c1&from=2") as answer:
        chunks = answer.iter_text()
        text = next(chunks)
        gate.go.set()
        text += "".join(chunks)
    whole = here.client.get("/v1/stream?conv_id=c1").text
    assert numbers(text)[0] == 2 and text.count("[DONE]") == 1
    assert whole.endswith(text), "the frames are the same as from the replica that writes the answer"
    assert there.client.get("/v1/stream?conv_id=c1").text == whole
    assert there.client.get("/v1/stream?conv_id=c2").status_code == 404


def test_conversation_runs_on_one_replica_at_a_time(replica: Replica, gate: QuotaCheck) -> None:
    here, there = two(replica, gate)
    begin(here)
    assert there.client.post(CHAT, json=BODY, headers=NAMED).status_code == 409
    gate.go.set()
    here.client.get("/v1/stream?conv_id=c1")
    there.wait(lambda: there.client.post(CHAT, json=BODY, headers=NAMED).status_code == 200)
    newest = there.client.get("/v1/stream?conv_id=c1").text
    here.wait(lambda: here.client.get("/v1/stream?conv_id=c1").text == newest)


def test_delete_stops_stream_on_another_replica(replica: Replica) -> None:
    here, there = two(replica, endless)
    begin(here)
    said = there.client.delete("/v1/stream?conv_id=c1")
    assert said.status_code == 200 and said.json()["stopped"] is True
    text = there.client.get("/v1/stream?conv_id=c1").text
    assert "[DONE]" in text


@pytest.mark.parametrize(
    ("path", "fields", "last"),
    [
        (CHAT, {}, 'data: {"error":{'),
        ("/v1/messages", {"max_tokens": 1000}, 'event: error\ndata: {"type":"error","error":{'),
    ],
)
def test_stopped_replica_is_reported_in_format_of_stream(
    replica: Replica, gate: QuotaCheck, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], last: str
) -> None:
    monkeypatch.setattr(resumable, "SILENT_SECONDS", 0.05)
    here, there = two(replica, gate)
    begin(here, path=path, **fields)
    with there.client.stream("GET", "/v1/stream?conv_id=c1") as answer:
        chunks = answer.iter_text()
        text = next(chunks)
        here.on_loop(lambda: here.shared.exchange.release(resumable.claim_name("local", "c1")))
        text += "".join(chunks)
    assert text.split("\n\n")[-2].startswith(last) and "has stopped" in text


def test_stopped_replica_of_an_earlier_release_is_reported() -> None:
    log = resumable.AnswerLog()
    assert log.feed({"after": -1, "id": "a", "sse_events": [], "body": None, "finished": False})
    assert log.stopped_event.startswith(b'data: {"error":{') and b"has stopped" in log.stopped_event


def test_background_response_can_be_read_and_cancelled_elsewhere(replica: Replica) -> None:
    here, there = two(replica, endless)
    asked = here.client.post("/v1/responses", json={"input": "Hello", "background": True}).json()
    shown = there.client.get(f"/v1/responses/{asked['id']}").json()
    assert (shown["id"], shown["status"]) == (asked["id"], asked["status"])
    find = here.api.resumable_streams.find
    assert not find("local", asked["id"]).is_read
    with there.client.stream("GET", f"/v1/responses/{asked['id']}?stream=true"):
        here.wait(lambda: find("local", asked["id"]).is_read)
    cancelled = there.client.post(f"/v1/responses/{asked['id']}/cancel").json()
    assert cancelled["id"] == asked["id"] and cancelled["status"] == "cancelled"
    assert there.client.get(f"/v1/responses/{asked['id']}").json()["status"] == "cancelled"
