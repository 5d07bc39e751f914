"""How many requests of programs one address may send in a minute: a pure ASGI layer around the `limits` library."""

from __future__ import annotations

import math
import time

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


class RateLimit:
    """429 for more than `per_minute` POSTs to the API, with or without a key, from one address within any minute; 0 is
    no limit. `Retry-After` is when the oldest of them is a minute old. What a person does at the page, reading, and
    stopping an answer are never refused; but who has shown as many wrong keys within a minute is, whatever the request
    that shows one more, so that none is found by trying.
    """

    def __init__(self, app: ASGIApp, per_minute: int) -> None:
        self._app = app
        self._limit = RateLimitItemPerMinute(per_minute) if per_minute else None
        self._storage = MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self._storage)
        self._ahead = _ahead()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit if scope["type"] == "http" else None
        if limit is None or not (_counts(scope) or _shows_key(scope)):
            await self._app(scope, receive, send)
            return
        if abs(_ahead() - self._ahead) > CLOCK_JUMP_SECONDS:
            self._storage.reset()
            self._ahead = _ahead()
        requests, wrong_keys = self._counter("requests", scope, limit), self._counter("wrong keys", scope, limit)
        if _shows_key(scope) and not self._limiter.test(limit, *wrong_keys):
            await self._refuse(limit, wrong_keys)(scope, receive, send)
        elif _counts(scope) and not self._limiter.hit(limit, *requests):
            await self._refuse(limit, requests)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
            if scope.get(WRONG_KEY):
                self._limiter.hit(limit, *wrong_keys)

    def _refuse(self, limit: RateLimitItemPerMinute, counter: tuple[str, str]) -> PlainTextResponse:
        free_at, _ = self._limiter.get_window_stats(limit, *counter)
        seconds = min(WINDOW_SECONDS, max(1, math.ceil(free_at - time.time())))
        text = f"More than {limit.amount} {counter[0]} within a minute; try again in {seconds} s.\n"
        return PlainTextResponse(text, 429, {"Retry-After": str(seconds)})

    def _counter(self, what: str, scope: Scope, limit: RateLimitItemPerMinute) -> tuple[str, str]:
        """What is counted, and of whom."""
        host = network_of((scope.get("client") or ("",))[0])
        if not host:
            return what, ELSEWHERE
        known = self._storage.events
        return what, host if len(known) < MAX_ADDRESSES or limit.key_for(what, host) in known else ELSEWHERE


def _ahead() -> float:
    """The time of day, by which the library counts, against a clock that nobody sets."""
    return time.time() - time.monotonic()


def _counts(scope: Scope) -> bool:
    return scope["method"] == "POST" and (is_api(scope) or scope["path"] == "/login")


def _shows_key(scope: Scope) -> bool:
    return any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
