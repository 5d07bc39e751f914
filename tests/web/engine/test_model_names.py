"""Resolving model names: the default model first, then installed models, and adapters together with their base
model."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import AdapterSource
from notso.web.engine.host import EngineHost
from notso.web.engine.model_names import ModelChoice, accepted_names, find_model
from notso.web.engine.models import ModelRegistry, adapter_files, adapter_name, resolve_within
from notso.web.values.durations import parse_duration


def host_with(name: str, path: Path | str = "", *adapters: str) -> EngineHost:
    engine = ScriptedEngine(name=name)
    engine.info = dataclasses.replace(engine.info, path=str(path))
    for each in adapters:
        engine.adapters.add(AdapterSource(each, "f"))
    host = EngineHost(lambda: engine)
    host.default.mark_loaded(engine)
    return host


@pytest.mark.parametrize(
    ("wanted", "means"),
    [
        (None, ModelChoice()),
        ("my model", ModelChoice()),
        ("My-Model:latest", ModelChoice()),
        ("LEGAL", ModelChoice("", "Legal")),
        ("smollm3:legal", ModelChoice("", "Legal")),
        ("SmolLM3", ModelChoice()),
        ("smollm3:latest", ModelChoice()),
        ("dummy", ModelChoice()),
        ("tgi", ModelChoice()),
        ("dummies", None),
        ("dummy:legal", None),
        ("smollm3:3b", None),
        ("SmolLM3-3B", None),
        ("my-model:legal:latest", ModelChoice("", "Legal")),
        ("llama:legal", None),
        ("my-model:other", None),
        (":legal", None),
        ("two", "Two.gguf"),
        ("TWO:latest", "Two.gguf"),
        ("two:legal", None),
        ("demo", "demo.gguf"),
    ],
)
def test_model_names_resolve_to_model_and_adapter(
    own_home: Path, tmp_path: Path, wanted: str | None, means: ModelChoice | str | None
) -> None:
    (tmp_path / "Two.gguf").write_bytes(b"GGUF")
    host = host_with("My Model", tmp_path / "one.gguf", "Legal")
    registry = ModelRegistry(lambda path: ScriptedEngine(), tmp_path)
    choice = asyncio.run(find_model(host, registry, wanted))
    if isinstance(means, str):
        assert choice is not None and Path(str(choice.model)).name == means and choice.adapter is None
    else:
        assert choice == means


def test_replaced_default_model_keeps_name_and_adapters(own_home: Path) -> None:
    host = host_with("Old", "", "Legal")
    host.switch(lambda: ScriptedEngine(name="New"))
    host.default.mark_loaded(ScriptedEngine(name="New"))
    registry = ModelRegistry(lambda path: ScriptedEngine())
    assert asyncio.run(find_model(host, registry, "old")) == ModelChoice("")
    assert asyncio.run(find_model(host, registry, "old:legal")) == ModelChoice("", "Legal")
    assert asyncio.run(find_model(host, registry, "smollm3:legal")) is None, "the adapter stays with its base model"
    assert "new" in accepted_names(host.default.info)  # type: ignore[arg-type]


def test_adapter_paths_are_limited_to_folder(tmp_path: Path) -> None:
    (tmp_path / "a b.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    for name in ("peft", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "out.gguf").symlink_to("/etc/passwd")
    (tmp_path / "bad.gguf").symlink_to("a" * 300)
    (tmp_path / "bad").symlink_to("a" * 300)
    found = [(file.path, file.name) for file in adapter_files(tmp_path)]
    assert found == [("a b.gguf", "a-b"), ("out.gguf", "out"), ("peft", "peft")]
    assert adapter_files(None) == adapter_files(tmp_path / "absent") == []
    assert adapter_name(Path("\u00e9\u00e9.gguf")) == "adapter"
    assert resolve_within(tmp_path, "peft") == (tmp_path / "peft").resolve()
    assert (
        resolve_within(tmp_path, "out.gguf")
        is resolve_within(tmp_path, "../x")
        is resolve_within(tmp_path, "a\0b")
        is None
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 0), ("90", 90), ("-1", -1), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("-5m", -300)),
        *(("99999999h", -1), ("", None), ("soon", None), ("1d", None), ("inf", None), ("m5", None), ("5 m", None)),
    ],
)
def test_duration_strings_are_parsed(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_adapter_name_does_not_shadow_model_name(own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "Two.gguf").write_bytes(b"GGUF")
    (tmp_path / "smollm3-3b-q8_0.gguf").write_bytes(b"GGUF")
    host = host_with("My Model", tmp_path / "one.gguf", "smollm3", "Two", "my-model", "one", "smollm3-3b-q8_0")
    registry = ModelRegistry(lambda path: ScriptedEngine(), tmp_path)
    for wanted in ("smollm3", "smollm3:latest", "My-Model", "one", "two", "TWO:latest", "smollm3-3b-q8_0"):
        choice = asyncio.run(find_model(host, registry, wanted))
        assert choice is not None and choice.adapter is None, wanted
    assert asyncio.run(find_model(host, None, "smollm3")) == ModelChoice()
    assert asyncio.run(find_model(host, registry, "smollm3:two")) == ModelChoice("", "Two")
