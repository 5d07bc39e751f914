"""What a turn has said so far, kept so that any number of readers can come, leave and come back.

A reader names the last number it saw and gets everything after it as one update, however much that is: closed blocks
to append, and the open tails as they are now. So a slow reader costs nothing but itself, and none can miss or double
a block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ChannelName = Literal["reasoning", "answer"]
CHANNELS: tuple[ChannelName, ...] = ("reasoning", "answer")
Figure = int | float | None


@dataclass(frozen=True, slots=True)
class ChannelUpdate:
    """HTML to append to a channel's closed part, and its new tail where that changed."""

    append: str
    tail: str | None


@dataclass(frozen=True, slots=True)
class Update:
    """One reader's next step. `snapshot`: it replaces all the reader has. `number` is what to name next time.

    `label` is the pill's word, `thought` stands above the thoughts, `detail` beside the moving dots; `progress` holds
    the same in figures.
    """

    number: int
    snapshot: bool
    channels: dict[ChannelName, ChannelUpdate]
    phase: str
    label: str
    thought: str
    detail: str
    progress: Mapping[str, Figure]


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
        self.detail = ""
        self.progress: Mapping[str, Figure] = {}
        self.figures: Mapping[str, Figure] = {}
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
        self.tell(phase, label, self.thought, self.detail, self.progress)

    def tell(self, phase: str, label: str, thought: str, detail: str, progress: Mapping[str, Figure]) -> None:
        """All that is said about the state, at once."""
        new = (phase, label, thought, detail, progress)
        if new != (self.phase, self.label, self.thought, self.detail, self.progress):
            self.phase, self.label, self.thought, self.detail, self.progress = new
            self.number += 1
            self._wake()

    def finish(
        self, phase: str, label: str, error: str | None = None, figures: Mapping[str, Figure] | None = None
    ) -> None:
        """The last entry. `error` is one line for a person; `figures` is what it all cost."""
        self.tell(phase, label, self.thought, "", {})
        self.error = error
        self.figures = figures or {}
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
        return Update(self.number, snapshot, channels, self.phase, self.label, self.thought, self.detail, self.progress)

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait until something after `number` is there. False when `seconds` passed without."""
        if self.number > number:
            return True
        try:
            return await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False

    async def ending(self, seconds: float) -> None:
        """Let so much time pass, or less if the end comes."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not self.finished and (left := deadline - asyncio.get_running_loop().time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
