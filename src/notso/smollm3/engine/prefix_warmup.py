"""Prefill, in idle time, the expected beginning of a conversation's next prompt.

The next prompt repeats the answer without its reasoning, so the tokens of the answer have new positions and must be
computed again. After the answer, the template ends the assistant's turn and starts the user's turn. All of these tokens
are known when the answer ends, so the engine prefills them while it is idle. The resulting blocks are ordinary blocks
of the block pool; if the next prompt is different, only idle time is wasted.

Drafts (messages not sent yet) are also prefilled, with the tokens that the template adds after them. If a draft is sent
unchanged, only one token remains to be computed. If the user first adds text, only the new text and a few tokens
before it remain.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from functools import partial

from notso.smollm3.engine.request import Request
from notso.smollm3.errors import NotsoError
from notso.smollm3.kv.offload import BlockMover, KVOffload
from notso.smollm3.model.lora import Adapter
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.output.generation import Generation
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, CacheSalt
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import PRIORITIES, Sequence
from notso.smollm3.values.messages import Message

# After an answer, a prefill starts when no request has arrived for this many seconds. A request for the chat's title
# arrives earlier, so it is not delayed.
QUIET_S = 0.3

# Maximum number of pending prefills after answers, and of stored drafts (one per owner).
MOST_PENDING = 16

# Maximum number of rows in a step. An arriving request waits for at most one layer of the step: milliseconds with the
# 3B model.
STEP_ROWS = 128

# Number of consecutive interrupted steps after which a prefill is abandoned.
MOST_TRIES = 8

# Maximum prompt length in tokens: rendering longer prompts on the engine thread would delay requests for too long.
MOST_TOKENS = 65_536

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PendingPrefill:
    # write: returns the ids to prefill; after an answer, it renders them.
    # spent: tokens that this prefill replaces: the finished prompt and answer, or the owner's previous draft.
    # first_obsolete: index of the first block of `spent` that may be obsolete (not needed for `ids`).
    # prompt: prompt of the finished answer; None for a draft.
    salt: CacheSalt
    adapter: Adapter | None
    conversation: bytes | None
    write: Callable[[], list[int]]
    spent: Tokens[int] = ()
    first_obsolete: int = 0
    prompt: Tokens[int] | None = None
    ids: list[int] = field(default_factory=list)  # beginning of the next prompt, once rendered
    tries: int = 0


class PrefixWarmup:
    """Prefills drafts and beginnings of expected prompts. Must be used on the engine thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, offload: KVOffload | None, mover: BlockMover) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._offload = offload
        self._mover = mover
        self._pending: deque[_PendingPrefill] = deque()
        self._steps = 0
        self._served: dict[bytes, int] = {}  # owner with pending work -> last step that served the owner
        self._drafts: OrderedDict[bytes, _PendingPrefill] = OrderedDict()
        # Salt of an owner -> ids of the owner's last draft (prefilled or not), and where its last turn starts.
        self._last_drafts: OrderedDict[bytes, tuple[list[int], int]] = OrderedDict()

    def schedule(self, request: Request) -> None:
        sequence = request.sequence
        if request.next_ids is None or request.output.finish_reason not in ("stop", "tool_calls"):
            return
        if sequence.is_evicted:
            return
        for other in [other for other in self._pending if other.prompt == sequence.prompt]:
            self._pending.remove(other)  # the answer was regenerated
        write = partial(_render_next_prompt, sequence, request.generation, request.next_ids)
        prefill = _PendingPrefill(
            sequence.salt, sequence.adapter, sequence.conversation, write, sequence.tokens, prompt=sequence.prompt
        )
        if len(self._pending) == MOST_PENDING:
            count = Counter(each.salt.owner for each in self._pending)
            # Drop the oldest prefill of the owner with the most pending prefills.
            self._pending.remove(max(self._pending, key=lambda each: count[each.salt.owner]))
        self._pending.append(prefill)

    def draft(
        self, salt: CacheSalt, adapter: Adapter | None, conversation: bytes | None, ids: list[int], turn_at: int
    ) -> None:
        """Schedule the prefill of a draft's prompt; `turn_at`: see `last_turn_at`."""
        owner = salt.owner
        spent, previous_turn_at = self._last_drafts.pop(owner, ([], 0))
        self._drafts.pop(owner, None)
        if len(ids) > MOST_TOKENS:
            return
        ids = ids[:-1]  # the last token is computed when its logits are needed
        self._drafts[owner] = _PendingPrefill(
            salt, adapter, conversation, lambda: ids, spent, first_obsolete=previous_turn_at // BLOCK_TOKENS
        )
        self._last_drafts[owner] = ids, turn_at
        if len(self._last_drafts) > MOST_PENDING:
            owner, _ = self._last_drafts.popitem(last=False)
            self._drafts.pop(owner, None)

    def cancel_draft(self, sequence: Sequence) -> None:
        if sequence.priority < PRIORITIES["background"]:
            self._last_drafts.pop(sequence.salt.owner, None)
            self._drafts.pop(sequence.salt.owner, None)

    def clear(self, conversation: bytes | None = None) -> None:
        for prefill in list(self._pending):
            if conversation in (None, prefill.conversation):
                self._pending.remove(prefill)
        for owner, draft in list(self._drafts.items()):
            if conversation in (None, draft.conversation):
                del self._drafts[owner], self._last_drafts[owner]
        if conversation is None:
            self._last_drafts.clear()

    def due_s(self, quiet_s: float) -> float:
        # Drafts are not delayed: the page sends them when the user pauses typing.
        if self._drafts:
            return 0.0
        return max(0.0, QUIET_S - quiet_s) if self._pending else float("inf")

    def prefill_next(self, should_continue: Callable[[], bool]) -> None:
        prefill = self._next_pending()
        is_over = True  # stays True after an exception, so that the prefill is not retried
        try:
            prefill.ids = prefill.ids or prefill.write()
            if self._is_worthwhile(prefill):
                is_over = self._step(prefill, should_continue)
        finally:
            if is_over and prefill.prompt is None:
                del self._drafts[prefill.salt.owner]
            elif is_over:
                self._pending.remove(prefill)

    def _next_pending(self) -> _PendingPrefill:
        # Returns the newest prefill of the least recently served owner. Drafts take precedence over other prefills.
        waiting = [*reversed(self._drafts.values() if self._drafts else self._pending)]
        prefill = min(waiting, key=lambda each: self._served.get(each.salt.owner, 0))
        self._steps += 1
        owners = {each.salt.owner for each in (*self._drafts.values(), *self._pending)}
        self._served = {owner: step for owner, step in self._served.items() if owner in owners}
        self._served[prefill.salt.owner] = self._steps
        return prefill

    def _step(self, prefill: _PendingPrefill, should_continue: Callable[[], bool]) -> bool:
        sequence = Sequence(
            prefill.ids,
            salt=prefill.salt,
            adapter=prefill.adapter,
            priority=PRIORITIES["background"],
            conversation=prefill.conversation,
        )
        rows = min(STEP_ROWS, self._runner.max_rows)
        prefill.tries += 1
        self._scheduler.add(sequence)
        try:
            plan = self._scheduler.schedule(rows, rows)
            self._mover.move(plan)
            for chunk in plan.chunks:
                chunk.samples = False
            if plan.chunks and self._runner.run(plan.chunks, lambda _: should_continue(), once=True) is not None:
                self._scheduler.advance(plan.chunks[0])
                self._runner.cache.touch_ahead(sequence.blocks[-1], plan.rows)
                prefill.tries = 0
            if not sequence.pending and self._offload is not None and prefill.prompt is not None:
                self._offload.offer(sequence)
            return not sequence.pending or prefill.tries >= MOST_TRIES
        finally:
            self._scheduler.remove(sequence)
            if prefill.prompt is None:
                self._deprioritize(prefill)  # copying from an obsolete block has marked it as recently used

    def _is_worthwhile(self, prefill: _PendingPrefill) -> bool:
        # A prefill may evict at most one block of other conversations.
        pool, ids = self._scheduler.pool, prefill.ids
        if not ids or self._scheduler.cached_length(prefill.salt, [*ids, -1]) == len(ids):
            return False
        cached = len(pool.chain(prefill.salt, ids))
        missing = -(-len(ids) // BLOCK_TOKENS) - cached - pool.blank
        if missing > 0:  # obsolete reasoning and drafts are evicted first
            missing -= self._deprioritize(prefill)
        return missing <= 1

    def _deprioritize(self, prefill: _PendingPrefill) -> int:
        # Makes the prefill's obsolete blocks the next ones to evict, and returns their number.
        pool, is_draft = self._scheduler.pool, prefill.prompt is None
        needed = set(pool.chain(prefill.salt, prefill.ids, with_rest=is_draft))
        chain = pool.chain(prefill.salt, prefill.spent, with_rest=is_draft)
        return pool.deprioritize([block for block in chain[prefill.first_obsolete :] if block not in needed])


def _render_next_prompt(
    sequence: Sequence, generation: Generation, next_ids: Callable[[Message], list[int]]
) -> list[int]:
    if len(sequence.tokens) > MOST_TOKENS:
        return []
    try:
        return next_ids(generation.result().message)
    except NotsoError as error:
        _log.debug("the next turn cannot be rendered: %s", error)
        return []
