"""The words about an answer while it comes."""

from __future__ import annotations

from notso.web.engine.port import Event, Progress
from notso.web.turns.status_line import Narration


def test_the_whole_way() -> None:
    narration = Narration(10.0)
    assert narration.say(10.0).phase == "queued"
    narration.take(Event("queued", place=2), 10.1)
    saying = narration.say(10.1)
    assert (saying.label, dict(saying.progress)) == ("Queued (2nd)", {"place": 2})
    narration.take(Event("progress", progress=Progress(360, 1360, 360)), 12.0)
    assert narration.say(12.0).label == "Reading prompt", "short waits are not worth figures"
    narration.take(Event("progress", progress=Progress(860, 1360, 360, 100.0)), 17.0)
    saying = narration.say(17.0)
    assert saying.label == "Reading prompt 63 %"
    assert saying.detail == "500 of 1,000 new tokens (360 from cache), 5 s left"
    assert saying.progress == {"percent": 63, "total": 1360, "done": 860, "cached": 360, "rate": 100.0, "left_s": 5}
    narration.take(Event("reasoning", text="hm", tokens=1), 22.0)
    assert narration.first_token_s == 12.0
    narration.take(Event("reasoning", text="hm", tokens=61), 28.0)
    saying = narration.say(28.2)
    assert (saying.phase, saying.label, saying.thought) == ("thinking", "Thinking", "Thinking, 6 s, 61 tokens")
    assert saying.detail == "61 tokens, 9.7 tokens/s"
    narration.take(Event("text", text="So", tokens=70), 30.5)
    saying = narration.say(40.0)
    assert (saying.phase, saying.label) == ("generating", "Generating")
    assert saying.thought == "Thought for 8 s, 61 tokens"
    assert narration.thinking_s == 8.5


def test_what_was_left_out_is_said() -> None:
    narration = Narration(0.0)
    narration.take(Event("trimmed", dropped_messages=4), 1.0)
    narration.take(Event("progress", progress=Progress(0, 100, 0)), 1.0)
    assert narration.say(1.0).detail == "The oldest 4 messages did not fit and were left out."
    assert narration.dropped_messages == 4


def test_a_thought_that_goes_on_counts_from_where_it_was() -> None:
    narration = Narration(0.0, thought_before_s=7.0)
    narration.take(Event("reasoning", text="hm", tokens=1), 1.0)
    assert narration.say(3.0).thought == "Thinking, 9 s, 1 tokens"
    narration.end_of_thinking(4.0)
    assert narration.thinking_s == 10.0
