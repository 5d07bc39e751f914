"""Synchronous key management for the command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from notso.web.sign_in.given_keys import digest_of, is_name, new_key
from notso.web.store.access import AccessStore, ApiKey, AuditEntry
from notso.web.values.errors import SettingsError

T = TypeVar("T")


class KeyBook:
    """Manages keys in a store that `make` opens for each call. Methods raise StorageError."""

    def __init__(self, make: Callable[[], AccessStore], by: str = "command line") -> None:
        self._make = make
        self._by = by

    def all(self) -> list[ApiKey]:
        return self._with_store(lambda store: store.keys())

    def add(
        self,
        name: str,
        *,
        requests_per_minute: int = 0,
        requests_per_day: int = 0,
        tokens_per_day: int = 0,
        is_operator: bool = False,
    ) -> tuple[str, ApiKey]:
        """Create a key; return its secret and record. Raise SettingsError for an invalid or taken name."""
        if not is_name(name):
            raise SettingsError("a key's name must have 1 to 64 characters on one line", setting="name")
        secret, key = new_key(
            name,
            requests_per_minute=requests_per_minute,
            requests_per_day=requests_per_day,
            tokens_per_day=tokens_per_day,
            is_operator=is_operator,
        )

        async def add(store: AccessStore) -> bool:
            added = await store.add_key(key, digest_of(secret))
            if added:
                await store.add_audit(self._entry(f"added the key {key.id}"))
            return added

        if not self._with_store(add):
            raise SettingsError(f"there is already a key named {name}, or there are too many keys", setting="name")
        return secret, key

    def revoke(self, name: str) -> ApiKey:
        """Revoke a key at once. Raise SettingsError if no valid key has that name."""

        async def revoke(store: AccessStore) -> ApiKey | None:
            key = await store.revoke_key(name, _now_ms())
            if key is not None:
                await store.add_audit(self._entry(f"revoked the key {key.id}"))
            return key

        key = self._with_store(revoke)
        if key is None:
            raise SettingsError(f"there is no active key named {name}", setting="name")
        return key

    def _entry(self, action: str) -> AuditEntry:
        return AuditEntry(_now_ms(), self._by, action, by_operator=True)

    def _with_store(self, work: Callable[[AccessStore], Awaitable[T]]) -> T:
        async def run() -> T:
            store = self._make()
            try:
                await store.open()
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
