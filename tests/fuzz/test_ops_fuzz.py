"""Random calls of every native operation: valid ones give NumPy's result, invalid ones raise, and none writes
elsewhere.

The operations are those that the native module exports (reliability NK2). They are called without ops.py, whose checks
are not needed for safety. Shapes, strides, dtypes, alignment, aliasing, ranges and contents vary. Runs for a few
seconds by default; `FUZZ_SECONDS=300` (or `make fuzz`) runs longer. A failure prints its seed: `FUZZ_SEED=<n>` runs
only that call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twins import PACKED, packed_twin

from notso.qtensor import _native
from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import FORMATS, FORMATS_BY_NAME
from notso.qtensor.reference import blocks, kv_cache, random_blocks
from notso.qtensor.reference import ops as reference
from notso.qtensor.tensor import QTensor

NAMES = tuple(ops.KV_FORMATS)
SECONDS = float(os.environ.get("FUZZ_SECONDS", "5"))
ONE_SEED = os.environ.get("FUZZ_SEED")
TOLERANCE = 2e-5  # relative to the largest output; the kernel tests have tighter bounds
CANARY = 0x5A
CONTROL = {
    "Program", "attention_variant", "available_kernels", "cpu_features", "end_on_bus_errors", "is_packed", "kernels",
    "known_kernels", "multiply_bytes", "packed_bytes", "packs_by_default", "set_thread_count", "thread_count",
    "use_attention", "use_kernels", "work_shares",
}  # fmt: skip

Array = npt.NDArray[Any]
Call = dict[str, Any]
Rng = np.random.Generator


def numbers(rng: Rng, *shape: int) -> Array:
    """Return floats of every kind, mostly ordinary ones."""
    x = rng.standard_normal(shape, np.float32)
    kind = rng.integers(0, 12)
    if x.size and kind < 5:
        special = [np.nan, np.inf, -np.inf, 1e-42, 0.0, 3e38, -3e38, 1e-20][kind::5]
        where = rng.random(shape) < 0.1
        x[where] = rng.choice(np.array(special, np.float32), int(where.sum()))
    return x


def size(rng: Rng, most: int, step: int = 1) -> int:
    return step * int(rng.integers(1, most + 1))


def weight(rng: Rng, rows: int) -> tuple[Array, int, int]:
    """Return bytes, format number and row length of a random weight."""
    format = FORMATS[int(rng.choice(list(FORMATS)))]
    k = size(rng, 3, 256) if format.block_values > 1 or rng.random() < 0.5 else size(rng, 70)
    data = random_blocks.random_blocks(format, rows * k // format.block_values, rng, 0.1).reshape(-1)
    return data, format.ggml_type, k


def packed(rng: Rng, data: Array, number: int, rows: int, k: int) -> tuple[Array, int]:
    """Return the weight in rows, or in slabs with the slab stride in bytes. Results with slabs are not compared here,
    but in tests/qtensor/test_packing.py."""
    if FORMATS[number].name not in PACKED or rng.random() < 0.5:
        return data, 0
    twin = packed_twin(tensor({}, data, number, rows, k), 64 * size(rng, 3))
    return twin.data, twin.slab_stride


def tensor(call: Call, data: Array, number: int, rows: int, k: int) -> QTensor:
    return QTensor("fuzz", FORMATS[number], (rows, k), np.ascontiguousarray(data))


def ids(rng: Rng, count: int, limit: int) -> Array:
    return rng.integers(0, limit, count).astype(np.int32)


def cache(rng: Rng) -> tuple[Call, int]:
    blocks_, kv_heads, dim, sequences, tiles = size(rng, 5), size(rng, 3), size(rng, 4, 16), size(rng, 3), size(rng, 2)
    rows, number = size(rng, 9), int(rng.integers(0, len(ops.KV_FORMATS)))
    small = NAMES[number] not in ("f16", "k8v8")
    shape = sequences, tiles
    return {
        "positions": ids(rng, rows, tiles * 128), "sequences": ids(rng, rows, sequences),
        "tables": ids(rng, sequences * tiles, blocks_).reshape(shape),
        "pool": stored(rng, blocks_, kv_heads, dim, NAMES[number]), "format": number, "kv_heads": kv_heads,
        "window_tables": ids(rng, sequences * tiles, blocks_).reshape(shape) if small else None,
        "window": stored(rng, blocks_, kv_heads, dim, "k8v8") if small else None,
    }, dim  # fmt: skip


def stored(rng: Rng, blocks_: int, kv_heads: int, dim: int, format: ops.KVFormat) -> Array:
    """Return random bytes of a KV cache whose float16 scales are as in a real cache: nonnegative, small and finite."""
    run = next(run for run in (3, 2, 1) if blocks_ % run == 0)
    shape = blocks_ // run, kv_heads, run, ops.kv_block_bytes(format, kv_heads, dim) // kv_heads
    data = rng.integers(0, 256, shape).astype(np.uint8)
    data[..., 1 if format == "f16" else -2 * 2 * 128 + 1 :: 2] &= 0x3F
    return data


def pools_of(c: Call) -> tuple[ops.KeyValuePool, ops.KeyValuePool | None]:
    dim = (c["k"] if "k" in c else c["q"]).shape[2]
    heads = c["k"].shape[1] if "k" in c else c["kv_heads"]
    pool = pool_of(NAMES[c["format"]], heads, dim, c["pool"])
    return pool, None if c["window"] is None else pool_of("k8v8", heads, dim, c["window"])


def pool_of(format: ops.KVFormat, kv_heads: int, dim: int, data: Array) -> ops.KeyValuePool:
    return ops.KeyValuePool(format, kv_heads, dim, data.shape[0] * data.shape[2], data)


# ---- valid calls of each operation, and their expected results: {output: array} ----


def embed_rows(rng: Rng) -> Call:
    rows, count = size(rng, 9), size(rng, 9)
    data, number, k = weight(rng, rows)
    data, stride = packed(rng, data, number, rows, k)
    return {
        "data": data,
        "format": number,
        "rows": rows,
        "k": k,
        "slab_stride": stride,
        "ids": ids(rng, count, rows),
        "out": numbers(rng, count, k),
    }


def embed_rows_expected(c: Call) -> Call:
    if c["slab_stride"]:
        return {}
    return {"out": reference.embedding_rows(tensor(c, c["data"], c["format"], c["rows"], c["k"]), c["ids"])}


def gather_rows(rng: Rng) -> Call:
    x = numbers(rng, size(rng, 9), size(rng, 40))
    count = size(rng, 9)
    return {"x": x, "ids": ids(rng, count, len(x)), "out": numbers(rng, count, x.shape[1])}


def rms_norm(rng: Rng) -> Call:
    x = numbers(rng, size(rng, 9), size(rng, 300))
    return {"x": x, "weight": numbers(rng, x.shape[1]), "eps": 1e-6, "out": numbers(rng, *x.shape)}


def rms_norm_expected(c: Call) -> Call:
    wide = np.square(c["x"]).sum(axis=1)  # float32, because overflowed results are not compared
    return {"out": np.where(np.isfinite(wide)[:, None], reference.rms_norm(c["x"], c["weight"], c["eps"]), np.nan)}


def matmul(rng: Rng) -> Call:
    """Return a call with one or several weights: plain, added to the output, or two gated; with or without a norm."""
    combine = int(rng.integers(0, 3))
    rows = [size(rng, 40)] * (combine or size(rng, 3))
    first, number, k = weight(rng, rows[0])
    format = FORMATS[number]
    rest = [random_blocks.random_blocks(format, n * k // format.block_values, rng, 0.1).reshape(-1) for n in rows[1:]]
    weights = [packed(rng, data, number, n, k) for data, n in zip([first, *rest], rows, strict=True)]
    x = numbers(rng, size(rng, 24), k)
    outs = [numbers(rng, len(x), n) for n in rows]
    norm = rng.uniform(0.5, 2, k).astype(np.float32) if rng.random() < 0.5 else None
    fused = {"norm": norm, "eps": 1e-5, "combine": combine}
    of_weights = {"data": [data for data, _ in weights], "slab_strides": [stride for _, stride in weights]}
    return {"x": x, **of_weights, "formats": [number] * len(rows), "outs": outs, **fused}


def matmul_expected(c: Call) -> Call:
    """Return NumPy's result of a plain product; otherwise, that of separate operations, whose bits must be equal."""
    if any(c["slab_strides"]):
        return {}
    x = c["x"]
    if c["norm"] is not None:
        x = np.empty_like(x)
        _native.rms_norm(c["x"], c["norm"], c["eps"], x)
    weights = [
        tensor(c, data, number, out.shape[1], x.shape[1])
        for data, number, out in zip(c["data"], c["formats"], c["outs"], strict=True)
    ]
    products = [reference.matmul(x, w) for w in weights]
    if c["combine"] == 1:
        products = [products[0] + c["outs"][0]]
    if c["combine"] == 2:
        products = [reference.silu_mul(*products)]
    return {"outs": products}


def rope(rng: Rng) -> Call:
    rows, half, positions = size(rng, 9), size(rng, 20), size(rng, 30)
    tables = {name: rng.standard_normal((positions, half), np.float32) for name in ("cosine", "sine")}
    x = numbers(rng, rows, size(rng, 5), 2 * half)
    return {"x": x, "positions": ids(rng, rows, positions), **tables, "adjacent": bool(rng.integers(2))}


def rope_expected(c: Call) -> Call:
    x, cosine, sine = (c[n].astype(np.float64) for n in ("x", "cosine", "sine"))
    cosine, sine = cosine[c["positions"]][:, None], sine[c["positions"]][:, None]
    half = x.shape[2] // 2
    one, two = (np.s_[..., ::2], np.s_[..., 1::2]) if c["adjacent"] else (np.s_[..., :half], np.s_[..., half:])
    out = np.empty_like(x)
    out[one], out[two] = x[one] * cosine - x[two] * sine, x[two] * cosine + x[one] * sine
    return {"x": out}


def store_key_values(rng: Rng) -> Call:
    places, dim = cache(rng)
    shape = len(places["positions"]), places.pop("kv_heads"), dim
    return {"k": numbers(rng, *shape), "v": numbers(rng, *shape), **places}


def store_key_values_expected(c: Call) -> Call:
    """Return NumPy's result; all bytes that the operation does not write stay the same."""
    pool, window = pools_of(c)
    result = {}
    for name, part, tables in (("pool", pool, "tables"), ("window", window, "window_tables")):
        if part is not None:
            result[name] = part.data.copy()
            kv_cache.put(result[name], part.format, c["k"], c["v"], c["positions"], c[tables][c["sequences"]])
    return result


def attention(rng: Rng) -> Call:
    places, dim = cache(rng)
    shape = len(places["positions"]), places["kv_heads"] * size(rng, 5), dim
    return {"q": numbers(rng, *shape), **places, "scale": 0.1, "out": numbers(rng, *shape)}


def attention_expected(c: Call) -> Call:
    pool, window = pools_of(c)
    out = np.empty_like(c["q"])
    for row, (p, s) in enumerate(zip(c["positions"], c["sequences"], strict=True)):
        own, parts = p // 128, []
        for tile in range(own + 1):
            held, tables = (pool, "tables") if window is None or tile not in (0, own) else (window, "window_tables")
            block, heads = held.block(c[tables][s, tile]), (held.kv_heads, held.head_dim)
            taken = (
                kv_cache.unpack_half_block(block, *heads)
                if held.format == "f16"
                else kv_cache.unpack_block(block, held.format, *heads)
            )
            parts.append(taken)
        q = c["q"][row : row + 1]
        if pool.format == "f16":
            k, v = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            out[row] = reference.attention(q, k, v, int(p), c["scale"])[0]
        else:
            keys, values = (
                kv_cache.RoundedVectors(*(np.concatenate(of) for of in zip(*(part[i] for part in parts), strict=True)))
                for i in (0, 1)
            )
            out[row] = kv_cache.attention(q, keys, values, int(p), c["scale"])[0]
    return {"out": out}


def three(*names: str) -> Callable[[Rng], Call]:
    def make(rng: Rng) -> Call:
        shape = size(rng, 9), size(rng, 300)
        return {name: numbers(rng, *shape) for name in (*names, "out")}

    return make


def rope_table(rng: Rng) -> Call:
    frequency = rng.uniform(-3, 3, size(rng, 20))
    shape = size(rng, 50), len(frequency)
    positions = ids(rng, shape[0], 1000)
    tables = {"cosine": numbers(rng, *shape), "sine": numbers(rng, *shape)}
    return {"frequency": frequency, "positions": positions, "factor": 1.5, **tables}


def rope_table_expected(c: Call) -> Call:
    angles = c["positions"][:, None] * c["frequency"]
    return {"cosine": np.cos(angles) * c["factor"], "sine": np.sin(angles) * c["factor"]}


def pack_weight(rng: Rng) -> Call:
    format = FORMATS_BY_NAME[PACKED[int(rng.integers(len(PACKED)))]]
    rows, k = size(rng, 150), size(rng, 3, 256)
    data = random_blocks.random_blocks(format, rows * k // format.block_values, rng, 0.1).reshape(-1)
    stride = _native.packed_bytes(format.ggml_type, 64, k, 1 << 30) + 64 * int(rng.integers(3))
    out = np.zeros(_native.packed_bytes(format.ggml_type, rows, k, stride), np.uint8)
    return {"data": data, "format": format.ggml_type, "rows": rows, "k": k, "slab_stride": stride, "out": out}


def dequantize(rng: Rng) -> Call:
    rows = size(rng, 9)
    data, number, k = weight(rng, rows)
    return {"data": data, "format": number, "out": numbers(rng, rows, k)}


OPERATIONS: dict[str, tuple[Callable[[Rng], Call], Callable[[Call], Call]]] = {
    "embed_rows": (embed_rows, embed_rows_expected),
    "gather_rows": (gather_rows, lambda c: {"out": c["x"][c["ids"]]}),
    "rms_norm": (rms_norm, rms_norm_expected),
    "matmul": (matmul, matmul_expected),
    "rope": (rope, rope_expected),
    "store_key_values": (store_key_values, store_key_values_expected),
    "attention": (attention, attention_expected),
    "silu_mul": (three("gate", "up"), lambda c: {"out": reference.silu_mul(c["gate"], c["up"])}),
    "add": (three("a", "b"), lambda c: {"out": c["a"] + c["b"]}),
    "softmax": (lambda r: {"x": numbers(r, size(r, 9), size(r, 300))}, lambda c: {"x": reference.softmax(c["x"])}),
    "argmax": (
        lambda r: {"x": np.nan_to_num(numbers(r, n := size(r, 9), size(r, 300))), "out": ids(r, n, 9)},
        lambda c: {"out": reference.argmax(c["x"])},
    ),
    "read_memory": (lambda r: {"data": r.integers(0, 256, size(r, 3000)).astype(np.uint8)}, lambda c: {}),
    "rope_table": (rope_table, rope_table_expected),
    "pack_weight": (pack_weight, lambda c: {}),
    "dequantize": (
        dequantize,
        lambda c: {"out": blocks.dequantize(FORMATS[c["format"]], c["data"].reshape(len(c["out"]), -1))},
    ),
}


# ---- invalid calls ----


class Arena:
    """Memory with canaries around every array of a call."""

    def __init__(self) -> None:
        self.rooms: list[tuple[Array, int, int]] = []

    def place(self, a: Array, offset: int = 0) -> Array:
        room = np.full(a.nbytes + 192, CANARY, np.uint8)
        begin = -room.ctypes.data % 64 + 64 + offset
        view = room[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
        view[...] = a
        self.rooms.append((room, begin, begin + a.nbytes))
        return view

    def intact(self) -> bool:
        return all((room[:begin] == CANARY).all() and (room[end:] == CANARY).all() for room, begin, end in self.rooms)


def damaged(a: Array, rng: Rng, arena: Arena, others: list[Array]) -> Any:
    """Return an array that is invalid in one way, or possibly still valid."""
    kind = rng.integers(0, 11)
    if kind == 0:
        return arena.place(a, int(rng.integers(1, 9)))  # arrays of bytes may have any alignment
    if kind == 1:
        return a.astype(rng.choice(["f8", "f4", "f2", "i8", "i4", "u4", "i2", "u2", "u1", "?"]))
    if kind == 2:
        return np.repeat(a, 2, axis=-1)[..., ::2]
    if kind == 3:
        return np.asfortranarray(a)[::-1]
    if kind == 4:
        return a[None] if rng.random() < 0.5 else a.reshape(-1)
    if kind == 5:
        axis = int(rng.integers(0, a.ndim))
        shape = list(a.shape)
        shape[axis] = max(0, shape[axis] + int(rng.choice([-1, 1, -shape[axis], 7])))
        return arena.place(np.zeros(shape, a.dtype))
    if kind == 6:
        a = a.copy()
        a.flags.writeable = False
        return a
    if kind == 7 and a.dtype == np.int32 and a.size:
        a.reshape(-1)[rng.integers(0, a.size)] = rng.choice([-1, 2**31 - 1, -(2**31), 128, 3, 10**6])
        return a
    if kind == 8:
        return rng.choice(np.array([None, "x", 3, 2.5], object))
    if kind == 9 and others:
        other = others[int(rng.integers(0, len(others)))]
        if other.nbytes >= a.nbytes and other.flags.c_contiguous:
            return other.reshape(-1).view(np.uint8)[: a.nbytes].view(a.dtype).reshape(a.shape)
    return arena.place(rng.integers(0, 256, a.shape).astype(a.dtype))


def arrays_of(call: Call) -> list[Array]:
    found: list[Array] = []
    for value in call.values():
        found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, np.ndarray)]
    return found


def placed(call: Call, arena: Arena) -> Call:
    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(v) for v in value]
        return arena.place(value) if isinstance(value, np.ndarray) else value

    return {name: put(value) for name, value in call.items()}


def near(call: Call, result: Array, expected: Array) -> bool:
    if any(np.abs(a[np.isfinite(a)]).max(initial=0) > 1e30 for a in arrays_of(call) if a.dtype == np.float32):
        return True  # sums and exp overflow in float32 before they do in float64
    if result.dtype != np.float32:
        return bool(np.array_equal(result, expected))
    finite = np.isfinite(expected)
    if not finite.all():
        return True  # the order of a sum decides which results are NaN; the kernel tests compare families
    scale = max(float(np.abs(expected).max(initial=0)), 1e-6)
    return bool((np.abs(result.astype(np.float64) - expected) <= TOLERANCE * scale).all())


def one_call(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    make, expect = OPERATIONS[name]
    arena = Arena()
    kernel_choice.use_kernels(str(rng.choice(kernel_choice.available_kernels())))
    call = placed(make(rng), arena)
    what = f"{name}, FUZZ_SEED={seed}, kernels {kernel_choice.kernels()}"
    operation = getattr(_native, name)
    if rng.random() < 0.4:
        expected, given = expect(call), placed(call, arena)
        operation(**call)
        for key, value in expected.items():
            pairs = zip(call[key], value, strict=False) if isinstance(value, list) else [(call[key], value)]
            assert all(near(given, result, wanted) for result, wanted in pairs), f"{what}: {key} differs from NumPy"
    else:
        victims = [key for key, value in call.items() if isinstance(value, (np.ndarray, list))]
        key = str(rng.choice(victims))
        others = arrays_of(call)
        if isinstance(call[key], list):
            index = int(rng.integers(0, len(call[key])))
            if isinstance(call[key][index], np.ndarray):
                call[key][index] = damaged(call[key][index], rng, arena, others)
            else:
                call[key][index] = int(rng.choice([-1, 4, 99, 12, 0]))
        else:
            call[key] = damaged(call[key], rng, arena, others)
        for scalar in ("format", "rows", "k", "kv_heads"):
            if isinstance(call.get(scalar), int) and rng.random() < 0.2:
                call[scalar] = int(rng.choice([0, -1, 1, 4, 12, 31, 2**31, 2**40, 2**62, -(2**63)]))
        before = [a.copy() for a in arrays_of(call)]
        try:
            operation(**call)
        except (ValueError, TypeError):
            same = zip(arrays_of(call), before, strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in same), f"{what}: rejected {key}, but wrote"
    assert arena.intact(), f"{what}: wrote outside its arrays"


def test_every_exported_operation_is_fuzzed() -> None:
    """Only operations of the CPU: tests/qtensor/test_cuda_driver.py makes each call to a GPU fail."""
    exported = {name for name in dir(_native) if not name.lower().startswith(("_", "cuda"))}
    assert exported == set(OPERATIONS) | CONTROL


@pytest.mark.parametrize("name", OPERATIONS)
def test_fuzzed_calls_match_numpy_and_never_write_out_of_bounds(name: str) -> None:
    before = kernel_choice.kernels()
    try:
        if ONE_SEED is not None:
            one_call(name, int(ONE_SEED))
            return
        seed, end = 0, time.monotonic() + SECONDS / len(OPERATIONS)
        while seed < 10 or time.monotonic() < end:
            with np.errstate(all="ignore"):
                one_call(name, seed)
            seed += 1
        print(f"{name}: {seed} calls")
    finally:
        kernel_choice.use_kernels(before)
