"""Sequences of tokens and their blocks, as seen by the scheduler, and the plan of a step, which the engine executes."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from notso.smollm3.scheduling.block_pool import NO_SALT, CacheSalt

PRIORITIES = {"interactive": 0, "api": 1, "background": 2}


@dataclass(eq=False)
class Sequence:
    """Tokens, the first `computed` of them in `blocks`."""

    # hashes[i] covers all tokens up to the end of full block i, and the salts. `conversation` is recorded at every
    # block (None: not recorded), `reading` at those of the fixed prefix. `batch_index`: row in the block tables while
    # running. `owner`: unit of fair scheduling. `adapter` is opaque here. `scored`: the whole prompt is computed, with
    # logits of the tokens from `scored_from`.
    prompt: Tokens[int]
    salt: CacheSalt = NO_SALT
    priority: int = 0
    conversation: bytes | None = None
    reading: bytes | None = None
    arrival: int = 0
    scored: bool = False
    scored_from: int = 0
    adapter: Any = None
    owner: str = ""
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    batch_index: int | None = None
    drafts: list[int] = field(default_factory=list)  # to be verified in the next step
    starvation_count: int = 0  # later arrivals admitted earlier
    cached: int = 0  # prompt tokens that were not computed
    started: bool = False  # something was computed
    returned: bool = False  # preempted since, so cached tokens may be its own
    is_evicted: bool = False  # its conversation was evicted: further blocks are not registered

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def found(self, block: int, count: int) -> None:
        self.blocks.append(block)
        self.computed += count
        self.cached += 0 if self.returned else count

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_scoring(self) -> bool:
        return self.scored and self.scored_from <= self.computed < len(self.prompt)

    @property
    def unscored(self) -> int:
        """Tokens before those that need logits; 0 if none do."""
        return max(self.scored_from - self.computed, 0) if self.scored else 0

    def kept_by(self, index: int) -> tuple[bytes | None, ...]:
        """Return the conversation, and any reading, that block `index` is recorded for."""
        return self.conversation, self.reading if index < self.salt.shared_blocks else None

    def parent_hash(self, index: int) -> bytes:
        return self.salt.parent_hash(index, self.hashes[index - 1] if index else b"")

    @property
    def next_parent(self) -> bytes:
        """What the first block without a hash is hashed after."""
        return self.parent_hash(len(self.hashes))


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
