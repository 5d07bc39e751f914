"""Recorded launches around attention that are fused into one, and others that stay separate."""

from __future__ import annotations

from typing import Any

import pytest

from notso.qtensor.backends.cuda.program import AttentionLaunch, Launch, RopeLaunch, StoreLaunch, fuse_launches

K, V, Q, OUT, POOL, OTHER_POOL = 1, 2, 3, 4, (100, 4, 128, 0), (101, 4, 128, 0)
ROWS, TURN = 5, (7, 8, 9)
PLACES = 10, 11, 12, 0, ROWS, 2


class Device:
    """Device that records the launches it receives."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.native = self

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.asked.append((name, given))


def run(*launches: Launch) -> list[str]:
    for launch in fuse_launches(launches):
        launch(1)
    return [name for name, _ in DEVICE.asked]


DEVICE: Any = Device()


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    DEVICE.asked.clear()


def rotation(x: int, heads: int, adjacent: bool = True) -> RopeLaunch:
    return RopeLaunch(DEVICE, x, (ROWS, heads, 128), TURN, adjacent)


STORING = StoreLaunch(DEVICE, K, V, PLACES, POOL, POOL)
ATTENDING = AttentionLaunch(DEVICE, Q, (ROWS, 16, 128), PLACES, POOL, POOL, 0.5, OUT)


def other(tiles: int) -> None:
    DEVICE.other(tiles)


def test_attention_launches_of_a_layer_are_fused() -> None:
    assert run(other, rotation(K, 4), STORING, rotation(Q, 16), ATTENDING, other) == [
        "other",
        "store_and_attend",
        "other",
    ]
    _, given = DEVICE.asked[1]
    assert given == (TURN, K, V, PLACES, TURN, Q, 16, PLACES, POOL, POOL, 0.5, 1, OUT)


def test_attention_launches_without_rotations_are_fused() -> None:
    assert run(STORING, ATTENDING, STORING, ATTENDING) == ["store_and_attend"] * 2
    assert {given[0] for _, given in DEVICE.asked} == {(0, 0, 0)}


@pytest.mark.parametrize(
    "launches",
    [
        (ATTENDING,),
        (rotation(Q, 16), ATTENDING),
        (STORING, other, ATTENDING),
        (STORING, rotation(Q, 16, adjacent=False), ATTENDING),
        (STORING, rotation(OUT, 16), ATTENDING),
        (StoreLaunch(DEVICE, K, V, PLACES, OTHER_POOL, OTHER_POOL), ATTENDING),
        (StoreLaunch(DEVICE, Q, V, PLACES, POOL, POOL), ATTENDING),
    ],
)
def test_unrelated_launches_are_not_fused(launches: tuple[Launch, ...]) -> None:
    assert "store_and_attend" not in run(*launches)
    assert len(DEVICE.asked) == len(launches)


def test_unrelated_rotation_stays_before_the_fused_launch() -> None:
    assert run(rotation(OUT, 4), STORING, ATTENDING) == ["rope", "store_and_attend"]
