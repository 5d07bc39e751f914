"""Who has no turn comes before another's second; nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from notso.web.edge.fair_turns import FairTurns
from notso.web.values.problems import Problem


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_owners_come_one_after_another_each_with_one_turn() -> None:
    async def run() -> None:
        turns, began, ends = FairTurns(2, 10), list[str](), dict[str, asyncio.Event]()

        async def take(owner: str, name: str) -> None:
            async with turns.turn(owner):
                began.append(name)
                ends[name] = asyncio.Event()
                await ends[name].wait()

        tasks = [asyncio.create_task(take("a", f"a{number}")) for number in range(4)]
        await settle()
        tasks += [asyncio.create_task(take(owner, owner)) for owner in ("b", "c")]
        await settle()
        assert began == ["a0", "b"], "one of each owner, though two turns are there"
        ends["a0"].set()
        await settle()
        assert began == ["a0", "b", "c"], "an owner that has none running comes before the second of another"
        ends["b"].set()
        await settle()
        assert began[3] == "a1"
        tasks[2].cancel()
        await settle()
        ends["a1"].set()
        ends["c"].set()
        await settle()
        assert began == ["a0", "b", "c", "a1", "a3"], "who left is passed over"
        ends["a3"].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn("a"), turns.turn("b"):
            pass

    asyncio.run(run())


def test_an_owner_with_too_many_waiting_is_refused_and_no_other() -> None:
    async def run() -> None:
        turns = FairTurns(1, 1)
        async with turns.turn("a"):
            waits = asyncio.create_task(turns.turn("a").__aenter__())
            await settle()
            with pytest.raises(Problem) as refused:
                await turns.turn("a").__aenter__()
            assert refused.value.status == 429 and refused.value.retry_after_seconds
            other = asyncio.create_task(turns.turn("b").__aenter__())
            await settle()
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await asyncio.wait_for(other, 60)

    asyncio.run(run())
