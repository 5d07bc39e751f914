"""Chats and turns for tests of the stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date
from typing import Any

from notso.web.store.protocol import Chat, ChatStore, NewTurn, StoredMessage, TurnAccepted
from notso.web.store.tree import shown_path
from notso.web.values.ids import new_generation_id, new_id

OWNER = "somebody"


def run_with_store(store: Any, work: Callable[[Any], Awaitable[None]]) -> None:
    """Open the store, run `work` with it, and close the store."""

    async def session() -> None:
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(session())


def a_chat(title: str = "A chat") -> Chat:
    return Chat(new_id(), title, True, date(2025, 7, 8), 1, 1)


def an_answer(chat: Chat) -> StoredMessage:
    return StoredMessage(new_id(), chat.id, "assistant", "", "", "queued", 1, generation_id=new_generation_id())


def a_turn(chat: Chat, text: str = "question", key: str | None = None, instead_of: str | None = None) -> NewTurn:
    question = StoredMessage(new_id(), chat.id, "user", text, "", "done", 1)
    return NewTurn(question, an_answer(chat), key or new_id(), instead_of)


async def finished(store: ChatStore, turn: NewTurn, text: str, new_chat: Chat | None = None) -> TurnAccepted:
    accepted = await store.add_turn(OWNER, turn, new_chat)
    assert isinstance(accepted, TurnAccepted)
    await store.save_message(replace(accepted.assistant_message, content=text, state="done"))
    return accepted


async def shown(store: ChatStore, chat: Chat) -> list[str]:
    stored = await store.chat(OWNER, chat.id)
    assert stored is not None
    return [each.message.content for each in shown_path(await store.messages(OWNER, chat.id), stored.chosen_root)]


def large_chats(turns: int = 500, small: int = 300) -> list[tuple[Chat, list[StoredMessage]]]:
    """Return one long chat and many short ones, which take more than one transaction to write."""
    chat, messages = a_chat("long"), list[StoredMessage]()
    for number in range(2 * turns):
        role: Any = "user" if number % 2 == 0 else "assistant"
        message = replace(an_answer(chat), role=role, state="done", content=f"needle {number}")
        generation_id = message.generation_id if role == "assistant" else None
        above = messages[-1].id if messages else None
        messages.append(replace(message, parent_id=above, generation_id=generation_id))
    return [(chat, messages), *((a_chat(f"short {number}"), []) for number in range(small))]
