"""Blocks of the key-value cache on disk, so that a conversation goes on after a restart without being read again.

One file holds one block of 128 positions in all layers, or the beginning of one (a tail: what an answer ended in). Its
name says the model and settings (the fingerprint), what the block is known by, and whose it is. A file is believed only
if every field and the checksum agree; anything else is a miss, and the file is removed. So a damaged cache costs time
and nothing else. The bytes reveal what was said: the folder is 0700, its files 0600.

Written in the background by a thread of low priority: to a temporary name, flushed (fsync), then renamed, so that after
a power cut a name hardly ever stands for bytes that are not there; the folder itself is flushed when the queue runs
empty. At the end of the process there is no time for that: what still waits is written and not flushed, and should the
power go in that minute, the checksum says so. The least recently read file goes first when the budget is reached.

The checksum is CRC-32: it guards against accidents, and takes a fifth of the time of a cryptographic hash (4 GB/s
against 0.9 for BLAKE2b). Who can write into the folder could as well write another model.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import (
    BlockName,
    DamagedBlockError,
    announce,
    encode_block,
    file_bytes,
    read_block,
    read_tokens,
    write_file,
)
from notso.smollm3.kv.file_lock import FolderLock

MIB = 1 << 20
QUEUE_BYTES = 128 * MIB
"""What may wait for being written; more is refused, as it can still be offered later."""

FREE_BYTES = 1024 * MIB
"""What is left free of the disk."""

LOOK_AGAIN_S = 1.0
"""A process that does not write looks so often for what the other one has written."""

_NO_BLOCK = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)  # of a file that is not there, or is no file
_OURS = re.compile(rf"{BlockName.PATTERN}\.(?:kv\d+|tmp)")
_log = logging.getLogger(__name__)


class _Job:
    """A block on its way to the disk."""

    def __init__(self, name: BlockName, tokens: Sequence[int], content: bytes) -> None:
        self.name = name
        self.tokens = array("i", tokens)
        self.content = content
        self.forgotten = False


class BlockFiles:
    """The blocks of one cache, `block_bytes` each, in `folder`, which may hold those of other models too.

    fingerprint: whatever the content of a block depends on besides its tokens. budget_bytes: of all files together,
    those of other models included. A second process finds what is there and writes nothing.

    Methods may be called from any thread. None raises for what a disk does: a cache that cannot be used is off, with
    one warning.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        block_bytes: int,
        budget_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        free_bytes: int = FREE_BYTES,
    ) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.budget_bytes = budget_bytes
        self._fingerprint = fingerprint
        self._queue_bytes = queue_bytes
        self._free_bytes = free_bytes
        self._files: OrderedDict[str, int] = OrderedDict()  # name -> bytes, the least recently used first
        self._used_bytes = 0
        self._known: dict[tuple[bytes, bool], BlockName] = {}  # (key, is_tail): blocks of this fingerprint
        self._tails: dict[bytes, list[int]] = {}
        self._queue: OrderedDict[tuple[bytes, bool], _Job] = OrderedDict()
        self._writing: _Job | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._problem: str | None = None
        self._has_warned = False
        self._looked = 0.0
        self._changed = 0
        self._has_changed = False
        self._lock = FolderLock(folder / "lock")
        self._writer: threading.Thread | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            owned = self._lock.acquire()
            self._scan(sweep=owned)
        except OSError as error:
            self._turn_off(error)
            return
        if owned:
            self._writer = threading.Thread(target=self._write_all, name="notso-block-files", daemon=True)
            self._writer.start()
        else:
            _log.warning("another process keeps its cache in %s; this one reads it only", folder)

    @property
    def is_writing(self) -> bool:
        """Whether new blocks are taken."""
        return self._writer is not None and self._problem is None and not self._closing

    @property
    def used_bytes(self) -> int:
        """Of the budget."""
        return self._used_bytes

    @property
    def blocks(self) -> int:
        """How many there are of this fingerprint, tails included."""
        return len(self._known)

    def has(self, key: bytes) -> bool:
        """Whether the full block known by `key` is there, as far as names tell."""
        self._look_again()
        with self._wake:
            return (key, False) in self._known or (key, False) in self._queue

    def tail(self, parent: bytes) -> list[int]:
        """The tokens of the part of a block that was kept after `parent`; empty if there is none."""
        self._look_again()
        with self._wake:
            if job := self._queue.get((parent, True)):
                return list(job.tokens)
            name = self._known.get((parent, True))
            if name is None or parent in self._tails:
                return list(self._tails.get(parent, ()))
        try:
            tokens = read_tokens(self.folder / str(name), name, self._fingerprint, self.block_bytes)
        except (OSError, DamagedBlockError) as error:
            self._drop(name, error)
            return []
        with self._wake:
            self._tails[parent] = tokens
        return list(tokens)

    def put(
        self, key: bytes, tokens: Sequence[int], content: bytes, *, is_tail: bool = False, tag: bytes = b""
    ) -> bool:
        """Let a block be written: True if it is there or will be, False if there is no room for it now.

        key: 16 bytes; for a tail that of the block before it, whose earlier tail this one replaces. tokens: up to 128.
        tag: up to 8 bytes, by which it can be removed. `content` must not change any more.
        """
        if len(content) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(content)}")
        name = BlockName.of(self._fingerprint, key, tag, is_tail=is_tail)
        with self._wake:
            if not self.is_writing:
                return False
            if not is_tail and ((key, False) in self._known or (key, False) in self._queue):
                return True
            waiting = sum(len(job.content) for other, job in self._queue.items() if other != (key, is_tail))
            if waiting + len(content) > self._queue_bytes or file_bytes(len(tokens), len(content)) > self.budget_bytes:
                return False
            self._queue.pop((key, is_tail), None)
            self._queue[key, is_tail] = _Job(name, tokens, content)
            self._wake.notify_all()
        return True

    def get(self, key: bytes, tokens: Sequence[int], *, is_tail: bool = False) -> bytes | None:
        """The content of a block, if it is there, whole, and of these tokens."""
        buffer = bytearray(self.block_bytes)
        return bytes(buffer) if self.read_into([memoryview(buffer)], key, tokens, is_tail=is_tail) else None

    def read_into(
        self, content: Sequence[memoryview], key: bytes, tokens: Sequence[int], *, is_tail: bool = False
    ) -> bool:
        """The same into parts of memory of `block_bytes` bytes together. What lies there afterwards counts only if it
        returned True."""
        with self._wake:
            job, name = self._queue.get((key, is_tail)), self._known.get((key, is_tail))
        if job is not None:
            at = 0
            for part in content:
                part[:] = job.content[at : at + len(part)]
                at += len(part)
            return job.tokens == array("i", tokens)
        if name is None:
            return False
        path = self.folder / str(name)
        try:
            held = read_block(path, name, self._fingerprint, content)
            os.utime(path)  # what was read last goes last, also after a restart
        except (OSError, DamagedBlockError) as error:
            self._drop(name, error)
            return False
        with self._wake:
            if str(name) in self._files:
                self._files.move_to_end(str(name))
        return held == list(tokens)

    def expect(self, key: bytes, *, is_tail: bool = False) -> None:
        """A block is wanted in a moment: the disk may begin."""
        with self._wake:
            name = self._known.get((key, is_tail))
        if name is not None:
            with suppress(OSError):  # the reader finds out
                announce(self.folder / str(name))

    def remove(self, tag: bytes) -> None:
        """Remove every block that was written with this tag, also by another process, and those that wait to be."""
        if self._writer is None and self._problem is None:
            with suppress(OSError):
                self._scan_changed()
        with self._wake:
            for at, job in list(self._queue.items()):
                if job.name.has_tag(tag):
                    job.forgotten = True
                    del self._queue[at]
            if self._writing is not None and self._writing.name.has_tag(tag):
                self._writing.forgotten = True
            names = [name for name in self._files if BlockName.parse(name).has_tag(tag)]
        for name in names:
            self._unlink(name, at_once=True)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was put is on the disk; False if it took longer."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._queue or self._writing) or not self._is_alive(), timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, at most this long, and let go of the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)
        self._lock.release()

    # The folder

    def _scan(self, *, sweep: bool) -> None:
        """Find what is there, the least recently used first, and remove what older versions and kills left."""
        found = []
        for entry in os.scandir(self.folder):
            if not _OURS.fullmatch(entry.name):
                continue
            if entry.name.endswith(BlockName.SUFFIX):
                with suppress(FileNotFoundError):  # the process that writes may remove it meanwhile
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
            elif sweep:
                Path(entry.path).unlink()
        with self._wake:
            for _, text, size in sorted(found):
                self._add(BlockName.parse(text), size)

    def _add(self, name: BlockName, size: int) -> None:
        if name.is_of(self._fingerprint):
            known = self._known.get((name.key, name.is_tail))
            if known is not None and known != name:
                self._unlink(str(known))  # the same block under another tag
            self._known[name.key, name.is_tail] = name
            self._tails.pop(name.key, None)
        self._used_bytes += size - self._files.pop(str(name), 0)
        self._files[str(name)] = size

    def _forget(self, text: str) -> None:
        self._used_bytes -= self._files.pop(text, 0)
        name = BlockName.parse(text)
        if self._known.get((name.key, name.is_tail)) == name:
            del self._known[name.key, name.is_tail]
            if name.is_tail:
                self._tails.pop(name.key, None)

    def _unlink(self, text: str, *, at_once: bool = False) -> None:
        """A file is gone for us; from the folder too, if we are the one that writes there or it must not wait."""
        with self._wake:
            self._forget(text)
        if self._lock.is_held or at_once:
            try:
                (self.folder / text).unlink(missing_ok=True)
            except OSError as error:
                _log.debug("%s could not be removed: %s", text, error)

    def _look_again(self) -> None:
        """Of two processes the one that does not write: see what the other has written or removed since."""
        now = time.monotonic()
        if self._writer is not None or self._problem is not None or now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
        try:
            self._scan_changed()
        except OSError as error:
            _log.debug("%s could not be looked through: %s", self.folder, error)

    def _scan_changed(self) -> None:
        """Once more after a change was seen: what comes within the same tick of the clock leaves the folder's time as
        it is."""
        changed = self.folder.stat().st_mtime_ns
        if changed != self._changed or self._has_changed:
            self._has_changed = changed != self._changed
            self._changed = changed  # from before the scan: what comes during it is seen the next time
            with self._wake:
                self._files.clear()
                self._known.clear()
                self._tails.clear()
                self._used_bytes = 0
            self._scan(sweep=False)

    def _drop(self, name: BlockName, error: Exception) -> None:
        """A file is not what its name says: it goes. If it could not be read, it stays: it may be whole, and only the
        process out of descriptors or the disk in trouble."""
        if not isinstance(error, FileNotFoundError):
            _log.log(logging.DEBUG if self._has_warned else logging.WARNING, "a cached block is not used: %s", error)
            self._has_warned = True
        if isinstance(error, DamagedBlockError) or getattr(error, "errno", None) in _NO_BLOCK:
            self._unlink(str(name))

    # The writer

    def _is_alive(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write_all(self) -> None:
        _lower_priority()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                at, job = next(iter(self._queue.items()))
                self._writing = job
            try:
                size = self._write(job)
            except OSError as error:
                self._turn_off(error)
                size = 0
            self._done(at, job, size)

    def _write(self, job: _Job) -> int:
        """Put one block on the disk; the bytes of its file."""
        parts = encode_block(job.name, self._fingerprint, job.tokens, job.content)
        size = sum(len(part) for part in parts)
        self._make_room(size)
        write_file(self.folder / str(job.name), parts, flush=not self._closing)
        return size

    def _done(self, at: tuple[bytes, bool], job: _Job, size: int) -> None:
        with self._wake:
            if self._queue.get(at) is job:
                del self._queue[at]
            if size:
                self._add(job.name, size)
            is_last = not self._queue
        if size and job.forgotten:
            self._unlink(str(job.name))
        if is_last and self._problem is None:
            try:
                _flush_folder(self.folder)
            except OSError as error:
                self._turn_off(error)
        with self._wake:
            self._writing = None
            self._wake.notify_all()

    def _make_room(self, size: int) -> None:
        """Let go of files until this one fits into the budget and the disk. Raises OSError where it cannot."""
        while True:
            status = os.statvfs(self.folder)
            with self._wake:
                over = self._used_bytes + size > self.budget_bytes
                full = status.f_bavail * status.f_frsize < self._free_bytes + size
                oldest = next(iter(self._files), None)
            if not over and not full:
                return
            if oldest is None:
                raise OSError(f"the disk has less than {(self._free_bytes + size) // MIB:,} MiB left")
            self._unlink(oldest)

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


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
