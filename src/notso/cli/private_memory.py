"""Protect the process's memory from other processes of the same user."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """On Linux, make the process non-dumpable, so that only root can read its memory and environment, which hold keys.

    This stops child processes (MCP servers, plugins) reading `/proc/PPID/environ`, and debuggers; it also disables core
    dumps. Executed programs are not affected.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
