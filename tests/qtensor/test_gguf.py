"""GGUF files written here and read by the `gguf` package, the reverse, and valid files at the limits."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from notso.qtensor.errors import GGUFError, OperandError, QTensorError
from notso.qtensor.formats import F32, FORMATS, Q4_K, Q6_K, Q8_0
from notso.qtensor.gguf import MAX_ARRAY_ITEMS, MAX_ENTRIES, MAX_TENSORS, GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter
from notso.qtensor.safetensors import SafetensorsFile

OPEN_SECONDS = 0.5  # for a header of 7.8 MB; 0.08 s measured, so there is a margin for a busy machine
PARSE_MEMORY = 64 << 20  # requirement GG12, in addition to the metadata's own size

VALUES = [
    ("a.uint8", 200, "uint8"),
    ("a.int8", -100, "int8"),
    ("a.uint16", 60000, "uint16"),
    ("a.int16", -30000, "int16"),
    ("a.uint32", 4_000_000_000, "uint32"),
    ("a.int32", -2_000_000_000, "int32"),
    ("a.float32", 0.5, "float32"),
    ("a.bool", True, "bool"),
    ("a.string", "grüße\n", "string"),
    ("a.uint64", 2**64 - 1, "uint64"),
    ("a.int64", -(2**63), "int64"),
    ("a.float64", 0.1, "float64"),
    ("b.strings", ["", "ä", "\U0001f600", "x\0y", "\0"], "array of string"),
    ("b.plain", ["one", "two", ""], "array of string"),
    ("b.none", [], "array of string"),
    ("b.no_numbers", [], "array of int32"),
    ("b.int32", [-1, 0, 7], "array of int32"),
    ("b.float32", [0.25, -8.0], "array of float32"),
    ("b.bool", [True, False], "array of bool"),
    ("b.uint64", [2**63], "array of uint64"),
]


def write_sample(path: Path) -> dict[str, np.ndarray]:
    """Write every value type, every format and odd sizes; return the tensors' bytes."""
    rng = np.random.default_rng(1)
    written = {}
    with GGUFWriter(path) as writer:
        for key, value, type_name in VALUES:
            writer.add(key, value, type_name)
        for format in FORMATS.values():
            shape = (3, 5 * format.block_values)
            raw = rng.integers(0, 256, 3 * 5 * format.block_bytes, np.uint8)
            written[f"t.{format.name}"] = raw
            pieces = [raw[i : i + 7].tobytes() for i in range(0, len(raw), 7)]
            writer.add_tensor(f"t.{format.name}", shape, format, iter(pieces))
        writer.add_tensor("one", (3,), F32, np.array([1, 2, 3], "<f4"))
        writer.add_tensor("four", (2, 3, 1, 32), Q8_0, bytes(6 * 34))
    return written


@pytest.mark.parametrize("alignment", [8, 16, 64, 4096])
def test_tensors_follow_the_alignment_entry(tmp_path: Path, alignment: int) -> None:
    for characters in range(4):  # the header ends at other offsets
        path = tmp_path / "aligned.gguf"
        with GGUFWriter(path) as writer:
            writer.add("general.alignment", alignment, "uint32")
            writer.add("x", " " * 8 * characters, "string")
            for number in (1.0, 2.0):
                writer.add_tensor(f"t.{number}", (3,), F32, np.full(3, number, "<f4"))
        with GGUFFile.open(path) as file:
            assert [tensor.as_float32().tolist() for tensor in file.tensors.values()] == [[1.0] * 3, [2.0] * 3]
        assert [tensor.data.tolist() for tensor in gguf.GGUFReader(path).tensors] == [[1.0] * 3, [2.0] * 3]
    with pytest.raises(GGUFError, match="alignment"):
        GGUFWriter(path).add("general.alignment", 24, "uint32")


@pytest.mark.parametrize("read", [GGUFFile.open, SafetensorsFile])
def test_git_lfs_pointer_is_recognized(tmp_path: Path, read: Callable[[Path], object]) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1915305312\n"
    (tmp_path / "model").write_text(pointer)
    with pytest.raises(QTensorError, match="git lfs pull"):
        read(tmp_path / "model")


def test_written_gguf_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    written = write_sample(path)
    with GGUFFile.open(path) as file:
        assert (file.version, file.size_bytes, file.alignment) == (3, path.stat().st_size, 32)
        assert dict(file.metadata) == {key: value for key, value, _ in VALUES}
        assert dict(file.metadata_types) == {key: type_name for key, _, type_name in VALUES}
        assert list(file.tensors) == [*written, "one", "four"]
        for name, raw in written.items():
            tensor = file.tensors[name]
            assert tensor.name == name and tensor.format.name == name[2:]
            np.testing.assert_array_equal(tensor.data, raw)
            assert not tensor.data.flags.writeable
        assert file.tensors["four"].shape == (2, 3, 1, 32)
        assert file.tensors["one"].as_float32().tolist() == [1, 2, 3]
        assert "sample.gguf" in repr(file)


def test_gguf_package_reads_written_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    written = write_sample(path)
    program = (
        "import sys, gguf, json\n"
        "r = gguf.GGUFReader(sys.argv[1])\n"
        "f = {k: v.contents() for k, v in r.fields.items() if not k.startswith('GGUF.')}\n"
        "t = {t.name: [t.tensor_type.name, [int(n) for n in t.shape], t.data.tobytes().hex()] for t in r.tensors}\n"
        "print(json.dumps([f, t]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=True)
    fields, tensors = json.loads(done.stdout)
    empty = ("b.none", "b.no_numbers")  # the gguf package fails on empty arrays; ours is tested above
    assert {k: v for k, v in fields.items() if k not in empty} == {k: v for k, v, _ in VALUES if k not in empty}
    assert tensors["four"][1] == [32, 1, 3, 2]
    for name, raw in written.items():
        assert tensors[name] == [
            name[2:],
            [5 * FORMATS[gguf.GGMLQuantizationType[name[2:]]].block_values, 3],
            raw.tobytes().hex(),
        ]


def test_file_written_by_gguf_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "demo")
    writer.add_uint32("n", 7)
    writer.add_float32("x", 1.5)
    writer.add_bool("yes", True)
    writer.add_string("s", "ü")
    writer.add_array("strings", ["a", "bc"])
    writer.add_array("numbers", [1, -2])
    values = np.arange(512, dtype=np.float32).reshape(2, 256)
    writer.add_tensor("f", values)
    writer.add_tensor(
        "q", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        got = dict(file.metadata)
        assert got.pop("general.architecture") == "demo"
        assert got == {"n": 7, "x": 1.5, "yes": True, "s": "ü", "strings": ["a", "bc"], "numbers": [1, -2]}
        np.testing.assert_array_equal(file.tensors["f"].as_float32(), values)
        np.testing.assert_allclose(file.tensors["q"].dequantize(), values, atol=511 / 127 / 2 + 0.1)


def test_tensors_and_metadata_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    written = write_sample(path)
    with GGUFFile.open(path) as file:
        tensor, metadata = file.tensors["t.Q4_K"], file.metadata
    assert len(file.tensors) == 0
    path.unlink()
    del file
    np.testing.assert_array_equal(tensor.data, written["t.Q4_K"])
    assert metadata["b.strings"][1] == "ä"


def test_open_leaks_no_file_descriptor(tmp_path: Path) -> None:
    sound, broken = tmp_path / "sound.gguf", tmp_path / "broken.gguf"
    write_sample(sound)
    broken.write_bytes(sound.read_bytes()[:-40])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        GGUFFile.open(sound).close()
        with pytest.raises(GGUFError):
            GGUFFile.open(broken)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_version_2_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.gguf"
    write_sample(path)
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    with GGUFFile.open(path) as file:
        assert file.version == 2 and len(file.tensors) == len(FORMATS) + 2


def test_counts_at_the_limit_are_read(tmp_path: Path) -> None:
    path = tmp_path / "many.gguf"
    with GGUFWriter(path) as writer:
        writer.add("numbers", np.zeros(MAX_ARRAY_ITEMS, np.uint8).tolist(), "array of uint8")
        writer.add("k" * 256, ["x" * (1 << 20), "y"], "array of string")
        for i in range(MAX_ENTRIES - 2):
            writer.add(f"key.{i}", i, "uint32")
        for i in range(MAX_TENSORS):
            writer.add_tensor(f"{i:0>64}", (1,), F32, b"abcd")
    with GGUFFile.open(path) as file:
        assert len(file.metadata) == MAX_ENTRIES and len(file.tensors) == MAX_TENSORS
        assert file.metadata.array_length("numbers") == MAX_ARRAY_ITEMS
        assert file.metadata.array_length("key.0") is None
        assert len(file.metadata["k" * 256][0]) == 1 << 20


@pytest.fixture(scope="module")
def large_header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a header as large as the official file's: 128,256 and 280,147 strings."""
    path = tmp_path_factory.mktemp("gguf") / "large.gguf"
    with GGUFWriter(path) as writer:
        writer.add("words", [f"Ġword{i}" for i in range(128256)], "array of string")
        writer.add("kinds", [i % 5 for i in range(128256)], "array of int32")
        writer.add("pairs", [f"Ġa{i} bé{i}" for i in range(280147)], "array of string")
        writer.add_tensor("t", (2, 256), Q4_K, bytes(288))
    return path


def test_a_large_header_is_read_quickly(large_header: Path) -> None:
    seconds = []
    for _ in range(3):
        started = time.process_time()  # CPU time, so that other processes have no effect
        GGUFFile.open(large_header)
        seconds.append(time.process_time() - started)
    assert min(seconds) < OPEN_SECONDS
    metadata = GGUFFile.open(large_header).metadata
    assert metadata["words"] == [f"Ġword{i}" for i in range(128256)]
    assert metadata["pairs"] == [f"Ġa{i} bé{i}" for i in range(280147)]
    assert metadata["kinds"] == [i % 5 for i in range(128256)]
    assert metadata["words"] is metadata["words"]


def test_parsing_memory_is_bounded(tmp_path: Path, large_header: Path) -> None:
    """Read under a hard memory limit: ten million empty strings, which are eighty million zero bytes but would not fit
    as Python lists, and letters with an emoji, which take four bytes each as a Python string."""
    hostile = tmp_path / "empty-strings.gguf"
    with hostile.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 10))
        for i in range(10):
            file.write(struct.pack("<Q1sIIQ", 1, b"%d" % i, 9, 8, MAX_ARRAY_ITEMS) + bytes(8 * MAX_ARRAY_ITEMS))
    wide = tmp_path / "wide-strings.gguf"
    with wide.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 60))
        text = b"x" * ((1 << 20) - 4) + "\U0001f600".encode()
        for i in range(60):
            file.write(struct.pack("<Q2sIQ", 2, b"%02d" % i, 8, len(text)) + text)
    assert GGUFFile.open(wide).metadata["07"] == text.decode()
    program = (
        "import re, resource, sys\n"
        "from pathlib import Path\n"
        "from notso.qtensor.gguf import GGUFFile\n"
        "now = int(re.search(r'VmData:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "limit = now + int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "print(len(GGUFFile.open(sys.argv[1]).metadata))\n"
    )
    for path, entries in ((large_header, 3), (hostile, 10), (wide, 60)):
        limit = PARSE_MEMORY + path.stat().st_size
        command = [sys.executable, "-c", program, str(path), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == (str(entries), "")


@pytest.mark.parametrize("kind", ["missing", "directory", "empty", "fifo", "nul", "device"])
def test_open_rejects_paths_that_are_not_gguf_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    match kind:
        case "directory":
            path.mkdir()
        case "empty":
            path.touch()
        case "fifo":
            os.mkfifo(path)
        case "nul":
            path = Path(f"{path}\0")
        case "device":
            path = Path("/dev/zero")
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


# ---------------------------------------------------------------- writer


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("the old file")
    for data in (bytes(143), bytes(145), [bytes(100), bytes(45)], iter([])):
        with pytest.raises(GGUFError, match="144 declared"), GGUFWriter(path) as writer:
            writer.add_tensor("w", (1, 256), Q4_K, data)
    with pytest.raises(ZeroDivisionError), GGUFWriter(path) as writer:
        writer.add_tensor("w", (1, 256), Q4_K, (1 // 0 for _ in range(1)))
    with pytest.raises(KeyError), GGUFWriter(path):
        raise KeyError("something else went wrong")
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    assert path.read_text() == "the old file"


def test_tensor_data_may_be_bytes_array_or_iterable(tmp_path: Path) -> None:
    path, raw = tmp_path / "x.gguf", np.arange(210, dtype=np.uint8)
    with GGUFWriter(path) as writer:
        writer.add_tensor("bytes", (256,), Q6_K, raw.tobytes())
        writer.add_tensor("array", (1, 256), Q6_K, raw)
        writer.add_tensor("pieces", (1, 256), Q6_K, [raw[:100], memoryview(raw[100:].copy())])
        writer.add_tensor("generator", (1, 256), Q6_K, (raw[i : i + 1] for i in range(210)))
        assert writer.tensor_bytes == 4 * 210
    with GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            np.testing.assert_array_equal(tensor.data, raw)


@pytest.mark.parametrize(
    ("key", "value", "type_name"),
    [
        ("", 1, "uint32"),
        ("k" * 257, 1, "uint32"),
        ("a\0b", 1, "uint32"),
        ("twice", 1, "uint32"),
        ("k", 1, "uint7"),
        ("k", 1, "array"),
        ("k", [1], "array of array"),
        ("k", [[1]], "array of array of uint8"),
        ("k", -1, "uint32"),
        ("k", 2**32, "uint32"),
        ("k", 1.5, "uint32"),
        ("k", "1", "uint32"),
        ("k", 1, "bool"),
        ("k", 1, "string"),
        ("k", 7, "array of int32"),
        ("k", [1, "2"], "array of int32"),
        ("k", [0] * (MAX_ARRAY_ITEMS + 1), "array of uint8"),
        ("k", "x" * ((1 << 20) + 1), "string"),
        ("k", "\ud800", "string"),
    ],
)
def test_writer_rejects_invalid_entries(tmp_path: Path, key: str, value: object, type_name: str) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add("twice", 1, "uint32")
    with pytest.raises(GGUFError):
        writer.add(key, value, type_name)


@pytest.mark.parametrize("name", ["", "n" * 65, "a\0b", "twice"])
def test_writer_rejects_invalid_tensor_names(tmp_path: Path, name: str) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("twice", (1,), F32, bytes(4))
    with pytest.raises(GGUFError):
        writer.add_tensor(name, (1,), F32, bytes(4))


@pytest.mark.parametrize("shape", [(), (0,), (1, 1, 1, 1, 256), (2, 255), (-1, 256)])
def test_writer_rejects_invalid_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises((GGUFError, OperandError)):
        GGUFWriter(tmp_path / "x.gguf").add_tensor("w", shape, Q4_K, b"")


def test_writer_rejects_counts_over_the_limit(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    for i in range(MAX_ENTRIES):
        writer.add(f"k{i}", i, "uint32")
        writer.add_tensor(f"t{i}", (1,), F32, bytes(4))
    with pytest.raises(GGUFError, match="4096"):
        writer.add("one too many", 1, "uint32")
    with pytest.raises(GGUFError, match="4096"):
        writer.add_tensor("one too many", (1,), F32, bytes(4))


def test_concurrent_writers_use_separate_temporary_files(tmp_path: Path) -> None:
    """Two writers use separate temporary files, even in one process; the file of the last one remains."""
    path = tmp_path / "a.gguf"
    inner = GGUFWriter(path, durable=False)
    inner.add("name", "inner", "string")

    def while_writing() -> bytes:
        inner.write()
        return bytes(4)

    outer = GGUFWriter(path, durable=False)
    outer.add("name", "outer", "string")
    outer.add_tensor("t", (1,), F32, (while_writing() for _ in range(1)))
    outer.write()
    with GGUFFile.open(path) as file:
        assert file.metadata["name"] == "outer"
    assert [each.name for each in tmp_path.iterdir()] == ["a.gguf"]
