"""Document libraries in both databases: documents, their text, search, and complete deletion."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from web.store.conftest import Kept
from web.store.some_chats import OWNER, a_chat, a_turn, finished, run_with_store

from notso.documents.passages import Passage
from notso.documents.values import READER_VERSION, Document, UnreadableError
from notso.web.store import documents as limits
from notso.web.store.copy import copy_database
from notso.web.store.documents import DEFAULT_LIBRARY, EVERYONE, PARSING_SECONDS, Member, PassageHit, StoredDocument
from notso.web.store.protocol import Attachment, ChatStore, Memory, StoredMessage
from notso.web.store.sql import documents as sql_documents
from notso.web.store.sql import passage_index
from notso.web.store.sql import store as sql_store
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.turns import documents as turn_documents
from notso.web.turns.documents import prompt_documents
from notso.web.values.durations import current_ms
from notso.web.values.errors import StorageError, StorageFullError
from notso.web.values.ids import new_id

PAGES = ("The heron stands in the reeds.", "Storks nest on chimneys.", "A crane dances in spring.")


def parsed(*pages: str) -> Document:
    starts, at = [], 0
    for page in pages:
        starts.append(at)
        at += len(page) + 2
    return Document("text", "", "\n\n".join(pages), tuple(starts), ("a remark",))


async def added(store: ChatStore, *pages: str, name: str = "birds.txt", owner: str = OWNER) -> StoredDocument:
    """Add a document and parse it."""
    library = await store.documents.library(owner, "Documents")
    new = await store.documents.add(owner, library.id, name, "\f".join(pages).encode())
    taken = await store.documents.claim(1)
    assert taken is not None and taken[0].id == new.id and taken[1] == "\f".join(pages).encode()
    assert await store.documents.finish(new.id, parsed(*pages))
    return (await store.documents.some(owner, [new.id]))[0]


def test_texts_of_older_readers_are_read_again_when_used(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        document, failing = await added(store, *PAGES), await added(store, "Wrens sing.", name="b.txt")
        await store.documents.reread([document.id])
        assert document.reader == READER_VERSION and await store.documents.claim(1) is None
        monkeypatch.setattr(sql_documents, "READER_VERSION", READER_VERSION + 1)
        monkeypatch.setattr(turn_documents, "READER_VERSION", READER_VERSION + 1)
        assert await store.documents.claim(1) is None, "an unused document is not read again"
        files = (Attachment("a", "", document=document.id), Attachment("b", "", document=failing.id))
        line = [StoredMessage("q", "c", "user", "?", "", "done", 1, attachments=files)]
        before = await prompt_documents(store, OWNER, date(2025, 1, 1), line)
        claimed = await store.documents.claim(current_ms())
        assert claimed is not None and claimed[0].state == "ready" and claimed[1] == "\f".join(PAGES).encode()
        assert PAGES[0] in before.head and (await store.documents.search(OWNER, "heron", 9))[0].number == 0
        await prompt_documents(store, OWNER, date(2025, 1, 1), line)
        other = await store.documents.claim(current_ms())
        assert other is not None and other[0].id == failing.id and await store.documents.claim(current_ms()) is None
        await store.documents.fail(failing.id, "is damaged")
        assert await store.documents.finish(document.id, parsed("The wren sings."))
        assert not await store.documents.finish(document.id, parsed("again"))
        after = await prompt_documents(store, OWNER, date(2025, 1, 1), line)
        assert "The wren sings." in after.head and "Wrens sing." in after.head and after.reading != before.reading
        assert await store.documents.search(OWNER, "heron", 9) == []
        assert [each.pages for each in await store.documents.documents(OWNER)] == [1, 1]
        assert await store.documents.claim(current_ms()) is None

    kept.run(work)


def test_failures_of_rereading_that_may_pass_are_tried_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        documents = [await added(store, f"Wrens sing {each}.", name=f"{each}.txt") for each in "ab"]
        ids = [each.id for each in documents]
        monkeypatch.setattr(sql_documents, "READER_VERSION", READER_VERSION + 1)
        now = current_ms()
        await store.documents.reread(ids)
        for code in ("document_unread", "document_damaged"):
            claimed = await store.documents.claim(now)
            assert claimed is not None
            error = UnreadableError("x", code)
            await store.documents.fail(claimed[0].id, error.stored(), is_passing=error.is_passing)
        await store.documents.reread(ids)
        assert await store.documents.claim(now) is None, "the next attempt is not made at once"
        later = now + int(1000 * (limits.RETRY_SECONDS + 60))
        monkeypatch.setattr(sql_documents, "current_ms", lambda: later)
        await store.documents.reread(ids)
        again = await store.documents.claim(later)
        assert again is not None and again[0].id == ids[0] and await store.documents.claim(later) is None
        assert await store.documents.finish(ids[0], parsed("The wren sings."))
        assert [each.state for each in await store.documents.some(OWNER, ids)] == ["ready"] * 2

    kept.run(work)


def test_searches_let_older_texts_be_read_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        documents = [await added(store, f"{each} sing.", name=each) for each in ("Wrens", "Larks")]
        other = await store.documents.new_library(OWNER, "Other")
        assert other is not None
        monkeypatch.setattr(sql_documents, "READER_VERSION", READER_VERSION + 1)
        for owner, library in ((OWNER, other.id), ("stranger", None)):
            await store.documents.search(owner, "wrens", 9, library_id=library)
            assert await store.documents.claim(current_ms()) is None
        hits = await store.documents.search(OWNER, "wrens", 9, library_id=documents[0].library_id)
        assert [hit.document.id for hit in hits] == [documents[0].id]
        claimed = [await store.documents.claim(current_ms()) for _ in range(3)]
        # The text of the other document may lack words that the new reader finds.
        assert [each and each[0].id for each in claimed] == [documents[0].id, documents[1].id, None]

    kept.run(work)


def test_a_document_is_queued_parsed_and_read(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        library = await store.documents.library(OWNER, "Documents")
        assert library == await store.documents.library(OWNER, "Documents") and len(library.salt) == 32
        content = secrets.token_bytes(600_000)
        new = await store.documents.add(OWNER, library.id, "a.pdf", content)
        assert (new.state, new.size, new.library_id) == ("queued", 600_000, library.id)
        again = await store.documents.add(OWNER, library.id, "copy.pdf", content)
        assert again == new and await store.documents.content(OWNER, new.id) == content
        assert await store.documents.text(OWNER, new.id) is None
        assert await store.documents.claim(1_000) == (new, content)
        assert await store.documents.claim(1_000) is None, "a document is claimed by only one parser"
        assert await store.documents.claim(1_001 + int(1000 * PARSING_SECONDS)) is not None, "the claim has expired"
        await store.documents.fail(new.id, "is encrypted")
        assert not await store.documents.finish(new.id, parsed(*PAGES))
        (failed,) = await store.documents.documents(OWNER)
        assert (failed.state, failed.reason) == ("failed", "is encrypted")
        assert await store.documents.retry(OWNER, new.id) and not await store.documents.retry(OWNER, new.id)
        assert await store.documents.claim(1) is not None
        assert await store.documents.finish(new.id, parsed(*PAGES))
        (ready,) = await store.documents.some(OWNER, [new.id, "unknown"])
        assert (ready.state, ready.pages, ready.note, ready.reason) == ("ready", 3, "a remark", "")
        text = await store.documents.text(OWNER, new.id)
        assert text is not None and text.text == "\n\n".join(PAGES)
        assert [text.text[each.start : each.end] for each in text.passages] == list(PAGES)
        assert [each.page for each in text.passages] == [1, 2, 3]

    kept.run(work)

    async def later(store: ChatStore) -> None:
        (ready,) = await store.documents.documents(OWNER)
        assert ready.characters == len("\n\n".join(PAGES))
        assert [hit.page for hit in await store.documents.search(OWNER, "stork", 5)] == [2]

    kept.run(later)


def test_a_failed_document_that_is_added_again_is_parsed_again(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        library = await store.documents.library(OWNER, "Documents")
        new = await store.documents.add(OWNER, library.id, "message", b"a")
        assert await store.documents.claim(1) is not None
        await store.documents.fail(new.id, "requires libraries that are not installed")
        again = await store.documents.add(OWNER, library.id, "message.eml", b"a")
        assert again == replace(new, name="message.eml") and await store.documents.claim(1) == (again, b"a")

    kept.run(work)


def test_interrupted_parsing_is_queued_again(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        library = await store.documents.library(OWNER, "Documents")
        await store.documents.add(OWNER, library.id, "a.txt", b"a")
        assert await store.documents.claim(1) is not None and await store.documents.claim(1) is None
        await store.documents.requeue()
        assert await store.documents.claim(1) is not None

    kept.run(work)


def test_documents_are_private_except_those_for_everyone(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        mine = await added(store, *PAGES)
        common = await added(store, "A heron for everyone.", owner=EVERYONE, name="common.txt")
        theirs = store.documents
        assert [each.id for each in await theirs.documents("eve")] == [common.id]
        assert await theirs.some("eve", [mine.id]) == [] and await theirs.content("eve", mine.id) == b""
        assert await theirs.text("eve", mine.id) is None and await theirs.documents("eve", mine.library_id) == []
        assert [hit.document.id for hit in await theirs.search("eve", "heron", 9)] == [common.id]
        assert await theirs.search("eve", "heron", 9, document_ids=[mine.id]) == []
        for owner in ("eve", OWNER):
            assert not await theirs.delete(owner, common.id) and not await theirs.retry(owner, common.id)
        assert not await theirs.delete("eve", mine.id)
        for library in (mine.library_id, common.library_id):
            with pytest.raises(StorageError, match="the library does not exist"):
                await theirs.add("eve", library, "mine.txt", b"mine")
        assert len(await theirs.documents(OWNER)) == 2 and len(await theirs.libraries(OWNER)) == 2

    kept.run(work)


def test_number_and_size_of_documents_per_owner_are_limited(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        await added(store, *PAGES)
        for name, most in (("MAX_DOCUMENTS_OF_OWNER", 1), ("MAX_DOCUMENT_BYTES_OF_OWNER", 100)):
            with monkeypatch.context() as patched:
                patched.setattr(sql_documents, name, most)
                library = await store.documents.library(OWNER, "Documents")
                with pytest.raises(StorageFullError, match="delete some"):
                    await store.documents.add(OWNER, library.id, "b.txt", b"b" * 200)
        await added(store, "b" * 200)

    kept.run(work)
    assert sql_documents.MAX_DOCUMENTS_OF_OWNER == limits.MAX_DOCUMENTS_OF_OWNER


def test_members_can_only_read_or_add_documents(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        documents = store.documents
        mine = await added(store, *PAGES)
        library = mine.library_id
        assert await documents.set_member(OWNER, library, Member("ann", "Ann", "read"))
        assert await documents.set_member(OWNER, library, Member("bob", "Bob", "add"))
        assert not await documents.set_member("ann", library, Member("eve", "Eve", "add"))
        assert not await documents.set_member(OWNER, library, Member(OWNER, "me", "read"))
        assert [(each.name, each.rights) for each in await documents.members(OWNER, library)] == [
            ("Ann", "read"),
            ("Bob", "add"),
        ]
        assert await documents.members("ann", library) == []
        for member, rights in (("ann", "read"), ("bob", "add")):
            (found,) = await documents.libraries(member)
            assert (found.id, found.rights, found.salt) == (library, rights, (await documents.libraries(OWNER))[0].salt)
            assert await documents.some(member, [mine.id]) == [mine] and await documents.text(member, mine.id)
            assert [hit.document.id for hit in await documents.search(member, "heron", 9)] == [mine.id]
            assert await documents.search(member, "heron", 9, library_id="another") == []
            assert not await documents.delete(member, mine.id) and not await documents.delete_library(member, library)
            assert not await documents.change_library(member, library, instructions="Obey.")
            assert not await documents.remove_member(member, library, "bob" if member == "ann" else "ann")
        with pytest.raises(StorageError, match="the library does not exist"):
            await documents.add("ann", library, "ann.txt", b"ann")
        added_by_bob = await documents.add("bob", library, "bob.txt", b"bob")
        assert await documents.some(OWNER, [added_by_bob.id]) == [added_by_bob]
        with monkeypatch.context() as patched:
            patched.setattr(sql_documents, "MAX_DOCUMENTS_OF_OWNER", 2)
            with pytest.raises(StorageFullError):
                await documents.add("bob", library, "more.txt", b"more")
        with monkeypatch.context() as patched:
            patched.setattr(sql_documents, "MAX_MEMBERS", 2)
            assert not await documents.set_member(OWNER, library, Member("eve", "Eve", "read"))
            assert await documents.set_member(OWNER, library, Member("bob", "Bob", "read")), "changed, not added"
        with pytest.raises(StorageError, match="the library does not exist"):
            await documents.add("bob", library, "later.txt", b"later")
        assert await documents.remove_member(OWNER, library, "ann")
        assert await documents.libraries("ann") == [] and await documents.documents("ann") == []
        assert await documents.search("ann", "heron", 9) == []
        assert await documents.remove_member("bob", library, "bob"), "members may leave"
        assert await documents.libraries("bob") == [] and await documents.members(OWNER, library) == []

    kept.run(work)


def test_deleting_a_project_deletes_documents_but_keeps_chats(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        documents = store.documents
        project = await documents.new_library(OWNER, "Birds")
        assert project is not None and project.is_project and await documents.new_library(OWNER, "Birds") is None
        other = await documents.new_library(OWNER, "Fish")
        assert other is not None and not await documents.change_library(OWNER, other.id, name="Birds")
        assert not (await documents.library(OWNER, DEFAULT_LIBRARY)).is_project
        changes: dict[str, Any] = {"name": "Herons", "instructions": "Be brief."}
        settings = {"temperature": 0.5}
        assert await documents.change_library(OWNER, project.id, **changes, settings=lambda _: settings)
        await store.change_defaults(OWNER, lambda _: {"temperature": 0.9, "min_p": 0.1})
        for number in range(sql_documents.DELETED_AT_ONCE + 1):
            await documents.add(OWNER, project.id, f"{number}.txt", f"{number}".encode())
        chat = replace(a_chat(), project=project.id)
        accepted = await finished(store, a_turn(chat), "fine", chat)
        base = await store.chat_base(OWNER, project.id)
        assert base.defaults == {"temperature": 0.5, "min_p": 0.1}
        assert (
            base.project == replace(project, **changes, settings=settings)
            and (await store.chat_base("eve", project.id)).project is None
        )
        for found in (await store.branch(OWNER, chat.id, None), await store.shown_chat(OWNER, chat.id, 9)):
            assert found is not None and found.base == base
        assert [each.id for each in (await store.chat_list(OWNER, 9, project=project.id)).chats] == [chat.id]
        assert (await store.chat_list(OWNER, 9, project=other.id)).chats == ()
        assert not await documents.move_chat("eve", chat.id, other.id)
        assert not await documents.move_chat(OWNER, chat.id, "unknown") and await documents.stale() == []
        assert await documents.move_chat(OWNER, chat.id, other.id) and await documents.move_chat(
            OWNER, chat.id, other.id
        )
        stale = await documents.stale()
        assert [(each.owner, each.conversation) for each in stale] == [(OWNER, accepted.user_message.id)]
        await documents.mark_cleared(stale)
        assert await documents.move_chat(OWNER, chat.id, project.id)
        await documents.mark_cleared(await documents.stale())
        one = (await documents.documents(OWNER, project.id))[0]
        assert await documents.delete(OWNER, one.id), "a chat of the project has used the document"
        assert [each.conversation for each in await documents.stale()] == [accepted.user_message.id]
        assert await documents.delete_library(OWNER, project.id)
        assert not await documents.delete_library(OWNER, project.id)
        left = await store.chat(OWNER, chat.id)
        assert left is not None and left.project == "" and await documents.documents(OWNER, project.id) == []

    kept.run(work)


def test_memories_are_per_owner_and_limited(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        first, second = Memory(new_id(), "Vegetarian.", 1), Memory(new_id(), "Lives in Oslo.", 2)
        assert await store.save_memory(OWNER, second) and await store.save_memory(OWNER, first)
        assert await store.memories(OWNER) == [first, second] and await store.memories("eve") == []
        assert (await store.chat_base(OWNER)).memories == ("Vegetarian.", "Lives in Oslo.")
        await store.save_memory("eve", replace(first, text="Eats meat."))
        assert await store.memories(OWNER) == [first, second] and not await store.delete("eve", "memory", first.id)
        assert await store.save_memory(OWNER, replace(first, text="Vegan."))
        with monkeypatch.context() as patched:
            patched.setattr(sql_store, "MAX_MEMORIES", 2)
            assert not await store.save_memory(OWNER, Memory(new_id(), "One too many.", 3))
            assert await store.save_memory(OWNER, replace(first, text="Vegan!"))
            patched.setattr(sql_store, "MAX_MEMORY_CHARACTERS", 20)
            assert not await store.save_memory(OWNER, replace(first, text="Vegan, since 1999"))
        assert await store.delete(OWNER, "memory", first.id) and not await store.delete(OWNER, "memory", first.id)
        assert await store.memories(OWNER) == [second]

    kept.run(work)


# ---------------------------------------------------------------- deletion


def markers() -> list[str]:
    return ["q" + secrets.token_hex(12) for _ in range(400)]


async def planted_and_deleted(store: Any, words: list[str]) -> list[bytes]:
    """Add a document with marker words between others that stay, delete it, and return every form of its markers."""
    for number in range(3):
        await added(store, *(" ".join(markers()) for _ in range(9)), name=f"{number}.txt")
    pages = [" ".join(words[at : at + 40]) for at in range(0, len(words), 40)]
    planted = await added(store, *pages, name=f"{words[0]}.txt")
    for number in range(3, 6):
        await added(store, *(" ".join(markers()) for _ in range(9)), name=f"{number}.txt")
    hit = (await store.documents.search(OWNER, words[7], 5))[0]
    assert hit.document.id == planted.id and words[7] in hit.text
    sql = "SELECT text FROM document_texts WHERE document_id = ?"
    packed = bytes((await store.run_read(lambda db: db.execute(sql, (planted.id,)).fetchone()))["text"])
    chat = a_chat()
    turn = a_turn(chat)
    question = replace(turn.user_message, attachments=(Attachment("a", "", planted.id),))
    await finished(store, replace(turn, user_message=question), "fine", chat)
    await store.documents.record_reading("scope", "reading", [planted.id])
    await store.documents.record_reading("scope", "other", [hit.document.id])
    assert await store.documents.delete(OWNER, planted.id) and not await store.documents.delete(OWNER, planted.id)
    assert await store.documents.search(OWNER, words[7], 5) == []
    stale = await store.documents.stale()
    assert [(each.owner, each.conversation, each.scope, each.reading) for each in stale] == [
        (OWNER, question.id, "", ""),
        ("", "", "scope", "reading"),
        ("", "", "scope", "other"),
    ]
    await store.documents.mark_cleared(stale)
    assert await store.documents.stale() == []
    return [*map(str.encode, words), *slices(packed)]


def raw_and_inflated(data: bytes) -> Iterator[bytes]:
    """Yield the data and the decompressed content of every zlib stream in it."""
    yield data
    for at in range(len(data) - 2):
        if data[at] == 0x78 and (data[at] * 256 + data[at + 1]) % 31 == 0:
            stream, found = zlib.decompressobj(), bytearray()
            try:
                for start in range(at, min(at + 4096, len(data)), 16):
                    found += stream.decompress(data[start : start + 16])
            except zlib.error:
                pass
            if found:
                yield bytes(found)


def slices(data: bytes) -> list[bytes]:
    """Return parts of the compressed data that identify fragments of it."""
    return [data[at : at + 24] for at in range(0, len(data) - 24, 500)]


def erase_unallocated(data: bytes) -> bytes:
    """Return a database file without the unallocated parts of its b-tree pages, in which SQLite leaves copies of rows
    that it has moved to another page; secure_delete does not overwrite these."""
    file = bytearray(data)
    page_size = int.from_bytes(data[16:18], "big")
    for page in range(0, len(data), page_size):
        at = page + (100 if page == 0 else 0)
        if header_bytes := {2: 12, 5: 12, 10: 8, 13: 8}.get(data[at]):
            cells, content = struct.unpack_from(">HH", data, at + 3)
            start, end = at + header_bytes + 2 * cells, page + (content or 65_536)
            file[start:end] = bytes(end - start)
    return bytes(file)


def test_no_byte_of_a_deleted_document_stays_in_sqlite(tmp_path: Path) -> None:
    words = markers()

    async def work(store: SQLiteStore) -> None:
        planted = await planted_and_deleted(store, words)
        # The store also does this when it is idle.
        while not await store._writes.run("", store._require_writer().checkpoint):
            pass
        files = sorted(tmp_path.iterdir())
        assert any(path.name == "notso.db-wal" for path in files)
        for path in files:
            content = path.read_bytes()
            for data in raw_and_inflated(erase_unallocated(content) if path.name == "notso.db" else content):
                left = [each for each in planted if each in data]
                assert not left, (path.name, len(left))

    run_with_store(SQLiteStore(tmp_path), work)


def test_byte_scan_finds_plain_and_compressed_text(tmp_path: Path) -> None:
    words = markers()

    async def work(store: SQLiteStore) -> None:
        await added(store, " ".join(words))

    run_with_store(SQLiteStore(tmp_path), work)
    forms = list(raw_and_inflated((tmp_path / "notso.db").read_bytes()))
    assert [words[9].encode() in data for data in forms].count(True) == 2, "the word is found plain and compressed"


def test_no_row_of_a_deleted_document_stays_in_postgres(database: str) -> None:
    from notso.web.store.postgres.store import PostgresStore

    words = markers()

    async def work(store: Any) -> None:
        planted = await planted_and_deleted(store, words)

        def tables(db: Any) -> list[str]:
            sql = "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = current_schema()"
            return [row["name"] for row in db.execute(sql).fetchall()]

        for name in await store.run_read(tables):
            rows = await store.run_read(lambda db, name=name: db.execute(f"SELECT * FROM {name}").fetchall())
            texts = [each.encode() if isinstance(each, str) else each for row in rows for each in row.values()]
            found = [bytes(each) for each in texts if isinstance(each, bytes | memoryview)]
            assert not any(mark in data for each in found for data in raw_and_inflated(each) for mark in planted)

    run_with_store(PostgresStore(database), work)


# ---------------------------------------------------------------- copies


def test_copy_and_backup_contain_documents(tmp_path: Path, new_database: str) -> None:
    from notso.web.store.postgres.store import PostgresStore

    before, after, backup = tmp_path / "before", tmp_path / "after", tmp_path / "backup" / "notso.db"
    backup.parent.mkdir()

    async def fill(store: SQLiteStore) -> None:
        await added(store, "Nothing of birds.")
        ready = await added(store, *PAGES)
        library = await store.documents.library(OWNER, "Documents")
        await store.documents.add(OWNER, library.id, "queued.bin", bytes(range(256)) * 2000)
        await store.documents.record_reading("scope", "reading", [ready.id])
        chat = a_chat()
        turn = a_turn(chat)
        question = replace(turn.user_message, attachments=(Attachment("a", "", ready.id),))
        await finished(store, replace(turn, user_message=question), "fine", chat)
        await store.backup(backup)

    found: list[Any] = []

    async def run_read(store: ChatStore) -> None:
        hits = await store.documents.search(OWNER, "crane spring heron", 9)
        documents = await store.documents.documents(OWNER)
        content = [await store.documents.content(OWNER, each.id) for each in documents]
        found.append((hits, documents, content, await store.documents.libraries(OWNER)))
        assert len(hits) == 2 and len(documents) == 3

    run_with_store(SQLiteStore(before), fill)
    copy_database(str(before), new_database)
    copy_database(new_database, str(after))
    for store in (SQLiteStore(before), SQLiteStore(after), PostgresStore(new_database), SQLiteStore(backup.parent)):
        run_with_store(store, run_read)
    assert found[0] == found[1] == found[2] == found[3]

    async def delete(store: ChatStore) -> None:
        (hit, *_) = await store.documents.search(OWNER, "crane", 1)
        assert await store.documents.delete(OWNER, hit.document.id) and len(await store.documents.stale()) == 2

    run_with_store(SQLiteStore(after), delete)


def test_a_copy_keeps_passages_that_another_release_has_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(store: ChatStore) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                sql_documents, "split_into_passages", lambda text, pages: [Passage(1, 0, 6), Passage(1, 7, 13)]
            )
            await added(store, "herons storks")

    run_with_store(SQLiteStore(tmp_path / "old"), fill)
    copy_database(str(tmp_path / "old"), str(tmp_path / "new"))

    async def search(store: ChatStore) -> None:
        assert [hit.text for hit in await store.documents.search(OWNER, "stork", 9)] == ["storks"]

    run_with_store(SQLiteStore(tmp_path / "new"), search)


# ---------------------------------------------------------------- search


class Corpus:
    """Generated documents. Some state a fact, and some of those have near-duplicates."""

    def __init__(self, documents: int, seed: int) -> None:
        self._random = random.Random(seed)
        sounds = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
        self._words = ["".join(self._random.choices(sounds, k=self._random.choice((1, 2, 2, 3)))) for _ in range(4000)]
        self._names = [word for word in self._words[500:] if len(word) >= 6]  # short words such as "in" are not names
        self._weights = [1 / (rank + 1) for rank in range(len(self._words))]
        self.documents: list[tuple[str, Document]] = []
        # (query, document name, fact, whether near-duplicates exist)
        self.questions: list[tuple[str, str, str, bool]] = []
        for number in range(documents):
            if number % 8:
                self._add(f"{number}.txt", self._pages(2))
            else:
                self._plant(number, copies=3 if number % 16 else 0)

    def _plant(self, number: int, copies: int) -> None:
        rng = self._random
        subject, place, amount = rng.choice(self._names), rng.choice(self._names), rng.randrange(1000, 9999)
        fact = f"The license of project {subject} in {place} costs {amount} crowns a year."
        pages = self._pages(3)
        pages[1] += " " + fact
        self._add(f"{number}.txt", pages)
        for copy in range(copies):
            other = f"The license of project {subject} in {rng.choice(self._names)} costs {copy} crowns a year."
            self._add(f"{number} copy {copy}.txt", [page.replace(fact, other) for page in pages])
        query = f"What does the license of project {subject} in {place} cost per year?"
        self.questions.append((query, f"{number}.txt", fact, copies > 0))

    def _pages(self, count: int) -> list[str]:
        def sentence() -> str:
            return " ".join(self._random.choices(self._words, self._weights, k=self._random.randrange(6, 16))) + "."

        return [" ".join(sentence() for _ in range(14)) for _ in range(count)]

    def _add(self, name: str, pages: list[str]) -> None:
        self.documents.append((name, parsed(*pages)))

    async def fill(self, store: ChatStore) -> None:
        library = await store.documents.library(OWNER, "Documents")
        for name, document in self.documents:
            await store.documents.add(OWNER, library.id, name, f"{name}\n{document.text}".encode())
        by_name = dict(self.documents)
        while (taken := await store.documents.claim(1)) is not None:
            await store.documents.finish(taken[0].id, by_name[taken[0].name])

    def recall(self, hits: list[list[PassageHit]], *, near: bool) -> float:
        """Return the fraction of facts found among the five best passages."""
        asked = [
            any(hit.document.name == name and fact in hit.text for hit in found)
            for (_, name, fact, is_near), found in zip(self.questions, hits, strict=True)
            if is_near == near
        ]
        return sum(asked) / len(asked)


@pytest.mark.parametrize(
    "documents", [60, pytest.param(1700, marks=[pytest.mark.long("store"), pytest.mark.timeout(3600)])]
)
def test_document_search_finds_facts_equally_in_both_databases(tmp_path: Path, database: str, documents: int) -> None:
    from notso.web.store.postgres.store import PostgresStore

    corpus = Corpus(documents, seed=7)
    assert documents < 1000 or len(corpus.documents) >= 2000
    lists = []
    for store in (SQLiteStore(tmp_path), PostgresStore(database)):
        hits: list[list[PassageHit]] = []

        async def work(store: ChatStore, hits: list[list[PassageHit]] = hits) -> None:
            await corpus.fill(store)
            for query, _, _, _ in corpus.questions:
                hits.append(await store.documents.search(OWNER, query, 5))

        run_with_store(store, work)
        lists.append([[(hit.document.name, hit.number, hit.score, hit.text) for hit in found] for found in hits])
    assert lists[0] == lists[1]
    assert corpus.recall(hits, near=False) >= 0.95
    assert corpus.recall(hits, near=True) >= 0.85


def test_a_search_without_words_or_matches_finds_nothing(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        document = await added(store, *PAGES, "日本語を勉強しています。")
        assert [hit.page for hit in await store.documents.search(OWNER, "勉強", 5)] == [4]
        assert [hit.page for hit in await store.documents.search(OWNER, "Spring's CRANES", 5)] == [3]
        assert [hit.page for hit in await store.documents.search(OWNER, "herons", 5, document_ids=[document.id])] == [1]
        for query in ("", "?!", "walrus", "'; DROP TABLE documents; --"):
            assert await store.documents.search(OWNER, query, 5) == []
        assert await store.documents.search(OWNER, "heron", 5, document_ids=[]) == []
        assert len(await store.documents.search(OWNER, "the in on a", 2)) == 2

    kept.run(work)


def test_searches_during_a_deletion_see_all_or_nothing(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        for _ in range(5):
            document = await added(store, *PAGES)
            found, gone = await asyncio.gather(
                asyncio.gather(*(store.documents.search(OWNER, "heron", 5) for _ in range(8))),
                store.documents.delete(OWNER, document.id),
            )
            assert gone and all(len(hits) in (0, 1) for hits in found)

    kept.run(work)


def test_frequent_query_words_are_skipped_over_the_postings_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_index, "MAX_POSTINGS", 10)
    frequent, rare = struct.pack("<60H", *range(60)), struct.pack("<3H", 7, 2, 9)
    rows = [passage_index.WordPostings("the", "a", "a", frequent), passage_index.WordPostings("heron", "a", "a", rare)]
    assert [each[1] for each in passage_index.rank_passages(rows, 20, 100)] == [7]
    assert len(passage_index.rank_passages(rows[:1], 20, 100)) == 20, (
        "a single word is searched even if it is very frequent"
    )
