"""Create a release from the current commit: `make release VERSION=0.2.0`, or

    python supply/release.py 0.2.0 [--dry-run]

Sets the version in pyproject.toml, moves CHANGELOG.md's Unreleased section to the new version, and commits both. Then
wheels, sources, the Debian package, SBOM and Homebrew formula are built from that commit into dist/, with provenance
and SHA-256 sums, and the commit is tagged. If the build fails, the commit is undone. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import provenance
from target import ROOT

OPEN = "## [Unreleased]\n"


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def refusal(root: Path, version: str) -> str | None:
    """Return why a version cannot be released from a checkout, or None if it can."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"{version!r} is not a version such as 1.2.3"
    if git(root, "status", "--porcelain"):
        return "there are uncommitted changes"
    released = [tag.removeprefix("v") for tag in git(root, "tag", "--list", "v*.*.*").splitlines()]
    if released and numbers(version) <= max(map(numbers, released)):
        return f"{max(released, key=numbers)} is already released"
    if not re.search(r"^- ", unreleased((root / "CHANGELOG.md").read_text()), re.MULTILINE):
        return "CHANGELOG.md has nothing under Unreleased"
    return None


def unreleased(changelog: str) -> str:
    return changelog.partition(OPEN)[2].partition("\n## [")[0]


def changed(root: Path, version: str, day: str) -> dict[Path, str]:
    """Return the new contents of the files that contain the version."""
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    said, count = re.subn(r'^version = "[^"]+"$', f'version = "{version}"', project.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"pyproject.toml must have one version line, not {count}")
    return {project: said, changelog: changelog.read_text().replace(OPEN, f"{OPEN}\n## [{version}] - {day}\n", 1)}


def build(root: Path, version: str) -> None:
    """Build all files to publish in dist/."""
    dist = root / "dist"
    for old in dist.glob(f"*{version}*"):
        old.unlink()
    parts = ["wheels", "sbom", *(["deb"] if shutil.which("dpkg-deb") else [])]
    subprocess.run(["make", "--no-print-directory", *parts], cwd=root, check=True)
    if "deb" not in parts:
        print("no Debian package, because dpkg-deb is not installed")
    shutil.copy(root / "build" / "sbom.json", dist / f"notso_smollm3_bot-{version}.cdx.json")
    (sources,) = dist.glob(f"*-{version}.tar.gz")
    formula = (root / "deploy" / "notso.rb").read_text()
    (dist / f"notso-{version}.rb").write_text(
        formula.replace("@SOURCES@", sources.name).replace("@SHA256@", hashlib.sha256(sources.read_bytes()).hexdigest())
    )
    made = sorted(path for path in dist.glob(f"*{version}*") if path.is_file())
    told = dist / f"notso_smollm3_bot-{version}.intoto.json"
    provenance.write(root, version, git(root, "rev-parse", "HEAD"), made, told)
    made = sorted([*made, told])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (dist / "SHA256SUMS").write_text("".join(sums))


def release(root: Path, version: str, day: str, build: Callable[[Path, str], None]) -> None:
    """Commit, build and tag. If the build fails, undo the commit."""
    for path, text in changed(root, version, day).items():
        path.write_text(text)
    git(root, "commit", "--all", "--message", f"Release {version}")
    try:
        build(root, version)
    except BaseException:
        git(root, "reset", "--hard", "HEAD~1")
        raise
    git(root, "tag", "--annotate", f"v{version}", "--message", f"Release {version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="print the planned release without changing anything")
    options = parser.parse_args()
    if why := refusal(ROOT, options.version):
        raise SystemExit(f"cannot release: {why}")
    if options.dry_run:
        print(f"would release {options.version} with these changes:\n{unreleased((ROOT / 'CHANGELOG.md').read_text())}")
        return
    release(ROOT, options.version, datetime.now(UTC).date().isoformat(), build)
    print(f"tagged v{options.version}; publish it with `git push --follow-tags`; the files are in dist/")


if __name__ == "__main__":
    main()
