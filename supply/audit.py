"""Audit the packages in this virtual environment: `make audit`.

Checked offline: versions match the lock files and are not below the minimums, installed files match their packages'
records, no startup file (such as a .pth) but our own exists, and the licenses of the runtime dependencies are allowed.
Checked online by pip-audit: known vulnerabilities. Exit codes: 0 nothing found, 1 something found, 3 nothing found, but
the online check was not possible.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lock import locked

FOLDER = Path(__file__).parent
FOUND, NOT_ASKED = 1, 3
OURS = "notso-smollm3-bot"
OUR_START_FILE = "_editable_skbc_notso_smollm3_bot.pth"
INSTALLED_GROUPS = ("build", "run", "dev")
ASK_SECONDS = 300

FLOORS = {
    "starlette": "1.0.1",
    "fastapi": "0.165",  # earlier versions split server-sent events at U+2028
    "jinja2": "3.1.6",  # earlier versions have sandbox escapes
    "h11": "0.16",
    "python-multipart": "0.0.27",
}
"""Minimum versions, because of fixes. The lock files have newer ones."""

LICENSES = re.compile(
    r"MIT|BSD|Apache|ISC|0BSD|PSF|Python Software Foundation|MPL-2\.0|Mozilla Public|Unlicense|CC0|Zlib|CNRI",
    re.IGNORECASE,
)
UNWANTED_LICENSES = re.compile(r"\bA?GPL|Affero|SSPL|BUSL|Commons Clause", re.IGNORECASE)


def name_of(distribution: importlib.metadata.Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:4]))


def versions(installed: Iterable[importlib.metadata.Distribution], pinned: dict[str, str]) -> Iterator[str]:
    """Yield packages whose version differs from the lock files, and those below the minimum."""
    for distribution in installed:
        name, version = name_of(distribution), distribution.version
        if name != OURS and pinned.get(name) != version:
            yield f"{name} {version} is installed, but the lock files have {pinned.get(name, 'none')}"
        if name in FLOORS and numbers(version) < numbers(FLOORS[name]):
            yield f"{name} {version} is older than {FLOORS[name]}"


def changed_files(installed: Iterable[importlib.metadata.Distribution]) -> Iterator[str]:
    """Yield files that differ from their package's record."""
    for distribution in installed:
        record = distribution.read_text("RECORD")  # from Python 3.12, `files` omits missing files
        if record is None:
            yield f"{name_of(distribution)} has no RECORD of its files"
        for file, recorded, _ in csv.reader((record or "").splitlines()):
            if not recorded:
                continue  # compiled code and the record itself
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                yield f"{name_of(distribution)}: {file} is missing"
                continue
            algorithm, _, value = recorded.partition("=")
            digest = base64.urlsafe_b64encode(hashlib.new(algorithm, path.read_bytes()).digest())
            if digest.decode().rstrip("=") != value:
                yield f"{name_of(distribution)}: {file} was changed after installation"


def start_files(folder: Path) -> Iterator[str]:
    """Yield files that Python runs at every start."""
    for path in sorted([*folder.glob("*.pth"), *folder.glob("sitecustomize*"), *folder.glob("usercustomize*")]):
        if path.name != OUR_START_FILE:
            yield f"{path.name} runs at every start of Python"


def licenses(installed: Iterable[importlib.metadata.Distribution]) -> Iterator[str]:
    """Yield packages whose license is not in the list, or is incompatible with ours."""
    for distribution in installed:
        said = license_of(distribution)
        if UNWANTED_LICENSES.search(said) or not LICENSES.search(said):
            yield f"{name_of(distribution)}: license {said[:60]!r}"


def license_of(distribution: importlib.metadata.Distribution) -> str:
    """Return the license in a package's metadata, from the first of three fields."""
    about = distribution.metadata
    classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or () if "License ::" in text]
    return about.get("License-Expression") or ", ".join(classified) or (about.get("License") or "none").splitlines()[0]


def vulnerabilities(program: Path) -> list[str] | None:
    """Return known vulnerabilities of the locked packages; None, with the reason on stderr, if the check failed."""
    if not program.is_file():
        print("pip-audit is not installed", file=sys.stderr)
        return None
    asked = [part for group in INSTALLED_GROUPS for part in ("--requirement", str(FOLDER / f"{group}.txt"))]
    command = [str(program), "--format", "json", "--progress-spinner", "off", "--disable-pip", "--no-deps", *asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
        answer = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        said = (
            done.stderr.strip().splitlines()[-1:] if not isinstance(error, subprocess.TimeoutExpired) else ["no answer"]
        )
        print(*said, file=sys.stderr)
        return None
    return judged(answer)


def judged(answer: list[dict[str, object]]) -> list[str] | None:
    """Return pip-audit's findings as lines, or None if it skipped a package."""
    skipped = [str(each["name"]) for each in answer if "skip_reason" in each]
    if skipped or not answer:
        print("pip-audit skipped", ", ".join(skipped) or "all packages", file=sys.stderr)
        return None
    return [f"{each['name']} {each['version']}: {flaw['id']}" for each in answer for flaw in each["vulns"]]  # type: ignore[attr-defined]


def main(program: Path) -> int:
    """Run all checks and print their results. Return the exit code."""
    installed = list(importlib.metadata.distributions())
    pinned = {
        name: version for group in INSTALLED_GROUPS for name, (version, _) in locked(FOLDER / f"{group}.txt").items()
    }
    run = set(locked(FOLDER / "run.txt"))
    needed = [each for each in installed if name_of(each) in run]
    checks = {
        f"versions of {len(installed)} packages": versions(installed, pinned),
        f"files of {len(installed)} packages": changed_files(installed),
        "startup files": start_files(Path(sysconfig.get_path("purelib"))),
        f"licenses of {len(needed)} runtime dependencies": licenses(needed),
    }
    found = 0
    for what, problems in checks.items():
        listed = list(problems)
        found += len(listed)
        print(f"{what}: {'ok' if not listed else f'{len(listed)} found'}")
        print(*(f"  {problem}" for problem in listed), sep="\n", end="\n" if listed else "")
    known = vulnerabilities(program)
    if known is None:
        print("vulnerabilities: NOT CHECKED, because pip-audit gave no result")
        return FOUND if found else NOT_ASKED
    print(f"vulnerabilities: {'none known' if not known else f'{len(known)} found'}")
    print(*(f"  {problem}" for problem in known), sep="\n", end="\n" if known else "")
    return FOUND if found or known else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
