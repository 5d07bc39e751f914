"""Two servers over one store: an answer that one computes can be read and stopped at the other."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from scripted_engine import ScriptedEngine, say
from valkey_server import ValkeyServer
from web.turns.test_tool_questions import answer, curious, result, script, tool, waiting
from web.turns.test_tool_turns import Others, permit

from notso.smollm3 import Event
from notso.web.rendering.markdown import render_markdown
from notso.web.replicas import turn_relay
from notso.web.replicas.exchange import LocalExchange
from notso.web.store.protocol import ChatStore, Orphan, StoredMessage
from notso.web.tools.toolbox import Toolbox
from notso.web.turns.sse import Feed
from notso.web.turns.turns import Turns

ANSWER = "Some *text*.\n\n- one\n- two\n\n```python\nx = 1\n```\n\nThe **end**: 1 < 2 & U+2028 \u2028 here.\n"
KEY = "correct horse battery staple"

Replica = Callable[..., Any]


class QuotaCheck:
    """Engine that generates half an answer and waits for `open` before the rest."""

    def __init__(self, answer: str = ANSWER) -> None:
        self._go = threading.Event()
        self._answer = answer

    def __call__(self, messages: object, thinking: bool) -> Iterator[Event]:
        half = len(self._answer) // 2
        yield from say(self._answer[:half])
        self._go.wait(60)
        yield from say(self._answer[half:])

    def open(self) -> None:
        self._go.set()


@pytest.fixture
def gate() -> Iterator[QuotaCheck]:
    gate = QuotaCheck()
    yield gate
    gate.open()


def joined(*servers: Any) -> None:
    for server in servers:
        server.wait(lambda server=server: server.shared.exchange._at is not None)


def test_answer_can_be_resumed_at_another_replica(replica: Replica, gate: QuotaCheck, screen: Any) -> None:
    here, there = replica(ScriptedEngine(gate)), replica(ScriptedEngine(gate))
    joined(here, there)
    asked = here.ask("Hello", thinking=False)
    seen = here.stream(asked, until=lambda event: event.event == "message" and "one" in event.data)
    for event in seen:
        screen.apply(event)
    last = int(seen[-1].id)

    def opens(event: Any) -> bool:
        gate.open()
        return False

    rest = there.stream(asked, str(last), until=opens)
    for event in rest:  # begins with an older state if the reader is ahead of the other replica
        screen.apply(event)
    assert screen.html(asked.message_id, "answer") == render_markdown(ANSWER)
    assert (rest[-1].event, json.loads(rest[-1].data)["state"]) == ("done", "done")
    assert here.finished(asked).content == ANSWER
    assert there.stream(asked)[-1].event == "done", "the end is read from the database"


def endless(messages: object, thinking: bool) -> Iterator[Event]:
    while True:
        yield from say("word ")


def test_stop_reaches_replica_that_generates_answer(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "notso.access")
    here, there = (replica(ScriptedEngine(endless, pace_seconds=0.01)) for _ in range(2))
    joined(here, there)
    asked = here.ask("Hello", thinking=False)
    here.stream(asked, until=lambda event: event.event == "message" and "word" in event.data)
    with ExitStack() as reading:
        client = reading.enter_context(httpx.Client(base_url=there.address, timeout=60))
        stream = reading.enter_context(client.stream("GET", f"/generations/{asked.generation_id}/events"))
        assert there.client.post(f"/generations/{asked.generation_id}/stop").status_code == 303
        assert '"state": "stopped"' in "".join(stream.iter_text()), "the other replica must send the end to its reader"
    stored = here.finished(asked)
    assert stored.state == "stopped" and stored.content.startswith("word")
    assert f"generation ended: stopped by the user; id {asked.generation_id};" in caplog.text
    assert caplog.messages.count(f"stop requested; id {asked.generation_id}") == 2, "logged by both servers"


def test_elicitation_reply_reaches_replica_that_runs_tool(replica: Replica) -> None:
    here, there = replica(ScriptedEngine(script)), replica(ScriptedEngine(script))
    joined(here, there)
    here.chat.toolbox = Toolbox(Others(tool(curious)))
    assert here.client.post("/tools", data={"tool-odd": "on"}).status_code == 303
    turn = here.ask("Go", thinking=False)
    assert permit(here, turn).status_code == 200
    question = waiting(here, turn)
    assert answer(there, turn, question, **{"value-0": "", "value-1": "1"}).status_code == 200
    assert answer(there, turn, question, **{"value-0": "Ada", "value-1": "36"}).status_code == 200
    assert result(here, turn) == ["accept", {"name": "Ada", "age": 36}]
    assert answer(there, turn, question, **{"value-0": "Ada"}).status_code == 409


def test_chat_changes_are_sent_to_feeds_of_other_replicas(replica: Replica, event_reader: Any) -> None:
    here, there = replica(ScriptedEngine()), replica(ScriptedEngine())
    joined(here, there)
    asked = here.ask("Hello")
    here.finished(asked)
    revision = there.on_loop(lambda: there.chat.feed.revision)
    reader = event_reader()
    with there.client.stream("GET", f"/feed?chat={asked.chat_id}&after={revision}&tab=") as feed:
        here.client.post(f"/chats/{asked.chat_id}/title", data={"title": "another"})
        for chunk in feed.iter_raw():
            reader.feed(chunk)
            if any(event.event == "chats" for event in reader.events):
                break
        else:
            pytest.fail("the feed ended without the change")


def test_remote_reader_receives_end_after_valkey_failure(
    replica: Replica, gate: QuotaCheck, valkey: ValkeyServer, screen: Any
) -> None:
    here, there = replica(ScriptedEngine(gate)), replica(ScriptedEngine(gate))
    joined(here, there)
    asked = here.ask("Hello", thinking=False)

    def goes(event: Any) -> bool:
        if event.event == "message" and "one" in event.data:
            valkey.stop()
            gate.open()
        return False

    events = there.stream(asked, until=goes)
    for event in events:
        screen.apply(event)
    assert screen.html(asked.message_id, "answer") == render_markdown(ANSWER), "the final text comes from the database"
    assert (events[-1].event, json.loads(events[-1].data)["state"]) == ("done", "done")
    assert here.finished(asked).content == ANSWER
    again = here.ask("Again", asked.chat_id, thinking=False)
    assert here.finished(again).state == "done", "a reader at the replica that computes the answer is not affected"
    valkey.start()
    there.wait(lambda: not there.shared.exchange.is_unreachable and not here.shared.exchange.is_unreachable)


def test_interrupted_turn_ends_for_readers_on_other_replicas(replica: Replica, gate: QuotaCheck) -> None:
    """The heartbeat of any replica interrupts the answer in the store and publishes `ended`."""
    here, there = replica(ScriptedEngine(gate)), replica(ScriptedEngine(gate))
    joined(here, there)
    asked = here.ask("Hello", thinking=False)
    here.stream(asked, until=lambda event: event.event == "message" and "one" in event.data)

    orphan = Orphan("local", asked.chat_id, asked.message_id, asked.generation_id)
    told: list[bool] = []

    def interrupts(event: Any) -> bool:
        if not told and event.event == "message":
            told.append(True)
            ended = replace(there.stored(asked), state="interrupted")
            there.on_loop(lambda: there.shared.store.save_message(ended))
            there.on_loop(lambda: there.chat.relay.ended(orphan))
        return False

    events = there.stream(asked, until=interrupts)
    assert json.loads(events[-1].data)["state"] == "interrupted"


def test_copy_is_kept_for_a_reader_that_is_about_to_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader asks for the log, and waits for its first content, when the copy would soon be dropped."""
    monkeypatch.setattr(turn_relay, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(turn_relay, "UNREAD_SECONDS", 0.02)
    monkeypatch.setattr(turn_relay, "FIRST_SECONDS", 60.0)
    message = StoredMessage("m", "c", "assistant", "", "", "running", 0, generation_id="g")

    class Shared(LocalExchange):
        is_shared = True

    async def run() -> bool:
        checks = 0

        async def generation(*_: str) -> StoredMessage:
            nonlocal checks
            checks += 1
            if checks == 2:
                readers.append(asyncio.create_task(relay.log_of("", message)))
                await asyncio.sleep(0)
            if checks == 3:
                kept.set()
            return message

        kept = asyncio.Event()
        store = cast(ChatStore, SimpleNamespace(generation=generation))
        relay = turn_relay.TurnRelay(Shared(), cast(Turns, SimpleNamespace(at_start=[])), Feed(), store)
        readers = [asyncio.create_task(relay.log_of("", message))]
        await asyncio.sleep(0)
        [copying] = relay._tasks
        await asyncio.wait([copying, asyncio.ensure_future(kept.wait())], return_when=asyncio.FIRST_COMPLETED)
        await relay.close()
        return kept.is_set()

    assert asyncio.run(run())


def test_login_and_logout_apply_to_all_replicas(replica: Replica) -> None:
    here, there = replica(ScriptedEngine(), api_key=KEY), replica(ScriptedEngine(), api_key=KEY)
    joined(here, there)
    assert here.client.post("/login", data={"api_key": KEY}).status_code == 303
    (token,) = here.client.cookies.values()
    # the headers a browser sends through a proxy in front of both servers
    proxied = {"Cookie": f"notso_session={token}", "Host": "localhost"}
    with httpx.Client(base_url=there.address, headers=proxied, timeout=60) as elsewhere:
        assert elsewhere.get("/").status_code == 200
        assert elsewhere.post("/logout").status_code == 303
        here.wait(lambda: here.client.get("/").status_code == 401 or here.client.get("/").status_code == 303)
        assert elsewhere.get("/").status_code in (303, 401)


def test_session_behind_proxy_is_valid_on_every_replica(replica: Replica) -> None:
    """The cookie name contains the port of the Host header, which is the proxy's port and not that of a replica."""
    here, there = replica(ScriptedEngine(), api_key=KEY), replica(ScriptedEngine(), api_key=KEY)
    joined(here, there)
    for host in ("localhost", "localhost:8443"):
        with httpx.Client(headers={"Host": host}, timeout=60) as browser:
            assert browser.get(f"{there.address}/").status_code in (303, 401)
            assert browser.post(f"{here.address}/login", data={"api_key": KEY}).status_code == 303
            assert [browser.get(f"{server.address}/").status_code for server in (there, here, there)] == [200] * 3
            assert len(browser.cookies) == 1


def test_rate_limit_is_shared_by_replicas(replica: Replica) -> None:
    here, there = (replica(ScriptedEngine(), requests_per_minute=5) for _ in range(2))
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    said = [server.client.post("/v1/chat/completions", json=body).status_code for server in (here, there) * 4]
    assert (said.count(200), said.count(429)) == (5, 3)
