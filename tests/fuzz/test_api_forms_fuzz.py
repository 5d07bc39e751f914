"""Malformed bodies of other endpoints than chat completions give a valid request or an error that names the field.

Runs for a few seconds by default; `FUZZ_SECONDS=300` (or `make fuzz`) runs longer. A failure prints the seed of its
case: `FUZZ_SEED=<n>` runs only that case.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from random import Random, SystemRandom
from typing import Any

import pytest

from notso.smollm3 import Message
from notso.web.api.completions.fields import TextFields, parse_text_request
from notso.web.api.messages.fields import MessageFields
from notso.web.api.messages.request import parse_count_request, parse_message_request
from notso.web.api.request_fields.fields import parse_object
from notso.web.api.responses.fields import ResponseFields
from notso.web.api.responses.request import parse_response_request
from notso.web.api.shared.api_request import ApiRequest
from notso.web.edge.errors import ApiError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "4"))
ONE_SEED = os.environ.get("FUZZ_SEED")
SLOWEST_SECONDS = 2.0  # of CPU time

SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, 0.0, -0.5, 1e-320, 1e308, 2.5),
    *("", "user", "assistant", "text", "none", "auto", "a\x00b", "\ud800", "😀", "x" * 300, "\u2028", [], {}, [[]]),
]
NAMES = [
    *(*TextFields.model_fields, *MessageFields.model_fields, *ResponseFields.model_fields),
    *("role", "content", "type", "text", "name", "arguments", "id", "schema", "x"),
]
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TURNS = [
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [1, {"b": None}]}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4", "is_error": False}]},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
]
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
KINDS: list[tuple[Callable[[Mapping[str, Any]], ApiRequest], dict[str, Any]]] = [
    (parse_text_request, {"prompt": ["one", "two"], "n": 2, "logprobs": 3, "stream": True, "stop": ["a"], "seed": 1}),
    (parse_text_request, {"prompt": "one", "echo": True, "max_tokens": 5, "logit_bias": {"1": 5}}),
    (parse_text_request, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 0}),
    (parse_text_request, {"prompt": [1, 2], "stop_token_ids": [5], "dry_sequence_breakers": ["."], "typical_p": 0.5}),
    (
        parse_message_request,
        {
            **{"max_tokens": 2000, "system": "Be kind.", "messages": TURNS, "tools": [TOOL], "stop_sequences": ["a"]},
            **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "any"}, "stream": True},
        },
    ),
    (parse_message_request, {"max_tokens": 5, "messages": TURNS, "output_config": {"effort": "low", "format": FORMAT}}),
    (parse_count_request, {"messages": TURNS, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}),
    (
        parse_response_request,
        {
            **{"input": ITEMS, "instructions": "x", "text": {"format": FORMAT}, "reasoning": {"effort": "low"}},
            **{"tools": [{"type": "function", "name": "add"}], "tool_choice": "required", "metadata": {"a": "b"}},
        },
    ),
    (parse_response_request, {"input": "Hello", "previous_response_id": "resp_1", "top_logprobs": 2, "store": False}),
]


def damaged(random: Random, value: Any, chance: float) -> Any:
    """Return a copy of `value` in which parts are occasionally replaced, removed or added."""
    if random.random() < chance:
        return random.choice(SCALARS)
    if isinstance(value, dict):
        kept = {
            random.choice(NAMES) if random.random() < chance / 4 else key: damaged(random, each, chance)
            for key, each in value.items()
            if random.random() > chance / 4
        }
        return kept | ({random.choice(NAMES): random.choice(SCALARS)} if random.random() < chance / 2 else {})
    if isinstance(value, list):
        return [damaged(random, each, chance) for each in value]
    return value


def seeds() -> Iterator[int]:
    if ONE_SEED is not None:
        yield int(ONE_SEED)
        return
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield SystemRandom().randrange(1 << 48)


def test_fuzzed_bodies_give_a_request_or_an_api_error() -> None:
    outcomes = {"question": 0, "refusal": 0}
    for seed in seeds():
        random = Random(seed)
        parse, good = random.choice(KINDS)
        data = json.dumps(damaged(random, good, random.choice([0.0, 0.02, 0.1]))).encode()
        began = time.thread_time()
        try:
            question = parse(parse_object(data))
        except ApiError as refusal:
            outcomes["refusal"] += 1
            for body in (refusal.body, refusal.anthropic_body):
                json.dumps(body, ensure_ascii=False).encode()  # fails for a lone surrogate
            assert refusal.status == 400 and 0 < len(refusal.message) < 400, f"seed {seed}"
            assert "\n" not in refusal.message, f"seed {seed}"
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        else:
            outcomes["question"] += 1
            for prompt, _ in question.choices:
                assert prompt, f"seed {seed}"
                for each in [prompt] if isinstance(prompt, str) else prompt:
                    (each.content if isinstance(each, Message) else str(each)).encode()
        assert time.thread_time() - began < SLOWEST_SECONDS, f"seed {seed}"
    assert ONE_SEED or min(outcomes.values()) > 20, outcomes
