"""Index of the cache files in a folder, and the lock that gives the right to write there."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import BlockName, DamagedBlockError
from notso.smollm3.kv.conversation_log import ConversationLog
from notso.system.files import lock

LOOK_AGAIN_S = 1.0  # seconds between a reader's scans for the writer's files

# Errors of a missing file, or of something that is no regular file.
_NO_BLOCK = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)
_OURS = re.compile(rf"{BlockName.PATTERN}\.(?:kv\d+|tmp)|conversations\.tmp")
_log = logging.getLogger(__name__)


class BlockFolder:
    """Cache files of all models; `lock` guards all but `path`."""

    def __init__(self, path: Path, cache_version: bytes) -> None:
        self.path = path
        self.lock = threading.RLock()
        # Size by name, least recently used first.
        self.files: OrderedDict[str, int] = OrderedDict()
        self.used_bytes = 0
        # Blocks of the usable cache versions by key and whether they are partial.
        self.known: dict[tuple[bytes, bool], BlockName] = {}
        # Tokens of partial blocks that were read.
        self.partials: dict[bytes, list[int]] = {}
        self.log = ConversationLog(path / "conversations")
        self._versions = {BlockName.model_of(cache_version): cache_version}
        self._owner = FolderLock(path / "lock")
        self._has_warned = False
        self._looked = 0.0
        self._changed = 0
        self._has_changed = False

    def version_of(self, name: BlockName) -> bytes | None:
        """Return the cache version that a name was made from, or None if its blocks cannot be used."""
        return self._versions.get(name.model)

    def adopt(self, cache_versions: Iterable[bytes]) -> None:
        """Use the blocks of these cache versions, which are interchangeable, and of no others."""
        with self.lock:
            self._versions = {BlockName.model_of(each): each for each in cache_versions}
            files = list(self.files.items())
            self._unsee()
            for text, size in files:
                self.add(BlockName.parse(text), size)

    def open(self) -> None:
        """Scan, and become the writer if possible. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)
        self._scan(sweep=self._owner.acquire())

    @property
    def is_ours(self) -> bool:
        """Whether this process writes here."""
        return self._owner.is_held

    def close(self) -> None:
        self._owner.release()

    def see_others(self) -> None:
        """As a reader, load the writer's changes."""
        if not self.is_ours:
            with suppress(OSError):
                self._scan_changed()
                with self.lock:
                    self.log.read({BlockName.parse(text) for text in self.files})

    def _scan(self, *, sweep: bool) -> None:
        # `sweep` removes leftovers of older versions and killed processes.
        found = []
        for entry in os.scandir(self.path):
            if not _OURS.fullmatch(entry.name):
                continue
            if entry.name.endswith(BlockName.SUFFIX):
                with suppress(FileNotFoundError):  # the writer may remove it meanwhile
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
                for text in lost:  # no conversation could ever evict it
                    self.unlink(text)

    def add(self, name: BlockName, size: int) -> None:
        if name.model in self._versions:
            known = self.known.get((name.hash, name.is_partial))
            if known is not None and known != name:
                self.unlink(str(known))  # the same block under another tag or cache version
            self.known[name.hash, name.is_partial] = name
            self.partials.pop(name.hash, None)
        self.used_bytes += size - self.files.pop(str(name), 0)
        self.files[str(name)] = size

    def _remove(self, text: str) -> None:
        self.used_bytes -= self.files.pop(text, 0)
        name = BlockName.parse(text)
        if self.known.get((name.hash, name.is_partial)) == name:
            del self.known[name.hash, name.is_partial]
            if name.is_partial:
                self.partials.pop(name.hash, None)
        self.log.drop(name)

    def unlink(self, text: str, *, at_once: bool = False) -> None:
        """Drop a file from the index, and from disk if writer or `at_once`."""
        with self.lock:
            self._remove(text)
        if self._owner.is_held or at_once:
            try:
                (self.path / text).unlink(missing_ok=True)
            except OSError as error:
                _log.debug("%s could not be removed: %s", text, error)

    def look_again(self) -> None:
        """As a reader, take over from an ended writer, or rescan after an interval."""
        now = time.monotonic()
        if self.is_ours or now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
        try:
            if self._owner.acquire():
                self._unsee()
                self._scan(sweep=True)
            else:
                self._scan_changed()
        except OSError as error:
            _log.debug("%s could not be listed: %s", self.path, error)

    def _scan_changed(self) -> None:
        changed = self.path.stat().st_mtime_ns
        if changed != self._changed or self._has_changed:
            # Scanned once more after a change: files added within the same clock tick leave the folder's mtime
            # unchanged.
            self._has_changed = changed != self._changed
            self._changed = changed  # taken before the scan, so changes during it are noticed next time
            self._unsee()
            self._scan(sweep=False)

    def _unsee(self) -> None:
        with self.lock:
            self.files.clear()
            self.known.clear()
            self.partials.clear()
            self.used_bytes = 0

    def drop(self, name: BlockName, error: Exception) -> None:
        """Remove a damaged file; keep it after other read errors."""
        if not isinstance(error, FileNotFoundError):
            _log.log(logging.DEBUG if self._has_warned else logging.WARNING, "a cached block is not used: %s", error)
            self._has_warned = True
        # An unreadable file may be intact, with the process out of descriptors or the disk in trouble.
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
        """Try without waiting. Raises OSError if the file cannot be created."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
