"""Errors on their way to a person: a status and one sentence, shown in place or as a page."""

from __future__ import annotations


class Problem(Exception):
    """Ends a request. `draft` is what the person had written, so that no page loses it. `full`: the context is, and the
    page offers what helps. `moved`: the chat has continued beyond what the page shows, and it offers to show that."""

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
        self.draft = draft
        self.retry_after_seconds = retry_after_seconds
        self.full = full
        self.moved = moved
