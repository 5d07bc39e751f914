"""Communication between replicas (servers that share a database). Messages are short-lived and may be lost.

`Alone`, the default, serves a single server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Body = Mapping[str, Any]
"""A JSON object."""
Heard = Callable[[Body], None]
Take = Callable[[Body], bool]
"""Applies changes to a copy. Returns False if earlier ones are missing; all changes are then sent again."""


class GrowingLog(Protocol):
    """Log that grows in numbered steps on one replica; others keep copies."""

    at_change: Callable[[], None] | None

    @property
    def number(self) -> int:
        """Increases with every change."""

    @property
    def finished(self) -> bool: ...

    def changes(self, after: int) -> Body:
        """Return the changes after number `after`, or all if it is -1."""


class Exchange(Protocol):
    """Message exchange. Use on the event loop.

    Only the coroutines wait for another machine.
    """

    @property
    def is_shared(self) -> bool: ...

    @property
    def is_away(self) -> bool:
        """Whether the last attempt to reach the others failed."""

    def tell(self, kind: str, **body: Any) -> None:
        """Send a message to all other replicas once they are reachable. If too many wait, the oldest are dropped."""

    def hear(self, kind: str, heard: Heard) -> None:
        """Subscribe to messages of a kind."""

    def after_a_gap(self, act: Callable[[], None]) -> None:
        """Call `act` when messages may have been missed."""

    def publish(self, name: str, log: GrowingLog) -> None:
        """Publish a log under a name until its end."""

    def following(self, name: str, take: Take) -> AbstractContextManager[None]:
        """Receive a published log's changes from the start while the context is open."""

    async def claim(self, name: str, holder: str) -> str:
        """Claim a name until `release` or the end of this replica.

        Returns '' on success, otherwise the current holder. If the others are unreachable, the claim is only local.
        """

    def release(self, name: str) -> None: ...

    async def is_held(self, name: str) -> bool:
        """Return whether a running replica holds the name; True if unknown."""

    async def remember(self, name: str, value: str, seconds: float) -> None:
        """Store a value for all replicas, if reachable."""

    async def recall(self, name: str) -> str | None:
        """Return a stored value, or None if it is missing or unreachable."""

    async def forget(self, name: str) -> None: ...

    def start(self) -> None: ...

    async def close(self) -> None:
        """Close after a last attempt to send."""


class Alone:
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
