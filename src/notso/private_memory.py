"""Protect the process's memory from other processes of the same user."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """Make the process non-dumpable (Linux)."""
    # Only root can then read its memory and environment, which hold keys: neither children (MCP servers, plugins) by
    # /proc/PPID/environ nor debuggers. Also disables core dumps. Executed programs are not affected.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
