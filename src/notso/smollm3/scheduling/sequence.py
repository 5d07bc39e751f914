"""One answer being computed, as the scheduler sees it: tokens and blocks, nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

PRIORITIES = {"interactive": 0, "api": 1, "background": 2}


@dataclass(eq=False)
class Sequence:
    """Tokens of prompt and answer; the first `computed` of them have their keys and values in `blocks`, in order.

    `hashes[i]` stands for all tokens up to the end of block i, for the blocks that are full; the first one is made from
    `salt`. `conversation` is noted at every block it computes or finds (None: at none). `batch_index` is its row in the
    block tables while it runs. `drafts` are draft tokens behind `tokens`, to be verified with the next step.
    `owner`: owners take turns (see scheduler.py).
    `adapter`: what the model computes it with besides its weights, which is the model's own affair.
    `scored`: logits after each token of the prompt are wanted, so all of it is computed, in smaller steps.
    """

    prompt: Tokens[int]
    salt: bytes = b""
    priority: int = 0
    conversation: bytes | None = None
    arrival: int = 0
    scored: bool = False
    adapter: Any = None
    owner: str = ""
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    batch_index: int | None = None
    drafts: list[int] = field(default_factory=list)
    starvation_count: int = 0  # later arrivals that were admitted before it
    cached: int = 0  # tokens of the prompt that did not have to be computed
    started: bool = False  # something was computed
    returned: bool = False  # it had to leave after that: what it finds now may be its own
    is_evicted: bool = False  # its conversation was: nobody finds what it computes from here on

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def found(self, block: int, count: int) -> None:
        """The next `count` tokens need not be computed: their keys and values are in `block`, or will be."""
        self.blocks.append(block)
        self.computed += count
        self.cached += 0 if self.returned else count

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed: the rest of the prompt, or the last token drawn."""
        return len(self.tokens) - self.computed

    @property
    def is_scoring(self) -> bool:
        """Whether logits after each of the next tokens are wanted."""
        return self.scored and self.computed < len(self.prompt)

    @property
    def last_hash(self) -> bytes:
        """What stands for the tokens of all full blocks."""
        return self.hashes[-1] if self.hashes else self.salt
