"""Read GGUF files of versions 2 and 3. Files are memory-mapped; declared sizes are checked before allocation.

A file is a header, metadata entries, tensor descriptions, padding, and tensor bytes:

    "GGUF"  version u32  tensor count u64  entry count u64
    entry:   key string, value type u32, value          (an array: item type u32, count u64, items)
    tensor:  name string, number of dimensions u32, dimensions u64 each (row length first), format u32, offset u64
    padding to `general.alignment` (default 32); tensor offsets are relative to the end of this padding

Numbers are little-endian; a string is a u64 length followed by UTF-8.
"""

# The checks are numbered GG1 to GG15 (with gaps), here and in tests/qtensor.

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from notso.qtensor.cursor import Cursor, StringSpan
from notso.qtensor.errors import GGUFError, UnsupportedFormatError, quoted, set_error_path
from notso.qtensor.formats import FORMATS, format_name
from notso.qtensor.tensor import QTensor
from notso.text_file import LFS_ADVICE, LFS_POINTER, open_regular

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)  # GG1; both versions have the same layout
MAX_ENTRIES: Final = 4096  # GG2
MAX_TENSORS: Final = 4096  # GG2
MAX_KEY_BYTES: Final = 256  # GG3
MAX_NAME_BYTES: Final = 64  # GG3
MAX_ARRAY_ITEMS: Final = 1_000_000  # GG4
MAX_SIDES: Final = 4  # GG5
DEFAULT_ALIGNMENT: Final = 32
MIN_ALIGNMENT: Final = 8  # GG6
MAX_ALIGNMENT: Final = 4096  # GG6
SHORT_TEXT_BYTES: Final = 1024  # longer strings are decoded on access
MAX_SIZE: Final = 2**63 - 1  # GG5, GG7: maximum product of dimensions, and maximum end offset of a tensor
SMALLEST_ENTRY: Final = 14  # a one-letter key, a type and a one-byte value
SMALLEST_TENSOR: Final = 33  # a one-letter name, one dimension, a format and an offset

BOOL, STRING, ARRAY = 7, 8, 9
VALUE_TYPES: Final[dict[int, str]] = {
    0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32", BOOL: "bool",
    STRING: "string", ARRAY: "array", 10: "uint64", 11: "int64", 12: "float64",
}  # fmt: skip
_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
SCALARS: Final = {number: struct.Struct("<" + code) for number, code in _CODES.items()}
ARRAY_TYPES: Final[dict[int, np.dtype[Any]]] = {number: np.dtype("<" + code) for number, code in _CODES.items()}


class TextSpan:
    """A long string, decoded on access, because decoding can quadruple its size (GG12)."""

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw

    def to_text(self) -> str:
        """Decode the string. Raises UnicodeDecodeError if the file has become invalid."""
        return str(self._raw, "utf-8")


class NumberSpan:
    """An undecoded array of numbers or booleans."""

    def __init__(self, values: npt.NDArray[Any], is_bool: bool) -> None:
        self._values = values
        self._is_bool = is_bool

    def __len__(self) -> int:
        return len(self._values)

    def to_list(self) -> list[Any]:
        values: list[Any] = (self._values != 0).tolist() if self._is_bool else self._values.tolist()
        return values


class Metadata(Mapping[str, Any]):
    """Entries in file order, with values of type int, float, bool or str, or lists of these."""

    # Arrays and long strings are validated when the file is opened, decoded on first access, and kept until `release`.
    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._entries[key]
        if not isinstance(value, StringSpan | NumberSpan | TextSpan):
            return value
        if key not in self._decoded:
            self._decoded[key] = value.to_text() if isinstance(value, TextSpan) else value.to_list()
        return self._decoded[key]

    def release(self) -> None:
        """Drop decoded values, which may take megabytes; the next access decodes them again."""
        self._decoded.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def array_length(self, key: str) -> int | None:
        """Return an array's length without decoding it; None for other values. Raises KeyError."""
        value = self._entries[key]
        return len(value) if isinstance(value, StringSpan | NumberSpan) else None


class GGUFFile:
    """An open file; `tensors` are read-only views of the memory-mapped file, in file order."""

    def __init__(self, path: Path, mapping: mmap.mmap, status: os.stat_result) -> None:
        self.path = path
        self.status = status
        self.size_bytes = len(mapping)
        self._mapping = mapping
        cursor = Cursor(memoryview(mapping))  # views keep the mapping and its descriptor alive
        self.version, tensor_count, entry_count = _read_header(cursor)
        entries, types, self.alignment = _read_entries(cursor, entry_count)
        self.metadata = Metadata(entries)
        self.metadata_types: Mapping[str, str] = MappingProxyType(types)  # "uint32", "array of string" and so on
        self.data_offset, tensors = _read_tensors(cursor, tensor_count, self.alignment)
        self.tensors: Mapping[str, QTensor] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and validate a file. Raises GGUFError, which names the field and offset of invalid content."""
        path = Path(path)
        try:
            return cls._open(path)
        except GGUFError as error:
            set_error_path(error, path)
            raise

    @classmethod
    def _open(cls, path: Path) -> GGUFFile:
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise GGUFError(f"cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)  # GG15: not stat, because the path may now refer to another file
            if status.st_size < len(MAGIC):
                raise GGUFError(f"{status.st_size} bytes are too few for a GGUF file", field="magic", offset=0)
            try:
                # mmap duplicates the descriptor, so this one can be closed.
                mapping = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise GGUFError(f"cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return cls(path, mapping, status)

    def close(self) -> None:
        """Drop the tensors; existing views stay valid."""
        self.tensors = MappingProxyType({})

    def release(self, tensor: QTensor) -> None:
        # Removes from memory the pages that contain only this tensor; the system reads them again when they are
        # accessed. Does nothing for tensors outside this mapping, such as copies.
        page = mmap.PAGESIZE
        start = tensor.data.ctypes.data - np.frombuffer(self._mapping, np.uint8).ctypes.data
        first, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
        if start >= 0 and start + tensor.nbytes <= self.size_bytes and first < end:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        set_error_path(error, self.path)
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.size_bytes} bytes)"


def _read_header(cursor: Cursor) -> tuple[int, int, int]:
    magic = bytes(cursor.read_bytes(4, "magic"))
    if magic == LFS_POINTER[:4]:
        cursor.fail(f"not a GGUF file, but {LFS_ADVICE}", "magic", 0)
    if magic != MAGIC:
        cursor.fail(f"not a GGUF file: begins with {magic!r}, not {MAGIC!r}", "magic", 0)
    version = cursor.uint32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        version_name = f"GGUF version {version}"
        if swapped in (1, *VERSIONS):
            version_name = f"GGUF version {swapped} in big-endian byte order"
        raise UnsupportedFormatError(f"{version_name} is not supported; supported: 2 and 3", field="version", offset=4)
    counts = []
    for field, limit, smallest in (
        ("tensor count", MAX_TENSORS, SMALLEST_TENSOR),
        ("metadata count", MAX_ENTRIES, SMALLEST_ENTRY),
    ):
        start = cursor.position
        count = cursor.uint64(field)
        if count > limit:
            cursor.fail(f"{count} exceeds the limit of {limit}", field, start)
        if count * smallest > cursor.left:
            cursor.fail(f"{count} entries do not fit in the remaining {cursor.left} bytes", field, start)
        counts.append(count)
    return version, counts[0], counts[1]


def _read_name(cursor: Cursor, field: str, limit: int) -> str:
    start = cursor.position
    name = cursor.string(field, limit)
    if not name or "\0" in name:
        cursor.fail("empty" if not name else "contains a NUL", field, start)
    return name


def _read_entries(cursor: Cursor, count: int) -> tuple[dict[str, Any], dict[str, str], int]:
    # Returns values (arrays and long strings as spans) by key, type names by key, and the alignment.
    entries: dict[str, Any] = {}
    types: dict[str, str] = {}
    alignment = DEFAULT_ALIGNMENT
    for i in range(count):
        start = cursor.position
        key = _read_name(cursor, f"metadata key {i}", MAX_KEY_BYTES)
        if key in entries:
            cursor.fail(f"{quoted(key)} appears twice", f"metadata key {i}", start)
        field = f"metadata {quoted(key)}"
        start = cursor.position
        kind = cursor.uint32(field)
        if kind == ARRAY:
            entries[key], types[key] = _read_array(cursor, field)
        elif kind in VALUE_TYPES:
            entries[key], types[key] = _read_value(cursor, kind, field), VALUE_TYPES[kind]
        else:
            cursor.fail(f"value type {kind} is not one of 0..12", field, start)
        if key == "general.alignment":
            alignment = entries[key]
            if types[key] != "uint32":  # GG9
                cursor.fail(f"the type must be uint32, not {types[key]}", field, start)
            if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
                cursor.fail(f"{alignment} is not a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}", field, start)
    return entries, types, alignment


def _read_value(cursor: Cursor, kind: int, field: str) -> Any:
    start = cursor.position
    if kind == STRING:
        text = cursor.string(field)
        size = cursor.position - start - 8
        if size <= SHORT_TEXT_BYTES:
            return text
        cursor.position = start + 8
        return TextSpan(cursor.read_bytes(size, field))
    value = cursor.scalar(SCALARS[kind], field)
    if kind == BOOL:
        if value not in (0, 1):
            cursor.fail(f"{value} is not a boolean (0 or 1)", field, start)
        return value == 1
    return value


def _read_array(cursor: Cursor, field: str) -> tuple[StringSpan | NumberSpan, str]:
    start = cursor.position
    kind = cursor.uint32(field)
    if kind == ARRAY:
        cursor.fail("arrays of arrays are not supported", field, start)
    if kind not in VALUE_TYPES:
        cursor.fail(f"item type {kind} is not one of 0..12", field, start)
    start = cursor.position
    count = cursor.uint64(field)
    if count > MAX_ARRAY_ITEMS:
        cursor.fail(f"array of {count} items exceeds the limit of {MAX_ARRAY_ITEMS}", field, start)
    type_name = f"array of {VALUE_TYPES[kind]}"
    if kind == STRING:
        return cursor.strings(count, field), type_name
    start = cursor.position
    values = np.frombuffer(cursor.read_bytes(count * ARRAY_TYPES[kind].itemsize, field), ARRAY_TYPES[kind])
    if kind == BOOL and count and values.max() > 1:
        index = int(np.argmax(values > 1))
        cursor.fail(f"item {index} is {values[index]}, not a boolean", field, start + index)
    return NumberSpan(values, kind == BOOL), type_name


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[int, dict[str, QTensor]]:
    # Returns the offset of the tensor data, and the tensors in file order.
    infos = {}
    for i in range(count):
        start = cursor.position
        name = _read_name(cursor, f"tensor name {i}", MAX_NAME_BYTES)
        if name in infos:
            cursor.fail(f"{quoted(name)} appears twice", f"tensor name {i}", start)
        infos[name] = (start, *_read_tensor_info(cursor, f"tensor {quoted(name)}", alignment))
    data_offset = -(-cursor.position // alignment) * alignment
    tensors: dict[str, QTensor] = {}
    for name, (start, shape, kind, size, offset) in infos.items():
        begin = data_offset + offset
        if begin + size > cursor.position + cursor.left:
            excess = begin + size - cursor.position - cursor.left
            cursor.fail(
                f"{size} bytes of data at {begin} end {excess} bytes past the end of the file",
                f"tensor {quoted(name)}",
                start,
            )
        cursor.position = begin
        data = np.frombuffer(cursor.read_bytes(size, name), np.uint8)
        tensors[name] = QTensor(name, FORMATS[kind], shape, data)
    _check_overlaps(cursor, infos)
    return data_offset, tensors


def _check_overlaps(cursor: Cursor, infos: dict[str, tuple[int, tuple[int, ...], int, int, int]]) -> None:
    # GG7: tensors must not overlap.
    previous, free_from = "", 0
    for name, (start, _, _, size, offset) in sorted(infos.items(), key=lambda item: item[1][4]):
        if offset < free_from:
            cursor.fail(f"data overlaps the data of {quoted(previous)}", f"tensor {quoted(name)}", start)
        previous, free_from = name, offset + size


def _read_tensor_info(cursor: Cursor, field: str, alignment: int) -> tuple[tuple[int, ...], int, int, int]:
    # Returns the shape (numpy order), format number, size in bytes, and data offset.
    start = cursor.position
    side_count = cursor.uint32(field)
    if not 1 <= side_count <= MAX_SIDES:
        cursor.fail(f"a tensor must have 1..{MAX_SIDES} dimensions, not {side_count}", field, start)
    sides, values, sides_at = [], 1, cursor.position
    for i in range(side_count):
        start = cursor.position
        side = cursor.uint64(field)
        values *= side
        if side < 1 or values > MAX_SIZE:
            problem = "; the product of the dimensions overflows" if side else ""
            cursor.fail(f"dimension {i} is {side}{problem}", field, start)
        sides.append(side)
    start = cursor.position
    kind = cursor.uint32(field)
    if kind not in FORMATS:
        supported = ", ".join(f.name for f in FORMATS.values())
        raise UnsupportedFormatError(
            f"block format {format_name(kind)} is not supported; supported: {supported}", field=field, offset=start
        )
    format = FORMATS[kind]
    if sides[0] % format.block_values:
        cursor.fail(
            f"row length {sides[0]} is not a multiple of {format.name}'s block size of {format.block_values}",
            field,
            sides_at,
        )
    size = values // format.block_values * format.block_bytes
    start = cursor.position
    offset = cursor.uint64(field)
    if offset % alignment:
        cursor.fail(f"data offset {offset} is not a multiple of {alignment}, the alignment", field, start)
    if size > MAX_SIZE or offset > MAX_SIZE - size:
        cursor.fail(f"data offset {offset} plus {size} bytes overflows", field, start)
    return tuple(reversed(sides)), kind, size, offset
