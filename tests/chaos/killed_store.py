"""A store in a process of its own that is killed: a data directory as an unclean end leaves it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from notso.web.store.sqlite import SQLiteStore

T = TypeVar("T")
OWNER = "local"

PROGRAM = """
import asyncio
import os
import signal
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from notso.web.ids import new_generation_id, new_id
from notso.web.store.protocol import Chat, NewTurn, StoredMessage
from notso.web.store.sqlite import SQLiteStore

def new_turn(chat, number):
    question = StoredMessage(new_id(), chat.id, "user", f"question {number} " + "words " * 50, "", "done", 1)
    answer = replace(question, id=new_id(), role="assistant", content="", state="queued")
    answer = replace(answer, generation_id=new_generation_id())
    return NewTurn(question, answer, new_id())

async def fill():
    store = SQLiteStore(Path(sys.argv[1]))
    await store.open()
    chat = Chat(new_id(), "A chat", True, date(2025, 7, 8), 1, 1)
    for number in range(int(sys.argv[2])):
        made = await store.add_turn("local", new_turn(chat, number), chat if number == 0 else None)
        await store.save_answer(replace(made.answer, content=f"answer {number} " + "more words " * 50, state="done"))
        print(number, flush=True)

asyncio.run(fill())
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_after(directory: Path, turns: int) -> None:
    """Have so many turns acknowledged, in one chat, then end without any goodbye."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), str(turns)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(done.stdout.split()) == turns


def with_store(directory: Path, work: Callable[[SQLiteStore], Awaitable[T]]) -> T:
    """Open the store here, use it, close it."""

    async def run() -> T:
        store = SQLiteStore(directory)
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def answers_in(store: SQLiteStore) -> list[str]:
    """The beginnings of all finished answers."""
    found = []
    for chat in await store.chats(OWNER):
        messages = await store.messages(OWNER, chat.id)
        found += [each.content[:12].strip() for each in messages if each.role == "assistant" and each.state == "done"]
    return found
