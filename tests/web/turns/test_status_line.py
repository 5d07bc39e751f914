"""The status text of a running answer."""

from __future__ import annotations

from notso.smollm3 import Event, Progress
from notso.web.turns.status_line import StatusLine


def test_status_line_follows_a_turn_through_all_phases() -> None:
    status_line = StatusLine(10.0)
    assert status_line.status(10.0).phase == "queued"
    status_line.consume(Event("queued", place=2), 10.1)
    status = status_line.status(10.1)
    assert (status.label, dict(status.progress)) == ("Queued (#2)", {"place": 2})
    status_line.consume(Event("progress", progress=Progress(360, 1360, 360)), 12.0)
    assert status_line.status(12.0).label == "Processing prompt", "short waits show no estimate"
    status_line.consume(Event("progress", progress=Progress(860, 1360, 360, 100.0)), 17.0)
    status = status_line.status(17.0)
    assert status.label == "Processing prompt 63%"
    assert status.detail == "500 of 1,000 new tokens (360 cached), about 5 s left"
    assert status.progress == {"percent": 63, "total": 1360, "done": 860, "cached": 360, "rate": 100.0, "left_s": 5}
    status_line.consume(Event("reasoning", text="hm", tokens=1), 22.0)
    assert status_line.first_token_s == 12.0
    status_line.consume(Event("reasoning", text="hm", tokens=61), 28.0)
    status = status_line.status(28.2)
    assert (status.phase, status.label, status.reasoning_label) == ("thinking", "Thinking", "Thinking, 6 s, 61 tokens")
    assert status.detail == "61 tokens, 9.7 tokens/s"
    status_line.consume(Event("text", text="So", tokens=70), 30.5)
    status = status_line.status(40.0)
    assert (status.phase, status.label) == ("generating", "Generating")
    assert status.reasoning_label == "Thought for 8 s, 61 tokens"
    assert status_line.thinking_s == 8.5


def test_status_line_reports_dropped_messages() -> None:
    status_line = StatusLine(0.0)
    status_line.consume(Event("trimmed", dropped_messages=4), 1.0)
    status_line.consume(Event("progress", progress=Progress(0, 100, 0)), 1.0)
    assert status_line.status(1.0).detail == "4 older messages no longer fit in the context and were left out."
    assert status_line.dropped_messages == 4


def test_continued_reasoning_includes_its_earlier_time() -> None:
    status_line = StatusLine(0.0, reasoning_before_s=7.0, reasoning_tokens_before=20)
    status_line.consume(Event("reasoning", text="hm", tokens=1), 1.0)
    assert status_line.status(3.0).reasoning_label == "Thinking, 9 s, 21 tokens"
    status_line.end_reasoning(4.0)
    assert status_line.thinking_s == 10.0


def test_thinking_figures_include_the_reasoning_before_tool_calls() -> None:
    first = StatusLine(0.0)
    first.consume(Event("reasoning", text="hm", tokens=30), 1.0)
    first.consume(Event("text", text="So", tokens=40), 4.0)
    second = first.next_round(5.0)
    second.consume(Event("reasoning", text="hm", tokens=12), 6.0)
    stats = second.stats(8.0, budget=100)
    assert (stats.numbers.reasoning_tokens, stats.numbers.thinking_ms) == (42, 5000.0)
    assert dict(stats.rows)["thinking"] == "42 tokens in 5.0 s, 58 left of 100"
