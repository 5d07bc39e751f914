"""Memory of the cache is there a little before it is needed, a few layers at a time, and nothing in it changes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from notso.qtensor.gguf import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub import demo_path
from notso.smollm3.kv_cache import AHEAD_BLOCKS, LAYERS_AT_ONCE, KVCache
from notso.smollm3.kv_formats import KV_FORMATS, KVFormat

BLOCKS = 9


@pytest.fixture(scope="module")
def config() -> SmolLM3Config:
    return SmolLM3Config.from_metadata(GGUFFile.open(demo_path()).metadata)


@pytest.fixture
def made(config: SmolLM3Config) -> Callable[[KVFormat], KVCache]:
    return lambda kv_format: KVCache(config, 1024, max_num_seqs=2, blocks=BLOCKS, kv_format=kv_format, recent_blocks=4)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_what_is_held_stays_as_it_is(made: Callable[[KVFormat], KVCache], kv_format: KVFormat) -> None:
    cache, rng = made(kv_format), np.random.default_rng(1)
    for pool in cache.pools:
        pool.data[:] = rng.integers(0, 256, pool.data.shape)
    before = [pool.data.copy() for pool in cache.pools]
    for block in (0, 0, 1, 5, 2, *range(BLOCKS), *([BLOCKS - 1] * 50)):
        cache.touch_ahead(block)
    for pool, held in zip(cache.pools, before, strict=True):
        np.testing.assert_array_equal(pool.data, held)


def test_it_is_a_few_layers_and_a_few_blocks_at_a_time(
    made: Callable[[KVFormat], KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, calls = made("k8v8"), 0
    before = -1
    while (cache._touched, cache._touched_layers) != before and calls < 1000:
        before = (cache._touched, cache._touched_layers)  # type: ignore[assignment]
        cache.touch_ahead(0)
        calls += 1
    rounds = -(-len(cache.pools) // LAYERS_AT_ONCE)
    assert cache._touched == AHEAD_BLOCKS and calls == AHEAD_BLOCKS * rounds + 1


def test_memory_is_taken_before_it_is_needed(made: Callable[[KVFormat], KVCache]) -> None:
    cache = made("f16")
    before = anonymous_bytes()
    for _ in range(100):
        cache.touch_ahead(0)
    pages = len(cache.pools) * AHEAD_BLOCKS
    assert anonymous_bytes() - before >= pages * mmap.PAGESIZE


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
