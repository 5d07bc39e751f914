"""Connect to PostgreSQL, migrate the schema, manage leases, and convert database errors."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import psycopg
from psycopg import Connection, Cursor, Pipeline, errors
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row, tuple_row
from psycopg.types.string import StrDumperUnknown
from psycopg_pool import ConnectionPool, PoolTimeout

from notso.web.store.postgres.migrations import MIGRATIONS, REINDEXES, SCHEMA_VERSION
from notso.web.store.protocol import DISK_FULL, FAILED, LEASE_SECONDS, MOST_TRIES, Heartbeat, Orphan, StoredMessage
from notso.web.store.sql.database import FIND, Database, Rows, Value
from notso.web.store.sql.search_words import Term, to_tsvector, tsquery
from notso.web.values.errors import (
    DataDirectoryNewerError,
    Sentence,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)

_UNFINISHED = "state IN ('queued', 'running')"

_FIND = FIND.format(texts="indexed", match="indexed.words @@ ?::tsquery")


class _PipelinedRows:
    def __init__(self, cursor: Cursor[DictRow], pipeline: Pipeline) -> None:
        self._cursor = cursor
        self._pipeline = pipeline

    @property
    def rowcount(self) -> int:
        # The row count is known only after the server has responded. The fetch methods wait for the response
        # themselves.
        self._pipeline.sync()
        return self._cursor.rowcount

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor.fetchall())


class PostgresDatabase(Database):
    """A connection of the process named `replica`."""

    for_update = " FOR UPDATE"

    def __init__(self, connection: Connection[DictRow], replica: str) -> None:
        self._connection = connection
        self._replica = replica
        self._pipeline: Pipeline | None = None

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        cursor = self._connection.execute(sql.replace("?", "%s").encode(), parameters)
        return _PipelinedRows(cursor, self._pipeline) if self._pipeline is not None else cursor

    @contextlib.contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """Run a transaction in pipeline mode, in which only access to results waits for a round trip."""
        # The error of a write is raised by the next access to a result, or at the end of the transaction.
        try:
            with self._connection.pipeline() as self._pipeline:
                self._connection.execute(begin.encode())
                yield
                self._connection.execute(b"COMMIT")
        finally:
            self._pipeline = None
            if not self._connection.closed and self._connection.info.transaction_status != TransactionStatus.IDLE:
                self._connection.rollback()

    def snapshot(self) -> AbstractContextManager[None]:
        return self.transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def prepare_bulk_copy(self) -> None:
        self.execute("SET CONSTRAINTS ALL DEFERRED")
        # During a copy, each transaction is idle while the other database is accessed.
        self.execute("SET LOCAL idle_in_transaction_session_timeout = 0")

    # Rows of the search index are deleted with their chat or message (ON DELETE CASCADE).

    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        self.execute("DELETE FROM indexed WHERE chat_id = ? AND owner = ? AND message_id IS NULL", (chat_id, owner))
        self.execute(
            "INSERT INTO indexed (owner, chat_id, words) VALUES (?, ?, ?::tsvector)",
            (owner, chat_id, to_tsvector(title)),
        )

    def index_message(self, owner: str, message: StoredMessage) -> None:
        self.execute(
            "INSERT INTO indexed (owner, chat_id, message_id, words) VALUES (?, ?, ?, ?::tsvector)"
            " ON CONFLICT (message_id) DO UPDATE SET words = excluded.words",
            (owner, message.chat_id, message.id, to_tsvector(message.content)),
        )

    def find(self, owner: str, terms: Sequence[Term], limit: int) -> list[Any]:
        return self.execute(_FIND, (tsquery(terms), owner, limit)).fetchall()

    def vocabulary(self, owner: str) -> Iterator[str]:
        sql = "SELECT word FROM ts_stat(format('SELECT words FROM indexed WHERE owner = %%L', ?::text))"
        for row in self.execute(sql, (owner,)):
            yield row["word"]

    def acquire(self, owner: str, message_id: str) -> None:
        self.execute(
            f"UPDATE messages SET holder = ? WHERE id = ? AND owner = ? AND {_UNFINISHED}",
            (self._replica, message_id, owner),
        )

    def interrupt_expired(self, owner: str, chat_id: str) -> None:
        self.execute(
            # Record the answer as an orphan, to be reported by the next heartbeat of any process.
            "WITH ended AS (UPDATE messages SET state = 'interrupted', holder = NULL"
            f" WHERE chat_id = ? AND owner = ? AND {_UNFINISHED} AND holder <> ? AND {_lease_expired()} RETURNING *)"
            " INSERT INTO orphans (generation_id, owner, chat_id, message_id)"
            " SELECT generation_id, owner, chat_id, id FROM ended ON CONFLICT DO NOTHING",
            (chat_id, owner, self._replica),
        )

    def holds_lease(self, message_id: str) -> bool:
        found = self.execute("SELECT 1 AS yes FROM messages WHERE id = ? AND holder = ?", (message_id, self._replica))
        return found.fetchone() is not None

    def release(self, message_id: str) -> None:
        self.execute("UPDATE messages SET holder = NULL WHERE id = ? AND holder = ?", (message_id, self._replica))

    def renew(self) -> None:
        self.execute(
            f"INSERT INTO replicas (id, expires) VALUES (?, clock_timestamp() + {_lease_interval()})"
            " ON CONFLICT (id) DO UPDATE SET expires = excluded.expires",
            (self._replica,),
        )

    def heartbeat(self, running: frozenset[str], known: frozenset[str] | None, *, is_leaving: bool) -> Heartbeat:
        self.renew()
        if is_leaving:
            return Heartbeat(lost=self._lost_generations(running))
        claimed = self._claim_orphans(known) if known is not None else []
        ended = self.execute(
            "UPDATE messages SET state = CASE WHEN " + _UNFINISHED + " THEN 'interrupted' ELSE state END, holder = NULL"
            # SKIP LOCKED ensures that concurrent heartbeats do not return the same orphan.
            f" WHERE id IN (SELECT id FROM messages WHERE holder IS NOT NULL AND {_lease_expired()}"
            " FOR UPDATE SKIP LOCKED) RETURNING owner, chat_id, id AS message_id, generation_id"
        ).fetchall()
        ended += self.execute(
            "DELETE FROM orphans WHERE generation_id IN (SELECT generation_id FROM orphans FOR UPDATE SKIP LOCKED)"
            " RETURNING owner, chat_id, message_id, generation_id"
        ).fetchall()
        self.execute(
            "DELETE FROM replicas WHERE expires < clock_timestamp() - interval '1 hour'"
            " AND pg_postmaster_start_time() < clock_timestamp() - interval '1 hour'"
        )
        orphans, taken_over = (tuple(Orphan(**row) for row in rows) for rows in (ended, claimed))
        return Heartbeat(orphans, taken_over, self._lost_generations(running))

    def _claim_orphans(self, known: frozenset[str]) -> list[Any]:
        # Also return answers that this process has claimed but that are not in `known`: an earlier result may have been
        # lost.
        return self._connection.execute(
            "UPDATE messages SET holder = %s WHERE id IN (SELECT messages.id FROM messages"
            " JOIN answer_traces ON message_id = messages.id"
            " JOIN chats ON chats.id = messages.chat_id AND chats.trash_id IS NULL"
            f" WHERE messages.trash_id IS NULL AND {_UNFINISHED}"
            f" AND (tries < %s AND {_lease_expired()} OR holder = %s AND generation_id <> ALL(%s))"
            " FOR UPDATE OF messages SKIP LOCKED) RETURNING owner, chat_id, id AS message_id, generation_id".encode(),
            (self._replica, MOST_TRIES, self._replica, list(known)),
        ).fetchall()

    def release_lease(self) -> None:
        """End this process's lease, and interrupt its unfinished answers that other processes cannot continue."""
        self.execute(
            f"UPDATE messages SET state = 'interrupted', holder = NULL WHERE holder = ? AND {_UNFINISHED}"
            " AND id NOT IN (SELECT message_id FROM answer_traces WHERE tries < ?)",
            (self._replica, MOST_TRIES),
        )
        self.execute("DELETE FROM replicas WHERE id = ?", (self._replica,))

    def count_other_processes(self) -> int:
        row = self.execute(
            "SELECT count(*) AS n FROM replicas WHERE id <> ? AND expires > clock_timestamp()", (self._replica,)
        ).fetchone()
        return int(row["n"])

    def _lost_generations(self, running: frozenset[str]) -> frozenset[str]:
        if not running:
            return frozenset()
        rows = self._connection.execute(
            "SELECT generation_id FROM messages WHERE generation_id = ANY(%s) AND state <> 'interrupted'"
            " AND (holder IS NULL OR holder = %s)",
            (list(running), self._replica),
        )
        return frozenset(running) - {row["generation_id"] for row in rows}


def _lease_interval() -> str:
    return f"interval '{LEASE_SECONDS} seconds'"


def _lease_expired() -> str:
    # Each process that generates answers has a lease, which covers all its unfinished answers: a row in `replicas` with
    # an expiry time by the clock of the database. After the database starts, all leases are valid for at least
    # LEASE_SECONDS, because they could not be renewed while it was down.
    alive = f"greatest(expires, pg_postmaster_start_time() + {_lease_interval()}) > clock_timestamp()"
    return f"holder NOT IN (SELECT id FROM replicas WHERE {alive})"


logger = logging.getLogger("notso.web.store")
for noisy in ("psycopg", "psycopg.pool"):  # these loggers report every failed reconnect and rollback
    logging.getLogger(noisy).setLevel(logging.ERROR)

T = TypeVar("T")

SCHEMA = "notso"
OLDEST_VERSION = 130_000
CONNECT_SECONDS = 3
PATIENCE_SECONDS = 3.0  # maximum wait for a connection
SHORT_PATIENCE_SECONDS = 0.5  # maximum wait while the database does not respond, so that requests fail quickly
RECONNECT_SECONDS = 0.2  # how long the pool tries to reconnect; the next request starts another attempt
TRIES = 3
HANG_SECONDS = 1.5  # if a heartbeat takes longer, the database or network is assumed to hang
MOST_SECONDS = 35.0  # time limit for work on a connection; longer than statement_timeout (30 s)
MIGRATION_LOCK = 0x6E6F74736F  # id of an advisory lock: arbitrary, but the same in every release

AWAY = Sentence("the database is not responding: nothing was lost, please try again", "storage_away")

_SETTINGS = (
    f"SET search_path = {SCHEMA}",
    "SET statement_timeout = '30s'",
    "SET lock_timeout = '10s'",
    "SET idle_in_transaction_session_timeout = '30s'",
    "SET client_min_messages = warning",
)
_DEFAULTS = {
    "application_name": "notso",
    "client_encoding": "utf8",
    "connect_timeout": str(CONNECT_SECONDS),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


class _EscapedText(StrDumperUnknown):
    # Escape U+0000, which PostgreSQL cannot store in text, as U+0001 and '0'. U+0001 itself becomes U+0001 and '1'.

    def dump(self, obj: str) -> Buffer | None:
        if "\x00" in obj or "\x01" in obj:
            obj = obj.replace("\x01", "\x011").replace("\x00", "\x010")
        return super().dump(obj)


class _PlainText(Loader):
    def load(self, data: Buffer) -> str:
        text = bytes(data).decode()
        return text.replace("\x010", "\x00").replace("\x011", "\x01") if "\x01" in text else text


class PostgresPool:
    """Thread-safe pool of up to `most` connections for the process named `replica`.

    Stores can share a pool; the last call to `close` closes it. Methods raise StorageError.
    """

    def __init__(self, url: str, most: int, replica: str) -> None:
        self._replica = replica
        self._url = url
        self._is_unavailable = False
        self._unavailable_since = 0.0  # when the database last failed to respond
        self._opening = threading.Lock()
        self._users = 0
        self._busy: dict[Connection[DictRow], float] = {}  # when the work on each connection started
        self._pool: ConnectionPool[Connection[DictRow]] = ConnectionPool(
            url,
            kwargs={**_defaults_for(url), "autocommit": True, "row_factory": dict_row},
            min_size=1,
            max_size=most,
            open=False,
            configure=_configure,
            timeout=PATIENCE_SECONDS,
            reconnect_timeout=RECONNECT_SECONDS,
            name="notso",
        )

    def open(self) -> None:
        """Connect and migrate the schema. Raises DataDirectoryNewerError."""
        with storage_errors(), self._opening:
            if not self._users:
                require_session_pooling(self._url)
                with connect(self._url) as connection:
                    check(connection)
                    migrate(connection)
                self._pool.open()
            self._users += 1

    def close(self) -> None:
        with self._opening:
            self._users -= 1
            if not self._users:
                self._pool.close(timeout=PATIENCE_SECONDS)

    def write(self, work: Callable[[PostgresDatabase], T]) -> T:
        """Run `work` in a transaction, with retries after conflicts and lost connections."""
        with storage_errors():
            for remaining_tries in reversed(range(TRIES)):
                ended = is_lost = False
                try:
                    with self._connection() as connection:
                        db = PostgresDatabase(connection, self._replica)
                        try:
                            with db.transaction("BEGIN"):
                                result = work(db)
                                ended = True
                            return result
                        finally:
                            # If the connection is lost after COMMIT was sent, do not retry, because the transaction
                            # may have succeeded.
                            is_lost = connection.closed and not ended
                except (errors.UniqueViolation, errors.DeadlockDetected, errors.SerializationFailure):
                    if not remaining_tries:
                        raise
                except psycopg.OperationalError:
                    if not is_lost or not remaining_tries:
                        raise
            raise StorageError(FAILED)

    def run_read(self, work: Callable[[PostgresDatabase], T]) -> T:
        """Run read-only `work`; retry once if the connection is broken."""
        with storage_errors():
            try:
                with self._connection() as connection:
                    return work(PostgresDatabase(connection, self._replica))
            except (PoolTimeout, errors.QueryCanceled):
                raise
            except psycopg.OperationalError:
                with self._connection() as connection:
                    return work(PostgresDatabase(connection, self._replica))

    def break_connections(self, seconds: float = 0.0) -> None:
        """Break connections that have been busy for at least `seconds`.

        With 0, also replace idle ones and assume an outage.
        """
        if not seconds:
            self._set_unavailable(True)
            self._pool.drain()
        latest_start = time.monotonic() - seconds
        for connection, since in list(self._busy.items()):
            if since <= latest_start:
                _shut_down_socket(connection)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection[DictRow]]:
        connection = self._checkout_connection()
        self._busy[connection] = time.monotonic()
        try:
            yield connection
            self._set_unavailable(False)
        except psycopg.OperationalError:
            # A restart of the database breaks all idle connections, so replace all of them at the first failure.
            if connection.closed:
                self._pool.drain()
            raise
        finally:
            self._busy.pop(connection, None)
            self._pool.putconn(connection)

    def _checkout_connection(self) -> Connection[DictRow]:
        if self._is_unavailable and time.monotonic() - self._unavailable_since < SHORT_PATIENCE_SECONDS:
            raise PoolTimeout(AWAY)
        until = time.monotonic() + (0.0 if self._is_unavailable else PATIENCE_SECONDS)
        while True:
            try:
                return self._pool.getconn(SHORT_PATIENCE_SECONDS)
            except PoolTimeout:
                # Wait in short steps, so that waiting ends soon after a heartbeat finds that the database hangs.
                if self._is_unavailable or time.monotonic() >= until:
                    self._set_unavailable(True)
                    raise

    def _set_unavailable(self, is_unavailable: bool) -> None:
        if is_unavailable:
            self._unavailable_since = time.monotonic()
        if is_unavailable != self._is_unavailable:
            self._is_unavailable = is_unavailable
            logger.warning("the chat database %s", "is not responding" if is_unavailable else "is responding again")


def connect(url: str) -> Connection[tuple[Any, ...]]:
    """Open a connection outside of the pool. Raises StorageError with the reason."""
    try:
        return Connection.connect(url, **_defaults_for(url), autocommit=True)
    except psycopg.OperationalError as error:
        raise StorageError(f"the database cannot be reached: {_reason(error)}") from error


def _shut_down_socket(connection: Connection[Any]) -> None:
    # Shutting down the socket ends all waits for it, in any thread.
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _deadline(connection: Connection[Any]) -> Iterator[None]:
    # Break the connection if the `with` block takes longer than CONNECT_SECONDS, because the database may hang.
    timer = threading.Timer(CONNECT_SECONDS, _shut_down_socket, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def query_server_settings(url: str, settings: Sequence[str]) -> list[str]:
    """Check the database and return the values of server settings. Raises StorageError."""
    with storage_errors():
        require_session_pooling(url)
    with storage_errors(), connect(url) as connection, _deadline(connection):
        check(connection)
        rows = [connection.execute("SELECT current_setting(%s)", (name,)).fetchone() for name in settings]
    return [str(row[0]) for row in rows if row is not None]


def migrate(connection: Connection[Any]) -> None:
    """Run pending migrations, each in a transaction with an advisory lock. Raises DataDirectoryNewerError."""
    with _deadline(connection):
        version = _version(connection)
    while version < SCHEMA_VERSION:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            version = _version(connection)  # another process may have migrated in the meantime
            if version >= SCHEMA_VERSION:
                break
            if version == 0:
                # CREATE SCHEMA IF NOT EXISTS would require the right to create schemas even if the schema exists.
                schemas = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s"
                if connection.execute(schemas, (SCHEMA,)).fetchone() is None:
                    connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
                connection.execute(f"CREATE TABLE {SCHEMA}.schema_version (version INTEGER NOT NULL)".encode())
                connection.execute(f"INSERT INTO {SCHEMA}.schema_version VALUES (0)".encode())
            connection.execute(f"SET LOCAL search_path = {SCHEMA}".encode())
            connection.execute(MIGRATIONS[version].encode())
            version += 1
            if version in REINDEXES:
                _rebuild_text_index(connection)
            connection.execute(f"UPDATE {SCHEMA}.schema_version SET version = %s".encode(), (version,))
    if version > SCHEMA_VERSION:
        raise DataDirectoryNewerError(
            "the conversations were written by a newer version of notso: please upgrade; nothing was changed"
        )


def _rebuild_text_index(connection: Connection[Any]) -> None:
    sql = (
        "SELECT indexed.chat_id, indexed.message_id, coalesce(messages.content, chats.title) FROM indexed"
        " JOIN chats ON chats.id = indexed.chat_id LEFT JOIN messages ON messages.id = indexed.message_id"
    )
    update = "UPDATE indexed SET words = %s::tsvector WHERE chat_id = %s AND message_id IS NOT DISTINCT FROM %s"
    with connection.cursor("texts", row_factory=tuple_row) as texts, connection.cursor() as writing:
        for chat_id, message_id, text in texts.execute(sql):
            writing.execute(update, (to_tsvector(text), chat_id, message_id))


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Convert psycopg errors to StorageError, without addresses, names or SQL."""
    try:
        yield
    except psycopg.Error as error:
        if not isinstance(error, PoolTimeout):  # for a timeout, the outage has already been logged
            logger.error("database: %s (%s)", type(error).__name__, error.sqlstate or "no state")
        raise _storage_error(error) from error


def _storage_error(error: psycopg.Error) -> StorageError:
    match error:
        case errors.DiskFull() | errors.OutOfMemory():
            return StorageFullError(DISK_FULL)
        case errors.DataCorrupted() | errors.IndexCorrupted():
            return StorageDamagedError("the database is damaged: restore a backup")
        case errors.ReadOnlySqlTransaction():
            return StorageError("the database is a read-only standby: use its primary")
        case errors.InsufficientPrivilege():
            return StorageError("the database user lacks the required permission")
        case psycopg.OperationalError():  # includes PoolTimeout
            return StorageError(AWAY)
        case _:
            return StorageError(FAILED)


def require_session_pooling(url: str) -> None:
    """Raise StorageError if clients share server processes, as with PgBouncer's pool_mode = transaction."""
    # Session settings would then apply to other clients' statements, and might not apply to those of this process.
    for _ in range(2):  # twice, because a busy pooler in transaction mode may assign different processes
        with connect(url) as one, connect(url) as other:
            pids = set()
            for connection in (one, other):
                with _deadline(connection):
                    pids.add(connection.execute("SELECT pg_backend_pid()").fetchone())
        if len(pids) == 1:
            raise StorageError(
                "the database of conversations is reached through a pooler in transaction mode, which mixes sessions: "
                "set pool_mode = session there, or use the database's own address"
            )


def check(connection: Connection[Any]) -> None:
    """Raise StorageError if the server is too old or the encoding is not UTF-8."""
    if connection.info.server_version < OLDEST_VERSION:
        raise StorageError("the database requires PostgreSQL 13 or newer")
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StorageError(f"the database must have the encoding UTF8, not {encoding}")


def _version(connection: Connection[Any]) -> int:
    # Do not use to_regclass: it may see the catalog as it was before the lock was acquired.
    found = connection.execute(
        "SELECT 1 FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = 'schema_version'", (SCHEMA,)
    )
    if found.fetchone() is None:
        return 0
    row = connection.execute(f"SELECT version FROM {SCHEMA}.schema_version".encode()).fetchone()
    return int(row[0]) if row is not None else 0


def _configure(connection: Connection[Any]) -> None:
    with _deadline(connection), connection.pipeline():
        for setting in _SETTINGS:
            connection.execute(setting.encode())
        # Acknowledged writes must be on disk, regardless of the database's default.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    connection.adapters.register_dumper(str, _EscapedText)
    for name in ("text", "varchar"):
        connection.adapters.register_loader(name, _PlainText)


def _defaults_for(url: str) -> dict[str, Any]:
    try:
        options = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise StorageError("invalid database URL; the form is postgresql://USER@HOST/NAME") from error
    return {name: value for name, value in _DEFAULTS.items() if name not in options}


def _reason(error: psycopg.Error) -> str:
    # Returns the first line of the message, which may name the host, user and database but contains no password.
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
