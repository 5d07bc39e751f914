"""One file of the cache on disk: its name, its bytes, and every check before it is believed.

    magic      8   NOTSO-KV
    order      4   0x01020304 in the writer's byte order
    version    4   of this layout
    model     32   digest of the cache version
    key       16   what the block is known by; of a partial block, what it comes after
    tag        8   whose it is
    is_partial    4
    tokens     4   how many, up to 128
    content    8   bytes
    checksum   4   CRC-32 of everything else
    ------------
    tokens     4 each
    content

Numbers are in the byte order of the machine: the content is too.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, HASH_BYTES

VERSION = 1
TAG_BYTES = 8
MOST_PARTS = 512  # that one call reads into; systems take 1,024

_MAGIC = b"NOTSO-KV"
_ORDER = 0x01020304
_HEADER = struct.Struct("=8sII32s16s8sIIQ")
_CHECKSUM = struct.Struct("=I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


class DamagedBlockError(Exception):
    """A file is not the block that its name promises. Never leaves the cache: it is a miss."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """A file's name: `model` (8 bytes of the cache version's digest), key, tag, and whether the block is partial.

    All in hex, so nothing of what anyone wrote comes into a path."""

    model: bytes
    hash: bytes
    tag: bytes
    is_partial: bool

    SUFFIX: ClassVar[str] = f".kv{VERSION}"
    PATTERN: ClassVar[str] = "([0-9a-f]{16})-([0-9a-f]{32})-([0-9a-f]{16})-([bt])"

    @classmethod
    def of(cls, cache_version: bytes, hash: bytes, tag: bytes, *, is_partial: bool) -> BlockName:
        """Raises ValueError for a key that has not 16 bytes or a tag of more than 8."""
        if len(hash) != HASH_BYTES or len(tag) > TAG_BYTES:
            raise ValueError(
                f"a key has {HASH_BYTES} bytes and a tag up to {TAG_BYTES}, not {len(hash)} and {len(tag)}"
            )
        return cls(_digest(cache_version)[:8], hash, tag.ljust(TAG_BYTES, b"\0"), is_partial)

    @classmethod
    def parse(cls, text: str) -> BlockName:
        """The reverse of str(). Raises ValueError."""
        match = re.fullmatch(cls.PATTERN + re.escape(cls.SUFFIX), text)
        if match is None:
            raise ValueError(f"{text!r} is no block's name")
        model, hash, tag, kind = match.groups()
        return cls(bytes.fromhex(model), bytes.fromhex(hash), bytes.fromhex(tag), kind == "t")

    def __str__(self) -> str:
        kind = "t" if self.is_partial else "b"
        return f"{self.model.hex()}-{self.hash.hex()}-{self.tag.hex()}-{kind}{self.SUFFIX}"

    def is_of(self, cache_version: bytes) -> bool:
        """Whether it belongs to this model and these settings."""
        return self.model == _digest(cache_version)[:8]

    def has_tag(self, tag: bytes) -> bool:
        """Whether it was written with this tag."""
        return self.tag == tag.ljust(TAG_BYTES, b"\0")


def file_bytes(tokens: int, content_bytes: int) -> int:
    """The size of the file of a block."""
    return HEADER_BYTES + 4 * tokens + content_bytes


def encode_block(name: BlockName, cache_version: bytes, tokens: array[int], content: bytes) -> list[bytes]:
    """The bytes of a block's file, in parts to be written one after another. tokens: an array of int32."""
    header = _header(name, cache_version, len(tokens), len(content))
    said = tokens.tobytes()
    return [header + _CHECKSUM.pack(_checksum(header, said, [content])), said, content]


def write_file(path: Path, parts: Sequence[bytes], *, flush: bool) -> None:
    """Under another name first, so that this one always stands for a whole file; `flush`: the bytes are on the disk
    before. Raises OSError, and leaves nothing behind."""
    draft = path.with_suffix(".tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            if flush:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """The names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_block(path: Path, name: BlockName, cache_version: bytes, content: Sequence[memoryview]) -> list[int]:
    """Read and check a block's file into the parts of `content`, one after another; its tokens. Raises OSError or
    DamagedBlockError.

    Only when it returns does `content` hold the block.
    """
    with _opened(path) as file:
        header, tokens, checksum = _read_header(file, name, cache_version, sum(len(part) for part in content))
        left = list(content)
        while left:
            count = os.readv(file.fileno(), left[:MOST_PARTS])
            if not count:
                raise DamagedBlockError(f"{path.name} ends early")
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    if _checksum(header, tokens, content) != checksum:
        raise DamagedBlockError(f"the checksum of {path.name} is wrong")
    return array("i", tokens).tolist()


def read_tokens(path: Path, name: BlockName, cache_version: bytes, content_bytes: int) -> list[int]:
    """The tokens alone, without the checksum's word: for finding out whether the block is wanted. Raises OSError or
    DamagedBlockError."""
    with _opened(path) as file:
        return array("i", _read_header(file, name, cache_version, content_bytes)[1]).tolist()


def announce(path: Path) -> None:
    """Have the system begin to fetch a block's file, which is wanted in a moment: in requests of its own size, and many
    at a time, a disk is several times faster than one read after another finds it. Raises OSError."""
    with _opened(path) as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _opened(path: Path) -> BinaryIO:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of that name would keep us waiting
    return os.fdopen(os.open(path, flags), "rb", buffering=0)


def _read_header(file: BinaryIO, name: BlockName, cache_version: bytes, content_bytes: int) -> tuple[bytes, bytes, int]:
    """Header, tokens and checksum, checked against the name, the model and the size of the file."""
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise DamagedBlockError(f"{name} is too short")
    header, (checksum,) = raw[: _HEADER.size], _CHECKSUM.unpack(raw[_HEADER.size :])
    count = _HEADER.unpack(header)[7]
    if header != _header(name, cache_version, count, content_bytes) or count > BLOCK_TOKENS:
        raise DamagedBlockError(f"{name} is another block, of another model, or from another version")
    if os.fstat(file.fileno()).st_size != file_bytes(count, content_bytes):
        raise DamagedBlockError(f"{name} has the wrong size")
    tokens = file.read(4 * count)
    if len(tokens) < 4 * count:
        raise DamagedBlockError(f"{name} ends early")
    return header, tokens, checksum


def _header(name: BlockName, cache_version: bytes, tokens: int, content_bytes: int) -> bytes:
    digest = _digest(cache_version)
    return _HEADER.pack(
        _MAGIC, _ORDER, VERSION, digest, name.hash, name.tag, int(name.is_partial), tokens, content_bytes
    )


def _checksum(header: bytes, tokens: bytes, content: Sequence[bytes | memoryview]) -> int:
    checksum = zlib.crc32(tokens, zlib.crc32(header))
    for part in content:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _digest(cache_version: bytes) -> bytes:
    return hashlib.blake2b(cache_version + sys.byteorder.encode(), digest_size=32).digest()
