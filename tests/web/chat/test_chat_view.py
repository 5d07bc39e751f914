"""Database reads per request: each reads its branch once, reads only a part of a long chat, and handles a chat that
changes meanwhile."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, Event, Message
from notso.smollm3.text.chat_template import ChatTemplate
from notso.web.chat.chat_view import NEWEST_MESSAGES
from notso.web.chat.submit import new_chat
from notso.web.chat.titles import Titles
from notso.web.store.protocol import Chat, NewTurn, StoredMessage
from notso.web.store.sql import rows, shown_part
from notso.web.store.sql import store as store_module
from notso.web.values.ids import new_generation_id, new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


class CountedStore:
    """A store that records its calls. `before` maps a call's name to a function that runs once before that call."""

    def __init__(self, store: Any) -> None:
        self.calls: list[str] = []
        self.before: dict[str, Callable[[Any], Any]] = {}
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if (change := self.before.pop(name, None)) is not None:
                await change(self._store)
            return await found(*args, **kwargs)

        return counted


class Asking:
    """A chat with one finished turn, and the store calls made inside `counted`."""

    def __init__(self, start: Start) -> None:
        self.engine = ScriptedEngine(lambda messages, thinking: say("one two three"))
        self.server = start(self.engine).ready()
        self.first = self.server.ask("a question", thinking=False)
        self.server.finished(self.first)
        self.url = f"/chats/{self.first.chat_id}"
        self.assistant_message = f"{self.url}/messages/{self.first.message_id}"
        self.store = CountedStore(self.server.shared.store)

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Hold the engine, so that saving an answer is not counted as part of the request."""
        self.engine.gate.clear()
        self.server.client.get(self.url)  # render the HTML that is not cached yet
        self.store.calls = []
        self.server.shared.store = self.server.chat.html_cache._store = self.store
        yield self.store.calls
        self.server.shared.store = self.server.chat.html_cache._store = self.store._store
        self.engine.gate.set()

    def post(self, url: str, **fields: str) -> None:
        done = self.server.client.post(url, data={"key": new_id()} | fields, headers=FRAGMENT)
        assert done.status_code == 200, done.text

    def send(self, text: str = "more") -> None:
        self.post(f"{self.url}/messages", text=text)

    def finish(self) -> tuple[Message, ...]:
        """Wait for the answer and return the messages that the model read."""
        self.server.finished(self.server.last(self.first.chat_id))
        return self.engine.requests[-1].messages


@pytest.fixture
def asking(start: Start, monkeypatch: pytest.MonkeyPatch) -> Asking:
    # Titles read the chat after each answer, which may be while calls are counted.
    monkeypatch.setattr(Titles, "schedule_if_needed", lambda self, turn: None)
    return Asking(start)


def test_sending_a_message_reads_the_branch_once(asking: Asking) -> None:
    with asking.counted() as calls:
        asking.send()
    assert calls == ["branch", "add_turn"]


def test_first_message_of_a_chat_reads_no_messages(asking: Asking) -> None:
    with asking.counted() as calls:
        assert asking.server.client.post("/chats", data={"text": "hello", "key": new_id()}).status_code == 303
    assert calls[:2] == ["chat_base", "add_turn"], "all further calls belong to the page that the redirect leads to"
    assert set(calls[2:]) <= {"shown_chat", "chat_list", "prompts"}


@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("regenerate", ["message", "branch", "add_message", "shown_chat"]),
        ("continue", ["message", "branch", "trace", "resume_message", "shown_chat"]),
        ("choose", ["message", "choose", "shown_chat"]),
        ("edit", ["message", "edit_message", "shown_chat", "keep_html"]),
    ],
)
def test_answer_actions_make_only_the_expected_store_calls(asking: Asking, what: str, calls: list[str]) -> None:
    with asking.counted() as counted:
        asking.post(f"{asking.assistant_message}/{what}", text="other words")
    assert counted == calls


def test_editing_a_question_reads_the_branch_once(asking: Asking) -> None:
    question = asking.server.on_loop(lambda: asking.server.shared.store.messages("local", asking.first.chat_id))[0].id
    with asking.counted() as calls:
        asking.post(f"{asking.url}/messages/{question}/edit", text="another question")
    assert calls == ["message", "branch", "add_turn", "shown_chat"]
    assert [message.content for message in asking.finish()] == ["another question"]


def test_views_read_the_chat_once_and_stop_reads_one_generation(asking: Asking) -> None:
    asking.engine.gate.clear()
    asking.send()
    running = asking.server.last(asking.first.chat_id)
    for url, expected in (
        (asking.url, ["shown_chat", "chat_list", "prompts"]),
        (f"{asking.url}/turns", ["shown_chat"]),
        (asking.assistant_message, ["shown_chat"]),
        (f"/status?chat={asking.first.chat_id}", ["shown_chat"]),
    ):
        with asking.counted() as calls:
            assert asking.server.client.get(url, headers=FRAGMENT).status_code == 200
        assert calls == expected, url
    with asking.counted() as calls:
        done = asking.server.client.post(f"/generations/{running.generation_id}/stop", data={}, headers=FRAGMENT)
        assert done.status_code == 204
    assert calls == ["generation"]
    with asking.counted() as calls:
        asking.post(f"{asking.url}/estimate", text="what I type")
    assert calls == ["branch"]


def test_turn_added_concurrently_by_another_tab_is_in_the_prompt(asking: Asking) -> None:
    """Another tab adds a turn between reading the chat and storing the question."""

    async def another_turn(store: Any) -> None:
        [question, answer] = await store.messages("local", asking.first.chat_id)
        turn = NewTurn(
            replace(question, id=new_id(), content="from the other tab"),
            replace(answer, id=new_id(), generation_id=new_id(), content="its answer", state="done"),
            new_id(),
        )
        accepted = await store.add_turn("local", turn)
        await store.save_message(replace(accepted.assistant_message, content="its answer", state="done"))

    with asking.counted() as calls:
        asking.store.before["add_turn"] = another_turn
        asking.send("last")
    assert calls == ["branch", "add_turn", "branch"]
    assert [message.content for message in asking.finish()] == [
        *("a question", "one two three", "from the other tab", "its answer", "last")
    ]


def test_answer_finished_during_next_question_is_complete_in_the_prompt(asking: Asking) -> None:
    """The chat was read while the previous answer was still being written."""

    async def end(store: Any) -> None:
        answer = (await store.messages("local", asking.first.chat_id))[-1]
        await store.save_message(replace(answer, content="at last", state="done"))

    chat_id, message_id = asking.first.chat_id, asking.first.message_id
    store = asking.server.shared.store
    with asking.counted():
        # after `counted` has loaded the page, which would finish an answer that is not being generated
        asking.server.on_loop(lambda: store.resume_message("local", chat_id, message_id, new_generation_id()))
        asking.store.before["add_turn"] = end
        asking.send("and now?")
    assert [message.content for message in asking.finish()] == ["a question", "at last", "and now?"]


def test_tab_is_notified_only_of_concurrent_turns_of_other_tabs(asking: Asking) -> None:
    tab = {"X-Tab": new_id()}

    def revision(text: str) -> str:
        return re.findall(r"after=([0-9a-f]+-\d+)", text)[-1]

    def sent() -> str:
        fields = {"text": "more", "key": new_id()}
        return asking.server.client.post(f"{asking.url}/messages", data=fields, headers=FRAGMENT | tab).text

    async def other_tab(store: Any) -> None:
        asking.server.chat.feed.announce("local", asking.first.chat_id, new_id())

    def heard(since: str) -> list[str]:
        return asking.server.chat.feed.since(since, "local", asking.first.chat_id, tab["X-Tab"])

    with asking.counted():
        assert "turns" not in heard(revision(sent()))
    asking.finish()
    with asking.counted():
        asking.store.before["add_turn"] = other_tab
        assert heard(revision(sent())) == ["chats", "turns"]


def test_prompt_of_each_message_is_encoded_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check whether a message fits renders the prompt once, and the engine reuses that rendering."""
    rendered: list[str] = []
    encode = ChatTemplate.encode

    def counted(self: ChatTemplate, tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
        rendered.append(messages[-1].content)
        return encode(self, tokenizer, messages, **options)

    monkeypatch.setattr(ChatTemplate, "encode", counted)
    server = start(Engine.load).ready()
    server.client.post("/settings", data={"max_tokens": "8", "tools": "clock"})
    first = server.ask("What is 27 + 48?", thinking=False)
    assert server.finished(first).state == "done"
    assert server.finished(server.ask("And 2 + 3?", first.chat_id, thinking=False)).state == "done"
    assert rendered == ["What is 27 + 48?", "And 2 + 3?"]


class CharactersRead:
    """Count the messages read from the store and their characters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages = self.characters = 0
        message_from_row = rows.message_from_row

        def counted(row: Any) -> StoredMessage:
            message = message_from_row(row)
            self.messages += 1
            self.characters += len(message.content)
            return message

        for module in (store_module, shown_part):
            monkeypatch.setattr(module, "message_from_row", counted)


def a_long_chat(summary_at: int | None = None, other_branches: int = 0) -> tuple[Chat, list[StoredMessage]]:
    """Build four hundred turns of a thousand characters each, with a summary after turn `summary_at`."""
    chat, messages = new_chat("long", thinking=False), list[StoredMessage]()

    def add(role: Any, content: str, parent: str | None, kind: Any = "turn") -> str:
        id = new_id()
        messages.append(StoredMessage(id, chat.id, role, content, "", "done", 0, None, parent_id=parent, kind=kind))
        return id

    last = None
    for number in range(400):
        last = add("user", f"q{number} " + "lorem " * 80, last)
        for _ in range(other_branches):
            add("assistant", "another " * 60, last)
        last = add("assistant", f"a{number} " + "dolor " * 80, last)
        if number == summary_at:
            last = add("assistant", "what was said", last, "summary")
    return chat, messages


@pytest.mark.parametrize("summary_at", [None, 397], ids=["long", "summed up"])
@pytest.mark.parametrize("what", ["ask", "estimate", "summarize", "regenerate", "continue", "edit", "suggest"])
def test_long_chat_reads_only_messages_that_fit_the_prompt(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, summary_at: int | None
) -> None:
    """Messages above a summary, beyond the context limit or in other branches are not read."""
    engine = ScriptedEngine(most_prompt_bytes=4_000)
    server = start(engine).ready()
    server.client.post("/settings", data={"when_full": "drop_oldest"})
    chat, messages = a_long_chat(summary_at, other_branches=1)
    server.on_loop(lambda: server.shared.store.add_chat("local", chat, messages))
    url, answer, question = f"/chats/{chat.id}", messages[-1].id, messages[-3].id
    server.client.get(url)  # render and cache the HTML
    read = CharactersRead(monkeypatch)
    fields = {"text": "and now?", "key": new_id(), "last": answer}
    address = {
        "ask": f"{url}/messages",
        "estimate": f"{url}/estimate",
        "summarize": f"{url}/summarize",
        "regenerate": f"{url}/messages/{answer}/regenerate",
        "continue": f"{url}/messages/{answer}/continue",
        "edit": f"{url}/messages/{question}/edit",
    }.get(what)
    if address is None:
        assert server.client.get(f"{url}/suggestions", headers=FRAGMENT | {"X-Last": answer}).status_code in (200, 204)
    else:
        answered = server.client.post(address, data=fields, headers=FRAGMENT)
        assert answered.status_code == 200, answered.text
    for_prompt = 10 if summary_at is None else 7
    on_page = 0 if what in ("ask", "estimate", "suggest") else NEWEST_MESSAGES + 2
    assert read.messages <= for_prompt + on_page + 5
    assert read.characters <= 550 * (for_prompt + on_page + 5)
    if what == "ask":
        asked = server.finished(server.last(chat.id))
        contents = [message.content.split()[0] for message in engine.requests[-1].messages]
        assert contents[-2:] == ["a399", "and"]
        assert len(contents) <= 10
        assert asked.dropped_messages == 0  # the scripted engine drops no messages


def test_messages_not_read_for_the_prompt_count_as_dropped(start: Start) -> None:
    engine = ScriptedEngine(
        lambda messages, thinking: [Event("trimmed", dropped_messages=3), *say("short")], most_prompt_bytes=4_000
    )
    server = start(engine).ready()
    chat, messages = a_long_chat()
    server.on_loop(lambda: server.shared.store.add_chat("local", chat, messages))
    server.client.post("/settings", data={"when_full": "drop_oldest"})
    asked = server.ask("and now?", chat.id, thinking=False)
    message = server.finished(asked)
    assert message.dropped_messages == 3 + 801 - len(engine.requests[-1].messages)


def test_failed_question_does_not_use_prompt_budget(start: Start) -> None:
    """The failed question is left out of the prompt, so the messages above it are read instead."""
    engine = ScriptedEngine(most_prompt_bytes=4_000)
    server = start(engine).ready()
    chat = new_chat("failed", thinking=False)
    line = [
        StoredMessage("", chat.id, "user", "hello", "", "done", 0),
        StoredMessage("", chat.id, "assistant", "hi", "", "done", 0),
        StoredMessage("", chat.id, "user", "x" * 50_000, "", "done", 0),
        StoredMessage("", chat.id, "assistant", "", "", "failed", 0),
    ]
    ids = [new_id() for _ in line]
    line = [replace(each, id=id, parent_id=above) for each, id, above in zip(line, ids, [None, *ids], strict=False)]
    server.on_loop(lambda: server.shared.store.add_chat("local", chat, line))
    server.finished(server.ask("again", chat.id, thinking=False))
    assert [message.content for message in engine.requests[-1].messages] == ["hello", "hi", "again"]
