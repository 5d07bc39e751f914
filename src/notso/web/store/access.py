"""Protocol for the store of API keys, quotas, usage and audit logs.

This store is separate from the chat store for two reasons: several processes may use it at once (`notso keys` while a
server runs, or several servers), and keys must stay valid if the chat database is damaged. It has two audit logs, one
for actions of operators and one for all other actions. `tests/web/store/access_suite.py` tests all implementations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from notso.web.values.quotas import MaxTokenUse, Quota, Reservation

MAX_KEYS = 10_000
RESERVED_SECONDS = 120.0  # a reservation expires after this time; the server renews it until the request ends
AUDIT_ENTRIES = 10_000  # per audit log


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Record of an API key, without the key itself. A limit of 0 means unlimited."""

    id: str
    name: str
    created_ms: int  # times are milliseconds since 1970, UTC
    requests_per_minute: int = 0
    tokens_per_day: int = 0  # prompt and answer tokens
    is_operator: bool = False
    revoked_ms: int = 0  # 0 while the key is valid
    requests_per_day: int = 0


@dataclass(frozen=True, slots=True)
class UsageTotals:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: UsageTotals) -> UsageTotals:
        return UsageTotals(
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
    used: UsageTotals


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry in an audit log. It never contains text from chats."""

    at_ms: int
    owner: str
    action: str
    address: str = ""
    count: int = 1  # how often the action has occurred since its previous entry
    by_operator: bool = False  # whether the entry belongs to the operators' log


class AccessStore(Protocol):
    """Store of keys, usage and audit entries, safe for concurrent processes.

    Writes are on disk and visible to all processes when a method returns. Methods raise StorageError.
    """

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def add_key(self, key: ApiKey, digest: bytes, *, by: str = "") -> bool:
        """Store a key under its SHA-256; return False if the name is taken or MAX_KEYS is reached.

        `by`: the operator to record in the audit log, in the same transaction.
        """

    async def keys(self) -> list[ApiKey]:
        """Return all keys, including revoked ones, sorted by name, then newest first."""

    async def key(self, by: str | bytes) -> ApiKey | None:
        """Return the key with this id or SHA-256, even if revoked."""

    async def valid_ids(self, key_ids: Collection[str]) -> set[str]:
        """Return those ids that belong to valid keys."""

    async def revoke_key(self, name: str, now_ms: int, *, by: str = "") -> ApiKey | None:
        """Revoke the valid key with this name and return it, or None. `by`: see `add_key`."""

    async def add_usage(self, rows: list[UsageRow], ended: Collection[Reservation] = ()) -> None:
        """Add usage and delete the `ended` reservations, in one transaction."""

    async def reserve(
        self, day: date, owner: str, quota: Quota, requests: Sequence[MaxTokenUse]
    ) -> list[Reservation] | UsageTotals:
        """Reserve tokens for requests. Answers get fewer tokens if the quota is nearly used up.

        A reservation never raises the sum of used and reserved tokens above the quota, even across processes. If the
        quota does not suffice, nothing is reserved, and the usage so far is returned.
        """

    async def remove_owner(self, owner: str) -> bool:
        """Permanently delete an owner's key, usage, reservations and audit entries. Return whether there were any."""

    async def renew(self, reservations: Collection[Reservation]) -> None:
        """Make unexpired reservations last RESERVED_SECONDS from now."""

    async def usage(self, first: date, last: date) -> list[UsageRow]:
        """Return the usage from `first` to `last`, sorted by day (newest first), then by owner."""

    async def used_on(self, day: date, owner: str) -> UsageTotals: ...

    async def add_audit(self, *entries: AuditEntry) -> None:
        """Append all entries or none. A full log discards the oldest entry of the owner that has the most entries."""

    async def audit(self, limit: int) -> list[AuditEntry]:
        """Return the newest `limit` entries of each log, newest first."""
