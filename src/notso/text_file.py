"""Read files that users specify: regular files of bounded size, and text with or without a byte order mark."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

LFS_POINTER = b"version https://git-lfs"  # beginning of the file that Git without LFS creates in place of a large one
LFS_ADVICE = "a Git LFS pointer to a file that has not been downloaded; run `git lfs pull`"

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # must precede UTF-16 LE, whose mark is a prefix of this one
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NUL = b"\0"
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotTextError(ValueError):
    """The bytes are not text. Callers prepend the file's name to the message."""


def read_text(path: Path, max_bytes: int) -> str:
    """Return a regular file's text, with `\\n` line endings. Raises NotTextError, or OSError as `read_regular` does."""
    return decode_text(read_regular(path, max_bytes))


def decode_text(data: bytes) -> str:
    """Return `data` as text with `\\n` line endings, without a byte order mark or trailing NULs.

    Raises NotTextError, which names the line, for invalid bytes and NULs within the text.
    """
    encoding = encoding_of(data)
    start = next((len(mark) for mark, _ in _MARKS if data.startswith(mark)), 0)
    try:
        text = data[start:].decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-LE").removesuffix("-BE")
        line = 1 + _with_newlines(data[start : start + error.start].decode(encoding)).count("\n")
        raise NotTextError(f"is not {name} text (byte {start + error.start}) in line {line}") from None
    text = _with_newlines(text.rstrip("\0"))
    if "\0" in text:
        line = 1 + text.count("\n", 0, text.index("\0"))
        raise NotTextError(f"is not text: line {line} contains a NUL character")
    return text


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def utf8_stream(file: BinaryIO) -> BinaryIO:
    """Return a stream of the rest of `file`, converted to UTF-8 without a byte order mark.

    Reading from it raises NotTextError for invalid UTF-16 or UTF-32. UTF-8 is not checked.
    """
    start = file.tell()
    head = file.read(4)
    encoding, length = next(((name, len(mark)) for mark, name in _MARKS if head.startswith(mark)), ("utf-8", 0))
    file.seek(start + length)
    return file if encoding == "utf-8" else io.BufferedReader(_Recoded(file, encoding))


class _Recoded(io.RawIOBase):
    PIECE_BYTES = 1 << 16

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._name = encoding.upper().removesuffix("-LE").removesuffix("-BE")
        self._decoder = codecs.getincrementaldecoder(encoding)("strict")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = self._file.read(self.PIECE_BYTES)
            try:
                self._rest = self._decoder.decode(piece, final=not piece).encode()
            except UnicodeError:
                raise NotTextError(f"is not {self._name} text") from None
            if not piece:
                break
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def encoding_of(data: bytes) -> str:
    """Return the name of the Unicode encoding of text that begins with `data`."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    if _NUL in data and len(data) % 2 == 0:
        # UTF-16 without a byte order mark: in Latin text, nearly all high bytes are NUL, but few low bytes are.
        even, odd = data[::2].count(_NUL), data[1::2].count(_NUL)
        most, least = max(even, odd), min(even, odd)
        if 4 * most >= 3 * (len(data) // 2) and 8 * least <= most:
            return "utf-16-le" if odd == most else "utf-16-be"
    return "utf-8"


def is_unicode(text: str | Path) -> bool:
    """Return whether a text or path can be encoded as UTF-8, as JSON and HTML require."""
    return _SURROGATE.search(str(text)) is None


SECRET_BYTES = 1 << 16
"""Maximum size of a file that contains a key or secret."""


def open_regular(path: Path) -> int:
    """Open `path` for reading and return a descriptor. Follows links.

    Raises OSError with `strerror` and `filename`, for example if the file is not a regular file.
    """
    # The file type is checked first: reading from a FIFO or terminal would wait for a writer, and even opening a device
    # can have side effects.
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _irregular_file_error(path)
        # With O_NONBLOCK, opening does not block if the file has been replaced by a FIFO since the check.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular_file_error(path)
    return descriptor


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return a regular file's content. Raises OSError as `open_regular` does, and if the file exceeds `max_bytes`."""
    # The limit applies to the bytes read, because some files, such as those in /proc, report a size of 0.
    with open(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return content


def _irregular_file_error(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB" if count >= 1 << 10 else f"{count} bytes"
