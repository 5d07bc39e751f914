"""Make notso believe that it runs on macOS. Every Python of the environment from `environment.py` imports this at
startup.

notso and platformdirs see `sys.platform == "darwin"`, 16 KiB pages, libSystem (libsystem.c), and none of the names that
exist only on Linux. If notso opens a file below /proc or /sys, the call fails and is recorded in a file, because the
code may catch the error. The standard library, other packages and tests see the real system.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from darwin.places import FAULTS, LIBRARY, LIBSYSTEM, NAMES, ROOT

PAGE_BYTES = 16384
INSTEAD = {"sys": {"platform": "darwin"}, "mmap": {"PAGESIZE": PAGE_BYTES, "ALLOCATIONGRANULARITY": PAGE_BYTES}}
F_RDADVISE, F_FULLFSYNC = 44, 51
TCP_OPTIONS = (0x80, 0x201)

OURS = f"{ROOT / 'src' / 'notso'}{os.sep}"
STANDARD = (f"{Path(os.__file__).parent}{os.sep}", "<frozen")


def asks_for_notso(depth: int) -> bool:
    """Return whether the code `depth` frames above the caller belongs to notso or platformdirs."""
    file = sys._getframe(depth + 1).f_code.co_filename
    return file.startswith(OURS) or f"{os.sep}platformdirs{os.sep}" in file


def hide(module: ModuleType, names: list[str], instead: dict[str, Any]) -> None:
    """Hide names of a module from notso, or replace their values."""
    kept = {name: getattr(module, name) for name in {*names, *instead} if hasattr(module, name)}
    for name in kept:
        delattr(module, name)

    def look_up(name: str) -> Any:
        if name in kept and not asks_for_notso(1):
            return kept[name]
        if name in instead:
            return instead[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on macOS")

    module.__getattr__ = look_up  # type: ignore[method-assign]


def refuse_folders_of_linux(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that makes notso fail if it opens a file below /proc or /sys."""
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | os.PathLike):
        return
    path = os.fspath(arguments[0])
    if not isinstance(path, str) or not path.startswith(("/proc", "/sys/")):
        return
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(STANDARD):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(OURS):
        fault = f"{frame.f_code.co_filename}:{frame.f_lineno} opens {path}"
        with FAULTS.open("a") as file:
            file.write(fault + "\n")
        raise RuntimeError(f"{fault}, which macOS lacks")


class Library(ctypes.CDLL):
    """Gives notso the stand-in for libSystem instead of the libraries of this process."""

    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        chosen = str(LIBRARY) if name == LIBSYSTEM or (name is None and asks_for_notso(1)) else name
        super().__init__(chosen, *arguments, **options)


def sysconf(name: str | int) -> int:
    return PAGE_BYTES if name in ("SC_PAGE_SIZE", "SC_PAGESIZE") and asks_for_notso(1) else _sysconf(name)


def control_file(descriptor: Any, command: int, argument: Any = 0) -> Any:
    if command == F_FULLFSYNC:
        os.fsync(descriptor)
        return 0
    if command == F_RDADVISE:
        if len(argument) != 16:  # struct radvisory
            raise ValueError("not a struct radvisory")
        return argument
    return _control_file(descriptor, command, argument)


def set_option(self: socket.socket, level: int, option: int, *value: Any) -> None:
    if level != socket.IPPROTO_TCP or option not in TCP_OPTIONS:
        _set_option(self, level, option, *value)


def start(self: subprocess.Popen[Any], command: Any, *arguments: Any, **options: Any) -> None:
    """Disguise isolated Pythons through their command, because they ignore their environment."""
    if isinstance(command, list) and command[:3] == [sys.executable, "-I", "-S"]:
        code = "import sys, runpy; sys.path.append(sys.argv.pop(1)); import darwin.disguise; sys.argv.pop(0);"
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [*command[:3], "-c", code, str(ROOT / "tests"), *command[3:]]
    _start(self, command, *arguments, **options)


_sysconf, _control_file, _set_option = os.sysconf, fcntl.fcntl, socket.socket.setsockopt
_start = subprocess.Popen.__init__


def put_on() -> None:
    """Disguise the current process."""
    os.sysconf = sysconf
    fcntl.fcntl, fcntl.F_FULLFSYNC = control_file, F_FULLFSYNC  # type: ignore[attr-defined]
    socket.socket.setsockopt = set_option  # type: ignore[assignment]
    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    ctypes.CDLL = Library  # type: ignore[misc]
    names = json.loads(NAMES.read_text())
    for name in {*names, *INSTEAD}:
        hide(__import__(name), names.get(name, []), INSTEAD.get(name, {}))
    sys.addaudithook(refuse_folders_of_linux)


put_on()
