"""What the engine does while nobody asks, a little at a time: what makes later requests quicker."""

from __future__ import annotations

import time
from collections.abc import Callable

from notso.smollm3.kv_shelf import KVShelf
from notso.smollm3.next_turn import NextTurns
from notso.smollm3.runner import Runner
from notso.smollm3.scheduler import Plan, Scheduler

SHELF_S = 0.005
"""Finished conversations go to the disk a block at a time: so often when idle."""

LONGEST_NAP_S = 60.0


class IdleWork:
    """Memory for what is on the shelf, and the beginnings of next turns. The engine's thread calls, but for
    `disturb`, which any may."""

    def __init__(self, runner: Runner, scheduler: Scheduler, shelf: KVShelf | None) -> None:
        self._shelf = shelf
        self._is_ready = shelf is None  # the cache's memory, for what is on the shelf
        self._quiet_since = time.monotonic()
        self.next_turns = NextTurns(runner, scheduler, shelf)

    def disturb(self) -> None:
        """Somebody asks for something, or an answer has ended."""
        self._quiet_since = time.monotonic()

    def nap_s(self, is_idle: bool) -> float:
        """For how long there is nothing to do, unless somebody comes."""
        nap = LONGEST_NAP_S
        if self._shelf is not None and (self._shelf.has_work or (is_idle and not self._is_ready)):
            nap = SHELF_S
        return min(nap, self.next_turns.due_s(self._quiet_s)) if is_idle else nap

    def work(self, bring_back: Callable[[Plan], None], go_on: Callable[[], bool]) -> None:
        """A little, when nothing waits or runs; see `NextTurns.read`."""
        if self._shelf is not None:
            self._is_ready = not self._shelf.make_ready()
        if not self.next_turns.due_s(self._quiet_s):
            self.next_turns.read(bring_back, go_on)

    @property
    def _quiet_s(self) -> float:
        return time.monotonic() - self._quiet_since
