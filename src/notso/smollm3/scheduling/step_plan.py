"""What a step does: written by the scheduler, carried out by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.smollm3.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, then its drafts. `samples`: logits after the last token and after
    each draft are needed."""

    sequence: Sequence
    start: int
    count: int
    drafts: list[int]
    samples: bool

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.count + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The token of each row."""
        return self.sequence.tokens[self.start : self.start + self.count] + self.drafts


@dataclass(slots=True)
class Restore:
    """Before the step: block `block` of a sequence is read from the shelf, the full one known by `key` or, if
    `is_tail`, the part that was kept after `key`. Then `Scheduler.read` or `Scheduler.unread` is called."""

    sequence: Sequence
    block: int
    key: bytes
    is_tail: bool = False


@dataclass(slots=True)
class Plan:
    """What the next step does."""

    chunks: list[Chunk] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.restores)
