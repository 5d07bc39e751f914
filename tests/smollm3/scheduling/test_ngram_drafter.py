"""Draft tokens: their source, their number, when drafting pauses, and its benefit."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notso.smollm3 import Engine
from notso.smollm3.scheduling.ngram_drafter import (
    CANDIDATES,
    COMPARED_MATCH,
    EMPTY_ROUNDS,
    FIRST_SILENCE,
    LONGEST_MATCH,
    LONGEST_SILENCE,
    MOST_DRAFTS,
    NgramDrafter,
    StepLatency,
    planned_cost,
)

ROOT = Path(__file__).parents[3]
FRESH = 10_000  # ids from here on are unseen
LONG = list(range(100, 200))


def after(match: int, then: list[int] = LONG) -> NgramDrafter:
    """Create a drafter whose text ends with a match of this length (up to 50), which `then` followed before."""
    return NgramDrafter([*range(50), *then, FRESH, *range(50 - match, 50)])


class Free(StepLatency):
    """Additional rows cost nothing."""

    def relative_cost(self, rows: int, more: int) -> float:
        return 1.0


class Dear(StepLatency):
    """Every row costs as much as a step."""

    def relative_cost(self, rows: int, more: int) -> float:
        return (rows + more) / rows


def test_tokens_after_the_previous_match_are_proposed() -> None:
    assert after(LONGEST_MATCH).propose() == LONG[:MOST_DRAFTS]


def test_propose_respects_the_limit() -> None:
    assert after(LONGEST_MATCH).propose(4) == LONG[:4]
    assert after(LONGEST_MATCH).propose(0) == after(LONGEST_MATCH).propose(-3) == []


def test_nothing_is_proposed_without_a_match() -> None:
    assert after(0).propose() == []


@pytest.mark.parametrize("match", [1, 2])
def test_short_match_is_drafted_only_if_rows_are_cheap(match: int) -> None:
    drafter = after(match)
    assert 1 <= len(drafter.propose()) <= 2 and drafter.propose() == LONG[: len(drafter.propose())]
    assert NgramDrafter(drafter._ids, latency=Dear()).propose() == []


def test_wrong_short_matches_do_not_suppress_longer_ones() -> None:
    drafter = after(2)
    for _ in range(9):
        drafter.propose(1)
        drafter.record_acceptance(1, 0)
    drafter.extend([FRESH, *range(40, 50)])

    assert drafter.propose() != []


def test_longer_match_proposes_more_tokens() -> None:
    lengths = [len(after(match).propose()) for match in (1, COMPARED_MATCH, 6, 14, LONGEST_MATCH)]

    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == MOST_DRAFTS


def test_too_short_text_proposes_nothing() -> None:
    for ids in ([], [1], [1, 2], [1, 2, 3], [0, 1]):
        assert NgramDrafter(ids).propose() == []


def test_longest_then_latest_match_is_used() -> None:
    ids = [9, 1, 2, 3, 70, 71, 8, 1, 2, 3, 60, 61, 7, 1, 2, 3, 50, 51, FRESH]

    assert NgramDrafter([*ids, 9, 1, 2, 3]).propose(1) == [70]
    assert NgramDrafter([*ids, 8, 1, 2, 3]).propose(1) == [60]
    assert NgramDrafter([*ids, 6, 1, 2, 3], latency=Free()).propose(1) == [50]


def test_proposal_stops_before_excluded_tokens() -> None:
    ids = [*range(40), 7, 500, 501, 999, 502, FRESH, *range(40), 7]

    assert NgramDrafter(ids).propose(4) == [500, 501, 999, 502]
    assert NgramDrafter(ids, never=frozenset({999})).propose(4) == [500, 501]
    assert NgramDrafter(ids, never=frozenset({500})).propose(4) == []


def test_proposal_continues_a_repetition_past_the_end() -> None:
    assert NgramDrafter([5, 6, 7] * 14).propose(8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_wrong_drafts_cause_growing_pauses() -> None:
    drafter = NgramDrafter([1, 2, 3, 4] * 2, latency=Free())
    silences, fresh = [], FRESH
    for _ in range(60):
        silent = 0
        while True:
            drafter.extend([fresh, 1, 2, 3])
            fresh += 1
            if drafter.propose(2):
                break
            silent += 4
        drafter.record_acceptance(2, 0)
        silences.append(silent)

    assert silences[:EMPTY_ROUNDS] == [0] * EMPTY_ROUNDS
    growing, longest = silences[EMPTY_ROUNDS : EMPTY_ROUNDS + 5], silences[EMPTY_ROUNDS + 5 :]
    assert growing[0] >= FIRST_SILENCE - 4 and growing == sorted(set(growing))
    assert all(LONGEST_SILENCE - 4 <= silent <= LONGEST_SILENCE + 8 for silent in longest)  # pauses are limited


def test_accepted_draft_resets_the_pause_counter() -> None:
    drafter = after(5)
    for _ in range(EMPTY_ROUNDS - 1):
        assert drafter.propose()
        drafter.record_acceptance(1, 0)
    drafter.record_acceptance(2, 2)
    drafter.record_acceptance(1, 0)
    drafter._right[:] = drafter._tried[:]  # only the pauses could prevent a draft

    assert drafter.propose()


def test_longest_possible_match_is_drafted_during_a_pause() -> None:
    drafter = after(5)
    drafter.propose()
    for _ in range(EMPTY_ROUNDS):
        drafter.record_acceptance(1, 0)
    drafter._right[:] = drafter._tried[:]
    drafter.extend([FRESH, *range(45, 50)])
    assert drafter.propose() == []

    drafter.extend([FRESH, *range(50)])
    assert drafter.propose() == LONG[:MOST_DRAFTS]


def test_draft_length_adapts_to_acceptance() -> None:
    wrong, right = after(9), after(9)
    usual = len(after(9).propose())
    for _ in range(2):
        wrong.propose()
        wrong.record_acceptance(usual, 0)
        right.propose()
        right.record_acceptance(usual, usual)

    assert len(wrong.propose()) < usual < len(right.propose())


def test_draft_length_decreases_with_row_cost() -> None:
    ids = [*range(50), *LONG, FRESH, *range(44, 50)]
    by_cost = [len(NgramDrafter(ids, latency=latency).propose()) for latency in (Free(), StepLatency(), Dear())]

    assert by_cost[0] == MOST_DRAFTS > by_cost[1] > by_cost[2] == 0


def test_draft_length_decreases_with_rows_of_the_step() -> None:
    lengths = [len(after(9).propose(rows=rows)) for rows in (1, 2, 4, 8, 16, 48, 64, 100)]

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4 and lengths[4:] == [0, 0, 0, 0]


def reference(ids: list[int]) -> tuple[int, int]:
    """Return the position after the longest of the latest matches, by checking all positions."""
    end = len(ids)
    found = []
    for place in range(end - 1, 0, -1):
        length = 0
        while length < min(place, LONGEST_MATCH) and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        found.append((length, place))
    compared = [each for each in found if each[0] >= COMPARED_MATCH][:CANDIDATES]
    shorter = max(((length, place) for length, place in found if length), default=(0, 0))
    length, place = max(compared, default=shorter)
    return place, length


@given(st.lists(st.integers(0, 3), max_size=120), st.lists(st.integers(0, 3), max_size=40))
def test_longest_match_equals_exhaustive_search(prompt: list[int], answer: list[int]) -> None:
    drafter = NgramDrafter(prompt)
    assert drafter._longest_match() == reference(prompt)
    for count, token in enumerate(answer, 1):
        drafter.extend([token])
        assert drafter._longest_match() == reference(prompt + answer[:count])


@given(
    st.lists(st.integers(0, 4) | st.sampled_from([2**21 - 1, 2**20]), max_size=200),
    st.lists(st.tuples(st.integers(-1, 20), st.integers(1, 70), st.integers(0, 20)), max_size=30),
)
def test_random_proposals_are_valid(ids: list[int], rounds: list[tuple[int, int, int]]) -> None:
    drafter = NgramDrafter(ids, never=frozenset({4}))
    for limit, rows, right in rounds:
        drafts = drafter.propose(limit, rows)
        assert len(drafts) <= max(0, min(limit, MOST_DRAFTS)) and 4 not in drafts and set(drafts) <= set(ids)
        drafter.record_acceptance(len(drafts), min(right, len(drafts)))
        came = [*drafts[:right], right % 4]
        drafter.extend(came)
        ids = ids + came
        assert len(drafter._ids) == len(ids)


def test_time_and_memory_are_bounded() -> None:
    """A token takes one or two microseconds; the limit is much higher because of other load."""
    source = random.Random(1)
    ids = [source.randrange(128_256) for _ in range(20_000)]
    tracemalloc.start()
    drafter = NgramDrafter(ids)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 260 * len(ids)

    started = time.thread_time()
    for _ in range(1_000):  # worst case: always a match, and never a correct one
        drafter.propose()
        drafter.record_acceptance(1, 0)
        drafter.extend([7])
    assert time.thread_time() - started < 1_000 * 60e-6


# ---------------------------------------------------------------- benefit


def speed_up(prompt: list[int], answer: list[int]) -> float:
    """Return the number of one-row steps divided by the estimated cost of the actual steps."""
    drafter, at, cost = NgramDrafter(prompt), 0, 0.0
    while at < len(answer):
        drafts = drafter.propose(len(answer) - at - 1)
        right = 0
        while right < len(drafts) and drafts[right] == answer[at + right]:
            right += 1
        drafter.record_acceptance(len(drafts), right)
        drafter.extend(answer[at : at + right + 1])
        at += right + 1
        cost += planned_cost(1 + len(drafts))
    return len(answer) / cost


@pytest.fixture(scope="module")
def pages(demo_engine: Engine) -> dict[str, list[int]]:
    """Return pages and files of this project as tokens of the demo model."""
    files = [ROOT / "CONTRIBUTING.md", ROOT / "training/README.md", ROOT / "src/notso/smollm3/output/lookahead.py"]
    return {path.name: demo_engine.tokenizer.encode(path.read_text("utf-8")) for path in files}


def test_verbatim_copy_is_at_least_four_times_faster(pages: dict[str, list[int]]) -> None:
    assert min(speed_up([*ids, FRESH], ids) for ids in pages.values()) > 4


def test_edited_copy_is_at_least_1_5_times_faster(demo_engine: Engine) -> None:
    text = (ROOT / "src/notso/smollm3/sampling/sampler.py").read_text("utf-8")
    encode = demo_engine.tokenizer.encode
    for changed in (text.replace("logits", "scores"), text.replace("self", "this").replace(":\n", ": # changed\n")):
        assert changed != text
        assert speed_up(encode(text), encode(changed)) > 1.5


def test_unseen_prose_is_faster(pages: dict[str, list[int]]) -> None:
    assert min(speed_up(encoded[:8], encoded) for encoded in pages.values()) > 1.05


# ---------------------------------------------------------------- cost of a step


def test_planned_costs_interpolate_the_planning_figures() -> None:
    assert [planned_cost(rows) for rows in (1, 4, 8, 16)] == [1.0, 1.1, 1.3, 1.8]
    assert planned_cost(6) == pytest.approx(1.2) and planned_cost(32) == pytest.approx(2.8)
    assert all(planned_cost(rows) < planned_cost(rows + 1) for rows in range(1, 64))


def test_untimed_latency_uses_planned_costs() -> None:
    assert StepLatency().relative_cost(1, 3) == pytest.approx(1.1)
    assert StepLatency().relative_cost(4, 4) == pytest.approx(1.3 / 1.1)


def test_costs_are_learned_from_steps() -> None:
    latency = StepLatency()
    for _ in range(40):
        for rows in (1, 4, 8, 16):
            latency.observe(rows, 0.1 * rows)  # every row costs as much as a step

    assert latency.relative_cost(1, 15) > 8 and latency.relative_cost(1, 3) > 2.5
    assert NgramDrafter(after(9)._ids, latency=latency).propose() == []


def test_single_outlier_timing_has_little_effect() -> None:
    latency = StepLatency()
    for _ in range(10):
        latency.observe(1, 0.1)
    latency.observe(8, 30.0)

    assert latency.relative_cost(1, 7) < 1.7


def test_invalid_timings_are_ignored() -> None:
    latency = StepLatency()
    for rows, seconds in ((0, 1.0), (65, 1.0), (4, 0.0), (4, -1.0)):
        latency.observe(rows, seconds)

    assert latency.relative_cost(1, 3) == pytest.approx(1.1)


def test_ratio_beyond_timed_rows_is_proportional() -> None:
    assert StepLatency().relative_cost(60, 15) == pytest.approx(75 / 60)
