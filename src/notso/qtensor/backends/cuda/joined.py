"""Recorded launches around attention, joined into one call for each layer.

A decoding step is a chain of dependent launches, whose number costs more than what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from notso.qtensor.backends.cuda.driver import Device, ask

# Launches an operation for at least this many tiles.
Launch: TypeAlias = Callable[[int], None]

Turn: TypeAlias = tuple[int, int, int]  # addresses of row numbers, cosines and sines
Places: TypeAlias = tuple[int, int, int, int, int, int]
PoolFacts: TypeAlias = tuple[int, int, int, int]

_NO_TURN: Turn = (0, 0, 0)


@dataclass(frozen=True)
class Rotation:
    """`rope`."""

    device: Device
    x: int
    shape: tuple[int, int, int]  # rows, heads, dimensions
    turn: Turn
    adjacent: bool

    def __call__(self, tiles: int) -> None:
        ask(self.device.native.rope, self.x, *self.shape, *self.turn, self.adjacent)


@dataclass(frozen=True)
class Storing:
    """`store_key_values`."""

    device: Device
    k: int
    v: int
    places: Places
    pool: PoolFacts
    window: PoolFacts

    def __call__(self, tiles: int) -> None:
        ask(self.device.native.store_key_values, self.k, self.v, self.places, self.pool, self.window)


@dataclass(frozen=True)
class Attending:
    """`attention`."""

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
        ask(self.device.native.attention, self.q, self.shape[1], *facts)


@dataclass(frozen=True)
class _Joined:
    """Rotations, if any, storing and attending."""

    of_keys: Turn
    storing: Storing
    of_queries: Turn
    attending: Attending

    def __call__(self, tiles: int) -> None:
        stored, read = self.storing, self.attending
        before = self.of_keys, stored.k, stored.v, stored.places, self.of_queries, read.q, read.shape[1], read.places
        ask(read.device.native.store_and_attend, *before, read.pool, read.window, read.scale, tiles, read.out)


def joined(launches: Sequence[Launch]) -> list[Launch]:
    """Return equivalent launches, where attention includes the storing and the rotations directly before it."""
    done: list[Launch] = []
    for launch in launches:
        done.append(launch)
        if not isinstance(launch, Attending):
            continue
        at = len(done) - 2
        of_queries, at = _turn(done, at, launch.q, launch.shape)
        storing = done[at] if at >= 0 else None
        if not isinstance(storing, Storing) or storing.pool != launch.pool or launch.q in (storing.k, storing.v):
            continue
        _, kv_heads, dim, _ = storing.pool
        of_keys, at = _turn(done, at - 1, storing.k, (storing.places[4], kv_heads, dim))
        done[at + 1 :] = [_Joined(of_keys, storing, of_queries, launch)]
    return done


def _turn(done: Sequence[Launch], at: int, x: int, shape: tuple[int, int, int]) -> tuple[Turn, int]:
    # The rotation of x at index `at`, if it is one, and the index before it.
    launch = done[at] if at >= 0 else None
    if isinstance(launch, Rotation) and launch.adjacent and (launch.x, launch.shape) == (x, shape):
        return launch.turn, at - 1
    return _NO_TURN, at
