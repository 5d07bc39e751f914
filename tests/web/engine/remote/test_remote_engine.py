"""A remote engine: connections break, the engine restarts, and each answer still arrives complete and exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_engine import DEFAULT_ANSWER, ScriptedEngine, say
from web.engine.remote.test_engine_link import KEY, read_request, text, wait

from notso.smollm3 import (
    AdapterSource,
    EngineError,
    Event,
    Generation,
    InvalidRequestError,
    MemoryBudget,
    Message,
    RequestOptions,
    SamplingParams,
)
from notso.web.api.engine import routes
from notso.web.engine.remote import engine_link
from notso.web.engine.remote.engine_link import EngineLink
from notso.web.engine.remote.remote_engine import RemoteSource
from notso.web.values.errors import EngineUnavailableError

ENGINE: dict[str, Any] = {"engine_api": True, "engine_key": KEY}
ASKED = (Message("user", "Hello"),)
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}

Start = Callable[..., Any]


class Relay:
    """A relay between a front end and its engine that can cut open connections and refuse new ones."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_open = True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, stay_away: bool = False) -> None:
        self.is_open = not stay_away
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._pairs = []

    def close(self) -> None:
        self.cut(stay_away=True)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if not self.is_open:
                here.close()
                continue
            try:
                pair = here, socket.create_connection(self._to)
            except OSError:
                here.close()
                continue
            self._pairs.append(pair)
            threading.Thread(target=self._carry, args=(pair,), daemon=True).start()

    @staticmethod
    def _carry(pair: tuple[socket.socket, socket.socket]) -> None:
        here, there = pair
        with here, there, contextlib.suppress(OSError):
            while True:
                for each in select.select(pair, [], [])[0]:
                    data = each.recv(65_536)
                    if not data:
                        return
                    (there if each is here else here).sendall(data)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts: an engine counts as lost within a second, but not after one broken connection."""
    monkeypatch.setattr(engine_link, "LOST_SECONDS", 0.6)
    monkeypatch.setattr(engine_link, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(engine_link, "LOST_RETRY_SECONDS", 0.05)


@pytest.fixture
def relayed() -> Iterator[Callable[[str], tuple[Relay, RemoteSource]]]:
    """Return a function that connects to an engine through a relay."""
    made: list[Any] = []

    def to(address: str) -> tuple[Relay, RemoteSource]:
        relay = Relay(address)
        source = RemoteSource(relay.address, KEY)
        made.extend([source, relay])
        return relay, source

    yield to
    for each in made:
        each.close()


Relayed = Callable[[str], tuple[Relay, RemoteSource]]


class Steps:
    """A script that writes one word for each `let`."""

    def __init__(self) -> None:
        self._let = threading.Semaphore(0)
        self._ended = False

    def let(self, times: int = 1) -> None:
        self._let.release(times)

    def end(self) -> None:
        self._ended = True
        self._let.release()

    def __call__(self, messages: object, thinking: bool) -> Iterable[Event]:
        number = 0
        while not self._ended and self._let.acquire(timeout=60) and not self._ended:
            number += 1
            yield Event("text", text=f"{number} ")


def test_broken_connection_neither_loses_nor_repeats_events(start: Start, relayed: Relayed) -> None:
    steps = Steps()
    scripted = ScriptedEngine(steps, slots=2)
    relay, source = relayed(start(scripted, **ENGINE).ready().address)
    engine = source()
    generation = engine.submit(ASKED)
    for number in range(1, 9):
        steps.let()
        if number % 2:
            relay.cut()
        wait(lambda number=number: f"{number} " in text(generation.read()))
    relay.cut()
    steps.end()
    wait(lambda: generation.finished)
    events = generation.read()
    assert text(events) == "1 2 3 4 5 6 7 8 " and events[-1].finish_reason == "stop"
    assert [event.kind for event in events[-2:]] == ["usage", "end"]
    assert text(engine.submit(ASKED).events()) == "" and len(scripted.requests) == 2, "no request is submitted twice"


def test_events_that_arrive_before_the_submission_is_confirmed_are_not_repeated(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, confirmed, call = threading.Event(), threading.Event(), EngineLink.call

    def confirm_late(link: EngineLink, name: str, body: Any) -> Any:
        result = call(link, name, body)
        received.set()
        assert confirmed.wait(60)
        return result

    monkeypatch.setattr(EngineLink, "call", confirm_late)
    steps = Steps()
    relay, source = relayed(start(ScriptedEngine(steps), **ENGINE).ready().address)
    engine = source()
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(engine.submit, ASKED)
        try:
            assert received.wait(60)
            for _ in range(2):
                seen = sum(entry.events for entry in engine._link._open.values())
                steps.let()
                wait(lambda seen=seen: not engine._link._open or engine._link._open[1].events > seen)
                relay.cut()
        finally:
            confirmed.set()
            steps.end()
    wait(lambda: submitted.result().finished)
    assert text(submitted.result().read()) == "1 2 "


def test_connection_that_breaks_before_a_submission_does_not_end_its_answer(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened, begun, call, handle_line = threading.Event(), threading.Event(), EngineLink.call, EngineLink._handle_line
    scripted, streams = ScriptedEngine(), list[Any]()
    relay, source = relayed(start(scripted, **ENGINE).ready().address)
    engine = source()
    scripted.gate.clear()

    def submit_late(link: EngineLink, name: str, body: Any) -> Any:
        if name == "submit":
            relay.cut()
            assert reopened.wait(60)
            streams.append(link._stream)
        return call(link, name, body)

    def handle_late(link: EngineLink, line: dict[str, Any]) -> None:
        if "known" in line:
            reopened.set()
            assert begun.wait(60)
        handle_line(link, line)

    monkeypatch.setattr(EngineLink, "call", submit_late)
    monkeypatch.setattr(EngineLink, "_handle_line", handle_late)
    generation = engine.submit(ASKED)
    begun.set()
    scripted.gate.set()
    wait(lambda: generation.finished)
    assert text(generation.read()) == DEFAULT_ANSWER
    assert streams == [engine._link._stream], "the stream is not opened again"


@pytest.mark.parametrize("is_noticed", [True, False])
def test_submission_that_arrives_after_its_stop_is_not_run(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    scripted, call, late = ScriptedEngine(), EngineLink.call, list[Any]()
    relay, source = relayed(start(scripted, **ENGINE).ready().address)
    engine = source()

    def call_late(link: EngineLink, name: str, body: Any) -> Any:
        if name == "submit" and not late:
            late.append(body)
            raise EngineUnavailableError("the connection broke")
        return call(link, name, body) if is_noticed or name != "steer" else None

    monkeypatch.setattr(EngineLink, "call", call_late)
    with pytest.raises(EngineUnavailableError):
        engine.submit(ASKED)
    source._link._steering.join()
    if not is_noticed:  # only the next request for events shows that the answer is not wanted
        stream = source._link._stream
        relay.cut()
        wait(lambda: source._link._stream is not stream)
    assert text(engine.submit(ASKED).events()) == DEFAULT_ANSWER
    with pytest.raises(EngineUnavailableError, match="has dropped"):
        call(source._link, "submit", late[0])
    assert len(scripted.requests) == 1


def test_stop_during_connection_loss_is_delivered_later(start: Start, relayed: Relayed) -> None:
    steps = Steps()
    scripted = ScriptedEngine(steps)
    relay, source = relayed(start(scripted, **ENGINE).ready().address)
    generation = source().submit(ASKED)
    steps.let()
    wait(lambda: text(generation.read()) == "1 ")
    relay.cut(stay_away=True)
    generation.stop()
    source._link._steering.join()
    relay.is_open = True
    while not generation.finished:
        steps.let()
        time.sleep(0.005)
    assert generation.read()[-1].finish_reason == "cancelled"


@pytest.mark.parametrize("error", [EngineUnavailableError("the engine is busy"), InvalidRequestError("no session")])
def test_stop_that_cannot_be_sent_is_delivered_despite_intact_stream(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    call = EngineLink.call

    def refuse(link: EngineLink, name: str, body: Any) -> Any:
        if name == "steer":
            raise error
        return call(link, name, body)

    monkeypatch.setattr(EngineLink, "call", refuse)
    scripted = ScriptedEngine()
    scripted.gate.clear()  # the answer ends only if it is stopped
    _, source = relayed(start(scripted, **ENGINE).ready().address)
    generation = source().submit(ASKED)
    wait(lambda: bool(generation.read()))
    generation.stop()
    wait(lambda: generation.finished)
    assert generation.read()[-1].finish_reason == "cancelled"


def test_stop_sends_network_request_from_link_thread(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    ask = EngineLink.call

    def call(link: EngineLink, name: str, body: Any) -> Any:
        threads.append(f"{name} {threading.current_thread().name}")
        return ask(link, name, body)

    steps = Steps()
    _, source = relayed(start(ScriptedEngine(steps), **ENGINE).ready().address)
    engine = source()
    generation = engine.submit(ASKED)
    monkeypatch.setattr(EngineLink, "call", call)
    generation.answer_now()
    generation.stop()
    assert engine.stats() is not None and not engine.adapters.infos
    source._link._steering.join()
    steps.end()
    wait(lambda: generation.finished)
    assert set(threads) == {"steer notso-link"}


def test_front_end_serves_pages_and_api_from_remote_engine(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    scripted = ScriptedEngine(slots=4)
    _, source = relayed(start(scripted, **ENGINE).ready().address)
    front = start(source, data_dir=tmp_path / "front", engine_url="http://engine:3000", engine_key=KEY).ready()
    asked = front.ask("Hello")
    assert front.finished(asked).content == DEFAULT_ANSWER
    said = front.client.post("/v1/chat/completions", json=CHAT).json()
    assert said["choices"][0]["message"]["content"] == DEFAULT_ANSWER
    assert front.client.post("/tokenize", json={"content": "ab"}).json()["tokens"] == [97, 98]
    assert front.client.get("/health").json() == {"status": "ok", "model": "Scripted", "demo": True, "device": "cpu"}
    for page in ("/", "/models", "/metrics", "/props", "/slots", "/v1/models", "/api/tags"):
        assert front.client.get(page).status_code == 200, page
    refused = front.client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a.gguf"})
    assert refused.status_code == 403
    front.client.post(f"/chats/{asked.chat_id}/delete")
    front.on_loop(lambda: front.shared.engine.clear_cache("local", "first"))
    assert scripted.cleared == [("local", "first")]


def test_lost_engine_is_reported_and_reconnected(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    steps = Steps()
    relay, source = relayed(start(ScriptedEngine(steps), **ENGINE).ready().address)
    front = start(source, data_dir=tmp_path / "front").ready()
    asked = front.ask("Hello")
    steps.let(3)
    front.stream(asked, until=lambda event: "1 2 3" in event.data)
    relay.cut(stay_away=True)
    assert front.finished(asked).state != "done"
    front.wait(lambda: front.client.get("/health").json() == {"status": "failed"})
    said = front.client.post("/v1/chat/completions", json=CHAT)
    assert said.status_code == 503 and "does not respond" in said.json()["error"]["message"]
    assert said.headers["retry-after"] == "5", "the front end tries to reconnect every second"
    assert "1 2 3" in front.client.get(f"/chats/{asked.chat_id}").text, "the text so far is kept"
    relay.is_open = True
    front.wait(lambda: front.client.get("/health").status_code == 200)
    steps.end()
    assert front.client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"model": "scripted", **CHAT}),
    ],
)
def test_requests_before_the_loss_of_an_engine_is_noticed_may_be_repeated(
    start: Start, relayed: Relayed, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    monkeypatch.setattr(engine_link, "LOST_SECONDS", 600.0)
    relay, source = relayed(start(ScriptedEngine(), **ENGINE).ready().address)
    front = start(source, data_dir=tmp_path / "front").ready()
    relay.cut(stay_away=True)  # as after a kill
    answer = front.client.post(path, json=body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
    assert "does not respond" in answer.json()["error"]["message"]


def test_requests_may_be_repeated_until_a_restarted_engine_knows_the_front_end(
    start: Start, relayed: Relayed, tmp_path: Any
) -> None:
    _, source = relayed(start(ScriptedEngine(), **ENGINE).ready().address)
    front = start(source, data_dir=tmp_path / "front").ready()
    source._link._session = "unknown"  # as for a new process, which has not received the request for events yet
    answer = front.client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
    assert "send the request again" in answer.json()["error"]["message"]


def test_a_front_end_may_start_before_its_engine(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    engine = start(ScriptedEngine(), **ENGINE).ready()
    relay, source = relayed(engine.address)
    relay.cut(stay_away=True)
    front = start(source, data_dir=tmp_path / "front")
    front.wait(lambda: front.client.get("/health").json() == {"status": "failed"})
    relay.is_open = True
    front.ready()


def test_engine_restart_fails_running_response(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    steps = Steps()
    first, second = start(ScriptedEngine(steps), **ENGINE).ready(), ScriptedEngine()
    relay, source = relayed(first.address)
    engine = source()
    generation = engine.submit(ASKED)
    anew = start(second, **ENGINE, data_dir=tmp_path / "anew").ready()
    host, _, port = anew.address.removeprefix("http://").rpartition(":")
    relay._to = (host, int(port))
    relay.cut()
    wait(lambda: generation.finished)
    error = generation.read()[-1].error
    assert isinstance(error, EngineError) and "was restarted" in str(error)
    assert text(engine.submit(ASKED).events()) == DEFAULT_ANSWER, "the restarted engine has the same model"
    steps.end()


@pytest.mark.parametrize("is_read", [True, False], ids=["stream-first", "response-first"])
def test_engine_restart_during_submission_fails_response(
    start: Start, relayed: Relayed, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    submitted = threading.Event()
    monkeypatch.setattr(engine_link, "LOST_SECONDS", 600.0)
    first = start(ScriptedEngine(), **ENGINE).ready()
    anew = start(ScriptedEngine(), **ENGINE, data_dir=tmp_path / "anew").ready()
    relay, source = relayed(first.address)
    engine, link, received = source(), source._link, list[Any]()
    call, handle_line = EngineLink.call, EngineLink._handle_line

    def handle(link: EngineLink, line: dict[str, Any]) -> None:
        if is_read or "known" not in line:
            handle_line(link, line)
        received.append(line)
        if not is_read and "known" in line:
            assert submitted.wait(60)
            handle_line(link, line)

    def call_late(link: EngineLink, name: str, body: Any) -> Any:
        if name != "submit":
            return call(link, name, body)
        monkeypatch.setattr(EngineLink, "call", call)
        relay.cut(stay_away=True)
        headers = {"Authorization": f"Bearer {KEY}"}
        response = first.client.post(f"{engine_link.WIRE_PATH}/submit", json=body, headers=headers).json()
        received.clear()
        host, _, port = anew.address.removeprefix("http://").rpartition(":")
        relay._to = (host, int(port))
        relay.is_open = True
        wait(lambda: any("known" in line for line in received))
        return response["result"]

    monkeypatch.setattr(EngineLink, "_handle_line", handle)
    monkeypatch.setattr(EngineLink, "call", call_late)
    generation = engine.submit(ASKED)
    submitted.set()
    wait(lambda: generation.finished)
    assert "was restarted" in str(generation.read()[-1].error)
    assert not link._open and text(engine.submit(ASKED).events()) == DEFAULT_ANSWER


def test_engine_model_switch_keeps_running_response(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    steps = Steps()
    server = start(ScriptedEngine(steps), **ENGINE).ready()
    _, source = relayed(server.address)
    front = start(source, data_dir=tmp_path / "front").ready()
    asked = front.ask("Hello")
    steps.let()
    front.stream(asked, until=lambda event: re.search(r">1\b", event.data) is not None)
    server.on_loop(lambda: server.shared.engine.switch(lambda: ScriptedEngine(name="Other")))
    front.wait(lambda: front.shared.engine.state == "loading")
    steps.let()
    front.stream(asked, until=lambda event: re.search(r">1 2\b", event.data) is not None)
    steps.end()
    stored = front.finished(asked)
    assert (stored.content, stored.state) == ("1 2 ", "done")
    # While the front end loads the engine again, /health still names the earlier model.
    front.wait(lambda: front.client.get("/health").json()["model"] == "Other")


def test_engine_that_loads_an_idle_model_again_is_not_lost(start: Start, relayed: Relayed, tmp_path: Any) -> None:
    """The available memory is measured at each load, so a part of the model's description changes."""
    loads = itertools.count(1)

    def load() -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.info = replace(engine.info, memory=MemoryBudget(1, 1, 1, 1, next(loads), "the system"))
        return engine

    server = start(load, **ENGINE, keep_alive_seconds=0.0)
    server.wait(lambda: server.shared.engine.state == "unloaded")
    _, source = relayed(server.address)
    front = start(source, data_dir=tmp_path / "front").ready()
    for number in (2, 3):
        assert front.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        wait(lambda number=number: f"available_bytes={number}," in repr(source._link.about.info))
        server.wait(lambda: server.shared.engine.state == "unloaded")
    assert (front.shared.engine.default.loads, front.shared.engine.state) == (1, "ready")


def test_engine_shutdown_fails_running_response(start: Start, relayed: Relayed) -> None:
    steps = Steps()
    server = start(ScriptedEngine(steps), **ENGINE, drain_seconds=0.0).ready()
    _, source = relayed(server.address)
    generation = source().submit(ASKED)
    server.server.handle_exit(15, None)
    while not generation.finished:
        steps.let()
        time.sleep(0.005)
    error = generation.read()[-1].error
    assert isinstance(error, EngineError) and "stopped during this response" in str(error)
    with pytest.raises(EngineError):
        source()
    steps.end()


@pytest.mark.parametrize("is_begun", [True, False])
def test_stream_of_a_stopping_engine_ends_after_all_events(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    monkeypatch.setattr(routes, "HEARTBEAT_SECONDS", 0.0)
    words = [Event("text", text=f"{number} ") for number in range(routes.MAX_EVENTS_PER_LINE)]
    last = Event("end", finish_reason="stop" if is_begun else "cancelled")
    shared = SimpleNamespace(stopping=True, engine=SimpleNamespace(stats=lambda: None))
    front_ends: Any = SimpleNamespace(
        services=SimpleNamespace(shared=shared), about=lambda: None, remove=lambda session: None
    )
    running: Any = SimpleNamespace(close=lambda: None)

    async def read() -> list[str]:
        session, generation, begun = (
            routes.FrontEndSession(front_ends),
            Generation(lambda: None),
            asyncio.Future[None](),
        )
        begun.set_result(None)
        answer = routes._Answer(running, cast(Any, begun), generation if is_begun else None, stopped=not is_begun)
        session._answers[1] = answer
        lines = []
        async for line in session.lines({}, [1], 1):
            lines.append(json.loads(line))
            assert len(lines) < 9, "the stream does not end"
            if len(lines) == 2 and is_begun:  # after the line was built
                generation.write([*words, last], last=True)
        return [event["kind"] for line in lines for event in line.get("answers", {}).get("1", [0, []])[1]]

    assert asyncio.run(read()) == [*(["text"] * len(words) if is_begun else []), "end"]


def test_large_events_of_many_answers_arrive_in_several_lines(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "LOST_SECONDS", 600.0)
    monkeypatch.setattr(engine_link, "MAX_LINE_BYTES", 3 * routes.LINE_BYTES)
    parts = [f"{number}:" + "x" * (routes.LINE_BYTES + number) for number in range(3)]
    scripted = ScriptedEngine(lambda messages, thinking: [Event("text", text=part) for part in parts], slots=2)
    relay, source = relayed(start(scripted, **ENGINE).ready().address)
    engine = source()
    scripted.gate.clear()
    generations = [engine.submit(ASKED) for _ in range(2)]
    relay.cut(stay_away=True)
    scripted.gate.set()
    wait(lambda: not scripted.stats().running)
    relay.is_open = True
    for generation in generations:
        wait(lambda generation=generation: generation.finished)
        assert text(generation.read()) == "".join(parts) and generation.read()[-1].finish_reason == "stop"


ERROR_OF_OPENAI = {"code": "engine_lost", "type": "server_error", "param": None}
LOST_ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (CHAT, ERROR_OF_OPENAI),
    "/v1/completions": ({"prompt": "a"}, ERROR_OF_OPENAI),
    "/v1/responses": ({"input": "a"}, ERROR_OF_OPENAI),
    "/completion": ({"prompt": "a"}, ERROR_OF_OPENAI),
    "/v1/messages": ({"model": "scripted", "max_tokens": 9, **CHAT}, {"type": "overloaded_error"}),
    "/api/chat": ({"model": "scripted", "stream": False, **CHAT}, {}),
    "/api/generate": ({"model": "scripted", "stream": False, "prompt": "a"}, {}),
}


@pytest.mark.parametrize("path", LOST_ANSWERS)
def test_a_whole_response_may_be_repeated_after_engine_shutdown(
    start: Start, relayed: Relayed, tmp_path: Any, path: str
) -> None:
    steps, (body, fields) = Steps(), LOST_ANSWERS[path]
    scripted = ScriptedEngine(steps)
    server = start(scripted, **ENGINE, drain_seconds=0.0).ready()
    _, source = relayed(server.address)
    front = start(source, data_dir=tmp_path / "front").ready()

    def has_ended() -> bool:
        steps.let()
        return sending.done()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(front.client.post, path, json=body)
        wait(lambda: scripted.stats().running)
        server.server.handle_exit(15, None)
        wait(has_ended)
    steps.end()
    answer = sending.result()
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
    error = answer.json()["error"]
    message = error["message"] if fields else error
    assert "stopped during this response" in message
    assert all(error[name] == value for name, value in fields.items()), error


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine_api": True, "engine_key": "another key than that"}, "NOTSO_ENGINE_KEY"),
        ({}, "--engine-api"),
    ],
)
def test_connection_error_names_setting_to_fix(start: Start, settings: dict[str, Any], told: str) -> None:
    source = RemoteSource(start(ScriptedEngine(), **settings).ready().address, KEY)
    with pytest.raises(EngineError, match=told):
        source()
    source.close()


def test_connection_error_contains_the_reason_of_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_SESSIONS", 0)
    source = RemoteSource(start(ScriptedEngine(), **ENGINE).ready().address, KEY)
    with pytest.raises(EngineError, match="too many front ends"):
        source()
    source.close()


def test_unknown_host_error_names_allow_host_option(start: Start) -> None:
    address = start(ScriptedEngine(), **ENGINE).ready().address.replace("127.0.0.1", "127.0.0.2")
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.2", port)) == 0:
            pytest.fail("the server listens on more than one address")
    relay = Relay(address.replace("127.0.0.2", "127.0.0.1"))
    source = RemoteSource(relay.address.replace("127.0.0.1", "0.0.0.0"), KEY)
    with pytest.raises(EngineError, match=r"--allow-host 0\.0\.0\.0"):
        source()
    source.close()
    relay.close()


def test_non_engine_server_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    read_request(connection)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[1, 2, 3]\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        source = RemoteSource(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY)
        with pytest.raises(EngineError, match="sent an invalid message"):
            source()
        source.close()


def test_engine_rejection_is_raised_at_front_end(start: Start, relayed: Relayed) -> None:
    refusal = InvalidRequestError("no such thing", param="top_p")
    scripted = ScriptedEngine(refusal=refusal)
    _, source = relayed(start(scripted, **ENGINE).ready().address)
    engine = source()
    with pytest.raises(InvalidRequestError, match="no such thing") as caught:
        engine.submit(ASKED, SamplingParams(), RequestOptions())
    assert caught.value.param == "top_p" and not source._link._open
    for wrong in (lambda: engine.adapters.add(AdapterSource("a", "a.gguf")), lambda: engine.adapters.remove("a")):
        with pytest.raises(InvalidRequestError, match="loaded on the engine"):
            wrong()


def test_expired_front_end_session_stops_its_generations(
    start: Start, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SESSION_SECONDS", 0.05)

    def endless(messages: object, thinking: bool) -> Iterator[Event]:
        while True:
            yield from say("word ")

    scripted = ScriptedEngine(endless, pace_seconds=0.001)
    server = start(scripted, **ENGINE).ready()
    relay, source = relayed(server.address)
    source().submit(ASKED)
    wait(lambda: scripted.stats().running)
    relay.cut(stay_away=True)
    wait(lambda: not scripted.stats().running)
    server.wait(lambda: not server.app.state.front_ends._sessions)
