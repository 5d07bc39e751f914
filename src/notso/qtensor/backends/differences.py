"""Check that two backends compute bit-identical results for small random operations.

The check runs before a device is used for a model, and takes less than a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from notso.qtensor.backends.protocol import Array, Backend, Host, RMSNorm
from notso.qtensor.formats import TILE_POSITIONS, Format, KVFormat
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor

# Numbers of rows: one, few and many. Backends may use a different kernel for each.
ROWS = (1, 5, 33)

OUTPUTS, INPUTS = 96, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
# Tested KV formats; formats with fewer bits use the same kernels as k8v8.
TESTED_KV_FORMATS: tuple[KVFormat, ...] = ("k8v8", "f16")

EPS = 1e-6

Work = Callable[[Backend, np.random.Generator], Host]


def differing_operations(one: Backend, other: Backend, formats: Iterable[Format]) -> list[str]:
    """Return the names of operations with differing results. Raises the backends' errors."""
    found = []
    for name, work in _workloads(formats):
        ours, theirs = (work(backend, np.random.default_rng(1)) for backend in (one, other))
        if ours.tobytes() != theirs.tobytes():
            found.append(name)
    return found


def _workloads(formats: Iterable[Format]) -> Iterator[tuple[str, Work]]:
    for format in formats:
        for rows in ROWS:
            yield f"{format} of {rows} rows", partial(_run_products, format=format, rows=rows)
    for kv in TESTED_KV_FORMATS:
        yield f"attention over {kv}", partial(_run_attention, format=kv)


def _weight(backend: Backend, rng: np.random.Generator, format: Format, name: str) -> Array:
    blocks = random_blocks(format, OUTPUTS * INPUTS // format.block_values, rng)
    return backend.weight(QTensor(name, format, (OUTPUTS, INPUTS), blocks.reshape(-1)))


def _floats(rng: np.random.Generator, *shape: int) -> Host:
    return rng.standard_normal(shape, np.float32)


def _run_products(backend: Backend, rng: np.random.Generator, format: Format, rows: int) -> Host:
    first, second = (_weight(backend, rng, format, name) for name in ("first", "second"))
    x = backend.upload(_floats(rng, rows, INPUTS))
    norm = RMSNorm(backend.upload(_floats(rng, INPUTS)), EPS)
    ids = backend.upload(rng.integers(0, OUTPUTS, rows, dtype=np.int32))
    embedded, outs = backend.empty(rows, INPUTS), [backend.empty(rows, OUTPUTS) for _ in range(2)]
    program = backend.program()
    with program.record():
        backend.embed_rows(first, ids, embedded)
        backend.matmul(x, first, outs[0])
        backend.matmul_gated(x, first, second, outs[1], norm=norm)
        backend.matmul_add(embedded, second, outs[1])
    program.run()
    program.run()
    return np.concatenate([backend.download(each).reshape(-1) for each in (embedded, *outs)])


def _run_attention(backend: Backend, rng: np.random.Generator, format: KVFormat) -> Host:
    # Tests many rows, which cross a tile boundary, then a few rows, as in decoding. Both steps are recorded, because a
    # backend may fuse recorded operations.
    (pool,) = backend.key_value_pools(1, 2, KV_HEADS, HEAD_DIM, format)
    frequencies = backend.upload(1.0 / 5e6 ** (np.arange(HEAD_DIM // 2, dtype=np.float64) * 2 / HEAD_DIM))
    tables = backend.upload(np.array([[1, 0]], np.int32))
    begin, outs = 0, []
    for rows in (TILE_POSITIONS + 9, 3):
        positions = backend.upload(np.arange(begin, begin + rows, dtype=np.int32))
        numbers = backend.upload(np.arange(rows, dtype=np.int32))
        sequences = backend.upload(np.zeros(rows, np.int32))
        table = backend.empty(rows, HEAD_DIM // 2), backend.empty(rows, HEAD_DIM // 2)
        q, k, v = (backend.upload(_floats(rng, rows, heads, HEAD_DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = backend.empty(rows, HEADS * HEAD_DIM).reshape(rows, HEADS, HEAD_DIM)
        program = backend.program()
        with program.record():
            backend.rope_table(frequencies, positions, table)
            backend.rope(k, numbers, table, adjacent=True)
            backend.store_key_values(k, v, positions, sequences, tables, pool)
            backend.rope(q, numbers, table, adjacent=True)
            backend.attention(q, positions, sequences, tables, pool, HEAD_DIM**-0.5, out)
        program.run()
        outs += [backend.download(each) for each in (out, q, k)]
        begin += rows
    return np.concatenate([each.reshape(-1) for each in outs])
