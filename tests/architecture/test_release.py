"""A release is rejected if something is missing, and undone if it fails; CI runs the same commands as developers."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

import provenance
import pytest
import yaml
from release import changed, git, refusal, release, unreleased
from target import ROOT, version

import notso

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a thing\n\n## [0.1.0] - 2026-01-01\n\n- all\n"
DAY = "2026-02-03"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository with two files and one release."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "me")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "me@localhost")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\nminimum-version = "1"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "all")
    git(tmp_path, "tag", "--annotate", "v0.1.0", "--message", "all")
    return tmp_path


def test_release_creates_changelog_section_commit_and_tag(house: Path) -> None:
    assert refusal(house, "0.2.0") is None
    seen = []
    release(house, "0.2.0", DAY, lambda root, v: seen.append((v, git(root, "status", "--porcelain"))))
    assert seen == [("0.2.0", "")], "builds must use the committed files"
    assert (house / "pyproject.toml").read_text() == '[project]\nversion = "0.2.0"\nminimum-version = "1"\n'
    text = (house / "CHANGELOG.md").read_text()
    assert unreleased(text).strip() == "" and f"## [0.2.0] - {DAY}\n\n### Added\n\n- a thing\n\n## [0.1.0]" in text
    assert git(house, "describe") == "v0.2.0" and git(house, "status", "--porcelain") == ""
    assert refusal(house, "0.3.0") == "CHANGELOG.md has nothing under Unreleased"


def test_provenance_lists_files_commit_and_lock_files(tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("b.whl", "a.tar.gz")]
    for path in made:
        path.write_text(path.name)
    commit = git(ROOT, "rev-parse", "HEAD")
    provenance.write(ROOT, "0.2.0", commit, made, tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    subjects = {each["name"]: each["digest"]["sha256"] for each in told["subject"]}
    assert subjects == {path.name: hashlib.sha256(path.name.encode()).hexdigest() for path in made}
    built = told["predicate"]["buildDefinition"]
    sources, *locks = built["resolvedDependencies"]
    assert sources["digest"] == {"gitCommit": commit}
    sums = {each["name"]: each["digest"]["sha256"] for each in locks}
    assert sums == {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in sums} and len(sums) == 3
    assert "ziglang" in built["internalParameters"]["tools"] and str(ROOT) not in json.dumps(told)


def test_a_build_that_fails_leaves_no_release(house: Path) -> None:
    before = git(house, "rev-parse", "HEAD")

    def fails(root: Path, version: str) -> None:
        raise subprocess.CalledProcessError(1, "make")

    with pytest.raises(subprocess.CalledProcessError):
        release(house, "0.2.0", DAY, fails)
    assert git(house, "rev-parse", "HEAD") == before and git(house, "tag") == "v0.1.0"
    assert (house / "CHANGELOG.md").read_text() == CHANGELOG


@pytest.mark.parametrize(
    ("wanted", "why"), [("0.1.0", "already released"), ("0.0.9", "already released"), ("1.0", "not a version")]
)
def test_invalid_or_released_version_is_refused(house: Path, wanted: str, why: str) -> None:
    assert why in str(refusal(house, wanted))


def test_uncommitted_changes_are_refused(house: Path) -> None:
    (house / "new").touch()
    assert refusal(house, "0.2.0") == "there are uncommitted changes"


def test_version_is_defined_in_one_place() -> None:
    assert notso.__version__ == version()
    files = changed(ROOT, "9.9.9", DAY)
    assert all("9.9.9" in text for text in files.values()) and len(files) == 2
    ours = [*(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").iterdir(), *(ROOT / "supply").glob("*.py")]
    said = re.compile(rf"(?<![\d.]){re.escape(version())}(?![\d.])")
    assert not [path.name for path in ours if path.name != "release.py" and said.search(path.read_text())]


def test_ci_steps_run_only_make_targets() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = [
        step["run"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) >= 5
    assert not [step for step in steps if step != ".ci/run" and step.removeprefix("make ") not in targets]
