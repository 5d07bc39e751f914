"""What arrays of whole numbers may hold, by native/ops: asked on the host before a step begins."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cuda.arrays import DeviceArray
from notso.qtensor.backends.cuda.kv_pool import DevicePool
from notso.qtensor.errors import OperandError
from notso.qtensor.kv_formats import TILE_POSITIONS

Integers = npt.NDArray[np.int32]
Window: TypeAlias = tuple[DeviceArray, DevicePool]


def check_below(what: str, numbers: Integers, limit: int) -> None:
    """Refuse what is none of `limit` rows."""
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        raise OperandError(f"{what} {numbers[wrong][0]} is outside 0..{limit - 1}")


def check_rows(positions: Integers, sequences: Integers, tables: Integers) -> None:
    """Every row stands somewhere in a sequence that there is."""
    count, length = tables.shape
    wrong = (sequences < 0) | (sequences >= count)
    if wrong.any():
        raise OperandError(f"row {int(wrong.argmax())} names a sequence that does not exist")
    wrong = (positions < 0) | (positions >= length * TILE_POSITIONS)
    if wrong.any():
        raise OperandError(f"position {positions[wrong][0]} is outside the block table")


def check_blocks(blocks: Integers, pool: DevicePool) -> None:
    """They are all in the pool."""
    wrong = (blocks < 0) | (blocks >= pool.blocks)
    if wrong.any():
        raise OperandError(f"block {blocks[wrong][0]} is outside the pool of {pool.blocks}")


def check_written(
    positions: Integers, sequences: Integers, tables: Integers, pool: DevicePool, window: Window | None
) -> None:
    """Each row has a place in the pool or in the windows, and no place that does not exist."""
    check_rows(positions, sequences, tables)
    tiles = positions // TILE_POSITIONS
    blocks = tables[sequences, tiles]
    if window is None:
        check_blocks(blocks, pool)
        return
    others = window[0].numbers[sequences, tiles]
    nowhere = (blocks == -1) & (others == -1)
    if nowhere.any():
        raise OperandError(f"row {int(nowhere.argmax())} has no block to be stored in")
    check_blocks(blocks[blocks != -1], pool)
    check_blocks(others[others != -1], window[1])


def check_read(
    positions: Integers, sequences: Integers, tables: Integers, pool: DevicePool, window: Window | None
) -> int:
    """Every block that a row reads is there. How many tiles the row reads that sees the most."""
    check_rows(positions, sequences, tables)
    if not positions.size:
        return 0
    own = positions // TILE_POSITIONS
    if window is not None:
        windows = window[0].numbers
        check_blocks(windows[sequences, own], window[1])
        check_blocks(windows[sequences, 0], window[1])
    first = 0 if window is None else 1
    for sequence in np.unique(sequences):
        furthest = int(own[sequences == sequence].max())
        check_blocks(tables[sequence, first : furthest + (window is None)], pool)
    return int(own.max()) + 1
