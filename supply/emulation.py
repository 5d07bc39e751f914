"""Root filesystems of other architectures, run by qemu's user mode in separate namespaces. Needs root and Linux 6.7.

qemu is registered in a binfmt_misc mount that only these namespaces see, so the host's configuration does not change.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
ELF_NUMBERS = {"x86_64": 0x3E, "aarch64": 0xB7}

APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
BEGIN = "mount -t proc proc /proc; mount -t binfmt_misc binfmt /proc/sys/fs/binfmt_misc"
BEGIN += '; printf %s "$QEMU" >/proc/sys/fs/binfmt_misc/register; '


def apart(
    machine: str, script: str, *arguments: str | Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a shell script in separate namespaces that can run a machine's programs, and return the result.

    arguments: the script's arguments, beginning with $0.
    variables: environment variables (default: only `PATH`).
    """
    environment = dict(variables or {"PATH": os.environ["PATH"]})
    if machine == platform.machine():
        return subprocess.run(
            [*APART, "sh", "-ec", script, *arguments], capture_output=True, text=True, env=environment
        )
    qemu = shutil.which(f"qemu-{machine}-static")
    if qemu is None:
        raise SystemExit(f"{machine} needs qemu-{machine}-static (Debian: apt install qemu-user-static)")
    environment["QEMU"] = registration(machine, qemu)
    # Map all of the host's users into the new namespace; only a process outside it may write such a map. So the child
    # waits for a line of input before it continues.
    wait = 'echo; read -r _; exec "$0" "$@"'
    command = ["unshare", "--user", "sh", "-c", wait, *APART, "sh", "-ec", BEGIN + script, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as running:
        assert running.stdin and running.stdout
        running.stdout.readline()
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{running.pid}/{name}").write_text("0 0 4294967295")
        said, complaint = running.communicate("\n")
    return subprocess.CompletedProcess(command, running.returncode, said, complaint)


def registration(machine: str, qemu: str) -> str:
    """Return the binfmt_misc line that registers qemu for a machine's ELF files. Flag F opens qemu immediately."""
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + bytes([ELF_NUMBERS[machine], 0])
    mask = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff"  # any OS ABI; an executable or a library
    escaped = ["".join(f"\\x{byte:02x}" for byte in each) for each in (head, mask)]
    return f":{machine}:M::{escaped[0]}:{escaped[1]}:{qemu}:F"
