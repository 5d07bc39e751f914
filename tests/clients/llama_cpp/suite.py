#!/usr/bin/env python3
"""Run the tests of llama.cpp's server against ours: `LLAMA_CPP=CLONE make test-llama-cpp`.

CLONE is a checkout or an unpacked archive of llama.cpp; it is not modified, and nothing is downloaded. adaptation.py
changes the tests, and llama_server.py translates the server's options. exclusions.json lists, with reasons, the cases
that do not apply, which are skipped, and the cases that fail. The exit status is 1 if an unlisted case fails, a listed
one passes, or CLONE is invalid.

Arguments select test files (`suite.py completion tokenize`). `--excluded` runs only the cases that do not apply and
lists those that pass anyway; some pass only because the server refuses what they ask for.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from exclusions import NOT_APPLICABLE, reasons_of

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LOGS = ROOT / "build/llama-cpp-tests"
INSIDE = "tools/server/tests"
JOBS = 3
TIMEOUT_SECONDS = 120
STATES = ("passed", "failed", "excluded", "skipped")


@dataclass(frozen=True, slots=True)
class Case:
    """A case of llama.cpp's tests. `state` is one of STATES; "skipped" cases are skipped by llama.cpp's own marks."""

    file: str
    name: str
    state: str
    said: str


def tests_of(clone: str) -> Path:
    """Return the folder of llama.cpp's server tests. Raise ValueError if the clone has none."""
    folder = Path(clone).absolute() / INSIDE
    if not (folder / "utils.py").is_file():
        raise ValueError(f"LLAMA_CPP is not a clone of llama.cpp: {INSIDE} is missing")
    return folder


def outcomes(folder: Path, words: list[str], *, excluded: bool = False) -> list[Case]:
    """Run the files whose names contain one of `words`, or all files, and return their cases."""
    files = sorted(path.name for path in (folder / "unit").glob("test_*.py"))
    chosen = [name for name in files if not words or any(word in name for word in words)]
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, ThreadPoolExecutor(JOBS) as jobs:
        found = jobs.map(lambda name: list(_outcomes_of(folder, name, data, excluded)), chosen)
        return [case for cases in found for case in cases]


def _outcomes_of(folder: Path, name: str, data: str, excluded: bool) -> Iterator[Case]:
    """Run one file. Raise FileNotFoundError if its tests did not finish."""
    report = LOGS / f"{name}.xml"
    report.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
        "LLAMA_SERVER_TESTS": str(folder),
        "NOTSO_EXCLUDED": str(int(excluded)),
        "NOTSO_PYTHON": os.environ.get("NOTSO_PYTHON", str(ROOT / ".venv/bin/python")),
        "NOTSO_TESTS_DATA": data,
        "PORT": str(port),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(HERE),
    }
    command = ["-m", "pytest", "-q", "-p", "adaptation", "-m", "not slow", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", f"timeout={TIMEOUT_SECONDS}", f"--junit-xml={report}", f"unit/{name}"]
    with (LOGS / f"{name}.log").open("w") as log:
        subprocess.run([sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=log)
    for case in ElementTree.parse(report).iter("testcase"):
        marks = {child.tag: child.get("message", "") for child in case}
        said = next(iter(marks.values()), "")
        if "failure" in marks or "error" in marks:
            state = "failed"
        elif "skipped" in marks:
            state = "excluded" if said.startswith(NOT_APPLICABLE) else "skipped"
        else:
            state = "passed"
        yield Case(name, f"{name.removesuffix('.py')}::{case.get('name')}", state, said)


def table(cases: list[Case]) -> Iterator[str]:
    """Yield a row for each file and a row with the totals."""
    yield f"{'':30}" + "".join(f"{word:>10}" for word in ("cases", *STATES))
    for file in (*sorted({case.file for case in cases}), "all"):
        counts = Counter(case.state for case in cases if file in (case.file, "all"))
        yield f"{file:30}" + "".join(f"{number:10}" for number in (counts.total(), *(counts[each] for each in STATES)))


def explained(cases: list[Case], failing: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons for exclusions and failures with their numbers of cases, and the totals."""
    excluded = Counter(case.said.removeprefix(NOT_APPLICABLE) for case in cases if case.state == "excluded")
    failed = Counter(failing.get(case.name, "NOT NAMED") for case in cases if case.state == "failed")
    for kind, reasons in (("excluded", excluded), ("failed", failed)):
        for reason, number in reasons.most_common():
            yield f"{number:4} {kind}: {reason}"
    counts = Counter(case.state for case in cases)
    applicable = counts["passed"] + counts["failed"]
    yield f"passed: {counts['passed']} of all {len(cases)}, and of the {applicable} that apply"


def main(words: list[str]) -> int:
    """Return the exit status: 1 if a case had another result than listed."""
    excluded, files = "--excluded" in words, [word for word in words if not word.startswith("-")]
    clone = os.environ.get("LLAMA_CPP")
    if not clone:
        print("skipped: LLAMA_CPP names no clone of llama.cpp")
        return 0
    try:
        folder = tests_of(clone)
    except ValueError as error:
        print(error)
        return 1
    cases = outcomes(folder, files, excluded=excluded)
    failing = reasons_of("fails", [case.name for case in cases])
    print("\n".join([*table(cases), *explained(cases, failing)]))
    wrong = [f"{each.name} failed: {each.said[:200]}" for each in cases if each.state == "failed"]
    wrong = [line for line in wrong if line.split(" failed: ")[0] not in failing] if not excluded else []
    right = [case.name for case in cases if case.state == "passed" and (excluded or case.name in failing)]
    print("\n".join([*wrong, *(f"{name} passes, and is named as one that does not" for name in right)]))
    (LOGS / "cases.json").write_text(json.dumps({case.name: case.state for case in cases}, indent=1))
    return 1 if not excluded and (wrong or right) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
