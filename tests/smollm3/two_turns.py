"""Two turns of a conversation, with a wait until prefill ahead between them is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from notso.smollm3 import Engine, Event, Message, RequestOptions, SamplingParams, Tool
from notso.smollm3.common_prefix import common_length
from notso.smollm3.kv.kv_cache import KVFormat

QUESTION = Message("user", "Tell me about the sea, and all that lives in it. " * 12)
SHORT = Message("user", "Hello!")
SAID = "The sea is wide, deep and cold, and its fish are many. " * 20
GREEDY = SamplingParams(max_tokens=24, temperature=0)
TOOLS: list[Tool] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def told(events: list[Event]) -> Message:
    calls = tuple(event.tool_call for event in events if event.tool_call is not None)
    text = {kind: "".join(event.text for event in events if event.kind == kind) for kind in ("text", "reasoning")}
    return Message("assistant", text["text"], text["reasoning"], calls)


def wait(engine: Engine) -> None:
    turns = engine._core.background.prefix_warmup
    until(lambda: not (engine._core._inbox or turns._pending or turns._drafts))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def load(kv: KVFormat = "k8v8", context: int = 2048, folder: Path | None = None) -> Engine:
    return Engine.load(context_tokens=context, kv=kv, cache_dir=folder, speculation=False)


def before_words(engine: Engine, messages: Sequence[Message], **options: Any) -> int:
    """Return the number of tokens before the user's words, which are the same for all next questions."""
    a, b = (
        engine.encode_chat([*messages, Message("user", words)], RequestOptions(**options))
        for words in ("And?", "1 or 2?")
    )
    return common_length(a, b)


def second_turn(
    engine: Engine, messages: Sequence[Message], words: str = "And the land?", **options: Any
) -> tuple[list[Event], int]:
    events = list(engine.generate([*messages, Message("user", words)], GREEDY, RequestOptions(**options)))
    usage = events[-2].usage
    assert usage is not None
    return [event for event in events if event.kind not in ("progress", "queued", "usage")], usage.cached_tokens


def counted(engine: Engine) -> list[int]:
    """Return a list to which every step that prefills ahead adds an entry."""
    reads, run = list[int](), engine._core.runner.run

    def counting(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
        reads.extend([1] * once)
        return run(chunks, go_on, once=once)

    engine._core.runner.run = counting  # type: ignore[method-assign]
    return reads
