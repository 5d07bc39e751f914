"""Read sign-in settings from a TOML file."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from notso.text_file import SECRET_BYTES, NotTextError, read_text
from notso.web.values.errors import SettingsError
from notso.web.values.visible_text import is_visible

MAX_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 128
T = TypeVar("T")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_MAPPED_IPV4 = ipaddress.ip_network("::ffff:0:0/96")  # all IPv4 addresses, as an IPv6 socket reports them


def parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse an address or network. Raises ValueError with a reason."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is neither an address nor a network") from None
    address = text.partition("/")[0]
    raise ValueError(f"{text!r} is ambiguous: write {address} for the address or {network} for the network")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySignIn:
    """Sign-in by a proxy that sends the user's name in `header`."""

    header: str
    addresses: tuple[str, ...]  # trusted addresses or networks, such as 10.0.0.0/8

    def __post_init__(self) -> None:
        _require(_HEADER.fullmatch(self.header) is not None, "[proxy] header is not a header name")
        _require(bool(self.addresses), "[proxy] addresses must list the addresses of the proxies")
        for address in self.addresses:
            try:
                network = parse_network(address)
            except ValueError as error:
                raise _error(f"[proxy] {error}") from None
            _require(
                network.prefixlen > 0 and network != _MAPPED_IPV4,
                "[proxy] addresses must not include all addresses, because anyone could then claim any name",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    issuer: str
    client_id: str
    public_url: str  # URL of this server for browsers
    client_secret: str = field(default="", repr=False)
    client_secret_file: str = ""  # alternative to client_secret; a public client has neither
    claim: str = "sub"  # claim with the user's name; `email` requires `email_verified`
    scope: str = "openid profile email"
    allowed: tuple[str, ...] = ()  # names, or `*@example.org` for a domain; empty: all users of the provider
    # True is safe only for providers that omit `email_verified` and do not let users choose their address.
    assume_email_verified: bool = False

    def __post_init__(self) -> None:
        for name in ("issuer", "public_url"):
            try:
                parts = urlsplit(getattr(self, name))
                _ = parts.port  # raises ValueError if the port is invalid
            except ValueError:
                raise _error(f"[oidc] {name} must be a URL") from None
            is_loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
            is_address = bool(parts.hostname) and not parts.query and not parts.fragment
            _require(is_address, f"[oidc] {name} must be a URL")
            is_secure = parts.scheme == "https" or (parts.scheme == "http" and is_loopback)
            _require(is_secure, f"[oidc] {name} must be an https URL")
        _require(bool(self.client_id), "[oidc] client_id is missing")
        _require("openid" in self.scope.split(), "[oidc] scope must contain openid")
        has_both = bool(self.client_secret and self.client_secret_file)
        _require(not has_both, "[oidc] set client_secret or client_secret_file, not both")

    def secret(self) -> str | None:
        """Return the client secret. Raises SettingsError if the file is unreadable."""
        if not self.client_secret_file:
            return self.client_secret or None
        try:
            return read_text(Path(self.client_secret_file), SECRET_BYTES).strip()
        except NotTextError as error:
            raise _error(f"[oidc] {self.client_secret_file} {error}") from None
        except OSError:
            raise _error(f"[oidc] {self.client_secret_file} cannot be read") from None

    def owner(self, name: str) -> str:
        # Only email domains are converted to lower case. A `sub` is case-sensitive even if it looks like an address.
        return f"oidc:{_lower_domain(name) if self.claim == 'email' else name}"

    def allows(self, name: str) -> bool:
        at_domain = "*@" + name.rpartition("@")[2]
        return not self.allowed or is_listed(name, self.allowed) or ("@" in name and is_listed(at_domain, self.allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInSettings:
    require_key: bool = False  # authenticate local requests too
    # Maximum number of characters in a user's chats; 0 means no limit. Not limited: chats of the local user and of
    # the server's own API key.
    kept_characters: int = 1_000_000_000
    operators: tuple[str, ...] = ()  # names of users (from the proxy or provider) with operator rights
    proxy: ProxySignIn | None = None
    oidc: OidcSettings | None = None

    @property
    def requires_authentication(self) -> bool:
        return self.require_key or self.proxy is not None or self.oidc is not None

    @property
    def rules(self) -> str:
        """Text form of the rules on which sessions depend, to detect changes."""
        oidc = self.oidc
        oidc_rules = (
            (oidc.issuer, oidc.client_id, oidc.claim, sorted(oidc.allowed), oidc.assume_email_verified)
            if oidc is not None
            else ()
        )
        return repr((sorted(self.operators), oidc_rules))


def read_sign_in(path: Path) -> SignInSettings:
    """Read a TOML file. Raises SettingsError."""
    try:
        document = tomllib.loads(read_text(path, MAX_BYTES))
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from None
    except NotTextError as error:
        raise _error(f"{path} {error}") from None
    except (ValueError, RecursionError) as error:
        raise _error(f"{path}: {' '.join(str(error).split())}") from None
    oidc = _read_table(OidcSettings, document, "oidc")
    # Resolve the path of the secret's file relative to the settings file.
    if oidc is not None and oidc.client_secret_file:
        oidc = replace(oidc, client_secret_file=str(path.parent / oidc.client_secret_file))
    tables: dict[str, Any] = {"proxy": _read_table(ProxySignIn, document, "proxy"), "oidc": oidc}
    return _validate_table(SignInSettings, document | tables, "")


def _read_table(kind: type[T], document: Mapping[str, Any], name: str) -> T | None:
    table = document.get(name)
    if table is None:
        return None
    _require(isinstance(table, dict), f"{name} must be a table, [{name}]")
    return _validate_table(kind, table, f"[{name}] ")


def _validate_table(kind: type[T], table: Mapping[str, Any], prefix: str) -> T:
    settings = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in table.items():
        _require(name in settings, f"{prefix}{name} is unknown; available: {', '.join(settings)}")
        kind_name = str(settings[name].type)
        if kind_name.startswith("tuple"):
            is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
            _require(is_list, f"{prefix}{name} must be a list of strings")
            values[name] = tuple(value)
            continue
        _require(kind_name != "bool" or isinstance(value, bool), f"{prefix}{name} must be true or false")
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        _require(kind_name != "int" or is_count, f"{prefix}{name} must be an integer, 0 or more")
        _require(kind_name != "str" or isinstance(value, str), f"{prefix}{name} must be a string")
        values[name] = value
    try:
        return kind(**values)
    except TypeError:
        missing = [name for name, each in settings.items() if name not in values and _is_needed(each)]
        raise _error(f"{prefix}is missing {', '.join(missing)}") from None


def _is_needed(field: Any) -> bool:
    return bool(field.default is MISSING)


def is_user_name(name: str) -> bool:
    """Return whether a name has 1 to 128 characters, all visible. Invisible ones could imitate another name."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and all(map(is_visible, name))


def is_listed(name: str, names: Iterable[str]) -> bool:
    """Return whether `names` contains `name`, ignoring the case of email domains."""
    return _lower_domain(name) in map(_lower_domain, names)


def _lower_domain(name: str) -> str:
    local, at, domain = name.rpartition("@")
    return f"{local}@{domain.lower()}" if at else name


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _error(message)


def _error(message: str) -> SettingsError:
    return SettingsError(f"sign-in: {message}", setting="sign_in")
