"""Checks of integer arrays on the host before a step, as in native/ops."""

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
    """Raise OperandError for a value outside 0..limit-1."""
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        raise OperandError(f"{what} {numbers[wrong][0]} is outside 0..{limit - 1}")


def check_rows(positions: Integers, sequences: Integers, tables: Integers) -> None:
    """Require each row to lie in an existing sequence."""
    count, length = tables.shape
    wrong = (sequences < 0) | (sequences >= count)
    if wrong.any():
        raise OperandError(f"row {int(wrong.argmax())} refers to a sequence that does not exist")
    wrong = (positions < 0) | (positions >= length * TILE_POSITIONS)
    if wrong.any():
        raise OperandError(f"position {positions[wrong][0]} is outside the block table")


def check_blocks(blocks: Integers, pool: DevicePool) -> None:
    """Require blocks to be in the pool."""
    wrong = (blocks < 0) | (blocks >= pool.blocks)
    if wrong.any():
        raise OperandError(f"block {blocks[wrong][0]} is outside the pool of {pool.blocks}")


def check_written(
    positions: Integers, sequences: Integers, tables: Integers, pool: DevicePool, window: Window | None
) -> None:
    """Require a valid block for each row."""
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
    """Require all blocks to be read; return the most tiles."""
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
