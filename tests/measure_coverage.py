"""Measures which lines the tests run, and writes docs/coverage.md: `make coverage`.

Python: all tests under coverage.py, child processes too (those that a test kills leave nothing). Native: the module
is built once more, instrumented by gcc and with the AMX kernels on emulated tiles where this CPU has no tiles, and the
tests of `qtensor` run on it. `--native` or `--python` measures only that half again; the other half's figures are kept
in build/coverage.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from notso.qtensor.backends.cpu import kernel_choice

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "coverage"
PAGE = ROOT / "docs" / "coverage.md"

SIDE_BY_SIDE = 3
"""Folders of tests at a time: one computes while the others wait."""

Lines = dict[str, tuple[int, int]]
"""File, from the root -> (lines that can be run, lines that were)."""

REPLACE = """
import importlib.util, sys
name = "notso.qtensor._native"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""

HEAD = """\
# What the tests run

Made by `make coverage`. Lines that can be run, and the share that the tests do run. Python: all tests, by coverage.py,
with the processes they start but not what they kill. Native: the tests of `tests/qtensor`, by gcov; a line
of a shared header counts once, whichever kernel family ran it. A line that runs is not yet a line that is proved: that
is the business of the twins, the goldens and the attacks.
"""


def python_lines() -> Lines:
    """Runs all tests under coverage.py."""
    data = BUILD / "python"
    environment = {
        **os.environ,
        "LONG": "chaos",
        "COVERAGE_FILE": str(data),
        "COVERAGE_RCFILE": str(ROOT / "pyproject.toml"),
    }
    coverage = [sys.executable, "-m", "coverage"]
    run([*coverage, "erase"], environment)
    tests = [*coverage, "run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=1200"]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as side_by_side:
        for folder in sorted({path.relative_to(ROOT).parts[1] for path in ROOT.glob("tests/*/**/test_*.py")}):
            side_by_side.submit(run, [*tests, f"tests/{folder}"], environment, must=False)
    run([*coverage, "combine", "-q"], environment)
    run([*coverage, "json", "-q", "-o", str(BUILD / "python.json")], environment)
    files = json.loads((BUILD / "python.json").read_text())["files"]
    return {
        name: (found["summary"]["num_statements"], found["summary"]["covered_lines"]) for name, found in files.items()
    }


def native_lines() -> Lines:
    """Builds the instrumented module, runs the tests of qtensor on it, and asks gcov."""
    folder, beside = BUILD / "native", Path(sys.executable).parent
    for old in folder.rglob("*.gcda"):
        old.unlink()
    configure = [str(beside / "cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={beside / 'ninja'}"]
    configure += ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=--coverage", "-DQTENSOR_OPTIMISE=-O1"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-S", str(ROOT), "-B", str(folder)]
    emulated = {"avx512_vnni"} <= {*kernel_choice.cpu_features()}
    target = "_native_emulated" if emulated else "_native"
    run(configure)
    run([str(beside / "ninja"), "-C", str(folder), target])
    (module,) = folder.glob(f"{target}*.so")
    tests = ["-q", "-p", "no:cacheprovider", "-o", "timeout=1200", "tests/qtensor"]
    run([sys.executable, "-c", REPLACE, str(module), *tests], must=False)
    ran: dict[tuple[str, int], bool] = {}
    for data in sorted(folder.rglob("*.gcda")):
        answer = subprocess.run(["gcov", "--json-format", "--stdout", str(data)], capture_output=True, cwd=folder)
        for part in answer.stdout.splitlines():
            for file in json.loads(part)["files"]:
                path = (folder / file["file"]).resolve()
                if path.is_relative_to(ROOT / "native"):
                    for line in file["lines"]:
                        key = str(path.relative_to(ROOT)), int(line["line_number"])
                        ran[key] = ran.get(key, False) or line["count"] > 0
    lines: Lines = {}
    for (name, _), counted in ran.items():
        all_lines, run_lines = lines.get(name, (0, 0))
        lines[name] = all_lines + 1, run_lines + counted
    return lines


def run(command: list[str], environment: dict[str, str] | None = None, *, must: bool = True) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    if must and done.returncode:
        sys.exit(f"{' '.join(command[:4])} ended with {done.returncode}")


def room(name: str) -> str:
    """The folder that a row of the page is about: two below the package, one below native."""
    parts = Path(name).parts
    depth = 4 if parts[0] == "src" else 3
    return "/".join(parts[: min(depth, len(parts) - 1)])


def table(lines: Lines) -> Iterable[str]:
    rooms: dict[str, list[int]] = {}
    for name, (every, ran) in lines.items():
        counted = rooms.setdefault(room(name), [0, 0])
        counted[0] += every
        counted[1] += ran
    yield "| room | lines | run |\n| --- | ---: | ---: |"
    for name, (every, ran) in sorted(rooms.items()):
        yield f"| {name} | {every:,} | {percent(every, ran)} |"
    every, ran = (sum(each[i] for each in lines.values()) for i in (0, 1))
    yield f"| **all** | {every:,} | **{percent(every, ran)}** |"


def percent(every: int, ran: int) -> str:
    return f"{100 * ran / every:.1f} %" if every else "-"


def least(lines: Lines) -> str:
    """The ten files with most lines that no test runs."""
    worst = sorted(lines.items(), key=lambda item: item[1][0] - item[1][1], reverse=True)[:10]
    return ", ".join(f"`{name}` {every - ran}" for name, (every, ran) in worst if every > ran)


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    for half, measured in (("native", native_lines), ("python", python_lines)):
        kept = BUILD / f"{half}-lines.json"
        if f"--{half}" in sys.argv or not {"--native", "--python"} & {*sys.argv}:
            kept.write_text(json.dumps(measured()))
    parts = [HEAD]
    for half, title in (("python", "Python"), ("native", "Native")):
        kept = BUILD / f"{half}-lines.json"
        if kept.exists():
            lines = json.loads(kept.read_text())
            parts += [f"\n## {title}\n", *table(lines), f"\nMost lines that no test runs: {least(lines)}.\n"]
    features = " ".join(name for name in kernel_choice.cpu_features())
    today = datetime.datetime.now(datetime.UTC).date()
    parts.append(f"\nMeasured {today}, Python {platform.python_version()}, on a CPU with {features}.")
    PAGE.write_text("\n".join(part.strip("\n") if i else part for i, part in enumerate(parts)) + "\n")


if __name__ == "__main__":
    main()
