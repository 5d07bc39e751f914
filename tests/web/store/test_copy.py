"""`notso store copy` to PostgreSQL and back: the copy is complete or absent, and the data stay identical."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from web.store.some_chats import OWNER, a_chat, a_turn, an_answer, finished, run_with_store, shown

from notso.cli import exit_codes
from notso.cli.app import run_command_line
from notso.smollm3 import Message, ToolCall
from notso.web.store.access import AccessStore, ApiKey, AuditEntry, UsageRow, UsageTotals
from notso.web.store.copy import TABLES, copy_database
from notso.web.store.documents import Member
from notso.web.store.opening import create_access_store, create_store
from notso.web.store.protocol import (
    AnswerStats,
    Attachment,
    Memory,
    NewMessage,
    SavedPrompt,
    StoredResponse,
    ToolUse,
    TurnAccepted,
)
from notso.web.store.records import IdempotentResponse, StoredBatch, StoredFile, UnfinishedResponse
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import StorageError
from notso.web.values.ids import new_id

STRANGE = "Ünïcödé \u2028 '; DROP TABLE chats; -- 😀 \x00 \x01 \x010 \x02 %s ? \\x00"


async def fill(store: SQLiteStore, chats: int = 3) -> None:
    """Store something of every kind."""
    for owner in (OWNER, "other"):
        await store.change_defaults(owner, lambda _: {"temperature": 0.1, "seed": 2**53 + 1})
        await store.save_prompt(owner, SavedPrompt(STRANGE, "instructions", STRANGE))
    project = await store.documents.new_library("other", STRANGE.replace("\x00", ""))
    assert project is not None
    assert await store.documents.set_member("other", project.id, Member(OWNER, "somebody", "read"))
    assert await store.save_memory(OWNER, Memory(new_id(), "Likes walruses.", 1))
    for number in range(chats):
        chat = replace(a_chat(f"Walrus {number} {STRANGE}"), settings={"seed": number, "suggestions": False})
        turn = await finished(store, a_turn(chat, f"q {STRANGE}"), "a", chat)
        await finished(store, a_turn(chat, "again", instead_of=turn.user_message.id), "b")
        added = await store.add_message(OWNER, NewMessage(an_answer(chat), turn.user_message.id, new_id()))
        assert isinstance(added, TurnAccepted)
        numbers = AnswerStats(1, 2, 3, 4, 0.1, 1e300, 5e-324, 7.0, 8.25)
        use = ToolUse("id", "name", "{}", "done", 1, STRANGE, 0.3)
        await store.save_message(
            replace(
                added.assistant_message, content="c", state="stopped", numbers=numbers, tool_uses=(use,), renderer=3
            )
        )
        await store.update_chat(OWNER, chat.id, pinned=True)
    await store.choose(OWNER, chat.id, turn.assistant_message.id)
    thrown = a_chat("Thrown")
    question = replace(a_turn(thrown).user_message, attachments=(Attachment(STRANGE, STRANGE),))
    await store.add_chat("other", thrown, [question])
    assert await store.trash_chat("other", thrown.id)
    unfinished = a_chat("Unfinished")
    await store.add_turn(OWNER, a_turn(unfinished), unfinished)
    for number in range(5):
        conversation = (Message("user", STRANGE), Message("assistant", "a", tool_calls=(ToolCall("id", "n", "{}"),)))
        body = {"text": STRANGE, "n": number}
        await store.save_response(OWNER, StoredResponse(f"resp_{9 - number}", None, body, conversation, 1, (body,)))
    await store.records.add_file(OWNER, StoredFile("file-1", STRANGE, "batch", 3, 1, 2), b"\x00\xff\n")
    await store.records.add_batch(StoredBatch("batch_1", OWNER, 1, {"text": STRANGE}, {"text": STRANGE}))
    await store.records.save_idempotent_response(
        OWNER, STRANGE, IdempotentResponse(b"\x00\xff", 200, (("a", STRANGE),), b"\xff\x00", 1)
    )


async def fill_access(store: AccessStore) -> None:
    """Add keys (one of them revoked), usage and the audit log."""
    for number, name in enumerate((STRANGE, "ann", "ann", "bob")):
        key = ApiKey(f"k{number}", name, number, number, 2**50 + number, is_operator=number % 2 == 1)
        assert await store.add_key(key, bytes([number, 0, 255]) * 10)
        if number == 1:
            await store.revoke_key("ann", 7)
    await store.add_usage(
        [UsageRow(date(2026, 1, day), "key:k1", UsageTotals(day, day, 2**40)) for day in range(1, 29)]
    )
    for number in range(5):
        await store.add_audit(AuditEntry(number, STRANGE, f"action {number}", "::1"))


def in_directory(directory: Path, work: Any) -> None:
    run_with_store(SQLiteStore(directory), work)


def everything(directory: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of all tables, and the responses in insertion order."""
    db = sqlite3.connect(directory / "notso.db")
    tables = ("chats", "messages", "trash", "preferences", "prompts", "library_members", "memories")
    tables += ("api_files", "api_file_parts", "api_batches", "kept_answers")
    found = {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in tables}
    found["responses"] = db.execute("SELECT * FROM responses ORDER BY rowid").fetchall()
    db.close()
    with contextlib.closing(sqlite3.connect(directory / "access.db")) as db:
        found |= {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in ("keys", "usage")}
        found["audit"] = db.execute("SELECT at_ms, owner, action, address FROM audit ORDER BY number").fetchall()
    return found


def test_copy_to_postgres_and_back_preserves_all_data(
    tmp_path: Path, new_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    in_directory(before, fill)
    run_with_store(SQLiteAccessStore(before), fill_access)
    assert run_command_line(["store", "copy", str(before), new_database]) == exit_codes.DONE
    there = capsys.readouterr().out
    assert run_command_line(["store", "copy", new_database, str(after)]) == exit_codes.DONE
    assert capsys.readouterr().out == there and "messages" in there and "both sides are identical" in there
    assert everything(before) == everything(after) and len(everything(after)["usage"]) == 28
    assert [row[0] for row in everything(after)["responses"]] == [f"resp_{9 - number}" for number in range(5)]

    async def look(store: Any) -> None:
        chats = await store.chats(OWNER)
        assert len(chats) == 4 and {chat.id for chat in chats if chat.title == "Unfinished"}
        assert len(await store.search(OWNER, "walrus", 9)) == 3
        assert await store.response(OWNER, "resp_5") is not None
        (one,) = [chat for chat in chats if chat.title.startswith("Walrus 2")]
        assert await shown(store, one) == [f"q {STRANGE}", "a"]
        await finished(store, a_turn(one, "on it goes"), "found tusks")
        assert [hit.chat_id for hit in await store.search(OWNER, "tusks", 9)] == [one.id]

    async def in_postgres() -> None:
        store = create_store(Path(), new_database)
        await store.open()
        await look(store)
        await store.close()

    in_directory(after, look)
    asyncio.run(in_postgres())


def test_leases_are_not_copied(tmp_path: Path, new_database: str) -> None:
    response = UnfinishedResponse("resp_1", OWNER, "{}", "[]", 7, 1, tries=1)
    now_ms = 10

    async def killed_server(store: SQLiteStore) -> None:
        await store.records.add_unfinished_response(response, "killed")
        await store.records.add_batch(StoredBatch("batch_1", OWNER, 1, {}, {}))
        assert await store.records.claim_batch("killed", (), now_ms)
        library = await store.documents.new_library(OWNER, "Reports")
        assert library is not None
        assert await store.documents.add(OWNER, library.id, "a.txt", b"text")
        assert await store.documents.claim(now_ms)
        assert await store.records.claim_unfinished_response("other", (), now_ms) is None
        assert await store.records.claim_batch("other", (), now_ms) is None
        assert await store.documents.claim(now_ms) is None

    async def next_server(store: Any) -> None:
        assert await store.records.claim_unfinished_response("other", (), now_ms) == replace(response, tries=2)
        assert await store.records.claim_batch("other", (), now_ms)
        assert await store.documents.claim(now_ms)

    in_directory(tmp_path / "before", killed_server)
    copy_database(str(tmp_path / "before"), str(tmp_path / "after"))
    copy_database(str(tmp_path / "before"), new_database)
    in_directory(tmp_path / "after", next_server)
    run_with_store(create_store(Path(), new_database), next_server)


def test_all_columns_except_leases_and_row_numbers_are_copied(tmp_path: Path) -> None:
    """Row numbers and word counts of the search index are not copied, because each database assigns its own."""

    async def nothing(store: SQLiteStore) -> None:
        pass

    in_directory(tmp_path, nothing)
    with contextlib.closing(sqlite3.connect(tmp_path / "notso.db")) as db:
        for table in TABLES:
            columns = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table.name})")}
            left_out = columns - set(table.columns)
            assert left_out <= {"holder", "held_until_ms", "number", "passages", "words"}, table.name
            assert not {"holder", "held_until_ms"} & set(table.columns), table.name


def test_copy_to_a_nonempty_target_is_refused(tmp_path: Path, new_database: str) -> None:
    before = tmp_path / "before"
    in_directory(before, fill)
    first = copy_database(str(before), new_database)
    with pytest.raises(StorageError, match="is not empty"):
        copy_database(str(before), new_database)
    with pytest.raises(StorageError, match="is not empty"):
        copy_database(new_database, str(before))
    assert copy_database(new_database, str(tmp_path / "after")) == first


def test_copy_to_the_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_directory(tmp_path, fill)
    for target in (tmp_path, tmp_path / "." / ".." / tmp_path.name):
        assert run_command_line(["store", "copy", str(tmp_path), str(target)]) == exit_codes.FAILED
        assert "the source and the target are the same" in capsys.readouterr().err


def test_target_with_only_keys_counts_as_nonempty(tmp_path: Path, new_database: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    in_directory(before, fill)
    run_with_store(create_access_store(Path(), new_database), fill_access)
    with pytest.raises(StorageError, match="is not empty"):
        copy_database(str(before), new_database)
    run_with_store(SQLiteAccessStore(before), fill_access)
    run_with_store(SQLiteAccessStore(before), lambda store: store.revoke_key("bob", 8))
    with pytest.raises(StorageError, match="is not empty"):
        copy_database(str(before), new_database)
    run_with_store(SQLiteAccessStore(after), lambda store: store.add_audit(AuditEntry(1, "ann", "did", "::1")))
    with pytest.raises(StorageError, match="is not empty"):
        copy_database(new_database, str(after))
    assert sum(each.rows for each in copy_database(new_database, str(tmp_path / "new"))) == 4 + 28 + 5, (
        "the refused copies added nothing"
    )


def test_copy_whose_chats_could_not_be_committed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    in_directory(Path(before), fill)
    run_with_store(SQLiteAccessStore(Path(before)), fill_access)
    write = SQLiteStore.write

    async def failing(store: SQLiteStore, work: Any, *arguments: Any) -> Any:
        def fail_at_the_end(db: Any) -> Any:
            result = work(db)
            if isinstance(result, tuple):  # the copied tables
                raise StorageError("the disk is full")
            return result

        return await write(store, fail_at_the_end, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "write", failing)
        with pytest.raises(StorageError, match="the disk is full"):
            copy_database(before, after)
    assert SQLiteAccessStore.exists(Path(after))
    copy_database(before, after)
    assert everything(Path(before)) == everything(Path(after))


def test_copy_without_keys_creates_no_access_file(tmp_path: Path) -> None:
    in_directory(tmp_path / "before", fill)
    copied = {each.table: each.rows for each in copy_database(str(tmp_path / "before"), str(tmp_path / "after"))}
    assert copied["chats"] == 5 and copied["keys"] == copied["audit"] == 0
    assert not SQLiteAccessStore.exists(tmp_path / "before") and not SQLiteAccessStore.exists(tmp_path / "after")


def test_copy_that_differs_from_the_source_is_discarded(
    tmp_path: Path, new_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before"
    in_directory(before, fill)
    from notso.web.store.postgres.connection import PostgresDatabase

    def change(db: PostgresDatabase, owner: str, chat_id: str, title: str) -> None:
        db.execute("UPDATE chats SET title = title || '.' WHERE id = ?", (chat_id,))

    with monkeypatch.context() as patched:
        patched.setattr(PostgresDatabase, "index_title", change)
        with pytest.raises(StorageError, match="differs from the source"):
            copy_database(str(before), new_database)
    assert {each.table: each.rows for each in copy_database(str(before), new_database)}["chats"] == 5


def test_copy_is_refused_while_a_server_uses_source_or_target(tmp_path: Path, new_database: str) -> None:
    before = tmp_path / "before"
    in_directory(before, fill)

    async def serving() -> None:
        store = create_store(Path(), new_database)
        await store.open()
        try:
            with pytest.raises(StorageError, match="a server is using"):
                await asyncio.to_thread(copy_database, str(before), new_database)
        finally:
            await store.close()

    async def holding(store: SQLiteStore) -> None:
        with pytest.raises(StorageError, match="another notso is using"):
            await asyncio.to_thread(copy_database, str(before), new_database)

    asyncio.run(serving())
    in_directory(before, holding)
    with pytest.raises(StorageError, match="contains no chats"):
        copy_database(str(tmp_path / "nowhere"), new_database)


def test_places_that_cannot_be_used_are_reported(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "notso.db").touch()
    for source, target in (("loop", "x"), ("x" * 300, "x"), ("before", "loop")):
        with pytest.raises(StorageError):
            copy_database(str(tmp_path / source), str(tmp_path / target))


def test_empty_source_means_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Patched, because the root directory of a machine may contain a file of this name.
    monkeypatch.setattr(os.path, "exists", lambda path: path == "notso.db")
    with pytest.raises(StorageError, match="the same"):
        copy_database("", str(tmp_path))
