"""A connection as the statements of this package see it, and what databases do each in their own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from notso.web.store.protocol import SearchHit, StoredMessage

Value = str | int | float | bool | bytes | None


class Rows(Protocol):
    """What a statement found. A row is read by the names of its columns."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Statements(Protocol):
    """One connection, within a transaction where something is written."""

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        """Run one statement; `?` stands for a parameter."""

    def snapshot(self) -> AbstractContextManager[None]:
        """What is read within it is as of one moment."""


class Database(ABC):
    """Statements, and what the tables of conversations need beside them.

    `for_update` ends a SELECT whose rows nobody else may change until the transaction has ended.
    """

    for_update: str

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        """Run one statement; `?` stands for a parameter."""

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """What is read within it is as of one moment."""

    @abstractmethod
    def begin_much(self) -> None:
        """Until the transaction ends a message may come before the one that it follows, and it may take its time."""

    # ---- words to be found

    @abstractmethod
    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        """Make a title findable, in place of its former one."""

    @abstractmethod
    def index_message(self, owner: str, message: StoredMessage) -> None:
        """Make a message findable, in place of its former text."""

    @abstractmethod
    def remove_chat(self, chat_id: str) -> None:
        """Before a chat is deleted: its words go too."""

    @abstractmethod
    def remove_message(self, message_id: str) -> None:
        """Before a message is deleted, likewise."""

    @abstractmethod
    def find(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        """See ChatStore.search."""

    # ---- unfinished turns, and whose they are

    @abstractmethod
    def take(self, owner: str, message_id: str) -> None:
        """An unfinished answer is this process's from now on."""

    @abstractmethod
    def interrupt_expired(self, owner: str, chat_id: str) -> None:
        """Interrupt the chat's unfinished answer if the process that had it has gone."""

    @abstractmethod
    def holds(self, message_id: str) -> bool:
        """Whether an unfinished answer is this process's."""

    @abstractmethod
    def let_go(self, message_id: str) -> None:
        """An answer has ended: it is nobody's."""

    # ---- what is deleted for good

    @abstractmethod
    def forget(self, owner: str, first_message_id: str) -> None:
        """Tell the other processes that a conversation is deleted: their caches hold it too."""
