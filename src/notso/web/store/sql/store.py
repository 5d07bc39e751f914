"""Implement the ChatStore methods that SQLite and PostgreSQL share."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from notso.smollm3 import Message, ToolCall
from notso.web.store.documents import DocumentStore
from notso.web.store.protocol import (
    MAX_MEMORIES,
    MAX_MEMORY_CHARACTERS,
    AnswerTrace,
    Attachment,
    Branch,
    Chat,
    ChatDefaults,
    ChatList,
    ChatOrder,
    ChatRow,
    ChatSnapshot,
    Damage,
    Deletable,
    EarlierImport,
    Memory,
    SavedPrompt,
    SearchHit,
    SettingsChange,
    SettingValue,
    ShareLink,
    ShownChat,
    ShownMessage,
    StoredMessage,
    StoredResponse,
)
from notso.web.store.records import ApiRecords
from notso.web.store.sql import shown_part, tree_writes
from notso.web.store.sql.database import Database, Transactions, columns_of
from notso.web.store.sql.documents import SQLDocuments, load_project, mark_stale
from notso.web.store.sql.records import SQLRecords
from notso.web.store.sql.rows import (
    CHAT_FIELDS,
    attachments_from_json,
    change_row_settings,
    chat_from_row,
    load_settings,
    message_from_row,
    stored_value,
    trace_from_row,
)
from notso.web.store.sql.search_words import Term, extract_snippet, fold, parse_query, similar_terms
from notso.web.store.sql.tree_writes import mark_owner_caches_stale, remove_piece
from notso.web.store.tree import branch, branch_end, path_to, shown_path
from notso.web.values.errors import Sentence, StorageError, StorageFullError
from notso.web.values.json_steps import json_steps

T = TypeVar("T")
P = ParamSpec("P")

SOURCES_AT_ONCE = 200  # number of sources per query in `earlier_imports`
# A large import is hidden in the trash until it is complete. At this interval, its trash entry gets a new id, so that
# the import is not purged.
RENEW_SECONDS = 3.0

_CHAT = "SELECT * FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL"
_DELETE: Mapping[Deletable, str] = {
    "memory": "DELETE FROM memories WHERE id = ? AND owner = ?",
    "prompt": "DELETE FROM prompts WHERE name = ? AND owner = ?",
    "response": "DELETE FROM responses WHERE id = ? AND owner = ?",
}
_IN_ORDER = "ORDER BY pinned DESC, updated_ms DESC, id DESC"
_ORDERS = {"used": "updated_ms", "title": "title", "messages": "messages", "size": "size_bytes"}
_COUNTED = """
    SELECT * FROM (
        SELECT shown.*,
            (SELECT count(*) FROM messages AS m WHERE m.chat_id = shown.id AND m.trash_id IS NULL) AS messages,
            (SELECT coalesce(sum(m.size), 0) FROM messages AS m WHERE m.chat_id = shown.id) AS size_bytes
        FROM ({chats}) AS shown
    ) AS counted
"""
_LISTED = "owner = ? AND trash_id IS NULL AND NOT temporary"
# The condition `size > 0` lets SQLite use a partial index.
_STORED_SIZE = "SELECT coalesce(sum(size), 0) AS n FROM messages WHERE owner = ? AND size > 0"
_MEMORIES = "SELECT id, text, created_ms FROM memories WHERE owner = ? ORDER BY created_ms, id"
_DEFAULTS = "SELECT settings FROM preferences WHERE owner = ?"
_SHARE = columns_of(ShareLink)
_MESSAGES = "SELECT * FROM messages WHERE chat_id = ? AND owner = ? AND trash_id IS NULL ORDER BY position"

MAX_RESPONSES = 1000  # responses per owner


def save_response(db: Database, owner: str, response: StoredResponse) -> None:
    db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response.id, owner))
    db.execute(
        "INSERT INTO responses (id, owner, previous_id, body, conversation, created_ms, input)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            response.id,
            owner,
            response.previous_id,
            "".join(json_steps(response.body, allow_nan=True)),
            json.dumps([asdict(message) for message in response.conversation], ensure_ascii=False),
            response.created_ms,
            "".join(json_steps(response.input, allow_nan=True)),
        ),
    )
    db.execute(
        # Order by rowid, because creation times are out of order after the clock has been set back.
        "DELETE FROM responses WHERE owner = ? AND rowid NOT IN"
        " (SELECT rowid FROM responses WHERE owner = ? ORDER BY rowid DESC LIMIT ?)",
        (owner, owner, MAX_RESPONSES),
    )


def save_memory(db: Database, owner: str, memory: Memory) -> bool:
    others = "SELECT count(*) AS n, coalesce(sum(length(text)), 0) AS size FROM memories WHERE owner = ? AND id <> ?"
    stored = db.execute(others, (owner, memory.id)).fetchone()
    if stored["n"] >= MAX_MEMORIES or stored["size"] + len(memory.text) > MAX_MEMORY_CHARACTERS:
        return False
    db.execute(
        "INSERT INTO memories (owner, id, text, created_ms) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET text = excluded.text WHERE memories.owner = excluded.owner",
        (owner, memory.id, memory.text, memory.created_ms),
    )
    return True


def add_share(db: Database, owner: str, share: ShareLink) -> bool:
    if db.execute(_CHAT, (share.chat_id, owner)).fetchone() is None:
        return False
    db.execute("DELETE FROM shares WHERE owner = ? AND expires_ms <= ?", (owner, share.created_ms))
    db.execute(f"INSERT INTO shares ({_SHARE}) VALUES (?, ?, ?, ?, ?, ?)", astuple(share))
    return True


def _write_method(
    work: Callable[Concatenate[Database, str, P], T], *, is_limited: bool = False
) -> Callable[Concatenate[SQLStore, str, P], Coroutine[Any, Any, T]]:
    # Converts a function that writes to a database into a method that runs it in a transaction. If `is_limited`, the
    # method also enforces the limit on the size of an owner's messages.

    async def method(self: SQLStore, owner: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run = self._add if is_limited else self.write
        return await run(lambda db: work(db, owner, *args, **kwargs), owner)

    return method


class SQLStore(Transactions):
    damage: Damage = ""

    def __init__(self) -> None:
        self.max_stored_characters: Callable[[str], int] = lambda owner: 0  # limit for an owner; 0 means none
        self.records: ApiRecords = SQLRecords(self)
        self.documents: DocumentStore = SQLDocuments(self)
        self._trash_seen: dict[str, float] = {}

    @property
    def read_only(self) -> bool:
        return bool(self.damage)

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def require_exclusive_use(self) -> None:
        """Raise StorageError if the database is damaged or in use; otherwise mark unfinished answers as interrupted."""

    @contextlib.asynccontextmanager
    async def exclusive_use(self) -> AsyncIterator[None]:
        """Open the store for exclusive use in an `async with` block, then close it. Raises StorageError."""
        await self.open()
        try:
            await self.require_exclusive_use()
            yield
        finally:
            await self.close()

    def _message(self, row: Any) -> StoredMessage:
        message = message_from_row(row)
        return replace(message, state="interrupted") if self.read_only and message.active else message

    async def chats(self, owner: str) -> list[Chat]:
        rows = await self.read(owner, f"SELECT * FROM chats WHERE owner = ? AND trash_id IS NULL {_IN_ORDER}", owner)
        return [chat_from_row(row) for row in rows]

    async def chat_list(
        self, owner: str, limit: int, *, skip: int = 0, archived: bool = False, project: str = ""
    ) -> ChatList:
        listed = _LISTED if archived else f"{_LISTED} AND NOT archived"
        values = (owner, project) if project else (owner,)
        listed += " AND project = ?" if project else ""

        def read(db: Database) -> ChatList:
            page = db.execute(
                f"SELECT * FROM chats WHERE {listed} {_IN_ORDER} LIMIT ? OFFSET ?", (*values, limit + 1, skip)
            )
            unread = db.execute(f"SELECT count(*) AS n FROM chats WHERE {listed} AND unread", values)
            rows = page.fetchall()
            return ChatList(tuple(map(chat_from_row, rows[:limit])), len(rows) > limit, unread.fetchone()["n"])

        return await self.run_read(read, owner)

    async def chat_rows(
        self, owner: str, limit: int, *, skip: int = 0, order: ChatOrder = "-used", title: str = ""
    ) -> tuple[list[ChatRow], bool]:
        by, is_descending = order.removeprefix("-"), order.startswith("-")
        direction = "DESC" if is_descending else "ASC"
        in_order = f"ORDER BY {_ORDERS[by]} {direction}, id {direction}"
        all_chats, part = f"SELECT * FROM chats WHERE {_LISTED}", fold(title)
        # Count the messages of all chats only if the counts determine the order.
        counted = _COUNTED.format(chats=all_chats) if by in ("messages", "size") else all_chats

        def read(db: Database) -> tuple[list[ChatRow], bool]:
            with db.snapshot():
                if part or by == "title":  # in Python, because the databases treat case and accents differently
                    listed = db.execute(f"SELECT id, title FROM ({counted}) AS listed {in_order}", (owner,))
                    titles = [(fold(row["title"]), row["id"]) for row in listed]
                    titles = [each for each in titles if part in each[0]]
                    if by == "title":
                        titles.sort(reverse=is_descending)
                    ids = [chat_id for _, chat_id in titles[skip : skip + limit + 1]]
                else:
                    page = f"SELECT id FROM ({counted}) AS listed {in_order} LIMIT ? OFFSET ?"
                    ids = [row["id"] for row in db.execute(page, (owner, limit + 1, skip))]
                shown = f"{all_chats} AND id IN ({', '.join('?' * len(ids)) or 'NULL'})"
                found = {row["id"]: row for row in db.execute(_COUNTED.format(chats=shown), (owner, *ids))}
            rows = [found[each] for each in ids[:limit]]
            return [ChatRow(chat_from_row(row), row["messages"], row["size_bytes"]) for row in rows], len(ids) > limit

        return await self.run_read(read, owner)

    async def chat(self, owner: str, chat_id: str) -> Chat | None:
        rows = await self.read(owner, _CHAT, chat_id, owner)
        return chat_from_row(rows[0]) if rows else None

    async def _load_with_chat(
        self,
        kind: Callable[..., T],
        load: Callable[..., tuple[Any, ...] | None],
        owner: str,
        chat_id: str,
        *rest: object,
        **options: object,
    ) -> T | None:
        # Calls `kind` with the chat, its defaults and the values from `load`, and returns the result. Returns None if
        # the chat does not exist or `load` returns None.
        def read(db: Database) -> T | None:
            with db.snapshot():
                found = _query_chat_and_defaults(db, owner, chat_id)
                loaded = load(db, owner, chat_id, *rest, **options)
                chat, base = found()
            return kind(chat, base, *loaded) if chat is not None and loaded is not None else None

        return await self.run_read(read, owner)

    async def chat_snapshot(self, owner: str, chat_id: str) -> ChatSnapshot | None:
        def load(db: Database, owner: str, chat_id: str) -> tuple[tuple[StoredMessage, ...]]:
            return (tuple(map(self._message, db.execute(_MESSAGES, (chat_id, owner)).fetchall())),)

        return await self._load_with_chat(ChatSnapshot, load, owner, chat_id)

    async def branch(
        self, owner: str, chat_id: str, last: str | None, *, most_characters: int | None = None
    ) -> Branch | None:
        if self.read_only:  # load the whole chat from its rows, because index entries may be damaged
            return _branch_of(await self.chat_snapshot(owner, chat_id), last)
        return await self._load_with_chat(
            Branch, shown_part.load_prompt_branch, owner, chat_id, last, most_characters=most_characters
        )

    async def earlier_attachments(self, owner: str, chat_id: str, message_id: str) -> list[Attachment]:
        stored = await self.run_read(
            lambda db: shown_part.load_earlier_attachments(db, owner, chat_id, message_id), owner
        )
        return [each for text in stored for each in attachments_from_json(text)]

    async def shown_chat(
        self, owner: str, chat_id: str, limit: int, *, through: str | None = None, first: str | None = None
    ) -> ShownChat | None:
        if self.read_only:
            snapshot = await self.chat_snapshot(owner, chat_id)
            path, earlier = branch_end(_shown_path_of(snapshot, through), limit, first)
            return ShownChat(snapshot.chat, snapshot.base, tuple(path), earlier) if snapshot is not None else None
        return await self._load_with_chat(
            ShownChat, shown_part.load_branch_end, owner, chat_id, limit=limit, through=through, first=first
        )

    async def shown_before(
        self, owner: str, chat_id: str, message_id: str, limit: int, *, first: int | None = None
    ) -> ShownChat | None:
        if self.read_only:
            snapshot = await self.chat_snapshot(owner, chat_id)
            line = _shown_path_of(snapshot, message_id)
            at = next((at for at, each in enumerate(line) if each.message.id == message_id), None)
            if snapshot is None or at is None or (first is not None and first >= at):
                return None
            path, earlier = branch_end(line[: at if first is None else first], limit)
            return ShownChat(snapshot.chat, snapshot.base, tuple(path), earlier)
        return await self._load_with_chat(
            ShownChat, shown_part.load_shown_before, owner, chat_id, message_id, limit=limit, first=first
        )

    async def shown_message(self, owner: str, chat_id: str, message_id: str) -> ShownMessage | None:
        if self.read_only:
            line = _shown_path_of(await self.chat_snapshot(owner, chat_id), message_id)
            return next((each for each in line if each.message.id == message_id), None)

        def read(db: Database) -> ShownMessage | None:
            with db.snapshot():
                return shown_part.load_shown_message(db, owner, chat_id, message_id)

        return await self.run_read(read, owner)

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        return [self._message(row) for row in await self.read(owner, _MESSAGES, chat_id, owner)]

    async def message_chunks(
        self, owner: str, chat_id: str, *, shown: bool = False
    ) -> AsyncIterator[list[StoredMessage]]:
        if self.read_only:  # load the whole chat from its rows, because index entries may be damaged
            snapshot = await self.chat_snapshot(owner, chat_id)
            if snapshot is not None:
                yield branch(snapshot.messages, snapshot.chat.chosen_root) if shown else list(snapshot.messages)
            return
        for ids in await self.run_read(lambda db: shown_part.pieces(db, owner, chat_id, shown=shown), owner):
            if messages := await self.run_read(partial(shown_part.piece, owner=owner, ids=ids), owner):
                yield messages

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None:
        sql = "SELECT * FROM messages WHERE id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL"
        rows = await self.read(owner, sql, message_id, chat_id, owner)
        return self._message(rows[0]) if rows else None

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None:
        sql = (
            "SELECT messages.* FROM messages JOIN chats ON chats.id = chat_id AND chats.trash_id IS NULL"
            " WHERE generation_id = ? AND messages.owner = ? AND messages.trash_id IS NULL"
        )
        rows = await self.read(owner, sql, generation_id, owner)
        return self._message(rows[0]) if rows else None

    async def search(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        terms = parse_query(query)
        return await self.run_read(lambda db: _search(db, owner, query, terms, limit), owner) if terms else []

    add_turn = _write_method(tree_writes.add_turn, is_limited=True)
    add_message = _write_method(tree_writes.add_message, is_limited=True)
    edit_message = _write_method(tree_writes.edit_message, is_limited=True)
    resume_message = _write_method(tree_writes.resume_message)
    choose = _write_method(tree_writes.choose)
    remove_summary = _write_method(tree_writes.remove_summary)
    trash_chat = _write_method(tree_writes.trash_chat)
    trash_chats = _write_method(tree_writes.trash_chats)
    trash_messages = _write_method(tree_writes.trash_messages)
    trash_message = _write_method(tree_writes.trash_message)
    rate_message = _write_method(tree_writes.rate_message)
    restore = _write_method(tree_writes.restore)
    keep_html = _write_method(tree_writes.keep_html)
    save_response = _write_method(save_response)
    save_memory = _write_method(save_memory)
    add_share = _write_method(add_share)

    async def memories(self, owner: str) -> list[Memory]:
        return [Memory(**row) for row in await self.read(owner, _MEMORIES, owner)]

    async def chat_base(self, owner: str, project: str = "") -> ChatDefaults:
        def read(db: Database) -> ChatDefaults:
            with db.snapshot():
                return _query_defaults(db, owner)(project)

        return await self.run_read(read, owner)

    async def update_chat(self, owner: str, chat_id: str, **changes: Any) -> bool:
        names = [name for name in CHAT_FIELDS if name in changes]
        assigned = ", ".join(f"{name} = ?" for name in names)
        values = [stored_value(changes[name]) for name in names]

        def write(db: Database) -> bool:
            found = db.execute(f"UPDATE chats SET {assigned} WHERE id = ? AND owner = ?", (*values, chat_id, owner))
            if found.rowcount and "title" in changes:
                db.index_title(owner, chat_id, changes["title"])
            return found.rowcount > 0

        return await self.write(write, owner)

    async def change_settings(self, owner: str, chat_id: str, change: SettingsChange) -> bool:
        def write(db: Database) -> bool:
            condition = "id = ? AND owner = ? AND trash_id IS NULL"
            return change_row_settings(db, "chats", condition, (chat_id, owner), change)

        return await self.write(write, owner)

    async def expired_temporary_chats(self, before_ms: int) -> list[tuple[str, str]]:
        sql = "SELECT owner, id FROM chats WHERE temporary AND trash_id IS NULL AND updated_ms < ?"
        rows = await self.read("", sql, before_ms)
        return [(row["owner"], row["id"]) for row in rows]

    async def prompts(self, owner: str) -> list[SavedPrompt]:
        rows = await self.read(owner, "SELECT name, kind, text FROM prompts WHERE owner = ? ORDER BY name", owner)
        return [SavedPrompt(**row) for row in rows]

    async def save_prompt(self, owner: str, prompt: SavedPrompt) -> None:
        sql = (
            "INSERT INTO prompts (owner, name, kind, text) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (owner, name) DO UPDATE SET kind = excluded.kind, text = excluded.text"
        )
        await self.change(owner, sql, owner, prompt.name, prompt.kind, prompt.text)

    async def defaults(self, owner: str) -> dict[str, SettingValue]:
        rows = await self.read(owner, _DEFAULTS, owner)
        return load_settings(rows[0] if rows else None)

    async def change_defaults(self, owner: str, change: SettingsChange) -> None:
        def write(db: Database) -> None:
            db.execute("INSERT INTO preferences (owner, settings) VALUES (?, '{}') ON CONFLICT DO NOTHING", (owner,))
            change_row_settings(db, "preferences", "owner = ?", (owner,), change)

        await self.write(write, owner)

    async def purge(self, seconds: float) -> int:
        old = await self.write(lambda db: tree_writes.due_trash_ids(db, self._trash_seen, seconds))
        for trash_id in old:
            while await self.write(partial(tree_writes.purge_piece, trash_id=trash_id)):
                pass
        return len(old)

    async def add_chat(self, owner: str, chat: Chat, messages: Sequence[StoredMessage]) -> None:
        await self.add_chats(owner, [(chat, messages)])

    async def add_chats(self, owner: str, chats: Sequence[tuple[Chat, Sequence[StoredMessage]]]) -> None:
        items: Iterator[Chat | StoredMessage] = itertools.chain.from_iterable(
            (chat, *messages) for chat, messages in chats
        )
        pieces = tree_writes.split_into_chunks(items)
        first, second = next(pieces), next(pieces, None)
        if second is None:
            await self._add(lambda db: tree_writes.add_piece(db, owner, first), owner)
            return
        trash_id = await self._add(lambda db: tree_writes.add_hidden_piece(db, owner, first, None), owner)
        renewed = time.monotonic()
        for piece in itertools.chain([second], pieces):
            add = partial(tree_writes.add_hidden_piece, owner=owner, piece=piece, trash_id=trash_id)
            trash_id = await self.write(add, owner)
            if time.monotonic() - renewed > RENEW_SECONDS:
                trash_id = await self.write(partial(tree_writes.renew_trash_id, owner=owner, trash_id=trash_id), owner)
                renewed = time.monotonic()
        if not await self.write(lambda db: tree_writes.restore(db, owner, trash_id), owner):
            raise StorageError(tree_writes.TOO_SLOW)

    async def shares(self, owner: str, chat_id: str, now_ms: int) -> list[ShareLink]:
        sql = f"SELECT {_SHARE} FROM shares WHERE chat_id = ? AND owner = ? AND expires_ms > ? ORDER BY created_ms DESC"
        return [ShareLink(**row) for row in await self.read(owner, sql, chat_id, owner, now_ms)]

    async def delete_share(self, owner: str, chat_id: str, share_id: str) -> bool:
        sql = "DELETE FROM shares WHERE id = ? AND chat_id = ? AND owner = ?"
        return await self.change(owner, sql, share_id, chat_id, owner)

    async def shared(self, share_id: str, now_ms: int) -> ShareLink | None:
        sql = (
            f"SELECT {_SHARE} FROM shares WHERE id = ? AND expires_ms > ? AND EXISTS (SELECT 1 FROM chats"
            " WHERE chats.id = chat_id AND chats.owner = shares.owner AND trash_id IS NULL AND NOT temporary)"
        )
        rows = await self.read("", sql, share_id, now_ms)
        return ShareLink(**rows[0]) if rows else None

    async def earlier_imports(self, owner: str, sources: Sequence[str]) -> dict[str, EarlierImport]:
        found: dict[str, EarlierImport] = {}
        for at in range(0, len(sources), SOURCES_AT_ONCE):
            part = sources[at : at + SOURCES_AT_ONCE]
            found |= await self.run_read(partial(tree_writes.load_earlier_imports, owner=owner, sources=part), owner)
        return found

    async def add_messages(self, owner: str, messages: Sequence[StoredMessage]) -> None:
        for piece in tree_writes.split_into_chunks(messages):
            await self._add(partial(tree_writes.add_piece, owner=owner, piece=piece), owner)

    async def save_message(
        self, assistant_message: StoredMessage, owner: str = "", trace: AnswerTrace | None = None
    ) -> None:
        await self.write(lambda db: tree_writes.save_message(db, assistant_message, trace), owner)

    async def trace(self, owner: str, message_id: str) -> AnswerTrace | None:
        sql = (
            "SELECT answer_traces.* FROM answer_traces JOIN messages ON messages.id = message_id"
            " WHERE message_id = ? AND owner = ?"
        )
        rows = await self.read(owner, sql, message_id, owner)
        return trace_from_row(rows[0]) if rows else None

    async def response(self, owner: str, response_id: str) -> StoredResponse | None:
        rows = await self.read(owner, "SELECT * FROM responses WHERE id = ? AND owner = ?", response_id, owner)
        return response_from_row(rows[0]) if rows else None

    async def delete(self, owner: str, kind: Deletable, key: str) -> bool:
        def work(db: Database) -> bool:
            if kind == "response":
                mark_stale(db, "responses WHERE id = ? AND owner = ?", key, owner)
            return db.execute(_DELETE[kind], (key, owner)).rowcount > 0

        return await self.write(work, owner)

    async def remove_owner(self, owner: str) -> bool:
        await self.write(lambda db: mark_owner_caches_stale(db, owner))
        found = False
        for library in await self.documents.libraries(owner):
            if library.rights == "own":
                found |= await self.documents.delete_library(owner, library.id)
        while await self.write(lambda db: remove_piece(db, owner)):
            found = True
        while await self.write(lambda db: db.merge_index()):
            pass
        return found

    async def _add(self, write: Callable[[Database], T], owner: str) -> T:
        most = self.max_stored_characters(owner)

        def write_within_limit(db: Database) -> T:
            # Send the query before the write and read the result after it, to save a round trip.
            stored = db.execute(_STORED_SIZE, (owner,)) if most else None
            result = write(db)
            if stored is not None and stored.fetchone()["n"] >= most and not getattr(result, "repeated", False):
                raise StorageFullError(
                    Sentence(
                        f"your chats have reached the limit of {most:,} characters: delete some and try again",
                        "storage_quota",
                        limit=most,
                    )
                )
            return result

        return await self.write(write_within_limit, owner)


def _search(db: Database, owner: str, query: str, terms: list[Term], limit: int) -> list[SearchHit]:
    rows = db.find(owner, terms, limit)
    similar = None
    if not rows and (similar := similar_terms(terms, db.vocabulary(owner))):
        terms, rows = similar, db.find(owner, similar, limit)
    return [
        SearchHit(
            row["chat_id"],
            row["message_id"],
            row["title"],
            extract_snippet(row["text"], query, terms),
            at_ms=row["at_ms"],
            similar=similar is not None,
        )
        for row in rows
    ]


def _shown_path_of(snapshot: ChatSnapshot | None, through: str | None) -> list[ShownMessage]:
    return shown_path(snapshot.messages, snapshot.chat.chosen_root, through) if snapshot is not None else []


def _branch_of(snapshot: ChatSnapshot | None, last: str | None) -> Branch | None:
    if snapshot is None:
        return None
    messages = snapshot.messages
    line = branch(messages, snapshot.chat.chosen_root) if last is None else path_to(messages, last)
    return Branch(snapshot.chat, snapshot.base, tuple(line), line[0].id if line else None)


def _query_chat_and_defaults(db: Database, owner: str, chat_id: str) -> Callable[[], tuple[Chat | None, ChatDefaults]]:
    # Send all statements before reading a result, so that PostgreSQL needs only one round trip (two if the chat is in a
    # project).
    chat, base = db.execute(_CHAT, (chat_id, owner)), _query_defaults(db, owner)

    def found() -> tuple[Chat | None, ChatDefaults]:
        row = chat.fetchone()
        return (chat_from_row(row) if row is not None else None), base(row["project"] if row is not None else "")

    return found


def _query_defaults(db: Database, owner: str) -> Callable[[str], ChatDefaults]:
    defaults, memories = db.execute(_DEFAULTS, (owner,)), db.execute(_MEMORIES, (owner,))

    def found(project_id: str) -> ChatDefaults:
        settings, texts = load_settings(defaults.fetchone()), tuple(row["text"] for row in memories.fetchall())
        project = load_project(db, owner, project_id)
        return ChatDefaults(settings | dict(project.settings if project is not None else {}), project, texts)

    return found


def response_from_row(row: Any) -> StoredResponse:
    messages = tuple(_message(entry) for entry in json.loads(row["conversation"]))
    body, items = json.loads(row["body"]), tuple(json.loads(row["input"]))
    return StoredResponse(row["id"], row["previous_id"], body, messages, row["created_ms"], items)


def _message(entry: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in entry.pop("tool_calls"))
    return Message(**entry, tool_calls=calls)
