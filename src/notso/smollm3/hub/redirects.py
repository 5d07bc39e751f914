"""HTTP requests that validate each redirect before following it.

By default the HTTP library follows twenty redirects to anywhere, including from https to http and to hosts of the local
network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from notso.smollm3.errors import DownloadError, quoted

if TYPE_CHECKING:
    import httpx2

MAX_REDIRECTS = 5  # one is usual: from the Hub to its content network


@contextlib.contextmanager
def followed(
    session: httpx2.Client,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout: float,
    leave_origin: bool = True,
) -> Iterator[httpx2.Response]:
    """Yield the final, unread response of `url` after validated redirects.

    leave_origin=False yields a cross-origin redirect instead of following it. Raises DownloadError for refused
    redirects, and httpx2.HTTPError.
    """
    # All addresses must be https, except on this machine if the first one is http there. Redirects reach the local
    # network only from within it. The Authorization header never leaves the first origin.
    first = require_safe(url)
    at_home = _is_local(first)
    sent = dict(headers)
    for _ in range(MAX_REDIRECTS + 1):
        with session.stream(method, url, headers=sent, timeout=timeout, follow_redirects=False) as response:
            following = response.next_request
            if following is None:
                yield response
                return
            url = str(following.url)
            if _origin(_split(url)) != _origin(first):
                if not leave_origin:
                    yield response
                    return
                sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
            _require_safe_hop(url, first, at_home)
    raise DownloadError(f"{first.hostname} redirects more than {MAX_REDIRECTS} times")


def require_safe(url: str) -> SplitResult:
    """Parse a permitted first address. Raises DownloadError."""
    parts = _split(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts)):
        raise DownloadError(f"models are downloaded over https only, not from {parts.scheme}://{parts.hostname}")
    return parts


def _require_safe_hop(url: str, first: SplitResult, at_home: bool) -> None:
    parts = _split(url)
    if parts.scheme != "https" and not (parts.scheme == first.scheme == "http" and _is_loopback(parts)):
        raise DownloadError(
            f"models are downloaded over https only; {first.hostname} redirects to {parts.scheme}://{parts.hostname}"
        )
    if not at_home and _is_local(parts):
        raise DownloadError(f"{first.hostname} redirects to {parts.hostname}, which is on the local network")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is none
    except ValueError:
        raise DownloadError(f"{quoted(url)} is not a URL") from None
    if not parts.hostname:
        raise DownloadError(f"{quoted(url)} has no host")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_loopback(parts: SplitResult) -> bool:
    return parts.hostname in ("127.0.0.1", "localhost", "::1")


def _is_local(parts: SplitResult) -> bool:
    # True if any address of the host is not globally routable. A name that does not resolve is left to the proxy; a
    # name that changes its address later has no certificate there.
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return any(not (getattr(each, "ipv4_mapped", None) or each).is_global or each.is_multicast for each in addresses)
