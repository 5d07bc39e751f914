"""While nobody asks for anything: what the next turn of a conversation will begin with is read before it is asked for.

Behind an answer's last token the template writes the end of the turn and the beginning of the person's; and thoughts
are left out of what it writes, so that behind them an answer stands where it was not computed. All of that is known
when an answer has ended. So prefilled, it is found in the block pool like anything else; if another question comes than
expected, nothing was lost but time that nobody wanted.

So are prompts whose last words a person is still typing. All of them, with what the template writes behind: sent as it
is, such a prompt lacks one token; if more is typed, no more than that and a few tokens before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from functools import partial

from notso.smollm3.engine.block_mover import BlockMover
from notso.smollm3.engine.request import Request
from notso.smollm3.errors import NotsoError
from notso.smollm3.kv.offload import KVOffload
from notso.smollm3.model.lora import Adapter
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.output.generation import Generation
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import PRIORITIES, Sequence
from notso.smollm3.values.messages import Message

QUIET_S = 0.3
"""Nothing may have been asked for so long: titles and the like are asked for at once, a next question later."""

MOST_NOTES = 16
"""Of answers, and of drafts, one an owner."""

STEP_ROWS = 128
"""Few enough that between two layers of the 3B there are milliseconds: so long does a request wait at the most."""

MOST_TRIES = 8
"""Steps given up for a request, until what was to be read is given up too."""

MOST_TOKENS = 65_536
"""Writing down more would keep the engine's thread for longer than a request should wait."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Note:
    """To be computed for a conversation, with block hashes that begin with `salt`. `spent`: of its blocks, those from
    number `kept` on are of no more use, but for those that are computed again now. `prompt`: what was answered; None:
    this is a draft."""

    salt: bytes
    adapter: Adapter | None
    conversation: bytes | None
    write: Callable[[], list[int]]
    spent: Tokens[int] = ()
    kept: int = 0
    prompt: Tokens[int] | None = None
    ids: list[int] = field(default_factory=list)  # the beginning of the next prompt, once it was written
    tries: int = 0


class PrefixWarmup:
    """Drafts, and answers that ended lately, the newest of them first. Only the engine's thread may call."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, offload: KVOffload | None, mover: BlockMover) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._offload = offload
        self._mover = mover
        self._notes: deque[_Note] = deque(maxlen=MOST_NOTES)
        self._drafts: OrderedDict[bytes, _Note] = OrderedDict()
        self._typed: OrderedDict[bytes, tuple[list[int], int]] = OrderedDict()  # the last draft, read or not

    def note(self, request: Request) -> None:
        """An answer has ended; if by itself, another turn may follow."""
        sequence = request.sequence
        if request.next_ids is None or request.output.finish_reason not in ("stop", "tool_calls"):
            return
        if sequence.is_evicted:
            return
        for other in [other for other in self._notes if other.prompt == sequence.prompt]:
            self._notes.remove(other)  # answered anew
        write = partial(_written, sequence, request.generation, request.next_ids)
        note = _Note(
            sequence.salt, sequence.adapter, sequence.conversation, write, sequence.tokens, prompt=sequence.prompt
        )
        self._notes.append(note)

    def draft(
        self, salt: bytes, adapter: Adapter | None, conversation: bytes | None, ids: list[int], turn_at: int
    ) -> None:
        """Somebody types: `ids` are the prompt, if it were sent now, and with number `turn_at` begins the turn being
        typed. What was typed before in its place is not wanted any more."""
        spent, before = self._typed.pop(salt, ([], 0))
        self._drafts.pop(salt, None)
        if len(ids) > MOST_TOKENS:
            return
        ids = ids[:-1]  # the last one is computed by whoever wants to know what follows
        self._drafts[salt] = _Note(salt, adapter, conversation, lambda: ids, spent, kept=before // BLOCK_TOKENS)
        self._typed[salt] = ids, turn_at
        if len(self._typed) > MOST_NOTES:
            salt, _ = self._typed.popitem(last=False)
            self._drafts.pop(salt, None)

    def sent(self, sequence: Sequence) -> None:
        """Somebody asks: what was typed is wanted now, and stays."""
        if sequence.priority < PRIORITIES["background"]:
            self._typed.pop(sequence.salt, None)
            self._drafts.pop(sequence.salt, None)

    def clear(self, conversation: bytes | None = None) -> None:
        """Nothing is to be read; or nothing for this conversation."""
        for note in list(self._notes):
            if conversation in (None, note.conversation):
                self._notes.remove(note)
        for salt, draft in list(self._drafts.items()):
            if conversation in (None, draft.conversation):
                del self._drafts[salt], self._typed[salt]
        if conversation is None:
            self._typed.clear()

    def due_s(self, quiet_s: float) -> float:
        """In how many seconds there is something to read; infinite if there is nothing. Who types has paused when a
        draft comes: nothing speaks for waiting longer."""
        if self._drafts:
            return 0.0
        return max(0.0, QUIET_S - quiet_s) if self._notes else float("inf")

    def read(self, go_on: Callable[[], bool]) -> None:
        """One step, given up between two layers once `go_on` says no. Nothing may wait or run."""
        note = self._drafts[next(reversed(self._drafts))] if self._drafts else self._notes[-1]
        is_over = True  # if it fails it is not tried again
        try:
            note.ids = note.ids or note.write()
            if self._is_worth_it(note):
                is_over = self._step(note, go_on)
        finally:
            if is_over and note.prompt is None:
                del self._drafts[note.salt]
            elif is_over:
                self._notes.remove(note)

    def _step(self, note: _Note, go_on: Callable[[], bool]) -> bool:
        """Whether that was the last one."""
        sequence = Sequence(
            note.ids,
            salt=note.salt,
            adapter=note.adapter,
            priority=PRIORITIES["background"],
            conversation=note.conversation,
        )
        rows = min(STEP_ROWS, self._runner.max_rows)
        note.tries += 1
        self._scheduler.add(sequence)
        try:
            plan = self._scheduler.schedule(rows, rows)
            self._mover.move(plan)
            for chunk in plan.chunks:
                chunk.samples = False
            if plan.chunks and self._runner.run(plan.chunks, lambda _: go_on(), once=True) is not None:
                self._scheduler.advance(plan.chunks[0])
                self._runner.cache.touch_ahead(sequence.blocks[-1], plan.rows)
                note.tries = 0
            if not sequence.pending and self._offload is not None and note.prompt is not None:
                self._offload.offer(sequence)
            return not sequence.pending or note.tries >= MOST_TRIES
        finally:
            self._scheduler.remove(sequence)
            if note.prompt is None:
                self._deprioritise(note)  # a block that was copied counts as used

    def _is_worth_it(self, note: _Note) -> bool:
        """Whether there is something to read, at the cost of no more than one block that somebody else may want."""
        pool, ids = self._scheduler.pool, note.ids
        if not ids or self._scheduler.cached_length(note.salt, [*ids, -1]) == len(ids):
            return False
        known = len(pool.chain(note.salt, ids))
        lacking = -(-len(ids) // BLOCK_TOKENS) - known - pool.blank
        if lacking > 0:  # what was thought, or typed before, goes first: nobody reads it again
            lacking -= self._deprioritise(note)
        return lacking <= 1

    def _deprioritise(self, note: _Note) -> int:
        """When room is needed, deprioritise what is of no more use. How many blocks that makes room for."""
        pool, is_draft = self._scheduler.pool, note.prompt is None
        wanted = set(pool.chain(note.salt, note.ids, with_rest=is_draft))
        chain = pool.chain(note.salt, note.spent, with_rest=is_draft)
        return pool.deprioritise([block for block in chain[note.kept :] if block not in wanted])


def _written(sequence: Sequence, generation: Generation, next_ids: Callable[[Message], list[int]]) -> list[int]:
    """The beginning of the next prompt; empty where it is not known, or of no use."""
    if len(sequence.tokens) > MOST_TOKENS:
        return []
    events = generation.read()
    message = Message(
        "assistant",
        "".join(event.text for event in events if event.kind == "text"),
        "".join(event.text for event in events if event.kind == "reasoning"),
        tuple(event.tool_call for event in events if event.tool_call is not None),
    )
    try:
        return next_ids(message)
    except NotsoError as error:
        _log.debug("the next turn cannot be written: %s", error)
        return []
