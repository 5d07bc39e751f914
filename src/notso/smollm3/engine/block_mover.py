"""Carries out what a plan says about blocks, before its step: copies within the cache, and loads from the disk."""

from __future__ import annotations

from itertools import groupby

from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.kv.offload import KVOffload
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.scheduling.step_plan import BlockCopy, BlockLoad, Plan


class BlockMover:
    """Only the engine's thread may call."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, offload: KVOffload | None) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._offload = offload

    def move(self, plan: Plan) -> None:
        """All moves, in their order. Chunks of sequences whose blocks could not be loaded are taken out of the plan."""
        if not plan.moves:
            return
        void = set[Sequence]()
        if self._offload is not None:
            self._offload.expect(plan.loads)
        for kind, moves in groupby(plan.moves, type):
            group = list(moves)
            if kind is BlockLoad:
                self._load([load for load in group if isinstance(load, BlockLoad) and load.sequence not in void], void)
                continue
            for copy in group:
                if isinstance(copy, BlockCopy):
                    self._cache.copy_block(copy)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence not in void]

    def _load(self, loads: list[BlockLoad], void: set[Sequence]) -> None:
        """Several at a time. Adds to `void` the sequences that lack a block."""
        found = [False] * len(loads) if self._offload is None else self._offload.load_all(loads)
        for load, is_there in zip(loads, found, strict=True):
            if load.sequence in void:
                continue
            if is_there:
                self._scheduler.loaded(load)
            else:
                self._scheduler.load_failed(load)
                void.add(load.sequence)
