"""Copy all data, including API keys, from one SQLite or PostgreSQL database to another, and verify the copy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notso.web.store.opening import create_access_store, create_store
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import Database, SQLConnection, Value, placeholders
from notso.web.store.sql.documents import DOCUMENT_COLUMNS, LIBRARY_COLUMNS, MEMBER_COLUMNS, reindex_document
from notso.web.store.sql.rows import CHAT_BOOLEANS, CHAT_COLUMNS, MESSAGE_COLUMNS, message_from_row
from notso.web.store.sql.store import SQLStore
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.errors import StorageError
from notso.web.values.settings import is_postgres

ROWS_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    booleans: frozenset[str] = frozenset()
    constants: Mapping[str, str | int] = field(default_factory=dict)  # fixed values for columns that are not copied


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """Number of rows in a table, and the sum of their SHA-256 digests, which does not depend on the rows' order."""

    table: str
    rows: int
    digest: str


# Not copied: search indexes, because each database builds its own, and the state of running servers: leases (the table
# `replicas`, and the columns `holder` and `held_until_ms`), reservations, and records of stale caches.
TABLES = (
    Table("chats", CHAT_COLUMNS, ("id",), CHAT_BOOLEANS),
    Table("messages", MESSAGE_COLUMNS, ("id",), frozenset({"edited"})),
    Table("answer_traces", ("message_id", "trace", "tries", "resumes"), ("message_id",)),
    Table("imported_messages", ("chat_id", "source", "message_id"), ("chat_id", "source")),
    Table("shares", ("id", "owner", "chat_id", "message_id", "created_ms", "expires_ms"), ("id",)),
    Table("libraries", LIBRARY_COLUMNS, ("id",)),
    Table("library_members", MEMBER_COLUMNS, ("library_id", "member")),
    Table("memories", ("id", "owner", "text", "created_ms"), ("id",)),
    Table("documents", DOCUMENT_COLUMNS, ("id",)),
    Table("document_parts", ("document_id", "part", "content"), ("document_id", "part")),
    Table("document_texts", ("document_id", "text", "pages", "passages"), ("document_id",)),
    Table("chat_documents", ("message_id", "document_id", "chat_id"), ("message_id", "document_id")),
    Table("readings", ("scope", "name", "document_id"), ("scope", "name", "document_id")),
    Table("trash", ("id", "owner", "chat_id", "kind", "settings", "chosen_root", "thrown_ms"), ("id",)),
    Table("preferences", ("owner", "settings"), ("owner",)),
    Table("prompts", ("owner", "name", "kind", "text"), ("owner", "name")),
    Table("responses", ("id", "owner", "previous_id", "body", "conversation", "created_ms", "input"), ("rowid",)),
    Table(
        "open_responses",
        (
            *("id", "owner", "path", "headers", "body", "conversation", "caller", "seed", "created_ms", "progress"),
            "tries",
        ),
        ("id",),
        # In the copy, no server has leased the responses, so any server may continue them immediately.
        constants={"holder": "", "held_until_ms": 0},
    ),
    Table("response_tokens", ("response_id", "first", "told"), ("response_id", "first")),
    Table("api_files", ("id", "owner", "name", "purpose", "size", "created_ms", "expires_ms"), ("id",)),
    Table("api_file_parts", ("file_id", "part", "content"), ("file_id", "part")),
    Table("api_batches", ("id", "owner", "created_ms", "body", "plan", "is_open"), ("id",), frozenset({"is_open"})),
    Table(
        "kept_answers",
        ("owner", "idempotency_key", "digest", "status", "headers", "body", "created_ms"),
        ("owner", "idempotency_key"),
    ),
)

# With SQLite, these tables are in a separate file (access.db), which may not exist.
ACCESS_TABLES = (
    Table(
        "keys",
        (
            "id",
            "name",
            "digest",
            "created_ms",
            "requests_per_minute",
            "tokens_per_day",
            "is_operator",
            "revoked_ms",
            "requests_per_day",
        ),
        ("id",),
        frozenset({"is_operator"}),
    ),
    Table("usage", ("day", "owner", "requests", "prompt_tokens", "completion_tokens"), ("day", "owner")),
    Table("audit", ("at_ms", "owner", "action", "address", "count"), ("number",)),
    Table("operator_audit", ("at_ms", "owner", "action", "address", "count"), ("number",)),
)


def copy_database(source: str, target: str) -> tuple[CopiedTable, ...]:
    """Copy a data directory or postgresql:// database to an empty one.

    The copied rows are read back and compared before the commit. Raises SettingsError, or StorageError if the target is
    not empty or a database is damaged, unreachable or in use by a server.
    """
    return asyncio.run(_copy(source, target))


async def _copy(source: str, target: str) -> tuple[CopiedTable, ...]:
    from_store = _chat_store_at(source, must_exist=True)
    if source == target or (not is_postgres(target) and os.path.realpath(source) == os.path.realpath(target)):
        raise StorageError("the source and the target are the same; choose another target")
    to_store = _chat_store_at(target)
    async with from_store.exclusive_use(), to_store.exclusive_use():
        return await _copy_in_transaction(from_store, to_store, TABLES, lambda: _copy_access(source, target))


async def _copy_access(source: str, target: str) -> tuple[CopiedTable, ...]:
    from_access, to_access = _access_store_at(source), _access_store_at(target)
    async with contextlib.AsyncExitStack() as closing:
        for each in (from_access, to_access):
            if each is not None:
                closing.push_async_callback(each.close)
                await each.open()
        if from_access is not None:
            if to_access is None:
                to_access = SQLiteAccessStore(Path(target))
                closing.push_async_callback(to_access.close)
            return await _copy_in_transaction(from_access, to_access, ACCESS_TABLES)
        if to_access is not None:
            await to_access.run_read(lambda db: _require_empty(db, ACCESS_TABLES))
    return tuple(_Digest(table).copied for table in ACCESS_TABLES)


async def _copy_in_transaction(
    source: SQLStore | SQLAccessStore,
    target: SQLStore | SQLAccessStore,
    tables: tuple[Table, ...],
    before_commit: Callable[[], Coroutine[Any, Any, tuple[CopiedTable, ...]]] | None = None,
) -> tuple[CopiedTable, ...]:
    loop = asyncio.get_running_loop()

    def read(from_db: SQLConnection) -> tuple[CopiedTable, ...]:
        def write(to_db: SQLConnection) -> tuple[CopiedTable, ...]:
            if isinstance(to_db, Database):
                to_db.prepare_bulk_copy()
            copied = _copy_tables(tables, from_db, to_db)
            # Chats and keys are copied in two transactions. If the keys cannot be committed, the chats are rolled back.
            if before_commit is None:
                return copied
            return (*copied, *asyncio.run_coroutine_threadsafe(before_commit(), loop).result())

        with from_db.snapshot():
            if isinstance(from_db, Database):
                from_db.prepare_bulk_copy()
            return asyncio.run_coroutine_threadsafe(target.write(write), loop).result()

    return await source.run_read(read)


def _copy_tables(tables: tuple[Table, ...], from_db: SQLConnection, to_db: SQLConnection) -> tuple[CopiedTable, ...]:
    if tables is ACCESS_TABLES and not _is_empty(to_db, tables):
        # The target already has the keys if an earlier copy committed them, but could not commit the chats.
        present = tuple(digest_table(to_db, table) for table in tables)
        if present == tuple(digest_table(from_db, table) for table in tables):
            return present
    _require_empty(to_db, tables)
    copied = []
    for table in tables:
        names = (*table.columns, *table.constants)
        into = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({placeholders(names)})"
        digest = _Digest(table)
        for rows in _read_batches(from_db, table):
            digest.add(rows)
            for row in rows:
                values = [bool(row[c]) if c in table.booleans else row[c] for c in table.columns]
                to_db.execute(into, [*values, *table.constants.values()])
                if isinstance(to_db, Database):
                    _index(to_db, table, row)
        copied.append(digest.copied)
    written = tuple(digest_table(to_db, table) for table in tables)
    if written != tuple(copied):
        raise StorageError("the copy differs from the source and was discarded")
    return written


def _index(db: Database, table: Table, row: Any) -> None:
    if table.name == "chats":
        db.index_title(row["owner"], row["id"], row["title"])
    elif table.name == "messages":
        db.index_message(row["owner"], message_from_row(row))
    elif table.name == "document_texts":
        reindex_document(db, row["document_id"])


def _is_empty(db: SQLConnection, tables: tuple[Table, ...]) -> bool:
    return all(db.execute(f"SELECT 1 AS one FROM {table.name} LIMIT 1").fetchone() is None for table in tables)


def _require_empty(db: SQLConnection, tables: tuple[Table, ...]) -> None:
    if not _is_empty(db, tables):
        raise StorageError("the target is not empty and was not changed; choose another one")


def digest_table(db: SQLConnection, table: Table) -> CopiedTable:
    digest = _Digest(table)
    for rows in _read_batches(db, table):
        digest.add(rows)
    return digest.copied


class _Digest:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows = 0
        self._sum = 0

    def add(self, rows: list[Any]) -> None:
        for row in rows:
            values = [bool(row[c]) if c in self._table.booleans else row[c] for c in self._table.columns]
            line = json.dumps(values, ensure_ascii=True, separators=(",", ":"), default=bytes.hex).encode()
            self._sum = (self._sum + int.from_bytes(hashlib.sha256(line).digest())) % (1 << 256)
            self._rows += 1

    @property
    def copied(self) -> CopiedTable:
        return CopiedTable(self._table.name, self._rows, f"{self._sum:064x}")


def _read_batches(db: SQLConnection, table: Table) -> Iterator[list[Any]]:
    names = ", ".join(dict.fromkeys((*table.columns, *table.key)))
    key, marks = ", ".join(table.key), placeholders(table.key)
    # Keyset pagination, because an OFFSET would read all earlier rows again.
    where = ""
    last: list[Value] = []
    while True:
        sql = f"SELECT {names} FROM {table.name}{where} ORDER BY {key} LIMIT {ROWS_AT_ONCE}"
        rows = db.execute(sql, last).fetchall()
        if not rows:
            return
        yield rows
        where, last = f" WHERE ({key}) > ({marks})", [rows[-1][name] for name in table.key]


def _chat_store_at(place: str, *, must_exist: bool = False) -> SQLStore:
    if is_postgres(place):
        return create_store(Path(), place)
    if must_exist and not os.path.exists(os.path.join(place, "notso.db")):  # noqa: PTH110, PTH118 - raises no error
        raise StorageError(f"{place} contains no chats")
    return create_store(Path(place), None)


def _access_store_at(place: str) -> SQLAccessStore | None:
    if is_postgres(place):
        return create_access_store(Path(), place)
    # Opening the store would create access.db, so return None if the file does not exist.
    return SQLiteAccessStore(Path(place)) if SQLiteAccessStore.exists(Path(place)) else None
