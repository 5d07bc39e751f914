"""Blocks of the key-value cache on disk, so that a conversation goes on after a restart without being read again.

One file holds one block of 128 positions in all layers, or the beginning of one (a partial block: what an answer ended
in). Its name says the model and settings (the cache version), what the block is known by, and whose it is. A file is
believed only if every field and the checksum agree; anything else is a miss, and the file is removed. So a damaged
cache costs time and nothing else. The bytes reveal what was said: the folder is 0700, its files 0600.

Written in the background by a thread of low priority: to a temporary name, flushed (fsync), then renamed, so that after
a power cut a name hardly ever stands for bytes that are not there; the folder itself is flushed when the queue runs
empty. At the end of the process there is no time for that: what still waits is written and not flushed, and should the
power go in that minute, the checksum says so. The least recently read file goes first when the budget is reached.

The checksum is CRC-32: it guards against accidents, and takes a fifth of the time of a cryptographic hash (4 GB/s
against 0.9 for BLAKE2b). Who can write into the folder could as well write another model.
"""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import (
    BlockName,
    DamagedBlockError,
    announce,
    encode_block,
    file_bytes,
    flush_folder,
    read_block,
    read_tokens,
    write_file,
)
from notso.smollm3.kv.block_folder import BlockFolder
from notso.smollm3.scheduling.block_pool import ANONYMOUS

MIB = 1 << 20
QUEUE_BYTES = 128 * MIB
"""What may wait for being written; more is refused, as it can still be offered later."""

FREE_BYTES = 1024 * MIB
"""What is left free of the disk."""

_log = logging.getLogger(__name__)


class _QueuedBlock:
    """A block on its way to the disk."""

    def __init__(
        self, name: BlockName, tokens: Sequence[int], content: bytes, conversations: Collection[bytes]
    ) -> None:
        self.name = name
        self.tokens = array("i", tokens)
        self.content = content
        self.conversations = set(conversations)  # none: it was forgotten


class DiskStore:
    """The blocks of one cache, `block_bytes` each, in `folder`, which may hold those of other models too.

    cache_version: whatever the content of a block depends on besides its tokens. budget_bytes: of all files together,
    those of other models included. A second engine, of this process or another, finds what is there, and writes nothing
    until the first has ended.

    Methods may be called from any thread. None raises for what a disk does: a cache that cannot be used is off, with
    one warning.
    """

    def __init__(
        self,
        folder: Path,
        cache_version: bytes,
        block_bytes: int,
        budget_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        free_bytes: int = FREE_BYTES,
    ) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.budget_bytes = budget_bytes
        self._cache_version = cache_version
        self._queue_bytes = queue_bytes
        self._free_bytes = free_bytes
        self._folder = BlockFolder(folder, cache_version)
        self._queue: OrderedDict[tuple[bytes, bool], _QueuedBlock] = OrderedDict()
        self._writing: _QueuedBlock | None = None
        self._is_at_work = False
        self._wake = threading.Condition(self._folder.lock)
        self._closing = False
        self._problem: str | None = None
        self._writer: threading.Thread | None = None
        try:
            self._folder.open()
        except OSError as error:
            self._turn_off(error)
            return
        self._start_writer()
        if not self._folder.is_ours:
            _log.warning("another engine keeps its cache in %s; this one only reads it while that one runs", folder)

    @property
    def is_writing(self) -> bool:
        """Whether new blocks are taken."""
        return self._writer is not None and self._problem is None and not self._closing

    @property
    def used_bytes(self) -> int:
        """Of the budget."""
        return self._folder.used_bytes

    @property
    def blocks(self) -> int:
        """How many there are of this cache version, partial blocks included."""
        return len(self._folder.known)

    def has(self, hash: bytes) -> bool:
        """Whether the full block known by `hash` is there, as far as names tell."""
        self._look_again()
        with self._wake:
            return (hash, False) in self._folder.known or (hash, False) in self._queue

    def partial(self, parent_hash: bytes) -> list[int]:
        """The tokens of the part of a block that was kept after `parent_hash`; empty if there is none."""
        self._look_again()
        with self._wake:
            if queued := self._queue.get((parent_hash, True)):
                return list(queued.tokens)
            name = self._folder.known.get((parent_hash, True))
            if name is None or parent_hash in self._folder.partials:
                return list(self._folder.partials.get(parent_hash, ()))
        try:
            tokens = read_tokens(self.folder / str(name), name, self._cache_version, self.block_bytes)
        except (OSError, DamagedBlockError) as error:
            self._folder.drop(name, error)
            return []
        with self._wake:
            self._folder.partials[parent_hash] = tokens
        return list(tokens)

    def put(
        self,
        hash: bytes,
        tokens: Sequence[int],
        content: bytes,
        *,
        is_partial: bool = False,
        tag: bytes = b"",
        conversations: Collection[bytes] = (ANONYMOUS,),
    ) -> bool:
        """Let a block be written: True if it is there or will be, False if there is no room for it now.

        key: 16 bytes; for a partial block that of the block before it, whose earlier one this replaces. tokens: up to
        128. tag: up to 8 bytes, by which it can be removed. conversations: all that it belongs to, 8 bytes each.
        `content` must not change any more.
        """
        if len(content) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(content)}")
        name = BlockName.of(self._cache_version, hash, tag, is_partial=is_partial)
        with self._wake:
            if not self.is_writing:
                return False
            if not is_partial and ((hash, False) in self._folder.known or (hash, False) in self._queue):
                for conversation in conversations:
                    self.belongs_to(hash, conversation)
                return True
            waiting = sum(len(queued.content) for other, queued in self._queue.items() if other != (hash, is_partial))
            if waiting + len(content) > self._queue_bytes or file_bytes(len(tokens), len(content)) > self.budget_bytes:
                return False
            self._queue.pop((hash, is_partial), None)
            self._queue[hash, is_partial] = _QueuedBlock(name, tokens, content, conversations)
            self._wake.notify_all()
        return True

    def belongs_to(self, hash: bytes, conversation: bytes) -> None:
        """The full block known by `hash`, if it is there, belongs to this conversation too."""
        with self._wake:
            queued, name = self._queue.get((hash, False)), self._folder.known.get((hash, False))
            if queued is not None:
                queued.conversations.add(conversation)
            if name is not None and self.is_writing:
                self._folder.log.add(name, conversation)
                self._wake.notify_all()

    def evict(self, conversation: bytes) -> None:
        """Remove every block that belongs to this conversation and no other, of all models."""
        self._folder.see_others()
        with self._wake:
            names = self._folder.log.evict(conversation)
            for queued in self._queued():
                queued.conversations.discard(conversation)
            self._unqueue_nobodys()
            self._wake.notify_all()
        for name in names:
            self._folder.unlink(str(name), at_once=True)

    def _queued(self) -> list[_QueuedBlock]:
        return [*self._queue.values(), *([] if self._writing is None else [self._writing])]

    def _unqueue_nobodys(self) -> None:
        """Blocks that belong to no conversation any more are not written; the one being written goes afterwards."""
        for at, queued in list(self._queue.items()):
            if not queued.conversations:
                del self._queue[at]

    def get(self, hash: bytes, tokens: Sequence[int], *, is_partial: bool = False) -> bytes | None:
        """The content of a block, if it is there, whole, and of these tokens."""
        buffer = bytearray(self.block_bytes)
        return bytes(buffer) if self.read_into([memoryview(buffer)], hash, tokens, is_partial=is_partial) else None

    def read_into(
        self, content: Sequence[memoryview], hash: bytes, tokens: Sequence[int], *, is_partial: bool = False
    ) -> bool:
        """The same into parts of memory of `block_bytes` bytes together. What lies there afterwards counts only if it
        returned True."""
        with self._wake:
            queued, name = self._queue.get((hash, is_partial)), self._folder.known.get((hash, is_partial))
        if queued is not None:
            at = 0
            for part in content:
                part[:] = queued.content[at : at + len(part)]
                at += len(part)
            return queued.tokens == array("i", tokens)
        if name is None:
            return False
        path = self.folder / str(name)
        try:
            held = read_block(path, name, self._cache_version, content)
            os.utime(path)  # what was read last goes last, also after a restart
        except (OSError, DamagedBlockError) as error:
            self._folder.drop(name, error)
            return False
        with self._wake:
            if str(name) in self._folder.files:
                self._folder.files.move_to_end(str(name))
        return held == list(tokens)

    def expect(self, hash: bytes, *, is_partial: bool = False) -> None:
        """A block is wanted in a moment: the disk may begin."""
        with self._wake:
            name = self._folder.known.get((hash, is_partial))
        if name is not None:
            with suppress(OSError):  # the reader finds out
                announce(self.folder / str(name))

    def remove(self, tag: bytes) -> None:
        """Remove every block that was written with this tag, also by another process, and those that wait to be."""
        self._folder.see_others()
        with self._wake:
            for queued in self._queued():
                if queued.name.has_tag(tag):
                    queued.conversations.clear()
            self._unqueue_nobodys()
            names = [name for name in self._folder.files if BlockName.parse(name).has_tag(tag)]
            self._folder.log.rewrite()
            self._wake.notify_all()
        for name in names:
            self._folder.unlink(name, at_once=True)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was put is on the disk; False if it took longer."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._queue or self._is_at_work or self._has_records) or not self._is_alive(), timeout_s
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, at most this long, and let go of the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)
        self._folder.close()

    def _look_again(self) -> None:
        """The engine that wrote here may have ended: then this one does."""
        self._folder.look_again()
        self._start_writer()

    # The writer

    def _start_writer(self) -> None:
        with self._wake:
            if self._folder.is_ours and self._writer is None and self._problem is None and not self._closing:
                self._writer = threading.Thread(target=self._write_all, name="notso-block-files", daemon=True)
                self._writer.start()

    def _is_alive(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write_all(self) -> None:
        _lower_priority()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing or self._has_records)
                if not (self._queue or self._has_records):
                    return
                queued = next(iter(self._queue.values()), None)
                self._writing, self._is_at_work = queued, True
                if queued is not None:
                    self._folder.log.begin(queued.name, queued.conversations)
                records, is_anew = self._folder.log.unsaved()
            size = 0
            try:
                self._folder.log.save(records, is_anew)
                size = 0 if queued is None else self._write(queued)
            except OSError as error:
                self._turn_off(error)
            if queued is not None:
                self._done((queued.name.hash, queued.name.is_partial), queued, size)
            with self._wake:
                self._writing, self._is_at_work = None, False
                self._wake.notify_all()

    @property
    def _has_records(self) -> bool:
        return self._folder.log.is_unsaved and self._problem is None

    def _write(self, queued: _QueuedBlock) -> int:
        """Put one block on the disk; the bytes of its file."""
        parts = encode_block(queued.name, self._cache_version, queued.tokens, queued.content)
        size = sum(len(part) for part in parts)
        self._make_room(size)
        write_file(self.folder / str(queued.name), parts, flush=not self._closing)
        return size

    def _done(self, at: tuple[bytes, bool], queued: _QueuedBlock, size: int) -> None:
        with self._wake:
            if self._queue.get(at) is queued:
                del self._queue[at]
            if size:
                self._folder.add(queued.name, size)
                for conversation in queued.conversations:  # some may have come meanwhile, and an older file gone
                    self._folder.log.add(queued.name, conversation)
            is_last = not self._queue
        if size and not queued.conversations:
            self._folder.unlink(str(queued.name))
        if is_last and self._problem is None:
            try:
                flush_folder(self.folder)
            except OSError as error:
                self._turn_off(error)

    def _make_room(self, size: int) -> None:
        """Let go of files until this one fits into the budget and the disk. Raises OSError where it cannot."""
        while True:
            status = os.statvfs(self.folder)
            with self._wake:
                over = self._folder.used_bytes + size > self.budget_bytes
                full = status.f_bavail * status.f_frsize < self._free_bytes + size
                oldest = next(iter(self._folder.files), None)
            if not over and not full:
                return
            if oldest is None:
                raise OSError(f"the disk has less than {(self._free_bytes + size) // MIB:,} MiB left")
            self._folder.unlink(oldest)

    def _turn_off(self, error: OSError) -> None:
        with self._wake:
            first, self._problem = self._problem is None, str(error)
            self._queue.clear()
        if first:
            _log.warning("conversations are not cached on disk from now on: %s", error)


def _lower_priority() -> None:
    """Of this thread alone: on Linux a thread has a priority of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except OSError as error:
        _log.debug("the priority stays: %s", error)
