"""Answers of the demo model are equal on the CPU and on the emulated GPU, alone and in groups of three; in groups of
sixteen if kernels or the engine have changed."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest
from long_tests import is_long
from stub_gpu.gpu import installed

from notso.smollm3 import Engine, Message, RequestOptions, SamplingParams

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub

IS_LONG = is_long("native") or is_long("engine")
BATCHES = (1, 3, 16) if IS_LONG else (1, 3)
WORDS = ("Who are you?", "What is 12 + 30?", "Tell me of NoPE.", "List three colours.", "Is water wet?")
TOKENS = 6 if IS_LONG else 3


def chat(number: int) -> tuple[list[Message], SamplingParams, RequestOptions]:
    """Return a chat with greedy or seeded sampling, alternately, with and without reasoning, and of varying length."""
    question = " ".join([WORDS[number % len(WORDS)]] * (1 + number % 3))
    params = SamplingParams(max_tokens=TOKENS, **({"temperature": 0} if number % 2 else {"seed": number}))
    return [Message("user", question)], params, RequestOptions(thinking=number % 4 < 2, date=date(2026, 1, 1))


def answers(device: str) -> list[str]:
    found = list[str]()
    with Engine.load(context_tokens=1024, threads=1, max_num_seqs=max(BATCHES), device=device) as engine:
        assert engine.info.device.startswith(device)
        for size in BATCHES:
            running = [engine.submit(*chat(len(found) + number)) for number in range(size)]
            found += ["".join(event.text for event in each.events()) for each in running]
        logits = engine.logits(np.random.default_rng(2).integers(100, 3000, 64 if IS_LONG else 17).tolist())
    return [*found, logits.tobytes().hex()]


def test_cpu_and_emulated_gpu_give_identical_answers() -> None:
    with installed():
        ours, theirs = (answers(device) for device in ("cpu", "cuda"))
    assert len(ours) == sum(BATCHES) + 1 and len(set(ours)) > sum(BATCHES) // 4
    assert ours == theirs
