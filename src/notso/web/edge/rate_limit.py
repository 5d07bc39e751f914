"""How many requests of programs one address may send in a minute: a pure ASGI layer around the `limits` library."""

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
from notso.web.edge.door import network_of
from notso.web.edge.errors import is_api

WINDOW_SECONDS = 60
MAX_ADDRESSES = 10_000
CLOCK_JUMP_SECONDS = 5  # set further than that, and counting begins anew: set back an hour, a minute would last as long
ELSEWHERE = "elsewhere"  # what all addresses beyond those share
REQUESTS, WRONG_KEYS = "requests", "wrong keys"


class Counters(Protocol):
    """Counts what one address does within a minute."""

    async def test(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        """Whether one more would be within the limit."""

    async def hit(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        """Count one more where that is within the limit; whether it was."""

    async def free_at(self, limit: RateLimitItemPerMinute, what: str, who: str) -> float:
        """When the oldest that counts will be a minute old: seconds of the wall clock."""


class OwnCounters:
    """Of this process alone, in its memory."""

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
    """429 for more than `per_minute` POSTs to the API and sign-ins, with or without a key, from one address within any
    minute; 0 is no limit. `Retry-After` is when the oldest of them is a minute old. What a person does at the page,
    reading, and stopping an answer are never refused; but who has shown as many wrong keys within a minute is, whatever
    the request that shows one more, so that none is found by trying. `counters` may be shared with other servers.
    """

    def __init__(self, app: ASGIApp, per_minute: int, counters: Counters | None = None) -> None:
        self._app = app
        self._limit = RateLimitItemPerMinute(per_minute) if per_minute else None
        self._counters: Counters = counters or OwnCounters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit if scope["type"] == "http" else None
        if limit is None or not (_counts(scope) or _shows_key(scope)):
            await self._app(scope, receive, send)
            return
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
    """The time of day, by which the library counts, against a clock that nobody sets."""
    return time.time() - time.monotonic()


def _counts(scope: Scope) -> bool:
    if scope["path"].startswith("/login/"):  # the way to a provider and back, which is asked and told of it
        return True
    return scope["method"] == "POST" and (is_api(scope) or scope["path"] == "/login")


def _shows_key(scope: Scope) -> bool:
    return any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
