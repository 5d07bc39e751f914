"""Malformed bodies of chat completions give a valid request or our error, within a time limit.

Runs for a few seconds by default; `FUZZ_SECONDS=300` (or `make fuzz`) runs longer. A failure prints the seed of its
case: `FUZZ_SEED=<n>` runs only that case.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from random import Random, SystemRandom
from typing import Any

import pytest

from notso.smollm3 import Message, SamplingParams
from notso.web.api.chat_completions.fields import ChatFields, ChatRequest, parse_chat_request
from notso.web.api.request_fields.fields import parse_object
from notso.web.edge.errors import ApiError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
ONE_SEED = os.environ.get("FUZZ_SEED")
SLOWEST_SECONDS = 2.0  # of CPU time

NAMES = [*ChatFields.model_fields, "role", "content", "type", "text", "function", "name", "arguments", "id", "x"]
SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, 0.0, -0.5, 1e-320, 1e308, 2.5),
    *("", "user", "assistant", "system", "tool", "text", "none", "auto", "a\x00b", "\ud800", "😀", "x" * 300, "\u2028"),
]
GOOD: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"},
    {"role": "tool", "content": "4", "tool_call_id": "c1"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    },
]
VALUES: dict[str, list[Any]] = {
    "stop": ["a", ["a", "b"]],
    "logit_bias": [{"1": 5}, {"1": 101}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {}}}]],
    "stream_options": [{"include_usage": True}],
    "reasoning_effort": ["none", "low", "high"],
    "chat_template_kwargs": [{"enable_thinking": False}],
}


def anything(random: Random, depth: int = 0) -> Any:
    kind = random.random()
    if depth > 4 or kind < 0.6:
        return random.choice(SCALARS)
    if kind < 0.8:
        return [anything(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(NAMES): anything(random, depth + 1) for _ in range(random.randrange(4))}


def damaged(random: Random, value: Any) -> Any:
    """Return a copy of `value` in which parts are occasionally replaced."""
    if random.random() < 0.15:
        return anything(random)
    if isinstance(value, dict):
        return {random.choice(NAMES) if random.random() < 0.03 else k: damaged(random, v) for k, v in value.items()}
    if isinstance(value, list):
        return [damaged(random, each) for each in value]
    return value


def body(random: Random) -> bytes:
    fields: dict[str, Any] = {"messages": random.choices(GOOD, k=random.randrange(1, 5))}
    for name in random.sample(list(ChatFields.model_fields), random.randrange(4)):
        fields[name] = random.choice([*VALUES.get(name, ()), *SCALARS, anything(random)])
    text = json.dumps(damaged(random, fields) if random.random() < 0.7 else fields)
    data = bytearray(text.encode())
    if random.random() < 0.2:
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
    if random.random() < 0.05:
        at = random.randrange(len(data))
        data[at:at] = random.choice([b"[", b'"', b"\\", b'{"a":', b"NaN", b"1e999", b'\\"']) * random.randrange(
            1, 20_000
        )
    return bytes(data)


def seeds() -> Iterator[int]:
    if ONE_SEED is not None:
        yield int(ONE_SEED)
        return
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield SystemRandom().randrange(1 << 48)


def test_fuzzed_chat_bodies_give_a_request_or_an_api_error() -> None:
    outcomes = {"request": 0, "refusal": 0}
    for seed in seeds():
        data = body(Random(seed))
        began = time.thread_time()
        try:
            request = parse_chat_request(parse_object(data))
        except ApiError as refusal:
            outcomes["refusal"] += 1
            error = refusal.body["error"]
            json.dumps(refusal.body, ensure_ascii=False).encode()  # fails for a lone surrogate
            assert 400 <= refusal.status < 500 and error["message"] and len(error["message"]) < 400, f"seed {seed}"
            assert "\n" not in error["message"], f"seed {seed}"
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        else:
            outcomes["request"] += 1
            check(request, seed)
        assert time.thread_time() - began < SLOWEST_SECONDS, f"seed {seed}"
    assert ONE_SEED or min(outcomes.values()) > 20, outcomes


def check(request: ChatRequest, seed: int) -> None:
    """Assert that the types of an accepted request are those that the engine expects."""
    assert request.messages and all(isinstance(each, Message) for each in request.messages), f"seed {seed}"
    assert all(isinstance(each.content, str) for each in request.messages), f"seed {seed}"
    assert request.params and all(isinstance(each, SamplingParams) for each in request.params), f"seed {seed}"
    for each in request.messages:
        each.content.encode()
