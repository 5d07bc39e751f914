"""What a request to the model may use of a quota: asked for before it begins, given back as far as it was not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Quota:
    """Most requests, and tokens of prompts and answers, of one day, UTC. 0: no limit."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request: the tokens of its prompt, and at most so many of its answer (0: the prompt alone is read)."""

    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request and these tokens are held for an owner: the prompt and `answer_tokens`."""

    id: str
    day: date
    owner: str
    prompt_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens


def granted(left: int, wanted: Sequence[Wanted]) -> list[int] | None:
    """Answer tokens for each of `wanted` so that all prompts and answers together fit into `left`, in equal shares
    where it is not enough for all; None where an answer would get none."""
    left -= sum(each.prompt_tokens for each in wanted)
    if left < sum(1 for each in wanted if each.answer_tokens):
        return None
    shares = [0] * len(wanted)
    for done, at in enumerate(sorted(range(len(wanted)), key=lambda at: wanted[at].answer_tokens)):
        shares[at] = min(wanted[at].answer_tokens, left // (len(wanted) - done))
        left -= shares[at]
    return shares
