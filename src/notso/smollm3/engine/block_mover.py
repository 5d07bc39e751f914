"""Execution of the block moves that precede a step: copies within the cache and loads from disk."""

from __future__ import annotations

from itertools import groupby

from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.kv.offload import KVOffload
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import BlockCopy, BlockLoad, Plan, Sequence


class BlockMover:
    """Executes block moves, on the engine thread."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, offload: KVOffload | None) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._offload = offload

    def move(self, plan: Plan) -> None:
        """Execute the moves of a plan; remove the chunks of sequences whose loads failed."""
        if not plan.moves:
            return
        failed = set[Sequence]()
        if self._offload is not None:
            self._offload.prefetch(plan.loads)
        for _, moves in groupby(plan.moves, type):
            loads = []
            for move in moves:
                if isinstance(move, BlockCopy):
                    self._cache.copy_block(move)
                elif move.sequence not in failed:
                    loads.append(move)
            if loads:
                self._load(loads, failed)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence not in failed]

    def _load(self, loads: list[BlockLoad], failed: set[Sequence]) -> None:
        loaded = [False] * len(loads) if self._offload is None else self._offload.load_all(loads)
        for load, is_loaded in zip(loads, loaded, strict=True):
            if load.sequence in failed:
                continue
            if is_loaded:
                self._scheduler.on_block_loaded(load)
            else:
                self._scheduler.on_load_failed(load)
                failed.add(load.sequence)
