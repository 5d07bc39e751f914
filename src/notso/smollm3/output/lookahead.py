"""Text that has to wait because it may be the beginning of something, and where in its stream it stands."""

from __future__ import annotations

from collections.abc import Iterable


class Span(str):
    """A span of a stream's text that knows at which character of the stream it begins."""

    __slots__ = ("start",)
    start: int

    def __new__(cls, text: str, start: int) -> Span:
        span = super().__new__(cls, text)
        span.start = start
        return span


class Lookahead:
    """The end of a growing stream, from its character `start` on: given out or dropped from the front, in order."""

    def __init__(self) -> None:
        self.text = ""
        self.start = 0

    def add(self, text: str) -> None:
        """More of the stream."""
        self.text += text

    def give(self, length: int) -> Span:
        """The first `length` characters, which are held no longer."""
        given = Span(self.text[:length], self.start)
        self.drop(length)
        return given

    def drop(self, length: int) -> None:
        """Forget the first `length` characters."""
        self.text = self.text[length:]
        self.start += length

    def drop_newlines(self) -> None:
        """Forget the newlines at the front."""
        self.drop(len(self.text) - len(self.text.lstrip("\n")))


def pending_length(text: str, patterns: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `patterns` begins, but which is not all of it."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(text), len(pattern) - 1), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest
