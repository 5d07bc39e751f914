"""Operator's settings, validated once and immutable."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from notso.web.values.errors import SettingsError, UnsafeBindError
from notso.web.values.origin_rules import OriginRules
from notso.web.values.sign_in import SignInSettings

DEFAULT_PORT = 3000
MAX_REQUESTS_PER_MINUTE = 1_000_000
RATE_BEYOND_LOOPBACK = 600
VALKEY_SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
NO_POSTGRES = "the database URL must begin with postgresql://"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def default_data_dir() -> Path:
    """Return the platform's user data directory for this program."""
    return Path(platformdirs.user_data_dir("notso", appauthor=False))


@dataclass(frozen=True, slots=True)
class Settings:
    """Server settings. Times in seconds. Raises SettingsError."""

    host: str = "127.0.0.1"  # address to listen on; others than loopback require `api_key` (UnsafeBindError)
    port: int = DEFAULT_PORT  # 0: any free port
    ollama_port: int | None = None  # additional port for Ollama's clients; 0: any free port
    data_dir: Path | None = None  # conversations; None: default_data_dir()
    # PostgreSQL database for conversations, shared by several servers; other files stay in data_dir.
    database_url: str | None = field(default=None, repr=False)
    mcp_config: Path | None = None  # MCP servers for chats
    mcp_allowed_http: tuple[str, ...] = ()  # hosts and networks, besides this machine, of MCP servers without https
    adapter_dir: Path | None = None  # folder that API clients may load adapters from
    sign_in_plugin: str | None = None  # plugin that identifies callers
    sign_in: SignInSettings = field(default_factory=SignInSettings)  # rules for several users
    allowed_hosts: tuple[str, ...] = ()  # accepted Host names besides loopback and `host`
    allowed_origins: tuple[str, ...] = ()  # origins with access to the API, as for OriginRules
    api_key: str | None = field(default=None, repr=False)  # required by guarded routes
    engine_url: str | None = None  # URL of the engine server; None: compute locally
    engine_api: bool = False  # serve as the engine of front ends
    engine_key: str | None = field(default=None, repr=False)  # shared secret of engine and front ends
    requests_per_minute: int | None = None  # API requests per address; None: RATE_BEYOND_LOOPBACK if public
    strict_fields: bool = False  # reject request fields that would be ignored
    keep_volatile: bool = False  # keep client lines that change with every request in the prompt
    # Idle time before a model is unloaded, negative: unlimited. None: the default model stays, others five minutes.
    keep_alive_seconds: float | None = None
    max_waiting_turns: int = 32  # waiting requests before new ones are refused
    max_message_characters: int = 200_000  # of a question
    max_answer_characters: int = 262_144  # an answer beyond this is stopped
    drain_seconds: float = 10.0  # time for running answers on shutdown
    leave_seconds: float = 0.0  # time in which /health fails but requests are admitted, for a proxy
    valkey_url: str | None = field(default=None, repr=False)  # Valkey server for short-lived messages between replicas
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks with trusted X-Forwarded-For and X-Forwarded-Proto
    send_timeout_seconds: float = 30.0  # a reader that takes nothing for this long is dropped

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise SettingsError("port must be from 0 to 65535", setting="port")
        if self.ollama_port is not None and not 0 <= self.ollama_port <= 65_535:
            raise SettingsError("ollama_port must be from 0 to 65535", setting="ollama_port")
        if not self.host or any(character.isspace() or character == "/" for character in self.host):
            raise SettingsError("host must be a name or an address", setting="host")
        if not is_loopback(self.host) and not self.asks_who:
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
        if self.requests_per_minute is not None and not 0 <= self.requests_per_minute <= MAX_REQUESTS_PER_MINUTE:
            raise SettingsError(
                f"requests_per_minute must be from 0 to {MAX_REQUESTS_PER_MINUTE}", setting="requests_per_minute"
            )
        if self.keep_alive_seconds is not None and not math.isfinite(self.keep_alive_seconds):
            raise SettingsError("keep_alive_seconds must be a number", setting="keep_alive_seconds")
        for name in ("max_waiting_turns", "max_message_characters", "max_answer_characters"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1", setting=name)
        if not 0 <= self.drain_seconds <= 600:
            raise SettingsError("drain_seconds must be from 0 to 600", setting="drain_seconds")
        if not 0 <= self.leave_seconds <= 600:
            raise SettingsError("leave_seconds must be from 0 to 600", setting="leave_seconds")
        if self.valkey_url is not None and not self.valkey_url.startswith(VALKEY_SCHEMES):
            raise SettingsError(f"valkey_url must begin with one of {', '.join(VALKEY_SCHEMES)}", setting="valkey_url")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                message = f"trusted_proxies: {proxy!r} is neither an address nor a network"
                raise SettingsError(message, setting="trusted_proxies") from None
        if not 0 < self.send_timeout_seconds <= 600:
            raise SettingsError("send_timeout_seconds must be above 0, at most 600", setting="send_timeout_seconds")

    @property
    def host_names(self) -> frozenset[str]:
        """Accepted `Host` names: lower case, without port or brackets."""
        names = {*LOOPBACK_NAMES, *(name.lower().strip("[]") for name in self.allowed_hosts)}
        if not _is_wildcard(self.host):
            names.add(self.host.lower().strip("[]"))
        return frozenset(names)

    @property
    def many_use_it(self) -> bool:
        """Whether the server distinguishes users."""
        return self.sign_in_plugin is not None or self.sign_in.asks_who

    @property
    def asks_who(self) -> bool:
        return bool(self.api_key) or self.many_use_it

    @property
    def rate(self) -> int:
        """API requests per minute and address; 0 means no limit."""
        if self.requests_per_minute is not None:
            return self.requests_per_minute
        return 0 if is_loopback(self.host) else RATE_BEYOND_LOOPBACK

    @property
    def directory(self) -> Path:
        return self.data_dir if self.data_dir is not None else default_data_dir()


def _require_key(key: str | None, name: str) -> None:
    called = "an API key" if name == "api_key" else "an engine's key"
    if key is not None and (key != key.strip() or not key.isprintable()):
        raise SettingsError(f"{called} must not begin or end with a space or contain line breaks", setting=name)
    if key is not None and len(key) < 16:
        raise SettingsError(f"{called} needs at least 16 characters", setting=name)


def is_postgres(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


def is_engine_url(url: str) -> bool:
    """Whether a URL names a server without path, query or user."""
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


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable only from this machine."""
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
