"""Accepted forms of the address of a Valkey server."""

from __future__ import annotations

import pytest
from valkey.asyncio import Valkey

from notso.web.replicas.joining import _with_port


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("valkey://cache", "valkey://cache:6379"),
        ("valkey://cache:", "valkey://cache:6379"),
        ("redis://:secret@cache/2", "redis://:secret@cache:6379/2"),
        ("rediss://user:secret@cache:7000/0", "rediss://user:secret@cache:7000/0"),
        ("valkeys://[::1]/1?timeout=5", "valkeys://[::1]:6379/1?timeout=5"),
        ("valkey://127.0.0.1:6380", "valkey://127.0.0.1:6380"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock?db=1"),
    ],
)
def test_default_port_is_added_to_valkey_url(given: str, used: str) -> None:
    assert _with_port(given) == used


@pytest.mark.parametrize("scheme", ["valkey", "valkeys", "redis", "rediss"])
@pytest.mark.parametrize("who", ["", ":secret@", "user:secret@", "user:p%40ss@"])
@pytest.mark.parametrize("host", ["notso-valkey", "[fd00::1]"])
@pytest.mark.parametrize("rest", ["", "/2", "/0?health_check_interval=5"])
def test_valkey_client_accepts_url_with_added_port(scheme: str, who: str, host: str, rest: str) -> None:
    url = f"{scheme}://{who}{host}"
    assert _with_port(url + rest) == f"{url}:6379{rest}"
    taken = Valkey.from_url(_with_port(url + rest)).connection_pool.connection_kwargs
    assert (taken["host"], taken["port"], taken.get("db", 0)) == (host.strip("[]"), 6379, 2 * rest.startswith("/2"))
