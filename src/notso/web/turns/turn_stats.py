"""Figures of one answer for the details behind the status badge."""

from __future__ import annotations

from dataclasses import dataclass

from notso.web.store.protocol import StoredMessage
from notso.web.values.wording import number, rate_of, words


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Counts in tokens, times in seconds; 0 means unknown."""

    place: int = 0
    queue_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0  # computed so far
    prefill_s: float = 0.0
    thinking_tokens: int = 0
    thinking_s: float = 0.0
    budget: int | None = None  # reasoning limit
    written_tokens: int = 0
    writing_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.place:
            rows.append(("queue", words["stat_place"].format(place=number(self.place))))
        elif self.queue_s >= 0.05:
            rows.append(("queue", words["stat_seconds"].format(seconds=number(self.queue_s, 1))))
        if self.prompt_tokens:
            rows.append(("prompt", self._prompt()))
        if self.thinking_tokens:
            rows.append(("thinking", self._thinking()))
        if self.written_tokens:
            rows.append(("written", self._written()))
        if self.first_token_s:
            rows.append(("first", words["stat_first"].format(seconds=number(self.first_token_s, 1))))
        return rows

    def _prompt(self) -> str:
        text = words["stat_prompt"].format(total=number(self.prompt_tokens), read=number(self.prefill_tokens))
        if self.prefill_s:
            rate = self.prefill_tokens / self.prefill_s
            text += words["stat_rate"].format(seconds=number(self.prefill_s, 1), rate=rate_of(rate))
        return text + words["stat_cached"].format(cached=number(self.cached_tokens))

    def _thinking(self) -> str:
        text = words["stat_tokens"].format(tokens=number(self.thinking_tokens))
        if self.thinking_s:
            text += words["stat_in"].format(seconds=number(self.thinking_s, 1))
        if self.budget is not None:
            left = max(0, self.budget - self.thinking_tokens)
            text += words["stat_budget"].format(left=number(left), budget=number(self.budget))
        return text

    def _written(self) -> str:
        text = words["stat_tokens"].format(tokens=number(self.written_tokens))
        if self.writing_s:
            rate = self.written_tokens / self.writing_s
            text += words["stat_rate"].format(seconds=number(self.writing_s, 1), rate=rate_of(rate))
        return text


def stats_of(message: StoredMessage) -> TurnStats:
    numbers = message.numbers
    return TurnStats(
        queue_s=numbers.queue_ms / 1000,
        prompt_tokens=numbers.prompt_tokens,
        cached_tokens=numbers.cached_tokens,
        prefill_tokens=numbers.prompt_tokens - numbers.cached_tokens,
        prefill_s=numbers.prompt_ms / 1000,
        thinking_tokens=numbers.reasoning_tokens,
        thinking_s=numbers.thinking_ms / 1000,
        written_tokens=numbers.completion_tokens,
        writing_s=numbers.completion_ms / 1000,
        first_token_s=numbers.first_token_ms / 1000,
    )
