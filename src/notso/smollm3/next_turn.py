"""While nobody asks for anything: what the next turn of a conversation will begin with is read before it is asked for.

Behind an answer's last token the template writes the end of the turn and the beginning of the person's; and thoughts
are left out of what it writes, so that behind them an answer stands where it was not computed. All of that is known
when an answer has ended. Read ahead, it is found in the prefix cache like anything else; if another question comes than
expected, nothing was lost but time that nobody wanted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from notso.smollm3.errors import NotsoError
from notso.smollm3.generation import Generation
from notso.smollm3.kv_shelf import KVShelf
from notso.smollm3.messages import Message
from notso.smollm3.prefix_cache import BLOCK_TOKENS
from notso.smollm3.request import Request
from notso.smollm3.runner import Runner
from notso.smollm3.scheduler import Plan, Scheduler
from notso.smollm3.sequence import RANKS, Sequence

QUIET_S = 0.3
"""Nothing may have been asked for so long: titles and the like are asked for at once, a next question later."""

MOST_NOTES = 16

STEP_ROWS = 128
"""Few enough that between two layers of the 3B there are milliseconds: so long does a request wait at the most."""

MOST_TRIES = 8
"""Steps given up for a request, until what was to be read is given up too."""

MOST_TOKENS = 65_536
"""Writing down more would keep the engine's thread for longer than a request should wait."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Note:
    sequence: Sequence
    answer: Generation
    next_ids: Callable[[Message], list[int]]
    ids: list[int] = field(default_factory=list)  # the beginning of the next prompt, once it was written
    tries: int = 0


class NextTurns:
    """Answers that ended lately, the newest of them first. Only the engine's thread may call."""

    def __init__(self, runner: Runner, scheduler: Scheduler, shelf: KVShelf | None) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._shelf = shelf
        self._notes: deque[_Note] = deque(maxlen=MOST_NOTES)

    def note(self, request: Request) -> None:
        """An answer has ended; if by itself, another turn may follow."""
        if request.next_ids is None or request.answer.finish_reason not in ("stop", "tool_calls"):
            return
        prompt = request.sequence.prompt
        for other in [other for other in self._notes if other.sequence.prompt == prompt]:
            self._notes.remove(other)  # answered anew
        self._notes.append(_Note(request.sequence, request.generation, request.next_ids))

    def forget(self) -> None:
        """Nothing is to be read."""
        self._notes.clear()

    def due_s(self, quiet_s: float) -> float:
        """In how many seconds there is something to read; infinite if there is nothing."""
        return max(0.0, QUIET_S - quiet_s) if self._notes else float("inf")

    def read(self, bring_back: Callable[[Plan], None], go_on: Callable[[], bool]) -> None:
        """One step, given up between two layers once `go_on` says no. Nothing may wait or run. `bring_back` moves a
        plan's blocks from the disk."""
        note, is_over = self._notes[-1], True  # if it fails it is not tried again
        try:
            note.ids = note.ids or _written(note)
            if self._is_worth_it(note):
                is_over = self._step(note, bring_back, go_on)
        finally:
            if is_over:
                self._notes.remove(note)

    def _step(self, note: _Note, bring_back: Callable[[Plan], None], go_on: Callable[[], bool]) -> bool:
        """Whether that was the last one."""
        sequence = Sequence(note.ids, root=note.sequence.root, rank=RANKS["background"])
        rows = min(STEP_ROWS, self._runner.max_rows)
        note.tries += 1
        self._scheduler.add(sequence)
        try:
            plan = self._scheduler.schedule(rows, rows)
            bring_back(plan)
            for chunk in plan.chunks:
                chunk.samples = False
            if plan.chunks and self._runner.run(plan.chunks, lambda _: go_on(), once=True) is not None:
                self._scheduler.advance(plan.chunks[0])
                self._runner.cache.touch_ahead(sequence.blocks[-1], plan.rows)
                note.tries = 0
            if not sequence.pending and self._shelf is not None:
                self._shelf.offer(sequence)
            return not sequence.pending or note.tries >= MOST_TRIES
        finally:
            self._scheduler.remove(sequence)

    def _is_worth_it(self, note: _Note) -> bool:
        """Whether there is something to read, at the cost of no more than one block that somebody else may want."""
        cache, ids, before = self._scheduler.cache, note.ids, note.sequence
        known = cache.chain(before.root, ids)
        at = len(known) * BLOCK_TOKENS
        if not ids or self._scheduler.cached_length(before.root, [*ids, -1]) == len(ids):
            return False
        lacking = -(-(len(ids) - at) // BLOCK_TOKENS) - cache.blank
        if lacking > 0:  # what was thought goes first: nobody reads it again
            kept = set(known)
            thoughts = [block for block in cache.chain(before.root, before.tokens) if block not in kept]
            lacking -= cache.let_go_first(thoughts)
        return lacking <= 1


def _written(note: _Note) -> list[int]:
    """The beginning of the next prompt; empty where it is not known, or of no use."""
    if len(note.sequence.tokens) > MOST_TOKENS:
        return []
    events = note.answer.read()
    answer = Message(
        "assistant",
        "".join(event.text for event in events if event.kind == "text"),
        "".join(event.text for event in events if event.kind == "reasoning"),
        tuple(event.tool_call for event in events if event.tool_call is not None),
    )
    try:
        return note.next_ids(answer)
    except NotsoError as error:
        _log.debug("the next turn cannot be written: %s", error)
        return []
