"""Create the exchange (for messages between replicas) and the request counters for a Valkey URL. The Valkey client is
an optional dependency, so it is imported only if a URL is given.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from notso.web.edge.rate_limit import Counters, LocalCounters
from notso.web.replicas.exchange import Exchange, LocalExchange
from notso.web.values.errors import SettingsError, require_extra

DEFAULT_PORT = 6379


def exchange_at(url: str | None) -> Exchange:
    """Return the exchange, which is local without a URL. Raises SettingsError for a missing extra or an invalid URL."""
    if url is None:
        return LocalExchange()
    with require_extra("valkey", "valkey_url"):
        from notso.web.replicas.valkey_exchange import ValkeyExchange
    try:
        return ValkeyExchange(_with_port(url))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"valkey_url is not a server URL: {error}", setting="valkey_url") from error


def counters_at(url: str | None) -> Counters:
    """Return the request counters. Raises SettingsError."""
    if url is None:
        return LocalCounters()
    with require_extra("valkey", "valkey_url"):
        from notso.web.replicas.valkey_exchange import ValkeyCounters
    return ValkeyCounters(_with_port(url))


def _with_port(url: str) -> str:
    # Add the default port, because not every client library knows it.
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname or parts.port is not None:
        return url
    return parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{DEFAULT_PORT}").geturl()
