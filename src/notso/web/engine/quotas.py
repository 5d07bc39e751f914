"""What stands in front of the engine where owners have quotas: how much a request may use is known before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from notso.web.engine.port import ChatEngine, Generation, Message, PromptInput, RequestOptions, SamplingParams, Usage
from notso.web.values.quotas import Reservation, Wanted


class Quotas(Protocol):
    """Keeps them. On the event loop."""

    def has_quota(self, owner: str) -> bool:
        """Whether there is one for that owner."""

    async def reserve(self, owner: str, wanted: Sequence[Wanted]) -> list[Reservation]:
        """Hold what these requests may use. Raises QuotaError, and StorageError where it cannot be known."""

    async def allows(self, owner: str, prompt_tokens: int) -> bool:
        """Whether a prompt of that length and a token of answer would still fit."""

    def ended(self, owner: str, usage: Usage | None, reservation: Reservation | None) -> None:
        """A request has ended, and this is what it used."""

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Those requests never began."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as the engine gets it; `begin` submits it as `engine` has prepared it, once."""

    prompt: PromptInput
    params: SamplingParams
    options: RequestOptions
    engine: ChatEngine | None = None
    begin: Callable[[], Generation] | None = None

    def to(self, engine: ChatEngine) -> Generation:
        """Submit it. May raise ModelError."""
        if self.begin is not None and self.engine is engine:
            return self.begin()
        return engine.submit(self.prompt, self.params, self.options)

    def cut_to(self, answer_tokens: int) -> Submission:
        """With at most so many tokens of answer (0: none was wanted); what was prepared does not serve then."""
        most = self.params.max_tokens
        if not answer_tokens or (most is not None and most <= answer_tokens):
            return self
        least = min(self.params.min_tokens, answer_tokens)
        params = replace(self.params, max_tokens=answer_tokens, min_tokens=least)
        return replace(self, params=params, engine=None, begin=None)


@dataclass(frozen=True, slots=True)
class Submissions:
    """All that one request asks of the engine, one after the other."""

    each: tuple[Submission, ...]

    def __call__(self, engine: ChatEngine) -> Iterator[Generation]:
        """Submit them. May raise ModelError."""
        return (each.to(engine) for each in self.each)


def wanted_of(engine: ChatEngine, submission: Submission) -> Wanted:
    """What it may cost. Raises ModelError. Takes time: not on the loop."""
    prompt, options, context = submission.prompt, submission.options, engine.info.context_tokens
    if isinstance(prompt, str):
        length = len(engine.tokenize(prompt))
    elif len(prompt) and isinstance(prompt[0], int):
        length = len(prompt)
    else:
        length = engine.count_tokens(cast(Sequence[Message], prompt), options)
    length = min(length, context)  # of a longer one the oldest is dropped, or the engine refuses it
    room = max(1, context - length)
    return Wanted(length, 0 if options.prompt_only else min(submission.params.max_tokens or room, room))
