"""Buffered end of a text stream, held back while its meaning is undecided."""

from __future__ import annotations

from collections.abc import Iterable


class Span(str):
    """Text with its position in the stream."""

    __slots__ = ("start",)
    start: int

    def __new__(cls, text: str, start: int) -> Span:
        span = super().__new__(cls, text)
        span.start = start
        return span


class Lookahead:
    """Undecided end of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self.start = 0

    def add(self, text: str) -> None:
        self.text += text

    def give(self, length: int) -> Span:
        """Release the first characters."""
        given = Span(self.text[:length], self.start)
        self.drop(length)
        return given

    def drop(self, length: int) -> None:
        self.text = self.text[length:]
        self.start += length

    def drop_newlines(self) -> None:
        self.drop(len(self.text) - len(self.text.lstrip("\n")))


def pending_length(text: str, patterns: Iterable[str]) -> int:
    """Return the length of the longest suffix that starts a pattern."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(text), len(pattern) - 1), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest
