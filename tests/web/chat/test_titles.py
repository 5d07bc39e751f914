"""Generated chat titles: only if enabled, only once, and never over a title that the user has set."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event
from notso.web.chat import submit, titles
from notso.web.chat.suggestions import IdleRequests
from notso.web.chat.titles import REQUEST, parse_title

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titles, "AFTER_SECONDS", 0.2)


def script(messages: Any, thinking: bool) -> Iterator[Event]:
    yield from say('Title: "**A Chat About Cats**"\n' if messages[-1].content == REQUEST else "Cats purr.")


def name_of(server: Any, chat_id: str) -> str:
    chat = server.on_loop(lambda: server.shared.store.chat("local", chat_id))
    title: str = chat.title
    return title


def asked_for(engine: ScriptedEngine) -> list[Any]:
    return [request for request in engine.requests if request.messages[-1].content == REQUEST]


def test_title_is_generated_once_at_background_priority(start: Start) -> None:
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    server.client.post("/settings", data={"titles": "on"})
    server.client.post("/tools", data={"tool-clock": "on"})
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    server.wait(lambda: name_of(server, asked.chat_id) == "A Chat About Cats")
    (request,) = asked_for(engine)
    options = request.options
    assert options.priority == "background" and request.params.thinking_budget == 0
    assert options.tools == engine.requests[0].options.tools, "equal tools let the title reuse the chat's cached prompt"
    assert options.tool_choice == "none"
    server.finished(server.ask("And dogs?", asked.chat_id))
    server.wait(lambda: not server.chat.turns.unfinished)
    assert len(asked_for(engine)) == 1
    listed = server.client.get(f"/chats?current={asked.chat_id}", headers={"HX-Request": "true"}).text
    assert '#chat-title" hx-swap="textContent">A Chat About Cats<' in listed


def test_chat_begun_with_an_attachment_alone_gets_a_title(start: Start) -> None:
    server = start(ScriptedEngine(script)).ready()
    server.client.post("/settings", data={"titles": "on"})
    asked = server.ask("", **{"file-1-name": "cats.txt", "file-1-text": "All about cats"})
    assert name_of(server, asked.chat_id) == "cats.txt"
    server.finished(asked)
    server.wait(lambda: name_of(server, asked.chat_id) == "A Chat About Cats")


def test_generated_title_does_not_replace_a_user_title(start: Start) -> None:
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    server.client.post("/settings", data={"titles": "on"})
    engine.gate.clear()
    asked = server.ask("Tell me about cats")
    server.client.post(f"/chats/{asked.chat_id}/title", data={"title": "Mine"})
    engine.gate.set()
    server.finished(asked)
    other = server.ask("And about dogs?")
    server.finished(other)
    # titles are generated in order, so the first chat's turn has passed
    server.wait(lambda: name_of(server, other.chat_id) == "A Chat About Cats")
    assert name_of(server, asked.chat_id) == "Mine"


def test_no_title_is_generated_by_default(start: Start) -> None:
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    server.wait(lambda: not server.chat.turns.unfinished)
    assert not asked_for(engine) and name_of(server, asked.chat_id) == "Tell me about cats"


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("A Chat About Cats", "A Chat About Cats"),
        ('\n"Cats."\nMore', "Cats"),
        ("Title: **Cats and dogs**", "Cats and dogs"),
        *(("", ""), ("...", ""), ("x" * 80, "")),
    ],
)
def test_title_is_extracted_from_generated_text(said: str, title: str) -> None:
    assert parse_title(said) == title


class Stoppable:
    """Count the stops of a generation that never ends unless stopped."""

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_new_turn_stops_all_title_generations(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[Stoppable] = []
    ended = threading.Event()

    async def endless(requests: Any, request: Any, seconds: float) -> str | None:
        running.append(Stoppable())
        requests._running.add(running[-1])
        while not ended.is_set():
            await asyncio.sleep(0.01)
        return None

    monkeypatch.setattr(titles, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(IdleRequests, "generate", endless)
    server = start(ScriptedEngine(script)).ready()
    server.client.post("/settings", data={"titles": "on"})
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    server.wait(lambda: len(running) == 1)
    server.finished(server.ask("Tell me about dogs"))
    server.wait(lambda: len(running) == 2)
    assert [each.stops for each in running] == [1, 0]
    server.finished(server.ask("And birds?", asked.chat_id))
    assert [each.stops for each in running] == [2, 1]
    ended.set()


def test_turn_that_starts_while_the_title_prompt_is_built_precedes_the_title(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, built, generated = threading.Event(), threading.Event(), threading.Event()
    build, generate = submit.follow_up_request, IdleRequests.generate

    async def slow(*arguments: Any) -> Any:
        building.set()
        await asyncio.to_thread(built.wait, 30)
        return await build(*arguments)

    async def recorded(*arguments: Any) -> str | None:
        generated.set()
        return await generate(*arguments)

    monkeypatch.setattr(titles, "follow_up_request", slow)
    monkeypatch.setattr(IdleRequests, "generate", recorded)
    engine = ScriptedEngine(script)
    server = start(engine).ready()
    server.client.post("/settings", data={"titles": "on"})
    asked = server.ask("Tell me about cats")
    server.finished(asked)
    assert building.wait(30)
    engine.gate.clear()
    other = server.ask("And about dogs?")
    built.set()
    assert not generated.wait(1)
    engine.gate.set()
    server.finished(other)
    server.wait(lambda: name_of(server, asked.chat_id) == "A Chat About Cats")


def test_title_prompt_is_not_built_on_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    build = submit.prompt_messages

    def recorded(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            on_loop.append(True)
            return build(*arguments, **options)
        on_loop.append(False)
        return build(*arguments, **options)

    monkeypatch.setattr(submit, "prompt_messages", recorded)
    server = start(ScriptedEngine(script)).ready()
    server.client.post("/settings", data={"titles": "on"})
    asked = server.ask("Tell me about cats")
    server.wait(lambda: name_of(server, asked.chat_id) == "A Chat About Cats")
    assert on_loop and not any(on_loop)
