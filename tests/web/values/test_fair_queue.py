"""Fair queueing: how long one owner can delay another, and what happens to work whose caller has left."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from notso.web.values.fair_queue import FairQueue


async def begun(queue: FairQueue) -> tuple[threading.Event, asyncio.Task[bool]]:
    """Start work that holds the thread until the returned event is set."""
    free = threading.Event()
    task = asyncio.create_task(queue.run("first", lambda: free.wait(60)))
    await asyncio.sleep(0)
    return free, task


def test_queue_alternates_between_owners() -> None:
    async def run() -> list[str]:
        queue, order = FairQueue("test"), list[str]()
        free, _ = await begun(queue)
        many = [asyncio.create_task(queue.run("many", lambda: order.append("many"))) for _ in range(100)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(queue.run(name, partial(order.append, name))) for name in ("a", "b", "a")]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*many, *few)
        queue.close()
        return order

    order = asyncio.run(run())
    assert order[:6] == ["many", "a", "b", "many", "a", "many"] and len(order) == 103


def test_exception_reaches_caller_and_queue_continues() -> None:
    async def run() -> int:
        queue = FairQueue("test")
        with pytest.raises(ZeroDivisionError):
            await queue.run("a", lambda: 1 // 0)
        result = await queue.run("a", lambda: 7)
        queue.close()
        return result

    assert asyncio.run(run()) == 7


def test_failed_thread_start_releases_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    start, fails = threading.Thread.start, [True]

    def start_at_second_try(thread: threading.Thread) -> None:
        if fails.pop() if fails else False:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def run() -> int:
        queue = FairQueue("test")
        with pytest.raises(RuntimeError, match="new thread"):
            await queue.run("a", lambda: 6)
        assert queue._running == {}
        result = await queue.run("b", lambda: 7)
        await queue.join()
        queue.close()
        return result

    monkeypatch.setattr(threading.Thread, "start", start_at_second_try)
    assert asyncio.run(run()) == 7


def test_cancelled_work_is_not_run() -> None:
    async def run() -> list[str]:
        queue, done = FairQueue("test"), list[str]()
        free, first = await begun(queue)
        given_up = asyncio.create_task(queue.run("a", lambda: done.append("given up")))
        kept = asyncio.create_task(queue.run("b", lambda: done.append("kept")))
        await asyncio.sleep(0)
        given_up.cancel()
        free.set()
        await asyncio.gather(first, kept)
        queue.close()
        return done

    assert asyncio.run(run()) == ["kept"]


def test_close_cancels_waiting_work() -> None:
    async def run() -> None:
        queue = FairQueue("test")
        free, first = await begun(queue)
        waiting = asyncio.create_task(queue.run("a", lambda: None))
        await asyncio.sleep(0)
        queue.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        free.set()
        assert await first

    asyncio.run(run())


def test_one_owner_leaves_one_thread_to_others() -> None:
    async def run() -> tuple[int, list[str]]:
        queue, order, free = FairQueue("test", 3), list[str](), threading.Event()
        greedy = [asyncio.create_task(queue.run("greedy", lambda: free.wait(60))) for _ in range(20)]
        await asyncio.sleep(0)
        for name in ("modest", "other", "modest"):
            await queue.run(name, partial(order.append, name))
        at_work = sum(queue._running.values())
        free.set()
        await asyncio.gather(*greedy)
        await queue.join()
        queue.close()
        return at_work, order

    assert asyncio.run(run()) == (2, ["modest", "other", "modest"])
