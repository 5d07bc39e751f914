"""Define the server settings, which are validated on creation and immutable.

Examples of `OriginRules` patterns: `app://obsidian.md`, `vscode-webview://*`, `http://localhost:*` and `*`.
"""

from __future__ import annotations

import ipaddress
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints
from urllib.parse import urlsplit

import platformdirs

from notso.web.values.errors import SettingsError, UnsafeBindError
from notso.web.values.sign_in import SignInSettings, parse_network

ANY = "*"
_SCHEME = r"[a-z][a-z0-9+.-]*"
_HOST = r"\[[0-9a-f:.]+\]|[a-z0-9._-]+"
_RULE = re.compile(rf"({_SCHEME})://(\*|{_HOST})(?::(\*|[0-9]{{1,5}}))?")


class OriginRules:
    """Match origins against patterns. `*` matches any host or port; the pattern `*` alone matches any origin.

    Raises ValueError for invalid patterns.
    """

    # No pattern matches "null", which browsers send for pages with an opaque origin.
    def __init__(self, rules: Iterable[str]) -> None:
        patterns = tuple(rules)
        self._any = ANY in patterns
        self._patterns = [_pattern(rule) for rule in patterns if rule != ANY]

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


DEFAULT_PORT = 3000
MAX_REQUESTS_PER_MINUTE = 1_000_000
RATE_BEYOND_LOOPBACK = 600
VALKEY_SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
NO_POSTGRES = "the database URL must begin with postgresql://"
_BASE_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]{1,64}){1,8}")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def default_data_dir() -> Path:
    return Path(platformdirs.user_data_dir("notso", appauthor=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting's range and command-line option. Without `help`, there is no command-line option."""

    help: str = ""
    metavar: str = ""
    name: str = ""  # default: the name of the setting
    short: str = ""
    variable: str = ""  # environment variable
    low: float | None = None
    high: float | None = None
    is_duration: bool = False  # such as 30s, 5m or 1h30m
    is_folder: bool = False  # must be an existing folder
    of_the_engine: bool = False  # does not apply to front ends
    after: str = ""  # option that precedes this one in --help; default: the option of the previous setting
    default: Any = None
    kind: Any = None

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple


def _setting(default: Any, *, secret: bool = False, **options: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"option": Option(default=default, **options)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Server settings. Times are in seconds. Raises SettingsError."""

    # Addresses other than loopback require an API key or sign-in; otherwise, UnsafeBindError is raised.
    host: str = _setting(
        "127.0.0.1", help="Address to listen on.", metavar="HOST", variable="NOTSO_HOST", after="model"
    )
    port: int = _setting(
        DEFAULT_PORT,
        help="Port to listen on (0: any free port).",
        metavar="PORT",
        short="-p",
        variable="NOTSO_PORT",
        low=0,
        high=65_535,
    )
    ollama_port: int | None = _setting(
        None, help="Also serve Ollama's API on this port (Ollama uses 11434).", metavar="PORT", low=0, high=65_535
    )
    adapter_dir: Path | None = _setting(
        None,
        help="Directory the API may load adapters from.",
        metavar="DIR",
        is_folder=True,
        of_the_engine=True,
        after="adapter",
    )
    # Negative: never unload. None: keep the default model, and unload others that have been idle for five minutes.
    keep_alive_seconds: float | None = _setting(
        None,
        help="Unload models idle for this long (30s, 5m; -1: never).",
        metavar="TIME",
        name="keep_alive",
        variable="NOTSO_KEEP_ALIVE",
        is_duration=True,
        of_the_engine=True,
        after="max_num_seqs",
    )
    data_dir: Path | None = _setting(  # None: default_data_dir()
        None,
        help="Directory for conversations and caches.",
        metavar="FOLDER",
        variable="NOTSO_DATA_DIR",
        after="library_disk",
    )
    # Several servers can share this database, which replaces the SQLite file in data_dir. Other files stay there.
    database_url: str | None = _setting(
        None,
        help="Store conversations in PostgreSQL instead of SQLite.",
        metavar="URL",
        variable="DATABASE_URL",
        secret=True,
    )
    engine_api: bool = _setting(
        False, help="Serve the engine API to front ends (requires NOTSO_ENGINE_KEY).", of_the_engine=True
    )
    engine_url: str | None = _setting(  # None: compute locally
        None, help="Run as a front end for the engine at this URL.", metavar="URL", variable="NOTSO_ENGINE_URL"
    )
    allowed_hosts: tuple[str, ...] = _setting(  # in addition to loopback and `host`
        (),
        help="Accept requests for this host name; repeatable.",
        metavar="NAME",
        name="allow_host",
        after="api_key_file",
    )
    allowed_origins: tuple[str, ...] = _setting(  # patterns of OriginRules
        (), help="Allow CORS requests from this origin; repeatable.", metavar="ORIGIN", name="allow_origin"
    )
    requests_per_minute: int | None = _setting(  # None: RATE_BEYOND_LOOPBACK, or 0 on loopback
        None,
        help="Maximum API requests per minute from each client address (0: unlimited).",
        metavar="N",
        name="rate_limit",
        variable="NOTSO_RATE_LIMIT",
        low=0,
        high=MAX_REQUESTS_PER_MINUTE,
    )
    valkey_url: str | None = _setting(  # stores only state that may be lost
        None,
        help="URL of the Valkey or Redis server shared by several notso servers.",
        metavar="URL",
        variable="VALKEY_URL",
        secret=True,
    )
    # The trusted headers are X-Forwarded-For, X-Forwarded-Proto and X-Forwarded-Prefix.
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        help="Trust X-Forwarded headers from this proxy address or network; repeatable.",
        metavar="ADDRESS",
        name="trust_proxy",
    )
    base_path: str = _setting(
        "",
        help="URL path of this server behind a reverse proxy, such as /chat.",
        metavar="PATH",
        variable="NOTSO_BASE_PATH",
    )
    leave_seconds: float = _setting(
        0.0, help="On shutdown, keep serving for S seconds, but return 503 at /health.", metavar="S", low=0, high=600
    )
    mcp_config: Path | None = _setting(
        None,
        help="File that lists MCP servers to use as tools (requires the optional extra `mcp`).",
        metavar="FILE",
        variable="NOTSO_MCP_CONFIG",
    )
    mcp_allowed_http: tuple[str, ...] = _setting(  # in addition to this machine
        (),
        help="Allow plain http to MCP servers at this host or network; repeatable.",
        metavar="HOST",
        name="mcp_allow_http",
        variable="NOTSO_MCP_ALLOW_HTTP",
    )
    documents: Path | None = _setting(
        None,
        help="Folder of documents that all users can ask about; never modified.",
        metavar="FOLDER",
        variable="NOTSO_DOCUMENTS",
        is_folder=True,
        after="mcp_allow_http",
    )
    unconfined_documents: bool = _setting(
        False,
        help="Parse PDF files and spreadsheets even if the system has no sandbox (Landlock and seccomp).",
        after="documents",
    )
    keep_volatile: bool = _setting(
        False,
        help="Keep the x-anthropic-billing-header line of Claude Code's system prompts, although it prevents caching.",
        after="sign_in",
    )
    strict_fields: bool = _setting(
        False, help="Reject API requests with fields that would be ignored.", variable="NOTSO_STRICT_FIELDS"
    )
    api_key: str | None = field(default=None, repr=False)  # key that grants access to protected routes
    engine_key: str | None = field(default=None, repr=False)  # shared secret of engine and front ends
    sign_in_plugin: str | None = None
    sign_in: SignInSettings = field(default_factory=SignInSettings)
    max_waiting_turns: int = _setting(32, low=1)  # queue length at which new turns are refused
    max_message_characters: int = _setting(200_000, low=1)
    max_answer_characters: int = _setting(262_144, low=1)  # longer answers are stopped
    drain_seconds: float = _setting(10.0, low=0, high=600)  # time limit for running answers on shutdown
    send_timeout_seconds: float = 30.0  # a client that reads nothing for this long is disconnected

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value, low, high = getattr(self, name), option.low, option.high
            if value is None or low is None or low <= value <= (math.inf if high is None else high):
                continue
            expected = f"at least {low}" if high is None else f"from {low} to {high}"
            raise SettingsError(f"{name} must be {expected}", setting=name)
        if not self.host or any(character.isspace() or character == "/" for character in self.host):
            raise SettingsError("host must be a name or an address", setting="host")
        if not is_loopback(self.host) and not self.requires_authentication:
            raise UnsafeBindError(
                f"listening on {self.host} allows access from other machines: set an API key, or use 127.0.0.1",
                setting="host",
            )
        if self.database_url is not None and not is_postgres(self.database_url):
            raise SettingsError(NO_POSTGRES, setting="database_url")
        try:
            OriginRules(self.allowed_origins)
        except ValueError as error:
            raise SettingsError(str(error), setting="allowed_origins") from None
        for name in ("api_key", "engine_key"):
            _require_key(getattr(self, name), name)
        if self.engine_url is not None and not is_engine_url(self.engine_url):
            raise SettingsError("engine_url must be http://HOST:PORT or https://HOST:PORT", setting="engine_url")
        if (self.engine_api or self.engine_url is not None) and self.engine_key is None:
            raise SettingsError("an engine and its front ends require a key", setting="engine_key")
        if self.engine_api and self.engine_url is not None:
            raise SettingsError("a front end cannot serve the engine API", setting="engine_api")
        # `math.isfinite` would raise OverflowError for an integer that no float can represent.
        if self.keep_alive_seconds is not None and not abs(self.keep_alive_seconds) <= sys.float_info.max:
            raise SettingsError("keep_alive_seconds must be a finite number", setting="keep_alive_seconds")
        if self.valkey_url is not None and not self.valkey_url.startswith(VALKEY_SCHEMES):
            raise SettingsError(f"valkey_url must begin with one of {', '.join(VALKEY_SCHEMES)}", setting="valkey_url")
        for proxy in self.trusted_proxies:
            try:
                parse_network(proxy)
            except ValueError as error:
                raise SettingsError(f"trusted_proxies: {error}", setting="trusted_proxies") from None
        for name in self.allowed_hosts:
            if not _is_host_name(name):
                examples = "bot.example or xn--mnchen-3ya.example"
                message = f"allow_host must be a host name such as {examples}, without a scheme or port, not {name!r}"
                raise SettingsError(message, setting="allowed_hosts")
        if self.base_path.strip("/") and not is_base_path(self.base_path.rstrip("/")):
            raise SettingsError("base_path must be a path such as /chat", setting="base_path")
        if not 0 < self.send_timeout_seconds <= 600:
            raise SettingsError("send_timeout_seconds must be above 0 and at most 600", setting="send_timeout_seconds")

    @property
    def host_names(self) -> frozenset[str]:
        """Accepted `Host` names, in lower case, without port or brackets."""
        names = {*LOOPBACK_NAMES, *(name.lower().strip("[]") for name in self.allowed_hosts)}
        if not _is_wildcard(self.host):
            names.add(self.host.lower().strip("[]"))
        return frozenset(names)

    @property
    def is_multi_user(self) -> bool:
        """Whether the server distinguishes users."""
        return self.sign_in_plugin is not None or self.sign_in.requires_authentication

    @property
    def requires_authentication(self) -> bool:
        return bool(self.api_key) or self.is_multi_user

    @property
    def rate(self) -> int:
        """API requests per minute and client address; 0 means no limit."""
        if self.requests_per_minute is not None:
            return self.requests_per_minute
        return 0 if is_loopback(self.host) else RATE_BEYOND_LOOPBACK

    @property
    def directory(self) -> Path:
        return self.data_dir if self.data_dir is not None else default_data_dir()


_KINDS = get_type_hints(Settings)
OPTIONS: dict[str, Option] = {
    each.name: replace(each.metadata["option"], kind=_KINDS[each.name], name=each.metadata["option"].name or each.name)
    for each in fields(Settings)
    if each.metadata
}
"""Options by the name of their setting."""


def _require_key(key: str | None, name: str) -> None:
    label = "an API key" if name == "api_key" else "the engine key"
    if key is not None and (key != key.strip() or not key.isprintable()):
        raise SettingsError(f"{label} must not begin or end with a space or contain line breaks", setting=name)
    if key is not None and len(key) < 16:
        raise SettingsError(f"{label} needs at least 16 characters", setting=name)


def is_postgres(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


def _is_host_name(name: str) -> bool:
    if ":" not in name:
        return _HOST_NAME.fullmatch(name) is not None
    try:
        ipaddress.IPv6Address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return "%" not in name


def is_engine_url(url: str) -> bool:
    """Return whether a URL consists of a scheme, host and optional port."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
            and "@" not in parts.netloc
            and parts.path in ("", "/")
            and not parts.query
            and not parts.fragment
        )
    except ValueError:
        return False


def is_base_path(text: str) -> bool:
    """Return whether `text` is a path such as /tools/chat, without a trailing slash."""
    return _BASE_PATH.fullmatch(text) is not None and not {".", ".."} & set(text.split("/"))


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
