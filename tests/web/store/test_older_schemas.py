"""Stores of older releases with an unfinished answer: it is interrupted or resumed as that release did."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from web.store.conftest import Kept
from web.store.some_chats import OWNER

from notso.web.store.protocol import AnswerRun, AnswerTrace, ChatStore
from notso.web.store.sql.search_words import indexed_text
from notso.web.store.sqlite.migrations import MIGRATIONS

Write: TypeAlias = Callable[[str, Sequence[Any]], None]

BEFORE_TRACES = {"sqlite": 13, "postgres": 11}  # the last schema without answer_traces
BEFORE_PROGRESS = {"sqlite": 16, "postgres": 14}  # the last schema whose background responses had a seed but no tokens
RUN = AnswerRun({"seed": 7}, origin="o", limit=9, ids=(1, 2), closed_at=(1,))
TRACE = '{"runs":[{"params":{"seed":7},"origin":"o","limit":9,"ids":[1,2],"closed_at":[1]}],"model":"m"}'


@pytest.fixture
def database(new_database: str) -> str:
    """Return a database without a schema, for `kept`."""
    return new_database


@pytest.fixture
def older(kept: Kept, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that creates a store with an older schema and writes rows as that release did."""

    def sqlite(version: int, rows: Callable[[Write], None]) -> None:
        db = sqlite3.connect(tmp_path / "notso.db", isolation_level=None)
        db.create_function("indexed_text", 1, indexed_text, deterministic=True)
        for script in MIGRATIONS[:version]:
            db.executescript(script)
        db.execute(f"PRAGMA user_version={version}")
        rows(lambda sql, values: db.execute(sql, values) and None)
        db.close()

    def postgres(version: int, rows: Callable[[Write], None]) -> None:
        psycopg = pytest.importorskip("psycopg")
        from notso.web.store.postgres import connection

        with psycopg.connect(request.getfixturevalue("database"), autocommit=True) as db:
            with monkeypatch.context() as patched:
                patched.setattr(connection, "SCHEMA_VERSION", version)
                connection.migrate(db)
            db.execute("SET search_path = notso")
            rows(lambda sql, values: db.execute(sql.replace("?", "%s"), values) and None)

    return sqlite if kept.kind == "sqlite" else postgres


def a_half_answer(write: Write) -> None:
    chat = "INSERT INTO chats (id, owner, title, thinking, prompt_date, created_ms, updated_ms)"
    write(f"{chat} VALUES ('c', ?, 'A chat', ?, '2025-07-08', 1, 1)", (OWNER, True))
    message = "INSERT INTO messages (id, owner, chat_id, position, parent_id, role, content, state, generation_id,"
    message += " created_ms) VALUES (?, ?, 'c', ?, ?, ?, ?, ?, ?, 1)"
    write(message, ("q", OWNER, 1, None, "user", "Go", "done", None))
    write(message, ("a", OWNER, 2, "q", "assistant", "half", "running", "g"))


async def taken_in(store: ChatStore) -> list[str]:
    return [each.message_id for each in (await store.heartbeat(frozenset(), frozenset())).taken]


def test_an_answer_without_a_trace_is_interrupted(kept: Kept, older: Any) -> None:
    older(BEFORE_TRACES[kept.kind], a_half_answer)

    async def look(store: ChatStore) -> None:
        assert await taken_in(store) == []
        answer = (await store.messages(OWNER, "c"))[1]
        assert (answer.content, await store.trace(OWNER, "a")) == ("half", None)
        if kept.kind == "sqlite":  # PostgreSQL first waits until the lease of the writing process expires.
            assert answer.state == "interrupted"

    kept.run(look)


def test_answer_with_an_older_trace_is_resumed(kept: Kept, older: Any) -> None:
    def rows(write: Write) -> None:
        a_half_answer(write)
        write("INSERT INTO answer_traces (message_id, trace, tries, resumes) VALUES ('a', ?, 1, 3)", (TRACE,))
        if kept.kind == "postgres":  # a server that no longer runs
            write("UPDATE messages SET holder = 'gone' WHERE id = ?", ("a",))

    older(BEFORE_PROGRESS[kept.kind], rows)

    async def look(store: ChatStore) -> None:
        assert await taken_in(store) == ["a"]
        assert await store.trace(OWNER, "a") == AnswerTrace((RUN,), "m", 1, 3)

    kept.run(look)


def test_older_background_response_restarts_with_its_seed(kept: Kept, older: Any) -> None:
    columns = "id, owner, body, caller, seed, created_ms, tries, holder, held_until_ms"
    values = ("resp_1", OWNER, json.dumps({"input": "x"}), "[]", 7, 1, 0, "gone", 0)

    def rows(write: Write) -> None:
        write(f"INSERT INTO open_responses ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    older(BEFORE_PROGRESS[kept.kind], rows)

    async def look(store: ChatStore) -> None:
        left = await store.records.claim_unfinished_response("me", (), 2)
        assert left is not None and (left.seed, left.path, left.progress, left.headers) == (
            7,
            "/v1/responses",
            "",
            "{}",
        )
        await store.records.save_progress("resp_1", "another", 0, "{}", is_further=True)
        await store.records.save_progress("resp_1", "me", 0, '{"ids":[1]}', is_further=True)
        found = await store.records.unfinished_response(OWNER, "resp_1")
        assert found is not None and (json.loads(found.progress)["ids"], found.tries) == ([1], 0)
        assert await store.records.unfinished_stream(OWNER, "") is None

    kept.run(look)
