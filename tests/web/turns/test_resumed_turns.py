"""Answers interrupted between two saves are resumed by the next process as if there had been no interruption."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, Event, Message, ToolCall
from notso.web.app import drain_work
from notso.web.chat import submit
from notso.web.store.protocol import Orphan
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.tools.calculator import CALCULATOR
from notso.web.turns.answer_trace import TraceRecorder
from notso.web.turns.turns import Turns
from notso.web.values.ids import new_id

Start: TypeAlias = Callable[..., Any]


@pytest.fixture
def left_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Copy the store when a method is called, as if the process had been killed at that point."""

    def before(owner: type, name: str, when: Callable[..., bool] = lambda *_: True) -> Path:
        method, copy = getattr(owner, name), tmp_path / "left"

        def called(self: Any, *arguments: Any, **named: Any) -> Any:
            if not copy.exists() and when(self, *arguments):
                shutil.copytree(tmp_path / "data", copy, ignore=shutil.ignore_patterns("*lock*"))
            return method(self, *arguments, **named)

        monkeypatch.setattr(owner, name, called)
        return copy

    return before


def shown(message: Any) -> tuple[Any, ...]:
    uses = [(use.name, use.arguments, use.state, use.result, use.content_at) for use in message.tool_uses]
    return message.state, message.content, message.reasoning, uses


def calculating(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
    if messages[-1].role == "tool":
        return say(f"It is {messages[-1].content}.", "A second thought.")
    call = Event("tool_call", tool_call=ToolCall("call_1", "calculator", '{"expression": "6 * 7"}'))
    return [*say("Let me see.", "A first thought."), call]


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "allowed_digests", lambda chat: {CALCULATOR.digest})


def test_unfinished_answers_are_left_to_the_next_start(start: Start) -> None:
    server = start(ScriptedEngine(lambda *_: say("word " * 5_000), pace_seconds=0.001), drain_seconds=0.0).ready()
    asked = server.ask("Go on and on")
    server.wait(lambda: "word" in server.client.get(f"/chats/{asked.chat_id}").text)
    server.on_loop(lambda: drain_work(server.app.state.parts))
    assert server.chat.turns.unfinished == 0 and server.stored(asked).active


@pytest.mark.usefixtures("granted")
def test_answer_is_resumed_after_a_tool_result(start: Start, left_at: Callable[..., Path]) -> None:
    left = left_at(TraceRecorder, "begin", lambda recorder, *_: bool(recorder.trace.runs))
    server = start(ScriptedEngine(calculating)).ready()
    server.client.post("/settings", data={"tools": "calculator"})
    asked = server.ask("Six times seven?")
    whole = server.finished(asked)
    assert whole.state == "done" and "\n\nA second thought." in whole.reasoning
    engine = ScriptedEngine(calculating)
    again = start(engine, data_dir=left).ready()
    assert shown(again.finished(asked)) == shown(whole)
    assert len(engine.requests) == 1, "the first request and the tool call are not repeated"


def test_unstarted_answer_is_generated_identically_after_restart(start: Start, left_at: Callable[..., Path]) -> None:
    left = left_at(Turns, "start")
    server = start(lambda: Engine.load(None, threads=1)).ready()
    server.client.post("/settings", data={"temperature": "1.5", "max_tokens": "60"})
    asked = server.ask("Hello")
    whole = server.finished(asked)
    again = start(lambda: Engine.load(None, threads=1), data_dir=left).ready()
    assert shown(again.finished(asked)) == shown(whole), "the seed is derived from the id, so the answer is the same"


def test_regenerated_answer_keeps_its_settings_after_restart(start: Start, left_at: Callable[..., Path]) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    left = left_at(Turns, "start")
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}/regenerate"
    assert server.client.post(url, data={"key": new_id(), "temperature": "0.25"}).status_code == 303
    engine = ScriptedEngine()
    again = start(engine, data_dir=left).ready()
    assert again.finished(again.last(asked.chat_id)).state == "done"
    assert [each.params.temperature for each in engine.requests] == [0.25]


def test_interrupted_continue_does_not_resume_the_stopped_generation(
    start: Start, left_at: Callable[..., Path]
) -> None:
    """Until the new generation starts, the trace still belongs to the stopped one and must not be resumed."""

    def script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
        return say(" And the rest." if messages[-1].role == "assistant" else "word " * 100)

    slow = ScriptedEngine(script, pace_seconds=0.01)
    server = start(slow).ready()
    asked = server.ask("Go")
    server.wait(lambda: server.stored(asked).content)
    server.client.post(f"/generations/{asked.generation_id}/stop")
    stopped = server.finished(asked).content
    left = left_at(Turns, "start")
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}/continue"
    assert server.client.post(url, data={"key": new_id()}).status_code == 303
    engine = ScriptedEngine(script)
    again = start(engine, data_dir=left).ready()
    assert again.finished(again.last(asked.chat_id)).content == stopped + " And the rest."
    assert engine.requests[0].options.continue_last


def test_crash_before_the_engine_request_counts_as_attempt(
    start: Start, tmp_path: Path, left_at: Callable[..., Path]
) -> None:
    """Without this count, an answer whose prompt crashes the process would crash every new process."""
    left = left_at(Turns, "start")
    server = start(ScriptedEngine()).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    for number in range(3):
        held = ScriptedEngine()
        held.gate.clear()
        again = start(held, data_dir=left).ready()
        if number == 2:
            assert again.finished(asked).state == "interrupted" and not held.requests
            break
        again.wait(lambda again=again: again.on_loop(lambda: again.chat.turns.find(asked.generation_id)) is not None)
        left, before = tmp_path / f"left {number}", left
        shutil.copytree(before, left, ignore=shutil.ignore_patterns("*lock*"))
        held.gate.set()


def test_repeatedly_reported_turn_is_resumed_once(start: Start, left_at: Callable[..., Path]) -> None:
    left = left_at(Turns, "start")
    asked = start(ScriptedEngine()).ready().ask("Hello")
    engine = ScriptedEngine()
    engine.gate.clear()
    again = start(engine, data_dir=left).ready()
    again.wait(lambda: again.on_loop(lambda: again.chat.turns.find(asked.generation_id)) is not None)
    told = Orphan("local", asked.chat_id, asked.message_id, asked.generation_id)
    again.on_loop(lambda: submit.resume_orphan(again.chat, told))
    engine.gate.set()
    assert again.finished(asked).state == "done"
    assert len([each for each in engine.requests if each.options.token_ids]) == 1


def test_answer_can_be_stopped_before_it_is_resumed(
    start: Start, left_at: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_at(Turns, "start")
    before = start(ScriptedEngine()).ready()
    asked = before.ask("Hello")
    before.finished(asked)
    resolve, resolving, gate = submit.resolve_model_choice, threading.Event(), threading.Event()

    async def late(*arguments: Any) -> Any:
        resolving.set()
        await asyncio.to_thread(gate.wait, 60)  # as while the chat's model or a tool server starts
        return await resolve(*arguments)

    monkeypatch.setattr(submit, "resolve_model_choice", late)
    engine = ScriptedEngine()
    again = start(engine, data_dir=left).ready()
    assert resolving.wait(60)
    assert again.client.post(f"/generations/{asked.generation_id}/stop", data={}).status_code == 303
    gate.set()
    assert again.finished(asked).state == "stopped" and not engine.requests


def test_shutdown_while_resuming_leaves_the_answer_for_next_server(
    start: Start, left_at: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_at(Turns, "start")
    before = start(ScriptedEngine()).ready()
    asked = before.ask("Hello")
    before.finished(asked)
    save, interrupt_all, unasked = SQLiteStore.save_message, Turns.interrupt_all, ScriptedEngine()
    saving, stopping = threading.Event(), threading.Event()
    ours: list[Turns] = []

    async def late(self: Any, *arguments: Any) -> None:
        if arguments[0].id != asked.message_id:  # a message of another test's server that is still shutting down
            return await save(self, *arguments)
        monkeypatch.setattr(SQLiteStore, "save_message", save)
        saving.set()
        await asyncio.to_thread(stopping.wait, 60)
        return await save(self, *arguments)

    def interrupt(self: Turns, *, asking_only: bool = False) -> None:
        interrupt_all(self, asking_only=asking_only)
        if not asking_only and self in ours:  # servers of earlier tests may shut down only now
            stopping.set()

    monkeypatch.setattr(Turns, "interrupt_all", interrupt)
    monkeypatch.setattr(SQLiteStore, "save_message", late)
    server = start(unasked, data_dir=left, drain_seconds=0.0)
    ours.append(server.chat.turns)
    assert saving.wait(60)
    server.close()
    with closing(sqlite3.connect(left / "notso.db")) as database:
        sql = "SELECT state, tries FROM messages JOIN answer_traces ON id = message_id"
        assert database.execute(sql).fetchall() == [("running", 0)], "a shutdown must not count as an attempt"
    again = start(ScriptedEngine(), data_dir=left).ready()
    assert again.finished(asked).state == "done" and not unasked.requests


def test_storage_errors_delay_resuming(
    start: Start, left_at: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.web.values.errors import StorageError

    left = left_at(Turns, "start")
    asked = start(ScriptedEngine()).ready().ask("Hello")
    save, failures = SQLiteStore.save_message, iter([True, True])

    async def full(self: Any, *arguments: Any) -> None:
        if next(failures, False):
            raise StorageError("the disk is full")
        await save(self, *arguments)

    monkeypatch.setattr(submit, "RESUME_RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(SQLiteStore, "save_message", full)
    again = start(ScriptedEngine(), data_dir=left).ready()
    assert again.finished(asked).state == "done"
