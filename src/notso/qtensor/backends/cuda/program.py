"""Operations captured once and replayed: on the device they are one graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from notso.qtensor.backends.cuda.driver import Device, Graph
from notso.qtensor.errors import OperandError

Check = Callable[[], int]
"""Refuses what arrays hold, and says how many tiles of the cache the row reads that sees the most (0: it reads none).
"""

Launch = Callable[[int], None]
"""Launches an operation for so many tiles or more."""


class Recorder(Protocol):
    """What a program must know of its backend."""

    device: Device
    recording: Program | None

    def flush(self) -> None:
        """Have the device see what was written to arrays of whole numbers."""


class Program:
    """Launches are captured when it first runs, anew when scratch memory has moved, and once for each power of two of
    tiles that its rows see: how many thread blocks a graph starts is fixed."""

    def __init__(self, backend: Recorder) -> None:
        self._backend = backend
        self._checks: dict[Hashable, Check] = {}
        self._launches: list[Launch] = []
        self._used: list[object] = []
        self._graphs: dict[int, Graph] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, key: Hashable, check: Check, launch: Launch, used: object) -> None:
        """One operation more, and the arrays it must hold on to. Checks of one key are the same: every layer reads
        the same block table."""
        self._checks.setdefault(key, check)
        self._launches.append(launch)
        self._used.append(used)

    @contextmanager
    def record(self) -> Iterator[Program]:
        """Keep the operations called instead of running them. Raises OperandError if one already is."""
        if self._backend.recording is not None:
            raise OperandError("another program is being recorded")
        self._backend.recording = self
        try:
            yield self
        finally:
            self._backend.recording = None

    def run(self) -> None:
        """Check what arrays hold, and have the device do it. Raises OperandError."""
        tiles = power_of_two(max((check() for check in self._checks.values()), default=0))
        self._backend.flush()
        graph = self._graphs.get(tiles)
        while graph is None or graph.scratch_moves != self._backend.device.native.scratch_moves:
            graph = self._captured(tiles)
        self._graphs[tiles] = graph
        graph.launch()

    def _captured(self, tiles: int) -> Graph | None:
        """None where scratch memory has moved meanwhile: what was launched before points to where it was."""
        device = self._backend.device
        moves = device.native.scratch_moves

        def launch_all() -> None:
            for launch in self._launches:
                launch(tiles)

        graph = Graph(device, launch_all)
        return graph if graph.scratch_moves == moves else None


def power_of_two(count: int) -> int:
    """The smallest that is not less; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
