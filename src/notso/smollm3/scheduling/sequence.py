"""Represent token sequences with their cache blocks, and the plans of steps that the scheduler creates and the engine
executes."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from notso.smollm3.scheduling.block_pool import NO_SALT, CacheSalt

PRIORITIES = {"interactive": 0, "api": 1, "background": 2}


@dataclass(eq=False)
class Sequence:
    """Tokens of a request. `blocks` holds the keys and values of the first `computed` tokens."""

    prompt: Tokens[int]
    salt: CacheSalt = NO_SALT
    priority: int = 0
    # Digest of the conversation to record in the sequence's cached blocks, if any.
    conversation: bytes | None = None
    # Digest of the reading (see block_pool) that pins the blocks of the prompt's prefix, if any.
    reading: bytes | None = None
    arrival: int = 0
    # Compute the whole prompt without cached blocks, with logits at all positions from `scored_from` on.
    scored: bool = False
    scored_from: int = 0
    adapter: Any = None  # not used by the scheduler
    owner: str = ""  # user or API key; the scheduler gives owners equal shares of the engine
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    # hashes[i]: hash of the salt and all tokens up to the end of full block i.
    hashes: list[bytes] = field(default_factory=list)
    batch_index: int | None = None  # row in the block tables while the sequence is running
    drafts: list[int] = field(default_factory=list)
    starvation_count: int = 0  # number of later arrivals that were admitted first (see MAX_STARVATION)
    cached: int = 0
    started: bool = False  # whether a chunk has been computed
    # Whether the partial block at the end must first be copied or loaded by the plan's moves, which may fail.
    awaits_move: bool = False
    # Whether it was preempted after it had started. `cached` then stays unchanged, because cached blocks may be its
    # own.
    returned: bool = False
    is_evicted: bool = False  # whether its conversation or reading was evicted; if so, no further blocks are registered

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def add_cached_block(self, block: int, count: int) -> None:
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
        """Number of uncomputed tokens before `scored_from`, or 0 if the prompt is not scored."""
        return max(self.scored_from - self.computed, 0) if self.scored else 0

    def block_owners(self, index: int) -> tuple[bytes | None, ...]:
        """Return the conversation and the reading to record in block `index`."""
        return self.conversation, self.reading if index < self.salt.shared_blocks else None

    def parent_hash(self, index: int) -> bytes:
        return self.salt.parent_hash(index, self.hashes[index - 1] if index else b"")

    @property
    def next_parent(self) -> bytes:
        """Parent hash of the first block that has no hash yet."""
        return self.parent_hash(len(self.hashes))


# Maximum number of rows per step. It limits a step's memory and the delay until a stop takes effect; it does not affect
# results.
MAX_ROWS = 512

# Maximum number of rows with logits per step: one per sequence, plus drafts. With a vocabulary of 128,256 tokens, the
# logits of a row take half a megabyte.
MAX_SAMPLED = 64


@dataclass(slots=True)
class Chunk:
    """Rows of one sequence in a step: its tokens [start, start + count), then its drafts."""

    sequence: Sequence
    start: int
    count: int
    drafts: list[int]
    samples: bool  # whether the logits of the last token and of the drafts are needed
    scores: bool = False  # whether the logits of all other tokens are also needed

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
    """Loads from disk block `hash` or, if `is_partial`, the partial block after it."""

    sequence: Sequence
    block: int
    hash: bytes
    is_partial: bool = False


@dataclass(slots=True)
class BlockCopy:
    """Copies a block and, if present, its window (see block_pool)."""

    source: int
    target: int
    source_window: int | None = None
    target_window: int | None = None


BlockMove: TypeAlias = BlockLoad | BlockCopy


@dataclass(slots=True)
class Plan:
    """Plan of a step: execute `moves`, then compute `chunks`."""

    chunks: list[Chunk] = field(default_factory=list)
    # Moves must be executed in order, because a later move may overwrite the source of an earlier one.
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
