"""Automatic summaries of nearly full chats: only if enabled, only while the server is idle, never against a user's
action."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, ToolCall
from notso.web.chat import context_gauge, suggestions
from notso.web.chat.context_gauge import Compaction
from notso.web.turns.prompt import SUMMARY_REQUEST

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every chat as nearly full and the server as idle after a short pause."""
    monkeypatch.setattr(context_gauge, "AFTER_SECONDS", 0.05)
    monkeypatch.setattr(suggestions, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(context_gauge, "WARN_PERCENT", 0)


def script(messages: Any, thinking: bool) -> Iterator[Event]:
    yield from say("We spoke of cats." if messages[-1].content == SUMMARY_REQUEST else "Cats purr.")


def asked_for(engine: ScriptedEngine) -> list[Any]:
    return [request for request in engine.requests if request.messages[-1].content == SUMMARY_REQUEST]


def line_of(server: Any, chat_id: str) -> list[Any]:
    line: list[Any] = server.on_loop(lambda: server.shared.store.messages("local", chat_id))
    return line


def test_automatic_summary_replaces_earlier_messages_and_can_be_removed(start: Start) -> None:
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    server.client.post("/settings", data={"compaction": "automatic"})
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    server.wait(lambda: line_of(server, asked.chat_id)[-1].kind == "summary")
    summary = line_of(server, asked.chat_id)[-1]
    assert (summary.content, summary.state) == ("We spoke of cats.", "done")
    (request,) = asked_for(engine)
    assert request.options.priority == "background" and request.options.tool_choice == "none"
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert "summary-card" in page and "We spoke of cats." in page and "Tell me about cats" in page
    server.finished(server.ask("And dogs?", asked.chat_id))
    (later,) = [request for request in engine.requests if request.messages[-1].content == "And dogs?"]
    read = "\n".join(message.content for message in later.messages)
    assert "We spoke of cats." in read and "Tell me about cats" not in read
    place = f"/chats/{asked.chat_id}/messages/{summary.id}/unsummarize"
    server.wait(lambda: not server.chat.turns.unfinished)
    assert server.client.post(place).status_code in (204, 303)
    assert summary.id not in {message.id for message in line_of(server, asked.chat_id)}


@pytest.mark.parametrize("choice", ["", "ask", "off"])
def test_no_automatic_summary_unless_enabled(start: Start, choice: str) -> None:
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    if choice:
        server.client.post("/settings", data={"compaction": choice})
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    server.finished(server.ask("And dogs?", asked.chat_id))
    server.wait(lambda: not server.on_loop(lambda: server.chat.turns.unfinished))
    assert not asked_for(engine)


def test_question_cancels_running_automatic_summary(start: Start) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slowly(messages: Any, thinking: bool) -> Iterator[Event]:
        if messages[-1].content == SUMMARY_REQUEST:
            writing.set()
            go_on.wait(60)
        yield from script(messages, thinking)

    engine = ScriptedEngine(slowly)
    server = start(engine).ready()
    server.client.post("/settings", data={"compaction": "automatic"})
    asked = server.ask("Tell me about cats")
    assert writing.wait(60)
    server.client.post("/settings", data={"compaction": "off"})
    later = server.ask("And dogs?", asked.chat_id)
    go_on.set()
    server.finished(later)
    assert [message.kind for message in line_of(server, asked.chat_id)] == ["turn"] * 4


def test_only_the_last_request_of_an_answer_counts_toward_the_context(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calling(messages: Any, thinking: bool) -> Iterator[Event]:
        rounds = sum(message.role == "tool" for message in messages)
        yield (
            Event("tool_call", tool_call=ToolCall(f"call_{rounds:024x}", "unknown", "{}"))
            if rounds < 3
            else say(".")[0]
        )

    scheduled: list[str] = []

    def record(_: Compaction, turn: Any) -> Any:
        scheduled.append(turn.message.chat_id)
        return asyncio.sleep(0)

    monkeypatch.setattr(Compaction, "_compact", record)
    monkeypatch.setattr(context_gauge, "WARN_PERCENT", 5)  # 205 tokens
    engine = ScriptedEngine(calling)
    server = start(engine).ready()
    server.client.post("/tools", data={"tool-clock": "on"})
    short, long = (server.ask("word " * words) for words in (50, 300))
    for asked in (short, long):
        assert server.finished(asked).numbers.prompt_tokens > 205
    server.wait(lambda: not server.on_loop(lambda: server.chat.turns.unfinished))
    assert len(engine.requests) == 8 and scheduled == [long.chat_id]
