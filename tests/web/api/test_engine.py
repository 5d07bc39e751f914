"""The engine's own endpoints, which serve front ends that present the engine key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event
from notso.web.api.engine import routes
from notso.web.app import create_app
from notso.web.edge.access import front_ends_only
from notso.web.engine.remote.engine_link import WIRE_PATH
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings

KEY = "a key for front ends only"
SHOWN = {"Authorization": f"Bearer {KEY}"}
QUESTION: dict[str, Any] = {"prompt": [{"role": "user", "content": "Hello"}], "params": {}, "options": {}}
ROUTES = {f"POST {WIRE_PATH}/{name}" for name in ("events", "submit", "prepare", "steer", "call")}

Start = Callable[..., Any]


@pytest.fixture
def engine(start: Start) -> Any:
    return start(ScriptedEngine(), engine_api=True, engine_key=KEY).ready()


def dependencies(settings: Settings) -> dict[str, list[Any]]:
    app = create_app(ScriptedEngine, settings)
    found = {}
    for context in iter_route_contexts(app.routes):
        dependant: Any = getattr(context, "dependant", None) or context.original_route.dependant  # type: ignore[attr-defined]
        for method in context.original_route.methods:  # type: ignore[attr-defined]
            found[f"{method} {context.path}"] = [each.call for each in dependant.dependencies]
    return found


def test_engine_endpoints_exist_only_if_enabled(tmp_path: Any) -> None:
    plain = dependencies(Settings(data_dir=tmp_path))
    serving = dependencies(Settings(data_dir=tmp_path, engine_api=True, engine_key=KEY))
    assert serving.keys() - plain.keys() == ROUTES
    assert all(front_ends_only in serving[each] for each in ROUTES)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {**SHOWN, "x-api-key": "another"}])
def test_engine_endpoints_reject_other_keys(engine: Any, headers: dict[str, str]) -> None:
    for route in ROUTES:
        assert engine.client.post(route.removeprefix("POST "), json=QUESTION, headers=headers).status_code == 401


def test_engine_key_grants_only_engine_endpoints(start: Start) -> None:
    server = start(ScriptedEngine(), engine_api=True, engine_key=KEY, api_key="another key, of programs").ready()
    assert server.client.get("/v1/models", headers=SHOWN).status_code == 401
    programs = {"Authorization": "Bearer another key, of programs"}
    assert server.client.get("/v1/models", headers=programs).status_code == 200
    assert server.client.post(f"{WIRE_PATH}/call", json={}, headers=programs).status_code == 401


def test_wrong_engine_keys_are_rate_limited(start: Start) -> None:
    server = start(ScriptedEngine(), engine_api=True, engine_key=KEY, requests_per_minute=3).ready()
    wrong = [server.client.post(f"{WIRE_PATH}/call", headers={"x-api-key": "x"}).status_code for _ in range(5)]
    assert wrong == [401] * 3 + [429] * 2


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("call", {"method": "close", "arguments": {}}),
        ("call", {"method": "__class__", "arguments": {}}),
        ("call", {"method": "tokenize", "arguments": {"self": 1}}),
        ("call", {"method": "tokenize", "arguments": {"text": ["a"]}}),
        ("call", []),
        ("prepare", {"prompt": 1, "params": {}, "options": {}}),
        ("prepare", {**QUESTION, "params": {"colour": 1}}),
        ("submit", QUESTION),
        ("submit", {**QUESTION, "session": 1, "number": 1}),
        ("events", {"session": "s", "read": [], "pending": [], "up_to": 0}),
        ("events", {"session": "s", "read": {"x": 1}, "pending": [], "up_to": 0}),
        ("steer", {"session": "s", "stop": ["all"]}),
    ],
)
def test_invalid_engine_request_returns_400(engine: Any, name: str, body: Any) -> None:
    answer = engine.client.post(f"{WIRE_PATH}/{name}", json=body, headers=SHOWN)
    assert answer.status_code == 400 and "EngineError" in answer.json()["error"]["kinds"]
    assert not engine.app.state.front_ends._sessions


def test_out_of_range_parameter_is_named_in_error(engine: Any) -> None:
    asked = {**QUESTION, "params": {"top_p": 7}}
    answer = engine.client.post(f"{WIRE_PATH}/prepare", json=asked, headers=SHOWN)
    assert answer.status_code == 200 and answer.json()["error"]["param"] == "top_p"


def test_unknown_session_reports_lost_connection(engine: Any) -> None:
    for name, body in (("submit", {**QUESTION, "session": "s", "number": 1}), ("steer", {"session": "s", "stop": [1]})):
        told = engine.client.post(f"{WIRE_PATH}/{name}", json=body, headers=SHOWN).json()
        assert "connection to the engine was lost" in told["error"]["message"]


def test_clear_cache_reaches_unloaded_engine(start: Start) -> None:
    scripted = ScriptedEngine()
    server = start(scripted, engine_api=True, engine_key=KEY, keep_alive_seconds=0.0)
    server.wait(lambda: scripted.closed and server.shared.engine.state == "unloaded")
    body = {"method": "clear_cache", "arguments": {"owner": "local", "conversation": "c"}}
    assert server.client.post(f"{WIRE_PATH}/call", json=body, headers=SHOWN).json() == {"result": None}
    assert scripted.cleared == [("local", "c")]


def test_unread_session_expires(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end disconnected before it read the first line."""
    monkeypatch.setattr(routes, "SESSION_SECONDS", 0.01)
    ends = engine.app.state.front_ends

    async def begin() -> None:
        ends.session("s")
        assert ends._sessions

    engine.on_loop(begin)
    engine.wait(lambda: not ends._sessions)


def test_session_does_not_expire_while_its_next_stream_opens(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = engine.app.state.front_ends

    async def reopen() -> bool:
        monkeypatch.setattr(routes, "SESSION_SECONDS", 0.0)
        sessions.session("one")
        monkeypatch.setattr(routes, "SESSION_SECONDS", 600.0)
        lines = sessions.session("one").lines({}, [], 0)
        await asyncio.sleep(0.0)  # the earlier timer is due
        await asyncio.sleep(0.0)
        await anext(lines)
        await lines.aclose()
        return sessions.existing_session("one") is not None

    assert engine.on_loop(reopen)


def test_broken_requests_are_not_reported_as_failures_of_the_engine(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = engine.address.removeprefix("http://").split(":")
    head = f"POST {WIRE_PATH}/call HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
    for half in (b"", b'{"me'):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + half)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(1)
    assert not [record for record in caplog.records if "a front end" in record.getMessage()]


def test_sessions_and_running_responses_are_limited(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(messages: object, thinking: bool) -> Iterator[Event]:
        while True:
            yield from say("word ")

    monkeypatch.setattr(routes, "MAX_OPEN", 2)
    monkeypatch.setattr(routes, "MAX_SESSIONS", 1)
    engine.shared.engine.engine.script = endless
    engine.shared.engine.engine.pace_seconds = 0.01
    empty = {"read": {}, "pending": [], "up_to": 0}
    with httpx.Client(base_url=engine.address, headers=SHOWN, timeout=60) as client:
        with client.stream("POST", f"{WIRE_PATH}/events", json={"session": "s", **empty}) as stream:
            next(stream.iter_bytes())
            told = [
                client.post(f"{WIRE_PATH}/submit", json={**QUESTION, "session": "s", "number": number}).json()
                for number in (1, 1, 2, 3)
            ]
            assert [each.get("result") for each in told] == [*[engine.app.state.front_ends._sessions["s"].id] * 3, None]
            assert "2 running responses" in told[-1]["error"]["message"]
            assert len(engine.app.state.front_ends._sessions["s"]._answers) == 2, "a repeated submission is ignored"
            second = client.post(f"{WIRE_PATH}/events", json={"session": "t", **empty}).json()
            assert second["error"]["message"] == "too many front ends"
        # A front end that reopens the stream without naming these answers has abandoned them.
        with client.stream("POST", f"{WIRE_PATH}/events", json={"session": "s", **empty, "up_to": 3}) as stream:
            next(stream.iter_bytes())
            engine.wait(lambda: not engine.shared.engine.stats().running)


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"engine_api": True}, "engine_key"),
        ({"engine_url": "http://engine:3000"}, "engine_key"),
        ({"engine_api": True, "engine_key": "short"}, "engine_key"),
        ({"engine_api": True, "engine_key": KEY, "engine_url": "http://engine:3000"}, "engine_api"),
        *(
            ({"engine_url": url, "engine_key": KEY}, "engine_url")
            for url in ("engine:3000", "ftp://engine", "http://", "http://a@engine", "http://engine/v1", "http://e:x")
        ),
    ],
)
def test_invalid_engine_settings_are_rejected(wrong: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**wrong)
    assert caught.value.setting == setting


def test_engine_change_listener_is_registered_once(engine: Any) -> None:
    ends, host = engine.app.state.front_ends, engine.shared.engine

    async def come_and_go() -> tuple[int, int]:
        for number in range(5):
            ends.remove(ends.session(f"session {number}"))
        last = ends.session("last")
        before = host.when_changed.count(ends._on_host_changed)
        host._notify_changed()
        after = host.when_changed.count(ends._on_host_changed)
        woken = last._stream.changed.is_set()
        ends.remove(last)
        assert woken
        return before, after

    assert engine.on_loop(come_and_go) == (1, 1)
