"""The memory budget shared by all request bodies: waiting, eviction, and the return of everything that was reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from notso.web.edge import limits
from notso.web.edge.limits import (
    FREE_BYTES,
    BodyBudget,
    BodyEvictedError,
    IncomingBody,
    RequestLimits,
    RequestTooSlowError,
)

KIB = 1024
MOST = 100 * KIB
SOON = 60.0
CHUNKED = [(b"transfer-encoding", b"chunked")]


def sender(*pieces: bytes, unfinished: bool = False) -> Callable[[], Awaitable[Any]]:
    """Return an ASGI `receive` that yields the pieces of a body. An unfinished body blocks after the last piece."""
    left = list(pieces)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": unfinished or bool(left)}

    return receive


def arrival(budget: BodyBudget, host: str = "a", seconds: float = SOON) -> IncomingBody:
    return IncomingBody(budget, host, 1 << 20, asyncio.get_running_loop().time() + seconds)


async def settled(done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


def begun(budget: BodyBudget, size: int, host: str = "a") -> tuple[IncomingBody, asyncio.Task[Any]]:
    one = arrival(budget, host)
    return one, asyncio.create_task(one.gather(sender(b"x" * size, unfinished=True)))


def test_small_body_pieces_are_joined_and_charged() -> None:
    async def run() -> None:
        budget = BodyBudget(MOST)
        one = arrival(budget)
        message = await one.gather(sender(*[b"ab"] * 40_000, b"c"))
        assert message == {"type": "http.request", "body": b"ab" * 40_000 + b"c", "more_body": False}
        assert one.held == 80_001 - FREE_BYTES and budget.free == MOST - one.held
        budget.release(one)
        assert budget.free == MOST

    asyncio.run(run())


def test_small_body_is_accepted_with_empty_budget() -> None:
    async def run() -> None:
        budget = BodyBudget(0)
        assert (await arrival(budget).gather(sender(b"x" * FREE_BYTES)))["body"] == b"x" * FREE_BYTES

    asyncio.run(run())


def test_body_waits_until_budget_is_released() -> None:
    async def run() -> None:
        budget = BodyBudget(MOST)
        first = arrival(budget)
        await first.gather(sender(b"x" * (FREE_BYTES + MOST)))
        second = asyncio.create_task(arrival(budget).gather(sender(b"y" * (FREE_BYTES + 10))))
        await settled(lambda: budget._eviction_lock.locked())
        assert not second.done()
        budget.release(first)
        assert len((await second)["body"]) == FREE_BYTES + 10

    asyncio.run(run())


def test_oldest_unfinished_body_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)

    async def run() -> None:
        budget = BodyBudget(MOST)
        whole = arrival(budget)
        await whole.gather(sender(b"x" * (FREE_BYTES + 10 * KIB)))
        old, gone = begun(budget, FREE_BYTES + 45 * KIB)
        await settled(lambda: old.held > 0)
        young, stays = begun(budget, FREE_BYTES + 40 * KIB)
        await settled(lambda: young.held > 0)
        assert len((await arrival(budget).gather(sender(b"y" * (FREE_BYTES + 20 * KIB))))["body"]) > FREE_BYTES
        with pytest.raises(BodyEvictedError):
            await gone
        assert old.held == 0 and not stays.done() and whole.held == 10 * KIB, "a complete body is never evicted"
        stays.cancel()

    asyncio.run(run())


def test_host_with_most_bytes_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)

    async def run() -> None:
        budget = BodyBudget(MOST)
        honest, waits = begun(budget, FREE_BYTES + 10 * KIB, "honest")
        await settled(lambda: honest.held > 0)
        bad = [begun(budget, FREE_BYTES + 30 * KIB, "bad") for _ in range(5)]
        await settled(lambda: sum(task.done() for _, task in bad) >= 2)
        assert not waits.done() and honest.held == 10 * KIB
        for task in (waits, *(task for _, task in bad)):
            task.cancel()
        await asyncio.gather(waits, *(task for _, task in bad), return_exceptions=True)
        for each in (honest, *(each for each, _ in bad)):
            budget.release(each)
        assert budget.free == MOST and not budget._arriving

    asyncio.run(run())


def test_new_body_is_evicted_when_only_complete_bodies_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)

    async def run() -> None:
        budget = BodyBudget(MOST)
        await arrival(budget).gather(sender(b"x" * (FREE_BYTES + MOST)))
        late = arrival(budget)
        with pytest.raises(BodyEvictedError):
            await late.gather(sender(b"y" * (FREE_BYTES + 1)))
        assert late.held == 0

    asyncio.run(run())


def test_slow_body_raises_request_too_slow_error() -> None:
    async def run() -> None:
        budget = BodyBudget(MOST)
        one = arrival(budget, seconds=0.01)
        with pytest.raises(RequestTooSlowError):
            await one.gather(sender(b"x" * (FREE_BYTES + 1), unfinished=True))
        budget.release(one)
        assert budget.free == MOST

    asyncio.run(run())


def test_evicted_body_returns_503_and_releases_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise AssertionError("the body must not reach the application")

    async def run() -> None:
        layer = RequestLimits(app)
        layer._budget = BodyBudget(0)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/import", "headers": CHUNKED, "client": ("a", 1), "method": "POST"}
        await layer(scope, sender(b"x" * (FREE_BYTES + 1), unfinished=True), send)
        headers = dict(sent[0]["headers"])
        assert sent[0]["status"] == 503 and headers[b"retry-after"] == b"5" and headers[b"connection"] == b"close"
        assert layer._budget.free == 0 and not layer._budget._arriving

    asyncio.run(run())


def test_body_is_released_before_the_response_starts() -> None:
    async def run() -> None:
        free: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            free.append(layer._budget.free)
            scope[limits.RELEASE_BODY]()
            free.append(layer._budget.free)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            free.append(layer._budget.free)

        layer = RequestLimits(app)
        layer._budget = BodyBudget(MOST, available=lambda: 1 << 40)
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": CHUNKED, "state": {}}
        await layer(scope, sender(b"x" * (FREE_BYTES + KIB)), send)
        assert free == [MOST - KIB, MOST, MOST] and not layer._budget._held

    asyncio.run(run())


def test_modest_host_keeps_share_beside_greedy_host() -> None:
    async def run() -> None:
        budget = BodyBudget(MOST)
        await arrival(budget, "greedy").gather(sender(b"x" * (FREE_BYTES + MOST)))
        more = asyncio.create_task(arrival(budget, "greedy").gather(sender(b"x" * (FREE_BYTES + 1))))
        await settled(lambda: budget._eviction_lock.locked())
        modest = await arrival(budget, "modest").gather(sender(b"y" * (FREE_BYTES + MOST // 4)))
        assert len(modest["body"]) == FREE_BYTES + MOST // 4 and not more.done()
        too_much = asyncio.create_task(arrival(budget, "modest").gather(sender(b"y" * (FREE_BYTES + 1))))
        await asyncio.sleep(0)
        assert not too_much.done()
        for each in (more, too_much):
            each.cancel()
        await asyncio.gather(more, too_much, return_exceptions=True)

    asyncio.run(run())


def test_body_budget_is_limited_by_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget counts the cost of a byte until its response, including bytes accepted since memory was last
    measured."""
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)
    looks = []

    def available() -> int:
        looks.append(1)
        return limits.COST * 90 * KIB

    async def run() -> None:
        budget = BodyBudget(1 << 30, available)
        assert budget.largest_body_allowed() == FREE_BYTES + 90 * KIB
        monkeypatch.setattr(limits, "MEASURE_SECONDS", 3600.0)
        first, task = begun(budget, FREE_BYTES + 60 * KIB)
        await settled(lambda: first.held == 60 * KIB)
        # The first body is evicted, because its holder has reserved more.
        with pytest.raises(BodyEvictedError):
            await asyncio.gather(task, arrival(budget, "b").gather(sender(b"x" * (FREE_BYTES + 40 * KIB))))
        assert budget.largest_body_allowed() <= FREE_BYTES + 90 * KIB and len(looks) == 1

    asyncio.run(run())


def test_body_larger_than_available_memory_returns_413() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def status(path: str, *pieces: bytes, chunked: bool = False) -> tuple[int, bytes]:
        layer = RequestLimits(app)
        layer._budget = BodyBudget(available=lambda: limits.COST * 100 * KIB)
        length = (b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"%d" % sum(map(len, pieces)))
        scope = {"type": "http", "method": "POST", "path": path, "headers": [length], "state": {}}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await layer(scope, sender(*pieces), send)
        return sent[0]["status"], sent[-1].get("body", b"")

    async def run() -> None:
        for path in ("/import", "/v1/chat/completions"):
            for chunked in (False, True):
                assert (await status(path, b"x" * 64 * KIB, chunked=chunked))[0] == 200
                assert (await status(path, b"x" * 150 * KIB, chunked=chunked))[0] == 200
                refused = await status(path, b"x" * 150 * KIB, b"x" * 100 * KIB, chunked=chunked)
                assert refused == (413, b"The request is too large: at most 167,936 bytes are allowed.\n")

    asyncio.run(run())
