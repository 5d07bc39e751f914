"""A Hugging Face folder can be run like a file. It is converted once, and again after a change in the folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden.random_models import RandomModel
from smollm3.conversion.hf_folder_of import write_folder

from notso.cli import terminal
from notso.smollm3.hub import registry

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
    return write_folder(model, tmp_path / "my model")


def made(home: Path) -> list[Path]:
    return sorted((home / "cache/notso/converted").glob("*"))


def test_model_folder_is_converted_once_until_changed(notso: Run, folder: Path, own_home: Path) -> None:
    ask = ["run", "--model", str(folder), "-t", "0", "-n", "3", "--no-think", "hello"]
    first = notso(*ask)
    assert first.code == 8 and "to Q4_K_M (takes minutes for the 3B model; the result is cached)" in first.err
    (file,) = made(own_home)
    assert file.name.startswith("my model-") and file.suffix == ".gguf"
    written = file.stat().st_mtime_ns
    second = notso(*ask)
    assert second.code == 8 and second.out == first.out and "to Q4_K_M" not in second.err
    assert file.stat().st_mtime_ns == written
    assert notso("inspect", str(folder)).code == 0 and made(own_home) == [file]
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    assert notso(*ask).out == first.out
    (newer,) = made(own_home)
    assert newer != file


def test_invalid_model_folder_is_refused_and_leaves_no_files(notso: Run, tmp_path: Path, own_home: Path) -> None:
    result = notso("run", "--model", str(tmp_path), "hello")
    assert result.code == 3 and "config.json" in result.err and made(own_home) == []


def model_status(notso: Run) -> tuple[str, str]:
    (found,) = [line for line in json.loads(notso("doctor", "--port", "0", "--json").out) if line["subject"] == "model"]
    return found["status"], found["message"]


def test_doctor_accepts_the_models_that_commands_run(
    demo_at_the_hub: object,
    fake_hub: Any,
    notso: Run,
    folder: Path,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("NOTSO_MODEL", str(folder))
    status, message = model_status(notso)
    assert status == "ok" and message.startswith(f"{folder} (") and made(own_home) == []
    monkeypatch.setenv("NOTSO_MODEL", "their/Model")
    assert model_status(notso)[0] == "fail" and not fake_hub.requests
    assert notso("pull", "their/Model").code == 0
    status, message = model_status(notso)
    assert status == "ok" and "Their-Q6_K.gguf" in message
    monkeypatch.setenv("NOTSO_MODEL", str(tmp_path))
    status, message = model_status(notso)
    assert status == "fail" and "config.json" in message
    (cached,) = registry.cached_files("their/Model")
    cached.with_name("Other-Q6_K.gguf").symlink_to(cached.resolve())
    monkeypatch.setenv("NOTSO_MODEL", "their/Model")
    status, message = model_status(notso)
    assert status == "fail" and "several files" in message


# Names of models that are not installed.


@pytest.fixture
def demo_at_the_hub(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> registry.KnownFile:
    """Replace the official file with the demo model."""
    fake_hub.content = registry.demo_path().read_bytes()
    sha256 = hashlib.sha256(fake_hub.content).hexdigest()
    name = "SmolLM3-Small-Q4_K_M.gguf"
    file = registry.KnownFile("small:Q4_K_M", "somebody/Small", "0" * 40, name, len(fake_hub.content), sha256)
    monkeypatch.setattr(registry, "KNOWN_FILES", (file,))
    large = {"size": file.size_bytes, "sha256": sha256}
    theirs = {"rfilename": "Their-Q6_K.gguf", "size": file.size_bytes, "lfs": large}
    fake_hub.listing = json.dumps({"id": "their/Model", "sha": "1" * 40, "siblings": [theirs]}).encode()
    return file


@pytest.mark.parametrize(("name", "again"), [("Q4_K_M", "small"), ("their/Model:q6_k", "their/Model")])
def test_fetch_option_downloads_the_model_once(
    fake_hub: Any, demo_at_the_hub: object, notso: Run, monkeypatch: pytest.MonkeyPatch, name: str, again: str
) -> None:
    ask = ("-t", "0", "-n", "3", "--no-think", "hello")
    refused = notso("run", "--model", name, *ask)
    assert refused.code == 3 and f"{name} is not installed; use `--fetch` to download it" in refused.err
    assert not fake_hub.requests
    first = notso("run", "--model", name, "--fetch", *ask)
    assert first.code == 8 and first.out, first.err
    asked = len(fake_hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for known in (name, again):
        assert notso("run", "--model", known, *ask).out == first.out
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("NOTSO_FETCH", "1")
    assert notso("run", "--model", again, *ask).out == first.out
    assert len(fake_hub.requests) == asked


@pytest.mark.parametrize("answer", ["y", "", "n"])
def test_download_is_confirmed_on_a_terminal(
    demo_at_the_hub: registry.KnownFile, notso: Run, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr(terminal, "progress", lambda **_: contextlib.nullcontext(lambda *_: None))
    result = notso("run", "--model", "Q4_K_M", "-n", "3", "--no-think", "hello", stdin=f"{answer}\n")
    assert f"small:Q4_K_M ({terminal.gigabytes(demo_at_the_hub.size_bytes)}) is not installed. Download" in result.err
    assert result.code == (3 if answer == "n" else 8)
    assert (registry.find_local(demo_at_the_hub) is None) == (answer == "n")


@pytest.mark.parametrize(("answers", "code"), [("n\n", 3), ("y\nn\n", 3), ("y\ny\n", 8)])
def test_names_are_sent_to_the_hub_only_after_confirmation(
    fake_hub: Any,
    demo_at_the_hub: object,
    notso: Run,
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
    code: int,
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr(terminal, "progress", lambda **_: contextlib.nullcontext(lambda *_: None))
    result = notso("run", "--model", "their/Model", "-n", "3", "--no-think", "hello", stdin=answers)
    assert "their/Model is not installed. Look for it on the Hugging Face Hub?" in result.err
    assert result.code == code and bool(fake_hub.requests) == answers.startswith("y")
    assert ("Download it now?" in result.err) == answers.startswith("y")


def test_paths_are_not_downloaded(fake_hub: Any, notso: Run) -> None:
    for path in ("models/x.gguf", "/a/b", "a/b/c"):
        result = notso("run", "--model", path, "--fetch", "hello")
        assert result.code == 3 and "is neither a model file nor the name" in result.err
    assert not fake_hub.requests


def test_a_context_beyond_the_maximum_is_reduced(notso: Run) -> None:
    result = notso("run", "--context", "1000000", "-n", "3", "--no-think", "hello")
    assert result.code == 8 and "The context length is 8,192 tokens, the maximum of this model." in result.err
