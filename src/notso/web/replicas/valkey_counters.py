"""Requests of one address counted over all replicas, by the scripts of the `limits` library, which Valkey runs whole.

While the server is away each replica counts for itself: so many times as much gets through as there are replicas, and
nobody is shut out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from valkey.asyncio import BlockingConnectionPool
from valkey.exceptions import ValkeyError

from notso.web.edge.rate_limit import Counters, OwnCounters

logger = logging.getLogger("notso.web.replicas")

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""A request waits no longer for being counted."""
MOST_CONNECTIONS = 4
RETRY_SECONDS = 1.0


class ValkeyCounters:
    """`url` as for the exchange. On the event loop."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: Counters = OwnCounters()
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MOST_CONNECTIONS,
            timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
        )
        storage = RedisStorage(url, implementation="valkey", key_prefix="notso:limit", connection_pool=pool)  # type: ignore[arg-type]
        self._limiter = MovingWindowRateLimiter(storage)
        self._away_until = float("-inf")
        self._away = False

    async def test(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return await self._either(lambda each: each.test(limit, what, who))

    async def hit(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return await self._either(lambda each: each.hit(limit, what, who))

    async def free_at(self, limit: RateLimitItemPerMinute, what: str, who: str) -> float:
        async def asked(each: MovingWindowRateLimiter | Counters) -> float:
            if isinstance(each, MovingWindowRateLimiter):
                return (await each.get_window_stats(limit, what, who)).reset_time
            return await each.free_at(limit, what, who)

        return await self._either(asked)

    async def _either(self, ask: Callable[[MovingWindowRateLimiter | Counters], Awaitable[T]]) -> T:
        """What Valkey says, or else what is known here."""
        if self._clock() >= self._away_until:
            try:
                answer = await ask(self._limiter)
            except (ValkeyError, OSError, TimeoutError) as error:
                if not self._away:
                    logger.warning("requests are counted by this replica alone: %s", error or type(error).__name__)
                self._away, self._away_until = True, self._clock() + RETRY_SECONDS
            else:
                self._away = False
                return answer
        return await ask(self._own)
