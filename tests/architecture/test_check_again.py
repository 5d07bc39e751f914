"""`make again` reruns failed tests: those that pass are reported as flaky, and those that fail fail the check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILS_ONCE = """
from pathlib import Path

def test_good() -> None:
    pass

def test_shaky() -> None:
    if not Path("seen").exists():
        Path("seen").touch()
        raise AssertionError
"""
FAILS_ALWAYS = "def test_bad() -> None:\n    assert not 1\n"
BROKEN = "import no_such_module\n"


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this project's Makefile on the tests of another folder, without installing anything."""
    python = Path(sys.executable)
    venv = python.parent.parent
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "-o", f"{venv}/.dev", f"VENV={venv}"]
    given = [*command, "FILES=.", "JOBS=1", "AGAIN=1", *arguments]
    few_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}  # loading others is slow
    env = os.environ | few_plugins
    return subprocess.run(given, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("source", "again", "named"),
    [
        (FAILS_ONCE, True, True),
        (FAILS_ALWAYS, False, False),
        (BROKEN, False, False),
        ("def test_good() -> None:\n    pass\n", True, False),
    ],
    ids=["once", "always", "broken", "good"],
)
def test_failed_tests_are_rerun_and_flaky_tests_reported(tmp_path: Path, source: str, again: bool, named: bool) -> None:
    (tmp_path / "test_it.py").write_text(source)
    first = make(tmp_path, "tests")
    assert first.returncode == 0, first.stdout + first.stderr
    second = make(tmp_path, "again")
    assert (second.returncode == 0) is again, second.stdout + second.stderr
    assert ("flaky: test_it.py::test_shaky\n" in second.stdout) is named
    assert "test_good" not in second.stdout


def test_failure_fails_the_check_without_a_rerun(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    assert make(tmp_path, "tests", "AGAIN=").returncode != 0
