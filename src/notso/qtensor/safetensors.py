"""Read safetensors files with F32, F16 and BF16 tensors; data is read only when it is accessed.

The header is validated against the file's size before tensors are accessed. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeGuard

import numpy as np

from notso.qtensor.errors import SafetensorsError, quoted
from notso.qtensor.formats import BF16, F16, F32, Format
from notso.qtensor.tensor import QTensor
from notso.text_file import LFS_ADVICE, LFS_POINTER, open_regular

MAX_HEADER_BYTES = 100_000_000  # the official reader has the same limit

MAX_TENSORS = 65_536
MAX_SIDES = 4
_LENGTH_BYTES = 8
_FORMATS: dict[str, Format] = {"F32": F32, "F16": F16, "BF16": BF16}


class SafetensorsFile:
    """Tensors by name, as views of the memory-mapped file. The constructor raises OSError or SafetensorsError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, QTensor] = {}
        with open(open_regular(self.path), "rb") as file:  # noqa: PTH123 - a descriptor
            size = file.seek(0, 2)
            if size < _LENGTH_BYTES:
                self._fail("the file is too short for a header")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read(np.frombuffer(self._map, np.uint8))
        except BaseException:
            self.close()
            raise

    def _read(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if data[: len(LFS_POINTER)].tobytes() == LFS_POINTER:
            self._fail(f"the file is {LFS_ADVICE}")
        length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, data.size - _LENGTH_BYTES):
            self._fail(f"the header size of {length:,} bytes exceeds the file or the limit")
        begin = _LENGTH_BYTES + length
        body = data[begin:]
        for name, entry in self._header(data[_LENGTH_BYTES:begin].tobytes()).items():
            if name == "__metadata__":
                continue
            format, shape, (start, end) = self._parse_entry(name, entry)
            values = math.prod(shape)
            needed = values * format.block_bytes
            if end > body.size or end - start != needed:
                self._fail(
                    f"{quoted(name)} needs {needed:,} bytes for {values:,} {format} values, but its data is at bytes "
                    f"{start:,} to {end:,} of {body.size:,}"
                )
            self.tensors[name] = QTensor(name, format, shape, body[start:end])

    def _header(self, raw: bytes) -> dict[str, Any]:
        def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                self._fail("the header contains a duplicate name")
            return found

        try:
            header = json.loads(raw, object_pairs_hook=reject_duplicates)
        except (ValueError, RecursionError):
            self._fail("the header is not JSON")
        if not isinstance(header, dict) or len(header) > MAX_TENSORS:
            self._fail(f"the header must be an object of at most {MAX_TENSORS:,} tensors")
        return header

    def _parse_entry(self, name: str, entry: Any) -> tuple[Format, tuple[int, ...], tuple[int, int]]:
        if not isinstance(entry, dict):
            self._fail(f"{quoted(name)} is not an object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in _FORMATS:
            self._fail(f"{quoted(name)} has dtype {quoted(dtype)}; supported: {', '.join(_FORMATS)}")
        if not _are_counts(shape) or not 1 <= len(shape) <= MAX_SIDES or 0 in shape:
            self._fail(f"{quoted(name)} must have 1 to {MAX_SIDES} dimensions, none of them 0")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(f"{quoted(name)} has invalid data offsets")
        return _FORMATS[dtype], tuple(shape), (offsets[0], offsets[1])

    def _fail(self, message: str) -> NoReturn:
        raise SafetensorsError(f"{self.path.name}: {message}")

    def close(self) -> None:
        """Close the file; it stays mapped while views exist."""
        self.tensors = {}
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _are_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
