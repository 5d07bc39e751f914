"""Large work one at a time, in one thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from notso.web.edge.work_line import LARGE_BYTES, WorkLine
from notso.web.values.problems import Problem


def test_large_work_is_done_one_at_a_time_in_order_and_small_work_beside_it() -> None:
    async def run() -> None:
        line, gate, done = WorkLine("line"), threading.Event(), list[int]()
        names = set[str]()

        def work(number: int) -> None:
            gate.wait(60)
            names.add(threading.current_thread().name)
            done.append(number)

        tasks = [asyncio.create_task(line.run(lambda n=n: work(n), LARGE_BYTES + 1)) for n in range(5)]  # type: ignore[misc]
        await asyncio.sleep(0)
        assert await line.run(lambda: "small", LARGE_BYTES) == "small" and not done
        gate.set()
        await asyncio.gather(*tasks)
        assert done == [0, 1, 2, 3, 4] and names == {"line_0"} and line.waiting == 0
        line.close()

    asyncio.run(run())


def test_who_finds_too_many_waiting_is_refused_and_those_who_leave_make_room() -> None:
    async def run() -> None:
        line = WorkLine("line", most_waiting=1)
        async with line.turn():
            waits = asyncio.create_task(line.run(lambda: 1, LARGE_BYTES + 1))
            while not line.waiting:
                await asyncio.sleep(0)
            with pytest.raises(Problem) as refused:
                await line.run(lambda: 2, LARGE_BYTES + 1)
            assert refused.value.status == 429 and refused.value.retry_after_seconds
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert line.waiting == 0
        assert await line.run(lambda: 3, LARGE_BYTES + 1) == 3
        with pytest.raises(ValueError, match="itself"):
            await line.run(lambda: (_ for _ in ()).throw(ValueError("itself")), LARGE_BYTES + 1)
        assert await line.run(lambda: 4, LARGE_BYTES + 1) == 4
        line.close()

    asyncio.run(run())
