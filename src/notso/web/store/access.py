"""People and keys as a store keeps them, beside the conversations: whose keys there are, what was used, what was done.

A protocol of its own: several processes use it at once (`notso keys` beside a server, or many servers), and a store of
conversations that is damaged or elsewhere locks nobody out. `tests/web/store/access_suite.py` holds any store to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from notso.web.values.quotas import Quota, Reservation, Wanted

MAX_KEYS = 10_000
RESERVED_SECONDS = 120.0
"""So long a reservation holds unless it is renewed: a server that was killed holds nothing for ever."""
AUDIT_ENTRIES = 10_000
"""Of each log."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without the key itself. `requests_per_minute`, `requests_per_day` and `tokens_per_day` (prompt and answer
    together): 0 is no limit. Times in milliseconds since 1970, UTC; `revoked_ms` 0: it counts."""

    id: str
    name: str
    created_ms: int
    requests_per_minute: int = 0
    tokens_per_day: int = 0
    is_operator: bool = False
    revoked_ms: int = 0
    requests_per_day: int = 0


@dataclass(frozen=True, slots=True)
class Used:
    """What was used: requests to the model, and tokens of prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one owner used on one day, UTC."""

    day: date
    owner: str
    used: Used


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that was done, by whom and when: never what anybody wrote. `address` is the other end's; `count`: so
    often since the entry before. What is `by_operator` is kept in a log of its own."""

    at_ms: int
    owner: str
    action: str
    address: str = ""
    count: int = 1
    by_operator: bool = False


class AccessStore(Protocol):
    """What is written is on disk when the method returns. Methods raise StorageError; they may be called from several
    processes at once, and what one writes the next read of another finds."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def add_key(self, key: ApiKey, digest: bytes) -> bool:
        """Keep a key by its SHA-256 digest; False: one of that name counts already, or there are too many."""

    async def keys(self) -> list[ApiKey]:
        """All of them, revoked ones too, by name, then the newest first."""

    async def key_of(self, digest: bytes) -> ApiKey | None:
        """The key of that digest, revoked or not."""

    async def key(self, key_id: str) -> ApiKey | None: ...

    async def revoke_key(self, name: str, now_ms: int) -> ApiKey | None:
        """The key of that name counts no more; None where none does."""

    async def add_usage(self, rows: list[UsageRow], ended: Collection[Reservation] = ()) -> None:
        """Add to what is there for the same days and owners, and end these reservations, all or nothing."""

    async def reserve(self, day: date, owner: str, quota: Quota, wanted: Sequence[Wanted]) -> list[Reservation] | Used:
        """Hold what these requests may use, for RESERVED_SECONDS: each its prompt and, at most, the answer it wants,
        and less where less is left. Used and reserved never exceed the quota, however many processes reserve at once.
        Where it is not enough nothing is held, and what comes back is what is used, without what others hold."""

    async def renew(self, reservations: Collection[Reservation]) -> None:
        """Hold them for RESERVED_SECONDS from now on. One that has lapsed stays so."""

    async def usage(self, first: date, last: date) -> list[UsageRow]:
        """Of those days, the newest first, then by owner."""

    async def used_on(self, day: date, owner: str) -> Used: ...

    async def add_audit(self, *entries: AuditEntry) -> None:
        """All or nothing. Each of the two logs keeps AUDIT_ENTRIES; of more, the oldest of whoever has most goes."""

    async def audit(self, limit: int) -> list[AuditEntry]:
        """The newest of both logs, so many of each, the newest first."""
