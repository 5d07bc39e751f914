"""Conditions under which cached keys and values may be reused."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from notso.qtensor.gguf import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv import kv_cache
from notso.smollm3.kv import model_identity as module
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.kv.model_identity import cache_version, sampled_identity


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Copy the demo model."""
    return Path(shutil.copy(demo_path(), tmp_path / "model.gguf"))


def taken(path: Path, kv_format: KVFormat = "k8v8", context: int = 1024, status: os.stat_result | None = None) -> bytes:
    with GGUFFile.open(path) as file:
        file.status = status or file.status
        return cache_version(sampled_identity(file), SmolLM3Config.from_metadata(file.metadata), kv_format, context)


def test_cache_version_is_stable_for_the_same_file(model: Path) -> None:
    assert taken(model) == taken(model) and len(taken(model)) == 32


def test_cache_version_differs_for_each_kv_format(model: Path) -> None:
    assert len({taken(model, kv_format) for kv_format in KV_FORMATS}) == len(KV_FORMATS)


def test_cache_version_depends_on_context_only_through_rope(model: Path) -> None:
    """Above the trained 4,096 tokens, YaRN changes the rotation of all positions."""
    assert taken(model, context=1024) == taken(model, context=4096) != taken(model, context=4097)
    assert taken(model, context=4097) == taken(model, context=8192)


def test_cache_version_differs_for_changed_weights_with_same_status(model: Path) -> None:
    status = model.stat()
    before = taken(model, status=status)
    with GGUFFile.open(model) as file:
        last = len(file.tensors) - 1
    with model.open("r+b") as raw:
        raw.seek(-100, os.SEEK_END)
        byte = raw.read(1)[0]
        raw.seek(-100, os.SEEK_END)
        raw.write(bytes([byte ^ 1]))
    assert last > 0 and taken(model, status=status) != before


def test_cache_version_differs_after_mtime_change(model: Path) -> None:
    before = taken(model)
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))
    assert taken(model) != before


def test_cache_version_depends_on_config_and_arithmetic(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile.open(model) as file:
        config, identity = SmolLM3Config.from_metadata(file.metadata), sampled_identity(file)
    before = cache_version(identity, config, "f16", 100)
    assert cache_version(identity, replace(config, rms_norm_eps=1e-5), "f16", 100) != before
    monkeypatch.setattr(module, "ARITHMETIC", module.ARITHMETIC + 1)
    assert cache_version(identity, config, "f16", 100) != before


def test_engines_that_load_at_once_store_all_kv_formats(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that reads the stored formats first writes them last."""
    read, threads, file = kv_cache._read, list[threading.Thread](), GGUFFile.open(model)

    def read_slowly(folder: Path) -> dict[str, str]:
        stored = read(folder)
        if not threads:
            threads.append(threading.Thread(target=kv_cache.store_kv_format, args=(tmp_path, file, 2048, "k8v4")))
            threads[0].start()
            threads[0].join(0.05)  # blocks until the other one has finished
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(kv_cache, "_read", read_slowly)
        kv_cache.store_kv_format(tmp_path, file, 1024, "f16")
        threads[0].join()
    assert [kv_cache.load_kv_format(tmp_path, file, context) for context in (1024, 2048)] == ["f16", "k8v4"]
