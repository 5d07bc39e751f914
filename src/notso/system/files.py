"""Lock files, write them durably, read ahead, open anonymous files, and locate the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import struct
import sys
from pathlib import Path

if sys.platform == "darwin":
    _F_RDADVISE = 44  # sys/fcntl.h

LONGEST_READ_AHEAD = (1 << 31) - 1  # in bytes; macOS stores the length in a C int


def file_type(path: Path) -> int:
    """Return a path's type, such as stat.S_IFDIR, or 0 if nothing exists there. Raises OSError."""
    # Path.exists, is_dir and is_file are not used, because since Python 3.14 they return False even if, for example,
    # permission was denied.
    try:
        return stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - tests replace os.stat
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError is raised for a path with NUL
        return 0


def lock(descriptor: int) -> None:
    """Lock a file until `unlock_and_close`. Raises OSError, or BlockingIOError if it is already locked."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_or_close(descriptor: int) -> bool:
    """Like `lock`, but close the file if it cannot be locked, and return False if it is already locked."""
    try:
        lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True


def unlock_and_close(descriptor: int) -> None:
    # Closing the descriptor is not enough: a forked child has a copy, which keeps the file locked until the child ends
    # or executes another program.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def sync(descriptor: int) -> None:
    """Flush a file to the disk, so that it survives a power failure. Raises OSError."""
    if sys.platform == "darwin":
        # On macOS, fsync does not flush the disk's cache, but F_FULLFSYNC does. Some file systems, such as network file
        # systems, do not support F_FULLFSYNC.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that renames survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path) -> int:
    """Open a file for reading and writing, and return its descriptor. Creates the file (0600) if necessary.

    A file that root creates belongs to the owner of its folder. Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if os.geteuid() == 0:  # after `sudo notso keys add`, the server of another user must be able to open the file
        folder = path.parent.stat()
        with contextlib.suppress(OSError):
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
    return descriptor


def write_private(path: Path, content: str, *, replace: bool) -> None:
    """Write a text file that only its owner can read. If writing fails, no incomplete file is left. Raises OSError."""
    # With `replace`, an existing file keeps its content if writing fails or the process is killed. Without it, an
    # existing file is an error (FileExistsError), and a killed process can leave an incomplete file.
    draft = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.part") if replace else path
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_ahead(descriptor: int) -> None:
    """Ask the kernel to read a file into its page cache. Raises OSError."""
    # The kernel reads many blocks in parallel, which is several times faster than sequential reads.
    if sys.platform == "darwin":
        size = min(os.fstat(descriptor).st_size, LONGEST_READ_AHEAD)
        fcntl.fcntl(descriptor, _F_RDADVISE, struct.pack("=qi4x", 0, size))  # struct radvisory
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)


def anonymous_file() -> int:
    """Return a descriptor of a new, empty anonymous file, in memory if possible. Raises OSError."""
    if sys.platform == "darwin":
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    return os.memfd_create("notso")


def cache_folder(home: Path) -> Path:
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
