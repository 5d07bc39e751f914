"""Debians without a compiler, made by debootstrap, to try packages in. Needs root."""

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
    """A minbase of that machine, made anew."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    options = ("--variant=minbase", f"--arch={DEBIAN_NAMES[machine]}", *options)
    if machine == platform.machine():
        subprocess.run(["debootstrap", *options, suite, root, *mirror], check=True, stdout=subprocess.DEVNULL)
        return
    command = ["debootstrap", "--foreign", *options, suite, root, *mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shorten_lists(root)
    namespace = os.environ | {"container": "lxc"}  # so that no device is made, which only the machine's own root may
    done = apart(machine, 'exec chroot "$0" /debootstrap/debootstrap --second-stage', root, variables=namespace)
    if done.returncode != 0:
        raise SystemExit(f"debootstrap of {suite} for {machine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def shorten_lists(root: Path) -> None:
    """Only what was fetched stays listed: debootstrap reads the list of all packages several times, and by qemu each
    time takes a minute and a half."""
    fetched = {line.split()[0] for line in (root / "debootstrap" / "debpaths").read_text().splitlines()}
    for path in (root / "var/lib/apt/lists").glob("*_Packages"):
        entries = path.read_text().split("\n\n")
        kept = [each for each in entries if each.partition("\n")[0].removeprefix("Package: ") in fetched]
        path.write_text("\n\n".join(kept) + "\n\n")


def bare_root(suite: str, mirror: list[str], machine: str = platform.machine()) -> Path:
    """A Debian with Python and no compiler, and a user."""
    root = ROOTS / (suite if machine == platform.machine() else f"{suite}-{machine}")
    if not (root / "home" / USER).is_dir():
        bootstrap(root, suite, mirror, machine, "--include=python3,python3-venv")
        done = apart(machine, f'exec chroot "$0" /usr/sbin/useradd --create-home {USER}', root)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
    return root


def copy_of(root: Path, name: str) -> Path:
    """A root to spoil."""
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
    """What a command says there as a user of no name, without capabilities, where only `writable` can be written.

    writable: folder there -> folder here, which is made and given to that user.
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
