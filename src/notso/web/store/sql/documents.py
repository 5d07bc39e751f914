"""Implement DocumentStore in SQL."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, fields, replace
from datetime import date
from typing import Any

from notso.documents.citations import find_marked_quotes, matches_when_folded, revision_of
from notso.documents.passages import Passage, page_at, split_into_passages
from notso.documents.values import READER_VERSION, Document
from notso.web.store.documents import (
    EVERYONE,
    MAX_DOCUMENT_BYTES_OF_OWNER,
    MAX_DOCUMENTS_OF_OWNER,
    MAX_HITS,
    MAX_LIBRARIES_OF_OWNER,
    MAX_MEMBERS,
    PARSING_SECONDS,
    RETRY_SECONDS,
    Citation,
    DocumentText,
    Library,
    Member,
    PassageHit,
    StaleCache,
    StoredDocument,
)
from notso.web.store.protocol import StoredMessage
from notso.web.store.records import PART_BYTES
from notso.web.store.sql.database import Database, Transactions, placeholders
from notso.web.store.sql.passage_index import TextIndex, WordPostings, index_text, query_words, rank_passages
from notso.web.store.sql.rows import change_row_settings
from notso.web.values.durations import current_ms
from notso.web.values.errors import Sentence, StorageError, StorageFullError
from notso.web.values.ids import new_id

# Records of stale caches in a shared database are deleted after this time. If a server has been down for longer, its
# disk cache must be cleared manually.
STALE_DAYS = 30
# Records of stale caches are numbered before they are committed, so a lower number may become visible after a higher
# one. Therefore, each query for records starts this far below the highest number whose cache has been cleared.
COMMIT_SPREAD = 1000
ROWS_AT_ONCE = 200

DOCUMENT_COLUMNS = tuple(each.name for each in fields(StoredDocument))
LIBRARY_COLUMNS = tuple(each.name for each in fields(Library) if each.name != "rights")
MEMBER_COLUMNS = ("library_id", *(each.name for each in fields(Member)))
_LIBRARY = ", ".join(f"libraries.{name}" for name in LIBRARY_COLUMNS)
_DOCUMENT = ", ".join(f"documents.{name}" for name in DOCUMENT_COLUMNS)
_IN_ORDER = "ORDER BY documents.created_ms, documents.id"
_READABLE = f"SELECT library_id FROM library_readers WHERE reader IN (?, '{EVERYONE}')"
_OWN = "library_id IN (SELECT id FROM libraries WHERE owner = ?)"
_ADDABLE = "SELECT library_id FROM library_readers WHERE reader = ? AND rights <> 'read'"
_REREADABLE = "state = 'ready' AND reader < ? AND held_until_ms BETWEEN 0 AND ?"
_OUTDATED = "state = 'ready' AND held_until_ms < 0"
_STALE = "INSERT INTO stale_caches (owner, conversation, scope, reading, since_ms)"
# The condition `project <> ''` lets the database use a partial index.
_IN_PROJECT = "SELECT id AS chat_id FROM chats WHERE project = ? AND project <> ''"
DELETED_AT_ONCE = 20  # documents per transaction


class SQLDocuments:
    def __init__(self, store: Transactions) -> None:
        self._store = store
        self.queued = asyncio.Event()
        self._cleared: set[int] = set()

    async def library(self, owner: str, name: str) -> Library:
        def work(db: Database) -> Library:
            _create(db, owner, name)
            row = db.execute(f"SELECT {_LIBRARY} FROM libraries WHERE owner = ? AND name = ?", (owner, name)).fetchone()
            return _library(row)

        return await self._store.write(work, owner)

    async def new_library(self, owner: str, name: str) -> Library | None:
        def work(db: Database) -> Library | None:
            owned = db.execute("SELECT count(*) AS n FROM libraries WHERE owner = ?", (owner,)).fetchone()
            return _create(db, owner, name) if owned["n"] < MAX_LIBRARIES_OF_OWNER else None

        return await self._store.write(work, owner)

    async def libraries(self, owner: str) -> list[Library]:
        sql = (
            f"SELECT {_LIBRARY}, rights FROM libraries JOIN library_readers ON library_id = libraries.id"
            f" WHERE reader IN (?, '{EVERYONE}') ORDER BY created_ms, libraries.id"
        )
        found = await self._store.run_read(lambda db: [_library(row) for row in db.execute(sql, (owner,))], owner)
        return [replace(each, rights="read") if each.owner == EVERYONE != owner else each for each in found]

    async def change_library(self, owner: str, library_id: str, **changes: Any) -> bool:
        values = {name: changes[name] for name in ("name", "instructions") if name in changes}
        assigned = ", ".join(f"{name} = ?" for name in values)

        def work(db: Database) -> bool:
            if "name" in values:
                taken = "SELECT 1 AS one FROM libraries WHERE owner = ? AND name = ? AND id <> ?"
                if db.execute(taken, (owner, values["name"], library_id)).fetchone() is not None:
                    return False
            own = (library_id, owner)
            if "settings" in changes and not change_row_settings(
                db, "libraries", "id = ? AND owner = ?", own, changes["settings"]
            ):
                return False
            sql = f"UPDATE libraries SET {assigned} WHERE id = ? AND owner = ?"
            return not values or db.execute(sql, (*values.values(), *own)).rowcount > 0

        return await self._store.write(work, owner)

    async def delete_library(self, owner: str, library_id: str) -> bool:
        own = "SELECT 1 AS one FROM libraries WHERE id = ? AND owner = ?"

        def detach_chats(db: Database) -> None:
            if db.execute(own, (library_id, owner)).fetchone() is not None:
                _mark_chats_stale(db, _IN_PROJECT, library_id)
                db.execute("UPDATE chats SET project = '' WHERE project = ? AND project <> ''", (library_id,))

        def delete_some(db: Database) -> bool | None:
            # Deletes some documents and returns None. If there are none, deletes the library and returns whether it
            # existed.
            sql = f"SELECT id FROM documents WHERE library_id = ? AND {_OWN} LIMIT {DELETED_AT_ONCE}"
            rows = db.execute(sql, (library_id, owner)).fetchall()
            for row in rows:
                _delete(db, owner, row["id"])
            if rows:
                return None
            return db.execute("DELETE FROM libraries WHERE id = ? AND owner = ?", (library_id, owner)).rowcount > 0

        await self._store.write(detach_chats, owner)
        while (deleted := await self._store.write(delete_some, owner)) is None:
            pass
        return deleted

    async def members(self, owner: str, library_id: str) -> list[Member]:
        sql = f"SELECT member, name, rights FROM library_members WHERE library_id = ? AND {_OWN} ORDER BY name, member"
        return await self._store.run_read(
            lambda db: [Member(**row) for row in db.execute(sql, (library_id, owner))], owner
        )

    async def set_member(self, owner: str, library_id: str, member: Member) -> bool:
        def work(db: Database) -> bool:
            sql = f"DELETE FROM library_members WHERE library_id = ? AND member = ? AND {_OWN}"
            db.execute(sql, (library_id, member.member, owner))
            sql = (
                f"INSERT INTO library_members ({', '.join(MEMBER_COLUMNS)}) SELECT id, ?, ?, ? FROM libraries"
                " WHERE id = ? AND owner = ? AND owner <> ?"
                " AND (SELECT count(*) FROM library_members WHERE library_id = ?) < ?"
            )
            values = (*astuple(member), library_id, owner, member.member, library_id, MAX_MEMBERS)
            return db.execute(sql, values).rowcount > 0

        return await self._store.write(work, owner)

    async def remove_member(self, owner: str, library_id: str, member: str) -> bool:
        sql = f"DELETE FROM library_members WHERE library_id = ? AND member = ? AND (member = ? OR {_OWN})"
        return await self._store.change(owner, sql, library_id, member, owner, owner)

    async def move_chat(self, owner: str, chat_id: str, library_id: str) -> bool:
        def work(db: Database) -> bool:
            sql = (
                "UPDATE chats SET project = ? WHERE id = ? AND owner = ? AND project <> ? AND trash_id IS NULL"
                f" AND ('' = ? OR ? IN ({_READABLE}))"
            )
            moved = db.execute(sql, (library_id, chat_id, owner, library_id, library_id, library_id, owner)).rowcount
            if moved:  # the chat's prompts now start with other documents, so its KV cache is stale
                _mark_chats_stale(db, "SELECT id AS chat_id FROM chats WHERE id = ?", chat_id)
            same = "SELECT 1 AS one FROM chats WHERE id = ? AND owner = ? AND project = ?"
            return moved > 0 or db.execute(same, (chat_id, owner, library_id)).fetchone() is not None

        return await self._store.write(work, owner)

    async def add(
        self, owner: str, library_id: str, name: str, content: bytes, *, document_id: str = ""
    ) -> StoredDocument:
        digest = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
        now = current_ms()
        day = date.today().isoformat()
        document = StoredDocument(document_id or new_id(), library_id, name, digest, len(content), now, day)

        def work(db: Database) -> StoredDocument:
            stored = db.execute(
                "SELECT count(*) AS n, coalesce(sum(size), 0) AS bytes FROM documents WHERE library_id IN"
                " (SELECT id FROM libraries WHERE owner = (SELECT owner FROM libraries WHERE id = ?))",
                (library_id,),
            ).fetchone()
            existing = db.execute(
                f"SELECT {_DOCUMENT} FROM documents WHERE library_id = ? AND (sha256 = ? OR id = ?)"
                f" AND library_id IN ({_ADDABLE})",
                (library_id, digest, document.id, owner),
            ).fetchone()
            if existing is not None and existing["state"] == "failed":
                # Parsing may succeed now, because the new name may reveal the kind of file, or the extra `documents`
                # may have been installed.
                again = replace(StoredDocument(**existing), name=name, state="queued", reason="")
                sql = "UPDATE documents SET name = ?, state = 'queued', reason = '' WHERE id = ?"
                db.execute(sql, (name, again.id))
                return again
            if existing is not None:
                return StoredDocument(**existing)
            if stored["n"] >= MAX_DOCUMENTS_OF_OWNER or stored["bytes"] + document.size > MAX_DOCUMENT_BYTES_OF_OWNER:
                raise StorageFullError(
                    Sentence(
                        f"the limit per user is {MAX_DOCUMENTS_OF_OWNER:,} documents with"
                        f" {MAX_DOCUMENT_BYTES_OF_OWNER:,} bytes in total; delete some",
                        "storage_documents",
                        documents=MAX_DOCUMENTS_OF_OWNER,
                        bytes=MAX_DOCUMENT_BYTES_OF_OWNER,
                    )
                )
            names = ("id", "library_id", "name", "sha256", "size", "created_ms", "reading_day", "state")
            added = db.execute(
                f"INSERT INTO documents ({', '.join(names)}) SELECT {placeholders(names)} WHERE ? IN ({_ADDABLE})",
                (*(getattr(document, each) for each in names), library_id, owner),
            )
            if not added.rowcount:
                raise StorageError("the library does not exist, or documents may not be added to it")
            for part, start in enumerate(range(0, len(content), PART_BYTES)):
                db.execute(
                    "INSERT INTO document_parts (document_id, part, content) VALUES (?, ?, ?)",
                    (document.id, part, content[start : start + PART_BYTES]),
                )
            return document

        added = await self._store.write(work, owner)
        self.queued.set()
        return added

    async def documents(self, owner: str, library_id: str | None = None) -> list[StoredDocument]:
        where, parameters = ("", ()) if library_id is None else (" AND library_id = ?", (library_id,))
        sql = f"SELECT {_DOCUMENT} FROM documents WHERE library_id IN ({_READABLE}){where} {_IN_ORDER}"
        return await self._store.run_read(lambda db: _documents(db, sql, (owner, *parameters)), owner)

    async def some(self, owner: str, document_ids: Sequence[str]) -> list[StoredDocument]:
        if not document_ids:
            return []
        return await self._store.run_read(lambda db: _documents_by_id(db, owner, document_ids), owner)

    async def content(self, owner: str, document_id: str) -> bytes:
        sql = (
            "SELECT content FROM document_parts JOIN documents ON documents.id = document_id"
            f" WHERE document_id = ? AND library_id IN ({_READABLE}) ORDER BY part"
        )
        rows = await self._store.read(owner, sql, document_id, owner)
        return b"".join(bytes(row["content"]) for row in rows)

    async def text(self, owner: str, document_id: str) -> DocumentText | None:
        def work(db: Database) -> DocumentText | None:
            return load_text(db, document_id) if _documents_by_id(db, owner, [document_id]) else None

        return await self._store.run_read(work, owner)

    async def search(
        self,
        owner: str,
        query: str,
        limit: int,
        *,
        document_ids: Sequence[str] | None = None,
        library_id: str | None = None,
    ) -> list[PassageHit]:
        words = query_words(query)
        if not words or (document_ids is not None and not document_ids):
            return []
        condition: tuple[str, tuple[str, ...]] = ("", ())
        if document_ids is not None:
            condition = (f" AND documents.id IN ({placeholders(document_ids)})", tuple(document_ids))
        elif library_id is not None:
            condition = (" AND documents.library_id = ?", (library_id,))

        outdated = f"library_id IN ({_READABLE}){condition[0]} AND {_REREADABLE}"
        values: tuple[str | int, ...] = (owner, *condition[1], READER_VERSION, current_ms())

        def work(db: Database) -> tuple[list[PassageHit], bool]:
            with db.snapshot():
                found = db.execute(f"SELECT 1 AS one FROM documents WHERE {outdated} LIMIT 1", values).fetchone()
                return _search(db, owner, words, min(limit, MAX_HITS), *condition), found is not None

        hits, has_outdated = await self._store.run_read(work, owner)
        if has_outdated and not self._store.read_only:
            with suppress(StorageError):  # a search succeeds even if the disk is full
                await self._store.change(owner, f"UPDATE documents SET held_until_ms = -1 WHERE {outdated}", *values)
                self.queued.set()
        return hits

    async def retry(self, owner: str, document_id: str) -> bool:
        sql = "UPDATE documents SET state = 'queued', reason = '' WHERE id = ? AND state = 'failed'"
        sql += f" AND library_id IN ({_ADDABLE})"
        is_queued = await self._store.change(owner, sql, document_id, owner)
        self.queued.set()
        return is_queued

    async def delete(self, owner: str, document_id: str) -> bool:
        return await self._store.write(lambda db: _delete(db, owner, document_id), owner)

    async def claim(self, now_ms: int) -> tuple[StoredDocument, bytes] | None:
        def work(db: Database) -> tuple[StoredDocument, bytes] | None:
            new = "state = 'queued' OR (state = 'parsing' AND held_until_ms < ?)"
            for condition, values in ((new, (now_ms,)), (_OUTDATED, ())):
                sql = f"SELECT {_DOCUMENT} FROM documents WHERE {condition} {_IN_ORDER} LIMIT 1{db.for_update}"
                row = db.execute(sql, values).fetchone()
                if row is not None:
                    break
            else:
                return None
            until = now_ms + int(1000 * PARSING_SECONDS)
            state = "ready" if row["state"] == "ready" else "parsing"
            db.execute("UPDATE documents SET state = ?, held_until_ms = ? WHERE id = ?", (state, until, row["id"]))
            rows = db.execute("SELECT content FROM document_parts WHERE document_id = ? ORDER BY part", (row["id"],))
            return StoredDocument(**row), b"".join(bytes(row["content"]) for row in rows.fetchall())

        return await self._store.write(work)

    async def requeue(self) -> None:
        sql = "UPDATE documents SET state = 'queued' WHERE state = 'parsing'"
        await self._store.change("", sql)

    async def reread(self, document_ids: Sequence[str]) -> None:
        sql = f"UPDATE documents SET held_until_ms = -1 WHERE id IN ({placeholders(document_ids)}) AND {_REREADABLE}"
        await self._store.change("", sql, *document_ids, READER_VERSION, current_ms())
        self.queued.set()

    async def finish(self, document_id: str, document: Document) -> bool:
        def pack() -> tuple[TextIndex, bytes]:
            passages = tuple(split_into_passages(document.text, document.pages))
            return index_text(document.text, passages), zlib.compress(document.text.encode())

        index, text = await asyncio.to_thread(pack)
        columns = (document.kind, " ".join(document.warnings), len(document.pages), len(document.text))

        def work(db: Database) -> bool:
            updated = db.execute(
                "UPDATE documents SET state = 'ready', reason = '', kind = ?, note = ?, pages = ?, characters = ?,"
                " reader = ? WHERE id = ? AND (state = 'parsing' OR (state = 'ready' AND reader < ?))",
                (*columns, READER_VERSION, document_id, READER_VERSION),
            )
            if not updated.rowcount:
                return False
            _delete_text(db, document_id)
            db.execute(
                "INSERT INTO document_texts (document_id, text, pages, passages) VALUES (?, ?, ?, ?)",
                (document_id, text, json.dumps(document.pages), json.dumps([astuple(each) for each in index.passages])),
            )
            _index_words(db, document_id, index)
            return True

        return await self._store.write(work)

    async def fail(self, document_id: str, reason: str, *, is_passing: bool = False) -> None:
        def work(db: Database) -> None:
            sql = "UPDATE documents SET state = 'failed', reason = ? WHERE id = ? AND state = 'parsing'"
            db.execute(sql, (reason, document_id))
            # If only a newer reader fails, keep the older text, and try again only if the cause may be temporary.
            column, value = "reader", READER_VERSION
            if is_passing:
                column, value = "held_until_ms", current_ms() + int(1000 * RETRY_SECONDS)
            db.execute(f"UPDATE documents SET {column} = ? WHERE id = ? AND state = 'ready'", (value, document_id))

        await self._store.write(work)

    async def record_reading(self, scope: str, name: str, document_ids: Sequence[str]) -> None:
        sql = (
            "INSERT INTO readings (scope, name, document_id) SELECT ?, ?, id FROM documents WHERE id = ?"
            " ON CONFLICT DO NOTHING"
        )

        def work(db: Database) -> None:
            for each in document_ids:
                db.execute(sql, (scope, name, each))

        await self._store.write(work)

    async def stale(self) -> list[StaleCache]:
        since = max(self._cleared, default=0) - COMMIT_SPREAD
        sql = "SELECT number, owner, conversation, scope, reading FROM stale_caches WHERE number > ? ORDER BY number"
        rows = await self._store.read("", sql, since)
        return [StaleCache(**row) for row in rows if row["number"] not in self._cleared]

    async def mark_cleared(self, caches: Sequence[StaleCache]) -> None:
        if not self._store.is_shared:
            sql = "DELETE FROM stale_caches WHERE number <= ?"
            await self._store.change("", sql, max(each.number for each in caches))
            return
        self._cleared.update(each.number for each in caches)
        self._cleared = {each for each in self._cleared if each > max(self._cleared) - 2 * COMMIT_SPREAD}
        before = current_ms() - STALE_DAYS * 86_400_000
        await self._store.change("", "DELETE FROM stale_caches WHERE since_ms < ?", before)


def reindex_document(db: Database, document_id: str) -> None:
    """Index a document that was copied from another database."""
    text = load_text(db, document_id)
    if text is not None:
        # Index the stored passages, because this release may split the text differently.
        _index_words(db, document_id, index_text(text.text, text.passages))


def verify_citations(db: Database, owner: str, message: StoredMessage) -> StoredMessage:
    """Return an answer with verified citations.

    A document is removed from its citation if the owner cannot read it, its text has changed, or the text lacks the
    quotation.
    """
    if not message.citations:
        return message
    readable = {each.id: each for each in _documents_by_id(db, owner, [each.document for each in message.citations])}
    texts = {each: text for each in readable if (text := load_text(db, each)) is not None}
    revisions = {each: revision_of(text.text) for each, text in texts.items()}
    marks = {each.start: each for each in find_marked_quotes(message.content)}
    verified = []
    for each in message.citations:
        mark, text = marks.get(each.at), texts.get(each.document)
        if (
            mark is None
            or text is None
            or mark.end != each.to
            or revisions[each.document] != each.revision
            or not matches_when_folded(text.text, each.start, each.end, mark.words)
        ):
            verified.append(Citation(each.at, each.to))
            continue
        page = page_at(text.pages, each.start) if len(text.pages) > 1 else 0
        verified.append(replace(each, page=page, name=readable[each.document].name))
    return replace(message, citations=tuple(verified))


def _remove_citations(db: Database, document_id: str) -> None:
    rows = db.execute(
        "SELECT id, citations FROM messages WHERE citations LIKE ? AND chat_id IN"
        " (SELECT chat_id FROM chat_documents WHERE document_id = ?)",
        (f'%"{document_id}"%', document_id),
    ).fetchall()
    for row in rows:
        remaining = [each for each in json.loads(row["citations"]) if each["document"] != document_id]
        db.execute("UPDATE messages SET citations = ? WHERE id = ?", (json.dumps(remaining), row["id"]))


def _index_words(db: Database, document_id: str, index: TextIndex) -> None:
    db.execute(
        "UPDATE documents SET passages = ?, words = ? WHERE id = ?", (len(index.passages), index.words, document_id)
    )
    numbers = db.execute(
        "SELECT documents.number AS document, libraries.number AS library FROM documents"
        " JOIN libraries ON libraries.id = library_id WHERE documents.id = ?",
        (document_id,),
    ).fetchone()
    rows = sorted(index.postings.items())
    for at in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[at : at + ROWS_AT_ONCE]
        marks = ", ".join(["(?, ?, ?, ?)"] * len(some))
        values = [each for word, places in some for each in (numbers["library"], word, numbers["document"], places)]
        db.execute(f"INSERT INTO document_words (library, word, document, places) VALUES {marks}", values)


def _search(
    db: Database, owner: str, words: Sequence[str], limit: int, condition: str, ids: tuple[str, ...]
) -> list[PassageHit]:
    totals = db.execute(
        "SELECT coalesce(sum(passages), 0) AS passages, coalesce(sum(words), 0) AS words FROM documents"
        f" WHERE library_id IN ({_READABLE}){condition}",
        (owner, *ids),
    ).fetchone()
    rows = db.execute(
        "SELECT word, documents.id AS document, sha256, places FROM document_words"
        " JOIN documents ON documents.number = document_words.document"
        f" WHERE library IN (SELECT number FROM libraries WHERE id IN ({_READABLE}))"
        f" AND word IN ({placeholders(words)}){condition}",
        (owner, *words, *ids),
    )
    postings = (WordPostings(row["word"], row["document"], row["sha256"], bytes(row["places"])) for row in rows)
    best = rank_passages(postings, int(totals["passages"]), int(totals["words"]))[:limit]
    documents = {each.id: each for each in _documents_by_id(db, owner, [document for document, _, _ in best])}
    texts = {each: load_text(db, each) for each in documents}
    hits = []
    for document, number, score in best:
        text = texts[document]
        if text is not None:
            passage = text.passages[number]
            part = text.text[passage.start : passage.end]
            hits.append(PassageHit(documents[document], number, passage.page, passage.start, part, score))
    return hits


def _delete(db: Database, owner: str, document_id: str) -> bool:
    row = db.execute(
        f"SELECT library_id FROM documents WHERE id = ? AND {_OWN}{db.for_update}", (document_id, owner)
    ).fetchone()
    if row is None:
        return False
    now = current_ms()
    chats = f"SELECT chat_id FROM chat_documents WHERE document_id = ? UNION {_IN_PROJECT}"
    _mark_chats_stale(db, chats, document_id, row["library_id"])
    readings = db.execute("SELECT scope, name FROM readings WHERE document_id = ?", (document_id,)).fetchall()
    for each in readings:
        db.execute(f"{_STALE} VALUES ('', '', ?, ?, ?)", (each["scope"], each["name"], now))
        db.execute("DELETE FROM readings WHERE scope = ? AND name = ?", (each["scope"], each["name"]))
    _remove_citations(db, document_id)
    _delete_text(db, document_id)
    for table in ("chat_documents", "document_parts"):
        db.execute(f"DELETE FROM {table} WHERE document_id = ?", (document_id,))
    db.execute("DELETE FROM documents WHERE id = ?", (document_id,))
    return True


def _delete_text(db: Database, document_id: str) -> None:
    number = "(SELECT number FROM documents WHERE id = ?)"
    db.execute(f"DELETE FROM document_words WHERE document = {number}", (document_id,))
    db.execute("DELETE FROM document_texts WHERE document_id = ?", (document_id,))


def mark_stale(db: Database, conversations: str, *values: str) -> None:
    """Record that engines must clear the caches of conversations (rows with `id` and `owner`)."""
    db.execute(f"{_STALE} SELECT owner, id, '', '', {current_ms()} FROM {conversations}", values)


def _mark_chats_stale(db: Database, chats: str, *values: str) -> None:
    # SQLite does not reorder a cross join. With an inner join, it would read the first messages of all chats.
    first_messages = "messages.chat_id = used.chat_id AND messages.parent_id IS NULL"
    mark_stale(db, f"({chats}) AS used CROSS JOIN messages WHERE {first_messages}", *values)


def _create(db: Database, owner: str, name: str) -> Library | None:
    library = Library(new_id(), owner, name, secrets.token_hex(16), current_ms())
    values = [_to_column(getattr(library, each)) for each in LIBRARY_COLUMNS]
    sql = f"INSERT INTO libraries ({', '.join(LIBRARY_COLUMNS)}) VALUES ({placeholders(values)}) ON CONFLICT DO NOTHING"
    return library if db.execute(sql, values).rowcount else None


def _library(row: Any) -> Library:
    return Library(**{**row, "settings": json.loads(row["settings"])})


def _to_column(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def load_project(db: Database, owner: str, library_id: str) -> Library | None:
    sql = f"SELECT {_LIBRARY} FROM libraries WHERE id = ? AND id IN ({_READABLE})"
    row = db.execute(sql, (library_id, owner)).fetchone() if library_id else None
    return _library(row) if row is not None else None


def _documents_by_id(db: Database, owner: str, document_ids: Iterable[str]) -> list[StoredDocument]:
    ids = tuple(dict.fromkeys(document_ids))
    if not ids:
        return []
    where = f"id IN ({placeholders(ids)}) AND library_id IN ({_READABLE})"
    sql = f"SELECT {_DOCUMENT} FROM documents WHERE {where} {_IN_ORDER}"
    return _documents(db, sql, (*ids, owner))


def _documents(db: Database, sql: str, parameters: tuple[str, ...]) -> list[StoredDocument]:
    return [StoredDocument(**row) for row in db.execute(sql, parameters)]


def load_text(db: Database, document_id: str) -> DocumentText | None:
    row = db.execute(
        "SELECT text, pages, passages FROM document_texts WHERE document_id = ?", (document_id,)
    ).fetchone()
    if row is None:
        return None
    passages = tuple(Passage(*each) for each in json.loads(row["passages"]))
    return DocumentText(zlib.decompress(bytes(row["text"])).decode(), tuple(json.loads(row["pages"])), passages)
