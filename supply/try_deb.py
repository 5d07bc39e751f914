"""Test the Debian package: install it in a minimal Debian, run its service and remove it: `make test-deb`, or

    python supply/try_deb.py [--suite trixie ...] [--mirror URL]

Needs root and debootstrap. Without --boot, systemd is not used: the unit's command runs with the unit's environment,
as an unnamed user without capabilities, on a read-only root with two writable folders. With --boot, which also needs
systemd-nspawn, a bookworm is booted and its systemd runs the unit with all its sandboxing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bare_debian import ROOTS, bare_root, confined, copy_of
from target import PYTHONS, ROOT, version

UNIT = "usr/lib/systemd/system/notso.service"
PLACES = {"%S": "/var/lib", "%C": "/var/cache"}


def of_unit(text: str) -> tuple[list[str], Mapping[str, str], list[str]]:
    """Return (command, environment variables, writable folders) of a systemd unit."""
    for sign, place in PLACES.items():
        text = text.replace(sign, place)
    rows = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    variables = [each for name, value in rows if name == "Environment" for each in shlex.split(value)]
    kept = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}
    folders = [f"{kept[name]}/{value}" for name, value in rows if name in kept]
    (command,) = [shlex.split(value) for name, value in rows if name == "ExecStart"]
    return command, dict(each.split("=", 1) for each in variables), folders


def in_root(root: Path, *command: str) -> float:
    begun = time.monotonic()
    done = subprocess.run(["chroot", root, *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{root.name}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - begun


def left(root: Path) -> list[str]:
    """Return paths that contain "notso" in a root."""
    return [str(path) for path in root.rglob("*notso*") if root / "proc" not in path.parents]


def package_of(suite: str) -> Path:
    """Return the package in dist/ for a Debian release. Raises SystemExit if there is none."""
    found = list((ROOT / "dist").glob(f"notso_{version()}-*~{suite}_amd64.deb"))
    if not found:
        raise SystemExit(
            f'dist has no package of {version()} for {suite}; build it with `make deb ARGS="--suite {suite}"`'
        )
    return found[0]


def tried(suite: str, mirror: list[str]) -> list[str]:
    """Install, run and remove the package. Returns a row of the table."""
    root, state = copy_of(bare_root(suite, mirror), f"{suite}-deb"), ROOTS / f"{suite}-deb-state"
    shutil.rmtree(state, ignore_errors=True)
    shutil.copy(package_of(suite), root / "package.deb")
    shutil.copy(ROOT / "supply" / "first_question.py", root)
    installed = in_root(root, "dpkg", "--install", "/package.deb")
    command, variables, folders = of_unit((root / UNIT).read_text())
    writable = {folder: state / folder.strip("/").replace("/", "-") for folder in folders}
    told = json.loads(confined(root, writable, variables, ["/usr/bin/python3", "/first_question.py", *command]))
    if "75" not in told["answer"]:
        raise SystemExit(f"{suite}: the answer must contain 75: {told['answer']!r}")
    if not list(state.rglob("notso.db")):
        raise SystemExit(f"{suite}: the state directory has no notso.db")
    in_root(root, "dpkg", "--install", "/package.deb")  # as an upgrade does
    removed = in_root(root, "dpkg", "--purge", "notso")
    for folder in folders:
        (root / folder.lstrip("/")).rmdir()
    if found := left(root):
        raise SystemExit(f"{suite}: these files remain after removal: {', '.join(found)}")
    return [f"Debian {suite}", *(f"{each:.1f}" for each in (installed, told["page"], told["stop"], removed))]


BOOT = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh -exc 'dpkg --install /package.deb; python3 /first_question.py; dpkg --install /package.deb; \\
  python3 /first_question.py; systemd-analyze security notso --no-pager --threshold=20 >/dev/null; \\
  ls /var/lib/private/notso/data/notso.db; dpkg --purge notso; if systemctl is-active notso; then exit 1; fi; echo done'
ExecStopPost=systemctl --no-block poweroff
StandardOutput=file:/said
StandardError=file:/said
"""


def booted(mirror: list[str]) -> str:
    """Boot a bookworm and test the package with its systemd. Returns a summary."""
    suite, fresh = "bookworm", ROOTS / "bookworm-systemd"
    if not (fresh / "usr/bin/systemctl").exists():
        include = "--include=python3,systemd,systemd-sysv,dbus"
        command = ["debootstrap", "--variant=minbase", include, suite, fresh, *mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    root = copy_of(fresh, "bookworm-booted")
    shutil.copy(package_of(suite), root / "package.deb")
    shutil.copy(ROOT / "supply" / "first_question.py", root)
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/systemd/system/trial.service").write_text(BOOT)
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "trial.service").symlink_to("../trial.service")
    command = [
        "timeout",
        "300",
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--private-network",
        "--boot",
        "-D",
        root,
    ]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = (root / "said").read_text()
    if said.count("27 + 48 = 75") != 2 or not said.endswith("done\n"):
        raise SystemExit(f"{suite}, booted, failed:\n{said}")
    return f"{suite}, booted: installation, question, reinstallation, question and removal passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", action="append", choices=list(PYTHONS), help="Debian release, repeatable (default: trixie)"
    )
    parser.add_argument("--mirror", nargs=1, default=[], help="Debian mirror (default: debootstrap's)")
    parser.add_argument("--boot", action="store_true", help="boot a bookworm and test with its systemd")
    options = parser.parse_args()
    if options.boot:
        print(booted(options.mirror))
        return
    head = ["", "install", "first page", "stop", "remove"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for suite in options.suite or ["trixie"]:
        print(f"| {' | '.join(tried(suite, options.mirror))} |", flush=True)


if __name__ == "__main__":
    main()
