"""What the engine does while nobody asks, a little at a time: what makes later requests quicker."""

from __future__ import annotations

import time
from collections.abc import Callable

from notso.smollm3.engine.prefix_warmup import QUIET_S, NextTurns
from notso.smollm3.kv.offload import KVShelf
from notso.smollm3.model.model_runner import Runner
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.step_plan import Plan

TICK_S = 0.005
"""Memory is had a little, steps are recorded one by one, and finished conversations go to the disk a block at a time:
so often when idle."""

LONGEST_NAP_S = 60.0


class IdleWork:
    """Memory and recorded steps for what comes next, and the beginnings of next turns. The engine's thread calls, but
    for `disturb`, which any may."""

    def __init__(self, runner: Runner, scheduler: Scheduler, shelf: KVShelf | None) -> None:
        self._runner = runner
        self._cache = runner.cache
        self._shelf = shelf
        self._has_memory = False
        self._quiet_since = time.monotonic()
        self.next_turns = NextTurns(runner, scheduler, shelf)

    def disturb(self) -> None:
        """Somebody asks for something, or an answer has ended."""
        self._quiet_since = time.monotonic()
        self._has_memory = False

    def nap_s(self, is_idle: bool) -> float:
        """For how long there is nothing to do, unless somebody comes."""
        nap = LONGEST_NAP_S
        if (is_idle and not self._has_memory) or (self._shelf is not None and self._shelf.has_work):
            nap = TICK_S
        if not is_idle:
            return nap
        if not self._runner.has_programs:
            nap = min(nap, max(TICK_S, QUIET_S - self._quiet_s))
        return min(nap, self.next_turns.due_s(self._quiet_s))

    def work(self, bring_back: Callable[[Plan], None], go_on: Callable[[], bool]) -> None:
        """A little, when nothing waits or runs; see `NextTurns.read`."""
        if not self._has_memory:
            blocks = 0 if self._shelf is None else self._shelf.ready_blocks
            self._has_memory = not self._cache.touch_idle(blocks)
        if not self.next_turns.due_s(self._quiet_s):
            self.next_turns.read(bring_back, go_on)
        elif not self._runner.has_programs and self._quiet_s >= QUIET_S:
            self._runner.record_ahead()

    @property
    def _quiet_s(self) -> float:
        return time.monotonic() - self._quiet_since
