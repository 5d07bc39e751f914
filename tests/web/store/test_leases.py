"""Heartbeats: a turn that another process took over is stopped, orphaned turns are reported, and outages are
survived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.store import leases as leases_module
from notso.web.store.leases import LeaseKeeper, RunningTurns
from notso.web.store.protocol import ChatStore, Heartbeat, Orphan
from notso.web.values.errors import StorageError

Start = Callable[..., Any]


class OtherProcesses:
    """A shared store that implements only the heartbeat and returns scripted results."""

    is_shared = True

    def __init__(self, *said: Heartbeat | StorageError) -> None:
        self.said = list(said)
        self.asked: list[frozenset[str]] = []
        self.all_said = asyncio.Event()

    async def heartbeat(
        self, running: frozenset[str], known: frozenset[str] | None = None, *, is_leaving: bool = False
    ) -> Heartbeat:
        self.asked.append(frozenset(running))
        found = self.said.pop(0) if self.said else Heartbeat()
        if not self.said:
            self.all_said.set()
        if isinstance(found, StorageError):
            raise found
        return found


def test_heartbeats_continue_after_database_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases_module, "HEARTBEAT_SECONDS", 0.0)
    orphan = Orphan("owner", "chat", "message", "generation")
    told: list[Orphan] = []

    async def work() -> None:
        away = StorageError("the database does not answer")
        others = OtherProcesses(Heartbeat(), away, away, Heartbeat((orphan,)))
        leases = LeaseKeeper(
            cast(ChatStore, others), cast(RunningTurns, SimpleNamespace(generations=frozenset({"mine"})))
        )
        leases.at_orphan.append(told.append)
        await leases.start()
        await others.all_said.wait()
        await leases.send_heartbeat()
        leases.stop()
        assert set(others.asked) == {frozenset({"mine"})}

    with caplog.at_level(logging.WARNING, "notso.web.store"):
        asyncio.run(work())
    assert told == [orphan]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "leases could not be renewed",
        "leases are renewed again",
        "turn interrupted",
    ]
    assert caplog.messages[-1].endswith("; id generation")


def test_turn_reported_as_lost_is_interrupted(start: Start) -> None:
    server = start(ScriptedEngine(lambda m, t: say("word " * 100_000), pace_seconds=0.001)).ready()
    asked = server.ask("Hello")
    turns = server.chat.turns
    assert turns.generations == {asked.generation_id}

    async def send_heartbeat() -> None:
        others = OtherProcesses(Heartbeat(lost=frozenset({asked.generation_id})))
        await LeaseKeeper(cast(ChatStore, others), turns).send_heartbeat()
        assert others.asked == [frozenset({asked.generation_id})]

    server.on_loop(send_heartbeat)
    assert server.finished(asked).state == "interrupted"


def test_single_process_store_sends_no_heartbeats(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    assert server.on_loop(lambda: server.app.state.parts.leases._beating) is None
