"""Where blocks of finished conversations go when the engine has time, and from where they come back after a restart."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.disk_store import BlockFiles
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, PrefixCache, block_key
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.scheduling.step_plan import Restore

TAG = b"chats"
"""On every file of ours, so that they can be removed and those of nobody else."""

LAST_WORDS_S = 3.0
"""How long closing may take for what was not written yet."""

AHEAD = 16
"""Blocks beyond those of the next step that the disk is told of: what it can have under way at a time."""

LACKING_S = 60.0
"""After so long a block that could not be brought back may be tried again."""

READY_BLOCKS = 64
"""Memory for so many blocks is made ready before anyone asks for what lies on disk: a chat of the default length."""

MOST_READERS = 4
"""Threads that bring blocks back, where there are so many processors."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Offer:
    """A block to be kept, as long as it still holds what it held: `tokens` after `parent`."""

    key: bytes
    parent: bytes
    tokens: list[int]
    block: int
    is_tail: bool
    has_companion: bool


class KVShelf:
    """Blocks of one cache in files (block_files.py). Called between steps, by the thread that owns the cache.

    For formats with companions, those of first blocks and of tails lie in a folder of their own.
    """

    def __init__(self, cache: KVCache, known: PrefixCache, folder: Path, fingerprint: bytes, budget_bytes: int) -> None:
        self._cache = cache
        self._known = known
        beside, for_companions = folder / "companions", budget_bytes // 4
        self._companions: BlockFiles | None = None
        self._former: BlockFiles | None = None  # companions from when the format was another: counted, and removed
        if cache.companion_bytes:
            self._companions = BlockFiles(beside, fingerprint, cache.companion_bytes, for_companions)
        elif beside.is_dir():
            self._former = BlockFiles(beside, fingerprint, 0, 0)
            for_companions = self._former.used_bytes
        else:
            for_companions = 0
        self._files = BlockFiles(folder, fingerprint, cache.block_bytes, budget_bytes - for_companions)
        self._has_room = file_bytes(BLOCK_TOKENS, cache.block_bytes) <= self._files.budget_bytes
        if cache.companion_bytes:
            self._has_room &= file_bytes(BLOCK_TOKENS, cache.companion_bytes) <= for_companions
        self._offers: dict[int, _Offer] = {}  # by block, so there are never more than blocks
        self._lacking: dict[tuple[bytes, bool], float] = {}  # (key, is_tail): known by name, of no use until then

    def has(self, key: bytes) -> bool:
        """Whether the full block known by `key` is there."""
        return not self._is_lacking(key) and self._files.has(key)

    def tail(self, parent: bytes) -> list[int]:
        """The tokens of the part of a block that was kept after `parent`; empty if there is none."""
        return [] if self._is_lacking(parent, is_tail=True) else self._files.tail(parent)

    def _is_lacking(self, key: bytes, *, is_tail: bool = False) -> bool:
        until = self._lacking.get((key, is_tail))
        if until is not None and time.monotonic() >= until:
            del self._lacking[key, is_tail]
            until = None
        return until is not None

    def expect(self, restores: list[Restore]) -> None:
        """These are read next, and what follows them: the disk may begin."""
        for restore in restores:
            self._files.expect(restore.key, is_tail=restore.is_tail)
        if not restores or restores[-1].is_tail:
            return
        sequence, key = restores[-1].sequence, restores[-1].key
        start = (sequence.blocks.index(restores[-1].block) + 1) * BLOCK_TOKENS
        for at in range(start, min(start + AHEAD * BLOCK_TOKENS, len(sequence.tokens) - BLOCK_TOKENS), BLOCK_TOKENS):
            key = block_key(key, sequence.tokens[at : at + BLOCK_TOKENS])
            if not self._files.has(key):
                break
            self._files.expect(key)

    @property
    def ready_blocks(self) -> int:
        """For how many blocks memory should be there: fresh memory can take longer than reading from the disk does."""
        return min(self._files.blocks, READY_BLOCKS)

    def read_all(self, restores: list[Restore]) -> list[bool]:
        """Bring blocks back into their places, several at a time; False for each that is not there after all.

        Checksums and fresh memory take the processor longer than a disk that has them ready.
        """
        at_once = min(MOST_READERS, len(os.sched_getaffinity(0)), len(restores))
        if at_once < 2:
            return [self._read_or_note(restore) for restore in restores]
        with ThreadPoolExecutor(at_once, thread_name_prefix="notso-kv-shelf") as readers:
            results = [
                None if self._has_companion(restore) else readers.submit(self._read_or_note, restore)
                for restore in restores
            ]
            return [
                self._read_or_note(restore) if result is None else result.result()
                for restore, result in zip(restores, results, strict=True)
            ]

    def _has_companion(self, restore: Restore) -> bool:
        """Those are brought back by the thread that owns the cache: their places are given out there."""
        is_first = restore.sequence.blocks[0] == restore.block
        return self._companions is not None and (restore.is_tail or is_first)

    def _read_or_note(self, restore: Restore) -> bool:
        try:
            found = self._read(restore)
        except Exception:  # memory, companions: it can be computed as well
            _log.exception("a block was not brought back")
            found = False
        if not found:
            self._lacking[restore.key, restore.is_tail] = time.monotonic() + LACKING_S
        return found

    def _read(self, restore: Restore) -> bool:
        """Into its place, which nobody reads before all of it is there."""
        sequence, index = restore.sequence, restore.sequence.blocks.index(restore.block)
        tokens = sequence.tokens[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
        if restore.is_tail:
            wanted, tokens = tokens[: sequence.computed - index * BLOCK_TOKENS], self._files.tail(restore.key)
            if tokens[: len(wanted)] != wanted:
                return False  # another by now
        found = self._files.read_into(
            self._cache.block_memory(restore.block), restore.key, tokens, is_tail=restore.is_tail
        )
        if found and self._companions is not None and self._has_companion(restore):
            companion = self._companions.get(restore.key, tokens, is_tail=restore.is_tail)
            found = companion is not None
            if companion is not None:
                self._cache.write_companion(restore.block, companion)
        return found

    def offer(self, sequence: Sequence) -> None:
        """A sequence is over: what it has computed is worth keeping. Call before its blocks are given back."""
        if not (self._has_room and self._files.is_writing):
            self._offers.clear()
            return
        parent, at = sequence.root, 0
        for key, block in zip(sequence.keys, sequence.blocks, strict=False):
            tokens = sequence.tokens[at : at + BLOCK_TOKENS]
            if not self.has(key):
                self._offers[block] = _Offer(key, parent, tokens, block, False, has_companion=at == 0)
            parent, at = key, at + BLOCK_TOKENS
        tokens = sequence.tokens[at : sequence.computed]
        if tokens:
            block = sequence.blocks[len(sequence.keys)]
            self._offers[block] = _Offer(parent, parent, tokens, block, True, True)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._offers) and self._files.is_writing

    def work(self) -> bool:
        """Hand one block over to be written; False if there is nothing, or no room for it now."""
        if not self.has_work:
            return False
        offer = next(iter(self._offers.values()))
        is_gone = self._known.find(offer.parent, offer.tokens) != offer.block  # given to others meanwhile
        is_there = not offer.is_tail and self.has(offer.key)
        if not (is_gone or is_there or self._put(offer)):
            return False
        del self._offers[offer.block]
        return True

    def _put(self, offer: _Offer) -> bool:
        """Whether there is nothing more to do for it."""
        if offer.has_companion and self._companions is not None:
            companion = self._cache.read_companion(offer.block)
            if companion is None:
                return True
            if not self._companions.put(offer.key, offer.tokens, companion, is_tail=offer.is_tail, tag=TAG):
                return not self._companions.is_writing
        content = self._cache.read_block(offer.block)
        if not self._files.put(offer.key, offer.tokens, content, is_tail=offer.is_tail, tag=TAG):
            return False
        self._lacking.pop((offer.key, offer.is_tail), None)
        return True

    def clear(self) -> None:
        """Remove everything that was kept, of every conversation."""
        self._offers.clear()
        for files in (self._files, self._companions, self._former):
            if files is not None:
                files.remove(TAG)

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and let go of the folder."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.has_work and time.monotonic() < deadline:
            if not self.work():
                time.sleep(0.01)
        for files in (self._files, self._companions, self._former):
            if files is not None:
                files.close()
