"""Programs that a server starts cannot read the keys in the server's environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc exists only on Linux")

CODE = """
import ctypes, os, sys
from pathlib import Path
from notso.system.processes import make_undumpable

if os.getuid() == 0:  # root may read the memory of all processes
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a program of that user is started
if sys.argv[1] == "private":
    make_undumpable()
reader = os.fork()
if not reader:
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    try:
        found = b"very-secret" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
        print("found" if found else "not there")
    except PermissionError:
        print("refused")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(reader, 0)
Path("/proc/self/smaps_rollup").read_text(), Path("/proc/self/status").read_text()  # the process can still read its own
"""


@pytest.mark.parametrize(("how", "told"), [("open", "found"), ("private", "refused")])
def test_private_memory_hides_the_environment_from_children(how: str, told: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE, how], env={"NOTSO_API_KEY": "very-secret"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == told, run.stderr
