"""The check runs what failed once more, alone: what passes then is named as flaky, what fails twice has failed."""

from __future__ import annotations

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
    """The house's Makefile on the tests of another folder, with nothing to install."""
    python = Path(sys.executable)
    venv = python.parent.parent
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "-o", f"{venv}/.dev", f"VENV={venv}"]
    given = [*command, "PARTS=test-engine", "FOLDERS=.", "AGAIN=1", *arguments]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("source", "checked", "again", "named"),
    [
        (FAILS_ONCE, True, True, True),
        (FAILS_ALWAYS, True, False, False),
        (BROKEN, False, False, False),
        ("def test_good() -> None:\n    pass\n", True, True, False),
    ],
    ids=["once", "always", "broken", "good"],
)
def test_what_fails_runs_once_more(tmp_path: Path, source: str, checked: bool, again: bool, named: bool) -> None:
    (tmp_path / "test_it.py").write_text(source)
    first = make(tmp_path, "test-engine")
    assert (first.returncode == 0) is checked, first.stdout + first.stderr
    if checked:
        second = make(tmp_path, "again")
        assert (second.returncode == 0) is again, second.stdout + second.stderr
        assert ("flaky: test_it.py::test_shaky\n" in second.stdout) is named
        assert "test_good" not in second.stdout


def test_a_part_run_by_hand_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    assert make(tmp_path, "test-engine", "AGAIN=").returncode != 0
