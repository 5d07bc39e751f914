"""Offload blocks to disk and load them again, and execute the block moves that precede a step.

Blocks of finished conversations and of pinned readings are offloaded. A reading is a named prompt prefix (see
block_pool), and a window is a more precise copy of a block (see kv_cache).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.disk_store import DiskStore
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, BlockPool, block_hash, is_reading
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import BlockCopy, BlockLoad, Plan, Sequence
from notso.system.processors import usable_processors

TAG = b"chats"  # tag in file names; clearing the cache removes only files with this tag

SHUTDOWN_WRITE_S = 3.0  # seconds that pending writes may take at shutdown

AHEAD = 16  # blocks to read ahead beyond those of the next step: as many as a disk can read concurrently

RETRY_S = 60.0  # seconds until a failed load is retried

READY_BLOCKS = 64  # maximum number of blocks to touch in advance of loads; the default context has this many

MOST_READERS = 4  # maximum number of threads that load blocks

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingBlock:
    # A block to write to disk if it still contains `tokens` in the same context (`parent_hash`).
    hash: bytes
    parent_hash: bytes
    tokens: list[int]
    block: int
    is_partial: bool
    needs_window: bool
    is_pinned: bool = False


class KVOffload:
    """Stores blocks of one cache in files. Must be used on the engine thread, between steps."""

    def __init__(
        self,
        cache: KVCache,
        pool: BlockPool,
        folder: Path,
        cache_version: bytes,
        budget_bytes: int,
        library_bytes: int,
    ) -> None:
        self._cache = cache
        self._pool = pool
        # Windows (of first and partial blocks) get a quarter of the budget.
        windows = _open_windows(folder, cache_version, cache.window_bytes, budget_bytes // 4)
        self._windows = windows if cache.window_bytes else None
        windows_bytes = 0
        if windows is not None:
            windows_bytes = windows.budget_bytes if cache.window_bytes else windows.used_bytes
        self._files = DiskStore(folder, cache_version, cache.block_bytes, budget_bytes - windows_bytes)
        self._chats = [self._files, *([] if windows is None else [windows])]
        self._has_room = all(
            _file_bytes(files) <= files.budget_bytes for files in (self._files, self._windows) if files is not None
        )
        self.readings = PinnedReadings(
            folder / "readings", cache_version, cache.block_bytes, cache.window_bytes, library_bytes
        )
        self._stores = [*self._chats, *self.readings.stores]
        self._offers: dict[int, _PendingBlock] = {}  # by block: a new offer replaces an older one
        # (hash, is_partial) of a block that could not be loaded -> time until which the block is not loaded again
        self._missing_until: dict[tuple[bytes, bool], float] = {}

    def adopt(self, cache_version: bytes, earlier: Iterable[bytes]) -> None:
        self._missing_until.clear()
        versions = list(earlier)
        for files in self._stores:
            files.adopt(cache_version, versions)

    def has(self, hash: bytes) -> bool:
        return not self._is_missing(hash) and (self._files.has(hash) or self.readings.files.has(hash))

    def partial(self, parent_hash: bytes) -> list[int]:
        return [] if self._is_missing(parent_hash, is_partial=True) else self._files.partial(parent_hash)

    def needs_window(self, *, is_first: bool, is_partial: bool) -> bool:
        return self._windows is not None and (is_first or is_partial)

    def _is_missing(self, hash: bytes, *, is_partial: bool = False) -> bool:
        until = self._missing_until.get((hash, is_partial))
        if until is not None and time.monotonic() >= until:
            del self._missing_until[hash, is_partial]
            until = None
        return until is not None

    def prefetch(self, loads: list[BlockLoad]) -> None:
        for load in loads:
            self._prefetch_block(load.hash, is_partial=load.is_partial)
        if not loads or loads[-1].is_partial:
            return
        sequence, hash = loads[-1].sequence, loads[-1].hash
        start = (sequence.blocks.index(loads[-1].block) + 1) * BLOCK_TOKENS
        for at in range(start, min(start + AHEAD * BLOCK_TOKENS, len(sequence.tokens) - BLOCK_TOKENS), BLOCK_TOKENS):
            parent_hash = sequence.salt.parent_hash(at // BLOCK_TOKENS, hash)
            hash = block_hash(parent_hash, sequence.tokens[at : at + BLOCK_TOKENS])
            if not self.has(hash):
                break
            self._prefetch_block(hash)

    def _prefetch_block(self, hash: bytes, *, is_partial: bool = False) -> None:
        if not is_partial and self.readings.files.has(hash):
            self.readings.files.prefetch(hash)
        else:
            self._files.prefetch(hash, is_partial=is_partial)

    @property
    def ready_blocks(self) -> int:
        # Number of blocks to touch in advance of loads, because page faults can take longer than reading from disk.
        return min(self._files.blocks + self.readings.files.blocks, READY_BLOCKS)

    def load_all(self, loads: list[BlockLoad]) -> list[bool]:
        """Load blocks in parallel; return whether each was loaded."""
        # Uses several threads, because checksums and page faults take more time than the disk.
        threads = min(MOST_READERS, usable_processors(), len(loads))
        if threads < 2:
            return [self._load_or_mark_missing(load) for load in loads]
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="notso-kv-offload") as readers:
                results = [
                    None if self._has_window(load) else readers.submit(self._load_or_mark_missing, load)
                    for load in loads
                ]
                return [
                    self._load_or_mark_missing(load) if result is None else result.result()
                    for load, result in zip(loads, results, strict=True)
                ]
        except RuntimeError:  # a thread could not be started; those that were started have ended
            return [self._load_or_mark_missing(load) for load in loads]

    def _has_window(self, load: BlockLoad) -> bool:
        # Windows are loaded on the engine thread, because only this thread may access the map of windows.
        return self.needs_window(is_first=load.sequence.blocks[0] == load.block, is_partial=load.is_partial)

    def _load_or_mark_missing(self, load: BlockLoad) -> bool:
        try:
            found = self._load(load)
        except Exception:  # not fatal: the block can be computed again
            _log.exception("a cached block could not be loaded")
            found = False
        if not found:
            self._missing_until[load.hash, load.is_partial] = time.monotonic() + RETRY_S
        return found

    def _load(self, load: BlockLoad) -> bool:
        sequence, index = load.sequence, load.sequence.blocks.index(load.block)
        tokens = sequence.tokens[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
        if load.is_partial:
            expected, tokens = tokens[: sequence.computed - index * BLOCK_TOKENS], self._files.partial(load.hash)
            if tokens[: len(expected)] != expected:
                return False  # the file has been replaced
        found = self._cache.load_block(
            load.block,
            lambda memory: (
                (not load.is_partial and self.readings.files.read_into(memory, load.hash, tokens))
                or self._files.read_into(memory, load.hash, tokens, is_partial=load.is_partial)
            ),
        )
        if found and self._windows is not None and self._has_window(load):
            window = None if load.is_partial else self.readings.window(load.hash, tokens)
            window = window or self._windows.get(load.hash, tokens, is_partial=load.is_partial)
            found = window is not None
            if window is not None:
                self._cache.write_window(load.block, window)
        return found

    def offer(self, sequence: Sequence) -> None:
        if not self._is_writing:
            self._offers.clear()
            return
        if sequence.is_evicted:
            return
        pinned = self._reserve_pinned_blocks(sequence)
        at = 0
        for index, (hash, block) in enumerate(zip(sequence.hashes, sequence.blocks, strict=False)):
            parent_hash = sequence.parent_hash(index)
            tokens = sequence.tokens[at : at + BLOCK_TOKENS]
            if index < pinned:
                if not self.readings.files.has(hash):
                    self._offers[block] = _PendingBlock(
                        hash, parent_hash, tokens, block, False, at == 0, is_pinned=True
                    )
                elif sequence.reading is not None:
                    self.readings.record_owner(hash, sequence.reading)
            elif not self.has(hash):
                offered = self._offers.get(block)
                # An equal offer is kept, because it may be pinned.
                if self._has_room and (offered is None or offered.hash != hash):
                    self._offers[block] = _PendingBlock(hash, parent_hash, tokens, block, False, at == 0)
            else:
                for files, owner in product(self._chats, sequence.block_owners(index)):
                    if owner is not None:
                        files.record_owner(hash, owner)
            at += BLOCK_TOKENS
        parent_hash = sequence.next_parent
        tokens = sequence.tokens[at : sequence.computed]
        if tokens and self._has_room:
            block = sequence.blocks[len(sequence.hashes)]
            self._offers[block] = _PendingBlock(parent_hash, parent_hash, tokens, block, True, True)

    def _reserve_pinned_blocks(self, sequence: Sequence) -> int:
        # Makes room for the blocks to pin; returns their number.
        if sequence.reading is None or not self.readings.is_writing:
            return 0
        hashes = sequence.hashes[: sequence.salt.shared_blocks]
        offered = {offer.hash for offer in self._offers.values() if offer.is_pinned}
        missing = [hash for hash in hashes if hash not in offered and not self.readings.files.has(hash)]
        has_room = self.readings.evict_for(sequence.reading, len(hashes), len(offered) + len(missing))
        return len(hashes) if has_room else 0

    @property
    def _is_writing(self) -> bool:
        return (self._has_room and self._files.is_writing) or self.readings.is_writing

    @property
    def has_work(self) -> bool:
        return bool(self._offers) and self._is_writing

    def work(self) -> bool:
        """Queue one offered block for writing; return False if none is offered or the queue is full."""
        if not self.has_work:
            return False
        offer = next(iter(self._offers.values()))
        is_reused = self._pool.find(offer.parent_hash, offer.tokens) != offer.block
        is_evicted = not self._pool.conversations(offer.block)
        try:
            if not (is_reused or is_evicted or self._queue_offer(offer)):
                return False
        except MemoryError:  # running answers do not depend on the disk cache
            _log.warning("a block was not written to the disk cache, because memory is short")
        del self._offers[offer.block]
        return True

    def _queue_offer(self, offer: _PendingBlock) -> bool:
        files, windows = (
            (self.readings.files, self.readings.windows) if offer.is_pinned else (self._files, self._windows)
        )
        if not files.is_writing:
            return True
        if offer.needs_window and windows is not None:
            window = self._cache.read_window(offer.block)
            if window is None:
                return True
            if not self._store(windows, offer, window):
                return not windows.is_writing
        content = self._cache.read_block(offer.block)
        if not self._store(files, offer, content):
            return False
        self._missing_until.pop((offer.hash, offer.is_partial), None)
        return True

    def _store(self, files: DiskStore, offer: _PendingBlock, content: bytes) -> bool:
        conversations = self._pool.conversations(offer.block)
        if offer.is_pinned:
            conversations = frozenset(filter(is_reading, conversations))
        return files.put(
            offer.hash, offer.tokens, content, is_partial=offer.is_partial, tag=TAG, conversations=conversations
        )

    def evict(self, conversation: bytes | None) -> None:
        if conversation is None:
            self._offers.clear()
        for files in self._stores:
            if conversation is None:
                files.remove(TAG)
            else:
                files.evict(conversation)

    def discard_offers(self) -> None:
        # The device has failed, so the contents of offered blocks cannot be read.
        self._offers.clear()

    def close(self) -> None:
        deadline = time.monotonic() + SHUTDOWN_WRITE_S
        while self.has_work and time.monotonic() < deadline:
            if not self.work():
                time.sleep(0.01)
        for files in self._stores:
            files.close()


class PinnedReadings:
    """Pinned readings on disk, of all models. `windows` is None if the KV format has none."""

    def __init__(
        self, folder: Path, cache_version: bytes, block_bytes: int, window_bytes: int, budget_bytes: int
    ) -> None:
        self._budget_bytes = budget_bytes
        self._has_warned = False
        self.files = DiskStore(folder, cache_version, block_bytes, budget_bytes, evicts=False)
        windows = _open_windows(folder, cache_version, window_bytes, budget_bytes, evicts=False)
        self.windows = windows if window_bytes else None
        self.stores = [self.files, *([] if windows is None else [windows])]

    @property
    def is_writing(self) -> bool:
        return all(files.is_writing for files in self.stores)

    def window(self, hash: bytes, tokens: list[int]) -> bytes | None:
        """Return the window of a first block, or None."""
        return None if self.windows is None else self.windows.get(hash, tokens)

    def record_owner(self, hash: bytes, reading: bytes) -> None:
        for files in self.stores:
            files.record_owner(hash, reading)

    def stored_size(self, reading: bytes) -> tuple[int, int]:
        """Return the number of a reading's blocks, and their size in bytes, including windows."""
        blocks, *windows = (files.sizes(reading) for files in self.stores)
        return len(blocks), sum(blocks) + sum(map(sum, windows))

    def evict_for(self, reading: bytes, blocks: int, unwritten: int) -> bool:
        """Evict readings other than `reading`, which has `blocks` blocks, to make room for `unwritten` blocks.

        Return False if this is impossible.
        """
        block, window = (0 if files is None else _file_bytes(files) for files in (self.files, self.windows))
        if blocks * block + window > self._budget_bytes:
            if not self._has_warned:
                _log.warning("a reading of %d blocks exceeds the disk budget of readings and is not pinned", blocks)
                self._has_warned = True
            return False
        for files in self.stores:
            files.mark_used(reading)
        others = iter([each for each in self.files.by_use() if each != reading])
        while unwritten and self._used_bytes + unwritten * block + window > self._budget_bytes:
            oldest = next(others, None)
            if oldest is None:
                return False
            for files in self.stores:
                files.evict(oldest)
        return True

    @property
    def _used_bytes(self) -> int:
        return sum(files.used_bytes + files.queued_bytes for files in self.stores)


def _open_windows(
    folder: Path, cache_version: bytes, window_bytes: int, budget_bytes: int, *, evicts: bool = True
) -> DiskStore | None:
    # If the KV format has no windows, returns the store of an earlier format's windows, which count toward the budget.
    folder = folder / "windows"
    if not window_bytes and not os.path.isdir(folder):  # noqa: PTH112 - raises no error
        return None
    return DiskStore(folder, cache_version, window_bytes, budget_bytes if window_bytes else 0, evicts=evicts)


def _file_bytes(files: DiskStore) -> int:
    return file_bytes(BLOCK_TOKENS, files.block_bytes)


class BlockMover:
    """Executes block moves (copies within the cache and loads from disk), on the engine thread."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, offload: KVOffload | None) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._offload = offload

    def move(self, plan: Plan) -> None:
        """Execute a plan's moves; remove the plan's chunks of sequences with failed loads."""
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
