"""Steps that prefill during answers process whole tiles, as many as fit in the time, on machines of any speed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from notso.smollm3.scheduling.scheduler import LEAST_TOKENS, REMEMBERED_STEPS, TILE_ROWS, PrefillBudget

STEP_S = 0.25
MACHINES: dict[str, Callable[[int], float]] = {
    "tiles": lambda rows: 0.066 + 0.0027 * TILE_ROWS * math.ceil(rows / TILE_ROWS),
    "columns in 32 lanes": lambda rows: 0.08 if rows == 1 else 0.29 if rows <= 16 else 0.38 * math.ceil(rows / 32),
    "every row its share": lambda rows: 0.1 * rows,
    "fast": lambda rows: 0.001 + 0.00001 * rows,
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("decoding", [1, 2, 7, 8, 16, 40])
def test_prefill_fills_the_step_time_with_whole_tiles(machine: str, decoding: int) -> None:
    cost, pace = MACHINES[machine], PrefillBudget(STEP_S)
    rows = 0
    for _ in range(100):
        tokens = pace.tokens(decoding, 512 - decoding, cost(decoding), cost(512) / 512)
        rows = decoding + tokens
        pace.observe(rows, cost(rows))
        assert tokens >= LEAST_TOKENS and rows % TILE_ROWS == 0
        assert rows - tokens == decoding
    least = TILE_ROWS * math.ceil((decoding + LEAST_TOKENS) / TILE_ROWS)
    assert rows == least or cost(rows) <= STEP_S
    fits = max((n for n in range(least, 513, TILE_ROWS) if cost(n) <= STEP_S), default=least)
    if machine in ("tiles", "fast"):
        assert rows == fits


def test_unknown_costs_give_one_tile() -> None:
    assert PrefillBudget(STEP_S).tokens(1, 511, 0.0, 0.0) == TILE_ROWS - 1


@pytest.mark.parametrize("most", [1, 5, 15, 16, 100])
def test_tokens_do_not_exceed_the_given_maximum(most: int) -> None:
    assert 1 <= PrefillBudget(10.0).tokens(1, most, 0.001, 0.0001) <= most


def test_single_slow_step_is_forgotten() -> None:
    pace, cost = PrefillBudget(STEP_S), MACHINES["tiles"]
    usual = 0
    for step in range(40 + 3 * REMEMBERED_STEPS):
        rows = 1 + pace.tokens(1, 511, cost(1), cost(512) / 512)
        if step == 39:
            usual = rows
        pace.observe(rows, 5.0 if step == 40 else cost(rows))
    assert rows == usual > TILE_ROWS


def test_deeper_prompts_get_smaller_chunks() -> None:
    pace = PrefillBudget(STEP_S)
    chosen = []
    for depth in range(200):
        rows = 1 + pace.tokens(1, 511, 0.066, 0.0027)
        seconds = 0.066 + rows * (0.0005 + 0.00004 * depth)
        chosen.append(rows)
        pace.observe(rows, seconds)
        assert seconds < 1.3 * STEP_S
    assert chosen[-1] < chosen[0]
