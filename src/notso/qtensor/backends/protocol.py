"""What a device must do for a model to run on it. The CPU is the first (cpu/); tests hold a second, in numpy.

Arrays are the backend's own: made by it, read and written by its operations, and opaque to everybody else but for what
`Array` says. numpy stands at the border, in `upload`, `write` and `download`. An operation gives the same bits on every
backend; the arithmetic of each is written down in native/kernel_table.h, its operands in cpu/ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from notso.qtensor.host_memory import MemoryLimit
from notso.qtensor.kv_formats import KVFormat
from notso.qtensor.tensor import QTensor

Array: TypeAlias = Any
"""Numbers in a backend's memory, row after row. Others may ask for its `shape`, for `array[i]` and `array[a:b]` of the
first side, and for `array.reshape(...)`, all of which lie in the same memory. (A type of its own would have to be a
parameter of every class that holds one.)"""

Weight: TypeAlias = Any
"""A tensor of blocks where the operations read it. Others may ask for its `name`."""

Host: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = Sequence[int] | Host


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """The normalisation of a matmul's input: x * (1 / sqrt(mean(x^2) + eps)) * weight per row; weight (K,) float32."""

    weight: Array
    eps: float


class Program(Protocol):
    """Operations captured once and replayed. Holds on to every array they use, whose contents are read anew."""

    def __len__(self) -> int: ...

    def record(self) -> AbstractContextManager[Program]:
        """Keep the operations called in this thread instead of running them. Raises OperandError if one already is."""

    def run(self) -> None:
        """Run them in order. Raises OperandError where an array holds something out of range."""


class KeyValuePool(Protocol):
    """Blocks of one layer's cache. The bytes of a block are the same on every backend (native/cache_format.h).

    Different blocks may be written by several threads at a time.
    """

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""

    def read_block(self, block: int) -> bytes:
        """A copy of a block. Raises OperandError if there is none."""

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Put back what `read_block` gave. Raises OperandError unless it has block_bytes bytes."""

    def block_memory(self, block: int) -> list[memoryview] | None:
        """Where a block lies, to be written in the order of `read_block`; None where the host cannot reach it."""

    def copy_block(self, source: int, target: int) -> None:
        """Make one block equal to another."""

    def touch_block(self, block: int) -> None:
        """Have memory for a block that is written soon, if memory is taken when it is first written."""


class WeightArena(Protocol):
    """Memory that weights are read faster from than from where `weight` leaves them."""

    def copy(self, weight: Weight) -> Weight:
        """The same weight in this memory. Raises QTensorError when it is full."""


class Backend(Protocol):
    """One device. Its operations are called from one thread at a time.

    Letters in shapes: L rows, C width, K values per weight row, N weight rows, H heads, KH heads of keys and values,
    D head dimension, S sequences, T tiles of a sequence.
    """

    @property
    def name(self) -> str:
        """Which device, for people: cpu, or cuda:0 and what it is called."""

    @property
    def kernels(self) -> str:
        """What runs the operations, for people: a kernel family."""

    @property
    def threads(self) -> int:
        """Threads of the host that share an operation."""

    # Memory

    def memory(self, mapped_bytes: int = 0) -> MemoryLimit:
        """What there is for weights, cache and steps. mapped_bytes: of the weights, so much is mapped already."""

    def weight_bytes(self, tensor: QTensor) -> int:
        """What `weight` would take. Raises DeviceError where the device has no kernels for its format."""

    def empty(self, rows: int, columns: int) -> Array:
        """(rows, columns) float32, with whatever lies there."""

    def upload(self, values: Host) -> Array:
        """`values`, contiguous, as an array; the caller gives them away."""

    def write(self, array: Array, values: Numbers) -> None:
        """Fill an array with as many numbers from the host."""

    def download(self, array: Array) -> Host:
        """An array's numbers, valid until it is written to."""

    def weight(self, tensor: QTensor) -> Weight:
        """A file's tensor as the operations read it. The file stays open as long as it is used."""

    def weight_arena(self, size_bytes: int, count: int) -> WeightArena | None:
        """Room for `count` weights of so many bytes together; None where weights lie best already.

        Raises QTensorError when it cannot be had."""

    @property
    def has_weight_arena(self) -> bool:
        """Whether there is such memory."""

    def key_value_pools(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        head_dim: int,
        format: KVFormat,
        *,
        large_pages: bool = True,
    ) -> Sequence[KeyValuePool]:
        """One for each layer, of zeros. large_pages: nearly all of it will be written. Raises OperandError or
        QTensorError."""

    def program(self) -> Program:
        """Nothing captured yet."""

    # Operations; each raises OperandError for operands it cannot take

    def embed_rows(self, weight: Weight, ids: Array, out: Array) -> None:
        """out[i] = row ids[i] of `weight`, dequantised. ids (L,) int32, out (L, K) float32."""

    def gather_rows(self, x: Array, ids: Array, out: Array) -> None:
        """out[i] = x[ids[i]]. x (L, C) float32, ids (M,) int32, out (M, C) float32."""

    def matmul(self, x: Array, weight: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        """out = x @ weight.T. x (L, K), weight (N, K), out (L, N) float32; with `norm` x is normalised first."""

    def matmul_many(self, x: Array, products: Sequence[tuple[Weight, Array]], *, norm: RMSNorm | None = None) -> None:
        """`matmul` of the same x with several weights."""

    def matmul_add(self, x: Array, weight: Weight, out: Array) -> None:
        """out = out + x @ weight.T."""

    def matmul_gated(self, x: Array, gate: Weight, up: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        """out = silu(x @ gate.T) * (x @ up.T)."""

    def silu_mul(self, gate: Array, up: Array, out: Array) -> None:
        """out = silu(gate) * up, all (L, C) float32; out may be one of them. With `matmul_many` the bits of
        `matmul_gated`."""

    def rope_table(self, frequencies: Array, positions: Array, table: tuple[Array, Array], factor: float = 1.0) -> None:
        """Fill (L, D/2) each with factor * cosine and sine of position * frequency; frequencies (D/2,) float64."""

    def rope(self, x: Array, positions: Array, table: tuple[Array, Array], *, adjacent: bool) -> None:
        """Rotate every head of x (L, H, D) in place by row positions[i] of the table. adjacent: pairs (2i, 2i + 1)."""

    def store_key_values(
        self,
        k: Array,
        v: Array,
        positions: Array,
        sequences: Array,
        tables: Array,
        pool: Any,
        window: tuple[Array, Any] | None = None,
    ) -> None:
        """Write k and v (L, KH, D) into the cache; tables (S, T) int32 names the block of each tile."""

    def attention(
        self,
        q: Array,
        positions: Array,
        sequences: Array,
        tables: Array,
        pool: Any,
        scale: float,
        out: Array,
        window: tuple[Array, Any] | None = None,
    ) -> None:
        """Causal attention of q (L, H, D) over the cache into out (L, H, D)."""
