"""Idle-time work that speeds up later requests, in small increments."""

from __future__ import annotations

import time
from collections.abc import Callable

from notso.smollm3.engine.block_mover import BlockMover
from notso.smollm3.engine.prefix_warmup import QUIET_S, PrefixWarmup
from notso.smollm3.kv.offload import KVOffload
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.scheduling.scheduler import Scheduler

# Interval of idle work: touching memory, capturing steps one by one, and offloading finished conversations block by
# block.
TICK_S = 0.005

LONGEST_NAP_S = 60.0


class BackgroundWork:
    """Idle-time warm-up on the engine's thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, offload: KVOffload | None, mover: BlockMover) -> None:
        self._runner = runner
        self._cache = runner.cache
        self._offload = offload
        self._has_memory = False
        self._quiet_since = time.monotonic()
        self.prefix_warmup = PrefixWarmup(runner, scheduler, offload, mover)

    def disturb(self) -> None:
        """Note activity. Thread-safe."""
        self._quiet_since = time.monotonic()
        self._has_memory = False

    def nap_s(self, is_idle: bool) -> float:
        """Return the seconds until there is idle work."""
        nap = LONGEST_NAP_S
        if (is_idle and not self._has_memory) or (self._offload is not None and self._offload.has_work):
            nap = TICK_S
        if not is_idle:
            return nap
        if not self._runner.has_captured_steps:
            nap = min(nap, max(TICK_S, QUIET_S - self._quiet_s))
        return min(nap, self.prefix_warmup.due_s(self._quiet_s))

    def work(self, go_on: Callable[[], bool]) -> None:
        """Do one increment while idle; see `PrefixWarmup.read`."""
        if not self._has_memory:
            blocks = 0 if self._offload is None else self._offload.ready_blocks
            self._has_memory = not self._cache.touch_idle(blocks)
        if not self.prefix_warmup.due_s(self._quiet_s):
            self.prefix_warmup.read(go_on)
        elif not self._runner.has_captured_steps and self._quiet_s >= QUIET_S:
            self._runner.capture_ahead()

    @property
    def _quiet_s(self) -> float:
        return time.monotonic() - self._quiet_since
