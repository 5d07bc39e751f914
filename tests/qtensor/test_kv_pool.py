"""Blocks of the KV cache: sizes, contents, and memory that is allocated on first use."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from notso.qtensor.backends.cpu import huge_pages, ops
from notso.qtensor.backends.cpu.huge_pages import RUN_BLOCKS, reserved_blocks
from notso.qtensor.errors import OperandError

BITS = {"f16": 16, "k8v8": 8.125, "k8v4": 6.125, "k4v4": 4.125, "k4v3": 3.625}


def test_block_bytes_match_the_bits_of_the_format() -> None:
    assert set(BITS) == set(ops.KV_FORMATS)
    for format in ops.KV_FORMATS:
        pool = ops.key_value_pool(3, 4, 128, format)
        assert (pool.blocks, pool.block_bytes, pool.nbytes) == (3, pool.block(0).size, 3 * pool.block_bytes)
        assert pool.block_bytes * 8 == 2 * 4 * 128 * 128 * BITS[format]
        assert pool.needs_window == (format in ("k8v4", "k4v4", "k4v3"))


@pytest.mark.parametrize("format", ops.KV_FORMATS)
def test_blocks_are_read_written_and_copied(format: ops.KVFormat) -> None:
    rng = np.random.default_rng(1)
    pool = ops.key_value_pool(4, 2, 32, format)
    pool.data[:] = rng.integers(0, 256, pool.data.shape)
    before = [pool.block(block).copy() for block in range(4)]
    held = pool.read_block(2)
    pool.copy_block(2, 0)
    pool.write_block(3, held)
    for block, source in ((0, 2), (1, 1), (2, 2), (3, 2)):
        np.testing.assert_array_equal(pool.block(block), before[source])
    pool.block(2)[:] = 0
    assert held == before[2].tobytes(), "a change of the block must not change its copy"


def test_layer_pools_are_contiguous_and_separate() -> None:
    pools = ops.key_value_pools(3, 4, 2, 32, "k8v8")
    for layer, pool in enumerate(pools):
        for head in pool.block_memory(layer):
            head[:] = bytes([layer + 1]) * len(head)
    for layer, pool in enumerate(pools):
        assert [set(pool.read_block(block)) for block in range(4)] == [
            {layer + 1 if b == layer else 0} for b in range(4)
        ]
        assert pool.data.ctypes.data == pools[0].data.ctypes.data + layer * pool.nbytes


@pytest.mark.parametrize("blocks", [1, RUN_BLOCKS, RUN_BLOCKS + 1, 3 * RUN_BLOCKS, 65, 1000])
def test_blocks_do_not_overlap_and_neighbors_are_contiguous(blocks: int) -> None:
    pool = ops.key_value_pool(blocks, 3, 16, "k4v3")
    start = pool.data.ctypes.data
    heads = np.array([[head.ctypes.data - start for head in pool.block(block)] for block in range(blocks)])
    size = pool.block_bytes // 3
    assert pool.data.shape[2] <= RUN_BLOCKS and pool.nbytes == reserved_blocks(blocks) * pool.block_bytes
    assert reserved_blocks(blocks) < blocks * (1 + 1 / RUN_BLOCKS)
    assert len(set(heads.flat)) == heads.size and not (heads % size).any() and heads.max() < pool.data.nbytes
    for block in range(1, blocks):
        if block % pool.data.shape[2]:
            assert (heads[block] - heads[block - 1] == size).all()


def test_invalid_blocks_and_formats_are_rejected() -> None:
    pool = ops.key_value_pool(2, 1, 16)
    for block in (-1, 2):
        for call in (
            pool.block,
            pool.read_block,
            pool.block_memory,
            lambda b: pool.copy_block(0, b),
            lambda b: pool.copy_block(b, 0),
        ):
            with pytest.raises(OperandError, match="outside"):
                call(block)
        with pytest.raises(OperandError, match="outside"):
            pool.write_block(block, bytes(pool.block_bytes))
    with pytest.raises(OperandError, match="bytes"):
        pool.write_block(0, bytes(pool.block_bytes - 1))
    with pytest.raises(OperandError, match=r"k3v3.*k8v8"):
        ops.key_value_pool(1, 1, 16, "k3v3")  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="1024"):
        ops.key_value_pool(1, 1, 2048, "k8v8")


def test_pool_memory_is_allocated_on_first_use() -> None:
    """A pool of 8 GiB reserves only address space."""
    pool = ops.key_value_pool(1 << 16, 4, 128, "k8v8")
    assert pool.nbytes > 8 << 30
    last = pool.block(pool.blocks - 1)
    last[0, :5] = 7
    assert pool.block(0).max() == 0 and last[0, :9].sum() == 35
    assert pool.data.ctypes.data % 64 == 0


def test_pool_without_large_pages_uses_only_written_blocks() -> None:
    """A block uses its own memory but not that of its neighbors."""
    pool = ops.key_value_pool(64, 4, 128, "k8v8", large_pages=False)
    assert pool.nbytes > 2 * huge_pages.LARGE_BYTES
    before = resident_bytes()
    pool.block(40)[:] = 1
    taken = resident_bytes() - before
    assert pool.block_bytes <= taken + mmap.PAGESIZE and taken < huge_pages.PAGE_BYTES // 2


def resident_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
