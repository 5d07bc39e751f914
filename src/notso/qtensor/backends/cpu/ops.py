"""Compute with arrays and quantized tensors. The caller provides the arrays for the results.

Every function checks shapes, dtypes and memory layout and raises OperandError before native code runs. Native code
checks the content of arrays (row numbers, positions, blocks) before it writes anything. native/kernel_table.h specifies
the arithmetic of each operation, and all kernel families produce bit-identical results.

Inside `with program.record():`, operations are not computed but recorded, with references to their arrays;
`program.run()` replays them with the arrays' current contents, in one native call without the interpreter lock.

Letters in shapes: L rows, C width, K values per weight row, N weight rows, H heads, KH KV heads, D head dimension, M
gathered rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.huge_pages import KeyValuePool, PackedTensor, key_value_pool, key_value_pools
from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.backends.protocol import RMSNorm
from notso.qtensor.errors import OperandError
from notso.qtensor.formats import KV_FORMAT_NUMBERS, KV_FORMATS, TILE_POSITIONS, KVFormat, kv_block_bytes
from notso.qtensor.tensor import QTensor

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
Window = tuple[Integers, KeyValuePool]
Weight = QTensor | PackedTensor

__all__ = [
    "CACHE_LINE_FLOATS", "KV_FORMATS", "TILE_POSITIONS", "KVFormat", "KeyValuePool", "Program", "RMSNorm",
    "add", "argmax", "attention", "embed_rows", "empty", "gather_rows", "key_value_pool", "key_value_pools",
    "kv_block_bytes", "matmul", "matmul_add", "matmul_gated", "matmul_many", "rms_norm", "rope", "rope_table",
    "silu_mul", "softmax", "store_key_values",
]  # fmt: skip

CACHE_LINE_FLOATS = 16


class Program:
    """Recorded operations for replay, with references to their arrays."""

    def __init__(self) -> None:
        self._steps = native.Program()

    def __len__(self) -> int:
        return len(self._steps)

    @contextmanager
    def record(self) -> Iterator[Program]:
        _native(self._steps.begin)
        try:
            yield self
        finally:
            self._steps.end()

    def run(self) -> None:
        _native(self._steps.run)


def empty(rows: int, columns: int) -> Floats:
    """Return an uninitialized (rows, columns) float32 array aligned to a cache line."""
    if rows < 0 or columns < 1:
        raise OperandError(f"an array cannot have the shape {rows} x {columns}")
    memory = np.empty(rows * columns + CACHE_LINE_FLOATS, np.float32)
    start = -(memory.ctypes.data // 4) % CACHE_LINE_FLOATS
    return memory[start : start + rows * columns].reshape(rows, columns)


def embed_rows(weight: Weight, ids: Integers, out: Floats) -> None:
    """out[i] = dequantized row ids[i] of `weight`. ids (L,) int32, out (L, K) float32."""
    _check_array("ids", ids, np.int32, 1)
    _check_array("out", out, np.float32, (ids.size, weight.cols), writeable=True)
    _check_no_overlap("out", out, ids, weight.data)
    shape = weight.rows, weight.cols, weight.slab_stride
    _native(native.embed_rows, weight.data, weight.format.ggml_type, *shape, ids, out)


def gather_rows(x: Floats, ids: Integers, out: Floats) -> None:
    """out[i] = x[ids[i]]. x (L, C) float32, ids (M,) int32, out (M, C) float32."""
    _check_array("x", x, np.float32, 2)
    _check_array("ids", ids, np.int32, 1)
    _check_array("out", out, np.float32, (ids.size, x.shape[1]), writeable=True)
    _check_no_overlap("out", out, x, ids)
    _native(native.gather_rows, x, ids, out)


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out = weight * x / sqrt(mean(x^2) + eps) per row. x, out (L, C) float32, weight (C,); out may be x."""
    _check_array("x", x, np.float32, 2)
    _check_array("weight", weight, np.float32, x.shape[1:])
    _check_array("out", out, np.float32, x.shape, writeable=True)
    if x.shape[1] == 0:
        raise OperandError("rms_norm needs at least one value")
    _check_no_overlap("out", out, weight)
    _check_no_overlap("out", out, x, in_place=True)
    _native(native.rms_norm, x, weight, float(eps), out)


def matmul(x: Floats, weight: Weight, out: Floats, *, norm: RMSNorm | None = None) -> None:
    """out = x @ weight.T, with x normalized first if `norm` is given. x (L, K), weight (N, K), out (L, N) float32."""
    # For quantized weights, each row of x is first quantized to bytes, with one scale per 256 values, or per 32 values
    # for formats with blocks of 32. Sums over values with the same scale are exact integers. Float weights are
    # multiplied in float32.
    _matmul(x, [(weight, out)], norm, _PLAIN)


def matmul_many(x: Floats, products: Sequence[tuple[Weight, Floats]], *, norm: RMSNorm | None = None) -> None:
    """Multiply x by several weights like `matmul`, quantizing x once per block size."""
    for i, (_, out) in enumerate(products):
        _check_no_overlap("out", out, *(other for _, other in products[:i]))
    _matmul(x, products, norm, _PLAIN)


def matmul_add(x: Floats, weight: Weight, out: Floats) -> None:
    """out = out + x @ weight.T, bit-identical to `matmul` followed by `add`."""
    _matmul(x, [(weight, out)], None, _ADD)


def matmul_gated(x: Floats, gate: Weight, up: Weight, out: Floats, *, norm: RMSNorm | None = None) -> None:
    """out = silu(x @ gate.T) * (x @ up.T), bit-identical to `matmul_many` followed by `silu_mul`; gate, up (N, K)."""
    _matmul(x, [(gate, out), (up, out)], norm, _GATED)


_PLAIN, _ADD, _GATED = 0, 1, 2  # how the native matmul combines its products


def _matmul(x: Floats, products: Sequence[tuple[Weight, Floats]], norm: RMSNorm | None, combine: int) -> None:
    _check_array("x", x, np.float32, 2)
    if not products or x.size == 0:
        raise OperandError("matmul needs at least one weight and one row")
    for weight, out in products:
        if weight.cols != x.shape[1]:
            raise OperandError(f"{weight.name or 'weight'} has {weight.cols} columns, but x has {x.shape[1]}")
        _check_array("out", out, np.float32, (x.shape[0], weight.rows), writeable=True)
    if norm is not None:
        _check_array("norm", norm.weight, np.float32, x.shape[1:])
    weights = [weight for weight, _ in products]
    for _, out in products:
        _check_no_overlap("out", out, x, *(weight.data for weight in weights), *([] if norm is None else [norm.weight]))
    _native(
        native.matmul,
        x,
        [weight.data for weight in weights],
        [weight.format.ggml_type for weight in weights],
        [weight.slab_stride for weight in weights],
        [out for _, out in products],
        None if norm is None else norm.weight,
        0.0 if norm is None else float(norm.eps),
        combine,
    )


def rope_table(
    frequencies: npt.NDArray[np.float64], positions: Integers, table: tuple[Floats, Floats], factor: float = 1.0
) -> None:
    """Fill `table`, two arrays (L, D/2), with factor * cosine and factor * sine of position * frequency.

    positions (L,) int32, nonnegative. Angles are float64; results are inexact for angles above 1.6 million radians.
    """
    _check_array("frequencies", frequencies, np.float64, 1)
    _check_array("positions", positions, np.int32, 1)
    if frequencies.size == 0 or not np.isfinite(frequencies).all() or not math.isfinite(factor):
        raise OperandError("rotary embedding needs frequencies; they and the factor must be finite")
    for name, values in zip(("cosine", "sine"), table, strict=True):
        _check_array(name, values, np.float32, (positions.size, frequencies.size), writeable=True)
        _check_no_overlap(name, values, frequencies, positions)
    _check_no_overlap("cosine", *table)
    _native(native.rope_table, frequencies, positions, float(factor), *table)


def rope(x: Floats, positions: Integers, table: tuple[Floats, Floats], *, adjacent: bool) -> None:
    """Rotate row i of x (L, H, D) float32 in place by row positions[i] (int32) of the table.

    adjacent: rotate pairs (2i, 2i+1), as in GGUF files, rather than (i, i + D/2).
    """
    _check_array("x", x, np.float32, 3, writeable=True)
    _check_array("positions", positions, np.int32, x.shape[:1])
    cosine, sine = table
    _check_array("cosine", cosine, np.float32, 2)
    for name, values in (("cosine", cosine), ("sine", sine)):
        _check_array(name, values, np.float32, (cosine.shape[0], x.shape[2] // 2))
    if x.shape[1] == 0 or x.shape[2] == 0 or x.shape[2] % 2:
        raise OperandError(f"{x.shape[1]} heads of size {x.shape[2]} cannot be rotated")
    _check_no_overlap("x", x, positions, cosine, sine)
    _native(native.rope, x, positions, cosine, sine, adjacent)


def store_key_values(
    k: Floats,
    v: Floats,
    positions: Integers,
    sequences: Integers,
    tables: Integers,
    pool: KeyValuePool,
    window: Window | None = None,
) -> None:
    """Write k and v (L, KH, D) float32 into the cache, rounded to the pool's format.

    Row i goes to positions[i] of sequence sequences[i]. tables[s, t] (int32) is the block of tile t of sequence s.
    """
    # With formats of fewer than 8 bits, each sequence's first and current tiles are also stored in 8 bits. `window` is
    # a pair: block tables of the same shape as `tables`, and the k8v8 pool of these tiles. A row is written to each
    # pool whose table has a block for the row's tile (-1: no block). At least one of the two tables must have a block
    # for this tile.
    _check_array("k", k, np.float32, 3)
    _check_array("v", v, np.float32, k.shape)
    _check_positions(k.shape[0], positions, sequences, tables)
    _check_pool(pool, k.shape[1], k.shape[2])
    others = _window_arguments(pool, tables, window)
    _check_no_overlap("the pool", pool.data, k, v, positions, sequences, tables, *others)
    if window is not None:
        _check_no_overlap("the window pool", others[1], k, v, positions, sequences, tables, others[0])
    arguments = (pool.data, KV_FORMAT_NUMBERS[pool.format], *(others or (None, None)))
    _native(native.store_key_values, k, v, positions, sequences, tables, *arguments)


def attention(
    q: Floats,
    positions: Integers,
    sequences: Integers,
    tables: Integers,
    pool: KeyValuePool,
    scale: float,
    out: Floats,
    window: Window | None = None,
) -> None:
    """Write causal attention of q (L, H, D) over the cache into out (L, H, D) float32.

    Row i attends to positions 0..positions[i] of its sequence, whose keys and values must already be stored.
    """
    # Query head h reads KV head h // (H / KH). With formats of fewer than 8 bits, a row at position p reads tile 0 and
    # tile p // 128 from the window pool (see `store_key_values`), and all other tiles from `pool`; the tables must have
    # blocks for all tiles that are read.
    _check_array("q", q, np.float32, 3)
    _check_array("out", out, np.float32, q.shape, writeable=True)
    _check_positions(q.shape[0], positions, sequences, tables)
    kv_heads = pool.kv_heads if isinstance(pool, KeyValuePool) else 0
    if q.shape[1] == 0 or kv_heads == 0 or q.shape[1] % kv_heads:
        raise OperandError(f"{q.shape[1]} query heads cannot share {kv_heads} KV heads")
    _check_pool(pool, kv_heads, q.shape[2])
    others = _window_arguments(pool, tables, window)
    _check_no_overlap("out", out, q, positions, sequences, tables, pool.data, *others)
    arguments = (pool.data, KV_FORMAT_NUMBERS[pool.format], kv_heads, *(others or (None, None)))
    _native(native.attention, q, positions, sequences, tables, *arguments, float(scale), out)


def silu_mul(gate: Floats, up: Floats, out: Floats) -> None:
    """out = gate / (1 + exp(-gate)) * up, all (L, C) float32; out may be gate or up."""
    _check_elementwise("gate", gate, "up", up, out)
    _native(native.silu_mul, gate, up, out)


def add(a: Floats, b: Floats, out: Floats) -> None:
    """out = a + b, all (L, C) float32; out may be a or b."""
    _check_elementwise("a", a, "b", b, out)
    _native(native.add, a, b, out)


def softmax(x: Floats) -> None:
    """Replace each row of x (L, C) float32 with its softmax."""
    _check_array("x", x, np.float32, 2, writeable=True)
    if x.shape[1] == 0:
        raise OperandError("softmax needs at least one value")
    _native(native.softmax, x)


def argmax(x: Floats, out: Integers) -> None:
    """out[i] = the lowest index of the largest value in row i. x (L, C) float32, out (L,) int32."""
    _check_array("x", x, np.float32, 2)
    _check_array("out", out, np.int32, x.shape[:1], writeable=True)
    if x.shape[1] == 0:
        raise OperandError("argmax needs at least one value")
    _check_no_overlap("out", out, x)
    _native(native.argmax, x, out)


def _native(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except (ValueError, TypeError) as error:
        raise OperandError(str(error).splitlines()[0]) from None


def _check_array(
    name: str, value: object, dtype: type[np.generic], shape: int | tuple[int, ...], *, writeable: bool = False
) -> None:
    # shape: the expected shape, or only the number of dimensions.
    ndim = shape if isinstance(shape, int) else len(shape)
    if not isinstance(value, np.ndarray):
        raise OperandError(f"{name} must be a numpy array, not {type(value).__name__}")
    if value.dtype != dtype or value.ndim != ndim:
        expected = f"{ndim}-dimensional {np.dtype(dtype).name}"
        raise OperandError(f"{name} must be {expected}, not {value.ndim}-dimensional {value.dtype.name}")
    if not value.flags.c_contiguous or not value.flags.aligned:
        raise OperandError(f"{name} must be contiguous and aligned")
    if writeable and not value.flags.writeable:
        raise OperandError(f"{name} is read-only")
    if isinstance(shape, tuple) and value.shape != shape:
        raise OperandError(f"{name} must have shape {shape}, not {value.shape}")


def _check_elementwise(a_name: str, a: Floats, b_name: str, b: Floats, out: Floats) -> None:
    _check_array(a_name, a, np.float32, 2)
    _check_array(b_name, b, np.float32, a.shape)
    _check_array("out", out, np.float32, a.shape, writeable=True)
    _check_no_overlap("out", out, a, b, in_place=True)


def _check_no_overlap(name: str, written: Any, *others: Any, in_place: bool = False) -> None:
    # in_place: an operand may be the output itself.
    for other in others:
        if np.may_share_memory(written, other) and not (in_place and other.ctypes.data == written.ctypes.data):
            raise OperandError(f"{name} overlaps another operand")


def _check_positions(rows: int, positions: Integers, sequences: Integers, tables: Integers) -> None:
    _check_array("positions", positions, np.int32, (rows,))
    _check_array("sequences", sequences, np.int32, (rows,))
    _check_array("tables", tables, np.int32, 2)


def _check_pool(pool: KeyValuePool, kv_heads: int, head_dim: int) -> None:
    if not isinstance(pool, KeyValuePool):
        raise OperandError(f"the pool must be a KeyValuePool, not {type(pool).__name__}")
    _check_array("the pool", pool.data, np.uint8, 4, writeable=True)
    if (pool.kv_heads, pool.head_dim) != (kv_heads, head_dim):
        raise OperandError(
            f"the pool has {pool.kv_heads} heads of size {pool.head_dim}; {kv_heads} of size {head_dim} are needed"
        )
    head_bytes, run = kv_block_bytes(pool.format, kv_heads, head_dim) // kv_heads, max(pool.data.shape[2], 1)
    _check_array("the pool", pool.data, np.uint8, (-(-pool.blocks // run), kv_heads, run, head_bytes))


def _window_arguments(pool: KeyValuePool, tables: Integers, window: Window | None) -> tuple[Any, ...]:
    # Returns the window pool's tables and bytes, or () if the format needs no window pool.
    if (window is not None) != pool.needs_window:
        raise OperandError(f"KV format {pool.format} {'needs a' if pool.needs_window else 'has no'} window pool")
    if window is None:
        return ()
    window_tables, window_pool = window
    _check_array("window tables", window_tables, np.int32, tables.shape)
    _check_pool(window_pool, pool.kv_heads, pool.head_dim)
    if window_pool.format != "k8v8":
        raise OperandError(f"the window pool must be k8v8, not {window_pool.format}")
    return window_tables, window_pool.data
