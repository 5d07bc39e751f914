"""Which model files are found, their names, and which of them are considered verified."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.errors import InvalidRequestError, ModelFileError
from notso.smollm3.hub import registry
from notso.smollm3.hub.download import plan_download, pull

CACHE_SETTINGS: list[dict[str, str]] = [
    {},
    {"XDG_CACHE_HOME": "/x/cache"},
    {"HF_HOME": "/x/hf"},
    {"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/x/cache"},
    {"HF_HOME": "$HOME/hf"},
    {"HF_HOME": "~no-such-user/hf"},
    {"HUGGINGFACE_HUB_CACHE": "/x/old"},
    {"HF_HUB_CACHE": "/x/new", "HUGGINGFACE_HUB_CACHE": "/x/old", "HF_HOME": "/x/hf"},
]


def test_hub_cache_path_matches_huggingface_hub(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # huggingface_hub reads these variables when it is imported, so each setting needs a separate process.
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name)
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    clean = dict(os.environ)
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env={**clean, **setting}, stdout=subprocess.PIPE, text=True)
        for setting in CACHE_SETTINGS
    ]
    for run, setting in zip(runs, CACHE_SETTINGS, strict=True):
        with monkeypatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, value)
            assert registry.hub_cache() == Path(run.communicate()[0].strip()), setting


@pytest.mark.parametrize(
    "name",
    [
        "smollm3-3b:Q8_0",
        "SmolLM3:q8_0",
        "Q8_0",
        "q8_0",
        "SmolLM3-Q8_0.gguf",
        "ggml-org/SmolLM3-3B-GGUF:Q8_0",
        " smollm3-3b:Q8_0 ",
    ],
)
def test_known_file_has_several_names(name: str) -> None:
    assert registry.known_file(name).filename == "SmolLM3-Q8_0.gguf"


@pytest.mark.parametrize("name", ["smollm3-3b", "smollm3", "ggml-org/SmolLM3-3B-GGUF", "Q4_K_M"])
def test_name_without_quantization_selects_the_smaller_file(name: str) -> None:
    assert registry.known_file(name).filename == "SmolLM3-Q4_K_M.gguf"


@pytest.mark.parametrize("name", ["", "llama", "smollm3-3b:Q2_K", "somebody/SmolLM3-3B-GGUF:Q8_0", "../../etc/passwd"])
def test_unknown_name_error_lists_the_choices(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="choices: smollm3-3b:Q4_K_M, smollm3-3b:Q8_0"):
        registry.known_file(name)


@pytest.mark.parametrize(
    ("filename", "quantization"),
    [
        ("SmolLM3-Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM3-3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("smollm3-3b.iq4_xs.gguf", "iq4_xs"),
        ("SmolLM3-3B-BF16.gguf", "BF16"),
        ("demo.gguf", None),
        ("QA-model.gguf", None),
    ],
)
def test_quantization_is_read_from_the_file_name(filename: str, quantization: str | None) -> None:
    assert registry.quantization_in(filename) == quantization


def cached(file: registry.KnownFile, content: bytes, revision: str | None = None) -> Path:
    path = registry.repository_folder(file) / "snapshots" / (revision or file.revision) / file.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_model_is_chosen_by_option_variable_cache_then_demo(
    fake_hub: Any, official_file: registry.KnownFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.resolve_model() is None
    pulled = cached(official_file, fake_hub.content)
    assert registry.resolve_model() == pulled

    named, given = tmp_path / "named.gguf", tmp_path / "given.gguf"
    named.touch()
    given.touch()
    monkeypatch.setenv("NOTSO_MODEL", str(named))
    assert registry.resolve_model() == named
    assert registry.resolve_model(given) == given


def test_missing_model_name_is_an_error(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match="neither a model file nor the name"):
        registry.resolve_model("missing.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        registry.resolve_model(own_home)
    monkeypatch.setenv("NOTSO_MODEL", "missing.gguf")
    with pytest.raises(ModelFileError, match="neither a model file nor the name"):
        registry.resolve_model()


def test_incomplete_file_in_the_cache_is_not_used(fake_hub: Any, official_file: registry.KnownFile) -> None:
    cached(official_file, fake_hub.content[:-1])

    assert registry.find_local(official_file) is None
    assert [model.verified for model in registry.local_models() if model.where == "cache"] == ["wrong size"]


def test_file_of_another_revision_is_used(fake_hub: Any, official_file: registry.KnownFile) -> None:
    path = cached(official_file, fake_hub.content, revision="e" * 40)

    assert registry.find_local(official_file) == path


def test_only_hashed_files_are_listed_as_verified(
    fake_hub: Any, official_file: registry.KnownFile, tmp_path: Path
) -> None:
    path = cached(official_file, fake_hub.content)
    (tmp_path / "other-Q8_0.gguf").write_bytes(b"GGUF")

    def listed() -> list[tuple[str, str, str]]:
        return [(m.name, m.where, m.verified) for m in registry.local_models([tmp_path]) if m.where != "built in"]

    assert listed() == [("small:Q4_K_M", "cache", "no"), ("other-Q8_0", "folder", "no")]
    registry.store_hash(path, registry.sha256_of(path))
    assert listed()[0] == ("small:Q4_K_M", "cache", "yes")


def test_remembered_hash_is_dropped_when_the_file_changes(own_home: Path) -> None:
    path = own_home / "model.gguf"
    path.write_bytes(b"one")
    registry.store_hash(path, "a" * 64)
    assert registry.stored_hash(path) == "a" * 64

    path.write_bytes(b"three")
    assert registry.stored_hash(path) is None
    path.write_bytes(b"one")
    os.utime(path, ns=(1, 1))
    assert registry.stored_hash(path) is None


@pytest.mark.parametrize(
    "ledger", ["", "not json", "[]", "null", json.dumps({"/x": 3}), pytest.param("[" * 100_000, id="deep")]
)
def test_damaged_ledger_is_treated_as_empty(own_home: Path, ledger: str) -> None:
    path = own_home / "model.gguf"
    path.write_bytes(b"one")
    registry._ledger_path().parent.mkdir(parents=True)
    registry._ledger_path().write_text(ledger)

    assert registry.stored_hash(path) is None
    registry.store_hash(path, "b" * 64)
    assert registry.stored_hash(path) == "b" * 64


def test_hashes_can_be_read_by_other_users(own_home: Path) -> None:
    """If root writes the file in the home folder of another user, that user must be able to read it."""
    path = own_home / "model.gguf"
    path.write_bytes(b"one")
    registry.store_hash(path, "d" * 64)
    assert registry._ledger_path().stat().st_mode == path.stat().st_mode


def test_store_hash_ignores_an_unwritable_cache(own_home: Path) -> None:
    path = own_home / "model.gguf"
    path.write_bytes(b"one")
    (own_home / "cache").write_text("a file where a folder should be")

    registry.store_hash(path, "c" * 64)
    assert registry.stored_hash(path) is None


def test_concurrent_store_hash_calls_keep_all_hashes(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download that starts first ends last."""
    paths = [own_home / name for name in ("a.gguf", "b.gguf")]
    for path in paths:
        path.write_bytes(b"x")
    read, threads = registry._read_ledger, list[threading.Thread]()

    def read_slowly() -> Any:
        ledger = read()
        if not threads:
            threads.append(threading.Thread(target=registry.store_hash, args=(paths[1], "b" * 64)))
            threads[0].start()
            threads[0].join(0.05)  # blocks until the other one has finished
        return ledger

    with monkeypatch.context() as patched:
        patched.setattr(registry, "_read_ledger", read_slowly)
        registry.store_hash(paths[0], "a" * 64)
        threads[0].join()
    assert [registry.stored_hash(path) for path in paths] == ["a" * 64, "b" * 64]


def linked(repository: str, revision: str, filename: str, content: bytes, at: int) -> Path:
    """Store a file as huggingface_hub does."""
    folder = registry.hub_cache() / f"models--{repository.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    path = folder / "snapshots" / revision / filename
    for each in (blob, path):
        each.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path.symlink_to(blob)
    os.utime(path, (at, at), follow_symlinks=False)
    return path


def test_other_content_of_equal_size_is_not_the_official_file(fake_hub: Any, official_file: registry.KnownFile) -> None:
    other = linked(official_file.repository, "a" * 40, official_file.filename, bytes(official_file.size_bytes), 1)
    assert registry.find_local(official_file) is None and registry.resolve_model() is None
    assert [each.name for each in registry.local_models() if each.path == other] == [other.stem]
    pulled = pull(official_file)  # the earlier file is not taken for a damaged download
    assert pulled.path.read_bytes() == fake_hub.content
    assert registry.resolve_model(official_file.name) == registry.resolve_model() == pulled.path


def test_latest_download_of_a_repository_is_used_by_name(own_home: Path) -> None:
    name = "SmolLM3-Tuned-Q6_K.gguf"
    linked("somebody/Tuned", "a" * 40, name, b"first", 1)
    latest = linked("somebody/Tuned", "b" * 40, name, b"third", 3)
    linked("somebody/Tuned", "c" * 40, name, b"second", 2)
    assert registry.resolve_model(Path(name).stem) == latest
    linked("other/Tuned", "a" * 40, name, b"other", 4)
    with pytest.raises(ModelFileError, match=r"several files are named smollm3-tuned-Q6_K; specify the path"):
        registry.resolve_model("smollm3-tuned-Q6_K")


def test_name_of_several_files_of_a_snapshot_is_refused(own_home: Path) -> None:
    name = "SmolLM3.gguf"
    linked("somebody/Tuned", "b" * 40, f"first/{name}", b"before it was moved", 1)
    first = linked("somebody/Tuned", "a" * 40, f"second/{name}", b"two", 2)
    assert registry.resolve_model("SmolLM3") == first
    linked("somebody/Tuned", "a" * 40, f"third/{name}", b"three", 3)
    with pytest.raises(ModelFileError, match="several files are named SmolLM3; specify the path"):
        registry.resolve_model("SmolLM3")


def test_only_file_of_a_split_model_is_listed(own_home: Path) -> None:
    for number in ("00001-of-00001", "00001-of-00002"):
        linked("somebody/Tuned", "a" * 40, f"SmolLM3-{number}.gguf", b"model", 1)
    assert [each.name for each in registry.local_models() if each.where == "cache"] == ["SmolLM3-00001-of-00001"]


def test_entries_that_cannot_be_read_are_skipped(own_home: Path) -> None:
    folders = ["own", "hf/hub/models--a--b/snapshots/c", ".lmstudio/models/a/b", "cache/llama.cpp"]
    for number, name in enumerate(folders):
        folder = own_home / name
        folder.mkdir(parents=True)
        (folder / f"SmolLM3-{number}.gguf").write_bytes(registry.demo_path().read_bytes())
        (folder / "SmolLM3-bad.gguf").symlink_to("a" * 300)
    (own_home / "hf/hub/models--a--bad").symlink_to("a" * 300)
    (own_home / ".lmstudio/models/bad").symlink_to("a" * 300)
    found = [each.name for each in registry.local_models([own_home / folders[0], own_home / ("a" * 300)])]
    assert found == ["demo", "SmolLM3-1", "a/b/SmolLM3-2", "SmolLM3-3", "SmolLM3-0"]


def test_models_are_found_without_a_home_directory(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_home)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert [each.name for each in registry.local_models()] == ["demo"]
    assert registry.resolve_model() is None
    assert registry.stored_hash(registry.demo_path()) is None


def test_unreadable_cache_is_like_an_empty_one(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(own_home / ("a" * 300)))
    assert [each.name for each in registry.local_models()] == ["demo"]
    assert registry.resolve_model() is None and registry.cached_files("a/b") == []
    assert plan_download(registry.KNOWN_FILES[0]).have_bytes == 0


def test_snapshot_with_undecodable_name_is_listed(own_home: Path) -> None:
    snapshot = registry.hub_cache() / "models--a--b" / "snapshots" / "r\udcff"
    snapshot.mkdir(parents=True)
    (snapshot / "smollm3-x.gguf").touch()
    assert snapshot / "smollm3-x.gguf" in [each.path for each in registry.local_models()]
