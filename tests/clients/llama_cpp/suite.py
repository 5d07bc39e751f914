"""Runs the tests of llama.cpp's server against ours: `python suite.py`, in the environment of `make test-llama-cpp`.

They come with the source archive of llama-cpp-python, are unpacked into build/ and stay as they are; what is changed of
them stands in adaptation.py. Each case that fails is named in exclusions.json with the reason. One that fails and is
not named there, or is named and passes, ends this with 1. With `--list` the cases that failed are printed, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = ROOT / "build/llama-cpp-tests"
RELEASE = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INSIDE = f"llama_cpp_python-{RELEASE}/vendor/llama.cpp/tools/server/tests/"
JOBS = 3
TIMEOUT_SECONDS = 120
EXCLUSIONS = HERE / "exclusions.json"


def unpacked() -> Path:
    """The folder of their tests. Raises CalledProcessError: the archive cannot be had; ValueError: it is another."""
    folder = CACHE / INSIDE
    if folder.exists():
        return folder
    archive = CACHE / f"llama_cpp_python-{RELEASE}.tar.gz"
    if not archive.exists():
        asked = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(CACHE), f"llama-cpp-python=={RELEASE}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *asked], check=True)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{archive.name} is not the archive that was looked at")
    with tarfile.open(archive) as opened:
        opened.extractall(CACHE, [each for each in opened if each.name.startswith(INSIDE)], filter="data")
    return folder


def outcomes(folder: Path) -> dict[str, str]:
    """Case -> passed, failed or skipped."""
    files = sorted(path.name for path in (folder / "unit").glob("test_*.py"))
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as data, ThreadPoolExecutor(JOBS) as jobs:
        for each in jobs.map(lambda name: _outcomes_of(folder, name, data), files):
            found |= each
    return found


def _outcomes_of(folder: Path, name: str, data: str) -> dict[str, str]:
    """Of one file. Raises FileNotFoundError: its tests did not come to an end."""
    report = CACHE / f"{name}.xml"
    report.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
        "LLAMA_SERVER_TESTS": str(folder),
        "NOTSO_PYTHON": os.environ.get("NOTSO_PYTHON", str(ROOT / ".venv/bin/python")),
        "NOTSO_TESTS_DATA": data,
        "PORT": str(port),
        "PYTHONPATH": str(HERE),
    }
    command = ["-m", "pytest", "-q", "-p", "adaptation", "-m", "not slow", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", f"timeout={TIMEOUT_SECONDS}", f"--junit-xml={report}", f"unit/{name}"]
    with (CACHE / f"{name}.log").open("w") as log:
        subprocess.run([sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=log)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').removeprefix('unit.')}::{case.get('name')}"] = state
    return found


def main() -> int:
    try:
        folder = unpacked()
    except subprocess.CalledProcessError:
        print("skipped: the package index does not give the archive that llama.cpp's tests come with")
        return 0
    found = outcomes(folder)
    failed = sorted(name for name, state in found.items() if state == "failed")
    if "--list" in sys.argv:
        print(json.dumps(failed, indent=1))
        return 0
    reasons: dict[str, list[str]] = json.loads(EXCLUSIONS.read_text())
    reason_of = {
        name: reason
        for reason, patterns in reasons.items()
        for name in found
        for each in patterns
        if fnmatchcase(name, each)
    }
    unlisted = [name for name in failed if name not in reason_of]
    passed = [name for name in reason_of if found[name] == "passed"]
    unknown = [
        each for patterns in reasons.values() for each in patterns if not any(fnmatchcase(n, each) for n in found)
    ]
    counts = Counter(found.values())
    print(f"llama.cpp's server tests: {counts['passed']} of {len(found)} pass, {counts['skipped']} skip themselves")
    for reason, number in Counter(reason_of[name] for name in failed if name in reason_of).most_common():
        print(f"{number:4} excluded: {reason}")
    for told, names in (("failed", unlisted), ("passed, but is excluded", passed), ("is no test", unknown)):
        for name in names:
            print(f"{name}: {told}")
    return 1 if unlisted or passed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
