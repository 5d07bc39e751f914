"""Turns: the contents of their stream, their independence of readers, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.qtensor import GGUFError
from notso.smollm3 import ContextLengthError, EngineError, Event, ModelFileError
from notso.web.rendering.markdown import render_markdown
from notso.web.turns import turn_consumer, turns
from notso.web.values.errors import StorageError
from notso.web.values.ids import new_generation_id, new_id

ANSWER = "Some *text*.\n\n- one\n- two\n\n```python\nx = 1\n```\n\nThe **end**: 1 < 2 & U+2028 \u2028 here.\n"
THOUGHTS = "First this.\n\nThen `that`."

Start = Callable[..., Any]

PARTIAL = re.compile(r'<hx-partial hx-target="([^"]*)" hx-swap="([^"]*)">(.*?)</hx-partial>', re.DOTALL)


def script(answer: str = ANSWER, thoughts: str = THOUGHTS, piece: int = 3) -> Callable[[object, bool], list[Event]]:
    return lambda messages, thinking: say(answer, thoughts if thinking else "", piece=piece)


def test_streamed_stored_and_shown_html_are_equal(start: Start, screen: Any, shown: Any) -> None:
    def in_pieces(messages: object, thinking: bool) -> Iterator[Event]:
        for number, event in enumerate(say(ANSWER, THOUGHTS, piece=3)):
            yield event
            if number < 8:
                shown.wait(lambda event: event.event == "message", number + 1)

    server = start(ScriptedEngine(in_pieces, pace_seconds=0.015)).ready()
    asked = server.ask("Hello")
    events = server.stream(asked, until=shown)
    for event in events:
        screen.apply(event)
    stored = server.finished(asked)
    assert (stored.content, stored.reasoning, stored.state) == (ANSWER, THOUGHTS, "done")
    assert screen.html(asked.message_id, "answer") == render_markdown(ANSWER) == stored.answer_html
    assert screen.html(asked.message_id, "reasoning") == render_markdown(THOUGHTS) == stored.reasoning_html
    assert len([event for event in events if event.event == "message"]) > 5, "the answer arrived in several pieces"
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert stored.answer_html in page and 'hx-sse:connect="/generations' not in page


def test_stream_ends_with_one_done_event_and_increasing_ids(start: Start) -> None:
    server = start(ScriptedEngine(script(), pace_seconds=0.002)).ready()
    events = server.stream(server.ask("Hello"))
    numbers = [int(event.id) for event in events]
    assert numbers == sorted(numbers)
    assert [event.event for event in events].count("done") == 1
    assert events[-1].event == "done"
    assert json.loads(events[-1].data)["state"] == "done"
    updates = [event.id for event in events if event.event == "message"]
    assert len(updates) == len(set(updates)), "each update has its own number"


def test_status_events_arrive_in_order(start: Start, shown: Any) -> None:
    def waits(messages: object, thinking: bool) -> Iterator[Event]:
        yield from say("", THOUGHTS)
        shown.wait_for_state("thinking")
        yield from say(ANSWER)
        shown.wait_for_state("generating")

    server = start(ScriptedEngine(waits)).ready()
    events = server.stream(server.ask("Hello"), until=shown)
    states = [json.loads(event.data)["state"] for event in events if event.event == "status"]
    assert [state for state in states if state in ("thinking", "generating", "done")] == [
        "thinking",
        "generating",
        "done",
    ]


def test_reconnecting_reader_gets_no_gaps_or_duplicates(start: Start) -> None:
    server = start(ScriptedEngine(script(ANSWER * 6, piece=5), pace_seconds=0.004)).ready()
    asked = server.ask("Hello")
    patience, last = random.Random(3), None
    shown: dict[str, str] = {}
    seen, event = -1, None
    for _ in range(500):
        for event in server.stream(asked, last, limit=patience.randint(1, 4)):
            last = event.id
            if event.event != "message":
                continue
            snapshot = event.data.startswith("<!--snapshot-->")
            if snapshot or int(event.id) > seen:  # as the page's script does
                seen = int(event.id)
                for target, swap, html in PARTIAL.findall(event.data):
                    shown[target] = (shown.get(target, "") if swap == "beforeend" else "") + html
        if event is not None and event.event == "done":
            break
    assert event is not None and event.event == "done"
    whole = shown[f"#msg-{asked.message_id}-answer-closed"] + shown[f"#msg-{asked.message_id}-answer-tail"]
    assert whole == server.finished(asked).answer_html


@pytest.mark.parametrize("header", [None, "", "x", "-1", "1e3", "٣", "99999999", "9" * 40])
def test_late_reader_or_invalid_last_event_id_gets_a_snapshot(shared: Any, screen: Any, header: str | None) -> None:
    asked = shared.ask("Hello")
    shared.finished(asked)
    events = shared.stream(asked, header.encode() if header is not None else None)
    assert events[0].data.startswith("<!--snapshot-->")
    screen.apply(events[0])
    assert screen.html(asked.message_id, "answer") == shared.stored(asked).answer_html
    assert [event.event for event in events] == ["message", "status", "usage", "done"]


def test_finished_turns_and_their_timers_are_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to finished turns and to the timers that would remove them."""
    monkeypatch.setattr(turns, "MAX_FINISHED", 2)
    server = start(ScriptedEngine(script())).ready()

    def clocks() -> int:
        loop = server.shared.engine._loop
        return sum(
            not clock.cancelled() and clock.when() > loop.time() + turns.KEEP_FINISHED_SECONDS / 2
            for clock in loop._scheduled
        )

    for _ in range(5):
        server.finished(server.ask("Hello"))
    server.on_loop(server.chat.turns.wait_for_all)
    assert (len(server.chat.turns._finished), server.on_loop(clocks)) == (2, 2)


@pytest.mark.parametrize("last_id", ["0", "1", "2", "3", "4", "5"])
def test_stream_of_an_old_turn_is_built_from_the_database(start: Start, screen: Any, last_id: str) -> None:
    """Readers that received the first updates of the turn get the whole answer, too."""
    server = start(ScriptedEngine(script())).ready()
    asked = server.ask("Hello")
    server.stream(asked)
    server.on_loop(server.chat.turns._finished.clear)
    events = server.stream(asked, last_id)
    screen.apply(events[0])
    assert screen.html(asked.message_id, "answer") == render_markdown(ANSWER)
    assert screen.html(asked.message_id, "reasoning") == render_markdown(THOUGHTS)
    assert events[-1].event == "done"


def test_disconnecting_readers_do_not_stop_the_answer(start: Start) -> None:
    engine = ScriptedEngine(script(ANSWER * 3), pace_seconds=0.005)
    server = start(engine).ready()
    asked = server.ask("Hello")
    with ThreadPoolExecutor(6) as pool:
        quitters = [pool.submit(server.stream, asked, None, until=lambda event: True) for _ in range(3)]
        stayers = [pool.submit(server.stream, asked) for _ in range(3)]
        for quitter in quitters:
            quitter.result(60)
        ends = [stayer.result(60)[-1] for stayer in stayers]
    assert {end.event for end in ends} == {"done"}
    assert server.finished(asked).content == ANSWER * 3
    assert len(engine.requests) == 1


def test_stream_sends_at_most_ten_updates_per_second(start: Start) -> None:
    server = start(ScriptedEngine(script("word " * 400, "", piece=5), pace_seconds=0.003)).ready()
    asked = server.ask("Hello")
    began = time.monotonic()
    updates = [event for event in server.stream(asked) if event.event == "message"]
    assert len(updates) <= 10 * (time.monotonic() - began) + 6


def test_stop_keeps_the_generated_text(start: Start) -> None:
    server = start(ScriptedEngine(script("word " * 5000, "", piece=5), pace_seconds=0.01)).ready()
    asked = server.ask("Hello", thinking=False)
    server.wait(lambda: "word word" in server.stored(asked).content)
    began = time.monotonic()
    assert server.client.post(f"/generations/{asked.generation_id}/stop", data={}).status_code == 303
    stored = server.finished(asked)
    assert time.monotonic() - began < 20, "the stop must not wait for the script, which takes 50 s"
    assert stored.state == "stopped"
    assert stored.content.startswith("word word")
    assert stored.numbers.completion_tokens * 5 == len(stored.content), "a stopped answer still reports its token count"
    events = server.stream(asked)
    assert json.loads(events[-1].data)["state"] == "stopped"
    assert server.client.post(f"/generations/{asked.generation_id}/stop", data={}).status_code == 303, "may be repeated"
    follow_up = server.ask("More", asked.chat_id)
    assert follow_up.message_id != asked.message_id


def test_stop_cancels_a_queued_turn(start: Start) -> None:
    engine = ScriptedEngine(script())
    engine.gate.clear()
    server = start(engine).ready()
    running = server.ask("one")
    server.wait(lambda: len(engine.requests) == 1)
    waiting = server.ask("two")
    headers = {"HX-Request": "true", "HX-Request-Type": "partial"}
    assert server.client.post(f"/generations/{waiting.generation_id}/stop", data={}, headers=headers).status_code == 204
    assert server.finished(waiting).state == "stopped"
    assert server.stored(running).active
    engine.gate.set()
    assert server.finished(running).state == "done"
    assert len(engine.requests) == 1, "the stopped message never reached the engine"


@pytest.mark.parametrize("action", ["delete", "clear", "archive", "stop"])
def test_turn_about_to_start_can_be_stopped(start: Start, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """The question is stored, and the turn waits for its tools. `stop`: requested at another replica."""
    engine = ScriptedEngine(script())
    server = start(engine).ready()
    first = server.ask("zero")
    server.finished(first)
    is_waiting, go = threading.Event(), asyncio.Event()

    async def ready(*_: object) -> None:
        is_waiting.set()
        await go.wait()

    monkeypatch.setattr(server.chat.toolbox, "ready", ready)
    url, fields = f"/chats/{first.chat_id}", {"text": "one", "key": new_id()}
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(httpx.post, f"{server.address}{url}/messages", data=fields, timeout=60)
        assert is_waiting.wait(60)
        if action == "stop":
            body = {"method": "stop", "arguments": [server.last(first.chat_id).generation_id]}
            server.on_loop(lambda: server.chat.relay._perform(body))
        elif action == "archive":
            server.client.post("/archive", data={"action": "delete", f"chat-{first.chat_id}": "on"})
        else:
            server.client.post(f"{url}/{action}")
        server.on_loop(go.set)
        sending.result(60)
    server.on_loop(server.chat.turns.wait_for_all)
    assert len(engine.requests) == 1, "the stopped turn never reached the engine"


def test_answer_is_stopped_if_the_deletion_of_its_chat_is_reported_as_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the connection to the database was lost after the commit."""
    engine = ScriptedEngine(script())
    engine.gate.clear()
    server = start(engine).ready()
    asked, trash = server.ask("Hello"), server.shared.store.trash_chat

    async def fail_late(owner: str, chat_id: str) -> None:
        await trash(owner, chat_id)
        raise StorageError("lost")

    monkeypatch.setattr(server.shared.store, "trash_chat", fail_late)
    assert server.client.post(f"/chats/{asked.chat_id}/delete").status_code == 503
    server.on_loop(server.chat.turns.wait_for_all)
    assert server.on_loop(lambda: server.chat.turns.find(asked.generation_id).log.status.phase) == "stopped"


def test_clearing_a_chat_keeps_a_question_stored_since_then(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(script(), slots=2)
    server = start(engine).ready()
    first = server.ask("one")
    server.finished(first)
    engine.gate.clear()
    running = server.ask("two", first.chat_id)
    trash, asked = server.shared.store.trash_messages, list[Any]()

    async def clear_and_ask(owner: str, chat_id: str, *, reset: bool) -> object:
        trashed = await trash(owner, chat_id, reset=reset)
        asked.append(await asyncio.to_thread(server.ask, "three", chat_id))
        return trashed

    monkeypatch.setattr(server.shared.store, "trash_messages", clear_and_ask)
    server.client.post(f"/chats/{first.chat_id}/clear")
    engine.gate.set()
    assert server.finished(asked[0]).state == "done"
    server.on_loop(server.chat.turns.wait_for_all)
    assert server.on_loop(lambda: server.chat.turns.find(running.generation_id).log.status.phase) == "stopped"


def test_end_of_a_cleared_turn_keeps_the_mark_of_the_next_one(start: Start) -> None:
    reached, ends = (
        {"one": threading.Event(), "two": threading.Event()},
        {"one": threading.Event(), "two": threading.Event()},
    )

    def waits(messages: Any, thinking: bool) -> Iterator[Event]:
        reached[messages[-1].content].set()
        ends[messages[-1].content].wait(60)
        yield from say("Fine.")

    server = start(ScriptedEngine(waits, slots=2)).ready()
    first = server.ask("one")
    assert reached["one"].wait(60)
    server.client.post(f"/chats/{first.chat_id}/clear")
    second = server.ask("two", first.chat_id)
    assert reached["two"].wait(60)
    ends["one"].set()
    server.wait(lambda: server.on_loop(lambda: server.chat.turns.generations) == {second.generation_id})
    assert server.on_loop(lambda: first.chat_id in server.chat.turns.marks)
    ends["two"].set()
    server.finished(second)
    assert server.on_loop(lambda: not server.chat.turns.marks)


def test_failures_to_save_and_to_submit_are_both_handled(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(refusal=EngineError("refused"))
    server = start(engine).ready()
    save, failures = server.shared.store.save_message, iter([RuntimeError("can't start new thread")])

    async def fail_once(*arguments: Any) -> None:
        for failure in failures:
            raise failure
        await save(*arguments)

    monkeypatch.setattr(server.shared.store, "save_message", fail_once)
    asked = server.ask("Hello")
    assert server.finished(asked).note == "refused"
    engine.refusal = None  # its traceback refers to the turn
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_second_question_during_an_answer_returns_409(start: Start) -> None:
    engine = ScriptedEngine(script())
    engine.gate.clear()
    server = start(engine).ready()
    asked = server.ask("one")
    answer = server.client.post(f"/chats/{asked.chat_id}/messages", data={"text": "two", "key": new_id()})
    assert answer.status_code == 409
    assert "still being generated" in answer.text and ">\ntwo</textarea>" in answer.text, "the typed text is returned"
    fragment = server.client.post(
        f"/chats/{asked.chat_id}/messages", data={"text": "two", "key": new_id()}, headers={"HX-Request": "true"}
    )
    assert fragment.status_code == 409
    assert "<html" not in fragment.text
    engine.gate.set()
    server.finished(asked)
    server.ask("two", asked.chat_id)


def test_concurrent_questions_start_one_turn(start: Start) -> None:
    engine = ScriptedEngine(script())
    server = start(engine).ready()
    first = server.ask("zero")
    server.finished(first)
    engine.gate.clear()

    def send(_: int) -> int:
        url = f"/chats/{first.chat_id}/messages"
        status: int = server.client.post(url, data={"text": "x", "key": new_id()}).status_code
        return status

    with ThreadPoolExecutor(10) as pool:
        statuses = sorted(pool.map(send, range(20)))
    assert statuses == [303] + [409] * 19
    engine.gate.set()


def test_repeated_key_creates_one_message(start: Start) -> None:
    engine = ScriptedEngine(script())
    server = start(engine).ready()
    key = new_id()
    first = server.ask("Hello", key=key)
    server.finished(first)
    assert server.ask("Hello", key=key) == first, "a repeated first message leads to the same chat"
    changed = server.client.post("/chats", data={"text": "Hello, you", "key": key})
    assert changed.status_code == 409 and "Hello, you" in changed.text and "already sent" in changed.text
    key = new_id()
    second = server.ask("More", first.chat_id, key=key)
    server.finished(second)
    url, fields = f"/chats/{first.chat_id}/messages", {"text": "More", "key": key}
    again = server.client.post(url, data=fields, headers={"HX-Request": "true"})
    assert again.status_code == 200 and f"msg-{second.message_id}" in again.text
    other = server.ask("Elsewhere")
    server.finished(other)
    fields = {"text": "More", "key": key}
    assert server.client.post(f"/chats/{other.chat_id}/messages", data=fields).status_code == 400
    assert len(engine.requests) == 3
    assert len(server.on_loop(lambda: server.shared.store.messages("local", first.chat_id))) == 4


def test_engine_request_has_history_date_and_thinking_setting(start: Start) -> None:
    engine = ScriptedEngine(script("Fine.", "Hm."))
    server = start(engine).ready()
    first = server.ask("One\r\n  two", thinking=True)
    server.finished(first)
    server.finished(server.ask("Three", first.chat_id, thinking=False))
    one, two = engine.requests
    assert [(message.role, message.content) for message in two.messages] == [
        ("user", "One\n  two"),
        ("assistant", "Fine."),
        ("user", "Three"),
    ]
    assert all(message.reasoning_content is None for message in two.messages)
    assert (one.options.thinking, two.options.thinking) == (True, False)
    assert one.options.date == two.options.date is not None


def test_prompt_date_is_fixed_per_chat(start: Start) -> None:
    engine = ScriptedEngine(script("Fine.", ""))
    server = start(engine).ready()
    asked = server.ask("One")
    server.finished(asked)
    server.on_loop(
        lambda: server.shared.store.change(
            "",  # as if the chat had begun long ago
            "UPDATE chats SET prompt_date = '2025-07-08' WHERE id = ?",
            asked.chat_id,
        )
    )
    server.finished(server.ask("Two", asked.chat_id))
    assert engine.requests[-1].options.date.isoformat() == "2025-07-08"  # type: ignore[union-attr]


def test_engine_failure_is_reported_and_partial_text_kept(start: Start) -> None:
    engine = ScriptedEngine(script("Half of it"), failure=EngineError("a number was not finite"))
    server = start(engine).ready()
    asked = server.ask("Hello")
    events = server.stream(asked)
    stored = server.finished(asked)
    assert (stored.state, stored.content, stored.note) == ("failed", "Half of it", "a number was not finite")
    assert [event.event for event in events[-2:]] == ["error", "done"]
    assert json.loads(events[-2].data)["message"] == "a number was not finite"
    engine.failure = None
    assert server.finished(server.ask("Again", asked.chat_id)).state == "done"


@pytest.mark.parametrize("refusal", [ContextLengthError(9120, 8192), RuntimeError("secret /home/me")])
def test_engine_rejection_is_reported_without_internal_details(start: Start, refusal: Exception) -> None:
    engine = ScriptedEngine(script("Fine"), refusal=refusal)
    server = start(engine).ready()
    asked = server.ask("Hello")
    events = server.stream(asked)
    stored = server.finished(asked)
    assert (stored.state, stored.content) == ("failed", "")
    assert ("9,120" in stored.note) == isinstance(refusal, ContextLengthError)
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert "secret" not in page + events[-2].data + stored.note
    assert ("No response. Prompt is too long: it needs 9,120 tokens, but the context is 8,192." in page) == (
        "9,120" in stored.note
    )
    engine.refusal = None
    assert server.finished(server.ask("Again", asked.chat_id)).state == "done"


def test_answer_is_cut_off_at_the_maximum_length(start: Start) -> None:
    server = start(ScriptedEngine(script("x" * 50_000, "", piece=100)), max_answer_characters=1000).ready()
    stored = server.finished(server.ask("Hello"))
    assert stored.content == "x" * 1000
    assert (stored.state, stored.note) == ("done", "Response cut off at the maximum length.")


def test_the_page_opens_and_messages_queue_while_the_model_loads(start: Start) -> None:
    gate = threading.Event()

    def load() -> ScriptedEngine:
        assert gate.wait(60)
        return ScriptedEngine(script())

    server = start(load)
    assert server.client.get("/health").status_code == 503
    assert server.client.get("/health").json() == {"status": "loading"}
    assert server.client.get("/livez").status_code == 200
    page = server.client.get("/").text
    assert "Loading" in page and 'hx-get="/status"' in page
    asked = server.ask("Hello")
    assert server.stored(asked).state in ("queued", "running")
    answer = server.client.get("/status").text
    assert 'hx-get="/status"' in answer and "#status-label" not in answer, "the status must not replace the stream"
    assert "Loading" in server.stream(asked, until=lambda event: event.event == "status")[-1].data
    gate.set()
    assert server.finished(asked).content == ANSWER
    assert server.client.get("/health").json()["status"] == "ok"
    server.wait(lambda: server.chat.turns.unfinished == 0)
    answer = server.client.get("/status").text
    assert 'hx-get="/status"' not in answer and '"#status-label" hx-swap="textContent">Ready<' in answer


UNMAPPED = "/secret/x.so: failed to map segment from shared object"


UNMAPPED_MODEL = GGUFError("secret")
UNMAPPED_MODEL.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    "error", [ModelFileError("no SmolLM3"), RuntimeError("secret"), ImportError(UNMAPPED), UNMAPPED_MODEL]
)
def test_model_load_failure_returns_503_and_keeps_typed_text(start: Start, error: Exception) -> None:
    gate = threading.Event()

    def load() -> ScriptedEngine:
        assert gate.wait(60)
        raise error

    server = start(load)
    queued = server.ask("Early")
    gate.set()
    assert server.finished(queued).state == "failed"
    assert server.client.get("/health").status_code == 503
    answer = server.client.post("/chats", data={"text": "My words", "key": new_id()})
    assert answer.status_code == 503
    assert "My words" in answer.text
    reason = "no SmolLM3" if isinstance(error, ModelFileError) else "could not be loaded; see"
    if isinstance(error, ImportError | GGUFError):
        reason = "could not be loaded, probably for lack of memory: "
    assert reason in answer.text and "secret" not in answer.text


def test_too_many_waiting_turns_return_429_with_retry_after(start: Start) -> None:
    engine = ScriptedEngine(script())
    engine.gate.clear()
    server = start(engine, max_waiting_turns=2).ready()
    server.ask("running")
    server.wait(lambda: server.on_loop(lambda: server.shared.requests.waiting) == 0)
    server.ask("waits")
    server.wait(lambda: engine.stats().waiting == 1)
    second = server.ask("waits too")
    assert "Queued (#2)" in server.stream(second, until=lambda event: "Queued (#2)" in event.data)[-1].data
    answer = server.client.post("/chats", data={"text": "too much", "key": new_id()})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert "too much" in answer.text
    engine.gate.set()


def test_partial_text_is_saved_repeatedly(start: Start) -> None:
    server = start(ScriptedEngine(script("word " * 5000, "", piece=5), pace_seconds=0.01)).ready()
    asked = server.ask("Hello", thinking=False)
    server.wait(lambda: len(server.stored(asked).content) > 0)
    before = len(server.stored(asked).content)
    server.wait(lambda: len(server.stored(asked).content) > before)
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})


def test_lost_turn_does_not_block_its_chat(start: Start) -> None:
    server = start(ScriptedEngine(script())).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    store, name = server.shared.store, new_generation_id()
    server.on_loop(lambda: store.resume_message("local", asked.chat_id, asked.message_id, name))
    assert server.finished(server.ask("More", asked.chat_id)).state == "done"
    assert server.stored(asked).state == "interrupted"


@pytest.fixture
def failing_saves(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], threading.Event]:
    """Return a function that lets saves of finished answers fail while the returned event is set."""
    monkeypatch.setattr(turn_consumer, "SAVE_RETRY_SECONDS", ())

    def fail(server: Any) -> threading.Event:
        failing, save = threading.Event(), server.shared.store.save_message
        failing.set()

        async def save_message(message: Any, *others: Any) -> None:
            if failing.is_set() and not message.active:
                raise StorageError("the disk is full")
            await save(message, *others)

        server.shared.store.save_message = save_message
        return failing

    return fail


@pytest.mark.parametrize("action", ["stop", "load"])
def test_answer_whose_last_save_failed_is_finished_later(
    start: Start, failing_saves: Callable[[Any], threading.Event], action: str
) -> None:
    server = start(ScriptedEngine(script("All of it.", ""))).ready()
    failing = failing_saves(server)
    asked = server.ask("Hello", thinking=False)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    page = f"/chats/{asked.chat_id}"
    assert server.client.get(page).status_code == 200 and server.stored(asked).active
    stop = f"/generations/{asked.generation_id}/stop"
    assert server.client.post(stop, data={}).status_code == 503
    failing.clear()
    if action == "stop":
        assert server.client.post(stop, data={}).status_code == 303
    else:
        assert stop not in server.client.get(page).text
    assert (server.stored(asked).state, server.stored(asked).content) == ("done", "All of it.")
    edit = {"text": "Edited."}
    server.client.post(f"{page}/messages/{asked.message_id}/edit", data=edit)
    server.client.post(stop, data={})
    assert server.client.get(page).status_code == 200 and server.stored(asked).content == "Edited."


@pytest.mark.parametrize("is_saved", [True, False])
def test_unexpected_error_keeps_the_partial_text(
    start: Start,
    failing_saves: Callable[[Any], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    is_saved: bool,
) -> None:
    async def fail(self: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(turn_consumer.TurnConsumer, "_finish", fail)
    server = start(ScriptedEngine(script("All of it.", ""))).ready()
    failing = failing_saves(server)
    if is_saved:
        failing.clear()
    asked = server.ask("Hello", thinking=False)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    failing.clear()
    monkeypatch.undo()
    assert server.finished(server.ask("More", asked.chat_id)).state == "done"
    stored = server.stored(asked)
    assert (stored.state, stored.content) == ("failed", "All of it.") and stored.note


def test_stalled_reader_is_dropped_without_delaying_others(start: Start) -> None:
    answer = "a paragraph of some words\n\n" * 8000
    server = start(ScriptedEngine(script(answer, "", piece=2000)), send_timeout_seconds=2).ready()
    asked = server.ask("Hello")
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    request = f"GET /generations/{asked.generation_id}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        stalled.sendall(request)
        reads = server.client.get(f"/generations/{asked.generation_id}/events").text  # a reader that does nothing else
        assert reads.count("event: done\n") == 1
        assert server.finished(asked).content == answer
        server.wait(lambda: not server.server.server_state.tasks)
        stalled.settimeout(60)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := stalled.recv(65_536):
                received += chunk
        assert b"event: done" not in received, "the stalled reader was dropped before the end"
    assert server.stream(asked)[-1].event == "done", "the dropped reader may reconnect"
