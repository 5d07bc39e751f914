"""People and keys in SQLite and in PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from web.store.access_suite import ANN, AccessSuite

from notso.web.store.access import AccessStore
from notso.web.store.opening import access_store_at
from notso.web.store.sqlite.access import ACCESS_FILE, MIGRATIONS, SQLiteAccessStore
from notso.web.values.errors import DataDirectoryNewerError, StorageError


class TestSQLite(AccessSuite):
    def make(self, folder: Path) -> AccessStore:
        return SQLiteAccessStore(folder / "data")


class TestPostgres(AccessSuite):
    @pytest.fixture(autouse=True)
    def empty(self, database: str) -> None:
        self.database = database

    def make(self, folder: Path) -> AccessStore:
        return access_store_at(folder / "data", self.database)


def test_the_file_is_private_and_holds_no_key(tmp_path: Path) -> None:
    async def work() -> None:
        store = SQLiteAccessStore(tmp_path / "data")
        assert not SQLiteAccessStore.exists(tmp_path / "data")
        await store.add_key(ANN, b"1" * 32)
        await store.close()

    asyncio.run(work())
    path = tmp_path / "data" / ACCESS_FILE
    assert SQLiteAccessStore.exists(path.parent) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {each.name for each in path.parent.iterdir()} == {ACCESS_FILE}  # no WAL, which two writers could damage


def test_a_newer_or_broken_file_is_told_and_left(tmp_path: Path) -> None:
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


def test_keys_of_an_older_release_stay_and_have_no_new_limit(tmp_path: Path) -> None:
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
