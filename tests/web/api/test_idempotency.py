"""Idempotency-Key: a repeated request gets the first answer, even if the first client has disconnected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event
from notso.web.edge.access import KeyRing
from notso.web.store.records import MAX_KEPT_ANSWERS
from notso.web.values.errors import StorageError

Start = Callable[..., Any]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
KEY = {"Idempotency-Key": "a key"}
REPEATED = "idempotent-replayed"


class Counting:
    """An engine that numbers its answers and waits for `go` before it finishes one."""

    def __init__(self, *, open: bool = True) -> None:
        self.asked = 0
        self.go = threading.Event()
        if open:
            self.go.set()

    def __call__(self, messages: object, thinking: bool) -> Iterator[Event]:
        self.asked += 1
        yield from say(f"begun {self.asked}, ")
        assert self.go.wait(60)
        yield from say("done")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        (CHAT, BODY | {"stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", BODY | {"max_tokens": 20}),
        ("/v1/messages", BODY | {"max_tokens": 20, "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/api/chat", BODY),
        ("/api/generate", {"prompt": "x", "stream": False}),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_repeated_request_gets_first_answer(start: Start, path: str, body: dict[str, Any]) -> None:
    engine = Counting()
    server = start(ScriptedEngine(engine)).ready()
    first = server.client.post(path, json=body, headers=KEY)
    again = server.client.post(path, json=body, headers=KEY)
    assert first.status_code == 200 and engine.asked == 1
    assert again.content == first.content
    assert REPEATED not in first.headers and again.headers[REPEATED] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    other = server.client.post(path, json=body, headers={"Idempotency-Key": "another"})
    assert other.content != first.content and engine.asked == 2
    server.client.post(path, json=body)
    assert engine.asked == 3


def test_upload_repeated_with_new_boundary_gets_first_file(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    first, again = (client.files.create(file=b"{}", purpose="batch", extra_headers=KEY) for _ in range(2))
    assert again == first and len(client.files.list().data) == 1
    with pytest.raises(openai.UnprocessableEntityError):
        client.files.create(file=b"[]", purpose="batch", extra_headers=KEY)


@pytest.mark.parametrize("boundary", ["boundary*=idna''%ff", "boundary*=a; boundary*0*=b"])
def test_malformed_boundary_is_refused(start: Start, boundary: str) -> None:
    server = start(ScriptedEngine()).ready()
    headers = {**KEY, "Content-Type": f"multipart/form-data; {boundary}"}
    assert server.client.post("/v1/files", content=b"--x--", headers=headers).status_code == 400


def test_idempotency_key_reused_for_different_request_returns_422(start: Start) -> None:
    engine = Counting()
    server = start(ScriptedEngine(engine)).ready()
    server.client.post(CHAT, json=BODY, headers=KEY)
    for path, body in ((CHAT, BODY | {"seed": 1}), ("/chat/completions", BODY), (f"{CHAT}?x=1", BODY)):
        refused = server.client.post(path, json=body, headers=KEY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert engine.asked == 1
    wrong: Any
    for wrong in ([("Idempotency-Key", "")], [("Idempotency-Key", "x" * 256)], [("Idempotency-Key", "a")] * 2):
        assert server.client.post(CHAT, json=BODY, headers=wrong).status_code == 400


def test_concurrent_requests_with_same_key_run_once(start: Start) -> None:
    engine = Counting(open=False)
    server = start(ScriptedEngine(engine)).ready()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.client.post, CHAT, json=BODY, headers=KEY) for _ in range(8)]
        server.wait(lambda: engine.asked == 1)
        engine.go.set()
        answers = [each.result() for each in asked]
    assert engine.asked == 1 and len({each.content for each in answers}) == 1
    assert sum(REPEATED not in each.headers for each in answers) == 1


def test_repeated_stream_replays_from_start_after_disconnect(start: Start) -> None:
    engine = Counting(open=False)
    server = start(ScriptedEngine(engine)).ready()
    body = BODY | {"stream": True}
    with httpx.Client(base_url=server.address) as client, client.stream("POST", CHAT, json=body, headers=KEY) as left:
        begun = next(left.iter_text())
    with server.client.stream("POST", CHAT, json=body, headers=KEY) as again:
        chunks = again.iter_text()
        text = next(chunks)
        engine.go.set()
        text += "".join(chunks)
    assert engine.asked == 1 and text.startswith(begun) and text.endswith("data: [DONE]\n\n")
    assert server.client.post(CHAT, json=body, headers=KEY).text == text


def test_stored_answers_survive_restart(start: Start) -> None:
    engine = Counting()
    server = start(ScriptedEngine(engine)).ready()
    first = server.client.post(CHAT, json=BODY, headers=KEY)
    server.close()
    server = start(ScriptedEngine(engine)).ready()
    again = server.client.post(CHAT, json=BODY, headers=KEY)
    assert again.content == first.content and engine.asked == 1
    assert server.client.post(CHAT, json=BODY | {"n": 2}, headers=KEY).status_code == 422


def test_failed_answers_are_not_stored(start: Start) -> None:
    asked = 0

    def fails_once(messages: object, thinking: bool) -> Iterator[Event]:
        nonlocal asked
        asked += 1
        yield from say("begun")
        if asked == 1:
            raise RuntimeError

    server = start(ScriptedEngine(fails_once)).ready()
    body = BODY | {"stream": True}
    assert '"error"' in server.client.post(CHAT, json=body, headers=KEY).text
    again = server.client.post(CHAT, json=body, headers=KEY)
    assert '"error"' not in again.text and REPEATED not in again.headers
    assert server.client.post(CHAT, json=body, headers=KEY).text == again.text
    invalid = {"Idempotency-Key": "invalid"}
    assert server.client.post(CHAT, json={"messages": 5}, headers=invalid).status_code == 400
    assert server.client.post(CHAT, json={"messages": 5}, headers=invalid).status_code == 400
    assert server.client.post(CHAT, json=BODY, headers=invalid).status_code == 200


def test_idempotency_keys_are_separate_per_owner(start: Start) -> None:
    engine = Counting()
    server = start(ScriptedEngine(engine), api_key="a long secret key").ready()
    assert server.client.post(CHAT, json=BODY, headers=KEY).status_code == 401
    mine = KEY | {"Authorization": "Bearer a long secret key"}
    answer = server.client.post(CHAT, json=BODY, headers=mine)
    records = server.shared.store.records
    assert server.on_loop(lambda: records.idempotent_response("local", "a key", 0)).body == answer.content
    assert server.on_loop(lambda: records.idempotent_response("another", "a key", 0)) is None


def test_old_answers_are_evicted_and_expire(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine(Counting())).ready()
    monkeypatch.setattr("notso.web.store.sql.records.MAX_KEPT_ANSWERS", 3)
    assert MAX_KEPT_ANSWERS > 3
    for number in range(5):
        server.client.post(CHAT, json=BODY, headers={"Idempotency-Key": str(number)})
    records = server.shared.store.records
    kept = [server.on_loop(lambda key=str(key): records.idempotent_response("local", key, 0)) for key in range(5)]
    assert [each is not None for each in kept] == [False, False, True, True, True]
    newest = kept[-1].created_ms
    assert server.on_loop(lambda: records.idempotent_response("local", "4", newest + 24 * 3_600_000 - 1)) is not None
    assert server.on_loop(lambda: records.idempotent_response("local", "4", newest + 24 * 3_600_000)) is None
    server.on_loop(lambda: records.purge(newest + 24 * 3_600_000))
    assert server.on_loop(lambda: records.idempotent_response("local", "4", 0)) is None


def test_openai_client_gets_stored_answer_for_repeated_key(start: Start) -> None:
    engine = Counting()
    server = start(ScriptedEngine(engine)).ready()
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "scripted", "messages": BODY["messages"], "extra_headers": KEY}
    first, again = (client.chat.completions.create(**ask) for _ in range(2))
    assert first == again and engine.asked == 1


def test_failed_api_key_lookup_returns_503(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine(Counting()), api_key="a long secret key").ready()

    async def away(*_: object) -> None:
        raise StorageError("the keys cannot be read")

    monkeypatch.setattr(KeyRing, "caller", away)
    answer = server.client.post(CHAT, json=BODY, headers=KEY)
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the keys cannot be read"
