"""SQLite store: one process owns the file, one thread writes, and nothing is repaired silently."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.store.some_chats import OWNER, a_chat, a_turn, finished, large_chats, run_with_store, shown

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
from notso.web.values.fair_queue import FairQueue


def run(directory: Path, work: Callable[[SQLiteStore], Awaitable[None]]) -> None:
    run_with_store(SQLiteStore(directory), work)


def test_files_are_private_and_pragmas_are_set(tmp_path: Path) -> None:
    directory = tmp_path / "data"

    async def look(store: SQLiteStore) -> None:
        await store.add_turn(OWNER, a_turn(chat := a_chat()), chat)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in directory.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        writer = store._writer
        assert writer is not None
        wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "trusted_schema": 0, "mmap_size": 0}
        for pragma, value in wanted.items():
            assert writer.connection.execute(f"PRAGMA {pragma}").fetchone()[0] == value, pragma
        await store.chats(OWNER)
        (reader,) = store._readers
        assert reader.execute("PRAGMA query_only").fetchone()[0] == 1
        assert reader.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == 0
        with pytest.raises(sqlite3.OperationalError):
            reader.execute("DELETE FROM chats")

    run(directory, look)


def test_second_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
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


def test_migration_runs_once_and_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_full_disk_raises_and_writes_work_again_afterwards(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        assert store._writer is not None
        pages = store._writer.connection.execute("PRAGMA page_count").fetchone()[0]
        store._writer.connection.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StorageFullError):
            await store.save_message(replace(turn.assistant_message, content="x" * 100_000, state="done"))
        assert (await store.messages(OWNER, chat.id))[1].state == "queued", "no partial write"
        store._writer.connection.execute("PRAGMA max_page_count=1000000")
        await store.save_message(replace(turn.assistant_message, content="x" * 100_000, state="done"))

    run(tmp_path, work)


def test_shared_memory_size_error_counts_as_full_disk() -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
    with pytest.raises(StorageFullError), connection_module.storage_errors():
        raise error


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


def test_slow_write_does_not_block_readers(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        release = threading.Event()
        slow = asyncio.ensure_future(store.write(lambda db: release.wait(30)))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(store.chats(OWNER), 20)
        release.set()
        assert await slow

    run(tmp_path, work)


def test_a_database_of_the_first_release_opens(tmp_path: Path) -> None:
    (tmp_path / "notso.db").touch(0o600)
    db = sqlite3.connect(tmp_path / "notso.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.executescript(migrations.MIGRATIONS[0])
    db.execute("PRAGMA user_version=1")
    db.execute(f"INSERT INTO chats VALUES ('chat', '{OWNER}', 'Old walruses', 1, '2025-07-08', 1, 2)")
    insert = (
        "INSERT INTO messages (id, chat_id, owner, parent_id, position, role, content, state, generation_id,"
        f" completion_tokens, created_ms) VALUES (?, 'chat', '{OWNER}', ?, ?, ?, ?, ?, ?, 7, 1)"
    )
    db.execute(insert, ("q1", None, 1, "user", "first", "done", None))
    db.execute(insert, ("a1", "q1", 2, "assistant", "tusks", "done", "g1"))
    db.execute(insert, ("q2", "a1", 3, "user", "second", "done", None))
    db.execute(insert, ("a2", "q2", 4, "assistant", "half", "running", "g2"))
    db.close()

    async def look(store: SQLiteStore) -> None:
        (chat,) = await store.chats(OWNER)
        assert (chat.title, chat.pinned, chat.settings) == ("Old walruses", False, {})
        assert await shown(store, chat) == ["first", "tusks", "second", "half"]
        messages = await store.messages(OWNER, "chat")
        assert messages[3].state == "interrupted" and messages[1].numbers.completion_tokens == 7
        assert [hit.message_id for hit in await store.search(OWNER, "tusks", 9)] == ["a1"]
        assert [hit.message_id for hit in await store.search(OWNER, "walruses", 9)] == [None]
        await finished(store, a_turn(chat, "third"), "more")
        assert await shown(store, chat) == ["first", "tusks", "second", "half", "third", "more"]

    run(tmp_path, look)
    run(tmp_path, lambda store: store.purge(0))  # type: ignore[arg-type, return-value]
    copy = sqlite3.connect(tmp_path / f"notso-before-{migrations.SCHEMA_VERSION}.db")
    assert copy.execute("PRAGMA user_version").fetchone()[0] == 1


def test_query_cost_does_not_depend_on_store_size(tmp_path: Path) -> None:
    """Count SQLite's virtual machine steps, because the planner once chose an index over all messages of the owner."""
    chat, others = large_chats(turns=60, small=0)[0], large_chats(turns=1000, small=0)

    async def steps(store: SQLiteStore) -> dict[str, int]:
        counted: dict[str, int] = {}
        ids = [each.id for each in chat[1]]

        async def count(name: str, work: Callable[[], Awaitable[object]], connection: sqlite3.Connection) -> None:
            calls: list[None] = []
            connection.set_progress_handler(lambda: calls.append(None), 10)
            await work()
            connection.set_progress_handler(None, 10)
            counted[name] = len(calls)

        await store.chats(OWNER)
        [reader] = store._readers
        await count("page", lambda: store.shown_chat(OWNER, chat[0].id, 40), reader)
        await count("above", lambda: store.shown_before(OWNER, chat[0].id, ids[-40], 40), reader)
        await count("prompt", lambda: store.branch(OWNER, chat[0].id, None, most_characters=1000), reader)
        await count("piece", lambda: anext(store.message_chunks(OWNER, chat[0].id)), reader)
        writer = store._require_writer().connection
        trash_id, _ = await store.trash_messages(OWNER, chat[0].id, reset=False)
        await count("restore", lambda: store.restore(OWNER, trash_id or ""), writer)
        await store.trash_messages(OWNER, chat[0].id, reset=False)
        await count("purge", lambda: store.purge(0), writer)
        return counted

    async def work(store: SQLiteStore) -> None:
        await store.add_chats(OWNER, [chat])
        small = await steps(store)
        await store.trash_chat(OWNER, chat[0].id)
        await store.purge(0)
        await store.add_chats(OWNER, others)
        await store.add_chats(OWNER, [chat])
        large = await steps(store)
        assert small == {name: pytest.approx(count, rel=0.2, abs=5) for name, count in large.items()}

    run(tmp_path, work)


def test_reads_and_writes_take_turns_by_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, owners = FairQueue.run, list[str]()

    async def noted(queue: FairQueue, owner: str, work: Callable[[], Any]) -> Any:
        owners.append(owner)
        return await plain(queue, owner, work)

    async def work(store: SQLiteStore) -> None:
        monkeypatch.setattr(FairQueue, "run", noted)
        await store.add_turn(OWNER, a_turn(chat := a_chat()), chat)
        await store.chats(OWNER)
        await store.messages(OWNER, chat.id)
        await store.shown_chat(OWNER, chat.id, 9)
        await store.branch(OWNER, chat.id, None, most_characters=9)
        await store.search(OWNER, "words", 9)
        await store.documents.search(OWNER, "words", 9)
        monkeypatch.setattr(FairQueue, "run", plain)

    run(tmp_path, work)
    assert len(owners) >= 7 and set(owners) == {OWNER}
