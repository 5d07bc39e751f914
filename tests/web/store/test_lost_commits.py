"""A database with lost commits is opened read-only and reports it; recovery is possible. Idle time checkpoints the
log."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from web.store.some_chats import OWNER, a_chat, a_turn
from web.store.test_sqlite_store import run

from notso.cli.app import run_command_line
from notso.web.store.sqlite import store as sqlite_store
from notso.web.store.sqlite.access import ACCESS_FILE, SQLiteAccessStore
from notso.web.store.sqlite.connection import (
    CommitCounterFile,
    checkpoint,
    detect_damage,
    open_reader,
    read_acknowledged_count,
    read_commit_count,
)
from notso.web.store.sqlite.store import SQLiteStore, back_up_directory
from notso.web.values.errors import StorageDamagedError, StorageError
from notso.web.values.ids import new_id

Start = Callable[..., Any]


def killed(directory: Path, chats: int = 3) -> None:
    """Imitate a crash: copy the folder while a store still has it open."""
    open_one = directory.with_name(directory.name + "-open")

    async def fill(store: SQLiteStore) -> None:
        for number in range(chats):
            chat = a_chat(f"Chat {number}")
            await store.add_turn(OWNER, a_turn(chat), chat)
        shutil.copytree(open_one, directory)

    run(open_one, fill)


async def titles(store: SQLiteStore) -> list[str]:
    return sorted(chat.title for chat in await store.chats(OWNER))


def shows(directory: Path, wanted: list[str], *, read_only: bool = False) -> None:
    async def look(store: SQLiteStore) -> None:
        assert (await titles(store), store.read_only) == (wanted, read_only)

    run(directory, look)


def test_database_without_lost_commits_opens_normally(tmp_path: Path) -> None:
    killed(tmp_path / "data")
    shows(tmp_path / "data", ["Chat 0", "Chat 1", "Chat 2"])
    shows(tmp_path / "data", ["Chat 0", "Chat 1", "Chat 2"])
    assert not list((tmp_path / "data").glob("kept-*"))


def test_commit_is_counted_after_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, a count ahead of its commit would report a loss."""
    counted: list[tuple[int, int | None]] = []
    note = CommitCounterFile.note

    def noted(witness: CommitCounterFile, commits: int) -> None:
        reader = open_reader(tmp_path / "notso.db")
        counted.append((commits, read_commit_count(reader)))
        reader.close()
        note(witness, commits)

    async def fill(store: SQLiteStore) -> None:
        for _ in range(3):
            await store.add_turn(OWNER, a_turn(chat := a_chat()), chat)

    monkeypatch.setattr(CommitCounterFile, "note", noted)
    run(tmp_path, fill)
    assert len(counted) >= 3 and all(told == stored for told, stored in counted), counted


@pytest.mark.parametrize("lost", ["notso.db", "notso.db-wal"])
def test_page_reports_missing_messages_and_rejects_writes(start: Start, tmp_path: Path, lost: str) -> None:
    data = tmp_path / "data"
    killed(data)
    (data / lost).unlink()
    left = sorted(path.name for path in data.glob("notso.db*"))
    server = start(ScriptedEngine()).ready()
    page = server.client.get("/").text
    assert "Some saved messages are missing" in page and "delete notso.db-commits" in page
    refused = server.client.post("/chats", data={"text": "My draft", "key": new_id()})
    assert refused.status_code == 503 and "My draft" in refused.text and "are missing" in refused.text
    refused = server.client.post("/settings", data={"temperature": "0.5"}, headers={"HX-Request": "true"})
    assert refused.status_code == 503 and "lacks the latest commits" in refused.text
    assert server.client.get("/export").json()["chats"] == []
    assert server.client.post("/v1/responses", json={"input": "x", "store": False}).status_code == 200
    server.close()
    assert {path.name for path in data.glob("notso.db*")} >= set(left)
    assert run_command_line(["backup", str(tmp_path / "copy.db"), "--data-dir", str(data)]) != 0


def test_deleting_the_commit_count_accepts_the_loss_and_keeps_old_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    killed(data)
    log = (data / "notso.db-wal").read_bytes()
    smashed = log[: len(log) // 2] + bytes(4096) + log[len(log) // 2 + 4096 :]
    (data / "notso.db-wal").write_bytes(smashed)
    shows(data, found := ["Chat 0"], read_only=True) if detect_damage(data / "notso.db") else pytest.fail(
        "no damage found"
    )
    (data / "notso.db-commits").unlink()
    shows(data, found)
    (kept,) = data.glob("kept-*-notso.db-wal")
    assert kept.read_bytes() == smashed and (data / kept.name.removesuffix("-wal")).stat().st_size > 0
    shows(data, found)
    assert len(list(data.glob("kept-*"))) == 2, "the damaged files are set aside only once"


def test_a_log_without_its_database_is_never_deleted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    killed(data)
    log = (data / "notso.db-wal").read_bytes()
    (data / "notso.db").write_bytes(b"")
    shows(data, [], read_only=True)
    assert (data / "notso.db-wal").read_bytes() == log
    (data / "notso.db-commits").unlink()
    shows(data, [])
    (kept,) = data.glob("kept-*-notso.db-wal")
    assert kept.read_bytes() == log


@pytest.mark.parametrize("forgotten", [(), ("notso.db-wal", "notso.db-shm")])
def test_backup_can_replace_a_newer_database(tmp_path: Path, forgotten: tuple[str, ...]) -> None:
    """The log of the old database may still be there; replaying it would overwrite the backup."""
    data, backup = tmp_path / "data", tmp_path / "backup.db"

    async def early(store: SQLiteStore) -> None:
        chat = a_chat("Early")
        await store.add_turn(OWNER, a_turn(chat), chat)
        await store.backup(backup)

    async def late(store: SQLiteStore) -> None:
        for _ in range(5):
            chat = a_chat("Late")
            await store.add_turn(OWNER, a_turn(chat), chat)
        shutil.copytree(data, tmp_path / "killed")

    run(data, early)
    run(data, late)
    data = tmp_path / "killed"
    for name in ("notso.db-wal", "notso.db-shm"):
        if name not in forgotten:
            (data / name).unlink()
    shutil.copy(backup, data / "notso.db")
    told = read_acknowledged_count(data / "notso.db")
    shows(data, ["Early"])
    assert len(list(data.glob("kept-*-notso.db-wal"))) == (1 if forgotten else 0)
    after = read_acknowledged_count(data / "notso.db")
    assert told is not None and after is not None and after >= told, "otherwise a later loss would go unnoticed"
    shows(data, ["Early"])


def test_older_copy_of_the_database_opens_read_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shows(data, [])
    shutil.copy(data / "notso.db", tmp_path / "old.db")

    async def write(store: SQLiteStore) -> None:
        chat = a_chat("Late")
        await store.add_turn(OWNER, a_turn(chat), chat)

    run(data, write)
    shutil.copy(tmp_path / "old.db", data / "notso.db")
    shows(data, [], read_only=True)
    (data / "notso.db-commits").unlink()
    shows(data, [])


def test_unreadable_commit_count_file_is_ignored(tmp_path: Path) -> None:
    data = tmp_path / "data"
    killed(data)
    for number in (b"", b"\x00" * 21, b"twelve", b"9" * 400):
        (data / "notso.db-commits").write_bytes(number)
        shows(data, ["Chat 0", "Chat 1", "Chat 2"])


def test_failure_to_write_the_commit_count_does_not_block_writes(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        assert store._writer is not None
        store._writer._commit_file._file.close()
        store._writer._commit_file._file = (tmp_path / "notso.db").open("rb", buffering=0)  # type: ignore[assignment]
        chat = a_chat("Kept")
        await store.add_turn(OWNER, a_turn(chat), chat)
        assert await titles(store) == ["Kept"]

    run(tmp_path, work)
    shows(tmp_path, ["Kept"])


def test_invalid_commit_count_in_the_database_is_a_loss(tmp_path: Path) -> None:
    data = tmp_path / "data"
    killed(data)
    db = sqlite3.connect(data / "notso.db")
    db.execute("UPDATE facts SET value = 'many' WHERE name = 'commits'")
    db.commit()
    db.close()
    shows(data, ["Chat 0", "Chat 1", "Chat 2"], read_only=True)
    (data / "notso.db-commits").unlink()
    shows(data, ["Chat 0", "Chat 1", "Chat 2"])


def test_writes_without_changes_are_not_counted(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        before = read_acknowledged_count(tmp_path / "notso.db")
        assert not await store.update_chat(OWNER, new_id(), title="x")
        await store.purge(0)
        assert read_acknowledged_count(tmp_path / "notso.db") == before
        chat = a_chat()
        await store.add_turn(OWNER, a_turn(chat), chat)
        assert read_acknowledged_count(tmp_path / "notso.db") == (before or 0) + 1

    run(tmp_path, work)


def test_idle_store_checkpoints_the_log_without_waiting_for_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "IDLE_SECONDS", 0.01)
    log = tmp_path / "notso.db-wal"

    async def until(what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.01)

    async def work(store: SQLiteStore) -> None:
        assert log.stat().st_size == 0, "the log is also checkpointed at startup"
        chat = a_chat("Kept")
        await store.add_turn(OWNER, a_turn(chat), chat)
        writer = store._writer
        assert writer is not None
        await until(lambda: log.stat().st_size == 0 and not writer.needs_checkpoint)
        reader = sqlite3.connect(f"file:{tmp_path / 'notso.db'}?mode=ro", uri=True, isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM chats").fetchone() == (1,)
        await store.update_chat(OWNER, chat.id, title="Changed")
        assert not await asyncio.to_thread(checkpoint, writer.connection)
        reader.execute("COMMIT")
        reader.close()
        await until(lambda: log.stat().st_size == 0)
        without_log = tmp_path / "elsewhere"
        without_log.mkdir()
        for name in ("notso.db", "notso.db-commits"):
            shutil.copy(tmp_path / name, without_log)
        assert detect_damage(without_log / "notso.db") == ""

    run(tmp_path, work)


def test_old_schema_with_lost_commits_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from notso.web.store.sqlite import connection

    data = tmp_path / "data"
    killed(data)
    (data / "notso.db-wal").unlink()
    monkeypatch.setattr(connection, "SCHEMA_VERSION", 99)
    with pytest.raises(StorageDamagedError, match="lacks the latest commits"):
        shows(data, [])


def test_unreadable_files_are_not_taken_for_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    killed(data)
    (data / "notso.db-commits").unlink()
    for name in ("notso.db", ACCESS_FILE):
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to("a" * 300)
    monkeypatch.setattr(Path, "exists", os.path.exists)  # in Python 3.14, this method raises no errors either
    with pytest.raises(StorageError, match="the data directory cannot be used: File name too long"):
        shows(data, [])
    assert (data / "notso.db-wal").exists(), "the log must not be moved: it may have commits of the unreadable file"
    with pytest.raises(OSError, match="File name too long"):
        back_up_directory(data, tmp_path / "backup.db")
    with pytest.raises(OSError, match="File name too long"):
        SQLiteAccessStore.exists(data)
