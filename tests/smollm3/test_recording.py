"""The recorded decoding step: what is replayed is always whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden.random_models import RANDOM

from notso.smollm3 import Engine, EngineError, SamplingParams

SMALL = replace(RANDOM, layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
PROMPT = [10, 20, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_an_interrupted_first_step_leaves_no_half_recorded_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while a step is recorded: what was recorded so far must not be replayed as if it were whole."""
    with Engine.load(SMALL.write(tmp_path / "small.gguf"), context_tokens=40, threads=1) as fresh:
        model = fresh._runner._model
        feed_forward = type(model)._feed_forward
        calls = 0

        def interrupted(self: Any, layer: Any, step: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 2 * SMALL.layers - 2:  # in the second step, the first that decodes, half-way
                raise RuntimeError("half recorded; replayed, the logits would be those of no step at all")
            feed_forward(self, layer, step)

        with monkeypatch.context() as patch, pytest.raises(EngineError):
            patch.setattr(type(model), "_feed_forward", interrupted)
            list(fresh.generate(PROMPT, GREEDY))
        after = [event.text for event in fresh.generate(PROMPT, GREEDY)]
    with Engine.load(tmp_path / "small.gguf", context_tokens=40, threads=1) as unhurt:
        assert after == [event.text for event in unhurt.generate(PROMPT, GREEDY)]
