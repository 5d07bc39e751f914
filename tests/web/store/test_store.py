"""Tests that every store must pass."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from web.store.conftest import Kept
from web.store.some_chats import OWNER, a_chat, a_turn, an_answer, finished

from notso.web.store.protocol import (
    AnswerRun,
    AnswerStats,
    AnswerTrace,
    ChatStore,
    Heartbeat,
    NewMessage,
    SettingsChange,
    TurnAccepted,
    TurnRefused,
)
from notso.web.values.errors import StorageError, StorageFullError
from notso.web.values.ids import new_generation_id, new_id


def test_stored_turn_is_read_back_unchanged(kept: Kept) -> None:
    chat, numbers = a_chat("Ünïcödé \u2028 '; DROP TABLE chats; --"), AnswerStats(1, 2, 3, 4, 5.5, 6.5, 7.5)
    turn = a_turn(chat, "text with 'quotes' and \u2028 and 😀")
    done = replace(
        turn.assistant_message, content="a", reasoning="r", state="done", note="n", numbers=numbers, renderer=1
    )

    async def write(store: ChatStore) -> None:
        assert isinstance(await store.add_turn(OWNER, turn, chat), TurnAccepted)
        await store.save_message(replace(done, answer_html="<p>", reasoning_html="<b>"))

    async def read(store: ChatStore) -> None:
        (found,) = await store.chats(OWNER)
        assert (found.id, found.title, found.prompt_date, found.thinking) == (
            chat.id,
            chat.title,
            chat.prompt_date,
            True,
        )
        question, answer = await store.messages(OWNER, chat.id)
        assert question == turn.user_message
        assert answer == replace(done, answer_html="<p>", reasoning_html="<b>", parent_id=question.id)
        assert await store.message(OWNER, chat.id, answer.id) == await store.generation(
            OWNER, answer.generation_id or ""
        )

    kept.run(write)
    kept.run(read)


def test_an_unfinished_answer_is_interrupted_at_the_next_start(kept: Kept) -> None:
    running, queued, done = a_chat(), a_chat(), a_chat()
    turns = {chat.id: a_turn(chat) for chat in (running, queued, done)}

    async def crash(store: ChatStore) -> None:
        for chat in (running, queued, done):
            await store.add_turn(OWNER, turns[chat.id], chat)
        await store.save_message(replace(turns[running.id].assistant_message, content="half", state="running"))
        await store.save_message(replace(turns[done.id].assistant_message, content="whole", state="done"))

    async def run_read(store: ChatStore) -> None:
        states = {}
        for chat in (running, queued, done):
            answer = (await store.messages(OWNER, chat.id))[1]
            states[chat.id] = (answer.state, answer.content)
        assert states == {
            running.id: ("interrupted", "half"),
            queued.id: ("interrupted", ""),
            done.id: ("done", "whole"),
        }

    kept.run(crash)
    kept.run(run_read)


def test_answer_with_a_trace_is_resumed_at_most_twice(kept: Kept) -> None:
    turns = [(chat := a_chat(), a_turn(chat), tries) for tries in range(3)]
    run = AnswerRun({"seed": 7, "logit_bias": {"5": 1.5}}, 1, 2, origin="o", limit=9, ids=(1, 2), closed_at=(1,))

    async def crash(store: ChatStore) -> None:
        for chat, turn, tries in turns:
            await store.add_turn(OWNER, turn, chat)
            half = replace(turn.assistant_message, content="half", state="running")
            await store.save_message(half, OWNER, AnswerTrace((run,), "model", tries, 3))

    async def run_read(store: ChatStore) -> None:
        found: set[str] = set()
        async with asyncio.timeout(60):
            while len(found) < 2:  # a shared store waits until the other process's lease expires
                found |= {each.message_id for each in (await store.heartbeat(frozenset(), frozenset())).taken}
                await asyncio.sleep(0.02)
        assert found == {turn.assistant_message.id for _, turn, tries in turns if tries < 2}
        for chat, turn, tries in turns:
            answer = turn.assistant_message
            state = "running" if tries < 2 else "interrupted"
            assert (await store.messages(OWNER, chat.id))[1].state == state
            assert await store.trace(OWNER, answer.id) == AnswerTrace((run,), "model", tries, 3)
            assert await store.trace("another", answer.id) is None
            await store.save_message(replace(answer, content="whole", state="done"), OWNER)
        await store.edit_message(OWNER, turns[0][0].id, turns[0][1].assistant_message.id, "mine")
        assert await store.trace(OWNER, turns[0][1].assistant_message.id) is None, "the trace belongs to the old text"

    kept.run(crash)
    kept.run(run_read)


def test_late_save_does_not_overwrite_a_resumed_answer(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        first = replace(turn.assistant_message, content="first", state="stopped")
        await store.save_message(first)
        resumed = await store.resume_message(OWNER, chat.id, first.id, new_generation_id())
        assert isinstance(resumed, TurnAccepted)
        await store.save_message(replace(first, content="late"))
        await store.save_message(replace(resumed.assistant_message, chat_id=new_id(), content="of another chat"))
        assert [(m.content, m.state) for m in await store.messages(OWNER, chat.id)][1] == ("first", "queued")
        assert await store.heartbeat(frozenset({resumed.assistant_message.generation_id or ""})) == Heartbeat()

    kept.run(work)


def test_reads_of_one_owner_do_not_block_another(kept: Kept) -> None:
    async def work(store: Any) -> None:
        free, chat = threading.Event(), a_chat()
        await store.add_turn(OWNER, a_turn(chat), chat)
        greedy = [asyncio.create_task(store.run_read(lambda db: free.wait(60), "greedy")) for _ in range(20)]
        await asyncio.sleep(0)
        assert [each.id for each in await store.chats(OWNER)] == [chat.id]
        assert not any(each.done() for each in greedy), "the greedy reads must still be running"
        free.set()
        await asyncio.gather(*greedy)

    kept.run(work)


def test_titles_are_filtered_and_sorted_without_case_in_every_script(kept: Kept) -> None:
    chats = [a_chat(title) for title in ("Österreich", "öffnen", "zebra", "ОТЧЁТ", "Оглавление", "Straße", "İZMİR")]

    async def work(store: ChatStore) -> None:
        for chat in chats:
            await store.add_turn(OWNER, a_turn(chat), chat)
        for part, found in (
            *(("öster", "Österreich"), ("ÖFF", "öffnen"), ("отчёт", "ОТЧЁТ"), ("ОГЛ", "Оглавление")),
            *(("STRASSE", "Straße"), ("ẞ", "Straße"), ("izmir", "İZMİR"), ("İzmir", "İZMİR"), ("oster", "Österreich")),
        ):
            rows, _ = await store.chat_rows(OWNER, 10, title=part)
            assert [row.chat.title for row in rows] == [found]
        in_order = ["İZMİR", "öffnen", "Österreich", "Straße", "zebra", "Оглавление", "ОТЧЁТ"]
        for order, titles in (("title", in_order), ("-title", in_order[::-1])):
            rows, _ = await store.chat_rows(OWNER, 10, order=order)
            assert [row.chat.title for row in rows] == titles

    kept.run(work)


def test_chat_rows_are_sorted_filtered_and_counted(kept: Kept) -> None:
    chats = [replace(a_chat(title), updated_ms=number) for number, title in enumerate(("b_1", "A%", "c"), start=1)]
    hidden = [replace(a_chat("hidden"), temporary=True), replace(a_chat("archived"), archived=True, updated_ms=9)]

    async def run_read(store: ChatStore) -> None:
        for number, chat in enumerate([*chats, *hidden]):
            await store.add_turn(OWNER, a_turn(chat, "word " * (100 * number + 1)), chat)
            await store.update_chat(OWNER, chat.id, archived=chat.archived)
        await store.add_turn("another", a_turn(other := a_chat("other")), other)

        async def titles(order: Any = "-used", **more: Any) -> list[str]:
            rows, _ = await store.chat_rows(OWNER, 10, order=order, **more)
            return [row.chat.title for row in rows]

        assert set(await titles()) == {"b_1", "A%", "c", "archived"}
        assert await titles("title") == ["A%", "archived", "b_1", "c"]
        assert await titles("-title") == ["c", "b_1", "archived", "A%"]
        assert await titles("size") == ["b_1", "A%", "c", "archived"]
        assert await titles("-size", title="a") == ["archived", "A%"]
        assert [await titles(title=part) for part in ("%", "_", "\\", "B")] == [["A%"], ["b_1"], [], ["b_1"]]
        rows, more = await store.chat_rows(OWNER, 2, skip=1, order="title")
        assert [row.chat.title for row in rows] == ["archived", "b_1"] and more
        assert all(row.messages == 2 and row.size_bytes > 0 for row in rows)
        rows, more = await store.chat_rows(OWNER, 1, skip=1, order="-size", title="a")
        assert [row.chat.title for row in rows] == ["A%"] and not more
        assert await store.chat_rows(OWNER, 2, title="absent") == ([], False) == await store.chat_rows(OWNER, 2, skip=4)
        counted, _ = await store.chat_rows(OWNER, 9, order="-messages")
        assert len(counted) == 4

    kept.run(run_read)


def test_one_turn_per_chat_and_one_message_per_key(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        first = a_turn(chat)
        answer = replace(first.assistant_message, parent_id=first.user_message.id)
        assert await store.add_turn(OWNER, first, chat) == TurnAccepted(first.user_message, answer)
        refused = await store.add_turn(OWNER, a_turn(chat))
        assert isinstance(refused, TurnRefused) and refused.running is not None
        assert refused.running.id == first.assistant_message.id
        again = await store.add_turn(OWNER, a_turn(chat, key=first.idempotency_key))
        assert isinstance(again, TurnAccepted) and again.repeated
        assert (again.user_message.id, again.assistant_message.id) == (
            first.user_message.id,
            first.assistant_message.id,
        )
        assert len(await store.messages(OWNER, chat.id)) == 2
        assert await store.add_turn(OWNER, a_turn(a_chat())) == TurnRefused(None)

    kept.run(work)


def test_ids_of_other_owners_are_unknown(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        other = "other"
        assert await store.chats(other) == [] == await store.messages(other, chat.id)
        assert await store.chat(other, chat.id) is None
        assert await store.message(other, chat.id, turn.assistant_message.id) is None
        assert await store.generation(other, turn.assistant_message.generation_id or "") is None
        assert await store.add_turn(other, a_turn(chat)) == TurnRefused(None)
        assert not await store.update_chat(other, chat.id, title="x")
        assert not await store.update_chat(other, chat.id, thinking=False)
        assert not await store.update_chat(other, chat.id, pinned=True)
        assert not await store.change_settings(other, chat.id, dict)
        assert not await store.choose(other, chat.id, turn.assistant_message.id)
        assert not await store.edit_message(other, chat.id, turn.assistant_message.id, "x")
        assert await store.trash_chat(other, chat.id) is None
        assert await store.trash_messages(other, chat.id, reset=True) == (None, [])
        assert await store.search(other, "question", 9) == []
        assert (await store.chat(OWNER, chat.id)) is not None

    kept.run(work)


def test_simultaneous_changes_of_settings_are_all_kept(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        await store.add_chat(OWNER, chat := replace(a_chat(), settings={"model": "a"}), [])
        names = [f"name-{number}" for number in range(20)]
        changes = [store.change_settings(OWNER, chat.id, lambda old, new=name: {**old, new: 1}) for name in names]
        assert all(await asyncio.gather(*changes))
        found = await store.chat(OWNER, chat.id)
        assert found is not None and found.settings == {"model": "a"} | dict.fromkeys(names, 1)
        await store.trash_chat(OWNER, chat.id)
        assert not await store.change_settings(OWNER, chat.id, dict)
        project = await store.documents.new_library(OWNER, "Birds")
        assert project is not None

        def adding(name: str) -> SettingsChange:
            return lambda old: {**old, name: 1}

        async def change(name: str) -> None:
            await store.change_defaults(OWNER, adding(name))
            assert await store.documents.change_library(OWNER, project.id, settings=adding(name))

        await asyncio.gather(*map(change, names))
        stored = await store.documents.library(OWNER, "Birds")
        assert await store.defaults(OWNER) == stored.settings == dict.fromkeys(names, 1)

    kept.run(work)


def test_late_save_does_not_restore_deleted_messages(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        assert await store.trash_chat(OWNER, chat.id)
        assert await store.purge(0) == 1
        await store.save_message(replace(turn.assistant_message, content="late", state="done"))
        assert await store.messages(OWNER, chat.id) == []
        assert await store.trash_chat(OWNER, chat.id) is None

    kept.run(work)


def test_calls_after_close_raise(kept: Kept) -> None:
    async def session() -> None:
        store = kept.store()
        await store.open()
        await store.close()
        with pytest.raises((StorageError, RuntimeError)):
            await store.update_chat(OWNER, new_id(), title="x")

    asyncio.run(session())


def test_writes_beyond_the_owner_limit_are_refused(kept: Kept) -> None:
    """A write beyond the limit is refused before anything is stored. Deleting frees space; other owners are not
    affected."""

    async def work(store: Any) -> None:
        store.max_stored_characters = lambda owner: 0 if owner == "local" else 3000
        chat = a_chat()
        first = a_turn(chat, "x" * 1500)
        turn = await finished(store, first, "y" * 600, chat)
        refused = [
            lambda: store.add_turn(OWNER, a_turn(chat)),
            lambda: store.add_turn(OWNER, a_turn(other := a_chat()), other),
            lambda: store.add_message(OWNER, NewMessage(an_answer(chat), turn.user_message.id, new_id())),
            lambda: store.add_chat(OWNER, a_chat(), []),
            lambda: store.edit_message(OWNER, chat.id, turn.assistant_message.id, "z"),
        ]
        for each in refused:
            with pytest.raises(StorageFullError, match="delete some"):
                await each()
        assert [len(each.content) for each in await store.messages(OWNER, chat.id)] == [1500, 600]
        assert [each.id for each in await store.chats(OWNER)] == [chat.id]
        mine = a_chat()
        await store.add_chat("local", mine, [replace(turn.user_message, id=new_id(), chat_id=mine.id, parent_id=None)])
        for _ in range(3):
            await store.add_chat("local", a_chat(), [])
        assert (await store.add_turn(OWNER, first, chat)).repeated
        await store.trash_chat(OWNER, chat.id)
        await store.purge(0)
        assert isinstance(await store.add_turn(OWNER, a_turn(new := a_chat()), new), TurnAccepted)

    kept.run(work)
