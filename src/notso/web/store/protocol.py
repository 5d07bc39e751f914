"""The values a store keeps and what every store must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol

from notso.smollm3 import Message

MessageState = Literal["queued", "running", "done", "stopped", "failed", "interrupted"]
MessageKind = Literal["turn", "summary"]
ToolState = Literal["waiting", "running", "done", "failed", "denied", "interrupted"]
PromptKind = Literal["message", "instructions"]
SettingValue = str | int | float | bool
Damage = Literal["", "unsound", "behind", "gone"]
"""`unsound`: the file fails its check. `behind`: commits are missing from it. `gone`: there is nothing left of it."""
ACTIVE_STATES: frozenset[MessageState] = frozenset({"queued", "running"})
MOST_SHOWN = 1000
"""Messages of a chat that one page begins with at most; those above come as they are scrolled to."""
BACKUP_ELSEWHERE = "the conversations are in PostgreSQL: pg_dump --format=custom makes a backup of them"
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 3.0
"""An unfinished turn belongs to the process that computes it. One that has not renewed its lease for so long, by the
clock of the database, has gone: its turns are interrupted by the next heartbeat of any other."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation. `prompt_date` is the day the model is told, frozen so that midnight changes no prompt.

    `created_ms` and `updated_ms` are milliseconds since 1970, UTC. `settings` holds what differs from the owner's
    defaults. `chosen_root` is the first message of the branch last shown (None: the newest). `unread`: nobody has
    looked since its answer ended. `archived` ones are kept out of the list; `temporary` ones are neither listed nor
    found nor exported, and are deleted some time after their last use.
    """

    id: str
    title: str
    thinking: bool
    prompt_date: date
    created_ms: int
    updated_ms: int
    pinned: bool = False
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    chosen_root: str | None = None
    unread: bool = False
    archived: bool = False
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A text that a person uses again and again, by a name: as a message, or as a chat's instructions."""

    name: str
    kind: PromptKind
    text: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a finished answer cost. Counts in tokens, times in milliseconds; `first_token_ms` from asking to seeing."""

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
    """A text file that goes with a question."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call the model made while it answered, and what came of it.

    `arguments` is the JSON object the model wrote; `result` what it read. Calls with the same `round` were written in
    one go. `content_at` and `reasoning_at` say how many characters of the answer and of its thoughts came before,
    `round_end` how many of the answer there were when the model left off to wait for results.
    `waiting`: for a person's permission; what was going on when the server went away is `interrupted`.
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
        """Whether there is a result that the model can read."""
        return self.state in ("done", "failed", "denied")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of the tree: `parent_id` is what it follows, `chosen_child` the version last shown after it.

    A question is always `done`; an answer has a generation id, by which its stream is found. A `summary` stands, for
    the model, in the place of all that is above it. `note` says in a person's words why an answer failed or was cut;
    `dropped_messages` older ones did not fit into its prompt; `tool_uses` are its calls, in order.
    `answer_html` and `reasoning_html` were made by renderer version `renderer` (0: not rendered).
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

    @property
    def active(self) -> bool:
        """Whether the engine still owes something to this message."""
        return self.state in ACTIVE_STATES


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A question and the place where its answer will grow.

    `after` is the last message of the branch the question was asked in, '' for an empty chat: the turn is refused when
    other messages follow it by now. None: the chosen branch. As another version of it, the question stands beside the
    question `instead_of`.
    """

    user_message: StoredMessage
    assistant_message: StoredMessage
    idempotency_key: str
    instead_of: str | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """Another answer to what is there already: a new version, or a summary. It follows `after`; a summary is refused
    when other messages follow that by now."""

    assistant_message: StoredMessage
    after: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The turn is on disk. `repeated`: this key was used before, and these are the messages it made then."""

    user_message: StoredMessage
    assistant_message: StoredMessage
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The chat has an unfinished answer, or it (or the message meant) does not exist (`running` is None).

    `held_here`: the answer is this process's to write; another one writes it otherwise, and only that may end it.
    `moved`: the branch that was shown has continued, or is gone.
    """

    running: StoredMessage | None
    held_here: bool = True
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Orphan:
    """An unfinished answer whose process has gone. It is interrupted now, with what was saved of it."""

    owner: str
    chat_id: str
    message_id: str
    generation_id: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a heartbeat found.

    `orphans` were interrupted by it, and are told to no other caller. `lost`: generations of this process that others
    have interrupted, because its own heartbeats came too late.
    """

    orphans: tuple[Orphan, ...] = ()
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A place that holds the words, between \\x02 and \\x03 in `snippet`; `message_id` is None for a title."""

    chat_id: str
    message_id: str | None
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A program's response: its `body` as it was told, the conversation that the next one goes on from, and the items
    of its question."""

    id: str
    previous_id: str | None
    body: Mapping[str, Any]
    conversation: tuple[Message, ...]
    created_ms: int
    input: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that begin with the same one, `first_message_id`: a chat has one, or several where its first question
    was edited."""

    owner: str
    first_message_id: str


@dataclass(frozen=True, slots=True)
class WholeChat:
    """A chat, its owner's default settings, and its messages of all branches, oldest first: as of one moment."""

    chat: Chat
    defaults: Mapping[str, SettingValue]
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The end of one branch of a chat, as of one moment: `line`, oldest first, with `above` messages above it.

    `first_id` is the branch's first message (None: an empty branch). `summarized`: `line` begins with the summary that
    stands for what is above it.
    """

    chat: Chat
    defaults: Mapping[str, SettingValue]
    line: tuple[StoredMessage, ...]
    first_id: str | None
    above: int = 0
    summarized: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A message on the shown branch, with the ids of all its versions (itself included), oldest first; and the nearest
    questions above and below it."""

    message: StoredMessage
    versions: tuple[str, ...]
    previous_user_message: str | None = None
    next_user_message: str | None = None

    @property
    def version(self) -> int:
        """Which one it is, counted from 1."""
        return self.versions.index(self.message.id) + 1

    @property
    def previous(self) -> str | None:
        """The version before this one."""
        return self.versions[self.version - 2] if self.version > 1 else None

    @property
    def next(self) -> str | None:
        """The version after this one."""
        return self.versions[self.version] if self.version < len(self.versions) else None


@dataclass(frozen=True, slots=True)
class ShownChat:
    """What a page of a chat shows: the end of its shown branch, and how many messages stand above that."""

    chat: Chat
    defaults: Mapping[str, SettingValue]
    path: tuple[Shown, ...]
    earlier: int


@dataclass(frozen=True, slots=True)
class ChatList:
    """Some chats in the order of the list, whether more follow, and how many of the list are unread."""

    chats: tuple[Chat, ...]
    has_more: bool
    unread: int


class ChatStore(Protocol):
    """Conversations of one owner at a time; every method names the owner, and a foreign id is an unknown one.

    A write has been committed to disk when its method returns. Methods raise StorageError. Where a method returns a
    bool, False means that there is no such thing.
    """

    @property
    def damage(self) -> Damage:
        """What is wrong with the data, if anything."""

    @property
    def read_only(self) -> bool:
        """Whether the data is damaged: it can be read as far as it goes, and every write raises StorageDamagedError."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use the same conversations at the same time."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def heartbeat(self, running: frozenset[str]) -> Heartbeat:
        """Renew this process's lease on its unfinished turns, and interrupt those of processes that have gone.
        `running`: the generations that it computes. Called every HEARTBEAT_SECONDS where the store is shared."""

    async def chats(self, owner: str) -> list[Chat]:
        """All chats, pinned ones first, then last used first."""

    async def chat_list(self, owner: str, limit: int, *, skip: int = 0, archived: bool = False) -> ChatList:
        """`limit` of them after the first `skip`: no temporary ones, and archived ones only with `archived`."""

    async def chat(self, owner: str, chat_id: str) -> Chat | None: ...

    async def whole_chat(self, owner: str, chat_id: str) -> WholeChat | None:
        """The chat with the messages of all its branches, in one read."""

    async def branch(
        self, owner: str, chat_id: str, last: str | None, *, most_characters: int | None = None
    ) -> Branch | None:
        """Return the branch that ends in the message `last` (None: the chosen branch, '': an empty one; of an unknown
        message the line is empty). With `most_characters`, what a prompt can be made of: its line begins with the
        newest finished summary, or with the message that exceeds so many characters of text, and nothing above is read.
        """

    async def attachments_above(self, owner: str, chat_id: str, message_id: str) -> list[Attachment]:
        """Return the files of all messages above this one on its branch, oldest first."""

    async def shown_chat(
        self, owner: str, chat_id: str, limit: int, *, through: str | None = None, first: str | None = None
    ) -> ShownChat | None:
        """The newest `limit` messages of the shown branch, and those above that begin a turn with them; from the
        message `first` on where that is further up, by no more than MOST_SHOWN. The branch passes the message `through`
        where the chat has it. It costs as much as what is shown, however many messages there are."""

    async def shown_above(self, owner: str, chat_id: str, message_id: str, limit: int) -> ShownChat | None:
        """The same of the messages above this one. None where there is no such chat or message."""

    async def shown_message(self, owner: str, chat_id: str, message_id: str) -> Shown | None:
        """One message as a page shows it, by itself."""

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        """All messages of the chat, all branches, oldest first (see tree.py)."""

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None: ...

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None:
        """The answer that this generation writes or wrote."""

    async def search(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        """Titles and messages that hold all the words of `query` (the last one may be unfinished), best first."""

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        """Store a question and its empty answer, and the chat with them when it is new, in one transaction."""

    async def add_message(self, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
        """Store an empty answer after a message that is there; that message comes back as the question."""

    async def resume_message(
        self, owner: str, chat_id: str, message_id: str, generation_id: str, *, through: str | None = None
    ) -> TurnAccepted | TurnRefused:
        """Queue a finished answer again, under a new generation, to be written on. Its text stays. The branch that ends
        in `through` (None: that passes the answer) is chosen."""

    async def edit_message(
        self, owner: str, chat_id: str, message_id: str, content: str, *, through: str | None = None
    ) -> bool:
        """Replace a finished answer's text by a person's, mark it as edited, and choose the branch as above."""

    async def choose(self, owner: str, chat_id: str, message_id: str) -> bool:
        """Remember this version as the one to show, all the way up."""

    async def remove_summary(self, owner: str, chat_id: str, message_id: str, *, through: str | None = None) -> bool:
        """Take a summary out; what followed it now follows what it stood for. Chooses the branch as above."""

    async def set_thinking(self, owner: str, chat_id: str, thinking: bool) -> bool: ...

    async def set_title(self, owner: str, chat_id: str, title: str) -> bool: ...

    async def set_pinned(self, owner: str, chat_id: str, pinned: bool) -> bool: ...

    async def set_unread(self, owner: str, chat_id: str, unread: bool) -> bool: ...

    async def set_archived(self, owner: str, chat_id: str, archived: bool) -> bool: ...

    async def keep(self, owner: str, chat_id: str) -> bool:
        """A temporary chat is one like others from now on."""

    async def lapsed(self, before_ms: int) -> list[tuple[str, str]]:
        """Temporary chats last used before that time, each as its owner and its id."""

    async def prompts(self, owner: str) -> list[SavedPrompt]:
        """Saved prompts by name."""

    async def save_prompt(self, owner: str, prompt: SavedPrompt) -> None:
        """Keep it, in the place of one of the same name."""

    async def delete_prompt(self, owner: str, name: str) -> bool: ...

    async def set_settings(self, owner: str, chat_id: str, settings: Mapping[str, SettingValue]) -> bool: ...

    async def defaults(self, owner: str) -> dict[str, SettingValue]:
        """The owner's own default settings; what is missing is as the program has it."""

    async def set_defaults(self, owner: str, settings: Mapping[str, SettingValue]) -> None: ...

    async def trash_chat(self, owner: str, chat_id: str) -> str | None:
        """Hide a chat until it is purged or restored; the id to restore it by, None where there is no such chat."""

    async def trash_messages(self, owner: str, chat_id: str, *, reset: bool) -> str | None:
        """Hide a chat's messages likewise; `reset` also empties its settings."""

    async def restore(self, owner: str, trash_id: str) -> str | None:
        """Bring back what was hidden. The chat's id, or None when it is gone for good."""

    async def thrown_away(self, seconds: float, now: float | None = None) -> list[Conversation]:
        """The conversations that `purge`, called with the same, deletes."""

    async def purge(self, seconds: float, now: float | None = None) -> int:
        """Delete for good what was found hidden by a call so long before `now` (monotonic; None: this moment). How many
        chats and clearings that were."""

    async def add_chat(self, owner: str, chat: Chat, messages: Sequence[StoredMessage]) -> None:
        """Store a whole chat; parents come before their children."""

    async def add_chats(self, owner: str, chats: Sequence[tuple[Chat, Sequence[StoredMessage]]]) -> None:
        """Store whole chats, one at least, all or none: what is large is written in pieces between which others write,
        and shown when all of it is there. Of what is broken off, nothing was ever shown, and `purge` deletes it."""

    async def backup(self, target: Path) -> None:
        """Write everything, as it is at one moment, to a new file. A shared store has other ways: StorageError."""

    async def save_message(self, assistant_message: StoredMessage) -> None:
        """Write text, tool calls, state, note, numbers and HTML of an answer. A deleted one stays deleted, and one that
        is written under another generation by now stays as it is. What was interrupted because its process seemed gone
        can still be ended by it, and no longer be written on."""

    async def keep_html(self, owner: str, messages: Sequence[StoredMessage]) -> None:
        """Write the HTML of messages whose text is still what it was made from."""

    async def save_response(self, owner: str, response: StoredResponse) -> None:
        """Keep a response, the newest thousand of each owner."""

    async def response(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def delete_response(self, owner: str, response_id: str) -> bool: ...


HIT_BEGINS, HIT_ENDS = "\x02", "\x03"
