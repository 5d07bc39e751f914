"""The file of MCP servers, in the usual form: {"mcpServers": {name: {command, args, env} or {url, headers}}}."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from notso.regular_file import read_regular
from notso.web.values.errors import SettingsError

MAX_FILE_BYTES = 262_144
MAX_SERVERS = 8

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_HEADER_VALUE = re.compile(r"[ -~]{0,4096}")
_KNOWN = {"command", "args", "env", "cwd", "type", "transport", "disabled"}
_KNOWN_AT_ADDRESS = {"url", "headers", "type", "transport", "disabled"}
_HTTP_TYPES = {"http", "streamable-http", "streamable_http"}
_THIS_MACHINE = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class McpEntry:
    """How one server is reached: a program that speaks MCP over its standard input and output, or a `url`."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    cwd: str | None = None
    url: str = field(default="", repr=False)  # may hold a secret, too
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def read_mcp_config(path: Path) -> list[McpEntry]:
    """The servers of a file, without those that it disables. Raises SettingsError, which says what is wrong."""
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _error(f"{path.name} is not JSON") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise _error(f'{path.name} needs an object "mcpServers"')
    entries = [_entry(name, entry) for name, entry in servers.items() if not _is_disabled(name, entry)]
    if len(entries) > MAX_SERVERS:
        raise _error(f"at most {MAX_SERVERS} servers can be used, {path.name} names {len(entries)}")
    return entries


def _is_disabled(name: str, entry: Any) -> bool:
    disabled = entry.get("disabled", False) if isinstance(entry, dict) else False
    if not isinstance(disabled, bool):
        raise _error(f"{name}: disabled must be true or false")
    return disabled


def _entry(name: str, entry: Any) -> McpEntry:
    if not _NAME.fullmatch(name):
        raise _error(f"{name!r} is no name for a server: letters, digits and - are, up to 32")
    if not isinstance(entry, dict):
        raise _error(f"{name}: an object is needed")
    kind = entry.get("type", entry.get("transport", "http" if "url" in entry else "stdio"))
    if kind != "stdio" and (not isinstance(kind, str) or kind not in _HTTP_TYPES):
        raise _error(f"{name}: only stdio and streamable HTTP (type http) can be used")
    known = _KNOWN if kind == "stdio" else _KNOWN_AT_ADDRESS
    unknown = sorted(set(entry) - known)
    if unknown:
        raise _error(f"{name}: {unknown[0]!r} is not known; there are: {', '.join(sorted(known))}")
    if kind != "stdio":
        return _entry_at_address(name, entry)
    command, args, env, cwd = entry.get("command"), entry.get("args", []), entry.get("env", {}), entry.get("cwd")
    if not isinstance(command, str) or not command.strip():
        raise _error(f"{name}: a command is needed")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise _error(f"{name}: args must be a list of texts")
    if not isinstance(env, dict) or not all(isinstance(each, str) for each in env.values()):
        raise _error(f"{name}: env must map names to texts")
    if cwd is not None and not isinstance(cwd, str):
        raise _error(f"{name}: cwd must be a text")
    return McpEntry(name, command, tuple(args), dict(env), cwd)


def _entry_at_address(name: str, entry: dict[str, Any]) -> McpEntry:
    url, headers = entry.get("url"), entry.get("headers", {})
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise _error(f"{name}: the url is none") from None
    if not isinstance(url, str) or not host or parts.scheme not in ("http", "https"):
        raise _error(f"{name}: a url is needed, https://...")
    if parts.scheme == "http" and host not in _THIS_MACHINE:
        raise _error(f"{name}: http is for this machine only; another one needs https")
    if parts.username is not None or parts.fragment:
        raise _error(f"{name}: the url must have no user and no fragment; use headers")
    if not isinstance(headers, dict) or not all(
        _HEADER.fullmatch(key) and isinstance(value, str) and _HEADER_VALUE.fullmatch(value)
        for key, value in headers.items()
    ):
        raise _error(f"{name}: headers must map names to texts of one line")
    return McpEntry(name, url=url, headers=dict(headers))


def _error(message: str) -> SettingsError:
    return SettingsError(message, setting="mcp_config")
