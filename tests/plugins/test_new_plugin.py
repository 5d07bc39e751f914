"""`notso plugin new` creates a project whose own tests pass, and which a server can load."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from plugins.installed_plugins import install

from notso.plugins.errors import PluginError
from notso.plugins.new_plugin import TEMPLATE, write_plugin
from notso.plugins.process import START_SECONDS, PluginProcess


def test_new_plugin_passes_its_tests_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "word-counter"
    written = write_plugin("word-counter", folder)
    assert {path.name for path in written} == {"pyproject.toml", "README.md", "word_counter.py", "test_plugin.py"}
    assert len(written) == len(list(TEMPLATE.iterdir()))
    assert not [path.name for path in written if "@" in path.read_text("utf-8")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert ran.returncode == 0 and "3 passed" in ran.stdout, ran.stdout + ran.stderr
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    install(tmp_path, monkeypatch, project["entry-points"]["notso.plugins"], folder)
    process = PluginProcess("word-counter")
    process.start()
    process.ready.wait(START_SECONDS)
    assert process.state == "on" and process.offer["tools"][0]["name"] == "word_counter_count_words"
    process.close()


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "a_b", "1a", "a-", "x" * 33])
def test_invalid_plugin_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PluginError, match="a plugin's name"):
        write_plugin(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_plugin("mine", tmp_path)
