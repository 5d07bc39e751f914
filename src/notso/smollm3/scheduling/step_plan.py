"""Plan of a step: written by the scheduler, executed by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from notso.smollm3.scheduling.sequence import Sequence

# Rows per step, which bounds its memory and the delay of a stop; results do not depend on it.
MAX_ROWS = 512

# Rows with logits per step, half a megabyte each with 128,256 tokens: one per sequence, and drafts if there are few.
MAX_SAMPLED = 64


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count), then drafts."""

    sequence: Sequence
    start: int
    count: int
    drafts: list[int]
    samples: bool  # logits of the last token and the drafts are needed
    scores: bool = False  # logits of all other tokens are needed, too

    @property
    def rows(self) -> int:
        return self.count + len(self.drafts)

    @property
    def sampled_rows(self) -> int:
        """Rows with logits, which come last."""
        if self.scores:
            return self.rows
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count] + self.drafts


@dataclass(slots=True)
class BlockLoad:
    """Load of block `hash`, or the partial block after it."""

    # Answered by `Scheduler.loaded` or `Scheduler.load_failed`.
    sequence: Sequence
    block: int
    hash: bytes
    is_partial: bool = False


@dataclass(slots=True)
class BlockCopy:
    """Copy of a block and its window."""

    source: int
    target: int
    source_window: int | None = None
    target_window: int | None = None


BlockMove: TypeAlias = BlockLoad | BlockCopy


@dataclass(slots=True)
class Plan:
    """A step: first `moves`, then `chunks`."""

    chunks: list[Chunk] = field(default_factory=list)
    # Moves run in order: a source may be reused further down the list.
    moves: list[BlockMove] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def sampled_rows(self) -> int:
        return sum(chunk.sampled_rows for chunk in self.chunks)

    @property
    def loads(self) -> list[BlockLoad]:
        return [move for move in self.moves if isinstance(move, BlockLoad)]

    def __bool__(self) -> bool:
        return bool(self.chunks or self.moves)
