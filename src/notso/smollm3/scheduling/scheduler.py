"""Who computes what in the next step: many sequences, one model, a fixed number of cache blocks.

A pure state machine: `schedule` says which tokens of which sequences the next step computes, `advance` tells it what
came of it. Sequences that are being answered get their next token in every step; what is left of a step reads prompts,
so that running chats keep moving while a long prompt is read. When blocks run out, the sequence of the lowest rank
that came last gives its blocks back and waits; what it had computed is cached as long as there is room.

Rank is the priority first, then the order of arrival; who was passed over too often comes first. So the first in rank
always gets on, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from notso.smollm3.common_prefix import common_length
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, OutOfBlocksError, PrefixCache, block_key
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.scheduling.step_plan import Chunk, Plan, Restore

FEW_ROWS = 8
"""A sequence with at most so many tokens to compute does not count as reading its prompt."""

MAX_PASSED_OVER = 16
"""So many later arrivals may be admitted before a waiting sequence goes first, whatever its priority."""

RESTORES_PER_STEP = 8
"""Blocks brought back from disk between two steps: running chats should not feel it."""


class Shelf(Protocol):
    """Where blocks lie that are not in memory."""

    def has(self, key: bytes) -> bool:
        """Whether the full block known by `key` is there."""

    def tail(self, parent: bytes) -> list[int]:
        """The tokens of the part of a block that was kept after `parent`; empty if there is none."""


class Scheduler:
    """Not thread-safe. `waiting` and `running` are in no particular order; see `queue`."""

    def __init__(
        self,
        cache: PrefixCache,
        max_num_seqs: int,
        shelf: Shelf | None = None,
        can_be_cut: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`can_be_cut`: whether a part of a block's content can be used without the rest."""
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.copy: Callable[[int, int], None] = lambda source, target: None
        """Gives one block the content of another, at once: a little later the first may be somebody else's."""
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._shelf = shelf
        self._can_be_cut = can_be_cut
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def queue(self) -> list[Sequence]:
        """Those that wait, the next one first."""
        return sorted(self.waiting, key=_rank)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn. Its whole length must fit into the blocks there are."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is over, or given up, wherever it is. Its blocks are free, their content stays findable."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._leave(sequence)

    def schedule(self, prompt_tokens: int, max_rows: int) -> Plan:
        """The next step: one row, or the drafts too, for each sequence that answers, and up to `prompt_tokens` of
        prompts, in `max_rows` rows altogether. Empty only when nothing waits or runs, or blocks that somebody else took
        from the cache are lacking."""
        plan = Plan()
        self._admit(plan)
        for sequence in sorted(self.running, key=_rank):
            room = max_rows - plan.rows
            if room > 0 and sequence.slot is not None and sequence.pending <= FEW_ROWS:
                self._plan_chunk(sequence, min(sequence.pending, room), plan)
        room = min(prompt_tokens, max_rows - plan.rows)
        for sequence in sorted(self.running, key=_rank):
            if room < 1:
                break
            if sequence.slot is not None and sequence.pending > FEW_ROWS and not self._match(sequence, plan):
                room -= self._plan_chunk(sequence, min(sequence.pending, room), plan)
        return plan

    def advance(self, chunk: Chunk, accepted: int = 0) -> None:
        """The step computed a chunk, and `accepted` of its drafts were right (the caller appends them to `tokens`
        first). A sequence that was removed meanwhile is left alone."""
        sequence = chunk.sequence
        if sequence.slot is None:
            return
        sequence.started = True
        sequence.computed = chunk.start + chunk.count + accepted
        while (len(sequence.keys) + 1) * BLOCK_TOKENS <= sequence.computed:
            at = len(sequence.keys) * BLOCK_TOKENS
            tokens = sequence.tokens[at : at + BLOCK_TOKENS]
            parent = sequence.key
            self.cache.register(sequence.blocks[len(sequence.keys)], parent, tokens)
            sequence.keys.append(block_key(parent, tokens))

    def unread(self, restore: Restore) -> None:
        """A block could not be brought back: it and what follows must be computed. Chunks of the sequence are void."""
        sequence = restore.sequence
        if sequence.slot is None or restore.block not in sequence.blocks:
            return
        before = sequence.computed
        self._cut(sequence, sequence.blocks.index(restore.block))
        if not sequence.returned:
            sequence.cached -= before - sequence.computed

    def read(self, restore: Restore) -> None:
        """A block was brought back: others may find it."""
        sequence = restore.sequence
        if restore.is_tail or restore.block not in sequence.blocks:
            return
        index = sequence.blocks.index(restore.block)
        parent = sequence.keys[index - 1] if index else sequence.root
        at = index * BLOCK_TOKENS
        self.cache.register(restore.block, parent, sequence.tokens[at : at + BLOCK_TOKENS])

    def cached_length(self, root: bytes, tokens: list[int]) -> int:
        """How many of a prompt's tokens would not have to be computed now. Nothing changes."""
        parent, at = root, 0
        while at + BLOCK_TOKENS < len(tokens):
            piece = tokens[at : at + BLOCK_TOKENS]
            key = block_key(parent, piece)
            if self.cache.find(parent, piece) is None and not (self._shelf is not None and self._shelf.has(key)):
                break
            parent, at = key, at + BLOCK_TOKENS
        return at + self.cache.find_beginning(parent, tokens[at:-1], self._can_be_cut)[1]

    # Coming and going

    def _admit(self, plan: Plan) -> None:
        for sequence in self.queue():
            if not self._slots or not self._fits(sequence):
                return
            self.waiting.remove(sequence)
            for other in self.waiting:
                other.passed_over += other.arrival < sequence.arrival
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            self._match(sequence, plan)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its prompt fits beside those that run, each of which may soon need a block more. Alone it always
        fits, unless blocks were taken from the cache by others than sequences."""
        needed = -(-len(sequence.tokens) // BLOCK_TOKENS)
        return needed + len(self.running) <= self.cache.available

    def _leave(self, sequence: Sequence) -> None:
        """Give back slot and blocks. The last ones go first when room is needed, so a beginning outlives its end."""
        full = len(sequence.keys)
        if full < len(sequence.blocks) and sequence.computed > full * BLOCK_TOKENS:
            tail = sequence.tokens[full * BLOCK_TOKENS : sequence.computed]
            self.cache.register(sequence.blocks[full], sequence.key, tail)
        for block in reversed(sequence.blocks):
            self.cache.release(block)
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
        sequence.blocks, sequence.keys, sequence.slot, sequence.computed = [], [], None, 0
        sequence.drafts = []
        self.running.remove(sequence)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not sequence]
        for restore in [restore for restore in plan.restores if restore.sequence is sequence]:
            plan.restores.remove(restore)
            self.unread(restore)  # nothing was read into it
        self._leave(sequence)
        sequence.returned = sequence.started
        sequence.cached = sequence.cached if sequence.started else 0
        self.waiting.append(sequence)
        plan.preempted.append(sequence)
        self.preemptions += 1

    # Blocks

    def _plan_chunk(self, sequence: Sequence, count: int, plan: Plan) -> int:
        """Add `count` tokens (and the drafts, if they are the last ones) to the plan; how many were added."""
        samples = count == sequence.pending
        drafts = sequence.drafts if samples else []
        length = sequence.computed + count
        if not self._make_room(sequence, length, plan):
            return 0
        if drafts and not self._has_room(sequence, length + len(drafts)):
            drafts = []  # nobody gives way to guesses
        self._make_room(sequence, length + len(drafts), plan)
        plan.chunks.append(Chunk(sequence, sequence.computed, count, list(drafts), samples))
        return count

    def _cut(self, sequence: Sequence, index: int) -> None:
        """What is in blocks from number `index` on must be computed."""
        for block in sequence.blocks[index:]:
            self.cache.release(block)
        del sequence.blocks[index:], sequence.keys[index:]
        sequence.computed = index * BLOCK_TOKENS

    def _make_room(self, sequence: Sequence, length: int, plan: Plan) -> bool:
        """Blocks for the first `length` tokens, at the cost of sequences lower in rank; False if it had to leave."""
        while len(sequence.blocks) * BLOCK_TOKENS < length:
            block = self._take(sequence, plan)
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _has_room(self, sequence: Sequence, length: int) -> bool:
        return -(-length // BLOCK_TOKENS) - len(sequence.blocks) <= self.cache.available

    def _take(self, sequence: Sequence, plan: Plan) -> int | None:
        while True:
            try:
                return self.cache.take()
            except OutOfBlocksError:
                last = max(self.running, key=_rank)
                self._preempt(last, plan)
                if last is sequence:
                    return None

    def _match(self, sequence: Sequence, plan: Plan) -> bool:
        """Take over what is cached of the tokens that come next. True if it has to wait for more from the shelf, or had
        to leave.

        The last token is always computed: its logits are wanted.
        """
        while sequence.computed == len(sequence.blocks) * BLOCK_TOKENS and sequence.pending > BLOCK_TOKENS:
            piece = sequence.tokens[sequence.computed : sequence.computed + BLOCK_TOKENS]
            parent = sequence.key
            block = self.cache.find(parent, piece)
            key = block_key(parent, piece)
            if block is not None:
                self.cache.share(block)
            elif self._shelf is not None and self._shelf.has(key):
                block = None if len(plan.restores) >= RESTORES_PER_STEP else self._take(sequence, plan)
                if block is None:
                    return True
                plan.restores.append(Restore(sequence, block, key))
            else:
                break
            sequence.keys.append(key)
            sequence.found(block, BLOCK_TOKENS)
        if sequence.computed == len(sequence.blocks) * BLOCK_TOKENS:
            self._match_beginning(sequence, plan)
        return False

    def _match_beginning(self, sequence: Sequence, plan: Plan) -> None:
        """The same for a part of a block: written on where it lies if nobody else needs it, else on a copy."""
        piece = sequence.tokens[sequence.computed : len(sequence.tokens) - 1][:BLOCK_TOKENS]
        source, common = self.cache.find_beginning(sequence.key, piece, self._can_be_cut)
        kept = self._shelf.tail(sequence.key) if self._shelf is not None else []
        on_shelf = common_length(kept, piece)
        if max(common, on_shelf) == 0:
            return
        if common >= on_shelf and self.cache.take_over(source, common):
            block = source
        elif common >= on_shelf:
            copied = self._copied(source)
            if copied is None:
                return
            block = copied
        elif not self.cache.available:
            return
        else:
            common, block = on_shelf, self.cache.take()
            plan.restores.append(Restore(sequence, block, sequence.key, is_tail=True))
        sequence.found(block, common)

    def _copied(self, source: int) -> int | None:
        """A block with the content of another, or None where there is no room for it."""
        self.cache.share(source)  # lest it be taken for the copy
        block = None
        try:
            block = self.cache.take()
            self.copy(source, block)
        except OutOfBlocksError:
            if block is not None:
                self.cache.release(block)
            return None
        finally:
            self.cache.release(source)
        return block


def _rank(sequence: Sequence) -> tuple[int, int]:
    return (-1 if sequence.passed_over > MAX_PASSED_OVER else sequence.rank, sequence.arrival)
