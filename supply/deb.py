"""Package the built wheel with its dependencies for Debian: `make deb`, or

    python supply/deb.py [--machine aarch64] [--suite trixie ...] [--out dist]

A package contains a virtual environment for the Python of one Debian release, with the locked versions of all
dependencies, so nothing is downloaded at installation. Builds are reproducible.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from emulation import DEBIAN_NAMES
from target import MACHINES, PYTHONS, ROOT, commit_time, fetch, pip_target, version

DEPLOY = ROOT / "deploy"
STAGES = ROOT / "build" / "deb"
HOUSE = "usr/lib/notso"

LAUNCHER = """#!/usr/lib/notso/bin/python3 -I
import sys

from notso.cli import main

sys.exit(main())
"""

CONTROL = """Package: notso
Version: {version}
Architecture: {architecture}
Maintainer: The notso-smollm3-bot authors <nobody@localhost>
Depends: python3 (>= {python}), python3 (<< {next_python}), libc6 (>= 2.28), libgcc-s1, libstdc++6
Section: web
Priority: optional
Description: chat page and API for SmolLM3-3B
 A chatbot and inference server that runs SmolLM3-3B from a GGUF file on the
 CPU, offline, without dequantizing its weights. All required Python packages
 and a small demo model are included.
"""

SCRIPTS = {
    "postinst": """
[ "$1" = configure ] || exit 0
/usr/lib/notso/bin/python3 -I -m compileall -q /usr/lib/notso/lib
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  if [ -z "$2" ]; then systemctl enable --now notso.service; else systemctl try-restart notso.service; fi
fi
""",
    "prerm": """
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now notso.service; fi
find /usr/lib/notso -name __pycache__ -prune -exec rm -rf {} +
""",
    "postrm": """
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
""",
}


def put(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def environment(house: Path, python: str, machine: str) -> None:
    """Create a virtual environment without pip. Its Python need not be installed on this machine."""
    archives, packages = (
        STAGES / f"archives-{python}-{machine}",
        house / "lib" / f"python{python}" / "site-packages",
    )
    fetch(python, machine, archives)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile"]
    here = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(archives)}
    ours = f"notso-smollm3-bot=={version()}"  # by name, so that no local path is recorded
    subprocess.run([*pip, *pip_target(python, machine), "--target", packages, ours], check=True, env=here)
    shutil.rmtree(packages / "bin")  # scripts for the local Python
    put(house / "pyvenv.cfg", f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n")
    (house / "bin").mkdir()
    (house / "bin" / "python3").symlink_to(f"/usr/bin/python{python}")


def build(suite: str, out: Path, machine: str = platform.machine()) -> Path:
    """Build the package for a Debian release, and return its path."""
    python, stage, architecture = PYTHONS[suite], STAGES / f"{suite}-{machine}", DEBIAN_NAMES[machine]
    major, minor = python.split(".")
    shutil.rmtree(stage, ignore_errors=True)
    environment(stage / HOUSE, python, machine)
    put(stage / "usr/bin/notso", LAUNCHER, 0o755)
    put(stage / "usr/lib/systemd/system/notso.service", (DEPLOY / "notso.service").read_text())
    put(stage / "etc/notso/config.toml", (DEPLOY / "config.toml").read_text())
    put(stage / "usr/share/doc/notso/copyright", (ROOT / "LICENSE").read_text())
    full = f"{version()}-1~{suite}"
    said = {"architecture": architecture, "python": python, "next_python": f"{major}.{int(minor) + 1}"}
    put(stage / "DEBIAN/control", CONTROL.format(version=full, **said))
    put(stage / "DEBIAN/conffiles", "/etc/notso/config.toml\n")
    for name, script in SCRIPTS.items():
        put(stage / "DEBIAN" / name, f"#!/bin/sh\nset -e\n{script.lstrip()}", 0o755)
    for path in stage.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    out.mkdir(parents=True, exist_ok=True)
    made = STAGES / f"notso_{full}_{architecture}.deb"
    steady = os.environ | {"SOURCE_DATE_EPOCH": commit_time()}
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", stage, made], check=True, env=steady, stdout=2)
    return made.rename(out / made.name)  # atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--machine", choices=MACHINES, default=platform.machine(), help="architecture (default: this machine's)"
    )
    parser.add_argument(
        "--suite", action="append", choices=list(PYTHONS), help="Debian release, repeatable (default: trixie)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="output folder (default: dist)")
    options = parser.parse_args()
    for suite in options.suite or ["trixie"]:
        made = build(suite, options.out, options.machine)
        print(f"{made.stat().st_size / 1e6:5.2f} MB  {made}")


if __name__ == "__main__":
    main()
