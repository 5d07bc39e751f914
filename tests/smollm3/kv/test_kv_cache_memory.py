"""Memory of the cache is touched shortly before use, a few layers at a time, without changing contents."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from notso.qtensor import CPU
from notso.qtensor.gguf import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv.kv_cache import AHEAD_BLOCKS, IDLE_BLOCKS, IDLE_LAYERS, KV_FORMATS, MOST_LAYERS, KVCache, KVFormat

BLOCKS = 9


@pytest.fixture(scope="module")
def config() -> SmolLM3Config:
    return SmolLM3Config.from_metadata(GGUFFile.open(demo_path()).metadata)


@pytest.fixture
def made(config: SmolLM3Config) -> Callable[[KVFormat], KVCache]:
    return lambda kv_format: KVCache(
        CPU(), config, 1024, max_num_seqs=2, blocks=BLOCKS, kv_format=kv_format, window_blocks=4
    )


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_touching_memory_preserves_cache_contents(made: Callable[[KVFormat], KVCache], kv_format: KVFormat) -> None:
    cache, rng = made(kv_format), np.random.default_rng(1)
    for pool in cache.pools:
        pool.data[:] = rng.integers(0, 256, pool.data.shape)
    before = [pool.data.copy() for pool in cache.pools]
    for block in (0, 0, 1, 5, 2, *range(BLOCKS), *([BLOCKS - 1] * 50)):
        cache.touch_ahead(block, 1 + block)
    while cache.touch_idle():
        pass
    for pool, held in zip(cache.pools, before, strict=True):
        np.testing.assert_array_equal(pool.data, held)


@pytest.mark.parametrize(("rows", "layers"), [(1, 1), (32, 2), (512, MOST_LAYERS)])
def test_touch_ahead_touches_layers_in_proportion_to_rows(
    made: Callable[[KVFormat], KVCache], rows: int, layers: int
) -> None:
    cache, calls = made("k8v8"), 0
    layers = min(layers, len(cache.pools))
    before = None
    while (cache._touched, cache._touched_layers) != before and calls < 1000:
        before = cache._touched, cache._touched_layers
        cache.touch_ahead(0, rows)
        calls += 1
    assert cache._touched == AHEAD_BLOCKS and calls == AHEAD_BLOCKS * -(-len(cache.pools) // layers) + 1


def test_idle_touching_stops_at_the_idle_block_limit(config: SmolLM3Config) -> None:
    cache = KVCache(CPU(), config, 1024, max_num_seqs=2, blocks=3 * IDLE_BLOCKS, kv_format="k8v8", window_blocks=4)
    rounds = -(-len(cache.pools) // IDLE_LAYERS)
    assert len(list(iter(cache.touch_idle, False))) == IDLE_BLOCKS * rounds
    assert cache._touched == IDLE_BLOCKS - 1  # no block is in use
    assert len(list(iter(lambda: cache.touch_idle(IDLE_BLOCKS + 1), False))) == rounds
    cache.touch_ahead(IDLE_BLOCKS, 1)
    while cache.touch_idle():
        pass
    assert cache._touched == 2 * IDLE_BLOCKS


def test_cache_without_large_pages_is_not_touched_when_idle(config: SmolLM3Config) -> None:
    cache = KVCache(CPU(), config, 1024, max_num_seqs=2, blocks=BLOCKS, kv_format="k8v8", large_pages=False)
    assert not cache.touch_idle() and not cache.touch_idle(BLOCKS)
    assert cache._touched == -1 and cache._touched_layers == 0


def test_touch_ahead_allocates_memory_before_use(made: Callable[[KVFormat], KVCache]) -> None:
    cache = made("f16")
    before = anonymous_bytes()
    for _ in range(100):
        cache.touch_ahead(0, 1)
    pages = len(cache.pools) * AHEAD_BLOCKS
    assert anonymous_bytes() - before >= pages * mmap.PAGESIZE


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
