"""Log the events of one turn. Any number of readers can attach to it, leave, and resume.

A reader passes the number of the last update that it received, and receives all later changes as one update: closed
blocks (which no longer change) to append, the current tails (open blocks), and changed tool cards. Except in snapshots,
a reader receives each closed block exactly once. A slow reader delays only itself.

All readers are woken together, so that an update can be encoded once for all of them. They are woken at most ten times
a second, and less often if there are many readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ChannelName = Literal["reasoning", "answer"]
CHANNELS: tuple[ChannelName, ...] = ("reasoning", "answer")
Stat = int | float | None
UPDATE_SECONDS = 0.1
"""Minimum seconds between two updates."""
SECONDS_FOR_READER = 0.002
"""With N readers, two updates are at least N times this many seconds apart, so that many readers do not slow down the
model."""
NUMBERS_OF_A_LOG = 1_000_000_000
"""Larger than the number of changes in any log. If a log continues the log of another process, its numbers start at
the next multiple of this number."""
CARD_MARK = "<!--tool-->"
"""Marks the place of a tool card in stored HTML. Other HTML is sanitized, so it contains no comments."""


@dataclass(frozen=True, slots=True)
class ChannelUpdate:
    """HTML to append to a channel, and the channel's tail if it has changed."""

    append: str
    tail: str | None


@dataclass(frozen=True, slots=True)
class Card:
    """HTML of a tool call's card, and of its two parts that change."""

    whole: str
    state: str
    result: str


@dataclass(frozen=True, slots=True)
class AnswerStatus:
    phase: str
    label: str = ""  # in the status badge
    reasoning_label: str = ""  # above the reasoning
    detail: str = ""  # next to the moving dots
    progress: Mapping[str, Stat] = field(default_factory=dict)  # the numbers in `detail`


@dataclass(frozen=True, slots=True)
class Update:
    number: int  # number of the last change, from which a reader can resume
    snapshot: bool  # replaces all of the reader's state
    channels: dict[ChannelName, ChannelUpdate]
    cards: Mapping[str, Card]  # changed cards that the reader already has
    asking: str  # id of the pending permission or question
    status: AnswerStatus


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """Last update of a reader: its number, and the fields that are sent only when they change."""

    number: int | None
    phase: str | None = None
    asking: str | None = None
    progress: tuple[tuple[str, Stat], ...] = ()


@dataclass(slots=True)
class _Channel:
    closed: list[tuple[int, str, str]] = field(default_factory=list)  # (number, HTML, "") or (number, "", id of a card)
    tail: str = ""
    tail_number: int = 0


class TurnLog:
    """Log that any number of tasks read. Use only on the event loop. `number` counts changes."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._from = number  # readers below this number get a snapshot
        self.finished = False
        self.status = AnswerStatus("queued")
        self.stats: Mapping[str, Stat] = {}
        self.error: str | None = None
        self.words = 0
        self.asking = ""
        self.at_phase: Callable[[], None] | None = None
        self.at_change: Callable[[], None] | None = None
        self.cards: dict[str, Card] = {}
        self._card_numbers: dict[str, int] = {}
        self._channels: dict[ChannelName, _Channel] = {name: _Channel() for name in CHANNELS}
        # Encoded updates by reader position and language; cleared on every change.
        self.encoded: dict[tuple[ReaderPosition, str], tuple[bytes, ReaderPosition]] = {}
        self._readers = 0
        self._notified = 0  # number at the last wake-up of readers
        self._notified_at = float("-inf")
        self._later: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def has_readers(self) -> bool:
        return self._readers > 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def write(self, channel: ChannelName, closed: str, tail: str) -> None:
        """Append a closed block ('' for none) and set the tail."""
        target = self._channels[channel]
        if not closed and tail == target.tail:
            return
        self.number += 1
        if closed:
            target.closed.append((self.number, closed, ""))
        if tail != target.tail:
            target.tail, target.tail_number = tail, self.number
        self._wake()

    def put_card(self, card_id: str, card: Card) -> None:
        self.number += 1
        if card_id not in self.cards:
            self._channels["answer"].closed.append((self.number, "", card_id))
        self.cards[card_id] = card
        self._card_numbers[card_id] = self.number
        self._wake()

    def ask(self, waits_for: str) -> None:
        """Set the id of the pending permission or question ('' for none)."""
        self.asking = waits_for
        self.number += 1
        self._wake()

    def set_status(self, status: AnswerStatus) -> None:
        if status != self.status:
            is_new_phase = status.phase != self.status.phase
            self.status = status
            self.number += 1
            self._wake()
            if is_new_phase and self.at_phase is not None:
                self.at_phase()

    def finish(self, phase: str, label: str, error: str | None = None, stats: Mapping[str, Stat] | None = None) -> None:
        """Close the log with statistics and, after a failure, an error (one line)."""
        self.set_status(AnswerStatus(phase, label, self.status.reasoning_label))
        self.error = error
        self.stats = stats or {}
        self.finished = True
        self.number += 1
        self._wake()

    def replace_html(self, html: Mapping[ChannelName, str]) -> None:
        """Replace all HTML; every reader gets a snapshot."""
        self.number += 1
        self._from = self.number
        for name, channel in self._channels.items():
            channel.closed = [(self.number, html[name], "")] if html[name] else []
            channel.tail, channel.tail_number = "", self.number
        self._wake()

    def clear(self) -> None:
        """Remove all text and cards."""
        self.cards, self._card_numbers = {}, {}
        self.replace_html({"reasoning": "", "answer": ""})

    def html(self, channel: ChannelName) -> str:
        """Return HTML with CARD_MARK for each card."""
        target = self._channels[channel]
        return "".join(html or CARD_MARK for _, html, _ in target.closed) + target.tail

    def since(self, number: int | None) -> Update:
        """Return all changes after `number`, or a snapshot if `number` is None or out of range."""
        snapshot = number is None or not self._from <= number <= self.number
        start = -1 if snapshot or number is None else number
        channels: dict[ChannelName, ChannelUpdate] = {}
        fresh: set[str] = set()
        for name, channel in self._channels.items():
            new = [(html, card_id) for at, html, card_id in channel.closed if at > start]
            append = "".join(html or self.cards[card_id].whole for html, card_id in new)
            fresh.update(card_id for _, card_id in new)
            tail = channel.tail if channel.tail_number > start else None
            if snapshot or append or tail is not None:
                channels[name] = ChannelUpdate(append, tail)
        changed = {
            name: self.cards[name] for name, at in self._card_numbers.items() if at > start and name not in fresh
        }
        return Update(self.number, snapshot, channels, changed, self.asking, self.status)

    def changes(self, after: int) -> dict[str, Any]:
        """Return changes after number `after` (-1 for all) as JSON values, for a copy on another replica."""
        return {
            "from": self._from,
            "closed": {
                name: [each for each in channel.closed if each[0] > after] for name, channel in self._channels.items()
            },
            "tails": {
                name: [channel.tail_number, channel.tail]
                for name, channel in self._channels.items()
                if channel.tail_number > after
            },
            "cards": {name: [at, asdict(self.cards[name])] for name, at in self._card_numbers.items() if at > after},
            "said": list(asdict(self.status).values()),
            "asking": self.asking,
            "ended": [self.error, dict(self.stats), self.words] if self.finished else None,
        }

    def apply_changes(self, after: int, number: int, changes: Mapping[str, Any]) -> bool:
        """Apply changes of the original log to this copy. Return False if earlier changes are missing."""
        if after > self.number:
            return False
        if number <= self.number or self.finished:
            return True
        if self.number < changes["from"]:  # the original has replaced all of its HTML
            self._from = changes["from"]
            self.cards, self._card_numbers = {}, {}
            for channel in self._channels.values():
                channel.closed, channel.tail, channel.tail_number = [], "", number
        for name, channel in self._channels.items():
            channel.closed += [(at, html, card) for at, html, card in changes["closed"][name] if at > self.number]
            channel.tail_number, channel.tail = changes["tails"].get(name, (channel.tail_number, channel.tail))
        for name, (at, card) in changes["cards"].items():
            self.cards[name], self._card_numbers[name] = Card(**card), at
        self.status = AnswerStatus(*changes["said"])
        self.asking = changes["asking"]
        if changes["ended"] is not None:
            self.error, self.stats, self.words = changes["ended"]
            self.finished = True
        self.number = number
        self._wake()
        return True

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait for an update after `number`. Return False on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._notified <= number:
                    await self._changed.wait()
        return self._notified > number

    def _wake(self) -> None:
        self.encoded.clear()
        if self.at_change is not None:
            self.at_change()
        if self.finished or not self._readers:
            self._notify_readers()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            due = self._notified_at + max(UPDATE_SECONDS, SECONDS_FOR_READER * self._readers)
            if due <= loop.time():
                self._notified_at = loop.time()
                self._notify_readers()
            else:
                self._later = loop.call_at(due, self._notify_later)

    def _notify_later(self) -> None:
        self._notified_at = asyncio.get_running_loop().time()
        self._notify_readers()

    def _notify_readers(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._notified = self.number
        self._changed.set()
        self._changed = asyncio.Event()
