"""`make freeze` masks ids and times in its records, and finds all other differences."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from freeze import record

ROOT = Path(__file__).parents[2]


def test_record_is_not_compared_with_itself(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for name in ("Makefile", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "All")
    commit = run("git", "rev-parse", "--short", "HEAD").stdout.strip()
    kept = tmp_path / f"build/freeze/{commit}/pages.txt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    for against in (f"./build/freeze/{commit}/", "build/freeze/absent"):
        done = run("make", "freeze", f"AGAINST={against}", "VENV=.venv", "-o", ".venv/.dev", "BIN=absent")
        assert f"AGAINST={against} must be the record of another state" in done.stdout, done.stderr
        assert done.returncode != 0 and kept.exists()
    (tmp_path / "Makefile").open("a").write("\n")
    done = run("make", "freeze", f"AGAINST=build/freeze/{commit}", "VENV=.venv", "-o", ".venv/.dev", "BIN=absent")
    assert "absent/python" in done.stderr and kept.exists()


def test_ids_ports_and_times_are_masked() -> None:
    one = '{"id":"chatcmpl-abcdef0123456789","created":1764100000,"total_duration":12.5e3} 127.0.0.1:4001 took 1.25 s'
    two = '{"id":"chatcmpl-0123456789abcdef","created":1764100001,"total_duration":7} 127.0.0.1:4002 took 13 s'
    assert record.masked(one) == record.masked(two)
    for changed in (one.replace("took", "needed"), one.replace("created", "made"), one + " "):
        assert record.masked(changed) != record.masked(two)


def test_difference_is_found_unless_listed_as_reworded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, word in ((old, "Look"), (new, "Theme")):
        folder.mkdir()
        (folder / "pages.txt").write_text(f"<h2>{word}</h2>\nsame\n")
    monkeypatch.setattr(record, "REWORDED", tmp_path / "reworded.tsv")
    assert record.compare(old, new) == 2 and "+<h2>Theme</h2>" in capsys.readouterr().out
    (tmp_path / "reworded.tsv").write_text("<h2>Look\t<h2>Theme\n")
    assert record.compare(old, new) == 0
    (new / "routes.txt").write_text("GET /more\n")
    assert record.compare(old, new) == 1
