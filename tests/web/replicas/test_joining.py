"""The address of a Valkey server, as people write it."""

from __future__ import annotations

import pytest

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
def test_the_usual_port_is_used_where_none_is_named(given: str, used: str) -> None:
    assert _with_port(given) == used
