"""A folder of Hugging Face's runs as a file does: it is converted once, and again when something in it has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden.random_models import RandomModel
from smollm3.conversion.hf_folder_of import write_folder

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
    return write_folder(model, tmp_path / "my model")


def made(home: Path) -> list[Path]:
    return sorted((home / "cache/notso/converted").glob("*"))


def test_it_is_converted_once(notso: Run, folder: Path, own_home: Path) -> None:
    ask = ["run", "--model", str(folder), "-t", "0", "-n", "3", "--no-think", "hello"]
    first = notso(*ask)
    assert first.code == 8 and "to Q4_K_M (once; " in first.err
    (file,) = made(own_home)
    assert file.name.startswith("my model-") and file.suffix == ".gguf"
    written = file.stat().st_mtime_ns
    second = notso(*ask)
    assert second.code == 8 and second.out == first.out and "made into" not in second.err
    assert file.stat().st_mtime_ns == written
    assert notso("inspect", str(folder)).code == 0 and made(own_home) == [file]
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    assert notso(*ask).out == first.out
    (newer,) = made(own_home)
    assert newer != file


def test_a_folder_that_is_no_model_is_refused_and_leaves_nothing(notso: Run, tmp_path: Path, own_home: Path) -> None:
    result = notso("run", "--model", str(tmp_path), "hello")
    assert result.code == 3 and "config.json" in result.err and made(own_home) == []
