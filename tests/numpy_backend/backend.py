"""The NumPy backend: a short implementation of the protocol `notso.qtensor.Backend`.

Its arrays are opaque, and its cache blocks have no host address, so that code outside notso.qtensor that depends on
either fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from notso.qtensor import MIB, KVFormat, MemoryLimit, QTensor, RMSNorm
from notso.qtensor.reference import kv_cache
from notso.qtensor.reference import ops as reference
from numpy_backend import arithmetic
from numpy_backend.pool import NumpyPool

Host = npt.NDArray[Any]


class OpaqueArray:
    """Array with only the members of the protocol `Array`."""

    def __init__(self, values: Host) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: int | slice) -> OpaqueArray:
        return OpaqueArray(self.values[index])

    def reshape(self, *shape: int | tuple[int, ...]) -> OpaqueArray:
        reshaped = OpaqueArray(self.values.reshape(*shape))
        assert np.shares_memory(reshaped.values, self.values) or not self.values.size
        return reshaped

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this array is in a backend's memory; download it")


class OpaqueWeight:
    """Uploaded tensor."""

    def __init__(self, tensor: QTensor) -> None:
        self.name = tensor.name
        self.tensor = QTensor(tensor.name, tensor.format, tensor.shape, tensor.data.copy())


class NumpyProgram:
    """Calls recorded for replay."""

    def __init__(self, backend: NumpyBackend) -> None:
        self._backend = backend
        self.steps: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self.steps)

    @contextmanager
    def record(self) -> Iterator[NumpyProgram]:
        self._backend.recording = self
        try:
            yield self
        finally:
            self._backend.recording = None

    def run(self) -> None:
        for step in self.steps:
            step()


class NumpyBackend:
    """`available_bytes`: the reported memory."""

    name = "numpy"
    kernels = "numpy"
    threads = 1
    has_weight_arena = False

    def __init__(self, available_bytes: int = 4096 * MIB) -> None:
        self.available_bytes = available_bytes
        self.recording: NumpyProgram | None = None
        self.weights = list[str]()

    def memory(self, mapped_bytes: int = 0) -> MemoryLimit:
        return MemoryLimit("numpy", self.available_bytes)

    def weight_bytes(self, tensor: QTensor) -> int:
        return tensor.nbytes

    def empty(self, rows: int, columns: int) -> OpaqueArray:
        return OpaqueArray(np.full((rows, columns), np.nan, np.float32))

    def upload(self, values: Host) -> OpaqueArray:
        return OpaqueArray(values.copy())

    def write(self, array: OpaqueArray, values: Sequence[int] | Host) -> None:
        array.values[:] = values

    def download(self, array: OpaqueArray) -> Host:
        return array.values.copy()

    def weight(self, tensor: QTensor) -> OpaqueWeight:
        self.weights.append(tensor.name)
        return OpaqueWeight(tensor)

    def weight_arena(self, size_bytes: int, count: int, *, is_requested: bool) -> None:
        return None

    def key_value_pools(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        head_dim: int,
        format: KVFormat,
        *,
        large_pages: bool = True,
    ) -> list[NumpyPool]:
        return [NumpyPool(blocks, kv_heads, head_dim, format) for _ in range(layers)]

    def program(self) -> NumpyProgram:
        return NumpyProgram(self)

    def _do(self, step: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.steps.append(step)
        else:
            step()

    # Operations

    def embed_rows(self, weight: OpaqueWeight, ids: OpaqueArray, out: OpaqueArray) -> None:
        self._do(lambda: _put(out, reference.embedding_rows(weight.tensor, ids.values)))

    def gather_rows(self, x: OpaqueArray, ids: OpaqueArray, out: OpaqueArray) -> None:
        self._do(lambda: _put(out, x.values[ids.values]))

    def matmul(self, x: OpaqueArray, weight: OpaqueWeight, out: OpaqueArray, *, norm: RMSNorm | None = None) -> None:
        self._do(lambda: _put(out, _product(x, weight, norm)))

    def matmul_many(
        self, x: OpaqueArray, products: Sequence[tuple[OpaqueWeight, OpaqueArray]], *, norm: RMSNorm | None = None
    ) -> None:
        for weight, out in products:
            self.matmul(x, weight, out, norm=norm)

    def matmul_add(self, x: OpaqueArray, weight: OpaqueWeight, out: OpaqueArray) -> None:
        self._do(lambda: _put(out, out.values + _product(x, weight, None)))

    def matmul_gated(
        self, x: OpaqueArray, gate: OpaqueWeight, up: OpaqueWeight, out: OpaqueArray, *, norm: RMSNorm | None = None
    ) -> None:
        self._do(lambda: _put(out, arithmetic.silu_mul(_product(x, gate, norm), _product(x, up, norm))))

    def silu_mul(self, gate: OpaqueArray, up: OpaqueArray, out: OpaqueArray) -> None:
        self._do(lambda: _put(out, arithmetic.silu_mul(gate.values, up.values)))

    def rope_table(
        self,
        frequencies: OpaqueArray,
        positions: OpaqueArray,
        table: tuple[OpaqueArray, OpaqueArray],
        factor: float = 1.0,
    ) -> None:
        def step() -> None:
            made = arithmetic.rope_table(frequencies.values, positions.values, factor)
            for out, values in zip(table, made, strict=True):
                _put(out, values)

        self._do(step)

    def rope(
        self, x: OpaqueArray, positions: OpaqueArray, table: tuple[OpaqueArray, OpaqueArray], *, adjacent: bool
    ) -> None:
        def step() -> None:
            cosine, sine = (part.values[positions.values] for part in table)
            _put(x, arithmetic.rope(x.values, cosine, sine, adjacent=adjacent))

        self._do(step)

    def store_key_values(
        self,
        k: OpaqueArray,
        v: OpaqueArray,
        positions: OpaqueArray,
        sequences: OpaqueArray,
        tables: OpaqueArray,
        pool: NumpyPool,
        recent: tuple[OpaqueArray, NumpyPool] | None = None,
    ) -> None:
        def step() -> None:
            for of_rows, to in ((tables, pool), *([] if recent is None else [recent])):
                to.put(k.values, v.values, positions.values, of_rows.values[sequences.values])

        self._do(step)

    def attention(
        self,
        q: OpaqueArray,
        positions: OpaqueArray,
        sequences: OpaqueArray,
        tables: OpaqueArray,
        pool: NumpyPool,
        scale: float,
        out: OpaqueArray,
        recent: tuple[OpaqueArray, NumpyPool] | None = None,
    ) -> None:
        def step() -> None:
            for sequence in set(sequences.values.tolist()):
                at = sequences.values == sequence
                windows = None if recent is None else (recent[0].values[sequence], recent[1])
                rows = q.values[at], positions.values[at], tables.values[sequence]
                out.values[at] = _attended(*rows, pool, scale, windows)

        self._do(step)


def _put(out: OpaqueArray, values: Host) -> None:
    assert out.values.shape == values.shape and out.values.dtype == values.dtype
    out.values[:] = values


def _product(x: OpaqueArray, weight: OpaqueWeight, norm: RMSNorm | None) -> Host:
    values = x.values if norm is None else arithmetic.rms_norm(x.values, norm.weight.values, norm.eps)
    return arithmetic.matmul(values, weight.tensor)


def _attended(
    q: Host, positions: Host, table: Host, pool: NumpyPool, scale: float, windows: tuple[Host, NumpyPool] | None
) -> Host:
    """Compute attention for the rows of one sequence."""
    if pool.format == "f16":
        k, v = pool.halves(table, int(positions.max()) + 1)
        return arithmetic.attention(q, k, v, positions + 1, scale)
    rows = []
    for row, position in zip(q, positions.tolist(), strict=True):
        keys, values = pool.rounded(table, position + 1, windows)
        rows.append(kv_cache.attention(row[None], keys, values, position, scale))
    return np.concatenate(rows)
