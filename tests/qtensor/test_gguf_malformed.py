"""Malformed GGUF files: cases for GG1..GG9 and GG12, extreme values in every numeric field, truncations and flipped
bits.

Each must quickly raise a one-line error that names the field and the byte, and must not allocate claimed sizes.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from notso.qtensor.errors import GGUFError, UnsupportedFormatError
from notso.qtensor.formats import UNSUPPORTED_NAMES
from notso.qtensor.gguf import GGUFFile

MAX_SECONDS = 0.25  # of this thread's CPU time, which other load does not affect; a hundred times the usual
MAX_ALLOCATED = 1 << 20  # while rejecting a small file; far less than any size claimed here
EXTREMES = (0, 1, 2**8 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes | str, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return u32(kind) + u64(count) + items


def tensor(
    name: bytes | str = "t",
    sides: Iterable[int] = (256,),
    format: int = 12,
    offset: int = 0,
    side_count: int | None = None,
) -> bytes:
    sides = list(sides)
    head = text(name) + u32(len(sides) if side_count is None else side_count)
    return head + b"".join(map(u64, sides)) + u32(format) + u64(offset)


def build(
    entries: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    entry_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    entries, tensors = list(entries), list(tensors)
    header = magic + u32(version)
    header += u64(len(tensors) if tensor_count is None else tensor_count)
    header += u64(len(entries) if entry_count is None else entry_count)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment if data else 0) + data


SOUND = build([entry("general.alignment", U32, u32(32))], [tensor()], bytes(144))
PAD = bytes(4096)  # padding, so that a count is rejected for its value and not for the end of the file


class Case(NamedTuple):
    name: str
    content: bytes
    field: str  # expected in the error's field
    offset: int
    message: str  # expected in the error's text
    error: type[GGUFError] = GGUFError


KV = 24  # offset of the first metadata entry


def value_at(key: str) -> int:
    """Return the offset of the value type of a first entry with this key."""
    return KV + 8 + len(key)


def valued(kind: int, value: bytes) -> bytes:
    """Return a file with one entry, "k"."""
    return build([entry("k", kind, value)])


def listed(kind: int, count: int, items: bytes) -> bytes:
    """Return a file with one array, "k"."""
    return valued(ARRAY, array(kind, count, items))


def described(*args: Any, **kwargs: Any) -> bytes:
    """Return a file with one tensor, "t", and 4,096 bytes of data."""
    return build([], [tensor(*args, **kwargs)], PAD)


CASES = [
    # GG1: container
    Case("empty", b"", "magic", 0, "0 bytes"),
    Case("one byte", b"G", "magic", 0, "1 bytes"),
    Case("other magic", build(magic=b"GGML"), "magic", 0, "not a GGUF"),
    Case("zip", b"PK\3\4" + PAD, "magic", 0, "not a GGUF"),
    Case("json", b'{"a": 1}' + PAD, "magic", 0, "not a GGUF"),
    Case("zeros", PAD, "magic", 0, "not a GGUF"),
    Case("lower case", build(magic=b"gguf"), "magic", 0, "not a GGUF"),
    Case("magic only", b"GGUF", "version", 4, "has only 0 more"),
    Case("half a version", b"GGUF\3\0", "version", 4, "has only 2 more"),
    Case("version 0", build(version=0), "version", 4, "version 0", UnsupportedFormatError),
    Case("version 1", build(version=1), "version", 4, "version 1", UnsupportedFormatError),
    Case("version 4", build(version=4), "version", 4, "version 4", UnsupportedFormatError),
    Case("version max", build(version=2**32 - 1), "version", 4, "4294967295", UnsupportedFormatError),
    Case("big-endian 3", build(version=3 << 24), "version", 4, "big-endian", UnsupportedFormatError),
    Case("big-endian 2", build(version=2 << 24), "version", 4, "big-endian", UnsupportedFormatError),
    Case("no counts", b"GGUF" + u32(3), "tensor count", 8, "has only 0 more"),
    Case("half a count", b"GGUF" + u32(3) + bytes(7), "tensor count", 8, "has only 7 more"),
    Case("no second count", b"GGUF" + u32(3) + bytes(8), "metadata count", 16, "has only 0 more"),
    # GG2: counts
    Case("tensors over the cap", build(tensor_count=4097) + PAD * 40, "tensor count", 8, "limit of 4096"),
    Case("entries over the cap", build(entry_count=4097) + PAD * 40, "metadata count", 16, "limit of 4096"),
    Case("tensors past the file", build(tensor_count=4096), "tensor count", 8, "do not fit"),
    Case("entries past the file", build(entry_count=4096), "metadata count", 16, "do not fit"),
    Case("tensors negative", build(tensor_count=2**64 - 1) + PAD, "tensor count", 8, "limit of 4096"),
    Case("entries negative", build(entry_count=2**64 - 1) + PAD, "metadata count", 16, "limit of 4096"),
    Case("the 43 bytes that hang another reader", build(entry_count=2**62) + bytes(19), "metadata count", 16, "limit"),
    # GG3: strings
    Case("key too long", build([entry("k" * 257, U8, b"\1")]), "metadata key 0", KV, "exceeds the limit of 256"),
    Case("key empty", build([entry("", U32, u32(1))]), "metadata key 0", KV, "empty"),
    Case("key with a NUL", build([entry("a\0b", U32, u32(1))]), "metadata key 0", KV, "NUL"),
    Case("key not UTF-8", build([entry(b"ab\xff", U32, u32(1))]), "metadata key 0", KV + 10, "UTF-8"),
    Case("key overlong", build([entry(b"\xc0\x80", U32, u32(1))]), "metadata key 0", KV + 8, "UTF-8"),
    Case("key past the file", build([text("k", 200) + bytes(9)]), "metadata key 0", KV + 8, "needs 200"),
    Case("key length negative", build([text("k", 2**64 - 1) + bytes(9)]), "metadata key 0", KV, "limit of 256"),
    Case("string over the cap", valued(STRING, text("x", (1 << 20) + 1)) + PAD, "'k'", KV + 13, "limit"),
    Case("string past the file", valued(STRING, text("x", 1 << 20)), "'k'", KV + 21, "needs 1048576"),
    Case("string length negative", valued(STRING, text("x", 2**63)) + PAD, "'k'", KV + 13, "limit"),
    Case("string not UTF-8", valued(STRING, text(b"abc\x80")), "'k'", KV + 24, "UTF-8"),
    Case("string a surrogate", valued(STRING, text(b"\xed\xa0\x80")), "'k'", KV + 21, "UTF-8"),
    Case("string cut short", valued(STRING, text(b"a\xe2\x82")), "'k'", KV + 22, "UTF-8"),
    Case("name too long", build([], [tensor("n" * 65)]), "tensor name 0", KV, "65 bytes exceeds the limit of 64"),
    Case("name empty", build([], [tensor("")]) + PAD, "tensor name 0", KV, "empty"),
    Case("name with a NUL", build([], [tensor("a\0")]), "tensor name 0", KV, "NUL"),
    Case("name not UTF-8", build([], [tensor(b"\xfe")]), "tensor name 0", KV + 8, "UTF-8"),
    Case("name past the file", build([], [text("n", 64) + bytes(30)]), "tensor name 0", KV + 8, "needs 64"),
    # GG4: arrays
    Case("array over the cap", listed(U8, 1_000_001, b"") + PAD * 300, "'k'", KV + 17, "limit of 1000000"),
    Case("array past the file", listed(U8, 1_000_000, PAD), "'k'", KV + 25, "needs 1000000"),
    Case("wide array past the file", listed(F64, 513, PAD), "'k'", KV + 25, "needs 4104"),
    Case("array negative", listed(U8, 2**64 - 1, PAD), "'k'", KV + 17, "limit of 1000000"),
    Case("array whose bytes wrap", listed(U64, 2**61 + 1, PAD), "'k'", KV + 17, "limit"),
    Case("strings over the cap", listed(STRING, 1_000_001, PAD), "'k'", KV + 17, "limit"),
    Case("strings past the file", listed(STRING, 1_000_000, PAD), "'k'", KV + 25, "4096 bytes left"),
    Case("strings that end early", listed(STRING, 3, text("abcdefgh") * 2), "'k'", KV + 57, "inside string 2"),
    Case("one string past the file", listed(STRING, 2, text("ab") + text("c", 99)), "'k'", KV + 35, "string 1 of 2"),
    Case("one string over the cap", listed(STRING, 1, text("c", 2**21)) + PAD, "'k'", KV + 25, "limit"),
    Case("one string negative", listed(STRING, 1, text("c", 2**64 - 8)) + PAD, "'k'", KV + 25, "limit"),
    Case("string item not UTF-8", listed(STRING, 3, text("a") + text(b"b\x80") + text("c")), "'k'", KV + 43,
         "string 1"),
    Case("string items joined", listed(STRING, 2, text(b"\xc3") + text(b"x" * 0x80)), "'k'", KV + 33, "string 0"),
    Case("last string item cut", listed(STRING, 2, text("a") + text(b"\xe2\x82")), "'k'", KV + 42, "string 1"),
    Case("array of arrays", listed(ARRAY, 1, array(U8, 1, b"\1")), "'k'", KV + 13, "arrays of arrays"),
    Case("array of type 13", listed(13, 1, PAD), "'k'", KV + 13, "item type 13"),
    Case("array of type max", listed(2**32 - 1, 1, PAD), "'k'", KV + 13, "item type"),
    Case("array without a type", build([entry("kk", ARRAY, b"")]), "'kk'", KV + 14, "has only 0 more"),
    Case("array without a count", valued(ARRAY, u32(U8)), "'k'", KV + 17, "has only 0 more"),
    # GG5: dimensions
    Case("no dimensions", build([], [tensor(sides=())]) + PAD, "tensor 't'", KV + 9, "dimensions, not 0"),
    Case("five dimensions", build([], [tensor(sides=(256, 1, 1, 1, 1))]) + PAD, "tensor 't'", KV + 9, "not 5"),
    Case("dimensions negative", build([], [tensor(side_count=2**32 - 1)]) + PAD, "tensor 't'", KV + 9,
         "dimensions, not 4294967295"),
    Case("dimensions past the file", build([], [tensor(sides=(256, 256), side_count=4)[:-8]]),
         "tensor 't'", KV + 29, "has only 4 more"),
    Case("an empty row", described(sides=(0,)), "tensor 't'", KV + 13, "dimension 0 is 0"),
    Case("no rows", described(sides=(256, 0)), "tensor 't'", KV + 21, "dimension 1 is 0"),
    Case("one side past 2^63", described(sides=(2**63,)), "tensor 't'", KV + 13, "overflows"),
    Case("a product that wraps to 256", described(sides=(2**32 + 256, 2**32)), "tensor 't'", KV + 21, "overflows"),
    Case("a product that wraps to 0", described(sides=(2**16,) * 4), "tensor 't'", KV + 37, "overflows"),
    Case("bytes past 2^63", described(sides=(2**61, 1), format=0), "tensor 't'", KV + 33, "overflows"),
    Case("row of part of a block", described(sides=(255,)), "tensor 't'", KV + 13, "not a multiple of Q4_K's"),
    Case("rows of part of a block", described(sides=(128, 2)), "tensor 't'", KV + 13, "not a multiple of Q4_K's"),
    Case("Q8_0 row of 33", described(sides=(33,), format=8), "tensor 't'", KV + 13, "block size of 32"),
    # GG6: alignment
    *[
        Case(f"alignment {value}", build([entry("general.alignment", U32, u32(value))], [tensor()], PAD),
             "general.alignment",
             value_at("general.alignment"), "not a power of two")
        for value in (0, 1, 4, 7, 31, 33, 4095, 8192, 2**31, 2**32 - 1)
    ],
    # GG7: data
    Case("data past the file", build([], [tensor()], bytes(143)), "tensor 't'", KV, "end 1 bytes past"),
    Case("no data", build([], [tensor()]), "tensor 't'", KV, "past the end of the file"),
    Case("shape larger than the file", described(sides=(256, 10**6)), "tensor 't'", KV, "past the end of the file"),
    Case("offset not aligned", described(offset=16), "tensor 't'", KV + 25, "multiple of 32"),
    Case("offset past the file", described(offset=4096), "tensor 't'", KV, "past the end of the file"),
    Case("offset far past the file", described(offset=2**62), "tensor 't'", KV, "past the end of the file"),
    Case("offset that wraps", described(offset=2**64 - 32), "tensor 't'", KV + 25, "overflows"),
    Case("offset near 2^63", described(offset=2**63 - 32), "tensor 't'", KV + 25, "overflows"),
    Case("same data", build([], [tensor("a"), tensor("b")], PAD), "tensor 'b'", KV + 33, "overlaps the data of 'a'"),
    Case("data overlaps", build([], [tensor("a", offset=128), tensor("b")], PAD), "tensor 'a'", KV,
         "overlaps the data of 'b'"),
    Case("data inside data", build([], [tensor("a", (2560,)), tensor("b", offset=320)], PAD),
         "tensor 'b'", KV + 33, "overlaps"),
    *[
        Case(f"format {number}", described(format=number), "tensor 't'", KV + 21, name, UnsupportedFormatError)
        for number, name in {**UNSUPPORTED_NAMES, 42: "unknown type 42", 2**31: "unknown type",
        2**32 - 1: "unknown type"}.items()
    ],
    # GG8: uniqueness
    Case("key twice", build([entry("k", U8, b"\1"), entry("k", U8, b"\1")]), "metadata key 1", KV + 14,
         "'k' appears twice"),
    Case("key twice, other type", build([entry("k", U8, b"\1"), entry("k", STRING, text("x"))]),
         "metadata key 1", KV + 14, "twice"),
    Case("name twice", build([], [tensor(), tensor(offset=160)], PAD), "tensor name 1", KV + 33, "'t' appears twice"),
    # GG9: types
    Case("value of type 13", valued(13, PAD), "'k'", KV + 9, "value type 13"),
    Case("value of type max", valued(2**32 - 1, PAD), "'k'", KV + 9, "value type"),
    Case("value without a type", build([text("k" * 10)]), "'kkkkkkkkkk'", KV + 18, "has only 0 more"),
    Case("truth value 2", valued(BOOL, b"\2"), "'k'", KV + 13, "not a boolean"),
    Case("truth value 255", valued(BOOL, b"\xff"), "'k'", KV + 13, "not a boolean"),
    Case("truth values", listed(BOOL, 3, b"\1\0\7"), "'k'", KV + 27, "item 2 is 7"),
    *[
        Case(f"alignment of type {kind}, {len(value)} bytes",
             build([entry("general.alignment", kind, value)], [tensor()], PAD),
             "general.alignment", value_at("general.alignment"), "must be uint32")
        for kind, value in (
            (U8, b"\x20"), (I8, b"\x20"), (U16, b"\x20\0"), (I32, u32(32)), (U64, u64(32)), (F32,
            struct.pack("<f", 32)),
            (STRING, text("32")), (BOOL, b"\1"), (ARRAY, array(U32, 1, u32(32))), (ARRAY, array(STRING, 1, text("32"))),
        )
    ],
    *[
        Case(f"cut in a value of type {kind}", build([entry("kkkkkkkkkkkk", kind, bytes(size - 1))]),
             "'kkkkkkkkkkkk'", KV + 24, f"needs {size}")
        for kind, size in ((U16, 2), (I16, 2), (U32, 4), (I32, 4), (F32, 4), (U64, 8), (I64, 8), (F64, 8))
    ],
    Case("cut before a value", build([entry("kkkkkkkkkkkk", U8, b"")]), "'kkkkkkkkkkkk'", KV + 24, "needs 1"),
    # hostile text in a message
    Case("escapes in a key", build([entry("\x1b[2J\n", 13, PAD)]), r"'\x1b[2J\n'", KV + 13, "value type 13"),
    Case("escapes in a name", build([], [tensor("\x9b\u202e")]), r"'\x9b\u202e'", KV, "past the end of the file"),
]  # fmt: skip


def refused(path: Path) -> GGUFError:
    """Open a file that must be rejected; check time, memory and form of the error."""
    started = time.thread_time()
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    seconds = time.thread_time() - started
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError):
            GGUFFile.open(path)
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert seconds < MAX_SECONDS
    assert allocated < MAX_ALLOCATED
    assert message.isprintable() and len(message) < 400
    return caught.value


def test_malformed_cases_are_at_least_a_hundred_and_unique() -> None:
    assert len(CASES) >= 100 and len({case.name for case in CASES}) == len(CASES)


def test_sound_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(SOUND)
    assert GGUFFile.open(path).tensors["t"].shape == (256,)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_malformed_file_is_rejected_with_field_and_offset(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(case.content)
    error = refused(path)
    assert type(error) is case.error
    assert case.field in error.field
    assert error.offset == case.offset
    assert case.message in str(error)
    assert f"{error.field} at byte {case.offset}: " in str(error)


def load_all(path: Path) -> None:
    """Open a file and read everything in it."""
    with GGUFFile.open(path) as file:
        for value in file.metadata.values():
            assert isinstance(value, int | float | str | list)
        for tensor in file.tensors.values():
            assert tensor.dequantize().shape == (tensor.rows, tensor.cols)


def rejected_or_loaded(path: Path) -> bool:
    """Return whether the file loads; a GGUFError is the only other allowed result."""
    try:
        load_all(path)
    except GGUFError as error:
        assert str(error).isprintable()
        return False
    return True


FIELDS = {
    "version": lambda n: build(version=n) if n < 2**32 else None,
    "tensor count": lambda n: build([], [tensor()], PAD, tensor_count=n),
    "entry count": lambda n: build([entry("k", U32, u32(1))], entry_count=n) + PAD,
    "key length": lambda n: build([text("k", n) + u32(U32) + u32(1)]) + PAD,
    "string length": lambda n: build([entry("k", STRING, text("x", n))]) + PAD,
    "value type": lambda n: build([entry("k", n, PAD)]) if n < 2**32 else None,
    "item type": lambda n: build([entry("k", ARRAY, array(n, 1, PAD))]) if n < 2**32 else None,
    "item count, bytes": lambda n: build([entry("k", ARRAY, array(U8, n, PAD))]),
    "item count, doubles": lambda n: build([entry("k", ARRAY, array(F64, n, PAD))]),
    "item count, strings": lambda n: build([entry("k", ARRAY, array(STRING, n, PAD))]),
    "item length": lambda n: build([entry("k", ARRAY, array(STRING, 2, text("x", n) + text("y")))]) + PAD,
    "alignment": lambda n: build([entry("general.alignment", U32, u32(n))], [tensor()], PAD) if n < 2**32 else None,
    "name length": lambda n: build([], [text("t", n) + tensor()[9:]], PAD),
    "dimension count": lambda n: build([], [tensor(side_count=n)], PAD) if n < 2**32 else None,
    "row length": lambda n: build([], [tensor(sides=(n,), format=0)], PAD),
    "rows": lambda n: build([], [tensor(sides=(256, n))], PAD),
    "third side": lambda n: build([], [tensor(sides=(256, 1, n))], PAD),
    "format": lambda n: build([], [tensor(format=n)], PAD) if n < 2**32 else None,
    "offset": lambda n: build([], [tensor(offset=n)], PAD),
}


@pytest.mark.parametrize("field", FIELDS)
def test_extreme_numeric_fields_load_or_are_rejected_quickly(tmp_path: Path, field: str) -> None:
    path, outcomes = tmp_path / "x.gguf", {}
    for value in EXTREMES:
        content = FIELDS[field](value)
        if content is not None:
            path.write_bytes(content)
            started = time.thread_time()
            outcomes[value] = rejected_or_loaded(path)
            assert time.thread_time() - started < 2 * MAX_SECONDS
    assert not any(loaded for value, loaded in outcomes.items() if value >= 2**31)


def test_open_does_not_allocate_the_claimed_tensor_size(tmp_path: Path) -> None:
    """A sparse file of 8 GiB is filled by its only tensor: opening maps it without reading."""
    path = tmp_path / "sparse.gguf"
    rows = (8 << 30) // 144
    path.write_bytes(build([], [tensor(sides=(256, rows))], b"\0"))
    with path.open("r+b") as file:
        file.truncate(9 << 30)
    tracemalloc.start()
    with GGUFFile.open(path) as opened:
        assert opened.tensors["t"].nbytes == rows * 144
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert allocated < MAX_ALLOCATED


def small_but_varied() -> bytes:
    entries = [
        entry("general.alignment", U32, u32(32)),
        entry("b", BOOL, b"\1"),
        entry("s", STRING, text("grüße")),
        entry("list", ARRAY, array(STRING, 3, text("a") + text("") + text("ü"))),
        entry("numbers", ARRAY, array(I16, 3, b"\1\0\2\0\3\0")),
        entry("truths", ARRAY, array(BOOL, 2, b"\1\0")),
    ]
    tensors = [tensor("w", (256, 2)), tensor("n", (8,), 0, 288), tensor("q", (32, 2, 1), 8, 320)]
    return build(entries, tensors, np.random.default_rng(1).integers(0, 60, 320 + 68, np.uint8).tobytes())


def test_file_truncated_at_any_byte_is_rejected(tmp_path: Path) -> None:
    path, content = tmp_path / "x.gguf", small_but_varied()
    path.write_bytes(content)
    assert rejected_or_loaded(path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert not rejected_or_loaded(path), f"a file cut to {size} of {len(content)} bytes was accepted"


def test_flipped_header_bit_loads_or_is_rejected(tmp_path: Path) -> None:
    path, content = tmp_path / "x.gguf", small_but_varied()
    header = len(content) - (320 + 68)
    loaded = 0
    for bit in range(8 * header):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        loaded += rejected_or_loaded(path)
    assert 0 < loaded < 8 * header / 2  # flips in names are valid, but few others are
