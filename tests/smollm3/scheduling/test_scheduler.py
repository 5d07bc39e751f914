"""The scheduler as a state machine: no sequence is lost or starved, no block is used twice, and steps read only keys
that were computed for the same tokens.

Steps are simulated. Each position of a block contains a digest of all tokens up to it. Before a row is computed, every
position that it would attend to must contain its own sequence's digest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import is_long

from notso.smollm3.engine.memory_plan import STEP_WINDOW_BLOCKS, WINDOW_BLOCKS
from notso.smollm3.scheduling.block_pool import ANONYMOUS, BLOCK_TOKENS, BlockPool, CacheSalt, block_hash, cache_salt
from notso.smollm3.scheduling.scheduler import FEW_ROWS, MAX_STARVATION, Scheduler
from notso.smollm3.scheduling.sequence import BlockCopy, Chunk, Plan, Sequence

SALT = cache_salt(b"model", "")
MAX_ROWS = 1024


@dataclass
class MemoryOffload:
    """Stores blocks in memory, and fails to load those in `damaged`."""

    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    partials: dict[bytes, tuple[list[int], list[int]]] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)
    has_windows: bool = False

    def has(self, key: bytes) -> bool:
        return key in self.blocks

    def partial(self, parent_hash: bytes) -> list[int]:
        return self.partials[parent_hash][0] if parent_hash in self.partials else []

    def needs_window(self, *, is_first: bool, is_partial: bool) -> bool:
        return self.has_windows and (is_first or is_partial)


class Machine:
    """A scheduler with a simulated model. `goals` is the number of tokens to generate for each sequence. `windows` is
    the number of windows of the format, in which the first tile and a row's own tile are read."""

    def __init__(
        self, blocks: int, max_num_seqs: int, offload: MemoryOffload | None = None, windows: int | None = None
    ) -> None:
        self.pool = BlockPool(blocks, windows)
        self.window_content: list[list[int]] = [[0] * BLOCK_TOKENS for _ in range(windows or 0)]
        self.offload = offload
        self.scheduler = Scheduler(self.pool, max_num_seqs, offload)
        self.content: list[list[int]] = [[0] * BLOCK_TOKENS for _ in range(blocks)]
        self.goals: dict[Sequence, int] = {}
        self.done: list[Sequence] = []
        self.computed_rows = 0

    def add(
        self,
        prompt: list[int],
        answers: int,
        priority: int = 0,
        salt: CacheSalt = SALT,
        conversation: bytes | None = ANONYMOUS,
        owner: str = "",
    ) -> Sequence:
        sequence = Sequence(prompt, salt=salt, priority=priority, conversation=conversation, owner=owner)
        self.goals[sequence] = len(prompt) + answers
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.goals.pop(sequence, None)

    def step(self, prompt_tokens: int, draft: random.Random | None = None) -> Plan:
        for sequence in self.scheduler.running:
            if draft is not None and sequence.pending == 1 and self.goals[sequence] - len(sequence.tokens) > 4:
                right = [self.next_token(sequence, ahead) for ahead in range(1, 4)]
                sequence.drafts = right[: draft.randrange(4)] + [draft.randrange(50)] * draft.randrange(2)
        plan = self.scheduler.schedule(prompt_tokens, MAX_ROWS)
        assert plan.rows <= MAX_ROWS
        void = self.move(plan)
        for chunk in plan.chunks:
            if chunk.sequence not in void:
                self.compute(chunk)
        self.check()
        return plan

    def move(self, plan: Plan) -> set[Sequence]:
        void = set[Sequence]()
        for move in plan.moves:
            if isinstance(move, BlockCopy):
                self.content[move.target] = list(self.content[move.source])
                if move.source_window is not None and move.target_window is not None:
                    self.window_content[move.target_window] = list(self.window_content[move.source_window])
                continue
            assert self.offload is not None
            if move.sequence in void:
                continue
            if move.hash in self.offload.damaged:
                self.offload.blocks.pop(move.hash, None)
                self.offload.partials.pop(move.hash, None)
                self.scheduler.on_load_failed(move)
                void.add(move.sequence)
                continue
            kept = self.offload.partials[move.hash][1] if move.is_partial else self.offload.blocks[move.hash]
            self.content[move.block] = list(kept)
            if move.block in self.pool.windows:
                self.window_content[self.pool.windows[move.block]] = list(kept)
            self.scheduler.on_block_loaded(move)
        return void

    @staticmethod
    def digest(sequence: Sequence, position: int, tokens: list[int]) -> int:
        # Private keys and values have different digests for each owner.
        salt = sequence.salt
        is_shared = not salt.private or position // BLOCK_TOKENS < salt.shared_blocks
        return hash((salt.root if is_shared else (salt.root, salt.private), tuple(tokens[: position + 1])))

    @staticmethod
    def next_token(sequence: Sequence, ahead: int = 0) -> int:
        """Return the simulated model's token, which depends on the position only."""
        return (len(sequence.tokens) + ahead) * 7 % 50

    def compute(self, chunk: Chunk) -> None:
        sequence, tokens = chunk.sequence, chunk.sequence.tokens[: chunk.start] + chunk.tokens
        assert chunk.start + chunk.rows <= len(sequence.blocks) * BLOCK_TOKENS
        for position in range(chunk.start):
            held = self.content[sequence.blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
            assert held == self.digest(sequence, position, tokens), "a row must not read another sequence's keys"
        for position in range(chunk.start, chunk.start + chunk.rows):
            block = sequence.blocks[position // BLOCK_TOKENS]
            assert self.pool.references(block) == 1, "a shared block must not be written"
            self.content[block][position % BLOCK_TOKENS] = self.digest(sequence, position, tokens)
        if self.window_content:
            self.compute_windows(chunk, tokens)
        self.computed_rows += chunk.rows
        right = 0
        if chunk.samples:
            for draft in [*chunk.drafts, None]:
                token = self.next_token(sequence)
                sequence.tokens.append(token)
                if token != draft or len(sequence.tokens) >= self.goals[sequence]:
                    break
                right += 1
        sequence.drafts = []
        self.scheduler.advance(chunk, right)
        if len(sequence.tokens) >= self.goals[sequence]:
            self.done.append(sequence)
            self.goals.pop(sequence)
            self.scheduler.remove(sequence)

    def compute_windows(self, chunk: Chunk, tokens: list[int]) -> None:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.rows):
            tile = position // BLOCK_TOKENS
            if position == chunk.start:  # later rows also read positions that this chunk writes
                for read in (*range(min(position, BLOCK_TOKENS)), *range(tile * BLOCK_TOKENS, position)):
                    held = self.window(sequence, read // BLOCK_TOKENS)[read % BLOCK_TOKENS]
                    assert held == self.content[sequence.blocks[read // BLOCK_TOKENS]][read % BLOCK_TOKENS]
            self.window(sequence, tile)[position % BLOCK_TOKENS] = self.digest(sequence, position, tokens)

    def window(self, sequence: Sequence, tile: int) -> list[int]:
        return self.window_content[self.pool.windows[sequence.blocks[tile]]]

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        assert set(scheduler.waiting) | set(scheduler.running) == set(self.goals), "a sequence was lost"
        assert not set(scheduler.waiting) & set(scheduler.running)
        used: dict[int, int] = {}
        for sequence in scheduler.running:
            assert sequence.computed <= len(sequence.blocks) * BLOCK_TOKENS
            assert 0 <= sequence.cached < len(sequence.prompt)
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for block in sequence.blocks:
                used[block] = used.get(block, 0) + 1
        for block in range(pool.blocks):
            assert pool.references(block) == used.get(block, 0)
        assert pool.available == pool.blocks - len(used)
        windows = list(pool.windows.values())
        assert len(set(windows)) == len(windows) and all(window < len(self.window_content) for window in windows)
        slots = [sequence.batch_index for sequence in scheduler.running]
        assert None not in slots
        assert len(set(slots)) == len(slots)
        for sequence in scheduler.waiting:
            assert sequence.batch_index is None
            assert not sequence.blocks

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def run(self, prompt_tokens: int = 256, most_steps: int = 10_000) -> int:
        for steps in range(most_steps):
            if not self.has_work:
                return steps
            plan = self.step(prompt_tokens)
            assert plan, "a step with waiting work must not be empty"
        raise AssertionError("the run did not end")


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt; prompts with the same seed have a common prefix."""
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


prompts = st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 60, 127, 128, 129, 200, 256, 300, 500])).map(
    lambda pair: prompt(*pair)
)


@settings(max_examples=100 if is_long("engine") else 10, deadline=None)
@given(
    blocks=st.integers(6, 24),
    slots=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
    requests=st.lists(st.tuples(prompts, st.integers(1, 200), st.integers(0, 2)), min_size=1, max_size=12),
    budgets=st.lists(st.sampled_from([1, 16, 100, 512]), min_size=1, max_size=4),
    has_windows=st.booleans(),
)
def test_random_requests_are_neither_lost_nor_mixed_up(
    blocks: int,
    slots: int,
    seed: int,
    requests: list[tuple[list[int], int, int]],
    budgets: list[int],
    has_windows: bool,
) -> None:
    windows = WINDOW_BLOCKS * slots + STEP_WINDOW_BLOCKS if has_windows else None
    machine, rng = Machine(blocks, slots, windows=windows), random.Random(seed)
    owners = rng.choices("abc", k=3)
    left = list(requests)
    for _ in range(5000):
        if left and rng.random() < 0.3:
            ids, answers, priority = left.pop()
            owner = rng.choice(owners)
            salt = rng.choice((SALT, CacheSalt(b"library", owner.encode(), rng.randrange(4))))
            machine.add(ids, min(answers, blocks * BLOCK_TOKENS - len(ids)), priority, salt, owner=owner)
        if machine.goals and rng.random() < 0.02:
            machine.abort(rng.choice(list(machine.goals)))
        if not machine.has_work and not left:
            break
        plan = machine.step(rng.choice(budgets), draft=rng)
        assert plan or not machine.has_work
    assert not machine.goals
    assert machine.pool.available == blocks


@settings(max_examples=50 if is_long("engine") else 12, deadline=None)
@given(blocks=st.integers(8, 24), seed=st.integers(0, 1 << 30), has_windows=st.booleans())
def test_evict_removes_only_blocks_of_one_conversation(blocks: int, seed: int, has_windows: bool) -> None:
    machine = Machine(blocks, 3, windows=WINDOW_BLOCKS * 3 + STEP_WINDOW_BLOCKS if has_windows else None)
    rng = random.Random(seed)
    pool, names = machine.pool, [bytes([number]) * 8 for number in range(4)]
    left = 12
    while left or machine.goals:
        if left and rng.random() < 0.3:
            left -= 1
            machine.add(prompt(rng.randrange(2), rng.randrange(1, 400)), 20, conversation=rng.choice(names))
        machine.step(rng.choice((16, 100, 512)), draft=rng)
        if rng.random() < 0.2:
            before = [pool.conversations(block) for block in range(blocks)]
            gone = rng.choice(names)
            machine.scheduler.evict(gone)
            machine.check()
            assert [pool.conversations(block) for block in range(blocks)] == [who - {gone} for who in before]
            assert pool.cached == sum(
                bool(pool.conversations(block)) and not pool.references(block) for block in range(blocks)
            )
    for name in names:
        machine.scheduler.evict(name)
    assert pool.blank == blocks and not pool.windows


@settings(max_examples=50 if is_long("engine") else 12, deadline=None)
@given(seed=st.integers(0, 1 << 30), damage=st.booleans())
def test_blocks_on_disk_are_loaded_at_the_right_positions(seed: int, damage: bool) -> None:
    """All blocks of the conversations were written to disk; some are damaged, and some are also in memory."""
    rng, offload = random.Random(seed), MemoryOffload()
    for conversation in range(3):
        ids = prompt(conversation, 700)
        parent_hash = SALT.root
        for at in range(0, 700 - BLOCK_TOKENS, BLOCK_TOKENS):
            piece = ids[at : at + BLOCK_TOKENS]
            held = [hash((SALT.root, tuple(ids[: at + i + 1]))) for i in range(BLOCK_TOKENS)]
            partial = rng.randrange(1, BLOCK_TOKENS)
            offload.partials[parent_hash] = (piece[:partial], held)
            if rng.random() < 0.1:
                offload.damaged.add(parent_hash)
            parent_hash = block_hash(parent_hash, piece)
            offload.blocks[parent_hash] = held
            if damage and rng.random() < 0.2:
                offload.damaged.add(parent_hash)
    machine = Machine(20, 3, offload)
    for _ in range(6):
        machine.add(prompt(rng.randrange(3), rng.randrange(1, 700)) + prompt(9, rng.randrange(60)), 20)
    machine.run(rng.choice([64, 300]))
    assert len(machine.done) == 6


def test_prompt_on_disk_is_not_computed_again() -> None:
    offload, ids = MemoryOffload(), prompt(1, 5 * BLOCK_TOKENS + 40)
    parent_hash = SALT.root
    for at in range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS):
        parent_hash = block_hash(parent_hash, ids[at : at + BLOCK_TOKENS])
        offload.blocks[parent_hash] = [hash((SALT.root, tuple(ids[: at + i + 1]))) for i in range(BLOCK_TOKENS)]
    offload.partials[parent_hash] = (
        ids[-40:-3],
        [hash((SALT.root, tuple(ids[: 5 * BLOCK_TOKENS + i + 1]))) for i in range(128)],
    )
    machine = Machine(10, 2, offload)
    sequence = machine.add(ids, 1)
    machine.run()
    assert sequence.cached == len(ids) - 3
    assert machine.computed_rows == 3


def test_running_answers_advance_every_step_during_prefill() -> None:
    machine = Machine(60, 4)
    chats = [machine.add(prompt(seed, 20), 40) for seed in range(3)]
    machine.step(256)
    long = machine.add(prompt(7, 4000), 1)
    while long in machine.goals:
        before = [len(chat.tokens) for chat in chats]
        plan = machine.step(64)
        if any(chat not in machine.goals for chat in chats):
            break
        assert [len(chat.tokens) for chat in chats] == [length + 1 for length in before]
        assert sum(chunk.rows for chunk in plan.chunks if chunk.sequence is long) == 64


def test_sequences_with_the_same_prompt_share_blocks() -> None:
    machine, ids = Machine(30, 8), prompt(3, 600)
    first = machine.add(ids, 30)
    machine.step(1000)
    others = [machine.add(ids, 30) for _ in range(5)]
    machine.step(1000)
    for other in others:
        assert other.blocks[:4] == first.blocks[:4]
        assert other.cached >= 512
        assert other.blocks[4] != first.blocks[4]
    machine.run()


def test_edited_message_reuses_tokens_before_the_edit() -> None:
    machine, ids = Machine(30, 2), prompt(3, 600)
    machine.add(ids, 5)
    machine.run()
    edited = machine.add([*ids[:300], 49, *ids[300:]], 5)
    machine.run()
    assert edited.cached == 300


def test_second_turn_computes_only_new_tokens() -> None:
    machine, ids = Machine(30, 2), prompt(3, 200)
    first = machine.add(ids, 30)
    machine.run()
    rows = machine.computed_rows
    second = machine.add([*first.tokens, 1, 2, 3], 1)
    machine.run()
    assert second.cached == len(first.tokens) - 1  # the keys of the last token were never computed
    assert machine.computed_rows - rows == 4


def test_owners_do_not_find_each_others_prompts() -> None:
    machine, ids = Machine(30, 2), prompt(3, 300)
    machine.add(ids, 1, salt=cache_salt(b"model", "a"))
    machine.run()
    stranger = machine.add(ids, 1, salt=cache_salt(b"model", "b"))
    machine.run()
    assert stranger.cached == 0


def test_cache_salt_separates_adapter_from_owner_name() -> None:
    assert cache_salt(b"lora", "ann") != cache_salt(b"", "loraann") != cache_salt(b"lor", "aann")
    ann, lora = cache_salt(b"lora", "", "ann"), cache_salt(b"", "", "loraann")
    assert ann.root != lora.root and ann.owner != lora.owner


def test_owners_of_one_scope_share_only_the_shared_blocks() -> None:
    machine, ids = Machine(30, 2), prompt(3, 700)
    for owner, cached in ((b"a", 0), (b"b", 3 * BLOCK_TOKENS), (b"b", len(ids) - 1), (b"a", len(ids) - 1)):
        salt = CacheSalt(b"library", owner, 3)
        assert machine.scheduler.cached_length(salt, ids) == cached
        sequence = machine.add(ids, 1, salt=salt)
        machine.run()
        assert sequence.cached == cached
        assert len(machine.pool.chain(salt, ids)) == len(ids) // BLOCK_TOKENS
    assert machine.scheduler.cached_length(CacheSalt(b"library", b"c", 0), ids) == 0
    assert machine.scheduler.cached_length(CacheSalt(b"library", b"a", 2), ids) == 2 * BLOCK_TOKENS
    assert machine.scheduler.cached_length(CacheSalt(b"another", b"a", 3), ids) == 0


def test_lowest_priority_is_preempted_and_resumed() -> None:
    machine = Machine(8, 4)
    low = machine.add(prompt(1, 300), 300, priority=2)
    machine.step(512)
    high = machine.add(prompt(2, 300), 300, priority=0)
    preempted = []
    while machine.has_work:
        preempted += machine.step(512).preempted
    assert preempted
    assert all(sequence is low for sequence in preempted)
    assert machine.done == [high, low]
    assert low.tokens[:300] == prompt(1, 300)
    assert len(low.tokens) == 600


def test_low_priority_request_does_not_starve() -> None:
    machine = Machine(8, 1)
    machine.add(prompt(0, 10), 3)
    patient = machine.add(prompt(1, 10), 3, priority=2)
    for number in range(48):
        machine.add(prompt(2 + number, 10), 3)
    while patient in machine.goals:
        machine.step(100)
    assert len(machine.done) <= MAX_STARVATION + 3


def test_idle_owner_preempts_extra_sequences_of_a_busy_owner() -> None:
    machine = Machine(40, 4)
    greedy = [machine.add(prompt(number, 20), 60, owner="greedy") for number in range(70)]
    for _ in range(3):
        machine.step(100)
    assert machine.scheduler.running == greedy[:4], "a single owner may use all slots"
    modest = [machine.add(prompt(100 + number, 20), 5, owner=f"modest {number % 2}") for number in range(4)]
    assert machine.scheduler.queue()[:2] == modest[:2]
    plan = machine.step(100)
    assert plan.preempted == [greedy[3], greedy[2]] and machine.scheduler.running == [*greedy[:2], *modest[:2]]
    while machine.done != modest:
        assert len([each for each in machine.scheduler.running if each.owner == "greedy"]) <= 3
        machine.step(100)
    machine.run()
    assert machine.done[4:8] == greedy[:4] and len(machine.done) == 74, "preempted sequences must continue first"


def test_prompts_of_two_owners_are_prefilled_in_turns() -> None:
    machine = Machine(40, 4)
    for number in range(3):
        machine.add(prompt(number, 600), 1, owner="greedy")
    machine.step(150)
    modest = machine.add(prompt(3, 300), 1, owner="modest")
    chunks = [chunk for _ in range(6) for chunk in machine.step(150).chunks]
    order = [chunk.sequence.owner for chunk in chunks if chunk.count > FEW_ROWS]
    assert order[:4] == ["greedy", "modest", "greedy", "modest"] and modest in machine.done


def test_busy_owner_gets_one_slot_among_many_owners() -> None:
    machine = Machine(40, 2)
    greedy = [machine.add(prompt(number, 10), 20, owner="greedy") for number in range(10)]
    modest = [machine.add(prompt(100 + number, 10), 3, owner=f"modest {number}") for number in range(60)]
    while set(modest) & set(machine.scheduler.waiting):
        machine.step(100)
        assert [each.owner for each in machine.scheduler.running].count("greedy") <= 1
    assert set(machine.done) > set(greedy[:3])


def test_queue_is_in_order_of_priority() -> None:
    machine = Machine(20, 1)
    running = machine.add(prompt(0, 5), 50)
    background = machine.add(prompt(1, 5), 1, priority=2)
    person = machine.add(prompt(2, 5), 1, priority=0)
    machine.step(100)
    assert machine.scheduler.running == [running]
    assert machine.scheduler.queue() == [person, background]


def test_short_prompt_is_computed_without_prefill_budget() -> None:
    machine = Machine(20, 2)
    machine.add(prompt(0, FEW_ROWS), 5)
    plan = machine.step(0)
    assert [chunk.rows for chunk in plan.chunks] == [FEW_ROWS]


@pytest.mark.parametrize("where", ["waiting", "reading", "answering"])
def test_removed_sequence_frees_all_blocks(where: str) -> None:
    machine = Machine(20, 1)
    other = machine.add(prompt(5, 10), 100) if where == "waiting" else None
    sequence = machine.add(prompt(1, 700), 50)
    for _ in range(1 if where == "reading" else 8):
        machine.step(128)
    assert (sequence in machine.scheduler.waiting) == (where == "waiting")
    machine.abort(sequence)
    machine.check()
    if other is not None:
        machine.abort(other)
    assert machine.pool.available == 20


def test_editing_a_message_keeps_the_original_cached() -> None:
    """If another branch needs a part of a block, the block is copied and not overwritten."""
    machine, ids = Machine(30, 2), prompt(3, 300)
    machine.add(ids, 1)
    machine.run()
    machine.add([*ids[:280], 49, *ids[280:]], 1)
    machine.run()
    back = machine.add([*ids, 5], 1)
    machine.run()
    assert back.cached == 300


def test_sequence_preempted_after_a_block_copy_completes() -> None:
    """An answer is preempted in the step in which a partial block was copied for it; both the copy and its source are
    evicted or found again."""
    machine, ids = Machine(6, 3), prompt(3, 126)
    machine.add(ids, 1)
    machine.run()
    machine.add(prompt(4, 635), 1)
    machine.step(128)
    late = machine.add(ids[:124] + [51] * 6, 1, priority=2)
    assert machine.step(512).preempted == [late]
    machine.run()
    assert machine.done[-1] is late


def test_step_does_not_exceed_max_rows() -> None:
    machine = Machine(40, 16)
    machine.add(prompt(1, 2000), 1)
    machine.step(512)
    for seed in range(12):
        machine.add(prompt(seed, 7), 1)
    assert machine.scheduler.schedule(512, max_rows=512).rows == 512


def test_two_prompts_loading_from_disk_do_not_deadlock() -> None:
    """Together they need more blocks than exist, and neither can compute anything yet."""
    offload, first, second = MemoryOffload(), prompt(1, 19 * BLOCK_TOKENS + 40), prompt(2, 13 * BLOCK_TOKENS + 40)
    for ids in (first, second):
        parent_hash = SALT.root
        for at in range(0, len(ids) - BLOCK_TOKENS, BLOCK_TOKENS):
            parent_hash = block_hash(parent_hash, ids[at : at + BLOCK_TOKENS])
            offload.blocks[parent_hash] = [hash((SALT.root, tuple(ids[: at + i + 1]))) for i in range(BLOCK_TOKENS)]
    machine = Machine(24, 2, offload)
    machine.add(second[: 7 * BLOCK_TOKENS + 1], 1)
    machine.run()
    sequences = [machine.add(first, 10), machine.add(second, 10)]
    machine.run()
    assert machine.done[1:] == sequences
    assert [sequence.cached for sequence in sequences] == [19 * BLOCK_TOKENS, 13 * BLOCK_TOKENS]


def test_many_short_prompts_do_not_exceed_max_rows() -> None:
    machine = Machine(64, 64)
    for seed in range(64):
        machine.add(prompt(seed, FEW_ROWS), 5)
    while machine.goals:
        assert machine.scheduler.schedule(100, max_rows=100).rows <= 100
        machine.step(100)


def test_sequence_without_free_blocks_waits_without_preemption() -> None:
    """`Engine.logits` holds blocks without a sequence. Sequences must not be repeatedly admitted and preempted."""
    machine = Machine(8, 2)
    held = [machine.pool.allocate() for _ in range(7)]
    sequence = machine.add(prompt(1, 300), 5)
    for _ in range(5):
        assert not machine.scheduler.schedule(256, MAX_ROWS)
    assert machine.scheduler.preemptions == 0 and machine.scheduler.waiting == [sequence]
    for block in held:
        machine.pool.free(block)
    machine.run()
    assert machine.done == [sequence]


def test_draft_tokens_do_not_preempt_sequences() -> None:
    machine = Machine(5, 2)
    low, high = machine.add(prompt(1, 127), 200, priority=2), machine.add(prompt(2, 380), 100)
    machine.step(512)
    held = machine.pool.allocate()
    high.drafts = [1] * 12  # the drafts would need a fourth block
    plan = machine.scheduler.schedule(512, MAX_ROWS)
    assert not plan.preempted and {chunk.sequence: chunk.rows for chunk in plan.chunks} == {low: 1, high: 1}
    machine.pool.free(held)
