"""Recorded operations, replayed as CUDA graphs.

In each layer, the attention kernel and the launches directly before it are fused into one launch, because a decode step
is a chain of dependent launches, and starting a launch takes longer than its computation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from notso.qtensor.backends.cuda.driver import Device, Graph, call_native
from notso.qtensor.errors import OperandError

# Function that launches an operation, given an upper bound on the number of tiles that a row reads.
Launch: TypeAlias = Callable[[int], None]

Rotation: TypeAlias = tuple[int, int, int]  # addresses of row numbers, cosines and sines
Places: TypeAlias = tuple[int, int, int, int, int, int]
PoolFacts: TypeAlias = tuple[int, int, int, int]

_NO_ROTATION: Rotation = (0, 0, 0)


@dataclass(frozen=True)
class RopeLaunch:
    """Launch of `rope`."""

    device: Device
    x: int
    shape: tuple[int, int, int]  # rows, heads, dimensions
    rotation: Rotation
    adjacent: bool

    def __call__(self, tiles: int) -> None:
        call_native(self.device.native.rope, self.x, *self.shape, *self.rotation, self.adjacent)


@dataclass(frozen=True)
class StoreLaunch:
    """Launch of `store_key_values`."""

    device: Device
    k: int
    v: int
    places: Places
    pool: PoolFacts
    window: PoolFacts

    def __call__(self, tiles: int) -> None:
        call_native(self.device.native.store_key_values, self.k, self.v, self.places, self.pool, self.window)


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch of `attention`."""

    device: Device
    q: int
    shape: tuple[int, int, int]
    places: Places
    pool: PoolFacts
    window: PoolFacts
    scale: float
    out: int

    def __call__(self, tiles: int) -> None:
        facts = self.places, self.pool, self.window, self.scale, tiles, self.out
        call_native(self.device.native.attention, self.q, self.shape[1], *facts)


@dataclass(frozen=True)
class _FusedLaunch:
    # A single launch of a layer's rotations (if any), `store_key_values` and `attention`.

    key_rotation: Rotation
    store: StoreLaunch
    query_rotation: Rotation
    attention: AttentionLaunch

    def __call__(self, tiles: int) -> None:
        store, read = self.store, self.attention
        arguments = self.key_rotation, store.k, store.v, store.places, self.query_rotation, read.q, read.shape[1]
        pools = read.places, read.pool, read.window
        call_native(read.device.native.store_and_attend, *arguments, *pools, read.scale, tiles, read.out)


def fuse_launches(launches: Sequence[Launch]) -> list[Launch]:
    """Return equivalent launches, with attention fused with the rotations and the storing directly before it."""
    fused: list[Launch] = []
    for launch in launches:
        fused.append(launch)
        if not isinstance(launch, AttentionLaunch):
            continue
        at = len(fused) - 2
        query_rotation, at = _preceding_rotation(fused, at, launch.q, launch.shape)
        store = fused[at] if at >= 0 else None
        if not isinstance(store, StoreLaunch) or store.pool != launch.pool or launch.q in (store.k, store.v):
            continue
        _, kv_heads, dim, _ = store.pool
        key_rotation, at = _preceding_rotation(fused, at - 1, store.k, (store.places[4], kv_heads, dim))
        fused[at + 1 :] = [_FusedLaunch(key_rotation, store, query_rotation, launch)]
    return fused


def _preceding_rotation(
    launches: Sequence[Launch], at: int, x: int, shape: tuple[int, int, int]
) -> tuple[Rotation, int]:
    # Returns the rotation of x by launch `at`, and the index of the launch before it. If launch `at` does not rotate
    # x, returns _NO_ROTATION and `at`.
    launch = launches[at] if at >= 0 else None
    if isinstance(launch, RopeLaunch) and launch.adjacent and (launch.x, launch.shape) == (x, shape):
        return launch.rotation, at - 1
    return _NO_ROTATION, at


# Function that checks array contents. May return the largest number of tiles that a row reads.
Check = Callable[[], int | None]


class RecordingBackend(Protocol):
    """A backend that can record operations."""

    device: Device
    recording: Program | None

    def flush(self) -> None: ...


class Program:
    """Recorded operations."""

    def __init__(self, backend: RecordingBackend) -> None:
        # The number of thread blocks in a graph is fixed, but the number needed depends on the number of tiles.
        # Therefore, one graph is captured for each power of two, when it is first needed. It is captured again when
        # scratch memory has moved, because it contains the old address.
        self._backend = backend
        self._checks: dict[Hashable, Check] = {}
        self._launches: list[Launch] = []
        self._used: list[object] = []
        self._graphs: dict[int, Graph] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, key: Hashable, check: Check, launch: Launch, used: object) -> None:
        # All layers read the same block table, so most checks are repetitions. Of checks with equal keys, which are
        # identical, only the first is kept.
        self._checks.setdefault(key, check)
        self._launches.append(launch)
        self._used.append(used)

    @contextmanager
    def record(self) -> Iterator[Program]:
        """Record operations. Raises OperandError if another program is being recorded."""
        if self._backend.recording is not None:
            raise OperandError("another program is being recorded")
        self._backend.recording = self
        try:
            yield self
        finally:
            self._backend.recording = None

    def run(self) -> None:
        """Check array contents and launch the graph. Raises OperandError."""
        tiles = power_of_two(max((check() or 0 for check in self._checks.values()), default=0))
        self._backend.flush()
        graph = self._graphs.get(tiles)
        while graph is None or graph.scratch_moves != self._backend.device.native.scratch_moves:
            graph = self._capture_graph(tiles)
        self._graphs[tiles] = graph
        graph.launch()

    def _capture_graph(self, tiles: int) -> Graph | None:
        device = self._backend.device
        moves = device.native.scratch_moves

        def launch_all() -> None:
            for launch in fuse_launches(self._launches):
                launch(tiles)

        graph = Graph(device, launch_all)
        # None if scratch memory moved during the capture, because earlier launches then contain its old address.
        return graph if graph.scratch_moves == moves else None


def power_of_two(count: int) -> int:
    """Return `count` rounded up to a power of two (0 for 0)."""
    return 1 << (count - 1).bit_length() if count else 0
