"""A limit counts requests over all replicas, or per replica while Valkey is unreachable."""

from __future__ import annotations

import asyncio
import time

from limits import RateLimitItemPerMinute
from valkey_server import ValkeyServer

from notso.web.edge.rate_limit import REQUESTS, WRONG_KEYS
from notso.web.replicas.valkey_exchange import ValkeyCounters

SIXTY = RateLimitItemPerMinute(60)


def test_limit_is_shared_by_replicas(valkey: ValkeyServer) -> None:
    async def run() -> None:
        replicas = [ValkeyCounters(valkey.url) for _ in range(3)]
        asked = [replicas[number % 3].hit(SIXTY, REQUESTS, "10.0.0.1") for number in range(180)]
        assert sum(await asyncio.gather(*asked)) == 60
        assert not await replicas[1].test(SIXTY, REQUESTS, "10.0.0.1")
        assert 0 < await replicas[2].free_at(SIXTY, REQUESTS, "10.0.0.1") - time.time() <= 60
        assert await replicas[0].hit(SIXTY, REQUESTS, "10.0.0.2"), "other addresses are not limited"
        assert await replicas[0].test(SIXTY, WRONG_KEYS, "10.0.0.1"), "other limits are not affected"

    asyncio.run(run())


def test_replicas_count_separately_while_valkey_is_down(valkey: ValkeyServer) -> None:
    async def run() -> None:
        now = [0.0]
        replicas = [ValkeyCounters(valkey.url, clock=lambda: now[0]) for _ in range(3)]

        async def through(many: int) -> int:
            return sum([await replicas[number % 3].hit(SIXTY, REQUESTS, "10.0.0.1") for number in range(many)])

        assert await through(90) == 60
        await asyncio.to_thread(valkey.stop)
        assert await through(300) == 180, "each replica allows sixty requests"
        await asyncio.to_thread(valkey.start)
        now[0] += 10
        assert await through(90) == 60, "the shared count works again, without the requests counted per replica"

    asyncio.run(run())
