"""Schedule many sequences on one model with a fixed number of cache blocks (continuous batching).

The scheduler is a pure state machine: `schedule` plans the tokens of the next step, and `advance` records its outcome.
Every step contains the pending tokens of all decoding sequences, usually one each; the remaining rows are prefill, so
long prompts do not stall running chats. When no block is free, the last sequence in the order described below is
preempted. Its computed prefix stays cached while there is room.

Sequences are ordered by priority, then by the number of sequences of the same owner ahead of them, then by arrival. The
first sequence of each owner thus precedes the second sequences of all owners with the same priority, and these are
preempted if necessary. A sequence that has been overtaken too often precedes all others. The first sequence in this
order always makes progress, so no sequence waits forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from notso.smollm3.common_prefix import common_length
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, BlockPool, CacheSalt, OutOfBlocksError, block_hash
from notso.smollm3.scheduling.sequence import MAX_SAMPLED, BlockCopy, BlockLoad, Chunk, Plan, Sequence

# A sequence with at most this many pending tokens is regarded as decoding.
FEW_ROWS = 8

# A waiting sequence precedes all others once more than this many later arrivals were admitted before it. An arrival
# counts only if its owner had at least as many running sequences as the owner of the waiting sequence.
MAX_STARVATION = 16

# Maximum number of blocks that are loaded from disk between two steps. It is small, because running chats wait for
# these loads.
LOADS_PER_STEP = 8


class Offload(Protocol):
    """Blocks stored outside the cache, such as on disk."""

    def has(self, hash: bytes) -> bool: ...

    def partial(self, parent_hash: bytes) -> list[int]: ...

    def needs_window(self, *, is_first: bool, is_partial: bool) -> bool: ...


class Scheduler:
    """Plans the steps of all sequences. Not thread-safe. `waiting` and `running` are unordered."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        offload: Offload | None = None,
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._free_indices = list(range(max_num_seqs - 1, -1, -1))
        self._offload = offload
        self._arrivals = 0
        # Number of prefilled rows of each owner with pending prompts; a new owner starts with the minimum of all
        # owners.
        self._prefilled: dict[str, int] = {}

    def queue(self) -> list[Sequence]:
        return _fair_order(self.waiting, Counter(each.owner for each in self.running))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, which must fit in the cache."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; its blocks stay cached."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence)

    def schedule(self, prompt_tokens: int, max_rows: int) -> Plan:
        """Plan a step of up to `max_rows` rows: decoding sequences first, then up to `prompt_tokens` prompt tokens."""
        # The plan can be empty although sequences are waiting if another user of the pool (ContextLogits) holds blocks.
        plan = Plan()
        self._admit(plan)
        for sequence in _fair_order(self.running):
            room = max_rows - plan.rows
            if room > 0 and sequence.batch_index is not None and not _is_prefill(sequence):
                self._plan_chunk(sequence, min(sequence.pending, room), plan)
        room = min(prompt_tokens, max_rows - plan.rows)
        for sequence in self._ordered_prefills():
            if room < 1:
                break
            if sequence.batch_index is not None and not self._match_cached_blocks(sequence, plan):
                most = self._scored_rows(plan) if sequence.is_scoring else sequence.unscored or room
                rows = self._plan_chunk(sequence, min(sequence.pending, room, most), plan)
                self._prefilled[sequence.owner] += rows
                room -= rows
        for chunk in plan.chunks if self.pool.has_windows else ():
            self.pool.open_windows(chunk.sequence.blocks, chunk.start, chunk.rows)
        return plan

    def advance(self, chunk: Chunk, accepted: int = 0) -> None:
        """Record a computed chunk whose first `accepted` drafts are already among the sequence's tokens."""
        sequence = chunk.sequence
        if sequence.batch_index is None:  # the sequence has been removed or preempted
            return
        sequence.started, sequence.awaits_move = True, False
        self.pool.close_windows(sequence.blocks, chunk.start, chunk.count)
        sequence.computed = chunk.start + chunk.count + accepted
        while (len(sequence.hashes) + 1) * BLOCK_TOKENS <= sequence.computed:
            at = len(sequence.hashes) * BLOCK_TOKENS
            tokens = sequence.tokens[at : at + BLOCK_TOKENS]
            parent_hash = sequence.next_parent
            self._register(sequence, len(sequence.hashes), parent_hash, tokens)
            sequence.hashes.append(block_hash(parent_hash, tokens))

    def on_load_failed(self, load: BlockLoad) -> None:
        """Drop the block of a failed load and all later blocks of the sequence. Its planned chunks become invalid."""
        sequence = load.sequence
        if sequence.batch_index is None or load.block not in sequence.blocks:
            return
        before = sequence.computed
        self._truncate(sequence, sequence.blocks.index(load.block))
        if not sequence.returned:
            sequence.cached -= before - sequence.computed

    def on_block_loaded(self, load: BlockLoad) -> None:
        sequence = load.sequence
        if load.is_partial or load.block not in sequence.blocks:
            return
        index = sequence.blocks.index(load.block)
        at = index * BLOCK_TOKENS
        self._register(sequence, index, sequence.parent_hash(index), sequence.tokens[at : at + BLOCK_TOKENS])

    def evict(self, conversation: bytes) -> None:
        for sequence in (*self.waiting, *self.running):
            if conversation in (sequence.conversation, sequence.reading):
                sequence.conversation, sequence.reading, sequence.is_evicted = None, None, True
        self.pool.evict(conversation)

    def cached_length(self, salt: CacheSalt, tokens: list[int]) -> int:
        parent_hash, at = salt.parent_hash(0, b""), 0
        while at + BLOCK_TOKENS < len(tokens):
            piece = tokens[at : at + BLOCK_TOKENS]
            hash = block_hash(parent_hash, piece)
            if self.pool.find(parent_hash, piece) is None and not (
                self._offload is not None and self._offload.has(hash)
            ):
                break
            at += BLOCK_TOKENS
            parent_hash = salt.parent_hash(at // BLOCK_TOKENS, hash)
        return at + self.pool.find_partial(parent_hash, tokens[at:-1])[1]

    # Admission and preemption

    def _admit(self, plan: Plan) -> None:
        for sequence in self.queue():
            while not self._free_indices or not self._fits(sequence):
                candidate = self._preemption_candidate(sequence)
                if candidate is None:
                    return
                self._preempt(candidate, plan)
            self.waiting.remove(sequence)
            running = Counter(each.owner for each in self.running)
            for other in self.waiting:
                if running[other.owner] <= running[sequence.owner]:
                    other.starvation_count += other.arrival < sequence.arrival
            sequence.batch_index = self._free_indices.pop()
            self.running.append(sequence)
            self._match_cached_blocks(sequence, plan)

    def _ordered_prefills(self) -> list[Sequence]:
        # The owner with the fewest prefilled rows comes first, so that long prompts of several owners take turns.
        found = [each for each in _fair_order(self.running) if _is_prefill(each)]
        prefilled = {each.owner: self._prefilled[each.owner] for each in found if each.owner in self._prefilled}
        least = min(prefilled.values(), default=0)
        self._prefilled = {each.owner: prefilled.get(each.owner, least) for each in found}
        return sorted(found, key=lambda each: (_effective_priority(each), self._prefilled[each.owner]))

    def _preemption_candidate(self, sequence: Sequence) -> Sequence | None:
        # A sequence preempts nothing if its owner has a running sequence. Otherwise, it preempts the last sequence of
        # the owner with the most running sequences (at least two), but never a sequence of a higher priority.
        running = Counter(each.owner for each in self.running)
        if running[sequence.owner]:
            return None
        others = [
            each
            for each in self.running
            if running[each.owner] > 1 and _effective_priority(each) >= _effective_priority(sequence)
        ]
        return max(others, key=lambda each: (running[each.owner], _sort_key(each)), default=None)

    def _fits(self, sequence: Sequence) -> bool:
        # Keeps one block available per running sequence, because each may soon need another block.
        needed = -(-len(sequence.tokens) // BLOCK_TOKENS)
        return needed + len(self.running) <= self.pool.available

    def _release(self, sequence: Sequence) -> None:
        full = len(sequence.hashes)
        # After a failed step, a partial block may lack its content, so it is registered only after a chunk has used it.
        if full < len(sequence.blocks) and sequence.computed > full * BLOCK_TOKENS and not sequence.awaits_move:
            partial = sequence.tokens[full * BLOCK_TOKENS : sequence.computed]
            self._register(sequence, full, sequence.next_parent, partial)
        # Blocks are evicted in the order in which they are freed. The first blocks are freed last, because more prompts
        # share them.
        for block in reversed(sequence.blocks):
            self.pool.free(block)
        if sequence.batch_index is not None:
            self._free_indices.append(sequence.batch_index)
        sequence.blocks, sequence.hashes, sequence.batch_index, sequence.computed = [], [], None, 0
        sequence.drafts, sequence.awaits_move = [], False
        self.running.remove(sequence)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not sequence]
        for load in [load for load in plan.loads if load.sequence is sequence]:
            plan.moves.remove(load)
            self.on_load_failed(load)  # drops the block, which has no content yet
        self._release(sequence)
        sequence.returned = sequence.started
        sequence.cached = sequence.cached if sequence.started else 0
        self.waiting.append(sequence)
        plan.preempted.append(sequence)
        self.preemptions += 1

    def _scored_rows(self, plan: Plan) -> int:
        # Reserves a row with logits for each running sequence that is not yet in the plan.
        others = len(self.running) - len(plan.chunks) - 1
        return max(1, MAX_SAMPLED - plan.sampled_rows - others)

    # Blocks

    def _plan_chunk(self, sequence: Sequence, count: int, plan: Plan) -> int:
        samples = count == sequence.pending
        drafts = sequence.drafts if samples else []
        length = sequence.computed + count
        if not self._make_room(sequence, length, plan):
            return 0
        if drafts and not self._has_room(sequence, length + len(drafts)):
            drafts = []  # drafts never preempt a sequence
        self._make_room(sequence, length + len(drafts), plan)
        plan.chunks.append(Chunk(sequence, sequence.computed, count, list(drafts), samples, sequence.is_scoring))
        return count

    def _register(self, sequence: Sequence, index: int, parent_hash: bytes, tokens: list[int]) -> None:
        if not sequence.is_evicted:
            self.pool.register(sequence.blocks[index], parent_hash, tokens, *sequence.block_owners(index))

    def _truncate(self, sequence: Sequence, index: int) -> None:
        for block in sequence.blocks[index:]:
            self.pool.free(block)
        del sequence.blocks[index:], sequence.hashes[index:]
        sequence.computed = index * BLOCK_TOKENS

    def _make_room(self, sequence: Sequence, length: int, plan: Plan) -> bool:
        # Preempts running sequences if necessary. Returns False if `sequence` itself was preempted.
        while len(sequence.blocks) * BLOCK_TOKENS < length:
            block = self._allocate(sequence, plan)
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _has_room(self, sequence: Sequence, length: int) -> bool:
        return -(-length // BLOCK_TOKENS) - len(sequence.blocks) <= self.pool.available

    def _allocate(self, sequence: Sequence, plan: Plan) -> int | None:
        while True:
            try:
                return self.pool.allocate()
            except OutOfBlocksError:
                last = _fair_order(self.running)[-1]
                self._preempt(last, plan)
                if last is sequence:
                    return None

    def _match_cached_blocks(self, sequence: Sequence, plan: Plan) -> bool:
        # Scored prompts use no cached blocks. The last token of other prompts is always computed, because its logits
        # are needed. Returns True if the sequence was preempted, or if it must wait for the next step to load more
        # blocks from disk.
        if sequence.is_scoring or sequence.unscored:
            return False
        while sequence.computed == len(sequence.blocks) * BLOCK_TOKENS and sequence.pending > BLOCK_TOKENS:
            piece = sequence.tokens[sequence.computed : sequence.computed + BLOCK_TOKENS]
            parent_hash = sequence.next_parent
            block = self.pool.find(parent_hash, piece)
            hash = block_hash(parent_hash, piece)
            if block is not None:
                self.pool.touch(block, *sequence.block_owners(len(sequence.blocks)))
            elif self._offload is not None and self._offload.has(hash):
                block = None if len(plan.loads) >= LOADS_PER_STEP else self._allocate(sequence, plan)
                if block is None:
                    return True
                self._plan_load(BlockLoad(sequence, block, hash), plan)
            else:
                break
            sequence.hashes.append(hash)
            sequence.add_cached_block(block, BLOCK_TOKENS)
        if sequence.computed == len(sequence.blocks) * BLOCK_TOKENS:
            self._match_partial(sequence, plan)
        return False

    def _match_partial(self, sequence: Sequence, plan: Plan) -> None:
        # A block whose first tokens match is copied, or extended in place if all of its tokens match and it is not in
        # use.
        piece = sequence.tokens[sequence.computed : len(sequence.tokens) - 1][:BLOCK_TOKENS]
        source, common = self.pool.find_partial(sequence.next_parent, piece)
        stored = self._offload.partial(sequence.next_parent) if self._offload is not None else []
        on_disk = common_length(stored, piece)
        if max(common, on_disk) == 0:
            return
        is_claimed = common >= on_disk and self.pool.claim(source, common)
        if is_claimed:
            block = source
        elif common >= on_disk:
            copied = self._plan_copy(source, plan)
            if copied is None:
                return
            block = copied
        elif not self.pool.available:
            return
        else:
            common, block = on_disk, self.pool.allocate()
            self._plan_load(BlockLoad(sequence, block, sequence.next_parent, is_partial=True), plan)
        sequence.awaits_move = not is_claimed
        sequence.add_cached_block(block, common)

    def _plan_load(self, load: BlockLoad, plan: Plan) -> None:
        if self._offload is not None and self._offload.needs_window(
            is_first=not load.sequence.blocks, is_partial=load.is_partial
        ):
            with suppress(OutOfBlocksError):  # without a window, the load fails later, and `on_load_failed` is called
                self.pool.open_window(load.block)
        plan.moves.append(load)

    def _plan_copy(self, source: int, plan: Plan) -> int | None:
        self.pool.touch(source)  # so that `allocate` does not evict it
        target = None
        try:
            target = self.pool.allocate()
            windows = self.pool.windows
            if source in windows:
                self.pool.open_window(target)
            plan.moves.append(BlockCopy(source, target, windows.get(source), windows.get(target)))
        except OutOfBlocksError:
            if target is not None:
                self.pool.free(target)
            return None
        finally:
            self.pool.free(source)
        return target


def _is_prefill(sequence: Sequence) -> bool:
    return sequence.pending > FEW_ROWS or sequence.is_scoring or sequence.unscored > 0


def _fair_order(sequences: Iterable[Sequence], before: Counter[str] | None = None) -> list[Sequence]:
    counts = Counter(before)
    ranked = []
    for sequence in sorted(sequences, key=_sort_key):
        ranked.append((_effective_priority(sequence), counts[sequence.owner], sequence.arrival, sequence))
        counts[sequence.owner] += 1
    return [each[-1] for each in sorted(ranked, key=lambda each: each[:-1])]


def _effective_priority(sequence: Sequence) -> int:
    return -1 if sequence.starvation_count > MAX_STARVATION else sequence.priority


def _sort_key(sequence: Sequence) -> tuple[int, int]:
    return (_effective_priority(sequence), sequence.arrival)


TILE_ROWS = 16  # kernels process rows in tiles, so durations are recorded by number of tiles
LEAST_TOKENS = 9  # smallest prefill; sequences with fewer pending tokens are decoding (see FEW_ROWS)

# A timing is dropped after this many steps, because prompts may have become longer by then.
REMEMBERED_STEPS = 64

OUTLIER = 2.0  # cap on a timing, as a multiple of the moving average


class PrefillBudget:
    """Limits the prompt tokens of a step so that the step takes at most `step_s` seconds, if possible."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._seconds: dict[int, float] = {}  # by number of tiles: exponential moving average (factor 1/2)
        self._timed: dict[int, int] = {}  # by number of tiles: step number of the last timing
        self._steps = 0

    def tokens(self, decoding: int, most: int, decode_s: float, token_s: float) -> int:
        """Choose the next step's number of prompt tokens, from 1 to `most`."""
        # decode_s: duration of a step that only decodes, or 0 if unknown. token_s: time per row in recent steps with
        # prefill, or 0 if unknown.
        tiles = -(-(decoding + LEAST_TOKENS) // TILE_ROWS)
        while (
            tiles * TILE_ROWS - decoding < most and self._expected_seconds(tiles + 1, decode_s, token_s) <= self._step_s
        ):
            tiles += 1
        return max(1, min(most, tiles * TILE_ROWS - decoding))

    def observe(self, rows: int, seconds: float) -> None:
        tiles = -(-rows // TILE_ROWS)
        self._steps += 1
        before = self._seconds.get(tiles)
        if before is not None:
            seconds = 0.5 * before + 0.5 * min(seconds, OUTLIER * before)
        self._seconds[tiles], self._timed[tiles] = seconds, self._steps
        for old in [old for old, at in self._timed.items() if self._steps - at > REMEMBERED_STEPS]:
            del self._seconds[old], self._timed[old]

    def _expected_seconds(self, tiles: int, decode_s: float, token_s: float) -> float:
        measured = max((other for other in self._seconds if other <= tiles), default=0)
        if measured:  # assume the average time per measured tile, without decode_s
            seconds = self._seconds[measured]
            return seconds + (tiles - measured) * max(0.0, seconds - decode_s) / measured
        return decode_s + tiles * TILE_ROWS * token_s if decode_s and token_s else float("inf")
