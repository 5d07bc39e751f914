"""Responses interrupted by the end of a process continue from their stored tokens; readers neither miss nor repeat
any."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_engine import ScriptedEngine
from starlette.requests import Request
from starlette.responses import JSONResponse

from notso.smollm3 import Engine
from notso.web.api.shared import background
from notso.web.store.protocol import StoredResponse
from notso.web.store.records import UnfinishedResponse
from notso.web.store.sql.records import SQLRecords

Start = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NAMED = {"X-Conversation-Id": "c1"}
SAMPLED = {"temperature": 1.5, "max_tokens": 80, "ignore_eos": True, "stream": True}


COPIED = threading.Event()


def load() -> Engine:
    """Load the demo model with an engine that pauses mid-response until the store has been copied."""
    engine = Engine.load(None, threads=1)
    step = engine._core._step

    def waiting() -> None:
        if any(each.output.tokens >= 12 for each in engine._core._requests.values()):
            assert COPIED.wait(60)
        step()

    engine._core._step = waiting  # type: ignore[method-assign]
    return engine


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Copy the store when it holds eight tokens of a response; return the folder of the copy.

    A parameter has further values that the store must hold."""
    copy, note, more = tmp_path / "left", SQLRecords.save_progress, getattr(request, "param", {})
    COPIED.clear()
    monkeypatch.setattr(secrets, "randbits", lambda bits: 3)  # a seed whose answers are long enough

    async def noted(self: Any, id: str, holder: str, first: int, progress: str, *, is_further: bool) -> None:
        await note(self, id, holder, first, progress, is_further=is_further)
        told = json.loads(progress)
        if not COPIED.is_set() and first + len(told["ids"]) >= 8 and more.items() <= told.items():
            shutil.copytree(tmp_path / "data", copy, ignore=shutil.ignore_patterns("*lock*"))
            COPIED.set()

    monkeypatch.setattr(background, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(SQLRecords, "save_progress", noted)
    return copy


def events(text: str) -> list[tuple[int, str, str]]:
    """Return the number, name and data of each event, without fields that depend on the time or the cache."""
    found = re.findall(r"^id: (\d+)\n(?:event: (.*)\n)?data: (.*)$", text, re.MULTILINE)
    clocks = re.compile(r'"(timings|cached_tokens|completed_at|usage|prompt_tokens_details)":(\{.*?\}|\d+|null)')
    return [(int(number), name, clocks.sub("", data)) for number, name, data in found]


def generated(server: Any) -> int:
    return int(server.shared.engine.default.engine.stats().generated_tokens_total)


def test_stored_conversation_stream_resumes_after_restart(start: Start, left: Path) -> None:
    server = start(load).ready()
    body = {"messages": HELLO, "store": True} | SAMPLED
    answer = server.client.post("/v1/chat/completions", json=body, headers=NAMED)
    assert answer.status_code == 200 and "store" not in answer.headers.get("x-notso-ignored", "")
    whole = events(answer.text)
    assert len(whole) > 30 and whole[-1][2] == "[DONE]"
    again = start(load, data_dir=left)
    again.wait(lambda: (found := again.client.get("/v1/stream?conv_id=c1")).status_code == 200 and bool(found.text))
    assert events(again.client.get("/v1/stream?conv_id=c1").text) == whole
    assert events(again.client.get("/v1/stream?conv_id=c1&from=25").text) == whole[25:]
    assert 0 < generated(again) <= generated(server) - 8, "the stored tokens must not be generated again"


def test_storing_stream_requires_store_and_conversation_id(start: Start, tmp_path: Path) -> None:
    COPIED.set()
    server = start(load).ready()
    body = {"messages": HELLO} | SAMPLED
    assert server.client.post("/v1/chat/completions", json=body, headers=NAMED).status_code == 200
    assert server.on_loop(lambda: server.shared.store.records.unfinished_stream("local", "c1")) is None
    told = server.client.post("/v1/chat/completions", json={"messages": HELLO, "store": True, "max_tokens": 2})
    assert "store" in told.headers["x-notso-ignored"], "without a conversation name nothing is stored"


@pytest.mark.parametrize("streams", [False, True])
def test_background_response_resumes_after_restart(start: Start, left: Path, streams: bool) -> None:
    server = start(load).ready()
    body = {
        "input": "Hello",
        "background": True,
        "temperature": 1.5,
        "ignore_eos": True,
        "max_output_tokens": 80,
        "stream": streams,
    }
    answer = server.client.post("/v1/responses", json=body, headers={"x-notso-receipt": "open"})
    id = re.findall(r'"id":"(resp_\w+)"', answer.text)[0]

    def finished(server: Any) -> Any:
        server.wait(lambda: server.client.get(f"/v1/responses/{id}").json().get("status") == "completed")
        return server.client.get(f"/v1/responses/{id}").json()

    whole = finished(server)
    again = start(load, data_dir=left)
    found = finished(again)
    assert (found["output"], found["created_at"]) == (whole["output"], whole["created_at"])
    if not streams:
        assert found["notso_receipt"] == whole["notso_receipt"], "the receipt header of the request is stored with it"
    else:
        assert events(again.client.get(f"/v1/responses/{id}?stream=true").text)[:30] == events(answer.text)[:30]
    assert 0 < generated(again) <= generated(server) - 8


def test_response_finished_while_draining_is_not_left_open(start: Start, left: Path) -> None:
    """Otherwise the next process would write the response again, and another model would write another text."""
    server = start(load).ready()
    id = server.client.post("/v1/responses", json={"input": "Hello", "background": True}).json()["id"]

    def unfinished() -> Any:
        return server.on_loop(lambda: server.shared.store.records.unfinished_response("local", id))

    assert unfinished() is not None
    server.on_loop(lambda: setattr(server.shared, "stopping", True))
    COPIED.set()
    server.wait(lambda: unfinished() is None)


def test_unfinished_response_is_not_reported_as_unknown(start: Start) -> None:
    """After a restart, another process may take a while to continue a response: it must load the model first."""
    server = start(ScriptedEngine()).ready()
    unfinished = UnfinishedResponse("resp_1", "local", "{}", "[]", 7, 500)
    server.on_loop(lambda: server.shared.store.records.add_unfinished_response(unfinished, "a stopped process"))
    waiting = server.client.get("/v1/responses/resp_1").json()
    assert (waiting["status"], waiting["background"], waiting["completed_at"]) == ("queued", True, None)
    chained = {"input": "Hello", "previous_response_id": "resp_1"}
    for answer in (
        server.client.post("/v1/responses/resp_1/cancel"),
        server.client.delete("/v1/responses/resp_1"),
        server.client.get("/v1/responses/resp_1?stream=true"),
        server.client.get("/v1/responses/resp_1/input_items"),
        server.client.post("/v1/responses", json=chained),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        assert answer.headers["retry-after"] == "2"


def test_unfinished_response_has_the_fields_of_a_finished_one(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    body = {
        "input": "Hi",
        "instructions": "Repl\\ud800y.",  # after an escape: a lone surrogate
        "max_output_tokens": 9.0,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "text": {"format": format},
        "top_p": 0.5,
    }
    text = json.dumps(body).replace("\\\\", "\\")
    headers = {"content-type": "application/json"}
    finished = server.client.post("/v1/responses", content=text, headers=headers).json()
    unfinished = UnfinishedResponse("resp_1", "local", text, "[]", 7, 500)
    server.on_loop(lambda: server.shared.store.records.add_unfinished_response(unfinished, "a stopped process"))
    waiting = server.client.get("/v1/responses/resp_1").json()
    assert waiting.keys() == finished.keys()
    changed = ("id", "created_at", "completed_at", "status", "incomplete_details", "model", "output", "usage")
    for name in waiting.keys() - {*changed, "background"}:
        assert waiting[name] == finished[name], name


def other_arithmetic() -> Engine:
    return Engine.load(None, threads=1, kv="k4v3")


def test_stored_stream_is_dropped_when_model_differs(start: Start, left: Path) -> None:
    body = {"messages": HELLO, "store": True} | SAMPLED
    start(load).ready().client.post("/v1/chat/completions", json=body, headers=NAMED)
    again = start(other_arithmetic, data_dir=left).ready()
    again.wait(lambda: again.on_loop(lambda: again.shared.store.records.unfinished_stream("local", "c1")) is None)
    assert again.client.get("/v1/stream?conv_id=c1").status_code == 404


def test_polled_response_restarts_when_model_differs(start: Start, left: Path) -> None:
    server = start(load).ready()
    body = {"input": "Hello", "background": True, "max_output_tokens": 80}
    id = server.client.post("/v1/responses", json=body).json()["id"]
    server.wait(COPIED.is_set)
    again = start(other_arithmetic, data_dir=left).ready()
    again.wait(lambda: again.client.get(f"/v1/responses/{id}").json().get("status") in ("completed", "incomplete"))


@pytest.mark.parametrize("left", [{"is_read": True}], indirect=True)
def test_response_whose_events_were_read_fails_when_model_differs(start: Start, left: Path) -> None:
    """Otherwise, readers that continue would get other events under the numbers of those that they have read."""
    server = start(load).ready()
    body = {"input": "Hello", "background": True, "max_output_tokens": 80}
    id = server.client.post("/v1/responses", json=body).json()["id"]
    assert server.client.get(f"/v1/responses/{id}?stream=true").status_code == 200
    again = start(other_arithmetic, data_dir=left).ready()
    again.wait(lambda: again.client.get(f"/v1/responses/{id}").json().get("status") not in ("queued", "in_progress"))
    failed = again.client.get(f"/v1/responses/{id}").json()
    assert (failed["status"], failed["max_output_tokens"], failed["tools"]) == ("failed", 80, [])


def test_a_response_keeps_its_creation_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1_000, 1_000)
    monkeypatch.setattr(background, "current_ms", lambda: next(clock))
    first, other = Request({"type": "http"}), Request({"type": "http"})
    assert background.created_ms(first) == 1_000 < background.created_ms(other)
    assert background.created_ms(first) == 1_000
    left = UnfinishedResponse("r", "a", "{}", "[]", 7, 500)
    assert background.created_ms(Request({"type": "http", background.UNFINISHED: left})) == 500


def test_stored_request_is_decoded_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, threads = json.loads, list[threading.Thread]()

    def noted(text: str) -> Any:
        threads.append(threading.current_thread())
        return loads(text)

    monkeypatch.setattr(json, "loads", noted)
    for body, is_read in (('{"input": "Hello"}', False), ('{"stream": true}', True)):
        unfinished = UnfinishedResponse("resp_1", "local", body, "[]", 3, 1000, path="/v1/responses")
        assert asyncio.run(background._has_read_events(unfinished)) is is_read
    assert threads[0] is not threading.current_thread()


def test_response_is_left_to_the_next_process_if_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, failed = list[None](), list[str]()

    async def pass_at_once(*_: object) -> None: ...

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        answered.append(None)
        shared.stopping = len(answered) == background.MAX_FAILURES
        await JSONResponse({}, 503)(scope, receive, send)

    async def with_current_key(caller: object) -> object:
        return caller

    async def save_response(owner: str, response: StoredResponse) -> None:
        failed.append(response.id)

    records = SimpleNamespace(delete_unfinished_response=pass_at_once)
    store = SimpleNamespace(records=records, save_response=save_response)
    shared: Any = SimpleNamespace(stopping=False, engine=SimpleNamespace(wait_for_first_load=pass_at_once), store=store)
    ring: Any = SimpleNamespace(with_current_key=with_current_key)
    monkeypatch.setattr(background, "LONGEST_PAUSE_SECONDS", 0)
    monkeypatch.setattr(background, "LONGEST_RETRY_SECONDS", 0)
    responses = background.BackgroundResponses(shared, ring)
    left = UnfinishedResponse("resp_1", "local", "{}", '["local", ""]', 3, 1000)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(responses._continue_claimed(cast(Any, None), answer, left))
    assert len(answered) == background.MAX_FAILURES and not failed
