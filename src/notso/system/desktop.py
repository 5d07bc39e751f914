"""The system's name, the user's folders and display. platformdirs knows the folders of notso itself."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def system_name() -> str:
    """Return the system and its version, such as "Linux 6.1.0" or "macOS 14.5"."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}".strip()
    return f"{platform.system()} {platform.release()}"


def cache_folder(home: Path) -> Path:
    """Return where programs of that user keep what they can make again."""
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def has_display() -> bool:
    """Return whether a browser would open in front of the user."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
