"""Each archive that the project is built from has a hash, and the supply-chain tools find faults."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import stat
from pathlib import Path
from typing import Any

import audit
import plant
import pytest
import sbom
from lock import FOLDER, GROUPS, ROOT, locked

LOCKS = {group: locked(FOLDER / f"{group}.txt") for group in GROUPS}
INSTALLED = {name: found for group in audit.INSTALLED_GROUPS for name, found in LOCKS[group].items()}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line]
    return {plain(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_lock_files_contain_exactly_the_pinned_versions() -> None:
    tools = {"uv": LOCKS["lock"]["uv"][0], "pip-audit": LOCKS["audit"]["pip-audit"][0]}
    assert {name: version for name, (version, _) in INSTALLED.items()} | tools == pins()
    shared = [LOCKS[group].keys() for group in audit.INSTALLED_GROUPS]
    assert sum(map(len, shared)) == len(INSTALLED), "the files overlap"


@pytest.mark.parametrize("group", GROUPS)
def test_every_line_of_a_lock_file_is_a_pin_or_a_hash(group: str) -> None:
    pattern = re.compile(
        r"#.*|[a-z0-9-]+==[0-9][0-9A-Za-z.]*( ; [a-z_'A-Z0-9!=<>. -]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?"
    )
    assert not [
        line for line in (FOLDER / f"{group}.txt").read_text("utf-8").splitlines() if not pattern.fullmatch(line)
    ]
    assert all(sums for _, sums in LOCKS[group].values())


def test_few_packages_are_needed_to_run() -> None:
    assert len(LOCKS["run"]) <= 50


def test_makefile_installs_only_the_project_without_hashes() -> None:
    made = (ROOT / "Makefile").read_text("utf-8")
    assert "LOCKED := install --require-hashes --no-deps -r\n" in made
    loose = [line for line in made.splitlines() if re.search(r"(PIP\)|-m pip\S*) .*\binstall\b", line)]
    assert [line.strip() for line in loose] == ["@$(PIP) install --no-deps --no-build-isolation -e ."]


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, Any]:
    """Create a package with one file; return its folder and its metadata."""
    about = tmp_path / "thing-1.0.dist-info"
    about.mkdir()
    (tmp_path / "thing.py").write_text("")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\nLicense-Expression: MIT\n")
    (about / "RECORD").write_text(
        "thing.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nthing-1.0.dist-info/RECORD,,\n"
    )
    return tmp_path, importlib.metadata.PathDistribution(about)


def test_a_changed_or_missing_file_is_found(package: tuple[Path, Any]) -> None:
    folder, thing = package
    assert not [*audit.changed_files([thing]), *audit.licenses([thing])]
    (folder / "thing.py").write_text("import os")
    assert list(audit.changed_files([thing])) == ["thing: thing.py was changed after installation"]
    (folder / "thing.py").unlink()
    assert list(audit.changed_files([thing])) == ["thing: thing.py is missing"]


def test_installed_version_other_than_the_locked_one_is_found(package: tuple[Path, Any]) -> None:
    assert list(audit.versions([package[1]], {"thing": "1.0"})) == []
    assert list(audit.versions([package[1]], {"thing": "1.1"})) == [
        "thing 1.0 is installed, but the lock files have 1.1"
    ]
    assert list(audit.versions([package[1]], {})) == ["thing 1.0 is installed, but the lock files have none"]


def test_python_startup_files_are_found(tmp_path: Path) -> None:
    for name in ("evil.pth", audit.OUR_START_FILE, "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).touch()
    assert [line.split()[0] for line in audit.start_files(tmp_path)] == [
        "evil.pth",
        "sitecustomize.py",
        "usercustomize.py",
    ]


def test_locked_versions_meet_minimums_and_have_known_licenses() -> None:
    low = [
        name
        for name, least in audit.FLOORS.items()
        if name in INSTALLED and audit.numbers(INSTALLED[name][0]) < audit.numbers(least)
    ]
    assert not low
    assert not list(audit.licenses(importlib.metadata.distribution(name) for name in LOCKS["run"]))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('echo \'{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}\'', []),
        (
            'echo \'{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]}\'; exit 1',
            ["a 1: CVE-1"],
        ),
        ('echo \'{"dependencies": [{"name": "a", "skip_reason": "not found"}]}\'', None),
        ("echo '{\"dependencies\": []}'", None),
        ("echo cannot connect >&2; exit 1", None),
    ],
)
def test_failed_audit_is_distinguished_from_no_vulnerabilities(
    tmp_path: Path, script: str, found: list[str] | None
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert audit.vulnerabilities(program) == found
    assert audit.vulnerabilities(tmp_path / "nothing") is None


def test_audit_states_what_it_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_files = audit.changed_files  # reading all installed files takes seconds
    monkeypatch.setattr(audit, "changed_files", lambda installed: changed_files(installed[:3]))
    assert audit.main(tmp_path / "nothing") in (audit.FOUND, audit.NOT_ASKED)
    said, reason = capsys.readouterr()
    assert re.search(r"^files of \d+ packages: ", said, re.MULTILINE)
    checked = re.search(r"^licenses of (\d+) runtime dependencies: ", said, re.MULTILINE)
    assert checked and 0 < int(checked[1]) <= len(LOCKS["run"])
    assert "because pip-audit gave no result" in said and reason == "pip-audit is not installed\n"


def test_unknown_change_to_plant_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown change: tree; the changes are parameter, "):
        plant.main(["tree"])


def test_bill_of_materials_lists_libraries_and_file_hashes() -> None:
    bill = sbom.bill()
    assert json.loads(json.dumps(bill)) == bill == sbom.bill()
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(set(references)) == len(references) and bill["dependencies"][0]["dependsOn"] == sorted(references)
    libraries = {each["name"]: each for each in bill["components"] if each["type"] == "library"}
    assert {name: each["version"] for name, each in libraries.items()} == {
        name: v for name, (v, _) in LOCKS["run"].items()
    }
    assert all(
        each["purl"] == f"pkg:pypi/{name}@{each['version']}" and each["properties"] for name, each in libraries.items()
    )
    files = {each["name"]: each["hashes"][0]["content"] for each in bill["components"] if each["type"] == "file"}
    there = [path for path in sbom.VENDOR.rglob("*") if path.is_file() and path.suffix not in (".md", ".LICENSE")]
    assert files == {str(p.relative_to(sbom.VENDOR)): hashlib.sha256(p.read_bytes()).hexdigest() for p in there}
