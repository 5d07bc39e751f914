"""Protocol for API keys, quotas, usage and the audit log, separate from the conversations.

Several processes use it at once (`notso keys` beside a server, or several servers), and damaged conversations do not
lock users out. `tests/web/store/access_suite.py` tests every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from notso.web.values.quotas import Quota, Reservation, Wanted

MAX_KEYS = 10_000
RESERVED_SECONDS = 120.0  # reservations lapse unless renewed, in case a server is killed
AUDIT_ENTRIES = 10_000  # of each of the two logs


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key's record, without the key. Limits of 0 mean none."""

    id: str
    name: str
    created_ms: int  # times are milliseconds since 1970, UTC
    requests_per_minute: int = 0
    tokens_per_day: int = 0  # of prompts and answers
    is_operator: bool = False
    revoked_ms: int = 0  # 0 while the key is valid
    requests_per_day: int = 0


@dataclass(frozen=True, slots=True)
class Used:
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
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class UsageRow:
    day: date
    owner: str
    used: Used


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action, never any content."""

    at_ms: int
    owner: str
    action: str
    address: str = ""
    count: int = 1  # occurrences since the previous entry
    by_operator: bool = False  # such entries go to a log of their own


class AccessStore(Protocol):
    """Store of keys, usage and audit entries, safe for concurrent processes.

    Writes are on disk when a method returns, and visible to every process. Methods raise StorageError.
    """

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def add_key(self, key: ApiKey, digest: bytes) -> bool:
        """Store a key by its SHA-256; False if the name is taken or MAX_KEYS reached."""

    async def keys(self) -> list[ApiKey]:
        """Return all keys, revoked ones included, by name, newest first."""

    async def key_of(self, digest: bytes) -> ApiKey | None:
        """Return the key of a digest, revoked or not."""

    async def key(self, key_id: str) -> ApiKey | None: ...

    async def revoke_key(self, name: str, now_ms: int) -> ApiKey | None: ...

    async def add_usage(self, rows: list[UsageRow], ended: Collection[Reservation] = ()) -> None:
        """Add usage and end reservations, in one transaction."""

    async def reserve(self, day: date, owner: str, quota: Quota, wanted: Sequence[Wanted]) -> list[Reservation] | Used:
        """Reserve quota for RESERVED_SECONDS: each prompt and, if less is left, a shorter answer.

        Used and reserved tokens never exceed the quota, across processes. If it is exhausted nothing is
        reserved, and the usage is returned.
        """

    async def remove_owner(self, owner: str) -> None:
        """Delete an owner's key, usage, reservations and audit entries for good."""

    async def renew(self, reservations: Collection[Reservation]) -> None:
        """Extend reservations by RESERVED_SECONDS; lapsed ones stay lapsed."""

    async def usage(self, first: date, last: date) -> list[UsageRow]:
        """Return usage of these days, newest first, then by owner."""

    async def used_on(self, day: date, owner: str) -> Used: ...

    async def add_audit(self, *entries: AuditEntry) -> None:
        """Append entries, all or none. Full logs drop the oldest entry of the owner with most."""

    async def audit(self, limit: int) -> list[AuditEntry]:
        """Return the newest entries, `limit` of each log, newest first."""
