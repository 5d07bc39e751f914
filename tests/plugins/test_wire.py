"""Packets between the server and a plugin."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notso.plugins import wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4), st.integers(1, 40))
def test_frames_are_unpacked_at_any_chunk_size(packets: list[object], piece: int) -> None:
    data, unpacker, found = b"".join(map(wire.encode_packet, packets)), wire.Unpacker(), []
    for at in range(0, len(data), piece):
        found += unpacker.feed(data[at : at + piece])
    assert found == packets


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x02\0\0\0{{", b"\x01\0\0\0\xff", b"\x40\x0d\x03\0" + b"[" * 200_000]
)
def test_invalid_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        wire.Unpacker().feed(data)


def test_values_that_cannot_be_packed_are_refused() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for packet in (float("nan"), object(), {(): 1}, nested, "x" * (wire.MAX_CALL_BYTES + 1)):
        with pytest.raises(ValueError):
            wire.encode_packet(packet)


def test_shared_memory_is_visible_in_both_mappings() -> None:
    descriptor = wire.create_shared_file()
    first, second = (mmap.mmap(descriptor, wire.SHARED_BYTES) for _ in range(2))
    os.close(descriptor)
    first[wire.SHARED_BYTES - 4 :] = b"last"
    assert second[wire.SHARED_BYTES - 4 :] == b"last" and second[:8] == bytes(8)
