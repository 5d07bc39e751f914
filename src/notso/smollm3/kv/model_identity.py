"""Identify a model file by its content, so that cached blocks stay valid if it is copied or gets new timestamps.

The sampled identity of a file is a hash of its inode, times and size, and of samples of each tensor. It is fast to
compute, and is used until the file's SHA-256 is known. Changed content has a different sampled identity, because every
write changes the ctime. The SHA-256 is computed once, in idle time and at low priority, and stored in the cache folder
with the sampled identity, so that blocks written under this sampled identity stay usable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.disk_store import lower_priority
from notso.smollm3.kv.kv_cache import KVFormat
from notso.system.files import write_private
from notso.text_file import open_regular, read_regular

FILE = "models.json"
MAX_BYTES = 1 << 16
MAX_ENTRIES = 64

READ_BYTES = 4 << 20
BUSY_S = 0.05  # seconds between checks whether a busy engine is idle again

_log = logging.getLogger(__name__)
_writing = threading.Lock()  # several engines in one process can share the folder


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of a file. `earlier`: former identities of the same content."""

    current: bytes
    earlier: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    sampled: str
    sha256: str


class IdentityWorker:
    """Identifies one open file; computes its digest in a thread unless the digest is stored."""

    def __init__(self, file: GGUFFile, folder: Path) -> None:
        self._path = file.path
        self._status = file.status
        self._folder = folder
        self._sampled = sampled_identity(file).hex()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        entries = _read(folder)
        self.sha256 = next((each.sha256 for each in entries if each.sampled == self._sampled), None)
        self.identity = ModelIdentity(bytes.fromhex(self._sampled))
        if self.sha256 is not None:
            self.identity = _identity(self.sha256, entries)

    def start(self, is_idle: Callable[[], bool], on_known: Callable[[ModelIdentity], None]) -> None:
        """Unless the digest is known, start a thread that computes it while `is_idle()`, and then calls `on_known`."""
        if self.sha256 is None:
            self._thread = threading.Thread(
                target=self._run, args=(is_idle, on_known), name="notso-model-digest", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the digest is known or cannot be computed."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self.wait()

    def _run(self, is_idle: Callable[[], bool], on_known: Callable[[ModelIdentity], None]) -> None:
        lower_priority()
        try:
            sha256 = self._digest(is_idle)
        except OSError as error:
            _log.debug("%s cannot be read again: %s", self._path, error)
            return
        if sha256 is None:
            return
        entry = _Entry(self._sampled, sha256)
        _store_digest(self._folder, entry)
        self.sha256, self.identity = sha256, _identity(sha256, [*_read(self._folder), entry])
        on_known(self.identity)

    def _digest(self, is_idle: Callable[[], bool]) -> str | None:
        # Returns None if stopped, or if the file at the path was replaced or changed.
        digest = hashlib.sha256()
        with open(open_regular(self._path), "rb", buffering=0) as source:  # noqa: PTH123 - a descriptor
            while self._is_open_file(source.fileno()):
                while not is_idle():
                    if self._stopping.wait(BUSY_S):
                        return None
                if self._stopping.is_set():
                    return None
                piece = source.read(READ_BYTES)
                if not piece:
                    return digest.hexdigest()
                digest.update(piece)
        return None

    def _is_open_file(self, descriptor: int) -> bool:
        return stat_fingerprint(os.fstat(descriptor)) == stat_fingerprint(self._status)


def _identity(sha256: str, entries: list[_Entry]) -> ModelIdentity:
    earlier = {each.sampled for each in entries if each.sha256 == sha256}
    return ModelIdentity(b"sha256" + bytes.fromhex(sha256), tuple(map(bytes.fromhex, sorted(earlier))))


def _store_digest(folder: Path, entry: _Entry) -> None:
    with _writing:
        entries = [*(each for each in _read(folder) if each.sampled != entry.sampled), entry][-MAX_ENTRIES:]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(folder / FILE, json.dumps([asdict(each) for each in entries], indent=1), replace=True)
        except OSError as error:
            # This error is only logged, because the digest is computed again at the next start.
            _log.debug("the digest of the model cannot be stored in %s: %s", folder, error)


def _read(folder: Path) -> list[_Entry]:
    try:
        content = json.loads(read_regular(folder / FILE, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [_Entry(**each) for each in content if _is_entry(each)] if isinstance(content, list) else []


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and set(value) == set(_Entry.__slots__) and all(map(_is_digest, value.values()))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


# Version of the numerical code: incremented when the order or precision of float operations or the layout of cache
# blocks changes.
ARITHMETIC = 2

SAMPLES = 4
SAMPLE_BYTES = 1024
DIGEST_BYTES = 32


def stat_fingerprint(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change if a file is written to, replaced or copied."""
    # The modification time can be set to any value, but the time of the last status change cannot.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sampled_identity(file: GGUFFile) -> bytes:
    """Return a hash (32 bytes) of a file's `stat_fingerprint` and of samples of each tensor."""
    # Hashing two gigabytes would delay the first answer; see IdentityWorker for the digest of the whole content.
    return content_identity(file, repr(stat_fingerprint(file.status)).encode())


def content_identity(file: GGUFFile, marks: bytes = b"") -> bytes:
    """Return a hash (32 bytes) of `marks` and of samples of each tensor; copies of a file have equal samples."""
    digest = hashlib.blake2b(marks, digest_size=DIGEST_BYTES)
    for name, tensor in sorted(file.tensors.items()):
        digest.update(repr((name, tensor.format.name, tensor.shape)).encode())
        last = max(tensor.nbytes - SAMPLE_BYTES, 0)
        for start in np.linspace(0, last, SAMPLES, dtype=np.int64):
            digest.update(tensor.data[start : start + SAMPLE_BYTES].tobytes())
    return digest.digest()


def cache_version(identity: bytes, config: SmolLM3Config, kv_format: KVFormat, context_tokens: int) -> bytes:
    """Return a digest (32 bytes). Caches with equal digests are interchangeable."""
    rotation = config.rope_frequencies(context_tokens)
    depends_on = repr((ARITHMETIC, config, kv_format, rotation)).encode()
    return hashlib.blake2b(depends_on + identity, digest_size=DIGEST_BYTES).digest()
