"""Measure attention over the KV cache at a depth of 32,768, in the 3B's shapes: see docs/kernels/attention.md.

    python benchmarks/cache_reading.py
    python benchmarks/cache_reading.py --formats k4v4 --threads 1

Prints the median nanoseconds of a thread for one tile (128 positions of one head of keys and values, read by four
queries) in three cases: all 36 layers with their blocks in order, the same at random places, and the same eight blocks
repeatedly, which stay in the processor's cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from notso.qtensor import kernel_choice
from notso.qtensor.backends.cpu import ops

LAYERS, HEADS, KV_HEADS, DIM, TILES = 36, 16, 4, 128, 256
ROUNDS = 15
PLACES = {"in order": TILES, "random": TILES, "in cache": 8}


def tile_ns(kv_format: ops.KVFormat, where: str) -> float:
    """Return the nanoseconds of a thread per tile."""
    rng = np.random.default_rng(1)
    distinct = PLACES[where]
    pools = ops.key_value_pools(LAYERS if distinct == TILES else 1, distinct, KV_HEADS, DIM, kv_format)
    window = ops.key_value_pool(2, KV_HEADS, DIM, "k8v8")
    for pool in (*pools, window):
        pool.data[:] = rng.integers(0, 256, pool.data.shape[-1], np.uint8)
        pool.data.view(np.float16)[..., (0 if pool.format == "f16" else -2 * ops.TILE_POSITIONS) :] = 0.01
    tables = (np.arange(TILES, dtype=np.int32) % distinct).reshape(1, TILES)
    if where == "random":
        tables = rng.permuted(tables, axis=1)
    others = np.full((1, TILES), -1, np.int32)
    others[0, [0, -1]] = 0, 1
    q = rng.standard_normal((1, HEADS, DIM), np.float32)
    places = np.array([TILES * ops.TILE_POSITIONS - 1], np.int32), np.zeros(1, np.int32)
    out, seconds = np.empty_like(q), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for layer in range(LAYERS):
            pool = pools[layer % len(pools)]
            ops.attention(q, *places, tables, pool, DIM**-0.5, out, (others, window) if pool.needs_window else None)
        seconds.append(time.perf_counter() - started)
    tiles = LAYERS * KV_HEADS * TILES / min(kernel_choice.threads(), KV_HEADS)
    return 1e9 * statistics.median(seconds) / tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=ops.KV_FORMATS, default=ops.KV_FORMATS)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    kernel_choice.configure(given.threads)
    print(f"{kernel_choice.kernels()}, {kernel_choice.threads()} threads, ns per tile: {', '.join(PLACES)}")
    for kv_format in given.formats:
        print(f"{kv_format}:", *(f"{tile_ns(kv_format, where):,.0f}" for where in PLACES), flush=True)


if __name__ == "__main__":
    main()
