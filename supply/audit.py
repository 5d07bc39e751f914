"""Looks at what is installed in this virtual environment: `make audit`.

Offline: the versions are those of the lock files and not below the floors, every installed file is the one its package
recorded, nothing runs at the start of Python but what we put there, and every licence is known. Online: pip-audit asks
for known vulnerabilities. Exit code 0: nothing found; 1: something found; 3: nothing found, but nobody could be asked.
"""

from __future__ import annotations

import base64
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
    "fastapi": "0.165",  # earlier ones cut events at U+2028
    "jinja2": "3.1.6",  # ways out of the sandbox before
    "h11": "0.16",
    "python-multipart": "0.0.27",
}
"""Versions that mended something; the newest of them stand in the lock files anyway."""

LICENCES = re.compile(
    r"MIT|BSD|Apache|ISC|0BSD|PSF|Python Software Foundation|MPL-2\.0|Mozilla Public|Unlicense|CC0|Zlib|CNRI",
    re.IGNORECASE,
)
UNWANTED_LICENCES = re.compile(r"\bA?GPL|Affero|SSPL|BUSL|Commons Clause", re.IGNORECASE)


def name_of(distribution: importlib.metadata.Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:4]))


def versions(installed: Iterable[importlib.metadata.Distribution], pinned: dict[str, str]) -> Iterator[str]:
    """Packages that are not those of the lock files, and those below a floor."""
    for distribution in installed:
        name, version = name_of(distribution), distribution.version
        if name != OURS and pinned.get(name) != version:
            yield f"{name} {version} is installed, the lock files have {pinned.get(name, 'none')}"
        if name in FLOORS and numbers(version) < numbers(FLOORS[name]):
            yield f"{name} {version} is older than {FLOORS[name]}"


def changed_files(installed: Iterable[importlib.metadata.Distribution]) -> Iterator[str]:
    """Files that are not what their package says it installed."""
    for distribution in installed:
        if distribution.files is None:
            yield f"{name_of(distribution)} has no record of its files"
        for file in distribution.files or ():
            if file.hash is None:
                continue  # compiled code and the record itself
            path = Path(str(file.locate()))
            if not path.is_file():
                yield f"{name_of(distribution)}: {file} is missing"
                continue
            digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, path.read_bytes()).digest())
            if digest.decode().rstrip("=") != file.hash.value:
                yield f"{name_of(distribution)}: {file} was changed after it was installed"


def start_files(folder: Path) -> Iterator[str]:
    """What Python would run by itself whenever it starts here."""
    for path in sorted([*folder.glob("*.pth"), *folder.glob("sitecustomize*"), *folder.glob("usercustomize*")]):
        if path.name != OUR_START_FILE:
            yield f"{path.name} runs at every start of Python"


def licences(installed: Iterable[importlib.metadata.Distribution]) -> Iterator[str]:
    """Packages under a licence nobody has looked at, or one that does not go with ours."""
    for distribution in installed:
        said = licence_of(distribution)
        if UNWANTED_LICENCES.search(said) or not LICENCES.search(said):
            yield f"{name_of(distribution)}: licence {said[:60]!r}"


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """What a package says of its licence, in the first of three places."""
    about = distribution.metadata
    classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or () if "License ::" in text]
    return about.get("License-Expression") or ", ".join(classified) or (about.get("License") or "none").splitlines()[0]


def vulnerabilities(program: Path) -> list[str] | None:
    """What is known against the locked packages; None, with the reason on stderr, if nobody could be asked."""
    if not program.is_file():
        print("pip-audit is not here", file=sys.stderr)
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
    """pip-audit's answer as lines; None if it left out a package."""
    skipped = [str(each["name"]) for each in answer if "skip_reason" in each]
    if skipped or not answer:
        print("pip-audit could not look up", ", ".join(skipped) or "anything", file=sys.stderr)
        return None
    return [f"{each['name']} {each['version']}: {flaw['id']}" for each in answer for flaw in each["vulns"]]  # type: ignore[attr-defined]


def main(program: Path) -> int:
    """Print what was looked at and what was found."""
    installed = list(importlib.metadata.distributions())
    pinned = {
        name: version for group in INSTALLED_GROUPS for name, (version, _) in locked(FOLDER / f"{group}.txt").items()
    }
    run = set(locked(FOLDER / "run.txt"))
    checks = {
        "versions": versions(installed, pinned),
        "files": changed_files(installed),
        "start files": start_files(Path(sysconfig.get_path("purelib"))),
        "licences": licences(each for each in installed if name_of(each) in run),
    }
    found = 0
    for what, problems in checks.items():
        listed = list(problems)
        found += len(listed)
        print(f"{what}: {'ok' if not listed else f'{len(listed)} found'} ({len(installed)} packages)")
        print(*(f"  {problem}" for problem in listed), sep="\n", end="\n" if listed else "")
    known = vulnerabilities(program)
    if known is None:
        print("vulnerabilities: NOT ASKED, the service could not be reached; this says nothing about them")
        return FOUND if found else NOT_ASKED
    print(f"vulnerabilities: {'none known' if not known else f'{len(known)} found'}")
    print(*(f"  {problem}" for problem in known), sep="\n", end="\n" if known else "")
    return FOUND if found or known else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
