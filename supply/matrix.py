"""Build with each installed compiler and Python, and compare answers of the demo model: `make matrix`, or

    python supply/matrix.py [--compiler clang++ ...] [--python PYTHON ...] [--debian trixie ...] [--tests ARGS]

Each combination is built in a new clone of the committed sources by `make .venv/.run`, which does the same as the first
`make run`. Debian releases are created by debootstrap, which needs root, and use their own g++ and Python. Prints a
table of wall time, CPU time and the answer's fingerprint, which must be the same in all rows. ccache is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bare_debian import ROOTS, bootstrap
from emulation import apart
from target import PYTHONS, ROOT, fetch_locked

BUILD = ROOT / "build" / "matrix"
COMPILERS = ("g++", *(f"g++-{number}" for number in range(12, 17)), *(f"clang++-{number}" for number in range(15, 23)))
PACKAGES = "python3,python3-venv,python3-dev,make,g++"

Run = Callable[[str], str]
"""Runs a shell command in the clone, and returns its output."""


def compilers() -> list[str]:
    """Return one compiler of each installed version."""
    found: dict[str, str] = {}
    for name in (*COMPILERS, "clang++"):
        if path := shutil.which(name):
            found.setdefault(output([path, "--version"]).splitlines()[0], path)
    return list(found.values())


def pythons() -> list[str]:
    """Return this Python and the newest installed one."""
    beside = sorted(Path(sys.base_prefix).parent.glob("*3.*/bin/python3"))  # folders of pyenv and uv
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    found: dict[tuple[int, ...], str] = {}
    for path in (*filter(None, named), *map(str, beside), sys.executable):
        asked = subprocess.run([path, "--version"], capture_output=True, text=True)
        numbers = tuple(map(int, re.findall(r"\d+", asked.stdout)[:2]))
        if asked.returncode == 0 and numbers >= (3, 11):
            found.setdefault(numbers, path)
    return list(dict.fromkeys([found[sys.version_info[:2]], found[max(found)]]))


def output(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def clone(to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", to], check=True)


def row(name: str, run: Run, settings: str, tests: str | None) -> tuple[list[str], str]:
    """Build in a clone. Returns a row of the table and the answer's fingerprint."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run(f"make {settings} .venv/.run")
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = json.loads(run(".venv/bin/notso run --json --temperature 0 'What is 27 + 48?'"))
    if tests is not None:
        run(f"make test ARGS='{tests}'")
    return [name, f"{seconds:.0f}", f"{spent:.0f}", answer["fingerprint"]], answer["fingerprint"]


def here(compiler: str, python: str, tests: str | None) -> tuple[list[str], str]:
    """Build with a compiler and Python of this machine."""
    said = output([compiler, "--version"]).splitlines()[0]
    version = output([python, "-c", "import platform; print(platform.python_version())"]).strip()
    folder = BUILD / f"{Path(compiler).name}-{version}"
    clone(folder)
    without = os.environ | {"CCACHE_DISABLE": "1"}

    def run(command: str) -> str:
        done = subprocess.run(["sh", "-c", command], cwd=folder, env=without, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{folder.name}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    return row(f"{said}, Python {version}", run, f"PYTHON={python} CXX={compiler}", tests)


def debian(suite: str, mirror: list[str], tests: str | None) -> tuple[list[str], str]:
    """Build in a Debian release with its own tools, offline."""
    machine = platform.machine()
    root = ROOTS / f"{suite}-compiler"
    if not (root / "usr/bin/g++").exists():
        bootstrap(root, suite, mirror, machine, f"--include={PACKAGES}")
    clone(root / "srv/notso")
    fetch_locked(PYTHONS[suite], machine, root / "srv/wheels")
    offline = "PIP_NO_INDEX=1 PIP_FIND_LINKS=/srv/wheels"

    def run(command: str) -> str:
        inside = f'mount -t proc proc {root}/proc; exec chroot {root} sh -c "cd /srv/notso && {offline} $0"'
        done = apart(machine, inside, command)
        if done.returncode != 0:
            raise SystemExit(f"{suite}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    said = run("g++ --version").splitlines()[0]
    return row(f"Debian {suite}: {said}, Python {PYTHONS[suite]}", run, "", tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", action="append", help="repeatable (default: all installed versions)")
    parser.add_argument("--python", action="append", help="repeatable (default: this one and the newest installed)")
    parser.add_argument(
        "--debian", action="append", choices=list(PYTHONS), default=[], help="Debian release to build in, repeatable"
    )
    parser.add_argument("--mirror", nargs=1, default=[], help="Debian mirror (default: debootstrap's)")
    parser.add_argument("--tests", metavar="ARGS", help="also run `make test` with these arguments")
    options = parser.parse_args()
    head = ["", "build, s", "CPU time, s", "fingerprint"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    found = set()
    for compiler in options.compiler or compilers():
        for python in options.python or pythons():
            cells, fingerprint = here(compiler, python, options.tests)
            print(f"| {' | '.join(cells)} |", flush=True)
            found.add(fingerprint)
    for suite in options.debian:
        cells, fingerprint = debian(suite, options.mirror, options.tests)
        print(f"| {' | '.join(cells)} |", flush=True)
        found.add(fingerprint)
    if len(found) != 1:
        raise SystemExit(f"the answers differ; fingerprints: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
