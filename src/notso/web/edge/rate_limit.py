"""Request rate limit per client address: ASGI middleware based on the `limits` library."""

from __future__ import annotations

import math
import time
from typing import Protocol

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.edge.access import WRONG_KEY
from notso.web.edge.connections import network_of
from notso.web.edge.errors import is_api
from notso.web.edge.security import HttpMiddleware

WINDOW_SECONDS = 60
MAX_ADDRESSES = 10_000
# If the wall clock is set forward or back by more than this, the counters are reset. Without the reset, setting
# the clock back by an hour would extend the window of one minute by an hour.
CLOCK_JUMP_SECONDS = 5
OTHER_ADDRESSES = "elsewhere"  # counter shared by all addresses beyond MAX_ADDRESSES
REQUESTS, WRONG_KEYS = "requests", "wrong keys"


class Counters(Protocol):
    async def test(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> bool: ...

    async def hit(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> bool:
        """Count an event if the limit allows it; return whether it does."""

    async def free_at(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> float:
        """Return the wall-clock time in seconds at which the oldest event expires."""


class LocalCounters:
    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self._storage)
        self._wall_clock_offset = _wall_clock_offset()

    async def test(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> bool:
        return self._limiter.test(limit, kind, self._counter_name(limit, kind, client))

    async def hit(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> bool:
        return self._limiter.hit(limit, kind, self._counter_name(limit, kind, client))

    async def free_at(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> float:
        return self._limiter.get_window_stats(limit, kind, self._counter_name(limit, kind, client)).reset_time

    def _counter_name(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> str:
        if abs(_wall_clock_offset() - self._wall_clock_offset) > CLOCK_JUMP_SECONDS:
            self._storage.reset()
            self._wall_clock_offset = _wall_clock_offset()
        counters = self._storage.events
        return client if len(counters) < MAX_ADDRESSES or limit.key_for(kind, client) in counters else OTHER_ADDRESSES


class RateLimit(HttpMiddleware):
    """Rejects (429) API POSTs and sign-ins beyond `per_minute` for each address; 0 disables the limit."""

    def __init__(self, app: ASGIApp, per_minute: int, counters: Counters | None = None) -> None:
        super().__init__(app)
        self._limit = RateLimitItemPerMinute(per_minute) if per_minute else None
        self._counters: Counters = counters or LocalCounters()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit
        if limit is None or not (_is_limited(scope) or _sends_key(scope)):
            await self._app(scope, receive, send)
            return
        # An address that sent too many invalid keys within a minute is rejected whenever it sends a key, even a valid
        # one, so that keys cannot be found by trial and error.
        client = network_of((scope.get("client") or ("",))[0]) or OTHER_ADDRESSES
        if _sends_key(scope) and not await self._counters.test(limit, WRONG_KEYS, client):
            await (await self._refuse(limit, WRONG_KEYS, client))(scope, receive, send)
        elif _is_limited(scope) and not await self._counters.hit(limit, REQUESTS, client):
            await (await self._refuse(limit, REQUESTS, client))(scope, receive, send)
        else:
            await self._app(scope, receive, send)
            if scope.get(WRONG_KEY):
                await self._counters.hit(limit, WRONG_KEYS, client)

    async def _refuse(self, limit: RateLimitItemPerMinute, kind: str, client: str) -> PlainTextResponse:
        free_at = await self._counters.free_at(limit, kind, client)
        seconds = min(WINDOW_SECONDS, max(1, math.ceil(free_at - time.time())))
        text = f"Too many {kind} within a minute (limit: {limit.amount}); try again in {seconds} s.\n"
        return PlainTextResponse(text, 429, {"Retry-After": str(seconds)})


def _wall_clock_offset() -> float:
    # The `limits` library uses the wall clock. Its offset from the monotonic clock changes if it is set, or if the
    # machine is suspended.
    return time.time() - time.monotonic()


def _is_limited(scope: Scope) -> bool:
    if scope["path"].startswith("/login/"):  # each of these requests contacts the sign-in provider
        return True
    return scope["method"] == "POST" and (is_api(scope) or scope["path"] == "/login")


def _sends_key(scope: Scope) -> bool:
    return any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
