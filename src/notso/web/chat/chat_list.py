"""Chat list of the sidebar: headings by day of last use, and unread and activity marks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from datetime import date, datetime

from notso.web.store.protocol import Chat, ChatStore
from notso.web.turns.tab_feed import Feed
from notso.web.turns.turn import Turn
from notso.web.turns.turns import Turns
from notso.web.values.errors import StorageError
from notso.web.values.wording import words


def by_day(chats: Iterable[Chat], today: date | None = None) -> list[tuple[str, list[Chat]]]:
    """Return (heading, chats) groups in list order; pinned chats have their own heading."""
    today = today or date.today()
    groups: dict[str, list[Chat]] = {}
    for chat in chats:
        groups.setdefault(_heading(chat, today), []).append(chat)
    return list(groups.items())


def _heading(chat: Chat, today: date) -> str:
    if chat.pinned:
        return words["day_pinned"]
    used = min(chat.updated_ms / 1000, time.time())  # a wrong clock may have stored a future time
    days = (today - datetime.fromtimestamp(used).date()).days
    if days <= 0:
        return words["day_today"]
    if days == 1:
        return words["day_yesterday"]
    return words["day_week" if days < 8 else "day_month" if days < 31 else "day_older"]


class ListMarks:
    """Announces changed marks to open tabs. Runs on the event loop."""

    def __init__(self, turns: Turns, store: ChatStore, feed: Feed) -> None:
        self._store = store
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_mark.append(self._told)
        turns.at_end.append(lambda turn, usage, finish_reason: self._ended(turn))

    def _told(self, turn: Turn) -> None:
        self._feed.announce(turn.request.options.owner or "", turn.message.chat_id, "", turns=False)

    def _ended(self, turn: Turn) -> None:
        # An answer that ended without a reader leaves its chat unread.
        if turn.log.is_read or turn.interrupted:
            return self._told(turn)
        task = asyncio.create_task(self._mark_unread(turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mark_unread(self, turn: Turn) -> None:
        with contextlib.suppress(StorageError):
            await self._store.update_chat(turn.request.options.owner or "", turn.message.chat_id, unread=True)
        self._told(turn)
