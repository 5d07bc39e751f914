"""What an operator may choose about the server, checked once and frozen."""

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
NO_POSTGRES = "the address of the database begins with postgresql://"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def default_data_dir() -> Path:
    """The user's data directory for this program; it is made when the store opens."""
    return Path(platformdirs.user_data_dir("notso", appauthor=False))


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes or characters, times in seconds.

    host: address to listen on. Anything but loopback needs `api_key`, or UnsafeBindError is raised.
    port: 0 takes a free one.
    ollama_port: a second port, where Ollama's clients look; None for none, 0 takes a free one.
    data_dir: holds the conversations; None keeps them where the platform keeps user data.
    database_url: a PostgreSQL database that holds them instead, for several servers; the data directory keeps the rest.
    mcp_config: names MCP servers whose tools chats may use; None for none.
    mcp_allowed_http: hosts and networks, beside this machine, whose MCP servers may be reached without encryption.
    adapter_dir: from where programs may load adapters; None: they may load none.
    sign_in_plugin: the plugin that says who sent a request; None: none does.
    sign_in: who may use it, where many do.
    allowed_hosts: further names this server may be called by (in `Host`), beside loopback and `host`.
    allowed_origins: whose pages may use the API (see OriginRules); none but the server's own if empty.
    api_key: what guarded routes demand; None for a server only this machine reaches.
    requests_per_minute: requests of programs that one address may send; 0 is no limit. None: 600 where other machines
        reach the server, no limit where only this one does.
    strict_fields: fields of programs' requests that would be ignored are refused.
    engine_url: the server that computes for this one, http://HOST:PORT or https; None: this one does.
    engine_api: whether this server computes for others, its front ends.
    engine_key: what front ends show their engine; both have it.
    keep_volatile: the model reads lines of clients that change with every request (see volatile_lines), too.
    keep_alive_seconds: how long a model stays loaded without requests, negative: for ever; None: the default one for
        ever, others for five minutes.
    max_waiting_turns: questions that may wait for the engine before new ones are refused.
    max_message_characters: longest question. max_answer_characters: an answer that grows past this is stopped.
    drain_seconds: how long a running answer may go on after the server was told to stop.
    leave_seconds: how long, told to stop, it goes on admitting while /health says no: a proxy takes it out meanwhile.
    valkey_url: a Valkey server through which replicas over one store tell each other what is short-lived.
    trusted_proxies: addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.
    send_timeout_seconds: a reader that takes nothing for so long is dropped; it may come back and resume.

    Raises SettingsError, whose `setting` names the field.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    ollama_port: int | None = None
    data_dir: Path | None = None
    database_url: str | None = field(default=None, repr=False)
    mcp_config: Path | None = None
    mcp_allowed_http: tuple[str, ...] = ()
    adapter_dir: Path | None = None
    sign_in_plugin: str | None = None
    sign_in: SignInSettings = field(default_factory=SignInSettings)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    engine_url: str | None = None
    engine_api: bool = False
    engine_key: str | None = field(default=None, repr=False)
    requests_per_minute: int | None = None
    strict_fields: bool = False
    keep_volatile: bool = False
    keep_alive_seconds: float | None = None
    max_waiting_turns: int = 32
    max_message_characters: int = 200_000
    max_answer_characters: int = 262_144
    drain_seconds: float = 10.0
    leave_seconds: float = 0.0
    valkey_url: str | None = field(default=None, repr=False)
    trusted_proxies: tuple[str, ...] = ()
    send_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise SettingsError("port must be from 0 to 65535", setting="port")
        if self.ollama_port is not None and not 0 <= self.ollama_port <= 65_535:
            raise SettingsError("ollama_port must be from 0 to 65535", setting="ollama_port")
        if not self.host or any(character.isspace() or character == "/" for character in self.host):
            raise SettingsError("host must be a name or an address", setting="host")
        if not is_loopback(self.host) and not self.asks_who:
            raise UnsafeBindError(
                f"listening on {self.host} lets other machines in: set an API key, or use 127.0.0.1", setting="host"
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
            raise SettingsError("engine_url is http://HOST:PORT or https://HOST:PORT", setting="engine_url")
        if (self.engine_api or self.engine_url is not None) and self.engine_key is None:
            raise SettingsError("an engine and its front ends need a key", setting="engine_key")
        if self.engine_api and self.engine_url is not None:
            raise SettingsError("a front end computes for nobody", setting="engine_api")
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
            raise SettingsError(f"valkey_url begins with one of {', '.join(VALKEY_SCHEMES)}", setting="valkey_url")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                message = f"trusted_proxies: {proxy!r} is no address and no network"
                raise SettingsError(message, setting="trusted_proxies") from None
        if not 0 < self.send_timeout_seconds <= 600:
            raise SettingsError("send_timeout_seconds must be above 0, at most 600", setting="send_timeout_seconds")

    @property
    def host_names(self) -> frozenset[str]:
        """Every name a request's `Host` may carry, lower case, without port or brackets."""
        names = {*LOOPBACK_NAMES, *(name.lower().strip("[]") for name in self.allowed_hosts)}
        if not _is_wildcard(self.host):
            names.add(self.host.lower().strip("[]"))
        return frozenset(names)

    @property
    def many_use_it(self) -> bool:
        """Whether people are told apart."""
        return self.sign_in_plugin is not None or self.sign_in.asks_who

    @property
    def asks_who(self) -> bool:
        """Whether requests must show a key, or be known in another way."""
        return bool(self.api_key) or self.many_use_it

    @property
    def rate(self) -> int:
        """Requests of programs that one address may send in a minute; 0 is no limit."""
        if self.requests_per_minute is not None:
            return self.requests_per_minute
        return 0 if is_loopback(self.host) else RATE_BEYOND_LOOPBACK

    @property
    def directory(self) -> Path:
        """Where the conversations are kept."""
        return self.data_dir if self.data_dir is not None else default_data_dir()


def _require_key(key: str | None, name: str) -> None:
    called = "an API key" if name == "api_key" else "an engine's key"
    if key is not None and (key != key.strip() or not key.isprintable()):
        raise SettingsError(f"{called} neither begins nor ends with a blank, and has no breaks", setting=name)
    if key is not None and len(key) < 16:
        raise SettingsError(f"{called} needs at least 16 characters", setting=name)


def is_postgres(url: str) -> bool:
    """Whether it is the address of a PostgreSQL database."""
    return url.startswith(("postgresql://", "postgres://"))


def is_engine_url(url: str) -> bool:
    """Whether it is the address of a server, without a path, a query or names of users."""
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
    """Whether only this machine reaches `host`."""
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
