"""Authenticate with the API keys that an operator has issued, and manage these keys on the command line.

A key is shown once, when it is created. Only its hash is stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypedDict, TypeVar, Unpack

from notso.web.edge.access import KEY_PREFIX, Caller
from notso.web.store.access import AccessStore, ApiKey
from notso.web.values.durations import current_ms
from notso.web.values.errors import SettingsError, StorageError

SECRET_BYTES = 32
"""Random bytes in a key, enough for a fast hash to be safe. A slow hash would delay every request."""
MAX_NAME_CHARACTERS = 64
CACHE_SECONDS = 60.0
"""If the store fails, a key remains valid for this long after it was last found in the store."""
MAX_CACHED = 10_000
COMMAND_LINE = "command line"
"""Name under which the audit log lists operators who use the command line."""
_log = logging.getLogger("notso.web.access")


class KeyOptions(TypedDict, total=False):
    requests_per_minute: int
    requests_per_day: int
    tokens_per_day: int
    is_operator: bool


def new_key(name: str, **options: Unpack[KeyOptions]) -> tuple[str, ApiKey]:
    secret = KEY_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return secret, ApiKey(secrets.token_hex(8), name, current_ms(), **options)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def is_name(name: str) -> bool:
    # Key names have no colon, because `notso keys remove proxy:ann` must remove the user with this id. The part before
    # the colon can be any plugin's name.
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and name == name.strip() and ":" not in name


def owner_of_key(key_id: str) -> str:
    return f"key:{key_id}"


class IssuedKeys:
    """Looks up keys on every request, so that revocation takes effect at once on all servers."""

    def __init__(self, store: AccessStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self.valid_ids = store.valid_ids
        self._clock = clock
        self._cache: dict[bytes | str, tuple[Caller, float]] = {}

    async def by_token(self, token: str) -> Caller | None:
        """Return the caller of a valid key. Raises StorageError."""
        return await self.lookup(digest_of(token))

    async def lookup(self, id_or_digest: str | bytes) -> Caller | None:
        """Return the caller whose key has this id or digest, if valid. Raises StorageError."""
        try:
            caller = _caller(await self._store.key(id_or_digest))
        except StorageError as error:
            _log.warning("keys cannot be looked up: %s", error)
            cached, cached_at = self._cache.get(id_or_digest, (None, 0.0))
            if cached is None or self._clock() - cached_at > CACHE_SECONDS:
                raise
            return cached
        self._cache.pop(id_or_digest, None)
        if caller is not None:
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[id_or_digest] = caller, self._clock()
        return caller


def _caller(key: ApiKey | None) -> Caller | None:
    if key is None or key.revoked_ms:
        return None
    limits = key.requests_per_minute, key.tokens_per_day, key.requests_per_day
    return Caller(owner_of_key(key.id), key.name, key.is_operator, key.id, *limits)


T = TypeVar("T")


class KeyManager:
    """Manages keys synchronously. Each call opens a store created by `create_store`. Methods raise StorageError."""

    def __init__(self, create_store: Callable[[], AccessStore]) -> None:
        self._create_store = create_store

    def all(self) -> list[ApiKey]:
        return self._with_store(lambda store: store.keys())

    def add(self, name: str, **options: Unpack[KeyOptions]) -> tuple[str, ApiKey]:
        """Create a key; return its secret and record.

        Raises SettingsError for an invalid or taken name, or if there are too many keys.
        """
        if not is_name(name):
            message = "a key's name must be one line of 1 to 64 characters, without a colon"
            raise SettingsError(message, setting="name")
        secret, key = new_key(name, **options)
        if not self._with_store(lambda store: store.add_key(key, digest_of(secret), by=COMMAND_LINE)):
            raise SettingsError(f"there is already a key named {name}, or there are too many keys", setting="name")
        return secret, key

    def revoke(self, name: str) -> ApiKey:
        """Revoke a key at once. Raises SettingsError if no active key has that name."""
        key = self._with_store(lambda store: store.revoke_key(name, current_ms(), by=COMMAND_LINE))
        if key is None:
            raise SettingsError(f"there is no active key named {name}", setting="name")
        return key

    def _with_store(self, work: Callable[[AccessStore], Awaitable[T]]) -> T:
        async def run() -> T:
            store = self._create_store()
            try:
                await store.open()
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())
