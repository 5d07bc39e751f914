"""Safetensors files: valid files according to the format, and headers that contradict the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.qtensor import SafetensorsError, SafetensorsFile

RNG = np.random.default_rng(8)
VALUES = RNG.standard_normal((3, 5)).astype(np.float32)


def file_of(path: Path, header: Any, body: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]} | changes}


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    halves = VALUES.astype(np.float16)
    header = {
        "__metadata__": {"format": "pt"},
        "half": {"dtype": "F16", "shape": [15], "data_offsets": [60, 90]},
        "whole": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
    }
    path = file_of(tmp_path / "a.safetensors", header, VALUES.tobytes() + halves.tobytes())
    with SafetensorsFile(path) as file:
        assert set(file.tensors) == {"half", "whole"}
        np.testing.assert_array_equal(file.tensors["whole"].dequantize(), VALUES)
        np.testing.assert_array_equal(file.tensors["whole"].dequantize(1, 2), VALUES[1:2])
        np.testing.assert_array_equal(file.tensors["half"].dequantize(), halves.astype(np.float32).reshape(1, -1))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[]", "must be an object"),
        (b'{"w": {}, "w": {}}', "duplicate name"),
        (b'{"w": {"dtype": "F32", "dtype": "F32"}}', "duplicate name"),
        ({"w": 3}, "is not an object"),
        ({"w": {}}, "has dtype None; supported: F32"),
        (entry(dtype="I8"), "has dtype 'I8'"),
        (entry(dtype=["F32"]), "supported: F32"),
        (entry(shape=[]), "1 to 4 dimensions"),
        (entry(shape=[0]), "1 to 4 dimensions"),
        (entry(shape=[3, -5]), "1 to 4 dimensions"),
        (entry(shape=[3, True]), "1 to 4 dimensions"),
        (entry(shape=[3.0]), "1 to 4 dimensions"),
        (entry(shape=[1] * 5), "1 to 4 dimensions"),
        (entry(shape=[1 << 50]), "1 to 4 dimensions"),
        (entry(shape=[1 << 47, 1 << 47]), "F32 values, but its data"),
        (entry(data_offsets=[60, 0]), "invalid data offsets"),
        (entry(data_offsets=[0]), "invalid data offsets"),
        (entry(data_offsets=[0, 61]), "F32 values, but its data"),
        (entry(data_offsets=[4, 64]), "F32 values, but its data"),
        (entry(data_offsets=[-4, 56]), "invalid data offsets"),
    ],
)
def test_invalid_header_is_rejected(tmp_path: Path, header: Any, words: str) -> None:
    path = file_of(tmp_path / "a.safetensors", header, VALUES.tobytes())
    with pytest.raises(SafetensorsError, match=words) as error:
        SafetensorsFile(path)
    assert str(error.value).startswith("a.safetensors: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0xFFFFFFFFFFFFFFFF, 1 << 40, 1000])
def test_header_longer_than_the_file_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(SafetensorsError, match="exceeds the file"):
        SafetensorsFile(path)
    path.write_bytes(b"1234")
    with pytest.raises(SafetensorsError, match="too short"):
        SafetensorsFile(path)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_file_loads_or_raises_safetensors_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A valid file with bytes changed, cut off or inserted gives tensors or our error."""
    good = file_of(tmp_path_factory.getbasetemp() / "good.safetensors", entry(), VALUES.tobytes()).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    cut = data.draw(st.integers(0, 8))
    mutated = good[:at] + data.draw(st.binary(max_size=8)) + good[at + cut :]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(mutated)
    try:
        with SafetensorsFile(path) as file:
            for tensor in file.tensors.values():
                assert tensor.dequantize().size == np.prod(tensor.shape)
    except SafetensorsError as error:
        assert "\n" not in str(error)
