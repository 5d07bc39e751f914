"""Minimal Debian systems without a compiler, for testing packages. Needs root and debootstrap."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from emulation import DEBIAN_NAMES, apart
from target import ROOT

ROOTS = ROOT / "build" / "roots"
USER = "me"
NOBODY = "61184"  # the first number that systemd gives to a DynamicUser


def bootstrap(root: Path, suite: str, mirror: list[str], machine: str, *options: str) -> None:
    """Create a minimal Debian for an architecture, replacing an existing one."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    options = ("--variant=minbase", f"--arch={DEBIAN_NAMES[machine]}", *options)
    if machine == platform.machine():
        subprocess.run(["debootstrap", *options, suite, root, *mirror], check=True, stdout=subprocess.DEVNULL)
        return
    command = ["debootstrap", "--foreign", *options, suite, root, *mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shorten_lists(root)
    # With this variable, debootstrap does not create device nodes, for which a user namespace's root has no permission.
    namespace = os.environ | {"container": "lxc"}
    done = apart(machine, 'exec chroot "$0" /debootstrap/debootstrap --second-stage', root, variables=namespace)
    if done.returncode != 0:
        raise SystemExit(f"debootstrap of {suite} for {machine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def shorten_lists(root: Path) -> None:
    """Keep only the downloaded packages in apt's lists, which debootstrap reads several times (90 s each in qemu)."""
    fetched = {line.split()[0] for line in (root / "debootstrap" / "debpaths").read_text().splitlines()}
    for path in (root / "var/lib/apt/lists").glob("*_Packages"):
        entries = path.read_text().split("\n\n")
        kept = [each for each in entries if each.partition("\n")[0].removeprefix("Package: ") in fetched]
        path.write_text("\n\n".join(kept) + "\n\n")


def bare_root(suite: str, mirror: list[str], machine: str = platform.machine()) -> Path:
    """Return the root of a Debian with Python and a user, without a compiler. Created if needed."""
    root = ROOTS / (suite if machine == platform.machine() else f"{suite}-{machine}")
    if not (root / "home" / USER).is_dir():
        bootstrap(root, suite, mirror, machine, "--include=python3,python3-venv")
        done = apart(machine, f'exec chroot "$0" /usr/sbin/useradd --create-home {USER}', root)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
    return root


def copy_of(root: Path, name: str) -> Path:
    """Return a copy of a root, for one test."""
    copy = ROOTS / name
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", root, copy], check=True)
    return copy


def confined(
    root: Path,
    writable: Mapping[str, Path],
    variables: Mapping[str, str],
    command: Sequence[str],
    user: str = NOBODY,
) -> str:
    """Run a command in a root, and return its output.

    It runs as an unnamed user without capabilities, and the root is read-only.

    writable: folder in the root -> folder outside, which is created and owned by the user.
    """
    mounts = ["ip link set lo up", f"mount --bind {root} {root}"]
    for inside, outside in writable.items():
        outside.mkdir(parents=True, exist_ok=True)
        subprocess.run(["chown", "--recursive", f"{user}:{user}", outside], check=True)
        (root / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --bind {outside} {root}{inside}")
    mounts += [f"mount -o remount,bind,ro {root}", f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmp {root}/tmp"]
    become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
    become += ["--inh-caps=-all", "--bounding-set=-all", "env", "-i", *(f"{k}={v}" for k, v in variables.items())]
    script = " && ".join([*mounts, f'exec chroot {root} "$@"'])
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", script, "sh", *become, *command],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    if done.returncode != 0:
        raise SystemExit(f"{root.name}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()
