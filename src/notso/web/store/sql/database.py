"""Define a database connection, including the operations that differ between SQLite and PostgreSQL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

from notso.web.store.protocol import StoredMessage
from notso.web.store.sql.search_words import Term

T = TypeVar("T")

Value = str | int | float | bool | bytes | None

FIND = """
SELECT indexed.chat_id, indexed.message_id, chats.title, coalesce(messages.content, chats.title) AS text,
    coalesce(messages.created_ms, chats.updated_ms) AS at_ms
FROM {texts}
JOIN chats ON chats.id = indexed.chat_id AND chats.trash_id IS NULL AND NOT chats.temporary
LEFT JOIN messages ON messages.id = indexed.message_id
WHERE {match} AND indexed.owner = ? AND messages.trash_id IS NULL
ORDER BY indexed.message_id IS NOT NULL, at_ms DESC, indexed.message_id DESC, indexed.chat_id LIMIT ?
"""
"""Full-text search; `texts` and `match` differ between databases. Parameters: query, owner and limit."""


def columns_of(kind: type) -> str:
    """Return the names of a dataclass's fields, which are also the columns of its table."""
    return ", ".join(each.name for each in fields(kind))


def placeholders(values: Sized) -> str:
    return ", ".join("?" * len(values))


class Rows(Protocol):
    """Result of a statement. Columns of a row are accessed by name."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class SQLConnection(Protocol):
    """A connection. Writes require a transaction."""

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        """Run a statement with `?` as the parameter placeholder."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Return a context manager in which all reads see the same snapshot."""


class Database(SQLConnection, ABC):
    """A connection with the operations that differ between databases."""

    # SELECT suffix that locks the selected rows until the transaction ends. With a single writer, no lock is needed.
    for_update: str = ""

    @abstractmethod
    def prepare_bulk_copy(self) -> None:
        """Prepare this transaction for a long copy: defer foreign keys, and disable idle timeouts."""

    # By default, `unindex_*` and `merge_index` do nothing: rows of the index are deleted with their chat or message.

    @abstractmethod
    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        """Index the title of a chat, replacing the previous entry."""

    @abstractmethod
    def index_message(self, owner: str, message: StoredMessage) -> None:
        """Index a message, replacing the previous entry."""

    def unindex_chat(self, chat_id: str) -> None:
        """Remove a chat from the index before it is deleted."""
        return None

    def unindex_message(self, message_id: str) -> None:
        """Remove a message from the index before it is deleted."""
        return None

    def merge_index(self) -> bool:
        """Remove some of the words of deleted texts from the index; return whether more are left."""
        return False

    @abstractmethod
    def find(self, owner: str, terms: Sequence[Term], limit: int) -> list[Any]:
        """Return rows (chat_id, message_id, title, text, at_ms): titles, then messages, each newest first."""

    @abstractmethod
    def vocabulary(self, owner: str) -> Iterator[str]:
        """Yield the indexed words of this owner."""

    # By default, unfinished answers need no leases, because a single process uses the database.

    def acquire(self, owner: str, message_id: str) -> None:
        """Assign an unfinished answer to this process."""
        return None

    def interrupt_expired(self, owner: str, chat_id: str) -> None:
        """Mark the chat's unfinished answer as interrupted if its lease has expired."""
        return None

    def holds_lease(self, message_id: str) -> bool:
        return True

    def release(self, message_id: str) -> None:
        return None


class Transactions(ABC):
    """Runs work on the database in other threads.

    Work waits in the queue of the user `owner` ("" for internal work). Queues are served in turn.
    """

    is_shared: ClassVar[bool]

    @property
    @abstractmethod
    def read_only(self) -> bool: ...

    @abstractmethod
    async def write(self, work: Callable[[Database], T], owner: str = "") -> T:
        """Run `work` in a transaction. Changes are on disk when this returns."""

    @abstractmethod
    async def run_read(self, work: Callable[[Database], T], owner: str = "") -> T:
        """Run read-only `work`."""

    async def change(self, owner: str, sql: str, *parameters: Value) -> bool:
        """Run a statement; return whether it changed any rows."""
        return await self.write(lambda db: db.execute(sql, parameters).rowcount > 0, owner)

    async def read(self, owner: str, sql: str, *parameters: Value) -> list[Any]:
        return await self.run_read(lambda db: db.execute(sql, parameters).fetchall(), owner)
