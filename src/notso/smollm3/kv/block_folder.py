"""Index of a folder's cache files, and the lock that the folder's writer holds.

A log records to which conversations or readings each cache file belongs, so that whole conversations can be evicted
after a restart. A reading is a pinned prefix of prompts (see block_pool). The log's format:

    magic   8   NOTSO-C1
    ------------
    conversation  8   digest of a conversation or reading
    model         8   part of the file name, like key and tag
    key          16
    tag           8
    flags         4   1: a partial block; 2: the file is rewritten, so earlier records no longer apply
    checksum      4   CRC-32 of the fields above
    ------------
    and so on

A record is appended before its file is written. Incomplete or damaged records are ignored; at worst, a file is not
attributed to one of its conversations and is evicted early. Eviction rewrites the log. The position of the last record
of a conversation or reading shows how recently it was used.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import BlockName, DamagedBlockError, write_file
from notso.smollm3.scheduling.block_pool import survives_eviction
from notso.system.files import lock_or_close, sync_folder, unlock_and_close

MAGIC = b"NOTSO-C1"
# The log is rewritten if it has more than 2 n + MOST_WASTE records when it is read, where n is the number of records
# still needed. It is also rewritten after MOST_WASTE + 1 records that only mark a conversation or reading as used.
MOST_WASTE = 1024

_RECORD = struct.Struct("=8s8s16s8sI")
_CHECKSUM = struct.Struct("=I")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
_PARTIAL, _REWRITTEN = 1, 2


class ConversationLog:
    """Log at `path`. Not thread-safe, except that one thread may call `save` concurrently."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[BlockName, set[bytes]] = {}
        self._appended: list[bytes] = []
        self._is_stale = False
        self._used: dict[bytes, None] = {}  # least recently used first
        self._waste = 0

    def read(self, names: Collection[BlockName]) -> None:
        self._of.clear()
        self._used.clear()
        content = b""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), os.fdopen(os.open(self._path, flags), "rb") as file:
            content = file.read()
        is_log = content.startswith(MAGIC)
        starts = range(len(MAGIC), len(content) - RECORD_BYTES + 1, RECORD_BYTES) if is_log else range(0)
        for at in starts:
            record, checksum = content[at : at + _RECORD.size], content[at + _RECORD.size : at + RECORD_BYTES]
            if _CHECKSUM.pack(zlib.crc32(record)) != checksum:
                continue
            conversation, model, hash, tag, marks = _RECORD.unpack(record)
            name = BlockName(model, hash, tag, is_partial=bool(marks & _PARTIAL))
            if marks & _REWRITTEN:
                self._of.pop(name, None)
            if name in names:
                self._of.setdefault(name, set()).add(conversation)
                self._mark_used(conversation)
        used = sum(len(conversations) for conversations in self._of.values())
        is_whole = is_log and (len(content) - len(MAGIC)) % RECORD_BYTES == 0
        self._is_stale = not is_whole or len(starts) > 2 * used + MOST_WASTE

    def has(self, name: BlockName) -> bool:
        return name in self._of

    def begin(self, name: BlockName, conversations: Iterable[bytes]) -> None:
        self._of[name] = set()
        for conversation in conversations:
            self._append(name, conversation, _REWRITTEN if not self._of[name] else 0)

    def add(self, name: BlockName, conversation: bytes) -> None:
        if conversation not in self._of.setdefault(name, set()):
            self._append(name, conversation, 0)

    def mark_used(self, conversation: bytes) -> None:
        name = next((name for name, conversations in self._of.items() if conversation in conversations), None)
        if name is not None and next(reversed(self._used), None) != conversation:
            self._append(name, conversation, 0)
            self._waste += 1
            self._is_stale |= self._waste > MOST_WASTE

    def by_use(self) -> list[bytes]:
        recorded = set[bytes]().union(*self._of.values())
        return [each for each in self._used if each in recorded]

    def files(self, conversation: bytes) -> list[BlockName]:
        return [name for name, conversations in self._of.items() if conversation in conversations]

    def drop(self, name: BlockName) -> None:
        self._of.pop(name, None)

    def evict(self, conversation: bytes) -> list[BlockName]:
        """Remove a conversation or reading; return the files to remove (see `survives_eviction`)."""
        unowned = []
        for name, conversations in list(self._of.items()):
            if conversation in conversations:
                conversations.discard(conversation)
                self._is_stale = True
                if not survives_eviction(conversations, conversation):
                    del self._of[name]
                    unowned.append(name)
        return unowned

    def rewrite(self) -> None:
        self._is_stale = True

    @property
    def is_unsaved(self) -> bool:
        return self._is_stale or bool(self._appended)

    def unsaved(self) -> tuple[bytes, bool]:
        """Return the records that the caller must `save`, and whether they replace the log. Later calls omit them."""
        if self._is_stale:
            by_use = {conversation: at for at, conversation in enumerate(self._used)}
            pairs = [(each, name) for name, conversations in self._of.items() for each in conversations]
            pairs.sort(key=lambda pair: by_use.get(pair[0], 0))
            records = [_record(name, conversation, 0) for conversation, name in pairs]
            self._waste = 0
        else:
            records = self._appended
        is_rewrite, self._appended, self._is_stale = self._is_stale, [], False
        return b"".join(records), is_rewrite

    def save(self, records: bytes, is_rewrite: bool) -> None:
        """Write records to the log. Raises OSError."""
        if is_rewrite:
            write_file(self._path, [MAGIC + records], flush=True)
            sync_folder(self._path.parent)
        elif records:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                while records:
                    records = records[os.write(descriptor, records) :]
            finally:
                os.close(descriptor)

    def _append(self, name: BlockName, conversation: bytes, flags: int) -> None:
        self._of[name].add(conversation)
        self._mark_used(conversation)
        self._appended.append(_record(name, conversation, flags))

    def _mark_used(self, conversation: bytes) -> None:
        self._used.pop(conversation, None)
        self._used[conversation] = None


def _record(name: BlockName, conversation: bytes, flags: int) -> bytes:
    record = _RECORD.pack(conversation, name.model, name.hash, name.tag, flags | (_PARTIAL if name.is_partial else 0))
    return record + _CHECKSUM.pack(zlib.crc32(record))


RESCAN_S = 1.0  # seconds between scans for another engine's files

# Errors from opening a missing file, or something other than a regular file.
_NO_BLOCK = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)
_OURS = re.compile(rf"{BlockName.PATTERN}\.(?:kv\d+|tmp)|conversations\.tmp")
_log = logging.getLogger(__name__)


class BlockFolder:
    """Cache files of all models. `lock` guards the index and the log."""

    def __init__(self, path: Path, cache_version: bytes) -> None:
        self.path = path
        self.lock = threading.RLock()
        # Size by name, least recently used first.
        self.files: OrderedDict[str, int] = OrderedDict()
        self.used_bytes = 0
        # Blocks of usable cache versions, by (hash, is_partial).
        self.usable: dict[tuple[bytes, bool], BlockName] = {}
        # Tokens of partial blocks that have been read, by parent hash.
        self.partials: dict[bytes, list[int]] = {}
        self.log = ConversationLog(path / "conversations")
        self._versions = {BlockName.model_of(cache_version): cache_version}
        self._writer_lock = FolderLock(path / "lock")
        self._has_warned = False
        self._refreshed_at = 0.0
        self._changed = 0
        self._has_changed = False

    def version_of(self, name: BlockName) -> bytes | None:
        """Return a block's cache version, or None for an unusable block."""
        return self._versions.get(name.model)

    def adopt(self, cache_versions: Iterable[bytes]) -> None:
        """Use only the blocks of these cache versions, which are interchangeable."""
        with self.lock:
            self._versions = {BlockName.model_of(each): each for each in cache_versions}
            files = list(self.files.items())
            self._clear_index()
            for text, size in files:
                self.add(BlockName.parse(text), size)

    def open(self) -> None:
        """Scan the folder, and become its writer if there is none. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(self.path.iterdir()):  # a folder with other files, such as /tmp, may be needed by other users
            self.path.chmod(0o700)
        self._scan(sweep=self._writer_lock.acquire())

    @property
    def is_writer(self) -> bool:
        return self._writer_lock.is_held

    def close(self) -> None:
        self._writer_lock.release()

    def rescan(self) -> None:
        if not self.is_writer:
            with suppress(OSError):
                self._rescan_if_changed()
                with self.lock:
                    self.log.read({BlockName.parse(text) for text in self.files})

    def _scan(self, *, sweep: bool) -> None:
        # sweep: remove leftovers of older versions and of killed processes.
        found = []
        for entry in os.scandir(self.path):
            if not _OURS.fullmatch(entry.name):
                continue
            if entry.name.endswith(BlockName.SUFFIX):
                with suppress(FileNotFoundError):  # the writer may have removed it
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
            elif sweep:
                Path(entry.path).unlink()
        with self.lock:
            for _, text, size in sorted(found):
                self.add(BlockName.parse(text), size)
            if sweep:
                self.log.read({BlockName.parse(text) for text in self.files})
                lost = [text for text in self.files if not self.log.has(BlockName.parse(text))]
                for text in lost:  # eviction would never remove these files, which belong to no conversation
                    self.unlink(text)

    def add(self, name: BlockName, size: int) -> None:
        if name.model in self._versions:
            other = self.usable.get((name.hash, name.is_partial))
            if other is not None and other != name:
                self.unlink(str(other))  # the same block under another tag or cache version
            self.usable[name.hash, name.is_partial] = name
            self.partials.pop(name.hash, None)
        self.used_bytes += size - self.files.pop(str(name), 0)
        self.files[str(name)] = size

    def _remove(self, text: str) -> None:
        self.used_bytes -= self.files.pop(text, 0)
        name = BlockName.parse(text)
        if self.usable.get((name.hash, name.is_partial)) == name:
            del self.usable[name.hash, name.is_partial]
            if name.is_partial:
                self.partials.pop(name.hash, None)
        self.log.drop(name)

    def unlink(self, text: str, *, at_once: bool = False) -> None:
        """Remove a file from the index, and from disk if this engine is the writer or `at_once` is true."""
        with self.lock:
            self._remove(text)
        if self._writer_lock.is_held or at_once:
            try:
                (self.path / text).unlink(missing_ok=True)
            except OSError as error:
                _log.debug("%s could not be removed: %s", text, error)

    def refresh_folder(self) -> None:
        """At most once per RESCAN_S, become the writer if the previous writer has ended; otherwise, rescan."""
        now = time.monotonic()
        if self.is_writer or now - self._refreshed_at < RESCAN_S:
            return
        self._refreshed_at = now
        try:
            if self._writer_lock.acquire():
                self._clear_index()
                self._scan(sweep=True)
            else:
                self._rescan_if_changed()
        except OSError as error:
            _log.debug("%s could not be listed: %s", self.path, error)

    def _rescan_if_changed(self) -> None:
        changed = self.path.stat().st_mtime_ns
        if changed != self._changed or self._has_changed:
            # After a change, the folder is scanned once more: files added within the same clock tick do not change its
            # modification time again.
            self._has_changed = changed != self._changed
            self._changed = changed  # taken before the scan, so changes during the scan cause another one
            self._clear_index()
            self._scan(sweep=False)

    def _clear_index(self) -> None:
        with self.lock:
            self.files.clear()
            self.usable.clear()
            self.partials.clear()
            self.used_bytes = 0

    def drop(self, name: BlockName, error: Exception) -> None:
        """Forget a file that is missing, delete one that is damaged, and keep one that could not be read."""
        if not isinstance(error, FileNotFoundError):
            _log.log(logging.DEBUG if self._has_warned else logging.WARNING, "a cached block is not used: %s", error)
            self._has_warned = True
        # After other errors, the file is kept, because it may be intact, for example if the process has too many open
        # files.
        if isinstance(error, DamagedBlockError) or getattr(error, "errno", None) in _NO_BLOCK:
            self.unlink(str(name))


class FolderLock:
    """Advisory lock on a file that is never removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Try to lock without waiting. Raises OSError if the file cannot be created."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not lock_or_close(descriptor):
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            unlock_and_close(self._descriptor)
            self._descriptor = None
