"""Rendering, parsing and saving never block the event loop for long, and nothing wakes it needlessly."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from scripted_engine import ScriptedEngine, say

from notso.web import app
from notso.web.server import DATE_SECONDS
from notso.web.values.ids import new_id
from notso.web.values.settings import Settings

Start = Callable[..., Any]

MAX_HELD_SECONDS = 0.1  # CPU time of the event loop's thread between two wake-ups of the probe
MAX_LAG_SECONDS = 5.0  # wall time; generous, because the test machine may be busy


class LagProbe:
    """Sleep 5 ms on a loop repeatedly; record how much longer each sleep took and the thread's CPU time meanwhile."""

    def __init__(self, server: Any) -> None:
        self.lags: list[float] = []
        self.held: list[float] = []
        self._stop = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(), server.shared.engine._loop)

    async def _run(self) -> None:
        while not self._stop.is_set():
            began, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.lags.append(time.perf_counter() - began - 0.005)
            self.held.append(time.thread_time() - used)

    def finish(self) -> None:
        self._stop.set()
        self._future.result(60)


def test_event_loop_is_not_blocked_by_hostile_text_or_large_forms(start: Start) -> None:
    hostile = "".join(
        ("![" * 4000, "\n\n", "|a" * 500, "\n", "|-" * 500, "\n", ("|b" * 500 + "\n") * 20, "\n\n# x\n\n")
    )
    code = "\n\n```python\n" + "x = {1: [2, 3]}  # y\n" * 600 + "```\n\n"
    script = lambda messages, thinking: say(hostile + code, piece=997)  # noqa: E731
    server = start(ScriptedEngine(script, pace_seconds=0.01)).ready()
    probe = LagProbe(server)
    asked = server.ask("go")
    for _ in range(5):
        assert (
            server.client.post("/chats", content=b"x=" + b"%41" * 349_000, headers={"Content-Type": FORM}).status_code
            == 400
        )
        server.client.post("/chats", data={"text": "é" * 150_000 + "\x00", "key": new_id()})
    server.finished(asked)
    assert server.client.get(f"/chats/{asked.chat_id}").status_code == 200
    probe.finish()
    assert len(probe.lags) > 50
    assert max(probe.held) < MAX_HELD_SECONDS
    assert max(probe.lags) < MAX_LAG_SECONDS


def test_event_loop_is_not_blocked_by_a_large_inline_file(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    data = base64.b64encode(b"<!-- %s --><p>x" % (b"x" * (15 << 20))).decode()
    parts = [{"type": "file", "file": {"filename": "a.html", "file_data": f"data:text/html;base64,{data}"}}]
    probe = LagProbe(server)
    answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    probe.finish()
    assert answer.status_code == 200, answer.text
    assert max(probe.held) < MAX_HELD_SECONDS


FORM = "application/x-www-form-urlencoded"


def is_coroutine(call: Any) -> bool:
    return iscoroutinefunction(call) or iscoroutinefunction(type(call).__call__)


def test_dependencies_of_routes_do_not_wait_for_a_thread(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine_api=True, engine_key="a key that is long enough")
    calls = set()
    for context in iter_route_contexts(app.create_app(ScriptedEngine, settings).routes):
        pending = [context.original_route.dependant]  # type: ignore[attr-defined]
        while pending:
            found = pending.pop().dependencies
            pending += found
            calls.update(each.call for each in found)
    assert len(calls) > 5 and not [call for call in calls if not is_coroutine(call)]


def test_livez_responds_while_engine_is_busy(start: Start) -> None:
    release = threading.Event()

    def busy(messages: Any, thinking: bool) -> Any:
        assert release.wait(60)
        return say("done")

    server = start(ScriptedEngine(busy)).ready()
    asked = server.ask("go")
    assert server.client.get("/livez").status_code == 200
    assert server.client.get("/health").status_code == 200
    assert server.stored(asked).active
    release.set()
    server.finished(asked)


def test_freed_memory_is_returned_repeatedly_by_another_thread(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(app, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(app, "release_freed_memory", lambda: threads.append(threading.get_ident()))
    server = start(ScriptedEngine()).ready()
    server.wait(lambda: len(threads) >= 3)
    assert server.on_loop(threading.get_ident) not in threads


def test_idle_server_has_no_timer_and_updates_date_on_connect(start: Start) -> None:
    running = start(ScriptedEngine()).ready()
    running.client.close()
    running._wait(lambda: not running.server.server_state.connections)
    assert running.server._tick_timeout is None
    # a Date header far in the past
    running.server.server_state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
    begun = int(time.time())
    with httpx.Client(base_url=running.address, timeout=60) as client:
        date = parsedate_to_datetime(client.get("/livez").headers["date"]).timestamp()
        assert begun <= date <= time.time()
        assert running.server._tick_timeout == DATE_SECONDS
    running.close()
