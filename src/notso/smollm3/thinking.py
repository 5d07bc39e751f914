"""Tells the model's reasoning from its answer while tokens arrive.

SmolLM3 thinks between `<think>` and `</think>`, each a token of its own. A model may also spell a tag out in ordinary
tokens, leave one out, or be cut off within one. No tag, nor part of one, ever shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

from notso.smollm3.held_text import pending_length

OPEN = "<think>"
CLOSE = "</think>"

Piece = tuple[Literal["reasoning", "text"], str]


class _State(Enum):
    BEFORE = auto()  # nothing but whitespace so far, or since the last closing tag
    REASONING = auto()
    ANSWER = auto()


class ThinkingParser:
    """Fed with (token id, text it completed); yields ("reasoning" | "text", text) pieces, never empty.

    Tags are known by id anywhere. Spelt out, an opening tag counts only where an answer begins, a closing one there and
    in reasoning; further on in an answer such words are the answer's. A closing tag without an opening one is dropped.
    Newlines at either end of reasoning and at the beginning of an answer are dropped. Reasoning that never ends stays
    reasoning.

    starts_inside: the prompt already opened the reasoning (`opens_thinking`). goes_on: the prompt holds the beginning
    of this reasoning or answer, so nothing of what follows is dropped. Ids are None where the file has no tags.
    """

    def __init__(
        self, open_id: int | None, close_id: int | None, starts_inside: bool = False, goes_on: bool = False
    ) -> None:
        self._open_id = open_id
        self._close_id = close_id
        self._held = ""
        before = _State.ANSWER if goes_on else _State.BEFORE
        self._state = _State.REASONING if starts_inside else before
        self._fresh = not goes_on  # no reasoning shown since it was opened

    @property
    def in_reasoning(self) -> bool:
        """Whether the last token fed was reasoning (or opened it); for counting."""
        return self._state is _State.REASONING

    def feed(self, token: int, text: str) -> list[Piece]:
        """Pieces that are certain after this token. `text` may be empty, and ends with the tag's spelling for a tag."""
        if token == self._open_id:
            pieces = self._scan(text.removesuffix(OPEN)) + self._flush(cut_off=False)
            self._open()
        elif token == self._close_id:
            pieces = self._scan(text.removesuffix(CLOSE)) + self._flush(cut_off=False)
            if self._state is _State.REASONING:
                self._state = _State.BEFORE
        else:
            pieces = self._scan(text)
        return pieces

    def finish(self) -> list[Piece]:
        """What is left when the answer ends; a tag that was cut off is dropped."""
        return self._flush(cut_off=True)

    def _open(self) -> None:
        self._state = _State.REASONING
        self._fresh = True

    def _scan(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._state is _State.BEFORE:
                goes_on = self._scan_before()
            elif self._state is _State.REASONING:
                goes_on = self._scan_reasoning(pieces)
            else:
                goes_on = False
                pieces.append(("text", self._held))
                self._held = ""
            if not goes_on:
                break
        return pieces

    def _scan_before(self) -> bool:
        """Decide what begins here; false while that is open."""
        begins = self._held.lstrip()
        if begins.startswith(OPEN):
            self._held = begins.removeprefix(OPEN)
            self._open()
        elif begins.startswith(CLOSE):
            self._held = begins.removeprefix(CLOSE)
        elif pending_length(begins, (OPEN, CLOSE)) == len(begins):
            return False
        else:
            self._held = self._held.lstrip("\n")
            self._state = _State.ANSWER
        return True

    def _scan_reasoning(self, pieces: list[Piece]) -> bool:
        """Give away reasoning up to its end; false if that is not here yet."""
        if self._fresh:
            self._held = self._held.lstrip("\n")
            begins = self._held.lstrip()
            if begins.startswith(OPEN):
                self._held = begins.removeprefix(OPEN)
                return True
            if pending_length(begins, (OPEN, CLOSE)) == len(begins):
                return False
        before, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._held = before
            pieces += self._flush(cut_off=False)
            self._held, self._state = rest, _State.BEFORE
            return True
        shown = before[: len(before) - pending_length(before, (CLOSE,))].rstrip("\n")
        if shown:
            pieces.append(("reasoning", shown))
            self._held, self._fresh = before[len(shown) :], False
        return False

    def _flush(self, cut_off: bool) -> list[Piece]:
        """What was held back, before a tag or at the end."""
        text, self._held = self._held, ""
        # A lone "<" may well be meant; more of a tag at the very end is a tag that was cut off.
        tag = pending_length(text, (OPEN, CLOSE))
        if cut_off and tag > 1:
            text = text[:-tag]
        if self._state is _State.REASONING:
            text = text.rstrip("\n")
            return [("reasoning", text)] if text and not (self._fresh and text.isspace()) else []
        text = text.lstrip("\n")
        return [("text", text)] if text and not text.isspace() else []


def opens_thinking(prompt: Sequence[int], open_id: int | None, close_id: int | None) -> bool:
    """Whether a prompt's last thinking tag is an opening one, so that the answer starts inside the reasoning."""
    tags = (token for token in reversed(prompt) if token in (open_id, close_id))
    return next(tags, close_id) == open_id and open_id is not None
