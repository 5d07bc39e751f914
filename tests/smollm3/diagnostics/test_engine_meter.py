"""Assumptions of the benchmark: the context's depth is correct, tokens are timed, and concurrent answers overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from long_tests import is_long

from notso.smollm3 import Engine, SamplingParams
from notso.smollm3.diagnostics.benchmark import NEW_TURN_TOKENS, BenchmarkPlan, EngineMeter
from notso.smollm3.errors import EngineError
from notso.smollm3.kv.kv_cache import KV_FORMATS
from notso.smollm3.output.generation import Generation

DEPTH = 700


@pytest.fixture(scope="module", params=KV_FORMATS if is_long("engine") else ("k8v8", "k4v3"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(kv=request.param, context_tokens=1024, max_num_seqs=4, speculation=False) as engine:
        yield engine


@pytest.fixture
def meter(engine: Engine) -> EngineMeter:
    return EngineMeter(engine, seed=1)


def test_context_depth_is_filled_from_cached_blocks(engine: Engine, meter: EngineMeter) -> None:
    for _ in range(2):
        before = engine.stats()
        assert meter.first_token_s(DEPTH) > 0
        after = engine.stats()
        prompts = after.prompt_tokens_total - before.prompt_tokens_total
        cached = after.cached_tokens_total - before.cached_tokens_total
        assert prompts == 257 + DEPTH + NEW_TURN_TOKENS  # the copied blocks, then the prompt
        assert cached >= DEPTH // 128 * 128


@pytest.mark.parametrize("task", [("decode", 6, 0), ("decode", 6, DEPTH), ("batch", 6, 4)])
def test_every_step_is_timed(meter: EngineMeter, task: tuple[str, int, int]) -> None:
    steps = meter.measure(task)
    assert len(steps) == 6 and min(steps) > 0


def test_prefill_is_timed(meter: EngineMeter) -> None:
    (seconds,) = meter.measure(("prefill", 64, DEPTH))
    assert 0 < seconds < 60


def test_batch_larger_than_max_num_seqs_is_refused(meter: EngineMeter) -> None:
    with pytest.raises(EngineError, match="choose a smaller --batch"):
        meter.measure(("batch", 6, 5))


def test_batch_answers_start_after_all_submissions(
    engine: Engine, meter: EngineMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Generation] = []
    submit = engine.submit

    def slow(*asked: Any) -> Generation:
        assert not (begun and begun[-1].wait(0, timeout_s=0.1)), "answers must wait for all submissions"
        begun.append(submit(*asked))
        return begun[-1]

    monkeypatch.setattr(engine, "submit", slow)
    assert len(meter.measure(("batch", 6, 4))) == 6 and len(begun) == 4


def test_batch_answers_can_be_stopped_between_steps(
    engine: Engine, meter: EngineMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = engine._core._step

    def and_pause() -> None:
        step()
        time.sleep(0.02)  # until the last token arrives and all answers are stopped

    monkeypatch.setattr(engine._core, "_step", and_pause)
    assert len(meter.measure(("batch", 3, 4))) == 3


def test_sampling_is_timed(meter: EngineMeter) -> None:
    assert meter.sampling_s(SamplingParams()) > 0


def test_benchmark_plan_lists_tasks_and_longest_context() -> None:
    plan = BenchmarkPlan(prefill=((512, 0), (128, 4096)), depths=(0, 2048), batches=(16,), decode_tokens=8)
    assert plan.tasks == [
        ("prefill", 512, 0), ("prefill", 128, 4096), ("decode", 8, 0), ("decode", 8, 2048), ("batch", 8, 16),
    ]  # fmt: skip
    assert plan.longest_tokens == 4096 + 128 + NEW_TURN_TOKENS + 8
