"""Write turns to a store and list the turns that can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TypeVar

from notso.web.store.protocol import Chat, NewTurn, StoredMessage, TurnAccepted
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.ids import new_generation_id, new_id

T = TypeVar("T")
OWNER = "local"


def a_chat() -> Chat:
    return Chat(new_id(), "A chat", True, date(2025, 7, 8), 1, 1)


def a_turn(chat: Chat, number: int) -> NewTurn:
    question = StoredMessage(new_id(), chat.id, "user", f"question {number} " + "words " * 50, "", "done", 1)
    answer = replace(question, id=new_id(), role="assistant", content="", state="queued")
    return NewTurn(question, replace(answer, generation_id=new_generation_id()), new_id())


async def save_turn(store: SQLiteStore, chat: Chat, number: int) -> None:
    """Store a question and then its whole answer. The first turn creates the chat."""
    made = await store.add_turn(OWNER, a_turn(chat, number), chat if number == 0 else None)
    assert isinstance(made, TurnAccepted)
    await store.save_message(
        replace(made.assistant_message, content=f"answer {number} " + "more words " * 50, state="done")
    )


def with_store(directory: Path, work: Callable[[SQLiteStore], Awaitable[T]]) -> T:
    """Open the store in this process, run `work` with it, and close it."""

    async def run() -> T:
        store = SQLiteStore(directory)
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def shown(store: SQLiteStore) -> tuple[list[int], list[int]]:
    """Return the numbers of the stored questions and of the finished answers."""
    questions, answers = [], []
    for chat in await store.chats(OWNER):
        for each in await store.messages(OWNER, chat.id):
            if each.role == "user":
                questions.append(int(each.content.split()[1]))
            elif each.state == "done":
                answers.append(int(each.content.split()[1]))
    return questions, answers
