"""The files of the cache in one folder: which there are, which block each holds, and who may write."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import BlockName, DamagedBlockError
from notso.smollm3.kv.conversation_log import ConversationLog
from notso.smollm3.kv.file_lock import FolderLock

LOOK_AGAIN_S = 1.0
"""A process that does not write looks so often for what the other one has written."""

_NO_BLOCK = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)  # of a file that is not there, or is no file
_OURS = re.compile(rf"{BlockName.PATTERN}\.(?:kv\d+|tmp)|conversations\.tmp")
_log = logging.getLogger(__name__)


class BlockFolder:
    """What is in the folder `path`, of all models. `lock` guards all that is public here but `path`.

    `files`: bytes by name, the least recently used first. `known`: blocks of this cache version by key and whether they
    are partial; `partials`: the tokens of those that were looked at. `log`: which conversations each file belongs to.
    """

    def __init__(self, path: Path, cache_version: bytes) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.files: OrderedDict[str, int] = OrderedDict()
        self.used_bytes = 0
        self.known: dict[tuple[bytes, bool], BlockName] = {}
        self.partials: dict[bytes, list[int]] = {}
        self.log = ConversationLog(path / "conversations")
        self._cache_version = cache_version
        self._owner = FolderLock(path / "lock")
        self._has_warned = False
        self._looked = 0.0
        self._changed = 0
        self._has_changed = False

    def open(self) -> None:
        """Find what is there; write there from now on, if no other process does. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)
        self._scan(sweep=self._owner.acquire())

    @property
    def is_ours(self) -> bool:
        """Whether this process writes there."""
        return self._owner.is_held

    def close(self) -> None:
        """Let another process write."""
        self._owner.release()

    def see_others(self) -> None:
        """Of two processes the one that does not write: see what the other has written, and for whom."""
        if not self.is_ours:
            with suppress(OSError):
                self._scan_changed()
                with self.lock:
                    self.log.read({BlockName.parse(text) for text in self.files})

    def _scan(self, *, sweep: bool) -> None:
        """Find what is there, the least recently used first, and remove what older versions and kills left."""
        found = []
        for entry in os.scandir(self.path):
            if not _OURS.fullmatch(entry.name):
                continue
            if entry.name.endswith(BlockName.SUFFIX):
                with suppress(FileNotFoundError):  # the process that writes may remove it meanwhile
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
                for text in lost:  # no conversation could have it removed
                    self.unlink(text)

    def add(self, name: BlockName, size: int) -> None:
        """A file is there."""
        if name.is_of(self._cache_version):
            known = self.known.get((name.hash, name.is_partial))
            if known is not None and known != name:
                self.unlink(str(known))  # the same block under another tag
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
        """A file is gone for us; from the folder too, if we are the one that writes there or it must not wait."""
        with self.lock:
            self._remove(text)
        if self._owner.is_held or at_once:
            try:
                (self.path / text).unlink(missing_ok=True)
            except OSError as error:
                _log.debug("%s could not be removed: %s", text, error)

    def look_again(self) -> None:
        """Of two engines the one that does not write: write from now on, if the other has ended; else see what it has
        written or removed since."""
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
            _log.debug("%s could not be looked through: %s", self.path, error)

    def _scan_changed(self) -> None:
        """Once more after a change was seen: what comes within the same tick of the clock leaves the folder's time as
        it is."""
        changed = self.path.stat().st_mtime_ns
        if changed != self._changed or self._has_changed:
            self._has_changed = changed != self._changed
            self._changed = changed  # from before the scan: what comes during it is seen the next time
            self._unsee()
            self._scan(sweep=False)

    def _unsee(self) -> None:
        """What was seen."""
        with self.lock:
            self.files.clear()
            self.known.clear()
            self.partials.clear()
            self.used_bytes = 0

    def drop(self, name: BlockName, error: Exception) -> None:
        """A file is not what its name says: it goes. If it could not be read, it stays: it may be whole, and only the
        process out of descriptors or the disk in trouble."""
        if not isinstance(error, FileNotFoundError):
            _log.log(logging.DEBUG if self._has_warned else logging.WARNING, "a cached block is not used: %s", error)
            self._has_warned = True
        if isinstance(error, DamagedBlockError) or getattr(error, "errno", None) in _NO_BLOCK:
            self.unlink(str(name))
