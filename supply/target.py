"""Target architectures and Debian releases of packages, and downloading dependencies for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
MACHINES = ("x86_64", "aarch64")


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def commit_time() -> str:
    """Return the commit's Unix time, which is used for all files in packages."""
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return said.stdout.strip()


def our_wheel(python: str, machine: str) -> Path:
    """Return the wheel in dist/ for a Python and an architecture. Raises SystemExit if there is none."""
    tag = "cp311-cp311" if python == "3.11" else "cp312-abi3"
    found = list((ROOT / "dist").glob(f"*-{version()}-{tag}-manylinux*_{machine}.whl"))
    if not found:
        raise SystemExit(
            f"dist has no wheel of {version()} for Python {python} on {machine}; build it with `make wheels`"
        )
    return found[0]


def pip_target(python: str, machine: str) -> list[str]:
    """Return pip's options for downloading for another Python and architecture than the current ones."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    for glibc in range(17, 37):
        options += ["--platform", f"manylinux_2_{glibc}_{machine}"]
    return [*options, "--platform", f"manylinux2014_{machine}"]


def fetch_locked(python: str, machine: str, folder: Path) -> None:
    """Download the locked archives of all dependencies to a folder, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", folder, *pip_target(python, machine)]
    both = [part for name in ("build.txt", "run.txt") for part in ("-r", ROOT / "supply" / name)]  # they do not overlap
    subprocess.run([*pip, "--require-hashes", "--no-deps", *both], check=True)


def fetch(python: str, machine: str, folder: Path) -> None:
    """Download all dependencies to a folder, and copy our wheel there."""
    fetch_locked(python, machine, folder)
    shutil.copy(our_wheel(python, machine), folder)
