"""Makes a release of what is committed: `make release VERSION=0.2.0`, or

    python supply/release.py 0.2.0 [--dry-run]

The version stands in pyproject.toml alone. What CHANGELOG.md has under Unreleased becomes the section of this version;
both are committed, then wheels, sources, the Debian package, bill of materials and formula are built from that commit
into dist/ with their provenance and SHA-256 sums, and only then it is tagged. Where the build fails the commit is taken
back. Nothing is pushed.
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
    """Why this version cannot be released from what is there; None if it can."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"{version!r} is no version: three numbers with points between them"
    if git(root, "status", "--porcelain"):
        return "there are changes that are not committed"
    released = [tag.removeprefix("v") for tag in git(root, "tag", "--list", "v*.*.*").splitlines()]
    if released and numbers(version) <= max(map(numbers, released)):
        return f"{max(released, key=numbers)} is released already"
    if not re.search(r"^- ", unreleased((root / "CHANGELOG.md").read_text()), re.MULTILINE):
        return "CHANGELOG.md has nothing under Unreleased"
    return None


def unreleased(changelog: str) -> str:
    return changelog.partition(OPEN)[2].partition("\n## [")[0]


def changed(root: Path, version: str, day: str) -> dict[Path, str]:
    """What the files that name the version say after it."""
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    said, count = re.subn(r'^version = "[^"]+"$', f'version = "{version}"', project.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit("pyproject.toml does not say its version once")
    return {project: said, changelog: changelog.read_text().replace(OPEN, f"{OPEN}\n## [{version}] - {day}\n", 1)}


def build(root: Path, version: str) -> None:
    """Everything that is published, in dist/."""
    dist = root / "dist"
    for old in dist.glob(f"*{version}*"):
        old.unlink()
    parts = ["wheels", "sbom", *(["deb"] if shutil.which("dpkg-deb") else [])]
    subprocess.run(["make", "--no-print-directory", *parts], cwd=root, check=True)
    if "deb" not in parts:
        print("dpkg-deb is not installed: no Debian package")
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
    """Commit, build, tag; without a tag there is no commit either."""
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
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    options = parser.parse_args()
    if why := refusal(ROOT, options.version):
        raise SystemExit(f"no release: {why}")
    if options.dry_run:
        print(f"would release {options.version} with:\n{unreleased((ROOT / 'CHANGELOG.md').read_text())}")
        return
    release(ROOT, options.version, datetime.now(UTC).date().isoformat(), build)
    print(f"v{options.version} is tagged; dist/ holds what to publish with `git push --follow-tags`")


if __name__ == "__main__":
    main()
