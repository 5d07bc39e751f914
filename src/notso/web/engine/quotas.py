"""Quota enforcement in front of the engine: a request's maximum use is reserved before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from notso.web.engine.port import ChatEngine, Generation, Message, PromptInput, RequestOptions, SamplingParams, Usage
from notso.web.values.quotas import Reservation, Wanted


class Quotas(Protocol):
    """Quota accounting. Use on the event loop."""

    def has_quota(self, owner: str) -> bool: ...

    async def reserve(self, owner: str, wanted: Sequence[Wanted]) -> list[Reservation]:
        """Reserve the requests' maximum use. Raise QuotaError or StorageError."""

    async def allows(self, owner: str, prompt_tokens: int) -> bool:
        """Return whether this prompt and one answer token fit."""

    def ended(self, owner: str, usage: Usage | None, reservation: Reservation | None) -> None:
        """Account a request's actual use."""

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Free reservations of requests that never started."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One engine request."""

    prompt: PromptInput
    params: SamplingParams
    options: RequestOptions
    engine: ChatEngine | None = None
    begin: Callable[[], Generation] | None = None  # submits what `engine` has prepared, once

    def to(self, engine: ChatEngine) -> Generation:
        """Submit. May raise ModelError."""
        if self.begin is not None and self.engine is engine:
            return self.begin()
        return engine.submit(self.prompt, self.params, self.options)

    def cut_to(self, answer_tokens: int) -> Submission:
        """Limit the answer's tokens (0: no answer requested)."""
        most = self.params.max_tokens
        if not answer_tokens or (most is not None and most <= answer_tokens):
            return self
        least = min(self.params.min_tokens, answer_tokens)
        params = replace(self.params, max_tokens=answer_tokens, min_tokens=least)
        # A prepared request has the old limit.
        return replace(self, params=params, engine=None, begin=None)


@dataclass(frozen=True, slots=True)
class Submissions:
    """All engine requests of one API request."""

    each: tuple[Submission, ...]

    def __call__(self, engine: ChatEngine) -> Iterator[Generation]:
        return (each.to(engine) for each in self.each)


def wanted_of(engine: ChatEngine, submission: Submission) -> Wanted:
    """Return the maximum use. Raise ModelError. Blocks."""
    prompt, options = submission.prompt, submission.options
    context = engine.info.context_of(options)
    if isinstance(prompt, str):
        length = len(engine.tokenize(prompt))
    elif len(prompt) and isinstance(prompt[0], int):
        length = len(prompt)
    else:
        length = engine.count_tokens(cast(Sequence[Message], prompt), options)
    length = min(length, context)  # a longer prompt is trimmed or rejected by the engine
    room = max(1, context - length)
    return Wanted(length, 0 if options.prompt_only else min(submission.params.max_tokens or room, room))
