"""Opening files that anyone may have put there: no FIFO or device is waited for, no endless file is read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SECRET_BYTES = 1 << 16
"""The most that a file with one key or secret in it may hold."""


def open_regular(path: Path) -> int:
    """A descriptor for reading `path`, which the caller closes. Follows links.

    Raises OSError, whose `strerror` and `filename` are set, also for what is no regular file: reading a FIFO, a
    terminal or a socket would wait for a writer, and opening a device can do anything.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a device is not even opened
            raise _no_regular_file(path)
        # Not blocking: the name may be a FIFO's by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise OSError(errno.EINVAL, "not a file name", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_regular_file(path)
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular` does, and for one of more than `most_bytes`:
    some files have no size, so what is read is counted."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {_size(most_bytes)}", str(path))
    return content


def _no_regular_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB" if count >= 1 << 10 else f"{count} bytes"
