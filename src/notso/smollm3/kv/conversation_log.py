"""Log of the conversations or readings that each cache file belongs to, for eviction after a restart.

    magic   8   NOTSO-C1
    ------------
    conversation  8   a digest; then the name of a file:
    model         8
    key          16
    tag           8
    flags         4   1: a partial block; 2: the file is rewritten, earlier conversations no longer count
    checksum      4   CRC-32 of the record before it
    ------------
    and so on

A record is appended before its file is written. Torn or damaged records are ignored: at worst a file lacks a
conversation and is evicted early. Eviction rewrites the log. The order of the last records is that of the last use.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from notso.smollm3.kv.block_file import BlockName, write_file
from notso.smollm3.scheduling.block_pool import outlives
from notso.system.files import sync_folder

MAGIC = b"NOTSO-C1"
# Obsolete records, beyond as many live ones, that trigger a rewrite.
MOST_WASTE = 1024

_RECORD = struct.Struct("=8s8s16s8sI")
_CHECKSUM = struct.Struct("=I")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
_PARTIAL, _ANEW = 1, 2


class ConversationLog:
    """Log at `path`. Not thread-safe, except that one thread may `save` concurrently."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[BlockName, set[bytes]] = {}
        self._appended: list[bytes] = []
        self._is_stale = False
        self._used: dict[bytes, None] = {}  # least recently used first
        self._waste = 0

    def read(self, names: Collection[BlockName]) -> None:
        """Load records of existing files."""
        self._of.clear()
        self._used.clear()
        content = b""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), os.fdopen(os.open(self._path, flags), "rb") as file:
            content = file.read()
        records = 0
        for at in range(len(MAGIC), len(content) - RECORD_BYTES + 1, RECORD_BYTES):
            records += 1
            record, checksum = content[at : at + _RECORD.size], content[at + _RECORD.size : at + RECORD_BYTES]
            if _CHECKSUM.pack(zlib.crc32(record)) != checksum:
                continue
            conversation, model, hash, tag, marks = _RECORD.unpack(record)
            name = BlockName(model, hash, tag, is_partial=bool(marks & _PARTIAL))
            if marks & _ANEW:
                self._of.pop(name, None)
            if name in names:
                self._of.setdefault(name, set()).add(conversation)
                self._mark_used(conversation)
        if not content.startswith(MAGIC):
            self._of.clear()
            self._used.clear()
        used = sum(len(conversations) for conversations in self._of.values())
        is_whole = content.startswith(MAGIC) and (len(content) - len(MAGIC)) % RECORD_BYTES == 0
        self._is_stale = not is_whole or records > 2 * used + MOST_WASTE

    def has(self, name: BlockName) -> bool:
        return name in self._of

    def begin(self, name: BlockName, conversations: Iterable[bytes]) -> None:
        """Record a file before it is written."""
        self._of[name] = set()
        for conversation in conversations:
            self._append(name, conversation, _ANEW if not self._of[name] else 0)

    def add(self, name: BlockName, conversation: bytes) -> None:
        if conversation not in self._of.setdefault(name, set()):
            self._append(name, conversation, 0)

    def use(self, conversation: bytes) -> None:
        """Make a conversation the most recently used one."""
        name = next((name for name, conversations in self._of.items() if conversation in conversations), None)
        if name is not None and next(reversed(self._used), None) != conversation:
            self._append(name, conversation, 0)
            self._waste += 1
            self._is_stale |= self._waste > MOST_WASTE

    def by_use(self) -> list[bytes]:
        """Return the conversations that have files, least recently used first."""
        left = set[bytes]().union(*self._of.values())
        return [each for each in self._used if each in left]

    def files(self, conversation: bytes) -> list[BlockName]:
        """Return the files of a conversation."""
        return [name for name, conversations in self._of.items() if conversation in conversations]

    def drop(self, name: BlockName) -> None:
        self._of.pop(name, None)

    def evict(self, conversation: bytes) -> list[BlockName]:
        """Remove a conversation or reading; return the files that only it kept."""
        left = []
        for name, conversations in list(self._of.items()):
            if conversation in conversations:
                conversations.discard(conversation)
                self._is_stale = True
                if not outlives(conversations, conversation):
                    del self._of[name]
                    left.append(name)
        return left

    def rewrite(self) -> None:
        """Schedule a rewrite."""
        self._is_stale = True

    @property
    def is_unsaved(self) -> bool:
        return self._is_stale or bool(self._appended)

    def unsaved(self) -> tuple[bytes, bool]:
        """Return the records to `save`, now counted as saved, and whether they replace the log."""
        if self._is_stale:
            by_use = {conversation: at for at, conversation in enumerate(self._used)}
            pairs = [(each, name) for name, conversations in self._of.items() for each in conversations]
            pairs.sort(key=lambda pair: by_use.get(pair[0], 0))
            records = [_record(name, conversation, 0) for conversation, name in pairs]
            self._waste = 0
        else:
            records = self._appended
        is_anew, self._appended, self._is_stale = self._is_stale, [], False
        return b"".join(records), is_anew

    def save(self, records: bytes, is_anew: bool) -> None:
        """Write records. Raises OSError."""
        if is_anew:
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
