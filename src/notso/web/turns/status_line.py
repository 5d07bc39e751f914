"""What is said about an answer while it comes: its phase, the pill's words, and the figures behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from notso.web.engine.port import Event
from notso.web.turns.answer_stats import Figures
from notso.web.turns.prefill_eta import PromptClock, Reading
from notso.web.turns.turn_log import Figure
from notso.web.values.wording import ordinal, words

WORTH_SAYING_S = 1.0


@dataclass(frozen=True, slots=True)
class Saying:
    """The arguments of TurnLog.tell."""

    phase: str
    label: str
    thought: str
    detail: str
    progress: Mapping[str, Figure]


class Narration:
    """Takes events with the time they came, in seconds of one clock, and says how things stand."""

    def __init__(self, asked_s: float, *, thought_before_s: float = 0.0) -> None:
        self.first_token_s = 0.0
        self.dropped_messages = 0
        self._asked = asked_s
        self._thought_before = thought_before_s
        self._place = 0
        self._clock = PromptClock()
        self._reading: Reading | None = None
        self._reading_since = 0.0
        self._writing_since = 0.0
        self._thinking_since = self._thinking_until = 0.0
        self._answering = False
        self._tokens = self._thought_tokens = self._thought_tokens_before = 0

    @property
    def thinking_s(self) -> float:
        """How long it thought, once it has finished thinking."""
        until = self._thinking_until
        return self._thought_before + (until - self._thinking_since if until else 0.0)

    @property
    def _all_thought_tokens(self) -> int:
        return self._thought_tokens_before + self._thought_tokens

    def next_part(self, now: float) -> Narration:
        """For what the engine says next, once tools have been used: what was thought and seen so far counts on."""
        after = Narration(now, thought_before_s=self.thinking_s)
        after.dropped_messages, after._thought_tokens_before = self.dropped_messages, self._all_thought_tokens
        after.first_token_s = self.first_token_s
        return after

    def take(self, event: Event, now: float) -> None:
        """One event."""
        match event.kind:
            case "queued":
                self._place = event.place
            case "trimmed":
                self.dropped_messages = event.dropped_messages
            case "progress" if event.progress is not None:
                self._reading_since = self._reading_since or now
                self._reading = self._clock.take(event.progress, now)
            case "reasoning" | "text":
                if not self._writing_since:
                    self._writing_since = now
                    self.first_token_s = self.first_token_s or now - self._asked
                self._tokens = max(event.tokens, self._tokens + 1)
                if event.kind == "reasoning":
                    self._thinking_since = self._thinking_since or now
                    self._thought_tokens = self._tokens
                else:
                    self._answering = True
                    self.end_of_thinking(now)

    def end_of_thinking(self, now: float) -> None:
        """The thought is over, if there was one."""
        if self._thinking_since and not self._thinking_until:
            self._thinking_until = now

    def say(self, now: float) -> Saying:
        """How things stand."""
        thought = self._thought(now)
        if self._writing_since:
            phase = "generating" if self._answering else "thinking"
            seconds = now - self._writing_since
            rate = round((self._tokens - 1) / seconds, 1) if seconds > WORTH_SAYING_S else 0.0
            detail = words["detail_writing"].format(tokens=self._tokens, rate=rate) if rate else ""
            progress = {"tokens": self._tokens, "rate": rate, "seconds": int(seconds)}
            return Saying(phase, words[f"phase_{phase}"], thought, detail, progress)
        if self._reading is not None:
            return self._say_reading(self._reading, now)
        if self._place:
            label = words["phase_queued_at"].format(place=ordinal(self._place))
            return Saying("queued", label, "", "", {"place": self._place})
        return Saying("queued", words["phase_queued"], "", "", {})

    def figures(self, now: float, budget: int | None) -> Figures:
        """How things stand, in figures."""
        reading, wrote_from = self._reading, self._writing_since
        began = self._reading_since or wrote_from
        thinking_until = self._thinking_until or (now if self._thinking_since else 0.0)
        return Figures(
            place=0 if began else self._place,
            queue_s=began - self._asked if began else 0.0,
            prompt_tokens=reading.new_tokens + reading.cached_tokens if reading else 0,
            cached_tokens=reading.cached_tokens if reading else 0,
            read_tokens=reading.new_tokens_done if reading else 0,
            reading_s=(wrote_from or now) - self._reading_since if self._reading_since else 0.0,
            thinking_tokens=self._thought_tokens,
            thinking_s=self._thought_before + thinking_until - self._thinking_since,
            budget=budget,
            written_tokens=self._tokens,
            writing_s=now - wrote_from if wrote_from else 0.0,
            first_token_s=self.first_token_s,
        )

    def _thought(self, now: float) -> str:
        if not self._thinking_since:
            return ""
        seconds = self._thought_before + (self._thinking_until or now) - self._thinking_since
        name = "thought_for" if self._thinking_until else "phase_thinking_for"
        return words[name].format(seconds=int(seconds)) + words["thought_tokens"].format(
            tokens=self._all_thought_tokens
        )

    def _say_reading(self, reading: Reading, now: float) -> Saying:
        progress: dict[str, Figure] = {
            "percent": reading.percent,
            "total": reading.new_tokens + reading.cached_tokens,
            "done": reading.new_tokens_done + reading.cached_tokens,
            "cached": reading.cached_tokens,
            "rate": round(reading.tokens_per_s, 1),
            "left_s": round(reading.left_s) if reading.left_s is not None else None,
        }
        if reading.left_s is None and now - self._reading_since < WORTH_SAYING_S:
            return Saying("reading", words["phase_reading"], "", self._dropped(), progress)
        detail = words["detail_reading"].format(done=f"{reading.new_tokens_done:,}", new=f"{reading.new_tokens:,}")
        if reading.cached_tokens:
            detail += words["detail_cached"].format(cached=f"{reading.cached_tokens:,}")
        if reading.left_s is not None:
            detail += words["detail_left"].format(seconds=round(reading.left_s))
        if reading.slower:
            detail += words["detail_slower"]
        label = words["phase_reading_at"].format(percent=reading.percent)
        return Saying("reading", label, "", " ".join(filter(None, (self._dropped(), detail))), progress)

    def _dropped(self) -> str:
        return words["note_dropped"].format(count=self.dropped_messages) if self.dropped_messages else ""
