"""Compare products in each block format with Q4_K, on one thread: the table in docs/kernels/formats.md.

    python benchmarks/format_rates.py

Formats are measured alternately, by processor time; the result is the minimum of nine rounds.
"""

from __future__ import annotations

import time

import numpy as np

from notso.qtensor import FORMATS, Q4_K, QTensor, kernel_choice, random_blocks
from notso.qtensor.backends.cpu import ops

ROWS, K, ROUNDS = 4096, 2048, 9
BATCHES = (1, 4, 64)


def main() -> None:
    kernel_choice.set_threads(1)
    rng = np.random.default_rng(1)
    formats = [format for format in FORMATS.values() if not format.is_float]
    weights = {
        f: QTensor("w", f, (ROWS, K), random_blocks(f, ROWS * K // f.block_values, rng).reshape(-1)) for f in formats
    }
    least = {(f, m): float("inf") for f in formats for m in BATCHES}
    for _ in range(ROUNDS):
        for (f, m), best in least.items():
            x, y = rng.standard_normal((m, K), np.float32), ops.empty(m, ROWS)
            start = time.thread_time()
            ops.matmul(x, weights[f], y)
            least[f, m] = min(best, time.thread_time() - start)
    print(f"Kernels {kernel_choice.kernels()}, {ROWS} x {K} weights.\n")
    print("| format | bits | M = 1, GB/s of blocks | " + " | ".join(f"M = {m}, times Q4_K's" for m in BATCHES) + " |")
    print("|---|---:|---:|" + "---:|" * len(BATCHES))
    for f in sorted(formats, key=lambda f: least[f, 1]):
        times = " | ".join(f"{least[f, m] / least[Q4_K, m]:.1f}" for m in BATCHES)
        print(f"| {f.name} | {f.bits_per_value:.2f} | {weights[f].nbytes / least[f, 1] / 1e9:.1f} | {times} |")


if __name__ == "__main__":
    main()
