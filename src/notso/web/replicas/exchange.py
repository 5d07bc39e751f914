"""What replicas, servers over one store, tell each other; all of it is short-lived and may be lost without harm.

A server alone has nobody to tell: `Alone` is the default, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Body = Mapping[str, Any]
"""An object of JSON."""
Heard = Callable[[Body], None]
Take = Callable[[Body], bool]
"""Adds changes to a copy. False: changes before them are missing, and all of them are wanted anew."""


class GrowingLog(Protocol):
    """Something that changes in numbered steps on one replica, and of which others keep copies."""

    at_change: Callable[[], None] | None
    """Called after each change."""

    @property
    def number(self) -> int:
        """Grows with every change."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will change."""

    def changes(self, after: int) -> Body:
        """What changed after that number; -1 for everything."""


class Exchange(Protocol):
    """On the event loop. Nothing here waits for another machine, but for `claim` and what is remembered."""

    @property
    def is_shared(self) -> bool:
        """Whether there may be other replicas."""

    @property
    def is_away(self) -> bool:
        """Whether the others could not be reached when that was last tried."""

    def tell(self, kind: str, **body: Any) -> None:
        """Tell all others, now or when they can be reached again; of very much, the oldest is left out."""

    def hear(self, kind: str, heard: Heard) -> None:
        """Have what others tell of that kind."""

    def after_a_gap(self, act: Callable[[], None]) -> None:
        """Have `act` called when something may have been told that was not heard."""

    def publish(self, name: str, log: GrowingLog) -> None:
        """From here to its end, others can follow the log by that name; it takes the place of one they followed."""

    def following(self, name: str, take: Take) -> AbstractContextManager[None]:
        """While it lasts, `take` gets the changes of a published log, from the first on."""

    async def claim(self, name: str, holder: str) -> str:
        """Hold that name against the other replicas until it is released, or this one is gone. '', or who holds it.
        Where they cannot be asked, it is held here alone."""

    def release(self, name: str) -> None:
        """It is free for others."""

    async def is_held(self, name: str) -> bool:
        """Whether a replica that is there holds that name; True also where that cannot be known."""

    async def remember(self, name: str, value: str, seconds: float) -> None:
        """Keep a value for all replicas; where they cannot be reached, it is not kept."""

    async def recall(self, name: str) -> str | None:
        """The value, or None where there is none or nobody can be asked."""

    async def forget(self, name: str) -> None:
        """There is no such value."""

    def start(self) -> None: ...

    async def close(self) -> None:
        """After a last try to send what is left."""


class Alone:
    """The exchange of a server without others."""

    is_shared = False
    is_away = False

    def tell(self, kind: str, **body: Any) -> None: ...

    def hear(self, kind: str, heard: Heard) -> None: ...

    def after_a_gap(self, act: Callable[[], None]) -> None: ...

    def publish(self, name: str, log: GrowingLog) -> None: ...

    @contextmanager
    def following(self, name: str, take: Take) -> Iterator[None]:
        yield

    async def claim(self, name: str, holder: str) -> str:
        return ""

    def release(self, name: str) -> None: ...

    async def is_held(self, name: str) -> bool:
        return False

    async def remember(self, name: str, value: str, seconds: float) -> None: ...

    async def recall(self, name: str) -> str | None:
        return None

    async def forget(self, name: str) -> None: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...
