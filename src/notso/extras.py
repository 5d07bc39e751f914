"""Return the installed release, and the command that installs an extra (optional dependencies), for messages."""

# The command names the wheel or folder from which notso was installed (WHEEL if unknown), because notso is not on a
# package index.

from __future__ import annotations

import json
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from urllib.parse import unquote, urlsplit

PACKAGE = "notso-smollm3-bot"


@cache
def installed_release() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def install_line(extra: str) -> str:
    try:
        source = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    url = urlsplit(str(source.get("url", "")))
    if url.scheme != "file":
        return f"pip install 'WHEEL[{extra}]' (see docs/installing.md)"
    option = "-e " if source.get("dir_info", {}).get("editable") else ""
    return f"{shlex.quote(sys.executable)} -m pip install {option}{shlex.quote(f'{unquote(url.path)}[{extra}]')}"
