"""Captured operations, replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from notso.qtensor.backends.cuda.driver import Device, Graph
from notso.qtensor.backends.cuda.joined import Launch, joined
from notso.qtensor.errors import OperandError

# Checks array contents and returns the most tiles that a row reads (0: none).
Check = Callable[[], int]


class Recorder(Protocol):
    """What a program needs of its backend."""

    device: Device
    recording: Program | None

    def flush(self) -> None:
        """Upload changed integer arrays."""


class Program:
    """Recorded operations."""

    def __init__(self, backend: Recorder) -> None:
        # Captured at the first run, again when scratch memory has moved, and once per power of two of tiles: the number
        # of thread blocks in a graph is fixed.
        self._backend = backend
        self._checks: dict[Hashable, Check] = {}
        self._launches: list[Launch] = []
        self._used: list[object] = []
        self._graphs: dict[int, Graph] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, key: Hashable, check: Check, launch: Launch, used: object) -> None:
        """Record an operation and the arrays that it uses."""
        # Checks with equal keys are identical: every layer reads the same block table.
        self._checks.setdefault(key, check)
        self._launches.append(launch)
        self._used.append(used)

    @contextmanager
    def record(self) -> Iterator[Program]:
        """Record operations. Raises OperandError if already recording."""
        if self._backend.recording is not None:
            raise OperandError("another program is being captured")
        self._backend.recording = self
        try:
            yield self
        finally:
            self._backend.recording = None

    def run(self) -> None:
        """Check array contents and launch. Raises OperandError."""
        tiles = power_of_two(max((check() for check in self._checks.values()), default=0))
        self._backend.flush()
        graph = self._graphs.get(tiles)
        while graph is None or graph.scratch_moves != self._backend.device.native.scratch_moves:
            graph = self._captured(tiles)
        self._graphs[tiles] = graph
        graph.launch()

    def _captured(self, tiles: int) -> Graph | None:
        device = self._backend.device
        moves = device.native.scratch_moves

        def launch_all() -> None:
            for launch in joined(self._launches):
                launch(tiles)

        graph = Graph(device, launch_all)
        # None if scratch memory has moved: earlier launches refer to its old address.
        return graph if graph.scratch_moves == moves else None


def power_of_two(count: int) -> int:
    """Return the next power of two, 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
