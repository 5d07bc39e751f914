"""Measure the rates of each kernel family on one thread: the tables in the pages of docs/kernels.

    python benchmarks/family_rates.py

Processor time excludes the time in which other programs use the core, but not their effects on caches and the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from notso.qtensor import Q4_K, Q6_K, Format, QTensor, kernel_choice, random_blocks
from notso.qtensor.backends.cpu import ops

Call = Callable[[], None]
RNG = np.random.default_rng(1)


def least_seconds(call: Call, repeats: int) -> float:
    """Return the least processor time of `repeats` calls, after a warm-up call."""
    call()
    spent = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        spent.append(time.thread_time() - start)
    return min(spent)


def product(format: Format, m: int, rows: int = 1024, k: int = 2048) -> tuple[Call, float]:
    """Return a product with `m` batch rows, and its GB of blocks (if `m` is 1) or its 10^12 operations."""
    weight = QTensor("w", format, (rows, k), random_blocks(format, rows * k // 256, RNG).reshape(-1))
    x, y = RNG.standard_normal((m, k), np.float32), ops.empty(m, rows)
    amount = weight.nbytes / 1e9 if m == 1 else 2 * m * rows * k / 1e12
    return lambda: ops.matmul(x, weight, y), amount


def attention(
    rows: int, depth: int, format: ops.KVFormat = "f16", heads: int = 16, kv_heads: int = 4, dim: int = 128
) -> tuple[Call, float]:
    """Return attention of the last `rows` of `depth` positions in the 3B's shapes, and its 10^9 operations."""
    tiles = -(-depth // ops.TILE_POSITIONS)
    pool = ops.key_value_pool(tiles, kv_heads, dim, format)
    table = np.arange(tiles, dtype=np.int32).reshape(1, tiles)
    window = (table, ops.key_value_pool(tiles, kv_heads, dim, "k8v8")) if pool.needs_window else None
    k, v = RNG.standard_normal((2, depth, kv_heads, dim), np.float32)
    every = np.arange(depth, dtype=np.int32), np.zeros(depth, np.int32), table
    ops.store_key_values(k, v, *every, pool, window)
    places = every[0][-rows:], every[1][-rows:], table
    q = RNG.standard_normal((rows, heads, dim), np.float32)
    out = np.empty_like(q)
    pairs = sum(range(depth - rows + 1, depth + 1))
    return lambda: ops.attention(q, *places, pool, dim**-0.5, out, window), 4 * dim * heads * pairs / 1e9


def rows_of(operation: str, rows: int = 64, width: int = 2048) -> tuple[Call, float]:
    """Return an operation over rows of floats, and its number of values in billions."""
    x, y, out = RNG.standard_normal((3, rows, width), np.float32)
    calls: dict[str, Call] = {
        "rms_norm": lambda: ops.rms_norm(x, y[0], 1e-6, out),
        "silu_mul": lambda: ops.silu_mul(x, y, out),
    }
    return calls[operation], x.size / 1e9


def main() -> None:
    cases = {
        "Q4_K, M = 1, GB/s of blocks": product(Q4_K, 1),
        "Q6_K, M = 1, GB/s of blocks": product(Q6_K, 1),
        "Q4_K, M = 256, TF/s": product(Q4_K, 256),
        "Q6_K, M = 256, TF/s": product(Q6_K, 256),
        "attention, 1 row at depth 512, GF/s": attention(1, 512),
        "attention, 1 row at depth 4,096, GF/s": attention(1, 4096),
        "attention, 256 rows at depth 512, GF/s": attention(256, 512),
        "attention, 256 rows at depth 4,096, GF/s": attention(256, 4096),
        **{
            f"the same with {format}, {rows} row{'s' * (rows > 1)}, GF/s": attention(rows, 4096, format)
            for format in tuple(ops.KV_FORMATS)[1:]
            for rows in (1, 256)
        },
        "rms_norm, G values/s": rows_of("rms_norm"),
        "silu_mul, G values/s": rows_of("silu_mul"),
    }
    kernel_choice.set_threads(1)
    families = kernel_choice.available_kernels()[::-1]
    print(f"| one thread | {' | '.join(families)} |\n|---|{'---:|' * len(families)}")
    for name, (call, amount) in cases.items():
        rates = []
        for family in families:
            kernel_choice.use_kernels(family)
            rates.append(amount / least_seconds(call, 1 if family == "generic" else 20))
        print(f"| {name} | {' | '.join(f'{rate:.3g}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    main()
