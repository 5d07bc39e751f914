"""What this process holds is no other program's, though that runs as the same user."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """On Linux: nobody but root reads this process's memory and environment, where keys are: neither child processes
    (MCP servers, plugins) by `/proc/PPID/environ` nor debuggers. It leaves no core dump then. What is executed by it is
    as before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
