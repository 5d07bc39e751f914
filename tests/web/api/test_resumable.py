"""Answers of a named conversation continue without their reader; they can be read again from any event and stopped by
name."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import EngineError
from notso.web.api.shared import resumable
from notso.web.api.shared.resumable import RemoteAnswers
from notso.web.replicas.exchange import LocalExchange
from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.sign_in import SignInSettings

Start = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
KEY = "correct horse battery staple"
CHAT = "/v1/chat/completions"
LONG = "word \r\n\u2028 data: " * 30


def slow(pace_seconds: float = 0.01, text: str = LONG, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda messages, thinking: say(text, "Hm. "), pace_seconds=pace_seconds, **options)


def events(text: str) -> list[tuple[int, str]]:
    return [(int(number), data) for number, data in re.findall(r"^id: (\d+)\ndata: (.*)$", text, re.MULTILINE)]


def said(found: list[tuple[int, str]]) -> str:
    chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def post(server: Any, name: str = "c1", **fields: Any) -> Any:
    body = {"messages": HELLO, "stream": True} | fields
    return server.client.post(CHAT, json=body, headers={"X-Conversation-Id": name})


def leave(server: Any, name: str = "c1", after: int = 3) -> list[tuple[int, str]]:
    """Send a request, read until after event `after`, disconnect, and return the events."""
    text = ""
    body = {"messages": HELLO, "stream": True}
    with (
        httpx.Client(base_url=server.address, timeout=30) as client,
        client.stream("POST", CHAT, json=body, headers={"X-Conversation-Id": name}) as answer,
    ):
        for chunk in answer.iter_text():
            text += chunk
            if len(events(text)) >= after:
                break
    return events(text)


def test_stream_resumes_from_last_event_after_disconnect(start: Start) -> None:
    server = start(slow()).ready()
    begun = leave(server, after=5)
    rest = events(server.client.get("/v1/stream", params={"conv_id": "c1", "from": begun[-1][0] + 1}).text)
    assert [number for number, _ in begun + rest] == list(range(len(begun) + len(rest)))
    assert said(begun + rest) == LONG and rest[-1][1] == "[DONE]"
    again = server.client.get("/v1/stream", params={"conv_id": "c1"}).text
    assert events(again) == begun + rest, "the stream can be read any number of times"
    last = {"Last-Event-ID": str(rest[-3][0])}
    assert events(server.client.get("/v1/stream?conv_id=c1", headers=last).text) == rest[-2:]
    assert server.client.get("/v1/stream", params={"conv_id": "c1", "from": rest[-1][0] + 1}).text == ""


def test_concurrent_readers_receive_same_stream(start: Start) -> None:
    server = start(slow()).ready()
    leave(server, after=2)
    found: list[str] = []
    readers = [
        threading.Thread(target=lambda: found.append(server.client.get("/v1/stream?conv_id=c1").text), daemon=True)
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert len(found) == 3 and len({tuple(events(text)) for text in found}) == 1 and said(events(found[0])) == LONG


def test_delete_stops_stream_by_conversation_id(start: Start) -> None:
    engine = slow(0.02, LONG * 100)
    server = start(engine).ready()
    begun = leave(server, after=5)
    assert engine.stats().running == 1, "the answer continues after the reader has left"
    answer = server.client.delete("/v1/stream?conv_id=c1").json()
    assert answer["stopped"] is True and answer["id"].startswith("chatcmpl-")
    server.wait(lambda: engine.stats().running == 0)
    found = events(server.client.get("/v1/stream?conv_id=c1").text)
    assert found[-1][1] == "[DONE]" and json.loads(found[-2][1])["choices"][0]["finish_reason"] == "stop"
    assert found[: len(begun)] == begun and len(said(found)) < len(LONG)
    assert server.client.delete("/v1/stream?conv_id=c1").json()["stopped"] is False
    server.wait(lambda: not server.shared.requests._open)


def test_non_streamed_answer_can_be_read_as_stream(start: Start) -> None:
    server = start(slow(0.001)).ready()
    whole = post(server, stream=False).json()
    found = events(server.client.get("/v1/stream?conv_id=c1").text)
    assert whole["choices"][0]["message"]["content"] == said(found)
    assert json.loads(found[0][1])["id"] == whole["id"]


def test_second_request_in_conversation_returns_409(start: Start) -> None:
    server = start(slow(0.02, LONG * 100)).ready()
    leave(server)
    refused = post(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "generation_in_progress")
    server.client.delete("/v1/stream?conv_id=c1")
    server.wait(lambda: server.client.delete("/v1/stream?conv_id=c1").json()["stopped"] is False)
    leave(server)
    server.client.delete("/v1/stream?conv_id=c1")


def test_concurrent_requests_in_conversation_return_200_or_409(start: Start) -> None:
    engine = slow(0.02, slots=20)
    server = start(engine).ready()
    found: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            body = {"messages": HELLO, "stream": True}
            found.append(client.post(CHAT, json=body, headers={"X-Conversation-Id": "c1"}).status_code)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 12 and found.count(200) >= 1 and set(found) <= {200, 409}
    server.wait(lambda: engine.stats().running == 0 and not server.shared.requests._open)


def test_engine_failure_is_same_error_for_every_reader(start: Start) -> None:
    server = start(slow(0.0, failure=EngineError("a logit was not finite"))).ready()
    first = events(post(server).text)
    again = events(server.client.get("/v1/stream?conv_id=c1").text)
    assert first == again and json.loads(first[-1][1])["error"]["code"] == "engine_error"
    assert not any(data == "[DONE]" for _, data in first)


def test_finished_streams_expire_and_are_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "RESUMABLE_SECONDS", 0.05)
    monkeypatch.setattr(resumable, "MAX_RESUMABLE", 3)
    server = start(slow(0.0)).ready()
    for number in range(6):
        assert post(server, f"c{number}").status_code == 200
        assert len(server.api.resumable_streams._streams) <= 4
    server.wait(lambda: not server.api.resumable_streams._streams)
    assert server.client.get("/v1/stream?conv_id=c5").status_code == 404


def test_newest_answer_of_an_old_conversation_is_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_RESUMABLE", 2)
    server = start(slow(0.0)).ready()
    for name in ("c1", "c2", "c1", "c3"):
        assert post(server, name).status_code == 200
        server.wait(lambda: all(each.finished for each in server.api.resumable_streams._streams.values()))
    found = [server.client.get(f"/v1/stream?conv_id={name}").status_code for name in ("c1", "c2", "c3")]
    assert found == [200, 404, 200]


def test_streams_of_one_user_do_not_displace_those_of_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "MAX_RESUMABLE", 3)
    book = KeyManager(lambda: SQLiteAccessStore(tmp_path / "data"))
    ann, bob = ({"Authorization": f"Bearer {book.add(name)[0]}"} for name in ("ann", "bob"))
    server = start(slow(0.0), sign_in=SignInSettings(require_key=True)).ready()
    names = [("bob", bob, "c"), *(("ann", ann, f"c{number}") for number in range(6))]
    for _, key, name in names:
        body = {"messages": HELLO, "stream": True}
        assert server.client.post(CHAT, json=body, headers={"X-Conversation-Id": name} | key).status_code == 200
        server.wait(lambda: all(each.finished for each in server.api.resumable_streams._streams.values()))
    found = {
        (who, name): server.client.get(f"/v1/stream?conv_id={name}", headers=key).status_code
        for who, key, name in names
    }
    assert found["bob", "c"] == found["ann", "c5"] == 200 and found["ann", "c0"] == 404


def test_evicted_streams_are_not_held_in_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_RESUMABLE", 3)
    server = start(slow(0.0)).ready()
    for number in range(9):
        assert post(server, f"c{number}").status_code == 200
    server.wait(lambda: all(each.follow_task.done() for each in server.api.resumable_streams._streams.values()))

    def held() -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if isinstance(each, resumable.ResumableStream)]
        return sum(each.running._requests is server.shared.requests for each in found)

    assert server.on_loop(held) == 3


@pytest.mark.parametrize(
    ("query", "headers", "status", "param"),
    [
        ("", {}, 400, "conv_id"),
        ("conv_id=", {}, 400, "conv_id"),
        ("conv_id=nobody", {}, 404, "conv_id"),
        ("conv_id=c1&from=-1", {}, 400, "from"),
        ("conv_id=c1&from=1e3", {}, 400, "from"),
        ("conv_id=c1&from=99999999999999999999", {}, 400, "from"),
        ("conv_id=c1&from=%D9%A1", {}, 400, "from"),
        ("conv_id=c1&x=1", {}, 400, "x"),
        ("conv_id=c1", {"Last-Event-ID": "x"}, 400, "from"),
    ],
)
def test_invalid_stream_query_is_rejected(
    start: Start, query: str, headers: dict[str, str], status: int, param: str
) -> None:
    server = start(slow(0.0, "Hi")).ready()
    post(server)
    answer = server.client.get(f"/v1/stream?{query}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_invalid_conversation_id_or_n_is_rejected(start: Start) -> None:
    server = start(slow(0.0, "Hi")).ready()
    for name in ("", "a b", "x" * 129, "\u00e9".encode()):
        answer = post(server, name)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-conversation-id"), name
    assert post(server, n=2).json()["error"]["param"] == "n"


def test_reasoning_end_control_stops_reasoning(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("Done.", "hm " * 3000, piece=3), pace_seconds=0.01)
    server = start(engine).ready()
    body = {"messages": HELLO, "stream": True}
    text, hurried = "", False
    with server.client.stream("POST", CHAT, json=body) as answer:
        for chunk in answer.iter_text():
            text += chunk
            if not hurried and "reasoning_content" in text:
                id = re.findall(r'"id":"(chatcmpl-\w+)"', text)[0]
                told = httpx.post(
                    f"{server.address}{CHAT}/control", json={"id": id, "action": "reasoning_end"}, timeout=60
                )
                assert told.json() == {"id": id, "action": "reasoning_end", "success": True}
                hurried = True
    chunks = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Done."
    assert text.count("reasoning_content") < 3000 and text.rstrip().endswith("[DONE]")
    gone = server.client.post(f"{CHAT}/control", json={"id": id, "action": "reasoning_end"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "id")
    for fields, param in (({"id": id}, "action"), ({"id": id, "action": "x"}, "action"), ({"action": "x"}, "id")):
        answer = server.client.post(f"{CHAT}/control", json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in (param, "action")


def test_shutdown_ends_running_stream_with_error(start: Start) -> None:
    from notso.web.app import drain_work

    server = start(slow(0.02, LONG * 100), drain_seconds=0.2).ready()
    leave(server)
    server.on_loop(lambda: drain_work(server.app.state.parts))
    server.wait(lambda: not server.shared.requests._open)
    found = events(server.client.get("/v1/stream?conv_id=c1").text)
    assert json.loads(found[-1][1])["error"]["code"] == "shutting_down"


class Following(LocalExchange):
    """An exchange that publishes nothing and counts the followed logs."""

    is_shared = True  # type: ignore[assignment]

    def __init__(self) -> None:
        self.open = 0

    @contextlib.contextmanager
    def following(self, name: str, feed: Any) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def is_claimed(self, name: str) -> bool:
        return True


def test_canceled_search_stops_following_exchange() -> None:
    async def search() -> tuple[int, int, int]:
        exchange = Following()
        elsewhere = RemoteAnswers(exchange)
        finding = asyncio.create_task(elsewhere.find("ann", "c1"))
        while not exchange.open:
            await asyncio.sleep(0)
        before = exchange.open
        finding.cancel()
        await asyncio.wait({finding})
        for _ in range(3):
            await asyncio.sleep(0)
        return before, exchange.open, len(elsewhere._tasks)

    assert asyncio.run(search()) == (1, 0, 0)


def test_remote_answer_is_followed_only_while_read() -> None:
    class Begun(Following):
        """An exchange with the beginning of an answer that another replica never finishes."""

        @contextlib.contextmanager
        def following(self, name: str, feed: Any) -> Iterator[None]:
            with super().following(name, feed):
                feed({"id": "a", "after": -1, "sse_events": ["data: 1\n\n"], "body": None, "finished": False})
                yield

    async def read() -> tuple[int, int, int]:
        exchange = Begun()
        elsewhere = RemoteAnswers(exchange)
        found = await elsewhere.find("ann", "c1")
        assert found is not None
        events = found.events(0, b"")
        del found
        assert await anext(events) == b"id: 0\ndata: 1\n\n"
        before = exchange.open
        await events.aclose()
        del events
        for _ in range(5):
            await asyncio.sleep(0)
        return before, exchange.open, len(elsewhere._tasks)

    assert asyncio.run(read()) == (1, 0, 0)
