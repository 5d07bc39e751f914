"""PostgreSQL outage: users get a message, typed text and answers are kept, and no restart is needed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from web.store.postgres_server import PostgresServer
from web.store.some_chats import OWNER, a_chat, a_turn, finished

from notso.web.values.errors import StorageError
from notso.web.values.ids import new_id

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from notso.web.store.postgres.store import PostgresStore

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}
AWAY = "the database is not responding"


def test_outage_returns_503_and_keeps_drafts_and_answers(restarted: PostgresServer, start: Start) -> None:
    go_on = threading.Event()

    def script(messages: object, thinking: bool) -> Any:
        events = say("word " * 50)
        yield from events[:10]
        go_on.wait(60)
        yield from events[10:]

    server = start(ScriptedEngine(script), database_url=restarted.new_database()).ready()
    try:
        first = server.ask("Kept before")
        restarted.stop(signal.SIGQUIT)
        refused = server.client.post("/chats", data={"text": "My draft", "key": (key := new_id())})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "My draft" in refused.text and AWAY in refused.text
        refused = server.client.post(f"/chats/{first.chat_id}/messages", data={"text": "My draft", "key": new_id()})
        assert refused.status_code == 503 and "My draft" in refused.text and AWAY in refused.text
        refused = server.client.post(f"/chats/{first.chat_id}/title", data={"title": "x"}, headers=FRAGMENT)
        assert refused.status_code == 503 and AWAY in refused.text and "<html" not in refused.text
        for address in ("/", f"/chats/{first.chat_id}"):
            page = server.client.get(address)
            assert page.status_code == 503 and AWAY in page.text
        server.wait(lambda: server.client.get("/health").json() == {"status": "database_away"})
        assert server.client.get("/health").status_code == 503
        go_on.set()
        answer = server.client.post("/v1/responses", json={"input": "x", "store": False, "max_output_tokens": 5})
        assert answer.status_code == 200, "requests that store nothing still work"
        restarted.start()
        server.wait(lambda: server.client.get("/health").status_code == 200)
        assert server.finished(first).content == "word " * 50, "text written during the outage is stored afterwards"
        assert server.client.post("/chats", data={"text": "My draft", "key": key}).status_code == 303
        assert server.client.post("/chats", data={"text": "My draft", "key": key}).status_code == 303
        titles = [chat.title for chat in server.on_loop(lambda: server.shared.store.chats("local"))]
        assert sorted(titles) == ["Kept before", "My draft"]
    finally:
        go_on.set()
        server.close()


def test_acknowledged_writes_survive_a_database_crash(restarted: PostgresServer) -> None:
    """The database crashes during many writes; the same store continues when it is back."""

    async def work() -> None:
        store = PostgresStore(restarted.new_database())
        await store.open()
        acknowledged: list[str] = []
        enough = asyncio.Event()

        async def write() -> None:
            with contextlib.suppress(StorageError):
                while True:
                    chat = a_chat()
                    await finished(store, a_turn(chat), "answer", chat)
                    acknowledged.append(chat.id)
                    if len(acknowledged) >= 100:
                        enough.set()

        writing = [asyncio.create_task(write()) for _ in range(8)]
        await enough.wait()
        await asyncio.to_thread(restarted.stop, signal.SIGQUIT)
        await asyncio.gather(*writing)
        with pytest.raises(StorageError, match=AWAY):
            await store.chats(OWNER)
        restarted.start()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(StorageError):
                    kept = {chat.id for chat in await store.chats(OWNER)}
                    break
        assert set(acknowledged) <= kept and len(kept - set(acknowledged)) <= len(writing)
        for chat_id in acknowledged:
            assert [m.state for m in await store.messages(OWNER, chat_id)] == ["done", "done"]
        await store.close()

    asyncio.run(work())
