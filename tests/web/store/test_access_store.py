"""Users and keys in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.store.access_suite import ANN, AccessSuite

from notso.web.store.access import AccessStore
from notso.web.store.opening import create_access_store
from notso.web.store.sqlite import access as sqlite_access
from notso.web.store.sqlite.access import ACCESS_FILE, MIGRATIONS, SQLiteAccessStore
from notso.web.store.sqlite.connection import CommitCounterFile, DirectoryLock
from notso.web.values.errors import DataDirectoryNewerError, StorageDamagedError, StorageError
from notso.web.values.ids import new_id


class TestSQLite(AccessSuite):
    def make(self, folder: Path) -> AccessStore:
        return SQLiteAccessStore(folder / "data")


class TestPostgres(AccessSuite):
    @pytest.fixture(autouse=True)
    def empty(self, new_database: str) -> None:  # a test drops a table
        self.database = new_database

    def make(self, folder: Path) -> AccessStore:
        return create_access_store(folder / "data", self.database)


def test_access_file_is_private_and_has_no_wal(tmp_path: Path) -> None:
    async def work() -> None:
        store = SQLiteAccessStore(tmp_path / "data")
        assert not SQLiteAccessStore.exists(tmp_path / "data")
        await store.add_key(ANN, b"1" * 32)
        await store.close()

    asyncio.run(work())
    path = tmp_path / "data" / ACCESS_FILE
    assert SQLiteAccessStore.exists(path.parent) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # no WAL file, which two writing processes could damage
    assert {each.name for each in path.parent.iterdir()} == {ACCESS_FILE}


def test_settings_of_the_access_file_keep_acknowledged_changes(tmp_path: Path) -> None:
    wanted = {"journal_mode": "delete", "synchronous": 2, "fullfsync": 1, "mmap_size": 0, "secure_delete": 1}

    async def read() -> dict[str, Any]:
        store = SQLiteAccessStore(tmp_path / "data")
        found = await store.write(lambda sql: {name: next(iter(sql.execute(f"PRAGMA {name}")))[0] for name in wanted})
        await store.close()
        return found

    assert asyncio.run(read()) == wanted


def test_files_created_by_root_belong_to_the_owner_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda descriptor, user, group: changed.append((user, group)))

    async def work() -> None:
        store = SQLiteAccessStore(tmp_path)
        await store.add_key(replace(ANN, id=new_id(), name=new_id()), os.urandom(32))
        await store.close()

    asyncio.run(work())
    DirectoryLock(tmp_path).release()
    CommitCounterFile(tmp_path / "notso.db", 1).close()
    owner = tmp_path.stat()
    assert changed == [(owner.st_uid, owner.st_gid)] * 3
    asyncio.run(work())
    DirectoryLock(tmp_path).release()
    assert len(changed) == 3, "existing files keep their owner"


def test_newer_or_corrupt_file_is_rejected_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / ACCESS_FILE
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    for content, kind in ((None, DataDirectoryNewerError), (b"no database at all " * 100, StorageError)):
        if content is not None:
            path.write_bytes(content)
        before = path.read_bytes()
        with pytest.raises(kind):
            asyncio.run(SQLiteAccessStore(tmp_path).open())
        assert path.read_bytes() == before


def test_migrated_keys_have_no_daily_request_limit(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / ACCESS_FILE) as connection:
        connection.executescript(MIGRATIONS[0])
        connection.execute("INSERT INTO keys VALUES ('k1', 'ann', ?, 1000, 60, 1000, 1, 0)", (b"1" * 32,))
        connection.execute("PRAGMA user_version=1")
    connection.close()

    async def work() -> None:
        store = SQLiteAccessStore(tmp_path)
        assert await store.keys() == [replace(ANN, requests_per_day=0)]
        await store.close()

    asyncio.run(work())


BOB = replace(ANN, id="k2", name="bob")


def on_file(folder: Path, work: Callable[[SQLiteAccessStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = SQLiteAccessStore(folder)
        try:
            await store.add_key(ANN, b"1" * 32)
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


def test_damage_is_reported_for_the_key_file_only(tmp_path: Path) -> None:
    path = tmp_path / ACCESS_FILE

    async def work(store: SQLiteAccessStore) -> None:
        assert await store.keys() == [ANN]
        good = path.read_bytes()
        for bad, said in ((b"\0" * 4096 + good[4096:], "is damaged"), (b"", "is empty")):
            path.write_bytes(bad)
            for _ in range(2):
                with pytest.raises(StorageDamagedError, match=f"access.db.*{said}") as told:
                    await store.keys()
                assert "notso.db" not in str(told.value) and "conversations are in another file" in str(told.value)
                with pytest.raises(StorageDamagedError, match=r"access\.db"):
                    await store.add_usage([])
            with pytest.raises(StorageDamagedError, match=said):  # a new process refuses the file too
                await SQLiteAccessStore(tmp_path).open()
            assert path.read_bytes() == bad, "the damaged file must stay unchanged"
        path.write_bytes(good)
        assert await store.keys() == [ANN], "the store works again once the file is restored"

    on_file(tmp_path, work)


def test_missing_file_is_reported_and_replacement_file_is_used(tmp_path: Path) -> None:
    path, away = tmp_path / ACCESS_FILE, tmp_path / "away"

    async def work(store: SQLiteAccessStore) -> None:
        path.rename(away)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"access\.db.*is missing"):
                await store.keys()
            with pytest.raises(StorageError, match="is missing"):
                await store.add_usage([])
        assert not path.exists(), "no empty file may replace it, because that would revoke all keys"
        other = SQLiteAccessStore(tmp_path)
        await other.add_key(BOB, b"2" * 32)
        await other.close()
        assert await store.keys() == [BOB]
        away.replace(path)
        assert await store.keys() == [ANN] and await store.add_key(BOB, b"2" * 32)

    on_file(tmp_path, work)


def test_only_first_call_waits_for_a_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(sqlite_access, "READ_MS", 1)
    monkeypatch.setattr(sqlite_access, "BUSY_MS", 2)
    monkeypatch.setattr(sqlite_access, "SHORT_MS", 0)
    run_work = sqlite_access._ConnectionThread.run_work

    def noting(thread: Any, work: Any) -> Any:
        waits.append(sqlite_access.SHORT_MS if thread._has_timed_out else thread._timeout_ms)
        return run_work(thread, work)

    monkeypatch.setattr(sqlite_access._ConnectionThread, "run_work", noting)

    async def work(store: SQLiteAccessStore) -> None:
        await store.keys()
        holder = sqlite3.connect(tmp_path / ACCESS_FILE, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        waits.clear()
        found = await asyncio.gather(*(store.keys() for _ in range(5)), return_exceptions=True)
        assert all("is locked by another program" in str(each) for each in found), found
        assert waits == [1, 0, 0, 0, 0]
        waits.clear()
        with pytest.raises(StorageError, match="locked by another program"):
            await store.add_usage([])
        assert waits == [2], "reads and writes have separate waiting times"
        holder.execute("COMMIT")
        holder.close()
        waits.clear()
        assert [await store.keys() for _ in range(2)] == [[ANN]] * 2 and waits == [0, 1]

    on_file(tmp_path, work)
