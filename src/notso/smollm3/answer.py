"""From tokens to events: one answer being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from notso.smollm3.messages import Event, FinishReason, ToolCall
from notso.smollm3.stops import StopStrings
from notso.smollm3.thinking import ThinkingParser, opens_thinking
from notso.smollm3.tokenizer import Tokenizer
from notso.smollm3.tools import ToolCallParser


class Answer:
    """Turns an answer's tokens into reasoning, text and tool-call events, and knows when it is over.

    token bytes -> whole characters -> reasoning or answer -> (answer only) stop strings -> tool calls.
    Each stage holds back what it cannot decide yet.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        find_tool_calls: bool,
        goes_on: bool = False,
    ) -> None:
        """goes_on: the prompt ends with the beginning of this very answer."""
        self._characters = tokenizer.stream()
        self._end_ids = tokenizer.end_ids
        starts_inside = opens_thinking(prompt, tokenizer.think_open_id, tokenizer.think_close_id)
        self._thinking = ThinkingParser(tokenizer.think_open_id, tokenizer.think_close_id, starts_inside, goes_on)
        self._stops = StopStrings(stop)
        self._calls = ToolCallParser() if find_tool_calls else None
        self._called = False
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self.reasoning_tokens = 0

    def push(self, token: int) -> Iterator[Event]:
        """Events that this token makes certain. Sets `finish_reason` when it ends the answer."""
        self.tokens += 1
        if token in self._end_ids:
            self.finish_reason = "stop"
            return
        was_reasoning = self._thinking.in_reasoning
        pieces = self._thinking.feed(token, self._characters.push(token))
        self.reasoning_tokens += was_reasoning or self._thinking.in_reasoning
        yield from self._pieces(pieces)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning."""
        return self._thinking.in_reasoning

    def finish(self, reason: FinishReason) -> Iterator[Event]:
        """Everything held back, when the answer ends (for `reason`, unless it has ended by itself)."""
        over = self._stops_matched
        self.finish_reason = self.finish_reason or reason
        if not over:
            leftover = self._characters.finish()
            pieces = self._thinking.feed(-1, leftover) if leftover else []
            yield from self._pieces([*pieces, *self._thinking.finish()])
        if not self._stops_matched:
            yield from self._text(self._stops.finish())
        if self._calls is not None:
            yield from self._answer_pieces(self._calls.finish())
        if self._called and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    _stops_matched = False

    def _pieces(self, pieces: Sequence[tuple[str, str]]) -> Iterator[Event]:
        for kind, text in pieces:
            if kind == "reasoning":
                yield Event("reasoning", text, tokens=self.tokens)
                continue
            shown, matched = self._stops.push(text)
            yield from self._text(shown)
            if matched:
                self._stops_matched = True
                self.finish_reason = "stop"
                return

    def _text(self, text: str) -> Iterator[Event]:
        if self._calls is not None:
            yield from self._answer_pieces(self._calls.push(text))
        elif text:
            yield Event("text", text, tokens=self.tokens)

    def _answer_pieces(self, pieces: Sequence[str | ToolCall]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._called = True
                yield Event("tool_call", tool_call=piece)
            elif piece:
                yield Event("text", piece, tokens=self.tokens)
