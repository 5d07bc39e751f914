"""A copy of a turn's log that is built from its published changes shows the same as the log."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from notso.web.turns.turn_log import AnswerStatus, Card, TurnLog

WORDS = ("", "<p>one</p>", "<p>zwei &amp; drei</p>", "<pre>\n</pre>")


def change(log: TurnLog, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0 | 1:
            log.write(rng.choice(("reasoning", "answer")), rng.choice(WORDS), rng.choice(WORDS))
        case 2:
            card = Card(f"whole {rng.random()}", f"state {rng.random()}", f"result {rng.random()}")
            log.put_card(f"card{rng.randrange(4)}", card)
        case 3:
            log.ask(rng.choice(("", "card1")))
        case _:
            progress = {"tokens": rng.randrange(99)}
            log.set_status(AnswerStatus("thinking", "Thinking", f"{rng.randrange(9)} s", progress=progress))


def tell(log: TurnLog, copy: TurnLog, after: int) -> bool:
    """Apply the changes after a JSON round trip, as over the network."""
    return copy.apply_changes(after, log.number, json.loads(json.dumps(log.changes(after))))


def shown(log: TurnLog, numbers: range) -> list[object]:
    return [log.since(number) for number in [None, *numbers]] + [log.html("answer"), log.html("reasoning")]


@pytest.mark.parametrize("seed", range(20))
def test_copied_log_gives_readers_the_same_updates(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        log, copy, late = TurnLog(), TurnLog(), TurnLog()
        told = 0
        for _ in range(40):
            before = log.number
            change(log, rng)
            if rng.random() < 0.5:
                assert tell(log, copy, rng.choice((-1, told, rng.randrange(told + 1))))
                told = log.number
            if rng.random() < 0.1 and before > late.number:
                assert not tell(log, late, before), "a copy must reject changes after a gap"
        log.finish("done", "Done", None, {"tokens": 3})
        assert tell(log, copy, told) and tell(log, late, -1)
        assert tell(log, copy, told), "repeated changes are accepted"
        for each in (copy, late):
            assert shown(each, range(log.number + 1)) == shown(log, range(log.number + 1))
            assert (each.finished, each.error, each.stats, each.words) == (True, None, {"tokens": 3}, 0)

    asyncio.run(run())


def test_copied_log_wakes_waiting_readers() -> None:
    async def run() -> None:
        log, copy = TurnLog(), TurnLog()
        log.write("answer", "<p>one</p>", "")
        with copy.reading():
            assert not await copy.wait(0, 0.001)
            tell(log, copy, -1)
            assert await copy.wait(0, 60)

    asyncio.run(run())


def test_restated_text_reaches_readers_as_a_snapshot() -> None:
    async def run() -> None:
        log = TurnLog()
        log.write("answer", "<p>one</p>", "<p>tw")
        seen = log.number
        log.replace_html({"answer": "<p>one</p><p>two</p>", "reasoning": ""})
        for update in (log.since(seen), log.since(None), log.since(0)):
            assert update.snapshot and update.channels["answer"].append == "<p>one</p><p>two</p>"
        assert not log.since(log.number).snapshot and not log.since(log.number).channels

    asyncio.run(run())
