"""What a step does: written by the scheduler, carried out by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from notso.smollm3.scheduling.sequence import Sequence

MAX_ROWS = 512
"""Rows of one step. Stopping, and the memory for a step, go by this; results do not depend on it."""

MAX_SAMPLED = 64
"""Rows of one step whose logits are wanted, one for each sequence and for drafts where there are few of them: half a
megabyte each with 128,256 tokens."""


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, then its drafts. `samples`: logits after the last token and after
    each draft are needed; `scores`: after each of the others too."""

    sequence: Sequence
    start: int
    count: int
    drafts: list[int]
    samples: bool
    scores: bool = False

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.count + len(self.drafts)

    @property
    def sampled_rows(self) -> int:
        """Rows whose logits are wanted, the last ones."""
        if self.scores:
            return self.rows
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def tokens(self) -> list[int]:
        """The token of each row."""
        return self.sequence.tokens[self.start : self.start + self.count] + self.drafts


@dataclass(slots=True)
class BlockLoad:
    """Block `block` of a sequence is read from the disk: the full one known by `hash` or, if `is_partial`, the partial
    one that was kept after `hash`. Then `Scheduler.loaded` or `Scheduler.load_failed` is called."""

    sequence: Sequence
    block: int
    hash: bytes
    is_partial: bool = False


@dataclass(slots=True)
class BlockCopy:
    """One block is given the content of another, and its window, where there is one, that of the other's window."""

    source: int
    target: int
    source_window: int | None = None
    target_window: int | None = None


BlockMove: TypeAlias = BlockLoad | BlockCopy


@dataclass(slots=True)
class Plan:
    """What the next step does: first `moves`, in this order, since what is copied from may be given away further down
    the list; then `chunks`."""

    chunks: list[Chunk] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def sampled_rows(self) -> int:
        """Those whose logits are wanted."""
        return sum(chunk.sampled_rows for chunk in self.chunks)

    @property
    def loads(self) -> list[BlockLoad]:
        """Those moves that read from the disk."""
        return [move for move in self.moves if isinstance(move, BlockLoad)]

    def __bool__(self) -> bool:
        return bool(self.chunks or self.moves)
