"""The engine's configuration is a single value of plain data, and its choices equal those of the layers below."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from notso.qtensor import KV_FORMATS
from notso.smollm3 import Engine, EngineConfig, InvalidRequestError
from notso.smollm3.scheduling.sequence import MAX_SAMPLED
from notso.smollm3.values.engine_config import KV_CHOICES, MAX_NUM_SEQS


def test_engine_config_round_trips_through_json() -> None:
    config = EngineConfig("m.gguf", 1024, 2, "mmap", "k8v4", 3, False, "cache", 5)
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert EngineConfig.from_dict({}) == EngineConfig()


def test_every_setting_is_documented() -> None:
    assert EngineConfig.__doc__ is not None
    for each in fields(EngineConfig):
        assert f"{each.name}:" in EngineConfig.__doc__ or f"`{each.name}`" in EngineConfig.__doc__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("colour", "red"),
        ("model", 5),
        ("context_tokens", True),
        ("threads", 0),
        ("weights", "disk"),
        ("kv", "k2v2"),
        ("kv", []),
        ("max_num_seqs", MAX_NUM_SEQS + 1),
        ("speculation", "yes"),
        ("cache_dir", 5),
        ("cache_bytes", -1),
        ("library_bytes", 1.5),
    ],
)
def test_unknown_or_out_of_range_settings_are_refused_by_name(name: str, value: Any) -> None:
    for make in (EngineConfig.from_dict, lambda settings: Engine.load(**settings)):
        with pytest.raises(InvalidRequestError) as caught:
            make({name: value})
        assert caught.value.param == name


def test_a_config_and_keywords_load_the_same_engine() -> None:
    asked = {"context_tokens": 256, "kv": "k8v4", "max_num_seqs": 2, "threads": 1}
    with Engine.load(EngineConfig.from_dict(asked)) as by_config, Engine.load(**asked) as by_keywords:
        for info in (by_config.info, by_keywords.info):
            assert (info.context_tokens, info.kv_format, info.max_num_seqs, info.is_demo) == (256, "k8v4", 2, True)


def test_kv_choices_match_the_supported_cache_formats() -> None:
    assert ("auto", *KV_FORMATS) == KV_CHOICES


def test_max_num_seqs_does_not_exceed_max_sampled() -> None:
    assert MAX_NUM_SEQS <= MAX_SAMPLED
