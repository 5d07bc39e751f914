"""A small random model that runs as usual but whose sampled tokens are scripted, for exact expectations of streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM

from notso.smollm3 import Engine, Event, RequestOptions, SamplingParams
from notso.smollm3.engine import input_processor

SMALL = replace(RANDOM, layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
END, THINK, THOUGHT = 258, 259, 260
"""Ids of `<|im_end|>`, `<think>` and `</think>` in a random model; those below 256 are bytes."""
PROMPT = [10, 20, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@dataclass
class Script:
    """Tokens that replace sampled ones. After the last, sampling raises an error, or returns `then`."""

    tokens: list[int] = field(default_factory=list)
    then: int | None = None
    drawn: int = 0
    pause_s: float = 0.0
    actions: dict[int, Callable[[], None]] = field(default_factory=dict)

    def at(self, draw: int, action: Callable[[], None]) -> None:
        """Run an action just before a sampling call returns (the first is 1)."""
        self.actions[draw] = action

    def say(self, *parts: int | str) -> None:
        """Append ids, or texts as their bytes."""
        for part in parts:
            self.tokens += [part] if isinstance(part, int) else part.encode()


def scripted(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replace the engine's sampling with a script."""
    state = Script()

    class Scripted:
        def __init__(self, *_: object) -> None:
            pass

        def sample(self, logits: np.ndarray, history: Sequence[int], position: int) -> int:
            assert np.isfinite(logits.max())  # logits of excluded tokens are not finite
            assert len(history) == position
            state.drawn += 1
            time.sleep(state.pause_s)
            state.actions.get(state.drawn, lambda: None)()
            if state.drawn > len(state.tokens) and state.then is not None:
                return state.then
            return state.tokens[state.drawn - 1]

    monkeypatch.setattr(input_processor, "Sampler", Scripted)
    return state


def answered(events: Iterable[Event]) -> list[Event]:
    """Return the events without those about progress before the first token."""
    return [event for event in events if event.kind not in ("queued", "progress")]


def run(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> list[Event]:
    """Return all events; assert their order: reasoning, text and calls, one usage, one end."""
    params = options.pop("params", None) or SamplingParams(
        **{name: options.pop(name) for name in ("max_tokens", "stop", "seed", "logit_bias") if name in options}
    )
    cancelled = options.pop("cancelled", None)
    events = answered(engine.generate(prompt, params, RequestOptions(**options), cancelled=cancelled))
    assert [event.kind for event in events[-2:]] == ["usage", "end"]
    assert {event.kind for event in events[:-2]} <= {"reasoning", "text", "tool_call"}
    for event in events[:-2]:
        assert bool(event.text) == (event.kind != "tool_call")
        assert event.usage is None
        assert event.finish_reason is None
    return events


def told(events: list[Event], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def tokens_used(events: list[Event]) -> tuple[int, int]:
    """Return the numbers of completion and reasoning tokens."""
    usage = events[-2].usage
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.prompt_ms > 0
    assert usage.completion_ms >= 0
    return usage.completion_tokens, usage.reasoning_tokens
