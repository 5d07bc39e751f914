"""CUDA backend. Arrays are in device memory; uploads and downloads copy them.

Operations check shapes when they are called, and array contents before they launch kernels (see
native/cuda/launches.h). Results are bit-identical to the CPU's. The host waits for the device only when it downloads
arrays, uploads weights, or frees memory or a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cuda.arrays import DeviceArray, DeviceWeight, HostMirror
from notso.qtensor.backends.cuda.driver import Device, DeviceMemory, call_native, weight_bytes
from notso.qtensor.backends.cuda.program import AttentionLaunch, Check, Launch, Places, Program, RopeLaunch, StoreLaunch
from notso.qtensor.backends.protocol import Host, Numbers, RMSNorm
from notso.qtensor.errors import OperandError
from notso.qtensor.formats import KV_FORMAT_NUMBERS, KV_FORMATS, TILE_POSITIONS, KVFormat, kv_block_bytes
from notso.qtensor.tensor import QTensor
from notso.system.memory import MemoryLimit


class DevicePool:
    """Blocks of one layer's cache, initially zero. The host can access them only by copying."""

    def __init__(self, device: Device, blocks: int, kv_heads: int, head_dim: int, format: KVFormat) -> None:
        if blocks < 1:
            raise OperandError(f"a cache cannot have {blocks} blocks")
        self.format = format
        self.blocks = blocks
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_bytes = kv_block_bytes(format, kv_heads, head_dim)
        self.nbytes = blocks * self.block_bytes
        self._memory = DeviceMemory(device, self.nbytes, zeroed=True)
        self.facts = self._memory.address, kv_heads, head_dim, KV_FORMAT_NUMBERS[format]

    @property
    def needs_window(self) -> bool:
        return KV_FORMATS[self.format].is_low_bit

    def read_block(self, block: int) -> bytes:
        content = np.empty(self.block_bytes, np.uint8)
        self._memory.download(content, self._offset(block))
        return content.tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        if len(data) != self.block_bytes:
            raise OperandError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        self._memory.upload(np.frombuffer(data, np.uint8), self._offset(block))

    def block_memory(self, block: int) -> None:
        """Return None: the host cannot access the memory."""

    def copy_block(self, source: int, target: int) -> None:
        self._memory.copy(self._offset(target), self._offset(source), self.block_bytes)

    def touch_block(self, block: int) -> None:
        pass  # all memory is allocated at construction

    def _offset(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise OperandError(f"block {block} is outside the pool of {self.blocks}")
        return block * self.block_bytes


_PLAIN, _ADD, _GATED = 0, 1, 2  # how a product is combined with its output, numbered as in native/cuda/one_row.h


class CUDA:
    """Backend for GPU number `number`. Raises DeviceError if it is unusable."""

    # Methods may raise DeviceMemoryError or DeviceLostError. After a DeviceLostError, the backend is unusable.
    threads = 1
    has_weight_arena = False

    def __init__(self, number: int = 0) -> None:
        self.device = Device(number)
        self.recording: Program | None = None
        self._unflushed = dict[int, Any]()  # by id: host copies (`HostMirror`) with changes that have not been uploaded

    @property
    def kernels(self) -> str:
        return f"cuda sm_{self.device.architecture}"

    @property
    def name(self) -> str:
        return f"cuda:{self.device.number} ({self.device.name})"

    # Memory

    def memory(self, mapped_bytes: int = 0) -> MemoryLimit:
        return MemoryLimit(f"cuda:{self.device.number}", self.device.free_bytes())

    weight_bytes = staticmethod(weight_bytes)

    def empty(self, rows: int, columns: int) -> DeviceArray:
        if rows < 0 or columns < 1:
            raise OperandError(f"an array cannot have the shape {rows} x {columns}")
        return DeviceArray(DeviceMemory(self.device, 4 * rows * columns), (rows, columns), np.dtype(np.float32))

    def upload(self, values: Host) -> DeviceArray:
        memory = DeviceMemory(self.device, values.nbytes)
        memory.upload(np.ascontiguousarray(values))
        mirror = HostMirror(values.reshape(-1).copy(), memory) if values.dtype == np.int32 else None
        return DeviceArray(memory, values.shape, values.dtype, mirror=mirror)

    def write(self, array: DeviceArray, values: Numbers) -> None:
        data = np.asarray(values, array.dtype)
        if data.shape != array.shape:
            raise OperandError(f"shape {data.shape} does not match the array's {array.shape}")
        # Integers are uploaded by `flush`, before the next launch.
        if array.mirror is None:
            array.memory.upload(np.ascontiguousarray(data), array.offset)
            return
        array.numbers[...] = data
        begin = array.offset // 4
        array.mirror.mark_changed(begin, begin + array.size)
        self._unflushed[id(array.mirror)] = array.mirror

    def flush(self) -> None:
        while self._unflushed:
            self._unflushed.popitem()[1].flush()

    def download(self, array: DeviceArray) -> Host:
        if array.mirror is not None:
            return array.numbers.copy()
        values = np.empty(array.shape, array.dtype)
        array.memory.download(values, array.offset)  # waits for pending work
        return values

    def weight(self, tensor: QTensor) -> DeviceWeight:
        return DeviceWeight(self.device, tensor)

    def weight_arena(self, size_bytes: int, count: int, *, is_requested: bool) -> None:
        """Return None: `weight` already copies to device memory."""

    def key_value_pools(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        head_dim: int,
        format: KVFormat,
        *,
        large_pages: bool = True,
    ) -> Sequence[DevicePool]:
        return [DevicePool(self.device, blocks, kv_heads, head_dim, format) for _ in range(layers)]

    def program(self) -> Program:
        return Program(self)

    def _dispatch(self, key: Hashable, check: Check, launch: Launch, *used: object) -> None:
        # Launches receive the number of tiles that `check` returns; only attention uses it.
        if self.recording is not None:
            self.recording.add(key, check, launch, used)
            return
        tiles = check() or 0
        self.flush()
        launch(tiles)

    # Operations

    def embed_rows(self, weight: DeviceWeight, ids: DeviceArray, out: DeviceArray) -> None:
        _expect_shape("out", out, (ids.size, weight.columns))
        if ids.size:
            native, args = self.device.native, (weight.facts, ids.address, ids.size, out.address)
            check = partial(check_below, "row", ids, weight.rows)
            key = "embed", ids.key, weight.rows
            self._dispatch(key, check, lambda _: call_native(native.embed_rows, *args), weight, out)

    def gather_rows(self, x: DeviceArray, ids: DeviceArray, out: DeviceArray) -> None:
        _expect_shape("out", out, (ids.size, x.shape[1]))
        if ids.size:
            native, args = self.device.native, (x.address, ids.address, ids.size, x.shape[1], out.address)
            check = partial(check_below, "row", ids, x.shape[0])
            key = "gather", ids.key, x.shape[0]
            self._dispatch(key, check, lambda _: call_native(native.gather_rows, *args), x, out)

    def matmul(self, x: DeviceArray, weight: DeviceWeight, out: DeviceArray, *, norm: RMSNorm | None = None) -> None:
        self.matmul_many(x, [(weight, out)], norm=norm)

    def matmul_add(self, x: DeviceArray, weight: DeviceWeight, out: DeviceArray) -> None:
        self.matmul_many(x, [(weight, out)], join=_ADD)

    def matmul_gated(
        self, x: DeviceArray, gate: DeviceWeight, up: DeviceWeight, out: DeviceArray, *, norm: RMSNorm | None = None
    ) -> None:
        self.matmul_many(x, [(gate, out), (up, out)], norm=norm, join=_GATED)

    def matmul_many(
        self,
        x: DeviceArray,
        products: Sequence[tuple[DeviceWeight, DeviceArray]],
        *,
        norm: RMSNorm | None = None,
        join: int = _PLAIN,
    ) -> None:
        if len(x.shape) != 2 or not products or not x.size:
            raise OperandError("matmul needs at least one weight and one row")
        for weight, out in products:
            if weight.columns != x.shape[1]:
                raise OperandError(f"{weight.name or 'weight'} has {weight.columns} columns, but x has {x.shape[1]}")
            _expect_shape("out", out, (x.shape[0], weight.rows))
        if norm is not None:
            _expect_shape("norm", norm.weight, x.shape[1:])
        each = [(weight.facts, out.address) for weight, out in products]
        normed = (0, 0.0) if norm is None else (norm.weight.address, float(norm.eps))
        native, args = self.device.native, (x.address, *x.shape, each, *normed, join)
        self._dispatch("matmul", lambda: None, lambda _: call_native(native.matmul, *args), x, products, norm)

    def silu_mul(self, gate: DeviceArray, up: DeviceArray, out: DeviceArray) -> None:
        for name, array in (("up", up), ("out", out)):
            _expect_shape(name, array, gate.shape)
        if gate.size:
            native, args = self.device.native, (gate.address, up.address, gate.size, out.address)
            self._dispatch("silu_mul", lambda: None, lambda _: call_native(native.silu_mul, *args), gate, up, out)

    def rope_table(
        self,
        frequencies: DeviceArray,
        positions: DeviceArray,
        table: tuple[DeviceArray, DeviceArray],
        factor: float = 1.0,
    ) -> None:
        rows, pairs = positions.size, frequencies.size
        for name, out in zip(("cosine", "sine"), table, strict=True):
            _expect_shape(name, out, (rows, pairs))

        def check() -> None:
            negative = positions.numbers[positions.numbers < 0]
            if negative.size:
                raise OperandError(f"position {negative[0]} is negative")

        if rows:
            args = frequencies.address, pairs, positions.address, rows, float(factor), *(out.address for out in table)
            key = "table", positions.key
            self._dispatch(key, check, lambda _: call_native(self.device.native.rope_table, *args), frequencies, table)

    def rope(
        self, x: DeviceArray, positions: DeviceArray, table: tuple[DeviceArray, DeviceArray], *, adjacent: bool
    ) -> None:
        rows, heads, dim = x.shape
        length = table[0].shape[0]
        _expect_shape("positions", positions, (rows,))
        for name, of_table in zip(("cosine", "sine"), table, strict=True):
            _expect_shape(name, of_table, (length, dim // 2))
        if rows:
            check = partial(check_below, "position", positions, length)
            rotation = positions.address, table[0].address, table[1].address
            launch = RopeLaunch(self.device, x.address, (rows, heads, dim), rotation, adjacent)
            self._dispatch(("rope", positions.key, length), check, launch, x, table)

    def store_key_values(
        self,
        k: DeviceArray,
        v: DeviceArray,
        positions: DeviceArray,
        sequences: DeviceArray,
        tables: DeviceArray,
        pool: DevicePool,
        window: Window | None = None,
    ) -> None:
        _expect_shape("k", k, (positions.size, pool.kv_heads, pool.head_dim))
        _expect_shape("v", v, k.shape)
        key, places = _place_arguments(positions, sequences, tables, pool, window)
        if positions.size:
            check = partial(check_written, positions, sequences, tables, pool, window)
            facts = pool.facts, (window[1] if window else pool).facts
            launch = StoreLaunch(self.device, k.address, v.address, places, *facts)
            self._dispatch(("store", *key), check, launch, k, v, pool, window)

    def attention(
        self,
        q: DeviceArray,
        positions: DeviceArray,
        sequences: DeviceArray,
        tables: DeviceArray,
        pool: DevicePool,
        scale: float,
        out: DeviceArray,
        window: Window | None = None,
    ) -> None:
        rows, heads, dim = q.shape
        _expect_shape("out", out, q.shape)
        _expect_shape("q", q, (positions.size, heads, pool.head_dim))
        if heads % pool.kv_heads:
            raise OperandError(f"{heads} query heads cannot share {pool.kv_heads} KV heads")
        key, places = _place_arguments(positions, sequences, tables, pool, window)
        facts = places, pool.facts, (window[1] if window else pool).facts, float(scale), out.address
        if rows:
            check = partial(check_read, positions, sequences, tables, pool, window)
            launch = AttentionLaunch(self.device, q.address, (rows, heads, dim), *facts)
            self._dispatch(("attention", *key), check, launch, q, out, pool, window)


def _expect_shape(name: str, array: DeviceArray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise OperandError(f"{name} must have shape {expected}, not {array.shape}")


def _place_arguments(
    positions: DeviceArray, sequences: DeviceArray, tables: DeviceArray, pool: DevicePool, window: Window | None
) -> tuple[tuple[Hashable, ...], Places]:
    if (window is not None) != pool.needs_window:
        raise OperandError(f"KV format {pool.format} {'needs a' if pool.needs_window else 'has no'} window pool")
    _expect_shape("sequences", sequences, positions.shape)
    windows = 0
    if window is not None:
        _expect_shape("window tables", window[0], tables.shape)
        windows = window[0].address
    key = positions.key, sequences.key, tables.key, pool.blocks, windows, window[1].blocks if window else 0
    return key, (positions.address, sequences.address, tables.address, windows, positions.size, tables.shape[1])


Integers = npt.NDArray[np.int32]
Window: TypeAlias = tuple[DeviceArray, DevicePool]


def check_below(what: str, array: DeviceArray, limit: int) -> None:
    """Raise OperandError if a value is outside 0..limit-1."""
    numbers = array.numbers
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        raise OperandError(f"{what} {numbers[wrong][0]} is outside 0..{limit - 1}")


def check_rows(positions: DeviceArray, sequences: DeviceArray, tables: DeviceArray) -> tuple[Integers, Integers]:
    """Return the tile and sequence of each row. Raises OperandError unless all of them exist."""
    places, rows = positions.numbers, sequences.numbers
    count, length = tables.shape
    wrong = (rows < 0) | (rows >= count)
    if wrong.any():
        raise OperandError(f"row {int(wrong.argmax())} refers to a sequence that does not exist")
    wrong = (places < 0) | (places >= length * TILE_POSITIONS)
    if wrong.any():
        raise OperandError(f"position {places[wrong][0]} is outside the block table")
    return places // TILE_POSITIONS, rows


def check_blocks(blocks: Integers, pool: DevicePool) -> None:
    """Raise OperandError unless all blocks are in the pool."""
    wrong = (blocks < 0) | (blocks >= pool.blocks)
    if wrong.any():
        raise OperandError(f"block {blocks[wrong][0]} is outside the pool of {pool.blocks}")


def check_written(
    positions: DeviceArray, sequences: DeviceArray, tables: DeviceArray, pool: DevicePool, window: Window | None
) -> None:
    """Raise OperandError unless each row has a block to be stored in."""
    tiles, rows = check_rows(positions, sequences, tables)
    blocks = tables.numbers[rows, tiles]
    if window is None:
        check_blocks(blocks, pool)
        return
    window_blocks = window[0].numbers[rows, tiles]
    unplaced = (blocks == -1) & (window_blocks == -1)
    if unplaced.any():
        raise OperandError(f"row {int(unplaced.argmax())} has no block to be stored in")
    check_blocks(blocks[blocks != -1], pool)
    check_blocks(window_blocks[window_blocks != -1], window[1])


def check_read(
    positions: DeviceArray, sequences: DeviceArray, tables: DeviceArray, pool: DevicePool, window: Window | None
) -> int:
    """Return the largest number of tiles that a row reads. Raises OperandError for invalid rows or blocks."""
    tiles, rows = check_rows(positions, sequences, tables)
    if window is not None:
        windows = window[0].numbers
        check_blocks(windows[rows, tiles], window[1])
        check_blocks(windows[rows, 0], window[1])
    first, blocks = 0 if window is None else 1, tables.numbers
    for sequence in np.unique(rows):
        last = int(tiles[rows == sequence].max())
        check_blocks(blocks[sequence, first : last + (window is None)], pool)
    return int(tiles.max()) + 1
