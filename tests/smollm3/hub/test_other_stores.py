"""Models of Ollama, LM Studio and llama.cpp are listed by the names used there, and run from their location."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from notso.smollm3.errors import ModelFileError
from notso.smollm3.hub import registry
from notso.smollm3.hub.registry import is_smollm3, stored_models
from notso.system.files import cache_folder


def manifest(root: Path, name: str, content: bytes, layers: object = None) -> Path:
    """Add a file to Ollama's store under a name; return its path."""
    digest = hashlib.sha256(content).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(content)}
    license = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00", "size": 1}
    path.write_text(json.dumps({"schemaVersion": 2, "layers": [license, model] if layers is None else layers}))
    return blob


@pytest.fixture
def model() -> bytes:
    return registry.demo_path().read_bytes()


def test_models_of_every_store_are_listed(own_home: Path, model: bytes) -> None:
    llama = model.replace(b"\x07\0\0\0\0\0\0\0smollm3", b"\x05\0\0\0\0\0\0\0llama\0\0", 1)
    ollama = own_home / ".ollama/models"
    first = manifest(ollama, "registry.ollama.ai/library/smollm3/latest", model)
    manifest(ollama, "hf.co/somebody/My-SmolLM3-GGUF/Q6_K", model + b"2")
    manifest(ollama, "registry.ollama.ai/library/llama3/8b", llama)
    llama_cpp = cache_folder(own_home) / "llama.cpp"
    kept = {
        own_home / ".lmstudio/models/somebody/My-GGUF/tuned-Q8_0.gguf": model + b"3",
        own_home / ".lmstudio/models/somebody/My-GGUF/llama.gguf": llama,
        llama_cpp / "somebody_tuned-IQ4_XS.gguf": model + b"4",
        own_home / "hf/hub/models--a--b/snapshots/c/tuned-Q5_K.gguf": model + b"5",
    }
    for path, content in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (llama_cpp / "again.gguf").symlink_to(llama_cpp / "somebody_tuned-IQ4_XS.gguf")
    found = {each.name: (each.where, each.quantization) for each in registry.local_models() if each.name != "demo"}
    assert found == {
        "tuned-Q5_K": ("cache", "Q5_K"),
        "hf.co/somebody/My-SmolLM3-GGUF:Q6_K": ("ollama", "Q6_K"),
        "smollm3:latest": ("ollama", ""),
        "somebody/My-GGUF/tuned-Q8_0": ("lm studio", "Q8_0"),
        "again": ("llama.cpp", ""),
    }
    assert registry.resolve_model("SmolLM3:latest") == first
    with pytest.raises(ModelFileError, match="nor the name of an installed model"):
        registry.resolve_model("llama3:8b")


def test_stores_named_by_environment_work_without_a_home_directory(
    own_home: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(number: int) -> object:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("LLAMA_CACHE", str(own_home / "llama"))
    (own_home / "llama").mkdir()
    (own_home / "llama" / "SmolLM3.gguf").write_bytes(model)
    with pytest.raises(RuntimeError):
        Path.home()
    assert [each.name for each in stored_models()] == ["SmolLM3"]


def test_ollama_models_variable_changes_the_store(
    own_home: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(own_home / "elsewhere"))
    manifest(own_home / "elsewhere", "registry.ollama.ai/me/mine/v1", model)
    manifest(own_home / ".ollama/models", "registry.ollama.ai/library/smollm3/latest", model)
    assert [each.name for each in stored_models()] == ["me/mine:v1"]


def test_every_name_of_a_stored_file_selects_it(own_home: Path, model: bytes) -> None:
    ollama = own_home / ".ollama/models/manifests/registry.ollama.ai/library"
    blob = manifest(own_home / ".ollama/models", "registry.ollama.ai/library/smollm3/latest", model)
    (ollama / "copy").mkdir()
    (ollama / "copy/v2").write_bytes((ollama / "smollm3/latest").read_bytes())
    assert len(stored_models()) == 1
    assert registry.resolve_model("copy:v2") == registry.resolve_model("smollm3:latest") == blob


def test_ollama_model_with_an_adapter_is_not_run_without_it(own_home: Path, model: bytes) -> None:
    blob = manifest(own_home / ".ollama/models", "registry.ollama.ai/library/tuned/latest", model)
    assert registry.resolve_model("tuned:latest") == blob
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": blob.name.replace("-", ":")}
        for kind in ("model", "adapter")
    ]
    manifest(own_home / ".ollama/models", "registry.ollama.ai/library/tuned/latest", model, layers)
    assert stored_models() == []
    with pytest.raises(ModelFileError, match="nor the name of an installed model"):
        registry.resolve_model("tuned:latest")


@pytest.mark.parametrize(
    "layers",
    [
        [],
        {},
        [1],
        [{"mediaType": "application/vnd.ollama.image.model"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "md5:00"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": 7}],
    ],
)
def test_invalid_ollama_manifest_is_ignored(own_home: Path, model: bytes, layers: object) -> None:
    manifest(own_home / ".ollama/models", "registry.ollama.ai/library/smollm3/latest", model, layers)
    (own_home / ".ollama/models/manifests/registry.ollama.ai/library/smollm3/other").write_text("[" * 100_000)
    assert stored_models() == []


def test_unreadable_files_are_not_models(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "text.gguf").write_text("general.architecture smollm3")
    assert not is_smollm3(tmp_path / "pipe.gguf")
    assert not is_smollm3(tmp_path / "absent") and not is_smollm3(tmp_path) and not is_smollm3(tmp_path / "text.gguf")
    assert is_smollm3(registry.demo_path())
