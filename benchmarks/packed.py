"""Compare packed weights with the layout of files (`docs/kernels/packed.md`), by block format and number of batch rows.

    python benchmarks/packed.py memory --formats Q4_K Q8_0 --batch-rows 1 2 4
    python benchmarks/packed.py cache

`memory` uses two threads and 200 MB of weights. It reports the median GB/s of blocks, and the median ratio to a plain
read of memory that is measured alternately. `cache` uses one thread and 320 rows. It reports the minimum ns per row and
block of 256, including the call and the quantization of the activations. Both layouts are measured alternately. On a
busy machine, real-time priority helps (`chrt -f 50 python ...`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from notso.qtensor import (
    CPU,
    FORMATS_BY_NAME,
    HugePageArena,
    QTensor,
    Weight,
    ceilings,
    kernel_choice,
    random_blocks,
    zeroed,
)

FORMATS = ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
MEMORY_BYTES = 200 << 20
READ_BYTES = 3 * ceilings.WINDOW_BYTES
CACHED_ROWS = 320
CACHED_SECONDS = 0.01  # duration of a measurement

RNG = np.random.default_rng(1)
OPS = CPU()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=["memory", "cache"])
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--batch-rows", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    is_cached = given.place == "cache"
    kernel_choice.configure(1 if is_cached else 2)
    reading = np.ones(READ_BYTES, np.uint8)
    print(f"{kernel_choice.kernels()} kernels, K = {given.columns:,}")
    for name in given.formats:
        rows, packed = weights_of(name, given.columns, is_cached)
        for m in given.batch_rows:
            x, y = RNG.standard_normal((m, given.columns), np.float32), OPS.empty(m, rows[0].rows)
            calls = {"rows": products(x, rows, y), "packed": products(x, packed, y)}
            if not is_cached:
                calls["read"] = lambda: ceilings.read_bandwidth(reading)
            measured = alternating(calls, given.rounds, CACHED_SECONDS if is_cached else 0)
            print(f"{name}, M = {m}: {told(measured, rows, is_cached)}", flush=True)


def weights_of(name: str, columns: int, is_cached: bool) -> tuple[list[QTensor], list[Weight]]:
    """Return weights in rows and packed, both on huge pages: one that fits in the cache, or MEMORY_BYTES of them."""
    format = FORMATS_BY_NAME[name]
    rows = CACHED_ROWS if is_cached else 11008 * 2048 // columns // 64 * 64
    count = rows * columns // format.block_values
    data = random_blocks(format, count, RNG).reshape(-1)
    weight = QTensor("w", format, (rows, columns), data)
    copies = 1 if is_cached else -(-MEMORY_BYTES // weight.nbytes)
    arena = HugePageArena(copies * weight.nbytes, copies)
    packed = [arena.copy(weight)[0] for _ in range(copies)]
    assert arena.layout == "packed", f"the {kernel_choice.kernels()} kernels do not pack {name}"
    memory = zeroed(copies * weight.nbytes).reshape(copies, -1)
    memory[:] = data
    return [QTensor("w", format, (rows, columns), each) for each in memory], packed


def products(x: np.ndarray, weights: Sequence[Weight], y: np.ndarray) -> Callable[[], None]:
    def call() -> None:
        for weight in weights:
            OPS.matmul(x, weight, y)

    return call


def alternating(calls: dict[str, Callable[[], None]], rounds: int, at_least_s: float) -> dict[str, list[float]]:
    """Return the seconds of each call in each round."""
    seconds = {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            made, started = 0, time.perf_counter()
            while made == 0 or time.perf_counter() - started < at_least_s:
                call()
                made += 1
            seconds[name].append((time.perf_counter() - started) / made)
    return seconds


def told(seconds: dict[str, list[float]], weights: list[QTensor], is_cached: bool) -> str:
    if is_cached:
        blocks = weights[0].rows * weights[0].cols / 256
        figures = {name: min(each) / blocks * 1e9 for name, each in seconds.items()}
        return f"rows {figures['rows']:.2f} ns, packed {figures['packed']:.2f} ns"
    size = sum(weight.nbytes for weight in weights)
    rates = {name: [size / each / 1e9 for each in times] for name, times in seconds.items() if name != "read"}
    reads = [READ_BYTES / each / 1e9 for each in seconds["read"]]
    figures = [
        f"{name} {statistics.median(each):.1f} GB/s ({statistics.median(map(float.__truediv__, each, reads)):.2f})"
        for name, each in rates.items()
    ]
    return f"{', '.join(figures)}, read {statistics.median(reads):.1f}"


if __name__ == "__main__":
    main()
