"""Operations on whole chats: list, search, pin, clear, reset, undo, suggestions, and notifications between tabs."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message
from notso.web import app
from notso.web.chat import views
from notso.web.chat.suggestions import REQUEST, parse_questions
from notso.web.chat.templates import by_day
from notso.web.store.protocol import Chat
from notso.web.store.sql.store import SQLStore
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}
CHIPS = "1. What is a walrus?\n- Where does it live?\n* Why?\nNot a question.\nWhat else?"


def suggesting(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
    yield from say(CHIPS if messages[-1].content == REQUEST else "An answer.", "thoughts " * 3 if thinking else "")


def test_chat_list_is_grouped_by_day() -> None:
    def used(title: str, year: int, month: int, day: int, pinned: bool = False) -> Chat:
        at = int(1000 * datetime(year, month, day, 12).timestamp())
        return Chat(title, title, True, date(2025, 1, 1), at, at, pinned)

    chats = [
        used("p", 2024, 1, 1, True),
        *(used("a", 2025, 7, 8), used("b", 2025, 7, 7), used("c", 2025, 7, 1), used("d", 2025, 6, 20)),
        *(used("e", 2024, 6, 20), used("f", 2023, 6, 20)),
    ]
    groups = by_day(chats, date(2025, 7, 8))
    assert [(heading, [chat.title for chat in group]) for heading, group in groups] == [
        *(("Pinned", ["p"]), ("Today", ["a"]), ("Yesterday", ["b"]), ("Previous 7 days", ["c"])),
        *(("Previous 30 days", ["d"]), ("Older", ["e", "f"])),
    ]


def test_clear_keeps_settings_reset_does_not_and_both_can_be_undone(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/settings", data={"seed": "5"})
    for verb, kept in (("clear", True), ("reset", False)):
        answer = server.client.post(f"{url}/{verb}", data={}, headers=FRAGMENT)
        assert answer.status_code == 200 and "Messages cleared." in answer.text and "<article" not in answer.text
        assert ('value="5"' in server.client.get(f"{url}/settings").text) == kept
        undo = re.findall(r"/undo/[0-9a-f]{32}", answer.text)[0]
        back = server.client.post(undo, data={}, headers=FRAGMENT)
        assert (back.status_code, back.headers["hx-redirect"]) == (204, url)
        assert f"msg-{asked.message_id}" in server.client.get(url).text
        assert 'value="5"' in server.client.get(f"{url}/settings").text
        assert server.client.post(undo, data={}, headers=FRAGMENT).status_code == 404, "undo works only once"
    assert server.client.post("/undo/nonsense", data={}).status_code == 404


def test_clear_stops_running_answer_and_chat_accepts_next_question(start: Start) -> None:
    server = start(ScriptedEngine(lambda m, t: say("word " * 5000), pace_seconds=0.01, slots=2)).ready()
    asked = server.ask("one")
    server.wait(lambda: server.stored(asked).content != "")
    server.client.post(f"/chats/{asked.chat_id}/clear", data={})
    other = server.ask("two", asked.chat_id)
    server.client.post(f"/generations/{other.generation_id}/stop", data={})
    assert server.finished(other).state == "stopped"


def test_deleting_redirects_only_if_the_current_chat_is_deleted(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    here, other = server.ask("here"), server.ask("other")
    server.finished(here), server.finished(other)
    answer = server.client.post(f"/chats/{other.chat_id}/delete", data={"current": here.chat_id}, headers=FRAGMENT)
    assert answer.status_code == 200 and "hx-redirect" not in answer.headers
    assert "/undo/" in answer.text and here.chat_id in answer.text and f"/chats/{other.chat_id}" not in answer.text
    answer = server.client.post(f"/chats/{here.chat_id}/delete", data={"current": here.chat_id}, headers=FRAGMENT)
    assert answer.headers["hx-redirect"].startswith("/?undo=")
    assert "Chat deleted." in server.client.get(answer.headers["hx-redirect"]).text


def test_deleted_chat_is_purged_when_undo_period_expires(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    purges = []
    purge = SQLStore.purge

    async def counted(store: SQLStore, *given: Any) -> int:
        purges.append(await purge(store, *given))
        return purges[-1]

    monkeypatch.setattr(SQLStore, "purge", counted)
    monkeypatch.setattr(app, "UNDO_SECONDS", 1e-6)
    monkeypatch.setattr(app, "PURGE_SECONDS", 0.05)
    engine = ScriptedEngine()
    server = start(engine).ready()
    asked = server.ask("secret walrus")
    server.finished(asked)
    assert engine.cleared == []
    answer = server.client.post(f"/chats/{asked.chat_id}/delete", data={})
    trash = answer.headers["location"].partition("=")[2]
    asked_for = engine.requests[0].options
    assert asked_for.conversation is not None
    server.wait(lambda: bool(engine.cleared))  # Cached state is cleared only when undo is no longer possible.
    assert engine.cleared == [(asked_for.owner, asked_for.conversation)]
    before = len(purges)
    server.wait(lambda: len(purges) >= before + 3)  # the purge of this chat, and later ones, which find nothing to do
    assert len(engine.cleared) == 1 and sum(purges) == 1 and purges[-1] == 0
    late = server.client.post(f"/undo/{trash}", headers=FRAGMENT)  # the toast may still offer it
    assert late.status_code == 404 and "This can no longer be undone." in late.text


def test_cleared_chat_gets_a_new_conversation_id(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After clearing, new messages get a new conversation id, so that purging the old messages does not affect them."""
    monkeypatch.setattr(app, "UNDO_SECONDS", 1e-6)
    monkeypatch.setattr(app, "PURGE_SECONDS", 0.05)
    engine = ScriptedEngine()
    server = start(engine).ready()
    asked = server.ask("secret walrus")
    server.finished(asked)
    server.client.post(f"/chats/{asked.chat_id}/messages", data={"text": "more", "key": new_id()})
    server.finished(server.last(asked.chat_id))
    assert server.client.post(f"/chats/{asked.chat_id}/clear", data={}).status_code in (200, 303)
    server.client.post(f"/chats/{asked.chat_id}/messages", data={"text": "a fresh start", "key": new_id()})
    server.finished(server.last(asked.chat_id))
    first, second, fresh = (request.options.conversation for request in engine.requests)
    assert first == second and fresh not in (first, None)
    server.wait(lambda: bool(engine.cleared))
    assert [conversation for _, conversation in engine.cleared] == [first]


def test_search_results_highlight_matches_and_escape_html(start: Start) -> None:
    server = start(ScriptedEngine(lambda m, t: say("It is a <b>walrus</b>."))).ready()
    asked = server.ask("About walruses & co")
    server.finished(asked)
    page = server.client.get("/search?q=walrus", headers=FRAGMENT).text
    assert "About <mark>walruses</mark> &amp; co" in page and "&lt;b&gt;<mark>walrus</mark>&lt;/b&gt;" in page
    assert f"?at={asked.message_id}#msg-{asked.message_id}" in page
    assert "No results." in server.client.get("/search?q=zebra", headers=FRAGMENT).text
    assert "<html" in server.client.get("/search?q=walrus").text
    assert server.client.get("/search?q=" + "x" * 5000).status_code == 200


def test_search_result_on_another_branch_does_not_select_that_branch(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/messages/{asked.message_id}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert f"msg-{asked.message_id}" not in server.client.get(url).text
    assert f"msg-{asked.message_id}" in server.client.get(f"{url}?at={asked.message_id}").text
    assert f"msg-{asked.message_id}" not in server.client.get(url).text


def test_suggestions_are_questions_only() -> None:
    assert parse_questions(CHIPS) == ["What is a walrus?", "Where does it live?", "Why?"]
    assert parse_questions('1) "Who?"\n2) **What?**') == ["Who?", "What?"]
    assert parse_questions("Only one?\nAnd a sentence.") == []
    assert parse_questions("Same?\nSame?\n" + "x" * 200 + "?") == []


def test_suggestions_are_generated_once_at_background_priority(start: Start) -> None:
    engine = ScriptedEngine(suggesting)
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    url = f"/chats/{asked.chat_id}/suggestions"
    page = server.client.get(url, headers=FRAGMENT).text
    assert re.findall(r'name="text" value="([^"]*)">', page) == ["What is a walrus?", "Where does it live?", "Why?"]
    request = engine.requests[-1]
    assert (request.options.priority, request.options.thinking, request.params.thinking_budget) == (
        "background",
        True,
        0,
    )
    assert request.params.max_tokens == 60
    assert [message.content for message in request.messages] == ["Hello", "An answer.", REQUEST]
    server.client.get(url)
    assert len(engine.requests) == 2, "suggestions are generated once"
    assert f'hx-post="/chats/{asked.chat_id}/messages"' in page and 'name="key"' in page, "sent like any other question"
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"suggestions": "off"})
    assert server.client.get(url).status_code == 204, "also for an answer that had suggestions"
    other = server.ask("More", asked.chat_id)
    server.finished(other)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert server.client.get(url).status_code == 204 and len(engine.requests) == 3
    server.client.post(f"/chats/{asked.chat_id}/delete")
    assert server.client.get(url).status_code == 204, "the page may ask after the chat was deleted"


def test_edited_answer_gets_new_suggestions(start: Start) -> None:
    engine = ScriptedEngine(suggesting)
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    url = f"/chats/{asked.chat_id}"
    server.client.get(f"{url}/suggestions")
    answer = server.stored(asked)
    assert server.client.post(f"{url}/messages/{answer.id}/edit", data={"text": "Another."}).status_code == 303
    for _ in range(2):
        server.client.get(f"{url}/suggestions")
    prompts = [[message.content for message in request.messages] for request in engine.requests[1:]]
    assert prompts == [["Hello", "An answer.", REQUEST], ["Hello", "Another.", REQUEST]]


def test_page_requests_suggestions_only_right_after_an_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine()).ready()
    assert "/suggestions" not in server.client.get("/").text
    asked = server.ask("Hello")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    assert f'hx-get="{url}/suggestions"' in server.client.get(url).text
    monkeypatch.setattr(views, "JUST_ENDED_MS", 0)
    assert "/suggestions" not in server.client.get(url).text


def test_new_question_interrupts_suggestions(start: Start) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        yield from say("What is a walrus? " * 5000 if messages[-1].content == REQUEST else "An answer.", piece=4)

    engine = ScriptedEngine(script, pace_seconds=0.01)
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    statuses: list[int] = []
    url = f"/chats/{asked.chat_id}/suggestions"
    waiting = threading.Thread(target=lambda: statuses.append(server.client.get(url).status_code))
    waiting.start()
    server.wait(lambda: len(engine.requests) == 2)
    began = time.monotonic()
    assert server.finished(server.ask("More")).state == "done"
    waiting.join(60)
    assert statuses == [204] and time.monotonic() - began < 60, "the request must return long before the answer ends"


def test_no_suggestions_while_another_answer_is_running(start: Start) -> None:
    engine = ScriptedEngine(suggesting, slots=2)
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    engine.gate.clear()
    server.ask("Elsewhere")
    assert server.client.get(f"/chats/{asked.chat_id}/suggestions").status_code == 204
    engine.gate.set()


def listen(server: Any, chat_id: str, tab: str, heard: list[str], ready: threading.Event) -> None:
    page = server.client.get(f"/chats/{chat_id}").text
    after = re.findall(r"after=([0-9a-f]+-\d+)", page)[0]
    url = f"/feed?chat={chat_id}&tab={tab}&after={after}"
    with contextlib.suppress(httpx.HTTPError), server.client.stream("GET", url) as response:
        for line in response.iter_lines():
            ready.set()
            if line.startswith("event: "):
                heard.append(line.removeprefix("event: "))


def test_tab_is_notified_of_changes_by_other_tabs_but_not_its_own(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    tabs, heard, threads = [new_id(), new_id()], ([], []), []  # type: ignore[var-annotated]
    for tab, notes in zip(tabs, heard, strict=True):
        ready = threading.Event()
        thread = threading.Thread(target=listen, args=(server, asked.chat_id, tab, notes, ready), daemon=True)
        thread.start()
        threads.append(thread)
        assert ready.wait(60)
    url = f"/chats/{asked.chat_id}"
    for tab in (tabs[0], tabs[0], tabs[1]):
        before = sum(map(len, heard))
        server.client.post(f"{url}/messages/{asked.message_id}/choose", data={}, headers={"X-Tab": tab})
        server.wait(lambda before=before: sum(map(len, heard)) >= before + 3)
    assert heard[1].count("turns") == 2 and heard[0].count("turns") == 1
    chats = heard[0].count("chats")
    assert chats >= 3
    server.finished(server.ask("elsewhere"))
    server.wait(lambda: heard[0].count("chats") > chats)
    assert heard[0].count("turns") == 1, "a change in another chat must not refresh this page"


def test_unknown_feed_revision_refreshes_chats_and_turns(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    for after in ("", "deadbeef-3", "x", "deadbeef-x", f"{server.chat.feed.revision.partition('-')[0]}-٣"):
        reader: list[str] = []
        with server.client.stream("GET", f"/feed?after={after}") as response:
            for line in response.iter_lines():
                reader += [line] if line.startswith(("event", "id")) else []
                if len(reader) >= 4:
                    break
        assert "event: chats" in reader and "event: turns" in reader


def test_stale_page_is_notified_of_its_own_question(start: Start) -> None:
    """The page was rendered before the question was stored, so it must be told to fetch the question."""
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    here, tab = f"/chats/{asked.chat_id}", new_id()
    rendered = server.client.get(f"{here}/turns", headers=FRAGMENT | {"X-Tab": tab}).text
    fields = {"text": "two", "key": new_id()}
    server.client.post(f"{here}/messages", data=fields, headers=FRAGMENT | {"X-Tab": tab})
    after = re.findall(r"/feed[^ ]+after=([0-9a-f]+-\d+)", rendered)[0]
    heard: list[str] = []
    with server.client.stream("GET", f"/feed?chat={asked.chat_id}&tab={tab}&after={after}") as response:
        for line in response.iter_lines():
            heard += [line.removeprefix("event: ")] if line.startswith("event: ") else []
            if "turns" in heard or heard.count("chats") > 1:
                break
    assert heard == ["chats", "turns"]


def test_answer_stream_also_carries_feed_events(start: Start) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    server = start(engine).ready()
    asked = server.ask("one")
    here, url = f"/chats/{asked.chat_id}", f"/generations/{asked.generation_id}/events"
    page = server.client.get(here).text
    tab, after = re.findall(rf'"{url}\?tab=([^&]+)&amp;after=([0-9a-f]+-\d+)"', page)[0]
    assert "/feed?" not in page
    heard: list[str] = []
    with server.client.stream("GET", f"{url}?tab={tab}&after={after}") as response:
        for line in response.iter_lines():
            heard += [line.removeprefix("event: ")] if line.startswith(("event: ", "id: ")) else []
            if "status" in heard and heard.count("chats") == 0:
                server.client.post(f"{here}/pin", data={"pinned": "on"}, headers={"X-Tab": tab})
            elif "chats" in heard and not engine.gate.is_set():
                engine.gate.set()
    assert "turns" not in heard and "done" in heard[-2:]
    assert not [each for each in heard if each.startswith("id: ") and "-" in each], "event ids count only the answer"
    ended = server.client.get(f"{here}/messages/{asked.message_id}?after={after}", headers=FRAGMENT | {"X-Tab": tab})
    assert f"/feed?chat={asked.chat_id}&amp;tab={tab}&amp;after={after}" in ended.text


def test_too_many_open_streams_of_one_owner_return_429(start: Start) -> None:
    engine = ScriptedEngine(lambda m, t: say("word " * 5000, piece=5), pace_seconds=0.02)
    server = start(engine).ready()
    asked = server.ask("one")
    url = f"/generations/{asked.generation_id}/events"
    opened = [server.client.stream("GET", url) for _ in range(8)]
    responses = [each.__enter__() for each in opened]
    assert {response.status_code for response in responses} == {200}
    server.wait(lambda: server.chat.turn_streams.full("local"))
    refused = server.client.get(url, headers=FRAGMENT)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    for each in opened:
        each.__exit__(None, None, None)
    server.wait(lambda: not server.chat.turn_streams.full("local"))
    server.wait(lambda: not server.chat.turn_streams._open)
    assert server.stream(asked, until=lambda event: True)
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})


def test_progress_and_usage_events_carry_token_counts(start: Start, shown: Any) -> None:
    def waits(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        yield from say("", "hm " * 20)
        shown.wait(lambda event: event.event == "progress" and '"thinking"' in event.data)
        yield from say("word " * 60)
        shown.wait(lambda event: event.event == "progress" and json.loads(event.data).get("tokens", 0) > 30)

    server = start(ScriptedEngine(waits)).ready()
    asked = server.ask("one")
    events = server.stream(asked, until=shown)
    figures = [json.loads(event.data) for event in events if event.event == "progress"]
    assert {each["message"] for each in figures} == {asked.message_id}
    assert {"prefill", "thinking", "generating"} >= {each["phase"] for each in figures} >= {"thinking", "generating"}
    tokens = [each["tokens"] for each in figures if each["phase"] != "prefill"]
    assert tokens == sorted(tokens) and tokens[-1] > 30
    (usage,) = (json.loads(event.data) for event in events if event.event == "usage")
    stored = server.finished(asked).numbers
    assert usage["completion_tokens"] == stored.completion_tokens and usage["first_token_ms"] > 0
    assert [event.event for event in events[-2:]] == ["usage", "done"]
