"""Errors shown to users: a status and one sentence."""

from __future__ import annotations


class Problem(Exception):
    """Ends a request with an error for the user."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        draft: str = "",
        retry_after_seconds: int | None = None,
        full: bool = False,
        moved: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.draft = draft  # the user's text, so that no page loses it
        self.retry_after_seconds = retry_after_seconds
        self.full = full  # the context is full; the page offers remedies
        self.moved = moved  # the chat continued elsewhere; the page offers to show that
