"""The engine's configuration is a single value of plain data, and its choices equal those of the layers below."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from notso.qtensor import KV_FORMATS
from notso.smollm3 import AdapterSource, Engine, EngineConfig, InvalidRequestError, NotsoError, TemplateError
from notso.smollm3.scheduling.sequence import MAX_SAMPLED
from notso.smollm3.values.engine_config import KV_CHOICES, MAX_NUM_SEQS


def test_engine_config_round_trips_through_json() -> None:
    config = EngineConfig("m.gguf", 1024, 2, "mmap", "k8v4", 3, False, "cache", 5)
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert EngineConfig.from_dict({}) == EngineConfig()


@pytest.mark.parametrize("scale", [10**400, float("nan"), float("-inf")])
def test_scale_of_adapter_must_be_finite(scale: float) -> None:
    with pytest.raises(InvalidRequestError, match="scale of adapter a must be a number"):
        AdapterSource("a", "file", scale)


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


def test_leading_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = {"cache_dir": Path("~/cache"), "chat_template_file": "~/t", "adapters": ["a=~/b:2"]}
    config = EngineConfig.from_dict(settings)
    assert (config.cache_dir, config.chat_template_file) == (f"{tmp_path}/cache", f"{tmp_path}/t")
    assert AdapterSource.parse(config.adapters[0]) == AdapterSource("a", f"{tmp_path}/b", 2.0)
    assert EngineConfig(cache_dir="~nobody-here/x", model="~/m").cache_dir == "~nobody-here/x"
    (tmp_path / "template").write_text("{{ 1 }}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotsoError, match="cannot be opened"):
        Engine.load("~nobody-here/model.gguf")
    with pytest.raises(TemplateError, match=str(tmp_path / "missing")):
        Engine.load(chat_template_file="~/missing")
    with Engine.load(cache_dir="~/cache", context_tokens=256) as engine:
        engine.chat("Hello", max_tokens=1)
    assert {each.name for each in tmp_path.iterdir()} == {"cache", "template"}


def test_a_config_and_keywords_load_the_same_engine() -> None:
    asked = {"context_tokens": 256, "kv": "k8v4", "max_num_seqs": 2, "threads": 1}
    with Engine.load(EngineConfig.from_dict(asked)) as by_config, Engine.load(**asked) as by_keywords:
        for info in (by_config.info, by_keywords.info):
            assert (info.context_tokens, info.kv_format, info.max_num_seqs, info.is_demo) == (256, "k8v4", 2, True)


def test_kv_choices_match_the_supported_cache_formats() -> None:
    assert ("auto", *KV_FORMATS) == KV_CHOICES


def test_max_num_seqs_does_not_exceed_max_sampled() -> None:
    assert MAX_NUM_SEQS <= MAX_SAMPLED


@pytest.mark.parametrize("name", ["cache_dir", "chat_template_file"])
@pytest.mark.parametrize("path", ["a\0b", "a\ud800"], ids=ascii)
def test_paths_that_no_system_accepts_are_refused(name: str, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.from_dict({name: path})
    assert caught.value.param == name


def test_unusable_cache_folder_does_not_prevent_loading(tmp_path: Path) -> None:
    for folder in (tmp_path / ("x" * 300), tmp_path / "file"):
        (tmp_path / "file").touch()
        with Engine.load("demo", context_tokens=256, cache_dir=folder) as engine:
            assert engine.chat("x", max_tokens=1).usage.completion_tokens == 1
