"""Plugins that keep conversations: one as it should be, and one that answers nothing."""

from __future__ import annotations

import threading
from typing import Any

from notso.plugins import Plugin
from notso.web.store.served import served
from notso.web.store.sqlite.store import SQLiteStore


class StuckStore(SQLiteStore):
    """Opens, and then says nothing more."""

    async def chats(self, owner: str) -> Any:
        threading.Event().wait()


KEEPER = Plugin(store=served(SQLiteStore))
STUCK = Plugin(store=served(StuckStore))
