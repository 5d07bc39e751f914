"""Write GGUF files of version 3 with typed metadata and streamed tensors; a file appears only once it is complete.

    with GGUFWriter(path) as writer:
        writer.add("demo.size", 3, "uint32")
        writer.add_tensor("weight", (2, 256), Q4_K, chunks())

Tensor data is not read until the file is written, at the end of the `with` block.
"""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.cursor import MAX_STRING_BYTES
from notso.qtensor.errors import GGUFError
from notso.qtensor.formats import Format, row_bytes
from notso.qtensor.gguf import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_ARRAY_ITEMS,
    MAX_ENTRIES,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    MAX_SIDES,
    MAX_TENSORS,
    MIN_ALIGNMENT,
    SCALARS,
    STRING,
    VALUE_TYPES,
)
from notso.system.files import sync

Chunk: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
TensorBytes: TypeAlias = Chunk | Iterable[Chunk]
Progress: TypeAlias = Callable[[int, int], None]  # tensor bytes written, total tensor bytes

_NUMBERS = {name: number for number, name in VALUE_TYPES.items()}


def _pack_string(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > MAX_STRING_BYTES:
        raise OverflowError(f"string of {len(raw)} bytes exceeds the limit of {MAX_STRING_BYTES}")
    return struct.pack("<Q", len(raw)) + raw


class GGUFWriter:
    """Collect entries and tensors, then write the file atomically.

    Methods raise GGUFError for invalid entries, tensors or data sizes; `write` may raise OSError.
    """

    def __init__(
        self, path: str | Path, *, durable: bool = True, progress: Progress = lambda written, total: None
    ) -> None:
        """durable: call fsync before renaming, so that a power failure leaves no partial file."""
        self.path = Path(path)
        self._durable = durable
        self._progress = progress
        self._written = 0
        self._alignment = DEFAULT_ALIGNMENT
        self._entries: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], Format, int, TensorBytes]] = {}

    def add(self, key: str, value: Any, type_name: str) -> None:
        """Add an entry. type_name: for example, "uint32" or "array of string"."""
        field, raw = f"metadata {key!a}", key.encode()
        if not 1 <= len(raw) <= MAX_KEY_BYTES or "\0" in key or key in self._entries:
            raise GGUFError("a key must be new, free of NUL and 1..256 bytes long", field=field)
        is_array = type_name.startswith("array of ")
        number = _NUMBERS.get(type_name.removeprefix("array of "), ARRAY)
        if number == ARRAY:
            raise GGUFError(f"unknown type {type_name!r}", field=field)
        try:
            if not is_array:
                packed = struct.pack("<I", number) + self._pack_value(value, number)
            else:
                if len(value) > MAX_ARRAY_ITEMS:
                    raise GGUFError(f"{len(value)} items exceed the limit of {MAX_ARRAY_ITEMS}", field=field)
                packed = struct.pack("<IIQ", ARRAY, number, len(value))
                packed += b"".join(self._pack_value(item, number) for item in value)
        except (struct.error, OverflowError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise GGUFError(f"value does not fit {type_name}: {error}", field=field) from error
        if len(self._entries) == MAX_ENTRIES:
            raise GGUFError(f"more than {MAX_ENTRIES} entries", field=field)
        if key == "general.alignment":
            if type_name != "uint32" or not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
                raise GGUFError(f"{value!r} is not a supported alignment", field=field)
            self._alignment = value
        self._entries[key] = packed

    @staticmethod
    def _pack_value(value: Any, number: int) -> bytes:
        if number == STRING:
            return _pack_string(value)
        if number == BOOL and not isinstance(value, bool | np.bool_):
            raise TypeError(f"{value!r} is not a boolean")
        return SCALARS[number].pack(value)

    def add_tensor(self, name: str, shape: Sequence[int], format: Format, data: TensorBytes) -> None:
        """Declare a tensor; `shape` is in numpy order. Raises OperandError for incomplete blocks."""
        # `data` (bytes or chunks) is read in `write`.
        field = f"tensor {name!a}"
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES or "\0" in name or name in self._tensors:
            raise GGUFError("a name must be new, free of NUL and 1..64 bytes long", field=field)
        shape = tuple(int(n) for n in shape)
        if not 1 <= len(shape) <= MAX_SIDES or min(shape) < 1:
            raise GGUFError(f"shape {shape} must have 1..{MAX_SIDES} dimensions of at least 1", field=field)
        size = math.prod(shape[:-1]) * row_bytes(format, shape[-1])
        if len(self._tensors) == MAX_TENSORS:
            raise GGUFError(f"more than {MAX_TENSORS} tensors", field=field)
        self._tensors[name] = (shape, format, size, data)

    @property
    def tensor_bytes(self) -> int:
        return sum(size for _, _, size, _ in self._tensors.values())

    def _header(self) -> bytes:
        parts = [MAGIC, struct.pack("<IQQ", 3, len(self._tensors), len(self._entries))]
        for key, packed in self._entries.items():
            parts += [_pack_string(key), packed]
        offset = 0
        for name, (shape, format, size, _) in self._tensors.items():
            sides = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            parts += [_pack_string(name), sides, struct.pack("<IQ", format.ggml_type, offset)]
            offset += size + self._padding(size)
        header = b"".join(parts)
        return header + bytes(self._padding(len(header)))

    def write(self) -> None:
        # The temporary name is unique, because another thread may write a file to the same path.
        temporary = self.path.with_name(f".{self.path.name[:50]}.{uuid.uuid4().hex}.part")
        try:
            with temporary.open("xb") as file:
                file.write(self._header())
                for name, (_, _, size, data) in self._tensors.items():
                    self._write_tensor(file, name, size, data)
                file.flush()
                if self._durable:
                    sync(file.fileno())
            temporary.replace(self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _write_tensor(self, file: BufferedWriter, name: str, size: int, data: TensorBytes) -> None:
        written = 0
        for piece in [data] if isinstance(data, bytes | bytearray | memoryview | np.ndarray) else data:
            raw = memoryview(piece.tobytes() if isinstance(piece, np.ndarray) else piece)
            written += raw.nbytes
            if written > size:
                break
            file.write(raw)
            self._written += raw.nbytes
            self._progress(self._written, self.tensor_bytes)
        if written != size:
            more = "at least " if written > size else ""
            raise GGUFError(f"{more}{written} bytes given, {size} declared", field=f"tensor {name!a}")
        file.write(bytes(self._padding(size)))

    def _padding(self, size: int) -> int:
        return -size % self._alignment

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.write()
