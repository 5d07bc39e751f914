"""Change feed that keeps the browser tabs of an owner in sync. Nothing is stored."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable

MAX_CHATS = 512
MAX_TABS = 16


class Feed:
    """Counts changes since the server's start. Use on the event loop only."""

    def __init__(self) -> None:
        # Called for each local change with owner, chat, tab, and whether messages changed.
        self.at_announce: Callable[[str, str, str, bool], None] | None = None
        self._boot = secrets.token_hex(4)
        self._number = 0
        self._lists: dict[str, int] = {}
        self._turns: OrderedDict[str, OrderedDict[str, int]] = OrderedDict()
        self._changed = asyncio.Event()
        self.closed = False

    @property
    def revision(self) -> str:
        return f"{self._boot}-{self._number}"

    def announce(self, owner: str, chat_id: str, tab: str, *, turns: bool = True) -> None:
        """Publish a change made in `tab`; `turns`: of messages too."""
        self.take(owner, chat_id, tab, turns)
        if self.at_announce is not None:
            self.at_announce(owner, chat_id, tab, turns)

    def take(self, owner: str, chat_id: str, tab: str, turns: bool) -> None:
        """Record a change from another replica."""
        self._number += 1
        self._lists[owner] = self._number
        if turns:
            tabs = self._turns.setdefault(chat_id, OrderedDict())
            self._turns.move_to_end(chat_id)
            tabs[tab] = self._number
            tabs.move_to_end(tab)
            if len(tabs) > MAX_TABS:
                tabs.popitem(last=False)
            if len(self._turns) > MAX_CHATS:
                self._turns.popitem(last=False)
        self._wake()

    def begin_anew(self) -> None:
        """Make every page refresh."""
        self._boot = secrets.token_hex(4)
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def since(self, revision: str, owner: str, chat_id: str, tab: str) -> list[str]:
        """Return what to reload: 'chats', 'turns', both or neither."""
        boot, _, text = revision.partition("-")
        if boot != self._boot or not text.isascii() or not text.isdecimal() or len(text) > 15:
            return ["chats", "turns"]  # a revision of an earlier server process
        number = int(text)
        events = ["chats"] if self._lists.get(owner, 0) > number else []
        by_others = (at for other, at in self._turns.get(chat_id, {}).items() if other != tab or not tab)
        if max(by_others, default=0) > number:
            events.append("turns")
        return events

    async def wait(self, revision: str, seconds: float) -> bool:
        """Wait for a change. Return False on timeout."""
        if revision != self.revision or self.closed:
            return True
        try:
            return await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
