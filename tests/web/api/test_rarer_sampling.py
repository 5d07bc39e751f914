"""The less common sampling fields, in the spelling of each API."""

from __future__ import annotations

from typing import Any

import pytest

from notso.smollm3 import SamplingParams
from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.completions.fields import parse_text_request
from notso.web.api.ollama.fields import OptionFields, to_sampling_params
from notso.web.edge.errors import ApiError

HELLO = [{"role": "user", "content": "Hello"}]
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"typical_p": 0.5}, {"typical_p": 0.5}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
    (
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64},
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64},
    ),
    ({"dry_sequence_breakers": ["\n", "."]}, {"dry_sequence_breakers": ("\n", ".")}),
    ({"dry_sequence_breakers": []}, {"dry_sequence_breakers": ()}),
    ({"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]}, {"min_tokens": 3, "ignore_eos": True}),
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
    ({"repeat_last_n": 64}, {"penalty_window": 64}),
    ({"repeat_last_n": -1}, {"penalty_window": 0}),
    ({"repeat_last_n": 0, "repeat_penalty": 1.3}, {"penalty_window": 256, "repetition_penalty": 1.0}),
    ({"mirostat": 0}, {}),
]


@pytest.mark.parametrize(("given", "expected"), TAKEN, ids=str)
def test_chat_and_text_requests_parse_rare_sampling_fields(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for params in (
        parse_chat_request({"messages": HELLO} | given).params[0],
        parse_text_request({"prompt": "Hello"} | given).params[0],
    ):
        assert {name: getattr(params, name) for name in expected} == expected


def test_ollama_options_set_typical_p() -> None:
    assert to_sampling_params(OptionFields(typical_p=0.5), None) == SamplingParams(typical_p=0.5)


@pytest.mark.parametrize(
    "given",
    [
        {"typical_p": 0},
        {"xtc_threshold": 1.5},
        {"dry_base": 0.1},
        {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": ["x"] * 33},
        {"min_tokens": 20, "max_tokens": 10},
        {"stop_token_ids": ["x"]},
        {"stop_token_ids": [-1]},
        {"ignore_eos": "yes"},
        {"repeat_last_n": -2},
        {"mirostat": 1},
    ],
    ids=str,
)
def test_invalid_sampling_value_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request({"messages": HELLO} | given)
    assert caught.value.status == 400 and (caught.value.param or "").startswith(next(iter(given)))


def test_mirostat_is_refused_with_the_reason() -> None:
    with pytest.raises(ApiError, match="break reproducibility"):
        parse_chat_request({"messages": HELLO, "mirostat": 2})
