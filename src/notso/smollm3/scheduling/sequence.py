"""One answer being computed, as the scheduler sees it: tokens and blocks, nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

RANKS = {"interactive": 0, "api": 1, "background": 2}


@dataclass(eq=False)
class Sequence:
    """Tokens of prompt and answer; the first `computed` of them have their keys and values in `blocks`, in order.

    `root` is the key that its content begins after; `keys[i]` stands for all tokens up to the end of block i, for the
    blocks that are full. `slot` is its row in the block tables while it runs. `drafts` are guesses at what follows
    `tokens`, to be verified with the next step.
    """

    prompt: Tokens[int]
    root: bytes = b""
    rank: int = 0
    arrival: int = 0
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    drafts: list[int] = field(default_factory=list)
    passed_over: int = 0
    cached: int = 0  # tokens of the prompt that did not have to be computed
    started: bool = False  # something was computed
    returned: bool = False  # it had to leave after that: what it finds now may be its own

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
    def key(self) -> bytes:
        """What stands for the tokens of all full blocks."""
        return self.keys[-1] if self.keys else self.root
