"""Protocol of the device backends: cpu/, cuda/, and one in numpy for tests.

Arrays belong to their backend and are opaque except for the interface of `Array`; only `upload`, `write` and
`download` exchange numpy arrays. Operations are bit-identical across backends: native/kernel_table.h defines their
arithmetic, and cpu/ops.py describes the shapes and dtypes of their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from notso.qtensor.formats import KVFormat
from notso.qtensor.tensor import QTensor
from notso.system.memory import MemoryLimit

# Row-major values in backend memory, with a `shape`. `array[i]`, `array[a:b]` and `reshape` return views of the same
# memory. The type is Any, because a precise type would make every class that holds an array generic.
Array: TypeAlias = Any

# A weight in the layout that the backend's operations require, with a `name`.
Weight: TypeAlias = Any

Host: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = Sequence[int] | Host


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Normalization of each row x to x / sqrt(mean(x^2) + eps) * weight; weight (K,) float32."""

    weight: Array
    eps: float


class Program(Protocol):
    """Recorded operations. Each run uses the current values of their arrays."""

    def __len__(self) -> int: ...

    def record(self) -> AbstractContextManager[Program]:
        """Record this thread's operations. Raises OperandError if already recording."""

    def run(self) -> None:
        """Run the operations in order. Raises OperandError for array values out of range."""


class KeyValuePool(Protocol):
    """Blocks of one layer's KV cache (native/cache_format.h); different threads may write different blocks."""

    @property
    def nbytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def read_block(self, block: int) -> bytes:
        """Return a block's bytes. Raises OperandError."""

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Write a block's bytes, in the format of `read_block`. Raises OperandError."""

    def block_memory(self, block: int) -> list[memoryview] | None:
        """Return a block's writable memory in the order of `read_block`, or None if the host cannot access it."""

    def copy_block(self, source: int, target: int) -> None: ...

    def touch_block(self, block: int) -> None: ...


class WeightArena(Protocol):
    """Memory that is faster to read than a mapped file."""

    @property
    def layout(self) -> str: ...

    def copy(self, *weights: Weight) -> tuple[Weight, ...]:
        """Copy weights that are read together. Raises QTensorError if the arena is full."""


class Backend(Protocol):
    """A device. Operations are called from one thread at a time."""

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> str:
        """Display name of the kernel family."""

    @property
    def threads(self) -> int:
        """Number of host threads that share an operation."""

    def memory(self, mapped_bytes: int = 0) -> MemoryLimit:
        """Return the available memory; mapped_bytes: size of the mapped weights."""

    def weight_bytes(self, tensor: QTensor) -> int:
        """Return the size of `weight(tensor)` in bytes."""

    def empty(self, rows: int, columns: int) -> Array: ...

    def upload(self, values: Host) -> Array:
        """Return contiguous `values` as an array; the caller must not change them later."""

    def write(self, array: Array, values: Numbers) -> None: ...

    def download(self, array: Array) -> Host:
        """Return an array's values, valid until the array is written to."""

    def weight(self, tensor: QTensor) -> Weight:
        """Prepare a tensor for operations; its file must stay open."""

    def weight_arena(self, size_bytes: int, count: int, *, is_requested: bool) -> WeightArena | None:
        """Reserve memory for `count` weights; return None if this would not speed up reading. Raises QTensorError.

        is_requested: whether the user requested packed weights, which may be slower for some batches.
        """

    @property
    def has_weight_arena(self) -> bool: ...

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
        """Return zeroed pools, one per layer. Raises OperandError or QTensorError."""
        # `large_pages`: use huge pages; unsuitable for sparsely written memory.

    def program(self) -> Program: ...

    # Operations; each raises OperandError for invalid operands.

    def embed_rows(self, weight: Weight, ids: Array, out: Array) -> None:
        """out[i] = weight[ids[i]]."""

    def gather_rows(self, x: Array, ids: Array, out: Array) -> None:
        """out[i] = x[ids[i]]."""

    def matmul(self, x: Array, weight: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        """out = x @ weight.T, with x normalized first if `norm` is given."""

    def matmul_many(
        self, x: Array, products: Sequence[tuple[Weight, Array]], *, norm: RMSNorm | None = None
    ) -> None: ...

    def matmul_add(self, x: Array, weight: Weight, out: Array) -> None:
        """out += x @ weight.T."""

    def matmul_gated(self, x: Array, gate: Weight, up: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        """out = silu(x @ gate.T) * (x @ up.T)."""

    def silu_mul(self, gate: Array, up: Array, out: Array) -> None:
        """out = silu(gate) * up, computed as in `matmul_gated`; out may be gate or up."""

    def rope_table(self, frequencies: Array, positions: Array, table: tuple[Array, Array], factor: float = 1.0) -> None:
        """table = factor * (cos, sin) of position * frequency."""

    def rope(self, x: Array, positions: Array, table: tuple[Array, Array], *, adjacent: bool) -> None:
        """Rotate x in place by rows `positions` of the table. adjacent: rotate pairs (2i, 2i + 1)."""

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
        """Store k and v; tables[s, t] is the block of tile t of sequence s."""

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
        """out = causal attention of q over the cache."""
