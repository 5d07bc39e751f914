"""Recorded steps are replayed only if complete, and are recorded before they are needed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden.random_models import RANDOM
from smollm3.two_turns import until

from notso.smollm3 import Engine, EngineError, SamplingParams
from notso.smollm3.engine.prefix_warmup import QUIET_S
from notso.smollm3.model import model_runner as runner
from notso.smollm3.model.model_runner import CAPTURED_ROWS, ModelRunner

SMALL = replace(RANDOM, layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
PROMPT = [10, 20, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_interrupted_capture_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error during recording, the incomplete program must not be replayed."""
    monkeypatch.setattr(ModelRunner, "capture_next_step", lambda _: None)
    with Engine.load(SMALL.write(tmp_path / "small.gguf"), context_tokens=40, threads=1) as fresh:
        model = fresh._runner._model
        feed_forward = type(model)._feed_forward
        calls = 0

        def interrupted(self: Any, layer: Any, step: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 2 * SMALL.layers - 2:  # halfway through the second step, the first that decodes
                raise RuntimeError("the recording is incomplete")
            feed_forward(self, layer, step)

        with monkeypatch.context() as patch, pytest.raises(EngineError):
            patch.setattr(type(model), "_feed_forward", interrupted)
            list(fresh.generate(PROMPT, GREEDY))
        after = [event.text for event in fresh.generate(PROMPT, GREEDY)]
    with Engine.load(tmp_path / "small.gguf", context_tokens=40, threads=1) as unhurt:
        assert after == [event.text for event in unhurt.generate(PROMPT, GREEDY)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return SMALL.write(tmp_path / "small.gguf")


def shapes(engine: Engine) -> set[tuple[int, int]]:
    return {shape[:2] for shape in engine._runner._captured}


def test_idle_engine_captures_decode_steps(file: Path) -> None:
    with Engine.load(file, context_tokens=40, threads=1) as engine:
        until(lambda: engine._runner.has_captured_steps)
        assert shapes(engine) == {(rows, 1) for rows in range(1, CAPTURED_ROWS + 1)}
        ahead = [[event.text for event in engine.generate(PROMPT * count, GREEDY)] for count in (1, 2, 5)]
    with Engine.load(file, context_tokens=40, threads=1) as at_once:
        assert ahead == [[event.text for event in at_once.generate(PROMPT * count, GREEDY)] for count in (1, 2, 5)]


def test_steps_are_captured_again_after_weights_change(file: Path) -> None:
    with Engine.load(file, context_tokens=40, threads=1) as engine:
        until(lambda: engine._runner.has_captured_steps)

        def exchange() -> int:
            engine._runner.weights = engine._runner.weights
            return len(shapes(engine))

        assert engine._core.call(exchange) == 0
        until(lambda: engine._runner.has_captured_steps and len(shapes(engine)) == CAPTURED_ROWS)


def test_steps_are_not_captured_while_weights_are_exchanged(file: Path) -> None:
    with Engine.load(file, context_tokens=40, threads=1) as engine:
        until(lambda: engine._runner.has_captured_steps)
        placement = SimpleNamespace(finished=threading.Event(), adopt=lambda _: None)
        looks = list[int]()

        def begin_exchange() -> None:
            engine._runner.placement = placement  # type: ignore[assignment]
            engine._runner.weights = engine._runner.weights

        engine._core.call(begin_exchange)
        for _ in range(3):
            time.sleep(2 * QUIET_S)
            engine._core.call(lambda: looks.append(len(shapes(engine))))
        assert looks == [0, 0, 0]
        placement.finished.set()
        until(lambda: engine._runner.has_captured_steps and len(shapes(engine)) == CAPTURED_ROWS)


def test_idle_capture_does_not_evict_used_steps(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_CAPTURED_STEPS", 4)
    with Engine.load(file, context_tokens=40, threads=1) as engine:
        list(engine.generate(PROMPT, GREEDY))
        used = shapes(engine)
        until(lambda: engine._runner.has_captured_steps)
        assert used <= shapes(engine) and len(shapes(engine)) == 4


def test_failed_capture_is_not_retried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, record = list[int](), ModelRunner._capture

    def fails(runner: ModelRunner, shape: tuple[int, int], step: Any) -> Any:
        if shape[:2] == (1, 1):
            tries.append(1)
            raise MemoryError
        return record(runner, shape, step)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_capture", fails)
        with Engine.load(file, context_tokens=40, threads=1) as engine:
            until(lambda: engine._runner.has_captured_steps)
            engine._core.call(lambda: None)
            assert len(tries) == 1
