"""Logits of a whole context are the same in pieces, during answers, and with concurrent callers; answers go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notso.smollm3 import Engine, SamplingParams
from notso.smollm3.errors import EngineError

IDS = [300 + i * i % 500 for i in range(300)]
LONG = SamplingParams(max_tokens=600, temperature=0.0, logit_bias={400: 100.0})


@pytest.fixture(scope="module", params=["k8v8", "k4v3"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(context_tokens=1024, kv=request.param, max_num_seqs=2) as engine:
        yield engine


def test_logits_chunks_interleave_with_answer_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = engine.logits(IDS)
    steps: list[str] = []
    run = engine._core.runner.run

    is_done = threading.Event()

    def noted(chunks: Any, *rest: Any) -> Any:
        is_piece = any(chunk.sequence.tokens == IDS for chunk in chunks)
        until = time.monotonic() + 60
        while not (is_piece or engine._core._inbox or is_done.is_set()):  # or the answer would end first
            assert time.monotonic() < until
            time.sleep(0.0005)
        steps.append("piece" if is_piece else "step")
        return run(chunks, *rest)

    monkeypatch.setattr(engine._core.runner, "run", noted)
    answer = engine.submit([1, 2, 3], LONG)
    beside = engine.logits(IDS)
    is_done.set()
    answer.stop()
    list(answer.events())
    np.testing.assert_array_equal(alone, beside)
    first, last = steps.index("piece"), len(steps) - steps[::-1].index("piece")
    assert steps.count("piece") >= len(IDS) // 16
    assert "piece piece piece" not in " ".join(steps[first:last])  # two pieces may precede an answer's step


def test_concurrent_logits_calls_match_sequential_calls(engine: Engine) -> None:
    asked = [IDS[:200], IDS[100:], IDS[50:90]]
    alone = [engine.logits(ids) for ids in asked]
    got: list[Any] = [None] * len(asked)

    def ask(number: int) -> None:
        got[number] = engine.logits(asked[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for ours, expected in zip(got, alone, strict=True):
        np.testing.assert_array_equal(ours, expected)
    cache = engine._core.scheduler.pool
    assert cache.available == cache.blocks


def test_close_during_logits_raises() -> None:
    engine = Engine.load(context_tokens=1024)
    run, begun = engine._core.runner.run, threading.Event()

    def noted(*given: Any) -> Any:
        begun.set()
        return run(*given)

    engine._core.runner.run = noted  # type: ignore[method-assign]
    told: list[Exception] = []

    def ask() -> None:
        try:
            while True:
                engine.logits(IDS)
        except (EngineError, ValueError) as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert told and not thread.is_alive()


def test_queued_request_does_not_busy_wait_for_cache_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    core, planned = engine._core, 0
    cache, schedule = core.scheduler.pool, core.scheduler.schedule

    def counted(*given: Any) -> Any:
        nonlocal planned
        planned += 1
        return schedule(*given)

    monkeypatch.setattr(core.scheduler, "schedule", counted)
    held = core.call(lambda: [cache.allocate() for _ in range(cache.available)])
    preempted = engine.stats().preemptions_total
    answer = engine.submit(IDS, SamplingParams(max_tokens=2, temperature=0.0))
    assert answer.wait(0, 60) and answer.read()[0].kind == "queued"
    calls = 50
    for _ in range(calls):
        core.call(lambda: None)
    assert planned <= calls + 5 and engine.stats().preemptions_total == preempted
    core.call(lambda: [cache.free(block) for block in held])
    assert list(answer.events())[-1].finish_reason == "length"
