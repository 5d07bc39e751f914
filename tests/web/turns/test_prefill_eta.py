"""The estimated time until a prompt has been processed."""

from __future__ import annotations

import pytest

from notso.smollm3 import Progress
from notso.web.turns.status_line import PrefillEta, PrefillProgress

TOTAL = 16_000
CHUNK = 512


def cost(at: int) -> float:
    """Return the seconds for the token at this position; the last token takes twice as long as the first."""
    return 0.002 * (1 + at / TOTAL)


def time_until(done: int) -> float:
    return 0.002 * (done + done * done / (2 * TOTAL))


def run(total: int = TOTAL, cached: int = 0, slowdown_after: int | None = None) -> list[tuple[float, PrefillProgress]]:
    clock, readings, extra = PrefillEta(), [], 0.0
    for done in range(cached, total + 1, CHUNK):
        if slowdown_after is not None and done > slowdown_after:
            extra += 3 * CHUNK * cost(done)
        now = 100 + time_until(done) - time_until(cached) + extra
        rate = 0.0 if done == cached else CHUNK / (time_until(done) - time_until(done - CHUNK))
        readings.append((now, clock.consume(Progress(done, total, cached, rate), now)))
    return readings


def test_estimate_accounts_for_rising_cost_of_later_tokens() -> None:
    readings = run()
    end = 100 + time_until(TOTAL)
    for now, prefill in readings[4:-3]:
        assert prefill.left_s == pytest.approx(end - now, rel=0.1)
    mean_guess = (TOTAL - 4 * CHUNK) * time_until(4 * CHUNK) / (4 * CHUNK)
    assert mean_guess < 0.75 * (end - readings[4][0]), "the mean rate would have predicted a much shorter time"


def test_estimate_never_increases() -> None:
    shown = [prefill.left_s for _, prefill in run() if prefill.left_s is not None]
    assert shown == sorted(shown, reverse=True)


def test_slowdown_is_flagged() -> None:
    readings = run(slowdown_after=8000)
    assert not any(prefill.slower for _, prefill in readings[: 8000 // CHUNK])
    assert any(prefill.slower for _, prefill in readings[8000 // CHUNK :])


def test_no_estimate_before_measurements_or_for_short_prompts() -> None:
    readings = run()
    assert readings[0][1].left_s is None
    assert readings[-1][1].left_s is None and readings[-1][1].percent > 95
    assert all(prefill.left_s is None for _, prefill in run(total=900))


def test_first_estimate_uses_the_engine_rate() -> None:
    assert PrefillEta().consume(Progress(360, 1360, 360, 100.0), 5.0).left_s == pytest.approx(10.0, rel=0.05)


def test_cached_tokens_are_counted_separately() -> None:
    _, prefill = run(cached=8192)[2]
    assert (prefill.new_tokens, prefill.new_tokens_done, prefill.cached_tokens) == (TOTAL - 8192, 1024, 8192)
    assert PrefillEta().consume(Progress(0, 0, 0), 0.0).percent == 0
