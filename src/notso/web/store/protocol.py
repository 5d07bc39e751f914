"""Values that the stores keep, and the ChatStore protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol

from notso.smollm3 import Message, Sentence
from notso.web.store.documents import Citation, DocumentStore, Library
from notso.web.store.records import ApiRecords

MessageState = Literal["queued", "running", "done", "stopped", "failed", "interrupted"]
MessageKind = Literal["turn", "summary"]
ToolState = Literal["waiting", "running", "done", "failed", "denied", "interrupted"]
Rating = Literal[-1, 0, 1]
PromptKind = Literal["message", "instructions"]
SettingValue = str | int | float | bool
Damage = Literal["", "unsound", "behind", "gone"]
"""`unsound`: the integrity check fails. `behind`: commits are missing. `gone`: the file is empty or missing."""
ACTIVE_STATES: frozenset[MessageState] = frozenset({"queued", "running"})
MAX_MEMORIES, MAX_MEMORY_CHARACTERS = 50, 4_000
"""Limits of an owner's memory: entries, and characters of all of them."""
MOST_SHOWN = 1000
"""Maximum messages of a chat that one page begins with."""
FAILED = Sentence("conversations cannot be read or written at the moment", "storage_failed")
DISK_FULL = Sentence("the disk is full: free some space; nothing was lost", "storage_disk_full")
BACKUP_ELSEWHERE = "the conversations are in PostgreSQL: back them up with pg_dump --format=custom"
# An unfinished turn belongs to the process that computes it. A process that has not renewed its lease for
# LEASE_SECONDS, by the clock of the database, is gone: the next heartbeat of another process interrupts its turns.
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation. Times are milliseconds since 1970, UTC.

    `settings` holds differences from the owner's defaults. `chosen_root` starts the branch last shown (None: the
    newest). `unread`: not opened since its answer ended. `archived` chats are not listed. `temporary` chats are
    not listed, searched or exported, and are deleted after a time without use. `source` identifies what an imported
    chat was made of ('': not imported). `project` is the id of a library ('': none).
    """

    id: str
    title: str
    thinking: bool
    # The date in the prompt, fixed so that midnight does not invalidate cached prompts.
    prompt_date: date
    created_ms: int
    updated_ms: int
    pinned: bool = False
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    chosen_root: str | None = None
    unread: bool = False
    archived: bool = False
    temporary: bool = False
    source: str = ""
    project: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    id: str
    text: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class ChatBase:
    """What chats of an owner start from: its settings, overridden by those of the project, and its memory."""

    defaults: Mapping[str, SettingValue] = field(default_factory=dict)
    project: Library | None = None
    memories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    name: str
    kind: PromptKind
    text: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """Cost of an answer, in tokens and milliseconds; `first_token_ms` counts from the request."""

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
    """A text file attached to a question, or a document of a library, whose text is not repeated here."""

    name: str
    text: str
    document: str = ""  # id


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call within an answer, and its result.

    `arguments` is a JSON object. Calls of one `round` were generated together. `content_at` and `reasoning_at`
    are the characters of answer and thoughts before the call; `round_end` the characters of the answer at the end
    of the round. `waiting` is for permission; `interrupted` by a server stop.
    """

    id: str
    name: str
    arguments: str
    state: ToolState
    round: int = 0
    result: str = ""
    duration_ms: float = 0.0
    content_at: int = 0
    reasoning_at: int = 0
    round_end: int = 0

    @property
    def is_final(self) -> bool:
        return self.state in ("done", "failed", "denied")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of the tree; `chosen_child` is the version last shown after it.

    Questions are always `done`; answers have a generation id that identifies the stream. A `summary` replaces all
    messages above it in prompts. `note` explains a failure to the user. `dropped_messages` older ones did not fit
    into the prompt. `renderer` is the version that made the HTML (0: none). `model` is the name of the model that
    wrote an answer ('': unknown), and `rating` is its user's opinion of it. `citations` say where its quotations stand
    in documents; the store keeps those that the documents confirm. `source` is the id within the import that
    adds the message; it is not read back.
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
    parent_id: str | None = None
    kind: MessageKind = "turn"
    chosen_child: str | None = None
    edited: bool = False
    attachments: tuple[Attachment, ...] = ()
    dropped_messages: int = 0
    tool_uses: tuple[ToolUse, ...] = ()
    model: str = ""
    rating: Rating = 0
    citations: tuple[Citation, ...] = ()
    source: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """One engine request of an answer, so that it can be repeated.

    It began with the first `content_at` and `reasoning_at` characters of answer and thoughts, and after `calls` tool
    calls; `is_apart` if a call separates its text from the text before. `params` are fields of SamplingParams, with
    the seed. `hurry`: its reasoning ends at once. `ids` are the tokens so far; at `closed_at` the engine ended the
    reasoning. `origin` and `limit` are those of the engine's `started` event. At its end, `tokens` and
    `reasoning_tokens` are counted and `finish` is the finish reason.
    """

    params: Mapping[str, Any]
    content_at: int = 0
    reasoning_at: int = 0
    calls: int = 0
    is_apart: bool = False
    hurry: bool = False
    origin: str = ""
    limit: int = 0
    ids: tuple[int, ...] = ()
    closed_at: tuple[int, ...] = ()
    tokens: int = 0
    reasoning_tokens: int = 0
    finish: str = ""


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """How an answer was written: its engine requests in order, and what they were sent with besides the chat's
    settings: the setting `model`, those `own` of this version (None: the chat's), whether `every` part of the documents
    is asked, of which so many were answered (`parts`), and whether the reasoning ends at once (`hurry`). An answer
    without requests has not begun.

    An answer left by a process that ended is taken up by another, unless MOST_TRIES processes have begun it with its
    last token or part so far (`tries`). `resumes` counts how often it was taken up.
    """

    runs: tuple[AnswerRun, ...]
    model: str | None = None
    tries: int = 0
    resumes: int = 0
    own: Mapping[str, SettingValue] | None = None
    every: bool = False
    hurry: bool = False
    parts: int = 0


MOST_TRIES = 2


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A question and its empty answer.

    `after` is the last message of the branch ('': empty chat, None: the chosen branch); the turn is refused if
    that has continued. `instead_of` makes the question a sibling of another. An answer without `trace` is not taken up
    by another process.
    """

    user_message: StoredMessage
    assistant_message: StoredMessage
    idempotency_key: str
    instead_of: str | None = None
    after: str | None = None
    trace: AnswerTrace | None = None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """Another answer after the message `after`: a version, or a summary.

    A summary is refused if the branch has continued.
    """

    assistant_message: StoredMessage
    after: str
    idempotency_key: str
    trace: AnswerTrace | None = None


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The turn is on disk. `repeated`: by an earlier request with this key."""

    user_message: StoredMessage
    assistant_message: StoredMessage
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The chat has an unfinished answer (`running`), or the chat or message does not exist.

    `held_here`: this process runs the answer, and only it may end it. `moved`: the branch has continued or is
    gone.
    """

    running: StoredMessage | None
    held_here: bool = True
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Orphan:
    owner: str
    chat_id: str
    message_id: str
    generation_id: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Result of a heartbeat.

    `orphans` were interrupted by it and are reported only once. `taken` are this process's from now on, and reported
    until it knows them: the result of a heartbeat that has taken some may be lost.
    `lost`: generations of this process that another one interrupted or took because of late heartbeats.
    """

    orphans: tuple[Orphan, ...] = ()
    taken: tuple[Orphan, ...] = ()
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Share:
    """A link to a chat, readable without a key down to one message. `id` is the SHA-256 of the link's secret."""

    id: str
    owner: str
    chat_id: str
    message_id: str
    created_ms: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class ImportedBefore:
    """A chat of an earlier import: the message made of each source, None if it was deleted since."""

    chat_id: str
    messages: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class SearchHit:
    r"""A match, marked by \\x02 and \\x03 in `snippet`; `message_id` is None for titles.

    `at_ms` is the time of the message, or of the chat's last use. `similar`: other words than those asked for match.
    """

    chat_id: str
    message_id: str | None
    title: str
    snippet: str
    at_ms: int = 0
    similar: bool = False


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of the Responses API, the conversation to continue, and its input items."""

    id: str
    previous_id: str | None
    body: Mapping[str, Any]
    conversation: tuple[Message, ...]
    created_ms: int
    input: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """All messages below one first message; edited first questions give a chat several."""

    owner: str
    first_message_id: str


@dataclass(frozen=True, slots=True)
class WholeChat:
    """A chat with the messages of all branches, oldest first, in one snapshot."""

    chat: Chat
    base: ChatBase
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The end of a branch, oldest first, in one snapshot; `above` messages precede `line`.

    `first_id` is the branch's first message (None: empty). `summarized`: `line` begins with a summary of them.
    """

    chat: Chat
    base: ChatBase
    line: tuple[StoredMessage, ...]
    first_id: str | None
    above: int = 0
    summarized: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A message on the shown branch, all its version ids, oldest first, and neighboring questions."""

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
    """The end of a chat's shown branch, and the number of messages above."""

    chat: Chat
    base: ChatBase
    path: tuple[Shown, ...]
    earlier: int


@dataclass(frozen=True, slots=True)
class ChatList:
    """Some chats in list order, whether more follow, and the number of unread ones in all."""

    chats: tuple[Chat, ...]
    has_more: bool
    unread: int


@dataclass(frozen=True, slots=True)
class ChatRow:
    chat: Chat
    messages: int
    size_bytes: int


ChatOrder = Literal["used", "-used", "title", "-title", "messages", "-messages", "size", "-size"]
"""Sort key of a table of chats; a minus sign reverses it."""


class ChatStore(Protocol):
    """Conversations by owner; foreign ids are treated as unknown.

    Writes are committed to disk when a method returns. Methods raise StorageError. A bool result is False if the
    object does not exist.
    """

    records: ApiRecords
    documents: DocumentStore

    @property
    def damage(self) -> Damage: ...

    @property
    def read_only(self) -> bool:
        """Whether the data is damaged: writes raise StorageDamagedError."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use the store concurrently."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def heartbeat(
        self, running: frozenset[str], known: frozenset[str] | None = None, *, is_leaving: bool = False
    ) -> Heartbeat:
        """Renew this process's lease, and take or interrupt turns of dead processes.

        `running`: generations of this process. `known`: those and the ones that it is about to start, if it continues
        turns that have a trace. One that `is_leaving` leaves turns of dead processes to others. Shared stores need it
        every HEARTBEAT_SECONDS, others once.
        """

    async def chats(self, owner: str) -> list[Chat]:
        """Return all chats, pinned first, then by last use."""

    async def chat_list(
        self, owner: str, limit: int, *, skip: int = 0, archived: bool = False, project: str = ""
    ) -> ChatList:
        """Return a page of the list, or of a project's, including archived chats only with `archived`."""

    async def chat_rows(
        self, owner: str, limit: int, *, skip: int = 0, order: ChatOrder = "-used", title: str = ""
    ) -> tuple[list[ChatRow], bool]:
        """Return a page of all listed chats whose title contains `title`, and whether more follow."""

    async def chat(self, owner: str, chat_id: str) -> Chat | None: ...

    async def whole_chat(self, owner: str, chat_id: str) -> WholeChat | None: ...

    async def branch(
        self, owner: str, chat_id: str, last: str | None, *, most_characters: int | None = None
    ) -> Branch | None:
        """Return the branch ending in `last` (None: chosen, '': empty; unknown: an empty line).

        With `most_characters` the line begins with the newest finished summary, or the message that exceeds
        this many characters.
        """

    async def attachments_above(self, owner: str, chat_id: str, message_id: str) -> list[Attachment]:
        """Return the files of all messages above on the branch, oldest first."""

    async def shown_chat(
        self, owner: str, chat_id: str, limit: int, *, through: str | None = None, first: str | None = None
    ) -> ShownChat | None:
        """Return the newest `limit` messages of the branch through `through`, rounded up to whole turns.

        Starts at `first` if that is further up, within MOST_SHOWN. The cost depends on what is shown only.
        """

    async def shown_above(self, owner: str, chat_id: str, message_id: str, limit: int) -> ShownChat | None:
        """Return `limit` messages above this one."""

    async def shown_message(self, owner: str, chat_id: str, message_id: str) -> Shown | None: ...

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        """Return the messages of all branches, oldest first (see tree.py)."""

    def message_pieces(self, owner: str, chat_id: str, *, shown: bool = False) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of all branches, or of the shown one, oldest first, in pieces of bounded size.

        Each piece is read when it is asked for, so that no more than one of a large chat is in memory; what was
        deleted meanwhile is missing.
        """

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None: ...

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None: ...

    async def search(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        """Find titles and messages with all words (the last may be a prefix): titles first, then the newest.

        If there are none, words that resemble those of the query are looked for.
        """

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        """Store a question and its empty answer, and `new_chat`, in one transaction."""

    async def add_message(self, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
        """Store an empty answer after an existing message, which is returned as the question."""

    async def resume_message(
        self,
        owner: str,
        chat_id: str,
        message_id: str,
        generation_id: str,
        *,
        through: str | None = None,
        trace: AnswerTrace | None = None,
    ) -> TurnAccepted | TurnRefused:
        """Queue a finished answer for continuation under a new generation.

        Chooses the branch ending in `through` (None: one with the answer). `trace` replaces that of the text so far.
        """

    async def edit_message(
        self, owner: str, chat_id: str, message_id: str, content: str, *, through: str | None = None
    ) -> bool:
        """Replace a finished answer's text, mark it as edited, and choose the branch."""

    async def choose(self, owner: str, chat_id: str, message_id: str) -> bool:
        """Make this message's branch the shown one."""

    async def remove_summary(self, owner: str, chat_id: str, message_id: str, *, through: str | None = None) -> bool:
        """Delete a summary and attach what follows to its parent. Chooses the branch."""

    async def update_chat(self, owner: str, chat_id: str, **changes: Any) -> bool: ...

    async def lapsed(self, before_ms: int) -> list[tuple[str, str]]:
        """Return (owner, id) of temporary chats last used before then."""

    async def prompts(self, owner: str) -> list[SavedPrompt]: ...

    async def save_prompt(self, owner: str, prompt: SavedPrompt) -> None: ...

    async def delete_prompt(self, owner: str, name: str) -> bool: ...

    async def memories(self, owner: str) -> list[Memory]: ...

    async def save_memory(self, owner: str, memory: Memory) -> bool:
        """Add an entry or replace its text; False past MAX_MEMORIES or MAX_MEMORY_CHARACTERS."""

    async def delete_memory(self, owner: str, memory_id: str) -> bool: ...

    async def chat_base(self, owner: str, project: str = "") -> ChatBase:
        """Return what new chats of the owner, or of a project, start from."""

    async def defaults(self, owner: str) -> dict[str, SettingValue]:
        """Return the owner's settings that differ from the program's."""

    async def set_defaults(self, owner: str, settings: Mapping[str, SettingValue]) -> None: ...

    async def trash_chat(self, owner: str, chat_id: str) -> str | None:
        """Hide a chat, and return the id for `restore`."""

    async def trash_chats(self, owner: str, chat_ids: Sequence[str]) -> tuple[str | None, int]:
        """Hide chats under one id for `restore`, and return it with the number of chats hidden."""

    async def trash_messages(self, owner: str, chat_id: str, *, reset: bool) -> str | None:
        """Hide a chat's messages; `reset` also clears its settings."""

    async def restore(self, owner: str, trash_id: str) -> list[str]:
        """Restore, and return the ids of the chats: none if purged."""

    async def thrown_away(self, seconds: float, now: float | None = None) -> list[Conversation]:
        """Return the conversations that `purge` with these arguments deletes."""

    async def purge(self, seconds: float, now: float | None = None) -> int:
        """Delete what has been in the trash for `seconds` at `now` (monotonic); return the count."""

    async def add_chat(self, owner: str, chat: Chat, messages: Sequence[StoredMessage]) -> None:
        """Store a whole chat; parents precede their children."""

    async def add_chats(self, owner: str, chats: Sequence[tuple[Chat, Sequence[StoredMessage]]]) -> None:
        """Store at least one whole chat, all or none.

        Large imports are written in hidden pieces, between which others write; `purge` deletes incomplete
        ones.
        """

    async def trash_message(self, owner: str, chat_id: str, message_id: str) -> str | None:
        """Hide a message and all below it, and return the id for `restore`.

        Returns None if it does not exist or an answer is unfinished.
        """

    async def rate_message(self, owner: str, chat_id: str, message_id: str, rating: Rating) -> bool: ...

    async def add_share(self, owner: str, share: Share) -> bool:
        """Store a link to a chat of the owner, and delete the owner's expired ones."""

    async def shares(self, owner: str, chat_id: str, now_ms: int) -> list[Share]:
        """Return the valid links to a chat, newest first."""

    async def delete_share(self, owner: str, chat_id: str, share_id: str) -> bool: ...

    async def shared(self, share_id: str, now_ms: int) -> Share | None:
        """Return a valid link of any owner whose chat is not deleted."""

    async def imported(self, owner: str, sources: Sequence[str]) -> dict[str, ImportedBefore]:
        """Return the chats that were imported from these sources and still exist, by source."""

    async def add_messages(self, owner: str, messages: Sequence[StoredMessage]) -> None:
        """Add messages to existing chats; parents precede their children. Written in pieces."""

    async def remove_owner(self, owner: str) -> None:
        """Delete everything of an owner for good, in pieces between which others write.

        What engines must forget is kept for `documents.stale`. It can be repeated after a failure.
        """

    async def backup(self, target: Path) -> None:
        """Write a snapshot to a new file. Raises StorageError if shared."""

    async def trace(self, owner: str, message_id: str) -> AnswerTrace | None:
        """Return how an answer was written; None if it is not known."""

    async def save_message(
        self, assistant_message: StoredMessage, owner: str = "", trace: AnswerTrace | None = None
    ) -> None:
        """Save an answer, and its trace if given, in the owner's turn ("": internal).

        Ignored if it was deleted or has another generation by now.

        An answer interrupted by another process can still be completed by its own, but not continued.
        """

    async def keep_html(self, owner: str, messages: Sequence[StoredMessage]) -> None: ...

    async def save_response(self, owner: str, response: StoredResponse) -> None:
        """Save a response, keeping each owner's newest thousand."""

    async def response(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def delete_response(self, owner: str, response_id: str) -> bool: ...


HIT_BEGINS, HIT_ENDS = "\x02", "\x03"
