"""What is acknowledged is on disk, one process owns it, and nothing is ever repaired behind anybody's back."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from notso.web.store.protocol import Chat, Heartbeat, NewTurn, Numbers, StoredMessage, TurnAccepted, TurnRefused
from notso.web.store.sqlite import connection as connection_module
from notso.web.store.sqlite import migrations
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import (
    DataDirectoryBusyError,
    DataDirectoryNewerError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)
from notso.web.values.ids import new_generation_id, new_id

OWNER = "somebody"


def run(directory: Path, work: Callable[[SQLiteStore], Awaitable[None]]) -> None:
    async def session() -> None:
        store = SQLiteStore(directory)
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(session())


def a_chat(title: str = "A chat") -> Chat:
    return Chat(new_id(), title, True, date(2025, 7, 8), 1, 1)


def a_turn(chat: Chat, text: str = "question", key: str | None = None) -> NewTurn:
    return NewTurn(
        StoredMessage(new_id(), chat.id, "user", text, "", "done", 1),
        StoredMessage(new_id(), chat.id, "assistant", "", "", "queued", 1, generation_id=new_generation_id()),
        key or new_id(),
    )


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    chat, numbers = a_chat("Ünïcödé \u2028 '; DROP TABLE chats; --"), Numbers(1, 2, 3, 4, 5.5, 6.5, 7.5)
    turn = a_turn(chat, "text with 'quotes' and \u2028 and 😀")
    done = replace(
        turn.assistant_message, content="a", reasoning="r", state="done", note="n", numbers=numbers, renderer=1
    )

    async def write(store: SQLiteStore) -> None:
        assert isinstance(await store.add_turn(OWNER, turn, chat), TurnAccepted)
        await store.save_message(replace(done, answer_html="<p>", reasoning_html="<b>"))

    async def read(store: SQLiteStore) -> None:
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

    run(tmp_path, write)
    run(tmp_path, read)


def test_files_are_private_and_the_pragmas_hold(tmp_path: Path) -> None:
    directory = tmp_path / "data"

    async def look(store: SQLiteStore) -> None:
        await store.add_turn(OWNER, a_turn(chat := a_chat()), chat)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in directory.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        writer, reader = store._writer, store._reader
        assert writer is not None
        wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "trusted_schema": 0, "mmap_size": 0}
        for pragma, value in wanted.items():
            assert writer.connection.execute(f"PRAGMA {pragma}").fetchone()[0] == value, pragma
        await store.chats(OWNER)
        reader = store._reader
        assert reader is not None
        assert reader.execute("PRAGMA query_only").fetchone()[0] == 1
        assert reader.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == 0
        with pytest.raises(sqlite3.OperationalError):
            reader.execute("DELETE FROM chats")

    run(directory, look)


def test_an_unfinished_answer_is_interrupted_at_the_next_start(tmp_path: Path) -> None:
    running, queued, done = a_chat(), a_chat(), a_chat()
    turns = {chat.id: a_turn(chat) for chat in (running, queued, done)}

    async def crash(store: SQLiteStore) -> None:
        for chat in (running, queued, done):
            await store.add_turn(OWNER, turns[chat.id], chat)
        await store.save_message(replace(turns[running.id].assistant_message, content="half", state="running"))
        await store.save_message(replace(turns[done.id].assistant_message, content="whole", state="done"))

    async def look(store: SQLiteStore) -> None:
        states = {}
        for chat in (running, queued, done):
            answer = (await store.messages(OWNER, chat.id))[1]
            states[chat.id] = (answer.state, answer.content)
        assert states == {
            running.id: ("interrupted", "half"),
            queued.id: ("interrupted", ""),
            done.id: ("done", "whole"),
        }

    run(tmp_path, crash)
    run(tmp_path, look)


def test_a_late_save_writes_only_what_it_was_asked_for(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
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
        assert await store.heartbeat([resumed.assistant_message.generation_id or ""]) == Heartbeat()

    run(tmp_path, work)


def test_one_turn_per_chat_and_one_message_per_key(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
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

    run(tmp_path, work)


def test_a_foreign_id_is_an_unknown_id(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        other = "other"
        assert await store.chats(other) == [] == await store.messages(other, chat.id)
        assert await store.chat(other, chat.id) is None
        assert await store.message(other, chat.id, turn.assistant_message.id) is None
        assert await store.generation(other, turn.assistant_message.generation_id or "") is None
        assert await store.add_turn(other, a_turn(chat)) == TurnRefused(None)
        assert not await store.set_title(other, chat.id, "x")
        assert not await store.set_thinking(other, chat.id, False)
        assert not await store.set_pinned(other, chat.id, True)
        assert not await store.set_settings(other, chat.id, {})
        assert not await store.choose(other, chat.id, turn.assistant_message.id)
        assert not await store.edit_message(other, chat.id, turn.assistant_message.id, "x")
        assert await store.trash_chat(other, chat.id) is None
        assert await store.trash_messages(other, chat.id, reset=True) is None
        assert await store.search(other, "question", 9) == []
        assert (await store.chat(OWNER, chat.id)) is not None

    run(tmp_path, work)


def test_deleting_takes_the_messages_along_and_a_late_save_brings_none_back(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        assert await store.trash_chat(OWNER, chat.id)
        assert await store.purge(0) == 1
        await store.save_message(replace(turn.assistant_message, content="late", state="done"))
        assert await store.messages(OWNER, chat.id) == []
        assert await store.trash_chat(OWNER, chat.id) is None

    run(tmp_path, work)


def test_the_second_process_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        with pytest.raises(DataDirectoryBusyError):
            await SQLiteStore(tmp_path).open()

    run(tmp_path, work)
    run(tmp_path, work)


def test_data_of_a_newer_release_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "notso.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE future (x)")
        db.execute(f"PRAGMA user_version={migrations.SCHEMA_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(DataDirectoryNewerError, match="newer"):
        asyncio.run(SQLiteStore(tmp_path).open())
    assert path.read_bytes() == before


def test_a_migration_runs_once_after_a_copy_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = a_chat()

    async def write(store: SQLiteStore) -> None:
        await store.add_turn(OWNER, a_turn(chat), chat)

    async def read(store: SQLiteStore) -> None:
        assert (await store.chats(OWNER))[0].id == chat.id
        assert store._writer is not None
        assert store._writer.connection.execute("SELECT note FROM extra").fetchone()[0] == "a; b"

    run(tmp_path, write)
    steps = (*migrations.MIGRATIONS, "CREATE TABLE extra (note TEXT); INSERT INTO extra VALUES ('a; b');")
    monkeypatch.setattr(connection_module, "MIGRATIONS", steps)
    monkeypatch.setattr(connection_module, "SCHEMA_VERSION", len(steps))
    run(tmp_path, read)
    run(tmp_path, read)
    copy = tmp_path / f"notso-before-{len(steps)}.db"
    assert sqlite3.connect(copy).execute("PRAGMA user_version").fetchone()[0] == len(steps) - 1


def test_a_failed_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(store: SQLiteStore) -> None:
        pass

    run(tmp_path, nothing)
    steps = (*migrations.MIGRATIONS, "CREATE TABLE extra (x); INSERT INTO nowhere VALUES (1);")
    with monkeypatch.context() as patched:
        patched.setattr(connection_module, "MIGRATIONS", steps)
        patched.setattr(connection_module, "SCHEMA_VERSION", len(steps))
        with pytest.raises(StorageError):
            run(tmp_path, nothing)
    db = sqlite3.connect(tmp_path / "notso.db")
    assert db.execute("PRAGMA user_version").fetchone()[0] == len(migrations.MIGRATIONS)
    assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'extra'").fetchone()[0] == 0
    db.close()
    run(tmp_path, nothing)


@pytest.mark.parametrize(
    "damage", [b"not a database at all, but long enough to be one" * 40, b"SQLite format 3\x00" + b"\xff" * 4096]
)
def test_a_damaged_file_is_reported_and_left_alone(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "notso.db"
    path.write_bytes(damage)
    with pytest.raises(StorageDamagedError, match="damaged"):
        asyncio.run(SQLiteStore(tmp_path).open())
    assert path.read_bytes() == damage


def test_a_full_disk_is_named_and_passes(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        assert store._writer is not None
        pages = store._writer.connection.execute("PRAGMA page_count").fetchone()[0]
        store._writer.connection.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StorageFullError):
            await store.save_message(replace(turn.assistant_message, content="x" * 100_000, state="done"))
        assert (await store.messages(OWNER, chat.id))[1].state == "queued", "nothing half-written"
        store._writer.connection.execute("PRAGMA max_page_count=1000000")
        await store.save_message(replace(turn.assistant_message, content="x" * 100_000, state="done"))

    run(tmp_path, work)


def test_no_room_for_the_index_of_the_log_is_a_full_disk_too() -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
    with pytest.raises(StorageFullError), connection_module.storage_errors():
        raise error


def test_after_closing_every_call_is_a_storage_error(tmp_path: Path) -> None:
    async def session() -> None:
        store = SQLiteStore(tmp_path)
        await store.open()
        await store.close()
        with pytest.raises((StorageError, RuntimeError)):
            await store.set_title(OWNER, new_id(), "x")

    asyncio.run(session())


def test_only_one_thread_ever_writes(tmp_path: Path) -> None:
    threads: set[str] = set()

    async def work(store: SQLiteStore) -> None:
        assert store._writer is not None
        store._writer.connection.set_trace_callback(lambda statement: threads.add(threading.current_thread().name))
        chats = [a_chat() for _ in range(20)]
        await asyncio.gather(*(store.add_turn(OWNER, a_turn(chat), chat) for chat in chats))
        assert len(await store.chats(OWNER)) == 20

    run(tmp_path, work)
    assert len(threads) == 1


def test_a_slow_write_does_not_hold_up_readers(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        release = threading.Event()
        slow = asyncio.ensure_future(store._write(lambda db: release.wait(30)))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(store.chats(OWNER), 20)
        release.set()
        assert await slow

    run(tmp_path, work)
