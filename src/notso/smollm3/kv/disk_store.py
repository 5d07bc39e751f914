"""Store KV blocks on disk, so that conversations continue without prefill after a restart.

A file contains one block of 128 positions in all layers, or the partial block at the end of an answer. Its name
contains the cache version (a digest of the model, the KV format and the version of the numerical code), the block's
hash and a tag. A file is used only if every field and the checksum match; otherwise, the block is computed again.
Damaged files are removed. The contents reveal conversations, so the folder has mode 0700, and files have mode 0600.

A low-priority thread writes each file under a temporary name, fsyncs it and renames it, so that a power failure rarely
leaves a file without its data. The folder is synced when the queue is empty. At shutdown, files are written without
fsync; the checksum detects lost data. The least recently used file is evicted first.
"""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from notso.smollm3.kv.block_file import (
    BlockName,
    DamagedBlockError,
    encode_block,
    file_bytes,
    prefetch_file,
    read_block,
    read_tokens,
    write_file,
)
from notso.smollm3.kv.block_folder import BlockFolder
from notso.smollm3.scheduling.block_pool import ANONYMOUS, survives_eviction
from notso.system.files import sync_folder
from notso.system.processes import lower_thread_priority

MIB = 1 << 20
# Maximum number of bytes waiting to be written.
QUEUE_BYTES = 128 * MIB

FREE_BYTES = 1024 * MIB  # space to keep free on the disk

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _QueuedBlock:
    name: BlockName
    cache_version: bytes
    tokens: array[int]
    content: bytes
    conversations: set[bytes]  # empty once evicted


class DiskStore:
    """Blocks on disk, of one cache version and of compatible earlier versions. Thread-safe.

    An error while writing stops further writes, with one warning; blocks on disk can still be read. If another engine
    writes to the folder, this store only reads.
    budget_bytes: limit for the files of all models. evicts: make room for a block by removing the least recently used
    files, instead of rejecting the block.
    """

    def __init__(
        self,
        folder: Path,
        cache_version: bytes,
        block_bytes: int,
        budget_bytes: int,
        *,
        evicts: bool = True,
        queue_bytes: int = QUEUE_BYTES,
        free_bytes: int = FREE_BYTES,
    ) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.budget_bytes = budget_bytes
        self._cache_version = cache_version
        self._evicts = evicts
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
            self._disable(error)
            return
        self._start_writer()
        if not self._folder.is_writer:
            _log.warning(
                "another engine is writing to the cache in %s; until it exits, this engine only reads the cache",
                folder,
            )

    def adopt(self, cache_version: bytes, earlier: Iterable[bytes]) -> None:
        """Write blocks of this cache version from now on, and also use those of `earlier` versions."""
        with self._wake:
            self._cache_version = cache_version
            self._folder.adopt([cache_version, *earlier])

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._problem is None and not self._closing

    @property
    def used_bytes(self) -> int:
        return self._folder.used_bytes

    @property
    def queued_bytes(self) -> int:
        with self._wake:
            return sum(len(queued.content) for queued in self._queue.values())

    def mark_used(self, conversation: bytes) -> None:
        with self._wake:
            if self.is_writing:
                self._folder.log.mark_used(conversation)
                self._wake.notify_all()

    def by_use(self) -> list[bytes]:
        with self._wake:
            return self._folder.log.by_use()

    def sizes(self, conversation: bytes) -> list[int]:
        with self._wake:
            files = self._folder.files
            return [files[str(name)] for name in self._folder.log.files(conversation) if str(name) in files]

    @property
    def blocks(self) -> int:
        return len(self._folder.usable)

    def has(self, hash: bytes) -> bool:
        self._refresh_folder()
        with self._wake:
            return (hash, False) in self._folder.usable or (hash, False) in self._queue

    def partial(self, parent_hash: bytes) -> list[int]:
        self._refresh_folder()
        with self._wake:
            if queued := self._queue.get((parent_hash, True)):
                return list(queued.tokens)
            name = self._folder.usable.get((parent_hash, True))
            if name is None or parent_hash in self._folder.partials:
                return list(self._folder.partials.get(parent_hash, ()))
            version = self._folder.version_of(name)
        if version is None:
            return []
        try:
            tokens = read_tokens(self.folder / str(name), name, version, self.block_bytes)
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
        """Queue a block; return False if there is no room now or `is_writing` is false.

        A partial block is stored under the hash of its parent, and replaces an earlier one. `content` must not be
        changed later. `tag` has up to 8 bytes, and identifies blocks for `remove`.
        """
        if len(content) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(content)}")
        name = BlockName.of(self._cache_version, hash, tag, is_partial=is_partial)
        with self._wake:
            if not self.is_writing:
                return False
            if not is_partial and ((hash, False) in self._folder.usable or (hash, False) in self._queue):
                for conversation in conversations:
                    self.record_owner(hash, conversation)
                return True
            waiting = sum(len(queued.content) for other, queued in self._queue.items() if other != (hash, is_partial))
            if waiting + len(content) > self._queue_bytes or file_bytes(len(tokens), len(content)) > self.budget_bytes:
                return False
            self._queue.pop((hash, is_partial), None)
            self._queue[hash, is_partial] = _QueuedBlock(
                name, self._cache_version, array("i", tokens), content, set(conversations)
            )
            self._wake.notify_all()
        return True

    def record_owner(self, hash: bytes, conversation: bytes) -> None:
        with self._wake:
            queued, name = self._queue.get((hash, False)), self._folder.usable.get((hash, False))
            if queued is not None:
                queued.conversations.add(conversation)
            if name is not None and self.is_writing:
                self._folder.log.add(name, conversation)
                self._wake.notify_all()

    def evict(self, conversation: bytes) -> None:
        self._folder.rescan()
        with self._wake:
            names = self._folder.log.evict(conversation)
            for queued in self._unwritten_blocks():
                if conversation in queued.conversations:
                    queued.conversations.discard(conversation)
                    if not survives_eviction(queued.conversations, conversation):
                        queued.conversations.clear()
            self._drop_evicted()
            self._wake.notify_all()
        for name in names:
            self._folder.unlink(str(name), at_once=True)

    def _unwritten_blocks(self) -> list[_QueuedBlock]:
        return [*self._queue.values(), *([] if self._writing is None else [self._writing])]

    def _drop_evicted(self) -> None:
        # If the block being written was evicted, `_finish_write` removes its file.
        for at, queued in list(self._queue.items()):
            if not queued.conversations:
                del self._queue[at]

    def get(self, hash: bytes, tokens: Sequence[int], *, is_partial: bool = False) -> bytes | None:
        """Return an intact block with these tokens, or None."""
        buffer = bytearray(self.block_bytes)
        return bytes(buffer) if self.read_into([memoryview(buffer)], hash, tokens, is_partial=is_partial) else None

    def read_into(
        self, content: Sequence[memoryview], hash: bytes, tokens: Sequence[int], *, is_partial: bool = False
    ) -> bool:
        """Read a block into buffers of `block_bytes` in total. If the result is False, their content is invalid."""
        with self._wake:
            queued, name = self._queue.get((hash, is_partial)), self._folder.usable.get((hash, is_partial))
            version = None if name is None else self._folder.version_of(name)
        if queued is not None:
            at = 0
            for part in content:
                part[:] = queued.content[at : at + len(part)]
                at += len(part)
            return queued.tokens == array("i", tokens)
        if name is None or version is None:
            return False
        path = self.folder / str(name)
        try:
            stored_tokens = read_block(path, name, version, content)
            os.utime(path)  # after a restart, the modification times determine the eviction order
        except (OSError, DamagedBlockError) as error:
            self._folder.drop(name, error)
            return False
        with self._wake:
            if str(name) in self._folder.files:
                self._folder.files.move_to_end(str(name))
        return stored_tokens == list(tokens)

    def prefetch(self, hash: bytes, *, is_partial: bool = False) -> None:
        with self._wake:
            name = self._folder.usable.get((hash, is_partial))
        if name is not None:
            with suppress(OSError):  # `read_into` reports the error
                prefetch_file(self.folder / str(name))

    def remove(self, tag: bytes) -> None:
        self._folder.rescan()
        with self._wake:
            for queued in self._unwritten_blocks():
                if queued.name.has_tag(tag):
                    queued.conversations.clear()
            self._drop_evicted()
            names = [name for name in self._folder.files if BlockName.parse(name).has_tag(tag)]
            self._folder.log.rewrite()
            self._wake.notify_all()
        for name in names:
            self._folder.unlink(name, at_once=True)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until queued blocks are written; return False on timeout."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._queue or self._is_at_work or self._has_records) or not self._is_alive(), timeout_s
            )

    def close(self, timeout_s: float = 10.0) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)
        self._folder.close()

    def _refresh_folder(self) -> None:
        self._folder.refresh_folder()
        self._start_writer()

    # Writer thread

    def _start_writer(self) -> None:
        with self._wake:
            if self._folder.is_writer and self._writer is None and self._problem is None and not self._closing:
                writer = threading.Thread(target=self._write_all, name="notso-block-files", daemon=True)
                try:
                    writer.start()
                except RuntimeError:  # the thread could not be started; `_refresh_folder` tries again
                    return
                self._writer = writer

    def _is_alive(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write_all(self) -> None:
        lower_priority()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing or self._has_records)
                if not (self._queue or self._has_records):
                    return
                queued = next(iter(self._queue.values()), None)
                self._writing, self._is_at_work = queued, True
                if queued is not None:
                    self._folder.log.begin(queued.name, queued.conversations)
                records, is_rewrite = self._folder.log.unsaved()
            size = 0
            try:
                self._folder.log.save(records, is_rewrite)
                size = 0 if queued is None else self._write(queued)
            except (OSError, MemoryError) as error:
                self._disable(error)
            if queued is not None:
                self._finish_write((queued.name.hash, queued.name.is_partial), queued, size)
            with self._wake:
                self._writing, self._is_at_work = None, False
                self._wake.notify_all()

    @property
    def _has_records(self) -> bool:
        return self._folder.log.is_unsaved and self._problem is None

    def _write(self, queued: _QueuedBlock) -> int:
        parts = encode_block(queued.name, queued.cache_version, queued.tokens, queued.content)
        size = sum(len(part) for part in parts)
        if not self._ensure_space(size):
            return 0
        write_file(self.folder / str(queued.name), parts, flush=not self._closing)
        return size

    def _finish_write(self, at: tuple[bytes, bool], queued: _QueuedBlock, size: int) -> None:
        with self._wake:
            if self._queue.get(at) is queued:
                del self._queue[at]
            if size:
                self._folder.add(queued.name, size)
                # All conversations are recorded again. During the write, some may have been added, or an older file of
                # the same name may have been removed together with its records.
                for conversation in queued.conversations:
                    self._folder.log.add(queued.name, conversation)
            elif str(queued.name) not in self._folder.files:
                self._folder.log.drop(queued.name)
            is_last = not self._queue
        if size and not queued.conversations:
            self._folder.unlink(str(queued.name))
        if is_last and self._problem is None:
            try:
                sync_folder(self.folder)
            except OSError as error:
                self._disable(error)

    def _ensure_space(self, size: int) -> bool:
        # Raises OSError if evicting all files is not enough.
        while True:
            status = os.statvfs(self.folder)
            with self._wake:
                over = self._folder.used_bytes + size > self.budget_bytes
                full = status.f_bavail * status.f_frsize < self._free_bytes + size
                oldest = next(iter(self._folder.files), None)
            if not over and not full:
                return True
            if not self._evicts:
                return False
            if oldest is None:
                raise OSError(f"the disk has less than {(self._free_bytes + size) // MIB:,} MiB left")
            self._folder.unlink(oldest)

    def _disable(self, error: OSError | MemoryError) -> None:
        with self._wake:
            first, self._problem = self._problem is None, str(error)
            self._queue.clear()
        if first:
            _log.warning("no more blocks will be written to the disk cache: %s", error)


def lower_priority() -> None:
    """Give the calling thread a low priority, where possible."""
    try:
        lower_thread_priority()
    except OSError as error:
        _log.debug("cannot lower the thread's priority: %s", error)
