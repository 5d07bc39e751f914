"""Recommended sampling parameters in a model file, and a separate chat template."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3 import Engine, Message, SamplingParams, TemplateError
from notso.smollm3.diagnostics import synth
from notso.smollm3.engine.model_description import sampling_defaults

QUESTION = [Message("user", "What is this?")]
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
My own: {{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"temp": 0.8, "top_k": 20, "top_p": 0.9}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
        ({"min_p": 0.05, "xtc_threshold": 0.2}, {"min_p": 0.05, "xtc_threshold": 0.2}),
        ({"xtc_probability": 0.5, "mirostat": 2}, {"xtc_probability": 0.5}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64}, {"repetition_penalty": 1.1, "penalty_window": 64}),
        ({"penalty_repeat": 1.1, "penalty_last_n": -1}, {"repetition_penalty": 1.1, "penalty_window": 0}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 0}, {}),
        ({"top_k": -1, "temp": 0}, {"top_k": 0, "temperature": 0}),
    ],
)  # fmt: skip
def test_gguf_sampling_keys_become_sampling_parameters(given: dict[str, Any], found: dict[str, float]) -> None:
    assert sampling_defaults({f"general.sampling.{key}": value for key, value in given.items()}) == found


@pytest.mark.parametrize("value", [3.0, -1.0, float("nan"), float("inf"), "0.5", True, [0.5], b"x"])
def test_invalid_gguf_sampling_value_is_logged_and_ignored(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = sampling_defaults({"general.sampling.temp": value, "general.sampling.top_p": 0.5})
    assert found == {"top_p": 0.5} and "general.sampling.temp is ignored" in caplog.text


def test_file_defaults_apply_only_to_unset_parameters() -> None:
    defaults = {"temperature": 0.9, "top_k": 20}
    assert SamplingParams(top_p=0.5).with_defaults(defaults) == SamplingParams(top_p=0.5, temperature=0.9, top_k=20)
    assert SamplingParams(temperature=0.0, top_k=3).with_defaults(defaults) == SamplingParams(temperature=0.0, top_k=3)
    assert SamplingParams(given=("temperature",)).with_defaults(defaults) == SamplingParams(top_k=20)
    assert SamplingParams().with_defaults({}) == SamplingParams()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def model(**keys: tuple[Any, str]) -> Path:
        plain, added = synth._config_entries, {f"general.sampling.{key}": entry for key, entry in keys.items()}
        monkeypatch.setattr(synth, "_config_entries", lambda *rest: plain(*rest) | added)
        path = tmp_path / "model.gguf"
        synth.write_synthetic(path, layers=1, hidden=256, ffn=256, heads=4, kv_heads=1, vocab=4096)
        return path

    return model


def _text(engine: Engine, **params: Any) -> str:
    return "".join(event.text for event in engine.generate(QUESTION, SamplingParams(max_tokens=12, **params)))


def test_engine_samples_with_defaults_of_the_model_file(model: Callable[..., Path]) -> None:
    with Engine.load(model(temp=(0.0, "float32"), top_k=(1, "int32")), context_tokens=1024, threads=1) as engine:
        assert engine.info.sampling == {"temperature": 0.0, "top_k": 1}
        greedy = _text(engine, temperature=0.0)
        assert _text(engine, seed=1) == _text(engine, seed=2) == greedy
        chosen = {_text(engine, seed=seed, temperature=1.5, top_k=40) for seed in range(4)}
        assert chosen != {greedy}


@pytest.mark.parametrize("encoded", [str.encode, lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode()])
def test_chat_template_file_overrides_the_model_template(
    model: Callable[..., Path], tmp_path: Path, encoded: Any
) -> None:
    path = tmp_path / "own.jinja"
    path.write_bytes(encoded(TEMPLATE))
    with Engine.load(model(), context_tokens=1024, threads=1, chat_template_file=path) as engine:
        assert engine.info.chat_template == TEMPLATE
        assert engine.render(QUESTION).startswith("<|im_start|>user\nMy own: What is this?<|im_end|>\n")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{% for %}", "own.jinja: "),
        (b"nothing of a question", "own.jinja: "),
        (b"\xff", "own.jinja is not UTF-8 text"),
        (None, "own.jinja cannot be read: No such file"),
        (b"a" * 300_000, "own.jinja cannot be read: it is larger than"),
    ],
)
def test_invalid_chat_template_file_is_rejected_by_name(
    model: Callable[..., Path], tmp_path: Path, data: bytes | None, reason: str
) -> None:
    path = tmp_path / "own.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TemplateError) as caught:
        Engine.load(model(), context_tokens=1024, threads=1, chat_template_file=str(path))
    assert reason in str(caught.value)
