"""Large pieces of work run one at a time in a single thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from notso.web.edge.work_queue import LARGE_BYTES, WorkQueue
from notso.web.values.errors import Problem


def test_large_work_runs_in_order_while_small_work_bypasses_queue() -> None:
    async def run() -> None:
        line, gate, done = WorkQueue("line"), threading.Event(), list[int]()
        names = set[str]()

        def work(number: int) -> None:
            gate.wait(60)
            names.add(threading.current_thread().name)
            done.append(number)

        tasks = [asyncio.create_task(line.run(lambda n=n: work(n), LARGE_BYTES + 1, "a")) for n in range(5)]  # type: ignore[misc]
        await asyncio.sleep(0)
        assert await line.run(lambda: "small", LARGE_BYTES, "a") == "small" and not done
        gate.set()
        await asyncio.gather(*tasks)
        assert done == [0, 1, 2, 3, 4] and names == {"line_0"} and line.waiting == 0
        line.close()

    asyncio.run(run())


def test_full_work_queue_returns_429_until_waiting_work_is_canceled() -> None:
    async def run() -> None:
        line = WorkQueue("line", most_waiting=1)
        async with line.turn("a"):
            waits = asyncio.create_task(line.run(lambda: 1, LARGE_BYTES + 1, "a"))
            while not line.waiting:
                await asyncio.sleep(0)
            with pytest.raises(Problem) as refused:
                await line.run(lambda: 2, LARGE_BYTES + 1, "a")
            assert refused.value.status == 429 and refused.value.retry_after_seconds
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert line.waiting == 0
        assert await line.run(lambda: 3, LARGE_BYTES + 1, "a") == 3
        with pytest.raises(ValueError, match="itself"):
            await line.run(lambda: (_ for _ in ()).throw(ValueError("itself")), LARGE_BYTES + 1, "a")
        assert await line.run(lambda: 4, LARGE_BYTES + 1, "a") == 4
        line.close()

    asyncio.run(run())


def test_large_work_alternates_between_owners() -> None:
    async def run() -> None:
        line, gate, order = WorkQueue("line", most_waiting=8), threading.Event(), list[str]()

        def work(owner: str) -> None:
            gate.wait(60)
            order.append(owner)

        def asked(owner: str) -> asyncio.Task[None]:
            return asyncio.create_task(line.run(lambda: work(owner), LARGE_BYTES + 1, owner))

        greedy = [asked("greedy") for _ in range(20)]
        await asyncio.sleep(0)
        modest = [asked("modest") for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        told = await asyncio.gather(*greedy, *modest, return_exceptions=True)
        assert [isinstance(each, Problem) for each in told] == [False] * 9 + [True] * 11 + [False] * 2
        assert order[:5] == ["greedy", "modest", "greedy", "modest", "greedy"]
        line.close()

    asyncio.run(run())
