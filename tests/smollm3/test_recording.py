"""The recorded decoding step: what is replayed is always whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden.random_models import RANDOM

from notso.smollm3 import Engine, SamplingParams

SMALL = replace(RANDOM, layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
PROMPT = [10, 20, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_an_interrupted_first_step_leaves_no_half_recorded_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the decoding step is recorded: what was recorded so far must not be replayed as if it were whole."""
    with Engine.load(SMALL.write(tmp_path / "small.gguf"), context_tokens=40, threads=1) as fresh:
        model = fresh._model
        forward = type(model).forward

        def interrupted(self: Any, step: Any) -> None:
            if step is fresh._decode_step:
                raise KeyboardInterrupt  # nothing is recorded: replayed, the logits would be those of no step at all
            forward(self, step)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(model), "forward", interrupted)
            list(fresh.generate(PROMPT, GREEDY))
        after = [event.text for event in fresh.generate(PROMPT, GREEDY)]
    with Engine.load(tmp_path / "small.gguf", context_tokens=40, threads=1) as unhurt:
        assert after == [event.text for event in unhurt.generate(PROMPT, GREEDY)]
