"""From an address to what replicas share: only here is the client of a Valkey server asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

from notso.web.edge.rate_limit import Counters, OwnCounters
from notso.web.replicas.exchange import Alone, Exchange
from notso.web.values.errors import SettingsError

DEFAULT_PORT = 6379


def exchange_at(url: str | None) -> Exchange:
    """None: this server is alone. Raises SettingsError: the extra is missing, or the address is none."""
    if url is None:
        return Alone()
    try:
        from notso.web.replicas.valkey_exchange import ValkeyExchange
    except ImportError as error:
        raise _missing() from error
    try:
        return ValkeyExchange(_with_port(url))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"valkey_url is no address of a server: {error}", setting="valkey_url") from error


def counters_at(url: str | None) -> Counters:
    """What requests are counted with. Raises SettingsError."""
    if url is None:
        return OwnCounters()
    try:
        from notso.web.replicas.valkey_exchange import ValkeyCounters
    except ImportError as error:
        raise _missing() from error
    return ValkeyCounters(_with_port(url))


def _with_port(url: str) -> str:
    """The address with Valkey's own port where it names none: not every library that reads it knows that port."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname or parts.port is not None:
        return url
    return parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{DEFAULT_PORT}").geturl()


def _missing() -> SettingsError:
    message = "a Valkey server needs the extra of that name: pip install 'notso-smollm3-bot[valkey]'"
    return SettingsError(message, setting="valkey_url")
