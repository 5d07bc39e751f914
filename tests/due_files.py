"""Which test files `make test` runs on a tree where the whole suite has passed before.

    python tests/due_files.py    the files to run; none where every file is due

A file is due when its digest differs from the one with which it passed last in this tree. The digest covers the file,
the package at the same place, what it or the module of its name imports, directly or not, every file and folder of the
repository that one of those tests names, and the machine. `build/tests_passed.json` holds the digests and is not
committed: a fresh clone, which has none, runs everything. Of the files that are not due a tenth is drawn, because a
digest cannot see everything that a test depends on.
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
"""Tests of the repository as a whole: no list of files says what they depend on."""
DRAWN_OF = 10

EVERYWHERE = ("pyproject.toml", "supply/build.txt", "supply/run.txt", "supply/dev.txt", "tests/conftest.py")
DATA = {
    "src/notso/plugins": ("src/notso/plugins",),
    "src/notso/qtensor": ("CMakeLists.txt", "native", "src/notso/qtensor"),
    "src/notso/smollm3": ("src/notso/smollm3", "src/notso/demo"),
    "src/notso/web": ("src/notso/web",),
}
"""Folder of a package -> files and folders whose contents, besides Python, its modules read or are built from."""
WHOLE = (
    "src/notso/cli/app.py",
    "src/notso/web/app.py",
    "tests/web/conftest.py",
    "tests/web/shared_between_servers.py",
)
"""Files that import all of the server or all commands. What a test reaches only through them does not make it due, or
every change in the server would make due every test that starts one: a test counts as one of the package at the same
place under src/, of the module of its name there, and of what it names, and the others are drawn. `make check` runs
all."""
CHOOSERS = ("tests/due_files.py", "tests/long_tests.py")
"""Files that name folders only to say which tests are due."""
ROOTS = ("src", "tests")
"""Beginnings of paths, and where programs look for modules: what a test imports or names of them counts, not all that
is in them."""
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
    """Each file and folder of the repository, and the files in it."""
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
    """Files that importing this name runs: of the packages around it, and its own."""
    parts, found = dotted.split("."), set()
    for count in range(1, len(parts) + 1):
        path = "/".join(parts[:count])
        for top in ("src/", "tests/", "supply/"):
            found |= {f"{top}{path}.py", f"{top}{path}/__init__.py"} & files().keys()
    return found


@cache
def imported(name: str) -> frozenset[str]:
    """Modules that a Python file imports, or names for another process to run."""
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
    """Path without its ending -> the files of that name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in files()["tests"]:
        stem = name.rpartition(".")[0]
        found[stem] = (*found.get(stem, ()), name)
    return found


@cache
def named(name: str) -> frozenset[str]:
    """Files that a test names, from the root, alone or by their folder, or that lie beside it."""
    found, folder = set(beside().get(name.removesuffix(".py"), ())), name.rpartition("/")[0]
    for path in NAMED.findall(text(name)) if name not in CHOOSERS else ():
        found |= {*files().get(path.rstrip("/"), ())} if path not in ROOTS else set()
        found |= {f"{folder}/{path}"} & {*files().get(f"{folder}/{path}", ())}
    return frozenset(found)


@cache
def fixtures(name: str) -> frozenset[str]:
    """conftest.py files above a test of which it asks for a fixture, or which act without being asked."""
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
    """All files of the repository that a test file depends on, itself included."""
    folder, _, file_name = name.removeprefix("tests/").rpartition("/")
    tested = f"src/notso/{folder}/{file_name.removeprefix('test_')}"
    found = {name, *package(folder)} | (files().keys() & {*EVERYWHERE})
    left = [name, *files().get(tested, ())]
    while left:
        each = left.pop()
        more = set() if each in WHOLE else set(imported(each))
        if not each.startswith("src/"):
            more |= named(each) | fixtures(each)
        for folder in (folder for folder in DATA if each.startswith(f"{folder}/")):
            more |= {file for part in DATA[folder] for file in files().get(part, ()) if not file.endswith(".py")}
        left += [file for file in more - found if file.endswith(".py") and not file.startswith(ALWAYS)]
        found |= more
    return frozenset(found)


def machine() -> bytes:
    """What else an outcome depends on: the interpreter, the processor, and the programs that tests look for."""
    cpu = Path("/proc/cpuinfo")
    flags = re.findall(r"^(?:flags|Features)\s*:.*", cpu.read_text() if cpu.exists() else "", re.MULTILINE)[:1]
    return repr((sys.version, platform.machine(), flags, [shutil.which(each) for each in PROGRAMS])).encode()


def digests() -> dict[str, str]:
    """Test file -> digest."""
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
    """The files to run; none where that is all of them."""
    changed = [name for name in now if name.startswith(ALWAYS) or passed.get(name) != now[name]]
    rest = sorted({*now} - {*changed})
    return sorted([*changed, *random.sample(rest, -(-len(rest) // DRAWN_OF))]) if passed else []


def record(seconds: dict[str, float], failed: set[str]) -> None:
    """Keep the planned digests of files that passed and forget those of files that failed; keep all their seconds."""
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
