"""The values a store keeps and what every store must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Literal, Protocol

MessageState = Literal["queued", "running", "done", "stopped", "failed", "interrupted"]
ACTIVE_STATES: frozenset[MessageState] = frozenset({"queued", "running"})


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation. `prompt_date` is the day the model is told, frozen so that midnight changes no prompt.

    `created_ms` and `updated_ms` are milliseconds since 1970, UTC.
    """

    id: str
    title: str
    thinking: bool
    prompt_date: date
    created_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a finished answer cost. Counts in tokens, times in milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_ms: float = 0.0
    completion_ms: float = 0.0
    thinking_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message. A question is always `done`; an answer has a generation id, by which its stream is found.

    `note` says in a person's words why an answer failed or was cut. `answer_html` and `reasoning_html` were made by
    renderer version `renderer` (0: not rendered).
    """

    id: str
    chat_id: str
    role: Literal["user", "assistant"]
    content: str
    reasoning: str
    state: MessageState
    created_ms: int
    generation_id: str | None = None
    note: str = ""
    numbers: Numbers = Numbers()
    answer_html: str = ""
    reasoning_html: str = ""
    renderer: int = 0

    @property
    def active(self) -> bool:
        """Whether the engine still owes something to this message."""
        return self.state in ACTIVE_STATES


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A question and the place where its answer will grow."""

    question: StoredMessage
    answer: StoredMessage
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The turn is on disk. `repeated`: this key was used before, and these are the messages it made then."""

    question: StoredMessage
    answer: StoredMessage
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The chat has an unfinished answer, or it does not exist (`running` is None)."""

    running: StoredMessage | None


class ChatStore(Protocol):
    """Conversations of one owner at a time; every method names the owner, and a foreign id is an unknown one.

    A write has been committed to disk when its method returns. Methods raise StorageError.
    """

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def chats(self, owner: str) -> list[Chat]:
        """All chats, last used first."""

    async def chat(self, owner: str, chat_id: str) -> Chat | None: ...

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        """The chat's messages, oldest first."""

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None: ...

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None:
        """The answer that this generation writes or wrote."""

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        """Store a question and its empty answer, and the chat with them when it is new, in one transaction."""

    async def set_thinking(self, owner: str, chat_id: str, thinking: bool) -> bool:
        """False when there is no such chat."""

    async def set_title(self, owner: str, chat_id: str, title: str) -> bool:
        """False when there is no such chat."""

    async def delete_chat(self, owner: str, chat_id: str) -> bool:
        """Remove a chat with its messages. False when there is no such chat."""

    async def save_answer(self, answer: StoredMessage) -> None:
        """Write text, state, note, numbers and HTML of an answer. A deleted one stays deleted."""
