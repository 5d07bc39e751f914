"""Read configuration files of MCP servers, in the formats of Claude, VS Code, Codex and other programs.

The servers are listed under keys in `_CONTAINERS`, such as `mcpServers`, or at the top level. Servers and settings that
cannot be used are skipped and reported with a reason. SettingsError is raised only if the file as a whole is unusable.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from notso.text_file import NotTextError, read_text
from notso.web.values.errors import SettingsError
from notso.web.values.visible_text import sanitize_line


class PlainHttpHosts:
    """Hosts to which unencrypted connections are allowed: loopback, and the names and networks in `allowed`.

    Raises SettingsError if a name or network is invalid.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for each in allowed:
            try:
                self._networks.append(ipaddress.ip_network(each.strip("[]"), strict=False))
            except ValueError:
                name = each.lower().rstrip(".")
                if not name or not name.isascii() or not all(sign.isalnum() or sign in "-._" for sign in name):
                    message = f"--mcp-allow-http needs a host such as tools.lan or 192.168.1.0/24, not {each!r}"
                    raise SettingsError(message, setting="mcp_allow_http") from None
                self._names.add(name)

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            name = host.lower().rstrip(".")
            return name == "localhost" or name in self._names
        return address.is_loopback or any(address in each for each in self._networks)


MAX_FILE_BYTES = 262_144
MAX_SERVERS = 8
MAX_NAME_CHARACTERS = 32
"""Maximum length of a server's name, which is a prefix of the names of its tools."""

MAX_LABEL_CHARACTERS = 80
MAX_NAMED = 12
"""Maximum number of names listed in a message. If there are more, the message ends with the number of the others."""

_CONTAINERS = (
    "mcpServers",  # Claude, Cursor, Cline and most other programs
    "servers",  # VS Code
    "mcp_servers",  # Codex
    "context_servers",  # Zed
    "mcp",  # opencode and Crush
    "mcp.servers",  # old versions of VS Code
    "amp.mcpServers",  # Amp
)
"""Keys that contain servers, with the programs that use them."""

_IGNORED_KEYS = {"$schema", "inputs", "version", "schema", "schema_version"}
"""Top-level keys that are ignored without a report."""

_HTTP_TYPES = {"http", "https", "streamablehttp", "httpstream", "streamable", "remote"}
_STDIO_TYPES = {"stdio", "local", "command", "process"}
_URLS = ("httpUrl", "serverUrl", "url", "baseUrl", "uri", "endpoint")
_TYPES = ("type", "transport", "transportType")
_HEADERS = ("headers", "http_headers")
_ENVIRONMENTS = ("env", "environment")
_ALLOWED = ("includeTools", "enabledTools", "enabled_tools", "tools", "allowedTools")
_DENIED = ("excludeTools", "disabledTools", "disabled_tools")
_SWITCHES = ("enabled", "isActive", "active")
_ANY_KIND = {*_TYPES, "disabled", *_SWITCHES, "name", *_ALLOWED, *_DENIED}
_OF_PROGRAMS = {"command", "args", *_ENVIRONMENTS, "cwd", "envFile"}
_AT_ADDRESSES = {*_URLS, *_HEADERS, "requestInit", "bearer_token_env_var"}
_SILENT = {"description", "source", "gallery", "iconPath", "icon", "$schema", "version"}
"""Keys of a server that are ignored without a report, because they affect neither the connection nor its use."""

_KNOWN = _ANY_KIND | _OF_PROGRAMS | _AT_ADDRESSES | _SILENT

_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_HEADER_VALUE = re.compile(r"[\t -~]{0,4096}")
_ENV_NAME = re.compile(r"[^=\0]+")
_VARIABLE = re.compile(
    r"\$\{([^{}$\n]{1,200})\}|\{env:([A-Za-z_][A-Za-z0-9_]*)\}|(?:\A|(?<= ))\$([A-Za-z_][A-Za-z0-9_]*)\Z"
)
_PLAIN = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_ENV_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")

Transport = Literal["stdio", "http", "sse", "http or sse"]


@dataclass(frozen=True, slots=True)
class SkippedItem:
    """A skipped part of a configuration, or an unusable tool. Name and reason are single lines."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class McpServerConfig:
    """An MCP server: a program that is run locally, or a server at a `url`."""

    name: str  # prefix of the tools' names; letters, digits, `_` and `-`
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)  # may contain secrets
    cwd: str | None = None
    url: str = field(default="", repr=False)  # may contain a secret
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    label: str = ""  # name in the file, if it differs from `name`
    transport: Transport = "http or sse"  # "http or sse": try both protocols
    allowed: frozenset[str] | None = None  # names of the tools to use, with wildcards `*` and `?`; None for all
    denied: frozenset[str] = frozenset()  # names of tools not to use, with the same wildcards

    @property
    def title(self) -> str:
        return self.label or self.name

    def allows_tool(self, tool: str) -> bool:
        return not _matches_any(tool, self.denied) and (self.allowed is None or _matches_any(tool, self.allowed))


@dataclass(frozen=True, slots=True)
class McpConfig:
    entries: tuple[McpServerConfig, ...] = ()
    left_out: tuple[SkippedItem, ...] = ()


class _UnusableServerError(Exception):
    pass


def read_mcp_config(path: Path, allowed_http: Iterable[str] = ()) -> McpConfig:
    """Read a configuration file: TOML if its extension is .toml, otherwise JSON with comments and trailing commas.

    Passes `allowed_http` to PlainHttpHosts. Raises SettingsError if the file or an allowed host is invalid.
    """
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from error
    except NotTextError as error:
        raise _error(f"{path} {error}") from error
    content = _parse_file(path, text)
    servers, notes = _find_servers(path, content)
    hosts = PlainHttpHosts(allowed_http)
    entries: dict[str, McpServerConfig] = {}
    for label, entry in servers:
        shown = sanitize_line(label, MAX_LABEL_CHARACTERS) or "(without a name)"
        if len(entries) == MAX_SERVERS and not _is_disabled(entry):
            notes.append(SkippedItem(shown, f"at most {MAX_SERVERS} servers can be used"))
            continue
        reader = _ServerReader(path, _input_defaults(content), hosts)
        try:
            config = reader.entry(_prefix(label, entries), shown, entry)
        except _UnusableServerError as error:
            notes.append(SkippedItem(shown, sanitize_line(str(error), 300)))
        else:
            entries[config.name] = config
            notes += [SkippedItem(shown, sanitize_line(each, 300)) for each in reader.notes]
    return McpConfig(tuple(entries.values()), tuple(notes))


def _parse_file(path: Path, text: str) -> Any:
    if not text.strip():
        return {}
    if path.suffix.lower() in (".yaml", ".yml"):
        raise _error(f"{path.name} is YAML: write the servers as JSON or TOML")
    try:
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else read_commented_json(text)
    except json.JSONDecodeError as error:
        raise _error(f"{path.name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except tomllib.TOMLDecodeError as error:
        raise _error(f"{path.name} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _error(f"{path.name} is not JSON: a value is nested too deeply or too long") from error


def _find_servers(path: Path, content: Any) -> tuple[list[tuple[str, Any]], list[SkippedItem]]:
    if not isinstance(content, dict):
        raise _error(f'{path.name} needs an object with a key "mcpServers"')
    notes = [_duplicate_key_note(each) for each in duplicate_keys(content)]
    found: list[tuple[str, Any]] = []
    used = {each for each in _CONTAINERS if each in content}
    for key in _CONTAINERS:
        if key in content:
            rows, more = _list_servers(path, key, content[key])
            found += rows
            notes += more
    if not used and content and all(isinstance(each, dict) and _is_server(each) for each in content.values()):
        return list(content.items()), notes
    others = sorted(set(content) - used - _IGNORED_KEYS)
    if not used and others:
        raise _error(
            f'{path.name} has no servers: the key "mcpServers" is missing; its keys are: {_format_names(others)}'
        )
    if not found:
        notes.append(SkippedItem(path.name, "it contains no servers"))
    if others:
        notes.append(SkippedItem(path.name, f"ignored: {_format_names(others)}"))
    return found, notes


def _list_servers(path: Path, key: str, value: Any) -> tuple[list[tuple[str, Any]], list[SkippedItem]]:
    if value is None:
        return [], []
    if isinstance(value, list):
        names = [each.get("name") if isinstance(each, dict) else None for each in value]
        return [
            (str(name or f"server-{at}"), each) for at, (name, each) in enumerate(zip(names, value, strict=True), 1)
        ], []
    if not isinstance(value, dict):
        raise _error(f'{path.name}: "{key}" must be an object that contains servers')
    if key == "mcp" and isinstance(value.get("servers"), dict) and not _is_server(value["servers"]):
        rows, notes = _list_servers(path, "mcp.servers", value["servers"])
        others = sorted(set(value) - {"servers", "inputs"})
        return rows, notes + ([SkippedItem(path.name, f"ignored in mcp: {_format_names(others)}")] if others else [])
    notes = [_duplicate_key_note(each) for each in duplicate_keys(value)]
    if key == "mcp":  # members of `mcp` that are not objects are settings, not servers
        others = [name for name, each in value.items() if not isinstance(each, dict)]
        notes += [SkippedItem(path.name, f"ignored in mcp: {_format_names(others)}")] if others else []
        return [(name, each) for name, each in value.items() if isinstance(each, dict)], notes
    return list(value.items()), notes


def _duplicate_key_note(key: str) -> SkippedItem:
    return SkippedItem(sanitize_line(key, MAX_LABEL_CHARACTERS), "defined twice; the last definition is used")


def _is_server(value: Mapping[str, Any]) -> bool:
    return any(isinstance(value.get(each), str | list | dict) for each in ("command", *_URLS))


def _input_defaults(content: Mapping[str, Any]) -> dict[str, str]:
    inner = content.get("mcp")
    rows = content.get("inputs", inner.get("inputs") if isinstance(inner, dict) else None)
    found = [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []
    return {str(each.get("id")): each["default"] for each in found if isinstance(each.get("default"), str)}


def _prefix(label: str, taken: Mapping[str, object]) -> str:
    segment = next((each for each in reversed(label.split("/")) if _UNFIT.sub("", each)), label)
    name = _UNFIT.sub("_", segment.removeprefix("@")).strip("_")[:MAX_NAME_CHARACTERS] or "server"
    return unique_name(name, taken, MAX_NAME_CHARACTERS)


def unique_name(name: str, taken: Mapping[str, object], most: int, separator: str = "_") -> str:
    """Cut a name to `most` characters. If the result is taken, make it end with a number."""
    found, number = name[:most], 1
    while found in taken:
        number += 1
        found = f"{name[: most - len(str(number)) - 1]}{separator}{number}"
    return found


def _format_names(names: Iterable[str]) -> str:
    shown = [sanitize_line(str(each), 60) or "(an empty name)" for each in names]
    more = len(shown) - MAX_NAMED
    return ", ".join(shown[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_disabled(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    return _is_true(entry.get("disabled")) or any(not _is_true(entry.get(each, True)) for each in _SWITCHES)


def _is_true(value: Any) -> bool:
    return value.strip().lower() not in ("", "false", "no", "off", "0") if isinstance(value, str) else bool(value)


class _ServerReader:
    def __init__(self, path: Path, inputs: Mapping[str, str], hosts: PlainHttpHosts) -> None:
        self.notes: list[str] = []
        self._path = path
        self._input_defaults = inputs
        self._hosts = hosts

    def entry(self, name: str, shown: str, entry: Any) -> McpServerConfig:
        if not isinstance(entry, dict):
            raise _UnusableServerError("an object with a command or a url is needed")
        if _is_disabled(entry):
            raise _UnusableServerError("disabled in the file")
        self.notes += [f"{key} is defined twice; the last value is used" for key in duplicate_keys(entry)]
        unknown = set(entry) - _KNOWN
        entry = {key: value for key, value in entry.items() if value is not None}
        kind = self._kind(entry)
        allowed, denied = self._tools(entry, _ALLOWED), self._tools(entry, _DENIED)
        label = "" if shown == name else shown
        config = self._program(name, entry) if kind == "stdio" else self._address(name, entry, kind)
        other_kind = (_AT_ADDRESSES if kind == "stdio" else _OF_PROGRAMS) & set(entry)
        if ignored := sorted(unknown | other_kind):
            self.notes.insert(0, f"ignored: {_format_names(ignored)}")
        return replace(config, label=label, transport=kind, allowed=allowed, denied=denied or frozenset())

    def _kind(self, entry: Mapping[str, Any]) -> Transport:
        url = next((entry[each] for each in _URLS if each in entry), None)
        type_name = next((entry[each] for each in _TYPES if each in entry), None)
        if type_name is None:
            if url is None:
                return "stdio"
            if "httpUrl" in entry:
                return "http"
            return "stdio" if isinstance(entry.get("command"), str) and entry["command"].strip() else "http or sse"
        kind = re.sub(r"[-_ ]", "", type_name).lower() if isinstance(type_name, str) else ""
        if kind in _STDIO_TYPES:
            return "stdio"
        if kind in _HTTP_TYPES:
            return "http or sse" if kind == "remote" else "http"
        if kind == "sse":
            return "sse"
        raise _UnusableServerError(
            f"type {sanitize_line(json.dumps(type_name), 60)} is not supported; use stdio, http or sse"
        )

    def _program(self, name: str, entry: Mapping[str, Any]) -> McpServerConfig:
        command: Any = entry.get("command")
        args: Any = entry.get("args", [])
        env = self._first(entry, _ENVIRONMENTS)
        if isinstance(command, dict):  # format of Zed
            args, env = command.get("args", args), command.get("env", env)
            command = command.get("path", command.get("command"))
        if not isinstance(args, list):
            raise _UnusableServerError("args must be a list of strings")
        if isinstance(command, list):  # format of opencode
            command, args = (command[0] if command else None), [*command[1:], *args]
        if not isinstance(command, str) or not command.strip():
            has_url = any(each in entry for each in _URLS)
            raise _UnusableServerError("type stdio needs a command, not a url" if has_url else "a command is needed")
        command = _expand_home(self._expand_text(command.strip(), "command"))
        words = [self._expand_text(each, f"args[{at}]") for at, each in enumerate(args)]
        # Path.exists() would raise an error for a long command, or for one in an unreadable folder.
        exists = os.path.exists(command) or shutil.which(command) is not None  # noqa: PTH110
        if not words and " " in command and not exists:
            command, *words = _split(command)
        cwd = _expand_home(self._expand_text(entry["cwd"], "cwd")) if "cwd" in entry else None
        self._require_no_nul(command, *words, cwd or "")
        return McpServerConfig(name, command, tuple(words), self._environment(entry, env), cwd)

    def _environment(self, entry: Mapping[str, Any], env: Any) -> dict[str, str]:
        variables = self._env_file(entry["envFile"]) if "envFile" in entry else {}
        if env is None:
            return variables
        if not isinstance(env, dict):
            raise _UnusableServerError("env must be an object that maps names to strings")
        for name, value in env.items():
            if value is None:
                continue
            if not _ENV_NAME.fullmatch(name):
                raise _UnusableServerError(f"env: {json.dumps(name)} is not the name of a variable")
            try:
                variables[name] = self._expand_text(value, f"env.{name}")
            except _UnsetVariableError as error:
                self.notes.append(f"env.{name} is left out: {error}")
        self._require_no_nul(*variables.values())
        return variables

    def _env_file(self, value: Any) -> dict[str, str]:
        path = Path(_expand_home(self._expand_text(value, "envFile")))
        try:
            text = read_text(self._path.parent / path, MAX_FILE_BYTES)
        except OSError as error:
            raise _UnusableServerError(f"envFile {path} cannot be read: {error.strerror}") from None
        except NotTextError as error:
            raise _UnusableServerError(f"envFile {path} {error}") from None
        variables = {}
        for line in text.split("\n"):
            found = _ENV_LINE.fullmatch(line.strip())
            if found is not None:
                content = found[2].strip()
                quoted = len(content) > 1 and content[0] == content[-1] and content[0] in "\"'"
                variables[found[1]] = content[1:-1] if quoted else content
        return variables

    def _address(self, name: str, entry: Mapping[str, Any], kind: Transport) -> McpServerConfig:
        key = next((each for each in _URLS if each in entry), None)
        if key is None:
            raise _UnusableServerError(f"type {kind} needs a url")
        url = self._expand_text(entry[key], key).strip()
        if unused := [each for each in _URLS if each in entry and each != key]:
            self.notes.append(f"ignored because {key} is set: {_format_names(unused)}")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise _UnusableServerError(f"{key} is not a URL") from None
        if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
            raise _UnusableServerError(f"{key} must begin with https:// or http://")
        if parts.scheme == "http" and host not in self._hosts:
            raise _UnusableServerError(
                f"http to {host} is not encrypted: use https, or allow it with --mcp-allow-http {host}"
            )
        if parts.username is not None:
            raise _UnusableServerError(f"{key} must not contain a user or password; use headers")
        return McpServerConfig(name, url=parts._replace(fragment="").geturl(), headers=self._headers(entry))

    def _headers(self, entry: Mapping[str, Any]) -> dict[str, str]:
        headers, options = self._first(entry, _HEADERS), entry.get("requestInit")
        if headers is None and isinstance(options, dict):
            headers = options.get("headers")
        result = {}
        if "bearer_token_env_var" in entry:
            variable = self._expand_text(entry["bearer_token_env_var"], "bearer_token_env_var")
            result["Authorization"] = f"Bearer {_environment_variable(variable)}"
        if headers is not None and not isinstance(headers, dict):
            raise _UnusableServerError("headers must be an object that maps names to strings")
        for name, value in (headers or {}).items():
            if value is None:
                continue
            text = self._expand_text(value, f"headers.{name}").strip()
            if not _HEADER.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):
                raise _UnusableServerError(f"headers: {json.dumps(name)} is not a valid header (one line of ASCII)")
            result[name] = text
        return result

    def _tools(self, entry: Mapping[str, Any], keys: Iterable[str]) -> frozenset[str] | None:
        names = self._first(entry, keys)
        if isinstance(names, dict):  # maps names of tools to true or false
            names = [name for name, value in names.items() if _is_true(value)]
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            return frozenset(names)
        if names is not None:
            raise _UnusableServerError(f"{next(each for each in keys if each in entry)} must be a list of tool names")
        return None

    def _first(self, entry: Mapping[str, Any], keys: Iterable[str]) -> Any:
        found = [each for each in keys if each in entry]
        if len(found) > 1:
            self.notes.append(f"ignored because {found[0]} is set: {_format_names(found[1:])}")
        return entry[found[0]] if found else None

    def _expand_text(self, value: Any, place: str) -> str:
        # Raises _UnusableServerError, or _UnsetVariableError if a variable is not set.
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return str(value)
        if not isinstance(value, str):
            raise _UnusableServerError(f"{place} must be a string")
        return _VARIABLE.sub(self._expand_variable, value)

    def _expand_variable(self, found: re.Match[str]) -> str:
        if found[2] is not None:
            return _environment_variable(found[2])
        if found[3] is not None:
            return os.environ.get(found[3], found[0])
        name = found[1]
        if name.startswith("input:"):
            return self._input_value(name.removeprefix("input:"))
        if name in ("workspaceFolder", "workspaceRoot"):
            folder = self._path.resolve().parent
            return str(folder.parent if folder.name.startswith(".") else folder)
        if name in ("userHome", "HOME") and "HOME" not in os.environ:
            return str(Path.home())
        if name == "userHome":
            return os.environ["HOME"]
        if name in ("pathSeparator", "/"):
            return os.sep
        plain = _PLAIN.fullmatch(name)
        if plain is None:
            return found[0]
        default = plain[2]
        return _environment_variable(plain[1]) if default is None else os.environ.get(plain[1]) or default

    def _input_value(self, name: str) -> str:
        variable = "NOTSO_INPUT_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
        if variable in os.environ:
            return os.environ[variable]
        if name in self._input_defaults:
            return self._input_defaults[name]
        raise _UnsetVariableError(f"the input {name} has no value: set {variable}")

    @staticmethod
    def _require_no_nul(*texts: str) -> None:
        if any("\0" in each for each in texts):
            raise _UnusableServerError("a value contains a NUL character")


class _UnsetVariableError(_UnusableServerError):
    pass


def _environment_variable(name: str) -> str:
    if name not in os.environ:
        raise _UnsetVariableError(f"the environment variable {name} is not set")
    return os.environ[name]


def _expand_home(path: str) -> str:
    return str(Path.home() / path[2:]) if path.startswith("~/") else path


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise _UnusableServerError(f"the command cannot be split into words: {error}") from None


def _matches_any(tool: str, patterns: frozenset[str]) -> bool:
    return tool in patterns or any(fnmatchcase(tool, each) for each in patterns)


_error = partial(SettingsError, setting="mcp_config")


_COMMENTS = re.compile(
    r"""
    "(?:[^"\\]|\\.)*+(?:"|\\?\Z)        # a string, or the rest of the text after a quote that is never closed
    | //[^\n]*+
    | /\*.*?(?:\*/|\Z)  # lazy, because a possessive group with a lookahead skips text in Python 3.11.2 (Debian 12)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|,(?=\s*+[}\]])', re.DOTALL)
_NOT_LINE_END = re.compile(r"[^\n]")


class _Object(dict[str, Any]):
    repeated: tuple[str, ...] = ()


def read_commented_json(text: str) -> Any:
    """Parse JSON with `//` and `/* */` comments and trailing commas, in linear time.

    Of repeated keys, the last is kept. Raises json.JSONDecodeError with the line and column in `text`, ValueError if
    a number is too long, or RecursionError if a value is nested too deeply.
    """
    plain = _COMMENTS.sub(lambda found: found[0] if found[0][0] == '"' else _NOT_LINE_END.sub(" ", found[0]), text)
    plain = _COMMAS.sub(lambda found: found[0] if found[0][0] == '"' else " ", plain)
    return json.loads(plain, object_pairs_hook=_object)


def duplicate_keys(value: object) -> tuple[str, ...]:
    """Return the duplicate keys of an object from `read_commented_json`."""
    return value.repeated if isinstance(value, _Object) else ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    members = _Object(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        members.repeated = tuple(dict.fromkeys(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return members
