"""Protocol for the store of chats, and the values that it stores.

A chat is a tree of messages: each edited question or regenerated answer starts another branch. One branch at a time is
shown ("chosen"). A turn is a question with its answer. A generation produces or continues one answer; the generation's
id identifies the event stream that chat pages receive. A generation consists of one or more requests to the engine
("runs"): the first one, and one after each round of tool calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol

from notso.smollm3 import Message, Sentence
from notso.web.store.documents import Citation, DocumentStore, Library
from notso.web.store.records import ApiRecords

MessageState = Literal["queued", "running", "done", "stopped", "failed", "interrupted"]
MessageKind = Literal["turn", "summary"]
Deletable = Literal["memory", "prompt", "response"]
ToolState = Literal["waiting", "running", "done", "failed", "denied", "interrupted"]
Rating = Literal[-1, 0, 1]
PromptKind = Literal["message", "instructions"]
SettingValue = str | int | float | bool
SettingsChange = Callable[[Mapping[str, SettingValue]], Mapping[str, SettingValue]]
Damage = Literal["", "unsound", "behind", "gone"]
"""`unsound`: the integrity check fails. `behind`: commits are missing. `gone`: the file is empty or missing."""
ACTIVE_STATES: frozenset[MessageState] = frozenset({"queued", "running"})
MAX_MEMORIES, MAX_MEMORY_CHARACTERS = 50, 4_000
"""Limits on a user's memory: number of entries, and total number of their characters."""
MOST_SHOWN = 1000
"""Maximum number of messages on a chat page when it is opened."""
MOST_SHOWN_CHARACTERS = 1 << 22
"""Approximate maximum size of the messages loaded for a page. The newest turn may be larger."""
FAILED = Sentence("conversations cannot be read or written at the moment", "storage_failed")
DISK_FULL = Sentence("the disk is full: free some space; nothing was lost", "storage_disk_full")
BACKUP_ELSEWHERE = "the conversations are in PostgreSQL: back them up with pg_dump --format=custom"
UNSHARED_SEARCH_SECONDS = 60.0
"""Interval between searches for work if no other process uses the store. New work wakes the worker at once, so a search
finds only work that is left over after a failure."""
# An unfinished turn belongs to the process that generates it. If this process does not renew its lease for
# LEASE_SECONDS (by the clock of the database), the next heartbeat of another process takes over or interrupts the turn.
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat without its messages. Times are milliseconds since 1970, UTC."""

    id: str
    title: str
    thinking: bool
    prompt_date: date  # date in the prompt, fixed so that midnight does not invalidate cached prompts
    created_ms: int
    updated_ms: int
    pinned: bool = False
    settings: Mapping[str, SettingValue] = field(default_factory=dict)  # only settings that were set for this chat
    chosen_root: str | None = None  # first message of the shown branch; None: the newest message without a parent
    unread: bool = False  # whether an answer has ended since the chat was last opened
    archived: bool = False  # hidden from the sidebar
    temporary: bool = False  # not listed or searched; deleted after a period without use
    source: str = ""  # id of the original, if the chat was imported
    project: str = ""  # id of the library that is the chat's project


@dataclass(frozen=True, slots=True)
class Memory:
    id: str
    text: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """Default settings, project and memories that apply to a chat."""

    # The user's default settings, overridden by those of the project.
    defaults: Mapping[str, SettingValue] = field(default_factory=dict)
    project: Library | None = None
    memories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    name: str
    kind: PromptKind
    text: str


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Token counts and times of an answer. `first_token_ms` is measured from the arrival of the request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_ms: float = 0.0
    completion_ms: float = 0.0
    thinking_ms: float = 0.0
    queue_ms: float = 0.0
    first_token_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file or library document attached to a question."""

    name: str
    text: str  # empty for documents
    document: str = ""  # id of the document


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in an answer, and its result."""

    id: str
    name: str
    arguments: str  # JSON object
    state: ToolState  # `waiting`: not started; `interrupted`: the answer ended before the call did
    round: int = 0  # number of the round; the calls of a round were generated together
    result: str = ""
    duration_ms: float = 0.0
    content_at: int = 0  # length of the answer before the call
    reasoning_at: int = 0  # length of the reasoning before the call
    round_end: int = 0  # length of the answer at the end of the round

    @property
    def is_final(self) -> bool:
        return self.state in ("done", "failed", "denied")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a chat. Questions are always `done`."""

    id: str
    chat_id: str
    role: Literal["user", "assistant"]
    content: str
    reasoning: str
    state: MessageState
    created_ms: int
    generation_id: str | None = None  # None for questions and automatic summaries
    note: str = ""  # error message for the user
    numbers: AnswerStats = AnswerStats()
    answer_html: str = ""
    reasoning_html: str = ""
    renderer: int = 0  # version of the renderer that produced the HTML; 0: not rendered
    parent_id: str | None = None
    kind: MessageKind = "turn"  # in prompts, a `summary` replaces all messages before it
    chosen_child: str | None = None  # the next message on the shown branch
    edited: bool = False
    attachments: tuple[Attachment, ...] = ()
    dropped_messages: int = 0  # number of older messages that did not fit in the prompt
    tool_uses: tuple[ToolUse, ...] = ()
    model: str = ""  # name of the model that generated the answer, if known
    rating: Rating = 0
    citations: tuple[Citation, ...] = ()  # a citation has no document if the store cannot verify it
    source: str = ""  # id in the imported file; stored, but not loaded again

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """A run (engine request) of an answer, recorded so that it can be repeated."""

    params: Mapping[str, Any]  # fields of SamplingParams, including the seed
    content_at: int = 0  # length of the answer before this run
    reasoning_at: int = 0  # length of the reasoning before this run
    calls: int = 0  # number of tool calls before this run
    is_apart: bool = False  # whether a tool call separates this run's text from that of the previous run
    hurry: bool = False  # whether the engine was asked to end the reasoning at once
    origin: str = ""  # from the engine's `started` event: a digest of the prompt, model, adapter and arithmetic
    limit: int = 0  # from the engine's `started` event: maximum number of tokens
    ids: tuple[int, ...] = ()  # ids of the tokens so far
    closed_at: tuple[int, ...] = ()  # indices in `ids` at which the engine ended the reasoning
    tokens: int = 0  # set at the end of the run
    reasoning_tokens: int = 0  # set at the end of the run
    finish: str = ""  # finish reason, set at the end of the run


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """Record of how an answer was generated. Another process can use it to continue the answer."""

    runs: tuple[AnswerRun, ...]  # empty if generation has not begun
    model: str | None = None  # value of the chat setting `model`
    # Number of attempts to generate the answer since it last grew. The attempt that added a token or part (see `parts`)
    # counts as the first one.
    tries: int = 0
    resumes: int = 0  # how often another process has continued the answer
    own: Mapping[str, SettingValue] | None = None  # settings of this version of the answer; None: those of the chat
    every: bool = False  # whether the question is asked separately about every part of the documents
    hurry: bool = False  # whether to end unfinished reasoning at once
    parts: int = 0  # with `every`, the number of parts answered so far


MOST_TRIES = 2
"""An answer with this many `tries` is not continued."""


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A question and its empty answer, to be stored."""

    user_message: StoredMessage
    assistant_message: StoredMessage
    idempotency_key: str
    instead_of: str | None = None  # id of the question that was edited
    # Id of the message that the question follows ('': none; None: the last message of the chosen branch). The turn is
    # refused if that message already has a reply, or, for '', if the chat is not empty.
    after: str | None = None
    trace: AnswerTrace | None = None  # without it, another process cannot continue the answer


@dataclass(frozen=True, slots=True)
class NewMessage:
    """Another version of an answer, or a summary, to be stored as a reply to the message `after`.

    A summary is refused if `after` already has a reply.
    """

    assistant_message: StoredMessage
    after: str
    idempotency_key: str
    trace: AnswerTrace | None = None


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The turn was stored. `repeated`: whether an earlier request with the same idempotency key stored it."""

    user_message: StoredMessage
    assistant_message: StoredMessage
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The turn was not stored.

    If `running` and `moved` are unset, the chat does not exist, or it has no message to which the request can apply.
    """

    running: StoredMessage | None  # the unfinished answer, if any
    is_generated_here: bool = True  # whether this process is generating that answer and can stop it
    moved: bool = False  # whether the branch has been continued or deleted


@dataclass(frozen=True, slots=True)
class Orphan:
    owner: str
    chat_id: str
    message_id: str
    generation_id: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    orphans: tuple[Orphan, ...] = ()  # interrupted turns of processes that have ended; each is reported once
    # Turns that this process must continue. Each is reported by every heartbeat until it is in `known`, because the
    # result of a heartbeat may be lost.
    taken: tuple[Orphan, ...] = ()
    lost: frozenset[str] = frozenset()  # this process's generations that another process has continued or interrupted


@dataclass(frozen=True, slots=True)
class ShareLink:
    """A link with which anyone can read a chat up to `message_id`. `id` is the SHA-256 of the link's secret."""

    id: str
    owner: str
    chat_id: str
    message_id: str
    created_ms: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class EarlierImport:
    """A chat from an earlier import. `messages` maps ids in the imported file to message ids (None: deleted)."""

    chat_id: str
    messages: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class SearchHit:
    r"""A search result. In `snippet`, \x02 and \x03 enclose matches. `message_id` is None for titles.

    `at_ms`: time of the message or of the chat's last use. `similar`: the words only resemble those of the query.
    """

    chat_id: str
    message_id: str | None
    title: str
    snippet: str
    at_ms: int = 0
    similar: bool = False


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of the Responses API, with its input items and the conversation so far."""

    id: str
    previous_id: str | None
    body: Mapping[str, Any]
    conversation: tuple[Message, ...]
    created_ms: int
    input: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatSnapshot:
    """A consistent snapshot of a chat with the messages of all branches, oldest first."""

    chat: Chat
    base: ChatDefaults
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A consistent snapshot of the end of a branch, oldest message first."""

    chat: Chat
    base: ChatDefaults
    line: tuple[StoredMessage, ...]
    first_id: str | None  # first message of the branch; None: the branch is empty
    above: int = 0  # number of messages before `line`
    summarized: bool = False  # whether `line` starts with a summary of the messages before it


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message on the shown branch, with the ids of its versions (oldest first) and of the neighboring questions."""

    message: StoredMessage
    versions: tuple[str, ...]
    previous_user_message: str | None = None
    next_user_message: str | None = None

    @property
    def version(self) -> int:
        return self.versions.index(self.message.id) + 1

    @property
    def previous(self) -> str | None:
        return self.versions[self.version - 2] if self.version > 1 else None

    @property
    def next(self) -> str | None:
        return self.versions[self.version] if self.version < len(self.versions) else None


@dataclass(frozen=True, slots=True)
class ShownChat:
    """Consecutive messages of a branch. `earlier` is the number of messages before them."""

    chat: Chat
    base: ChatDefaults
    path: tuple[ShownMessage, ...]
    earlier: int


@dataclass(frozen=True, slots=True)
class ChatList:
    """A page of the chat list, and the number of unread chats on all pages."""

    chats: tuple[Chat, ...]
    has_more: bool
    unread: int


@dataclass(frozen=True, slots=True)
class ChatRow:
    chat: Chat
    messages: int
    size_bytes: int


ChatOrder = Literal["used", "-used", "title", "-title", "messages", "-messages", "size", "-size"]
"""Sort key for the table of chats; a minus sign means descending."""


class ChatStore(Protocol):
    """Store of chats by owner. Objects of other owners are treated as unknown.

    Writes are committed to disk when a method returns. Methods raise StorageError. Methods that return a bool return
    False if the object does not exist.
    """

    records: ApiRecords
    documents: DocumentStore

    @property
    def damage(self) -> Damage: ...

    @property
    def read_only(self) -> bool:
        """Whether writes raise StorageDamagedError because the data is damaged."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use the store concurrently."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def heartbeat(
        self, running: frozenset[str], known: frozenset[str] | None = None, *, is_leaving: bool = False
    ) -> Heartbeat:
        """Renew this process's lease, and take over or interrupt turns of processes that have ended.

        `running`: generations of this process. `known`: the same, and those that are about to start, or None if this
        process cannot continue turns. `is_leaving`: the process is stopping and takes over no turns. Call this every
        HEARTBEAT_SECONDS for a shared store, and once otherwise.
        """

    async def chats(self, owner: str) -> list[Chat]:
        """Return all chats, pinned ones first, then the most recently used."""

    async def chat_list(
        self, owner: str, limit: int, *, skip: int = 0, archived: bool = False, project: str = ""
    ) -> ChatList:
        """Return a page of the chat list, or of a project's chats. `archived`: whether to include archived chats."""

    async def chat_rows(
        self, owner: str, limit: int, *, skip: int = 0, order: ChatOrder = "-used", title: str = ""
    ) -> tuple[list[ChatRow], bool]:
        """Return a page of the chats whose title contains `title`, and whether there are more.

        Case and accents are ignored.
        """

    async def chat(self, owner: str, chat_id: str) -> Chat | None: ...

    async def chat_snapshot(self, owner: str, chat_id: str) -> ChatSnapshot | None: ...

    async def branch(
        self, owner: str, chat_id: str, last: str | None, *, most_characters: int | None = None
    ) -> Branch | None:
        """Return the branch that ends in message `last` (None: the chosen branch; '': an empty one).

        `line` is empty for an unknown message. With `most_characters`, omit messages before the newest finished
        summary, and messages that are followed by more than this many characters.
        """

    async def earlier_attachments(self, owner: str, chat_id: str, message_id: str) -> list[Attachment]:
        """Return the attachments of messages before `message_id`, oldest first."""

    async def shown_chat(
        self, owner: str, chat_id: str, limit: int, *, through: str | None = None, first: str | None = None
    ) -> ShownChat | None:
        """Return the newest `limit` messages of the branch that contains `through` (None: the chosen branch).

        The limit is rounded up to whole turns. Older messages back to `first` are included, up to MOST_SHOWN in total.
        Turns beyond MOST_SHOWN_CHARACTERS are left out.
        """

    async def shown_before(
        self, owner: str, chat_id: str, message_id: str, limit: int, *, first: int | None = None
    ) -> ShownChat | None:
        """Return the `limit` messages before this one, or before index `first` of its branch.

        The limits are those of `shown_chat`.
        """

    async def shown_message(self, owner: str, chat_id: str, message_id: str) -> ShownMessage | None: ...

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        """Return the messages of all branches, oldest first."""

    def message_chunks(self, owner: str, chat_id: str, *, shown: bool = False) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of all branches, or of the shown one, oldest first, in chunks of limited size.

        Each chunk is loaded when it is requested, to save memory. Messages deleted in the meantime are missing.
        """

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None: ...

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None: ...

    async def search(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        """Find titles and messages that contain all words (the last may be a prefix). Titles precede messages.

        If nothing is found, search for similar words.
        """

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        """Store a question with its empty answer, and a new chat if given, in one transaction."""

    async def add_message(self, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
        """Store an answer or summary below an existing message, and return that message as `user_message`."""

    async def resume_message(
        self,
        owner: str,
        chat_id: str,
        message_id: str,
        generation_id: str,
        *,
        through: str | None = None,
        trace: AnswerTrace | None = None,
        model: str = "",
    ) -> TurnAccepted | TurnRefused:
        """Queue a finished answer for continuation with a new generation id.

        Makes the branch that contains `through` the shown one (None: a branch with the answer). `trace` replaces the
        stored trace; None deletes it. `model`: name of the continuing model ('': unchanged).
        """

    async def edit_message(
        self, owner: str, chat_id: str, message_id: str, content: str, *, through: str | None = None
    ) -> bool:
        """Replace a finished answer's text, mark the answer as edited, and make its branch the shown one."""

    async def choose(self, owner: str, chat_id: str, message_id: str) -> bool:
        """Make this message's branch the shown one."""

    async def remove_summary(self, owner: str, chat_id: str, message_id: str, *, through: str | None = None) -> bool:
        """Make a summary's branch the shown one, and replace the summary with its replies."""

    async def update_chat(self, owner: str, chat_id: str, **changes: Any) -> bool: ...

    async def change_settings(self, owner: str, chat_id: str, change: SettingsChange) -> bool:
        """Replace a chat's settings with what `change` returns for them, in one transaction."""

    async def expired_temporary_chats(self, before_ms: int) -> list[tuple[str, str]]:
        """Return (owner, id) of the temporary chats that were last used before this time."""

    async def prompts(self, owner: str) -> list[SavedPrompt]: ...

    async def save_prompt(self, owner: str, prompt: SavedPrompt) -> None: ...

    async def memories(self, owner: str) -> list[Memory]: ...

    async def save_memory(self, owner: str, memory: Memory) -> bool:
        """Add or replace an entry; return False if MAX_MEMORIES or MAX_MEMORY_CHARACTERS would be exceeded."""

    async def chat_base(self, owner: str, project: str = "") -> ChatDefaults:
        """Return the defaults of the owner's chats, or of chats in a project."""

    async def defaults(self, owner: str) -> dict[str, SettingValue]:
        """Return the default settings that the owner has set."""

    async def change_defaults(self, owner: str, change: SettingsChange) -> None:
        """Replace the owner's default settings with what `change` returns for them, in one transaction."""

    async def trash_chat(self, owner: str, chat_id: str) -> str | None:
        """Move a chat to the trash and return the id for `restore`."""

    async def trash_chats(self, owner: str, chat_ids: Sequence[str]) -> tuple[str | None, int]:
        """Move chats to the trash, and return one id for `restore` and the number of chats moved."""

    async def trash_messages(self, owner: str, chat_id: str, *, reset: bool) -> tuple[str | None, list[str]]:
        """Move a chat's messages to the trash, and return an id for `restore` and the ids of unfinished generations."""

    async def restore(self, owner: str, trash_id: str) -> list[str]:
        """Restore a trash entry and return the ids of its chats; return [] if it was purged."""

    async def purge(self, seconds: float) -> int:
        """Delete the trash entries that this process first saw at least `seconds` ago, and return their number."""
        # After `purge`, `documents.stale()` returns the caches of the deleted conversations.

    async def add_chat(self, owner: str, chat: Chat, messages: Sequence[StoredMessage]) -> None:
        """Store a whole chat. Messages must follow their parents."""

    async def add_chats(self, owner: str, chats: Sequence[tuple[Chat, Sequence[StoredMessage]]]) -> None:
        """Store all of these chats with their messages, or none.

        A large import is written in several transactions. It is hidden until it is complete; `purge` deletes it if it
        remains incomplete.
        """

    async def trash_message(self, owner: str, chat_id: str, message_id: str) -> str | None:
        """Move a message and all messages below it to the trash and return the id for `restore`.

        Returns None if the message does not exist or any of these messages is unfinished.
        """

    async def rate_message(self, owner: str, chat_id: str, message_id: str, rating: Rating) -> bool: ...

    async def add_share(self, owner: str, share: ShareLink) -> bool:
        """Store a link to one of the owner's chats, and delete the owner's expired links."""

    async def shares(self, owner: str, chat_id: str, now_ms: int) -> list[ShareLink]:
        """Return the valid links to a chat, newest first."""

    async def delete_share(self, owner: str, chat_id: str, share_id: str) -> bool: ...

    async def shared(self, share_id: str, now_ms: int) -> ShareLink | None:
        """Return a link of any owner, if it is valid and its chat exists."""

    async def earlier_imports(self, owner: str, sources: Sequence[str]) -> dict[str, EarlierImport]:
        """Return the existing chats that were imported from these sources, by source."""

    async def add_messages(self, owner: str, messages: Sequence[StoredMessage]) -> None:
        """Add messages to existing chats, in several transactions. Messages must follow their parents."""

    async def remove_owner(self, owner: str) -> bool:
        """Permanently delete all data of an owner, in several transactions; return whether there was any.

        Afterwards, `documents.stale` returns the caches to clear. Can be repeated after a failure.
        """

    async def backup(self, target: Path) -> None:
        """Write a snapshot to `target`. Raises StorageError for shared stores."""

    async def trace(self, owner: str, message_id: str) -> AnswerTrace | None:
        """Return the trace of an answer, if stored."""

    async def save_message(
        self, assistant_message: StoredMessage, owner: str = "", trace: AnswerTrace | None = None
    ) -> None:
        """Save an answer, and its trace if given. `owner` selects the queue in which the write waits.

        Does nothing if the answer was deleted or has another generation id. If another process has marked the
        answer as interrupted, the process that generates it can still save the finished answer.
        """

    async def keep_html(self, owner: str, messages: Sequence[StoredMessage]) -> None: ...

    async def save_response(self, owner: str, response: StoredResponse) -> None:
        """Save a response. Only the newest thousand of each owner are kept."""

    async def response(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def delete(self, owner: str, kind: Deletable, key: str) -> bool:
        """Delete a memory (by id), response (by id) or prompt (by name); return whether it existed."""


HIT_BEGINS, HIT_ENDS = "\x02", "\x03"
