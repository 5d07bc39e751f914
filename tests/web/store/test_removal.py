"""Removing a user deletes everything from both databases, including every planted marker."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from web.store.some_chats import a_chat, a_turn, run_with_store
from web.store.test_documents import added, raw_and_inflated

from notso.smollm3 import Message
from notso.web.sign_in.users import remove_user
from notso.web.store.access import AccessStore, ApiKey, AuditEntry, UsageRow, UsageTotals
from notso.web.store.documents import Member
from notso.web.store.protocol import (
    Attachment,
    Chat,
    Memory,
    SavedPrompt,
    ShareLink,
    StoredMessage,
    StoredResponse,
    TurnAccepted,
)
from notso.web.store.records import IdempotentResponse, StoredBatch, StoredFile, UnfinishedResponse
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import SettingsError
from notso.web.values.ids import new_id


class Planted:
    """An owner with an object of every kind; each text contains a unique marker."""

    def __init__(self) -> None:
        self.words = list[str]()
        self.key = ApiKey(secrets.token_hex(8), self.mark(), 1)
        self.owner = f"key:{self.key.id}"
        self.words.append(self.owner)

    def mark(self) -> str:
        self.words.append("q" + secrets.token_hex(12))
        return self.words[-1]

    async def plant(self, store: Any, access: AccessStore, neighbor: str) -> None:
        mark, owner = self.mark, self.owner
        document = await added(store, mark(), mark(), name=f"{mark()}.txt", owner=owner)
        project = await store.documents.new_library(owner, mark())
        changes: dict[str, Any] = {"instructions": mark(), "settings": lambda _: {"tools": mark()}}
        assert await store.documents.change_library(owner, project.id, **changes)
        failed = await store.documents.add(owner, project.id, f"{mark()}.bin", mark().encode())
        assert await store.documents.claim(1) is not None
        await store.documents.fail(failed.id, mark())
        assert await store.documents.set_member(owner, project.id, Member(neighbor, mark(), "read"))
        await store.documents.record_reading("scope", f"reading-{owner[4:8]}", [document.id])
        chat = replace(a_chat(mark()), settings={"system_prompt": mark()}, project=project.id, source=mark())
        turn = a_turn(chat, mark())
        files = (Attachment(mark(), mark()), Attachment("d", "", document.id))
        question = replace(turn.user_message, attachments=files)
        accepted = await store.add_turn(owner, replace(turn, user_message=question), chat)
        assert isinstance(accepted, TurnAccepted)
        answer = replace(accepted.assistant_message, content=mark(), reasoning=mark(), note=mark(), state="done")
        await store.save_message(answer, owner)
        await store.add_share(owner, ShareLink(mark(), owner, chat.id, question.id, 1, 1 << 50))
        deep = a_chat(mark())
        await store.add_chat(owner, deep, list(self._deep(deep)))
        thrown = a_chat(mark())
        await store.add_chat(owner, thrown, [replace(question, id=new_id(), chat_id=thrown.id, attachments=())])
        await store.trash_chat(owner, thrown.id)
        conversation = (Message("user", mark()),)
        await store.save_response(owner, StoredResponse(f"resp_{mark()}", None, {"x": mark()}, conversation, 1))
        records = store.records
        unfinished = UnfinishedResponse(f"resp_{mark()}", owner, mark(), mark(), 1, 1, headers=mark())
        await records.add_unfinished_response(unfinished, "holder")
        await records.save_progress(unfinished.id, "holder", 0, mark(), is_further=True)
        await records.add_file(owner, StoredFile(mark(), mark(), "batch", 3, 1, 1 << 50), mark().encode() * 11_000)
        plan = {"text": mark(), "output_file_id": mark(), "error_file_id": mark()}
        batch = StoredBatch(mark(), owner, 1, {"status": "in_progress", "text": mark()}, plan)
        await records.add_batch(batch)
        assert (await records.claim_batch("holder", [], 1)).id == batch.id
        assert await records.add_line(batch.id, "holder", str(plan["output_file_id"]), 1, mark().encode())
        await records.save_idempotent_response(
            owner, mark(), IdempotentResponse(b"x", 200, (("a", mark()),), mark().encode(), 1)
        )
        await store.save_prompt(owner, SavedPrompt(mark(), "message", mark()))
        await store.save_memory(owner, Memory(new_id(), mark(), 1))
        await store.change_defaults(owner, lambda _: {"system_prompt": mark()})
        assert await access.add_key(self.key, self.key.id.encode() * 2)
        await access.add_usage([UsageRow(date(2026, 1, 1), owner, UsageTotals(1, 2, 3))])
        await access.add_audit(AuditEntry(1, owner, mark(), mark()), AuditEntry(1, owner, mark(), by_operator=True))

    def _deep(self, chat: Chat) -> Iterator[StoredMessage]:
        """Yield a chain of messages longer than SQLite's cascade limit and than one deletion transaction."""
        parent = None
        for number in range(1100):
            text = self.mark() if number % 300 == 0 else "x"
            yield StoredMessage(new := new_id(), chat.id, "user", text, "", "done", number, parent_id=parent)
            parent = new

    async def rest(self, store: Any, access: AccessStore) -> tuple[int, ...]:
        """Return the number of objects that remain in each of the owner's lists."""
        of, records = self.owner, store.records
        lists = [await store.chats(of), await store.documents.documents(of), await store.documents.libraries(of)]
        lists += [await records.files(of), await records.batches(of), await store.prompts(of), await store.memories(of)]
        lists += [[key for key in await access.keys() if key == self.key]]
        lists += [[row for row in await access.usage(date(2026, 1, 1), date(2026, 1, 1)) if row.owner == of]]
        return (*map(len, lists), len(await store.defaults(of)))


async def removed(store: Any, access: AccessStore) -> tuple[Planted, Planted]:
    gone, stays = Planted(), Planted()
    await gone.plant(store, access, stays.owner)
    await stays.plant(store, access, gone.owner)
    before = await stays.rest(store, access)
    assert min(before) > 0 and await gone.rest(store, access) == before
    await remove_user(store, access, gone.owner, "an operator")
    with pytest.raises(SettingsError, match=f"no data is stored for {gone.owner}"):
        await remove_user(store, access, gone.owner, "an operator")
    assert set(await gone.rest(store, access)) == {0}
    assert await stays.rest(store, access) == (before[0], before[1] - 1, before[2] - 1, *before[3:]), "one project gone"
    stale = await store.documents.stale()
    assert {each.owner for each in stale if each.conversation} == {gone.owner}
    assert len({each.conversation for each in stale if each.conversation}) == 5, "three chats, two responses"
    assert [each.reading for each in stale if each.reading] == [f"reading-{gone.owner[4:8]}"]
    entries = [entry for entry in await access.audit(100) if entry.by_operator and entry.owner == "an operator"]
    assert [entry.action for entry in entries] == [f"removed the key {gone.key.id} with all data"]
    return gone, stays


def test_no_byte_of_a_removed_user_stays_in_sqlite(tmp_path: Path) -> None:
    async def work(store: SQLiteStore) -> None:
        access = SQLiteAccessStore(tmp_path)
        gone, stays = await removed(store, access)
        await store.documents.mark_cleared(await store.documents.stale())
        await access.close()
        # The store also does this when it is idle.
        while not await store._writes.run("", store._require_writer().checkpoint):
            pass
        found: set[str] = set()
        for path in sorted(tmp_path.iterdir()):
            for data in raw_and_inflated(path.read_bytes()):
                left = [each for each in gone.words if each.encode() in data]
                assert not left, (path.name, left)
                found |= {each for each in stays.words if each.encode() in data}
        assert len(found) > 0.9 * len(stays.words), "the scan must find the other user's markers"

    run_with_store(SQLiteStore(tmp_path), work)


def test_no_row_of_a_removed_user_stays_in_postgres(database: str) -> None:
    from notso.web.store.postgres.store import PostgresStore

    async def work(store: Any) -> None:
        access = store.access()
        await access.open()
        gone, stays = await removed(store, access)

        def tables(db: Any) -> list[str]:
            sql = "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = current_schema()"
            return [row["name"] for row in db.execute(sql).fetchall()]

        found: set[str] = set()
        for name in await store.run_read(tables):
            rows = await store.run_read(lambda db, name=name: db.execute(f"SELECT * FROM {name}").fetchall())
            texts = [each.encode() if isinstance(each, str) else each for row in rows for each in row.values()]
            for each in [bytes(text) for text in texts if isinstance(text, bytes | memoryview)]:
                for data in raw_and_inflated(each):
                    # Other servers still need this table to drop their cached state.
                    left = [word for word in gone.words if word.encode() in data and name != "stale_caches"]
                    assert not left, (name, left)
                    found |= {word for word in stays.words if word.encode() in data}
        assert len(found) > 0.9 * len(stays.words)
        await access.close()

    run_with_store(PostgresStore(database), work)
