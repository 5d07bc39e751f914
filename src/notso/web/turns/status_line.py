"""Compute the badge of an answer in progress: its phase and label, and the figures shown when it is expanded."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.smollm3 import Event, Progress
from notso.web.store.protocol import AnswerStats, StoredMessage
from notso.web.turns.turn_log import AnswerStatus, Stat
from notso.web.values.wording import format_rate, number, words


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Figures of an answer, which may be in progress. In `numbers`, 0 means unknown."""

    numbers: AnswerStats = field(default_factory=AnswerStats)
    prefill_tokens: int = 0  # computed so far
    place: int = 0  # position in the queue
    budget: int | None = None  # reasoning limit

    @property
    def rows(self) -> list[tuple[str, str]]:
        numbers, rows = self.numbers, []
        if self.place:
            rows.append(("queue", words["stat_place"].format(place=number(self.place))))
        elif numbers.queue_ms >= 50:
            rows.append(("queue", words["stat_seconds"].format(seconds=_seconds(numbers.queue_ms))))
        if numbers.prompt_tokens:
            rows.append(("prompt", self._prompt()))
        if numbers.reasoning_tokens:
            rows.append(("thinking", self._thinking()))
        if numbers.completion_tokens:
            written = words["stat_tokens"].format(tokens=number(numbers.completion_tokens))
            rows.append(("written", written + _rate(numbers.completion_tokens, numbers.completion_ms)))
        if numbers.first_token_ms:
            rows.append(("first", words["stat_first"].format(seconds=_seconds(numbers.first_token_ms))))
        return rows

    def _prompt(self) -> str:
        numbers = self.numbers
        text = words["stat_prompt"].format(total=number(numbers.prompt_tokens), read=number(self.prefill_tokens))
        text += _rate(self.prefill_tokens, numbers.prompt_ms)
        return text + words["stat_cached"].format(cached=number(numbers.cached_tokens))

    def _thinking(self) -> str:
        numbers = self.numbers
        text = words["stat_tokens"].format(tokens=number(numbers.reasoning_tokens))
        if numbers.thinking_ms:
            text += words["stat_in"].format(seconds=_seconds(numbers.thinking_ms))
        if self.budget is not None:
            left = max(0, self.budget - numbers.reasoning_tokens)
            text += words["stat_budget"].format(left=number(left), budget=number(self.budget))
        return text


def _seconds(milliseconds: float) -> str:
    return number(milliseconds / 1000, 1)


def _rate(tokens: int, milliseconds: float) -> str:
    if not milliseconds:
        return ""
    rate = format_rate(tokens / (milliseconds / 1000))
    return words["stat_rate"].format(seconds=_seconds(milliseconds), rate=rate)


def stats_from_message(message: StoredMessage) -> TurnStats:
    return TurnStats(message.numbers, message.numbers.prompt_tokens - message.numbers.cached_tokens)


SHOWN_AFTER_S = 1.0


class StatusLine:
    def __init__(
        self,
        requested_at: float,
        *,
        reasoning_before_s: float = 0.0,
        reasoning_tokens_before: int = 0,
        omitted_messages: int = 0,
    ) -> None:
        self.first_token_s = 0.0
        self.dropped_messages = 0
        self._omitted_messages = omitted_messages  # messages omitted from the request; the engine may omit more
        self._requested_at = requested_at
        self._reasoning_before_s, self._reasoning_tokens_before = reasoning_before_s, reasoning_tokens_before
        self._queue_place = 0
        self._prefill_eta = PrefillEta()
        self._prefill: PrefillProgress | None = None
        self._prefill_since = 0.0
        self._writing_since = 0.0
        self._thinking_since = self._thinking_until = 0.0
        self._has_answer_text = False
        self._tokens = self._reasoning_tokens = 0

    @property
    def thinking_s(self) -> float:
        until = self._thinking_until
        return self._reasoning_before_s + (until - self._thinking_since if until else 0.0)

    @property
    def _all_reasoning_tokens(self) -> int:
        return self._reasoning_tokens_before + self._reasoning_tokens

    def next_round(self, now: float) -> StatusLine:
        after = StatusLine(
            now,
            reasoning_before_s=self.thinking_s,
            reasoning_tokens_before=self._all_reasoning_tokens,
            omitted_messages=self._omitted_messages,
        )
        after.dropped_messages, after.first_token_s = self.dropped_messages, self.first_token_s
        return after

    def consume(self, event: Event, now: float) -> None:
        match event.kind:
            case "queued":
                self._queue_place = event.place
            case "trimmed":
                self.dropped_messages = event.dropped_messages + self._omitted_messages
            case "progress" if event.progress is not None:
                self._prefill_since = self._prefill_since or now
                self._prefill = self._prefill_eta.consume(event.progress, now)
            case "reasoning" | "text":
                if not self._writing_since:
                    self._writing_since = now
                    self.first_token_s = self.first_token_s or now - self._requested_at
                self._tokens = max(event.tokens, self._tokens + 1)
                if event.kind == "reasoning":
                    self._thinking_since = self._thinking_since or now
                    self._reasoning_tokens = self._tokens
                else:
                    self._has_answer_text = True
                    self.end_reasoning(now)

    def end_reasoning(self, now: float) -> None:
        if self._thinking_since and not self._thinking_until:
            self._thinking_until = now

    def status(self, now: float) -> AnswerStatus:
        reasoning_label = self._reasoning_label(now)
        if self._writing_since:
            phase = "generating" if self._has_answer_text else "thinking"
            seconds = now - self._writing_since
            rate = round((self._tokens - 1) / seconds, 1) if seconds > SHOWN_AFTER_S else 0.0
            detail = words["detail_writing"].format(tokens=number(self._tokens), rate=format_rate(rate)) if rate else ""
            progress = {"tokens": self._tokens, "rate": rate, "seconds": int(seconds)}
            return AnswerStatus(phase, words[f"phase_{phase}"], reasoning_label, detail, progress)
        if self._prefill is not None:
            return self._prefill_status(self._prefill, now)
        if self._queue_place:
            label = words["phase_queued_at"].format(place=number(self._queue_place))
            return AnswerStatus("queued", label, "", "", {"place": self._queue_place})
        return AnswerStatus("queued", words["phase_queued"], "", "", {})

    def stats(self, now: float, budget: int | None) -> TurnStats:
        prefill, wrote_from = self._prefill, self._writing_since
        began = self._prefill_since or wrote_from
        thinking_until = self._thinking_until or (now if self._thinking_since else 0.0)
        numbers = AnswerStats(
            prompt_tokens=prefill.new_tokens + prefill.cached_tokens if prefill else 0,
            cached_tokens=prefill.cached_tokens if prefill else 0,
            completion_tokens=self._tokens,
            reasoning_tokens=self._all_reasoning_tokens,
            prompt_ms=1000 * ((wrote_from or now) - self._prefill_since) if self._prefill_since else 0.0,
            completion_ms=1000 * (now - wrote_from) if wrote_from else 0.0,
            thinking_ms=1000 * (self._reasoning_before_s + thinking_until - self._thinking_since),
            queue_ms=1000 * (began - self._requested_at) if began else 0.0,
            first_token_ms=1000 * self.first_token_s,
        )
        return TurnStats(numbers, prefill.new_tokens_done if prefill else 0, 0 if began else self._queue_place, budget)

    def _reasoning_label(self, now: float) -> str:
        if not self._thinking_since:
            return ""
        seconds = self._reasoning_before_s + (self._thinking_until or now) - self._thinking_since
        name = "reasoning_for" if self._thinking_until else "phase_thinking_for"
        return words[name].format(seconds=int(seconds)) + words["reasoning_tokens"].format(
            tokens=number(self._all_reasoning_tokens)
        )

    def _prefill_status(self, prefill: PrefillProgress, now: float) -> AnswerStatus:
        progress: dict[str, Stat] = {
            "percent": prefill.percent,
            "total": prefill.new_tokens + prefill.cached_tokens,
            "done": prefill.new_tokens_done + prefill.cached_tokens,
            "cached": prefill.cached_tokens,
            "rate": round(prefill.tokens_per_s, 1),
            "left_s": round(prefill.left_s) if prefill.left_s is not None else None,
        }
        if prefill.left_s is None and now - self._prefill_since < SHOWN_AFTER_S:
            return AnswerStatus("prefill", words["phase_prefill"], "", self._dropped_note(), progress)
        detail = words["detail_prefill"].format(done=number(prefill.new_tokens_done), new=number(prefill.new_tokens))
        if prefill.cached_tokens:
            detail += words["detail_cached"].format(cached=number(prefill.cached_tokens))
        if prefill.left_s is not None:
            detail += words["detail_left"].format(seconds=round(prefill.left_s))
        if prefill.slower:
            detail += words["detail_slower"]
        label = words["phase_prefill_at"].format(percent=prefill.percent)
        return AnswerStatus("prefill", label, "", " ".join(filter(None, (self._dropped_note(), detail))), progress)

    def _dropped_note(self) -> str:
        return words["note_dropped"].format(count=number(self.dropped_messages)) if self.dropped_messages else ""


SHORTEST_SHOWN_S = 1.0
SLOWER_BY = 1.25
DOUBLING_TOKENS = 16_384
"""Until two chunks have been timed, the cost per token is assumed to double after this many tokens. The assumption is
pessimistic, so that the estimated time shrinks rather than grows."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    percent: int
    new_tokens: int
    new_tokens_done: int
    cached_tokens: int
    tokens_per_s: float
    left_s: float | None  # None if unknown or below SHORTEST_SHOWN_S
    slower: bool  # whether the estimate has grown noticeably (see SLOWER_BY)


class PrefillEta:
    def __init__(self) -> None:
        self._chunks: list[tuple[float, float, int]] = []  # (middle position, seconds per token, tokens)
        self._last: tuple[float, int] | None = None
        self._last_estimate: tuple[float, float] | None = None

    def consume(self, progress: Progress, now_s: float) -> PrefillProgress:
        done, total = progress.done_tokens, progress.total_tokens
        if self._last is not None and done > self._last[1]:
            then, before = self._last
            tokens = done - before
            self._chunks.append(((before + done) / 2, max(0.0, now_s - then) / tokens, tokens))
        if self._last is None or done > self._last[1]:
            self._last = (now_s, done)
        left = self._estimate_left(done, total, progress.tokens_per_s)
        slower = False
        if left is not None and self._last_estimate is not None:
            expected = max(0.0, self._last_estimate[1] - (now_s - self._last_estimate[0]))
            slower = left > SLOWER_BY * expected and left > expected + SHORTEST_SHOWN_S
            left = left if slower else min(left, expected)
        if left is not None:
            self._last_estimate = (now_s, left)
        new = total - progress.cached_tokens
        return PrefillProgress(
            percent=100 * done // total if total else 0,
            new_tokens=new,
            new_tokens_done=done - progress.cached_tokens,
            cached_tokens=progress.cached_tokens,
            tokens_per_s=progress.tokens_per_s,
            left_s=left if left is not None and left >= SHORTEST_SHOWN_S else None,
            slower=slower,
        )

    def _estimate_left(self, done: int, total: int, tokens_per_s: float) -> float | None:
        if not self._chunks and tokens_per_s <= 0:
            return None
        if len(self._chunks) < 2:
            cost = self._chunks[0][1] if self._chunks else 1 / tokens_per_s
            return (total - done) * cost * (1 + (total - done) / 2 / DOUBLING_TOKENS)
        weight = sum(tokens for *_, tokens in self._chunks)
        middle = sum(at * tokens for at, _, tokens in self._chunks) / weight
        cost = sum(seconds * tokens for _, seconds, tokens in self._chunks) / weight
        spread = sum((at - middle) ** 2 * tokens for at, _, tokens in self._chunks)
        slope = 0.0
        if spread > 0:
            slope = sum((at - middle) * (seconds - cost) * tokens for at, seconds, tokens in self._chunks) / spread
        slope = max(0.0, slope)  # a negative slope is noise
        return (total - done) * (cost + slope * ((done + total) / 2 - middle))
