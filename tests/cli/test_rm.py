"""`notso rm` removes a downloaded model under all its names, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.hub import registry

Run = Callable[..., Any]


@pytest.fixture
def fetched(fake_hub: Any, official_file: registry.KnownFile, notso: Run) -> Path:
    return Path(notso("pull", "small").out.strip())


@pytest.mark.parametrize("name", ["small:Q4_K_M", "Q4_K_M", "SMALL", "PATH"])
def test_downloaded_file_is_removed_and_can_be_downloaded_again(notso: Run, fetched: Path, name: str) -> None:
    blob, repository = fetched.resolve(), fetched.parents[2]
    other = repository / "snapshots" / ("f" * 40) / "Another name.gguf"
    other.parent.mkdir()
    other.symlink_to(blob)
    kept = fetched.with_name("README.md")
    kept.write_text("kept")
    result = notso("rm", str(fetched) if name == "PATH" else name, "--yes")
    assert result.code == 0 and "3.0 MB freed" in result.err
    assert not blob.exists() and not fetched.is_symlink() and not other.parent.exists()
    assert kept.read_text() == "kept"
    assert "small" not in notso("list").out
    assert notso("pull", "small").code == 0 and fetched.resolve().is_file()


def test_file_in_a_folder_of_its_repository_is_listed_and_removed(
    fake_hub: Any, own_home: Path, notso: Run, small_model: Path
) -> None:
    fake_hub.content = small_model.read_bytes()
    lfs = {"size": len(fake_hub.content), "sha256": hashlib.sha256(fake_hub.content).hexdigest()}
    file = {"rfilename": "Q6/a/Tuned-Q6_K.gguf", "lfs": lfs}
    fake_hub.listing = json.dumps({"id": "somebody/Mine", "sha": "1" * 40, "siblings": [file]}).encode()
    path = Path(notso("pull", "somebody/Mine").out.strip())
    (path.parent / "Tuned-BF16-00001-of-00002.gguf").write_bytes(fake_hub.content)
    listed = notso("list").out
    assert str(path) in listed and "00001" not in listed
    (path.parent / "Tuned-BF16-00001-of-00002.gguf").unlink()
    blob = path.resolve()
    assert notso("rm", "tuned-q6_k", "--yes").code == 0
    assert not blob.exists() and not [*path.parents[3].iterdir()]
    assert path.parents[3].name == "snapshots"


def test_rm_without_terminal_requires_yes_option(notso: Run, fetched: Path) -> None:
    result = notso("rm", "small")
    assert result.code == 2 and "--yes" in result.err and fetched.is_file()


@pytest.mark.parametrize(
    ("name", "told"), [("demo", "part of the program"), ("nothing", "there is no model"), ("../x", "there is no model")]
)
def test_rm_refuses_the_demo_and_unknown_models(notso: Run, own_home: Path, name: str, told: str) -> None:
    result = notso("rm", name, "--yes")
    assert result.code == 2 and told in result.err and result.err.count("\n") == 1


def test_rm_refuses_files_of_other_programs(
    notso: Run, own_home: Path, monkeypatch: pytest.MonkeyPatch, small_model: Path
) -> None:
    folder = own_home / ".lmstudio" / "models" / "somebody" / "SmolLM3-GGUF"
    folder.mkdir(parents=True)
    file = folder / "SmolLM3-X-Q4_K_M.gguf"
    file.write_bytes(small_model.read_bytes())
    listed = notso("list").out
    assert "SmolLM3-X" in listed, listed
    result = notso("rm", str(file), "--yes")
    assert result.code == 2 and "remove it in LM Studio" in result.err and file.is_file()
