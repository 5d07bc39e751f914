"""Several processes share one PostgreSQL: only one turn per chat at a time, and abandoned turns are taken over."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from web.store.conftest import Kept
from web.store.database_proxy import DatabaseProxy, database_proxy
from web.store.postgres_server import PostgresServer
from web.store.some_chats import OWNER, a_chat, a_turn, an_answer, finished, run_with_store

from notso.web.store.documents import Member
from notso.web.store.protocol import (
    AnswerTrace,
    Heartbeat,
    Memory,
    NewMessage,
    Orphan,
    SavedPrompt,
    StoredResponse,
    TurnAccepted,
    TurnRefused,
)
from notso.web.store.sql.database import Database
from notso.web.values.errors import DataDirectoryNewerError, StorageError
from notso.web.values.ids import new_generation_id, new_id

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from notso.web.store.postgres import connection as connection_module  # noqa: E402
from notso.web.store.postgres import store as store_module  # noqa: E402
from notso.web.store.postgres.connection import PostgresDatabase  # noqa: E402
from notso.web.store.postgres.store import PostgresStore  # noqa: E402


@asynccontextmanager
async def stores(url: str, how_many: int) -> AsyncIterator[list[PostgresStore]]:
    """Open one store for each simulated process. A killed process never closes its store."""
    opened = [PostgresStore(url) for _ in range(how_many)]
    await asyncio.gather(*(store.open() for store in opened))
    try:
        yield opened
    finally:
        for store in opened:
            await store.close()


async def expire(store: PostgresStore, dead: PostgresStore) -> None:
    """Set the lease of a process to one hour ago."""
    name = dead._connections._replica
    sql = "UPDATE replicas SET expires = expires - interval '1 hour' WHERE id = ?"
    assert await store.write(lambda db: db.execute(sql, (name,)).rowcount) == 1


async def until_found(store: PostgresStore) -> Heartbeat:
    """Send heartbeats until orphans are found. Leases are also counted from the database's start, so this may take a
    moment."""
    async with asyncio.timeout(60):
        while not (found := await store.heartbeat(frozenset())).orphans:
            await asyncio.sleep(0.05)
    return found


def run(work: Callable[[], Any]) -> None:
    asyncio.run(work())


def test_only_the_owning_process_can_save_a_turn(database: str) -> None:
    async def work() -> None:
        async with stores(database, 2) as (here, there):
            chat = a_chat()
            turn = a_turn(chat)
            assert isinstance(await here.add_turn(OWNER, turn, chat), TurnAccepted)
            for store, held_here in ((here, True), (there, False)):
                refused = await store.add_turn(OWNER, a_turn(chat))
                assert isinstance(refused, TurnRefused) and refused.is_generated_here == held_here
                assert refused.running is not None and refused.running.id == turn.assistant_message.id
                assert await store.heartbeat(frozenset()) == Heartbeat()
            await there.save_message(replace(turn.assistant_message, content="stolen", state="done"))
            await here.save_message(replace(turn.assistant_message, content="half", state="running"))
            assert (await there.messages(OWNER, chat.id))[1].content == "half"
            await here.save_message(replace(turn.assistant_message, content="whole", state="done"))
            assert isinstance(await there.add_turn(OWNER, a_turn(chat)), TurnAccepted)

    run(work)


def test_abandoned_turn_is_interrupted_by_one_heartbeat(database: str) -> None:
    async def work() -> None:
        async with stores(database, 3) as (dead, one, other):
            chat = a_chat()
            turn = a_turn(chat)
            await dead.add_turn(OWNER, turn, chat)
            await dead.save_message(replace(turn.assistant_message, content="half", state="running"))
            await expire(one, dead)
            found = await until_found(one)
            answer = turn.assistant_message
            assert found.orphans == (Orphan(OWNER, chat.id, answer.id, answer.generation_id or ""),)
            assert await other.heartbeat(frozenset()) == await one.heartbeat(frozenset()) == Heartbeat()
            stored = (await other.messages(OWNER, chat.id))[1]
            assert (stored.state, stored.content) == ("interrupted", "half")

    run(work)


def test_claimed_turn_is_reported_until_known_to_run(database: str) -> None:
    """A heartbeat can time out after its transaction, so claimed turns are reported until they are known to run."""

    async def work() -> None:
        async with stores(database, 3) as (dead, alive, leaving):
            chat = a_chat()
            turn = replace(a_turn(chat), trace=AnswerTrace(()))
            answer, nothing = turn.assistant_message, frozenset[str]()
            await dead.add_turn(OWNER, turn, chat)
            await expire(alive, dead)
            async with asyncio.timeout(60):
                while not (found := await alive.heartbeat(nothing, nothing)).taken:
                    assert await leaving.heartbeat(nothing, nothing, is_leaving=True) == Heartbeat()
                    await asyncio.sleep(0.05)
            (left,) = found.taken
            assert left.message_id == answer.id and not found.orphans
            await alive.save_message(replace(answer, state="running"), OWNER, AnswerTrace((), tries=2))
            assert (await alive.heartbeat(nothing, nothing)).taken == (left,)
            assert await alive.heartbeat(nothing, frozenset({left.generation_id})) == Heartbeat()
            assert await leaving.heartbeat(nothing, nothing) == Heartbeat(), "the turn belongs to the other process"

    run(work)


def test_chat_of_a_dead_process_accepts_a_new_turn(database: str) -> None:
    async def work() -> None:
        async with stores(database, 2) as (dead, alive):
            chat = a_chat()
            turn = a_turn(chat)
            await dead.add_turn(OWNER, turn, chat)
            await expire(alive, dead)
            async with asyncio.timeout(60):
                while isinstance(accepted := await alive.add_turn(OWNER, a_turn(chat)), TurnRefused):
                    await asyncio.sleep(0.05)
            assert isinstance(accepted, TurnAccepted)
            states = [message.state for message in await alive.messages(OWNER, chat.id)]
            assert states == ["done", "interrupted", "done", "queued"]
            (orphan,) = (await alive.heartbeat(frozenset())).orphans
            assert orphan.generation_id == turn.assistant_message.generation_id, "the answer's readers are notified"

    run(work)


def test_paused_process_can_finish_but_not_extend_its_answer(database: str) -> None:
    async def work() -> None:
        async with stores(database, 2) as (paused, alive):
            chat, other = a_chat(), a_chat()
            turn, edited = a_turn(chat), a_turn(other)
            await paused.add_turn(OWNER, turn, chat)
            await paused.add_turn(OWNER, edited, other)
            await expire(alive, paused)
            assert len((await until_found(alive)).orphans) == 2
            await alive.edit_message(OWNER, other.id, edited.assistant_message.id, "a person's")
            names = [each.assistant_message.generation_id or "" for each in (turn, edited)]
            assert (await paused.heartbeat(frozenset(names))).lost == set(names)
            await paused.save_message(replace(turn.assistant_message, content="more", state="running"))
            assert (await alive.messages(OWNER, chat.id))[1].content == ""
            for each in (turn, edited):
                await paused.save_message(replace(each.assistant_message, content="whole", state="done"))
            assert (await alive.messages(OWNER, chat.id))[1].content == "whole", "the finished text is kept"
            assert (await alive.messages(OWNER, other.id))[1].content == "a person's"
            name = new_generation_id()
            await alive.resume_message(OWNER, chat.id, turn.assistant_message.id, name)
            await paused.save_message(replace(turn.assistant_message, content="late", state="done"))
            assert (await alive.messages(OWNER, chat.id))[1].content == "whole"
            assert (await alive.heartbeat(frozenset({name}))) == Heartbeat()

    run(work)


def test_single_process_keeps_its_turn_after_a_pause(database: str) -> None:
    async def work() -> None:
        async with stores(database, 1) as (store,):
            chat = a_chat()
            turn = a_turn(chat)
            await store.add_turn(OWNER, turn, chat)
            await expire(store, store)
            refused = await store.add_turn(OWNER, a_turn(chat))
            assert isinstance(refused, TurnRefused) and refused.is_generated_here
            assert await store.heartbeat(frozenset({turn.assistant_message.generation_id or ""})) == Heartbeat()

    run(work)


def test_concurrent_questions_start_only_one_turn(database: str) -> None:
    async def work() -> None:
        async with stores(database, 3) as opened:
            chat = a_chat()
            await finished(opened[0], a_turn(chat), "answer", chat)
            asked = [store.add_turn(OWNER, a_turn(chat)) for store in opened for _ in range(4)]
            outcomes = await asyncio.gather(*asked)
            assert sum(isinstance(outcome, TurnAccepted) for outcome in outcomes) == 1
            assert len([m for m in await opened[0].messages(OWNER, chat.id) if m.active]) == 1
            positions = await opened[0].read(OWNER, "SELECT position FROM messages WHERE chat_id = ?", chat.id)
            assert sorted(row["position"] for row in positions) == [1, 2, 3, 4]

    run(work)


def test_question_takes_few_database_round_trips(database: str) -> None:
    """Asking a question takes few round trips: for the key, the chat and the turn. Routes add none
    (see test_chat_view.py)."""

    async def work(store: Any, proxy: DatabaseProxy) -> None:
        access, chat = store.access(), a_chat()
        await finished(store, a_turn(chat), "answer", chat)
        await asyncio.gather(*(store.branch(OWNER, chat.id, None) for _ in range(8)))  # Open the connections first.
        proxy.trips = 0
        assert await access.key(b"none") is None
        assert await store.branch(OWNER, chat.id, None, most_characters=1000) is not None
        assert isinstance(await store.add_turn(OWNER, a_turn(chat)), TurnAccepted)
        assert proxy.trips < 8
        proxy.trips = 0
        assert (await store.shown_chat(OWNER, chat.id, 40)) is not None
        assert proxy.trips < 4

    with database_proxy(database) as proxy:
        store = PostgresStore(proxy.url)
        run_with_store(store, lambda store: work(store, proxy))


def test_unresponsive_database_fails_calls_without_blocking(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database accepts connections and never answers. Waiting calls fail at the next heartbeat, new calls fail at
    once, and closing does not wait. The store works again when the database answers."""

    monkeypatch.setattr(store_module, "HANG_SECONDS", 0.3)

    async def work() -> None:
        store, chat = PostgresStore(proxy.url), a_chat()
        await store.open()
        await finished(store, a_turn(chat), "answer", chat)
        proxy.silent = True
        waiting = [asyncio.create_task(store.chats(OWNER)) for _ in range(20)]
        waiting += [asyncio.create_task(store.update_chat(OWNER, chat.id, title="x")) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(StorageError, match="not responding"):
            await store.heartbeat(frozenset())
        asked: list[float] = []
        getconn = store._connections._pool.getconn
        monkeypatch.setattr(store._connections._pool, "getconn", lambda wait: (asked.append(wait), getconn(wait))[1])
        for told in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(told, StorageError)
        assert len(asked) < 10, "other calls must not wait in turn for a database that is known to be down"
        with pytest.raises(StorageError, match="not responding"):
            await store.chats(OWNER)
        proxy.silent = False
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(StorageError):
                    await store.heartbeat(frozenset())
                    break
        assert [each.id for each in await store.chats(OWNER)] == [chat.id]
        proxy.silent = True
        await store.close()

    with database_proxy(database) as proxy:
        asyncio.run(work())


def test_open_and_key_access_time_out_on_unresponsive_database(
    new_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This must not depend on heartbeats, which `notso keys` does not send."""

    async def work() -> None:
        store = PostgresStore(proxy.url)
        access = store.access()
        await access.open()
        assert await access.keys() == []
        monkeypatch.setattr(store_module, "MOST_SECONDS", 0.3)
        proxy.silent = True
        with pytest.raises(StorageError, match="not responding"):
            await access.keys()
        await access.close()
        await store.close()

    async def begin() -> None:
        monkeypatch.setattr(connection_module, "CONNECT_SECONDS", 0.3)
        connect = connection_module.connect

        def silent_then(url: str) -> Any:
            connection = connect(url)
            proxy.silent = True
            return connection

        monkeypatch.setattr(connection_module, "connect", silent_then)
        store = PostgresStore(proxy.url)
        with pytest.raises(StorageError, match=r"not responding|cannot be reached"):
            await store.open()
        await store.close()

    for each in (work, begin):
        with database_proxy(new_database) as proxy:
            asyncio.run(each())


def test_concurrent_repeated_keys_create_one_turn(database: str) -> None:
    async def work() -> None:
        async with stores(database, 3) as opened:
            for _ in range(5):
                key, chats = new_id(), [a_chat() for _ in range(6)]
                asked = [
                    opened[number % 3].add_turn(OWNER, a_turn(chat, key=key), chat) for number, chat in enumerate(chats)
                ]
                outcomes = await asyncio.gather(*asked)
                assert sorted(outcome.repeated for outcome in outcomes if isinstance(outcome, TurnAccepted)) == [
                    *([False]),
                    *([True] * 5),
                ]
                assert len({outcome.user_message.id for outcome in outcomes if isinstance(outcome, TurnAccepted)}) == 1
            assert len(await opened[0].chats(OWNER)) == 5

    run(work)


def test_concurrent_starts_create_one_schema(new_database: str) -> None:
    async def work() -> None:
        async with stores(new_database, 5) as opened:
            rows = await opened[0].read(OWNER, "SELECT version FROM schema_version")
            assert [row["version"] for row in rows] == [connection_module.SCHEMA_VERSION]

    run(work)


def test_schema_may_be_created_by_an_administrator(new_database: str) -> None:
    role = f"app_{new_id().replace('-', '')}"
    with psycopg.connect(new_database, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN".encode())
        admin.execute(f"CREATE SCHEMA notso AUTHORIZATION {role}".encode())  # the role itself may create no schema

    async def work(store: Any) -> None:
        assert await store.chats("me") == []

    run_with_store(PostgresStore(new_database.replace("://postgres@", f"://{role}@")), work)


def test_data_of_a_newer_release_is_refused(new_database: str) -> None:
    async def work() -> None:
        async with stores(new_database, 1) as (store,):
            await store.write(lambda db: db.execute("UPDATE schema_version SET version = version + 1"))
        newer = PostgresStore(new_database)
        with pytest.raises(DataDirectoryNewerError, match="newer"):
            await newer.open()
        await newer.close()

    run(work)


def test_a_failed_migration_changes_nothing(new_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        steps = (*connection_module.MIGRATIONS, "CREATE TABLE extra (x INT); INSERT INTO nowhere VALUES (1)")
        with monkeypatch.context() as patched:
            patched.setattr(connection_module, "MIGRATIONS", steps)
            patched.setattr(connection_module, "SCHEMA_VERSION", len(steps))
            store = PostgresStore(new_database)
            with pytest.raises(StorageError):
                await store.open()
            await store.close()
        async with stores(new_database, 1) as (store,):
            (row,) = await store.read("", "SELECT to_regclass('extra') IS NULL AS none")
            assert row["none"]

    run(work)


@pytest.mark.parametrize("address", ["postgresql://nobody@127.0.0.1:1/x", "postgresql://a:b:c@[/", "postgresql://?x=1"])
def test_unreachable_or_invalid_address_raises_storage_error(postgres: PostgresServer, address: str) -> None:
    async def work() -> None:
        with pytest.raises(StorageError, match="database"):
            store = PostgresStore(address)
            try:
                await store.open()
            finally:
                await store.close()

    run(work)


def test_a_database_in_another_encoding_is_refused(postgres: PostgresServer) -> None:
    async def work() -> None:
        with psycopg.connect(f"{postgres.address}/postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        store = PostgresStore(f"{postgres.address}/latin")
        with pytest.raises(StorageError, match="UTF8"):
            await store.open()
        await store.close()

    run(work)


def test_deletion_is_reported_to_every_process(database: str) -> None:
    async def work() -> None:
        async with stores(database, 2) as (one, other):
            chat = a_chat()
            turn = await finished(one, a_turn(chat), "answer", chat)
            await one.trash_chat(OWNER, chat.id)
            assert await one.purge(0) == 1
            for store in (one, other):
                (gone,) = await store.documents.stale()
                assert (gone.owner, gone.conversation) == (OWNER, turn.user_message.id)
                await store.documents.mark_cleared([gone])
                assert await store.documents.stale() == [] == await store.chats(OWNER)
        async with stores(database, 1) as (late,):
            assert await late.documents.stale() == [gone], "its disk cache may still contain the conversation"

    run(work)


def test_row_lock_does_not_block_other_calls(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = tuple(
        re.sub(r"'\d+s'", "'900s'", each) for each in connection_module._SETTINGS
    )  # also on a loaded machine
    monkeypatch.setattr(connection_module, "_SETTINGS", patient)
    monkeypatch.setattr(store_module, "MOST_SECONDS", 900)

    async def work() -> None:
        async with stores(database, 1) as (store,):
            chat = a_chat()
            await finished(store, a_turn(chat), "answer", chat)
            held, release = threading.Event(), threading.Event()

            def hold(db: Database) -> None:
                # Statements are pipelined: only fetching waits until the database has locked the row.
                db.execute("SELECT id FROM chats WHERE id = ? FOR UPDATE", (chat.id,)).fetchone()
                held.set()
                release.wait(900)

            holding = asyncio.ensure_future(store.write(hold))
            await asyncio.to_thread(held.wait, 900)
            waiting = asyncio.ensure_future(store.add_turn(OWNER, a_turn(chat)))
            other = a_chat()
            await store.add_turn(OWNER, a_turn(other), other)
            assert len(await store.chats(OWNER)) == 2
            assert await store.heartbeat(frozenset()) == Heartbeat()
            assert not waiting.done()
            release.set()
            await holding
            assert isinstance(await waiting, TurnAccepted)

    run(work)


NOT_OF_A_REQUEST = re.compile(r"replicas|orphans|stale_caches|WHERE temporary|FROM trash$|TRANSACTION|holder = ")
BY_AN_ID_OF_ITS_OWN = re.compile(r"generation_id = \?|SET answer_html")


def test_every_statement_of_a_request_names_its_owner(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call every method once on both databases; only purging works across owners."""
    said: list[str] = []

    def listen(kind: type[Database]) -> None:
        plain = kind.execute

        def execute(db: Database, sql: str, parameters: Any = ()) -> Any:
            said.append(sql)
            return plain(db, sql, parameters)

        monkeypatch.setattr(kind, "execute", execute)

    async def work(store: Any) -> None:
        said.clear()
        chat = a_chat()
        turn = await finished(store, a_turn(chat), "answer", chat)
        await store.add_message(OWNER, NewMessage(an_answer(chat), turn.user_message.id, new_id()))
        summary = replace(an_answer(chat), kind="summary", state="done")
        await store.add_chat(OWNER, a_chat(), [])
        await store.resume_message(OWNER, chat.id, turn.assistant_message.id, new_generation_id())
        await store.edit_message(OWNER, chat.id, turn.assistant_message.id, "text")
        await store.choose(OWNER, chat.id, turn.assistant_message.id)
        await store.remove_summary(OWNER, chat.id, summary.id)
        for change in ("thinking", "pinned", "unread", "archived"):
            await store.update_chat(OWNER, chat.id, **{change: True})
        await store.update_chat(OWNER, chat.id, title="title", temporary=False, settings={})
        await store.change_defaults(OWNER, dict)
        await store.save_prompt(OWNER, SavedPrompt("name", "message", "text"))
        await store.delete(OWNER, "prompt", "name")
        await store.keep_html(OWNER, await store.messages(OWNER, chat.id))
        await store.save_response(OWNER, StoredResponse("r", None, {}, (), 1))
        await store.delete(OWNER, "response", "r")
        memory = Memory(new_id(), "text", 1)
        await store.save_memory(OWNER, memory)
        await store.delete(OWNER, "memory", memory.id)
        project = await store.documents.new_library(OWNER, "project")
        await store.documents.change_library(OWNER, project.id, name="another", instructions="text", settings=dict)
        await store.documents.move_chat(OWNER, chat.id, project.id)
        await store.documents.set_member(OWNER, project.id, Member("ann", "Ann", "read"))
        await store.documents.members(OWNER, project.id)
        await store.documents.remove_member(OWNER, project.id, "ann")
        await store.chat_list(OWNER, 9, project=project.id)
        for reading in (store.chats, store.prompts, store.defaults, store.memories, store.chat_base):
            await reading(OWNER)
        for reading in (store.chat, store.chat_snapshot, store.generation, store.response):
            await reading(OWNER, chat.id)
        await store.search(OWNER, "text", 9)
        trash, _ = await store.trash_messages(OWNER, chat.id, reset=True)
        await store.restore(OWNER, trash)
        await store.restore(OWNER, await store.trash_chat(OWNER, chat.id))

    async def session(store: Any) -> None:
        await work(store)

    from notso.web.store.sqlite.store import SQLiteDatabase

    listen(PostgresDatabase if kept.kind == "postgres" else SQLiteDatabase)
    kept.run(session)
    assert len(said) > 60
    nameless = [sql for sql in said if not re.search(r"\bowner\b", re.sub(r"SELECT owner[^F]*|INSERT INTO.*", "", sql))]
    nameless = [sql for sql in nameless if not re.search(r"INSERT INTO \w+ \(.*owner", sql)]
    nameless = [sql for sql in nameless if not NOT_OF_A_REQUEST.search(sql) and not BY_AN_ID_OF_ITS_OWN.search(sql)]
    assert not nameless, "\n".join(nameless)


def test_database_restart_does_not_interrupt_turns(monkeypatch: pytest.MonkeyPatch, restarted: PostgresServer) -> None:
    monkeypatch.setattr(connection_module, "LEASE_SECONDS", 3600.0)

    async def work() -> None:
        async with stores(restarted.new_database(), 2) as (one, other):
            chat = a_chat()
            turn = a_turn(chat)
            await one.add_turn(OWNER, turn, chat)
            await expire(other, one)
            await other.write(lambda db: db.execute("UPDATE replicas SET expires = expires - interval '2 hours'"))
            await asyncio.to_thread(restarted.stop)
            restarted.start()
            assert await other.heartbeat(frozenset()) == Heartbeat()
            assert (await other.messages(OWNER, chat.id))[1].state == "queued"
            await one.save_message(replace(turn.assistant_message, content="whole", state="done"))
            assert (await other.messages(OWNER, chat.id))[1].content == "whole"

    run(work)
