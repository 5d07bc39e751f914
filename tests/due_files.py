"""Choose the test files that `make test` runs on a tree in which the whole suite has passed before.

    python tests/due_files.py    print the files to run; nothing if all are due

A file is due if its digest differs from the one with which it last passed in this tree. The digest covers the file, the
package at the corresponding path, direct and indirect imports of the test and of the module with its name, every file
and folder of the repository that these tests name, and the machine. `build/tests_passed.json` contains the digests and
is not committed, so a fresh clone runs everything. A tenth of the other files is drawn at random, because a digest does
not cover everything that a test depends on.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PASSED = ROOT / "build" / "tests_passed.json"
PLANNED = ROOT / "build" / "tests_planned.json"
SECONDS = ROOT / "build" / "tests_seconds.json"

ALWAYS = "tests/architecture/"
"""Tests of the whole repository, whose dependencies cannot be listed."""
DRAWN_OF = 10

EVERYWHERE = ("pyproject.toml", "supply/build.txt", "supply/run.txt", "supply/dev.txt", "tests/conftest.py")
DATA = {
    "src/notso/plugins": ("src/notso/plugins",),
    "src/notso/qtensor": ("CMakeLists.txt", "native", "src/notso/qtensor"),
    "src/notso/smollm3": ("src/notso/smollm3", "src/notso/demo"),
    "src/notso/web": ("src/notso/web",),
}
"""Folder of a package -> files and folders, other than Python modules, that the package reads or is built from."""
WHOLE = (
    "src/notso/cli/app.py",
    "src/notso/web/app.py",
    "tests/web/conftest.py",
    "tests/web/shared_between_servers.py",
)
"""Files that import the whole server or all commands. What a test reaches only through them is ignored; otherwise,
every change in the server would make every test that starts one due. Such a test depends on the package at the
corresponding path under src/, on the module with its name, and on files that it names; the remaining tests are drawn at
random. `make check` runs all tests."""
CHOOSERS = ("tests/due_files.py", "tests/long_tests.py")
"""Files that name folders only to choose tests."""
ROOTS = ("src", "tests")
"""Folders that tests name as the start of a path or on sys.path. Only what a test imports or names in them counts."""
PROGRAMS = (
    "c++",
    "chromium",
    "haproxy",
    "pgbouncer",
    "caddy",
    "psql",
    "redis-server",
    "valkey-server",
    "qemu-aarch64-static",
    "node",
)
"""Programs without which tests are skipped."""

IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|.+)|import (.+))", re.MULTILINE)
MODULE = re.compile(r"(?<![\w./])notso(?:\.\w+)+")
QUOTED_MODULE = re.compile(r"[\"'](notso(?:\.\w+)+)[\"']")
PROGRAM = re.compile(r"[\"']notso[\"']|/notso\b(?!/)")
NAMED = re.compile(r"[\"']([\w.-][\w./-]*)(?:\*[^\"']*)?[\"']")
FIXTURE = re.compile(r"@pytest\.fixture(.*?)^def (\w+)", re.MULTILINE | re.DOTALL)


@cache
def files() -> dict[str, tuple[str, ...]]:
    """Map each file and folder of the repository to the files in it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    found: dict[str, list[str]] = {}
    for name in sorted({*listed} - {""}):
        if (ROOT / name).is_file():
            for each in (Path(name), *Path(name).parents[:-1]):
                found.setdefault(str(each), []).append(name)
    return {name: tuple(inside) for name, inside in found.items()}


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@cache
def content(name: str) -> bytes:
    return hashlib.sha256((ROOT / name).read_bytes()).digest()


def modules(dotted: str) -> set[str]:
    """Return the files that are executed by importing this name: those of its packages, and its own."""
    parts, found = dotted.split("."), set()
    for count in range(1, len(parts) + 1):
        path = "/".join(parts[:count])
        for top in ("src/", "tests/", "supply/"):
            found |= {f"{top}{path}.py", f"{top}{path}/__init__.py"} & files().keys()
    return found


@cache
def imported(name: str) -> frozenset[str]:
    """Return the modules that a Python file imports or names, for example to run them in another process."""
    source = text(name)
    dotted = set((QUOTED_MODULE if name.startswith("src/") else MODULE).findall(source))
    for package, members, whole in IMPORT.findall(source):
        dotted |= {f"{package}.{member}" for member in re.findall(r"\w+", members)} if package else set()
        dotted |= set(re.findall(r"[\w.]+", whole))
    if not name.startswith("src/") and PROGRAM.search(source):
        dotted.add("notso.__main__")
    return frozenset().union(*map(modules, dotted))


@cache
def beside() -> dict[str, tuple[str, ...]]:
    """Map paths without suffix to the files with that path."""
    found: dict[str, tuple[str, ...]] = {}
    for name in files()["tests"]:
        stem = name.rpartition(".")[0]
        found[stem] = (*found.get(stem, ()), name)
    return found


@cache
def named(name: str) -> frozenset[str]:
    """Return files that a test names by path, file name or folder, and files with its own name and another suffix."""
    found, folder = set(beside().get(name.removesuffix(".py"), ())), name.rpartition("/")[0]
    for path in NAMED.findall(text(name)) if name not in CHOOSERS else ():
        found |= {*files().get(path.rstrip("/"), ())} if path not in ROOTS else set()
        found |= {f"{folder}/{path}"} & {*files().get(f"{folder}/{path}", ())}
    return frozenset(found)


@cache
def fixtures(name: str) -> frozenset[str]:
    """Return the conftest.py files above a test whose fixtures it uses, explicitly or automatically."""
    found = set()
    for folder in Path(name).parents[:-1]:
        conftest = f"{folder}/conftest.py"
        if conftest in files() and conftest != name:
            defined = FIXTURE.findall(text(conftest))
            words = "|".join(word for _, word in defined) or "$."
            acts = "def pytest_" in text(conftest) or any("autouse" in options for options, _ in defined)
            if acts or re.search(rf"\b(?:{words})\b", text(name)):
                found.add(conftest)
    return frozenset(found)


@cache
def package(folder: str) -> frozenset[str]:
    """Files of the package at the same place as a folder of tests, without those that have tests at their own place."""
    found = files().get(f"src/notso/{folder}", ())
    below = {each.rpartition("/")[0] for each in files().get(f"tests/{folder}", ())} - {f"tests/{folder}"}
    apart = tuple(f"src/notso/{each.removeprefix('tests/')}/" for each in below)
    return frozenset(file for file in found if not file.startswith(apart))


@cache
def closure(name: str) -> frozenset[str]:
    """Return all files of the repository that a test file depends on, including itself."""
    folder, _, file_name = name.removeprefix("tests/").rpartition("/")
    tested = f"src/notso/{folder}/{file_name.removeprefix('test_')}"
    found = {name, *package(folder)} | (files().keys() & {*EVERYWHERE})
    left = [name, *files().get(tested, ())]
    while left:
        each = left.pop()
        more = set() if each in WHOLE else set(imported(each))
        if not each.startswith("src/"):
            more |= named(each) | fixtures(each)
        left += [file for file in more - found if file.endswith(".py") and not file.startswith(ALWAYS)]
        found |= more
    for folder, parts in DATA.items():
        if any(file.startswith(f"{folder}/") for file in found):
            found |= {file for part in parts for file in files().get(part, ()) if not file.endswith(".py")}
    return frozenset(found)


def machine() -> bytes:
    """Return the other influences on outcomes: the interpreter, the processor, and the programs that tests look for."""
    cpu = Path("/proc/cpuinfo")
    flags = re.findall(r"^(?:flags|Features)\s*:.*", cpu.read_text() if cpu.exists() else "", re.MULTILINE)[:1]
    return repr((sys.version, platform.machine(), flags, [shutil.which(each) for each in PROGRAMS])).encode()


def digests() -> dict[str, str]:
    """Return the digest of each test file."""
    here, found = machine(), {}
    for name in files()["tests"]:
        if re.match(r"tests/(?!clients/)(.*/)?test_\w+\.py$", name):
            whole = hashlib.sha256(here)
            for file in sorted(closure(name)):
                whole.update(file.encode() + content(file))
            found[name] = whole.hexdigest()
    return found


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")


def due(now: dict[str, str], passed: dict[str, str]) -> list[str]:
    """Return the files to run; empty if all are due."""
    changed = [name for name in now if name.startswith(ALWAYS) or passed.get(name) != now[name]]
    rest = sorted({*now} - {*changed})
    return sorted([*changed, *random.sample(rest, -(-len(rest) // DRAWN_OF))]) if passed else []


def record(seconds: dict[str, float], failed: set[str]) -> None:
    """Store the planned digests of passed files, delete those of failed files, and store all durations."""
    planned = read(PLANNED)
    kept = {name: digest for name, digest in read(PASSED).items() if name in planned and name not in failed}
    write(PASSED, kept | {name: planned[name] for name in planned.keys() & seconds.keys() - failed})
    known = {name: taken for name, taken in read(SECONDS).items() if name in planned}
    write(SECONDS, known | {name: round(taken, 1) for name, taken in seconds.items()})


if __name__ == "__main__":
    write(PLANNED, digests())
    chosen = due(read(PLANNED), read(PASSED))
    if chosen:
        print(f"{len(chosen)} of {len(read(PLANNED))} test files are due or drawn", file=sys.stderr)
    print(*chosen)
