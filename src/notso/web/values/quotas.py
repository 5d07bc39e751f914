"""Define quotas, and reservations of the maximum number of tokens that a request may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Quota:
    """Daily limits (UTC); 0 means no limit."""

    requests: int = 0
    tokens: int = 0  # of prompts and answers


@dataclass(frozen=True, slots=True)
class MaxTokenUse:
    """Maximum numbers of tokens of one request."""

    prompt_tokens: int
    answer_tokens: int  # 0: the prompt is processed, but nothing is generated


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens reserved for one request."""

    id: str
    day: date
    owner: str
    prompt_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def allocate_tokens(left: int, uses: Sequence[MaxTokenUse]) -> list[int] | None:
    """Subtract the prompts' tokens from `left` and divide the rest among the answers. Return None if too few remain."""
    # Each answer gets an equal share, but not more than it needs; the rest of its share goes to the other answers.
    left -= sum(each.prompt_tokens for each in uses)
    if left < sum(1 for each in uses if each.answer_tokens):
        return None
    shares = [0] * len(uses)
    for done, at in enumerate(sorted(range(len(uses)), key=lambda at: uses[at].answer_tokens)):
        shares[at] = min(uses[at].answer_tokens, left // (len(uses) - done))
        left -= shares[at]
    return shares
