"""Chats under headings that say when they were last used."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import date, datetime

from notso.web.store.protocol import Chat
from notso.web.values.wording import words


def by_day(chats: Iterable[Chat], today: date | None = None) -> list[tuple[str, list[Chat]]]:
    """(heading, chats) in the order the chats come; pinned ones have a heading of their own."""
    today = today or date.today()
    groups: dict[str, list[Chat]] = {}
    for chat in chats:
        groups.setdefault(_heading(chat, today), []).append(chat)
    return list(groups.items())


def _heading(chat: Chat, today: date) -> str:
    if chat.pinned:
        return words["day_pinned"]
    used = min(chat.updated_ms / 1000, time.time())  # a clock that stood wrong may have written any time at all
    days = (today - datetime.fromtimestamp(used).date()).days
    if days <= 0:
        return words["day_today"]
    if days == 1:
        return words["day_yesterday"]
    return words["day_week" if days < 8 else "day_month" if days < 31 else "day_older"]
