"""The list of chats follows what is being answered: its marks are told as they change, and an answer that ends while
nobody looks leaves its chat unread."""

from __future__ import annotations

import asyncio
import contextlib

from notso.web.store.protocol import ChatStore
from notso.web.turns.tab_feed import Feed
from notso.web.turns.turn import Turn
from notso.web.turns.turns import Turns
from notso.web.values.errors import StorageError


class ListMarks:
    """Listens to turns. Everything here runs on the event loop."""

    def __init__(self, turns: Turns, store: ChatStore, feed: Feed) -> None:
        self._store = store
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_mark.append(self._told)
        turns.at_end.append(lambda turn, usage, finish_reason: self._ended(turn))

    def _told(self, turn: Turn) -> None:
        self._feed.announce(turn.request.options.owner or "", turn.message.chat_id, "", turns=False)

    def _ended(self, turn: Turn) -> None:
        if turn.log.is_read or turn.interrupted:
            return self._told(turn)
        task = asyncio.create_task(self._mark_unread(turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mark_unread(self, turn: Turn) -> None:
        with contextlib.suppress(StorageError):
            await self._store.set_unread(turn.request.options.owner or "", turn.message.chat_id, True)
        self._told(turn)
