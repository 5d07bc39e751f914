"""Request rate limit per client address, ASGI middleware around the `limits` library."""

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

WINDOW_SECONDS = 60
MAX_ADDRESSES = 10_000
# A larger jump of the clock resets the counters: otherwise, if it is set back by an hour, a window lasts an hour.
CLOCK_JUMP_SECONDS = 5
ELSEWHERE = "elsewhere"  # shared by all addresses beyond MAX_ADDRESSES
REQUESTS, WRONG_KEYS = "requests", "wrong keys"


class Counters(Protocol):
    async def test(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool: ...

    async def hit(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        """Count an entry if it is within the limit; return whether it is."""

    async def free_at(self, limit: RateLimitItemPerMinute, what: str, who: str) -> float:
        """Return the wall-clock time in seconds when the oldest entry expires."""


class OwnCounters:
    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self._storage)
        self._ahead = _ahead()

    async def test(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return self._limiter.test(limit, what, self._named(limit, what, who))

    async def hit(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return self._limiter.hit(limit, what, self._named(limit, what, who))

    async def free_at(self, limit: RateLimitItemPerMinute, what: str, who: str) -> float:
        return self._limiter.get_window_stats(limit, what, self._named(limit, what, who)).reset_time

    def _named(self, limit: RateLimitItemPerMinute, what: str, who: str) -> str:
        if abs(_ahead() - self._ahead) > CLOCK_JUMP_SECONDS:
            self._storage.reset()
            self._ahead = _ahead()
        known = self._storage.events
        return who if len(known) < MAX_ADDRESSES or limit.key_for(what, who) in known else ELSEWHERE


class RateLimit:
    """Limits API POSTs and sign-ins to `per_minute` per address, with 429; 0 disables it."""

    def __init__(self, app: ASGIApp, per_minute: int, counters: Counters | None = None) -> None:
        self._app = app
        self._limit = RateLimitItemPerMinute(per_minute) if per_minute else None
        self._counters: Counters = counters or OwnCounters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit if scope["type"] == "http" else None
        if limit is None or not (_counts(scope) or _shows_key(scope)):
            await self._app(scope, receive, send)
            return
        # Pages, GET requests and stopping an answer are not limited. An address that sent too many invalid keys within
        # a minute is rejected whenever it sends a key, which prevents guessing.
        who = network_of((scope.get("client") or ("",))[0]) or ELSEWHERE
        if _shows_key(scope) and not await self._counters.test(limit, WRONG_KEYS, who):
            await (await self._refuse(limit, WRONG_KEYS, who))(scope, receive, send)
        elif _counts(scope) and not await self._counters.hit(limit, REQUESTS, who):
            await (await self._refuse(limit, REQUESTS, who))(scope, receive, send)
        else:
            await self._app(scope, receive, send)
            if scope.get(WRONG_KEY):
                await self._counters.hit(limit, WRONG_KEYS, who)

    async def _refuse(self, limit: RateLimitItemPerMinute, what: str, who: str) -> PlainTextResponse:
        free_at = await self._counters.free_at(limit, what, who)
        seconds = min(WINDOW_SECONDS, max(1, math.ceil(free_at - time.time())))
        text = f"More than {limit.amount} {what} within a minute; try again in {seconds} s.\n"
        return PlainTextResponse(text, 429, {"Retry-After": str(seconds)})


def _ahead() -> float:
    # `limits` counts by the wall clock; a change of this difference means that the clock was set.
    return time.time() - time.monotonic()


def _counts(scope: Scope) -> bool:
    if scope["path"].startswith("/login/"):  # each contacts the sign-in provider
        return True
    return scope["method"] == "POST" and (is_api(scope) or scope["path"] == "/login")


def _shows_key(scope: Scope) -> bool:
    return any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
