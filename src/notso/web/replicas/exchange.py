"""Define how replicas (servers that share a database) communicate. Messages are kept only for a short time, and may be
lost.

`LocalExchange`, the default, is for a single server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Body = Mapping[str, Any]
"""A JSON object."""
Subscriber = Callable[[Body], None]
"""Function that handles a message from another replica."""
ApplyChanges = Callable[[Body], bool]
"""Function that applies changes from a published log to a copy. It returns False if earlier changes are missing; then
it is called again with all changes."""


class ChangeLog(Protocol):
    """Log of changes with increasing numbers. One replica writes it; others keep copies."""

    at_change: Callable[[], None] | None

    @property
    def number(self) -> int:
        """Number of the last change."""

    @property
    def finished(self) -> bool: ...

    def changes(self, after: int) -> Body:
        """Return the changes after number `after` (-1: all)."""


class Exchange(Protocol):
    """Messages, logs and values shared by replicas. Use on the event loop. Only the coroutines wait for the network."""

    at_gap: list[Callable[[], None]]  # called whenever messages may have been lost

    @property
    def is_shared(self) -> bool: ...

    @property
    def is_unreachable(self) -> bool:
        """Whether the last attempt to reach the other replicas failed."""

    def send(self, kind: str, **body: Any) -> None:
        """Send a message to all other replicas once they are reachable. If too many are waiting, drop the oldest."""

    def subscribe(self, kind: str, subscriber: Subscriber) -> None:
        """Call `subscriber` for each message of this kind."""

    def publish(self, name: str, log: ChangeLog) -> None:
        """Send each change of a log until the log is finished."""

    def following(self, name: str, apply_changes: ApplyChanges) -> AbstractContextManager[None]:
        """While the context is open, pass the changes from a published log to `apply_changes`."""

    async def claim(self, name: str, holder: str) -> str:
        """Claim a name for `holder` until `release` is called or this replica stops.

        Returns '' on success, otherwise the current holder. Also succeeds if the other replicas are unreachable.
        """

    def release(self, name: str) -> None: ...

    async def is_claimed(self, name: str) -> bool:
        """Return whether a running replica has claimed the name, or True if that is unknown."""

    async def set_value(self, name: str, value: str, seconds: float) -> None:
        """Store a value for all replicas once they are reachable. If too many values are waiting, drop the oldest."""

    async def get_value(self, name: str, if_unreachable: str | None = None) -> str | None:
        """Return a stored value, None if there is none, or `if_unreachable` if that is unknown."""

    def start(self) -> None: ...

    async def close(self) -> None:
        """Try to send the waiting messages, then close."""


class LocalExchange:
    is_shared = False
    is_unreachable = False

    def __init__(self) -> None:
        self.at_gap: list[Callable[[], None]] = []

    def send(self, kind: str, **body: Any) -> None: ...

    def subscribe(self, kind: str, subscriber: Subscriber) -> None: ...

    def publish(self, name: str, log: ChangeLog) -> None: ...

    @contextmanager
    def following(self, name: str, apply_changes: ApplyChanges) -> Iterator[None]:
        yield

    async def claim(self, name: str, holder: str) -> str:
        return ""

    def release(self, name: str) -> None: ...

    async def is_claimed(self, name: str) -> bool:
        return False

    async def set_value(self, name: str, value: str, seconds: float) -> None: ...

    async def get_value(self, name: str, if_unreachable: str | None = None) -> str | None:
        return None

    def start(self) -> None: ...

    async def close(self) -> None: ...
