"""Read a GGUF file's bytes with bounds checks; no other module indexes them.

The checks are necessary because NumPy and memoryview silently truncate slices that extend past the end.
"""

from __future__ import annotations

import codecs
import struct
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import GGUFError

MAX_STRING_BYTES: Final = 1 << 20  # check GG3 (see gguf.py)
_DECODE_BYTES: Final = 1 << 20  # bytes decoded at a time, so that memory use does not depend on declared sizes

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class Cursor:
    """Position in a buffer. Methods raise GGUFError, which names the field and the offset."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._end = len(buffer)
        self.position = 0

    @property
    def left(self) -> int:
        return self._end - self.position

    def fail(self, message: str, field: str, offset: int | None = None) -> NoReturn:
        """Raise GGUFError about `field` at `offset` (default: the current position)."""
        raise GGUFError(message, field=field, offset=self.position if offset is None else offset)

    def read_bytes(self, count: int, field: str) -> memoryview:
        if count > self.left:
            self.fail(f"needs {count} bytes, but the file has only {self.left} more", field)
        start = self.position
        self.position = start + count
        return self._buffer[start : self.position]

    def uint32(self, field: str) -> int:
        value: int = _U32.unpack(self.read_bytes(4, field))[0]
        return value

    def uint64(self, field: str) -> int:
        value: int = _U64.unpack(self.read_bytes(8, field))[0]
        return value

    def scalar(self, layout: struct.Struct, field: str) -> int | float:
        value: int | float = layout.unpack(self.read_bytes(layout.size, field))[0]
        return value

    def string(self, field: str, limit: int = MAX_STRING_BYTES) -> str:
        """Read a uint64 length and that many bytes of UTF-8."""
        start = self.position
        length = self.uint64(field)
        if length > limit:
            self.fail(f"string of {length} bytes exceeds the limit of {limit}", field, start)
        raw = self.read_bytes(length, field)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"not UTF-8: {error.reason}", field, start + 8 + error.start)

    def strings(self, count: int, field: str) -> StringSpan:
        """Validate `count` strings; return them undecoded."""
        start = self.position
        ends = _string_ends(self._buffer, start, self._end, count, field)
        self.position = int(ends[-1]) if count else start
        span = StringSpan(self._buffer[start : self.position], ends - start)
        span.check_utf8(field, start)
        return span


def _string_ends(buffer: memoryview, start: int, end: int, count: int, field: str) -> npt.NDArray[np.int64]:
    if count * 8 > end - start:
        raise GGUFError(f"{count} strings declared, but only {end - start} bytes left", field=field, offset=start)
    ends = np.empty(count, np.int64)
    unpack, limit = _U64.unpack_from, MAX_STRING_BYTES
    position, last = start, end - 8
    # The number of iterations comes from the file, but each iteration consumes at least 8 bytes or fails, so the loop
    # cannot run past the end of the file.
    for i in range(count):
        if position > last:
            raise GGUFError(f"the file ends inside string {i} of {count}", field=field, offset=position)
        (length,) = unpack(buffer, position)
        stop = position + 8 + length
        if length > limit or stop > end:
            reason = f"the limit is {limit}" if length > limit else f"only {end - position - 8} are left"
            raise GGUFError(
                f"string {i} of {count} declares {length} bytes, but {reason}", field=field, offset=position
            )
        ends[i] = position = stop
    return ends


class StringSpan:
    """Undecoded strings with 8-byte length prefixes."""

    def __init__(self, raw: memoryview, ends: npt.NDArray[np.int64]) -> None:
        self._raw = raw
        # (count,) end offsets in `raw`; uint32 if they fit, which halves the memory.
        self._ends = ends.astype(np.uint32) if len(raw) < 1 << 32 else ends

    def __len__(self) -> int:
        return len(self._ends)

    def _starts(self) -> npt.NDArray[np.int64]:
        starts = np.zeros(len(self._ends), np.int64)
        starts[1:] = self._ends[:-1]
        return starts

    def _text(self, starts: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.uint8]:
        # Length prefixes are replaced by NULs. A NUL cannot continue a UTF-8 sequence, so the whole text is valid if
        # and only if every string is.
        text = np.frombuffer(self._raw[start:stop], np.uint8).copy()
        first, last = np.searchsorted(starts, [start - 7, stop])
        prefixes = starts[first:last] - start
        for i in range(8):
            at = prefixes + i
            text[at[(at >= 0) & (at < len(text))]] = 0
        return text

    def check_utf8(self, field: str, offset: int) -> None:
        """Raise GGUFError for invalid UTF-8; `offset`: file position of the span."""
        size, starts = len(self._raw), self._starts()
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        for start in range(0, size, _DECODE_BYTES):
            stop = min(start + _DECODE_BYTES, size)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(self._text(starts, start, stop).data, final=stop == size)
            except UnicodeDecodeError as error:
                position = start - pending + error.start
                index = int(np.searchsorted(self._ends, position, side="right"))
                raise GGUFError(f"string {index} is not UTF-8", field=field, offset=offset + position) from None

    def to_list(self) -> list[str]:
        """Decode all strings. Raises UnicodeDecodeError if the file has become invalid since it was opened."""
        if not len(self):
            return []
        starts = self._starts()
        text = self._text(starts, 0, len(self._raw))
        if int(np.count_nonzero(text == 0)) == 8 * len(self):  # the usual case: no string contains NUL
            return str(text.data, "utf-8").split("\0" * 8)[1:]
        spans = zip(starts.tolist(), self._ends.tolist(), strict=True)
        return [str(self._raw[start + 8 : stop], "utf-8") for start, stop in spans]
