"""What a turn has said so far, kept so that any number of readers can come, leave and come back.

A reader names the last number it saw and gets everything after it as one update, however much that is: closed blocks
to append, and the open tails as they are now. So a slow reader costs nothing but itself, and none can miss or double
a block.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

ChannelName = Literal["reasoning", "answer"]
CHANNELS: tuple[ChannelName, ...] = ("reasoning", "answer")


@dataclass(frozen=True, slots=True)
class ChannelUpdate:
    """HTML to append to a channel's closed part, and its new tail where that changed."""

    append: str
    tail: str | None


@dataclass(frozen=True, slots=True)
class Update:
    """One reader's next step. `snapshot`: it replaces all the reader has. `number` is what to name next time."""

    number: int
    snapshot: bool
    channels: dict[ChannelName, ChannelUpdate]
    phase: str
    label: str
    thought: str


@dataclass(slots=True)
class _Channel:
    closed: list[tuple[int, str]] = field(default_factory=list)
    tail: str = ""
    tail_number: int = 0


class TurnLog:
    """Written by one task on the event loop, read by many there. Numbers grow by one with every change."""

    def __init__(self) -> None:
        self.number = 0
        self.finished = False
        self.phase = "queued"
        self.label = ""
        self.thought = ""
        self.error: str | None = None
        self._channels: dict[ChannelName, _Channel] = {name: _Channel() for name in CHANNELS}
        self._changed = asyncio.Event()

    def write(self, channel: ChannelName, closed: str, tail: str) -> None:
        """Append a closed block (may be '') and set the open tail."""
        target = self._channels[channel]
        if not closed and tail == target.tail:
            return
        self.number += 1
        if closed:
            target.closed.append((self.number, closed))
        if tail != target.tail:
            target.tail, target.tail_number = tail, self.number
        self._wake()

    def set_phase(self, phase: str, label: str) -> None:
        """The state in the status pill's words."""
        if (phase, label) != (self.phase, self.label):
            self.phase, self.label = phase, label
            self.number += 1
            self._wake()

    def set_thought(self, label: str) -> None:
        """What stands above the thoughts."""
        if label != self.thought:
            self.thought = label
            self.number += 1
            self._wake()

    def finish(self, phase: str, label: str, error: str | None = None) -> None:
        """The last entry. `error` is one line for a person."""
        self.set_phase(phase, label)
        self.error = error
        self.finished = True
        self.number += 1
        self._wake()

    def html(self, channel: ChannelName) -> str:
        """All of a channel, closed and open."""
        target = self._channels[channel]
        return "".join(html for _, html in target.closed) + target.tail

    def since(self, number: int | None) -> Update:
        """Everything after `number`. None, or a number this log never gave, gets a snapshot."""
        snapshot = number is None or not 0 <= number <= self.number
        start = -1 if snapshot or number is None else number
        channels: dict[ChannelName, ChannelUpdate] = {}
        for name, channel in self._channels.items():
            append = "".join(html for at, html in channel.closed if at > start)
            tail = channel.tail if channel.tail_number > start else None
            if snapshot or append or tail is not None:
                channels[name] = ChannelUpdate(append, tail)
        return Update(self.number, snapshot, channels, self.phase, self.label, self.thought)

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait until something after `number` is there. False when `seconds` passed without."""
        if self.number > number:
            return True
        try:
            return await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
