"""PostgreSQL connection for the shared statements, and leases on unfinished answers.

A process that writes answers has a row in `replicas` with the expiry of its lease, by the clock of the database.
Leases also count from the start of the database: while it is down, none can be renewed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from psycopg import Connection, Cursor, Pipeline
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow

from notso.web.store.protocol import LEASE_SECONDS, MOST_TRIES, Heartbeat, Orphan, StoredMessage
from notso.web.store.sql.database import Database, Rows, Value
from notso.web.store.sql.search_words import Term, tsquery, vector_of

FORGOTTEN_DAYS = 30  # the disk cache of a process away for longer is left to its operator

_UNFINISHED = "state IN ('queued', 'running')"

_FIND = """
SELECT indexed.chat_id, indexed.message_id, chats.title, coalesce(messages.content, chats.title) AS text,
    coalesce(messages.created_ms, chats.updated_ms) AS at_ms
FROM indexed
JOIN chats ON chats.id = indexed.chat_id AND chats.trash_id IS NULL AND NOT chats.temporary
LEFT JOIN messages ON messages.id = indexed.message_id
WHERE indexed.words @@ ?::tsquery AND indexed.owner = ? AND messages.trash_id IS NULL
ORDER BY indexed.message_id IS NOT NULL, at_ms DESC, indexed.message_id DESC, indexed.chat_id LIMIT ?
"""


class _SentRows:
    """Result of a pipelined statement."""

    def __init__(self, cursor: Cursor[DictRow], pipeline: Pipeline) -> None:
        self._cursor = cursor
        self._pipeline = pipeline

    @property
    def rowcount(self) -> int:
        # rowcount is known only after the server's answer; fetching waits by itself.
        self._pipeline.sync()
        return self._cursor.rowcount

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor.fetchall())


class PostgresDatabase(Database):
    """One connection, for the process named `replica`."""

    for_update = " FOR UPDATE"

    def __init__(self, connection: Connection[DictRow], replica: str) -> None:
        self._connection = connection
        self._replica = replica
        self._pipeline: Pipeline | None = None

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        cursor = self._connection.execute(sql.replace("?", "%s").encode(), parameters)
        return _SentRows(cursor, self._pipeline) if self._pipeline is not None else cursor

    @contextlib.contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """Run a transaction in pipeline mode: statements cost no round trip, only reads wait.

        An error is raised by the next read, or at the end.
        """
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

    def begin_much(self) -> None:
        self.execute("SET CONSTRAINTS ALL DEFERRED")
        # The transaction waits while the other database is read.
        self.execute("SET LOCAL idle_in_transaction_session_timeout = 0")

    # ---- search index: rows are deleted with their chat or message (ON DELETE CASCADE)

    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        self.execute("DELETE FROM indexed WHERE chat_id = ? AND owner = ? AND message_id IS NULL", (chat_id, owner))
        self.execute(
            "INSERT INTO indexed (owner, chat_id, words) VALUES (?, ?, ?::tsvector)", (owner, chat_id, vector_of(title))
        )

    def index_message(self, owner: str, message: StoredMessage) -> None:
        self.execute(
            "INSERT INTO indexed (owner, chat_id, message_id, words) VALUES (?, ?, ?, ?::tsvector)"
            " ON CONFLICT (message_id) DO UPDATE SET words = excluded.words",
            (owner, message.chat_id, message.id, vector_of(message.content)),
        )

    def remove_chat(self, chat_id: str) -> None:
        pass

    def remove_message(self, message_id: str) -> None:
        pass

    def find(self, owner: str, terms: Sequence[Term], limit: int) -> list[Any]:
        return self.execute(_FIND, (tsquery(terms), owner, limit)).fetchall()

    def vocabulary(self, owner: str) -> Iterator[str]:
        sql = "SELECT word FROM ts_stat(format('SELECT words FROM indexed WHERE owner = %%L', ?::text))"
        for row in self.execute(sql, (owner,)):
            yield row["word"]

    # ---- leases

    def take(self, owner: str, message_id: str) -> None:
        self.execute(
            f"UPDATE messages SET holder = ? WHERE id = ? AND owner = ? AND {_UNFINISHED}",
            (self._replica, message_id, owner),
        )

    def interrupt_expired(self, owner: str, chat_id: str) -> None:
        self.execute(
            # Recorded as an orphan for the next heartbeat of any process.
            "WITH ended AS (UPDATE messages SET state = 'interrupted', holder = NULL"
            f" WHERE chat_id = ? AND owner = ? AND {_UNFINISHED} AND holder <> ? AND {_gone()} RETURNING *)"
            " INSERT INTO orphans (generation_id, owner, chat_id, message_id)"
            " SELECT generation_id, owner, chat_id, id FROM ended ON CONFLICT DO NOTHING",
            (chat_id, owner, self._replica),
        )

    def holds(self, message_id: str) -> bool:
        found = self.execute("SELECT 1 AS yes FROM messages WHERE id = ? AND holder = ?", (message_id, self._replica))
        return found.fetchone() is not None

    def let_go(self, message_id: str) -> None:
        self.execute("UPDATE messages SET holder = NULL WHERE id = ? AND holder = ?", (message_id, self._replica))

    def renew(self) -> None:
        self.execute(
            f"INSERT INTO replicas (id, expires) VALUES (?, clock_timestamp() + {_lease()})"
            " ON CONFLICT (id) DO UPDATE SET expires = excluded.expires",
            (self._replica,),
        )

    def heartbeat(self, running: frozenset[str], *, takes: bool) -> Heartbeat:
        self.renew()
        taken = self._take_orphans() if takes else []
        ended = self.execute(
            "UPDATE messages SET state = CASE WHEN " + _UNFINISHED + " THEN 'interrupted' ELSE state END, holder = NULL"
            # SKIP LOCKED: of concurrent heartbeats only one gets an orphan.
            f" WHERE id IN (SELECT id FROM messages WHERE holder IS NOT NULL AND {_gone()} FOR UPDATE SKIP LOCKED)"
            " RETURNING owner, chat_id, id AS message_id, generation_id"
        ).fetchall()
        ended += self.execute(
            "DELETE FROM orphans WHERE generation_id IN (SELECT generation_id FROM orphans FOR UPDATE SKIP LOCKED)"
            " RETURNING owner, chat_id, message_id, generation_id"
        ).fetchall()
        self.execute(
            "DELETE FROM replicas WHERE expires < clock_timestamp() - interval '1 hour'"
            " AND pg_postmaster_start_time() < clock_timestamp() - interval '1 hour'"
        )
        orphans, adopted = (tuple(Orphan(**row) for row in rows) for rows in (ended, taken))
        return Heartbeat(orphans, adopted, self._lost(running))

    def _take_orphans(self) -> list[Any]:
        return self.execute(
            "UPDATE messages SET holder = ? WHERE id IN (SELECT messages.id FROM messages"
            " JOIN answer_traces ON message_id = messages.id AND tries < ?"
            " JOIN chats ON chats.id = messages.chat_id AND chats.trash_id IS NULL"
            f" WHERE holder IS NOT NULL AND messages.trash_id IS NULL AND {_UNFINISHED} AND {_gone()}"
            " FOR UPDATE OF messages SKIP LOCKED) RETURNING owner, chat_id, id AS message_id, generation_id",
            (self._replica, MOST_TRIES),
        ).fetchall()

    def leave(self) -> None:
        """End this process's lease, and interrupt its unfinished answers that no other can continue."""
        self.execute(
            f"UPDATE messages SET state = 'interrupted', holder = NULL WHERE holder = ? AND {_UNFINISHED}"
            " AND id NOT IN (SELECT message_id FROM answer_traces WHERE tries < ?)",
            (self._replica, MOST_TRIES),
        )
        self.execute("DELETE FROM replicas WHERE id = ?", (self._replica,))

    def others(self) -> int:
        """Return the number of other processes with a valid lease."""
        row = self.execute(
            "SELECT count(*) AS n FROM replicas WHERE id <> ? AND expires > clock_timestamp()", (self._replica,)
        ).fetchone()
        return int(row["n"])

    def _lost(self, running: frozenset[str]) -> frozenset[str]:
        if not running:
            return frozenset()
        rows = self._connection.execute(
            "SELECT generation_id FROM messages WHERE generation_id = ANY(%s) AND state <> 'interrupted'"
            " AND (holder IS NULL OR holder = %s)",
            (list(running), self._replica),
        )
        return frozenset(running) - {row["generation_id"] for row in rows}

    # ---- permanent deletion

    def forget(self, owner: str, first_message_id: str) -> None:
        self.execute("INSERT INTO forgotten (owner, first_message_id) VALUES (?, ?)", (owner, first_message_id))

    def forgotten(self, after: int) -> list[Any]:
        """Return conversations that any process purged since number `after`."""
        self.execute(f"DELETE FROM forgotten WHERE since < clock_timestamp() - interval '{FORGOTTEN_DAYS} days'")
        return self.execute(
            "SELECT number, owner, first_message_id FROM forgotten WHERE number > ? ORDER BY number", (after,)
        ).fetchall()


def _lease() -> str:
    return f"interval '{LEASE_SECONDS} seconds'"


def _gone() -> str:
    alive = f"greatest(expires, pg_postmaster_start_time() + {_lease()}) > clock_timestamp()"
    return f"holder NOT IN (SELECT id FROM replicas WHERE {alive})"
