"""Where blocks of finished conversations go when the engine has time, and from where they come back after a restart."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from notso.smollm3.block_file import file_bytes
from notso.smollm3.block_files import BlockFiles
from notso.smollm3.kv_cache import KVCache
from notso.smollm3.prefix_cache import BLOCK_TOKENS, PrefixCache
from notso.smollm3.scheduler import Restore
from notso.smollm3.sequence import Sequence

TAG = b"chats"
"""On every file of ours, so that they can be removed and those of nobody else."""

LAST_WORDS_S = 3.0
"""How long closing may take for what was not written yet."""

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
        for_companions = budget_bytes // 4 if cache.companion_bytes else 0
        self._files = BlockFiles(folder, fingerprint, cache.block_bytes, budget_bytes - for_companions)
        self._companions: BlockFiles | None = None
        self._has_room = file_bytes(BLOCK_TOKENS, cache.block_bytes) <= self._files.budget_bytes
        if cache.companion_bytes:
            path = folder / "companions"
            self._companions = BlockFiles(path, fingerprint, cache.companion_bytes, for_companions)
            self._has_room &= file_bytes(BLOCK_TOKENS, cache.companion_bytes) <= for_companions
        self._offers: dict[int, _Offer] = {}  # by block, so there are never more than blocks
        self._lacking: set[tuple[bytes, bool]] = set()  # (key, is_tail): known by name, and of no use
        self._buffer = bytearray(cache.block_bytes)

    def has(self, key: bytes) -> bool:
        """Whether the full block known by `key` is there."""
        return (key, False) not in self._lacking and self._files.has(key)

    def tail(self, parent: bytes) -> list[int]:
        """The tokens of the part of a block that was kept after `parent`; empty if there is none."""
        return [] if (parent, True) in self._lacking else self._files.tail(parent)

    def read(self, restore: Restore) -> bool:
        """Bring a block back into its place; False if it is not there after all."""
        try:
            found = self._read(restore)
        except Exception:  # memory, companions: it can be computed as well
            _log.exception("a block was not brought back")
            found = False
        if not found:
            self._lacking.add((restore.key, restore.is_tail))
        return found

    def _read(self, restore: Restore) -> bool:
        sequence, index = restore.sequence, restore.sequence.blocks.index(restore.block)
        tokens = sequence.tokens[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
        if restore.is_tail:
            wanted, tokens = tokens[: sequence.computed - index * BLOCK_TOKENS], self._files.tail(restore.key)
            if tokens[: len(wanted)] != wanted:
                return False  # another by now
        found = self._files.read_into(self._buffer, restore.key, tokens, is_tail=restore.is_tail)
        if found and self._companions is not None and (restore.is_tail or index == 0):
            companion = self._companions.get(restore.key, tokens, is_tail=restore.is_tail)
            found = companion is not None
            if companion is not None:
                self._cache.write_companion(restore.block, companion)
        if not found:
            return False
        self._cache.write_block(restore.block, self._buffer)
        return True

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
        self._lacking.discard((offer.key, offer.is_tail))
        return True

    def clear(self) -> None:
        """Remove everything that was kept, of every conversation."""
        self._offers.clear()
        self._files.remove(TAG)
        if self._companions is not None:
            self._companions.remove(TAG)

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and let go of the folder."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.has_work and time.monotonic() < deadline:
            if not self.work():
                time.sleep(0.01)
        self._files.close()
        if self._companions is not None:
            self._companions.close()
