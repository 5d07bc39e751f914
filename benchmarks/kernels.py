"""Compare each important kernel with its upper limit: the memory bandwidth, or the rate of byte products.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json

Uses all threads, every kernel family of this CPU (or those given by --kernels), SmolLM3-3B's shapes, and random weights
on huge pages that exceed any cache. Limits and kernels are measured alternately, and medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from notso import __version__
from notso.qtensor import (
    CPU,
    KV_FORMATS,
    Q4_K,
    Q6_K,
    TILE_POSITIONS,
    Format,
    HugePageArena,
    QTensor,
    ceilings,
    kernel_choice,
    random_blocks,
    zeroed,
)
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine
from notso.system.processors import usable_cores

COLUMNS = (1, 2, 4, 8, 16, 64, 512)
ROWS, WIDTH = 11008, 2048
WEIGHT_BYTES = 400 << 20  # exceeds any cache
HEADS, KV_HEADS, DIM = 16, 4, 128
DEPTHS = (512, 4096, 32768)
PREFILL_ROWS = 512
PREFILL_DEPTHS = (512, 4096, 8192)
LEAST_SECONDS = 0.05
READ_BYTES = 1 << 30

RNG = np.random.default_rng(1)
OPS = CPU()


@dataclass(frozen=True)
class Case:
    """A kernel call, the bytes it reads or the operations it performs, and its upper limit."""

    name: str
    call: Callable[[], None]
    amount: float
    ceiling: str  # "read" or "multiply"
    attention: str = "auto"  # "vectors": measured only if the default is tiles


def products(format: Format) -> list[Case]:
    """Return products of `format` weights with 1 to 512 columns; with few columns, reading weights limits the speed."""
    size = ROWS * WIDTH // 256 * format.block_bytes
    count = -(-WEIGHT_BYTES // size)
    arena = HugePageArena(count * size, count)
    blocks = random_blocks(format, ROWS * WIDTH // 256, RNG).reshape(-1)
    weights = [arena.copy(QTensor("w", format, (ROWS, WIDTH), blocks))[0] for _ in range(count)]

    def over_all(columns: int) -> Callable[[], None]:
        x, y = RNG.standard_normal((columns, WIDTH), np.float32), OPS.empty(columns, ROWS)
        used = weights if columns <= 64 else weights[:8]

        def call() -> None:
            for weight in used:
                OPS.matmul(x, weight, y)

        return call

    cases = []
    for columns in COLUMNS:
        used = count if columns <= 64 else min(count, 8)
        reads = columns <= 8
        amount = used * (size if reads else 2 * columns * ROWS * WIDTH)
        name = f"{format.name}, {columns} columns"
        cases.append(Case(name, over_all(columns), amount, "read" if reads else "multiply"))
    return cases


def attention(kv_format: str, rows: int, depth: int) -> Case:
    """Return attention of the last `rows` of `depth` positions, in SmolLM3-3B's shapes."""
    tiles = -(-depth // TILE_POSITIONS)
    [pool] = OPS.key_value_pools(1, tiles, KV_HEADS, DIM, kv_format)  # type: ignore[arg-type]
    tables = np.arange(tiles, dtype=np.int32).reshape(1, tiles)
    small = "4" in kv_format
    window = (tables, OPS.key_value_pools(1, tiles, KV_HEADS, DIM, "k8v8")[0]) if small else None
    step = 1024
    for start in range(0, depth, step):
        count = min(step, depth - start)
        places = np.arange(start, start + count, dtype=np.int32), np.zeros(count, np.int32)
        k, v = RNG.standard_normal((2, count, KV_HEADS, DIM), np.float32)
        OPS.store_key_values(k, v, *places, tables, pool, window)
    q = RNG.standard_normal((rows, HEADS, DIM), np.float32)
    out = np.empty_like(q)
    places = np.arange(depth - rows, depth, dtype=np.int32), np.zeros(rows, np.int32)

    def call() -> None:
        OPS.attention(q, *places, tables, pool, DIM**-0.5, out, window)

    name = f"attention {kv_format}, {rows} rows at {depth:,}"
    if rows == 1:
        return Case(name, call, depth * pool.block_bytes / TILE_POSITIONS, "read")
    return Case(name, call, 4.0 * DIM * HEADS * sum(range(depth - rows + 1, depth + 1)), "multiply")


def by_vectors(case: Case) -> Case:
    """Return the same case without tiles."""

    def call() -> None:
        kernel_choice.use_attention("vectors")
        case.call()
        kernel_choice.use_attention("auto")

    return replace(case, name=f"{case.name}, by vectors", call=call, attention="vectors")


def cases_of(kv_formats: list[str]) -> list[Case]:
    """Return all cases."""
    found = [*products(Q4_K), *products(Q6_K)]
    found += [attention(f, 1, depth) for f in kv_formats for depth in DEPTHS]
    prompts = [attention(f, PREFILL_ROWS, depth) for f in kv_formats for depth in PREFILL_DEPTHS]
    return found + prompts + [by_vectors(case) for case in prompts if "f16" not in case.name]


def rate(case: Case) -> float:
    """Return the rate of a call, in 10^9 bytes or operations per second; short calls are repeated."""
    calls, seconds, started = 0, 0.0, time.perf_counter()
    while seconds < LEAST_SECONDS:
        case.call()
        calls, seconds = calls + 1, time.perf_counter() - started
    return calls * case.amount / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=kernel_choice.available_kernels()[:-1] or ["generic"])
    parser.add_argument("--kv", nargs="+", default=list(KV_FORMATS), choices=KV_FORMATS)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()

    kernel_choice.set_threads(given.threads or usable_cores())
    stolen = StolenTime()
    memory = zeroed(READ_BYTES)
    memory[:] = 93
    every_case = cases_of(given.kv)
    measured: dict[str, Any] = {}
    for family in given.kernels:
        kernel_choice.use_kernels(family)
        has_tiles = kernel_choice.attention_variant() == "tiles"
        cases = [case for case in every_case if has_tiles or case.attention == "auto"]
        read, multiply = [], []
        rates: dict[str, list[float]] = {case.name: [] for case in cases}
        for case in cases:
            case.call()  # warm up
        for _ in range(given.repeat):
            read.append(max(ceilings.read_bandwidth(memory) for _ in range(2)) / 1e9)
            multiply.append(2 * ceilings.byte_product_rate() / 1e9)
            for case in cases:
                rates[case.name].append(rate(case))
        tops = {"read": statistics.median(read), "multiply": statistics.median(multiply)}
        print(f"\n| {family} | median | min | max | share of ceiling |\n| --- | ---: | ---: | ---: | ---: |")
        print(f"| reading, GB/s | {tops['read']:.1f} | {min(read):.1f} | {max(read):.1f} | |")
        print(f"| byte products, G/s | {tops['multiply']:.0f} | {min(multiply):.0f} | {max(multiply):.0f} | |")
        rows = []
        for case in cases:
            values = rates[case.name]
            median = statistics.median(values)
            share = median / tops[case.ceiling]
            unit = "GB/s" if case.ceiling == "read" else "GF/s"
            print(f"| {case.name}, {unit} | {median:.4g} | {min(values):.4g} | {max(values):.4g} | {share:.2f} |")
            rows.append({"kernel": case.name, "unit": unit, "rate": median, "min": min(values), "max": max(values)})
            rows[-1] |= {"share": share, "ceiling": case.ceiling}
        measured[family] = {"read_gb_s": tops["read"], "byte_gops": tops["multiply"], "kernels": rows}
    result = {
        "machine": describe_machine() | {"stolen_percent": round(stolen.percent(), 2)},
        "version": __version__,
        "threads": kernel_choice.threads(),
        "repeats": given.repeat,
        "families": measured,
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
