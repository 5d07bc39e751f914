"""Origin patterns such as `app://obsidian.md`, `vscode-webview://*`, `http://localhost:*` and `*`."""

from __future__ import annotations

import re
from collections.abc import Iterable

ANY = "*"
_SCHEME = r"[a-z][a-z0-9+.-]*"
_HOST = r"\[[0-9a-f:.]+\]|[a-z0-9._-]+"
_RULE = re.compile(rf"({_SCHEME})://(\*|{_HOST})(?::(\*|[0-9]{{1,5}}))?")


class OriginRules:
    """Matches origins against patterns; a star stands for a whole host, port, or everything.

    Raises ValueError for invalid patterns.
    """

    # "null", sent by pages without an origin, cannot be matched.
    def __init__(self, rules: Iterable[str]) -> None:
        given = tuple(rules)
        self._any = ANY in given
        self._patterns = [_pattern(rule) for rule in given if rule != ANY]

    def allow(self, origin: str) -> bool:
        if not _RULE.fullmatch(origin.lower()) or "*" in origin:
            return False
        return self._any or any(pattern.fullmatch(origin.lower()) for pattern in self._patterns)


def _pattern(rule: str) -> re.Pattern[str]:
    match = _RULE.fullmatch(rule.lower().removesuffix("/"))
    if match is None:
        raise ValueError(f"{rule!r} is not an origin: use SCHEME://HOST[:PORT], where host or port can be *, or just *")
    scheme, host, port = match.groups()
    hosts = rf"(?:{_HOST})" if host == "*" else re.escape(host)
    port = port or ("*" if host == "*" else "")
    ports = r"(?::[0-9]{1,5})?" if port == "*" else f":{port}" if port else ""
    return re.compile(rf"{re.escape(scheme)}://{hosts}{ports}")
