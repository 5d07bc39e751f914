"""Select the database: SQLite files in the data directory, or PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from notso.web.store.protocol import ChatStore
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import SettingsError, require_extra
from notso.web.values.settings import NO_POSTGRES, is_postgres

if TYPE_CHECKING:
    from notso.web.store.postgres.store import PostgresStore


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """Version and settings of a PostgreSQL server."""

    version: str
    connections: int  # value of `max_connections`
    loses: str  # name of a setting that endangers commits because it is off (`fsync`, `full_page_writes`), or ''


def create_store(directory: Path, database_url: str | None) -> SQLiteStore | PostgresStore:
    """Return a store that is not open yet.

    Raises SettingsError if the extra `postgres` is not installed, and StorageError for an invalid URL.
    """
    if database_url is None:
        return SQLiteStore(directory)
    with require_extra("postgres", "database_url"):
        from notso.web.store.postgres.store import PostgresStore
    return PostgresStore(database_url)


def run_with_store(directory: Path, database_url: str | None, work: Callable[[ChatStore], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with an open store in a new event loop, for CLI commands. Raises StorageError and SettingsError."""

    async def run() -> T:
        store = create_store(directory, database_url)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def create_access_store(
    directory: Path, database_url: str | None, chat_store: ChatStore | None = None
) -> SQLAccessStore:
    """Return an access store that is not open yet. Raises SettingsError and StorageError.

    `chat_store`: this process's chat store, if any. With PostgreSQL, both stores share connections.
    """
    if database_url is None:
        return SQLiteAccessStore(directory)
    with require_extra("postgres", "database_url"):
        from notso.web.store.postgres.connection import PostgresPool
        from notso.web.store.postgres.store import ACCESS_THREADS, PostgresAccessStore, PostgresStore
    if isinstance(chat_store, PostgresStore):
        return chat_store.access()
    return PostgresAccessStore(PostgresPool(database_url, ACCESS_THREADS, "keys"))


def query_database_info(database_url: str) -> DatabaseInfo:
    """Query a PostgreSQL server. Raises StorageError and SettingsError."""
    if not is_postgres(database_url):
        raise SettingsError(NO_POSTGRES, setting="database_url")
    with require_extra("postgres", "database_url"):
        from notso.web.store.postgres.connection import query_server_settings
    version, connections, fsync, full_page_writes = query_server_settings(
        database_url, ("server_version", "max_connections", "fsync", "full_page_writes")
    )
    loses = "fsync" if fsync == "off" else "full_page_writes" if full_page_writes == "off" else ""
    return DatabaseInfo(f"PostgreSQL {version.split()[0]}", int(connections), loses)
