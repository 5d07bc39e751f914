"""Separate reasoning from the answer while streaming.

SmolLM3 writes its reasoning between `<think>` and `</think>`, each a single token. A tag may also be spelled in
ordinary tokens, omitted or truncated. Recognized tags are never shown, even if truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

from notso.smollm3.output.lookahead import Lookahead, Span, pending_length

OPEN = "<think>"
CLOSE = "</think>"

Piece = tuple[Literal["reasoning", "text"], Span]


class _State(Enum):
    BEFORE = auto()  # only whitespace so far, or since the last closing tag
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits a stream of (token id, text) into nonempty pieces of reasoning and text."""

    # Tag tokens are recognized anywhere. Tags in ordinary tokens are recognized at the start of an answer or of
    # reasoning, and closing tags also in the middle of reasoning. Unmatched closing tags, and newlines around the
    # reasoning and before the answer, are dropped. Reasoning without a closing tag stays reasoning.
    #
    # open_id, close_id: tag tokens, None if the model file has none.
    # starts_inside: the prompt ends inside reasoning.
    # goes_on: the prompt ends with the beginning of the answer, so leading newlines and spelled-out tags are text.
    # explicit_start: the answer starts only when `begin_answer` is called, so text that follows a closing tag in the
    # same token is dropped.
    def __init__(
        self,
        open_id: int | None,
        close_id: int | None,
        starts_inside: bool = False,
        goes_on: bool = False,
        explicit_start: bool = False,
    ) -> None:
        self._open_id = open_id
        self._close_id = close_id
        self._explicit_start = explicit_start
        self._lookahead = Lookahead()
        before = _State.ANSWER if goes_on else _State.BEFORE
        self._state = _State.REASONING if starts_inside else before
        self._fresh = not goes_on  # no reasoning has been shown since the opening tag

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def feed(self, token: int, text: str) -> list[Piece]:
        if token == self._open_id:
            pieces = self._flush_before_tag(text, OPEN)
            self._enter_reasoning()
        elif token == self._close_id:
            pieces = self._flush_before_tag(text, CLOSE)
            if self._state is _State.REASONING:
                self._state = _State.BEFORE
        else:
            pieces = self._scan(text)
        return pieces

    def begin_answer(self) -> None:
        self._lookahead.drop(len(self._lookahead.text))
        self._state = _State.ANSWER

    def finish(self) -> list[Piece]:
        """Return the rest of the text without a truncated tag."""
        return self._flush(len(self._lookahead.text), cut_off=True)

    def _flush_before_tag(self, text: str, tag: str) -> list[Piece]:
        before = text.removesuffix(tag)
        pieces = self._scan(before)
        pieces += self._flush(len(self._lookahead.text), cut_off=False)
        self._lookahead.add(text[len(before) :])
        self._lookahead.drop(len(self._lookahead.text))
        return pieces

    def _enter_reasoning(self) -> None:
        self._state = _State.REASONING
        self._fresh = True

    def _scan(self, text: str) -> list[Piece]:
        self._lookahead.add(text)
        pieces: list[Piece] = []
        while self._lookahead.text:
            if self._state is _State.BEFORE:
                goes_on = self._scan_start()
            elif self._state is _State.REASONING:
                goes_on = self._scan_reasoning(pieces)
            else:
                goes_on = False
                pieces.append(("text", self._lookahead.pop_text(len(self._lookahead.text))))
            if not goes_on:
                break
        return pieces

    def _scan_start(self) -> bool:
        begins = self._lookahead.text.lstrip()
        spaces = len(self._lookahead.text) - len(begins)
        if begins.startswith(OPEN):
            self._lookahead.drop(spaces + len(OPEN))
            self._enter_reasoning()
        elif begins.startswith(CLOSE):
            self._lookahead.drop(spaces + len(CLOSE))
        elif pending_length(begins, (OPEN, CLOSE)) == len(begins):
            return False
        else:
            self._lookahead.drop_newlines()
            self._state = _State.ANSWER
        return True

    def _scan_reasoning(self, pieces: list[Piece]) -> bool:
        if self._fresh:
            self._lookahead.drop_newlines()
            begins = self._lookahead.text.lstrip()
            if begins.startswith(OPEN):
                self._lookahead.drop(len(self._lookahead.text) - len(begins) + len(OPEN))
                return True
            if pending_length(begins, (OPEN, CLOSE)) == len(begins):
                return False
        before, tag, rest = self._lookahead.text.partition(CLOSE)
        if tag:
            pieces += self._flush(len(before), cut_off=False)
            self._lookahead.drop(len(CLOSE) + (len(rest) if self._explicit_start else 0))
            self._state = _State.BEFORE
            return True
        shown = before[: len(before) - pending_length(before, (CLOSE,))].rstrip("\n")
        if shown:
            pieces.append(("reasoning", self._lookahead.pop_text(len(shown))))
            self._fresh = False
        return False

    def _flush(self, length: int, cut_off: bool) -> list[Piece]:
        end = self._lookahead.start + length
        text = self._lookahead.text[:length]
        # A single "<" at the end may be text; a longer prefix of a tag is a truncated tag.
        tag = pending_length(text, (OPEN, CLOSE))
        if cut_off and tag > 1:
            text = text[:-tag]
        if self._state is _State.REASONING:
            text = text.rstrip("\n")
            pieces = self._pop_piece("reasoning", text) if not (self._fresh and text.isspace()) else []
        else:
            shown = text.lstrip("\n")
            self._lookahead.drop(len(text) - len(shown))
            pieces = self._pop_piece("text", shown) if not shown.isspace() else []
        self._lookahead.drop(end - self._lookahead.start)
        return pieces

    def _pop_piece(self, kind: Literal["reasoning", "text"], text: str) -> list[Piece]:
        return [(kind, self._lookahead.pop_text(len(text)))] if text else []


def ends_in_reasoning(prompt: Sequence[int], open_id: int | None, close_id: int | None) -> bool:
    """Return whether the prompt ends inside reasoning."""
    tags = (token for token in reversed(prompt) if token in (open_id, close_id))
    return next(tags, close_id) == open_id and open_id is not None
