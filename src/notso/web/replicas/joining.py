"""Creates the exchange and the request counters for a URL. Only this module imports the Valkey client, if needed."""

from __future__ import annotations

from urllib.parse import urlsplit

from notso.extras import install_line
from notso.web.edge.rate_limit import Counters, OwnCounters
from notso.web.replicas.exchange import Alone, Exchange
from notso.web.values.errors import SettingsError

DEFAULT_PORT = 6379


def exchange_at(url: str | None) -> Exchange:
    """Return the exchange, `Alone` without a URL. Raises SettingsError if the extra is missing or the URL invalid."""
    if url is None:
        return Alone()
    try:
        from notso.web.replicas.valkey_exchange import ValkeyExchange
    except ImportError as error:
        raise _missing() from error
    try:
        return ValkeyExchange(_with_port(url))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"valkey_url is not a server URL: {error}", setting="valkey_url") from error


def counters_at(url: str | None) -> Counters:
    """Return the request counters. Raises SettingsError."""
    if url is None:
        return OwnCounters()
    try:
        from notso.web.replicas.valkey_exchange import ValkeyCounters
    except ImportError as error:
        raise _missing() from error
    return ValkeyCounters(_with_port(url))


def _with_port(url: str) -> str:
    # Not every client library knows Valkey's default port.
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname or parts.port is not None:
        return url
    return parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{DEFAULT_PORT}").geturl()


def _missing() -> SettingsError:
    message = f"the extra valkey is not installed: {install_line('valkey')}"
    return SettingsError(message, setting="valkey_url")
