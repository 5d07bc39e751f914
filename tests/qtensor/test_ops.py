"""Every operation rejects invalid operands with OperandError before it writes anything (reliability NK1).

The operations are found by inspecting the module, so that none is omitted (NK2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import ops
from notso.qtensor.errors import NotsoError, OperandError
from notso.qtensor.formats import Q4_K, Q8_0
from notso.qtensor.tensor import QTensor

Array = npt.NDArray[Any]
Operands = dict[str, Any]

WEIGHT = QTensor("weight", Q8_0, (6, 64), np.zeros(6 * 68, np.uint8))
OTHER_WEIGHT = QTensor("other", Q8_0, (3, 64), np.zeros(3 * 68, np.uint8))


def f(*shape: int) -> npt.NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def i(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def places() -> Operands:
    return {"positions": i(0, 130, 5), "sequences": i(0, 1, 1), "tables": np.array([[0, 1], [2, 3]], np.int32)}


def pool() -> Operands:
    return {"data": two_runs("f16")}


def two_runs(format: ops.KVFormat) -> Any:
    """Create four blocks, two in each run."""
    return ops.key_value_pool(4, 2, 16, format).data.reshape(2, 2, 2, -1)


def pools() -> Operands:
    """Create pools of a format below 8 bits, with their tables and window."""
    tables = np.array([[3, 2], [1, 0]], np.int32)
    return {"data": two_runs("k4v4"), "window_tables": tables, "window": two_runs("k8v8")}


def with_pools(call: Callable[..., None], format: ops.KVFormat = "f16") -> Callable[..., None]:
    """Wrap an operation so that it is called with the bytes of its pools."""

    def run(data: Any, **operands: Any) -> None:
        if format != "f16":
            operands["window"] = operands.pop("window_tables"), ops.KeyValuePool("k8v8", 2, 16, 4, operands["window"])
        call(pool=ops.KeyValuePool(format, 2, 16, 4, data), **operands)

    return run


# For each operation: a function that creates valid operands, the names of those that it writes, and a call.
CASES: dict[str, tuple[Callable[[], Operands], set[str], Callable[..., None]]] = {
    "embed_rows": (lambda: {"ids": i(0, 5, 2), "out": f(3, 64)}, {"out"}, lambda **a: ops.embed_rows(WEIGHT, **a)),
    "gather_rows": (lambda: {"x": f(4, 5), "ids": i(3, 0), "out": f(2, 5)}, {"out"}, ops.gather_rows),
    "rms_norm": (
        lambda: {"x": f(3, 5), "weight": f(5), "out": f(3, 5)},
        {"out"},
        lambda **a: ops.rms_norm(eps=1e-6, **a),
    ),
    "matmul": (lambda: {"x": f(3, 64), "out": f(3, 6)}, {"out"}, lambda x, out: ops.matmul(x, WEIGHT, out)),
    "matmul_many": (
        lambda: {"x": f(3, 64), "one": f(3, 6), "two": f(3, 3)},
        {"one", "two"},
        lambda x, one, two: ops.matmul_many(x, [(WEIGHT, one), (OTHER_WEIGHT, two)]),
    ),
    "matmul_add": (lambda: {"x": f(3, 64), "out": f(3, 6)}, {"out"}, lambda x, out: ops.matmul_add(x, WEIGHT, out)),
    "matmul_gated": (
        lambda: {"x": f(3, 64), "norm": f(64), "out": f(3, 6)},
        {"out"},
        lambda x, norm, out: ops.matmul_gated(x, WEIGHT, WEIGHT, out, norm=ops.RMSNorm(norm, 1e-6)),
    ),
    "rope_table": (
        lambda: {"frequencies": np.ones(4), "positions": i(0, 7, 9), "cosine": f(3, 4), "sine": f(3, 4)},
        {"cosine", "sine"},
        lambda frequencies, positions, cosine, sine: ops.rope_table(frequencies, positions, (cosine, sine)),
    ),
    "rope": (
        lambda: {"x": f(3, 2, 8), "positions": i(0, 1, 9), "cosine": f(10, 4), "sine": f(10, 4)},
        {"x"},
        lambda x, positions, cosine, sine: ops.rope(x, positions, (cosine, sine), adjacent=True),
    ),
    "store_key_values": (
        lambda: {"k": f(3, 2, 16), "v": f(3, 2, 16), **places(), **pool()},
        {"data"},
        with_pools(ops.store_key_values),
    ),
    "attention": (
        lambda: {"q": f(3, 4, 16), **places(), **pool(), "out": f(3, 4, 16)},
        {"out"},
        with_pools(partial(ops.attention, scale=0.25)),
    ),
    "store_key_values, k4v4": (
        lambda: {"k": f(3, 2, 16), "v": f(3, 2, 16), **places(), **pools()},
        {"data", "window"},
        with_pools(ops.store_key_values, "k4v4"),
    ),
    "attention, k4v4": (
        lambda: {"q": f(3, 4, 16), **places(), **pools(), "out": f(3, 4, 16)},
        {"out"},
        with_pools(partial(ops.attention, scale=0.25), "k4v4"),
    ),
    "silu_mul": (lambda: {"gate": f(3, 5), "up": f(3, 5), "out": f(3, 5)}, {"out"}, ops.silu_mul),
    "add": (lambda: {"a": f(3, 5), "b": f(3, 5), "out": f(3, 5)}, {"out"}, ops.add),
    "softmax": (lambda: {"x": f(3, 5)}, {"x"}, ops.softmax),
    "argmax": (lambda: {"x": f(3, 5), "out": i(7, 7, 7)}, {"out"}, ops.argmax),
}
MAKERS = {"empty"}

# Dimensions that may have another length: rows to choose from, tables, and the width of a single operand.
FREE_SIDES = {
    ("gather_rows", "x", 0), ("softmax", "x", 0), ("softmax", "x", 1), ("argmax", "x", 1),
    ("store_key_values", "tables", 0),
    ("store_key_values", "tables", 1), ("store_key_values", "data", 2), ("attention", "data", 2),
    *((f"{name}, k4v4", pool, 2) for name in ("store_key_values", "attention") for pool in ("data", "window")),
    ("attention", "tables", 0), ("attention", "tables", 1), ("rope", "x", 1),
}  # fmt: skip


def test_every_public_operation_has_a_case() -> None:
    public = {
        name
        for name, value in vars(ops).items()
        if inspect.isfunction(value) and value.__module__ == ops.__name__ and not name.startswith("_")
    }
    assert public == {name.split(",")[0] for name in CASES} | MAKERS


@pytest.mark.parametrize("name", CASES)
def test_valid_operands_are_accepted(name: str) -> None:
    make, _, call = CASES[name]
    call(**make())


def _refuses(name: str, operands: Operands, what: str) -> None:
    before = {key: value.copy() for key, value in operands.items() if isinstance(value, np.ndarray)}
    with pytest.raises(OperandError) as caught:
        CASES[name][2](**operands)
        pytest.fail(f"{name} accepts {what}")
    assert "\n" not in str(caught.value) and isinstance(caught.value, NotsoError)
    for key, value in before.items():
        np.testing.assert_array_equal(operands[key], value, err_msg=f"{name} wrote {key} although it refused {what}")


def misaligned(a: Array) -> Array:
    room = np.zeros(a.nbytes + 1, np.uint8)
    view = room[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def altered(a: Array) -> Iterator[tuple[str, Any]]:
    """Yield variants of an operand that are invalid in one way."""
    yield "None", None
    yield "a list", a.tolist()
    for dtype in (
        np.float64,
        np.float32,
        np.float16,
        np.int64,
        np.int32,
        np.uint32,
        np.int16,
        np.uint16,
        np.bool_,
        object,
    ):
        if a.dtype != dtype:
            yield f"an array of {np.dtype(dtype)}", a.astype(dtype)
    if a.itemsize > 1:
        yield "the other byte order", a.astype(a.dtype.newbyteorder())
    yield "one dimension more", a[None]
    yield "one dimension less", a[0] if a.ndim == 1 else a.reshape(a.shape[0], -1) if a.ndim > 2 else a.reshape(-1)
    yield "every other item", np.repeat(a, 2, axis=-1)[..., ::2]
    yield "backwards", a[::-1]
    if a.ndim > 1:
        yield "columns first", np.asfortranarray(a)
        yield "a repeated row", np.broadcast_to(a[:1], a.shape)
    yield "misaligned", misaligned(a)


def cases_of_operands() -> Iterator[tuple[str, str]]:
    for name, (make, _, _) in CASES.items():
        for operand in make():
            yield name, operand


@pytest.mark.parametrize(("name", "operand"), list(cases_of_operands()))
def test_invalid_operands_are_rejected(name: str, operand: str) -> None:
    make, written, _ = CASES[name]
    for what, wrong in altered(make()[operand]):
        _refuses(name, {**make(), operand: wrong}, f"{operand} as {what}")
    sides = make()[operand].shape
    for axis, length in enumerate(sides):
        for other in (0, length - 1, length + 1):
            if (name, operand, axis) in FREE_SIDES and other:
                continue
            if (name, operand, axis) == ("softmax", "x", 0):
                continue  # zero rows are valid and do nothing
            shape = (*sides[:axis], other, *sides[axis + 1 :])
            wrong = np.zeros(shape, make()[operand].dtype)
            _refuses(name, {**make(), operand: wrong}, f"{operand} of shape {shape}")
    if operand in written:
        operands = make()
        operands[operand].flags.writeable = False
        _refuses(name, operands, f"a read-only {operand}")


@pytest.mark.parametrize("name", [name for name, (_, written, _) in CASES.items() if written])
def test_overlapping_outputs_are_rejected(name: str) -> None:
    """Output may be the same array as an input if documented, but must not overlap it otherwise."""
    make, written, _ = CASES[name]
    for out in written:
        for other, value in make().items():
            if other == out or not isinstance(value, np.ndarray):
                continue
            operands = make()
            target = operands[out]
            room = np.zeros(max(target.nbytes, value.nbytes) + 64, np.uint8)
            operands[out] = room[: target.nbytes].view(target.dtype).reshape(target.shape)
            operands[out][...] = target
            operands[other] = room[16 : 16 + value.nbytes].view(value.dtype).reshape(value.shape)
            if not np.may_share_memory(operands[out], operands[other]):
                operands[other] = room[4 : 4 + value.nbytes].view(value.dtype).reshape(value.shape)
            _refuses(name, operands, f"{out} over {other}")


@pytest.mark.parametrize("make_index", [0, -1], ids=["first row", "last row"])
@pytest.mark.parametrize(
    ("name", "operand", "limit"),
    [
        ("embed_rows", "ids", 6), ("gather_rows", "ids", 4), ("rope", "positions", 10),
        ("store_key_values", "positions", 256), ("store_key_values", "sequences", 2), ("store_key_values", "tables", 4),
        ("attention", "positions", 256), ("attention", "sequences", 2), ("attention", "tables", 4),
    ],
)  # fmt: skip
def test_out_of_range_contents_are_rejected(name: str, operand: str, limit: int, make_index: int) -> None:
    """Row numbers, positions, sequences and blocks are checked when the operation runs, eagerly or in a program."""
    make, _, call = CASES[name]
    for wrong in (-1, limit, limit + 1, -(2**31), 2**31 - 1, 2**30):
        operands = make()
        row = operands[operand]
        if operand == "tables":
            row[1 if make_index else 0, 0] = wrong  # a tile that a row of the batch uses
        else:
            row[make_index] = wrong
        _refuses(name, operands, f"{operand} with {wrong}")

        program = ops.Program()
        with program.record():
            call(**operands)
        before = {key: value.copy() for key, value in operands.items()}
        with pytest.raises(OperandError):
            program.run()
        for key, value in before.items():
            np.testing.assert_array_equal(operands[key], value, err_msg=f"{name} wrote {key}")


def test_blocks_beyond_the_position_are_not_checked() -> None:
    make, _, call = CASES["attention"]
    operands = make()
    operands["tables"][0, 1] = -1  # sequence 0 is at position 0, in its first tile
    call(**operands)


def test_operations_accept_zero_rows() -> None:
    none = {"positions": i(), "sequences": i(), "tables": np.zeros((1, 1), np.int32)}
    ops.embed_rows(WEIGHT, i(), f(0, 64))
    ops.gather_rows(f(0, 5), i(), f(0, 5))
    ops.rms_norm(f(0, 5), f(5), 1e-6, f(0, 5))
    ops.rope(f(0, 2, 8), i(), (f(3, 4), f(3, 4)), adjacent=False)
    for format in ("f16", "k8v8"):
        pool = ops.key_value_pool(1, 2, 16, format)
        ops.store_key_values(f(0, 2, 16), f(0, 2, 16), **none, pool=pool)
        ops.attention(f(0, 4, 16), **none, pool=pool, scale=1.0, out=f(0, 4, 16))
    ops.add(f(0, 5), f(0, 5), f(0, 5))
    ops.softmax(f(0, 5))
    ops.argmax(f(0, 5), i())


def test_mismatched_weights_are_rejected() -> None:
    with pytest.raises(OperandError):
        ops.matmul_many(f(3, 64), [])
    with pytest.raises(OperandError):
        ops.matmul(f(0, 64), WEIGHT, f(0, 6))
    narrow = QTensor("narrow", Q8_0, (6, 32), np.zeros(6 * 34, np.uint8))
    with pytest.raises(OperandError, match="narrow"):
        ops.matmul(f(3, 64), narrow, f(3, 6))
    with pytest.raises(OperandError):
        ops.embed_rows(narrow, i(0), f(1, 64))
    twice = f(3, 6)
    with pytest.raises(OperandError, match="overlaps"):
        ops.matmul_many(f(3, 64), [(WEIGHT, twice), (WEIGHT, twice)])
    for shape, length in (((2, 256), 143), ((2, 256), 2 * 144 + 1), ((1, 100), 144), ((0, 256), 0), ((), 0)):
        with pytest.raises(OperandError):
            QTensor("wrong", Q4_K, shape, np.zeros(length, np.uint8))


@pytest.mark.parametrize("sides", [(0, 1, 16), (1, 0, 16), (1, 1, 0), (1, 1, 8), (1, 1, 24), (-1, 1, 16)])
def test_invalid_pool_dimensions_are_rejected(sides: tuple[int, int, int]) -> None:
    with pytest.raises(OperandError):
        ops.key_value_pool(*sides)


@pytest.mark.parametrize(("heads", "dim"), [(0, 8), (2, 0), (2, 7)])
def test_rope_rejects_invalid_head_dimensions(heads: int, dim: int) -> None:
    table = np.zeros((3, dim // 2), np.float32)
    with pytest.raises(OperandError):
        ops.rope(f(2, heads, dim), i(0, 1), (table, table.copy()), adjacent=True)
