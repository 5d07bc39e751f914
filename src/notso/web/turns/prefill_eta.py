"""Estimate of the remaining prefill time from the timings of earlier chunks.

Attention makes a token's cost grow with its position. The cost per token is modeled as a line over the position, fitted
to the prompt's chunks by least squares, and summed over the remaining tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from notso.web.engine.port import Progress

SHORTEST_SHOWN_S = 1.0
SLOWER_BY = 1.25
DOUBLING_TOKENS = 16_384
"""Token distance over which the cost doubles, assumed until two chunks are timed; high, as an estimate may shrink but
should not grow."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    percent: int
    new_tokens: int
    new_tokens_done: int
    cached_tokens: int
    tokens_per_s: float
    left_s: float | None  # None if unknown or below SHORTEST_SHOWN_S
    slower: bool  # the estimate grew


class PrefillEta:
    """Estimator for one prompt."""

    def __init__(self) -> None:
        self._chunks: list[tuple[float, float, int]] = []  # middle position, seconds per token, tokens
        self._last: tuple[float, int] | None = None
        self._promised: tuple[float, float] | None = None

    def take(self, progress: Progress, now_s: float) -> PrefillProgress:
        """Return the progress to show after an event."""
        done, total = progress.done_tokens, progress.total_tokens
        if self._last is not None and done > self._last[1]:
            then, before = self._last
            tokens = done - before
            self._chunks.append(((before + done) / 2, max(0.0, now_s - then) / tokens, tokens))
        if self._last is None or done > self._last[1]:
            self._last = (now_s, done)
        left = self._left(done, total, progress.tokens_per_s)
        slower = False
        if left is not None and self._promised is not None:
            promised = max(0.0, self._promised[1] - (now_s - self._promised[0]))
            slower = left > SLOWER_BY * promised and left > promised + SHORTEST_SHOWN_S
            left = left if slower else min(left, promised)  # never count up without reporting `slower`
        if left is not None:
            self._promised = (now_s, left)
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

    def _left(self, done: int, total: int, tokens_per_s: float) -> float | None:
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
        slope = max(0.0, slope)  # the cost never falls with the position: a negative slope is noise
        return (total - done) * (cost + slope * ((done + total) / 2 - middle))
